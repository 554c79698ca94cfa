"""Writes `metrics.csv`: appends rows, replaces the file to add columns, and closes it as a part.

Runs in the writer thread. Appended rows count once `drain` has written a position that covers them.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np

from destinations.history.aggregate import Floats
from destinations.history.csv_file import CsvSnapshot
from destinations.history.row_chain import Keep, SealedPart
from destinations.history.sums import BlockSums, CheckedBlocks, Section, Sums, read_sums, sums_path
from uploads.disk import (
    DISK,
    Disk,
    closing,
    end_of_last_line,
    is_open_file,
    open_temporary,
    read_at,
    replacement,
)

from .closed_parts import ClosedParts, rearranged
from .layout import (
    OWN_COLUMNS,
    CsvState,
    Position,
    column_of,
    format_cell_rows,
    format_cells,
    header_line,
    parse_header,
    read_header,
)

__all__ = [
    "ChangedError",
    "MetricsCsv",
    "Replacement",
    "RowFormatter",
]

_COPY_BYTES = 128 << 10


class ChangedError(OSError):
    """Another program has changed the size of the file."""

    def __init__(self) -> None:
        super().__init__(errno.EBUSY, "another program has changed the file")


class RowFormatter:
    """Formats rows with certain names as lines of a file that has all their columns."""

    def __init__(self, names: tuple[str, ...], columns: dict[str, int]) -> None:
        wanted = (*OWN_COLUMNS, *map(column_of, names))
        self.missing = [column for column in wanted if column not in columns]
        self._targets = [] if self.missing else [columns[column] for column in wanted]
        self._count = len(columns)
        # The column of the first value. A metric named "epoch" replaces an own column.
        first = self._targets[3] if self._targets[3:] else 0
        contiguous = [*range(len(OWN_COLUMNS)), *range(first, first + len(names))]
        self._is_contiguous = first >= len(OWN_COLUMNS) and self._targets == contiguous
        self._before = "," * (first - 2)
        self._after = "," * (len(columns) - first - len(names)) + "\n"

    def lines(self, steps: list[int], epochs: list[int], times: Floats, values: Floats) -> bytes:
        """Returns the lines of at least one row: float64 times `(rows,)` and values `(rows, metrics)`."""
        if not (self._is_contiguous and np.isfinite(times).all()):
            rows = zip(steps, epochs, times.tolist(), map(tuple, values.tolist()), strict=True)
            return "".join([self.line(*row) for row in rows]).encode()
        # A handful of calls for all rows; between them, training can take the interpreter lock.
        line = b"%d,%d,%b" + self._before.encode() + b"%b" + self._after.encode()
        stamps = format_cell_rows(times.round(6)[:, None])
        return b"".join(map(line.__mod__, zip(steps, epochs, stamps, format_cell_rows(values), strict=True)))

    def line(self, step: int | None, epoch: int | None, time: float, values: tuple[float, ...]) -> str:
        """Returns the line of a row.

        Raises:
            RuntimeError: the file lacks a column.
        """
        if self.missing:
            raise RuntimeError(f"the file has no column for {self.missing[:3]}: these values would be lost")
        own, cells = f"{_cell(step)},{_cell(epoch)},{round(time, 6)!r}", format_cells(values)
        if self._is_contiguous:
            return f"{own}{self._before}{cells}{self._after}"
        row = [""] * self._count
        texts = [*own.split(","), *(cells.split(",") if cells else ())]
        for target, text in zip(self._targets, texts, strict=True):
            row[target] = text
        return ",".join(row) + "\n"


def _cell(value: int | None) -> str:
    return "" if value is None else str(value)


class MetricsCsv:
    """One CSV, open for writing.

    Args:
        path: the path of the file, which the first rows create.
        disk: the disk operations.
    """

    def __init__(self, path: Path, disk: Disk = DISK, *, first_part: int = 1) -> None:
        self.path = path
        self.parts = ClosedParts(path, disk, first=first_part)
        """The closed parts before the file."""
        self._disk = disk
        self.size = 0
        self.rows = 0
        """The number of rows."""
        self.columns: dict[str, int] = {}
        self._header = b""
        # Whether the rename of the open file is synced.
        self._is_named = True
        # Whether the file may have bytes beyond `size`.
        self._is_torn = False
        self._fd = -1
        self._sums = BlockSums.begin(b"")
        # How many blocks are in the file of the checksums, and its size; None if it has to be rewritten.
        self._written: tuple[int, int] | None = None
        self.checks: CheckedBlocks | None = None
        """The checksums of the file that was opened, until it is replaced."""
        # For this file only. The last one is found without hashing ten thousand names for each row.
        self._formatters: dict[tuple[str, ...], RowFormatter] = {}
        self._names: tuple[str, ...] | None = None
        self._plan = RowFormatter((), {})

    def open(self, position: Position | None) -> CsvState | None:
        """Opens an existing file and truncates it to the rows that count.

        Returns:
            The state of the file, or None if the position doesn't match it; then all complete lines count.
        """
        sums = read_sums(self.path)
        try:
            self._fd = self._disk.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            self.parts.open(None if position is None else position.states[-1])
            return None
        file_size = os.fstat(self._fd).st_size
        header = read_header(self._fd, file_size)
        state = None if position is None else position.state_of(header, file_size)
        try:
            self.parts.open(state or (None if position is None else position.states[-1]))
        except BaseException:
            self.close()
            raise
        end = end_of_last_line(self._fd, file_size) if state is None else state.csv_bytes
        if end < len(header) or not header:
            self.close()
            return None
        if end < file_size:
            self._disk.truncate(self._fd, end)
        self.size = end
        self._take_header(header)
        tail = None if position is None else position.tail_of(header, file_size)
        self.checks = CheckedBlocks(self.path, sums, header, file_size, end, self.read, tail)
        self._sums, self._written = BlockSums.begin(header), None
        self.rows = sum(map(self._sums.add, self.snapshot().chunks())) + self.checks.lost
        if header.endswith(b"\r\n"):
            lines = (chunk.replace(b"\r\n", b"\n") for chunk in self.snapshot().chunks())
            self.accept(self._prepare(header.replace(b"\r\n", b"\n"), lines))
        return state

    def state(self, segment: int, offset: int) -> CsvState:
        """Returns the current state of the file, for the position."""
        return _state(self._sums, self.size, segment, offset, self.parts.chain.size)

    def formatter(self, names: tuple[str, ...]) -> RowFormatter:
        """Returns the formatter for rows with these names; its `missing` lists columns the file lacks."""
        if names is self._names:
            return self._plan
        plan = self._formatters.get(names)
        if plan is None:
            if len(self._formatters) > 1000:  # noqa: PLR2004  # mostly names that do not recur
                self._formatters.clear()
            plan = self._formatters[names] = RowFormatter(names, self.columns)
        self._names, self._plan = names, plan
        return plan

    @property
    def exists(self) -> bool:
        """Whether the file exists."""
        return self._fd >= 0

    def is_in_place(self) -> bool:
        """Returns whether the open file is still at the path."""
        if self._fd < 0:
            return True
        try:
            named = self.path.stat()
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))

    def append(self, lines: list[bytes]) -> None:
        """Appends lines.

        Raises:
            ChangedError: another program has changed the size of the file; nothing was appended.
            OSError: the disk is full; nothing was appended.
        """
        if not self.is_as_left():
            raise ChangedError
        if self._written is None:
            self._save_sums()
        data = b"".join(lines)
        if self._is_torn:
            self._disk.truncate(self._fd, self.size)
        self._is_torn = True
        self._disk.write(self._fd, data, self.size)
        self._is_torn = False
        self.size += len(data)
        self.rows += self._sums.add(data)

    def is_as_left(self) -> bool:
        """Returns whether the open file still has the size that this object left."""
        size = os.fstat(self._fd).st_size
        return size == self.size or (self._is_torn and size > self.size)

    def rewind(self, size: int, rows: int) -> None:
        """Drops the rows that were appended last; later rows overwrite them."""
        self._is_torn = self._is_torn or size < self.size
        self.size, self.rows = size, rows
        self._sums.rewind(size, self.read)
        # The rows written in their place may have other bytes, such as a time that is rounded differently.
        if self._written is not None and self._written[0] > len(self._sums.blocks):
            self._written = None

    def sync(self) -> None:
        """Syncs the file."""
        if self._fd >= 0:
            self._disk.sync(self._fd)

    def sync_name(self) -> None:
        """Syncs the name of the open file."""
        if not self._is_named:
            self._disk.sync_folder(self.path.parent)
            self._is_named = True

    def begin(self, columns: Iterable[str]) -> None:
        """Creates the file with its first columns."""
        self.accept(self._prepare(header_line(dict.fromkeys((*OWN_COLUMNS, *columns))), ()))

    def prepare_columns(self, columns: list[str]) -> "Replacement":
        """Writes a copy with additional columns."""
        wanted = dict.fromkeys((*self.columns, *OWN_COLUMNS, *columns))
        added = len(wanted) - len(self.columns)
        # Each line feed ends a row, since cells are numbers.
        end = b"," * added + b"\n"
        body = (chunk.replace(b"\n", end) for chunk in self.snapshot().chunks(chunk_bytes=_COPY_BYTES))
        return self._prepare(header_line(wanted), body)

    def snapshot(self) -> CsvSnapshot:
        """Returns the rows of the file, valid until this object replaces it."""
        return CsvSnapshot(self._fd, self._header, self.size, checks=self.checks)

    # Checksums.

    def write_sums(self, *, is_last: bool = False) -> None:
        """Writes the checksums of complete blocks; at the end, also of the remaining rows."""
        if is_last:
            self._sums.close_block()
        written, size = self._written or (0, 0)
        if self._written is not None and written >= len(self._sums.blocks):
            return
        path = sums_path(self.path)
        if self._written is None or written > len(self._sums.blocks) or not _has_size(path, size):
            self._save_sums()
            return
        lines = self._sums.lines(written)
        fd = self._disk.open(path, os.O_WRONLY | os.O_CLOEXEC)
        with closing(fd):
            self._disk.write(fd, lines, size)
        self._written = len(self._sums.blocks), size + len(lines)

    def _save_sums(self, *following: BlockSums) -> None:
        """Replaces the file of checksums with sums of this CSV, and of the CSV that will follow it."""
        content = b"".join(one.content() for one in (self._sums, *following))
        # If a power loss undoes this rename, the old file has the same sums of the current CSV.
        with replacement(sums_path(self.path), durable=bool(following), disk=self._disk) as fd:
            self._disk.write(fd, content, 0)
            self._disk.sync(fd)
        self._written = None if following else (len(self._sums.blocks), len(content))

    # Rows of the newest session, which follow the rows of earlier sessions.

    @property
    def own_rows(self) -> int:
        """The number of rows of the newest session in the file."""
        return self.rows - (self.parts.chain.view or 0)

    def own_start(self) -> int:
        """Returns the offset of the first row of the newest session."""
        return self.snapshot().offset_of(self.parts.chain.view or 0)

    def seal(self) -> SealedPart | None:
        """Writes the rows of the newest session as a closed part; returns None if there are none.

        Raises:
            ChangedError: another program has changed the file in the meantime.
            OSError: the disk is full.
        """
        if self.own_rows <= 0:
            return None
        own = attrs.evolve(self.snapshot(), begin=self.own_start())
        part = self.parts.close(own, self.own_rows)
        if not self.is_as_left():
            raise ChangedError
        return part

    def look_again(self) -> None:
        """Checks which rows another program has left in the open file, for `prepare_mended`."""
        size = os.fstat(self._fd).st_size
        sums = Sums((Section(self._sums.header, tuple(self._sums.blocks)),))
        self.size = end_of_last_line(self._fd, min(size, self.size))
        if self.read(0, len(self._header)) != self._header:
            self.size = len(self._header)
        tail = self._sums.tail
        self.checks = CheckedBlocks(self.path, sums, self._header, size, self.size, self.read, tail)

    def prepare_mended(self) -> "tuple[Replacement, int]":
        """Writes a copy in which lost rows are blank, and returns it with the number of lost rows.

        So each row keeps its number. Rows of earlier sessions come from their closed parts, if these are
        complete.
        """
        columns, view, lost = list(self.columns), self.parts.chain.view or 0, 0
        earlier = b""
        with contextlib.suppress(OSError):
            earlier = (
                b"".join(self.parts.lines_of(self.parts.chain.kept(self.parts.chain.before), columns))
                if view
                else b""
            )
        is_whole = earlier.count(b"\n") == view
        left = self.rows - view if is_whole else self.rows

        def body() -> Iterator[bytes]:
            nonlocal lost, left
            if is_whole:
                yield earlier
            for chunk in self.snapshot().chunks(self.own_start() if is_whole else None):
                left -= chunk.count(b"\n")
                lost += sum(not line.strip(b" ,\n") for line in chunk.splitlines())
                yield chunk.replace(b" ", b"")
            lost += left
            yield (b"," * (len(columns) - 1) + b"\n") * left

        return self._prepare(self._header, body()), lost

    def prepare_history(
        self, columns: Iterable[str], kept: Sequence[tuple[SealedPart, Keep]], *, with_own: bool
    ) -> "Replacement":
        """Writes a version that begins with rows of earlier sessions.

        Args:
            columns: the columns that it must have.
            kept: the closed parts that contain these rows.
            with_own: whether the rows of the newest session follow.
        """
        own = list(self.columns)
        wanted = list(dict.fromkeys((*OWN_COLUMNS, *columns, *(own if with_own else ()))))

        def body() -> Iterator[bytes]:
            yield from self.parts.lines_of(kept, wanted)
            for chunk in self.snapshot().chunks(self.own_start()) if with_own else ():
                yield rearranged(chunk, own, wanted)

        return self._prepare(header_line(wanted), body())

    @property
    def header(self) -> bytes:
        """The first line."""
        return self._header

    def read(self, start: int, length: int) -> bytes:
        """Returns bytes of the file."""
        return read_at(self._fd, length, start)

    def restore(self) -> None:
        """Rewrites a deleted file at its path, from the open descriptor."""
        self.accept(self._prepare(self._header, self.snapshot().chunks()))

    def close(self) -> None:
        """Closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # Inside.

    def _take_header(self, header: bytes) -> None:
        self._header = header
        self.columns = {name: index for index, name in enumerate(parse_header(header))}
        self._formatters.clear()
        self._names = None

    def _prepare(self, header: bytes, body: Iterable[bytes]) -> "Replacement":
        return Replacement(self.path, header, body, self._disk)

    def accept(self, replacement: "Replacement") -> None:
        """Renames a replacement into place and continues with it; `sync_name` syncs the rename.

        Raises:
            OSError: the replacement couldn't be renamed, and was removed.
        """
        try:
            if self._header or os.path.lexists(sums_path(self.path)):
                self._save_sums(replacement.sums)
        except BaseException:
            replacement.discard()
            raise
        fd = replacement.take()
        self.close()
        self._fd, self.size, self.rows, self._is_torn = fd, replacement.size, replacement.rows, False
        self._is_named = False
        self._take_header(replacement.header)
        self._sums, self._written, self.checks = replacement.sums, None, None


class Replacement:
    """A complete new version of a file, in a temporary file beside it."""

    def __init__(self, path: Path, header: bytes, body: Iterable[bytes], disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self.header = header
        self.sums = BlockSums.begin(header)
        self._fd, self._name = open_temporary(path, disk)
        self.size = 0
        self.rows = 0
        try:
            self._write(header)
            for chunk in body:
                self._write(chunk)
                self.rows += self.sums.add(chunk)
            disk.sync(self._fd)
        except BaseException:
            self.discard()
            raise

    def state(self, segment: int, offset: int, history: int) -> CsvState:
        """Returns the state of the new version for the position."""
        return _state(self.sums, self.size, segment, offset, history)

    def take(self) -> int:
        """Renames the file into place and returns its descriptor; removes it if that fails."""
        try:
            self._disk.replace(self._name, self._path)
        except OSError:
            # A network file system may report a failure although the rename succeeded.
            if not is_open_file(self._fd)(str(self._path)):
                self.discard()
                raise
        return self._fd

    def discard(self) -> None:
        """Removes the file."""
        os.close(self._fd)
        with contextlib.suppress(OSError):
            Path(self._name).unlink()

    def _write(self, chunk: bytes) -> None:
        self._disk.write(self._fd, chunk, self.size)
        self.size += len(chunk)


def _state(sums: BlockSums, size: int, segment: int, offset: int, history: int) -> CsvState:
    tail = sums.tail
    return CsvState(sums.header, size, segment, offset, 0, history, tail.start, tail.rows, tail.crc32)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
