"""The lock of the process that works on a spool; the text of the lock file says which one, for messages.

The kernel's lock decides, never the process id in the file: ids are reused after a reboot.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from uploads.disk import IRREGULAR, closing, is_open_file, open_regular, try_lock, unlock
from uploads.errors import SpoolOwnedError

__all__ = ["OwnerLock", "owner_of"]

_READERS_SECONDS = 5.0
_RETRY_SECONDS = 0.002
_MAX_LOOKS = 10


@attrs.define(eq=False, slots=False, repr=False)
class OwnerLock:
    """One `flock` on one file; the file's text says who holds it.

    After a fork the child must call `forget`: both share the lock's open file, and a child that outlives its
    parent would keep the spool locked.

    Args:
        path: The file.
        role: "queue" or "drain", for messages.
        sleep: Waits; injected by tests.
    """

    _path: Path
    _role: str
    _sleep: Callable[[float], None] = attrs.field(default=time.sleep, kw_only=True)
    _descriptor: int | None = attrs.field(default=None, init=False)
    _is_there: Callable[[str], bool] = attrs.field(default=lambda _: False, init=False)

    def acquire(self) -> None:
        """Takes the lock without waiting.

        Raises:
            SpoolOwnedError: Another process holds it; the message says which.
        """
        for looks_left in reversed(range(_MAX_LOOKS)):
            descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
            try:
                self._lock(descriptor)
                is_there = is_open_file(descriptor)
                is_named = is_there(str(self._path))
            except BaseException:
                os.close(descriptor)
                raise
            if is_named or not looks_left:  # Some FUSE file systems give a file another number each time.
                break
            os.close(
                descriptor
            )  # It was deleted before it was locked: others lock the file that is there now.
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "role": self._role,
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        with contextlib.suppress(OSError):  # A full disk: the lock holds without the text.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
        self._descriptor, self._is_there = descriptor, is_there

    def renew(self) -> None:
        """Locks the file anew where the one that is locked was deleted; does nothing if none is held.

        Raises:
            SpoolOwnedError: Another process holds the new one.
        """
        held = self._descriptor
        if held is not None and not self._is_there(str(self._path)):
            self.acquire()
            os.close(held)

    def _lock(self, descriptor: int) -> None:
        """Takes the lock; waits for `owner_of` in other processes, which holds it, shared, for an instant."""
        deadline = time.monotonic() + _READERS_SECONDS
        while not try_lock(descriptor):
            owner = owner_of(self._path)
            if owner is not None or time.monotonic() > deadline:
                raise SpoolOwnedError(
                    f"spool {self._path.parent} is in use by {_describe(owner)}. Wait for it or stop it."
                )
            self._sleep(_RETRY_SECONDS)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            unlock(self._descriptor)
            self.forget()

    def forget(self) -> None:
        """Closes this process's descriptor without unlocking it for processes that share it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def owner_of(path: Path) -> dict[str, Any] | None:
    """Returns pid, host, role and since of the process that holds the lock; None if it is free."""
    try:
        with closing(open_regular(path)) as descriptor:
            return None if try_lock(descriptor, shared=True) else _parse(os.pread(descriptor, 4096, 0))
    except (FileNotFoundError, *IRREGULAR):
        return None


def _parse(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        match json.loads(text):
            case dict() as about:
                return about
    return {}


def _describe(about: dict[str, Any] | None) -> str:
    if not about:
        return "an unnamed process"
    role, pid, host, since = (about.get(key) for key in ("role", "pid", "host", "since"))
    return f"the {role} with pid {pid} on {host}, since {since}"
