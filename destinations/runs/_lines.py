"""Files of one JSON object per line, as a run leaves them: the last line may be torn, others may be damaged."""

import json
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Lines", "number_of", "read_lines", "read_object"]

_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@attrs.frozen
class Lines:
    """What a file holds.

    Attributes:
        records: the lines that are JSON objects, in order.
        damaged: how many lines are not; a last line without an end is being written and is none of them.
    """

    records: tuple[dict[str, Any], ...]
    damaged: int


def read_lines(path: Path) -> Lines:
    """Reads a file; nothing where there is none."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Lines((), 0)
    *lines, rest = data.split(b"\n")
    records, damaged = [], 0
    for line in [*lines, rest]:
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            record, damaged = None, damaged + (line is not rest)
        else:
            damaged += record is not None and not isinstance(record, dict)
        if isinstance(record, dict):
            records.append(record)
    return Lines(tuple(records), damaged)


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that is one JSON object; an empty one where there is none, or none that can be read."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def number_of(value: Any) -> float | None:
    """Returns a number as strict JSON has it, where NaN and infinities are texts; None for what is none."""
    if isinstance(value, str):
        return _NUMBERS.get(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
