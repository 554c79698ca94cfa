"""Who works on a spool: a lock that dies with its holder, and a few words about them for everybody else.

The kernel's lock decides, never the process id in the file: ids are reused after a reboot.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from uploads.disk import IRREGULAR, open_regular, try_lock, unlock
from uploads.errors import SpoolOwnedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["OwnerLock", "owner_of"]

_LOOKERS_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.002


class OwnerLock:
    """One `flock` on one file; the file's text says who holds it.

    After a fork the child must call `forget`: both share the lock's open file, and a child that outlives its
    parent would otherwise keep the spool locked.

    Args:
        path: The file.
        role: What it says about this process.
        sleep: Waits; injected by tests.
    """

    def __init__(self, path: Path, role: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._path = path
        self._role = role
        self._sleep = sleep
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Takes the lock without waiting.

        Raises:
            SpoolOwnedError: Somebody else holds it; the message says who.
        """
        descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "role": self._role,
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)
        self._descriptor = descriptor

    def _lock(self, descriptor: int) -> None:
        """Somebody who only looks (`owner_of`) holds the lock for an instant, shared; that is waited for."""
        deadline = time.monotonic() + _LOOKERS_SECONDS
        while True:
            if try_lock(descriptor):
                return
            owner = owner_of(self._path)
            if owner is not None or time.monotonic() > deadline:
                raise SpoolOwnedError(
                    f"{self._path.parent} must have one owner, got a second: {_describe(owner)}. Wait for it or stop it."
                )
            self._sleep(_LOOK_AGAIN_SECONDS)

    def release(self) -> None:
        """Gives the lock back; nothing where it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            unlock(self._descriptor)
            self.forget()

    def forget(self) -> None:
        """Closes this process's handle on the lock without unlocking it for others who share it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def owner_of(path: Path) -> dict[str, Any] | None:
    """Who holds the lock at this path: pid, host, role, since; None where nobody does."""
    try:
        descriptor = open_regular(path)
    except (FileNotFoundError, *IRREGULAR):
        return None
    try:
        return None if try_lock(descriptor, shared=True) else _parse(os.pread(descriptor, 4096, 0))
    finally:
        os.close(descriptor)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        about = json.loads(text)
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def _describe(about: dict[str, Any] | None) -> str:
    if not about:
        return "an unnamed process"
    return f"the {about.get('role')} with pid {about.get('pid')} on {about.get('host')}, since {about.get('since')}"
