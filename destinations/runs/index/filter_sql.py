"""Compiles filters to SQL. User input is only ever a bound value, never part of a statement.

A statement selects the values to sort by, and `destinations.runs.order` sorts them. SQLite calls the
functions of `destinations.runs.record` for the status, age and duration that are shown.

The hyperparameters and metrics of a run are one JSON array, `cells`; the table `places` has the path of each
name in it. SQLite reads the array once per run and statement, however many fields there are: a filter of two
fields and a sort by a third take 0.4 s of processor time for 100,000 runs of 80 values. A cell
is a number, a text, or a blob for values that SQLite has no type for (true, false, none, NaN). SQLite sorts
numbers before texts before blobs, so `value < ''` selects numbers.
"""

# ruff: noqa: S608  # Statements are built from names of our own columns, numbers and question marks only.

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from destinations.runs.order import MISSING, Kind, key_of, sort_rows
from destinations.runs.record import FIELDS, Scalar

from .filters import Chain, Compare, Field, Found, In, Match, Node, Not, Test
from .patterns import matching

__all__ = [
    "ESCAPE",
    "FUNCTIONS",
    "Order",
    "Query",
    "compile_query",
    "escape_nul",
    "unescape_nul",
    "with_found",
]

Sql = tuple[str, list[Any]]

FUNCTIONS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    f"run_{name}": (len(field.needs) + 1, field.compute)
    for name, field in FIELDS.items()
    if field.compute is not None
}
"""The functions that SQLite calls for computed fields, each with its number of arguments."""

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
        """Whether statements select runs in this order already."""
        return self.descending and self.field == Field("run", "created_at")


@attrs.frozen
class Query:
    """A statement and its values. It selects value to sort by, creation time and id, newest run first."""

    statement: str
    values: tuple[Any, ...]
    order: Order

    def texts(self, selected: Iterable[tuple[Any, ...]]) -> list[tuple[str, int]]:
        """Returns the texts among the values of selected rows, each with the id of its run."""
        found = [(value, number) for value, _, number in selected if isinstance(value, str)]
        if self.order.field.type == "texts":
            return [(text, number) for value, number in found for text in json.loads(value)]
        return [(unescape_nul(value), number) for value, number in found]

    def rows(self, selected: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Returns selected rows in order, with decoded values; `MISSING` if a run has none."""
        kind = self.order.field.type

        def meant(value: Any) -> Any:
            if value is None:
                return MISSING
            if kind == "bool":
                return bool(value)
            if kind == "cell":
                return unescape_nul(value) if isinstance(value, str) else _OF_BLOB.get(value, value)
            return value

        # Most values are floats, and 100,000 calls of `meant` would take a tenth of a second.
        found = [row if type(row[0]) is float else (meant(row[0]), *row[1:]) for row in selected]
        return found if self.order.is_newest_first else sort_rows(found, descending=self.order.descending)


def with_found(node: Node, texts_of: Callable[[Field], Sequence[tuple[str, int]]]) -> Node:
    """Returns the filter with each regular expression replaced by the runs that it matches.

    Args:
        node: the filter.
        texts_of: returns the texts of a field, each with the id of its run.

    Raises:
        BudgetError: an expression takes too long.
    """
    match node:
        case Not():
            return Not(with_found(node.node, texts_of))
        case Chain():
            return Chain(node.word, tuple(with_found(one, texts_of) for one in node.nodes))
        case Match():
            texts = texts_of(node.field)
            places = matching(node.pattern, [text for text, _ in texts])
            return Found(tuple({texts[place][1]: None for place in places}))
    return node


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
        node: the filter without regular expressions, see `with_found`; None for all runs.
        order: the field to sort by.
        cells: the numbers of the hyperparameters and metrics in the filter and the order; no run has a
            field that is missing here.
        root: the folder that paths are relative to.
        now: the time to compare heartbeats with.
        archived: True for archived runs only, False for the others, None for both.
    """
    compiler = _Compiler(cells, root, now)
    condition, values = compiler.node(node) if node is not None else ("1", [])
    if archived is not None:
        condition, values = f"({condition}) AND r.archived = ?", [*values, int(archived)]
    column, more = compiler.column(order.field)
    join = " LEFT JOIN cells c ON c.run = r.id" if compiler.uses_cells else ""
    for number in compiler.joined:
        join += f" LEFT JOIN places p{number} ON p{number}.name = {number} AND p{number}.layout = c.layout"
    # The SQL index gives the first runs at once, but takes twice the time to read all runs.
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
        # The numbers of names with a joined place.
        self.joined: set[int] = set()

    def column(self, field: Field) -> Sql:
        """Returns the expression of a field; NULL if a run lacks it."""
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
        match node:
            case Not():
                condition, values = self.node(node.node)
                return f"NOT ({condition})", values
            case Chain():
                parts = [self.node(one) for one in node.nodes]
                joined = f" {node.word.upper()} ".join(f"({condition})" for condition, _ in parts)
                return joined, [value for _, values in parts for value in values]
            case Found():
                return "r.id IN (SELECT value FROM json_each(?))", [json.dumps(node.runs)]
        if node.field.type == "texts":
            return _texts_test(node)
        column, more = self.column(node.field)
        if column == "NULL":
            return "0", []
        condition, values = _test(node, column, more)
        return f"({column} IS NOT NULL AND {condition})", [*more, *values]


def _texts_test(node: Test) -> Sql:
    items = f"SELECT value FROM json_each(r.{node.field.name})"
    match node:
        case In():
            marks = ", ".join("?" * len(node.values))
            found = f"EXISTS ({items} WHERE value IN ({marks}))"
            return f"NOT {found}" if node.negated else found, [_stored(value) for value in node.values]
    return f"EXISTS ({items})", []


def _test(node: Test, column: str, more: list[Any]) -> Sql:
    """Returns a condition on a column that is not NULL; `more` are the column's values."""
    kind = node.field.type
    match node:
        case In():
            bound = [_bound(value, kind) for value in node.values]
            marks = ", ".join(mark for mark, _ in bound)
            word = "NOT IN" if node.negated else "IN"
            return f"{column} {word} ({marks})", [*more, *(value for _, value in bound)]
        case Compare():
            mark, value = _bound(node.value, kind)
            return f"{column} {node.operator} {mark}{_same_kind(node, column)}", [*more, value]
    return "1", []


def _same_kind(node: Compare, column: str) -> str:
    """Returns the condition that a cell has the kind of the compared value; "" for other fields."""
    if node.field.type != "cell":
        return ""
    bounds = {Kind.NUMBER: f"{column} < ''", Kind.TEXT: f"{column} >= '' AND {column} < x''"}
    # Nothing is less or greater than NaN.
    return f" AND {bounds.get(key_of(node.value)[0], '0')}"


def _bound(value: Scalar, kind: str) -> tuple[str, Any]:
    """Returns the mark for a value in a statement, and the value as a column of this type stores it."""
    if kind == "bool":
        return "?", int(value is True)
    if kind != "cell":
        return "?", value
    stored = _stored(value)
    if isinstance(stored, float) and math.isfinite(stored):
        # SQLite does not always parse a decimal to the nearest float, so parse it like a cell.
        return "json_extract(?, '$[0]')", json.dumps([value])
    return "?", stored


def _stored(value: Scalar) -> Any:
    """Returns a value as `_CELL` selects it."""
    kind, key = key_of(value)
    if kind is Kind.TEXT:
        return escape_nul(key)
    if kind is Kind.BOOL:
        return b"true" if key else b"false"
    return {Kind.NONE: b"none", Kind.NAN: b"nan"}.get(kind, key)


def escape_nul(text: str) -> str:
    """Returns the text with NUL escaped, because SQLite's JSON functions end a text at NUL."""
    return text.replace(ESCAPE, f"{ESCAPE}1").replace("\0", f"{ESCAPE}0")


def unescape_nul(text: str) -> str:
    """Reverses `escape_nul`."""
    return text.replace(f"{ESCAPE}0", "\0").replace(f"{ESCAPE}1", ESCAPE)
