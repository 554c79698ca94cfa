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

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import attrs
import numpy as np
import torch

__all__ = ["CudaDevice", "ScalarRows"]

_UNSIGNED_64 = 1 << 64
_Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]
_dtype_of = attrgetter("dtype")


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
        stream_id = torch._C._cuda_getCurrentRawStream  # noqa: SLF001
        return ScalarRows(on_device, on_host, _new_event, self._stream, stream_id, self.is_capturing)

    def copy_array(self, tensor: torch.Tensor) -> "_ArrayCopy":
        """Snapshots a tensor on the current stream, and copies it on a side stream."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return _ArrayCopy(tensor, self._side, self._stream())

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


@attrs.frozen(eq=False)
class _Layout:
    """How the scalars of a call lie in a row.

    Args:
        dtypes: of the scalars.
        parts: for each dtype whether its cells are floats, and what picks from the scalars and their cells;
            None for all of them.
        has_dimensions: whether some have the shape `(1,)`, or more dimensions.
    """

    dtypes: list[torch.dtype]
    parts: list[tuple[bool, Callable[[_Tensors], _Tensors] | None]]
    has_dimensions: bool
    integers: list[tuple[int, torch.dtype]]

    def __len__(self) -> int:
        return len(self.dtypes)


class ScalarRows:
    """Rows of scalars, on the device and in pinned memory.

    A scalar takes 8 bytes, whatever its dtype: floats are widened to float64, integers and booleans to int64,
    without loss. Both share one buffer, so that there is one copy.

    Args:
        on_device: `(rows, capacity)` int64.
        on_host: the same in pinned host memory.
        new_event: makes the events that are recorded behind copies.
        current_stream: returns the current stream of the device.
        stream_id: returns what tells the current stream from others, in a twentieth of the time of
            `current_stream`.
        is_capturing: whether a graph is being captured there.
    """

    def __init__(
        self,
        on_device: torch.Tensor,
        on_host: torch.Tensor,
        new_event: Callable[[], _Event],
        current_stream: Callable[[], Any],
        stream_id: Callable[[int], int],
        is_capturing: Callable[[], bool],
    ) -> None:
        self._on_device, self._on_host, self._new_event = on_device, on_host, new_event
        self._current_stream = current_stream
        self._stream_id, self._is_capturing = stream_id, is_capturing
        self._streams: dict[int, Any] = {}
        self._index = on_device.get_device()
        self._integers_read = on_host.numpy()
        self._floats_read = self._integers_read.view(np.float64)
        # By row, as many as a call has needed: to make a view takes as long as to queue a kernel.
        self._integers: list[_Tensors] = [()] * len(on_device)
        self._floats: list[_Tensors] = [()] * len(on_device)
        self._events: list[_Event] = []

    def layout(self, scalars: Sequence[torch.Tensor]) -> _Layout:
        """Returns how scalars of these dtypes lie in a row."""
        dtypes = [one.dtype for one in scalars]
        return _Layout(
            dtypes,
            [(dtype.is_floating_point, _picker(dtypes, dtype)) for dtype in dict.fromkeys(dtypes)],
            any(one.dim() for one in scalars),
            [(place, dtype) for place, dtype in enumerate(dtypes) if not dtype.is_floating_point],
        )

    def stream(self) -> Any:
        """Returns the current stream, the same object each time; None while a graph is being captured."""
        number = self._stream_id(self._index)
        # The default stream, 0, cannot be captured.
        if number and self._is_capturing():
            return None
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = self._current_stream()
        return stream

    def stage(self, row: int, layout: _Layout, scalars: _Tensors) -> bool:
        """Queues the snapshot of scalars into a row; False if their dtypes are others.

        One of another device, or in host memory, arrives too.

        Raises:
            RuntimeError: one has several elements, or dimensions that the layout does not know of.
        """
        if [*map(_dtype_of, scalars)] != layout.dtypes:
            return False
        if layout.has_dimensions:
            scalars = [one.reshape(()) for one in scalars]
        is_grad_enabled = torch.is_grad_enabled()
        # As `torch.no_grad`, in a tenth of the time.
        torch._C._set_grad_enabled(False)  # noqa: FBT003, SLF001
        try:
            # One kernel for all tensors of a dtype; torch's optimizers use it too.
            for is_float, pick in layout.parts:
                cells = self._cells(row, len(scalars), is_float=is_float)
                if pick is None:
                    torch._foreach_copy_(cells, scalars)
                else:
                    torch._foreach_copy_(pick(cells), pick(scalars))
        finally:
            torch._C._set_grad_enabled(is_grad_enabled)  # noqa: SLF001
        return True

    def _cells(self, row: int, count: int, *, is_float: bool) -> _Tensors:
        of_rows = self._floats if is_float else self._integers
        cells = of_rows[row]
        if len(cells) < count:
            with torch.inference_mode(mode=False):
                whole = self._on_device[row, :count]
                cells = of_rows[row] = (whole.view(torch.float64) if is_float else whole).unbind()
        return cells if len(cells) == count else cells[:count]

    def send(self, first: int, layouts: Sequence[_Layout], stream: Any) -> "_RowsCopy":
        """Queues the copy of rows, on the stream that took their snapshots."""
        rows = slice(first, first + len(layouts))
        event = self._events.pop() if self._events else self._new_event()
        if stream is self.stream():
            self._on_host[rows].copy_(self._on_device[rows], non_blocking=True)
        else:
            with torch.cuda.stream(stream):
                self._on_host[rows].copy_(self._on_device[rows], non_blocking=True)
        event.record(stream)
        return _RowsCopy(self, rows, layouts, event)

    def read(self, rows: slice, layouts: Sequence[_Layout], event: _Event) -> list[list[Any]]:
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


def _picker(dtypes: Sequence[torch.dtype], dtype: torch.dtype) -> Callable[[Any], Any] | None:
    places = [place for place, one in enumerate(dtypes) if one is dtype]
    if len(places) == len(dtypes):
        return None
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


@attrs.frozen(eq=False)
class _RowsCopy:
    """Rows that are being copied."""

    _memory: ScalarRows
    _rows: slice
    _layouts: Sequence[_Layout]
    _event: _Event

    def is_done(self) -> bool:
        return self._event.query()

    def read(self) -> list[Any]:
        return self._memory.read(self._rows, self._layouts, self._event)


def _new_event() -> _Event:
    event: _Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


def _whole(number: int, dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return bool(number)
    return number % _UNSIGNED_64 if dtype is torch.uint64 else number


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

    def read(self) -> torch.Tensor:
        return self._host
