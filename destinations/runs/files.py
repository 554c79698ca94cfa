"""Reads untrusted files of JSON: one object, or one object per line, of which some may be torn or damaged."""

import errno
import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from destinations.run_directory.layout import is_shallow
from uploads.disk import MAX_DOCUMENT_BYTES, open_regular, read_regular

__all__ = [
    "clean_text",
    "file_inside",
    "json_lines",
    "metric_of",
    "number_of",
    "path_inside",
    "read_object",
    "read_object_file",
    "whole_of",
    "write_json",
]

_TOO_LARGE = 1 << 63
_BACKSLASH = ord("\\")
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _integer(digits: str) -> float:
    """Returns an integer; the nearest float beyond 64 bits."""
    number = float(digits)
    return int(digits) if abs(number) < _TOO_LARGE else number


_loads = functools.partial(json.loads, parse_int=_integer)
_fast_loads: Callable[[bytes], Any]
_fast_dumps: Callable[[Any], bytes] | None
try:
    import orjson
except ImportError:
    _fast_loads, _fast_dumps = _loads, None
else:
    _fast_loads, _fast_dumps = orjson.loads, orjson.dumps


def read_object(raw: bytes) -> dict[str, Any]:
    """Parses a JSON object; accepts `NaN` and `Infinity`, which stable-pretraining writes.

    Raises:
        ValueError: it is not a JSON object; the message says why.
    """
    try:
        try:
            data = _fast_loads(raw)
        except ValueError:
            # orjson rejects NaN, lone surrogates, and integers beyond 64 bits.
            data = _loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"it is not an object but {type(data).__name__}")  # noqa: TRY004  # bad content
    # Only an escape can be a lone surrogate, which SQLite and terminals reject. Searching for one byte is ten
    # times faster than for several.
    return _cleaned(data) if _BACKSLASH in raw and (b"\\ud" in raw or b"\\uD" in raw) else data


def write_json(value: Any) -> str:
    """Returns compact JSON; non-finite numbers are `null` with orjson, and `NaN` and the like without."""
    if _fast_dumps is not None:
        try:
            return _fast_dumps(value).decode()
        except TypeError:  # An integer beyond 64 bits.
            pass
    return _dumps(value)


def clean_text(text: str) -> str:
    """Returns a text that can be encoded as UTF-8: lone surrogates are escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST_INT = (1 << 63) - 1


def json_lines(path: Path, *, with_torn: bool = False) -> Iterator[dict[str, Any] | None]:
    """Yields the JSON objects of a file, one per line; None for a line that is not one, or exceeds 32 MiB.

    Args:
        path: the file; a missing one has no lines.
        with_torn: whether to yield a last line without a line feed if it is an object; otherwise it is
            skipped.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        fd = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    with os.fdopen(fd, "rb") as file:
        is_beyond = False
        while line := file.readline(MAX_DOCUMENT_BYTES):
            is_whole = line.endswith(b"\n")
            is_long = is_beyond or (not is_whole and len(line) == MAX_DOCUMENT_BYTES)
            is_beyond = is_long and not is_whole
            if is_long:
                if is_whole:
                    yield None
                continue
            record = _object(line)
            if is_whole and line.strip() and record is None:
                yield None
            elif record is not None and (is_whole or with_torn):
                yield record


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and is_shallow(found) else None


def read_object_file(path: Path) -> dict[str, Any]:
    """Reads a file of one JSON object; returns an empty one if the file is missing or damaged."""
    try:
        return _object(read_regular(path)) or {}
    except OSError:
        return {}


def number_of(value: Any) -> float | None:
    """Returns a number of strict JSON, where NaN and infinities are texts; None if it is not a number.

    An integer beyond 64 bits is the nearest float.
    """
    if isinstance(value, str):
        return _NUMBERS.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) or abs(value) <= _LARGEST_INT:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def metric_of(value: Any) -> float | None:
    """Returns a value of a metric as a number, of which true is 1 and false 0; None if it is not one."""
    return float(value) if isinstance(value, bool) else number_of(value)


def whole_of(value: Any) -> int | None:
    """Returns a number as an integer; None if it is not a number, not finite, or beyond 64 bits."""
    number = number_of(value)
    if number is None or not math.isfinite(number) or abs(number) > _LARGEST_INT:
        return None
    return int(number)


def path_inside(run_dir: Path, relative: Any) -> Path:
    """Returns the path of a file that a record names; the file need not exist.

    Raises:
        ValueError: the path leads out of the folder of the run, possibly through a link, or is too long for
            the system.
    """
    parts = PurePosixPath(str(relative))
    if not parts.parts or parts.is_absolute() or ".." in parts.parts or "\0" in str(relative):
        raise ValueError(f"path {relative!r} of a record is outside the folder of its run.")
    path = run_dir / parts
    # A link in place of the file itself is refused on open.
    folder = path.parent
    while folder != run_dir:
        try:
            is_link = folder.is_symlink()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise ValueError(f"path {str(relative)[:100]!r}… of a record is too long.") from error
        if is_link:
            raise ValueError(f"path {relative!r} of a record passes through a link.")
        folder = folder.parent
    return path


def file_inside(run_dir: Path, relative: Any) -> Path:
    """Returns a regular file that a record names.

    Raises:
        FileNotFoundError: it is missing, a link, or outside the folder of the run.
    """
    try:
        path = path_inside(run_dir, relative)
        if not path.is_symlink() and path.is_file():
            return path
    except ValueError:
        pass
    raise FileNotFoundError(f"file {relative!r} of a record is not in the folder of its run.")
