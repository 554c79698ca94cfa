"""Arguments of a queue: checks of seconds, workers, bytes and choices, and the timeouts and fence."""

import math
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import attrs

__all__ = ["Fence", "Timeouts", "check_bytes", "check_choice", "check_seconds", "check_workers"]


def check_seconds(name: str, seconds: float) -> float:
    """Returns the seconds, capped at the maximum that `threading` can wait.

    Raises:
        ValueError: Negative, or not a number.
    """
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{name} must be a number of seconds from 0 to inf, got {seconds}")
    return min(float(seconds), threading.TIMEOUT_MAX / 2)


def check_workers(workers: int) -> None:
    """Raises ValueError for less than one worker, and TypeError for anything but a whole number."""
    if not isinstance(workers, int):
        raise TypeError(f"workers must be a whole number, got {workers!r}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")


def check_bytes(name: str, count: object) -> None:
    """Raises TypeError for a size that isn't a number, such as "10GB"."""
    if not isinstance(count, int | float) or math.isnan(count):
        raise TypeError(f"{name} must be a number of bytes, got {count!r}. Write 10 * 2**30 for 10 GiB.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def _limit(name: str, seconds: float) -> Any:
    return attrs.field(default=seconds, converter=lambda given: check_seconds(name, given), kw_only=True)


@attrs.frozen
class Timeouts:
    """The timeouts of an upload queue, in seconds from 0 to inf.

    ```python
    queue = UploadQueue("store", timeouts=Timeouts(exit_seconds=120))
    ```

    Attributes:
        full_wait_seconds: How long `submit` waits for room in the spool before it refuses a file.
        exit_seconds: How long uploads may take at interpreter exit, or at the end of a `with` block.
        give_back_seconds: How much longer `close` may wait for uploads in flight.
        grace_seconds: How long a worker process continues after the end of the training process.

    Raises:
        ValueError: Negative, or not a number.
    """

    full_wait_seconds: float = _limit("full_wait_seconds", 0.0)
    exit_seconds: float = _limit("exit_seconds", 30.0)
    give_back_seconds: float = _limit("give_back_seconds", 5.0)
    grace_seconds: float = _limit("grace_seconds", 600.0)


@attrs.frozen
class Fence:
    """Protects a successor's files from this process, in case it was wrongly taken for dead.

    ```python
    fence = Fence(unless="live/0004/successor.json", prefix="live/0004/")
    queue = UploadQueue("store", fence=fence)
    ```

    A successor puts the object `unless` before it writes anything. From then on this queue, including the
    files that wait in its spool, deletes nothing and changes nothing outside `prefix`. A file goes below
    `prefix` instead, under its quoted name; a pointer is not sent.

    Attributes:
        unless: The name of the object.
        prefix: Beginning of names that no other process uses; ends with a slash.
    """

    unless: str
    prefix: str

    def instead_of(self, name: str) -> str:
        """Returns a file's name once the successor is there; empty if the file isn't sent then."""
        return "" if name.startswith(self.prefix) else self.prefix + quote(name, safe="")
