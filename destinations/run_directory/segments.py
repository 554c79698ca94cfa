"""The segment files of a journal: fixed-size and memory-mapped, or appended to if mapping is unreliable.

The training thread writes to a segment; the writer thread creates, prepares, and removes segments.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from destinations.history.rows import Call
from uploads.disk import DISK, Disk, read_at, read_regular

from .frames import (
    HEADER,
    MAGIC,
    Begin,
    Boundary,
    Follows,
    Keys,
    Resume,
    Rewind,
    iter_frames,
    keys_frame,
)
from .layout import POSITION, Position, segment_number, segment_paths

__all__ = [
    "AppendedSegment",
    "JournalPlace",
    "JournalRecord",
    "MappedSegment",
    "Segment",
    "allocate",
    "continues_from",
    "end_of_journal",
    "iter_keys",
    "iter_records",
    "journal_extent",
    "journal_records",
    "names_before",
    "segment_bytes",
]

_POPULATE_STEP_BYTES = 64 << 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it.


class Segment:
    """A file of frames with a maximum size; the base of both kinds.

    Args:
        path: the path of the new file.
        number: its number; 0 for a segment that is prepared in advance.
        size: the maximum size in bytes.
        disk: the disk operations.
    """

    is_abandoned = False
    """Whether the next segment is independent of this one."""

    write: Callable[[bytes], object]
    """Appends all bytes or none. Thread-safe.

    Raises:
        ValueError: the segment is full or sealed.
        BlockingIOError: a signal handler that interrupted a write calls it.
        OSError: the disk is full.
    """

    def __init__(self, path: Path, number: int, size: int, disk: Disk = DISK) -> None:
        self.path = path
        self.number = number
        self.size = size
        self._disk = disk
        self._fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def populate(self) -> None:
        """Prepares the file for writing."""

    def end(self) -> int:
        """Returns the offset before which there may be frames."""
        raise NotImplementedError

    def seal(self) -> int:
        """Ends writing; later calls of `write` fail.

        Returns:
            The end of the frames, the same for each call.
        """
        raise NotImplementedError

    def fileno(self) -> int:
        """Returns the descriptor for reading and syncing."""
        return self._fd

    def is_at(self, path: Path) -> bool:
        """Returns whether the file at a path is this one."""
        try:
            return self._fd >= 0 and os.path.samestat(path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def move(self, path: Path, number: int) -> None:
        """Renames the file and sets its number; idempotent."""
        if not self.is_at(path):
            self._disk.replace(self.path, path)
        self.path, self.number = path, number

    def close(self) -> None:
        """Closes the file."""
        self.unmap()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def unmap(self) -> None:
        """Ends writing; reading is still possible."""

    def discard(self) -> None:
        """Closes and removes the file."""
        is_in_place = self.is_at(self.path)
        self.close()
        if is_in_place:
            with contextlib.suppress(OSError):
                self._disk.unlink(self.path)


class MappedSegment(Segment):
    """A memory-mapped segment, whose content survives the process immediately.

    Its blocks are allocated in advance, because a mapped write to a full disk raises SIGBUS.
    """

    def __init__(self, path: Path, number: int, size: int, disk: Disk = DISK) -> None:
        super().__init__(path, number, size, disk)
        self._sealed_at = -1
        # The last known frame boundary.
        self._boundary = len(MAGIC)
        try:
            allocate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            self.discard()
            raise
        self.write = self._map.write
        self.write(MAGIC)

    def populate(self) -> None:
        """Faults the pages in for the training thread, in steps: `madvise` holds the interpreter lock."""
        for start in range(0, self.size, _POPULATE_STEP_BYTES):
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_STEP_BYTES, self.size - start))
            except (OSError, ValueError, AttributeError):
                return

    def end(self) -> int:
        if self._sealed_at >= 0:
            return self._sealed_at
        return self.size if self._map.closed else self._map.tell()

    def seal(self) -> int:
        if self._sealed_at < 0:
            if not self._map.closed:
                at = self._map.tell()
                if at < self.size:
                    self._boundary = at
                self._map.seek(self.size)
            # Another thread or a signal handler may have written a row between the two calls. Scan for it.
            end = self._boundary
            data = b"" if self._fd < 0 else read_at(self._fd, self.size - end, end)
            for offset, _ in iter_frames(data):
                end = self._boundary + offset
            self._sealed_at = end
        return self._sealed_at

    def unmap(self) -> None:
        if hasattr(self, "_map"):
            self._map.close()


class AppendedSegment(Segment):
    """A segment written by system calls, for file systems on which mappings are unreliable."""

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

    def write(self, data: bytes) -> None:
        """Appends all bytes or none."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # as Condition asks it
            raise BlockingIOError(errno.EWOULDBLOCK, "this thread writes to the segment already")
        with self._lock:
            if self._fd < 0 or self._is_sealed or self._end + len(data) > self.size:
                raise ValueError("segment is full")
            self._disk.write(self._fd, data, self._end)
            self._end += len(data)

    def end(self) -> int:
        return self._end

    def seal(self) -> int:
        with self._lock:
            self._is_sealed = True
            return self._end


def allocate(fd: int, size: int) -> None:
    """Allocates disk space for a file."""
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        zeros = bytes(_POPULATE_STEP_BYTES)
        for start in range(0, size, len(zeros)):
            DISK.write(fd, zeros[: size - start], start)


JournalPlace = tuple[int, int]
"""The number of a segment and an offset in it."""

JournalRecord = Call | Begin | Rewind | Resume | Boundary
"""A call, or a mark between calls."""

# A segment is as large as its largest row needs.
_MAX_SEGMENT_BYTES = 1 << 30
# The first bytes of the payload of each frame of names.
_KEYS_START = keys_frame(0, ()).partition(b"keys")[0][HEADER.size :] + b"keys"


def iter_records(
    data: bytes, offset: int, names: dict[int, tuple[str, ...]]
) -> Iterator[tuple[int, JournalRecord | None]]:
    """Yields the record of each frame, or None for a frame without one, with the offset after the frame.

    Stops at the first frame that is incomplete or corrupt, and at a row whose names were lost.

    Args:
        data: a segment, or a piece of one.
        offset: the offset of the first frame.
        names: the names of the schemas before that; updated.
    """
    for end, record in iter_frames(data, offset):
        match record:
            case (schema, step, epoch, at, values):
                if len(names.get(schema, ())) != len(values):
                    return
                yield end, Call(names[schema], step, epoch, at, values)
            case Begin() | Rewind() | Resume() | Boundary():
                yield end, record
            case _:
                if isinstance(record, Keys):
                    names[record.schema] = record.names
                yield end, None


def continues_from(data: bytes, place: JournalPlace) -> bool:
    """Returns whether a segment continues the journal at a place, where reading ended before."""
    if not data.startswith(MAGIC):
        return False
    _, first = next(iter_frames(data, len(MAGIC)), (0, None))
    return not isinstance(first, Follows) or (first.segment, first.offset) == place


def end_of_journal(folder: Path) -> JournalPlace | None:
    """Returns where an idle journal ends, or None if that depends on the CSV."""
    position = Position.read(folder / POSITION)
    starts = [(0, len(MAGIC))] if position is None else [(one.segment, one.offset) for one in position.states]
    try:
        ends = {journal_records(folder, start)[1] for start in starts}
    except OSError:
        return None
    return ends.pop() if len(ends) == 1 else None


def journal_records(folder: Path, place: JournalPlace) -> tuple[list[JournalRecord], JournalPlace, bool]:
    """Returns the records from a place on, the place where they end, and whether all segments were there.

    Args:
        folder: the journal of a rank.
        place: where to begin.
    """
    records: list[JournalRecord] = []
    least, _ = place
    is_whole = True
    while True:
        paths = [path for path in segment_paths(folder) if segment_number(path) >= least]
        if not paths:
            return records, place, False
        # Checked before reading: a segment with a successor doesn't grow any more.
        has_successor = len(paths) > 1
        number = segment_number(paths[0])
        data = segment_bytes(paths[0])
        is_whole = is_whole and number == least and data is not None
        # If it doesn't follow, rows before it are missing, either because of a power loss, or because they
        # were drained meanwhile. The caller finds out which.
        if data and data.startswith(MAGIC) and (number == place[0] or continues_from(data, place)):
            end = place[1] if number == place[0] else len(MAGIC)
            found: list[JournalRecord] = []
            for after, record in iter_records(data, end, names_before(data, end)):
                end = after
                if record is not None:
                    found.append(record)
            # A row of the CSV never spans two segments.
            records += [*([Boundary()] if records and found else []), *found]
            place = number, end
        if not has_successor:
            return records, place, is_whole
        least = number + 1


def segment_bytes(path: Path) -> bytes | None:
    """Returns a segment's content, which doesn't begin with `MAGIC` if it is damaged; None if it is gone."""
    try:
        return read_regular(path, _MAX_SEGMENT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None


def journal_extent(folder: Path, place: JournalPlace | None) -> JournalPlace:
    """Returns a value that changes when rows are added, without reading or checking the rows.

    Args:
        folder: the journal of a rank.
        place: where to begin, at most the end; None for the beginning.
    """
    paths = segment_paths(folder)
    if not paths:
        return 0, 0
    number = segment_number(paths[-1])
    if (data := segment_bytes(paths[-1])) is None:
        return number, 0
    at = place[1] if place is not None and place[0] == number else len(MAGIC)
    while at + HEADER.size <= len(data) and (length := HEADER.unpack_from(data, at)[0]):
        at += HEADER.size + length
    return number, at


def names_before(data: bytes, start: int) -> dict[int, tuple[str, ...]]:
    """Returns the names of the schemas before an offset, without decoding the rows, which may be thousands.

    A power loss may have damaged frames before them, whose rows are in the CSV.
    """
    return {record.schema: record.names for record in iter_keys(data[:start], len(MAGIC))}


def iter_keys(data: bytes, offset: int) -> Iterator[Keys]:
    """Yields the frames with names from an offset on, without decoding others; some may be damaged."""
    at = data.find(_KEYS_START, offset)
    while at >= 0:
        # The same bytes inside a row have no matching header before them.
        _, record = next(iter_frames(data, at - HEADER.size), (0, None))
        if isinstance(record, Keys):
            yield record
        at = data.find(_KEYS_START, at + 1)
