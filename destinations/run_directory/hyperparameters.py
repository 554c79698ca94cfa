"""Hyperparameters with dotted names, as the sidecar has them."""

from collections.abc import Mapping
from typing import Any

from .files import strict_json

__all__ = ["flat_hyperparameters"]

_LONGEST_LIST = 100


def flat_hyperparameters(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns hyperparameters with dotted names, indices of lists among them; long lists stay one text."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), item)
        elif isinstance(value, list | tuple) and 0 < len(value) <= _LONGEST_LIST:
            for index, item in enumerate(value):
                add(f"{prefix}.{index}", item)
        elif isinstance(value, Mapping | list | tuple):
            flat[prefix] = strict_json(value)
        else:
            flat[prefix] = value

    add("", dict(hyperparameters))
    return flat if hyperparameters else {}
