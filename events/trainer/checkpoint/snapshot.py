"""Copies a state into buffers that are kept, so that training continues while the copy is written.

A tree of plain values and tensors becomes a `StateSnapshot`: the same tree with a reference in place of each
tensor, and the storages that the references are into. Storages lie one after the other in one buffer, a
memory file (`memfd_create(2)`) where the system has it, so that another process can map the same pages; it
does not count against the size of /dev/shm. As with `torch.save`, each storage is copied once and whole:
tensors that share memory (tied parameters, views) share it when they are loaded, if they are of one type.

Which values there may be, says `plain`. What torch can load but what has no plain storage (sparse and
quantized tensors, types that the user has declared safe) is pickled by torch in the calling thread.
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
# Of larger ones, a copy that gives up the interpreter's lock costs less than it saves.
_SMALL_BYTES = 64 << 10
# The time that torch takes to write a storage beside its bytes, in bytes.
_STORAGE_BYTES = 16 << 10
# Linux 5.14: makes pages present without changing what is in them.
_MADV_POPULATE_WRITE = 23
# The kernel holds a lock on the memory map meanwhile, for which allocations of training wait.
_POPULATE_BYTES = 8 << 20
_MEMORY = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_MEMORY_SHARE = 0.9
# A process that maps buffers tells them apart by these numbers.
_identifiers = itertools.count(1)


class NotEnoughMemoryError(Exception):
    """There is no memory for a copy of the state."""


class TensorReference(NamedTuple):
    """A tensor in a storage of a snapshot.

    Attributes:
        storage: the index of the storage.
        view: dtype, size, strides and offset in elements, whether it requires a gradient, and whether it is
            loaded as a `Parameter`. Of many tensors that are alike, it is one object.
    """

    storage: int
    view: tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]


@attrs.frozen
class Pickled:
    """A value that torch can load, in the format of `torch.save`."""

    data: bytes


@attrs.frozen
class StateSnapshot:
    """A tree of values with references, and where the storages are in the buffer.

    Attributes:
        tree: the values.
        sizes: the bytes of each storage; they lie one after the other, each at a multiple of 64.
        buffer: the identifier of the `SnapshotBuffer`.
    """

    tree: Any
    sizes: tuple[int, ...]
    buffer: int

    @property
    def room(self) -> int:
        """The bytes that the storages need in a buffer."""
        return sum(_aligned(self.sizes))

    @property
    def effort(self) -> int:
        """What it takes to write it: the bytes of one storage that takes as long."""
        return self.room + _STORAGE_BYTES * len(self.sizes)


def _aligned(sizes: Sequence[int]) -> list[int]:
    return [(size + _ALIGNMENT - 1) & -_ALIGNMENT for size in sizes]


def _offsets(sizes: Sequence[int]) -> Iterator[int]:
    """Returns where each storage begins, and where the last one ends."""
    return itertools.accumulate(_aligned(sizes), initial=0)


class _Referencing(PlainWalk):
    """The walk that replaces tensors by references and collects their storages."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[torch.UntypedStorage] = []
        self.sizes: list[int] = []
        # Those that are not small, or not on the host.
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
        """Returns a snapshot that is in no buffer."""
        # Each of its many new objects would have Python look through all objects again: a third of the time.
        with _without_collection():
            return StateSnapshot(self.values(values), tuple(self.sizes), 0)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Has Python look for no garbage meanwhile."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def outline_of(values: Any) -> StateSnapshot:
    """Returns a snapshot of which nothing was copied: what it needs is known.

    Raises:
        CheckpointError: a checkpoint cannot hold the values.
    """
    return _Referencing().outline(values)


def rebuild(snapshot: StateSnapshot, memory: torch.Tensor) -> Any:
    """Returns the tree of a snapshot with tensors again, which are views of the buffer.

    Args:
        snapshot: what to rebuild.
        memory: the buffer, `(bytes,)` uint8.
    """
    content = memory.numpy()
    storages = [
        # Each is a storage of its own: else `torch.save` would write the whole buffer.
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

    Not thread-safe, but for `prepare`, which another thread may run while a snapshot is taken.

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
