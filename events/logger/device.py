"""Copies values from a device to the host without waiting for the device.

Training thread only: to query a CUDA event while a graph is being captured breaks it, from any thread.

A call takes a snapshot in the order of the device's stream. Scalars go into a row of device memory, and
`send` starts one copy for all rows that were gathered meanwhile: to queue a copy and an event takes twice as
long as the snapshot itself. Each array is copied separately. `collect` reads completed copies. Nothing
waits, except in `wait`, and when a ring is full and its policy is "wait".
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from events.errors import RecordError
from events.redaction import error_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .cuda import CudaDevice, DeviceCopy, RowLayout, ScalarRows

__all__ = [
    "SCALARS_PER_SLOT",
    "DeviceCopies",
    "DeviceRing",
    "HostCopies",
    "PendingCopy",
    "PendingRows",
]

_log = logging.getLogger("events")

_POLL_SECONDS = 0.0002
SCALARS_PER_SLOT = 64


def open_device(tensor: Any) -> CudaDevice | None:
    """Returns the device of a tensor, or None if it cannot be copied from without waiting."""
    if not getattr(tensor, "is_cuda", False):
        return None
    from .cuda import CudaDevice

    return CudaDevice(tensor.device)


@attrs.frozen
class DeviceCopies:
    """Options for copying values from a device to the host.

    ```python
    Trainer(..., device_copies=DeviceCopies(slots=256, when_full="drop"))
    ```

    Args:
        slots: the maximum number of pending calls per device, and of pending arrays. A call with more than
            64 metrics takes several.
        when_full: what to do when all slots are in use: "wait" for one, or "drop" the value and count it.
        wait_seconds: the maximum wait, for a slot and at the end of `fit`, at flush and at close.
        gather_seconds: how long the metrics of a call may wait on the device for later calls, with which they
            share a copy, and how often to look whether copies have arrived. A quarter of the slots is copied
            at once, and so is a call after a pause. With 0, each call is copied separately and costs three
            times as much.
        open_device: returns the device of a tensor.
        clock: a monotonic clock in seconds.
        sleep: waits for seconds.
    """

    slots: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    when_full: Literal["wait", "drop"] = attrs.field(
        default="wait", validator=attrs.validators.in_(("wait", "drop"))
    )
    wait_seconds: float = attrs.field(default=30.0, validator=attrs.validators.ge(0))
    open_device: Callable[[Any], CudaDevice | None] = open_device
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
        first: the number of the first row.
        layouts: of each row.
        copies: what gets numbers beside `table`, by the number of the row.
        table: the numbers of each row, once they have arrived; None if they are lost.
        is_ready: whether nothing more is to be waited for.
    """

    first: int = 0
    layouts: list[RowLayout] = attrs.field(factory=list)
    copies: dict[int, Sequence[PendingCopy]] = attrs.field(factory=dict)
    table: Sequence[list[Any]] | None = None
    is_ready: bool = False

    @property
    def count(self) -> int:
        """How many scalars there are."""
        return sum(len(layout.dtypes) for layout in self.layouts)

    def complete(self, table: Sequence[list[Any]]) -> None:
        """Sets the numbers."""
        self.table, self.is_ready = table, True
        for row, copies in self.copies.items():
            for copy, number in zip(copies, table[row - self.first], strict=False):
                copy.complete(number)

    def drop(self) -> None:
        """Marks the numbers as lost."""
        self.is_ready = True
        for copies in self.copies.values():
            for copy in copies:
                copy.drop()


@attrs.define(eq=False)
class DeviceRing:
    """The rows of scalars and the arrays that are on their way from one device, oldest first.

    Attributes:
        staged: the rows that have no copy yet.
        at: the next row.
        limit: the row before which `prepare` must be called again; so it must where the current stream is not
            the one with `number`.
        is_capturing: whether a graph is being captured on the current stream.
    """

    _device: CudaDevice
    _policy: DeviceCopies
    memory: ScalarRows | None = None
    staged: PendingRows = attrs.field(factory=PendingRows)
    at: int = 0
    limit: int = 0
    number: int = 0
    is_capturing: Callable[[], bool] = attrs.field(init=False)
    _stream: Any = None
    # The rows that no copy in progress has.
    _free: int = attrs.field(init=False)
    # How many rows one copy has at most: the others have room meanwhile.
    _most: int = attrs.field(init=False)
    _copies: deque[tuple[DeviceCopy, PendingRows | PendingCopy]] = attrs.field(factory=deque)
    _failure: Exception | None = None
    _reported: set[str] = attrs.field(factory=set)
    lost_values: int = 0

    def __attrs_post_init__(self) -> None:
        self.is_capturing = self._device.is_capturing
        self._free = self._policy.slots
        self._most = max(1, self._policy.slots // 4) if self._policy.gather_seconds else 1

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._copies or self.staged.layouts)

    def require_no_capture(self) -> None:
        """Raises a `RecordError` while a graph is being captured."""
        if self._device.is_capturing():
            raise RecordError(
                "values on a device must be logged outside of a graph capture, got a call while a CUDA graph "
                "is being captured: it would run once, never on replay. "
                "Log the graph's output tensors after replay()."
            )

    def layout(self, scalars: Sequence[Any]) -> tuple[ScalarRows, RowLayout]:
        """Returns how such scalars lie in a row, and in which memory."""
        if self.memory is None:
            self.memory = self._device.make_rows(self._policy.slots, SCALARS_PER_SLOT)
        return self.memory, self.memory.layout(scalars)

    def prepare(self, layout: RowLayout) -> bool:
        """Makes ready for the snapshot of scalars into row `at`; returns whether there is room."""
        memory = self.memory
        if memory is None or self._failure is not None or self.is_capturing():
            return False
        if self._stream is None or memory.stream_number() != self.number:
            self.send()
            self.number, self._stream = memory.stream_number(), memory.stream()
        elif self.at >= self.limit:
            self.send()
        size = len(self.staged.layouts)
        self.limit = min(self.staged.first + self._most, self._policy.slots, self.at + self._free - size)
        if self.at >= self.limit:
            return False
        if layout.cells[self.at] is None:
            memory.make_cells(layout, self.at)
        return True

    def send(self) -> None:
        """Starts the copy of the staged rows."""
        rows, memory = self.staged, self.memory
        if not rows.layouts or memory is None or self.is_capturing():
            return
        self._free -= len(rows.layouts)
        self.at %= self._policy.slots
        self.limit, self.staged = self.at, PendingRows(self.at)
        try:
            copy = memory.send(rows.first, rows.layouts, self._stream)
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._lose([rows])
            self._fail(error)
        else:
            self._copies.append((copy, rows))

    def copy_scalars(self, tensors: Sequence[Any]) -> list[PendingCopy]:
        """Starts the copy of scalars of any kinds, each with a `PendingCopy`; the slow path."""
        pending: list[PendingCopy] = []
        for first in range(0, len(tensors), SCALARS_PER_SLOT):
            group = tensors[first : first + SCALARS_PER_SLOT]
            copies = [PendingCopy() for _ in group]

            def start(group: Sequence[Any] = group, copies: Sequence[PendingCopy] = copies) -> None:
                _, layout = self.layout(group)
                if not self.prepare(layout):
                    self._lose(copies)
                    return
                layout.copy(layout.cells[self.at], group)
                self.staged.layouts.append(layout)
                self.staged.copies[self.at] = copies
                self.at += 1

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
            self.send()
            self.collect()
        if self._failure is None and self._is_full() and policy.when_full == "wait":
            deadline = policy.clock() + policy.wait_seconds
            while self._is_full() and policy.clock() < deadline:
                policy.sleep(_POLL_SECONDS)
                self.collect()
        return self._failure is None and not self._is_full()

    def _is_full(self) -> bool:
        slots = self._policy.slots
        return self._free <= len(self.staged.layouts) or len(self._copies) >= slots

    def collect(self) -> None:
        """Reads the copies that are complete."""
        if not self._copies or self.is_capturing():
            return
        try:
            while self._copies and self._copies[0][0].is_done():
                copy, pending = self._copies[0]
                pending.complete(copy.read())
                self._copies.popleft()
                self._free += len(pending.layouts) if isinstance(pending, PendingRows) else 0
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
        """Drops pending copies. Their memory is not reused, because a copy may still write to it."""
        self._lose([one for _, one in self._copies if not one.is_ready])
        self._lose([self.staged])
        self._copies.clear()
        self.staged, self.memory = PendingRows(), None
        self.at, self.limit, self._free = 0, 0, self._policy.slots

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
        rings = [self.ring_of(tensor) for tensor in tensors]
        used = [ring for ring in dict.fromkeys(rings) if ring is not None]
        for ring in used:
            ring.require_no_capture()
        pending = {ring: iter(ring.copy_scalars(_of(ring, rings, tensors))) for ring in used}
        return [
            tensor.item() if ring is None else next(pending[ring])
            for ring, tensor in zip(rings, tensors, strict=True)
        ]

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

    def collect(self) -> None:
        """Reads the copies that are complete, without waiting."""
        if os.getpid() != self._owner_pid:
            self.abandon()
            self._by_device, self._rings, self._owner_pid = {}, [], os.getpid()
        for ring in self._rings:
            ring.collect()

    def send(self) -> None:
        """Starts the copies of the rows that have none yet."""
        for ring in self._rings:
            ring.send()

    def wait(self) -> bool:
        """Waits for all copies until the deadline; returns whether they are complete."""
        policy = self._policy
        deadline = policy.clock() + policy.wait_seconds
        self.send()
        self.collect()
        while self.is_busy:
            if policy.clock() >= deadline:
                return False
            policy.sleep(_POLL_SECONDS)
            self.send()
            self.collect()
        return True

    def abandon(self) -> None:
        """Drops all pending copies."""
        for ring in self._rings:
            ring.abandon()


def _of(ring: DeviceRing, rings: Sequence[DeviceRing | None], tensors: Sequence[Any]) -> list[Any]:
    """Returns the tensors of one ring."""
    return [tensor for one, tensor in zip(rings, tensors, strict=True) if one is ring]
