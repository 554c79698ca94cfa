"""How long to wait, and how often to try."""

from __future__ import annotations

import math
import random
import threading
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RetryPolicy", "check_seconds", "check_workers"]


def check_seconds(name: str, seconds: float) -> float:
    """The time, which may be infinite, as what a wait of Python's takes.

    Raises:
        ValueError: Negative, or not a number.
    """
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{name} must be a number of seconds from 0 to inf, got {seconds}")
    return min(float(seconds), threading.TIMEOUT_MAX / 2)


def check_workers(workers: int) -> None:
    """Raises ValueError where there would be nobody to upload."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")


@attrs.frozen
class RetryPolicy:
    """Full jitter: a delay is uniform between nothing and a ceiling that doubles, so that eight ranks do not return together.

    Failures that will pass by themselves are tried again for as long as the queue lives; there is no count for them.

    Attributes:
        first_seconds: Ceiling after the first failure.
        cap_seconds: Ceiling that is never passed.
        retry_after_cap_seconds: The longest that a server's Retry-After is obeyed.
        probe_first_seconds: How soon a parked store is probed; doubles up to `probe_cap_seconds`.
        probe_cap_seconds: The longest between two probes of a parked store.
        unknown_tries: After how many failures that nobody classified an entry is rejected, once the store has taken others.
        corrupt_tries: After how many corruptions on the wire an entry counts as corrupt.
        denied_tries: After how many denials an entry is rejected while the store takes others.
        uniform: Draws between two bounds; injected by tests.
    """

    first_seconds: float = 1.0
    cap_seconds: float = 60.0
    retry_after_cap_seconds: float = 300.0
    probe_first_seconds: float = 1.0
    probe_cap_seconds: float = 300.0
    unknown_tries: int = 10
    corrupt_tries: int = 5
    denied_tries: int = 3
    uniform: Callable[[float, float], float] = random.uniform

    def to_json(self) -> dict[str, float]:
        """Everything but `uniform`, for another process."""
        return attrs.asdict(self, filter=attrs.filters.exclude("uniform"))

    def delay_seconds(self, failures: int, retry_after_seconds: float | None = None) -> float:
        """How long to wait after this many failures in a row (1 is the first)."""
        if retry_after_seconds is not None:
            return min(retry_after_seconds, self.retry_after_cap_seconds)
        return self.uniform(0.0, min(self.cap_seconds, self.first_seconds * 2.0 ** min(failures - 1, 32)))

    def probe_seconds(self, probes: int) -> float:
        """How long a parked store is left alone after this many probes that failed."""
        return min(self.probe_cap_seconds, self.probe_first_seconds * 2.0 ** min(probes, 32))
