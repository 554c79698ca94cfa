"""Writes `metrics.csv`: appends rows, replaces the file to add columns, and closes it as a part.

Runs in the writer thread. Appended rows count only once `drain` has written a position that covers them.
"""

import contextlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
import numpy as np

from uploads.disk import (
    DISK,
    Disk,
    end_of_last_line,
    is_open_file,
    open_temporary,
    replacement,
)

from .blocks import MISSING_STEP, abandoned_by, read_blocks
from .layout import (
    OWN_COLUMNS,
    CsvState,
    Position,
    column_of,
    format_cell_rows,
    format_cells,
    header_line,
    parse_header,
    parse_number,
    part_before,
    part_numbers,
    part_path,
    parts_path,
    read_header,
)
from .reader import CsvSnapshot, Part, part_begun_by

if TYPE_CHECKING:
    from .frames import Resume, RowBlock

__all__ = [
    "AbandonedRows",
    "ChangedError",
    "Cut",
    "MetricsCsv",
    "Replacement",
    "RowFormatter",
]

_COPY_BYTES = 128 << 10
_LINES_AT_ONCE = 1000

Line = Callable[[int | None, int | None, float, tuple[float, ...]], str]


class ChangedError(Exception):
    """Another program has changed the size of the file."""


class RowFormatter:
    """Formats rows of certain names as lines of one file, which must have all their columns."""

    def __init__(self, names: tuple[str, ...], columns: dict[str, int]) -> None:
        wanted = (*OWN_COLUMNS, *map(column_of, names))
        self.missing = [column for column in wanted if column not in columns]
        targets = [] if self.missing else [columns[column_of(name)] for name in names]
        self._places = frozenset(targets)
        self._has_epoch = "epoch" in names
        self._targets = targets
        self._columns = columns
        self._own = [columns[name] for name in OWN_COLUMNS if name in columns]
        first = targets[0] if targets else None
        self.line: Line = self._incomplete if self.missing else self._general
        self._is_contiguous = (
            not self.missing
            and first is not None
            and self._own == [0, 1, 2]
            and targets == list(range(first, first + len(names)))
            and first > 2  # noqa: PLR2004  # after the own columns
        )
        if self._is_contiguous and first is not None:
            self._before = "," * (first - 2)
            self._after = "," * (len(columns) - first - len(names)) + "\n"
            self.line = self._contiguous

    def can_join(self, other: Self) -> bool:
        """Returns whether a row of these names and one of others, of one step and epoch, fit into a line.

        Where one has a metric that replaces the epoch, they are of two epochs.
        """
        has_epoch = self._has_epoch or other._has_epoch
        return not has_epoch and self._places.isdisjoint(other._places)

    def lines(self, block: "RowBlock", count: int) -> bytes:
        """Returns the lines of the first `count` rows of a block, at least one."""
        steps, epochs, times, values = block.steps, block.epochs, block.times[:count], block.values[:count]
        if not (self._is_contiguous and np.isfinite(times).all()):
            rows = zip(steps, epochs, times.tolist(), map(tuple, values.tolist()), strict=False)
            return "".join([self.line(*row) for row in rows]).encode()
        # A handful of calls for all rows: between them the interpreter lock is free for training.
        line = b"%d,%d,%b" + self._before.encode() + b"%b" + self._after.encode()
        stamps = format_cell_rows(times.round(6)[:, None])
        return b"".join(map(line.__mod__, zip(steps, epochs, stamps, format_cell_rows(values), strict=False)))

    def wide_line(
        self,
        step: int | None,
        epoch: int | None,
        time: float,
        values: "np.ndarray[Any, np.dtype[np.float64]]",
    ) -> bytes:
        """Returns the line of floats `(metrics,)`."""
        if not self._is_contiguous:
            return self.line(step, epoch, time, tuple(values.tolist())).encode()
        before = f"{_cell(step)},{_cell(epoch)},{round(time, 6)!r}{self._before}".encode()
        return b"".join([before, *format_cell_rows(values[None]), self._after.encode()])

    def _contiguous(self, step: int | None, epoch: int | None, time: float, values: tuple[float, ...]) -> str:
        cells = format_cells(values)
        return f"{_cell(step)},{_cell(epoch)},{round(time, 6)!r}{self._before}{cells}{self._after}"

    def _incomplete(self, *_: object) -> str:
        raise RuntimeError(f"the file has no column for {self.missing[:3]}: these values would be lost")

    def _general(self, step: int | None, epoch: int | None, time: float, values: tuple[float, ...]) -> str:
        cells = [""] * len(self._columns)
        for column, text in zip(self._own, (_cell(step), _cell(epoch), repr(round(time, 6))), strict=True):
            cells[column] = text
        for target, value in zip(self._targets, values, strict=True):
            cells[target] = format_cells((value,))
        return ",".join(cells) + "\n"


def _cell(value: int | None) -> str:
    return "" if value is None else str(value)


class MetricsCsv:
    """One CSV, open for writing.

    Args:
        path: the path of the file, which is created with the first rows.
        disk: the disk operations.
    """

    def __init__(self, path: Path, disk: Disk = DISK, *, first_part: int = 1) -> None:
        self.path = path
        self._first_part = first_part
        self.folder = parts_path(path)
        """The folder of the closed parts."""
        self._disk = disk
        self.closed = 0
        """The number of the last closed part, after which this file begins; 0 if there is none."""
        self.size = 0
        self.rows = 0
        """The number of rows; of a file that was opened, those added since, until it is set."""
        self.columns: dict[str, int] = {}
        self._header = b""
        # Whether the disk has the name of the open file, as far as this object gave it one.
        self._is_named = True
        # Whether there may be bytes beyond the size that this object wrote.
        self._is_torn = False
        self._fd = -1
        # Of this file alone. The last one is found without hashing ten thousand names for each row.
        self._formatters: dict[tuple[str, ...], RowFormatter] = {}
        self._names: tuple[str, ...] | None = None
        self._plan = RowFormatter((), {})

    def open(self, position: Position | None) -> CsvState | None:
        """Opens an existing file and truncates it to the rows that count.

        Returns:
            The state of the file, or None if the position does not match it: then all complete lines count.
        """
        numbers = part_numbers(self.folder)
        self.closed = numbers[-1] if numbers else 0
        if position is not None:
            self.closed = position.states[-1].parts
        try:
            self._fd = self._disk.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return None
        file_size = os.fstat(self._fd).st_size
        header = read_header(self._fd, file_size)
        state = None if position is None else position.state_of(header, file_size)
        if state is not None:
            self.closed = state.parts
        end = end_of_last_line(self._fd, file_size) if state is None else state.csv_bytes
        if position is None and end > len(header):
            part = part_begun_by(self.parts(), CsvSnapshot(self._fd, header, end))
            if part is not None and part.number == self.closed and part.has_size(end):
                self.closed = part_before(numbers)  # It was being closed when the position was lost.
            elif part is not None:
                end = len(header)  # A copy of a live run, of which the part was copied later, has them there.
        if end < len(header) or not header:
            self.close()
            return None
        if end < file_size:
            self._disk.truncate(self._fd, end)
        self.size = end
        self._take_header(header)
        if header.endswith(b"\r\n"):
            lines = (line.replace(b"\r\n", b"\n") for line in self._lines())
            self.accept(self._prepare(header.replace(b"\r\n", b"\n"), lines))
        return state

    def state(self, segment: int, offset: int) -> CsvState:
        """Returns the current state of the file for the position."""
        return CsvState(zlib.crc32(self._header), self.size, segment, offset, self.closed)

    def formatter(self, names: tuple[str, ...]) -> RowFormatter:
        """Returns the formatter of rows of these names in the present file; it knows the columns it lacks."""
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
        """Returns whether the open file is the one at the path."""
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
        data = b"".join(lines)
        if self._is_torn:
            self._disk.truncate(self._fd, self.size)
        self._is_torn = True
        self._disk.write(self._fd, data, self.size)
        self._is_torn = False
        self.size += len(data)
        self.rows += data.count(b"\n")

    def is_as_left(self) -> bool:
        """Returns whether the open file has the size that this object left it with."""
        size = os.fstat(self._fd).st_size
        return size == self.size or (self._is_torn and size > self.size)

    def rewind(self, size: int, rows: int) -> None:
        """Drops rows that were appended last: what is beyond the size is overwritten."""
        self._is_torn = self._is_torn or size < self.size
        self.size, self.rows = size, rows

    def has_rows(self, limit: int, rows: int) -> bool:
        """Reads the file up to a limit, and returns whether it has the header and so many ends of rows.

        Where it was cut and written on, at least one is missing.
        """
        start = len(self._header)
        is_whole = os.pread(self._fd, start, 0) == self._header and os.fstat(self._fd).st_size >= limit
        return is_whole and self.count_rows(limit) == rows

    def count_rows(self, limit: int) -> int:
        """Returns the number of rows up to a limit."""
        return sum(chunk.count(b"\n") for chunk in self._chunks(len(self._header), limit))

    def sound_rows(self, limit: int) -> tuple[int, int]:
        """Reads the file up to a limit, and returns where its sound rows end, and their number.

        They end where bytes are missing, or are NUL, as where a file that was cut is written on. Without the
        header there are none.
        """
        start = len(self._header)
        if os.pread(self._fd, start, 0) != self._header:
            return start, 0
        end, rows = start, 0
        for chunk in self._chunks(start, limit):
            sound = chunk.partition(b"\0")[0]
            rows += sound.count(b"\n")
            end = start + sound.rfind(b"\n") + 1 if b"\n" in sound else end
            start += len(sound)
            if len(sound) < len(chunk):
                break
        return end, rows

    def prepare_until(self, end: int) -> "Replacement":
        """Writes a copy of the rows up to an offset."""
        return self._prepare(self._header, self._chunks(len(self._header), end))

    def foreign_bytes(self) -> Iterator[bytes]:
        """Yields what another program put in: what it appended, or all if the header is not ours."""
        is_ours = os.pread(self._fd, len(self._header), 0) == self._header
        yield from self._chunks(self.size if is_ours else 0, os.fstat(self._fd).st_size)

    def sync(self) -> None:
        """Syncs the file."""
        if self._fd >= 0:
            self._disk.sync(self._fd)

    def sync_name(self) -> None:
        """Waits until the disk has the open file under its name."""
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
        header = header_line(wanted)
        return self._prepare(header, self._padded(b"," * added))

    def prepare_without(
        self,
        resume: "Resume",
        first: int,
        aside: "Callable[[bytes], AbandonedRows]",
        between: Callable[[], None],
    ) -> tuple["Replacement", list["AbandonedRows"]]:
        """Writes a copy without abandoned rows, which comes after fewer parts.

        Args:
            resume: says which rows are abandoned.
            first: the number of the first part of which, and of all later ones, all rows are abandoned;
                `closed + 1` if there is none.
            aside: returns what takes the lines that are left out, for each file that has such lines.
            between: called after each chunk.

        Returns:
            The copy, and what took the lines; their files are permanent.
        """
        left: list[AbandonedRows] = []

        def kept() -> Iterator[bytes]:
            for part in self.parts(first):
                with contextlib.closing(part.open()) as file:
                    yield from _kept(file, resume, left, aside, between)
            yield from _kept(self.snapshot(), resume, left, aside, between)

        return self._prepare(self._header, kept(), first - 1), left

    def snapshot(self) -> CsvSnapshot:
        """Returns the rows of the file, which stays open as long as this object does not replace it."""
        return CsvSnapshot(self._fd, self._header, self.size)

    # Parts.

    @property
    def part_bytes(self) -> int:
        """The size of all closed parts that are there."""
        return sum(part.identity[2] for part in self.parts() if part.identity)

    def rows_missing(self, number: int, rows: int) -> int:
        """Returns how many rows a part lacks of those that it had when it was closed."""
        part = Part.find(self.folder, number)
        try:
            if part is None:
                return rows
            with contextlib.closing(part.open()) as file:
                return max(0, rows - int(file.packed.count))
        except OSError:
            return rows

    def parts(self, first: int = 1) -> list[Part]:
        """Returns the closed parts from a number on that are there."""
        numbers = (number for number in part_numbers(self.folder) if first <= number <= self.closed)
        found = (Part.find(self.folder, number) for number in numbers)
        return [part for part in found if part is not None]

    def prepare_next(
        self,
        columns: Iterable[str],
        between: Callable[[], None] = lambda: None,
    ) -> "Replacement":
        """Closes the file as a part, and writes a file without rows that takes its place.

        The part counts once the position says so: until then its rows are those of this file.

        Args:
            columns: of the new file.
            between: called meanwhile.
        """
        for folder in (self.folder.parent, self.folder):
            self._disk.make_folder(folder)
            self._disk.sync_folder(folder.parent)
        number = max(self.closed + 1, self._first_part)
        self.put_part(number, self.snapshot().to_parquet(between))
        if not self.is_as_left():
            raise ChangedError
        return self._prepare(header_line(dict.fromkeys((*OWN_COLUMNS, *columns))), (), number)

    def rewrite_part(
        self,
        part: Part,
        resume: "Resume",
        aside: "Callable[[bytes], AbandonedRows]",
        between: Callable[[], None],
    ) -> list["AbandonedRows"]:
        """Replaces a part by one without abandoned rows; see `prepare_without`.

        As long as the journal has the resume, it makes no difference which of them is there.
        """
        left: list[AbandonedRows] = []
        with contextlib.closing(part.open()) as file:
            lines = b"".join([file.header, *_kept(file, resume, left, aside, between)])
        csv = CsvSnapshot(-1, file.header, len(lines), lines)
        self.put_part(part.number, csv.to_parquet(between))
        return left

    def put_part(self, number: int, content: bytes) -> None:
        """Writes a part to the disk, in the place of what is there."""
        with replacement(part_path(self.folder, number), durable=True, disk=self._disk) as fd:
            self._disk.write(fd, content, 0)
        # Of an earlier version of this package: it would count.
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(part_path(self.folder, number, ".csv"))

    def remove_surplus(self) -> None:
        """Removes the parts beyond the last that counts: their rows are in this file, or in `abandoned/`.

        Raises:
            OSError: one cannot be removed.
        """
        surplus = False
        for suffix in (".npy", ".parquet", ".csv"):
            for number in part_numbers(self.folder, [suffix]):
                if number > self.closed:
                    self._disk.unlink(part_path(self.folder, number, suffix))
                    surplus = True
        if surplus:
            # Without a position, parts that a power loss restores would count again.
            self._disk.sync_folder(self.folder)

    @property
    def header(self) -> bytes:
        """The first line."""
        return self._header

    def read(self, start: int, length: int) -> bytes:
        """Returns bytes of the file."""
        return os.pread(self._fd, length, start)

    def blocks(self, start: int) -> Iterator[bytes]:
        """Yields the file from an offset on, in blocks of complete lines."""
        return CsvSnapshot(self._fd, self._header, self.size).chunks(start, _COPY_BYTES)

    def restore(self) -> None:
        """Rewrites a deleted file at its path, from the open descriptor."""
        self.accept(self.prepare_until(self.size))

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

    def _chunks(self, start: int, end: int | None = None) -> Iterator[bytes]:
        end = self.size if end is None else end
        while start < end:
            chunk = os.pread(self._fd, min(_COPY_BYTES, end - start), start)
            if not chunk:
                return
            start += len(chunk)
            yield chunk

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        for chunk in self._chunks(len(self._header)):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line + b"\n" for line in lines)

    def _padded(self, commas: bytes) -> Iterator[bytes]:
        """Yields the rows with empty cells appended. Each line feed ends a row: cells are numbers only."""
        for chunk in self._chunks(len(self._header)):
            yield chunk.replace(b"\n", commas + b"\n")

    def _prepare(self, header: bytes, body: Iterable[bytes], closed: int | None = None) -> "Replacement":
        return Replacement(self.path, header, body, self._disk, self.closed if closed is None else closed)

    def accept(self, replacement: "Replacement") -> None:
        """Renames a replacement into place and continues with it; see `sync_name`.

        Raises:
            OSError: it could not be renamed, and is gone.
        """
        fd = replacement.take()
        self.close()
        self._fd, self.size, self.rows, self._is_torn = fd, replacement.size, replacement.rows, False
        self._is_named = False
        self.closed = replacement.closed
        self._take_header(replacement.header)


class AbandonedRows:
    """The file of an abandoned branch, named by its checksum: repeating it after a crash is idempotent.

    Args:
        folder: the folder of the file.
        stem: the start of its name.
        step: the step that training resumed from.
        header: its first line.
        disk: the disk operations.
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
        """The number of rows."""
        self.path = folder
        """The permanent file, once there is one."""

    def write(self, line: bytes) -> None:
        """Appends a line."""
        self._pending.append(line)
        if len(self._pending) >= _LINES_AT_ONCE:
            self._write()
        self._crc32 = zlib.crc32(line, self._crc32)
        self.count += 1

    def keep(self) -> None:
        """Makes the file permanent; otherwise it is removed on exit."""
        self._write()
        self._disk.sync(self._fd)
        self.path = self._folder / f"{self._name}.{self._crc32:08x}.csv"
        self._disk.replace(self._temporary, self.path)
        self._disk.sync_folder(self._folder)

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


class Replacement:
    """A complete new version of a file, in a temporary file beside it."""

    def __init__(self, path: Path, header: bytes, body: Iterable[bytes], disk: Disk, closed: int) -> None:
        self._path = path
        self._disk = disk
        self.header = header
        self.closed = closed
        """The number of the last part before it."""
        self._fd, self._name = open_temporary(path, disk)
        self.size = 0
        self.rows = 0
        try:
            self._write(header)
            for chunk in body:
                self._write(chunk)
                self.rows += chunk.count(b"\n")
            disk.sync(self._fd)
        except BaseException:
            self.discard()
            raise

    def state(self, segment: int, offset: int) -> CsvState:
        """Returns the state of the new version for the position."""
        return CsvState(zlib.crc32(self.header), self.size, segment, offset, self.closed)

    def take(self) -> int:
        """Renames the file into place, and returns its descriptor; removes it where that fails."""
        try:
            self._disk.replace(self._name, self._path)
        except OSError:
            # A network file system may say that it has failed when the file has its name.
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


@attrs.frozen
class Cut:
    """What a resume takes of a file.

    Attributes:
        dropped: the number of abandoned rows.
        is_all: whether these are all.
    """

    dropped: int
    is_all: bool

    @classmethod
    def of(cls, file: CsvSnapshot, resume: "Resume", between: Callable[[], None]) -> Self:
        """Reads the steps of the rows, and the times; calls `between` after each chunk."""
        dropped, is_all = 0, True
        for chunk in file.chunks(chunk_bytes=_COPY_BYTES):
            drops = _abandoned_lines(file.header, chunk, resume)
            dropped += int(drops.sum())
            is_all = is_all and bool(drops.all())
            between()
        return cls(dropped, is_all)


def _kept(
    file: CsvSnapshot,
    resume: "Resume",
    left: list[AbandonedRows],
    aside: Callable[[bytes], AbandonedRows],
    between: Callable[[], None],
) -> Iterator[bytes]:
    """Yields the lines of a file that are not abandoned; the others are put aside."""
    dropped: AbandonedRows | None = None
    with contextlib.ExitStack() as one:
        for chunk in file.chunks(chunk_bytes=_COPY_BYTES):
            drops = _abandoned_lines(file.header, chunk, resume)
            if not drops.any():
                yield chunk
            else:
                lines = [line + b"\n" for line in chunk.split(b"\n")[:-1]]
                yield b"".join(itertools.compress(lines, ~drops))
                dropped = dropped or one.enter_context(aside(file.header))
                for line in itertools.compress(lines, drops):
                    dropped.write(line)
            between()
        if dropped is not None:
            dropped.keep()
            left.append(dropped)


def _abandoned_lines(header: bytes, chunk: bytes, resume: "Resume") -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Returns which of some lines are abandoned."""
    blocks = list(read_blocks(header, [chunk], ()))
    if [len(block) for block in blocks] == [chunk.count(b"\n")] and (blocks[0].step != MISSING_STEP).all():
        return abandoned_by(blocks[0], resume)
    # A step of more bits, or none; a line that is none of numbers.
    columns = {name: at for at, name in enumerate(parse_header(header))}
    step_at, time_at = columns.get("step"), columns.get("time")
    cells = [line.decode("utf-8", "replace").split(",") for line in chunk.split(b"\n")[:-1]]
    return np.array([resume.drops(_integer(row, step_at), _float(row, time_at)) for row in cells], np.bool_)


def _integer(cells: list[str], index: int | None) -> int | None:
    try:
        value = None if index is None else parse_number(cells[index])
        return None if value is None else int(value)
    except (ValueError, IndexError, OverflowError):
        return None


def _float(cells: list[str], index: int | None) -> float:
    try:
        return float("nan") if index is None else float(cells[index])
    except (ValueError, IndexError):
        return float("nan")
