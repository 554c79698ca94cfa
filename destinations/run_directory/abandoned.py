"""Where the rows of a branch go that training left: a CSV in `abandoned/`."""

import contextlib
import os
import zlib
from pathlib import Path
from typing import Self

from .disk import DISK, Disk

__all__ = ["AbandonedRows"]

_LINES_AT_ONCE = 1000


class AbandonedRows:
    """The file of an abandoned branch, named by what it holds, so that doing it again after a crash changes nothing.

    Args:
        folder: where it will be.
        stem: how its name begins.
        step: the step that training went back to.
        header: its first line.
        disk: what it is written by.
    """

    def __init__(self, folder: Path, stem: str, step: int, header: bytes, disk: Disk = DISK) -> None:
        self._folder = folder
        self._disk = disk
        self._name = f"{stem}.step{step}"
        self._temporary = folder / f".{self._name}.tmp"
        self._fd = disk.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._size = 0
        self._pending = [header]
        self._crc32 = zlib.crc32(header)
        self.count = 0
        """How many rows there are."""

    def write(self, line: bytes) -> None:
        """Adds a line."""
        self._pending.append(line)
        if len(self._pending) >= _LINES_AT_ONCE:
            self._write()
        self._crc32 = zlib.crc32(line, self._crc32)
        self.count += 1

    def keep(self) -> Path:
        """Gives the file its name, and returns that path; without it, nothing is left of it."""
        self._write()
        self._disk.sync(self._fd)
        path = self._folder / f"{self._name}.{self._crc32:08x}.csv"
        self._disk.replace(self._temporary, path)
        self._disk.sync_folder(self._folder)
        return path

    def _write(self) -> None:
        data, self._pending = b"".join(self._pending), []
        self._disk.write(self._fd, data, self._size)
        self._size += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        with contextlib.suppress(OSError):
            self._temporary.unlink()
