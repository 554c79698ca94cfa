"""Blocks: rows of metrics as numpy arrays, read from the text of a CSV or from the columns of Parquet.

pyarrow's CSV reader reads the numbers; a few are read row by row, with the same results.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import attrs
import numpy as np

from destinations.history.aggregate import MISSING_STEP, Aggregate, Floats
from destinations.history.csv_file import CsvSnapshot
from destinations.history.row_chain import Limit, drops
from destinations.history.rows import MetricRow, parse_rows
from destinations.history.sealed import ParquetSnapshot
from destinations.history.snapshot import MetricsSnapshot

from .layout import OWN_COLUMNS, PLAIN, parse_header
from .parquet import PartIndex, filled_column, indexed_columns, read_lines

__all__ = [
    "MISSING_STEP",
    "Block",
    "Floats",
    "Steps",
    "add_rows",
    "block_of_rows",
    "blocks_of",
    "indexed_files",
    "read_blocks",
]

_Bools = np.ndarray[Any, np.dtype[np.bool_]]
Steps = np.ndarray[Any, np.dtype[np.int64]]
_Cells = dict[int, tuple[Floats, _Bools]]
"""The values of each column and which are present, by the index of the column."""

_EXACT_FLOAT = float(1 << 53)
_NEGATIVE_ZERO = re.compile(rb"(?:^|[,\n])-0+[,\n]")
# Reading a smaller chunk row by row is as fast.
_ARROW_BYTES = 4 << 10
_BATCH_ROWS = 10_000
# The number of values in a block of Parquet, about as many as in a block of a CSV.
_BLOCK_VALUES = 1 << 17


@attrs.frozen(eq=False)
class Block:
    """Consecutive rows of metrics.

    Attributes:
        step: int64 `(rows,)`; `MISSING_STEP` if missing.
        time: float64 `(rows,)`, seconds since 1970; NaN if missing.
        columns: by name, the values, float64 `(rows,)`, and which are present, bool `(rows,)`.
        writer: the name of the writer that logged the rows; "" for the trainer.
    """

    step: Steps
    time: Floats
    columns: dict[str, tuple[Floats, _Bools]]
    writer: str = ""

    def __len__(self) -> int:
        return len(self.step)

    def until(self, time: float | None) -> "Block":
        """Returns the rows that were logged up to a time; all of them for None."""
        return self if time is None else self.chosen(~(self.time > time))

    def chosen(self, keep: _Bools) -> "Block":
        """Returns some of the rows, by a mask, bool `(rows,)`."""
        columns = {name: (values[keep], there[keep]) for name, (values, there) in self.columns.items()}
        return Block(self.step[keep], self.time[keep], columns, self.writer)

    def add_to(self, statistics: Aggregate) -> None:
        """Adds the rows to statistics, including their epoch if that is a column."""
        statistics.add_columns(list(self.columns), self.step, self.columns.values())

    @property
    def nbytes(self) -> int:
        """The memory of the rows, in bytes."""
        arrays = [self.step, self.time, *(one for pair in self.columns.values() for one in pair)]
        return sum(one.nbytes for one in arrays)


def blocks_of(
    file: CsvSnapshot,
    wanted: Collection[str] | None = None,
    *,
    start: int | None = None,
    end: int | None = None,
    with_time: bool = True,
) -> Iterator[Block]:
    """Yields the rows of a file in blocks; see `read_blocks`.

    Args:
        file: the CSV, or the part in Parquet.
        wanted: the columns to read. Default: all metrics.
        start: the place of the first row, see `CsvSnapshot`. Default: the first row of the file.
        end: the place after the last row. Default: after the last row of the file.
        with_time: whether the times are needed.

    Raises:
        OSError: the file can't be read.
    """
    if not isinstance(file, ParquetSnapshot):
        with_time = with_time or file.limit is not None
        blocks = read_blocks(file.header, file.chunks(start, end=end), wanted, with_time=with_time)
        yield from (_within(file.limit, block) for block in blocks)
        return
    columns = parse_header(file.header)
    names, places = _places_of(columns, wanted, with_time=with_time)
    needed = _needed(places) or [0]
    rows = max(1, _BLOCK_VALUES // len(needed))
    for arrays in file.packed.arrays(needed, start or 0, end, rows):
        cells = dict(zip(needed, arrays, strict=True))
        yield _block_of_cells(cells, places, names, len(arrays[0][0]))


def read_blocks(
    header: bytes,
    chunks: Iterable[bytes],
    wanted: Collection[str] | None = None,
    *,
    with_time: bool = True,
) -> Iterator[Block]:
    """Yields the rows of a CSV in blocks.

    Args:
        header: the first line.
        chunks: the other lines, in pieces of whole lines.
        wanted: the columns to read. Default: all metrics.
        with_time: whether the times are needed; otherwise they may be NaN, which saves a fifth of the time.
    """
    columns = parse_header(header)
    pieces = iter(chunks)
    for chunk in pieces:
        others = chunk.translate(None, PLAIN)
        if b'"' in others:
            # A quoted cell may contain a line feed, so chunks may not be whole lines.
            rows = parse_rows(columns, itertools.chain([chunk], pieces))
            while batch := list(itertools.islice(rows, _BATCH_ROWS)):
                yield block_of_rows(batch, wanted)
            return
        block = None if others else _block_of_numbers(columns, chunk, wanted, with_time=with_time)
        yield block_of_rows(parse_rows(columns, [chunk]), wanted) if block is None else block


def add_rows(file: CsvSnapshot, statistics: Aggregate, until: float | None = None) -> None:
    """Adds the rows of a file to statistics, from its index if that has all that they need.

    An index lacks the steps of last values.

    Args:
        file: the CSV, or the part in Parquet.
        statistics: the statistics.
        until: rows of a named writer that were logged later don't count.
    """
    if isinstance(file, ParquetSnapshot) and not statistics.by_step:
        file.packed.index().add_to(statistics)
        return
    for block in blocks_of(file, indexed_columns(parse_header(file.header))):
        block.until(until).add_to(statistics)


def indexed_files(
    snapshot: MetricsSnapshot, wanted: Collection[str] | None = None
) -> Iterator[tuple[CsvSnapshot, PartIndex | None]]:
    """Yields each file of a snapshot and its index, or None for the CSV.

    Args:
        snapshot: the metrics.
        wanted: the columns that the index should cover. Default: all.
    """
    for file in snapshot.files():
        yield file, file.packed.index(wanted) if isinstance(file, ParquetSnapshot) else None


def block_of_rows(rows: Iterable[MetricRow], wanted: Collection[str] | None = None) -> Block:
    """Returns rows as a block."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row.metrics) if wanted is None else wanted
    step = np.fromiter((MISSING_STEP if row.step is None else row.step for row in rows), np.int64, len(rows))
    time = np.fromiter((np.nan if row.time is None else row.time for row in rows), np.float64, len(rows))
    columns = {}
    for name in names:
        cells = [row.epoch if name == "epoch" else row.metrics.get(name) for row in rows]
        values = np.fromiter((np.nan if cell is None else cell for cell in cells), np.float64, len(rows))
        columns[name] = values, np.fromiter((cell is not None for cell in cells), np.bool_, len(rows))
    return Block(step, time, columns)


# Chunks of plain numbers.


def _block_of_numbers(
    columns: list[str], chunk: bytes, wanted: Collection[str] | None, *, with_time: bool
) -> Block | None:
    """Returns the rows of a chunk of plain numbers, or None if only `parse_rows` can read it."""
    names, places = _places_of(columns, wanted, with_time=with_time)
    needed = _needed(places)
    if not needed or len(chunk) < _ARROW_BYTES:
        return None
    table = read_lines(chunk, len(columns), needed, as_floats=True)
    if table is None:
        return None
    cells = dict(zip(needed, map(filled_column, table.columns), strict=True))
    if _has_negative_zero(cells) and _NEGATIVE_ZERO.search(chunk):
        return None  # The integer "-0" is 0, while "-0.0" is a negative zero.
    steps = (cells[index][0] for index in places["step"])
    if any((np.abs(one[np.isfinite(one)]) >= _EXACT_FLOAT).any() for one in steps):
        return None
    return _block_of_cells(cells, places, names, len(table))


def _places_of(
    columns: list[str], wanted: Collection[str] | None, *, with_time: bool
) -> tuple[Collection[str], dict[str, list[int]]]:
    """Returns the names of the wanted metrics, and the columns of these, the steps, and the times."""
    names = [name for name in columns if name not in OWN_COLUMNS] if wanted is None else wanted
    places: dict[str, list[int]] = {name: [] for name in ("step", "time", *names)}
    for index, column in enumerate(columns):
        if column in places and (with_time or column != "time"):
            places[column].append(index)
    return names, places


def _needed(places: dict[str, list[int]]) -> list[int]:
    return sorted({index for found in places.values() for index in found})


def _block_of_cells(cells: _Cells, places: dict[str, list[int]], names: Collection[str], count: int) -> Block:
    """Returns `count` rows as a block."""

    def column_named(name: str) -> tuple[Floats, _Bools]:
        values, present = np.full(count, np.nan), np.zeros(count, np.bool_)
        for place, index in enumerate(places[name]):
            later, there = cells[index]
            if later.dtype == np.int64:
                later = np.where(there, later, np.nan)
            if place == 0:
                values, present = later, there
            else:  # For a duplicate column, the last present cell counts.
                values, present = np.where(there, later, values), present | there
        return values, present

    steps, has_step = column_named("step")
    if len(places["step"]) == 1 and cells[places["step"][0]][0].dtype == np.int64:
        step = np.where(has_step, cells[places["step"][0]][0], MISSING_STEP)
    else:
        has_step = has_step & (np.abs(steps) < -float(MISSING_STEP))  # and neither NaN nor infinite
        step = np.where(has_step, np.where(has_step, steps, 0.0).astype(np.int64), MISSING_STEP)
    return Block(step, column_named("time")[0], {name: column_named(name) for name in names})


def _has_negative_zero(cells: _Cells) -> bool:
    return any(bool((np.signbit(values) & (values == 0)).any()) for values, _ in cells.values())


def _within(limit: Limit | None, block: Block) -> Block:
    """Returns the rows that count."""
    return block if limit is None else block.chosen(~drops(limit, block.step, block.time))
