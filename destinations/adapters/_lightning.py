"""What loggers and callbacks of Lightning are made from, in each of the two packages that have them."""

import importlib
import importlib.util
from typing import Any

from ._optional import missing

__all__ = ["CallbackBase", "LoggerBase"]


def _class_trees() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Returns the base classes of loggers and of callbacks in each Lightning package that is installed."""
    loggers, callbacks, error = [], [], None
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            if importlib.util.find_spec(package.partition(".")[0]) is None:
                continue
            loggers.append(importlib.import_module(f"{package}.loggers").Logger)
            callbacks.append(importlib.import_module(f"{package}.callbacks").Callback)
        except (
            ImportError,
            ValueError,
        ) as failure:  # One that is broken must not keep the other from being used.
            error = failure
    if not loggers:
        raise missing(
            "lightning", "lightning", ImportError(error or "neither it nor pytorch_lightning is there")
        )
    return tuple(loggers), tuple(callbacks)


_LOGGERS, _CALLBACKS = _class_trees()
LoggerBase: Any = type("LoggerBase", _LOGGERS, {})
CallbackBase: Any = type("CallbackBase", _CALLBACKS, {})
