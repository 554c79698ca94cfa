"""Copies of what was logged, for destinations that keep it: the original belongs to the caller, who may change it."""

import copy
from pathlib import PurePath
from typing import Any

__all__ = ["own_copy"]

_IMMUTABLE = (str, bytes, bool, int, float, type(None), PurePath)


def own_copy(value: Any) -> Any:
    """Returns a value that shares nothing with the given one; tensors come out detached and in host memory.

    What cannot be copied (a lock, a generator, an open file) is returned as its text.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is dict:
        return {key: own_copy(item) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(own_copy(item) for item in value)
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return value.detach().to("cpu", copy=True)
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  # anything may refuse to be copied, for a reason of its own
        return repr(value)
