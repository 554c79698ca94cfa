"""Copies a state into buffers that are kept, so that training continues while the copy is written.

A tree of plain values and tensors becomes a `StateSnapshot`: the same tree with a reference in place of each
tensor, and the referenced storages. Storages lie one after the other in one buffer. Where the system supports
it, the buffer is a memory file (`memfd_create(2)`), so that another process can map the same pages without
using /dev/shm. As with `torch.save`, each storage is copied once and whole: tensors of one type that share
memory (tied parameters, views) share it again when they are loaded.

`plain` defines the allowed values. Values that torch can load but that have no plain storage (sparse and
quantized tensors, types that the user declared safe) are pickled by torch in the calling thread.
"""

import ctypes
import functools
import gc
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch

from .plain import PlainWalk, check_memory, load_asked, mapped

__all__ = [
    "NotEnoughMemoryError",
    "SnapshotBuffer",
    "StateSnapshot",
    "outline_of",
    "rebuild",
]

_ALIGNMENT = 64
# For larger ones, releasing the interpreter's lock pays.
_SMALL_BYTES = 64 << 10
# The fixed cost of writing a storage, expressed in bytes.
_STORAGE_BYTES = 16 << 10
# Linux 5.14: makes pages present without changing their content.
_MADV_POPULATE_WRITE = 23
# The kernel locks the memory map meanwhile, and allocations of training wait for it.
_POPULATE_BYTES = 8 << 20
_MEMORY = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_MEMORY_SHARE = 0.9
# A process that maps buffers distinguishes them by these numbers.
_identifiers = itertools.count(1)


class NotEnoughMemoryError(Exception):
    """There is no memory for a copy of the state."""


class TensorReference(NamedTuple):
    """A tensor in a storage of a snapshot.

    Attributes:
        storage: the index of the storage.
        view: dtype, size, strides and offset in elements, whether it requires a gradient, and whether it is
            loaded as a `Parameter`. Similar tensors share one object.
    """

    storage: int
    view: tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]


@attrs.frozen
class Pickled:
    """A value that torch can load, in the format of `torch.save`."""

    data: bytes


@attrs.frozen
class StateSnapshot:
    """A tree of values with references, and the layout of the storages in the buffer.

    Attributes:
        tree: the values.
        sizes: the size of each storage in bytes; each begins at a multiple of 64.
        buffer: the identifier of the `SnapshotBuffer`.
    """

    tree: Any
    sizes: tuple[int, ...]
    buffer: int

    @property
    def room(self) -> int:
        """The buffer size that the storages need, in bytes."""
        return sum(_aligned(self.sizes))

    @property
    def effort(self) -> int:
        """The cost of writing it, as the size of a single storage that takes as long."""
        return self.room + _STORAGE_BYTES * len(self.sizes)


def _aligned(sizes: Sequence[int]) -> list[int]:
    return [(size + _ALIGNMENT - 1) & -_ALIGNMENT for size in sizes]


def _offsets(sizes: Sequence[int]) -> Iterator[int]:
    """Returns the offset of each storage, and the end of the last one."""
    return itertools.accumulate(_aligned(sizes), initial=0)


class _Referencing(PlainWalk):
    """The walk that replaces tensors by references and collects their storages."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []
        self.sizes: list[int] = []
        # Indices of storages that are large or not on the host.
        self.large: set[int] = set()
        self._indices: dict[tuple[int, torch.dtype], int] = {}
        self._views: dict[Any, Any] = {}

    def stored(self, tensor: torch.Tensor) -> TensorReference:
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        # Its identity, also while `storage` is one of several wrappers; torch.save refuses memory of two
        # types.
        key = storage._cdata, dtype  # noqa: SLF001
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self.sizes)
            size = storage.nbytes()
            check_memory(tensor, size)
            self.storages.append(storage)
            self.sizes.append(size)
            if size > _SMALL_BYTES or not tensor.is_cpu:
                self.large.add(index)
        view = (
            dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.requires_grad,
            type(tensor) is torch.nn.Parameter,
        )
        return TensorReference(index, self._views.setdefault(view, view))

    def asked(self, value: Any, data: bytes) -> Pickled:
        return Pickled(data)

    def outline(self, values: Any) -> StateSnapshot:
        """Returns a snapshot outside of any buffer."""
        # The many new objects would trigger garbage collections, a third of the time.
        with _without_collection():
            return StateSnapshot(self.values(values), tuple(self.sizes), 0)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disables garbage collection in a block."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def outline_of(values: Any) -> StateSnapshot:
    """Returns a snapshot without a copy, which tells how much memory it needs.

    Raises:
        CheckpointError: a checkpoint cannot hold the values.
    """
    return _Referencing().outline(values)


def rebuild(snapshot: StateSnapshot, memory: torch.Tensor) -> Any:
    """Returns the tree of a snapshot, with tensors that are views of the buffer.

    Args:
        snapshot: what to rebuild.
        memory: the buffer, `(bytes,)` uint8.
    """
    content = memory.numpy()
    storages = [
        # Separate storages: otherwise `torch.save` would write the whole buffer.
        torch.frombuffer(content, dtype=torch.uint8, count=size, offset=offset).untyped_storage()
        if size
        else torch.empty(0, dtype=torch.uint8).untyped_storage()
        for offset, size in zip(_offsets(snapshot.sizes), snapshot.sizes, strict=False)
    ]

    def leaf(part: Any) -> Any:
        if type(part) is TensorReference:
            return _tensor_at(part, storages[part.storage])
        return load_asked(part.data) if type(part) is Pickled else part

    return mapped(snapshot.tree, leaf)


def _tensor_at(reference: TensorReference, storage: torch.UntypedStorage) -> torch.Tensor:
    dtype, size, stride, offset, requires_grad, is_parameter = reference.view
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, offset, size, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


class SnapshotBuffer:
    """The memory that states are copied into, kept from one snapshot to the next; it grows, never shrinks.

    Not thread-safe, except for `prepare`, which another thread may run while a snapshot is taken.

    Args:
        available: returns the bytes of memory that are free.
    """

    def __init__(self, available: Callable[[], int | None] | None = None) -> None:
        self.available = available or available_memory
        self._lock = threading.Lock()  # Guards what `reserve` replaces.
        self.identifier = 0
        self.descriptor: int | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def reserve(self, size: int) -> None:
        """Makes room for a number of bytes; does not touch the pages.

        Raises:
            NotEnoughMemoryError: that much memory is not available.
        """
        with self._lock:
            if size <= len(self.memory):
                return
            # The pages of the old buffer are free only when its last reader has let go of it.
            free = self.available()
            if free is not None and size > free * _MEMORY_SHARE:
                raise NotEnoughMemoryError(
                    f"a copy of the state needs {size >> 20} MiB of memory, {free >> 20} MiB are available"
                )
            self._release()
            self.identifier = next(_identifiers)
            try:
                memory = self._map_file(size) or mmap.mmap(-1, size)
            except OSError as error:
                raise NotEnoughMemoryError(
                    f"a copy of the state needs {size >> 20} MiB of memory: {error}"
                ) from error
            self.memory = torch.frombuffer(memory, dtype=torch.uint8)

    def _map_file(self, size: int) -> mmap.mmap | None:
        """Returns a new memory file, which another process can map too, or None where there can be none."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            descriptor = os.memfd_create("checkpoint")
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
        except OSError:  # RLIMIT_FSIZE counts it as a file.
            os.close(descriptor)
            return None
        self.descriptor = descriptor
        return memory

    def prepare(self) -> None:
        """Makes the pages present, so that the first copy is as fast as the next; any thread may call it.

        Takes about a second per GiB, without the interpreter's lock. Where the kernel cannot (before Linux
        5.14), the first copy does it.
        """
        memory = self.memory
        try:
            madvise = ctypes.CDLL(None).madvise
        except (OSError, AttributeError):
            return
        for start in range(0, len(memory), _POPULATE_BYTES):
            count = min(_POPULATE_BYTES, len(memory) - start)
            address = ctypes.c_void_p(memory.data_ptr() + start)
            if self.memory is not memory or madvise(address, ctypes.c_size_t(count), _MADV_POPULATE_WRITE):
                return
        self._pin(memory)

    def take(self, values: Any) -> tuple[StateSnapshot, Callable[[], None]]:
        """Copies values; returns the snapshot, and a function that waits until the copy is complete.

        Tensors on the CPU are copied when this returns. Those on a GPU are copied by its current stream: what
        it runs afterwards, such as the next optimizer step, waits for the copy; this thread does not.

        Args:
            values: a tree of plain values and tensors.

        Raises:
            CheckpointError: it holds something else.
            NotEnoughMemoryError: there is no memory for the copy.
        """
        walk = _Referencing()
        snapshot = walk.outline(values)
        self.reserve(snapshot.room)
        address = self.memory.data_ptr()
        devices = set()
        places = zip(walk.storages, walk.sizes, _offsets(walk.sizes), strict=False)
        for index, (storage, size, offset) in enumerate(places):
            if index not in walk.large:
                _copy(address + offset, storage.data_ptr(), size)
                continue
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.memory[offset : offset + size].copy_(source, non_blocking=True)
            if storage.is_cuda:
                devices.add(storage.device)
        wait = functools.partial(_wait, _events_on(devices))
        return attrs.evolve(snapshot, buffer=self.identifier), wait

    def release(self) -> None:
        """Gives the memory back."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        memory, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
            self._is_pinned = False
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _pin(self, memory: torch.Tensor) -> None:
        """Locks the pages where there is a GPU: copies from it need no other buffer, and no waiting."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with self._lock:
                if self.memory is memory:
                    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                    self._is_pinned = int(runtime.cudaHostRegister(memory.data_ptr(), len(memory), 1)) == 0


# Does not give up the interpreter's lock, as `ctypes.memmove` does: for each of many small storages another
# thread would take it.
_copy = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


def _events_on(devices: set[torch.device]) -> list[torch.cuda.Event]:
    events = []
    for device in devices:
        events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        events[-1].record(torch.cuda.current_stream(device))
    return events


def _wait(events: list[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()


def available_memory() -> int | None:
    """Returns the bytes of memory that can be had without swapping, or None where the system does not tell.

    `MemAvailable`, or what the control group may still have (memory.max less memory.current) if that is less.
    """
    try:
        text = _MEMORY.read_text(encoding="ascii")
        free = next(
            int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    try:
        limit = int((_CONTROL_GROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CONTROL_GROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # No control group, or "max".
        return free
    return max(0, min(free, limit - used))
