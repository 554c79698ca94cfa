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

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Snapshots scalars and starts their copy; queues work and returns."""
        if not self._integers:
            # Views, made on the first use of a slot.
            with torch.inference_mode(mode=False):
                self._integers = self._staging.unbind()
                self._floats = self._staging.view(torch.float64).unbind()
        with torch.no_grad():
            self._dtypes = [tensor.dtype for tensor in tensors]
            targets = [
                (self._floats if dtype.is_floating_point else self._integers)[index]
                for index, dtype in enumerate(self._dtypes)
            ]
            # One kernel for many tensors; torch's optimizers use it too.
            torch._foreach_copy_(targets, [tensor.detach().reshape(()) for tensor in tensors])
            count = len(tensors)
            self._on_host[:count].copy_(self._staging[:count], non_blocking=True)
            self._event.record(self._current_stream())

    def is_done(self) -> bool:
        """Returns whether the copy is complete."""
        return self._event.query()

    def read(self) -> list[Any]:
        """Returns Python numbers; booleans are `bool`."""
        received = self._on_host[: len(self._dtypes)]
        pairs = zip(received.view(torch.float64).tolist(), received.tolist(), self._dtypes, strict=True)
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
