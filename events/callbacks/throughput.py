"""`Throughput`: logs how many batches, samples and tokens are trained per second."""

from events.callback import Callback
from events.interval import Interval
from events.logger.logger import Logger
from events.state import State
from events.timestamp import Time, Timestamp

__all__ = ["Throughput"]


class Throughput(Callback):
    """Logs training throughput, under Composer's names.

    ```python
    Trainer(..., callbacks=[Throughput("50ba")])
    ```

    `throughput/batches_per_sec`, `throughput/samples_per_sec` and `throughput/tokens_per_sec` (the latter two
    if the loop counts them) over all ranks; with several ranks also `throughput/device/…`, the share of one
    rank.

    Durations are those of the run's clock (`state.timestamp.total_wct`): they include reading and exclude
    evaluation. The first batch of a session, which compiles and warms up, is not counted.

    Args:
        interval: how often to log; a bare number counts batches.
    """

    def __init__(self, interval: Time | str | int = "10ba") -> None:
        super().__init__()
        self._interval = Interval(interval, "ba")
        # Where the counted batches begin; None until the first batch of a session has ended.
        self._since: Timestamp | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts the interval."""
        self._interval.start(state)
        self._since = None

    def batch_end(self, state: State, logger: Logger) -> None:
        """Logs if the interval has passed."""
        if self._since is None:
            self._since = state.timestamp
        if self._interval.passed(state):
            self._log(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Logs the unfinished interval."""
        self._log(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Logs the unfinished interval."""
        self._log(state, logger)

    def _log(self, state: State, logger: Logger) -> None:
        since, now = self._since or state.timestamp, state.timestamp
        seconds = (now.total_wct - since.total_wct).total_seconds()
        if seconds <= 0:
            return
        self._since = now
        counts = {
            "batches": now.batch.value - since.batch.value,
            "samples": now.sample.value - since.sample.value,
            "tokens": now.token.value - since.token.value,
        }
        rates = {f"{name}_per_sec": count / seconds for name, count in counts.items() if count > 0}
        metrics = {f"throughput/{name}": rate for name, rate in rates.items()}
        if state.world_size > 1:
            metrics |= {f"throughput/device/{name}": rate / state.world_size for name, rate in rates.items()}
        logger.log_metrics(metrics)
