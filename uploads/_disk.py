"""Writes a whole file system out, which Python's `os` has no call for."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["sync_disk_of"]


def sync_disk_of(path: Path) -> None:
    """syncfs(2) for the file system that the path is on. Since Linux 5.8 it reports what could not be written.

    Raises:
        OSError: Something could not be written.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if library.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)
