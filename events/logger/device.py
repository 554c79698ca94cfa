"""Copies values from a device to the host without waiting for the device.

All in the training thread, and no call from any other: a query of a CUDA event while a graph is being captured breaks the
capture, whichever thread it comes from.

A call takes a snapshot in the order of the device's stream, starts a copy, and gets a `Landing` for each value. `collect`
looks which copies have landed; nothing waits, except where a ring is full and its policy says so, and in `wait`.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import attrs

from events.errors import RecordError

__all__ = ["Device", "DeviceCopies", "Flight", "HostCopies", "Landing", "Slot"]

_log = logging.getLogger("events")

_POLL_SECONDS = 0.0002


class Flight(Protocol):
    """A copy on its way."""

    def is_done(self) -> bool:
        """Says whether it has landed, without waiting; raises what the device has failed with."""

    def read(self) -> list[Any]:
        """Returns what has landed; only asked once it has."""


class Slot(Flight, Protocol):
    """Memory for the scalars of a call, on the device and on the host; used again once its copy was read."""

    def start(self, tensors: Sequence[Any]) -> None:
        """Snapshots scalars and starts their copy."""


class Device(Protocol):
    """What a device can do for us."""

    def is_capturing(self) -> bool:
        """Says whether a graph is being captured, so that nothing may be asked of the device."""

    def make_slots(self, count: int, capacity: int) -> Sequence[Slot]:
        """Allocates slots, of so many scalars each."""

    def copy_array(self, tensor: Any) -> Flight:
        """Snapshots a tensor and starts its copy; it lands as a list of one tensor on the host."""


def open_device(tensor: Any) -> Device | None:
    """Returns the device that a tensor is on, or None for one that cannot be copied from without waiting."""
    if not getattr(tensor, "is_cuda", False):
        return None
    from .cuda import CudaDevice

    return CudaDevice(tensor.device)


@attrs.frozen
class DeviceCopies:
    """How values come from a device to the host.

    Args:
        slots: how many copies may be on their way from one device.
        scalars_per_slot: how many metrics a copy holds; a call with more takes several slots.
        when_full: what happens to a value when all slots are on their way: "wait" for one to land, or "drop" the value,
            which is counted.
        wait_seconds: how long is waited at most, for a slot and at the end of `fit`, at flush and at close.
        open_device: what makes a device for a tensor.
        clock: a clock in seconds that never goes back.
        sleep: waits for seconds.
    """

    slots: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    scalars_per_slot: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    when_full: Literal["wait", "drop"] = attrs.field(
        default="wait", validator=attrs.validators.in_(("wait", "drop"))
    )
    wait_seconds: float = attrs.field(default=30.0, validator=attrs.validators.ge(0))
    open_device: Callable[[Any], Device | None] = open_device
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Landing:
    """A value on its way; `is_lost` where it will never come."""

    __slots__ = ("is_lost", "is_ready", "value")

    def __init__(self) -> None:
        self.is_ready = False
        self.is_lost = False
        self.value: Any = None

    def land(self, value: Any) -> None:
        """Takes the value."""
        self.value, self.is_ready = value, True

    def lose(self) -> None:
        """Gives the value up."""
        self.is_ready = self.is_lost = True


class _Ring:
    """The copies that are on their way from one device, oldest first."""

    def __init__(self, device: Device, policy: DeviceCopies) -> None:
        self._device = device
        self._policy = policy
        self._free: deque[Slot] | None = None
        self._flights: deque[tuple[Flight, list[Landing], Slot | None]] = deque()
        self._failure: Exception | None = None
        self._reported: set[str] = set()
        self.lost_values = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._flights)

    def require_no_capture(self) -> None:
        if self._device.is_capturing():
            raise RecordError(
                "values on a device must be logged outside of a graph capture, got a call while a CUDA graph is being "
                "captured: it would run once, and never on replay. Log the graph's output tensors after replay()."
            )

    def copy_scalars(self, tensors: Sequence[Any]) -> list[Landing]:
        landings: list[Landing] = []
        capacity = self._policy.scalars_per_slot
        for first in range(0, len(tensors), capacity):
            landings += self._copy_slot(tensors[first : first + capacity])
        return landings

    def _copy_slot(self, tensors: Sequence[Any]) -> list[Landing]:
        landings = [Landing() for _ in tensors]
        slot = None
        try:
            if self._has_room():
                slot = self._slots().popleft()
                slot.start(tensors)
                self._flights.append((slot, landings, slot))
                return landings
        except Exception as error:  # noqa: BLE001  # no memory, no kernel for a dtype: it must not stop training
            self._report(error)
            if slot is not None:
                # Behind the others: what of its copy was queued has landed before its turn comes again.
                self._slots().append(slot)
            self._read_waiting(landings, [tensor.item for tensor in tensors])
            return landings
        self._lose(landings)
        return landings

    def _read_waiting(self, landings: list[Landing], reads: Sequence[Callable[[], Any]]) -> None:
        """Reads in the ordinary way, which waits for the device, what could not be copied otherwise."""
        for landing, read in zip(landings, reads, strict=True):
            try:
                landing.land(read())
            except Exception as error:  # noqa: BLE001  # as in _copy_slot
                self._report(error)
                self._lose([landing])

    def copy_array(self, tensor: Any) -> Landing:
        landing = Landing()
        try:
            if self._has_room():
                self._flights.append((self._device.copy_array(tensor), [landing], None))
                return landing
        except Exception as error:  # noqa: BLE001  # as in _copy_slot
            self._report(error)
            self._read_waiting([landing], [lambda: tensor.detach().cpu()])
            return landing
        self._lose([landing])
        return landing

    def _slots(self) -> deque[Slot]:
        if self._free is None:
            self._free = deque(self._device.make_slots(self._policy.slots, self._policy.scalars_per_slot))
        return self._free

    def _report(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind not in self._reported:
            self._reported.add(kind)
            _log.error(
                "a value could not be copied from its device without waiting for it; training goes on.",
                exc_info=error,
            )

    def _has_room(self) -> bool:
        """Waits for room, where the policy says so."""
        policy = self._policy
        self.collect()
        if self._failure is None and self._is_full() and policy.when_full == "wait":
            deadline = policy.clock() + policy.wait_seconds
            while self._is_full() and policy.clock() < deadline:
                policy.sleep(_POLL_SECONDS)
                self.collect()
        return self._failure is None and not self._is_full()

    def _is_full(self) -> bool:
        return len(self._flights) >= self._policy.slots or (self._free is not None and not self._free)

    def collect(self) -> None:
        """Takes what has landed; a slot is used again only after that, so that no copy runs into another."""
        if not self._flights or self._device.is_capturing():
            return
        try:
            while self._flights and self._flights[0][0].is_done():
                flight, landings, slot = self._flights[0]
                for landing, value in zip(landings, flight.read(), strict=True):
                    landing.land(value)
                self._flights.popleft()
                if slot is not None and self._free is not None:
                    self._free.append(slot)
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # An asynchronous error of CUDA stays: asking again would raise it again, for ever.
        self._failure = error
        _log.error(
            "the device failed; what was on its way from it is lost, training goes on.", exc_info=error
        )
        self.abandon()

    def abandon(self) -> None:
        """Gives up what is on its way. Its slots are not used again: a copy may still run into them."""
        for _, landings, _ in self._flights:
            self._lose([landing for landing in landings if not landing.is_ready])
        self._flights.clear()

    def _lose(self, landings: list[Landing]) -> None:
        self.lost_values += len(landings)
        for landing in landings:
            landing.lose()


class HostCopies:
    """The copies from all devices.

    A forked child forgets what was on its way: it must not touch the devices of its parent.
    """

    def __init__(self, policy: DeviceCopies) -> None:
        self._policy = policy
        self._rings: dict[Any, _Ring | None] = {}
        self._owner_pid = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way."""
        return any(ring is not None and ring.is_busy for ring in self._rings.values())

    @property
    def lost_values(self) -> int:
        """How many values were dropped, because a ring was full, a device failed, or a deadline passed."""
        return sum(ring.lost_values for ring in self._rings.values() if ring is not None)

    def start_scalars(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns a `Landing` for each scalar; its number at once where its device cannot do better.

        Raises:
            RecordError: a graph is being captured.
        """
        by_ring: dict[int, tuple[_Ring, list[int]]] = {}
        found: list[Any] = [None] * len(tensors)
        for index, tensor in enumerate(tensors):
            ring = self._ring_of(tensor)
            if ring is None:
                found[index] = tensor.item()
            else:
                by_ring.setdefault(id(ring), (ring, []))[1].append(index)
        for ring, _ in by_ring.values():
            ring.require_no_capture()
        for ring, indices in by_ring.values():
            landings = ring.copy_scalars([tensors[index] for index in indices])
            for index, landing in zip(indices, landings, strict=True):
                found[index] = landing
        return found

    def start_array(self, tensor: Any) -> Any:
        """Returns a `Landing` for a tensor, or the tensor on the host where its device cannot do better.

        Raises:
            RecordError: a graph is being captured.
        """
        ring = self._ring_of(tensor)
        if ring is None:
            return tensor.detach().cpu()
        ring.require_no_capture()
        return ring.copy_array(tensor)

    def _ring_of(self, tensor: Any) -> _Ring | None:
        key = tensor.device
        if key not in self._rings:
            device = self._policy.open_device(tensor)
            self._rings[key] = None if device is None else _Ring(device, self._policy)
        return self._rings[key]

    def collect(self) -> None:
        """Takes what has landed, without waiting."""
        if os.getpid() != self._owner_pid:
            self._forget()
        for ring in self._rings.values():
            if ring is not None:
                ring.collect()

    def wait(self) -> bool:
        """Waits until all has landed, or the deadline; returns whether it has."""
        policy = self._policy
        deadline = policy.clock() + policy.wait_seconds
        self.collect()
        while self.is_busy:
            if policy.clock() >= deadline:
                return False
            policy.sleep(_POLL_SECONDS)
            self.collect()
        return True

    def abandon(self) -> None:
        """Gives up what is on its way."""
        for ring in self._rings.values():
            if ring is not None:
                ring.abandon()

    def _forget(self) -> None:
        self.abandon()
        self._rings = {}
        self._owner_pid = os.getpid()
