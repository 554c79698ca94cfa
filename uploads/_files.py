"""How the spool writes its small files: whole or not at all, for this user alone."""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["append_line", "fsync_path", "read_json", "replace_json", "write_text"]


def write_text(path: Path, text: str) -> None:
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
