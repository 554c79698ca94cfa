"""Writing files so that nobody ever sees half of one."""

import contextlib
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

from .disk import DISK, Disk

__all__ = [
    "append_line",
    "open_temporary",
    "remove_temporaries",
    "replace_file",
    "strict_json",
]

_counter = itertools.count()


def replace_file(path: Path, content: bytes, *, durable: bool = False, disk: Disk = DISK) -> None:
    """Writes a file beside its place, then renames it.

    Args:
        path: the file; its folder is made where it is missing.
        content: what it is to hold.
        durable: whether to wait until the disk has it.
        disk: what it is written by.
    """
    try:
        fd, name = open_temporary(path, disk)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = open_temporary(path, disk)
    try:
        try:
            disk.write(fd, content, 0)
            if durable:
                disk.sync(fd)
        finally:
            os.close(fd)
        disk.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    if durable:
        disk.sync_folder(path.parent)


def open_temporary(path: Path, disk: Disk = DISK) -> tuple[int, str]:
    """Opens a new file beside a path; unlike what `mkstemp` makes, it may be read by whom the umask lets."""
    name = f"{path.parent}/.{path.name}.{os.getpid()}-{next(_counter)}.tmp"
    return disk.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), name


def remove_temporaries(folder: Path, *, but_own: bool = False, disk: Disk = DISK) -> None:
    """Removes what a dead process left half written.

    Args:
        folder: where.
        but_own: leaves what this process is writing: another rank of it may have its files there.
        disk: what is written by.
    """
    for path in folder.glob(".*.tmp"):
        if but_own and f".{os.getpid()}-" in path.name:
            continue
        with contextlib.suppress(OSError):
            disk.unlink(path)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds one line of JSON with one write; a torn line that a dead process left is ended first."""
    line = f"{strict_json(record)}\n".encode()
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    try:
        fd = os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, flags, 0o666)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(fd, line) != len(line):
            os.ftruncate(fd, size)
            raise OSError(f"{path} must take a whole line, got a full disk.")
    finally:
        os.close(fd)


def strict_json(value: Any, indent: int | None = None) -> str:
    """Returns JSON that every reader takes: NaN and infinities become the strings "NaN", "Infinity" and "-Infinity"."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
