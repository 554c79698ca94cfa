"""A disk on which one call of this process fails, counted under one folder."""

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

_BY_PATH = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "link", "scandir", "listdir", "statvfs")
_BY_DESCRIPTOR = ("write", "pwrite", "fsync", "ftruncate", "pread", "preadv", "read")
_WRITES = {"write", "pwrite"}


class FailingDisk:
    """Makes one call under a folder fail, chosen by its number. The lock guards the count.

    Attributes:
        count: How many calls there were while it was failing.
        failed: Which call failed, such as "write"; empty if there were fewer calls.
    """

    def __init__(
        self, root: Path, code: int, *, is_ours=lambda: True, only=_BY_PATH + _BY_DESCRIPTOR
    ) -> None:
        self.count = 0
        self.failed = ""
        self._root = str(root.resolve())
        self._code = code
        self._is_ours = is_ours
        self._only = only
        self._number = 0
        self._is_short = False
        self._is_for_good = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def failing(self, patch, number: int, *, short: bool = False, for_good: bool = False):
        """Makes the call of this number fail within the block.

        With `short`, a write takes half of its bytes first.

        Args:
            patch: pytest's monkeypatch.
            number: From 1.
            short: Only half of the bytes are written, and the next write fails.
            for_good: All later calls fail too.
        """
        self.count, self.failed, self._number, self._is_short = 0, "", number, short
        self._is_for_good = for_good
        with patch.context() as context:
            for name in self._only:
                context.setattr(os, name, self._failing(name, getattr(os, name)))
            context.setattr(os, "copy_file_range", self._unsupported)
            context.setattr(fcntl, "ioctl", self._unsupported)
            yield self

    def _failing(self, name, real):
        readlink = os.readlink

        def call(where, *arguments, **options):
            path = where
            if name in _BY_DESCRIPTOR:
                path = readlink(f"/proc/self/fd/{where}")
            elif options.get("dir_fd") is not None:
                path = readlink(f"/proc/self/fd/{options['dir_fd']}")
            if not self._is_ours() or not str(path).startswith(self._root):
                return real(where, *arguments, **options)
            with self._lock:
                self.count += 1
                is_now = self.count == self._number or (self._is_for_good and self.count > self._number)
                is_short = is_now and self._is_short and name in _WRITES
                if is_now:
                    self.failed = name
                if is_short:
                    self._is_short = False
                    self._number += 1
            if not is_now:
                return real(where, *arguments, **options)
            if is_short:
                return real(where, arguments[0][: len(arguments[0]) // 2], *arguments[1:])
            raise OSError(self._code, os.strerror(self._code), str(where))

        return call

    def _unsupported(self, *arguments):
        raise OSError(errno.EOPNOTSUPP, "not here")
