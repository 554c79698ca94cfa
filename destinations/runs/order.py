"""The one rule by which values of runs are told apart, ordered and grouped.

Values of different kinds are different, and the kinds have an order: numbers, texts, other values, true and
false, none, NaN, and at last `MISSING`, which stands for a run without a value. A direction turns the order
within a kind, never the order of kinds, so that the best values are first in either direction. Numbers are
equal by their value: 1 and 1.0 are one, and NaN equals NaN.

The index selects values and leaves their order to `sort_rows`; the page and the exported site show the order
and the groups that were computed here.
"""

import enum
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from .files import number_of

__all__ = ["MISSING", "Key", "Kind", "Missing", "key_of", "label_of", "orders_of", "same_values", "sort_rows"]


class Missing(enum.Enum):
    """The type of `MISSING`."""

    MISSING = "\N{EN DASH}"


MISSING: Final = Missing.MISSING
"""Stands for the value of a run that has none."""


class Kind(enum.IntEnum):
    """The kind of a value, in the order of the kinds."""

    NUMBER = 0
    TEXT = 1
    OTHER = 2
    BOOL = 3
    NONE = 4
    NAN = 5
    MISSING = 6


Row = TypeVar("Row", bound=Sequence[Any])
Key = tuple[Kind, Any]
"""Keys are equal for equal values; within a kind they have an order."""

_MAX_INT = 1 << 63
_WORDS = {"true", "false", "none", MISSING.value}


def _float_key(value: float) -> Key:
    return (Kind.NUMBER, value) if value == value else (Kind.NAN, 0)  # noqa: PLR0124  # the test for NaN


_KEYS: Mapping[type, Callable[[Any], Key]] = {
    float: _float_key,
    # SQLite has no integers beyond 64 bits: they count as the nearest float.
    int: lambda value: (Kind.NUMBER, number_of(value)),
    str: lambda value: (Kind.TEXT, value),
    bool: lambda value: (Kind.BOOL, value),
    type(None): lambda _: (Kind.NONE, 0),
    Missing: lambda _: (Kind.MISSING, 0),
}


def key_of(value: Any) -> Key:
    """Returns the key of a value; values that are no scalars are compared by type and text."""
    make = _KEYS.get(type(value))
    return (Kind.OTHER, (type(value).__name__, str(value))) if make is None else make(value)


def label_of(value: Any) -> str:
    """Returns a text for a scalar; equal values have the same label, and different ones another.

    A text stands for itself, unless it reads like the label of a value of another kind: then it is quoted.
    """
    kind, key = key_of(value)
    if kind is Kind.NUMBER:
        return str(int(key)) if abs(key) < _MAX_INT and key == int(key) else repr(key)
    if kind is Kind.TEXT:
        return f'"{key}"' if _is_ambiguous(key) else str(key)
    if kind is Kind.OTHER:
        return str(value)
    return {Kind.BOOL: str(key).lower(), Kind.NONE: "none", Kind.NAN: "nan", Kind.MISSING: MISSING.value}[
        kind
    ]


def _is_ambiguous(text: str) -> bool:
    if not text.strip() or text[0] == '"' or text in _WORDS:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def same_values(values: Iterable[Any]) -> bool:
    """Returns whether all of some values are equal; True for none."""
    return len({key_of(value) for value in values}) <= 1


def sort_rows(rows: Iterable[Row], *, descending: bool) -> list[Row]:
    """Returns rows in the order of their first items; rows of equal values stay as they are.

    Args:
        rows: each begins with a value.
        descending: whether the order within each kind is from max to min.
    """
    numbers: list[tuple[Any, Row]] = []
    of_kind = {Kind.NUMBER: numbers}
    for row in rows:
        value = row[0]
        # Most values are floats, and a hundred thousand calls of `key_of` take a tenth of a second.
        if type(value) is float and value == value:  # noqa: PLR0124  # the test for NaN
            numbers.append((value, row))
        else:
            kind, key = key_of(value)
            of_kind.setdefault(kind, []).append((key, row))
    found: list[Row] = []
    for kind in sorted(of_kind):
        of_kind[kind].sort(key=operator.itemgetter(0), reverse=descending)
        found += [row for _, row in of_kind[kind]]
    return found


def orders_of(values: Iterable[Any]) -> dict[str, list[int]]:
    """Returns the places of values in their order from min to max, `up`, and from max to min, `down`."""
    rows = [(value, place) for place, value in enumerate(values)]
    return {
        name: [place for _, place in sort_rows(rows, descending=descending)]
        for name, descending in (("up", False), ("down", True))
    }
