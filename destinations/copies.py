"""Copies, merges, and measures logged values, for destinations that keep them."""

import copy
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from events import safe_text

__all__ = ["merged", "own_copy", "size_in_bytes"]

_DEEPEST = 100
_IMMUTABLE = (str, bytes, bool, int, float, type(None), PurePath)


def own_copy(value: Any, parents: tuple[Any, ...] = ()) -> Any:
    """Returns a deep copy of a value; tensors are detached and copied to host memory.

    A value that can't be copied (a lock, a generator, an open file, a meta tensor) becomes its text, and so
    does a value that contains itself or is nested more than a hundred levels deep.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) in {dict, list, tuple}:
        if len(parents) >= _DEEPEST or any(value is parent for parent in parents):
            return f"<{type(value).__name__} that contains itself, or is nested too deeply>"
        parents = (*parents, value)
        if type(value) is dict:
            return {key: own_copy(item, parents) for key, item in value.items()}
        return type(value)(own_copy(item, parents) for item in value)
    try:
        if hasattr(value, "detach") and hasattr(value, "cpu"):
            return value.detach().to("cpu", copy=True)
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  # anything may refuse to be copied, for a reason of its own
        return safe_text(value)


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested mappings; new values win."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        is_nested = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before or {}, value) if is_nested else value
    return result


def size_in_bytes(value: Any) -> int:
    """Returns the size of the arrays, images, texts, and bytes in a value."""
    if isinstance(value, Mapping):
        return sum(map(size_in_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_in_bytes, value)) + 8 * len(value)
    if isinstance(value, bytes | str):
        return len(value)
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if hasattr(value, "getbands"):
        return int(value.width * value.height * len(value.getbands()))
    return 0
