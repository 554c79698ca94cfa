"""Strict JSON, index lines and temporary files of a run folder, on top of `uploads.disk`."""

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

from uploads.disk import DISK, Disk, append_line

__all__ = ["append_record", "remove_temporaries", "strict_json"]

# Written by a command that takes no lock.
_OF_EDITS = ".edits.json."
_OF_RANK = re.compile(r"\.\w+\.rank(\d+)\.")


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Appends one line of JSON to an index; creates file and folder if missing."""
    line = strict_json(record)
    try:
        append_line(path, line)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, line)


def remove_temporaries(folder: Path, rank: int | None = None, *, disk: Disk = DISK) -> None:
    """Removes temporary files (`uploads.disk.open_temporary`) that a killed process left.

    Args:
        folder: Where.
        rank: Remove those of this rank only, whose lock the caller holds: other ranks, and `edit`, may be
            writing theirs. Default: all.
        disk: Makes the system calls.
    """
    for path in folder.glob(".*.tmp"):
        of_rank = _OF_RANK.match(path.name)
        if rank is not None and (
            rank != (int(of_rank[1]) if of_rank else 0) or path.name.startswith(_OF_EDITS)
        ):
            continue
        with contextlib.suppress(OSError):
            disk.unlink(path)


def strict_json(value: Any, indent: int | None = None) -> str:
    """Returns standard JSON: NaN and infinities become the strings "NaN", "Infinity" and "-Infinity".

    A value that JSON cannot represent becomes its text.
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=_text)
    except (ValueError, TypeError, RecursionError):
        pass
    try:
        return json.dumps(_finite(value), indent=indent, allow_nan=False, default=_text)
    except (ValueError, TypeError, RecursionError):
        # Imported here: `events` takes 0.1 s, and readers of runs write JSON without it.
        from events import plain_config

        return json.dumps(_finite(plain_config({"": value})[""]), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _text(value: Any) -> str:
    from events import safe_text

    return safe_text(value)
