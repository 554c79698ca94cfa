"""One writer per rank: a lock file that says who holds it.

The lock is flock(2): it ends with the process that holds it, however that ends. Where the file system has no
flock, the file itself is the lock: it is made exclusively, and is stale when its process is gone from this
host, or when the heartbeat of the run has not been touched for three minutes.
"""

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from uploads.disk import read_json, try_lock

from .errors import RunInUseError
from .layout import HEARTBEAT

__all__ = ["WriterLock"]

_STALE_SECONDS = 180.0
_NO_FLOCK = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
_TRIES = 10


class WriterLock:
    """The right to write to a run folder.

    Args:
        path: the lock file.
        use_flock: whether to try flock(2) at all.
    """

    def __init__(self, path: Path, *, use_flock: bool = True) -> None:
        self._path = path
        self._run_dir = path.parent
        self._use_flock = use_flock
        self._fd = -1

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            RunInUseError: another process has it.
        """
        for _ in range(_TRIES):
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
        """Gives the lock back, and takes the file away."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Never that of another process, which has the folder at this path now.
            if self._is_at(self._path, fd):
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(fd)

    def is_in_place(self) -> bool:
        """Says whether the file that is held is still in the folder."""
        return self._fd >= 0 and self._is_at(self._path, self._fd)

    def follow(self, folder: Path) -> None:
        """Has the lock file looked for in a folder by another path, which stays true when the folder is moved."""
        self._path = folder / self._path.name

    def renew(self, run_dir: Path | None = None) -> None:
        """Takes the lock again, and lets go of the file that was held before.

        Args:
            run_dir: where, instead of in the folder that is held.

        Raises:
            RunInUseError: another process has taken it meanwhile.
        """
        again = WriterLock(
            self._path if run_dir is None else run_dir / self._path.name, use_flock=self._use_flock
        )
        again.acquire()
        before, self._fd = self._fd, again._fd
        if before >= 0:
            os.close(before)

    @staticmethod
    def _is_at(path: Path, fd: int) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(fd))
        except OSError:
            return False

    def forget_in_child(self) -> None:
        """Lets go of the descriptor in a forked child, which would hold the lock for as long as it lives."""
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
            return not Path(f"/proc/{owner['pid']}").exists()
        with contextlib.suppress(OSError):
            return time.time() - (self._path.parent / HEARTBEAT).stat().st_mtime > _STALE_SECONDS
        return False

    def owner(self) -> dict[str, Any]:
        """Returns the content of the lock file: pid, host, since."""
        return read_json(self._path)

    def _refusal(self) -> RunInUseError:
        owner = self.owner()
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
        return RunInUseError(
            f"run folder {str(self._run_dir)!r} must have one writer, got a second one: {who} writes to it. "
            "Wait for its end, or choose another folder."
        )
