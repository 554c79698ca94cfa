"""One conversion for all destinations: whatever a user logs as a metric becomes a Python number.

Runs in the training thread. A destination never sees a tensor as a metric, and never one on a device. Nothing here waits
for a device; what lies on one is set aside, for `_device` to copy.
"""

import argparse
import dataclasses
import enum
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from operator import attrgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import attrs

from events.errors import RecordError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "BinnedValues",
    "FlatMetrics",
    "flatten_metrics",
    "host_metrics",
    "is_function",
    "is_on_device",
    "is_plain",
    "plain_config",
    "quick_host_metrics",
    "safe_text",
    "short",
    "to_host",
]

_LEAVES = (str, bool, float, type(None))
_DEEPEST = 100
# Python refuses to write an integer of more than 4,300 digits in decimal.
_LONGEST_INTEGER_BITS = 14_000


def plain_config(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dictionaries with string keys, lists, strings, numbers, booleans and None.

    Takes mappings, attrs classes and dataclasses (with or without slots), namespaces, named tuples, pydantic
    models and OmegaConf, nested in any way. Enum members become their values, paths, dtypes, devices and whatever else
    has no plain form become their text. A value that contains itself, is nested more than a hundred levels deep, or cannot
    be read, becomes a text that says so; the others are not affected. The configuration itself is not changed, and nothing
    in the result is shared with it.

    Raises:
        TypeError: the configuration as a whole is none of these.
    """
    plain = _plain(config)
    if not isinstance(plain, dict):
        raise TypeError(
            f"hyperparameters must be a mapping or a config object, got {type(config).__name__}. "
            'Write log_hyperparameters({"name": value}).'
        )
    return plain


def safe_text(value: Any) -> str:
    """Returns the text of a value, or one that says that it has none."""
    try:
        return "".join(str(value))
    except Exception as error:  # noqa: BLE001  # a user's own class
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


def _plain(value: Any, parents: tuple[Any, ...] = ()) -> Any:
    if type(value) in _LEAVES:
        return value
    if any(value is parent for parent in parents):
        return f"<{type(value).__name__} that contains itself>"
    if len(parents) >= _DEEPEST:
        return f"<{type(value).__name__} nested too deeply>"
    try:
        return _plain_inside(value, (*parents, value))
    except Exception:  # noqa: BLE001  # a user's own class
        return safe_text(value)


def _plain_inside(value: Any, parents: tuple[Any, ...]) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value, parents)
    fields = _fields(value)
    if fields is not None:
        return {
            key if type(key) is str else safe_text(_plain(key, parents)): _plain(item, parents)
            for key, item in fields.items()
        }
    if isinstance(value, list | tuple | set | frozenset) or _is_list_config(value):
        items = sorted(value, key=safe_text) if isinstance(value, set | frozenset) else value
        return [_plain(item, parents) for item in items]
    return _leaf(value, parents)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Returns what is inside something with named parts, or None."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        try:
            container = omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=False)
        except (
            omegaconf.errors.OmegaConfBaseException
        ):  # An interpolation that leads nowhere stays as it is written.
            container = omegaconf.OmegaConf.to_container(value, resolve=False)
        return container if isinstance(container, dict) else None
    if isinstance(value, Mapping):
        return value
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value)
    if isinstance(value, type):
        return None
    if attrs.has(type(value)):
        return _set_fields(value, attrs.fields(type(value)))
    if dataclasses.is_dataclass(value):
        return _set_fields(value, dataclasses.fields(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: dict[str, Any] = value._asdict()
        return named
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return {
            name: getattr(value, name) for name in (*type(value).model_fields, *(value.model_extra or ()))
        }
    return None


def _set_fields(value: Any, fields: Iterable[Any]) -> dict[str, Any]:
    """Returns the fields that have a value; one declared with `init=False` may have none yet."""
    return {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}


def _is_list_config(value: Any) -> bool:
    """Recognises a list of OmegaConf, which is no `list`; it resolves what it holds as it is gone through."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and omegaconf.OmegaConf.is_list(value)


def _leaf(value: Any, parents: tuple[Any, ...]) -> Any:
    """Returns numbers of other libraries as Python's own, and everything else as text."""
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _plain(value.item(), parents)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return _plain(value.tolist(), parents)
    if isinstance(value, bool | int | float | str):
        # A subclass, such as a boolean or integer flag of another library.
        number = next(base(value) for base in (bool, int, float, str) if isinstance(value, base))
        return (
            hex(number) if isinstance(number, int) and number.bit_length() > _LONGEST_INTEGER_BITS else number
        )
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return safe_text(value)


_MOST_SAMPLES = 10_000
_NORMAL_BINS = 64
_NORMAL_REACH = 4.0
_NORMAL_COUNT = 1000.0


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@attrs.frozen(repr=False)
class BinnedValues:
    """How many values lie between which edges, where the values themselves are not at hand.

    ```python
    logger.log_histogram(BinnedValues(counts=[3, 5], edges=[0.0, 0.5, 1.0]), "scores")
    logger.log_histogram(BinnedValues.normal(mean=0.1, std=2.0), "weights")
    ```

    Destinations that know it write counts and edges as they are; to others it is an array of at most 10,000 values that are
    distributed so, all in the middle of their bins.

    Args:
        counts: one for each bin, 0 or more; whole or not.
        edges: rising, one more than counts.
        count: how many values there are, non-finite ones among them; the sum of the counts where it is not given.
        non_finite: how many of them were NaN or infinite, and are in no bin.
        min: the least value; without it, the lower edge of the first bin that is not empty.
        max: the greatest value; without it, the upper edge of the last bin that is not empty.
        mean: their mean; without it, that of the middles of the bins.
        std: their standard deviation, divided by their number; without it, that of the middles of the bins.

    Raises:
        RecordError: the edges do not rise, their number does not fit, or a count is negative.
    """

    counts: tuple[float, ...] = attrs.field(converter=_floats)
    edges: tuple[float, ...] = attrs.field(converter=_floats)
    count: float | None = None
    non_finite: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None

    def __attrs_post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise RecordError(
                f"binned values must have one edge more than counts, got {len(self.counts)} counts and "
                f"{len(self.edges)} edges."
            )
        if not all(math.isfinite(low) and low < high < math.inf for low, high in self._bins()):
            raise RecordError(f"binned values must have rising edges, got {self.edges[:4]}…")
        if not all(0 <= count < math.inf for count in self.counts):
            raise RecordError("binned values must have counts of 0 or more, got others among them.")

    @classmethod
    def normal(cls, mean: float, std: float) -> "BinnedValues":
        """Returns a normal distribution, in 64 bins that reach four standard deviations to both sides.

        Raises:
            RecordError: mean or standard deviation is not finite, or the latter is negative.
        """
        if not (math.isfinite(mean) and 0 <= std < math.inf):
            raise RecordError(
                f"distribution must have a finite mean and std of 0 or more, got {mean} and {std}."
            )
        # A width that a float at this place can show.
        width = std or max(abs(mean) * 1e-6, 1e-6)
        edges = [
            mean + width * _NORMAL_REACH * (2 * index / _NORMAL_BINS - 1) for index in range(_NORMAL_BINS + 1)
        ]
        below = [math.erf((edge - mean) / (width * math.sqrt(2))) / 2 for edge in edges]
        counts = [_NORMAL_COUNT * (above - under) for under, above in itertools.pairwise(below)]
        return cls(counts, edges, min=edges[0], max=edges[-1], mean=mean, std=std)

    def record(self) -> dict[str, Any]:
        """Returns counts, edges and moments, as destinations write them."""
        total = math.fsum(self.counts)
        filled = [edges for edges, count in zip(self._bins(), self.counts, strict=True) if count]
        mean, std = self._moments(total)
        mean = mean if self.mean is None else self.mean
        return {
            "count": _whole(total + self.non_finite if self.count is None else self.count),
            "non_finite": self.non_finite,
            "counts": [_whole(count) for count in self.counts] if filled else [],
            "edges": list(self.edges) if filled else [],
            "min": self.min if self.min is not None or not filled else filled[0][0],
            "max": self.max if self.max is not None or not filled else filled[-1][1],
            "mean": mean,
            "std": std if self.std is None else self.std,
            "sum": None if mean is None else mean * total,
        }

    def _moments(self, total: float) -> tuple[float | None, float | None]:
        if not total:
            return None, None
        weighed = [
            ((low + high) / 2, count) for (low, high), count in zip(self._bins(), self.counts, strict=True)
        ]
        mean = math.fsum(middle * count for middle, count in weighed) / total
        return mean, math.sqrt(math.fsum((middle - mean) ** 2 * count for middle, count in weighed) / total)

    def _bins(self) -> list[tuple[float, float]]:
        return list(itertools.pairwise(self.edges))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        import numpy as np

        total = math.fsum(self.counts)
        scale = min(1.0, _MOST_SAMPLES / total) if total else 0.0
        middles = np.array([(low + high) / 2 for low, high in self._bins()], dtype or np.float64)
        return np.repeat(middles, [round(count * scale) for count in self.counts])

    def __repr__(self) -> str:
        return f"BinnedValues({len(self.counts)} bins from {self.edges[0]:g} to {self.edges[-1]:g})"


def _whole(count: float) -> float:
    return int(count) if count == int(count) else count


_PLAIN_TYPES = frozenset({float, int, bool})
ARE_PLAIN = _PLAIN_TYPES.issuperset
_is_cpu = attrgetter("is_cpu")


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
    has_cuda: Callable[[], bool] = staticmethod(lambda: True)


def _tensor_types() -> frozenset[type]:
    torch = sys.modules.get("torch")
    if torch is not None and not _Torch.tensor_types and hasattr(torch, "nn"):
        _Torch.has_cuda = torch.cuda.is_initialized
        _Torch.tensor_types = frozenset({torch.Tensor, torch.nn.Parameter})
    return _Torch.tensor_types


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
