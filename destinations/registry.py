"""Destinations by name, for configuration files: from this package, from others, and registered ones.

A package adds a destination with an entry point in the group `training_destinations.destinations`. Its value
is a class or another factory. Destinations are imported on first use.
"""

from __future__ import annotations

import importlib
import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import LoggerDestination
    from .trackers.tracker import Tracker

__all__ = ["ENTRY_POINT_GROUP", "MODULES", "create_destination", "register_destination", "trackers"]

_log = logging.getLogger("destinations")

ENTRY_POINT_GROUP = "training_destinations.destinations"

MODULES = {
    "Artifacts": ".artifacts",
    "Comet": ".trackers.comet",
    "Console": ".text.console",
    "Functions": ".functions",
    "Health": ".health",
    "InMemory": ".in_memory",
    "LoggerDestination": ".base",
    "MLflow": ".trackers.mlflow",
    "ProgressBar": ".text.progress_bar",
    "RunDirectory": ".run_directory",
    "Slack": ".trackers.webhook",
    "TensorBoard": ".trackers.tensorboard",
    "TextFile": ".text.text_file",
    "Trackio": ".trackers.trackio",
    "WandB": ".trackers.wandb",
    "Webhook": ".trackers.webhook",
}
"""The modules of our own classes, relative to `destinations`."""

_lock = threading.Lock()  # Guards the table.
_factories: dict[str, Callable[..., LoggerDestination]] = {}


def register_destination(name: str, factory: Callable[..., LoggerDestination]) -> None:
    """Registers a destination under a name, for this process.

    ```python
    register_destination("memory", lambda: InMemory(max_records=1000))
    Trainer(..., loggers=[create_destination("memory")])
    ```

    Args:
        name: the name for `create_destination`.
        factory: a class, or a function that returns a destination.

    Raises:
        ValueError: the name is one of ours, or has another factory already.
    """
    if name in MODULES:
        raise ValueError(f"{name!r} is a destination of training-destinations; choose another name")
    with _lock:
        if _factories.setdefault(name, factory) is not factory:
            raise ValueError(f"the name {name!r} has a destination already: {_factories[name]!r}")


def create_destination(name: str = "", /, **arguments: Any) -> LoggerDestination:
    """Creates a destination by its name, with arguments from a configuration.

    ```python
    destination = create_destination("TextFile", filename="logs/{run_name}.txt")
    ```

    Args:
        name: the name of one of our classes ("Console"), of an entry point, or a registered one. A keyword
            `name=` is used if this one is missing.
        arguments: for its constructor, which may have a `name` too.

    Raises:
        ValueError: the name is unknown.
        ImportError: a required package is not installed.
    """
    factory = _factory_of(name or arguments.pop("name", ""))
    destination: LoggerDestination = factory(**arguments)
    return destination


def trackers() -> dict[str, type[Tracker]]:
    """Returns all tracker classes by lower-case name: from this package, from others, and registered ones.

    Imports the classes, but not the packages that they log with.
    """
    from .trackers.tracker import Tracker

    found = {}
    for name in sorted(_names(), key=str.lower):
        if MODULES.get(name, ".trackers.").startswith(".trackers."):
            try:
                factory: Any = _factory_of(name)
            except Exception as error:  # noqa: BLE001  # another package's, the others are wanted
                _log.warning("destination %r cannot be imported: %s", name, error)
                continue
            if isinstance(factory, type) and issubclass(factory, Tracker):
                found[name.lower()] = factory
    return found


def _installed() -> Any:
    from importlib import metadata  # Costs more than the rest of `import destinations`.

    return metadata.entry_points(group=ENTRY_POINT_GROUP)


def _names() -> list[str]:
    return sorted({*MODULES, *_factories, *_installed().names} - {"LoggerDestination"})


def _factory_of(name: str) -> Callable[..., Any]:
    if name in MODULES and name != "LoggerDestination":
        factory: Callable[..., Any] = getattr(importlib.import_module(MODULES[name], __package__), name)
        return factory
    with _lock:
        if name in _factories:
            return _factories[name]
    installed = _installed()
    if name in installed.names:
        register_destination(name, installed[name].load())
        return _factories[name]
    import difflib

    known = _names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"unknown destination {name!r}{hint} Known: {', '.join(known)}.")
