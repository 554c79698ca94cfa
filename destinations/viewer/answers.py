"""Answers as strict JSON, with a form for numbers that JSON lacks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

__all__ = ["encode", "plain", "shown"]

# JavaScript rounds larger integers.
_MAX_SAFE = (1 << 53) - 1

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def shown(value: Any) -> Any:
    """Returns a value for JSON; a number that JavaScript can't represent becomes an object."""
    if type(value) is int and abs(value) > _MAX_SAFE:
        return {"number": str(value)}
    if isinstance(value, float) and value - value != 0:
        return {"number": "nan" if value != value else "inf" if value > 0 else "-inf"}  # noqa: PLR0124  # NaN
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def plain(value: Any) -> Any:
    """Returns a nested value for strict JSON; see `shown` for special numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return shown(value)
    return str(value)


def _dump_plain(value: Any) -> bytes:
    # The first text turns arrays into lists; reading it turns NaN into None.
    text = json.dumps(value, default=lambda array: array.tolist())
    found = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(found, allow_nan=False, separators=(",", ":")).encode()


def encode(answer: Any) -> bytes:
    """Returns an answer as strict JSON; numbers that aren't finite are null."""
    try:
        return orjson.dumps(answer, option=_OPTIONS)
    except TypeError:  # An integer beyond 64 bits, a lone surrogate, an array that is not contiguous.
        return _dump_plain(answer)
