"""What was logged and has not reached its destination yet: calls, and what waits for a destination to be due.

Everything here belongs to the training thread.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import attrs

from events.state import Phase, State

from .destination import Destination, due_at, note_written
from .device import Landing
from .values import is_function

__all__ = [
    "Accumulation",
    "MediaCall",
    "MetricsCall",
    "Moment",
    "Sink",
    "are_flat",
    "landings_in",
    "own",
    "resolve",
]

_FOLD_AFTER = 64
_COMPACT_AT = 64
_FUNCTION_TYPES = frozenset({FunctionType, MethodType, BuiltinFunctionType})
# Whether there is nothing among these types that has to be read or flattened at the call.
are_flat = (_FUNCTION_TYPES | {float, int, bool}).issuperset


# Where a run stands, as destinations read it from the state. Functions, for it is asked at each call that waits.
Moment = tuple[Any, ...]
_MOMENT = (
    "timestamp",
    "phase",
    "eval_timestamp",
    "predict_timestamp",
    "dataloader_label",
    "dataloader_len",
)
moment_of: Callable[[State], Moment] = attrgetter(*_MOMENT)


def put_moment(moment: Moment, state: State) -> None:
    """Makes the state say where the run stood."""
    for name, value in zip(_MOMENT, moment, strict=True):
        setattr(state, name, value)


def phase_of(moment: Moment) -> Phase:
    """Returns what the loop was doing."""
    phase: Phase = moment[1]
    return phase


class MetricsCall:
    """A call of `log_metrics`, shared by all destinations; a function in it is called once for all of them."""

    __slots__ = ("_functions", "moment", "order", "step", "values")

    def __init__(
        self, values: dict[str, Any], functions: set[str] | None, step: int, moment: Moment, order: int
    ) -> None:
        self.values = values
        self._functions = functions
        self.step = step
        self.moment = moment
        self.order = order

    @property
    def functions(self) -> set[str]:
        """The names whose values are functions that nobody has called yet."""
        if self._functions is None:
            self._functions = {name for name, value in self.values.items() if is_function(value)}
        return self._functions


@attrs.define(eq=False)
class MediaCall:
    """A call of another `log_*` method.

    `given` are the values that may be functions, `prepare` turns them into the arguments of the destination's method.
    """

    action: str
    name: str
    given: tuple[Any, ...]
    prepare: Callable[..., tuple[Any, ...]]
    moment: Moment
    order: int
    arguments: tuple[Any, ...] | None = None
    is_lost: bool = False


@attrs.define(eq=False)
class Accumulation:
    """What came of a metric since its destination was last written to, boiled down to one number."""

    aggregate: str
    _count: int = 0
    _first: float = 0.0
    _last: float = 0.0
    _least: float = 0.0
    _most: float = 0.0
    _total: float = 0.0
    _samples: "deque[Any]" = attrs.field(factory=deque)

    def add(self, sample: Any) -> None:
        """Takes a number, or a `Landing`."""
        self._samples.append(sample)
        if len(self._samples) >= _FOLD_AFTER:
            self._fold()

    @property
    def is_ready(self) -> bool:
        """Whether every sample has landed."""
        self._fold()
        return not self._samples

    @property
    def is_lost(self) -> bool:
        """Whether there is no sample at all."""
        self._fold()
        return not self._count

    @property
    def value(self) -> float:
        """The number."""
        self._fold()
        if self.aggregate == "mean":
            return self._total / self._count
        found: float = {
            "first": self._first,
            "last": self._last,
            "min": self._least,
            "max": self._most,
            "sum": self._total,
            "count": self._count,
        }[self.aggregate]
        return found

    def _fold(self) -> None:
        while self._samples:
            sample = self._samples[0]
            if isinstance(sample, Landing):
                if not sample.is_ready:
                    return
                if not sample.is_lost:
                    self._take(sample.value)
            else:
                self._take(sample)
            self._samples.popleft()

    def _take(self, value: float) -> None:
        if not self._count:
            self._first = self._least = self._most = value
            self._total = value
        else:
            # NaN is neither less nor more: said so that it gets in, and stays.
            if value < self._least or value != value:  # noqa: PLR0124
                self._least = value
            if value > self._most or value != value:  # noqa: PLR0124
                self._most = value
            self._total += value
        self._last = value
        self._count += 1


@attrs.define(eq=False)
class Waiting:
    """What waits in one phase: calls of `log_metrics` by their names, other records by kind and name, the last of each.

    That a later call has the same names tells at once that it takes the place of an earlier one; which call has the last
    value of which name is only found out when it is needed.
    """

    calls: dict[tuple[str, ...], MetricsCall] = attrs.field(factory=dict)
    accumulations: dict[str, Accumulation] = attrs.field(factory=dict)
    media: dict[tuple[str, str], MediaCall] = attrs.field(factory=dict)
    _compact_at: int = _COMPACT_AT

    def add(self, names: tuple[str, ...], call: MetricsCall) -> None:
        """Keeps a call in the place of an earlier one with the same names."""
        self.calls[names] = call
        if len(self.calls) > self._compact_at:
            # Bounded by the number of names, however they come together.
            needed = set(self.last_calls().values())
            self.calls = {names: call for names, call in self.calls.items() if call in needed}
            self._compact_at = max(_COMPACT_AT, 2 * len(self.calls))

    def last_calls(self) -> dict[str, MetricsCall]:
        """Returns for each name the call that had it last."""
        last: dict[str, MetricsCall] = {}
        for call in sorted(self.calls.values(), key=lambda one: one.order):
            last |= dict.fromkeys(call.values, call)
        return last


class Sink:
    """One destination: what it takes, whether it is due, and what waits for it."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        rate = getattr(destination, "write_rate", None)
        self._aggregate: str = "last" if rate is None else rate.aggregate
        self.limits_media: bool = rate is not None and rate.media
        self.is_paced = (
            rate is not None
            or getattr(destination, "default_write_seconds", 0.0) > 0
            or not _is_default(destination, "should_write")
        )
        self._waiting: dict[Phase, Waiting] = {}
        self._writing: tuple[tuple[Any, ...], set[Any]] | None = None

    def takes(self, action: str) -> bool:
        """Says whether a record of this kind does anything."""
        return not _is_default(self.destination, action)

    def is_due(self, state: State, step: int, names: Iterable[Any]) -> bool:
        """Says whether a record is to be written now.

        What is logged in one step in several calls is written together: once a step is being written, names that it has
        not had yet go along, until one comes that it has had.
        """
        at = (state.timestamp.batch.value, step, state.phase)
        if self._writing is not None and self._writing[0] == at and self._writing[1].isdisjoint(names):
            self._writing[1].update(names)
            return True
        if not self.destination.should_write(state):
            # Something waits: nothing later goes along with that write.
            self._writing = None
            return False
        note_written(self.destination, state)
        self._writing = (at, set(names))
        return True

    def holds(self, phase: Phase) -> bool:
        """Says whether a write has to look at more than its own record."""
        return self._aggregate != "last" or phase in self._waiting

    def wait(self, call: MetricsCall | MediaCall) -> None:
        """Keeps a call until the destination is due."""
        waiting = self.waiting_in(phase_of(call.moment))
        if isinstance(call, MediaCall):
            waiting.media[call.action, call.name] = call
            return
        waiting.add(tuple(call.values), call)
        if self._aggregate != "last":
            self._accumulate(waiting.accumulations, call.values, call.functions)

    def forget(self, call: MediaCall) -> None:
        """Lets go of what waits of the same kind and name, which this call takes the place of."""
        waiting = self._waiting.get(phase_of(call.moment))
        if waiting is not None:
            waiting.media.pop((call.action, call.name), None)

    def waiting_in(self, phase: Phase) -> Waiting:
        """Returns where what waits in a phase is kept."""
        waiting = self._waiting.get(phase)
        if waiting is None:
            waiting = self._waiting[phase] = Waiting()
        return waiting

    def quiet_until(self, state: State) -> float | None:
        """Returns until when it is certain not to be due in this phase, by its clock, or None where nobody can say."""
        if self._aggregate != "last" or not _is_default(self.destination, "should_write"):
            return None
        return due_at(self.destination, state)

    def _accumulate(
        self, accumulations: dict[str, Accumulation], values: Mapping[str, Any], left_out: Iterable[str] = ()
    ) -> None:
        for name, value in values.items():
            if name in left_out or isinstance(value, dict):
                continue
            accumulation = accumulations.get(name)
            if accumulation is None:
                accumulation = accumulations[name] = Accumulation(self._aggregate)
            accumulation.add(value)

    @property
    def waiting_phases(self) -> list[Phase]:
        """The phases in which something waits."""
        return list(self._waiting)

    def take(
        self, phase: Phase, evaluate: Callable[[MetricsCall, list[str]], None]
    ) -> Iterator[tuple[MetricsCall, dict[str, Any]] | MediaCall]:
        """Yields what waits in a phase, in the order in which it was logged, and forgets it.

        Args:
            phase: the phase.
            evaluate: calls the functions of a call with these names.
        """
        waiting = self._waiting.pop(phase, None)
        if waiting is None:
            return
        metrics = waiting.last_calls()
        calls: list[MetricsCall | MediaCall] = [*set(metrics.values()), *waiting.media.values()]
        for call in sorted(calls, key=lambda one: one.order):
            if isinstance(call, MediaCall):
                yield call
                continue
            late = [name for name in call.values if name in call.functions and metrics.get(name) is call]
            evaluate(call, late)
            values = {name: value for name, value in call.values.items() if metrics.get(name) is call}
            if self._aggregate != "last":
                called = {name: values[name] for name in late if name in values}
                self._accumulate(waiting.accumulations, called)
                values |= {
                    name: waiting.accumulations[name] for name in values if name in waiting.accumulations
                }
            if values:
                yield call, values


def _is_default(destination: Any, method: str) -> bool:
    """Says whether a destination leaves a method as the base class has it, which marks its own."""
    found = getattr(destination, method, None)
    return found is None or getattr(found, "is_default", False)


def own(value: Any) -> Any:
    """Returns a value that its caller cannot change any more; what is on its way stays what it is."""
    if isinstance(value, Landing | str | bytes | int | float | None):
        return value
    if type(value) in {list, tuple}:
        return type(value)(own(item) for item in value)
    if type(value) is dict:
        return {key: own(item) for key, item in value.items()}
    if hasattr(value, "detach") and hasattr(value, "clone"):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  # anything may refuse to be copied, for a reason of its own
        return value


def landings_in(value: Any) -> Iterator[Landing | Accumulation]:
    """Yields what is still on its way, in lists, tuples and dicts too."""
    if isinstance(value, Landing | Accumulation):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from landings_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from landings_in(item)


def resolve(value: Any) -> Any:
    """Returns a value with everything in it that has landed."""
    if isinstance(value, Landing):
        return value.value
    if type(value) in {list, tuple}:
        return type(value)(resolve(item) for item in value)
    return {key: resolve(item) for key, item in value.items()} if type(value) is dict else value
