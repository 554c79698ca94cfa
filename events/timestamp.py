"""Training time: `Time`, a number with a unit, and `Timestamp`, the progress of a run.

Both are frozen, and safe in any thread: a loop replaces its timestamp as it advances.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from numbers import Integral, Real
from types import GenericAlias
from typing import Any

import attrs

from .errors import TimeStringError, TimeUnitError

__all__ = ["TOTAL_IN", "Time", "TimeUnit", "Timestamp"]


class TimeUnit(StrEnum):
    """A unit of training time; the value is its suffix in strings such as "10ep".

    ```python
    print(Time(3, TimeUnit.EPOCH))  # 3ep
    ```
    """

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"  # noqa: S105  # the unit
    DURATION = "dur"
    SECOND = "sec"

    @classmethod
    def _missing_(cls, value: object) -> "TimeUnit":
        for unit in cls:
            if str(value).lower() in {unit.value, unit.name.lower()}:
                return unit
        raise TimeStringError(f"time unit must be one of {', '.join(cls)}, got {value!r}.")

    @property
    def plural(self) -> str:
        """The plural of the unit's name, for messages."""
        return "batches" if self is TimeUnit.BATCH else f"{self.name.lower()}s"


# The units that may have fractions.
_FRACTIONAL = frozenset({TimeUnit.DURATION, TimeUnit.SECOND})
_CLOCK = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_NUMBER_UNIT = re.compile(r"([+-]?[\d_]*\.?[\d_]*(?:e[+-]?\d+)?)(iter|ep|ba|sp|tok|dur|sec)", re.ASCII)
_SECONDS_PER = (86_400, 3_600, 60, 1)


def _python_number(value: Any) -> int | float | None:
    """Returns a number of any library as int or float; None for a bool or anything else."""
    match value:
        case bool():
            return None
        case int() | float():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value)
    return None


def _number(given: Any, unit: TimeUnit) -> int | float:
    """Returns the value as an int or float, whichever the unit holds; raises if it cannot."""
    value = given if type(given) is Decimal else _python_number(given)
    if value is None:
        raise TimeUnitError(f"time must have a number as its value, got {given!r} ({type(given).__name__}).")
    if not math.isfinite(value):
        raise TimeStringError(f"time must be finite, got {value}{unit}.")
    if value == int(value) and unit is not TimeUnit.DURATION:
        return int(value)
    if unit not in _FRACTIONAL:
        raise TimeStringError(
            f"time in {unit.plural} must be a whole number, got {value}{unit}. "
            'Only durations ("0.5dur") and seconds ("0.5sec") may have a fraction.'
        )
    return float(value)


def _unit(unit: TimeUnit | str) -> TimeUnit:
    return unit if type(unit) is TimeUnit else TimeUnit(unit)


@functools.total_ordering
@attrs.frozen(eq=False, repr=False, order=False)
class Time:
    """A span of training time: a number and its unit.

    ```python
    print(Time(10, "ba") + "5ba", Time.from_timestring("3ep") * 2)  # 15ba 6ep
    ```

    `Time(10, "ep")` and `Time.from_timestring("10ep")` are the same. Whole units hold an `int`; seconds hold
    an `int` or a `float`; a duration (a share of the whole run) holds a `float`.

    Arithmetic and comparison, `==` included, need equal units: `Time(1, "ep") == Time(1, "ba")` raises
    instead of always being false. A bare operand takes the unit of the `Time`; a string is parsed.
    """

    value: int | float
    unit: TimeUnit = attrs.field(converter=_unit)

    def __class_getitem__(cls, kind: Any) -> GenericAlias:
        """Takes the type of the value, as annotations written for Composer name it: `Time[int]`."""
        return GenericAlias(cls, kind)

    def __attrs_post_init__(self) -> None:
        if type(self.value) is not int or self.unit is TimeUnit.DURATION:
            object.__setattr__(self, "value", _number(self.value, self.unit))

    @classmethod
    def from_timestring(cls, timestring: str) -> "Time":
        """Parses strings such as "10ep", "500ba", "3e10sp", "4_000tok", "0.5dur", "30sec", "1h20m40s".

        Raises:
            TimeStringError: the string has no unit, an unknown one, or a fraction of a whole unit.
        """
        text = timestring.strip().lower()
        clock = _CLOCK.fullmatch(text)
        if text and clock:
            parts = (int(group or 0) * size for group, size in zip(clock.groups(), _SECONDS_PER, strict=True))
            return cls(sum(parts), TimeUnit.SECOND)
        match = _NUMBER_UNIT.fullmatch(text)
        try:
            number, unit = (Decimal(match[1]), TimeUnit(match[2])) if match else (None, None)
        except InvalidOperation:  # Such as "e5ba".
            number, unit = None, None
        if number is None or unit is None:
            raise TimeStringError(
                f"time must be a number with a unit, got {timestring!r}. "
                'Write "10ep", "500ba", "1e6sp", "4_000tok", "0.5dur", "30sec", "2iter" or "1h30m".'
            )
        return cls(_number(number, unit), unit)

    @classmethod
    def from_iteration(cls, iteration: int) -> "Time":
        """Returns `Time(iteration, "iter")`."""
        return cls(iteration, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, epoch: int) -> "Time":
        """Returns `Time(epoch, "ep")`."""
        return cls(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: int) -> "Time":
        """Returns `Time(batch, "ba")`."""
        return cls(batch, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, sample: int) -> "Time":
        """Returns `Time(sample, "sp")`."""
        return cls(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: int) -> "Time":
        """Returns `Time(token, "tok")`."""
        return cls(token, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, duration: float) -> "Time":
        """Returns `Time(duration, "dur")`, a share of the run from 0 to 1."""
        return cls(duration, TimeUnit.DURATION)

    @classmethod
    def from_timedelta(cls, duration: timedelta | str) -> "Time":
        """Returns a time in seconds, of a `timedelta` or a string such as "1h20m40s".

        Raises:
            TimeStringError: it is a string in another unit than seconds.
        """
        time = cls.from_input(duration)
        if time.unit is not TimeUnit.SECOND:
            raise TimeStringError(
                f'duration must be in hours, minutes and seconds, "1h30m", got {duration!r}.'
            )
        return time

    def to_timestring(self) -> str:
        """Returns the string that `from_timestring` reads, as `str` does."""
        return str(self)

    @classmethod
    def from_input(
        cls, value: "Time | str | int | timedelta", default_unit: TimeUnit | str | None = None
    ) -> "Time":
        """Returns a `Time` for any value that users may pass as one.

        Args:
            value: a `Time`, a time string, a `timedelta`, or a bare integer.
            default_unit: the unit of a bare integer; without it a bare integer is an error.

        Raises:
            TimeStringError: the string cannot be parsed, or a bare integer has no default unit.
            TimeUnitError: the value is of another type.
        """
        match value:
            case Time():
                return value
            case str():
                return cls.from_timestring(value)
            case timedelta():
                return cls(value.total_seconds(), TimeUnit.SECOND)
        number = _python_number(value)
        if type(number) is not int:
            raise TimeUnitError(
                f"time must be a Time, a string, a timedelta or an int, got {type(value).__name__}."
            )
        if default_unit is None:
            raise TimeStringError(f'time must have a unit, got {value!r}. Write "{value}ep" or "{value}ba".')
        return cls(number, default_unit)

    def _operand(self, other: object) -> int | float:
        """Returns the number of the other operand, in this unit."""
        if isinstance(other, Time | str):
            time = Time.from_input(other)
            if time.unit is not self.unit:
                raise TimeUnitError(
                    f"times must have the same unit, got {self} and {time}; "
                    f'timestamp.get("{time.unit}") gives the run\'s time in {time.unit.plural}.'
                )
            return time.value
        number = other if type(other) is int else _python_number(other)
        if number is None:
            raise TimeUnitError(
                f"operand of a time in {self.unit.plural} must be a time, string or number, "
                f"got {other!r:.80}."
            )
        return number

    def __add__(self, other: object) -> "Time":
        return Time(self.value + self._operand(other), self.unit)

    __radd__ = __add__

    def __sub__(self, other: object) -> "Time":
        return Time(self.value - self._operand(other), self.unit)

    def __rsub__(self, other: object) -> "Time":
        return Time(self._operand(other) - self.value, self.unit)

    def __mul__(self, other: object) -> "Time":
        """Scales by a number, or by a duration ("0.5dur" of "10ep" is "5ep")."""
        if not isinstance(other, Time | str):
            return Time(_scaled(self.value * self._operand(other), self.unit), self.unit)
        time = Time.from_input(other)
        if TimeUnit.DURATION not in {self.unit, time.unit}:
            raise TimeUnitError(f"a time must be multiplied by a number or a duration, got {self} * {time}.")
        unit = self.unit if time.unit is TimeUnit.DURATION else time.unit
        return Time(_scaled(self.value * time.value, unit), unit)

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> "Time":
        """Divides by a time of the same unit into a duration, or by a number into the same unit."""
        if isinstance(other, Time | str):
            return Time(self.value / self._operand(other), TimeUnit.DURATION)
        return Time(_scaled(self.value / self._operand(other), self.unit), self.unit)

    def __mod__(self, other: object) -> "Time":
        return Time(self.value % self._operand(other), self.unit)

    def __neg__(self) -> "Time":
        return Time(-self.value, self.unit)

    def __pos__(self) -> "Time":
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Time | str | int | float):
            return NotImplemented
        return self.value == self._operand(other)

    def __lt__(self, other: object) -> bool:
        return self.value < self._operand(other)

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"

    def __repr__(self) -> str:
        return f"Time({self.value!r}, TimeUnit.{self.unit.name})"


def _scaled(value: float, unit: TimeUnit) -> int | float:
    """Rounds toward zero if the unit has no fractions.

    Ignores floating-point error: 0.29 of 100 batches is 29, not 28.
    """
    if unit in _FRACTIONAL or isinstance(value, int):
        return value
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-12) else int(value)


def _counter(unit: TimeUnit) -> Any:
    """Returns a field of `Timestamp` in one unit: takes a `Time`, a string or a number; never negative."""

    def convert(value: "Time | str | int") -> Time:
        time = value if type(value) is Time else Time.from_input(value, unit)
        if time.unit is not unit:
            raise TimeUnitError(f"count of {unit.plural} must be a time in {unit.plural}, got {time}.")
        if time.value < 0:
            raise TimeStringError(f"count of {unit.plural} must be at least 0, got {time}.")
        return time

    return attrs.field(default=Time(0, unit), converter=convert)


_NO_TIME = timedelta(0)


@functools.total_ordering
@attrs.frozen(kw_only=True, eq=False, order=False)
class Timestamp:
    """The progress of a run: counts and durations of everything completed so far.

    ```python
    now = Timestamp(epoch=1, batch=120)
    print(now.get("ba"), now.batch_in_epoch)  # 120ba 0ba
    ```

    Counts are `Time`s (`timestamp.batch.value`, `int(timestamp.batch)`), in total and within the current
    iteration or epoch. Samples and tokens are summed over ranks. Wall-clock durations (`*_wct`) are
    `timedelta`s of training alone, without evaluation and the time between sessions of a resumed run.

    `timestamp >= "10ep"` and `timestamp == "10ep"` compare the count in that unit; two timestamps are equal
    if all of their fields are.
    """

    iteration: Time = _counter(TimeUnit.ITERATION)
    epoch: Time = _counter(TimeUnit.EPOCH)
    batch: Time = _counter(TimeUnit.BATCH)
    sample: Time = _counter(TimeUnit.SAMPLE)
    token: Time = _counter(TimeUnit.TOKEN)
    epoch_in_iteration: Time = _counter(TimeUnit.EPOCH)
    token_in_iteration: Time = _counter(TimeUnit.TOKEN)
    batch_in_epoch: Time = _counter(TimeUnit.BATCH)
    sample_in_epoch: Time = _counter(TimeUnit.SAMPLE)
    token_in_epoch: Time = _counter(TimeUnit.TOKEN)
    total_wct: timedelta = _NO_TIME
    iteration_wct: timedelta = _NO_TIME
    epoch_wct: timedelta = _NO_TIME
    batch_wct: timedelta = _NO_TIME

    def get(self, unit: TimeUnit | str) -> Time:
        """Returns the total in one unit; in seconds, the total wall-clock duration.

        Raises:
            TimeUnitError: the unit is a duration, a share of a run whose length a timestamp does not know.
        """
        unit = _unit(unit)
        if unit is TimeUnit.DURATION:
            raise TimeUnitError(
                "a timestamp has no duration: use state.get_elapsed_duration(), which knows the maximum."
            )
        return TOTAL_IN[unit](self)

    def to_next_batch(
        self, samples: int | Time = 0, tokens: int | Time = 0, duration: timedelta = _NO_TIME
    ) -> "Timestamp":
        """Returns the timestamp after one more batch.

        Args:
            samples: its number of samples, over all ranks.
            tokens: its number of tokens, over all ranks.
            duration: its wall-clock time.
        """
        return self.copy(
            batch=self.batch + 1,
            batch_in_epoch=self.batch_in_epoch + 1,
            sample=self.sample + samples,
            sample_in_epoch=self.sample_in_epoch + samples,
            token=self.token + tokens,
            token_in_epoch=self.token_in_epoch + tokens,
            token_in_iteration=self.token_in_iteration + tokens,
            total_wct=self.total_wct + duration,
            iteration_wct=self.iteration_wct + duration,
            epoch_wct=self.epoch_wct + duration,
            batch_wct=duration,
        )

    def to_next_epoch(self, duration: timedelta = _NO_TIME) -> "Timestamp":
        """Returns the timestamp at the start of the next epoch.

        Args:
            duration: wall-clock time since the last batch.
        """
        return self.copy(
            epoch=self.epoch + 1,
            epoch_in_iteration=self.epoch_in_iteration + 1,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=self.total_wct + duration,
            iteration_wct=self.iteration_wct + duration,
            epoch_wct=_NO_TIME,
            batch_wct=_NO_TIME,
        )

    def to_next_iteration(self, duration: timedelta = _NO_TIME) -> "Timestamp":
        """Returns the timestamp at the start of the next iteration.

        Args:
            duration: wall-clock time since the last batch.
        """
        return self.copy(
            iteration=self.iteration + 1,
            epoch_in_iteration=0,
            token_in_iteration=0,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=self.total_wct + duration,
            iteration_wct=_NO_TIME,
            epoch_wct=_NO_TIME,
            batch_wct=_NO_TIME,
        )

    def copy(self, **changes: Any) -> "Timestamp":
        """Returns a copy with the named fields changed.

        Raises:
            TypeError: a name is not a field.
        """
        return attrs.evolve(self, **changes)

    def __eq__(self, other: object) -> bool:
        match other:
            case Timestamp():
                return attrs.astuple(self, recurse=False) == attrs.astuple(other, recurse=False)
            case Time() | str():
                time = Time.from_input(other)
                return self.get(time.unit) == time
        return NotImplemented

    def __hash__(self) -> int:
        return hash(attrs.astuple(self, recurse=False))

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Time | str):
            raise TimeUnitError(f'a timestamp compares with a time such as "10ep", got {other!r}.')
        time = Time.from_input(other)
        return self.get(time.unit) < time

    def get_state(self) -> dict[str, Time | timedelta]:
        """Returns all counts and durations by field name."""
        return attrs.asdict(self, recurse=False)

    def state_dict(self) -> dict[str, Any]:
        """Returns counts as numbers and durations as `timedelta`, by field name."""
        return {
            name: value if isinstance(value, timedelta) else value.value
            for name, value in self.get_state().items()
        }

    def to_numbers(self) -> dict[str, int | float]:
        """Returns plain numbers by field name: counts as they are, durations in seconds."""
        return {
            name: value.total_seconds() if _is_duration(name) else value
            for name, value in self.state_dict().items()
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Timestamp":
        """Returns the timestamp of a `state_dict`, or of `to_numbers`.

        Missing fields are zero, and unknown ones are ignored.
        """
        known = {field.name: state[field.name] for field in attrs.fields(cls) if field.name in state}
        for name, value in known.items():
            if _is_duration(name) and not isinstance(value, timedelta):
                known[name] = timedelta(seconds=value)
        return cls(**known)


def _is_duration(field: str) -> bool:
    return field.endswith("_wct")


# `Timestamp.get` without its parsing of units: each interval asks at every batch, in half the time.
TOTAL_IN: dict[TimeUnit, Callable[[Timestamp], Time]] = {
    unit: operator.attrgetter(unit.name.lower())
    for unit in TimeUnit
    if unit not in {TimeUnit.SECOND, TimeUnit.DURATION}
} | {TimeUnit.SECOND: lambda timestamp: Time(timestamp.total_wct.total_seconds(), TimeUnit.SECOND)}
