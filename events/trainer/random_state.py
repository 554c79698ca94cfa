"""The random number generators that training draws from: seeding, saving and restoring them."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["random_state_of", "restore_random_state", "seed_all"]


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # users' datasets draw from the legacy generator
    torch.manual_seed(seed)


def random_state_of(dataloader: Any) -> dict[str, Any]:
    """Returns the states of the global generators and of the dataloader's own."""
    return {
        "global": _global_state(),
        "dataloader": [generator.get_state() for generator in _generators_of(dataloader)],
    }


def restore_random_state(state: Mapping[str, Any], dataloader: Any) -> None:
    """Restores what `random_state_of` returned."""
    _restore_global_state(state["global"])
    for generator, saved in zip(_generators_of(dataloader), state["dataloader"], strict=False):
        generator.set_state(saved)


def _global_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "cached_gaussian": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_global_state(state: dict[str, Any]) -> None:
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
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


def _generators_of(dataloader: Any) -> list[torch.Generator]:
    """Returns the distinct generators that a dataloader and its samplers own."""
    samplers = [getattr(dataloader, name, None) for name in ("sampler", "batch_sampler")]
    found: list[torch.Generator] = []
    for owner in (dataloader, *samplers, getattr(samplers[1], "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is one for one in found):
            found.append(generator)
    return found
