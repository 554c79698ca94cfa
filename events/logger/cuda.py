"""Copies from a CUDA device that do not wait for it.

**Snapshot.** A scalar is first copied on the current stream into our own device memory: work queued after the
call, such as an optimizer step or the replay of a graph, cannot change it, and the caller's tensor may be
freed. The scalars of a call take one kernel for each dtype.

**Copy.** From there it goes to pinned memory: rows of scalars in groups, on the stream that took their
snapshots; arrays on a side stream, so that a large copy overlaps with kernels.

**Event.** One is recorded behind the copy, on the stream of that device, and used again for later copies of
rows: creating and destroying events can block.

The current stream must have waited for a tensor that another stream computes, as for any operation.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import torch

from .values import picker

__all__ = ["CudaDevice", "DeviceCopy", "RowLayout", "ScalarRows"]

_UNSIGNED_64 = 1 << 64
_MAX_LAYOUTS = 64


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

    def make_rows(self, count: int, capacity: int) -> "ScalarRows":
        """Allocates rows in one go: pinning is slow, and may wait for the device."""
        with torch.inference_mode(mode=False):
            on_device = torch.zeros((count, capacity), dtype=torch.int64, device=self._device)
            on_host = torch.zeros((count, capacity), dtype=torch.int64, pin_memory=True)
        # `torch.cuda.current_stream` takes as long as half a kernel.
        number = functools.partial(torch._C._cuda_getCurrentRawStream, on_device.get_device())  # noqa: SLF001
        return ScalarRows(on_device, on_host, _new_event, self._stream, number)

    def copy_array(self, tensor: torch.Tensor) -> "DeviceCopy":
        """Snapshots a tensor on the current stream, and copies it on a side stream."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side = self._side
        with torch.inference_mode(mode=False), torch.no_grad():
            snapshot = tensor.detach().clone(memory_format=torch.contiguous_format)
            host = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
            side.wait_stream(self._stream())
            with torch.cuda.stream(side):
                host.copy_(snapshot, non_blocking=True)
            event = _new_event()
            event.record(side)
        return DeviceCopy(event, lambda: host, snapshot)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


@attrs.define(eq=False)
class RowLayout:
    """How the scalars of a call lie in a row.

    Args:
        dtypes: of the scalars, in their order.
        cells: of each row: views of one scalar each; where `picks` is given, for each dtype. None where
            `make_cells` was not called.
        copy: queues the snapshot of scalars, a list or tuple, into cells: one kernel for each dtype. May
            raise, if one has more elements or needs a gradient where none had; then nothing has changed that
            anyone reads.
        picks: for each dtype whether its cells are floats, and what picks from the scalars and their cells;
            empty where all are floats of one dtype.
        integers: the places and dtypes of those that are no floats.
    """

    dtypes: list[torch.dtype]
    cells: list[Any]
    copy: Callable[[Any, Any], object]
    picks: Sequence[tuple[bool, Callable[[Any], Any]]]
    integers: list[tuple[int, torch.dtype]]


class ScalarRows:
    """Rows of scalars, on the device and in pinned memory.

    A scalar takes 8 bytes, whatever its dtype: floats are widened to float64, integers and booleans to int64,
    without loss. Both share one buffer, so that there is one copy.

    Args:
        on_device: `(rows, capacity)` int64.
        on_host: the same in pinned host memory.
        new_event: makes the events that are recorded behind copies.
        stream: returns the current stream of the device.
        stream_number: returns which one it is, in a twentieth of the time; 0 for the default one.
    """

    def __init__(
        self,
        on_device: torch.Tensor,
        on_host: torch.Tensor,
        new_event: Callable[[], _Event],
        stream: Callable[[], Any],
        stream_number: Callable[[], int],
    ) -> None:
        self._on_device, self._on_host, self._new_event = on_device, on_host, new_event
        self.stream, self.stream_number = stream, stream_number
        self._integers_read = on_host.numpy()
        self._floats_read = self._integers_read.view(np.float64)
        self._layouts: dict[tuple[Any, ...], RowLayout] = {}
        self._events: list[_Event] = []

    def layout(self, scalars: Sequence[torch.Tensor]) -> RowLayout:
        """Returns how such scalars lie in a row; the same object for the same dtypes."""
        dtypes = [one.dtype for one in scalars]
        is_odd = any(one.dim() or one.requires_grad for one in scalars)
        key = (is_odd, *dtypes)
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            is_simple = not is_odd and dtypes[0].is_floating_point and len(set(dtypes)) == 1
            picks = (
                []
                if is_simple
                else [
                    (dtype.is_floating_point, picker([at for at, one in enumerate(dtypes) if one is dtype]))
                    for dtype in dict.fromkeys(dtypes)
                ]
            )
            self._layouts[key] = RowLayout(
                dtypes,
                [None] * len(self._on_device),
                torch._foreach_copy_ if is_simple else _copier([pick for _, pick in picks]),
                picks,
                [(place, dtype) for place, dtype in enumerate(dtypes) if not dtype.is_floating_point],
            )
        return self._layouts[key]

    def make_cells(self, layout: RowLayout, row: int) -> None:
        """Sets the cells of a row: to make a view takes as long as to queue a kernel."""
        with torch.inference_mode(mode=False):
            whole = self._on_device[row, : len(layout.dtypes)]
            integers, floats = whole.unbind(), whole.view(torch.float64).unbind()
        picked = [pick(floats if is_float else integers) for is_float, pick in layout.picks]
        layout.cells[row] = picked or floats

    def send(self, first: int, layouts: Sequence[RowLayout], stream: Any) -> "DeviceCopy":
        """Queues the copy of rows, on the stream that took their snapshots."""
        rows = slice(first, first + len(layouts))
        event = self._events.pop() if self._events else self._new_event()
        with contextlib.nullcontext() if stream == self.stream() else torch.cuda.stream(stream):
            self._on_host[rows].copy_(self._on_device[rows], non_blocking=True)
        event.record(stream)
        return DeviceCopy(event, functools.partial(self.read, rows, layouts, event))

    def read(self, rows: slice, layouts: Sequence[RowLayout], event: _Event) -> list[list[Any]]:
        """Returns the numbers of rows, and keeps the event for another copy; booleans are `bool`."""
        self._events.append(event)
        width = max(len(layout.dtypes) for layout in layouts)
        table: list[list[Any]] = self._floats_read[rows, :width].tolist()
        if any(layout.integers for layout in layouts):
            integers = self._integers_read[rows, :width].tolist()
            for numbers, whole, layout in zip(table, integers, layouts, strict=True):
                for place, dtype in layout.integers:
                    numbers[place] = _whole(whole[place], dtype)
        return table


def _copier(picks: Sequence[Callable[[Any], Any]]) -> Callable[[Any, Any], None]:
    """Returns what copies scalars of several dtypes, or with dimensions or gradients."""

    def copy(cells: Sequence[Any], scalars: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            flat = [one.reshape(()) if one.dim() else one for one in scalars]
            # Where tensors of several dtypes are given at once, torch copies them one by one.
            for targets, pick in zip(cells, picks, strict=True):
                torch._foreach_copy_(targets, pick(flat))

    return copy


def _new_event() -> _Event:
    event: _Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


def _whole(number: int, dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return bool(number)
    return number % _UNSIGNED_64 if dtype is torch.uint64 else number


@attrs.frozen(eq=False)
class DeviceCopy:
    """A copy in progress.

    Args:
        event: recorded behind it.
        read: returns the tensor, or a list of numbers for each row; called once, when the copy is complete.
        snapshot: what it reads, kept until then so that its memory is not given to another tensor.
    """

    _event: _Event
    read: Callable[[], Any]
    _snapshot: torch.Tensor | None = None

    def is_done(self) -> bool:
        """Returns whether it is complete, without waiting; raises the error of a device that failed."""
        return self._event.query()
