"""The names of a module's weights, as in the plain module, even if it or a part of it is compiled."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["load_weights_into", "plain_name", "weights_of"]

_COMPILED = "_orig_mod"


def plain_name(name: str) -> str:
    """Returns the name of a weight or a module without what `torch.compile` adds."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def weights_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Returns the `state_dict` of a module by plain names."""
    weights: Mapping[str, Any] = module.state_dict()
    return _renamed(weights, plain_name) if any(_COMPILED in name for name in weights) else weights


def load_weights_into(module: Any, weights: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Loads weights by their plain names; returns what `load_state_dict` does."""
    own = (*module.state_dict(), *(name for name, _ in module.named_modules()))
    if any(_COMPILED in name for name in own):
        names = {plain_name(name): name for name in own}
        weights = _renamed(weights, lambda name: names.get(name, name))
    return module.load_state_dict(weights, strict=strict)


def _renamed(weights: Mapping[str, Any], name_of: Callable[[str], str]) -> Mapping[str, Any]:
    renamed: OrderedDict[str, Any] = OrderedDict((name_of(name), value) for name, value in weights.items())
    # The versions of the module's parts, by their names.
    if (versions := getattr(weights, "_metadata", None)) is not None:
        vars(renamed)["_metadata"] = OrderedDict((name_of(name), one) for name, one in versions.items())
    return renamed
