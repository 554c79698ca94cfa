"""The values that a checkpoint may hold: one table for checking, copying and reading them.

`torch.load(weights_only=True)` must return each value equal and with the same type. That holds for the types
below, within the limits below. Other values are converted to one of them, or torch's reader is tried on the
value itself: sparse and quantized tensors, types that the user declared safe.
Everything else is refused when it is saved, with its location.
"""

import functools
import io
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from events.errors import CheckpointError

__all__ = [
    "PlainWalk",
    "RefusedError",
    "check_memory",
    "has_plain_storage",
    "load_asked",
    "mapped",
    "plain_values",
]

_LEAVES = frozenset({type(None), bool, float, complex, torch.Size, torch.dtype, torch.device, torch.layout})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
# torch's reader takes integers of up to 255 bytes.
_INT_BITS = 2039
_INT_LIMIT = 1 << _INT_BITS
# Each level takes stack frames here, in pickle, and in the writing process.
_MAX_DEPTH = 100
_SHOWN_BITS = 64
_OPEN = object()


class RefusedError(Exception):
    """A checkpoint cannot hold a value; the message describes it."""


def _exact_number(value: np.generic) -> Any:
    number = value.item() if value.dtype.kind in "biufc" else value
    if isinstance(number, np.generic):
        raise RefusedError(f"a numpy scalar of type {value.dtype}")
    return number


def _tensor_of(array: "np.ndarray[Any, Any]") -> torch.Tensor:
    if type(array) not in {np.ndarray, np.memmap}:
        raise RefusedError(f"a {type(array).__name__}, which a tensor cannot represent")
    # Big-endian, read-only, or with strides that a tensor cannot have: copied.
    native = np.require(array, array.dtype.newbyteorder("="), ["C", "W", "E"])
    try:
        return torch.from_numpy(native)
    except TypeError as error:
        raise RefusedError(f"an array of type {array.dtype}") from error


def _int(value: int) -> int:
    if not -_INT_LIMIT <= value < _INT_LIMIT:
        raise RefusedError(f"an int of {value.bit_length()} bits, where {_INT_BITS} can be read,")
    return value


# Empty bytes are pickled by the name of their class, which torch.load does not allow.
_LIMITED: dict[type, Callable[[Any], Any]] = {
    int: _int,
    str: str,
    bytes: lambda value: value or bytearray(),
    bytearray: bytearray,
}

# Called on the plain type, because a subclass may override `__str__` and so on.
_CONVERSIONS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (np.generic, _exact_number),
    (np.ndarray, _tensor_of),
    (int, int.__int__),
    (float, float.__float__),
    (complex, complex.__complex__),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (list, lambda value: list(list.__iter__(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: set(frozenset.__iter__(value))),
    (Mapping, dict),
)


class PlainWalk:
    """Walks a tree of values, checks them, and makes them plain; tensors are kept."""

    def __init__(self) -> None:
        self._depth = 0
        # The keys of a refused value, last key first.
        self._path: list[Any] = []
        # By identity, with the value to keep it alive: a value that occurs twice stays one.
        self._known: dict[int, tuple[Any, Any]] = {}
        self._types: dict[int, torch.dtype] = {}

    def values(self, value: Any, place: str = "") -> Any:
        """Returns a tree of plain values.

        Raises:
            CheckpointError: a value would not be loaded by `torch.load(weights_only=True)`.
        """
        try:
            return self._plain(value)
        except MemoryError:
            raise
        except Exception as error:
            found = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
            where = place + "".join(f"/{_shown(key)}" for key in reversed(self._path))
            text = (
                f"checkpoint must hold tensors and plain values, got {found} at {where}. "
                "Return numbers, strings, lists and dictionaries from state_dict."
            )
            raise CheckpointError(text.encode(errors="backslashreplace").decode()) from error

    def stored(self, tensor: torch.Tensor) -> Any:
        """Returns the stand-in for a tensor with a plain storage."""
        storage = tensor.untyped_storage()
        check_memory(tensor, storage.nbytes())
        pointer = storage.data_ptr()
        if not pointer or self._types.setdefault(pointer, tensor.dtype) is tensor.dtype:
            return tensor
        # torch.save refuses memory of two types.
        copy = tensor.detach().clone()
        is_parameter = type(tensor) is torch.nn.Parameter
        return (
            torch.nn.Parameter(copy, tensor.requires_grad)
            if is_parameter
            else copy.requires_grad_(tensor.requires_grad)
        )

    def asked(self, value: Any, data: bytes) -> Any:
        """Returns the stand-in for a value that torch's reader was tried on.

        Args:
            value: the value.
            data: the output of `torch.save` for it.
        """
        return value

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return value
        if kind in _TENSORS and has_plain_storage(value):
            return self.stored(value)
        if kind in _CONTAINERS:
            return self._container(value, kind)
        limited = _LIMITED.get(kind)
        if limited is not None:
            return limited(value)
        if not isinstance(value, torch.Tensor):
            for base, convert in _CONVERSIONS:
                if isinstance(value, base):
                    return self._plain(convert(value))
        return self.asked(value, _asked(value))

    def _container(self, value: Any, kind: type) -> Any:
        known, plain = self._known.get(id(value), (None, None))
        if plain is _OPEN:
            raise RefusedError(f"a {kind.__name__} that contains itself")
        if known is not None:
            return plain
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RefusedError(f"more than {_MAX_DEPTH} levels")
        self._known[id(value)] = (value, _OPEN)
        key: Any = None
        try:
            if kind is dict or kind is OrderedDict:
                plain = kind()
                for key, one in value.items():
                    plain[key if type(key) is str else self._key(key)] = self._plain(one)
                if kind is OrderedDict and vars(value):
                    # A module's `state_dict` has the versions of its parts in an attribute.
                    vars(plain).update(self._plain(vars(value)))
            else:
                each = self._key if kind is set else self._plain
                plain = []
                for key, one in enumerate(value):  # noqa: B007  # where one is refused
                    plain.append(each(one))
                plain = plain if kind is list else kind(plain)
        except Exception:
            self._path.append(key)
            raise
        if len(plain) != len(value):
            raise RefusedError(f"a {kind.__name__} in which two keys become the same")
        self._known[id(value)] = (value, plain)
        self._depth -= 1
        return plain

    def _key(self, key: Any) -> Any:
        plain = self._plain(key)
        if not _is_key(plain):
            raise RefusedError(f"a {type(key).__name__} as a key or in a set")
        return plain


def _is_key(value: Any) -> bool:
    kind = type(value)
    return kind in _LEAVES or kind in {int, str, bytes} or (kind is tuple and all(map(_is_key, value)))


def _shown(key: Any) -> str:
    """Returns a key as text; one that may be long or run foreign code, as its type."""
    kind = type(key)
    is_short = kind is str or kind in {bool, float, type(None)}
    if is_short or (kind is int and key.bit_length() <= _SHOWN_BITS):
        return str(key)
    return f"<{kind.__name__}>"


def plain_values(values: Any, place: str = "") -> Any:
    """Returns values as `torch.load(weights_only=True)` reads them; tensors are not copied.

    Raises:
        CheckpointError: a checkpoint cannot hold them; the message names the location.
    """
    return PlainWalk().values(values, place)


def mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns a tree of containers with mapped leaves; a container that occurs twice stays one."""
    known: dict[int, Any] = {}

    def value(part: Any) -> Any:
        kind = type(part)
        if kind not in _CONTAINERS:
            return leaf(part)
        if id(part) in known:
            return known[id(part)]
        if kind is dict or kind is OrderedDict:
            found = kind((key, value(one)) for key, one in part.items())
            if kind is OrderedDict and vars(part):
                vars(found).update(value(vars(part)))
        else:
            found = kind(map(value, part))
        known[id(part)] = found
        return found

    return value(tree)


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is just a view of a storage in host or GPU memory."""
    return (
        type(tensor) in _TENSORS
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        # Excludes quantized types.
        and _is_readable(tensor.dtype)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
    )


def check_memory(tensor: torch.Tensor, size: int) -> None:
    """Raises RefusedError if the memory of a tensor, of `size` bytes, has been freed."""
    if not size and tensor.numel():
        raise RefusedError("a tensor whose memory has been freed")


@functools.cache
def _is_readable(dtype: torch.dtype) -> bool:
    """Returns whether torch's reader knows tensors of this type."""
    try:
        _asked(torch.empty(0, dtype=dtype))
    except (RefusedError, RuntimeError, UserWarning):
        return False
    return True


def _asked(value: Any) -> bytes:
    """Returns the output of `torch.save` for a value, if torch's reader can load it.

    Raises:
        RefusedError: it cannot.
    """
    kind: type = type(value)
    if kind.__module__.startswith("torch.") and kind in torch.serialization.get_safe_globals():
        raise RefusedError(f"a {kind.__name__}, which torch.load reads only where its module is imported,")
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.is_meta:
        raise RefusedError("a tensor on the device 'meta', which has no values,")
    data = io.BytesIO()
    try:
        if is_tensor and value.device.type != "cpu":
            value = value.detach().cpu()
        torch.save(value, data)
        loaded = load_asked(data.getvalue())
    except Exception as error:
        problem = f": {error}" if is_tensor else ""
        raise RefusedError(f"a {kind.__name__}{problem}") from error
    if type(loaded) is not type(value):
        raise RefusedError(f"a {kind.__name__}, which torch.load reads as a {type(loaded).__name__},")
    return data.getvalue()


def load_asked(data: bytes) -> Any:
    """Loads a value from the output of `torch.save`; runs no code from it."""
    return torch.load(io.BytesIO(data), weights_only=True)
