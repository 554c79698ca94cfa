"""How the spool reads and writes its small files: whole or not at all, for this user alone.

What is read may be damaged or hostile: only regular files of a bounded size are, links are not followed, a FIFO is not waited for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from typing import TYPE_CHECKING, Any

from .errors import SpoolDamaged

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
    "write_all",
    "write_text",
]

_READ_BYTES = 1 << 16
_MOST_BYTES = 16 << 20  # A manifest names what it comes after, with twenty bytes for each.
_NOT_A_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV}

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
    """A descriptor of a regular file. Does not follow a link, and does not wait for the other end of a FIFO.

    Raises:
        SpoolDamaged: Something else is there.
        OSError: It could not be opened; says nothing about what is there.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise SpoolDamaged(f"{path} must be a regular file, got {error.strerror}") from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise SpoolDamaged(f"{path} must be a regular file, got {stat.filemode(mode)}")
    return descriptor


def read_bytes(path: str | Path) -> bytes:
    """A small file, whole.

    Raises:
        SpoolDamaged: Not a regular file, or larger than any that the spool writes.
        OSError: It could not be read.
    """
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size > _MOST_BYTES:
            raise SpoolDamaged(f"{path} must have at most {_MOST_BYTES} bytes, got more")
        data = piece = os.read(descriptor, _READ_BYTES)
        while len(piece) == _READ_BYTES and len(data) <= _MOST_BYTES:
            piece = os.read(descriptor, _READ_BYTES)
            data += piece
    finally:
        os.close(descriptor)
    return data


def write_all(descriptor: int, data: bytes) -> None:
    """Writes everything: one call may take a part, on a disk that is nearly full for instance."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_text(path: str | Path, text: str) -> None:
    """Writes a new file for this user alone.

    Raises:
        ValueError: It is larger than what can be read again.
    """
    data = _encoded(text)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} must have at most {_MOST_BYTES} bytes, got {len(data)}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, data)
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
    """Appends one whole line or nothing; begins a line of its own where a crash tore the last one. One thread at a time.

    Raises:
        SpoolDamaged: Not a regular file.
        OSError: The line could not be written.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        try:
            write_all(descriptor, b"\n" * torn + _encoded(line) + b"\n")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
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
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _encoded(text: str) -> bytes:
    r"""As UTF-8. Half a surrogate pair, as names of files that are not UTF-8 have, becomes `\udcXX`, which JSON reads back."""
    return text.encode("utf-8", "backslashreplace")
