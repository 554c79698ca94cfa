"""Copies a state into buffers that are kept, so that training continues while the copy is written.

A tree of plain values and tensors becomes a `StateSnapshot`: the same tree with a reference in place of each
tensor, and the storages that the references are into. Storages lie one after the other in one buffer, a
memory file (`memfd_create(2)`) where the system has it, so that another process can map the same pages; it
does not count against the size of /dev/shm. As with `torch.save`, each storage is copied once and whole:
tensors that share memory (tied parameters, views) share it when they are loaded.

Values are those that `torch.load(weights_only=True)` accepts. A few others are converted: numpy scalars to
numbers, arrays to tensors, subclasses of the plain types (named tuples, enumerations of strings) to these.
What torch can load but what has no plain storage (sparse and quantized tensors, types that the user has
declared safe) is pickled by torch in the calling thread.
"""

import ctypes
import functools
import io
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from events.errors import CheckpointError

__all__ = [
    "NotEnoughMemoryError",
    "SnapshotBuffer",
    "StateSnapshot",
    "has_plain_storage",
    "plain_values",
    "rebuild",
    "size_of",
]

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, torch.layout}
)
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_ALIGNMENT = 64
# Linux 5.14: makes pages present without changing what is in them.
_MADV_POPULATE_WRITE = 23
# The kernel holds a lock on the memory map meanwhile, for which allocations of training wait.
_POPULATE_BYTES = 8 << 20
_MEMORY = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_MEMORY_SHARE = 0.9


class NotEnoughMemoryError(Exception):
    """There is no memory for a copy of the state."""


@attrs.frozen
class TensorReference:
    """A tensor in a storage of a snapshot; offset and strides are in elements.

    Attributes:
        storage: the index of the storage.
        is_parameter: whether it is loaded as a `Parameter`.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    is_parameter: bool


@attrs.frozen
class Pickled:
    """A value that torch can load, in the format of `torch.save`."""

    data: bytes


@attrs.frozen
class StateSnapshot:
    """A tree of values with references, and where the storages are in the buffer.

    Attributes:
        tree: the values.
        storages: offset and size of each, in bytes.
        buffer: the identifier of the `SnapshotBuffer`.
    """

    tree: Any
    storages: tuple[tuple[int, int], ...]
    buffer: int

    @property
    def size(self) -> int:
        """The bytes of all storages."""
        return sum(size for _, size in self.storages)


class _Reading:
    """The walk over a tree that replaces tensors by references and collects their storages.

    Args:
        keeps_tensors: leaves tensors, and what torch can load, as they are.
    """

    def __init__(self, *, keeps_tensors: bool = False) -> None:
        self._keeps_tensors = keeps_tensors
        self.storages: list[torch.UntypedStorage] = []
        self._indices: dict[int, int] = {}

    def plain(self, value: Any, place: str) -> Any:
        """Returns a value with references in place of tensors.

        Raises:
            CheckpointError: a value would not be loaded by `torch.load(weights_only=True)`.
        """
        kind = type(value)
        if kind in _PLAIN:
            # Empty bytes are pickled by the name of their class, which torch.load does not allow.
            return value if value != b"" else bytearray()
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if kind is dict:
            return {self.plain(key, place): self.plain(one, f"{place}/{key}") for key, one in value.items()}
        if kind is OrderedDict:
            # A module's `state_dict` has the versions of its parts in an attribute.
            ordered = OrderedDict(
                (self.plain(key, place), self.plain(one, f"{place}/{key}")) for key, one in value.items()
            )
            vars(ordered).update(self.plain(vars(value), place))
            return ordered
        if kind in {list, tuple, set}:
            return kind(self.plain(one, f"{place}/{index}") for index, one in enumerate(value))
        return self._converted(value, place)

    def _converted(self, value: Any, place: str) -> Any:
        if isinstance(value, np.generic):
            return self.plain(value.item(), place)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return self.plain(torch.from_numpy(value), place)
        if isinstance(value, Mapping):
            return self.plain(dict(value), place)
        if isinstance(value, frozenset):
            return self.plain(set(value), place)
        bases: tuple[type, ...] = (int, float, str, bytes, tuple, list, set)
        for base in bases:
            if isinstance(value, base):
                return self.plain(base(value), place)
        if _is_loadable(value):
            return value if self._keeps_tensors else _pickled(value, place)
        raise CheckpointError(
            f"checkpoint must hold tensors and plain values, got a {type(value).__name__} at {place}. "
            "Return numbers, strings, lists and dictionaries from state_dict."
        )

    def _tensor(self, tensor: torch.Tensor, place: str) -> Any:
        if not has_plain_storage(tensor):
            pickled = _pickled(tensor, place)
            return tensor if self._keeps_tensors else pickled
        return tensor if self._keeps_tensors else self._reference(tensor)

    def _reference(self, tensor: torch.Tensor) -> TensorReference:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001  # its identity, also while `storage` is one of several wrappers
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self.storages)
            self.storages.append(storage)
        return TensorReference(
            index,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
        )


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is no more than a view of a storage in the memory of the host or a GPU."""
    return (
        type(tensor) in _TENSORS
        and tensor.layout is torch.strided
        and tensor.device.type in {"cpu", "cuda"}
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _pickled(value: Any, place: str) -> Pickled:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        value = value.detach().cpu()
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint must hold what torch.load(weights_only=True) reads, got a {type(value).__name__} "
            f"at {place}: {error}"
        ) from error
    return Pickled(data.getvalue())


def _is_loadable(value: Any) -> bool:
    try:
        _pickled(value, "")
    except CheckpointError:
        return False
    return True


def plain_values(values: Any, place: str = "") -> Any:
    """Returns values as `torch.load(weights_only=True)` reads them; tensors are the same, not copies.

    Raises:
        CheckpointError: a checkpoint cannot hold them; the message names the place.
    """
    return _Reading(keeps_tensors=True).plain(values, place)


def size_of(values: Any) -> int:
    """Returns the bytes that the tensors of a tree need in a buffer."""
    reading = _Reading()
    reading.plain(values, "")
    return _layout(reading.storages)[1]


def _layout(storages: list[torch.UntypedStorage]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Returns offset and size of each storage, and the size of all."""
    places = []
    end = 0
    for storage in storages:
        places.append((end, storage.nbytes()))
        end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    return tuple(places), end


def rebuild(snapshot: StateSnapshot, memory: torch.Tensor) -> Any:
    """Returns the tree of a snapshot with tensors again, which are views of the buffer.

    Args:
        snapshot: what to rebuild.
        memory: the buffer, `(bytes,)` uint8.
    """
    storages = [
        # Each is a storage of its own: else `torch.save` would write the whole buffer.
        _storage_at(memory, offset, size)
        for offset, size in snapshot.storages
    ]

    def value(part: Any) -> Any:
        kind = type(part)
        if kind is TensorReference:
            return _tensor_at(part, storages[part.storage])
        if kind is Pickled:
            return torch.load(io.BytesIO(part.data), weights_only=True)
        if kind is dict:
            return {key: value(one) for key, one in part.items()}
        if kind is OrderedDict:
            ordered = OrderedDict((key, value(one)) for key, one in part.items())
            vars(ordered).update(value(vars(part)))
            return ordered
        if kind in {list, tuple, set}:
            return kind(value(one) for one in part)
        return part

    return value(snapshot.tree)


def _storage_at(memory: torch.Tensor, offset: int, size: int) -> torch.UntypedStorage:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    view = memory[offset : offset + size].numpy()
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _tensor_at(reference: TensorReference, storage: torch.UntypedStorage) -> torch.Tensor:
    tensor = torch.empty(0, dtype=reference.dtype)
    tensor.set_(storage, reference.offset, reference.size, reference.stride)
    if reference.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=reference.requires_grad)
    return tensor.requires_grad_(reference.requires_grad)


class SnapshotBuffer:
    """The memory that states are copied into, kept from one snapshot to the next; it grows, never shrinks.

    Not thread-safe, but for `prepare`, which another thread may run while a snapshot is taken.

    Args:
        available: returns the bytes of memory that are free.
    """

    def __init__(self, available: Callable[[], int | None] | None = None) -> None:
        self._available = available or available_memory
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
            free = self._available()
            if free is not None and size > free * _MEMORY_SHARE:
                raise NotEnoughMemoryError(
                    f"a copy of the state needs {size >> 20} MiB of memory, {free >> 20} MiB are available"
                )
            self._release()
            self.identifier += 1
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
        reading = _Reading()
        tree = reading.plain(values, "")
        places, size = _layout(reading.storages)
        self.reserve(size)
        devices = set()
        for storage, (offset, count) in zip(reading.storages, places, strict=True):
            if not count:
                continue
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.memory[offset : offset + count].copy_(source, non_blocking=True)
            if storage.device.type == "cuda":
                devices.add(storage.device)
        return StateSnapshot(tree, places, self.identifier), functools.partial(_wait, _events_on(devices))

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
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with self._lock:
                if self.memory is memory:
                    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                    self._is_pinned = int(runtime.cudaHostRegister(memory.data_ptr(), len(memory), 1)) == 0


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
