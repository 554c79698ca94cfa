"""Waits for another thread or process without taking the processor that it needs."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["open_files", "until"]

_POLL_SECONDS = 0.01


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Waits until a condition holds.

    Raises:
        AssertionError: it didn't within the limit.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(_POLL_SECONDS)


def open_files() -> set[str]:
    """Returns the targets of this process's descriptors: paths, and names such as `socket:[123]`.

    Threads of earlier tests may open and close files meanwhile; a file that is closed during the call is left out.
    """
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    return found
