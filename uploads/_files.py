"""How the spool writes its small files: whole or not at all, for this user alone."""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "append_line",
    "exists",
    "fsync_path",
    "mkdir",
    "read_bytes",
    "read_json",
    "rename",
    "replace_json",
    "rmdir",
    "unlink",
    "write_text",
]

_READ_BYTES = 1 << 16

# Paths as text: to make a Path takes longer than the system takes for these five, and each is done for every upload.


def exists(path: str) -> bool:
    """Whether there is such a file or folder."""
    return os.path.exists(path)  # noqa: PTH110  # as said above


def mkdir(path: str) -> None:
    """Makes a folder for this user alone."""
    os.mkdir(path, 0o700)  # noqa: PTH102


def rename(source: str, target: str) -> None:
    """Changes a name in one step."""
    os.rename(source, target)  # noqa: PTH104


def unlink(path: str) -> None:
    """Removes a file."""
    os.unlink(path)  # noqa: PTH108


def rmdir(path: str) -> None:
    """Removes an empty folder."""
    os.rmdir(path)  # noqa: PTH106


def read_bytes(path: str) -> bytes:
    """A small file, whole."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = piece = os.read(descriptor, _READ_BYTES)
        while len(piece) == _READ_BYTES:
            piece = os.read(descriptor, _READ_BYTES)
            data += piece
    finally:
        os.close(descriptor)
    return data


def write_text(path: str | Path, text: str) -> None:
    """Writes a new file for this user alone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def replace_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file in one step; a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_text(temporary, json.dumps(value, ensure_ascii=False))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Appends one whole line with one write, mending a line that a crash tore before."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, ("\n" * torn + line + "\n").encode())
    finally:
        os.close(descriptor)


def fsync_path(path: Path) -> None:
    """Has the kernel write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is none, or something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
