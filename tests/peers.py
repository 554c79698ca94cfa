"""Finds packages that tests read but don't install; see .ci/peers.txt."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

__all__ = ["folder_of", "spec_of"]

PEERS = Path(sys.prefix) / "peers"


def spec_of(name: str) -> ModuleSpec | None:
    """Returns the spec of a package among the peers, else of an installed one, else None."""
    return PathFinder.find_spec(name, [str(PEERS), *sys.path])


def folder_of(name: str) -> str | None:
    """Returns the folder of a package, or None."""
    spec = spec_of(name)
    return next(iter(spec.submodule_search_locations or ()), None) if spec else None
