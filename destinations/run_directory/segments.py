"""The files that a journal is made of: fixed-size, memory-mapped where the file system allows, appended to where not.

A segment is written by the training thread; it is made, prepared and taken away by the writer thread.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from uploads.disk import DISK, Disk, read_regular

from .frames import MAGIC, Follows, Keys, UnknownFrame, iter_frames
from .layout import POSITION, Position, segment_number, segment_paths

__all__ = [
    "FIRST_BYTES",
    "AppendedSegment",
    "JournalPlace",
    "MapFile",
    "MappedSegment",
    "Segment",
    "allocate",
    "continues_from",
    "end_of_journal",
    "journal_records",
]

_POPULATE_STEP_BYTES = 64 << 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it.


MapFile = Callable[[int, int], mmap.mmap]
"""Maps a file, from its descriptor and size; raises OSError where its file system does not let it."""


class Segment(Protocol):
    """A file of frames that grows up to a limit."""

    path: Path
    number: int
    size: int

    def write(self, data: bytes, /) -> object:
        """Adds bytes, all or none; any thread may call.

        Raises:
            ValueError: the segment is full.
            BlockingIOError: this thread is in the middle of a write already: a signal handler has interrupted it.
            OSError: the disk is full.
        """

    def populate(self) -> None:
        """Prepares for being written to."""

    def end(self) -> int:
        """Returns up to where there may be frames."""

    def room(self) -> int:
        """Returns how many bytes fit in; less than 1 where the segment is sealed."""

    def seal(self) -> int:
        """Makes the segment full: whatever still holds its `write` is refused.

        Returns:
            Where its frames end; the same each time.
        """

    def fileno(self) -> int:
        """Returns the descriptor to read and to sync."""

    def is_at(self, path: Path) -> bool:
        """Says whether the file at a path is this one."""

    def move(self, path: Path, number: int) -> None:
        """Gives the file its name and its number; does nothing where it has them."""

    def unmap(self) -> None:
        """Ends writing; reading is still possible."""

    def close(self) -> None:
        """Lets go of the file."""

    def discard(self) -> None:
        """Lets go of the file, and removes it."""


class _File:
    """What both kinds of segments share: a file that begins with `MAGIC`, and its name."""

    def __init__(self, path: Path, number: int, size: int, disk: Disk) -> None:
        self.path = path
        self.number = number
        self.size = size
        self._disk = disk
        self._fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def fileno(self) -> int:
        return self._fd

    def is_at(self, path: Path) -> bool:
        try:
            return self._fd >= 0 and os.path.samestat(path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def move(self, path: Path, number: int) -> None:
        if not self.is_at(path):
            self._disk.replace(self.path, path)
        self.path, self.number = path, number

    def close(self) -> None:
        self.unmap()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def unmap(self) -> None:
        """Nothing is mapped."""

    def discard(self) -> None:
        is_in_place = self.is_at(self.path)
        self.close()
        if is_in_place:
            with contextlib.suppress(OSError):
                self._disk.unlink(self.path)


class MappedSegment(_File):
    """A segment in memory that the kernel keeps: what is written is safe from the end of this process at once.

    Its blocks are allocated beforehand, for a mapped write to a full disk would be a signal (SIGBUS) and not an error.
    """

    def __init__(
        self, path: Path, number: int, size: int, map_file: MapFile = mmap.mmap, disk: Disk = DISK
    ) -> None:
        super().__init__(path, number, size, disk)
        self._sealed_at = -1
        # An offset at which a frame begins or the frames end, as late as is known.
        self._boundary = len(MAGIC)
        try:
            allocate(self._fd, size)
            self._map = map_file(self._fd, size)
        except BaseException:
            self.discard()
            raise
        self.write = self._map.write
        self.write(MAGIC)

    def populate(self) -> None:
        """Brings the pages in, so that the training thread does not have to; in steps, for the interpreter is held."""
        for start in range(0, self.size, _POPULATE_STEP_BYTES):
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_STEP_BYTES, self.size - start))
            except (OSError, ValueError, AttributeError):
                return

    def end(self) -> int:
        """Returns up to where there may be frames."""
        if self._sealed_at >= 0:
            return self._sealed_at
        return self.size if self._map.closed else self._map.tell()

    def room(self) -> int:
        """Returns how many bytes fit in."""
        return 0 if self._map.closed else self.size - self._map.tell()

    def seal(self) -> int:
        """Makes the segment full."""
        if self._sealed_at < 0:
            if not self._map.closed:
                at = self._map.tell()
                if at < self.size:
                    self._boundary = at
                self._map.seek(self.size)
            # Between the two calls a row of another thread, or of a signal handler, may have come: it is looked for.
            end = self._boundary
            data = b"" if self._fd < 0 else os.pread(self._fd, self.size - end, end)
            for offset, _ in iter_frames(data):
                end = self._boundary + offset
            self._sealed_at = end
        return self._sealed_at

    def unmap(self) -> None:
        """Ends writing; reading is still possible."""
        if hasattr(self, "_map"):
            self._map.close()


class AppendedSegment(_File):
    """A segment that is written by system calls, for file systems on which mappings cannot be relied on."""

    def __init__(self, path: Path, number: int, size: int, disk: Disk = DISK) -> None:
        super().__init__(path, number, size, disk)
        self._end = 0
        self._is_sealed = False
        # Guards the end of the file.
        self._lock = threading.RLock()
        try:
            self.write(MAGIC)
        except BaseException:
            self.discard()
            raise

    def populate(self) -> None:
        """Nothing to prepare."""

    def write(self, data: bytes) -> None:
        """Adds bytes, all or none."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # as Condition asks it
            raise BlockingIOError(errno.EWOULDBLOCK, "this thread writes to the segment already")
        with self._lock:
            if self._fd < 0 or self._is_sealed or self._end + len(data) > self.size:
                raise ValueError("segment is full")
            self._disk.write(self._fd, data, self._end)
            self._end += len(data)

    def end(self) -> int:
        """Returns up to where there may be frames."""
        return self._end

    def room(self) -> int:
        """Returns how many bytes fit in."""
        return 0 if self._is_sealed else self.size - self._end

    def seal(self) -> int:
        """Makes the segment full."""
        with self._lock:
            self._is_sealed = True
            return self._end


def allocate(fd: int, size: int) -> None:
    """Has the disk keep room for a file of a size."""
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in {
            errno.EOPNOTSUPP,
            errno.EINVAL,
            errno.ENOSYS,
        }:
            raise
        zeros = bytes(_POPULATE_STEP_BYTES)
        for start in range(0, size, len(zeros)):
            os.pwrite(fd, zeros[: size - start], start)
        os.ftruncate(fd, size)


JournalPlace = tuple[int, int]
"""Number of a segment, and an offset in it."""

FIRST_BYTES = 128
"""What the first bytes of a segment and a `Follows` fit into."""

# A segment holds a row at least, however long: its writer makes it as large as that needs.
_MAX_SEGMENT_BYTES = 1 << 30


def continues_from(data: bytes, place: JournalPlace) -> bool:
    """Says whether a segment goes on from a place.

    Args:
        data: the segment, or its first `FIRST_BYTES`.
        place: up to where the journal was read.
    """
    if not data.startswith(MAGIC):
        return False
    _, first = next(iter_frames(data, len(MAGIC)), (0, None))
    return not isinstance(first, Follows) or (first.segment, first.offset) == place


def end_of_journal(folder: Path) -> JournalPlace | None:
    """Returns the place that reading of a journal comes to that nobody writes; None where that depends on the CSV."""
    position = Position.read(folder / POSITION)
    starts = [(0, len(MAGIC))] if position is None else [(one.segment, one.offset) for one in position.states]
    try:
        ends = {journal_records(folder, start, are_kept=False)[1] for start in starts}
    except OSError:
        return None
    return ends.pop() if len(ends) == 1 else None


def journal_records(
    folder: Path, place: JournalPlace, *, are_kept: bool = True
) -> tuple[list[object], JournalPlace, bool]:
    """Returns what the segments hold from a place on, up to which place that is, and whether no segment between was gone.

    Rows come as a tuple of names, step, epoch, time and values; the other records as they are.
    """
    records: list[object] = []
    least, _ = place
    is_whole = True
    while True:
        paths = [path for path in segment_paths(folder) if segment_number(path) >= least]
        if not paths:
            return records, place, False
        # Listed before it is read: what is complete now cannot grow while it is read.
        has_successor = len(paths) > 1
        number = segment_number(paths[0])
        data = _segment_data(paths[0])
        is_whole = is_whole and number == least and data is not None
        # Where it does not follow, rows before it are missing: of a power loss, or drained meanwhile, which the caller finds out.
        if data and (number == place[0] or continues_from(data, place)):
            found, end = _segment_records(data, place[1] if number == place[0] else len(MAGIC))
            records += found if are_kept else []
            place = number, end
        if not has_successor:
            return records, place, is_whole
        least = number + 1


def _segment_data(path: Path) -> bytes | None:
    """Returns the content of a segment, empty where it is none; None where it was taken away."""
    try:
        data = read_regular(path, _MAX_SEGMENT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return data if data.startswith(MAGIC) else b""


def _segment_records(data: bytes, start: int) -> tuple[list[object], int]:
    """Returns the records of a segment from an offset on, rows as names, step, epoch, time and values; and where they end."""
    records: list[object] = []
    names = {
        record.schema: record.names
        for _, record in iter_frames(data[:start], len(MAGIC))
        if isinstance(record, Keys)
    }
    for end, record in iter_frames(data, start):
        if isinstance(record, Keys):
            names[record.schema] = record.names
        elif isinstance(record, tuple):
            schema, *rest, values = record
            if len(names.get(schema, ())) != len(values):
                return records, start  # Its names were lost.
            records.append((names[schema], *rest, values))
        elif not isinstance(record, Follows | UnknownFrame):
            records.append(record)
        start = end
    return records, start
