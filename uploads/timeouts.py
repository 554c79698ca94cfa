"""How long a queue waits, and the check of every number of seconds that a caller gives."""

import math
import threading
from typing import Any

import attrs

__all__ = ["Timeouts", "check_seconds"]


def check_seconds(name: str, seconds: float) -> float:
    """Returns the seconds, capped at what the waits of `threading` accept.

    Raises:
        ValueError: Negative, or not a number.
    """
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{name} must be a number of seconds from 0 to inf, got {seconds}")
    return min(float(seconds), threading.TIMEOUT_MAX / 2)


def _limit(name: str, seconds: float) -> Any:
    return attrs.field(default=seconds, converter=lambda given: check_seconds(name, given), kw_only=True)


@attrs.frozen
class Timeouts:
    """How long a queue waits, in seconds from 0 to inf.

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
