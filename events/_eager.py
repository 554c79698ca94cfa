"""Keeps `torch.compile` out of functions that a compiled region comes to call."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["eager"]

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that is run as it stands, with all that it calls, where a compiled region calls it.

    `torch.compiler.disable` would do so at once, and import the compiler, which takes seconds, for programs without one.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(sys.modules["torch"].compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
