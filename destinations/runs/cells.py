"""Hyperparameters and last values as typed cells that SQL can sort and filter.

Each name has a column in a table of a hundred columns (`cells_0`, `cells_1`, …), and each run a row in the tables that it has
values for: that is ten times faster to fill than a row for each value. A name is given an SQL index when a query first filters or
sorts by it. Names beyond the first two thousand share one table of rows (`more_cells`).

Numbers and texts are stored as such; what SQLite has no type for, or would take for NULL, is a blob: see `_BLOBS`. No column has a
type of its own, so SQLite converts nothing.
"""

# ruff: noqa: S608  # All that is put into a statement is names of tables and columns that are made here, numbers and question marks.

import contextlib
import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from .database import Database
from .filter_sql import Source
from .filter_tree import Field
from .reading import Reading
from .record import Scalar

__all__ = ["CELL_TABLES", "Cells"]

CELL_TABLES = """
CREATE TABLE names (id INTEGER PRIMARY KEY, grp TEXT, name TEXT, UNIQUE (grp, name));
CREATE TABLE more_cells (run INTEGER, name INTEGER, value, PRIMARY KEY (run, name)) WITHOUT ROWID;
CREATE INDEX more_cells_by_value ON more_cells (name, value);
"""

_PAGE_COLUMNS = 100
_MOST_PAGES = 20
_PAGED_NAMES = _PAGE_COLUMNS * _MOST_PAGES
_MOST_SHAPES = 1000
_LARGEST_INT = (1 << 63) - 1
_ADD_OTHERS = "INSERT OR REPLACE INTO more_cells VALUES (?, ?, ?)"

_BLOBS: dict[bytes, Scalar] = {b"nan": math.nan, b"true": True, b"false": False, b"none": None}
# `sqlite3` looks for an adapter of each value whose type is not exactly int, float, str or bytearray; it takes its time.
_TRUE, _FALSE, _NONE, _NAN = (bytearray(text) for text in (b"true", b"false", b"none", b"nan"))


class Cells:
    """The values of all runs of an index.

    Args:
        database: where they are.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._names: dict[tuple[str, str], int] = {}
        self._indexed: set[int] = set()
        # The names and types that a run has, and how to make rows of its values: most runs of a sweep have the same.
        self._shapes: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[type, ...]], _Shape] = {}

    # --- writing ---------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forgets which names there are: another process may have changed that, or the file is another."""
        self._names.clear()
        self._shapes.clear()
        self._indexed.clear()

    def begin(self) -> None:
        """Learns which names there are; at the beginning of a transaction that writes."""
        self.forget()
        for number, group, name in self._db.execute("SELECT id, grp, name FROM names"):
            self._names[group, name] = number

    def tables(self) -> list[str]:
        """Returns the tables that may have rows of a run."""
        pages = -(-min(len(self._names), _PAGED_NAMES) // _PAGE_COLUMNS)
        return ["more_cells", *(f"cells_{page}" for page in range(pages))]

    def add(self, rows: dict[str, list[Any]], number: int, reading: Reading) -> None:
        """Adds the values of a run to the rows for each statement."""
        hparams, summary = reading.hparams, reading.summary
        values = [*hparams.values(), *summary.values()]
        if reading.may_have_nan:
            values = [_cell(value) for value in values]
        key = (tuple(hparams), tuple(summary), tuple(map(type, values)))
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = self._shape(*key)
        for place in shape.odd:
            values[place] = _cell(values[place])
        values.append(number)
        for statement, row in shape.statements:
            rows.setdefault(statement, []).append(row(values))
        if shape.others:
            others = [(number, name, values[place]) for name, place in shape.others]
            rows.setdefault(_ADD_OTHERS, []).extend(others)

    def write(self, rows: Mapping[str, Sequence[Any]]) -> None:
        """Writes the rows that `add` made."""
        for statement, values in rows.items():
            try:
                self._db.executemany(statement, values)
            except OverflowError:
                self._db.executemany(statement, [tuple(map(_small, row)) for row in values])

    def _number(self, group: str, name: str) -> int:
        """Returns the number of a name, which is its column; a new one gets the next, and its table where that is full."""
        number = self._names.get((group, name))
        if number is None:
            number = len(self._names)
            self._db.execute("INSERT INTO names VALUES (?, ?, ?)", (number, group, name))
            self._names[group, name] = number
            if number < _PAGED_NAMES and number % _PAGE_COLUMNS == 0:
                columns = ", ".join(f"c{column}" for column in range(_PAGE_COLUMNS))
                self._db.execute(
                    f"CREATE TABLE cells_{number // _PAGE_COLUMNS} (run INTEGER PRIMARY KEY, {columns})"
                )
        return number

    def _shape(self, hparams: Sequence[str], summary: Sequence[str], types: Sequence[type]) -> "_Shape":
        numbers = [self._number("hparams", name) for name in hparams]
        numbers += [self._number("summary", name) for name in summary]
        pages: dict[int, list[tuple[int, int]]] = {}
        others = []
        for place, number in enumerate(numbers):
            if number >= _PAGED_NAMES:
                others.append((number, place))
            else:
                pages.setdefault(number // _PAGE_COLUMNS, []).append((number % _PAGE_COLUMNS, place))
        statements = []
        for page, cells in pages.items():
            # Only the columns that there are: SQLite is quick about those that are not, and Python slow about each None.
            columns = ", ".join(f"c{column}" for column, _ in cells)
            marks = ", ".join("?" * len(cells))
            statements.append(
                (
                    f"INSERT OR REPLACE INTO cells_{page} (run, {columns}) VALUES (?, {marks})",
                    itemgetter(len(numbers), *(place for _, place in cells)),
                )
            )
        return _Shape(
            statements, others, [place for place, kind in enumerate(types) if kind in {bool, type(None)}]
        )

    # --- reading ---------------------------------------------------------------------------------------------------

    def names(self, group: str) -> list[str]:
        """Returns the names of all hyperparameters or metrics that a run has or had."""
        rows = self._db.execute("SELECT name FROM names WHERE grp = ? ORDER BY id", (group,))
        return [name for (name,) in rows]

    def sources(self, fields: Iterable[Field]) -> dict[Field, Source]:
        """Returns where the cells of some fields are, each with an SQL index; those of names that no run has are left out."""
        found: dict[Field, Source] = {}
        for field in fields:
            row = self._db.execute(
                "SELECT id FROM names WHERE grp = ? AND name = ?", (field.group, field.name)
            ).fetchone()
            if row is None:
                continue
            number = int(row[0])
            if number >= _PAGED_NAMES:
                found[field] = Source("more_cells", "value", number)
                continue
            page, column = f"cells_{number // _PAGE_COLUMNS}", f"c{number % _PAGE_COLUMNS}"
            if number not in self._indexed:
                # Where another process writes, this one does without: the answer is the same, and later.
                with contextlib.suppress(sqlite3.OperationalError):
                    self._db.execute(
                        f"CREATE INDEX IF NOT EXISTS {page}_{column} ON {page} ({column}) WHERE {column} IS NOT NULL"
                    )
                    self._indexed.add(number)
            found[field] = Source(page, column, None)
        return found

    def of_runs(self, ids: Sequence[int]) -> dict[int, tuple[dict[str, Scalar], dict[str, Any]]]:
        """Returns hyperparameters and last values of each run."""
        found: dict[int, tuple[dict[str, Scalar], dict[str, Any]]] = {number: ({}, {}) for number in ids}
        names = [(group, name) for group, name in self._db.execute("SELECT grp, name FROM names ORDER BY id")]
        marks = ", ".join("?" * len(ids))

        def add(run: int, name: int, value: Any) -> None:
            group, text = names[name]
            cells = found[run][0 if group == "hparams" else 1]
            cells[text] = _BLOBS[value] if isinstance(value, bytes) else value

        for first in range(0, min(len(names), _PAGED_NAMES), _PAGE_COLUMNS):
            table = f"cells_{first // _PAGE_COLUMNS}"
            for run, *values in self._db.execute(f"SELECT * FROM {table} WHERE run IN ({marks})", ids):
                for offset, value in enumerate(values):
                    if value is not None:
                        add(run, first + offset, value)
        if len(names) > _PAGED_NAMES:
            for row in self._db.execute(
                f"SELECT run, name, value FROM more_cells WHERE run IN ({marks})", ids
            ):
                add(*row)
        return found


class _Shape:
    """How the values of a run with certain names and types become rows.

    Args:
        statements: with what takes the row of each out of all values and the number of the run behind them.
        others: number and place of names that have no column.
        odd: places of values that SQLite has no type for.
    """

    def __init__(
        self,
        statements: Sequence[tuple[str, Callable[[Any], Any]]],
        others: list[tuple[int, int]],
        odd: list[int],
    ) -> None:
        self.statements = statements
        self.others = others
        self.odd = odd


def _cell(value: Scalar) -> Any:
    if value is True or value is False:
        return _TRUE if value else _FALSE
    if value is None:
        return _NONE
    return _NAN if value != value else value  # noqa: PLR0124  # NaN


def _small(value: Any) -> Any:
    """Returns a value that fits; an integer beyond 64 bits as the float next to it."""
    if not isinstance(value, int) or -_LARGEST_INT <= value <= _LARGEST_INT:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
