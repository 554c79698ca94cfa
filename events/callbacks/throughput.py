"""`Throughput`: how many batches, samples and tokens are trained in a second."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from events.callback import Callback
from events.interval import Interval
from events.logger.logger import Logger
from events.monitor.stat import Aggregation, Stat
from events.state import State
from events.timestamp import Time, Timestamp

if TYPE_CHECKING:
    from events.monitor.monitor_event import Event

__all__ = ["Throughput"]

_SECONDS = "seconds"


class Throughput(Callback):
    """Logs rates of training, under Composer's names.

    `throughput/batches_per_sec`, `throughput/samples_per_sec` and `throughput/tokens_per_sec` (the latter two
    where the loop counts them) over all ranks; with several ranks also `throughput/device/…`, which is the
    share of one.

    What counts is the time from the end of one batch to the end of the next, reading included, evaluation
    not: each interval's batches over the sum of their seconds. The batch that compiles, warms up and fills
    caches is the first of its session; it is not counted.

    Args:
        interval: how often to log; a bare number counts batches.
        clock: seconds that only grow.
    """

    def __init__(
        self, interval: Time | str | int = "10ba", *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._interval = Interval(interval, "ba")
        self._clock = clock
        # The interval closes these windows; their time never ends.
        self._windows: list[Event] = []
        self._batches = Stat(
            _SECONDS, [Aggregation.COUNT, Aggregation.SUM], timedelta.max, log=self._windows.append
        )
        self._counted_from = Timestamp()
        self._batch_began: float | None = None
        self._eval_began: float | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Counts intervals from here."""
        self._interval.start(state)
        self._batch_began = self._eval_began = None

    def batch_end(self, state: State, logger: Logger) -> None:
        """Counts a batch; logs where an interval ends."""
        now = self._clock()
        if self._batch_began is None:
            self._counted_from = state.timestamp
        else:
            self._batches.add(now - self._batch_began)
        self._batch_began = now
        if self._interval.passed(state):
            self._log(state, logger)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Stops the clock."""
        self._begin_evaluation()

    def eval_start(self, state: State, logger: Logger) -> None:
        """Stops the clock."""
        self._begin_evaluation()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Starts the clock again."""
        self._end_evaluation()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Starts the clock again."""
        self._end_evaluation()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Logs what is left."""
        self._log(state, logger)
        self._batch_began = None

    def close(self, state: State, logger: Logger) -> None:
        """Logs what is left."""
        self._log(state, logger)

    def _begin_evaluation(self) -> None:
        if self._eval_began is None:
            self._eval_began = self._clock()

    def _end_evaluation(self) -> None:
        if self._eval_began is not None and self._batch_began is not None:
            self._batch_began += self._clock() - self._eval_began
        self._eval_began = None

    def _log(self, state: State, logger: Logger) -> None:
        since, self._counted_from = self._counted_from, state.timestamp
        batches, seconds = self._close_window()
        if seconds <= 0:
            return
        counts = {
            "batches": batches,
            "samples": state.timestamp.sample.value - since.sample.value,
            "tokens": state.timestamp.token.value - since.token.value,
        }
        rates = {f"{what}_per_sec": count / seconds for what, count in counts.items() if count > 0}
        metrics = {f"throughput/{name}": rate for name, rate in rates.items()}
        if state.world_size > 1:
            metrics |= {f"throughput/device/{name}": rate / state.world_size for name, rate in rates.items()}
        logger.log_metrics(metrics)

    def _close_window(self) -> tuple[float, float]:
        """Returns how many batches there were since the last time, and how long they took."""
        self._batches.flush()
        # More than one where somebody else flushed all Stats in between.
        data = [window.data for window in self._windows]
        self._windows.clear()
        return (
            sum(float(window[f"{_SECONDS}.count"]) for window in data),
            sum(float(window[f"{_SECONDS}.sum"]) for window in data),
        )
