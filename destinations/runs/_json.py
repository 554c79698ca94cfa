"""Reading JSON fast where orjson is installed, and whatever Python's own writer has written in any case."""

import json
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["clean_text", "read_object", "written_texts"]

_TOO_LARGE = 1 << 63
_fast_loads: Callable[[bytes], Any]
_fast_dumps: Callable[[Sequence[str]], str]
try:
    import orjson
except ImportError:
    _fast_loads, _fast_dumps = json.loads, json.dumps
else:
    _fast_loads = orjson.loads

    def _fast_dumps(texts: Sequence[str]) -> str:
        return orjson.dumps(texts).decode()


def read_object(raw: bytes) -> dict[str, Any]:
    """Returns a JSON object; `NaN` and `Infinity` are read too, which stable-pretraining writes.

    Raises:
        ValueError: it is none; the text says why.
    """
    try:
        try:
            data = _fast_loads(raw)
        except ValueError:
            # orjson is strict: no NaN, no lone surrogates, no integers beyond 64 bits.
            data = json.loads(raw, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"it is no object but {type(data).__name__}")  # noqa: TRY004  # of bad content, not of a bad call
    # Only an escape can be a lone surrogate, which neither SQLite nor a terminal takes.
    # To look for one byte is ten times faster than for several.
    return _cleaned(data) if b"\\" in raw and (b"\\ud" in raw or b"\\uD" in raw) else data


def _integer(digits: str) -> float:
    """Returns an integer; beyond 64 bits the nearest float, as the index has it."""
    number = float(digits)
    return int(digits) if abs(number) < _TOO_LARGE else number


def written_texts(texts: Sequence[str]) -> str:
    """Returns texts as a JSON list."""
    return _fast_dumps(texts) if texts else "[]"


def clean_text(text: str) -> str:
    """Returns a text that UTF-8 can hold: a lone surrogate is written as an escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value
