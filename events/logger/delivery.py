"""Delivers records to the destinations that are due, once their values have arrived from the device.

Training thread only. Records are delivered in the order of the calls; meanwhile the state has the position of
the call.
"""

import functools
import itertools
import logging
import math
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import attrs

from events.errors import RecordError
from events.state import Phase, State

from .checks import unreadable
from .converters import plain_cell
from .destination import Destination
from .device import (
    SCALARS_PER_SLOT,
    DeviceCopies,
    DeviceRing,
    HostCopies,
    PendingCopy,
    PendingRows,
)
from .faults import Faults
from .pacing import (
    MetricsCall,
    PacedDestination,
    PendingRecords,
    RecordCall,
    RunningAggregate,
    RunPosition,
    are_flat,
    pending_in,
    phase_of,
    position_of,
    resolve,
    restore_position,
    snapshot,
)
from .records import RECORD_KINDS
from .values import (
    PLAIN_TYPES,
    TorchHooks,
    are_plain_types,
    are_real,
    flatten_metrics,
    is_function,
    is_on_device,
    local_shard,
    picker,
    read_numbers,
    short_repr,
    to_host,
)

if TYPE_CHECKING:
    from .cuda import RowLayout, ScalarRows

__all__ = ["Delivery", "LogRow", "without_compile"]

P = ParamSpec("P")
R = TypeVar("R")


def without_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Excludes a function and all that it calls from `torch.compile`.

    `torch.compiler.disable` is applied on first use inside a program that compiles: it imports the compiler,
    which takes seconds.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(sys.modules["torch"].compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


_log = logging.getLogger("events")

_MAX_PLANS = 256
_NOTHING_PENDING = PendingRows(table=[[]], is_ready=True)


@attrs.define(eq=False)
class _Delivery:
    """A record with its destinations, delivered once all of its values have arrived."""

    targets: Sequence[PacedDestination]
    action: str
    finish: Callable[[], dict[str, Any] | None]
    pending: Sequence[PendingCopy | RunningAggregate]
    position: RunPosition

    @property
    def is_ready(self) -> bool:
        return all(copy.is_ready for copy in self.pending)


class _RowPlan(NamedTuple):
    """How calls of certain names become rows; a tuple, for between kernels each look elsewhere costs.

    Attributes:
        picks: what returns the values on a device, and the numbers beside them; None if there are no numbers.
        names: all full names, the names of values on the device, and the names of the others.
    """

    ring: DeviceRing
    memory: "ScalarRows"
    layout: "RowLayout"
    dtypes: list[Any]
    cells: list[Any]
    copy: Callable[[Any, Any], object]
    picks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None
    names: tuple[Sequence[str], Sequence[str], Sequence[str]]

    def values_of(self, host: Sequence[Any], numbers: Sequence[Any] | None) -> dict[str, Any]:
        """Returns the numbers of a call by their names, without those that are lost."""
        names, on_device, others = self.names
        found = dict(zip(on_device, numbers or (), strict=False))
        if self.picks is not None:
            found |= zip(others, host, strict=True)
            return {name: found[name] for name in names if name in found}
        return found


# A call that waits for its copy, or for a record before it: a plain tuple of the rows that it belongs to, its
# row, its plan, what it has on the host, step and position; without a plan it is all on the host.
_Row = tuple[PendingRows, int, _RowPlan | None, Any, int, RunPosition]
LogRow = Callable[[Any, int | None], bool]


def _row_logger(plans: dict[tuple[Any, ...], _RowPlan], delivery: "Delivery", state: State) -> LogRow:
    """Returns what logs scalars on a device, and Python's numbers beside them, where there is a plan.

    A call comes between kernels, with cold caches: what counts is how much code and memory it touches. So
    this is one function, and all that it needs are defaults of its arguments; in methods it took 20 µs more
    of 55. It returns False, and has logged nothing, where anything is not as the last time.
    """

    def log_row(
        metrics: Any,
        step: int | None,
        plans: dict[tuple[Any, ...], _RowPlan] = plans,
        state: State = state,
        position_of: Callable[[State], RunPosition] = position_of,
        dtype_of: Callable[[Any], Any] = operator.attrgetter("dtype"),
        append: Callable[[Any], None] = delivery.outbox.append,
        delivery: "Delivery" = delivery,
        clock: Callable[[], float] = delivery.clock,
        is_traced: Callable[[], bool] = TorchHooks.is_traced,
    ) -> bool:
        if type(metrics) is not dict or is_traced() or (plan := plans.get((*metrics,))) is None:
            return False
        ring, memory, layout, dtypes, cells, copy, picks, _ = plan
        row = ring.at
        if row >= ring.limit or (targets := cells[row]) is None or ring.memory is not memory:
            return False
        number = memory.stream_number()
        if number != ring.number or (number and ring.is_capturing()):
            return False
        scalars: Any = [*metrics.values()]
        host: Sequence[Any] = ()
        if picks is not None:
            scalars, host = picks[0](scalars), picks[1](scalars)
            if not are_plain_types(map(type, host)):
                return False
        try:
            if (step is not None and type(step) is not int) or [*map(dtype_of, scalars)] != dtypes:
                return False
            copy(targets, scalars)
        except Exception as error:  # noqa: BLE001  # no scalars, several elements, a gradient: the slow path
            delivery.raise_if_foreign(error)
            return False
        position = position_of(state)
        rows = ring.staged
        rows.layouts.append(layout)
        ring.at = row + 1
        append((rows, row, plan, host, position[0].batch.value if step is None else step, position))
        if clock() >= delivery.look_at:
            delivery.look()
        return True

    return log_row


@attrs.define(eq=False)
class _IdleWindow:
    """A time span of one phase in which no destination is due."""

    phase: Phase
    clock: Callable[[], float]
    until: float
    pending: list[PendingRecords]


class Delivery:
    """Delivers records to destinations.

    Args:
        state: the run.
        destinations: the destinations.
        faults: returns the `Faults` that count failures.
        policy: how values are copied from devices.
    """

    def __init__(
        self,
        state: State,
        destinations: Iterable[Destination],
        faults: Callable[[], Faults],
        policy: DeviceCopies,
    ) -> None:
        self._state = state
        self._targets: tuple[PacedDestination, ...] = ()
        self._metric_targets: tuple[PacedDestination, ...] = ()
        self.is_paced = False
        self._faults = faults
        self._copies = HostCopies(policy)
        self.clock = policy.clock
        # Whether there were scalars on a device.
        self.has_rows = False
        # From when on a call or an event looks what has arrived.
        self.look_at = -math.inf
        self._gather_seconds = policy.gather_seconds
        # What waits for copies, or for a record before it.
        self.outbox: deque[_Delivery | _Row] = deque()
        # By prefix.
        self._row_loggers: dict[str, tuple[dict[tuple[Any, ...], _RowPlan], LogRow]] = {}
        # The destination that packs numbers, and all others that take metrics.
        self._packer: Any = None
        self._unpacked: tuple[PacedDestination, ...] = ()
        self._orders = itertools.count()
        self._idle: _IdleWindow | None = None
        self.add(destinations)

    def add(self, destinations: Iterable[Destination]) -> None:
        """Adds destinations, for later records."""
        self._idle = None
        self._targets = (*self._targets, *map(PacedDestination, destinations))
        self._metric_targets = tuple(target for target in self._targets if target.takes("log_metrics"))
        self.is_paced = any(target.is_paced for target in self._targets)
        packers = [one for one in self._metric_targets if hasattr(one.destination, "try_log_metrics")]
        self._packer = packers[0].destination if packers else None
        self._unpacked = tuple(one for one in self._metric_targets if one not in packers[:1])

    @property
    def is_busy(self) -> bool:
        """Whether a record or a copy from a device is pending."""
        return bool(self.outbox) or self._copies.is_busy

    @property
    def lost_values(self) -> int:
        """How many values were lost on their way from a device."""
        return self._copies.lost_values

    def try_defer(self, metrics: Any, step: int) -> bool:
        """Stores metrics if no destination is due, and returns whether it did; functions are not called.

        The fast path of a logger whose destinations all have write rates.
        """
        idle, state = self._idle, self._state
        if idle is None or idle.phase is not state.phase or idle.clock() >= idle.until:
            return False
        if type(metrics) is not dict or not are_flat(map(type, metrics.values())):
            return False
        names = tuple(metrics)
        try:
            "".join(names)
        except TypeError:
            return False
        call = MetricsCall(metrics.copy(), step, position_of(state), next(self._orders))
        for pending in idle.pending:
            pending.add(names, call)
        return True

    def try_log(self, metrics: Any, prefix: str, step: int) -> bool:
        """Logs metrics that are all scalars of Python or torch, and returns whether it did.

        Not for destinations with write rates, and where one fails.
        """
        if TorchHooks.is_traced():
            return False
        try:
            if type(metrics) is not dict:
                # A TensorDict is a mapping, but iterates over its batch.
                metrics = dict(metrics.items())
            numbers = read_numbers(metrics)
            if numbers is None:
                return self._try_log_row(metrics, prefix, step)
            if not are_real(numbers):
                return False
            if prefix:
                numbers = {prefix + name: value for name, value in numbers.items()}
        except Exception as error:  # noqa: BLE001  # what is no scalar: the slow path reports it
            self.raise_if_foreign(error)
            return False
        if self.outbox:
            self.outbox.append((_NOTHING_PENDING, 0, None, numbers, step, position_of(self._state)))
            self.look()
        else:
            self._log(numbers, step)
            self._faults().raise_refused()
        return True

    def _try_log_row(self, metrics: dict[str, Any], prefix: str, step: int) -> bool:
        """Calls `log_row`, and makes ready before what it needs, unless it has that."""
        log_row = self.log_row(prefix)
        if log_row(metrics, step):
            return True
        names, values = tuple(metrics), list(metrics.values())
        full_names = [prefix + name for name in names]
        places = [place for place, value in enumerate(values) if is_on_device(value)]
        others = [place for place, value in enumerate(values) if type(value) in PLAIN_TYPES]
        scalars = [values[place] for place in places]
        are_taken = len(places) + len(others) == len(values) and all(map(_is_scalar, scalars))
        if not (0 < len(scalars) <= SCALARS_PER_SLOT and are_taken):
            return False
        ring = self._copies.ring_of(scalars[0])
        if ring is None or len({one.device for one in scalars}) > 1:
            return False
        plans = self._row_loggers[prefix][0]
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        memory, layout = ring.layout(scalars)
        parts = full_names, picker(places)(full_names), picker(others)(full_names) if others else ()
        picks = (picker(places), picker(others)) if others else None
        plans[names] = _RowPlan(ring, memory, layout, layout.dtypes, layout.cells, layout.copy, picks, parts)
        self.has_rows = True
        return ring.prepare(layout) and log_row(metrics, step)

    def log_row(self, prefix: str) -> LogRow:
        """Returns what logs rows with a prefix for their names; see `_row_logger`."""
        if prefix not in self._row_loggers:
            plans: dict[tuple[Any, ...], _RowPlan] = {}
            self._row_loggers[prefix] = plans, _row_logger(plans, self, self._state)
        return self._row_loggers[prefix][1]

    def raise_if_foreign(self, error: BaseException) -> None:
        """Raises Ctrl-C and what a signal handler raised."""
        self._faults().raise_if_foreign(error)

    def _log(self, numbers: dict[str, Any], step: int) -> None:
        """Gives numbers to all destinations, first to the one that packs them."""
        targets, packer = self._metric_targets, self._packer
        try:
            if packer is not None and not self._faults().failing and packer.try_log_metrics(numbers, step):
                targets = self._unpacked
        except Exception as error:  # noqa: BLE001  # then its `log_metrics` gets them
            self.raise_if_foreign(error)
        if targets:
            self._call(targets, "log_metrics", {"metrics": numbers, "step": step})

    def look(self) -> bool:
        """Delivers what has arrived, and starts the copies of rows, if it is time; returns whether it was."""
        now = self.clock()
        if now < self.look_at:
            return False
        self._copies.collect()
        self._deliver_ready()
        self._copies.send()
        # A row after a pause is sent at once.
        self.look_at = now + self._gather_seconds if self.is_busy else -math.inf
        return True

    def _open_idle_window(self) -> None:
        """Determines until when no destination is due, if that depends on time alone."""
        state, targets = self._state, self._metric_targets
        until = [target.idle_until(state) for target in targets]
        clocks = {id(target.clock) for target in targets}
        known = [time for time in until if time is not None]
        if not targets or len(known) < len(targets) or len(clocks) > 1:
            self._idle = None
            return
        pending = [target.pending[state.phase] for target in targets]
        self._idle = _IdleWindow(state.phase, targets[0].clock, min(known), pending)

    @without_compile
    def log_metrics(self, metrics: Any, prefix: str, step: int) -> None:
        """Delivers metrics, or keeps them; invalid ones are refused."""
        try:
            flat = flatten_metrics(metrics, prefix)
            names = list(metrics.keys())
        except Exception as error:  # noqa: BLE001  # a mapping's own methods
            text = (
                f"metrics must be a dict from name to number, got {short_repr(metrics, 80)}: {error!r:.200}."
            )
            self._faults().refuse("log_metrics", RecordError(text))
            return
        due = [target for target in self._metric_targets if self._is_due(target, step, names)]
        if not due:
            self._open_idle_window()
        try:
            self._start_copies(flat.values, flat.on_device)
        except RecordError as error:
            self._faults().refuse("log_metrics", error)
            if not flat.values:
                return
        for name, message in flat.errors:
            self._faults().refuse(name, RecordError(message))
        if not flat.values and flat.errors:
            return
        if flat.on_device or flat.functions or self.is_paced or self.is_busy:
            call = MetricsCall(flat.values, step, position_of(self._state), next(self._orders))
            call.functions = set(flat.functions)
            self._distribute(call, due)
        else:
            self._call(due, "log_metrics", {"metrics": flat.values, "step": step})
        self.look()

    def _distribute(self, call: MetricsCall, due: list[PacedDestination]) -> None:
        if not all(self._is_parked(target) for target in due):
            self._evaluate(call, list(call.functions))
        direct = [target for target in due if not target.is_paced]
        if direct:
            self._submit(self._metrics_entry(direct, call, call.values))
        for target in self._metric_targets:
            if target.is_paced:
                target.hold(call)
                if target in due:
                    self._write_waiting(target, phase_of(call.position))

    @without_compile
    def log_record(
        self,
        action: str,
        name: str,
        given: tuple[Any, ...],
        prepare: Callable[..., dict[str, Any]],
    ) -> None:
        """Delivers a record of another kind, or keeps it.

        Args:
            action: the method of the destinations.
            name: the name of the record.
            given: the values that may be functions.
            prepare: checks them, and returns the arguments of the method by name, in its order.
        """
        position, order = position_of(self._state), next(self._orders)
        call = RecordCall(action, name, given, prepare, position, order)
        if not any(map(is_function, given)):
            self._prepare(call)
            if call.is_lost:
                return
        step = int(self._state.timestamp.batch)
        can_wait = RECORD_KINDS[action].can_wait
        targets = [target for target in self._targets if target.takes(action)]
        limited = [target for target in targets if can_wait and target.limits_media]
        direct = [target for target in targets if target not in limited]
        due = [target for target in limited if self._is_due(target, step, [(action, name)])]
        if len(due) < len(limited) and call.arguments is not None:
            call.arguments = snapshot(call.arguments)
        if direct:
            self._submit(self._media_entry(direct, call))
        for target in limited:
            target.hold(call)
            if target in due:
                self._write_waiting(target, phase_of(call.position))
        self.look()

    def to_host(self, value: Any) -> Any:
        """Returns tensors in host memory, those on a device as a `PendingCopy`."""
        return to_host(value, self._copies.start_array)

    def cell_to_host(self, value: Any) -> Any:
        """Returns a cell of a table as `plain_cell`, with tensors on a device as a `PendingCopy`."""
        return to_host(plain_cell(value), lambda tensor: self._copies.start_array(tensor, plain_cell))

    def _deliver_ready(self) -> None:
        outbox = self.outbox
        while outbox:
            entry = outbox[0]
            if isinstance(entry, _Delivery):
                if not entry.is_ready:
                    return
                outbox.popleft()
                self._deliver(entry)
            elif entry[0].is_ready:
                self._deliver_rows()
            else:
                return

    def _deliver_rows(self) -> None:
        """Delivers the rows that come first in line, each where the run stood at its call."""
        outbox, state = self.outbox, self._state
        at = now = position_of(state)
        try:
            while outbox and type(outbox[0]) is tuple and outbox[0][0].is_ready:
                rows, row, plan, host, step, position = outbox.popleft()  # type: ignore[misc]
                if position[0] is not at[0] or position[1:] != at[1:]:
                    restore_position(position, state)
                    at = position
                if plan is not None:
                    host = plan.values_of(host, rows.table[row - rows.first] if rows.table else None)
                if host or plan is None:
                    self._log(host, step)
        finally:
            if at is not now:
                restore_position(now, state)

    @without_compile
    def wait_for_copies(self, *, is_last: bool = False) -> None:
        """Waits for all pending copies until the deadline, and delivers them.

        Args:
            is_last: copies that are not complete at the deadline are dropped.
        """
        if self.is_busy and not self._copies.wait():
            _log.warning(
                "copies from a device were not complete at the deadline; %s.",
                "their values are lost" if is_last else "their values are delivered later",
            )
            if is_last:
                self._copies.abandon()
        self._deliver_ready()

    def write_all(self) -> None:
        """Writes all waiting records."""
        for target in self._targets:
            for phase in list(target.pending):
                self._write_waiting(target, phase)

    def _is_due(self, target: PacedDestination, step: int, names: Iterable[Any]) -> bool:
        if not target.is_paced:
            return True
        try:
            return target.is_due(self._state, step, names)
        except BaseException as error:  # noqa: BLE001  # a destination must not stop training
            self._faults().failed(target.destination, "should_write", error)
            return False

    def _is_parked(self, target: PacedDestination) -> bool:
        return self._faults().is_parked(target.destination)

    def _write_waiting(self, target: PacedDestination, phase: Phase) -> None:
        self._idle = None
        for taken in target.take(phase, self._evaluate):
            if isinstance(taken, RecordCall):
                entry = self._media_entry([target], taken)
            else:
                entry = self._metrics_entry([target], *taken)
            self._submit(entry)

    def _evaluate(self, call: MetricsCall, names: list[str]) -> None:
        """Calls functions of a call; one that raises or returns no number loses only its own value."""
        for name in names:
            function = call.values[name]
            call.functions.discard(name)
            try:
                flat = flatten_metrics({name: function()})
                self._start_copies(flat.values, flat.on_device)
            except Exception as error:  # noqa: BLE001  # a user's function must not stop training
                self._faults().count_bad_value(name, error)
                del call.values[name]
                continue
            for _, text in flat.errors:
                self._faults().count_bad_value(name, RecordError(text))
            for again in flat.functions:
                self._faults().count_bad_value(
                    name, RecordError(f"metric {again!r} must be a number, got a function.")
                )
                del flat.values[again]
            if flat.values:
                call.values[name] = flat.values.get(name, flat.values)
            else:
                del call.values[name]

    def _prepare(self, call: RecordCall) -> None:
        has_function = any(map(is_function, call.given))
        try:
            call.arguments = call.prepare(*(value() if is_function(value) else value for value in call.given))
        except Exception as error:  # noqa: BLE001  # as above
            call.is_lost = True
            name = call.name or call.action
            if has_function:
                self._faults().count_bad_value(name, error)
            elif isinstance(error, RecordError):
                self._faults().refuse(name, error)
            else:
                self._faults().refuse(name, unreadable(call.action, call.name, error))

    def _start_copies(self, values: dict[str, Any], names: list[str]) -> None:
        """Replaces each tensor on a device by a `PendingCopy`."""
        if not names:
            return
        try:
            started = self._copies.start_scalars([values[name] for name in names])
        except BaseException:
            for name in names:
                del values[name]
            raise
        values.update(zip(names, started, strict=True))

    def _metrics_entry(
        self, targets: Sequence[PacedDestination], call: MetricsCall, values: dict[str, Any]
    ) -> _Delivery:
        def finish() -> dict[str, Any] | None:
            found = _numbers(values)
            return {"metrics": found, "step": call.step} if found or not values else None

        pending = pending_in(values) if self._copies.is_busy else []
        return _Delivery(targets, "log_metrics", finish, pending, call.position)

    def _media_entry(self, targets: Sequence[PacedDestination], call: RecordCall) -> _Delivery:
        if call.arguments is None and not (call.is_lost or all(map(self._is_parked, targets))):
            self._prepare(call)
        pending = pending_in(call.arguments) if self._copies.is_busy else []

        def finish() -> dict[str, Any] | None:
            if call.arguments is None or any(copy.is_lost for copy in pending):
                return None
            return resolve(call.arguments) if pending else call.arguments

        if (self.outbox or pending) and call.arguments is not None:
            call.arguments = snapshot(call.arguments)
        return _Delivery(targets, call.action, finish, pending, call.position)

    def _submit(self, entry: _Delivery) -> None:
        """Delivers a record now, or later if it or an earlier one is incomplete."""
        if self.outbox or not entry.is_ready:
            # The next call or event asks whether it has come.
            self.outbox.append(entry)
        else:
            self._deliver(entry)

    def _deliver(self, entry: _Delivery) -> None:
        arguments = entry.finish()
        if arguments is None:
            return
        now = position_of(self._state)
        if all(map(operator.is_, entry.position, now)):
            self._call(entry.targets, entry.action, arguments)
            return
        restore_position(entry.position, self._state)
        try:
            self._call(entry.targets, entry.action, arguments)
        finally:
            restore_position(now, self._state)

    def _call(self, targets: Sequence[PacedDestination], action: str, arguments: Mapping[str, Any]) -> None:
        faults = self._faults()
        options = {name: arguments[name] for name in RECORD_KINDS[action].keywords if name in arguments}
        if options:
            arguments = {name: value for name, value in arguments.items() if name not in options}
        for target in targets:

            def call(_: Destination, target: PacedDestination = target) -> None:
                target.call(action, arguments, options)

            faults.attempt(target.destination, action, call)


def _is_scalar(tensor: Any) -> bool:
    """Returns whether a tensor can be in a row as it is."""
    return tuple(tensor.shape) == () and not tensor.dtype.is_complex and local_shard(tensor) is tensor


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers that have arrived; lost values and functions that were not called are left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PendingCopy | RunningAggregate):
            if not value.is_lost:
                found[name] = value.value
        elif isinstance(value, dict):
            found |= _numbers(value)
        elif not is_function(value):
            found[name] = value
    return found
