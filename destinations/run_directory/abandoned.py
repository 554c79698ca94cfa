"""Where the rows of a branch go that training left: a CSV in `abandoned/`."""

import contextlib
import os
import zlib
from pathlib import Path
from typing import Self

__all__ = ["AbandonedRows"]


class AbandonedRows:
    """The file of an abandoned branch, named by what it holds, so that doing it again after a crash changes nothing.

    Args:
        folder: where it will be.
        stem: how its name begins.
        step: the step that training went back to.
        header: its first line.
    """

    def __init__(self, folder: Path, stem: str, step: int, header: bytes) -> None:
        self._folder = folder
        self._name = f"{stem}.step{step}"
        self._temporary = folder / f".{self._name}.tmp"
        self._file = self._temporary.open("wb")
        self._file.write(header)
        self._crc32 = zlib.crc32(header)
        self.is_empty = True

    def write(self, line: bytes) -> None:
        """Adds a line."""
        self._file.write(line)
        self._crc32 = zlib.crc32(line, self._crc32)
        self.is_empty = False

    def keep(self) -> None:
        """Gives the file its name; without it, nothing is left of it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self._folder / f"{self._name}.{self._crc32:08x}.csv")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()
