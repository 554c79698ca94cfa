"""`Throughput`: logs how many batches, samples and tokens are trained per second."""

import time
from collections.abc import Callable

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

    The time of a batch runs from the end of the previous batch to its own end: it includes reading and
    excludes evaluation. A rate is the count of an interval over the sum of these times. The first batch of a
    session, which compiles and warms up, is not counted.

    Args:
        interval: how often to log; a bare number counts batches.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, interval: Time | str | int = "10ba", *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._interval = Interval(interval, "ba")
        self._clock = clock
        self._batches = 0
        self._seconds = 0.0
        self._interval_start = Timestamp()
        self._batch_end: float | None = None
        self._eval_start: float | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts the interval."""
        self._interval.start(state)
        self._batch_end = self._eval_start = None

    def batch_end(self, state: State, logger: Logger) -> None:
        """Counts a batch; logs if the interval has passed."""
        now = self._clock()
        if self._batch_end is None:
            self._interval_start = state.timestamp
        else:
            self._batches += 1
            self._seconds += now - self._batch_end
        self._batch_end = now
        if self._interval.passed(state):
            self._log(state, logger)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Pauses the clock."""
        self._begin_evaluation()

    def eval_start(self, state: State, logger: Logger) -> None:
        """Pauses the clock."""
        self._begin_evaluation()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Resumes the clock."""
        self._end_evaluation()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Resumes the clock."""
        self._end_evaluation()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Logs the unfinished interval."""
        self._log(state, logger)
        self._batch_end = None

    def close(self, state: State, logger: Logger) -> None:
        """Logs the unfinished interval."""
        self._log(state, logger)

    def _begin_evaluation(self) -> None:
        if self._eval_start is None:
            self._eval_start = self._clock()

    def _end_evaluation(self) -> None:
        if self._eval_start is not None and self._batch_end is not None:
            self._batch_end += self._clock() - self._eval_start
        self._eval_start = None

    def _log(self, state: State, logger: Logger) -> None:
        since, self._interval_start = self._interval_start, state.timestamp
        batches, seconds = self._batches, self._seconds
        self._batches, self._seconds = 0, 0.0
        if seconds <= 0:
            return
        counts = {
            "batches": batches,
            "samples": state.timestamp.sample.value - since.sample.value,
            "tokens": state.timestamp.token.value - since.token.value,
        }
        rates = {f"{name}_per_sec": count / seconds for name, count in counts.items() if count > 0}
        metrics = {f"throughput/{name}": rate for name, rate in rates.items()}
        if state.world_size > 1:
            metrics |= {f"throughput/device/{name}": rate / state.world_size for name, rate in rates.items()}
        logger.log_metrics(metrics)
