"""Filters and orders as SQL. What users write is never a part of a statement, only a value beside it.

A test of a cell is `id IN (runs whose cell is such)`, which SQLite answers from the index of the cell, once, where these are few;
where they are many, it is a look at the cell of each run that comes up, until there are as many as are wanted. In a column, numbers sort
before texts and texts before blobs, whatever their values: `value < ''` are the numbers, `value >= x''` the blobs.
"""

# ruff: noqa: S608  # All that is put into a statement is names of tables and columns that are made here, numbers and question marks.

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from .filters import All, Any_, Compare, Exists, Field, In, IsTrue, Match, Node, Not
from .record import HEARTBEAT_SECONDS, Scalar
from .scan import RUNNING

__all__ = ["Order", "Query", "Source", "compile_query"]

Sql = tuple[str, list[Any]]

_SELECT_NONE = "SELECT NULL, r.created_at, r.id FROM runs r"
_NUMBERS, _TEXTS, _BLOBS = "{0} < ''", "{0} >= '' AND {0} < x''", "{0} >= x''"


@attrs.frozen
class Source:
    """Where the cells of a field are.

    Args:
        table: the table.
        column: the column of the values.
        name: the number of the name, in the table that all names share.
    """

    table: str
    column: str
    name: int | None


@attrs.frozen
class Order:
    """By what to sort: runs without a value come last, in both directions, and before them those with NaN."""

    field: Field
    descending: bool


@attrs.frozen
class Query:
    """Statements that follow one another, each with its values; each selects a value to sort by, the time of creation, and the id."""

    statements: tuple[tuple[str, tuple[Any, ...]], ...]


def compile_query(
    node: Node | None,
    order: Order,
    sources: Mapping[Field, Source],
    *,
    root: str,
    now: float,
    archived: bool | None,
    is_rare: Callable[[str, Sequence[Any]], bool] = lambda *_: True,
) -> Query:
    """Returns the statements of a query.

    Args:
        node: the filter, or None for all runs.
        order: by what to sort.
        sources: of the cells that the filter and the order name; a name without one is one that no run has.
        root: the folder that paths are below of.
        now: by which heartbeats are judged.
        archived: only runs that are archived, or that are not; None for both.
        is_rare: says whether a statement selects few rows only; takes it with its values.
    """
    compiler = _Compiler(sources, root, now, is_rare)
    condition, values = compiler.node(node) if node is not None else ("1", [])
    if archived is not None:
        condition, values = f"({condition}) AND r.archived = ?", [*values, int(archived)]
    return Query(tuple(compiler.statements(order, condition, values)))


class _Compiler:
    def __init__(
        self,
        sources: Mapping[Field, Source],
        root: str,
        now: float,
        is_rare: Callable[[str, Sequence[Any]], bool],
    ) -> None:
        self._is_rare = is_rare
        self._sources = sources
        self._root = root
        self._now = now

    # --- order -----------------------------------------------------------------------------------------------------

    def statements(
        self, order: Order, condition: str, values: list[Any]
    ) -> list[tuple[str, tuple[Any, ...]]]:
        """Returns the statements for each part of the order."""
        if order.field.group == "run":
            return self._by_own(order, condition, values)
        direction = "DESC" if order.descending else "ASC"
        newest = "r.created_at DESC, r.id DESC"
        source = self._sources.get(order.field)
        if source is None:
            return [(f"{_SELECT_NONE} WHERE {condition} ORDER BY {newest}", tuple(values))]
        column = f"s.{source.column}"
        named, name = ("", []) if source.name is None else ("s.name = ? AND ", [source.name])
        # The order of the index comes first, so that only as many runs are looked at as are wanted.
        select = (
            f"SELECT {column}, r.created_at, r.id FROM {source.table} s CROSS JOIN runs r ON r.id = s.run"
        )
        by = f"ORDER BY {column} {direction}, s.run {direction}"
        found = [
            (
                f"{select} WHERE {named}{part.format(column)} AND ({condition}) {by}",
                (*name, *values),
            )
            for part in (_NUMBERS, _TEXTS, _BLOBS)
        ]
        has, of = self._has(source)
        without = f"{_SELECT_NONE} WHERE NOT ({has}) AND ({condition}) ORDER BY {newest}"
        return [*found, (without, (*of, *values))]

    def _by_own(self, order: Order, condition: str, values: list[Any]) -> list[tuple[str, tuple[Any, ...]]]:
        column, more = self._column(order.field)
        direction = "DESC" if order.descending else "ASC"
        select = f"SELECT {column}, r.created_at, r.id FROM runs r"
        by = f"ORDER BY {column} {direction}, r.id {direction}"
        present = f"{select} WHERE {column} IS NOT NULL AND ({condition}) {by}"
        missing = f"{_SELECT_NONE} WHERE {column} IS NULL AND ({condition}) ORDER BY r.id {direction}"
        return [(present, (*more, *more, *values, *more)), (missing, (*more, *values))]

    # --- filter ----------------------------------------------------------------------------------------------------

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
        if node.field.group != "run":
            return self._cell(node)
        if node.field.name == "tags":
            return self._tags(node)
        return self._own(node)

    def _cell(self, node: Compare | In | Match | Exists | IsTrue) -> Sql:
        source = self._sources.get(node.field)
        if source is None:
            return "0", []
        if isinstance(node, Exists):
            return self._has(source)
        condition, values = _test(node, source.column)
        return self._in(source, condition, values)

    def _has(self, source: Source) -> Sql:
        return self._in(source, f"{source.column} IS NOT NULL", [])

    def _in(self, source: Source, condition: str, values: list[Any]) -> Sql:
        if source.name is not None:
            condition, values = f"name = ? AND {condition}", [source.name, *values]
        rows = f"SELECT run FROM {source.table} WHERE {condition}"
        if self._is_rare(rows, values):
            return f"r.id IN ({rows})", values
        return f"EXISTS ({rows} AND run = r.id)", values

    def _tags(self, node: Compare | In | Match | Exists | IsTrue) -> Sql:
        if isinstance(node, Exists):
            return "r.id IN (SELECT run FROM tags)", []
        if isinstance(node, IsTrue):
            return "0", []
        negated = (
            node.negated if isinstance(node, In) else isinstance(node, Compare) and node.operator == "!="
        )
        if isinstance(node, Compare):
            condition, values = "tag = ?", [node.value]
        elif isinstance(node, In):
            condition, values = f"tag IN ({_marks(node.values)})", list(node.values)
        else:
            condition, values = "matches_pattern(?, tag)", [node.pattern]
        return f"r.id {'NOT ' if negated else ''}IN (SELECT run FROM tags WHERE {condition})", values

    def _own(self, node: Compare | In | Match | Exists | IsTrue) -> Sql:
        column, more = self._column(node.field)
        if isinstance(node, Exists):
            return f"{column} IS NOT NULL", more
        if node.field.type == "bool":
            return self._flag(node, column, more)
        condition, values = _test(node, column, is_typed=True)
        # The values of a column that is an expression stand where the column does.
        ordered = [*values, *more] if isinstance(node, Match) else [*more, *values]
        return f"({column} IS NOT NULL AND {condition})", [*more, *ordered]

    def _flag(self, node: Compare | In | Match | Exists | IsTrue, column: str, more: list[Any]) -> Sql:
        if isinstance(node, Compare):
            operator = "=" if node.operator == "==" else "!="
            return f"{column} {operator} ?", [*more, int(node.value is True)]
        if isinstance(node, In):
            wanted = [int(value is True) for value in node.values]
            return f"{column} {'NOT ' if node.negated else ''}IN ({_marks(wanted)})", [*more, *wanted]
        return f"{column} = 1", more

    def _column(self, field: Field) -> Sql:
        if field.name == "alive":
            fresh = self._now - HEARTBEAT_SECONDS
            return f"(r.open & {RUNNING} AND r.heartbeat_at IS NOT NULL AND r.heartbeat_at >= ?)", [fresh]
        if field.name == "path":
            below = self._root if self._root == "/" else f"{self._root}/"
            return "iif(r.path = '', ?, ? || r.path)", [self._root, below]
        return f"r.{field.name}", []


def _test(node: Compare | In | Match | Exists | IsTrue, column: str, *, is_typed: bool = False) -> Sql:
    """Returns a condition on a column, which has values of one type only, or of any."""
    if isinstance(node, IsTrue):
        return f"{column} = ?", [b"true"]
    if isinstance(node, Match):
        return f"matches_pattern(?, {column})", [node.pattern]
    if isinstance(node, In):
        values = [stored(value) for value in node.values]
        return f"{column} {'NOT ' if node.negated else ''}IN ({_marks(values)})", values
    if not isinstance(node, Compare):
        raise TypeError(node)
    value = stored(node.value)
    if node.operator in {"==", "!="}:
        return f"{column} {'=' if node.operator == '==' else '!='} ?", [value]
    if isinstance(value, bytes):
        # Nothing is less or greater than NaN.
        return "0", []
    condition = f"{column} {node.operator} ?"
    if not is_typed:
        kind = _TEXTS if isinstance(value, str) else _NUMBERS
        condition = f"{condition} AND {kind.format(column)}"
    return condition, [value]


def stored(value: Scalar) -> Any:
    """Returns a value as it stands in a cell; SQLite has no NaN, and no type for what is true, false and none."""
    if value is None:
        return b"none"
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return b"nan" if isinstance(value, float) and math.isnan(value) else value


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))
