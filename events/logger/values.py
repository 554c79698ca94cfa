"""Converts the numbers that users log to host values, once for all destinations.

Training thread only. Destinations never get a tensor as a metric, nor any tensor on a device. Nothing here
waits for a device; values on one are left for `device` to copy.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import attrs

from events.errors import RecordError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "PLAIN_TYPES",
    "BinnedValues",
    "FlatMetrics",
    "TorchHooks",
    "are_plain_types",
    "are_real",
    "flatten_metrics",
    "host_metrics",
    "host_number",
    "is_function",
    "is_on_device",
    "local_shard",
    "map_nested",
    "picker",
    "read_numbers",
    "short_repr",
    "to_host",
]

_MAX_DEPTH = 100
_MAX_SAMPLES = 10_000
_NORMAL_BINS = 64
_NORMAL_DEVIATIONS = 4.0
_NORMAL_COUNT = 1000.0


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@attrs.frozen(repr=False)
class BinnedValues:
    """A histogram given as counts and edges instead of values.

    ```python
    logger.log_histogram(BinnedValues(counts=[3, 5], edges=[0.0, 0.5, 1.0]), "scores")
    logger.log_histogram(BinnedValues.normal(mean=0.1, std=2.0), "weights")
    ```

    Destinations that support it write counts and edges as they are; for others it converts to an array of at
    most 10,000 values at the centers of the bins.

    Args:
        counts: one per bin, at least 0, not necessarily whole.
        edges: increasing, one more than counts.
        count: the number of values, with non-finite ones. Default: the sum of the counts and `non_finite`.
        non_finite: the number of NaN and infinite values, which are in no bin.
        min: the minimum. Default: the lower edge of the first bin that is not empty.
        max: the maximum. Default: the upper edge of the last bin that is not empty.
        mean: the mean. Default: the mean of the bin centers.
        std: the population standard deviation. Default: computed from the bin centers.

    Raises:
        RecordError: the edges do not increase, their number is wrong, or a count is negative.
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
            raise RecordError(f"binned values must have increasing edges, got {self.edges[:4]}…")
        if not all(0 <= count < math.inf for count in self.counts):
            raise RecordError("binned values must have counts of 0 or more.")

    @classmethod
    def normal(cls, mean: float, std: float) -> "BinnedValues":
        """Returns a normal distribution in 64 bins, up to four standard deviations to both sides.

        Raises:
            RecordError: mean or standard deviation is not finite, or the latter is negative.
        """
        if not (math.isfinite(mean) and 0 <= std < math.inf):
            raise RecordError(
                f"distribution must have a finite mean and std of 0 or more, got {mean} and {std}."
            )
        # At least the resolution of a float of this size.
        width = std or max(abs(mean) * 1e-6, 1e-6)
        edges = [
            mean + width * _NORMAL_DEVIATIONS * (2 * index / _NORMAL_BINS - 1)
            for index in range(_NORMAL_BINS + 1)
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
        scale = _MAX_SAMPLES / max(total, _MAX_SAMPLES)
        middles = np.array([(low + high) / 2 for low, high in self._bins()], dtype or np.float64)
        return np.repeat(middles, [round(count * scale) for count in self.counts])

    def __repr__(self) -> str:
        return f"BinnedValues({len(self.counts)} bins from {self.edges[0]:g} to {self.edges[-1]:g})"


def _whole(count: float) -> float:
    return int(count) if count == int(count) else count


PLAIN_TYPES = frozenset({float, int, bool})
are_plain_types = PLAIN_TYPES.issuperset
_is_cpu = attrgetter("is_cpu")


def short_repr(value: Any, length: int = 40) -> str:
    """Returns the beginning of a value's `repr`, or a placeholder if that raises."""
    try:
        return f"{value!r:.{length}}"
    except Exception as error:  # noqa: BLE001  # a user's own class
        return f"<{type(value).__name__} without a repr: {type(error).__name__}>"


class TorchHooks:
    """What the fast path needs of torch, once the program has imported it; never imported here."""

    tensor_types: frozenset[type] = frozenset()
    item: Callable[[Any], Any] = staticmethod(lambda tensor: tensor.item())
    has_cuda: Callable[[], bool] = staticmethod(lambda: True)
    is_traced: Callable[[], bool] = staticmethod(lambda: bool(_tensor_types()) and TorchHooks.is_traced())


def _tensor_types() -> frozenset[type]:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "nn"):
        TorchHooks.has_cuda = torch.cuda.is_initialized
        TorchHooks.item = torch.Tensor.item
        # Of the functions that say so the shortest; `torch.compile` takes it for True.
        TorchHooks.is_traced = torch.compiler.is_dynamo_compiling
        TorchHooks.tensor_types = frozenset({torch.Tensor, torch.nn.Parameter})
    return TorchHooks.tensor_types


def are_real(numbers: dict[str, Any]) -> bool:
    """Returns whether what `read_numbers` returned are real numbers.

    Raises:
        TypeError: a name is not a string.
    """
    "".join(numbers)
    return complex not in map(type, numbers.values())


def read_numbers(metrics: Any) -> dict[str, Any] | None:
    """Returns Python's numbers and tensors in host memory as numbers, None if there are others.

    The numbers may be complex, and the names may not be strings; see `are_real`.

    Raises:
        Exception: metrics are not a mapping, or a tensor has many elements.
    """
    if type(metrics) is not dict:
        # A TensorDict is a mapping, but iterates over its batch.
        metrics = dict(metrics.items())
    tensor_types = TorchHooks.tensor_types or _tensor_types()
    values = metrics.values()
    # Without CUDA, tensors need not be checked one by one: other devices are waited for.
    look = TorchHooks.has_cuda()
    if tensor_types.issuperset(map(type, values)):
        if look and not all(map(_is_cpu, values)):
            return None
        # All in C: a loop would take a microsecond more for ten tensors.
        return dict(zip(metrics, map(TorchHooks.item, values)))  # noqa: B905  # as many
    numbers = {}
    for name, value in metrics.items():
        kind = type(value)
        if kind in PLAIN_TYPES:
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
        values: numbers, tensors on a device, and functions.
        on_device: the names of tensors on a device.
        functions: the names of functions.
        errors: name and message of each invalid value.
        separator: what joins the names of nested metrics.
    """

    values: dict[str, Any] = attrs.field(factory=dict)
    on_device: list[str] = attrs.field(factory=list)
    functions: list[str] = attrs.field(factory=list)
    errors: list[tuple[str, str]] = attrs.field(factory=list)
    separator: str = "/"


def flatten_metrics(metrics: Any, prefix: str = "") -> FlatMetrics:
    """Returns metrics by their full names: nested ones are flattened, joined with "/".

    Booleans and integers keep their types. Scalars of numpy, torch and other array libraries, of any dtype,
    are converted; of a DTensor, the local shard.
    """
    flat = FlatMetrics()
    _collect(metrics.items(), prefix, flat, (metrics,))
    return flat


def host_metrics(metrics: Mapping[str, Any], *, keys_sep: str = "/") -> tuple[dict[str, float], list[str]]:
    """Returns metrics as Python numbers, and a message for each invalid one; waits for devices.

    ```python
    metrics, errors = host_metrics({"loss": torch.tensor(0.5), "eval": {"top1": 0.25}})
    print(metrics)  # {'loss': 0.5, 'eval/top1': 0.25}
    ```

    What is no number, such as a string, None or an array of several values, is left out, with a message;
    torchrl's own loggers pass it on.

    Args:
        metrics: as for `Logger.log_metrics`; nested mappings and TensorDicts are flattened.
        keys_sep: what joins the names of nested metrics.
    """
    flat = FlatMetrics(separator=keys_sep)
    _collect(metrics.items(), "", flat, (metrics,))
    for name in flat.on_device:
        flat.values[name] = flat.values[name].item()
    for name in flat.functions:
        flat.errors.append((name, _scalar_error(name, flat.values.pop(name))))
    return flat.values, [message for _, message in flat.errors]


def picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """Returns what takes the values at these places of a sequence."""
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


def is_on_device(value: Any) -> bool:
    """Returns whether a value is a tensor outside host memory."""
    return getattr(value, "is_cpu", True) is False and not getattr(value, "is_meta", False)


def is_function(value: Any) -> bool:
    """Returns whether a value is a function to be called for it; classes, metrics and models are not."""
    try:
        return (
            callable(value)
            and not isinstance(value, type)
            and not hasattr(value, "shape")
            and not hasattr(value, "forward")
            and not hasattr(value, "compute")
        )
    except Exception:  # noqa: BLE001  # attributes that raise
        return False


def to_host(value: Any, copy: Callable[[Any], Any] | None = None) -> Any:
    """Returns tensors detached and in host memory, in lists, tuples and dicts too; everything else as it is.

    A tensor on the meta device, which has no values, becomes its text. A tensor in host memory is not copied.

    Args:
        value: the value to convert.
        copy: starts the copy of a tensor on a device. Default: wait for the device.
    """

    def one_to_host(one: Any) -> Any:
        if not (hasattr(one, "detach") and hasattr(one, "cpu")):
            return one
        one = local_shard(one)
        if getattr(one, "is_meta", False):
            return str(one)  # No values to copy.
        return copy(one) if copy is not None and is_on_device(one) else one.detach().cpu()

    return map_nested(one_to_host, value)


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to what nested lists, tuples and dicts contain; returns a copy of them."""
    match value:
        case list() | tuple():
            return [map_nested(function, item) for item in value]
        case dict():
            return {key: map_nested(function, item) for key, item in value.items()}
    return function(value)


def _collect(
    items: Iterable[tuple[Any, Any]], prefix: str, flat: FlatMetrics, parents: tuple[Any, ...] = ()
) -> None:
    for key, value in items:
        if not isinstance(key, str):
            text = f"metric must have a string as its name, got {short_repr(key)} ({type(key).__name__})."
            flat.errors.append((short_repr(key), text))
            continue
        name = prefix + key
        try:
            if type(value) in TorchHooks.tensor_types and is_on_device(value) and name not in flat.values:
                _collect_on_device(name, value, flat)
            else:
                _collect_item(name, value, flat, parents)
        except Exception as error:  # noqa: BLE001  # a value's own methods; the others are logged
            text = f"metric {name!r} must be a scalar, got {short_repr(value)}: {error!r:.200}."
            flat.errors.append((name, text))


def _collect_item(name: str, value: Any, flat: FlatMetrics, parents: tuple[Any, ...]) -> None:
    is_plain = type(value) in PLAIN_TYPES
    if not is_plain and isinstance(value, Mapping):
        if len(parents) > _MAX_DEPTH or any(value is parent for parent in parents):
            text = f"metric {name!r:.80} must be a scalar, got a dict that contains itself."
            flat.errors.append((name[:80], text))
        else:
            _collect(value.items(), f"{name}{flat.separator}", flat, (*parents, value))
    elif name in flat.values:
        text = f"metric {name!r} must be given once, got it again from a nested dict. Rename one of them."
        flat.errors.append((name, text))
    elif is_plain:
        flat.values[name] = value
    else:
        _collect_one(name, value, flat)


def _collect_one(name: str, value: Any, flat: FlatMetrics) -> None:
    if type(value).__name__ == "NonTensorData":  # How a TensorDict wraps other values.
        value = value.data
    value = local_shard(value)
    if is_on_device(value):
        _collect_on_device(name, value, flat)
    elif is_function(value):
        flat.values[name] = value
        flat.functions.append(name)
    else:
        number = host_number(value)
        if number is None:
            flat.errors.append((name, _scalar_error(name, value)))
        else:
            flat.values[name] = number


def _collect_on_device(name: str, value: Any, flat: FlatMetrics) -> None:
    if math.prod(value.shape) == 1 and not value.dtype.is_complex:
        flat.values[name] = value
        flat.on_device.append(name)
    else:
        flat.errors.append((name, _scalar_error(name, value)))


def local_shard(value: Any) -> Any:
    """Returns the local shard of a DTensor: the full tensor would need a collective."""
    return value.to_local() if hasattr(value, "to_local") and hasattr(value, "placements") else value


def host_number(value: Any) -> float | None:
    """Returns the number of a scalar of any library, waiting for its device; None for anything else."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item"):
        if math.prod(shape) != 1:
            return None
        try:
            value = value.item()
        except Exception:  # noqa: BLE001  # a tensor without data, or an error of a library
            return None
    match value:
        case bool() | int() | float():
            return value
        case Real():
            return float(value)
    return None


def _scalar_error(name: str, value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) != 1:
        got = f"shape {tuple(shape)}"
        hint = "Log a mean, or use log_histogram."
    elif getattr(value, "is_meta", False):
        got, hint = "a tensor on the meta device", "It has no value."
    elif shape is not None:
        got, hint = f"a value of dtype {getattr(value, 'dtype', None)}", "Log a real number."
    elif type(value) is str:
        got, hint = f"the string {value!r:.40}", "Use log_text."
    elif type(value) in {list, tuple}:
        got, hint = f"a {type(value).__name__} of {len(value)}", "Log a mean, or use log_histogram."
    elif hasattr(value, "compute"):
        got, hint = f"a {type(value).__name__}", "Log what its compute() returns."
    else:
        got, hint = f"{short_repr(value)} ({type(value).__name__})", "Log a number."
    return f"metric {name!r} must be a scalar, got {got}. {hint}"
