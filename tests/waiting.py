"""Waiting for what another thread or process does, without taking the processor that it needs."""

import time
from collections.abc import Callable

__all__ = ["until"]

_POLL_SECONDS = 0.01


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Waits until a condition holds.

    Raises:
        AssertionError: it still does not after so long.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(_POLL_SECONDS)
