"""One conversion for all destinations: whatever a user logs as a metric becomes a Python number.

Runs in the training thread. A destination never sees a tensor as a metric, and never one on a device. Nothing here waits
for a device; what lies on one is set aside, for `_device` to copy.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from operator import attrgetter
from typing import Any

import attrs

__all__ = [
    "FlatMetrics",
    "flatten_metrics",
    "host_metrics",
    "is_function",
    "is_on_device",
    "is_plain",
    "quick_host_metrics",
    "reader_of",
    "short",
    "to_host",
]

_PLAIN_TYPES = frozenset({float, int, bool})
ARE_PLAIN = _PLAIN_TYPES.issuperset
_is_cpu = attrgetter("is_cpu")
_DEEPEST = 100


def short(value: Any, length: int = 40) -> str:
    """Returns the beginning of a value's `repr`, or of a text that says that it has none."""
    try:
        return f"{value!r:.{length}}"
    except Exception as error:  # noqa: BLE001  # a user's own class
        return f"<{type(value).__name__} without a repr: {type(error).__name__}>"


def is_plain(metrics: Mapping[str, Any]) -> bool:
    """Says whether there is nothing to convert: string keys, and Python's own numbers.

    This is asked at each call: both halves run in C, in a third of a microsecond for ten metrics.
    """
    try:
        if ARE_PLAIN(map(type, metrics.values())):
            "".join(metrics)
            return True
    except Exception:  # noqa: BLE001, S110  # no mapping, or a name that is no string
        pass
    return False


class _Torch:
    """What of torch is needed on the short way, once somebody has imported it; never imported from here."""

    tensor_types: frozenset[type] = frozenset()
    are_tensors: Callable[[Any], bool] = staticmethod(frozenset[type]().issuperset)
    item: Callable[[Any], Any] | None = None
    has_cuda: Callable[[], bool] = staticmethod(lambda: True)


def _tensor_types() -> frozenset[type]:
    torch = sys.modules.get("torch")
    if torch is not None and not _Torch.tensor_types and hasattr(torch, "nn"):
        _Torch.has_cuda = torch.cuda.is_initialized
        _Torch.item = torch.Tensor.item
        _Torch.tensor_types = frozenset({torch.Tensor, torch.nn.Parameter})
        _Torch.are_tensors = _Torch.tensor_types.issuperset
    return _Torch.tensor_types


def reader_of(metrics: Any) -> Callable[[Any], Any] | None:
    """Returns what reads each value, where all are plain tensors in host memory; else None.

    What it reads may still be no number, and it raises where a tensor has several elements. It knows tensors once
    `quick_host_metrics` has met some.
    """
    if type(metrics) is not dict:
        return None
    if not _Torch.are_tensors(map(type, metrics.values())):
        return None
    # Without CUDA no tensor is on a device that is worth not waiting for, and a look at each can be saved.
    return None if _Torch.has_cuda() and not all(map(_is_cpu, metrics.values())) else _Torch.item


def quick_host_metrics(metrics: Any) -> dict[str, float] | None:
    """Returns metrics as Python numbers, or None where that takes a second look.

    The short way for what training loops log most: numbers and tensors of one element in host memory, not nested. What
    `Tensor.item` itself takes is most of it.
    """
    try:
        if type(metrics) is not dict:
            # A TensorDict is a mapping, but going through it goes through its batch.
            metrics = dict(metrics.items())
        numbers = _numbers_of(metrics)
        # A complex number has no place among metrics, and shows in a sum; this is faster than a look at each.
        if numbers is not None and type(sum(numbers.values())) is not complex:
            "".join(numbers)
            return numbers
    except Exception:  # noqa: BLE001, S110  # no mapping, many elements: whatever it is, the long way says it better
        pass
    return None


def _numbers_of(metrics: dict[str, Any]) -> dict[str, float] | None:
    tensor_types = _Torch.tensor_types or _tensor_types()
    values = metrics.values()
    # Without CUDA no tensor is on a device that is worth not waiting for, and a look at each can be saved.
    look = _Torch.has_cuda()
    if tensor_types.issuperset(map(type, values)):
        if look and not all(map(_is_cpu, values)):
            return None
        # A copy has its size at once; what grows is built anew on the way.
        numbers = metrics.copy()
        for name, value in numbers.items():
            numbers[name] = value.item()
        return numbers
    numbers = {}
    for name, value in metrics.items():
        kind = type(value)
        if kind in _PLAIN_TYPES:
            numbers[name] = value
        elif kind in tensor_types and (not look or value.is_cpu):
            numbers[name] = value.item()
        else:
            return None
    return numbers


@attrs.define(eq=False)
class FlatMetrics:
    """Metrics by their full names, in the caller's order.

    Attributes:
        values: numbers; tensors on a device and functions stand where their numbers will be.
        on_device: which names have tensors on a device.
        functions: which names have functions.
        errors: a sentence for each one that is no number.
    """

    values: dict[str, Any] = attrs.field(factory=dict)
    on_device: list[str] = attrs.field(factory=list)
    functions: list[str] = attrs.field(factory=list)
    errors: list[str] = attrs.field(factory=list)


def flatten_metrics(metrics: Any, prefix: str = "") -> FlatMetrics:
    """Returns metrics by their full names: nested mappings and TensorDicts are flattened, names joined with "/".

    Booleans and integers stay what they are. Scalars of numpy, torch and other array libraries, of any dtype, are read;
    of a DTensor, the part that this rank has.
    """
    flat = FlatMetrics()
    _collect(metrics.items(), prefix, flat, (metrics,))
    return flat


def host_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Returns metrics as Python numbers, and a sentence for each one that is no number; waits for devices."""
    flat = flatten_metrics(metrics)
    for name in flat.on_device:
        flat.values[name] = flat.values[name].item()
    for name in flat.functions:
        flat.errors.append(_complaint(name, flat.values.pop(name)))
    return flat.values, flat.errors


def is_on_device(value: Any) -> bool:
    """Says whether a value is a tensor outside of host memory."""
    return getattr(value, "is_cpu", True) is False and not getattr(value, "is_meta", False)


def is_function(value: Any) -> bool:
    """Says whether a value is to be had by calling it; a class, a metric and a model are none."""
    try:
        return (
            callable(value)
            and not isinstance(value, type)
            and not hasattr(value, "shape")
            and not hasattr(value, "forward")
            and not hasattr(value, "compute")
        )
    except Exception:  # noqa: BLE001  # attributes that raise when they are looked at
        return False


def to_host(value: Any, copy: Callable[[Any], Any] | None = None) -> Any:
    """Returns tensors detached and in host memory, in lists, tuples and dicts too; everything else as it is.

    A tensor on the meta device, which has no values, becomes its text.

    A tensor that is in host memory already is not copied.

    Args:
        value: what is converted.
        copy: what to do with a tensor on a device; without it, the device is waited for.
    """
    if isinstance(value, list | tuple):
        return [to_host(item, copy) for item in value]
    if isinstance(value, dict):
        return {key: to_host(item, copy) for key, item in value.items()}
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = _local(value)
        if getattr(value, "is_meta", False):
            return str(value)  # It has no values that could be copied.
        return copy(value) if copy is not None and is_on_device(value) else value.detach().cpu()
    return value


def _collect(
    items: Iterable[tuple[Any, Any]], prefix: str, flat: FlatMetrics, parents: tuple[Any, ...] = ()
) -> None:
    for key, value in items:
        if not isinstance(key, str):
            flat.errors.append(
                f"metric must have a string as its name, got {short(key)} ({type(key).__name__})."
            )
            continue
        name = prefix + key
        try:
            _collect_item(name, value, flat, parents)
        except Exception as error:  # noqa: BLE001  # a value's own methods; the others are logged
            flat.errors.append(f"metric {name!r} must be a scalar, got {short(value)}: {error!r:.200}.")


def _collect_item(name: str, value: Any, flat: FlatMetrics, parents: tuple[Any, ...]) -> None:
    tensor_types = _tensor_types()
    kind = type(value)
    if kind not in _PLAIN_TYPES and kind not in tensor_types and isinstance(value, Mapping):
        if len(parents) > _DEEPEST or any(value is parent for parent in parents):
            flat.errors.append(f"metric {name!r:.80} must be a scalar, got a dict that contains itself.")
        else:
            _collect(value.items(), f"{name}/", flat, (*parents, value))
    elif name in flat.values:
        flat.errors.append(
            f"metric {name!r} must be given once, got it again from a nested dict. Rename one of them."
        )
    elif kind in _PLAIN_TYPES:
        flat.values[name] = value
    elif kind not in tensor_types or not _collect_tensor(name, value, flat):
        _collect_one(name, value, flat)


def _collect_tensor(name: str, value: Any, flat: FlatMetrics) -> bool:
    """Takes a plain tensor of one element in host memory, and says whether it was one."""
    if not value.is_cpu or value.numel() != 1:
        return False
    number = value.item()
    if type(number) not in _PLAIN_TYPES:
        return False
    flat.values[name] = number
    return True


def _collect_one(name: str, value: Any, flat: FlatMetrics) -> None:
    if type(value).__name__ == "NonTensorData":  # What a TensorDict wraps other things in.
        value = value.data
    value = _local(value)
    if is_on_device(value):
        if math.prod(value.shape) == 1 and not value.dtype.is_complex:
            flat.values[name] = value
            flat.on_device.append(name)
        else:
            flat.errors.append(_complaint(name, value))
    elif is_function(value):
        flat.values[name] = value
        flat.functions.append(name)
    else:
        number = _number(value)
        if number is None:
            flat.errors.append(_complaint(name, value))
        else:
            flat.values[name] = number


def _local(value: Any) -> Any:
    """Returns the part of a DTensor that this rank has: the whole would take all ranks, and wait for them."""
    return value.to_local() if hasattr(value, "to_local") and hasattr(value, "placements") else value


def _number(value: Any) -> float | None:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item"):
        if math.prod(shape) != 1:
            return None
        try:
            value = value.item()
        except Exception:  # noqa: BLE001  # a tensor without data, a library's own reasons
            return None
    if isinstance(value, bool | int | float):
        return value
    return float(value) if isinstance(value, Real) else None


def _complaint(name: str, value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) != 1:
        got = f"shape {tuple(shape)}"
        hint = "Log a mean, or use log_histogram."
    elif getattr(value, "is_meta", False):
        got, hint = "a tensor on the meta device", "It has no value."
    elif shape is not None:
        got, hint = f"a value of dtype {getattr(value, 'dtype', None)}", "Log a real number."
    elif isinstance(value, str):
        got, hint = f"the string {value!r:.40}", "Use log_text."
    elif isinstance(value, list | tuple):
        got, hint = f"a {type(value).__name__} of {len(value)}", "Log a mean, or use log_histogram."
    elif hasattr(value, "compute"):
        got, hint = f"a {type(value).__name__}", "Log what its compute() returns."
    else:
        got, hint = f"{short(value)} ({type(value).__name__})", "Log a number."
    return f"metric {name!r} must be a scalar, got {got}. {hint}"
