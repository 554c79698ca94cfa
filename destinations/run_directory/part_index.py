"""The index of a closed part: what each thousand of its rows have, as one array beside it.

It is derived from the part, and can be deleted at any time. docs/format.md describes the file.

It is not trusted: only regular files are read, of the size that the columns of the part give them, and each
block of the array has a checksum. What no writer would have put there, such as entries that end in another
order, is no index, and the caller computes it from the rows. Whoever forges a whole index can write rows as
well, so that no reader asks for more; a resume, which moves rows, does.
"""

import os
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.history.aggregate import Aggregate
from uploads.disk import DISK, Disk, closing, open_regular, replacement

from .blocks import MISSING_STEP, Block, Floats, blocks_of, read_blocks
from .frames import Resume
from .layout import column_of, parse_header
from .reader import CsvSnapshot, MetricsSnapshot, ParquetSnapshot

__all__ = [
    "CHUNK_ROWS",
    "OF_COLUMN",
    "OF_ROWS",
    "IndexBuilder",
    "PartIndex",
    "indexed_columns",
    "indexed_files",
    "is_cut",
    "rows_entry",
]

CHUNK_ROWS = 1000
"""How many rows one entry is of: about so many where rows were indexed as they were written."""

# Of rows of very many metrics an entry is of fewer, for the sake of memory.
_CHUNK_VALUES = 1 << 19

OF_ROWS = (
    *("end", "rows", "first_step", "last_step", "min_step", "max_step"),
    *("first_time", "last_time", "min_time", "max_time"),
)
"""What an entry says of its rows; `end` is the offset after the last one in the CSV."""

_HEADER_BYTES = 128
# As of 28 GiB of rows of a metric each. More would be read at once.
_MAX_ENTRIES = 1 << 20

OF_COLUMN = ("count", "finite", "min", "min_step", "max", "max_step", "mean", "last")
"""What an entry says of each column; min, max and mean are of the finite values."""


def indexed_columns(columns: Sequence[str]) -> list[str]:
    """Returns the columns that an index covers: all but step and time, each once."""
    return [name for name in dict.fromkeys(columns) if name not in {"step", "time"}]


@attrs.frozen(eq=False)
class PartIndex:
    """What is in a part, entry by entry.

    Attributes:
        columns: of the part, see `indexed_columns`.
        array: float64 `(len(OF_ROWS) + len(OF_COLUMN) * len(columns), entries)`.
    """

    columns: list[str]
    array: Floats

    def __len__(self) -> int:
        return int(self.array.shape[1])

    def of_rows(self, name: str) -> Floats:
        """Returns a field of `OF_ROWS`, float64 `(entries,)`; NaN where no row has a step, or a time."""
        found: Floats = self.array[OF_ROWS.index(name)]
        return found

    def of_column(self, column: str) -> Floats:
        """Returns the fields of `OF_COLUMN`, float64 `(8, entries)`; NaN where there is no such value."""
        start = len(OF_ROWS) + len(OF_COLUMN) * self.columns.index(column)
        found: Floats = self.array[start : start + len(OF_COLUMN)]
        return found

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.of_rows("rows").sum())

    def span(self, file: CsvSnapshot, entries: slice) -> tuple[int, int]:
        """Returns the place of the first row of some entries in the part, and that after the last one."""
        ends, rows = self.of_rows("end"), self.of_rows("rows")
        before = int(rows[: entries.start].sum())
        last = before + int(rows[entries].sum())
        start = file.first if not entries.start else file.place(int(ends[entries.start - 1]), before)
        return start, file.place(int(ends[entries.stop - 1]), last)

    @classmethod
    def of(cls, file: CsvSnapshot, between: Callable[[], None] = lambda: None) -> "PartIndex":
        """Computes the index of a part from its rows; calls `between` after each thousand.

        In Parquet, offsets in the CSV are estimates.
        """
        columns = indexed_columns(parse_header(file.header))
        entries = []
        for end, block in _thousands(file, columns):
            between()
            entries += [_entry(block, columns, end)] if len(block) else []
        shape = len(OF_ROWS) + len(OF_COLUMN) * len(columns)
        return cls(columns, np.array(entries).T.copy() if entries else np.empty((shape, 0)))

    def add_to(self, statistics: Aggregate) -> None:
        """Adds the rows to statistics, which do not learn the steps of last values."""
        fields = self.array[len(OF_ROWS) :].reshape(len(self.columns), len(OF_COLUMN), len(self))
        statistics.add_fields(self.columns, fields.transpose(1, 2, 0), self.of_rows("last_step"))

    @classmethod
    def read(cls, path: Path, csv: CsvSnapshot, wanted: Collection[str] | None = None) -> "PartIndex | None":
        """Reads the file of an index; None if it is missing, damaged, or not that of this part.

        Args:
            path: of the file.
            csv: the part.
            wanted: columns; others are left out. None for all.
        """
        every = indexed_columns(parse_header(csv.header))
        names = frozenset(every if wanted is None else wanted)
        places = [place for place, name in enumerate(every) if name in names]
        try:
            with closing(open_regular(path)) as fd:
                array = _IndexFile(fd, csv, len(every)).read(places)
        except OSError:
            return None
        return None if array is None else cls([every[place] for place in places], array)

    def write(self, path: Path, csv: CsvSnapshot, disk: Disk = DISK) -> None:
        """Writes the file of the index of a part, which has all its columns."""
        array = np.ascontiguousarray(self.array, "<f8")
        blocks = array[len(OF_ROWS) :].reshape(len(self.columns), len(OF_COLUMN) * len(self))
        seed = zlib.crc32(csv.header)
        sums = np.array([zlib.crc32(block, seed) for block in (array[: len(OF_ROWS)], *blocks)], "<u4")
        pieces = (_npy_header(array), array.tobytes(), _npy_header(sums), sums.tobytes())
        with replacement(path, durable=True, disk=disk) as fd:
            disk.write(fd, b"".join(pieces), 0)


def _npy_header(array: "np.ndarray[Any, Any]") -> bytes:
    """Returns what is before an array in a file of NumPy: the same bytes with each version of it."""
    shape = f"({', '.join(map(str, array.shape))}{',' * (array.ndim == 1)})"
    text = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    length = _HEADER_BYTES - 10
    return b"\x93NUMPY\x01\0" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


class _IndexFile:
    """The file of an index, as `PartIndex.write` writes it.

    Args:
        fd: the open file.
        csv: the part.
        columns: how many columns it has.
    """

    def __init__(self, fd: int, csv: CsvSnapshot, columns: int) -> None:
        self._fd = fd
        self._csv = csv
        self._columns = columns
        of_entry = 8 * (len(OF_ROWS) + len(OF_COLUMN) * columns)
        rest = os.fstat(fd).st_size - 2 * _HEADER_BYTES - 4 * (1 + columns)
        self._entries = rest // of_entry if rest >= 0 and rest % of_entry == 0 else -1
        self._sums_at = _HEADER_BYTES + of_entry * self._entries + _HEADER_BYTES

    def read(self, places: Sequence[int]) -> Floats | None:
        """Returns the fields of the rows and of some columns, by number; None if it is not of the part."""
        if not 0 <= self._entries <= _MAX_ENTRIES or not self._has_headers():
            return None
        seed = zlib.crc32(self._csv.header)
        # The fields of the rows are the first block, then there is one for each column.
        spans = [(0, len(OF_ROWS)), *((len(OF_ROWS) + len(OF_COLUMN) * at, len(OF_COLUMN)) for at in places)]
        blocks = [
            self._piece(_HEADER_BYTES + 8 * self._entries * at, 8 * self._entries * n) for at, n in spans
        ]
        sums = [self._piece(self._sums_at + 4 * at, 4) for at in (0, *(1 + place for place in places))]
        if sums != [zlib.crc32(block, seed).to_bytes(4, "little") for block in blocks]:
            return None
        fields = sum(count for _, count in spans)
        array = np.frombuffer(b"".join(blocks), "<f8").reshape(fields, self._entries).astype(np.float64)
        return array if _is_plausible(array, len(self._csv.header), self._csv.end) else None

    def _has_headers(self) -> bool:
        fields = len(OF_ROWS) + len(OF_COLUMN) * self._columns
        array = np.broadcast_to(np.empty((), "<f8"), (fields, self._entries))
        sums = np.broadcast_to(np.empty((), "<u4"), (1 + self._columns,))
        return self._piece(0, _HEADER_BYTES) == _npy_header(array) and self._piece(
            self._sums_at - _HEADER_BYTES, _HEADER_BYTES
        ) == _npy_header(sums)

    def _piece(self, at: int, length: int) -> bytes:
        return os.pread(self._fd, length, at)


def _is_plausible(array: Floats, start: int, end: int) -> bool:
    """Returns whether entries are in order, of whole rows between two offsets, with fields that fit."""
    ends, rows, *of_rows = array[: len(OF_ROWS)]
    columns = (len(array) - len(OF_ROWS)) // len(OF_COLUMN)
    stats = array[len(OF_ROWS) :].reshape(columns, len(OF_COLUMN), array.shape[1]).swapaxes(0, 1)
    count, finite, low, low_step, high, high_step, _, _ = stats
    has = finite > 0
    # Whatever is NaN fails a comparison.
    with np.errstate(invalid="ignore"):
        return bool(
            (ends[-1] if len(ends) else start) == end
            and (rows >= 1).all()
            and (np.diff(ends, prepend=start) >= rows).all()
            and all((whole == np.floor(whole)).all() for whole in (ends, rows, count, finite))
            and not any(np.isinf(steps).any() for steps in (*of_rows[:4], low_step, high_step))
            and ((finite >= 0) & (finite <= count) & (count <= rows)).all()
            and np.where(has, np.isfinite(low) & np.isfinite(high) & (low <= high), np.isnan(low)).all()
        )


class IndexBuilder:
    """The index of a CSV that is being written, made from the rows on their way; in the writer thread.

    It is given up where anything but rows and columns is written: then the index is computed from the file.
    """

    def __init__(self) -> None:
        self._rows = self._values = 0
        self._blocks: list[tuple[tuple[str, ...], list[Any], list[Any], Any, Any]] = []
        self._entries: list[tuple[Floats, list[str], Floats]] = []
        self._columns: dict[tuple[str, ...], list[str]] = {}

    def add(
        self, names: tuple[str, ...], steps: list[Any], epochs: list[Any], times: Any, values: Any
    ) -> None:
        """Adds rows of certain names: `times` has one for each, `values` a row for each."""
        self._blocks.append((names, steps, epochs, times, values))
        self._rows += len(steps)
        self._values += len(steps) * len(names)

    def written(self, end: int) -> None:
        """Notes that the rows that were added are before this offset of the file."""
        if self._rows >= CHUNK_ROWS or self._values >= _CHUNK_VALUES:
            self._close_entry(end)

    def widen(self, header_bytes: int, row_bytes: int) -> None:
        """Notes that header and rows have so many more bytes each."""
        before = 0
        for of_rows, _, _ in self._entries:
            before += int(of_rows[1])
            of_rows[0] += header_bytes + before * row_bytes

    def finish(self, end: int, columns: Sequence[str]) -> PartIndex:
        """Returns the index of the whole file, which has these columns."""
        if self._rows:
            self._close_entry(end)
        names = indexed_columns(columns)
        places = {name: place for place, name in enumerate(names)}
        array = np.full((len(self._entries), len(OF_ROWS) + len(OF_COLUMN) * len(names)), np.nan)
        for row, (of_rows, found, of_columns) in zip(array, self._entries, strict=True):
            row[: len(OF_ROWS)] = of_rows
            stats = row[len(OF_ROWS) :].reshape(len(names), len(OF_COLUMN))
            stats[:, :2] = 0
            stats[[places[name] for name in found]] = of_columns.T
        return PartIndex(names, array.T)

    def _close_entry(self, end: int) -> None:
        blocks, count = self._blocks, self._rows
        self._blocks, self._rows, self._values = [], 0, 0
        step, time, epoch = np.empty(count), np.empty(count), np.empty(count)
        groups: dict[tuple[str, ...], list[tuple[int, Any]]] = {}
        group: list[tuple[int, Any]] = []
        before: tuple[str, ...] | None = None
        at = 0
        for names, steps, epochs, times, rows in blocks:
            to = at + len(steps)
            step[at:to], time[at:to], epoch[at:to] = steps, times, epochs
            # Of ten thousand names, even a look-up takes its time.
            if names is not before:
                group, before = groups.setdefault(names, []), names
            group.append((at, rows))
            at = to
        columns = {"epoch": 0}
        for names in groups:
            for name in self._columns_of(names):
                columns.setdefault(name, len(columns))
        found = _EntrySummary(len(columns))
        for names, group in groups.items():
            of_names = self._columns_of(names)
            if "epoch" in of_names:
                for at, rows in group:
                    epoch[at : at + len(rows)] = np.nan
            places = np.fromiter((columns[name] for name in of_names), np.intp, len(of_names))
            rows_at = np.concatenate([np.arange(at, at + len(rows)) for at, rows in group])
            found.add(places, rows_at, np.concatenate([np.asarray(rows, np.float64) for _, rows in group]))
        there = np.flatnonzero(~np.isnan(epoch))
        if len(there):
            found.add(np.zeros(1, np.intp), there, epoch[there, None])
        of_rows = rows_entry(step, time.round(6), end)
        self._entries.append((of_rows, list(columns), found.fields(step)))

    def _columns_of(self, names: tuple[str, ...]) -> list[str]:
        if names not in self._columns:
            self._columns[names] = [column_of(name) for name in names]
        return self._columns[names]


class _EntrySummary:
    """The fields of the columns of an entry, from rows of some of them at a time."""

    def __init__(self, columns: int) -> None:
        self._count, self._finite = np.zeros(columns), np.zeros(columns)
        self._total, self._last = np.zeros(columns), np.full(columns, np.nan)
        # Values, and the rows that they are in.
        self._low, self._low_at = np.full(columns, np.inf), np.zeros(columns, np.intp)
        self._negated_high, self._high_at = np.full(columns, np.inf), np.zeros(columns, np.intp)
        self._last_at = np.full(columns, -1)

    def add(self, places: Any, rows_at: Any, values: Floats) -> None:
        """Adds values.

        Args:
            places: the columns that have them, `(columns,)`.
            rows_at: the rows, ascending, `(rows,)`.
            values: `(rows, columns)`.
        """
        is_finite = np.isfinite(values)
        all_finite = bool(is_finite.all())
        self._count[places] += len(values)
        self._finite[places] += len(values) if all_finite else is_finite.sum(axis=0)
        with np.errstate(over="ignore", invalid="ignore"):
            self._total[places] += _total(values if all_finite else np.where(is_finite, values, 0.0))
        low, low_at = _least(values if all_finite else np.where(is_finite, values, np.inf))
        _take_less(self._low, self._low_at, places, low, rows_at[low_at])
        high, high_at = _least(-values if all_finite else np.where(is_finite, -values, np.inf))
        _take_less(self._negated_high, self._high_at, places, high, rows_at[high_at])
        is_later = rows_at[-1] > self._last_at[places]
        later = places[is_later]
        self._last[later], self._last_at[later] = values[-1][is_later], rows_at[-1]

    def fields(self, step: Floats) -> Floats:
        """Returns the fields of `OF_COLUMN`, float64 `(8, columns)`; `step` has that of each row."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self._total / self._finite
        of_finite = np.array([self._low, step[self._low_at], -self._negated_high, step[self._high_at], mean])
        of_finite[:, self._finite == 0] = np.nan
        return np.concatenate([[self._count, self._finite], of_finite, [self._last]])


def _least(values: Floats) -> tuple[Floats, Any]:
    """Returns the first least value of each column of `(rows, columns)`, and its row."""
    rows, columns = values.shape
    if columns <= rows:
        across = np.ascontiguousarray(values.T)
        at = across.argmin(axis=1)
        return across[np.arange(columns), at], at
    least, at = values[0].copy(), np.zeros(columns, np.intp)
    for row in range(1, rows):
        is_less = values[row] < least
        np.copyto(least, values[row], where=is_less)
        at[is_less] = row
    return least, at


def _total(values: Floats) -> Floats:
    """Returns the sum of each column; of many rows the one with the least error."""
    rows, columns = values.shape
    found: Floats = np.ascontiguousarray(values.T).sum(axis=1) if columns <= rows else values.sum(axis=0)
    return found


def _take_less(held: Floats, held_at: Any, places: Any, values: Floats, rows_at: Any) -> None:
    """Takes values that are less than those held, or as small and of an earlier row."""
    before = held[places]
    is_less = (values < before) | ((values == before) & (rows_at < held_at[places]))
    held[places[is_less]], held_at[places[is_less]] = values[is_less], rows_at[is_less]


def indexed_files(
    snapshot: MetricsSnapshot, wanted: Collection[str] | None = None
) -> Iterator[tuple[CsvSnapshot, PartIndex | None]]:
    """Yields the files of a snapshot, each with its index; None for the CSV, and where there is none.

    Args:
        snapshot: the metrics.
        wanted: as of `PartIndex.read`.
    """
    for number, file in enumerate(snapshot.files()):
        part = snapshot.parts[number] if number < len(snapshot.parts) else None
        yield file, None if part is None else PartIndex.read(part.index_path, file, wanted)


def is_cut(index: PartIndex, resume: Resume) -> bool:
    """Returns whether a resume may have abandoned rows of a part."""
    return bool((index.of_rows("max_step") >= resume.step).any())


def _thousands(csv: CsvSnapshot, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
    """Yields the rows of a file, a thousand at a time, and the offset after them."""
    start = len(csv.header)
    if isinstance(csv, ParquetSnapshot):
        done = 0
        for block in blocks_of(csv, columns, most_rows=CHUNK_ROWS):
            done += len(block)
            yield start + csv.size * done // csv.packed.count, block
        return
    for chunk in csv.chunks():
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1
        cuts = [*ends[CHUNK_ROWS - 1 :: CHUNK_ROWS].tolist(), len(chunk)]
        before = 0
        for cut in dict.fromkeys(cuts):
            for block in read_blocks(csv.header, [chunk[before:cut]], columns):
                yield start + cut, block
            before = cut
        start += len(chunk)


def _entry(block: Block, columns: Sequence[str], end: int) -> Floats:
    step = np.where(block.step == MISSING_STEP, np.nan, block.step.astype(np.float64))
    statistics = Aggregate()
    statistics.add_block(block)
    return np.concatenate([rows_entry(step, block.time, end), statistics.fields(columns).T.ravel()])


def rows_entry(step: Floats, time: Floats, end: int) -> Floats:
    """Returns the fields of `OF_ROWS` of some rows."""
    return np.array([end, len(step), *_extent(step), *_extent(time)])


def _extent(values: Floats) -> tuple[float, float, float, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return (np.nan,) * 4
    return known[0], known[-1], known.min(), known.max()
