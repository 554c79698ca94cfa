"""`Timer`: how long a batch takes, and how long training waits for it to be read."""

import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from events.callback import Callback
from events.interval import Interval
from events.logger.logger import Logger
from events.monitor.monitor_event import Event
from events.monitor.stat import Aggregation, Stat
from events.state import State
from events.timestamp import Time

__all__ = ["Timer"]


class Timer(Callback):
    """Logs the seconds that training batches take.

    | metric | from | to |
    |---|---|---|
    | `timer/data_seconds` | `BEFORE_DATALOADER`, or, in a loop without it, the end of the batch before | `AFTER_DATALOADER`, or `BATCH_START` |
    | `timer/step_seconds` | `BATCH_START` | `BATCH_END` |

    Each with its aggregations, as in `timer/step_seconds.p95`. Each interval begins anew; what an unfinished
    one holds is logged at `FIT_END`, or at close. The clock is the host's and waits for no device: what is
    queued there is seen where something else in the loop waits for it.

    Args:
        interval: how often to log; a bare number counts batches.
        aggregations: what is to be known of each interval.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        interval: Time | str | int = "10ba",
        aggregations: Iterable[Aggregation] = (Aggregation.MEAN, Aggregation.P95, Aggregation.MAX),
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._interval = Interval(interval, "ba")
        self._clock = clock
        aggregations = tuple(aggregations)
        self._data = self._stat("timer/data_seconds", aggregations)
        self._step = self._stat("timer/step_seconds", aggregations)
        self._closed: dict[str, float] = {}
        self._data_began: float | None = None
        self._step_began: float | None = None
        self._reads_by_event = False

    def _stat(self, name: str, aggregations: tuple[Aggregation, ...]) -> Stat:
        # The interval closes these windows; their time never ends.
        return Stat(name, aggregations, timedelta.max, log=self._take)

    def _take(self, event: Event) -> None:
        self._closed.update((name, value) for name, value in event.data.items() if not isinstance(value, str))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Counts intervals from here."""
        self._interval.start(state)
        self._forget_marks()

    def epoch_start(self, state: State, logger: Logger) -> None:
        """In a loop without `BEFORE_DATALOADER`, the first batch is read from here on."""
        self._data_began = self._clock()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Reading begins."""
        self._reads_by_event = True
        self._data_began = self._clock()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Reading ends."""
        self._end_reading(self._clock())

    def batch_start(self, state: State, logger: Logger) -> None:
        """The step begins, and reading has ended."""
        now = self._clock()
        self._end_reading(now)
        self._step_began = now

    def batch_end(self, state: State, logger: Logger) -> None:
        """The step ends; logs where an interval does."""
        now = self._clock()
        if self._step_began is not None:
            self._step.add(now - self._step_began)
            self._step_began = None
        if self._interval.passed(state):
            self._log(logger)
        if not self._reads_by_event:
            self._data_began = self._clock()

    def eval_start(self, state: State, logger: Logger) -> None:
        """What follows is no reading of a training batch."""
        self._data_began = None

    def eval_end(self, state: State, logger: Logger) -> None:
        """In a loop without `BEFORE_DATALOADER`, the next batch is read from here on."""
        if not self._reads_by_event:
            self._data_began = self._clock()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Logs what is left."""
        self._log(logger)
        self._forget_marks()

    def close(self, state: State, logger: Logger) -> None:
        """Logs what is left."""
        self._log(logger)

    def _end_reading(self, now: float) -> None:
        if self._data_began is not None:
            self._data.add(now - self._data_began)
            self._data_began = None

    def _log(self, logger: Logger) -> None:
        self._data.flush()
        self._step.flush()
        closed, self._closed = self._closed, {}
        if closed:
            logger.log_metrics(closed)

    def _forget_marks(self) -> None:
        self._data_began = self._step_began = None
