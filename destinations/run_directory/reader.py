"""Reads the metrics of a run, live or finished: the CSV plus the rows still in the journal.

Never writes. Returns no row twice, and every row whose call had returned before reading began, whatever the
writer does meanwhile and however it ended.
"""

import contextlib
import csv
import errno
import functools
import io
import itertools
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from destinations.history.fork import parents_of
from destinations.history.row_chain import ALL, Keep, Kept, Limit, RowChain, RowPlace, drops
from destinations.history.rows import Call
from destinations.history.sums import CheckedBlocks, Sums, read_sums
from uploads.disk import end_of_last_line, open_regular, read_at, read_regular

from .frames import MAGIC, Begin, Boundary, Resume, Rewind
from .layout import (
    MARKED_TAIL_BYTES,
    MAX_LINE_BYTES,
    OWN_COLUMNS,
    PARTS_FOLDER,
    POSITION,
    CsvState,
    Position,
    check_format,
    column_of,
    csv_mark,
    format_cells,
    header_end,
    header_line,
    journal_path,
    metrics_name,
    missing_parts,
    parse_header,
    parse_number,
    part_numbers,
    part_path,
    parts_path,
    read_header,
    whole_number,
)
from .segments import JournalRecord, journal_records

if TYPE_CHECKING:
    from .parquet import ParquetRows

__all__ = [
    "CsvSnapshot",
    "End",
    "MetricRow",
    "MetricsSnapshot",
    "ParquetSnapshot",
    "Part",
    "damage_of_csvs",
    "damage_of_parts",
    "has_any_metric",
    "is_sound",
    "keeps",
    "last_rows",
    "last_rows_of",
    "merge_journal",
    "metric_columns",
    "open_existing",
    "parse_rows",
    "part_begun_by",
    "read_rows",
    "read_series",
    "read_whole",
    "row_of",
    "take_snapshot",
]

End = tuple[str, int | None]
"""The id of a session, and the mark of its checkpoint where rows end; None for all of its rows."""

_TRIES = 100
_MOST_MISSING = 100
# Open files of parents that are kept as closed parts.
_MOST_HELD = 16
_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 256 << 10
_TAIL_ROWS = 1000
# Times are rounded to microseconds.
_SAME_SECONDS = 1e-5
_SUFFIXES = (".csv", ".parquet")
# Histories that were read last; they are never changed, so any thread may use them.
_chains: dict[Path, RowChain] = {}
_MOST_HELD = 64
_MAX_CACHED_BYTES = 64 << 20
_PACKED_BYTES = 8 << 20
# Of the parts of a run that has ended, so many are read whole when it is scanned.
_MOST_VERIFIED = 16
_RANK = re.compile(r"metrics(?:\.rank([0-9]{1,9}))?")
_log = logging.getLogger("destinations")
_OWN_HEADERS = tuple(header_line(OWN_COLUMNS).rstrip() + end for end in (b",", b"\n", b"\r"))


@attrs.define(eq=False, repr=False)
class CsvSnapshot:
    """The valid rows of a CSV, up to a complete line.

    Where a row begins is its place: an offset in a CSV, and the number of the row in a `ParquetSnapshot`.

    Args:
        fd: the open file, owned by this object; -1 if there is none.
        header: the first line, with its line end.
        end: the end of the valid rows.
        held: the file up to there, if it was read already.
        begin: the offset of the first row. Default: after the header.
        limits: which of its rows do not count, until the writer has written them anew; see `Keep`.
        checks: the checksums of its rows; the rows of a damaged block are blank.
    """

    _fd: int
    header: bytes
    end: int
    _held: bytes | None = None
    begin: int | None = None
    limits: tuple[Limit, ...] = ()
    checks: CheckedBlocks | None = None

    @classmethod
    def of(cls, fd: int) -> Self:
        """Returns all complete lines of an open file, which is owned by the result.

        Raises:
            OSError: it cannot be read; it is closed then.
        """
        try:
            size = os.fstat(fd).st_size
            return cls(fd, read_header(fd, size), end_of_last_line(fd, size))
        except BaseException:
            os.close(fd)
            raise

    @property
    def size(self) -> int:
        """The size of the rows in bytes."""
        return max(0, self.end - self.first)

    @property
    def is_own(self) -> bool:
        """Whether our writer made the file: it only appends rows, or replaces the whole file."""
        return self.header.startswith(_OWN_HEADERS)

    @property
    def first(self) -> int:
        """The place of the first row."""
        return len(self.header) if self.begin is None else self.begin

    def offset_of(self, row: int, start: int | None = None) -> int:
        """Returns the offset of a row, counted from 0 at an offset; the end if there are fewer."""
        at = self.first if start is None else start
        for chunk in self.chunks(at):
            if (count := chunk.count(b"\n")) >= row:
                return at + sum(map(len, chunk.splitlines(keepends=True)[:row]))
            row, at = row - count, at + len(chunk)
        return at

    def count(self, start: int) -> int:
        """Returns the number of rows from an offset on."""
        return sum(chunk.count(b"\n") for chunk in self.chunks(start))

    def fileno(self) -> int:
        """Returns the descriptor; -1 if there is no CSV."""
        return self._fd

    def chunks(
        self, start: int | None = None, chunk_bytes: int = _CHUNK_BYTES, *, end: int | None = None
    ) -> Iterator[bytes]:
        """Yields the rows in chunks of complete lines.

        Args:
            start: the place of a row. Default: that of the first.
            chunk_bytes: the size of a read; a longer line is one chunk.
            end: the place after a row. Default: that after the last one.
        """
        at = self.first if start is None else start
        end = self.end if end is None else end
        length = chunk_bytes
        while at < end:
            piece = self._piece(at, min(length, end - at))
            if not piece:
                return
            whole = len(piece) if at + len(piece) >= end else piece.rfind(b"\n") + 1
            if whole == 0:
                if length >= MAX_LINE_BYTES:
                    raise OSError(errno.EFBIG, f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
                length *= 2
                continue
            yield piece[:whole]
            at += whole
            length = chunk_bytes

    def chunks_from_end(self, chunk_bytes: int = _TAIL_BYTES) -> Iterator[bytes]:
        """Yields the rows in chunks of complete lines, last chunk first; see `chunks`."""
        first, end, length = self.first, self.end, chunk_bytes
        while end > first:
            start = max(first, end - length)
            piece = self._piece(start, end - start)
            if len(piece) < end - start:
                return  # The file was truncated meanwhile.
            # The chunk starts within a line, unless it is the first.
            skipped = 0 if start == first else piece.find(b"\n") + 1
            if start > first and skipped in {0, len(piece)}:
                if length >= MAX_LINE_BYTES:
                    raise OSError(errno.EFBIG, f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
                length *= 2
                continue
            yield piece[skipped:]
            end, length = start + skipped, chunk_bytes

    def _piece(self, at: int, length: int) -> bytes:
        piece = self.raw(at, length)
        return piece if self.checks is None else self.checks.checked(piece, at, self.raw)

    def raw(self, at: int, length: int) -> bytes:
        """Returns bytes of the file as they are; fewer at its end."""
        if self._held is not None:
            return self._held[at : at + length]
        return read_at(self._fd, length, at) if length > 0 else b""

    def rows(self, start: int | None = None) -> "Iterator[MetricRow]":
        """Yields the rows one chunk at a time; see `chunks` and `parse_rows`."""
        columns = parse_header(self.header)
        for chunk in self.chunks(start):
            rows = parse_rows(columns, [chunk])
            yield from (row for row in rows if keeps(self.limits, row)) if self.limits else rows

    def before(self, end: int, length: int) -> bytes:
        """Returns up to `length` bytes before an offset, without the first line."""
        start = max(len(self.header), end - length)
        return self.raw(start, end - start)

    def mark(self, size: int, closed: int = 0) -> dict[str, int] | None:
        """Returns the `csv_mark` of the first `size` bytes, after some parts; None if there are fewer."""
        if not len(self.header) <= size <= self.end:
            return None
        start = max(0, size - MARKED_TAIL_BYTES)
        return csv_mark(self.header, self.raw(start, size - start), size, closed)

    def to_parquet(self, between: Callable[[], None] = lambda: None) -> bytes:
        """Returns the rows as a closed part; calls `between` meanwhile."""
        from .parquet import pack  # imports numpy, and pyarrow

        def chunks() -> Iterator[bytes]:
            for chunk in self.chunks(chunk_bytes=_PACKED_BYTES):
                between()
                yield chunk

        def cells() -> Iterator[dict[str, float]]:
            for row in self.rows():
                own = zip(OWN_COLUMNS, (row.step, row.epoch, row.time), strict=True)
                cells = itertools.chain(own, row.metrics.items())
                yield {name: cell for name, cell in cells if cell is not None}

        return pack(self.header, chunks(), cells, csv_bytes=self.end)

    def take(self) -> int:
        """Hands the descriptor over to the caller; this object cannot read any more."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class ParquetSnapshot(CsvSnapshot):
    """The rows of a part, as those of the CSV that it was: header and size are of that.

    Args:
        rows: the file, owned by this object.
        is_damaged: whether it has no rows because its file is damaged.
    """

    def __init__(self, rows: "ParquetRows", *, is_damaged: bool = False) -> None:
        super().__init__(-1, rows.header, rows.csv_bytes)
        self.packed = rows
        self.is_damaged = is_damaged

    @property
    def first(self) -> int:
        return 0

    def chunks(
        self, start: int | None = None, chunk_bytes: int = _CHUNK_BYTES, *, end: int | None = None
    ) -> Iterator[bytes]:
        del chunk_bytes
        return self.packed.lines(start or 0, end)

    def chunks_from_end(self, chunk_bytes: int = _TAIL_BYTES) -> Iterator[bytes]:
        del chunk_bytes
        for end in range(self.packed.count, 0, -_TAIL_ROWS):
            yield b"".join(self.packed.lines(max(0, end - _TAIL_ROWS), end))

    def rows(self, start: int | None = None, end: int | None = None) -> "Iterator[MetricRow]":
        columns = parse_header(self.header)
        for cells in self.packed.cells(start or 0, end):
            yield _row_of_cells(
                {name: cell for name, cell in zip(columns, cells, strict=True) if cell is not None}
            )

    def begins_with(self, csv: CsvSnapshot) -> bool:
        """Returns whether this has the rows of a CSV, in the same place."""
        if self.header != csv.header or not 0 < csv.size <= self.size:
            return False
        if _numbers_of(csv.rows()) != _numbers_of(self.rows()):
            return False
        count = sum(chunk.count(b"\n") for chunk in csv.chunks())
        return _numbers_of(_last_csv_rows(csv, 1, ())) == _numbers_of(self.rows(count - 1))

    def close(self) -> None:
        self.packed.close()


def _numbers_of(rows: "Iterable[MetricRow]") -> str:
    """Returns the numbers of the first row as text, in which NaN is itself."""
    row = next(iter(rows))
    # In a part, the integers of a column of floats are floats.
    return repr((row.step, row.time, {name: float(value) for name, value in row.metrics.items()}))


@attrs.frozen
class Part:
    """A closed part of the rows of a rank: Parquet, or the CSV of an earlier version of this package.

    Its rows never change. Where both files are there, the CSV counts.

    Attributes:
        folder: of the parts of the rank.
        number: of the part, from 1 on.
        is_csv: whether it is a CSV, until `runs pack` makes it Parquet.
        keep: which of its rows count.
    """

    folder: Path
    number: int
    is_csv: bool = False
    keep: Keep = ALL

    @classmethod
    def find(cls, folder: Path, number: int, keep: Keep = ALL) -> Self | None:
        """Returns the part that is there; None if there is none."""
        found = (cls(folder, number, is_csv, keep) for is_csv in (True, False))
        return next((part for part in found if os.path.lexists(part.path)), None)

    def open(self) -> "ParquetSnapshot":
        """Opens the part; the caller closes it. One whose footer is damaged has no rows, see `damage`.

        Raises:
            OSError: it cannot be read, or is not there.
        """
        from .parquet import DamagedParquetError, ParquetRows  # imports numpy, and pyarrow

        fd = open_existing(self.path)
        if fd < 0:
            if self.is_csv:
                return attrs.evolve(self, is_csv=False).open()
            raise FileNotFoundError(errno.ENOENT, "it is not there", str(self.path))
        try:
            found = CsvSnapshot.of(fd) if self.is_csv else ParquetSnapshot(ParquetRows(fd, str(self.path)))
        except DamagedParquetError:
            header = header_line(OWN_COLUMNS)
            nothing = CsvSnapshot(-1, header, len(header))
            return ParquetSnapshot(ParquetRows(nothing.to_parquet()), is_damaged=True)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise
        if not isinstance(found, ParquetSnapshot) or found.packed.version == 1:
            # What earlier versions wrote is read as what this one would have written.
            with contextlib.closing(found):
                found = ParquetSnapshot(ParquetRows(found.to_parquet(), str(self.path)))
        if self.keep != ALL:
            found.packed.keep(self.keep)
        return found

    @contextlib.contextmanager
    def opened(self) -> "Iterator[ParquetSnapshot]":
        """Opens the part for the duration of a `with` block; logs what cannot be read of it."""
        with contextlib.closing(self.open()) as file:
            if (damage := self.damage(file)) is not None:
                self.warn(damage)
            yield file

    @property
    def size(self) -> int:
        """The size of its file."""
        return self.path.stat().st_size

    @property
    def path(self) -> Path:
        """The path of the file."""
        return part_path(self.folder, self.number, ".csv" if self.is_csv else ".parquet")

    @property
    def absence(self) -> str:
        """What to say where it is not there."""
        return f"{_shown(self.path)} is missing: its rows are lost"

    def warn(self, damage: str) -> None:
        """Logs what is wrong with it."""
        _log.warning("run folder %s: %s.", self.path.parents[2], damage)

    def damage(self, file: "ParquetSnapshot") -> str | None:
        """Returns what cannot be read of the open part, as far as it is known; None if nothing."""
        if file.is_damaged:
            return f"{_shown(self.path)} is damaged: its rows cannot be read"
        lost = file.packed.lost
        return (
            f"{_shown(self.path)} is damaged: {lost:,} of {file.packed.count:,} rows cannot be read"
            if lost
            else None
        )

    def check(self, *, pages: bool = False) -> str | None:
        """Returns what cannot be read of the part, see `damage`; with `pages`, reads all of it.

        Raises:
            OSError: see `open`.
        """
        with contextlib.closing(self.open()) as file:
            if pages:
                file.packed.verify()
            return self.damage(file)


def _shown(path: Path) -> str:
    return "/".join(path.parts[-3:])


JournalOf = tuple[str, tuple[Limit, ...], tuple[JournalRecord, ...]]
"""The id of a session, the limits of its rows, and its records in the journal."""


@attrs.frozen(eq=False, repr=False)
class MetricsSnapshot:
    """The metrics of a rank at one moment: the closed parts, then the CSV, then the journal.

    Attributes:
        chain: the sessions whose rows count, oldest first, and how many of them; also those that the history
            does not have yet.
        parts: the closed parts before the CSV, oldest first; none where it begins with their rows.
        csv: the rows of the CSV.
        has_view: whether it begins with all rows of earlier sessions that count.
        journal: what the journal has beyond the files, see `segments.journal_records`, by session.
        place: segment and offset where the journal continues; None without a position.
        closed: the number of the last part before the CSV; 0 if there is none.
        missing: parts that should be there, the first hundred.
        history: all sessions and closed parts.
        path: of the CSV.
        inherited: of a fork, the rows of its parents, which come before the parts.
    """

    chain: tuple[Kept, ...]
    parts: tuple[Part, ...]
    csv: CsvSnapshot
    has_view: bool
    journal: tuple[JournalOf, ...]
    place: tuple[int, int] | None
    closed: int
    missing: tuple[Part, ...]
    history: RowChain
    path: Path
    inherited: tuple[Part, ...] = ()

    def sealed(self, place: RowPlace, start: int) -> Iterator[tuple[Part, int]]:
        """Yields the closed parts of a session, each with the number of its first row.

        Args:
            place: the session, and how many of its rows count.
            start: the number of the first row that is needed.
        """
        first = 0
        for sealed in self.history.parts.get(place.session, ()):
            end = first + sealed.rows
            if place.rows is not None and first >= place.rows:
                return
            if end > start:
                keep = ALL if place.rows is None or end <= place.rows else Keep(place.rows - first)
                part = Part.find(parts_path(self.path), sealed.number, keep)
                if part is None:
                    part = Part(parts_path(self.path), sealed.number, keep=keep)
                    part.warn(part.absence)
                else:
                    yield part, first
            first = end

    def files(self) -> "Iterator[CsvSnapshot]":
        """Yields the parts, each open until the next one, then the CSV. What is missing or cut is logged."""
        for part in self.missing:
            part.warn(part.absence)
        for part in (*self.inherited, *self.parts):
            with part.opened() as file:
                yield file
        for problem in self._problems():
            _log.warning("%s: %s.", self.path, problem)
        yield self.csv

    def _problems(self) -> list[str]:
        """Returns what is wrong with the CSV, as far as it is known without reading its rows."""
        checks, lost = self.csv.checks, self.history.lost
        found = [f"{lost:,} rows of {self.path.name} were damaged, and are lost"] if lost else []
        return found + ([checks.problem] if checks is not None and checks.problem else [])

    def damage_of_csv(self) -> list[str]:
        """Returns what is missing of the rows of the CSV, which is read whole."""
        checks = self.csv.checks
        if checks is None:
            return self._problems()
        checks.verify(self.csv.raw)
        damage = checks.damage()
        return list(dict.fromkeys([*self._problems(), *([] if damage is None else [damage])]))

    def damage(self, *, pages: bool = False) -> list[str]:
        """Returns what is missing of the rows; with `pages`, reads the CSV and the last sixteen parts."""
        found = [part.absence for part in self.missing]
        verified = frozenset(self.parts[-_MOST_VERIFIED:] if pages else ())
        damages = [part.check(pages=part in verified) for part in self.parts]
        found += [damage for damage in damages if damage is not None]
        return found + (self.damage_of_csv() if pages else self._problems())

    def rows(self) -> "Iterator[MetricRow]":
        """Yields all rows outside damaged blocks; holds no file open."""
        for file in self.files():
            yield from filter(is_sound, file.rows())
        yield from self.journal_rows()

    def journal_rows(self) -> "list[MetricRow]":
        """Returns the rows of the journal."""
        return [row for _, rows in self.journal_by_session() for row in rows]

    def journal_by_session(self) -> "Iterator[tuple[str, list[MetricRow]]]":
        """Yields the rows of the journal that each session has."""
        for session, limits, records in self.journal:
            yield session, self.rows_of(limits, records)

    @staticmethod
    def rows_of(limits: Sequence[Limit], records: Sequence[JournalRecord]) -> "list[MetricRow]":
        """Returns the rows of some records of a session."""
        return [row for row in merge_journal(records) if keeps(limits, row)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.csv.close()


def damage_of_parts(run_dir: Path, count: int, *, pages: bool = False) -> list[str]:
    """Returns what is missing of the closed parts of all ranks, file by file.

    Args:
        run_dir: the folder of the run.
        count: how many parts rank 0 had when it ended; while there is a position, that counts.
        pages: whether to read parts whole, see `MetricsSnapshot.damage`.

    Raises:
        OSError: as of `take_snapshot`.
    """

    def damage(rank: int) -> list[str]:
        with take_snapshot(run_dir, rank, with_records=False, with_parents=False) as snapshot:
            found = snapshot.damage(pages=pages)
            if rank == 0 and snapshot.place is None and snapshot.closed < count:
                last = sum(gap.stop - gap.start for gap in missing_parts([snapshot.closed], count))
                found.append(f"the last {last} parts are missing: their rows are lost")
            return found

    with os.scandir(run_dir / PARTS_FOLDER) as entries:
        found = [match for entry in entries if (match := _RANK.fullmatch(entry.name))]
    ranks = sorted({0, *(int(match[1] or 0) for match in found)})
    return [one for rank in ranks for one in damage(rank)]


def damage_of_csvs(run_dir: Path) -> list[str]:
    """Returns what is missing of the rows that are in the CSVs of a run, of all ranks; reads them whole.

    Raises:
        OSError: as of `take_snapshot`.
    """
    found = []
    for path in sorted(run_dir.glob("metrics*.csv")):
        if match := _RANK.fullmatch(path.stem):
            with take_snapshot(
                run_dir, int(match[1] or 0), with_records=False, with_parents=False
            ) as snapshot:
                found += snapshot.damage_of_csv()
    return found


def metric_columns(snapshot: MetricsSnapshot) -> list[str]:
    """Returns the columns of all metrics, in the order of first appearance."""
    names: list[str] = []
    header = b""
    for file in snapshot.files():
        if file.header != header:
            header = file.header
            names += [name for name in parse_header(header) if name not in OWN_COLUMNS]
    before = None
    for record in itertools.chain.from_iterable(records for _, _, records in snapshot.journal):
        match record:
            case (logged, *_) if logged is not before:
                before = logged
                names += [column for column in map(column_of, logged) if column != "epoch"]
    return list(dict.fromkeys(names))


def take_snapshot(
    run_dir: Path,
    rank: int,
    *,
    with_records: bool = True,
    end: End | None = None,
    with_parents: bool = True,
) -> MetricsSnapshot:
    """Returns a consistent snapshot of a rank's metrics, a context manager.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows.
        with_records: whether to read the journal as well.
        end: where the rows end. Default: with the newest session.
        with_parents: whether a fork begins with the rows of its parents.

    Raises:
        NewerFormatError: a newer release wrote the run.
        OSError: a file is unreadable, is not a regular file, or was replaced during each of a hundred
            attempts.
    """
    check_format(run_dir)
    for _ in range(_TRIES):
        snapshot = _try(run_dir, rank, with_records, end)
        if snapshot is not None and with_parents:
            with contextlib.ExitStack() as opened:
                opened.callback(snapshot.csv.close)
                snapshot = attrs.evolve(snapshot, inherited=_inherited(run_dir, rank, end, snapshot.chain))
                opened.pop_all()
        if snapshot is not None:
            return snapshot
    raise OSError(f"metrics in {run_dir} changed during each of {_TRIES} attempts to read them. Try again.")


@attrs.frozen
class _HeldPart(Part):
    """Rows of a parent that are in no closed part, as if they were in one."""

    content: bytes = attrs.field(default=b"", eq=False, repr=False)

    def open(self) -> ParquetSnapshot:
        from .parquet import ParquetRows  # imports numpy, and pyarrow

        found = ParquetSnapshot(ParquetRows(self.content, str(self.path)))
        if self.keep != ALL:
            found.packed.keep(self.keep)
        return found


def _inherited(run_dir: Path, rank: int, end: End | None, chain: Sequence[Kept]) -> tuple[Part, ...]:
    """Returns the rows of the parents of a fork, within the limits of the oldest of its own sessions."""
    own = chain[0][1] if chain else ()
    found: list[Part] = []
    for parent in reversed(parents_of(run_dir, None if end is None else end[0])):
        follows = parent.follows
        limits = own if follows.before is None else (*own, (follows.before, None))
        if rank and follows.step is not None:
            # The sessions of other ranks are others: their rows are compared by step.
            limits = (*limits, (follows.step, follows.time))
        to = None if rank else (follows.session, follows.mark)
        with take_snapshot(parent.path, rank, end=to, with_parents=False) as snapshot:
            for part in snapshot.missing:
                part.warn(part.absence)
            parts = [*snapshot.parts, *_held_parts(snapshot, parts_path(parent.path / metrics_name(rank)))]
            keeps = (attrs.evolve(part.keep, limits=(*part.keep.limits, *limits)) for part in parts)
            found += [attrs.evolve(part, keep=keep) for part, keep in zip(parts, keeps, strict=True)]
    return tuple(found)


def _held_parts(snapshot: MetricsSnapshot, folder: Path) -> Iterator[_HeldPart]:
    """Yields the rows of a snapshot that are in no closed part."""
    csv, number = snapshot.csv, snapshot.closed + 1
    if csv.size:
        state = os.fstat(csv.fileno()) if csv.fileno() >= 0 else None
        known = None if state is None else (state.st_ino, state.st_mtime_ns, state.st_size)
        content = _packed((folder, known, csv.first, csv.end), csv)
        yield _HeldPart(folder, number, keep=Keep(limits=csv.limits), content=content)
        number += 1
    if rows := snapshot.journal_rows():
        names = list(dict.fromkeys(name for row in rows for name in row.metrics))
        header = header_line([*OWN_COLUMNS, *names])
        cells = ([row.step, row.epoch, row.time, *map(row.metrics.get, names)] for row in rows)
        lines = (",".join("" if cell is None else format_cells([cell]) for cell in one) for one in cells)
        text = header + "".join(f"{line}\n" for line in lines).encode()
        yield _HeldPart(folder, number, content=CsvSnapshot(-1, header, len(text), text).to_parquet())


# Of the files that were packed last, which do not change where their runs have ended.
_held: dict[Hashable, bytes] = {}


def _packed(key: Hashable, csv: CsvSnapshot) -> bytes:
    content = _held.pop(key, None)
    if content is None:
        content = csv.to_parquet()
    _held[key] = content
    while len(_held) > _MOST_HELD:
        _held.pop(next(iter(_held)), None)
    return content


def _try(run_dir: Path, rank: int, with_records: bool, to: End | None) -> MetricsSnapshot | None:
    """Reads everything once; None if the writer replaced or removed a file meanwhile."""
    folder = journal_path(run_dir, rank)
    path = run_dir / metrics_name(rank)
    position, sums = Position.read(folder / POSITION), read_sums(path)
    fd = open_existing(path)
    try:
        snapshot = _read(folder, path, fd, position, sums, to, with_records=with_records)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    if snapshot is None and fd >= 0:
        os.close(fd)
    return snapshot


def _read(  # noqa: C901  # one look, step by step
    folder: Path,
    path: Path,
    fd: int,
    position: Position | None,
    sums: Sums,
    to: End | None,
    *,
    with_records: bool,
) -> MetricsSnapshot | None:
    size = 0 if fd < 0 else os.fstat(fd).st_size
    header = b"" if fd < 0 else read_header(fd, size)
    held: bytes | None = None
    end = size
    segment, offset = 0, len(MAGIC)
    state = known = None
    if position is not None:
        state = position.state_of(header, size)
        if state is None and size and Position.read(folder / POSITION) != position:
            return None
        known = state or position.states[-1]
        segment, offset = known.segment, known.offset
        if state is not None:
            end = state.csv_bytes
    chain = _chain(path, known)
    if state is None and (header.startswith(_OWN_HEADERS) or size > _MAX_CACHED_BYTES):
        # A finished run, or a lost position: our writer only appends or replaces. The file of another program
        # is read at once unless it is too large; reading ends if it is truncated meanwhile.
        end = end_of_last_line(fd, size)
    elif state is None:
        held = b"" if fd < 0 else read_at(fd, size, 0)
        size, header = len(held), held[: header_end(held)]
        end = held.rfind(b"\n") + 1
    records: list[JournalRecord] = []
    last, is_whole = segment, True
    if with_records:
        records, (last, _), is_whole = journal_records(folder, (segment, offset))
    after = Position.read(folder / POSITION)
    csv = CsvSnapshot(fd, header, end, held)
    if sums != Sums():
        tail = None if position is None else position.tail_of(header, size)
        csv.checks = CheckedBlocks(path, sums, header, size, end, csv.raw, tail)
    if after is None and position is None:
        # A new CSV, or one of another program; unless a whole session took place meanwhile.
        if _size(path) != size or _chain(path, None) != chain:
            return None
        found = (Part.find(parts_path(path), one.number, keep) for one, keep in chain.preceding())
        if part_begun_by([part for part in found if part is not None], csv) is not None:
            csv.end = len(header)  # They were being closed when the position was lost.
        return _snapshot(path, chain, csv, records, None, to)
    if after is None or position is None or after.generation != position.generation:
        return None
    if not is_whole and after != position:
        return None  # A segment was drained and removed before it was read: its rows are in newer lines.
    drained_beyond = with_records and any(state.segment > last for state in after.states)
    return None if drained_beyond else _snapshot(path, chain, csv, records, (segment, offset), to)


def _chain(path: Path, state: CsvState | None) -> RowChain:
    """Returns the history of a CSV; of one of format 2, the parts that are there."""
    limit = None if state is None else state.history
    chain = RowChain.read(path, limit, _chains.get(path))
    if chain.size:
        if len(_chains) > _MOST_HELD:
            _chains.clear()
        _chains[path] = chain
    else:
        folder = parts_path(path)
        numbers = [one for one in part_numbers(folder) if state is None or one <= state.parts]
        chain.add_format2(numbers, functools.partial(_rows_in, folder))
    return chain


def _rows_in(folder: Path, number: int) -> int:
    """Returns how many rows a part of format 2 has; 0 if it is damaged."""
    part = Part.find(folder, number)
    try:
        return 0 if part is None else _count(part, part.path.stat())
    except OSError:
        return 0


@functools.lru_cache(maxsize=4096)
def _count(part: Part, _: os.stat_result) -> int:
    with contextlib.closing(part.open()) as file:
        return int(file.packed.count)


def _snapshot(
    path: Path,
    history: RowChain,
    csv: CsvSnapshot,
    records: list[JournalRecord],
    place: tuple[int, int] | None,
    to: End | None,
) -> MetricsSnapshot:
    """Returns the snapshot; what the journal says of sessions is applied as the writer will."""
    chain, csv, has_view, journal = _settled(history, csv, records, to)
    folder = parts_path(path)
    sealed = [] if has_view else [*history.parts_of(chain)]
    there, csvs = ({*part_numbers(folder, one)} if sealed else set() for one in (_SUFFIXES, (".csv",)))
    parts = [Part(folder, one.number, one.number in csvs, keep) for one, keep in sealed]
    return MetricsSnapshot(
        tuple(chain),
        tuple(part for part in parts if part.number in there),
        csv,
        has_view,
        tuple(journal),
        place,
        max((part.number for part in parts), default=0),
        tuple(part for part in parts if part.number not in there)[:_MOST_MISSING],
        history,
        path,
    )


@attrs.define
class _Pending:
    """What the journal has of a session: what it follows, up to which mark and which step; its records."""

    follows: tuple[str, int | None] | None = None
    limit: Limit | None = None
    records: list[JournalRecord] = attrs.field(factory=list)

    def until(self, mark: int | None) -> list[JournalRecord] | None:
        """Returns the records up to a mark; None if they do not have it, because it is in the history."""
        if mark is None:
            return self.records
        is_mark = (isinstance(one, Boundary) and one.mark == mark for one in self.records)
        at = next((at for at, found in enumerate(is_mark) if found), None)
        return None if at is None else self.records[:at]


def _pending(history: RowChain, records: Iterable[JournalRecord]) -> tuple[str, dict[str, _Pending]]:
    """Returns the id of the newest session, and what the journal has of each."""
    current = history.newest
    pending = {current: _Pending()}
    for record in records:
        match record:
            case Begin() if history.knows(record.session):
                current = record.session  # Before there is a position, the journal begins anew.
            case Begin():
                pending[record.session] = _Pending((current, None))
                current = record.session
            case _ if current not in pending:
                pass  # The session ended without a row.
            case Rewind(to, mark) if to != current and (to in pending or history.knows(to)):
                pending[current].follows, pending[current].limit = (to, mark), None
            case Rewind() | Resume():
                if not current:
                    # As an earlier version logged it, in a session without a name.
                    current = "resumed"
                    pending[current] = _Pending(("", None))
                resume = record if isinstance(record, Resume) else record.resume
                pending[current].limit = resume.limit
            case _:
                pending[current].records.append(record)
    return current, pending


def _settled(
    history: RowChain, csv: CsvSnapshot, records: list[JournalRecord], to: End | None
) -> tuple[list[Kept], CsvSnapshot, bool, list[JournalOf]]:
    """Returns what counts once the journal is drained, up to an end.

    Returns:
        The sessions, the rows of the CSV, whether it begins with all rows of earlier sessions, and the
        records of the journal by session.
    """
    newest, pending = _pending(history, records)
    session, mark = (newest, None) if to is None else to
    limits: tuple[Limit, ...] = ()
    chain: list[Kept] = []
    journal: list[JournalOf] = []
    rows, has_view = attrs.evolve(csv, begin=csv.end), False
    while True:
        one = pending.pop(session, None)
        if one is None:
            before = RowPlace(session) if mark is None else history.place(session, mark)
            break
        own, place = one.until(mark), RowPlace(session)
        if session == history.newest:
            if own is None and mark is not None:
                place = history.place(session, mark)
            has_view = history.view is not None and one.follows is None and one.limit is None
            rows = attrs.evolve(_rows_of(place, history, csv, has_view=has_view), limits=limits)
        chain.append((place, limits))
        if own:
            journal.append((session, limits, tuple(own)))
        limits = limits if one.limit is None else (*limits, one.limit)
        if one.follows is None:
            earlier = history.before
            return [*history.chain(earlier, limits), *chain[::-1]], rows, has_view, journal[::-1]
        session, mark = one.follows
    return [*history.chain(before, limits), *chain[::-1]], rows, has_view, journal[::-1]


def _rows_of(place: RowPlace, history: RowChain, csv: CsvSnapshot, *, has_view: bool) -> CsvSnapshot:
    """Returns the newest session's rows of the CSV up to a place, which follow the earlier sessions' rows."""
    view, sealed = history.view or 0, history.sealed_rows(place.session)
    begin = csv.begin if has_view or not view else csv.offset_of(view)
    if place.rows is not None:
        csv = attrs.evolve(csv, end=csv.offset_of(view + max(0, place.rows - sealed)))
    return attrs.evolve(csv, begin=begin)


def part_begun_by(parts: Sequence[Part], csv: CsvSnapshot) -> Part | None:
    """Returns the part that has the rows of the CSV, in the same place.

    Of a run that was closed in order this opens the last part alone: its rows are older.

    Raises:
        OSError: see `Part.open`.
    """
    first = next(csv.rows(), None) if parts and csv.size else None
    if first is None:
        return None
    for part in reversed(parts):
        with contextlib.closing(part.open()) as piece:
            later = piece.packed.first_time - (float("nan") if first.time is None else first.time)
            if later < -_SAME_SECONDS:
                return None
            if not later > _SAME_SECONDS and piece.begins_with(csv):
                return part
    return None


def open_existing(path: Path) -> int:
    """Opens a regular file to read it; returns -1 if there is none."""
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return -1


def read_whole(path: Path, max_bytes: int = 1 << 30) -> CsvSnapshot:
    """Reads a CSV that never changes.

    Raises:
        OSError: it cannot be read, or is too large.
    """
    content = read_regular(path, max_bytes)
    return CsvSnapshot(-1, content[: header_end(content)], len(content), content)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


@attrs.frozen
class MetricRow:
    """One row: what was logged by one call, or by several of one step.

    ```python
    row = read_rows("runs/digits")[-1]
    print(row.step, row.metrics["loss"])  # 3 0.25
    ```
    """

    step: int | None
    epoch: float | None
    time: float | None
    metrics: dict[str, float]
    writer: str = ""
    """Of a run that several write, the name of its writer where a reader of the run says it; "" otherwise."""


def read_rows(run_dir: Path | str, rank: int = 0) -> list[MetricRow]:
    """Returns all rows of a rank, oldest first, with their metrics by column.

    ```python
    for row in read_rows("runs/digits"):
        print(row.step, row.metrics)
    ```

    Args:
        run_dir: the folder of the run.
        rank: whose rows; others than rank 0 have some only where the run was made with `all_ranks=True`.
    """
    with take_snapshot(Path(run_dir), rank) as snapshot:
        return list(snapshot.rows())


def read_series(run_dir: Path | str, name: str, rank: int = 0) -> list[tuple[int | None, float]]:
    """Returns step and value of every row that has the metric.

    ```python
    print(read_series("runs/digits", "loss")[0])  # (0, 1.0)
    ```
    """
    column = column_of(name)
    return [(row.step, row.metrics[column]) for row in read_rows(run_dir, rank) if column in row.metrics]


def last_rows(
    run_dir: Path | str, count: int, rank: int = 0, wanted: Collection[str] = ()
) -> list[MetricRow]:
    """Returns the last rows of a rank, oldest first, reading the CSV from its end; see `read_rows`.

    The file of another program may rename its columns in the middle: it is read from its beginning, in
    little memory.

    Args:
        run_dir: the folder of the run.
        count: how many at most.
        rank: whose rows.
        wanted: columns; rows that have none of them do not count. All rows where empty.
    """
    with take_snapshot(Path(run_dir), rank) as snapshot:
        return last_rows_of(snapshot, count, wanted)


def last_rows_of(snapshot: MetricsSnapshot, count: int, wanted: Collection[str] = ()) -> list[MetricRow]:
    """Returns the last rows of a snapshot, oldest first; see `last_rows`."""
    found = [*deque(_wanted(snapshot.journal_rows(), wanted), maxlen=count)]
    found = [*_last_csv_rows(snapshot.csv, count - len(found), wanted), *found]
    for part in reversed((*snapshot.inherited, *snapshot.parts)):
        if len(found) >= count:
            break
        with contextlib.closing(part.open()) as piece:
            if not wanted or not frozenset(wanted).isdisjoint(parse_header(piece.header)):
                found = [*_last_csv_rows(piece, count - len(found), wanted), *found]
    return found


def _last_csv_rows(csv_part: CsvSnapshot, count: int, wanted: Collection[str]) -> list[MetricRow]:
    if count <= 0:
        return []
    columns = parse_header(csv_part.header)
    pieces: list[list[MetricRow]] = []
    if csv_part.is_own:
        for chunk in csv_part.chunks_from_end():
            if b'"' in chunk:
                break  # A quoted cell may hold the end of a line.
            pieces.append(list(_wanted(parse_rows(list(columns), [chunk]), wanted, csv_part.limits)))
            if sum(map(len, pieces)) >= count:
                return [row for piece in reversed(pieces) for row in piece][-count:]
        else:
            return [row for piece in reversed(pieces) for row in piece]
    return list(deque(_wanted(csv_part.rows(), wanted), maxlen=count))


def _wanted(
    rows: Iterable[MetricRow], wanted: Collection[str], limits: Sequence[Limit] = ()
) -> Iterator[MetricRow]:
    for row in rows:
        if has_any_metric(row, wanted) and keeps(limits, row):
            yield row


def has_any_metric(row: MetricRow, wanted: Collection[str]) -> bool:
    """Returns whether a row has one of the wanted columns, or none are wanted."""
    return not wanted or any(name in row.metrics for name in wanted)


def parse_rows(columns: list[str], pieces: Iterable[bytes]) -> Iterator[MetricRow]:
    """Yields the rows of complete lines; invalid lines become rows without metrics, or are skipped.

    Args:
        columns: the columns of the header. Some programs repeat the header when they continue a file; such a
            line replaces the content of this list.
        pieces: the lines, in pieces of complete ones.
    """
    lines = (io.StringIO(piece.decode("utf-8", "replace"), newline="") for piece in pieces)
    reader = csv.reader(itertools.chain.from_iterable(lines))
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:  # A line that is too long to be one of numbers.
            continue
        found = {
            column: value
            for column, cell in zip(columns, cells, strict=False)
            if cell and (value := parse_number(cell)) is not None
        }
        if not found and cells:
            cells[0] = cells[0].removeprefix("\ufeff")
            if any(cell in OWN_COLUMNS for cell in cells):
                columns[:] = cells
                continue
        yield _row_of_cells(found)


def _row_of_cells(found: dict[str, float]) -> MetricRow:
    """Returns the row of the cells of a line that are numbers, by their columns."""
    step, epoch, time = (found.pop(name, None) for name in OWN_COLUMNS)
    return MetricRow(whole_number(step), epoch, time, found)


@functools.lru_cache(maxsize=64)
def _columns_of(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(column_of, names))


def row_of(
    names: Sequence[str], step: int | None, epoch: float | None, time: float, values: Sequence[float]
) -> MetricRow:
    """Returns a row of the journal as it will be in the CSV."""
    # True is 1 there.
    numbers = [int(value) if type(value) is bool else value for value in values]
    metrics = dict(zip(_columns_of(tuple(names)), numbers, strict=True))
    return MetricRow(step, metrics.pop("epoch", epoch), time, metrics)


def merge_journal(records: Iterable[JournalRecord]) -> list[MetricRow]:
    """Returns the rows that the writer will make of the records of a session."""
    rows: list[MetricRow] = []
    pending: Call | None = None
    for record in records:
        both = pending.joined(record) if pending and isinstance(record, Call) else None
        if pending and both is None:
            rows.append(row_of(*pending))
        pending = both or (record if isinstance(record, Call) else None)
    return [*rows, row_of(*pending)] if pending else rows


def is_sound(row: MetricRow) -> bool:
    """Returns whether a row was read; a line of a damaged block is blank."""
    return bool(row.metrics) or (row.step, row.time) != (None, None)


def keeps(limits: Sequence[Limit], row: MetricRow) -> bool:
    """Returns whether a row counts within limits."""
    if not limits:
        return True
    step, time = (float("nan") if one is None else one for one in (row.step, row.time))
    return not any(drops(limit, step, time) for limit in limits)
