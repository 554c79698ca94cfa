"""A closed part: rows of metrics in Parquet, written once, with an index in its metadata.

`pack` makes the bytes of a part, and `ParquetRows` reads them. Nothing here knows about run folders. A column
is int64 if all of its cells are integers, and float64 otherwise. The page "The format on disk" describes the
file; pandas, DuckDB, and Polars read it too.

Damage loses only the row group that it is in. pyarrow compares the checksums of pages. The checksum of the
footer precedes the footer, and is compared first, because pyarrow trusts a footer.
"""

import base64
import contextlib
import errno
import io
import itertools
import json
import logging
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from destinations.history.aggregate import Aggregate
from destinations.history.row_chain import Keep, drops

from .layout import PLAIN, format_cell_rows, header_line, parse_header

__all__ = [
    "ENTRY_ROWS",
    "OF_COLUMN",
    "OF_ROWS",
    "DamagedParquetError",
    "ParquetRows",
    "PartIndex",
    "distinct_names",
    "filled_column",
    "indexed_columns",
    "pack",
    "read_lines",
    "rows_entry",
]

Floats = np.ndarray[Any, np.dtype[np.float64]]
Numbers = np.ndarray[Any, np.dtype[Any]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
_Cells = Iterable[Mapping[str, float]]

ENTRY_ROWS = 1024
"""The number of rows per entry of an index; a row group has eight entries."""

OF_ROWS = (
    *("rows", "first_step", "last_step", "min_step", "max_step"),
    *("first_time", "last_time", "min_time", "max_time"),
)
"""The fields of an entry about its rows."""

OF_COLUMN = ("count", "finite", "min", "min_step", "max", "max_step", "mean", "last")
"""The fields of an entry about each column; min, max, and mean cover the finite values."""

_METADATA = "destinations"
# Version 1 has no index and no checksum of the footer.
_VERSION = 2
_MAGIC = b"PAR1"
# Precedes the checksum of the footer; other readers skip both.
_SUM_MARK = b"sum:"
_GROUP_ROWS = 8192
# Rows with very many metrics come in smaller groups, of 32 MiB in memory.
_GROUP_VALUES = 1 << 22
_MOST_GROUP_ROWS = 1 << 16
_FILE_BYTES = 1 << 30
# What the encodings may add to eight bytes per value.
_SLACK_BYTES = 1 << 20
_BATCH_ROWS = 1000
_log = logging.getLogger("destinations")


class DamagedParquetError(OSError):
    """The file is truncated, has other bytes than were written, or isn't ours."""

    def __init__(self, damage: object, path: str | None = None) -> None:
        super().__init__(errno.EINVAL, f"the Parquet file is damaged, or none of ours: {damage}")
        self.filename = path


def _pyarrow(*, is_writing: bool = False) -> Any:
    """Returns pyarrow with the modules needed for reading, or also those for writing."""
    import pyarrow.parquet

    if is_writing:
        import pyarrow.compute  # takes a tenth of a second
        import pyarrow.csv
    return pyarrow


def distinct_names(names: Iterable[str]) -> list[str]:
    """Returns names that differ in more than case, which DuckDB ignores."""
    seen: set[str] = set()
    distinct = []
    for name in names:
        found = name
        while found.lower() in seen:
            found += "_"
        seen.add(found.lower())
        distinct.append(found)
    return distinct


# Writing.


def pack(
    header: bytes,
    chunks: Iterable[bytes],
    rows: Callable[[], _Cells],
    *,
    csv_bytes: int,
) -> bytes:
    """Returns the rows of a CSV as a Parquet file.

    Args:
        header: the first line of the CSV.
        chunks: the other lines, in pieces of whole lines of some MiB.
        rows: returns the cells of each row, by column; called if not all lines are plain numbers.
        csv_bytes: the size of the CSV.
    """
    pa = _pyarrow(is_writing=True)
    names = parse_header(header)
    found = _read_lines(pa, len(names), chunks) if len(set(names)) == len(names) else None
    if found is None:
        found = _read_cells(pa, by_name := list(rows()), names)
        names = list(dict.fromkeys([*names, *itertools.chain.from_iterable(by_name)]))
        header = header_line(names)
    table = pa.table(found, distinct_names(names))
    about = {
        "version": _VERSION,
        "header": header.decode("utf-8", "replace"),
        "csv_bytes": csv_bytes,
        "integers": [],  # Columns that earlier versions had behind these.
    }
    encodings = {
        field.name: "BYTE_STREAM_SPLIT" if field.type == pa.float64() else "DELTA_BINARY_PACKED"
        for field in table.schema
    }
    sink = pa.BufferOutputStream()
    with pa.parquet.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        column_encoding=encodings,
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        writer.add_key_value_metadata({_METADATA: json.dumps(about), **_index(names, table)})
        writer.write_table(table, max(1, min(_GROUP_ROWS, _GROUP_VALUES // max(1, table.num_columns))))
    data = memoryview(sink.getvalue())
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return b"".join([data[:at], _SUM_MARK, zlib.crc32(data[at:-8]).to_bytes(4, "little"), data[at:]])


def _read_lines(pa: Any, count: int, chunks: Iterable[bytes]) -> list[Any] | None:
    """Returns the columns of lines, or None if not all cells are numbers."""
    kinds = {pa.int64(), pa.float64(), pa.null()}
    pieces: list[list[Any]] = [[] for _ in range(count)]
    for chunk in chunks:
        table = None if chunk.translate(None, PLAIN) else read_lines(chunk, count)
        if table is None or not kinds.issuperset(table.schema.types):
            return None
        for piece, column in zip(pieces, table.columns, strict=True):
            piece.append(column)
    return [_joined(pa, piece) for piece in pieces]


def read_lines(
    chunk: bytes, count: int, wanted: Sequence[int] | None = None, *, as_floats: bool = False
) -> Any | None:
    """Reads whole lines of plain numbers as an Arrow table.

    Args:
        chunk: the lines, which contain only the characters in `layout.PLAIN`.
        count: the number of columns.
        wanted: the indices of the columns to return. Default: all.
        as_floats: whether every column is float64. Otherwise Arrow infers the type of each column.

    Returns:
        The table, or None if a cell is missing or isn't a number.
    """
    import pyarrow as pa
    from pyarrow import csv

    names = [str(index) for index in range(count)]
    try:
        return csv.read_csv(
            pa.BufferReader(chunk),
            csv.ReadOptions(column_names=names, use_threads=False, block_size=len(chunk) + 1),
            csv.ParseOptions(quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.float64()) if as_floats else None,
                include_columns=None if wanted is None else [names[index] for index in wanted],
                null_values=[""],
                check_utf8=False,
                timestamp_parsers=[],
            ),
        )
    except pa.ArrowInvalid:
        return None


def _joined(pa: Any, pieces: list[Any]) -> Any:
    """Returns a column of integers if all of its pieces have integers, else of floats."""
    kind = pa.int64() if {piece.type for piece in pieces} - {pa.null()} == {pa.int64()} else pa.float64()
    arrays = [pa.compute.cast(piece, kind, safe=False).chunks for piece in pieces]
    return pa.concat_arrays([pa.array([], kind), *itertools.chain.from_iterable(arrays)])


def _read_cells(pa: Any, rows: list[Mapping[str, float]], names: Iterable[str]) -> list[Any]:
    """Returns the columns of rows, like `_read_lines`."""
    found = []
    for name in dict.fromkeys([*names, *itertools.chain.from_iterable(rows)]):
        cells: list[Any] = [row.get(name) for row in rows]
        present = [cell for cell in cells if cell is not None]
        are_integers = present and all(type(cell) is int and abs(cell) < 1 << 63 for cell in present)
        kind, convert = (pa.int64(), int) if are_integers else (pa.float64(), float)
        found.append(pa.array([None if cell is None else convert(cell) for cell in cells], kind))
    return found


# The index.


def indexed_columns(columns: Sequence[str]) -> list[str]:
    """Returns the columns that an index covers: all except step and time, each once."""
    return [name for name in dict.fromkeys(columns) if name not in {"step", "time"}]


def _index(names: list[str], table: Any) -> dict[str, str]:
    """Returns the index of a table as texts: a block about the rows, then one for each column."""
    columns = {}
    for name, column in zip(names, table.columns, strict=False):
        values, there = _numpy(column)
        columns[name] = np.where(there, values, np.nan), there
    nothing = np.full(len(table), np.nan), np.zeros(len(table), np.bool_)
    (step, _), (time, _) = columns.pop("step", nothing), columns.pop("time", nothing)
    entries = []
    for start in range(0, len(table), ENTRY_ROWS):
        rows = slice(start, start + ENTRY_ROWS)
        of_entry = {name: (values[rows], there[rows]) for name, (values, there) in columns.items()}
        entries.append(_entry(step[rows], time[rows], of_entry))
    fields, of_column = len(OF_ROWS), len(OF_COLUMN)
    array = np.array(entries, "<f8").reshape(len(entries), fields + of_column * len(columns)).T
    blocks = [array[:fields], *(array[at : at + of_column] for at in range(fields, len(array), of_column))]
    return {
        f"{_METADATA}.{at}": base64.b64encode(block.tobytes()).decode() for at, block in enumerate(blocks)
    }


def _entry(step: Floats, time: Floats, columns: Mapping[str, tuple[Floats, Bools]]) -> Floats:
    """Returns the entry of an index for some rows."""
    statistics = Aggregate()
    statistics.add_columns(list(columns), step, columns.values())
    return np.concatenate([rows_entry(step, time), statistics.fields(list(columns)).T.ravel()])


def rows_entry(step: Floats, time: Floats) -> Floats:
    """Returns the fields of `OF_ROWS` of some rows."""
    return np.array([len(step), *_extent(step), *_extent(time)])


def _extent(values: Floats) -> tuple[float, float, float, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return (np.nan,) * 4
    return known[0], known[-1], known.min(), known.max()


@attrs.frozen(eq=False)
class PartIndex:
    """The index of a part, with an entry for every `ENTRY_ROWS` rows.

    Attributes:
        columns: the indexed columns, see `indexed_columns`.
        array: float64 `(len(OF_ROWS) + len(OF_COLUMN) * len(columns), entries)`.
    """

    columns: list[str]
    array: Floats

    def __len__(self) -> int:
        return int(self.array.shape[1])

    def of_rows(self, name: str) -> Floats:
        """Returns a field of `OF_ROWS`, float64 `(entries,)`; NaN if no row has a step, or a time."""
        found: Floats = self.array[OF_ROWS.index(name)]
        return found

    def of_column(self, column: str) -> Floats:
        """Returns the fields of `OF_COLUMN`, float64 `(8, entries)`; NaN if there is no such value."""
        start = len(OF_ROWS) + len(OF_COLUMN) * self.columns.index(column)
        found: Floats = self.array[start : start + len(OF_COLUMN)]
        return found

    def spans(self, may: Bools) -> Iterator[tuple[int, int]]:
        """Yields the first row and the end of each run of consecutive entries that `may` selects."""
        may = np.concatenate([[False], may, [False]])
        begins, ends = np.flatnonzero(may[1:] & ~may[:-1]), np.flatnonzero(~may[1:] & may[:-1])
        for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
            yield first * ENTRY_ROWS, last * ENTRY_ROWS

    def add_to(self, statistics: Aggregate) -> None:
        """Adds the rows to statistics, except the steps of last values."""
        fields = self.array[len(OF_ROWS) :].reshape(len(self.columns), len(OF_COLUMN), len(self))
        statistics.add_fields(self.columns, fields.transpose(1, 2, 0), self.of_rows("last_step"))


# Reading.


class ParquetRows:
    """The rows of a file that `pack` has made.

    Args:
        file: the file's descriptor, which this object owns even if the constructor raises; or its bytes.
        path: the name of the file in errors and warnings.

    Attributes:
        header: the first line of the CSV that it was made from.
        csv_bytes: the size of that CSV.
        version: the version of the file.
        content: the bytes of the file, if these were given.
        count: the number of rows.
        lost: how many of the requested rows can't be read.

    Raises:
        DamagedParquetError: the footer is damaged, or isn't ours.
        OSError: the file needs more memory than ours do, or a later version wrote it.
    """

    def __init__(self, file: int | bytes, path: str | None = None) -> None:
        self._path = path
        self.content = file if isinstance(file, bytes) else None
        self._held: tuple[tuple[int, tuple[int, ...]], Any] | None = None
        self._damaged: set[int] = set()
        # The numbers of the rows that count, if these aren't the first `count` rows.
        self._places: Any = None
        self.count = 0
        self.lost = 0
        # Closes the descriptor. pyarrow reads through it, in this thread alone.
        self._file = io.BytesIO(file) if isinstance(file, bytes) else os.fdopen(file, "rb", buffering=0)
        try:
            has_sum = self._check_footer()
            self._pa = _pyarrow()
            with self._checked():
                self._open(has_sum=has_sum)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._held = None
        self._file.close()

    def index(self, wanted: Collection[str] | None = None) -> PartIndex:
        """Returns the index of the rows.

        Args:
            wanted: the columns that it should cover. Default: all.

        Raises:
            DamagedParquetError: the index is missing, or has other columns or rows.
        """
        places = {name: place for place, name in enumerate(indexed_columns(self._columns), 1)}
        names = [name for name in places if wanted is None or name in wanted]
        lengths = [len(OF_ROWS), *[len(OF_COLUMN)] * len(names)]
        with self._checked():
            keys = (f"{_METADATA}.{place}".encode() for place in (0, *map(places.__getitem__, names)))
            blocks = [np.frombuffer(base64.b64decode(self._metadata[key]), "<f8") for key in keys]
            shapes = zip(blocks, lengths, strict=True)
            entries = -(-self._starts[-1] // ENTRY_ROWS)
            array = np.concatenate([block.reshape(length, entries) for block, length in shapes])
        if self.count < self._starts[-1]:
            same = 0 if self._places is not None else self.count // ENTRY_ROWS
            starts = range(same * ENTRY_ROWS, self.count, ENTRY_ROWS)
            array = np.column_stack([array[:, :same], *(self._entry_at(names, start) for start in starts)])
        return PartIndex(names, array)

    def keep(self, keep: Keep) -> None:
        """Leaves out the rows that don't count; call it first.

        Raises:
            OSError: see `ParquetRows`.
        """
        highest = self.index(()).of_rows("max_step") if keep.limit else np.empty(0)
        self.count = self.count if keep.rows is None else min(self.count, keep.rows)
        if keep.limit is None or not (highest >= keep.limit[0]).any():
            return
        own = {name: place for place, name in enumerate(self._columns)}
        kept = np.ones(self.count, np.bool_)
        for first, last in itertools.pairwise(self._starts):
            # Rows of a damaged group are left out anyway.
            for step, time in self.arrays([own["step"], own["time"]], first, min(last, self.count), last):
                steps, times = (np.where(there, values, np.nan) for values, there in (step, time))
                kept[first : first + len(steps)] &= ~drops(keep.limit, steps, times)
        if not kept.all():
            self._places = np.flatnonzero(kept)
            self.count = len(self._places)

    def invert(self) -> None:
        """Selects exactly the rows that `keep` has left out; call it after `keep`."""
        kept = np.arange(self.count) if self._places is None else self._places
        self._places = np.setdiff1d(np.arange(self._starts[-1]), kept)
        self.count = len(self._places)

    def _entry_at(self, names: list[str], start: int) -> Floats:
        """Computes the entry of an index for rows if some of them don't count."""
        places = {name: place for place, name in enumerate(self._columns)}
        end = min(start + ENTRY_ROWS, self.count)
        nothing = np.full(end - start, np.nan), np.zeros(end - start, np.bool_)
        columns = dict.fromkeys(("step", "time", *names), nothing)
        wanted = [name for name in columns if name in places]
        pieces = [*self.arrays([places[name] for name in wanted], start, end)]
        for at, name in enumerate(wanted):
            values, present = (np.concatenate([piece[at][part] for piece in pieces]) for part in (0, 1))
            columns[name] = np.where(present, values, np.nan), present
        step, time = (columns.pop(name)[0] for name in ("step", "time"))
        return _entry(step, time, columns)

    def place_of(self, row: int) -> int:
        """Returns how many rows before a row of the file count, see `keep`."""
        return row if self._places is None else int(np.searchsorted(self._places, row))

    def arrays(
        self,
        indices: Sequence[int],
        start: int = 0,
        end: int | None = None,
        most_rows: int = _MOST_GROUP_ROWS,
    ) -> Iterator[list[tuple[Numbers, Bools]]]:
        """Yields columns in chunks of rows: the values of each column, and which are present.

        Args:
            indices: the indices of the columns in the header.
            start: the number of the first row, from 0.
            end: the number of the row after the last one. Default: after all rows.
            most_rows: the maximum number of rows in a chunk.

        Returns:
            For each index, float64 `(rows,)` with NaN if missing, or int64; and bool `(rows,)`.

        Raises:
            OSError: see `ParquetRows`.
        """
        for table in self._tables(tuple(indices), start, end, most_rows):
            yield [filled_column(column) for column in table]

    def cells(self, start: int = 0, end: int | None = None) -> Iterator[tuple[float | None, ...]]:
        """Yields the cells of each row in the order of the header, None if missing; see `arrays`."""
        for table in self._tables(tuple(range(len(self._columns))), start, end, _BATCH_ROWS):
            columns: list[list[Any]] = []
            for column in table:
                values, present = _numpy(column)
                found: list[Any] = values.tolist()
                for place in np.flatnonzero(~present).tolist():
                    found[place] = None
                columns.append(found)
            yield from zip(*columns, strict=True)

    def lines(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yields the rows as chunks of CSV lines, formatted like the writer's; see `arrays`."""
        for table in self._tables(tuple(range(len(self._columns))), start, end, _BATCH_ROWS):
            cells: list[list[bytes]] = []
            # Formatting adjacent columns of floats together is faster.
            for is_whole, group in itertools.groupby(map(_numpy, table), _has_all_floats):
                if is_whole:
                    cells.append(format_cell_rows(np.stack([values for values, _ in group], axis=1)))
                else:
                    cells += itertools.starmap(_texts, group)
            yield b"\n".join([*map(b",".join, zip(*cells, strict=True)), b""])

    # Inside.

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Converts exceptions of pyarrow, and of the checks of this class, to OSError."""
        try:
            yield
        except (
            *(self._pa.ArrowException, ArithmeticError, AttributeError, LookupError, RecursionError),
            *(TypeError, ValueError),
        ) as error:
            raise DamagedParquetError(error, self._path) from error
        except OSError as error:
            if error.errno is not None:
                raise
            # Raised by pyarrow: a checksum, a page, or an encoding.
            raise DamagedParquetError(error, self._path) from error
        except MemoryError as error:
            raise OSError(errno.ENOMEM, f"the Parquet file needs too much memory: {error}") from error

    def _piece(self, at: int, length: int) -> bytes:
        self._file.seek(max(0, at))
        return self._file.read(length) or b""

    def _check_footer(self) -> bool:
        """Returns whether the footer has a checksum; without one, the version is 1.

        Raises:
            DamagedParquetError: the file doesn't begin and end like Parquet, or the checksum is wrong.
        """
        size = self._file.seek(0, os.SEEK_END)
        tail = self._piece(size - 8, 8)
        length = int.from_bytes(tail[:4], "little")
        at = size - 8 - length
        if (self._piece(0, 4), tail[4:]) != (_MAGIC, _MAGIC) or at < len(_MAGIC) or size > _FILE_BYTES:
            raise DamagedParquetError(f"{size} bytes do not end with a footer", self._path)
        mark = self._piece(at - 8, 8)
        if not mark.startswith(_SUM_MARK):
            return False
        if zlib.crc32(self._piece(at, length)) != int.from_bytes(mark[4:], "little"):
            raise DamagedParquetError("the checksum of its footer is another one", self._path)
        return True

    def _open(self, *, has_sum: bool) -> None:
        parquet = self._pa.parquet.ParquetFile(
            self._pa.PythonFile(self._file, mode="r"), page_checksum_verification=True
        )
        # Reads columns by index, because a name with dots would mean a nested column.
        self._reader = parquet.reader
        self._footer = parquet.metadata
        self._metadata = self._footer.metadata
        about = json.loads(self._metadata[_METADATA.encode()])
        self.header = str(about["header"]).encode()
        self.csv_bytes = int(about["csv_bytes"])
        self.version = int(about["version"])
        self._columns = parse_header(self.header)
        # Earlier versions appended columns that mark which cells of a column of floats were integers.
        more = [int(index) for index in about["integers"]]
        if self.version > _VERSION:
            raise OSError(errno.ENOTSUP, "the Parquet file is of a later version of this package. Update it")
        if (
            self.version != (_VERSION if has_sum else 1)
            or self._footer.num_columns != len(self._columns) + len(more)
            or not all(0 <= index < len(self._columns) for index in more)
            or not self.header.endswith(b"\n")
            or self.csv_bytes < len(self.header)
        ):
            raise ValueError("its metadata are not those of its columns")
        schema = [self._footer.schema.column(index) for index in range(self._footer.num_columns)]
        kinds = [{"INT64", "DOUBLE"}] * len(self._columns) + [{"BOOLEAN", "INT64"}] * len(more)
        if not all(
            column.physical_type in allowed and not column.max_repetition_level
            for column, allowed in zip(schema, kinds, strict=True)
        ):
            raise ValueError("its columns are not plain numbers")
        # Reads no metadata of a column in a group: if forged, pyarrow aborts the process.
        groups = [self._footer.row_group(group) for group in range(self._footer.num_row_groups)]
        rows = [one.num_rows for one in groups]
        sizes = [one.total_byte_size - one.num_rows * 10 * len(schema) for one in groups]
        if not all(0 <= one <= _MOST_GROUP_ROWS for one in rows) or max(
            sizes, default=0
        ) > _SLACK_BYTES * len(schema):
            raise ValueError("a row group is larger than ours")
        # The number of the first row of each group, then the number of all rows.
        self._starts = [0, *itertools.accumulate(rows)]
        self.count = self._starts[-1]

    def _tables(
        self, indices: tuple[int, ...], start: int, end: int | None, most_rows: int
    ) -> Iterator[list[Any]]:
        """Yields chunks of rows as lists of columns, without damaged row groups."""
        end = self.count if end is None else min(end, self.count)
        places = {index: place for place, index in enumerate(sorted(set(indices)))}
        for group, (first, last) in enumerate(itertools.pairwise(self._starts)):
            if self._places is not None:
                rows_at = self._places[start:end]
                rows_at = rows_at[(rows_at >= first) & (rows_at < last)] - first
                if len(rows_at) and (table := self._group(group, indices)) is not None:
                    for at in range(0, len(rows_at), most_rows):
                        rows = table.take(self._pa.array(rows_at[at : at + most_rows]))
                        yield [rows.column(places[index]) for index in indices]
                continue
            begin, until = max(start, first), min(end, last)
            if begin >= until or (table := self._group(group, indices)) is None:
                continue
            for at in range(begin, until, most_rows):
                rows = table.slice(at - first, min(most_rows, until - at))
                yield [rows.column(places[index]) for index in indices]

    def verify(self) -> int:
        """Reads all pages, and returns how many rows can't be read."""
        indices = tuple(range(self._footer.num_columns))
        for group in range(self._footer.num_row_groups):
            self._group(group, indices)
        self._held = None
        return self.lost

    def _group(self, group: int, indices: tuple[int, ...]) -> Any:
        """Returns columns of a row group, or None if one is damaged; caches the last group."""
        key = group, indices
        if self._held is not None and self._held[0] == key:
            return self._held[1]
        self._held = None
        wanted = sorted(set(indices))
        rows = self._starts[group + 1] - self._starts[group]
        try:
            with self._checked():
                table = self._reader.read_row_group(group, column_indices=wanted, use_threads=False)
                if table.num_columns != len(wanted) or len(table) != rows:
                    raise ValueError(f"{table.num_columns} columns of {len(table)} rows")
        except DamagedParquetError as error:
            if group not in self._damaged:
                self._damaged.add(group)
                self.lost += rows
                _log.warning(
                    "%s: %d of %d rows cannot be read (%s).", self._path, rows, self.count, error.strerror
                )
            return None
        self._held = key, table.combine_chunks()
        return self._held[1]


def _numpy(column: Any) -> tuple[Numbers, Bools]:
    """Converts a column without `to_numpy`, which takes half a second to import pandas."""
    array = column.chunk(0) if column.num_chunks else column.combine_chunks()
    count, offset = len(array), array.offset
    bits, numbers = array.buffers()
    kind = np.int64 if str(array.type) == "int64" else np.float64
    values: Numbers = np.frombuffer(numbers, kind, count, offset * 8) if count else np.empty(0, kind)
    present = np.ones(count, np.bool_) if not array.null_count else _bools(bits, offset, count)
    return values, present


def _has_all_floats(column: tuple[Numbers, Bools]) -> bool:
    values, present = column
    return values.dtype == np.float64 and bool(present.all())


def _texts(values: Numbers, present: Bools) -> list[bytes]:
    """Returns the cells of a column, b"" if missing."""
    if values.dtype == np.int64:
        cells = zip(values.tolist(), present.tolist(), strict=True)
        return [b"%d" % value if there else b"" for value, there in cells]
    found = [b""] * len(values)
    places = np.flatnonzero(present)
    if len(places):
        texts = format_cell_rows(np.ascontiguousarray(values[places])[:, None])
        for place, text in zip(places.tolist(), texts, strict=True):
            found[place] = text
    return found


def _bools(bits: Any, offset: int, count: int) -> Bools:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=offset + count, bitorder="little")[
        offset:
    ].astype(np.bool_)


def filled_column(column: Any) -> tuple[Numbers, Bools]:
    """Returns the values of a column, with NaN for missing floats, and which of them are present."""
    values, present = _numpy(column)
    if values.dtype == np.float64 and not present.all():
        values = np.where(present, values, np.nan)
    return values, present
