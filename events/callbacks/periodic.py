"""`Periodic`: the base of callbacks that do something at an interval."""

from collections.abc import Collection

from events.callback import Callback
from events.interval import Interval
from events.logger.logger import Logger
from events.state import State
from events.timestamp import Time, TimeUnit

__all__ = ["BATCHES_OR_EPOCHS", "Periodic"]

BATCHES_OR_EPOCHS = (TimeUnit.BATCH, TimeUnit.EPOCH)


class Periodic(Callback):
    """Calls `due` when an interval has passed: after a batch, an epoch or an iteration.

    A subclass overrides `due`, or looks in the next batch whether `_is_due`, as it is in the first one.

    Args:
        interval: how often; a bare number counts batches.
        units: the units that the interval may have.

    Raises:
        ValueError: the interval is in another unit.
    """

    def __init__(self, interval: Time | str | int, units: Collection[TimeUnit] = tuple(TimeUnit)) -> None:
        super().__init__()
        self._interval = Interval(interval, TimeUnit.BATCH)
        self._is_due = False
        if self._interval.time.unit not in units:
            names = " or ".join(unit.plural for unit in units)
            raise ValueError(f'interval must be in {names} ("100ba"), got {self._interval.time}.')

    def due(self, state: State, logger: Logger) -> None:
        """Makes the next batch due."""
        self._is_due = True

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts the interval; the first batch is due."""
        self._interval.start(state)
        self._is_due = True

    def batch_end(self, state: State, logger: Logger) -> None:
        """Checks whether the interval has passed."""
        if self._interval.passed(state):
            self.due(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Checks whether the interval has passed; epochs count when they end, after their last batch."""
        Periodic.batch_end(self, state, logger)

    iteration_end = epoch_end
