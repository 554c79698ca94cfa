"""Reads untrusted JSON files: one object, or one object per line. Lines may be torn or damaged."""

import contextlib
import errno
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from destinations.kinds.line import file_inside, number_of, path_inside, whole_of
from destinations.run_directory.layout import is_shallow, number_of_int
from destinations.runs.budget import spend
from uploads.disk import (
    ABSENT,
    MAX_DOCUMENT_BYTES,
    UnreadableError,
    lock,
    open_regular,
    read_regular,
    rename_new,
)

__all__ = [
    "clean_text",
    "file_inside",
    "folder_lock",
    "integer_of",
    "json_lines",
    "number_of",
    "path_inside",
    "read_object",
    "read_object_file",
    "whole_of",
    "write_json",
    "written_beside",
]

_MAX_DIGITS = 20
# A parsed record takes several times the memory of its line.
_RECORD_FACTOR = 4
_BACKSLASH = ord("\\")
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def integer_of(digits: str) -> float:
    """Returns an integer, or beyond 64 bits the nearest float."""
    # Python refuses to convert thousands of digits.
    return number_of_int(int(digits)) if len(digits) <= _MAX_DIGITS else float(digits)


_loads = functools.partial(json.loads, parse_int=integer_of)


def read_object(raw: bytes) -> dict[str, Any]:
    """Parses a JSON object; accepts `NaN` and `Infinity`, which stable-pretraining writes.

    Raises:
        ValueError: the content is no JSON object; the message says why.
    """
    try:
        try:
            data = orjson.loads(raw)
        except ValueError:
            # orjson rejects NaN, lone surrogates, and integers beyond 64 bits.
            data = _loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"it is not an object but {type(data).__name__}")  # noqa: TRY004  # bad content
    # Only an escape can be a lone surrogate, which SQLite and terminals reject. The search for one byte comes
    # first, because it is ten times faster than for several.
    return _cleaned(data) if _BACKSLASH in raw and (b"\\ud" in raw or b"\\uD" in raw) else data


def write_json(value: Any) -> str:
    """Returns compact JSON; NaN and infinities become `null`, unless an integer exceeds 64 bits."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # An integer beyond 64 bits.
        return _dumps(value)


def clean_text(text: str) -> str:
    """Returns the text with lone surrogates escaped, so that UTF-8 can encode it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


def json_lines(path: Path, *, with_torn: bool = False) -> Iterator[dict[str, Any] | None]:
    """Yields the JSON objects of a file, one per line; None for a damaged line, or one above 32 MiB.

    Args:
        path: the file; a missing one has no lines.
        with_torn: whether to yield a last line without a line feed if it is an object.

    Raises:
        OSError: the file is unreadable.
    """
    try:
        fd = open_regular(path)
    except ABSENT:
        return
    with os.fdopen(fd, "rb") as file:
        is_beyond = False
        while line := file.readline(MAX_DOCUMENT_BYTES):
            spend(_RECORD_FACTOR * len(line))
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
    """Returns the JSON object in a file; an empty one if there is no file.

    Raises:
        UnreadableError: the file is damaged.
        OSError: the file is unreadable.
    """
    try:
        found = _object(read_regular(path))
    except ABSENT:
        return {}
    if found is None:
        raise UnreadableError(errno.EIO, "it is damaged: no JSON object", str(path))
    return found


@contextlib.contextmanager
def written_beside(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary file to write, which moves to `path` at the end; an exception removes it.

    Args:
        path: the final path.
        overwrite: whether to replace an existing file.

    Raises:
        FileExistsError: the path exists.
    """
    # A unique name: the folder may be shared, and two exports may run at once.
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        if overwrite:
            temporary.replace(path)
        else:
            # A file that another process wrote there meanwhile stays.
            rename_new(name, os.fspath(path))
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Locks a folder, if its file system supports that; needs no file, and a run's writer doesn't lock it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            lock(fd)
        yield
    finally:
        os.close(fd)
