"""Determines when a recurring action is due: every "10ba", "1ep", "90s" or "0.1dur" of training."""

import logging
import math
from datetime import timedelta

from .errors import TimeStringError
from .state import State, length_of
from .timestamp import TOTAL_IN, Time, Timestamp, TimeUnit

__all__ = ["Interval"]

_log = logging.getLogger("events")

# 0.7 * 10 is slightly above 7: tolerates the rounding of a share of a run.
_ROUNDING = 1e-9


class Interval:
    """Determines when a span of training time has passed, repeatedly.

    ```python
    interval = Interval("100ba")
    interval.start(state)           # where training starts or resumes
    ...
    if interval.passed(state):      # at the end of each batch and of each epoch
        ...
    ```

    It has passed when training has crossed a multiple of the interval since the last check: with "100sp" and
    batches of 64 samples, after the 2nd, 4th, 5th and 7th batch. Multiples count from the beginning of the
    run, so that a resumed run continues its rhythm. Several multiples crossed at once count once. Epochs
    count when they end, seconds count training time (`timestamp.total_wct`), a duration is a share of
    `state.max_duration`.

    Args:
        interval: a `Time`, a time string, a `timedelta`, or a whole number of `default_unit`.
        default_unit: the unit of a bare number; without it a bare number is an error.

    Raises:
        TimeStringError: the interval is not positive, longer than the whole run, or cannot be parsed.
        TimeUnitError: it is of another type.
    """

    def __init__(
        self, interval: Time | str | int | timedelta, default_unit: TimeUnit | str | None = None
    ) -> None:
        self._interval = Time.from_input(interval, default_unit)
        if self._interval.value <= 0:
            raise TimeStringError(f'interval must be positive, got {self._interval}. Write "1ep" or "10ba".')
        if self._interval.unit is TimeUnit.DURATION and self._interval.value > 1:
            raise TimeStringError(
                f'interval must be at most the whole run, "1dur", got {self._interval}. '
                'Write "0.1dur" for a tenth.'
            )
        self._last_check = Timestamp()
        self._is_said = False

    @property
    def time(self) -> Time:
        """The span."""
        return self._interval

    def start(self, state: State) -> None:
        """Counts from the current timestamp; without this call, from the beginning of the run.

        Raises:
            TimeStringError: the interval is a share of the run, and `state.max_duration` gives no length.
        """
        if self._interval.unit is TimeUnit.DURATION and not length_of(state):
            raise TimeStringError(
                f"interval {self._interval} must have a run of known length, "
                f"got max_duration={state.max_duration}. "
                'Give max_duration, or an interval such as "10ba".'
            )
        self._last_check = state.timestamp

    def passed(self, state: State) -> bool:
        """Returns whether a multiple of the interval was crossed since the last check."""
        before, self._last_check = self._last_check, state.timestamp
        unit, step = self._interval.unit, self._interval.value
        if unit is TimeUnit.TOKEN and not (
            self._is_said or state.timestamp.token or not state.timestamp.batch
        ):
            self._is_said = True
            _log.warning(
                "interval %s has not begun: after %s the run has counted no tokens.",
                self._interval,
                state.timestamp.batch,
            )
        if unit is TimeUnit.DURATION:
            length = length_of(state)
            if not length:
                return False
            unit, step = length.unit, length.value * step
        return _multiples(state.timestamp, unit, step) > _multiples(before, unit, step)

    def __repr__(self) -> str:
        return f"Interval({str(self._interval)!r})"


def _multiples(timestamp: Timestamp, unit: TimeUnit, step: float) -> int:
    """Returns the number of whole steps up to a timestamp."""
    count = TOTAL_IN[unit](timestamp).value
    if type(step) is int and type(count) is int:
        return count // step
    return math.floor(count / step + _ROUNDING)
