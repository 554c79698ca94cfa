"""`JournalSource`: the part of a journal that isn't drained yet, segment by segment and frame by frame.

Runs in the writer thread.
"""

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from uploads.disk import Disk, closing, read_at

from .frames import MAGIC, RowBlock, count_rows, read_row_block
from .layout import segment_number, segment_paths
from .segments import (
    JournalRecord,
    continues_from,
    iter_keys,
    iter_records,
    names_before,
    segment_bytes,
)

if TYPE_CHECKING:
    from .journal_files import JournalFiles

__all__ = ["CHUNK_ROWS", "JournalSource"]

CHUNK_ROWS = 256
"""The maximum number of rows in a block.

With ten floats per row, a block holds the interpreter lock for less than a millisecond. Smaller blocks would
take more time in total, because each has an overhead of a few hundred microseconds.
"""

Found = JournalRecord | tuple[tuple[str, ...], RowBlock]
"""A call, a block of calls with their names, or a mark between calls."""

# How many new names to look for in advance.
_MOST_COMING = 64


class JournalSource:
    """Reads a journal from a place on: the segment and offset before which everything is drained.

    Args:
        folder: the folder of the journal.
        files: the segments of a live journal; None for the journal of a dead process.
        disk: the disk operations.

    Attributes:
        segment: the number of the current segment.
        offset: the offset in that segment. The caller moves it as it writes what `frames` yields.
        end: the offset up to which the segment was read.
        damaged_bytes: the number of unreadable bytes in segments.
    """

    def __init__(self, folder: Path, files: "JournalFiles | None", disk: Disk) -> None:
        self._folder = folder
        self._files = files
        self._disk = disk
        self.segment = 0
        self.offset = self.end = len(MAGIC)
        self.damaged_bytes = 0
        self._names: dict[int, tuple[str, ...]] = {}
        self._names_of_segment = 0
        self._skipped: set[int] = set()
        # The segment as it was read last, and the offset up to which it was yielded.
        self._data = b""
        self._taken = 0

    def segments(self) -> Iterator[None]:
        """Goes through the segments; the caller reads each to its end with `frames` before the next one."""
        while True:
            # Listed before reading: a segment with a successor doesn't grow any more.
            listed = self._listed()
            if not self._enter(self._next(listed, self.segment)):
                return
            yield
            if not self._enter(self._next(listed, self.segment + 1)):
                return

    def frames(self) -> Generator[tuple[int, int, Found], None, None]:
        """Yields each item of the current segment with its start and end offsets."""
        self._data, self._taken = self._content(self.segment), self.offset
        if not self._data.startswith(MAGIC):
            return
        if self._names_of_segment != self.segment:
            self._names_of_segment = self.segment
            self._names = names_before(self._data, self.offset)
        while (item := self._next_item()) is not None:
            start, self._taken, found = item
            if found is not None:
                yield start, self._taken, found
        self.end = self._taken
        if self.segment not in self._own():
            self.damaged_bytes += len(self._data[self._taken :].rstrip(b"\0"))

    def _next_item(self) -> tuple[int, int, Found | None] | None:
        """Returns the next item of the data, or None if it is incomplete or its names were lost."""
        data, at = self._data, self._taken
        block = read_row_block(data, at, CHUNK_ROWS)
        if block is not None and len(names := self._names.get(block.schema, ())) == block.values.shape[1]:
            return at, at + block.size, (names, block)
        return next(((at, end, record) for end, record in iter_records(data, at, self._names)), None)

    def coming_names(self) -> list[tuple[str, ...]]:
        """Returns the new names that upcoming rows have."""
        return [record.names for record in iter_keys(self._data, self._taken)][:_MOST_COMING]

    def sync(self) -> None:
        """Syncs the segments that aren't drained."""
        for number, path in self._listed().items():
            if number >= self.segment:
                with contextlib.suppress(FileNotFoundError), closing(os.open(path, os.O_RDONLY)) as fd:
                    self._disk.sync(fd)
        self._disk.sync_folder(self._folder)

    def remove_drained(self) -> None:
        """Removes the segments before the current one."""
        if self._files is not None:
            while self._files.segments and self._files.segments[0].number < self.segment:
                segment = self._files.segments.popleft()
                segment.close()
                with contextlib.suppress(OSError):
                    self._disk.unlink(segment.path)
        for path in segment_paths(self._folder):
            if segment_number(path) < self.segment:
                with contextlib.suppress(OSError):
                    self._disk.unlink(path)

    # For use after writing has ended.

    def is_drained(self) -> bool:
        """Returns whether all rows are drained."""
        listed = self._listed()
        number = self._next(listed, self.segment)
        return number is None or (self._next(listed, number + 1) is None and not self._rows_left(number))

    def rows_of_deleted(self) -> int:
        """Returns how many rows exist only in deleted segments."""
        own = [] if self._files is None else list(self._files.segments)
        gone = [one for one in own if one.number >= self.segment and not one.is_at(one.path)]
        # If there are very many, the oldest are closed.
        contents = ((one.number, read_at(one.fileno(), one.size, 0)) for one in gone if one.fileno() >= 0)
        return sum(count_rows(data, self._start_in(number)) for number, data in contents)

    def _rows_left(self, number: int) -> int:
        data = self._content(number)
        return count_rows(data, self._start_in(number)) if data.startswith(MAGIC) else 0

    def _start_in(self, number: int) -> int:
        return self.offset if number == self.segment else len(MAGIC)

    # Which segments there are.

    def _own(self) -> set[int]:
        """Returns the numbers of the segments of this process."""
        return set() if self._files is None else {one.number for one in list(self._files.segments)}

    def _listed(self) -> dict[int, Path]:
        """Returns the paths of the segments, by their numbers, ascending."""
        return {segment_number(path): path for path in segment_paths(self._folder)}

    def _content(self, number: int) -> bytes:
        """Returns the bytes of a segment, which may be damaged; empty if the file is gone."""
        path = self._listed().get(number)
        return b"" if path is None else segment_bytes(path) or b""

    def _next(self, listed: dict[int, Path], least: int) -> int | None:
        """Returns the segment to continue in: the current one, or the first one that follows its end.

        Segments that follow rows that a power loss has destroyed are skipped and counted as damage.
        """
        own = self._own()
        for number, path in listed.items():
            if number < least:
                continue
            if number == self.segment or number in own:
                return number
            data = segment_bytes(path) or b""
            if continues_from(data, (self.segment, self.offset)):
                return number
            if number not in self._skipped:
                self._skipped.add(number)
                self.damaged_bytes += len(data.rstrip(b"\0"))
        return None

    def _enter(self, number: int | None) -> bool:
        if number is not None and number != self.segment:
            self.segment, self.offset = number, len(MAGIC)
        self.end = self.offset
        return number is not None
