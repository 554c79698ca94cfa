"""Tables: CSV files below `tables/`, with the types of their columns in `tables.jsonl`."""

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.layout import TABLES_FOLDER
from destinations.text.formatting import describe

from .kind import FileOf, Kind, RecordOutput, Work
from .line import Line, whole_of
from .media import MAX_MEDIUM_BYTES, open_file

__all__ = ["TABLE", "Table", "TableEntry", "read_table", "table_rows"]

_MAX_LINE = 16 << 20


@attrs.frozen
class TableEntry:
    """The metadata of a table.

    Attributes:
        name: the name as logged.
        step: the step of the call.
        time: the time of the call, in seconds since 1970.
        path: the absolute path of the CSV.
        size: bytes.
        row_count: number of rows, without the header.
        columns: name and type of each column; types are "bool", "int", "float", "str" and "empty".
    """

    name: str
    step: int | None
    time: float | None
    path: Path
    size: int | None
    row_count: int
    columns: tuple[tuple[str, str], ...]


@attrs.frozen
class Table:
    """A table.

    Attributes:
        name: the name as logged.
        step: the step of the call.
        columns: the names of the columns.
        rows: the rows of typed cells. In a column of texts, None was read back as "".
    """

    name: str
    step: int | None
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns each row as a dict; if columns have the same name, the last one wins."""
        return [dict(zip(self.columns, row, strict=False)) for row in self.rows]


def read_table(path: Path, types: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """Reads the CSV of a table.

    Args:
        path: the file.
        types: the types of its columns, from the index: "bool", "int", "float", "str" or "empty". Further
            columns are texts.

    Returns:
        The names of the columns, and the rows with typed cells. A cell that doesn't fit its type stays a
        text. In a column of numbers, an empty cell is None; in a column of floats, a number without a point
        is an int, as logged.

    Raises:
        ValueError: the file is not a CSV; the message has its path.
    """
    rows = table_rows(path, types)
    columns = next(rows, [])
    return columns, list(rows)


def table_rows(
    path: Path, types: Sequence[str], start: int = 0, end: float = math.inf
) -> Iterator[list[Any]]:
    """Yields the names of the columns, then each row, as in `read_table`.

    Args:
        path: the file.
        types: as for `read_table`.
        start: the first row to parse; rows outside the range are empty lists.
        end: the end of the range.

    Raises:
        ValueError: the file is not a CSV; the message has its path.
    """
    with open_file(path) as raw:
        if os.fstat(raw.fileno()).st_size > MAX_MEDIUM_BYTES:
            raise ValueError(f"table {path} has more than {MAX_MEDIUM_BYTES >> 20} MiB. Open its path.")
        text = io.TextIOWrapper(raw, "utf-8-sig", "replace", newline="")
        reader = csv.reader(_lines(text))
        try:
            columns = next(reader, [])
            kinds = [*types, *["str"] * (len(columns) - len(types))]
            yield columns
            for place, cells in enumerate(reader):
                # An empty line is a row with a single empty value.
                is_wanted = columns and start <= place < end
                pairs = zip(cells or [""], kinds, strict=False) if is_wanted else ()
                yield [_typed(cell, kind) for cell, kind in pairs]
        except csv.Error as error:
            raise ValueError(f"table {path} is not a CSV ({error}). Open its path.") from error


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(_MAX_LINE):
        if len(line) == _MAX_LINE:
            raise csv.Error(f"a line has more than {_MAX_LINE >> 20} Mi characters")
        yield line


def _typed(text: str, kind: str) -> Any:
    if kind == "str":
        return text
    if text == "" or kind == "empty":
        return None
    if text in {"True", "False"}:
        return text == "True"
    try:
        return int(text) if kind == "int" or text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def _write(
    _name: str, *, columns: list[str], rows: list[list[Any]], caption: str | None = None
) -> tuple[int, Work]:
    rows = [list(row) for row in rows]

    def work(output: RecordOutput) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(map(describe, row) for row in rows)
        data = text.getvalue().encode("utf-8", "backslashreplace")
        fields = {
            "path": output.add_file(".csv", data),
            "size": len(data),
            "rows": len(rows),
            "columns": [
                {"name": column, "type": _column_type(row[index] for row in rows)}
                for index, column in enumerate(columns)
            ],
        }
        output.add_line(fields if caption is None else {**fields, "caption": caption})

    return 64 * len(rows) * (len(columns) + 1), work


def _column_type(values: Iterable[Any]) -> str:
    """Returns the narrowest type that holds all values: bool, int, float or str; None is ignored."""
    kinds = {type(value) for value in values if value is not None}
    for name, allowed in (("bool", {bool}), ("int", {bool, int}), ("float", {bool, int, float})):
        if kinds and kinds <= allowed:
            return name
    return "str" if kinds else "empty"


def _parse(line: Line) -> TableEntry:
    return TableEntry(
        **line.call(),
        path=line.path(),
        size=line.whole("size"),
        row_count=whole_of(line.fields.get("rows")) or 0,
        columns=tuple((str(one["name"]), str(one.get("type", "str"))) for one in line.fields["columns"]),
    )


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    (line,) = lines
    columns, rows = read_table(line.file(), [str(one.get("type")) for one in line.fields.get("columns", ())])
    return {"columns": columns, "rows": rows}


def _page_fields(_: TableEntry, fields: dict[str, Any], _file_of: FileOf) -> dict[str, Any]:
    columns = [{"name": column, "type": kind} for column, kind in fields["columns"]]
    return {**fields, "rows": fields.pop("row_count"), "columns": columns}


TABLE = Kind(
    name="table",
    index="tables.jsonl",
    write=_write,
    parse=_parse,
    replay=_replay,
    shows="table",
    folder=TABLES_FOLDER,
    page_fields=_page_fields,
)
