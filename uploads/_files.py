"""How the spool reads and writes its files: small ones whole or not at all, for this user alone.

A spool may have been written by somebody else, so nothing is opened through a symlink, only regular files are read, and only up
to a limit.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "append_line",
    "exists",
    "fsync_path",
    "mkdir",
    "open_regular",
    "read_bytes",
    "read_json",
    "rename",
    "replace_json",
    "rmdir",
    "unlink",
    "write_text",
]

_READ_BYTES = 1 << 16
_LIMIT_BYTES = 4 << 20  # A note of a file in 10,000 parts has less.

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


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; neither follows a symlink nor waits for the writer of a FIFO.

    Raises:
        OSError: ELOOP for a symlink, EINVAL for a folder, a FIFO or a device, and whatever else `os.open` raises.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "must be a regular file", str(path))
    return descriptor


def read_bytes(path: str | Path, limit: int = _LIMIT_BYTES) -> bytes:
    """A small file, whole.

    Raises:
        OSError: EFBIG for a file beyond the limit, and what `open_regular` raises.
    """
    descriptor = open_regular(path)
    try:
        data = piece = os.read(descriptor, _READ_BYTES)
        while len(piece) == _READ_BYTES:
            if len(data) > limit:
                raise OSError(errno.EFBIG, f"must have at most {limit} bytes", str(path))
            piece = os.read(descriptor, _READ_BYTES)
            data += piece
    finally:
        os.close(descriptor)
    return data


def write_text(path: str | Path, text: str) -> None:
    """Writes a new file for this user alone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        data = memoryview(_encoded(text))
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
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, _encoded("\n" * torn + line + "\n"))
    finally:
        os.close(descriptor)


def fsync_path(path: Path) -> None:
    """Has the kernel write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is none, or something else."""
    try:
        value = json.loads(read_bytes(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _encoded(text: str) -> bytes:
    r"""UTF-8; the bytes of a path that are none become `\\udcXX`, which JSON reads back as they were."""
    return text.encode(errors="backslashreplace")
