"""How much a spool may hold: a limit in bytes, and a floor of free space on its disk."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from .errors import SpoolFull

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Room"]

_LOOK_AGAIN_SECONDS = 1.0  # Others fill and empty the disk without telling us.


class Room:
    """Keeps account of the bytes in a spool. The condition's lock guards the account.

    Args:
        spool: The spool's folder, to ask its disk.
        spool_bytes: The limit; None for none.
        free_bytes: What must stay free on the disk.
        wait_seconds: How long `take` waits for room.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        spool: Path,
        *,
        spool_bytes: int | None,
        free_bytes: int,
        wait_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._spool = spool
        self._limit_bytes = spool_bytes
        self._free_bytes = free_bytes
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._held_bytes = 0

    def take(self, size: int, *, adds_to_disk: bool = True) -> None:
        """Books the bytes, waiting for room up to the limit.

        Raises:
            SpoolFull: There was none.
        """
        deadline = self._clock() + self._wait_seconds
        with self._changed:
            while (objection := self._objection(size, adds_to_disk=adds_to_disk)) is not None:
                left = deadline - self._clock()
                if left <= 0:
                    raise SpoolFull(
                        f"{objection}. Make room, raise the limit, or wait longer with full_wait_seconds=…"
                    )
                self._changed.wait(min(left, _LOOK_AGAIN_SECONDS))
            self._held_bytes += size

    def hold(self, size: int) -> None:
        """Books bytes that earlier processes left, whether there is room or not."""
        with self._changed:
            self._held_bytes += size

    def give(self, size: int) -> None:
        """Returns bytes that have left the spool."""
        with self._changed:
            self._held_bytes -= size
            self._changed.notify_all()

    def forget_after_fork(self) -> None:
        """In a forked child: the parent's lock may be held by a thread that does not exist here."""
        self._changed = threading.Condition()

    def _objection(self, size: int, *, adds_to_disk: bool) -> str | None:
        if self._limit_bytes is not None and self._held_bytes + size > self._limit_bytes:
            return f"spool {self._spool} must hold at most {self._limit_bytes} bytes, got {self._held_bytes} and {size} more"
        if adds_to_disk:
            disk = os.statvfs(self._spool)
            free = disk.f_bavail * disk.f_frsize
            if free - size < self._free_bytes:
                return f"the disk of spool {self._spool} must keep {self._free_bytes} bytes free, got {free} free and {size} more to store"
        return None
