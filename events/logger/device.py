"""Copies values from a device to the host without waiting for the device.

Training thread only: to query a CUDA event while a graph is being captured breaks it, from any thread.

A call takes a snapshot in the order of the device's stream, starts a copy, and returns a `PendingCopy` for
each value. `collect` reads the copies that are complete. Nothing waits, except in `wait`, and where a ring is
full and its policy says so.
"""

import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import attrs

from events.errors import RecordError
from events.redaction import error_trace

__all__ = ["CopyDevice", "DeviceCopies", "DeviceCopy", "HostCopies", "PendingCopy", "Slot"]

_log = logging.getLogger("events")

_POLL_SECONDS = 0.0002


class DeviceCopy(Protocol):
    """A copy in progress."""

    def is_done(self) -> bool:
        """Returns whether it is complete, without waiting; raises the error of a device that failed."""

    def read(self) -> list[Any]:
        """Returns the values; only called once it is complete."""


class Slot(DeviceCopy, Protocol):
    """Memory for the scalars of a call, on the device and on the host; reused once its copy was read."""

    def start(self, tensors: Sequence[Any]) -> None:
        """Snapshots scalars and starts their copy."""


class CopyDevice(Protocol):
    """A device that can copy without waiting."""

    def is_capturing(self) -> bool:
        """Returns whether a graph is being captured, so that the device must not be queried."""

    def make_slots(self, count: int, capacity: int) -> Sequence[Slot]:
        """Allocates `count` slots of `capacity` scalars each."""

    def copy_array(self, tensor: Any) -> DeviceCopy:
        """Snapshots a tensor and starts its copy; `read` returns a list of one tensor on the host."""


def open_device(tensor: Any) -> CopyDevice | None:
    """Returns the device of a tensor, or None if it cannot be copied from without waiting."""
    if not getattr(tensor, "is_cuda", False):
        return None
    from .cuda import CudaDevice

    return CudaDevice(tensor.device)


@attrs.frozen
class DeviceCopies:
    """How values are copied from a device to the host.

    ```python
    Trainer(..., device_copies=DeviceCopies(slots=256, when_full="drop"))
    ```

    Args:
        slots: the maximum number of pending copies per device.
        scalars_per_slot: how many metrics a copy holds; a call with more takes several slots.
        when_full: what to do when all slots are in use: "wait" for one, or "drop" the value and count it.
        wait_seconds: the maximum wait, for a slot and at the end of `fit`, at flush and at close.
        open_device: returns the device of a tensor.
        clock: a monotonic clock in seconds.
        sleep: waits for seconds.
    """

    slots: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    scalars_per_slot: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    when_full: Literal["wait", "drop"] = attrs.field(
        default="wait", validator=attrs.validators.in_(("wait", "drop"))
    )
    wait_seconds: float = attrs.field(default=30.0, validator=attrs.validators.ge(0))
    open_device: Callable[[Any], CopyDevice | None] = open_device
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@attrs.define(eq=False)
class PendingCopy:
    """A value that is being copied to the host; `is_lost` if it never arrives.

    Attributes:
        is_ready: whether nothing more is to be waited for.
        is_lost: whether it never arrives.
        value: the value, once it has arrived.
        convert: what is made of the value when it arrives; must not raise.
    """

    is_ready: bool = False
    is_lost: bool = False
    value: Any = None
    convert: Callable[[Any], Any] | None = None

    def complete(self, value: Any) -> None:
        """Sets the value."""
        self.value = value if self.convert is None else self.convert(value)
        self.is_ready = True

    def drop(self) -> None:
        """Marks the value as lost."""
        self.is_ready = self.is_lost = True


@attrs.define(eq=False)
class _Ring:
    """The pending copies from one device, oldest first."""

    _device: CopyDevice
    _policy: DeviceCopies
    _free: deque[Slot] | None = None
    _copies: deque[tuple[DeviceCopy, list[PendingCopy], Slot | None]] = attrs.field(factory=deque)
    _failure: Exception | None = None
    _reported: set[str] = attrs.field(factory=set)
    lost_values: int = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._copies)

    def require_no_capture(self) -> None:
        if self._device.is_capturing():
            raise RecordError(
                "values on a device must be logged outside of a graph capture, got a call while a CUDA graph "
                "is being captured: it would run once, never on replay. "
                "Log the graph's output tensors after replay()."
            )

    def copy_scalars(self, tensors: Sequence[Any]) -> list[PendingCopy]:
        pending: list[PendingCopy] = []
        capacity = self._policy.scalars_per_slot
        for first in range(0, len(tensors), capacity):
            group = tensors[first : first + capacity]
            start = functools.partial(self._start_slot, group)
            pending += self._copy(start, [tensor.item for tensor in group])
        return pending

    def copy_array(self, tensor: Any, convert: Callable[[Any], Any] | None) -> PendingCopy:
        [pending] = self._copy(
            lambda: (self._device.copy_array(tensor), None), [lambda: tensor.detach().cpu()], convert
        )
        return pending

    def _start_slot(self, tensors: Sequence[Any]) -> tuple[Slot, Slot]:
        slot = self._slots().popleft()
        try:
            slot.start(tensors)
        except BaseException:
            # Last in line: what was queued of its copy is complete before it is reused.
            self._slots().append(slot)
            raise
        return slot, slot

    def _copy(
        self,
        start: Callable[[], tuple[DeviceCopy, Slot | None]],
        reads: Sequence[Callable[[], Any]],
        convert: Callable[[Any], Any] | None = None,
    ) -> list[PendingCopy]:
        """Starts a copy; where that fails, reads each value the ordinary way, which waits for the device."""
        pending = [PendingCopy(convert=convert) for _ in reads]
        try:
            if self._has_room():
                copy, slot = start()
                self._copies.append((copy, pending, slot))
            else:
                self._lose(pending)
        except Exception as error:  # noqa: BLE001  # no memory, no kernel for a dtype: must not stop training
            self._report(error)
            for one, read in zip(pending, reads, strict=True):
                try:
                    one.complete(read())
                except Exception as failure:  # noqa: BLE001  # as above
                    self._report(failure)
                    self._lose([one])
        return pending

    def _slots(self) -> deque[Slot]:
        if self._free is None:
            self._free = deque(self._device.make_slots(self._policy.slots, self._policy.scalars_per_slot))
        return self._free

    def _report(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind not in self._reported:
            self._reported.add(kind)
            _log.error(
                "could not copy a value from its device without waiting; training continues.\n%s",
                error_trace(error),
            )

    def _has_room(self) -> bool:
        """Returns whether there is a free slot; waits for one if the policy says so."""
        policy = self._policy
        if self._is_full():
            self.collect()
        if self._failure is None and self._is_full() and policy.when_full == "wait":
            deadline = policy.clock() + policy.wait_seconds
            while self._is_full() and policy.clock() < deadline:
                policy.sleep(_POLL_SECONDS)
                self.collect()
        return self._failure is None and not self._is_full()

    def _is_full(self) -> bool:
        return len(self._copies) >= self._policy.slots or (self._free is not None and not self._free)

    def collect(self) -> None:
        """Reads the copies that are complete; a slot is reused only after that."""
        if not self._copies or self._device.is_capturing():
            return
        try:
            while self._copies and self._copies[0][0].is_done():
                copy, pending, slot = self._copies[0]
                for target, value in zip(pending, copy.read(), strict=True):
                    target.complete(value)
                self._copies.popleft()
                if slot is not None and self._free is not None:
                    self._free.append(slot)
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # An asynchronous CUDA error is permanent: each further query would raise it again.
        self._failure = error
        _log.error(
            "the device failed; its pending values are lost, training continues.\n%s", error_trace(error)
        )
        self.abandon()

    def abandon(self) -> None:
        """Drops all pending copies. Their slots are not reused: a copy may still write to them."""
        for _, pending, _ in self._copies:
            self._lose([copy for copy in pending if not copy.is_ready])
        self._copies.clear()

    def _lose(self, pending: list[PendingCopy]) -> None:
        self.lost_values += len(pending)
        for copy in pending:
            copy.drop()


class HostCopies:
    """The copies from all devices.

    A forked child drops its parent's pending copies: it must not touch the parent's devices.
    """

    def __init__(self, policy: DeviceCopies) -> None:
        self._policy = policy
        # By device; None for one that cannot copy without waiting.
        self._by_device: dict[Any, _Ring | None] = {}
        self._rings: list[_Ring] = []
        self._owner_pid = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether a copy is pending."""
        return any(ring.is_busy for ring in self._rings)

    @property
    def lost_values(self) -> int:
        """How many values were lost: a ring was full, a device failed, or a deadline passed."""
        return sum(ring.lost_values for ring in self._rings)

    def start_scalars(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns a `PendingCopy` for each scalar, or its number if its device cannot copy without waiting.

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
            pending = ring.copy_scalars([tensors[index] for index in indices])
            for index, copy in zip(indices, pending, strict=True):
                found[index] = copy
        return found

    def start_array(self, tensor: Any, convert: Callable[[Any], Any] | None = None) -> Any:
        """Returns a `PendingCopy` for a tensor, or the tensor on the host if the device cannot do better.

        Args:
            tensor: the tensor to copy.
            convert: what is made of the tensor on the host; must not raise. Default: nothing.

        Raises:
            RecordError: a graph is being captured.
        """
        ring = self._ring_of(tensor)
        if ring is None:
            host = tensor.detach().cpu()
            return host if convert is None else convert(host)
        ring.require_no_capture()
        return ring.copy_array(tensor, convert)

    def _ring_of(self, tensor: Any) -> _Ring | None:
        key = tensor.device
        if key not in self._by_device:
            device = self._policy.open_device(tensor)
            ring = self._by_device[key] = None if device is None else _Ring(device, self._policy)
            if ring is not None:
                self._rings.append(ring)
        return self._by_device[key]

    def collect(self) -> None:
        """Reads the copies that are complete, without waiting."""
        if os.getpid() != self._owner_pid:
            self.abandon()
            self._by_device, self._rings, self._owner_pid = {}, [], os.getpid()
        for ring in self._rings:
            ring.collect()

    def wait(self) -> bool:
        """Waits for all copies until the deadline; returns whether they are complete."""
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
        """Drops all pending copies."""
        for ring in self._rings:
            ring.abandon()
