"""The random number generators that training draws from: seeding, saving and restoring them."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from .reachable import reach

__all__ = [
    "generator_states",
    "generators_in",
    "parts_of",
    "random_state_of",
    "restore_generators",
    "restore_random_state",
    "seed_all",
]

# Attributes that may hold generators; the live iterator holds queues and processes.
_PARTS = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # users' datasets draw from the legacy generator
    torch.manual_seed(seed)


def random_state_of(dataloader: Any) -> dict[str, Any]:
    """Returns the states of the global generators, and of the dataloader's generators by their location."""
    return {"global": _global_state(), "dataloader": generator_states(generators_in(dataloader))}


def restore_random_state(state: Mapping[str, Any], dataloader: Any) -> list[str]:
    """Restores the result of `random_state_of`; returns the locations of missing generators."""
    _restore_global_state(state["global"])
    return restore_generators(state["dataloader"], generators_in(dataloader))


def generators_in(dataloader: Any) -> dict[str, Any]:
    """Returns the generators in a dataloader, by their location."""
    return reach(parts_of(dataloader)).generators


def generator_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of generators, by their location."""
    return {place: _state(one) for place, one in generators.items()}


def restore_generators(saved: Mapping[str, Any], generators: Mapping[str, Any]) -> list[str]:
    """Restores the result of `generator_states`; returns the locations of missing generators."""
    return [place for place, one in saved.items() if not _has_restored(generators.get(place), one)]


def parts_of(dataloader: Any) -> dict[str, Any]:
    """Returns the parts of a dataloader to search for generators, by name."""
    parts = {
        name: getattr(dataloader, name) for name in _PARTS if getattr(dataloader, name, None) is not None
    }
    # Other kinds of loaders may have them anywhere.
    return parts if isinstance(dataloader, torch.utils.data.DataLoader) else {"": dataloader, **parts}


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
    is_cuda_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
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
        "cuda": torch.cuda.get_rng_state_all() if is_cuda_used else [],
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


# How to get and set the state of a generator, by type.
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
