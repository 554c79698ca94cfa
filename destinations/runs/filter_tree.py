"""Filters as trees, and what they mean: `matches` evaluates one in Python, `filter_sql` compiles it to SQL.

`filters` makes them of text. docs/runs.md has the language for people.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from .liveness import is_alive
from .record import RunRecord, Scalar

__all__ = [
    "FIELDS",
    "All",
    "Any_",
    "Compare",
    "Exists",
    "Field",
    "Filter",
    "In",
    "IsTrue",
    "Match",
    "Node",
    "Not",
    "Operator",
    "compare_values",
    "kind_of",
    "matches",
]

FieldType = Literal["text", "texts", "time", "bool", "cell"]
Operator = Literal["==", "!=", "<", "<=", ">", ">="]

# What a run has beside its hyperparameters and metrics, with the type of each.
FIELDS: dict[str, FieldType] = {
    "run_id": "text",
    "name": "text",
    "status": "text",
    "kind": "text",
    "path": "text",
    "tags": "texts",
    "notes": "text",
    "display_name": "text",
    "checkpoint_path": "text",
    "problem": "text",
    "alive": "bool",
    "archived": "bool",
    "created_at": "time",
    "ended_at": "time",
    "updated_at": "time",
    "heartbeat_at": "time",
}


@attrs.frozen
class Field:
    """What a test looks at: `group` is "run", "hparams" or "summary"."""

    group: str
    name: str

    @property
    def type(self) -> FieldType:
        """The type of its values; "cell" is any scalar."""
        return FIELDS[self.name] if self.group == "run" else "cell"

    def __str__(self) -> str:
        return self.name if self.group == "run" else f"{self.group}.{self.name}"


@attrs.frozen
class Compare:
    """A field beside a value."""

    field: Field
    operator: Operator
    value: Scalar


@attrs.frozen
class In:
    """A field is one of some values; or, of tags, has one of them."""

    field: Field
    values: tuple[Scalar, ...]
    negated: bool


@attrs.frozen
class Match:
    """A text has a place where a regular expression matches."""

    field: Field
    pattern: str


@attrs.frozen
class Exists:
    """The run has the field."""

    field: Field


@attrs.frozen
class IsTrue:
    """The field is `true`."""

    field: Field


@attrs.frozen
class Not:
    """The opposite."""

    node: "Node"


@attrs.frozen
class All:
    """All of several."""

    nodes: tuple["Node", ...]


@attrs.frozen
class Any_:  # noqa: N801  # `typing.Any` has the name
    """At least one of several."""

    nodes: tuple["Node", ...]


Node = Compare | In | Match | Exists | IsTrue | Not | All | Any_


@attrs.frozen
class Filter:
    """A filter that was understood.

    Args:
        text: as it was written.
        node: its tree.
    """

    text: str
    node: Node

    def fields(self) -> Iterator[Field]:
        """Yields the fields that it looks at."""
        waiting: list[Node] = [self.node]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Not):
                waiting.append(node.node)
            elif isinstance(node, All | Any_):
                waiting.extend(node.nodes)
            else:
                yield node.field


# --- evaluation ----------------------------------------------------------------------------------------------------


def matches(node: Node | Filter, record: RunRecord, now: float) -> bool:
    """Says whether a filter is true of a run.

    Args:
        node: the filter.
        record: the run.
        now: by which the heartbeat is judged.
    """
    if isinstance(node, Filter):
        return matches(node.node, record, now)
    if isinstance(node, All):
        return all(matches(one, record, now) for one in node.nodes)
    if isinstance(node, Any_):
        return any(matches(one, record, now) for one in node.nodes)
    if isinstance(node, Not):
        return not matches(node.node, record, now)
    values = _values(node.field, record, now)
    if isinstance(node, Exists):
        return bool(values)
    if isinstance(node, IsTrue):
        return any(value is True for value in values)
    if isinstance(node, Match):
        return any(isinstance(value, str) and re.search(node.pattern, value) for value in values)
    if isinstance(node, In):
        is_in = any(compare_values(value, "==", one) for value in values for one in node.values)
        return not is_in and (bool(values) or node.field.type == "texts") if node.negated else is_in
    if node.field.type == "texts" and node.operator == "!=":
        return not any(compare_values(value, "==", node.value) for value in values)
    return any(compare_values(value, node.operator, node.value) for value in values)


def compare_values(left: Scalar, operator: Operator, right: Scalar) -> bool:
    """Compares two values: numbers with numbers, texts with texts; what is of another kind is only ever unequal.

    NaN equals NaN, and is neither less nor greater than anything.
    """
    kind = kind_of(left)
    if operator == "!=":
        return not compare_values(left, "==", right)
    if kind != kind_of(right):
        return False
    if operator == "==":
        return kind == "nan" or left == right
    if kind not in {"number", "text"}:
        return False
    one: Any = left
    if operator in {"<", "<="}:
        return bool(one < right if operator == "<" else one <= right)
    return bool(one > right if operator == ">" else one >= right)


def kind_of(value: Scalar) -> str:
    """Returns what a value can be compared with: its own kind."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "text"
    return "nan" if value != value else "number"  # noqa: PLR0124  # the test for NaN that takes any integer


def _values(field: Field, record: RunRecord, now: float) -> tuple[Scalar, ...]:
    """Returns what the run has there: one value or none, of tags any number."""
    if field.group == "hparams":
        return (record.hparams[field.name],) if field.name in record.hparams else ()
    if field.group == "summary":
        return (record.summary[field.name],) if field.name in record.summary else ()
    if field.name == "tags":
        return record.tags
    if field.name == "alive":
        return (is_alive(record.status, record.heartbeat_at, now),)
    value = getattr(record, field.name)
    if field.name == "path":
        return (str(value),)
    return () if value is None else (value,)
