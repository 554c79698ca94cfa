"""The rows of a closed part as Parquet, in the place of its CSV: `write_parquet` and `ParquetRows`.

Nothing here knows of run folders. A column has the type that gives each cell back as it was, an integer or a
float to the last bit: int64, float64, or float64 with a column of bools that says which are integers. What
has other cells stays CSV. docs/format.md describes the file; pandas, DuckDB and Polars read it too.

A file is hostile until checked. pyarrow believes the sizes that a file states, and some of what it tells of
columns ends the process where that is damaged; so the footer and the heads of pages are read here first.
"""

import contextlib
import errno
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .layout import PLAIN, format_cell_rows, parse_header

__all__ = [
    "DamagedParquetError",
    "ParquetRows",
    "StaysCsvError",
    "distinct_names",
    "is_whole",
    "write_parquet",
]

Floats = np.ndarray[Any, np.dtype[np.float64]]
Numbers = np.ndarray[Any, np.dtype[Any]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

_METADATA = "destinations"
_VERSION = 1
_MAGIC = b"PAR1"
_INTEGER = r"^(0|-?[1-9][0-9]*)$"
_EXACT_FLOAT = 1 << 53
# The most rows of a row group, and the most values: 32 MiB in memory. A part of 50 metrics is two groups.
_GROUP_ROWS = 1 << 16
_GROUP_VALUES = 1 << 22
# What a footer describes, of a hundred bytes each, and with its schema in ten structs.
_MOST_CHUNKS = 20_000
_FOOTER_BYTES = 4 << 20
_MOST_STRUCTS = 1 << 18
_FILE_BYTES = 1 << 30
_HEAD_BYTES = 512
_DEEPEST = 8
# Of parquet.thrift: what fields are called by their numbers.
_OF_FILE = {"schema": 2, "row_groups": 4}
_OF_SCHEMA = {"type": 1, "repetition": 3, "children": 5}
_OF_GROUP = {"columns": 1, "rows": 3}
_OF_CHUNK = {"file": 1, "about": 3}
_OF_COLUMN = {"type": 1, "values": 5, "compressed": 7, "pages": 9, "dictionary": 11}
_OF_PAGE = {"uncompressed": 2, "compressed": 3}
_BOOLEAN, _INT64, _DOUBLE = 0, 2, 5
_REPEATED = 2
# What the encodings may add to eight bytes a value.
_SLACK_BYTES = 1 << 20
_BATCH_ROWS = 1000
_MOST_TEXT = 300


class StaysCsvError(ValueError):
    """The rows have cells that are neither floats nor integers of 64 bits, or are too many columns."""


class DamagedParquetError(OSError):
    """The file is cut, has other bytes than were written, or is none of ours."""

    def __init__(self, damage: object, path: str | None = None) -> None:
        super().__init__(errno.EINVAL, f"the Parquet file is damaged, or none of ours: {damage}")
        self.filename = path


def _pyarrow(*, is_writing: bool = False) -> Any:
    """Returns pyarrow with the modules that are needed to read, or also those to write."""
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


def write_parquet(target: Any, header: bytes, csv_bytes: int, chunks: Callable[[], Iterable[bytes]]) -> None:
    """Writes the rows of a CSV as Parquet; reads them twice.

    Args:
        target: what takes the bytes: an object with `write`, `tell`, `flush`, `close` and `closed`.
        header: the first line of the CSV.
        csv_bytes: the size of the CSV.
        chunks: returns the other lines, in pieces of whole lines of some MiB.

    Raises:
        StaysCsvError: the rows cannot be written so that they come back as they are.
        OSError: pyarrow is not installed, or the disk is full.
    """
    pa = _pyarrow(is_writing=True)
    columns = parse_header(header)
    try:
        text = header.decode()
        kinds, rows = _kinds_of(pa, len(columns), chunks())
    except (UnicodeDecodeError, pa.ArrowInvalid) as error:
        raise StaysCsvError(f"the rows are not all numbers: {error}") from error
    mixed = [index for index, kind in enumerate(kinds) if kind is None]
    names = distinct_names([*columns, *(f"{columns[index]} is an integer" for index in mixed)])
    groups = -(-rows // max(1, min(_GROUP_ROWS, _GROUP_VALUES // len(names))))
    group_rows = -(-rows // max(1, groups))
    if len(names) * groups > _MOST_CHUNKS:
        raise StaysCsvError(f"{len(names)} columns of {rows} rows are too many")
    types = [pa.float64() if kind is None else kind for kind in kinds] + [pa.bool_()] * len(mixed)
    about = {"version": _VERSION, "header": text, "csv_bytes": csv_bytes, "integers": mixed}
    steps = [name for name, column in zip(names, columns, strict=False) if column == "step"]
    encodings = {
        name: "BYTE_STREAM_SPLIT" if kind == pa.float64() else "DELTA_BINARY_PACKED"
        for name, kind in zip(names, types, strict=True)
        if kind != pa.bool_()
    }
    schema = pa.schema(list(zip(names, types, strict=True)))
    with pa.parquet.ParquetWriter(
        target,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        column_encoding=encodings,
        write_statistics=steps or False,
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        writer.add_key_value_metadata({_METADATA: json.dumps(about)})
        for table in _groups((_table(pa, schema, kinds, chunk) for chunk in chunks()), group_rows, pa):
            writer.write_table(table, row_group_size=group_rows)


def _kinds_of(pa: Any, count: int, chunks: Iterable[bytes]) -> tuple[list[Any], int]:
    """Returns the type of each column, None for floats with integers among them, and the number of rows.

    Raises:
        StaysCsvError: a cell is no number, or an integer that its column cannot have.
        pyarrow.ArrowInvalid: a line has more or fewer cells.
    """
    has_integers, has_floats, is_large = (np.zeros(count, np.bool_) for _ in range(3))
    rows = 0
    for chunk in chunks:
        if chunk.translate(None, PLAIN):
            raise StaysCsvError("the rows have other cells than numbers")
        table = _parsed(pa, chunk, [pa.float64()] * count)
        rows += len(table)
        whole = []
        for index in range(count):
            values, present = _numpy(table.column(index))
            if (values == np.floor(values))[present].any():
                whole.append(index)  # They may be written as integers.
            else:
                has_floats[index] |= present.any()
        texts = _parsed(pa, chunk, [pa.string()] * count, whole).columns if whole else ()
        for index, cells in zip(whole, texts, strict=True):
            is_integer = _are_integers(pa, cells)
            integers = pa.compute.cast(cells.filter(is_integer), pa.int64())
            if len(integers):
                bounds = pa.compute.min_max(integers)
                least, most = bounds["min"].as_py(), bounds["max"].as_py()
                is_large[index] |= max(-least, most) > _EXACT_FLOAT
            has_integers[index] |= len(integers) > 0
            has_floats[index] |= len(integers) < len(cells) - cells.null_count
    if (has_integers & has_floats & is_large).any():
        raise StaysCsvError("a column has floats and integers of more than 53 bits")
    kinds = [
        pa.float64() if not integers else None if floats else pa.int64()
        for integers, floats in zip(has_integers, has_floats, strict=True)
    ]
    return kinds, rows


def _are_integers(pa: Any, cells: Any) -> Any:
    return pa.compute.fill_null(pa.compute.match_substring_regex(cells, _INTEGER), fill_value=False)


def _parsed(pa: Any, chunk: bytes, types: Sequence[Any], wanted: Iterable[int] | None = None) -> Any:
    """Returns the cells of lines of plain numbers as a table; those of all columns if none are wanted."""
    names = [str(index) for index in range(len(types))]
    return pa.csv.read_csv(
        pa.BufferReader(chunk),
        pa.csv.ReadOptions(column_names=names, use_threads=False, block_size=len(chunk) + 1),
        pa.csv.ParseOptions(quote_char=False, ignore_empty_lines=False),
        pa.csv.ConvertOptions(
            column_types=dict(zip(names, types, strict=True)),
            include_columns=names if wanted is None else [str(index) for index in wanted],
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,
        ),
    )


def _table(pa: Any, schema: Any, kinds: Sequence[Any], chunk: bytes) -> Any:
    """Returns lines as a table of the columns of the file."""
    cells = _parsed(pa, chunk, [pa.string() if kind is None else kind for kind in kinds])
    found, flags = [], []
    for kind, column in zip(kinds, cells.columns, strict=True):
        found.append(column if kind is not None else pa.compute.cast(column, pa.float64()))
        if kind is None:
            flags.append(_are_integers(pa, column))
    return pa.table([*found, *flags], schema=schema)


def _groups(tables: Iterable[Any], rows: int, pa: Any) -> Iterator[Any]:
    """Yields tables of so many rows, the last one of what is left."""
    pending: list[Any] = []
    for table in tables:
        pending.append(table)
        while sum(map(len, pending)) >= rows:
            joined = pa.concat_tables(pending)
            yield joined.slice(0, rows)
            pending = [joined.slice(rows)]
    if sum(map(len, pending)):
        yield pa.concat_tables(pending)


# Reading.


def is_whole(fd: int) -> bool:
    """Returns whether a file begins and ends as Parquet does; one that was cut does not."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, 8, max(0, size - 8))
    footer = int.from_bytes(tail[:4], "little")
    ends = os.pread(fd, 4, 0), tail[4:]
    return ends == (_MAGIC, _MAGIC) and footer + 12 <= size <= _FILE_BYTES and footer <= _FOOTER_BYTES


def _check_whole(fd: int) -> None:
    if not is_whole(fd):
        raise DamagedParquetError(f"{os.fstat(fd).st_size} bytes do not end with a footer")


class ParquetRows:
    """The rows of a file that `write_parquet` has written.

    Args:
        fd: the file, a regular one; owned by this object, also if it raises.
        path: what errors call it.

    Attributes:
        header: the first line of the CSV that it was.
        csv_bytes: the size of that.

    Raises:
        DamagedParquetError: it is damaged, or is none of ours.
        OSError: it needs more memory than ours do, or is of a later version; or pyarrow is missing.
    """

    def __init__(self, fd: int, path: str | None = None) -> None:
        self._path = path
        # Closes the descriptor. pyarrow reads through it, in this thread alone.
        self._file = os.fdopen(fd, "rb", buffering=0)
        self._held: tuple[tuple[int, tuple[int, ...]], Any] | None = None
        try:
            _check_whole(fd)  # also where pyarrow is missing
            self._pa = _pyarrow()
            with self._checked():
                self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._held = None
        self._file.close()

    def arrays(
        self, indices: Sequence[int], start: int = 0, end: int | None = None, most_rows: int = _GROUP_ROWS
    ) -> Iterator[list[tuple[Numbers, Bools]]]:
        """Yields some columns, some rows at a time: the values of each, and which are present.

        Args:
            indices: of the columns, in the header.
            start: the number of the first row, from 0 on.
            end: the number of the row after the last one. Default: that of all rows.
            most_rows: how many at a time.

        Returns:
            For each index float64 `(rows,)`, NaN where missing, or int64; and bool `(rows,)`.

        Raises:
            OSError: see `ParquetRows`.
        """
        for table in self._tables(tuple(indices), start, end, most_rows):
            yield [_filled(*_numpy(column)) for column in table]

    def cells(self, start: int = 0, end: int | None = None) -> Iterator[tuple[float | None, ...]]:
        """Yields the cells of each row, None where missing, in the order of the header; see `arrays`."""
        count = len(self._columns)
        for table in self._tables(tuple(range(count + len(self._integers))), start, end, _BATCH_ROWS):
            columns: list[list[Any]] = []
            for column in table[:count]:
                values, present = _numpy(column)
                found: list[Any] = values.tolist()
                for place in np.flatnonzero(~present).tolist():
                    found[place] = None
                columns.append(found)
            for index, flags in zip(self._integers, table[count:], strict=True):
                found = columns[index]
                for place in np.flatnonzero(_numpy(flags)[0]).tolist():
                    found[place] = int(found[place])
            yield from zip(*columns, strict=True)

    def lines(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yields the rows as lines of a CSV, some at a time, formatted as the writer does; see `arrays`."""
        count = len(self._columns)
        for table in self._tables(tuple(range(count + len(self._integers))), start, end, _BATCH_ROWS):
            flags = dict(zip(self._integers, table[count:], strict=True))
            cells: list[list[bytes]] = []
            floats: list[Floats] = []
            for index, column in enumerate(table[:count]):
                values, present = _numpy(column)
                is_integer = _numpy(flags[index])[0] if index in flags else values.dtype == np.int64
                if present.all() and not np.any(is_integer):
                    floats.append(values)  # Those side by side are formatted together, which is faster.
                    continue
                if floats:
                    cells.append(format_cell_rows(np.stack(floats, axis=1)))
                    floats = []
                cells.append(_texts(values, present, present & is_integer))
            if floats:
                cells.append(format_cell_rows(np.stack(floats, axis=1)))
            yield b"\n".join([*map(b",".join, zip(*cells, strict=True)), b""])

    # Inside.

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Raises what pyarrow and the checks of this class raise as OSError."""
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
            # pyarrow's own: a checksum, a page, an encoding.
            raise DamagedParquetError(error, self._path) from error
        except MemoryError as error:
            raise OSError(errno.ENOMEM, f"the Parquet file needs too much memory: {error}") from error

    def _open(self) -> None:
        parquet = self._pa.parquet.ParquetFile(
            self._pa.PythonFile(self._file, mode="r"),
            page_checksum_verification=True,
            thrift_string_size_limit=_FOOTER_BYTES,
            thrift_container_size_limit=_MOST_CHUNKS * 2,
        )
        # Columns by their index: a name may have dots, and then be part of another.
        self._reader = parquet.reader
        about = json.loads(parquet.metadata.metadata[_METADATA.encode()])
        self.header = str(about["header"]).encode()
        self.csv_bytes = int(about["csv_bytes"])
        self._columns = parse_header(self.header)
        self._integers = [int(index) for index in about["integers"]]
        if int(about["version"]) > _VERSION:
            raise OSError(errno.ENOTSUP, "the Parquet file is of a later version of this package. Update it")
        if (
            about["version"] != _VERSION
            or parquet.metadata.num_columns != len(self._columns) + len(self._integers)
            or not all(0 <= index < len(self._columns) for index in self._integers)
            or not self.header.endswith(b"\n")
            or self.csv_bytes < len(self.header)
        ):
            raise ValueError("its metadata are not those of its columns")

    @functools.cached_property
    def _footer(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """The number of rows of each row group, and where each of its columns is: from where to where.

        Read when rows are: headers are asked for more often.

        Raises:
            ValueError: columns or rows are other than ours may be.
        """
        fd = self._file.fileno()
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 4, size - 8), "little")
        start = size - 8 - length
        found, _ = _Thrift(os.pread(fd, length, start)).struct()
        count = len(self._columns) + len(self._integers)
        root, *columns = found[_OF_FILE["schema"]]
        groups = found[_OF_FILE["row_groups"]]
        kinds = [one.get(_OF_SCHEMA["type"]) for one in columns]
        if (
            root.get(_OF_SCHEMA["children"]) != count
            or len(columns) != count
            or any(one.get(_OF_SCHEMA["repetition"]) == _REPEATED for one in columns)
            or not set(kinds[: len(self._columns)]) <= {_INT64, _DOUBLE}
            or not set(kinds[len(self._columns) :]) <= {_BOOLEAN}
            or count * len(groups) > _MOST_CHUNKS
        ):
            raise ValueError("its columns are not plain numbers")
        return [
            (rows := _checked_rows(group), [_place_of(*one, rows, start) for one in _chunks(group, kinds)])
            for group in groups
        ]

    @functools.cached_property
    def _starts(self) -> list[int]:
        """The number of the first row of each group, and that of all rows."""
        with self._checked():
            return [0, *itertools.accumulate(rows for rows, _ in self._footer)]

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._starts[-1]

    def _tables(
        self, indices: tuple[int, ...], start: int, end: int | None, most_rows: int
    ) -> Iterator[list[Any]]:
        """Yields rows as a list of columns."""
        end = self.count if end is None else min(end, self.count)
        for group, (first, last) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            begin, until = max(start, first), min(end, last)
            if begin >= until:
                continue
            table = self._group(group, indices)
            places = {index: place for place, index in enumerate(sorted(set(indices)))}
            for at in range(begin, until, most_rows):
                rows = table.slice(at - first, min(most_rows, until - at))
                yield [rows.column(places[index]) for index in indices]

    def _group(self, group: int, indices: tuple[int, ...]) -> Any:
        """Returns columns of a row group; the last one is kept, for who reads it piece by piece."""
        key = group, indices
        if self._held is None or self._held[0] != key:
            self._held = None
            wanted = sorted(set(indices))
            with self._checked():
                for index in wanted:
                    self._check_pages(group, index)
                table = self._reader.read_row_group(group, column_indices=wanted, use_threads=False)
                rows = self._starts[group + 1] - self._starts[group]
                if table.num_columns != len(wanted) or len(table) != rows:
                    raise ValueError(f"{table.num_columns} columns of {len(table)} rows")
            self._held = key, table.combine_chunks()
        return self._held[1]

    def _check_pages(self, group: int, index: int) -> None:
        """Raises ValueError where a column needs more memory than its rows, decompressed."""
        rows, places = self._footer[group]
        at, end = places[index]
        left = 10 * rows + _SLACK_BYTES
        while at < end:
            fields, length = _Thrift(os.pread(self._file.fileno(), _HEAD_BYTES, at)).struct()
            compressed, uncompressed = (fields[_OF_PAGE[name]] for name in ("compressed", "uncompressed"))
            at += length + compressed
            left -= uncompressed
            if compressed < 0 or uncompressed < 0 or left < 0 or at > end:
                raise ValueError(f"column {index} has a page of {compressed} bytes, {uncompressed} of values")


def _checked_rows(group: dict[int, Any]) -> int:
    rows: int = group[_OF_GROUP["rows"]]
    if not 0 <= rows <= _GROUP_ROWS:
        raise ValueError(f"a row group of {rows} rows")
    return rows


def _chunks(group: dict[int, Any], kinds: list[int]) -> Iterator[tuple[dict[int, Any], int]]:
    """Yields what a footer says of the columns of a row group, and the type of each."""
    return zip(group[_OF_GROUP["columns"]], kinds, strict=True)


def _place_of(chunk: dict[int, Any], kind: int, rows: int, limit: int) -> tuple[int, int]:
    """Returns from where to where a column of a row group is, all of it before an offset."""
    about = chunk[_OF_CHUNK["about"]]
    start, size = about[_OF_COLUMN["pages"]], about[_OF_COLUMN["compressed"]]
    if (
        _OF_CHUNK["file"] in chunk
        or _OF_COLUMN["dictionary"] in about
        or (about[_OF_COLUMN["type"]], about[_OF_COLUMN["values"]]) != (kind, rows)
        or not 0 < start <= start + size <= limit
    ):
        raise ValueError(f"a column of type {kind} and {rows} rows is {about}"[:_MOST_TEXT])
    return start, start + size


def _numpy(column: Any) -> tuple[Numbers, Bools]:
    """Returns a column without its own `to_numpy`, which imports pandas: half a second."""
    array = column.chunk(0) if column.num_chunks else column.combine_chunks()
    count, offset = len(array), array.offset
    bits, numbers = array.buffers()
    size = array.type.bit_width
    if size == 1:
        values: Numbers = _bools(numbers, offset, count)
    else:
        kind = np.int64 if str(array.type) == "int64" else np.float64
        values = np.frombuffer(numbers, kind, count, offset * 8) if count else np.empty(0, kind)
    present = np.ones(count, np.bool_) if not array.null_count else _bools(bits, offset, count)
    return values, present


def _texts(values: Numbers, present: Bools, is_integer: Bools) -> list[bytes]:
    """Returns the cells of a column, empty where missing."""
    found = [b""] * len(values)
    for place in np.flatnonzero(is_integer).tolist():
        found[place] = b"%d" % values[place]
    places = np.flatnonzero(present & ~is_integer)
    if len(places):
        texts = format_cell_rows(np.ascontiguousarray(values[places])[:, None])
        for place, text in zip(places.tolist(), texts, strict=True):
            found[place] = text
    return found


def _bools(bits: Any, offset: int, count: int) -> Bools:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=offset + count, bitorder="little")[
        offset:
    ].astype(np.bool_)


def _filled(values: Numbers, present: Bools) -> tuple[Numbers, Bools]:
    if values.dtype == np.float64 and not present.all():
        values = np.where(present, values, np.nan)
    return values, present


class _Thrift:
    """Reads Thrift's compact protocol: structs as dicts by the numbers of fields.

    Args:
        data: where they are.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = _MOST_STRUCTS

    def struct(self, at: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
        """Reads a struct; returns it, and the offset after it.

        Raises:
            ValueError: it is deeper, or has more structs, than any of ours; IndexError, it is not all there.
        """
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise ValueError("it is too large, or too deep")
        data = self._data
        found: dict[int, Any] = {}
        field = 0
        while head := data[at]:
            at += 1
            if head >> 4:
                field += head >> 4
            else:
                field, at = self._signed(at)
            kind = head & 15
            if kind in {1, 2}:  # A bool, whose value is its type.
                found[field] = kind == 1
            else:
                found[field], at = self._value(kind, at, depth)
        return found, at + 1

    def _value(self, kind: int, at: int, depth: int) -> tuple[Any, int]:
        match kind:
            case 4 | 5 | 6:
                return self._signed(at)
            case 8:
                length, at = _unsigned(self._data, at)
                return self._data[at : at + length], at + length
            case 9:
                return self._list(at, depth + 1)
            case 12:
                return self.struct(at, depth + 1)
            case 1 | 2 | 3:
                return self._data[at], at + 1
        raise ValueError(f"a field of type {kind}")

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        head, at = self._data[at], at + 1
        count = head >> 4
        if count == 15:  # noqa: PLR2004  # it follows
            count, at = _unsigned(self._data, at)
        if count > len(self._data) - at or depth > _DEEPEST:
            raise ValueError(f"a list of {count} elements")
        found = []
        for _ in range(count):
            one, at = self._value(head & 15, at, depth)
            found.append(one)
        return found, at

    def _signed(self, at: int) -> tuple[int, int]:
        byte = self._data[at]
        if byte < 128:  # noqa: PLR2004  # the last one: nearly all are
            return (byte >> 1) ^ -(byte & 1), at + 1
        number, at = _unsigned(self._data, at)
        return (number >> 1) ^ -(number & 1), at


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while (byte := data[at]) > 127:  # noqa: PLR2004  # another one follows
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
    return number | byte << shift, at + 1
