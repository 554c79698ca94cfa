"""Compiles filters to SQL. What users write is never part of a statement, only a bound value.

A statement selects the values to sort by; `destinations.runs.order` has their order. What is shown of
a status, an age or a duration is computed by the functions of `destinations.runs.record`, which SQLite calls.

Hyperparameters and metrics of a run are one JSON array, `cells`; the table `places` has the path of a name in
it. SQLite reads the array once per run and statement, whatever the number of fields: a filter of two fields
and a sort by a third take 0.4 s of processor time for 100,000 runs of 80 values (docs/runs.md). A cell is a
number, a text, or a blob for what SQLite has no type for (true, false, none, NaN). SQLite orders numbers
before texts before blobs: `value < ''` selects numbers.
"""

# ruff: noqa: S608  # Statements are built from names of our own columns, numbers and question marks only.

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from destinations.runs.order import MISSING, Kind, key_of, sort_rows
from destinations.runs.record import FIELDS, Scalar

from .filters import All, Any_, Compare, Exists, Field, In, IsTrue, Match, Node, Not

__all__ = ["ESCAPE", "FUNCTIONS", "Order", "Query", "compile_query", "escape_nul", "unescape_nul"]

Sql = tuple[str, list[Any]]
Test = Compare | In | Match | Exists | IsTrue

FUNCTIONS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    f"run_{name}": (len(field.needs) + 1, field.compute)
    for name, field in FIELDS.items()
    if field.compute is not None
}
"""The functions that SQLite calls for computed fields, with their number of arguments."""

_BLOBS = {"true": "true", "false": "false", "null": "none", "array": "nan"}
_OF_BLOB: Mapping[bytes, Scalar] = {b"true": True, b"false": False, b"none": None, b"nan": math.nan}
_CELL = (
    "CASE json_type(c.cells, {0}) "
    + " ".join(f"WHEN '{kind}' THEN x'{blob.encode().hex()}'" for kind, blob in _BLOBS.items())
    + " ELSE json_extract(c.cells, {0}) END"
)
# SQLite joins at most 64 tables.
_MAX_JOINS = 60
ESCAPE = "\ue000"


@attrs.frozen
class Order:
    """The field to sort by, and the direction; see `destinations.runs.order`."""

    field: Field
    descending: bool

    @property
    def is_newest_first(self) -> bool:
        """Whether this is the order in which a statement selects runs."""
        return self.descending and self.field == Field("run", "created_at")


@attrs.frozen
class Query:
    """A statement and its values; it selects value to sort by, time of creation, and id, newest run first."""

    statement: str
    values: tuple[Any, ...]
    order: Order

    def rows(self, selected: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Returns selected rows in order, with what their values stand for; `MISSING` if a run has none."""
        kind = self.order.field.type

        def meant(value: Any) -> Any:
            if value is None:
                return MISSING
            if kind == "bool":
                return bool(value)
            if kind == "cell":
                return unescape_nul(value) if isinstance(value, str) else _OF_BLOB.get(value, value)
            return value

        # Most values are floats, and a hundred thousand calls take a tenth of a second.
        found = [row if type(row[0]) is float else (meant(row[0]), *row[1:]) for row in selected]
        return found if self.order.is_newest_first else sort_rows(found, descending=self.order.descending)


def compile_query(
    node: Node | None,
    order: Order,
    cells: Mapping[Field, int],
    *,
    root: str,
    now: float,
    archived: bool | None,
) -> Query:
    """Returns the statement of a query.

    Args:
        node: the filter, or None for all runs.
        order: the field to sort by.
        cells: the numbers of hyperparameters and metrics that the filter and the order name; no run has the
            others.
        root: the folder that paths are relative to.
        now: the time that heartbeats are compared with.
        archived: only archived runs, or only others; None for both.
    """
    compiler = _Compiler(cells, root, now)
    condition, values = compiler.node(node) if node is not None else ("1", [])
    if archived is not None:
        condition, values = f"({condition}) AND r.archived = ?", [*values, int(archived)]
    column, more = compiler.column(order.field)
    join = " LEFT JOIN cells c ON c.run = r.id" if compiler.uses_cells else ""
    for number in compiler.joined:
        join += f" LEFT JOIN places p{number} ON p{number}.name = {number} AND p{number}.layout = c.layout"
    # The index of SQL gives the first runs at once; to read all runs by it takes twice the time.
    newest = "r.created_at" if order.is_newest_first else "+r.created_at"
    statement = (
        f"SELECT {column}, r.created_at, r.id AS id FROM runs r{join} WHERE {condition} "
        f"ORDER BY {newest} DESC, r.id DESC"
    )
    return Query(statement, (*more, *values), order)


class _Compiler:
    def __init__(self, cells: Mapping[Field, int], root: str, now: float) -> None:
        self._cells = cells
        self._root = root
        self._now = now
        self.uses_cells = False
        # The numbers of names whose place is joined to the row.
        self.joined: set[int] = set()

    def column(self, field: Field) -> Sql:
        """Returns the expression of a field; NULL where a run does not have it."""
        if field.group != "run":
            number = self._cells.get(field)
            if number is None:
                return "NULL", []
            self.uses_cells = True
            if number not in self.joined and len(self.joined) == _MAX_JOINS:
                place = f"(SELECT path FROM places WHERE name = {number} AND layout = c.layout)"
                return _CELL.format(place), []
            self.joined.add(number)
            return _CELL.format(f"p{number}.path"), []
        if field.name == "path":
            below = self._root if self._root == "/" else f"{self._root}/"
            return "iif(r.path = '', ?, ? || r.path)", [self._root, below]
        declared = FIELDS[field.name]
        if declared.compute is None:
            return f"r.{declared.name}", []
        return f"run_{declared.name}({', '.join(f'r.{need}' for need in declared.needs)}, ?)", [self._now]

    def node(self, node: Node) -> Sql:
        """Returns a condition that is 0 or 1, never NULL."""
        if isinstance(node, Not):
            condition, values = self.node(node.node)
            return f"NOT ({condition})", values
        if isinstance(node, All | Any_):
            parts = [self.node(one) for one in node.nodes]
            word = " AND " if isinstance(node, All) else " OR "
            return word.join(f"({condition})" for condition, _ in parts), [
                value for _, values in parts for value in values
            ]
        if node.field.type == "texts":
            return _texts_test(node)
        column, more = self.column(node.field)
        if column == "NULL":
            return "0", []
        if isinstance(node, Exists):
            return f"{column} IS NOT NULL", more
        if node.field.type == "bool":
            return _bool_test(node, column, more)
        condition, values = _test(node, column, is_cell=node.field.group != "run")
        # The values of an expression are bound where it stands in the statement.
        ordered = [*values, *more] if isinstance(node, Match) else [*more, *values]
        return f"({column} IS NOT NULL AND {condition})", [*more, *ordered]


def _texts_test(node: Test) -> Sql:
    items = f"SELECT value FROM json_each(r.{node.field.name})"
    if isinstance(node, Exists):
        return f"EXISTS ({items})", []
    if isinstance(node, IsTrue):
        return "0", []
    if isinstance(node, Match):
        return f"EXISTS ({items} WHERE matches_pattern(?, value))", [node.pattern]
    wanted = [node.value] if isinstance(node, Compare) else list(node.values)
    is_negated = node.operator == "!=" if isinstance(node, Compare) else node.negated
    condition = f"EXISTS ({items} WHERE value IN ({_marks(wanted)}))"
    return f"NOT {condition}" if is_negated else condition, [_stored(value) for value in wanted]


def _bool_test(node: Test, column: str, more: list[Any]) -> Sql:
    if isinstance(node, Compare):
        operator = "=" if node.operator == "==" else "!="
        return f"{column} {operator} ?", [*more, int(node.value is True)]
    if isinstance(node, In):
        wanted = [int(value is True) for value in node.values]
        return f"{column} {'NOT ' if node.negated else ''}IN ({_marks(wanted)})", [*more, *wanted]
    return f"{column} = 1", more


def _test(node: Test, column: str, *, is_cell: bool) -> Sql:
    """Returns a condition on a column that is not NULL; values of a cell are of any type."""
    if isinstance(node, IsTrue):
        return f"{column} = ?", [b"true"]
    if isinstance(node, Match):
        return f"matches_pattern(?, {column})", [node.pattern]
    if isinstance(node, In):
        marks = ", ".join(_mark(value, is_cell=is_cell) for value in node.values)
        values = [_bound(value, is_cell=is_cell) for value in node.values]
        return f"{column} {'NOT ' if node.negated else ''}IN ({marks})", values
    if not isinstance(node, Compare):
        raise TypeError(node)
    mark, value = _mark(node.value, is_cell=is_cell), _bound(node.value, is_cell=is_cell)
    if node.operator in {"==", "!="}:
        return f"{column} {'=' if node.operator == '==' else '!='} {mark}", [value]
    if isinstance(value, bytes):
        # Nothing is less or greater than NaN.
        return "0", []
    condition = f"{column} {node.operator} {mark}"
    if is_cell:
        kind = "{0} >= '' AND {0} < x''" if isinstance(node.value, str) else "{0} < ''"
        condition = f"{condition} AND {kind.format(column)}"
    return condition, [value]


def _mark(value: Scalar, *, is_cell: bool) -> str:
    return "json_extract(?, '$[0]')" if is_cell and _is_read_as_float(value) else "?"


def _bound(value: Scalar, *, is_cell: bool) -> Any:
    # SQLite does not always read the nearest float of a decimal text: the value takes the same way as the
    # cell.
    return json.dumps([value]) if is_cell and _is_read_as_float(value) else _stored(value)


def _is_read_as_float(value: Scalar) -> bool:
    _, key = key_of(value)
    return isinstance(key, float) and math.isfinite(key)


def _stored(value: Scalar) -> Any:
    """Returns a value as `_CELL` has it."""
    kind, key = key_of(value)
    if kind is Kind.TEXT:
        return escape_nul(key)
    if kind is Kind.BOOL:
        return b"true" if key else b"false"
    return {Kind.NONE: b"none", Kind.NAN: b"nan"}.get(kind, key)


def escape_nul(text: str) -> str:
    """Returns a text without NUL, at which the JSON functions of SQLite end a text."""
    return text.replace(ESCAPE, f"{ESCAPE}1").replace("\0", f"{ESCAPE}0")


def unescape_nul(text: str) -> str:
    """Returns the text that `escape_nul` was given."""
    return text.replace(f"{ESCAPE}0", "\0").replace(f"{ESCAPE}1", ESCAPE)


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))
