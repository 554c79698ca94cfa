"""From a call of the logger to the destinations: who is due, what waits, and what is still on its way from a device.

Everything runs in the training thread. Records arrive in the order in which they were logged, and the state says, while
they do, where the run stood when that was.
"""

import functools
import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import attrs

from events.errors import RecordError
from events.state import Phase, State

from .destination import Destination, clock_of
from .device import DeviceCopies, HostCopies, Landing
from .faults import Faults
from .pacing import (
    Accumulation,
    MediaCall,
    MetricsCall,
    Moment,
    Sink,
    Waiting,
    are_flat,
    landings_in,
    moment_of,
    own,
    phase_of,
    put_moment,
    resolve,
)
from .values import flatten_metrics, is_function, to_host

__all__ = ["Delivery", "eager"]

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that is run as it stands, with all that it calls, where a compiled region calls it.

    `torch.compiler.disable` would do so at once, and import the compiler, which takes seconds, for programs without one.
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


@attrs.define(eq=False)
class _Entry:
    """A record with its destinations, which goes out once all of it has landed."""

    sinks: Sequence[Sink]
    action: str
    finish: Callable[[], tuple[Any, ...] | None]
    on_its_way: Sequence[Landing | Accumulation]
    moment: Moment

    @property
    def is_ready(self) -> bool:
        return all(landing.is_ready for landing in self.on_its_way)


@attrs.define(eq=False)
class _Quiet:
    """A time in which no destination is due: until when by which clock, in which phase, and where calls wait.

    The last call, and its names, are kept here: the next one most often takes its place, and it never gets further.
    """

    phase: Phase
    clock: Callable[[], float]
    until: float
    waiting: list[Waiting]
    names: tuple[str, ...] = ()
    last: tuple[dict[str, Any], int, Moment, int] | None = None


class Delivery:
    """Brings records to destinations.

    Args:
        state: the run.
        destinations: where to.
        faults: returns who keeps what the destinations do wrong.
        policy: how values come from devices.
    """

    def __init__(
        self,
        state: State,
        destinations: Iterable[Destination],
        faults: Callable[[], Faults],
        policy: DeviceCopies,
    ) -> None:
        self._state = state
        self._sinks = tuple(Sink(destination) for destination in destinations)
        self._metric_sinks = tuple(sink for sink in self._sinks if sink.takes("log_metrics"))
        self._faults = faults
        self._copies = HostCopies(policy)
        self._outbox: deque[_Entry] = deque()
        self._orders = itertools.count()
        self.is_paced = any(sink.is_paced for sink in self._sinks)
        self._quiet: _Quiet | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way from a device."""
        return bool(self._outbox) or self._copies.is_busy

    @property
    def lost_values(self) -> int:
        """How many values never came from their device."""
        return self._copies.lost_values

    def put_off(self, metrics: Any, step: int) -> bool:
        """Takes metrics that nobody writes now, and says whether that is so; functions are not called, nor looked at.

        The short way for the most frequent call of a logger with rates: numbers and functions, while no destination can be
        due for a while.
        """
        quiet, state = self._quiet, self._state
        if quiet is None or quiet.phase is not state.phase or quiet.clock() >= quiet.until:
            return False
        if type(metrics) is not dict or not are_flat(map(type, metrics.values())):
            return False
        names = tuple(metrics)
        if names != quiet.names:
            try:
                "".join(names)
            except TypeError:
                return False
            self._keep_last()
            quiet.names = names
        quiet.last = (metrics.copy(), step, moment_of(state), next(self._orders))
        return True

    def _keep_last(self) -> None:
        """Has the last call that was put off wait with the others."""
        quiet = self._quiet
        if quiet is None or quiet.last is None:
            return
        values, step, moment, order = quiet.last
        call = MetricsCall(values, None, step, moment, order)
        for waiting in quiet.waiting:
            waiting.add(quiet.names, call)
        quiet.last = None

    def _be_quiet(self) -> None:
        """Notes until when no destination is due, where that is a matter of time alone."""
        state, sinks = self._state, self._metric_sinks
        until = [sink.quiet_until(state) for sink in sinks]
        clocks = {id(clock_of(sink.destination)) for sink in sinks}
        known = [time for time in until if time is not None]
        if not sinks or len(known) < len(sinks) or len(clocks) > 1:
            self._quiet = None
            return
        waiting = [sink.waiting_in(state.phase) for sink in sinks]
        self._quiet = _Quiet(state.phase, clock_of(sinks[0].destination), min(known), waiting)

    @eager
    def log_metrics(self, metrics: Any, prefix: str, step: int) -> list[str]:
        """Takes metrics; returns a sentence for each one that cannot be taken."""
        self._keep_last()
        due = [sink for sink in self._metric_sinks if self._is_due(sink, step, metrics.keys())]
        if not due:
            self._be_quiet()
        flat = flatten_metrics(metrics, prefix)
        try:
            self._start_copies(flat.values, flat.on_device)
        except RecordError as error:
            flat.errors.append(str(error))
        if not flat.values and flat.errors:
            return flat.errors
        if flat.on_device or flat.functions or self.is_paced or self.is_busy:
            call = MetricsCall(
                flat.values, set(flat.functions), step, moment_of(self._state), next(self._orders)
            )
            refusal = self._distribute(call, due)
        else:
            refusal = self._call(due, "log_metrics", (flat.values, step))
        return flat.errors if refusal is None else [*flat.errors, str(refusal)]

    def _distribute(self, call: MetricsCall, due: list[Sink]) -> RecordError | None:
        for sink in self._metric_sinks:
            if sink not in due:
                sink.wait(call)
        if any(not self._faults().is_parked(sink.destination) for sink in due):
            self._evaluate(call, list(call.functions))
        direct = [sink for sink in due if not sink.holds(phase_of(call.moment))]
        refusal = self._submit(self._metrics_entry(direct, call, call.values)) if direct else None
        for sink in due:
            if sink not in direct:
                sink.wait(call)
                refusal = self._write_waiting(sink, phase_of(call.moment)) or refusal
        return refusal

    @eager
    def log_record(
        self,
        action: str,
        name: str,
        given: tuple[Any, ...],
        prepare: Callable[..., tuple[Any, ...]],
        *,
        may_wait: bool,
    ) -> None:
        """Takes a record of another kind.

        Args:
            action: the method of the destinations.
            name: the name of the record.
            given: what may be functions.
            prepare: makes the arguments of the method from them; raises what is wrong with them.
            may_wait: whether a rate may hold it back.

        Raises:
            RecordError: it cannot be taken.
        """
        call = MediaCall(action, name, given, prepare, moment_of(self._state), next(self._orders))
        if not any(map(is_function, given)):
            call.arguments = prepare(*given)
        step = int(self._state.timestamp.batch)
        sinks = [sink for sink in self._sinks if sink.takes(action)]
        due = [
            sink
            for sink in sinks
            if not (may_wait and sink.limits_media) or self._is_due(sink, step, [(action, name)])
        ]
        if len(due) < len(sinks) and call.arguments is not None:
            call.arguments = own(call.arguments)
        for sink in sinks:
            if sink not in due:
                sink.wait(call)
        for sink in due:
            if sink.limits_media:
                sink.forget(call)
                self._write_waiting(sink, phase_of(call.moment))
        if call.arguments is None and any(not self._faults().is_parked(sink.destination) for sink in due):
            self._prepare(call)
        refusal = self._submit(self._media_entry(due, call)) if due else None
        if refusal is not None:
            raise refusal

    def to_host(self, value: Any) -> Any:
        """Returns tensors in host memory, those on a device as a `Landing`."""
        return to_host(value, self._copies.start_array)

    @eager
    def poll(self) -> None:
        """Delivers what has landed, without waiting."""
        self._copies.collect()
        while self._outbox and self._outbox[0].is_ready:
            entry = self._outbox.popleft()
            refusal = self._deliver(entry)
            if refusal is not None:
                # Whoever logged it is long gone.
                self._faults().note_value(entry.action, refusal)

    @eager
    def land(self, *, is_last: bool = False) -> None:
        """Waits until everything has come from its device, and delivers it; until the deadline.

        Args:
            is_last: there is no later: what has not come is given up.
        """
        if self.is_busy and not self._copies.wait():
            _log.warning(
                "values were still on their way from a device at the deadline; %s.",
                "they are lost" if is_last else "they are delivered when they come",
            )
            if is_last:
                self._copies.abandon()
        self.poll()

    def write_all(self) -> None:
        """Writes everything that waits for a destination to be due."""
        for sink in self._sinks:
            for phase in sink.waiting_phases:
                self._write_waiting(sink, phase)

    def _is_due(self, sink: Sink, step: int, names: Iterable[Any]) -> bool:
        if not sink.is_paced:
            return True
        try:
            return sink.is_due(self._state, step, names)
        except BaseException as error:  # noqa: BLE001  # a destination must not stop training
            self._faults().failed(sink.destination, "should_write", error)
            return False

    def _write_waiting(self, sink: Sink, phase: Any) -> RecordError | None:
        self._keep_last()
        refusal, self._quiet = None, None
        for taken in sink.take(phase, self._evaluate):
            if isinstance(taken, MediaCall):
                if taken.arguments is None:
                    self._prepare(taken)
                entry = self._media_entry([sink], taken)
            else:
                entry = self._metrics_entry([sink], *taken)
            refusal = self._submit(entry) or refusal
        return refusal

    def _evaluate(self, call: MetricsCall, names: list[str]) -> None:
        """Calls functions of a call; one that raises, or returns no number, costs its own name."""
        for name in names:
            function = call.values[name]
            call.functions.discard(name)
            try:
                flat = flatten_metrics({name: function()})
                self._start_copies(flat.values, flat.on_device)
            except Exception as error:  # noqa: BLE001  # a user's function must not stop training
                self._faults().note_value(name, error)
                del call.values[name]
                continue
            for text in flat.errors:
                self._faults().note_value(name, RecordError(text))
            for again in flat.functions:
                self._faults().note_value(
                    name, RecordError(f"metric {again!r} must be a number, got a function.")
                )
                del flat.values[again]
            if flat.values:
                call.values[name] = flat.values.get(name, flat.values)
            else:
                del call.values[name]

    def _prepare(self, call: MediaCall) -> None:
        try:
            call.arguments = call.prepare(*(value() if is_function(value) else value for value in call.given))
        except Exception as error:  # noqa: BLE001  # as above
            self._faults().note_value(call.name or call.action, error)
            call.is_lost = True

    def _start_copies(self, values: dict[str, Any], names: list[str]) -> None:
        """Puts a `Landing` in the place of each tensor on a device."""
        if not names:
            return
        try:
            started = self._copies.start_scalars([values[name] for name in names])
        except BaseException:
            for name in names:
                del values[name]
            raise
        values.update(zip(names, started, strict=True))

    def _metrics_entry(self, sinks: Sequence[Sink], call: MetricsCall, values: dict[str, Any]) -> _Entry:
        def finish() -> tuple[Any, ...] | None:
            found = _numbers(values)
            return (found, call.step) if found or not values else None

        on_its_way = list(landings_in(values)) if self._copies.is_busy else []
        return _Entry(sinks, "log_metrics", finish, on_its_way, call.moment)

    def _media_entry(self, sinks: Sequence[Sink], call: MediaCall) -> _Entry:
        landings = list(landings_in(call.arguments)) if self._copies.is_busy else []

        def finish() -> tuple[Any, ...] | None:
            if call.arguments is None or any(landing.is_lost for landing in landings):
                return None
            return resolve(call.arguments) if landings else call.arguments

        if (self._outbox or landings) and call.arguments is not None:
            call.arguments = own(call.arguments)
        return _Entry(sinks, call.action, finish, landings, call.moment)

    def _submit(self, entry: _Entry) -> RecordError | None:
        """Delivers a record now, or, where something before it or in it is still on its way, later."""
        if self._outbox or not entry.is_ready:
            self._outbox.append(entry)
            self.poll()
            return None
        return self._deliver(entry)

    def _deliver(self, entry: _Entry) -> RecordError | None:
        arguments = entry.finish()
        if arguments is None:
            return None
        now = moment_of(self._state)
        if entry.moment == now:
            return self._call(entry.sinks, entry.action, arguments)
        put_moment(entry.moment, self._state)
        try:
            return self._call(entry.sinks, entry.action, arguments)
        finally:
            put_moment(now, self._state)

    def _call(self, sinks: Sequence[Sink], action: str, arguments: tuple[Any, ...]) -> RecordError | None:
        def call(destination: Destination) -> None:
            # By position, as Composer calls it: a subclass may have named its arguments as it liked.
            getattr(destination, action)(*arguments)

        faults = self._faults()
        refusals = [faults.attempt(sink.destination, action, call) for sink in sinks]
        return next((refusal for refusal in refusals if refusal is not None), None)


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Returns what has landed; what was lost, or is a function that nobody called, is left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Landing | Accumulation):
            if not value.is_lost:
                found[name] = value.value
        elif isinstance(value, dict):
            found |= _numbers(value)
        elif not is_function(value):
            found[name] = value
    return found
