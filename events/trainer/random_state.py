"""The random number generators that training draws from: seeding, finding, saving and restoring them."""

import contextlib
import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = [
    "find_generators",
    "generator_states",
    "parts_of",
    "random_state_of",
    "restore_generators",
    "restore_random_state",
    "seed_all",
]

_DEPTH = 8
_OBJECTS = 2000
_ITEMS = 32
# Where a dataloader and its parts keep their own; its live iterator holds queues and processes.
_PARTS = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")
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


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # users' datasets draw from the legacy generator
    torch.manual_seed(seed)


def random_state_of(dataloader: Any) -> dict[str, Any]:
    """Returns the states of the global generators and, by their place, of those that the dataloader holds."""
    return {"global": _global_state(), "dataloader": generator_states(dataloader)}


def restore_random_state(state: Mapping[str, Any], dataloader: Any) -> list[str]:
    """Restores what `random_state_of` returned; returns the places where there is no such generator now."""
    _restore_global_state(state["global"])
    return restore_generators(state["dataloader"], dataloader)


def generator_states(dataloader: Any) -> dict[str, Any]:
    """Returns the states of the generators that a dataloader holds, by their place."""
    return {place: _state(one) for place, one in find_generators(parts_of(dataloader))[0].items()}


def restore_generators(saved: Mapping[str, Any] | list[Any], dataloader: Any) -> list[str]:
    """Restores what `generator_states` returned; returns the places where there is no such generator now."""
    found, _ = find_generators(parts_of(dataloader))
    if not isinstance(saved, Mapping):
        # An older checkpoint has those of torch, of the loader and its samplers, in this order.
        own = [
            place
            for place, one in found.items()
            if isinstance(one, torch.Generator)
            and place.startswith(("generator", "sampler", "batch_sampler"))
        ]
        saved = dict(zip(own, saved, strict=False))
    return [place for place, one in saved.items() if not _has_restored(found.get(place), one)]


def parts_of(dataloader: Any) -> dict[str, Any]:
    """Returns the parts of a dataloader where generators are looked for, by name."""
    parts = {
        name: getattr(dataloader, name) for name in _PARTS if getattr(dataloader, name, None) is not None
    }
    # One of another kind has them anywhere.
    return parts if isinstance(dataloader, torch.utils.data.DataLoader) else {"": dataloader, **parts}


def find_generators(roots: Mapping[str, Any], *, ignoring: object = None) -> tuple[dict[str, Any], bool]:
    """Looks for random number generators in objects, nearest first.

    They are found in attributes, in the first 32 items of lists, tuples and dictionaries, in arguments of
    `functools.partial`, and in what a function has captured; eight deep, in 2,000 objects. Those in global
    variables of a module, and inside types of other extensions, are not found.

    Args:
        roots: where to begin, by name.
        ignoring: an object that is not looked into.

    Returns:
        torch's, numpy's and Python's generators by their place, such as "dataset.transform.rng", each once;
        and whether everything was looked at.
    """
    found: dict[str, Any] = {}
    seen = {id(ignoring)}
    waiting = deque((name, value, 0) for name, value in roots.items())
    kinds = tuple(_KINDS)
    while waiting:
        place, value, depth = waiting.popleft()
        if value is None or isinstance(value, _NEVER_INSIDE) or id(value) in seen:
            continue
        if len(seen) >= _OBJECTS:
            return found, False
        seen.add(id(value))
        if isinstance(value, kinds):
            found[place] = value
        elif depth < _DEPTH:
            waiting.extend((f"{place}{name}".lstrip("."), one, depth + 1) for name, one in _inside(value))
    return found, True


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object holds, with how it is reached; computes no property."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # Nothing is assigned yet.
                yield f".{name}", cell.cell_contents
        yield from ((".__defaults__", value.__defaults__), (".__kwdefaults__", value.__kwdefaults__))
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


def _state(generator: Any) -> Any:
    """Returns the state of a generator as plain values; torch's is a tensor."""
    return next(get(generator) for kind, (get, _) in _KINDS.items() if isinstance(generator, kind))


def _has_restored(generator: Any, state: Any) -> bool:
    """Gives a generator its state; returns False if there is none, or the state is of another kind."""
    try:
        next(put for kind, (_, put) in _KINDS.items() if isinstance(generator, kind))(generator, state)
    except (StopIteration, AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return False
    return True


def _python_state(generator: Any) -> dict[str, Any]:
    """Returns the state of a generator of Python's, or of the module `random`."""
    version, words, gauss = generator.getstate()
    return {"version": version, "words": list(words), "gauss": gauss}


def _set_python_state(generator: Any, state: Mapping[str, Any]) -> None:
    generator.setstate((state["version"], tuple(state["words"]), state["gauss"]))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _global_state() -> dict[str, Any]:
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return {
        "python": _python_state(random),
        "numpy": {
            "keys": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "cached_gaussian": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def _restore_global_state(state: dict[str, Any]) -> None:
    legacy = state["numpy"]
    _set_python_state(random, state["python"])
    np.random.set_state(  # noqa: NPY002
        (
            "MT19937",
            legacy["keys"].numpy().astype(np.uint32),
            legacy["position"],
            legacy["has_gauss"],
            legacy["cached_gaussian"],
        )
    )
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


# How the state of a generator is got and set, by its type.
_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    torch.Generator: (lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    random.Random: (_python_state, _set_python_state),
    np.random.Generator: (
        lambda one: _plain(one.bit_generator.state),
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
    np.random.RandomState: (
        lambda one: _plain(one.get_state(legacy=False)),
        lambda one, state: one.set_state(state),
    ),
}
