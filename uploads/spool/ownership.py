"""The lock of the process that works on a spool; the text of the lock file says which one, for messages.

The kernel's lock decides, never the process id in the file: ids are reused after a reboot.
"""

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from uploads.disk import FileLock, is_locked, read_json
from uploads.errors import SpoolOwnedError

__all__ = ["OwnerLock", "owner_of"]


class OwnerLock(FileLock):
    """The lock of a spool's queue or of its drain.

    Args:
        path: The file.
        role: "queue" or "drain", for messages.
    """

    def __init__(self, path: Path, role: str) -> None:
        super().__init__(path)
        self._role = role

    def take(self) -> None:
        """Takes the lock without waiting.

        Raises:
            SpoolOwnedError: Another process holds it; the message says which.
        """
        self.acquire(role=self._role, since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def renew(self) -> None:
        """Locks the file anew if the locked one was deleted; does nothing if none is held.

        Raises:
            SpoolOwnedError: Another process holds the new one.
        """
        held = self._fd
        if held >= 0 and not self._is_at(self._path, held):
            self.take()
            os.close(held)

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def refusal(self) -> SpoolOwnedError:
        """Returns the error for a spool that another process has."""
        owner = self.owner()
        role, pid, host, since = (owner.get(key) for key in ("role", "pid", "host", "since"))
        who = f"the {role} with pid {pid} on {host}, since {since}" if owner else "an unnamed process"
        return SpoolOwnedError(f"spool {self._path.parent} is in use by {who}. Wait for it or stop it.")


def owner_of(path: Path) -> dict[str, Any] | None:
    """Returns pid, host, role and since of the process that holds the lock; None if it is free."""
    return read_json(path) if is_locked(path) else None
