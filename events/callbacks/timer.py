"""`Timer`: logs how long batches take, and how long training waits for data."""

import time
from collections.abc import Callable, Iterable

from events.logger.logger import Logger
from events.monitor.stat import Aggregation, Summary
from events.state import State
from events.timestamp import Time

from .periodic import Periodic

__all__ = ["Timer"]


class Timer(Periodic):
    """Logs the durations of training batches in seconds.

    ```python
    Trainer(..., callbacks=[Timer("100ba", [Aggregation.MEAN, Aggregation.MAX])])
    ```

    | `timer/…` | from | to |
    |---|---|---|
    | `data_seconds` | `BEFORE_DATALOADER` or last `BATCH_END` | `AFTER_DATALOADER` or `BATCH_START` |
    | `step_seconds` | `BATCH_START` | `BATCH_END` |

    Each is aggregated per interval, as in `timer/step_seconds.p95`; an unfinished interval is logged at
    `FIT_END` or at close. The clock is the host's and does not synchronize with a device: the time of queued
    kernels shows where something else in the loop waits for them.

    Args:
        interval: how often to log; a bare number counts batches.
        aggregations: what to compute for each interval.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        interval: Time | str | int = "10ba",
        aggregations: Iterable[Aggregation] = (Aggregation.MEAN, Aggregation.P95, Aggregation.MAX),
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(interval)
        self._clock = clock
        self._aggregations = tuple(Aggregation(aggregation) for aggregation in aggregations)
        self._data = Summary(self._aggregations)
        self._step = Summary(self._aggregations)
        self._data_start: float | None = None
        self._step_start: float | None = None
        self._has_dataloader_events = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts the interval."""
        super().fit_start(state, logger)
        self._clear_starts()

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Starts reading, in a loop without `BEFORE_DATALOADER`."""
        self._data_start = self._clock()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Starts reading."""
        self._has_dataloader_events = True
        self._data_start = self._clock()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Ends reading."""
        self._end_reading(self._clock())

    def batch_start(self, state: State, logger: Logger) -> None:
        """Starts the step; ends reading."""
        now = self._clock()
        self._end_reading(now)
        self._step_start = now

    def batch_end(self, state: State, logger: Logger) -> None:
        """Ends the step; logs if the interval has passed."""
        now = self._clock()
        if self._step_start is not None:
            self._step.fold([now - self._step_start])
            self._step_start = None
        super().batch_end(state, logger)
        if not self._has_dataloader_events:
            self._data_start = self._clock()

    def eval_start(self, state: State, logger: Logger) -> None:
        """Ignores the time of an evaluation."""
        self._data_start = None

    def eval_end(self, state: State, logger: Logger) -> None:
        """Starts reading, in a loop without `BEFORE_DATALOADER`."""
        if not self._has_dataloader_events:
            self._data_start = self._clock()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Logs the unfinished interval."""
        self.due(state, logger)
        self._clear_starts()

    def close(self, state: State, logger: Logger) -> None:
        """Logs the unfinished interval."""
        self.due(state, logger)

    def _end_reading(self, now: float) -> None:
        if self._data_start is not None:
            self._data.fold([now - self._data_start])
            self._data_start = None

    def due(self, state: State, logger: Logger) -> None:
        """Logs the interval."""
        summaries = {"timer/data_seconds": self._data, "timer/step_seconds": self._step}
        self._data, self._step = Summary(self._aggregations), Summary(self._aggregations)
        metrics = {
            f"{name}.{aggregation}": value
            for name, summary in summaries.items()
            if summary.count
            for aggregation, value in summary.values(self._aggregations).items()
        }
        if metrics:
            logger.log_metrics(metrics)

    def _clear_starts(self) -> None:
        self._data_start = self._step_start = None
