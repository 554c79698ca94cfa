"""The index of a closed part: what each thousand of its rows have, as one array beside it.

It is derived from the part, and can be deleted at any time. docs/format.md describes the file.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from uploads.disk import DISK, Disk, replacement

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
    "summarize",
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
    def of(cls, file: CsvSnapshot) -> "PartIndex":
        """Computes the index of a part from its rows; in Parquet, offsets in the CSV are estimates."""
        columns = indexed_columns(parse_header(file.header))
        entries = [_entry(block, columns, end) for end, block in _thousands(file, columns) if len(block)]
        shape = len(OF_ROWS) + len(OF_COLUMN) * len(columns)
        return cls(columns, np.array(entries).T.copy() if entries else np.empty((shape, 0)))

    @classmethod
    def of_block(cls, block: Block) -> "PartIndex":
        """Computes an index of one entry."""
        columns = list(block.columns)
        return cls(columns, _entry(block, columns, 0)[:, None])

    @classmethod
    def read(cls, path: Path, csv: CsvSnapshot) -> "PartIndex | None":
        """Reads the file of an index; None if it is missing, or not that of this part."""
        columns = indexed_columns(parse_header(csv.header))
        with contextlib.suppress(OSError, ValueError, EOFError, SyntaxError):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            index = cls(columns, array)
            if (
                array.dtype == np.float64
                and array.ndim == 2  # noqa: PLR2004  # fields and entries
                and len(array) == len(OF_ROWS) + len(OF_COLUMN) * len(columns)
                and (index.of_rows("end")[-1] if len(index) else len(csv.header)) == csv.end
            ):
                return index
        return None

    def write(self, path: Path, disk: Disk = DISK) -> None:
        """Writes the file."""
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(self.array), allow_pickle=False)
        with replacement(path, durable=True, disk=disk) as fd:
            disk.write(fd, buffer.getvalue(), 0)


class IndexBuilder:
    """The index of a CSV that is being written, made from the rows on their way; in the writer thread.

    It is given up where anything but rows and columns is written: then the index is computed from the file.
    """

    def __init__(self) -> None:
        self._rows = self._values = 0
        self._blocks: list[tuple[tuple[str, ...], list[Any], list[Any], Any, Any]] = []
        self._entries: list[tuple[Floats, list[str], Floats]] = []

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
        columns: dict[str, int] = {"epoch": 0}
        places: dict[tuple[str, ...], list[int]] = {}
        for names in dict.fromkeys(block[0] for block in blocks):
            places[names] = [columns.setdefault(column_of(name), len(columns)) for name in names]
        step, time = np.empty(count), np.empty(count)
        values = np.full((len(columns), count), np.nan)
        present = np.zeros(values.shape, np.bool_)
        at = 0
        for names, steps, epochs, times, rows in blocks:
            to = at + len(steps)
            step[at:to], time[at:to], values[0, at:to] = steps, times, epochs
            present[0, at:to] = ~np.isnan(values[0, at:to])
            values[places[names], at:to] = np.asarray(rows, np.float64).T
            present[places[names], at:to] = True
            at = to
        of_rows = rows_entry(step, time.round(6), end)
        self._entries.append((of_rows, list(columns), summarize(step, values, present)))


def indexed_files(snapshot: MetricsSnapshot) -> Iterator[tuple[CsvSnapshot, PartIndex | None]]:
    """Yields the files of a snapshot, each with its index; None for the CSV, and where there is none."""
    for number, file in enumerate(snapshot.files()):
        part = snapshot.parts[number] if number < len(snapshot.parts) else None
        yield file, None if part is None else PartIndex.read(part.index_path, file)


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
    values = np.array([block.columns[name][0] for name in columns]).reshape(len(columns), len(block))
    present = np.array([block.columns[name][1] for name in columns], np.bool_).reshape(values.shape)
    return np.concatenate([rows_entry(step, block.time, end), summarize(step, values, present).T.ravel()])


def rows_entry(step: Floats, time: Floats, end: int) -> Floats:
    """Returns the fields of `OF_ROWS` of some rows."""
    return np.array([end, len(step), *_extent(step), *_extent(time)])


def _extent(values: Floats) -> tuple[float, float, float, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return (np.nan,) * 4
    return known[0], known[-1], known.min(), known.max()


def summarize(step: Floats, values: Floats, present: "np.ndarray[Any, np.dtype[np.bool_]]") -> Floats:
    """Returns the fields of `OF_COLUMN`, float64 `(8, columns)`.

    Args:
        step: float64 `(rows,)`; NaN if missing.
        values: float64 `(columns, rows)`.
        present: which of them are there.
    """
    if not values.size:
        found = np.full((len(OF_COLUMN), len(values)), np.nan)
        found[:2] = 0.0
        return found
    is_finite = present & np.isfinite(values)
    count, finite = present.sum(axis=1), is_finite.sum(axis=1)
    low_at = np.where(is_finite, values, np.inf).argmin(axis=1)
    high_at = np.where(is_finite, values, -np.inf).argmax(axis=1)
    last_at = values.shape[1] - 1 - present[:, ::-1].argmax(axis=1)
    every = np.arange(len(values))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = np.where(is_finite, values, 0.0).sum(axis=1) / finite
    of_finite = np.array(
        [values[every, low_at], step[low_at], values[every, high_at], step[high_at], mean], np.float64
    )
    of_finite[:, finite == 0] = np.nan
    last = np.where(count > 0, values[every, last_at], np.nan)
    return np.concatenate([[count, finite], of_finite, [last]])
