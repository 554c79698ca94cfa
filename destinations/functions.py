"""`Functions`: a destination made of functions, without a class."""

import difflib
from collections.abc import Callable
from typing import Any

from events import WriteRate

from .base import LoggerDestination

__all__ = ["Functions"]

_TAKEN = tuple(
    name for name in vars(LoggerDestination) if name.startswith("log_") or name in {"flush", "upload_file"}
)


class Functions(LoggerDestination):
    """Passes each kind of record to a function.

    ```python
    losses = []
    Trainer(..., loggers=[Functions(log_metrics=lambda metrics, step: losses.append(metrics["loss"]))])
    ```

    A function has the name, the arguments and the rules of a method of `LoggerDestination`: it is called in
    the training thread, must be quick, and must not change its arguments. Its exceptions don't stop training.
    Kinds without a function are ignored.

    Args:
        write_rate: how often metrics are passed on; None for every call.
        functions: by the name of a method, such as `log_metrics`, `log_text` or `flush`.

    Raises:
        TypeError: a name isn't a method of `LoggerDestination`, or a value isn't a function.
    """

    def __init__(self, *, write_rate: WriteRate | None = None, **functions: Callable[..., Any]) -> None:
        super().__init__(write_rate=write_rate)
        for name, function in functions.items():
            if name not in _TAKEN:
                near = difflib.get_close_matches(name, _TAKEN, n=1)
                raise TypeError(
                    f"unknown method {name!r} of LoggerDestination. "
                    f"Write {near[0] if near else 'log_metrics'}=…; there are {', '.join(_TAKEN)}."
                )
            if not callable(function):
                raise TypeError(f"{name} must be a function, got {function!r:.80}.")
            setattr(self, name, function)
        self._takes_files = "upload_file" in functions

    def can_upload_files(self) -> bool:
        return self._takes_files
