"""One conversion for all destinations: whatever a user logs as a metric becomes a Python number.

Runs in the training thread. A destination never sees a tensor as a metric.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

__all__ = ["host_metrics", "is_plain", "to_host"]

_PLAIN_TYPES = frozenset({float, int, bool})
_ARE_PLAIN = _PLAIN_TYPES.issuperset


def is_plain(metrics: Mapping[str, Any]) -> bool:
    """Says whether there is nothing to convert: string keys, and Python's own numbers.

    This is asked at each call: both halves run in C, in a third of a microsecond for ten metrics.
    """
    try:
        "".join(metrics)
        return _ARE_PLAIN(map(type, metrics.values()))
    except (TypeError, AttributeError):  # No mapping, or a name that is no string.
        return False


def host_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Returns metrics as Python numbers, and a sentence for each one that is no number.

    Nested mappings are flattened, their keys joined with "/". Booleans and integers stay what they are. Scalars of
    numpy, torch and other array libraries, of any dtype, are read; on a device, that waits for the device.
    """
    values: dict[str, float] = {}
    errors: list[str] = []
    _collect(metrics, "", values, errors)
    return values, errors


def to_host(value: Any) -> Any:
    """Returns tensors detached and in host memory, in lists and tuples too; everything else as it is.

    A tensor that is in host memory already is not copied.
    """
    if isinstance(value, list | tuple):
        return [to_host(item) for item in value]
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return value.detach().cpu()
    return value


def _collect(metrics: Mapping[Any, Any], prefix: str, values: dict[str, float], errors: list[str]) -> None:
    for key, value in metrics.items():
        if not isinstance(key, str):
            errors.append(f"metric must have a string as its name, got {key!r} ({type(key).__name__}).")
        elif isinstance(value, Mapping):
            _collect(value, f"{prefix}{key}/", values, errors)
        elif type(value) in _PLAIN_TYPES:
            values[prefix + key] = value
        else:
            number = _number(value)
            if number is None:
                errors.append(_complaint(prefix + key, value))
            else:
                values[prefix + key] = number


def _number(value: Any) -> float | None:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item"):
        if math.prod(shape) != 1:
            return None
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    return float(value) if isinstance(value, Real) else None


def _complaint(name: str, value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) != 1:
        got = f"shape {tuple(shape)}"
        hint = "Log a mean, or use log_histogram."
    elif shape is not None:
        got, hint = f"a value of dtype {getattr(value, 'dtype', None)}", "Log a real number."
    elif isinstance(value, str):
        got, hint = f"the string {value!r:.40}", "Use log_text."
    elif isinstance(value, list | tuple):
        got, hint = f"a {type(value).__name__} of {len(value)}", "Log a mean, or use log_histogram."
    else:
        got, hint = f"{value!r:.40} ({type(value).__name__})", "Log a number."
    return f"metric {name!r} must be a scalar, got {got}. {hint}"
