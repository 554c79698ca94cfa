"""Copies of logged values, for destinations that keep them: the originals belong to the caller."""

import copy
from pathlib import PurePath
from typing import Any

from events import safe_text

__all__ = ["own_copy"]

_DEEPEST = 100
_IMMUTABLE = (str, bytes, bool, int, float, type(None), PurePath)


def own_copy(value: Any, parents: tuple[Any, ...] = ()) -> Any:
    """Returns a value that shares nothing with the given one; tensors come out detached and in host memory.

    What cannot be copied (a lock, a generator, an open file, a meta tensor) is returned as its text.
    So is what contains itself or is nested more than a hundred levels deep.
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
