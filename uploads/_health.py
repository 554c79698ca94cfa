"""How the store does, as all uploading threads together see it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .retry import RetryPolicy

__all__ = ["Health"]

_log = logging.getLogger("uploads")


class Health:
    """Successes, failures in a row, and why the store is parked. The lock guards everything.

    Attributes:
        successes: How many entries the store has taken.
        parked_because: Why nothing gets through until something outside changes; empty where that is not so.
        last_error: The last reason of all.
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float]) -> None:
        self.successes = 0
        self.parked_because = ""
        self.last_error = ""
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._failures_in_a_row = 0
        self._probes = 0
        self._renewed_for = 0
        self._resting_until = float("-inf")

    def worked(self) -> None:
        """An entry got through."""
        with self._lock:
            self.successes += 1
            self._failures_in_a_row = self._probes = self._renewed_for = 0
            if self.parked_because:
                _log.warning("uploads go on")
            self.parked_because = ""

    def failed(self, reason: str) -> int:
        """An attempt failed; returns how many did in a row."""
        with self._lock:
            self.last_error = reason
            self._failures_in_a_row += 1
            return self._failures_in_a_row

    def parked(self, reason: str) -> float:
        """The store denied; returns how many seconds to leave it alone."""
        with self._lock:
            self.last_error = self.parked_because = reason
            now = self._clock()
            if now >= self._resting_until:  # Else it is another thread's answer to the same trouble.
                self._probes += 1
                self._resting_until = now + self._policy.probe_seconds(self._probes - 1)
            return self._resting_until - now

    def wants_renewal(self) -> bool:
        """Whether the store was not renewed since its last denial; asking counts as renewing."""
        with self._lock:
            wants = self._renewed_for != self._probes
            self._renewed_for = self._probes
            return wants
