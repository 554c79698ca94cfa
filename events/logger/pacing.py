"""Keeps, per destination, when it is written to next and the records that wait until then.

Training thread only.
"""

import copy
import functools
import inspect
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import attrs

from events.monitor.stat import Aggregation, Summary
from events.state import Phase, State

from .destination import Destination, WriteRate, WriteSchedule
from .device import PendingCopy
from .values import PLAIN_TYPES, is_function, map_nested

__all__ = [
    "MetricsCall",
    "PacedDestination",
    "RecordCall",
    "RunPosition",
    "RunningAggregate",
    "are_flat",
    "pending_in",
    "resolve",
    "snapshot",
]

_log = logging.getLogger("events")

_FOLD_AFTER = 64
_COMPACT_AT = 64
# The sum of as many integers as there can be is still one that a float can hold.
_MAX_INTEGER_BITS = 960
_FUNCTION_TYPES = frozenset({FunctionType, MethodType, BuiltinFunctionType})
# Whether none of these types needs conversion or flattening at the call.
are_flat = (_FUNCTION_TYPES | PLAIN_TYPES).issuperset


# The fields of the state that say how far a run has come. A plain tuple, made at each delayed call.
RunPosition = tuple[Any, ...]
_POSITION_FIELDS = (
    "timestamp",
    "phase",
    "eval_timestamp",
    "predict_timestamp",
    "dataloader_label",
    "dataloader_len",
)
position_of: Callable[[State], RunPosition] = attrgetter(*_POSITION_FIELDS)


def restore_position(position: RunPosition, state: State) -> None:
    """Sets the state back to a position."""
    for name, value, current in zip(_POSITION_FIELDS, position, position_of(state), strict=True):
        # Each is checked as it is set, and mostly one has changed.
        if value is not current:
            setattr(state, name, value)


def phase_of(position: RunPosition) -> Phase:
    """Returns the phase of a position."""
    phase: Phase = position[1]
    return phase


@attrs.define(eq=False, slots=False)
class MetricsCall:
    """A call of `log_metrics`, shared by all destinations; its functions are called once for all."""

    values: dict[str, Any]
    step: int
    position: RunPosition
    order: int

    @functools.cached_property
    def functions(self) -> set[str]:
        """The names whose values are functions that were not called yet."""
        return {name for name, value in self.values.items() if is_function(value)}


@attrs.define(eq=False)
class RecordCall:
    """A call of another `log_*` method.

    `given` are the values that may be functions; `prepare` turns them into the arguments of the destination's
    method, by name and in its order.
    """

    action: str
    name: str
    given: tuple[Any, ...]
    prepare: Callable[..., dict[str, Any]]
    position: RunPosition
    order: int
    arguments: dict[str, Any] | None = None
    is_lost: bool = False


def _bounded(value: float) -> float:
    """Returns infinity for an integer that no float can hold, so that no sum overflows."""
    if type(value) is int and value.bit_length() > _MAX_INTEGER_BITS:
        return math.inf if value > 0 else -math.inf
    return value


class RunningAggregate:
    """Aggregates the values of a metric since the last write into one number.

    Args:
        aggregate: as in `WriteRate`, other than "last".
    """

    def __init__(self, aggregate: str) -> None:
        # The first value needs no summary.
        self._wanted = () if aggregate == "first" else (Aggregation(aggregate),)
        self._summary = Summary(self._wanted)
        self._first: float = 0
        self._samples: deque[Any] = deque()

    def add(self, sample: Any) -> None:
        """Adds a number or a `PendingCopy`."""
        self._samples.append(sample)
        if len(self._samples) >= _FOLD_AFTER:
            self._fold()

    @property
    def is_ready(self) -> bool:
        """Whether every sample has arrived on the host."""
        self._fold()
        return not self._samples

    @property
    def is_lost(self) -> bool:
        """Whether there is no sample."""
        self._fold()
        return not self._summary.count

    @property
    def value(self) -> float:
        """The aggregate of the samples."""
        self._fold()
        return next(iter(self._summary.values(self._wanted).values()), self._first)

    def _fold(self) -> None:
        arrived: list[float] = []
        while self._samples:
            sample = self._samples[0]
            if not isinstance(sample, PendingCopy):
                arrived.append(_bounded(sample))
            elif not sample.is_ready:
                break
            elif not sample.is_lost:
                arrived.append(_bounded(sample.value))
            self._samples.popleft()
        if arrived:
            self._first = self._first if self._summary.count else arrived[0]
            self._summary.fold(arrived)


@attrs.define(eq=False)
class PendingRecords:
    """The latest records that wait in one phase: metrics by their names, others by kind and name.

    A call with the same names replaces an earlier one at once. The latest value of each name is only looked
    up when it is needed.
    """

    calls: dict[tuple[str, ...], MetricsCall] = attrs.field(factory=dict)
    accumulations: dict[str, RunningAggregate] = attrs.field(factory=dict)
    media: dict[tuple[str, str], RecordCall] = attrs.field(factory=dict)
    _compact_at: int = _COMPACT_AT

    def add(self, names: tuple[str, ...], call: MetricsCall) -> None:
        """Adds a call; it replaces an earlier one with the same names."""
        self.calls[names] = call
        if len(self.calls) > self._compact_at:
            # Bounded by the number of names, in whatever combinations they are logged.
            needed = set(self.last_calls().values())
            self.calls = {names: call for names, call in self.calls.items() if call in needed}
            self._compact_at = max(_COMPACT_AT, 2 * len(self.calls))

    def last_calls(self) -> dict[str, MetricsCall]:
        """Returns for each name the latest call with it."""
        last: dict[str, MetricsCall] = {}
        for call in sorted(self.calls.values(), key=lambda one: one.order):
            last |= dict.fromkeys(call.values, call)
        return last


class PacedDestination:
    """A destination with its write schedule and the records that wait for it."""

    def __init__(self, destination: Destination) -> None:
        self.destination: Any = destination
        rate: WriteRate | None = getattr(destination, "write_rate", None)
        self._schedule = WriteSchedule(rate or WriteRate())
        if hasattr(destination, "write_schedule"):
            # For an override of `should_write` that calls the one of the base class.
            destination.write_schedule = self._schedule
        self._has_own_rule = not _is_default(destination, "should_write")
        self._aggregate: str = "last" if rate is None else rate.aggregate
        self.limits_media: bool = rate is not None and rate.media
        self.is_paced = rate is not None or self._has_own_rule
        # What waits, by phase.
        self.pending: defaultdict[Phase, PendingRecords] = defaultdict(PendingRecords)
        self._writing: tuple[tuple[Any, ...], set[Any]] | None = None
        # Whether a method takes a keyword, by both names; found at the first record that has it.
        self._takes_option: dict[tuple[str, str], bool] = {}

    def call(self, action: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Calls the destination's method for a kind of record, or else its `log_record`.

        Args:
            action: the method.
            arguments: its arguments by name, in its order.
            options: further keywords; each one that the method does not take is reported once.
        """
        method = getattr(self.destination, action, None)
        if method is None:
            self.destination.log_record(action.removeprefix("log_"), {**arguments, **options})
            return
        accepted = {name: value for name, value in options.items() if self._accepts(method, action, name)}
        # By position, as Composer calls it: a subclass may have renamed its arguments.
        method(*arguments.values(), **accepted)

    def _accepts(self, method: Callable[..., Any], action: str, option: str) -> bool:
        key = (action, option)
        if key not in self._takes_option:
            self._takes_option[key] = _takes_keyword(method, option)
            if not self._takes_option[key]:
                name = type(self.destination).__name__
                _log.warning("%s.%s has no argument %r: it is left out there.", name, action, option)
        return self._takes_option[key]

    def takes(self, action: str) -> bool:
        """Returns whether the destination implements a kind of record, or takes any."""
        return not _is_default(
            self.destination, action if hasattr(self.destination, action) else "log_record"
        )

    def is_due(self, state: State, step: int, names: Iterable[Any]) -> bool:
        """Returns whether a record is to be written now.

        Several calls within one step are written together: once a step is being written, further names are
        written too, until one comes again.
        """
        at = (state.timestamp.batch.value, step, state.phase)
        if self._writing is not None and self._writing[0] == at and self._writing[1].isdisjoint(names):
            self._writing[1].update(names)
            return True
        is_due = self.destination.should_write(state) if self._has_own_rule else self._schedule.is_due(state)
        if not is_due:
            # A record waits now, so no later one may join that write.
            self._writing = None
            return False
        self._schedule.note_write(state)
        self._writing = (at, set(names))
        return True

    def hold(self, call: MetricsCall | RecordCall) -> None:
        """Keeps a call until the destination is due."""
        pending = self.pending[phase_of(call.position)]
        if isinstance(call, RecordCall):
            pending.media[call.action, call.name] = call
            return
        pending.add(tuple(call.values), call)
        if self._aggregate != "last":
            self._accumulate(pending.accumulations, call.values, call.functions)

    def idle_until(self, state: State) -> float | None:
        """Returns until when the destination is not due in this phase, by its clock; None if unknown."""
        return None if self._aggregate != "last" or self._has_own_rule else self._schedule.due_at(state)

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of the write rate."""
        return self._schedule.rate.clock

    def _accumulate(
        self,
        accumulations: dict[str, RunningAggregate],
        values: Mapping[str, Any],
        left_out: Iterable[str] = (),
    ) -> None:
        for name, value in values.items():
            if name in left_out or isinstance(value, dict):
                continue
            accumulation = accumulations.get(name)
            if accumulation is None:
                accumulation = accumulations[name] = RunningAggregate(self._aggregate)
            accumulation.add(value)

    def take(
        self, phase: Phase, evaluate: Callable[[MetricsCall, list[str]], None]
    ) -> Iterator[tuple[MetricsCall, dict[str, Any]] | RecordCall]:
        """Removes and yields the waiting records of a phase in the order of the calls.

        Args:
            phase: the phase.
            evaluate: calls the functions of a call with these names.
        """
        pending = self.pending.pop(phase, PendingRecords())
        metrics = pending.last_calls()
        calls: list[MetricsCall | RecordCall] = [*set(metrics.values()), *pending.media.values()]
        for call in sorted(calls, key=lambda one: one.order):
            if isinstance(call, RecordCall):
                yield call
                continue
            late = [name for name in call.values if name in call.functions and metrics.get(name) is call]
            evaluate(call, late)
            values = {name: value for name, value in call.values.items() if metrics.get(name) is call}
            if self._aggregate != "last":
                called = {name: values[name] for name in late if name in values}
                self._accumulate(pending.accumulations, called)
                values |= {
                    name: pending.accumulations[name] for name in values if name in pending.accumulations
                }
            if values:
                yield call, values


def _is_default(destination: Any, method: str) -> bool:
    """Returns whether a destination inherits a method unchanged; the base class marks its own."""
    found = getattr(destination, method, None)
    return found is None or getattr(found, "is_default", False)


def snapshot(value: Any) -> Any:
    """Returns a copy that the caller cannot change; pending copies and immutable values as they are."""

    def copied(one: Any) -> Any:
        if isinstance(one, PendingCopy | str | bytes | int | float | None):
            return one
        if hasattr(one, "detach") and hasattr(one, "clone"):
            return one.detach().clone()
        try:
            return copy.deepcopy(one)
        except Exception:  # noqa: BLE001  # any class may refuse to be copied
            return one

    return map_nested(copied, value)


def resolve(value: Any) -> Any:
    """Returns a value with its pending copies replaced by their values."""
    return map_nested(lambda one: one.value if isinstance(one, PendingCopy) else one, value)


def pending_in(value: Any) -> list[PendingCopy | RunningAggregate]:
    """Returns the pending copies in a value, in nested lists, tuples and dicts too."""
    if isinstance(value, PendingCopy | RunningAggregate):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    # Without a call for each of the copies themselves.
    return [found for one in items for found in ((one,) if type(one) is PendingCopy else pending_in(one))]


def _takes_keyword(method: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # no signature to read
        return False
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
