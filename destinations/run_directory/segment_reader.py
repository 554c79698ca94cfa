"""Reading a segment while it is being written."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from .disk import Disk
    from .journal import Journal

__all__ = ["SegmentReader"]


class SegmentReader:
    """Reads a segment: from the descriptor that the journal has open, else from its path.

    Args:
        path: of the segment.
        journal: the writing end, where it has the segment open.
        number: of the segment.
    """

    def __init__(self, path: Path, journal: "Journal | None", number: int) -> None:
        self._owned = -1
        self._segment = None
        if journal is not None:
            self._segment = next((item for item in list(journal.segments) if item.number == number), None)
        self._fd = -1 if self._segment is None else self._segment.fileno()
        if self._fd >= 0:
            # The journal may close its own descriptor meanwhile. Where there is no other, that one must do.
            with contextlib.suppress(OSError):
                self._fd = self._owned = os.dup(self._fd)
        if self._fd < 0:
            with contextlib.suppress(FileNotFoundError):
                self._fd = self._owned = os.open(path, os.O_RDONLY)

    def read(self, offset: int, length: int) -> bytes:
        """Returns bytes from an offset on, fewer where there are no more."""
        if self._fd < 0:
            return b""
        if self._segment is not None and self._segment.size:
            length = min(length, self._segment.end() - offset)
        return os.pread(self._fd, max(0, length), offset)

    def size(self) -> int:
        """Returns how many bytes the file has."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    def sync(self, disk: "Disk") -> None:
        """Waits until the disk has the segment."""
        if self._fd >= 0:
            disk.sync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned >= 0:
            os.close(self._owned)
