"""Finds modules and random number generators among the objects that the trainer's arguments reach.

Everything runs in the training thread. The search is bounded and computes no property.
"""

import contextlib
import functools
import itertools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from .weights import plain_name

__all__ = ["GENERATORS", "Reached", "reach"]

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The kinds of random number generators whose states are saved."""

_STATEFUL = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_DEPTH = 8
_OBJECTS = 2000
_ITEMS = 32
# Attributes of a torch module besides its weights, with room to spare.
_OBJECTS_OF_MODULE = 16
_NEVER_INSIDE = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    types.ModuleType,
    torch.Tensor,
    np.ndarray,
    np.generic,
    random.SystemRandom,
)
# Most attributes of a module; skipping them early makes the search of a large model fast.
_PLAIN = frozenset({bool, int, float, str, type(None), torch.device, torch.dtype})
_CONTAINERS = frozenset({dict, OrderedDict, set, list, tuple})
# These hold the run itself, threads and process groups, but no objects of the user.
_CLOSED = ("events.", "destinations.", "uploads.", "torch.")
_OPEN = "torch.utils.data"


@attrs.frozen
class Reached:
    """The found objects, nearest first and each once, by a location such as "dataset.transform.rng".

    Attributes:
        generators: torch's, numpy's and Python's generators.
        parts: outermost modules, without wrappers; optimizers, schedulers and gradient scalers.
        is_whole: whether the search was complete.
    """

    generators: dict[str, Any]
    parts: dict[str, Any]
    is_whole: bool


def reach(roots: Mapping[str, Any], seen: set[int] | None = None) -> Reached:
    """Searches objects, nearest first.

    It searches attributes, the first 32 items of lists, tuples and dictionaries, arguments of
    `functools.partial`, the object of a bound method, closures, and modules and generators among the globals
    that a function names; eight levels deep, in 2,000 objects. The attributes of all modules of a model are
    searched at any depth. Other globals, and the inside of extension types, are not.

    Args:
        roots: the objects to start from, by name.
        seen: identities of objects to skip; searched objects are added.
    """
    found = Reached({}, {}, is_whole=True)
    seen = set() if seen is None else seen
    limit = len(seen) + _OBJECTS
    waiting = deque((name, root, 0) for name, root in roots.items())
    while waiting:
        place, value, depth = waiting.popleft()
        value = value.module if isinstance(value, DistributedDataParallel) else value
        if _is_nothing(value) or id(value) in seen:
            continue
        if len(seen) >= limit:
            return attrs.evolve(found, is_whole=False)
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            found.generators[place] = value
        elif isinstance(value, torch.nn.Module):
            found.parts[place] = value
            new = [pair for pair in value.named_modules() if pair[1] is value or id(pair[1]) not in seen]
            seen.update(id(module) for _, module in new)
            limit += len(new) * (1 + _OBJECTS_OF_MODULE)
            for path, module in new:
                inside = f"{place}.{plain_name(path)}".strip(".")
                waiting.extend((f"{inside}{tail}", one, depth + 1) for tail, one in _beside(module))
        elif depth and isinstance(value, _STATEFUL):
            found.parts[place] = value
        elif depth < _DEPTH and not (depth and _is_closed(value)):
            waiting.extend((f"{place}{tail}".lstrip("."), one, depth + 1) for tail, one in _inside(value))
    return found


def _is_nothing(value: Any) -> bool:
    """Returns whether a value holds nothing of interest."""
    is_empty = isinstance(value, dict | list | tuple) and not value
    return value is None or is_empty or isinstance(value, _NEVER_INSIDE)


def _is_closed(value: Any) -> bool:
    owner = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return str(owner).startswith(_CLOSED) and not str(owner).startswith(_OPEN)


def _beside(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a module except its weights, submodules and plain values."""
    if _is_closed(module) and not type(module).__module__.startswith("torch.nn."):
        return
    for name, one in list(vars(module).items()):
        kind = type(one)
        is_plain = kind in _PLAIN or (kind in _CONTAINERS and not one)
        if not is_plain and name not in {"_parameters", "_buffers", "_modules"}:
            yield f".{name}", one


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the contents of an object with their paths; computes no property."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # Nothing is assigned yet.
                yield f".{name}", cell.cell_contents
        yield from ((".__defaults__", value.__defaults__), (".__kwdefaults__", value.__kwdefaults__))
        for name in value.__code__.co_names:
            if isinstance(one := value.__globals__.get(name), (torch.nn.Module, *GENERATORS)):
                yield f".{name}", one
        return
    if isinstance(value, dict):
        items = list(itertools.islice(value.items(), _ITEMS))
        yield from ((f"[{key!r}]", one) for key, one in items if isinstance(key, str | int))
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", one) for index, one in enumerate(value[:_ITEMS]))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{name}", one) for name, one in list(attributes.items()) if name != "_iterator")
    kind: Any = type(value)
    for name, slot in _slots_of(kind):
        with contextlib.suppress(AttributeError):
            yield f".{name}", slot.__get__(value)


@functools.lru_cache(1024)
def _slots_of(kind: type) -> tuple[tuple[str, types.MemberDescriptorType], ...]:
    return tuple(
        (name, one)
        for base in kind.__mro__
        for name, one in vars(base).items()
        if isinstance(one, types.MemberDescriptorType)
    )
