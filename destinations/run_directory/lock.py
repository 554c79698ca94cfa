"""The lock of a run folder: one writer per rank, and a lock file that says which.

The lock is flock(2), which ends with the process that holds it. Where the file system has no flock, the file
itself is the lock: it is created exclusively, and is stale when its process on this host is gone, or when the
heartbeat of the run is older than three minutes.
"""

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from uploads.disk import has_process_ended, read_json, try_lock

from .errors import RunInUseError
from .layout import HEARTBEAT

__all__ = ["WriterLock"]

_STALE_SECONDS = 180.0
_NO_FLOCK = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
_MAX_TRIES = 10


class WriterLock:
    """The exclusive lock of the writer of a run folder.

    Args:
        path: The lock file.
        use_flock: Whether to try flock(2) at all.
    """

    def __init__(self, path: Path, *, use_flock: bool = True) -> None:
        self._path = path
        self._run_dir = path.parent
        self._use_flock = use_flock
        self._fd = -1

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            RunInUseError: Another process holds it.
        """
        for _ in range(_MAX_TRIES):
            fd = self._open()
            if fd is None:
                continue
            self._fd = fd
            os.ftruncate(fd, 0)
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            os.pwrite(fd, json.dumps(owner).encode(), 0)
            return
        raise self._refusal()

    def release(self) -> None:
        """Removes the file and releases the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Another process may have a folder, and a lock, at this path now.
            if self._is_at(self._path, fd):
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(fd)

    def is_in_place(self) -> bool:
        """Returns whether the held file is still in the folder."""
        return self._fd >= 0 and self._is_at(self._path, self._fd)

    def follow(self, folder: Path) -> None:
        """Sets the folder to look for the lock file in: a path that stays valid when the folder is moved."""
        self._path = folder / self._path.name

    def renew(self, run_dir: Path | None = None) -> None:
        """Takes the lock again, then releases the file that was held before.

        Args:
            run_dir: Where; default: the present folder.

        Raises:
            RunInUseError: Another process has taken it meanwhile.
        """
        renewed = WriterLock(
            self._path if run_dir is None else run_dir / self._path.name, use_flock=self._use_flock
        )
        renewed.acquire()
        before, self._fd = self._fd, renewed._fd
        if before >= 0:
            os.close(before)

    @staticmethod
    def _is_at(path: Path, fd: int) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(fd))
        except OSError:
            return False

    def forget_in_child(self) -> None:
        """Closes the descriptor in a forked child, which would otherwise keep the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int | None:
        if not self._use_flock:
            return self._create()
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_lock(fd):
                os.close(fd)
                raise self._refusal()
            # The last owner may have removed the file between the two calls.
            if os.path.samestat(os.fstat(fd), self._path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_FLOCK:
                raise
            self._use_flock = False
            if self.owner():
                return None
            return os.open(self._path, os.O_RDWR)
        os.close(fd)
        return None

    def _create(self) -> int | None:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if not self._is_stale():
                raise self._refusal() from None
            with contextlib.suppress(OSError):
                self._path.unlink()
            return None

    def _is_stale(self) -> bool:
        owner = self.owner()
        if owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int):
            has_ended = has_process_ended(owner["pid"])
            if has_ended is not None:
                return has_ended
        with contextlib.suppress(OSError):
            return time.time() - (self._path.parent / HEARTBEAT).stat().st_mtime > _STALE_SECONDS
        return False

    def owner(self) -> dict[str, Any]:
        """Returns the content of the lock file: pid, host, since."""
        return read_json(self._path)

    def _refusal(self) -> RunInUseError:
        owner = self.owner()
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
        error = RunInUseError(
            f"run folder {str(self._run_dir)!r} is in use: {who} writes to it. "
            "Wait until it ends, or choose another folder."
        )
        error.is_same_process = (owner.get("pid"), owner.get("host")) == (os.getpid(), socket.gethostname())
        return error
