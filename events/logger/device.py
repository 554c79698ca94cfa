"""Copies values from a device to the host without waiting for the device.

Training thread only: to query a CUDA event while a graph is being captured breaks it, from any thread.

A call takes a snapshot in the order of the device's stream. Scalars go into a row of device memory, and the
rows that `gather_seconds` have gathered come over in one copy: to queue a copy and an event takes twice as
long as the snapshot itself. An array has a copy of its own. `collect` starts the copies that are due, and
reads those that are complete. Nothing waits, except in `wait`, and where a ring is full and its policy says
so.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import Any, ClassVar, Literal, Protocol

import attrs

from events.errors import RecordError
from events.redaction import error_trace

__all__ = [
    "CopyDevice",
    "DeviceCopies",
    "DeviceCopy",
    "DeviceRing",
    "HostCopies",
    "PendingCopy",
    "PendingRows",
    "RowMemory",
]

_log = logging.getLogger("events")

_POLL_SECONDS = 0.0002


class DeviceCopy(Protocol):
    """A copy in progress."""

    def is_done(self) -> bool:
        """Returns whether it is complete, without waiting; raises the error of a device that failed."""

    def read(self) -> Any:
        """Returns the tensor, or a list of numbers for each row; called once, when it is complete."""


class RowMemory(Protocol):
    """Memory for rows of scalars, on the device and on the host."""

    def layout(self, scalars: Sequence[Any]) -> Any:
        """Returns how rows of such scalars, of the same dtypes and device, are staged and read."""

    def stream(self) -> Any:
        """Returns the current stream, the same object each time; None while a graph is being captured.

        One copy has rows of one stream.
        """

    def stage(self, row: int, layout: Any, scalars: Any) -> bool:
        """Queues the snapshot of scalars into a row; False, and nothing is queued, if they do not fit."""

    def send(self, first: int, layouts: Sequence[Any], stream: Any) -> DeviceCopy:
        """Queues the copy of a row for each layout, from the first on, behind what the stream has."""


class CopyDevice(Protocol):
    """A device that can copy without waiting."""

    def is_capturing(self) -> bool:
        """Returns whether a graph is being captured, so that the device must not be queried."""

    def make_rows(self, count: int, capacity: int) -> RowMemory:
        """Allocates `count` rows of `capacity` scalars each."""

    def copy_array(self, tensor: Any) -> DeviceCopy:
        """Snapshots a tensor and starts its copy; `read` returns a tensor on the host."""


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
        slots: the maximum number of pending calls per device, and of pending arrays.
        scalars_per_slot: how many metrics of a call have room in a slot; a call with more takes several.
        when_full: what to do when all slots are in use: "wait" for one, or "drop" the value and count it.
        wait_seconds: the maximum wait, for a slot and at the end of `fit`, at flush and at close.
        gather_seconds: how long a call's metrics may wait on the device for later ones, to share their copy;
            a quarter of the slots is sent at once. The first call after such a time does not wait. With 0,
            each call has a copy of its own, and costs three times as much.
        open_device: returns the device of a tensor.
        clock: a monotonic clock in seconds.
        sleep: waits for seconds.
    """

    slots: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    scalars_per_slot: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    when_full: Literal["wait", "drop"] = attrs.field(
        default="wait", validator=attrs.validators.in_(("wait", "drop"))
    )
    wait_seconds: float = attrs.field(default=30.0, validator=attrs.validators.ge(0))
    open_device: Callable[[Any], CopyDevice | None] = open_device
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    gather_seconds: float = attrs.field(default=0.05, kw_only=True, validator=attrs.validators.ge(0))


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
    count: ClassVar[int] = 1

    def complete(self, value: Any) -> None:
        """Sets the value."""
        self.value = value if self.convert is None else self.convert(value)
        self.is_ready = True

    def drop(self) -> None:
        """Marks the value as lost."""
        self.is_ready = self.is_lost = True


@attrs.define(eq=False)
class PendingRows:
    """The rows of scalars that come to the host in one copy.

    Attributes:
        layouts: how each is staged and read.
        copies: what gets numbers beside `table`, by the index of the row.
        table: the numbers of each row, once they have arrived; None if they are lost.
        is_ready: whether nothing more is to be waited for.
    """

    layouts: list[Sized] = attrs.field(factory=list)
    copies: dict[int, Sequence[PendingCopy]] = attrs.field(factory=dict)
    table: Sequence[list[Any]] | None = None
    is_ready: bool = False

    @property
    def count(self) -> int:
        """How many scalars there are."""
        return sum(map(len, self.layouts))

    def complete(self, table: Sequence[list[Any]]) -> None:
        """Sets the numbers."""
        self.table, self.is_ready = table, True
        for index, copies in self.copies.items():
            for copy, number in zip(copies, table[index], strict=False):
                copy.complete(number)

    def drop(self) -> None:
        """Marks the numbers as lost."""
        self.is_ready = True
        for copies in self.copies.values():
            for copy in copies:
                copy.drop()


@attrs.define(eq=False)
class DeviceRing:
    """The rows of scalars and the arrays that are on their way from one device, oldest first."""

    _device: CopyDevice
    _policy: DeviceCopies
    _memory: RowMemory | None = None
    # The rows that are staged and not sent: `_first` and the following.
    _staged: PendingRows = attrs.field(factory=PendingRows)
    _first: int = 0
    _stream: Any = None
    _free: int = attrs.field(init=False)
    _send_at: float = -math.inf
    # How many rows one copy has at most: the others have room meanwhile.
    _most: int = attrs.field(init=False)
    _copies: deque[tuple[DeviceCopy, PendingRows | PendingCopy]] = attrs.field(factory=deque)
    _failure: Exception | None = None
    _reported: set[str] = attrs.field(factory=set)
    lost_values: int = 0

    def __attrs_post_init__(self) -> None:
        self._free = self._policy.slots
        self._most = max(1, self._policy.slots // 4) if self._policy.gather_seconds else 1

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._copies or self._staged.layouts)

    def require_no_capture(self) -> None:
        """Raises a `RecordError` while a graph is being captured."""
        if self._device.is_capturing():
            raise RecordError(
                "values on a device must be logged outside of a graph capture, got a call while a CUDA graph "
                "is being captured: it would run once, never on replay. "
                "Log the graph's output tensors after replay()."
            )

    def layout(self, scalars: Sequence[Any]) -> Any:
        """Returns how such scalars are staged; see `RowMemory`."""
        if self._memory is None:
            self._memory = self._device.make_rows(self._policy.slots, self._policy.scalars_per_slot)
        return self._memory.layout(scalars)

    def try_stage(self, layout: Any, scalars: Sequence[Any], now: float) -> PendingRows | None:
        """Snapshots scalars.

        Returns:
            What they are the last row of; None if there is no room, a graph is being captured, or they have
            another layout: then nothing has changed.
        """
        memory = self._memory
        if not self._free or memory is None or (stream := memory.stream()) is None:
            return None
        if stream is not self._stream:
            self._send()
            self._stream = stream
            if not self._free:
                return None
        rows = self._staged
        at = self._first + len(rows.layouts)
        if not memory.stage(at, layout, scalars):
            return None
        self._free -= 1
        rows.layouts.append(layout)
        if now >= self._send_at or len(rows.layouts) >= self._most or at + 1 == self._policy.slots:
            self._send_at = now + self._policy.gather_seconds
            self._send()
        return rows

    def _send(self) -> None:
        """Starts the copy of all staged rows."""
        rows = self._staged
        if not rows.layouts or self._memory is None:
            return
        first, self._staged = self._first, PendingRows()
        self._first = (first + len(rows.layouts)) % self._policy.slots
        try:
            copy = self._memory.send(first, rows.layouts, self._stream)
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._lose([rows])
            self._fail(error)
        else:
            self._copies.append((copy, rows))

    def copy_scalars(self, tensors: Sequence[Any]) -> list[PendingCopy]:
        """Starts the copy of scalars of any kinds, each with a `PendingCopy`; the slow path."""
        pending: list[PendingCopy] = []
        capacity = self._policy.scalars_per_slot
        for first in range(0, len(tensors), capacity):
            group = tensors[first : first + capacity]
            copies = [PendingCopy() for _ in group]

            def start(group: Sequence[Any] = group, copies: Sequence[PendingCopy] = copies) -> None:
                rows = self.try_stage(self.layout(group), group, self._policy.clock())
                if rows is None:
                    self._lose(copies)
                else:
                    rows.copies[len(rows.layouts) - 1] = copies

            self._start(start, copies, [tensor.item for tensor in group])
            pending += copies
        return pending

    def copy_array(self, tensor: Any, convert: Callable[[Any], Any] | None) -> PendingCopy:
        """Starts the copy of a tensor."""
        pending = PendingCopy(convert=convert)
        self._start(
            lambda: self._copies.append((self._device.copy_array(tensor), pending)),
            [pending],
            [lambda: tensor.detach().cpu()],
        )
        return pending

    def _start(
        self,
        start: Callable[[], None],
        pending: Sequence[PendingCopy],
        reads: Sequence[Callable[[], Any]],
    ) -> None:
        """Starts a copy; where that fails, reads each value the ordinary way, which waits for the device."""
        try:
            if self._has_room():
                start()
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
            self._send()
            self.collect()
        if self._failure is None and self._is_full() and policy.when_full == "wait":
            deadline = policy.clock() + policy.wait_seconds
            while self._is_full() and policy.clock() < deadline:
                policy.sleep(_POLL_SECONDS)
                self.collect()
        return self._failure is None and not self._is_full()

    def _is_full(self) -> bool:
        return not self._free or len(self._copies) >= self._policy.slots

    def collect(self, *, is_last: bool = False) -> None:
        """Reads the copies that are complete, and starts the copy of the rows for which it is time.

        Args:
            is_last: starts it in any case.
        """
        if not self.is_busy or self._device.is_capturing():
            return
        try:
            while self._copies and self._copies[0][0].is_done():
                copy, pending = self._copies[0]
                pending.complete(copy.read())
                self._copies.popleft()
                self._free += len(pending.layouts) if isinstance(pending, PendingRows) else 0
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._fail(error)
        if self._staged.layouts and (is_last or self._policy.clock() >= self._send_at):
            self._send_at = self._policy.clock() + self._policy.gather_seconds
            self._send()

    def _fail(self, error: Exception) -> None:
        # An asynchronous CUDA error is permanent: each further query would raise it again.
        self._failure = error
        _log.error(
            "the device failed; its pending values are lost, training continues.\n%s", error_trace(error)
        )
        self.abandon()
        self._free = 0

    def abandon(self) -> None:
        """Drops what is pending. Its memory is not used again: a copy may still write to it."""
        self._lose([one for _, one in self._copies if not one.is_ready])
        self._lose([self._staged])
        self._copies.clear()
        self._staged, self._memory = PendingRows(), None
        self._first, self._free = 0, self._policy.slots

    def _lose(self, pending: Sequence[PendingRows | PendingCopy]) -> None:
        for one in pending:
            self.lost_values += one.count
            one.drop()


class HostCopies:
    """The copies from all devices.

    A forked child drops its parent's pending copies: it must not touch the parent's devices.
    """

    def __init__(self, policy: DeviceCopies) -> None:
        self._policy = policy
        # By device; None for one that cannot copy without waiting.
        self._by_device: dict[Any, DeviceRing | None] = {}
        self._rings: list[DeviceRing] = []
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
        by_ring: dict[int, tuple[DeviceRing, list[int]]] = {}
        found: list[Any] = [None] * len(tensors)
        for index, tensor in enumerate(tensors):
            ring = self.ring_of(tensor)
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
        ring = self.ring_of(tensor)
        if ring is None:
            host = tensor.detach().cpu()
            return host if convert is None else convert(host)
        ring.require_no_capture()
        return ring.copy_array(tensor, convert)

    def ring_of(self, tensor: Any) -> DeviceRing | None:
        """Returns the ring of a tensor's device; None for one that cannot copy without waiting."""
        key = tensor.device
        if key not in self._by_device:
            device = self._policy.open_device(tensor)
            ring = self._by_device[key] = None if device is None else DeviceRing(device, self._policy)
            if ring is not None:
                self._rings.append(ring)
        return self._by_device[key]

    def collect(self, *, is_last: bool = False) -> None:
        """Reads the copies that are complete, without waiting; see `DeviceRing.collect`."""
        if os.getpid() != self._owner_pid:
            self.abandon()
            self._by_device, self._rings, self._owner_pid = {}, [], os.getpid()
        for ring in self._rings:
            ring.collect(is_last=is_last)

    def wait(self) -> bool:
        """Waits for all copies until the deadline; returns whether they are complete."""
        policy = self._policy
        deadline = policy.clock() + policy.wait_seconds
        self.collect(is_last=True)
        while self.is_busy:
            if policy.clock() >= deadline:
                return False
            policy.sleep(_POLL_SECONDS)
            self.collect(is_last=True)
        return True

    def abandon(self) -> None:
        """Drops all pending copies."""
        for ring in self._rings:
            ring.abandon()
