"""Copies from a CUDA device that do not wait for it.

**Snapshot.** A scalar is first copied on the current stream into our own device memory: work queued after the
call, such as an optimizer step or the replay of a graph, cannot change it, and the caller's tensor may be
freed.

**Copy.** From there it goes to pinned memory, on the same stream for scalars, on a side stream for arrays, so
that a large copy overlaps with kernels.

**Event.** One is recorded behind the copy, on the stream of that device, and created once per slot: creating
and destroying events can block.

The current stream must have waited for a tensor that another stream computes, as for any operation.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

__all__ = ["CudaDevice", "ScalarSlot"]

_UNSIGNED_64 = 1 << 64


class _Event(Protocol):
    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...


class CudaDevice:
    """One CUDA device.

    Args:
        device: the torch device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None

    def is_capturing(self) -> bool:
        """Returns whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def make_slots(self, count: int, capacity: int) -> "list[ScalarSlot]":
        """Allocates slots in one go: pinning is slow, and may wait for the device."""
        with torch.inference_mode(mode=False):
            on_device = torch.zeros((count, capacity), dtype=torch.int64, device=self._device)
            on_host = torch.zeros((count, capacity), dtype=torch.int64, pin_memory=True)
        return [
            ScalarSlot(staging, received, _new_event(), self._stream)
            for staging, received in zip(on_device.unbind(), on_host.unbind(), strict=True)
        ]

    def copy_array(self, tensor: torch.Tensor) -> "_ArrayCopy":
        """Snapshots a tensor on the current stream, and copies it on a side stream."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return _ArrayCopy(tensor, self._side, self._stream())

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


@attrs.define(eq=False)
class ScalarSlot:
    """The scalars of one call.

    A scalar takes 8 bytes, whatever its dtype: floats are widened to float64, integers and booleans to int64,
    without loss. Both share one buffer, so that there is one copy.

    Args:
        staging: `(capacity,)` int64, on the device.
        on_host: `(capacity,)` int64, in pinned host memory.
        event: recorded behind the copy; complete when the copy is.
        current_stream: returns what the event is recorded on.
    """

    _staging: torch.Tensor
    _on_host: torch.Tensor
    _event: _Event
    _current_stream: Callable[[], Any]
    _integers: Sequence[torch.Tensor] = attrs.field(default=(), init=False)
    _floats: Sequence[torch.Tensor] = attrs.field(default=(), init=False)
    _dtypes: list[torch.dtype] = attrs.field(factory=list, init=False)
    # Of as many scalars as the last time.
    _staged: torch.Tensor = attrs.field(factory=lambda: torch.empty(0), init=False)
    _received: torch.Tensor = attrs.field(factory=lambda: torch.empty(0), init=False)
    _received_floats: torch.Tensor = attrs.field(factory=lambda: torch.empty(0), init=False)

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Snapshots scalars and starts their copy; queues work and returns."""
        if len(tensors) != len(self._received_floats):
            self._make_views(len(tensors))
        with torch.no_grad():
            self._dtypes = dtypes = [tensor.dtype for tensor in tensors]
            # One kernel for all tensors of a dtype; torch's optimizers use it too.
            for dtype in set(dtypes):
                targets = self._floats if dtype.is_floating_point else self._integers
                places = [place for place, one in enumerate(dtypes) if one is dtype]
                torch._foreach_copy_(
                    [targets[place] for place in places],
                    [one.reshape(()) if one.dim() else one for one in map(tensors.__getitem__, places)],
                )
            self._received.copy_(self._staged, non_blocking=True)
            self._event.record(self._current_stream())

    def _make_views(self, count: int) -> None:
        """Makes what a call of so many scalars uses: a view takes as long as queueing a kernel."""
        with torch.inference_mode(mode=False):
            if not self._integers:
                self._integers = self._staging.unbind()
                self._floats = self._staging.view(torch.float64).unbind()
            self._staged, self._received = self._staging[:count], self._on_host[:count]
            self._received_floats = self._received.view(torch.float64)

    def is_done(self) -> bool:
        """Returns whether the copy is complete."""
        return self._event.query()

    def read(self) -> list[Any]:
        """Returns Python numbers; booleans are `bool`."""
        if all(dtype.is_floating_point for dtype in self._dtypes):
            return self._received_floats.tolist()
        pairs = zip(self._received_floats.tolist(), self._received.tolist(), self._dtypes, strict=True)
        return [_number(as_float, as_integer, dtype) for as_float, as_integer, dtype in pairs]


def _new_event() -> _Event:
    event: _Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


def _number(as_float: float, as_integer: int, dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return as_float
    if dtype is torch.bool:
        return bool(as_integer)
    return as_integer % _UNSIGNED_64 if dtype is torch.uint64 else as_integer


class _ArrayCopy:
    """A tensor that is being copied. Keeps the snapshot until then, so that its memory is not reused."""

    def __init__(self, tensor: torch.Tensor, side: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._snapshot = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._host = torch.empty(self._snapshot.shape, dtype=self._snapshot.dtype, pin_memory=True)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self._host.copy_(self._snapshot, non_blocking=True)
            self._event = _new_event()
            self._event.record(side)

    def is_done(self) -> bool:
        return self._event.query()

    def read(self) -> list[Any]:
        return [self._host]
