"""What the files of a run's metrics hold at one moment, also while they are being written: which rows the CSV has, and the journal's.

Reads and never writes. A snapshot has each row once, and all of those whose call had returned before it was taken, whatever
the writer does meanwhile, and however it ended. The rows of the CSV are read from the open file later, in pieces: what counts of
a file never changes, for a writer replaces a file and does not rewrite it. A CSV that no position knows, such as another
program's, may be rewritten in place; it is read at once, up to 64 MiB.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from .csv_text import header_end, header_line, parse_header
from .files import open_regular
from .frames import MAGIC
from .layout import (
    OWN_COLUMNS,
    POSITION,
    Position,
    column_of,
    journal_path,
    metrics_name,
)
from .segment_chain import journal_records

__all__ = ["CsvPart", "Snapshot", "metric_columns", "take_snapshot"]

_TRIES = 100
_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 256 << 10
_HEADER_BYTES = 64 << 10
_LONGEST_LINE = 64 << 20
_MOST_HELD_BYTES = 64 << 20
_OWN_HEADER = header_line(OWN_COLUMNS).rstrip()


class CsvPart:
    """The rows of a CSV that count, up to a whole line.

    Args:
        fd: the open file, which belongs to this object; -1 where there is none.
        header: the first line, with its end.
        end: up to where the file counts.
        held: the file up to there, where it was read already.
    """

    def __init__(self, fd: int, header: bytes, end: int, held: bytes | None = None) -> None:
        self._fd = fd
        self.header = header
        self.end = end
        self._held = held

    @property
    def size(self) -> int:
        """How many bytes the rows have."""
        return max(0, self.end - len(self.header))

    def fileno(self) -> int:
        """The descriptor; -1 where there is no file."""
        return self._fd

    def read(self) -> bytes:
        """Returns the rows."""
        return b"".join(self.chunks())

    def chunks(self, start: int | None = None, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[bytes]:
        """Returns the rows in pieces of whole lines.

        Args:
            start: an offset in the file at which a line begins. Default: the first row.
            chunk_bytes: how much to read at a time; a longer line is one piece.
        """
        at = len(self.header) if start is None else start
        length = chunk_bytes
        while at < self.end:
            piece = self._piece(at, min(length, self.end - at))
            if not piece:
                return
            whole = len(piece) if at + len(piece) >= self.end else piece.rfind(b"\n") + 1
            if whole == 0:
                if length >= _LONGEST_LINE:
                    raise OSError(errno.EFBIG, f"a line has more than {_LONGEST_LINE >> 20} MiB")
                length *= 2
                continue
            yield piece[:whole]
            at += whole
            length = chunk_bytes

    def chunks_from_end(self, chunk_bytes: int = _TAIL_BYTES) -> Iterator[bytes]:
        """Returns the rows in pieces of whole lines, the last piece first; see `chunks`."""
        first, end, length = len(self.header), self.end, chunk_bytes
        while end > first:
            start = max(first, end - length)
            piece = self._piece(start, end - start)
            if len(piece) < end - start:
                return  # It was cut meanwhile.
            # The first line is a part of one, unless it is the first of all.
            skipped = 0 if start == first else piece.find(b"\n") + 1
            if start > first and skipped in {0, len(piece)}:
                if length >= _LONGEST_LINE:
                    raise OSError(errno.EFBIG, f"a line has more than {_LONGEST_LINE >> 20} MiB")
                length *= 2
                continue
            yield piece[skipped:]
            end, length = start + skipped, chunk_bytes

    def _piece(self, at: int, length: int) -> bytes:
        if self._held is not None:
            return self._held[at : at + length]
        pieces = []
        while length > 0 and (piece := os.pread(self._fd, length, at)):
            pieces.append(piece)
            at, length = at + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def take(self) -> int:
        """Returns the descriptor, which belongs to the caller from now on; nothing can be read here any more."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Lets go of the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Snapshot:
    """What the files held at one moment.

    Attributes:
        csv: the rows that the CSV has.
        records: what the journal has beyond it, see `segment_chain.journal_records`.
        place: segment and offset that the journal goes on from; None where no position says so.
    """

    def __init__(self, csv: CsvPart, records: tuple[object, ...], place: tuple[int, int] | None) -> None:
        self.csv = csv
        self.records = records
        self.place = place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.csv.close()


def metric_columns(snapshot: Snapshot) -> list[str]:
    """Returns the columns of all metrics, in the order of their first appearance."""
    names = [name for name in parse_header(snapshot.csv.header) if name not in OWN_COLUMNS]
    for record in snapshot.records:
        if isinstance(record, tuple):
            names += [column for column in map(column_of, record[0]) if column != "epoch"]
    return list(dict.fromkeys(names))


def take_snapshot(run_dir: Path, rank: int, *, with_records: bool = True) -> Snapshot:
    """Returns what the files of a rank hold now; to be closed, as a context manager.

    Args:
        run_dir: the folder of the run.
        rank: whose rows.
        with_records: whether to read the journal, too.

    Raises:
        OSError: a file cannot be read, is no regular file, or was replaced by the writer each of a hundred times.
    """
    for _ in range(_TRIES):
        snapshot = _try(run_dir, rank, with_records)
        if snapshot is not None:
            return snapshot
    raise OSError(
        f"metrics in {run_dir} must stand still for a moment, got a new file each of {_TRIES} times. Try again."
    )


def _try(run_dir: Path, rank: int, with_records: bool) -> Snapshot | None:
    """Reads everything once; None where the writer replaced or took away a file meanwhile."""
    folder = journal_path(run_dir, rank)
    path = run_dir / metrics_name(rank)
    position = Position.read(folder / POSITION)
    fd = _open(path)
    try:
        snapshot = _read(folder, path, fd, position, with_records=with_records)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    if snapshot is None and fd >= 0:
        os.close(fd)
    return snapshot


def _read(
    folder: Path, path: Path, fd: int, position: Position | None, *, with_records: bool
) -> Snapshot | None:
    header, size = _header(fd)
    held: bytes | None = None
    end = size
    segment, offset = 0, len(MAGIC)
    state = None
    if position is not None:
        state = position.state_of(header, size)
        if state is None and size and Position.read(folder / POSITION) != position:
            return None
        known = state or position.states[-1]
        segment, offset = known.segment, known.offset
        if state is not None:
            end = state.csv_bytes
    if state is None and (header.startswith(_OWN_HEADER) or size > _MOST_HELD_BYTES):
        # A run that has ended, or whose position is lost: our own writer adds lines, or replaces the file. What another
        # program wrote is not held in memory where it is too large: where it is cut meanwhile, reading ends.
        end = _last_line_end(fd, size)
    elif state is None:
        held = b"" if fd < 0 else _whole(fd)
        size, header = len(held), held[: header_end(held)]
        end = held.rfind(b"\n") + 1
    records: list[object] = []
    last, is_whole = segment, True
    if with_records:
        records, (last, _), is_whole = journal_records(folder, (segment, offset))
    after = Position.read(folder / POSITION)
    csv = CsvPart(fd, header, end, held)
    if after is None and position is None:
        # A CSV that was only just begun, or that somebody else wrote; unless a whole session took place meanwhile.
        return Snapshot(csv, tuple(records), None) if _size(path) == size else None
    if after is None or position is None or after.generation != position.generation:
        return None
    if not is_whole and after != position:
        return None  # A segment was drained and taken away before it was read: its rows are in lines not counted here.
    drained_beyond = with_records and any(state.segment > last for state in after.states)
    return None if drained_beyond else Snapshot(csv, tuple(records), (segment, offset))


def _open(path: Path) -> int:
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _header(fd: int) -> tuple[bytes, int]:
    """Returns the first line and the size of a file."""
    if fd < 0:
        return b"", 0
    size = os.fstat(fd).st_size
    length = _HEADER_BYTES
    while True:
        data = os.pread(fd, length, 0)
        end = header_end(data)
        if end or length >= size:
            return data[:end], size
        if length >= _LONGEST_LINE:
            raise OSError(errno.EFBIG, f"the header has more than {_LONGEST_LINE >> 20} MiB")
        length *= 4


def _last_line_end(fd: int, size: int) -> int:
    """Returns where the last whole line ends."""
    end = size
    while end > 0:
        start = max(0, end - _HEADER_BYTES)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _whole(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return file.read()
