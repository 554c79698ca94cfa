"""Files, written so that nobody ever sees half of one, and read so that no foreign one does harm."""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import stat
import weakref
from pathlib import Path
from typing import Any, Protocol

from events import plain_config, safe_text

__all__ = [
    "DISK",
    "MOST_BYTES",
    "Disk",
    "append_line",
    "discard",
    "forget_in_children",
    "open_regular",
    "open_temporary",
    "read_open",
    "read_regular",
    "remove_temporaries",
    "replace_file",
    "strict_json",
]


class Disk:
    """The operating system's own calls; errors are `OSError`s as they come."""

    def open(self, path: Path | str, flags: int) -> int:
        """Opens a file; a new one may be read by whom the umask lets."""
        return os.open(path, flags, 0o666)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Writes all of the data at an offset."""
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], offset + written)

    def truncate(self, fd: int, size: int) -> None:
        """Cuts a file."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Waits until the disk has what is in a file, whether it was written or mapped."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Waits until the disk has the names in a folder, where the file system can do that."""
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def replace(self, source: Path | str, target: Path) -> None:
        """Gives a file another name, in the place of whatever has it."""
        Path(source).replace(target)

    def unlink(self, path: Path | str) -> None:
        """Takes a file away."""
        Path(path).unlink()

    def make_folder(self, path: Path) -> None:
        """Makes a folder, where there is none."""
        path.mkdir(exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Takes an empty folder away."""
        path.rmdir()


DISK = Disk()

MOST_BYTES = 32 << 20
"""The largest document, and the longest line of an index, that is read."""

_counter = itertools.count()
# Written by a command that takes no lock.
_OF_EDITS = ".edits.json."
_OF_RANK = re.compile(r"\.\w+\.rank(\d+)\.")


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


def remove_temporaries(folder: Path, rank: int | None = None, *, disk: Disk = DISK) -> None:
    """Removes what a dead process left half written.

    Args:
        folder: where.
        rank: of which rank, whose lock is held: those of other ranks, and of edits, may be being written. Default: all.
        disk: what is written by.
    """
    for path in folder.glob(".*.tmp"):
        of_rank = _OF_RANK.match(path.name)
        if rank is not None and (
            rank != (int(of_rank[1]) if of_rank else 0) or path.name.startswith(_OF_EDITS)
        ):
            continue
        with contextlib.suppress(OSError):
            disk.unlink(path)


def open_regular(path: Path | str) -> int:
    """Opens a file to read it: a regular file only, never through a symbolic link, and without waiting for a FIFO.

    Raises:
        OSError: it is something else, or cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of a file; see `open_regular`.

    Raises:
        OSError: it cannot be read, or is larger than `most_bytes`.
    """
    fd = open_regular(path)
    try:
        return read_open(fd, os.fstat(fd).st_size, str(path), most_bytes)
    finally:
        os.close(fd)


def read_open(fd: int, size: int, name: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of an open regular file, which may grow meanwhile; see `read_regular`."""
    raw = os.read(fd, size + 1) if size <= most_bytes else b""
    # A read returns less than it was asked for beyond 2 GiB, and more than expected where the file grew.
    while size < len(raw) <= most_bytes and (more := os.read(fd, 1 << 16)):
        raw += more
    if size > most_bytes or len(raw) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", name)
    return raw


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
    """Returns JSON that every reader takes: NaN and infinities become the strings "NaN", "Infinity" and "-Infinity".

    What JSON cannot hold becomes its text.
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=safe_text)
    except (ValueError, TypeError, RecursionError):
        pass
    try:
        return json.dumps(_finite(value), indent=indent, allow_nan=False, default=safe_text)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(_finite(plain_config({"": value})[""]), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Forgetful(Protocol):
    """What has a thread, a lock and files that are not a forked child's."""

    def forget_in_child(self) -> None:
        """Lets go of them, in the child."""


_open: "weakref.WeakSet[Forgetful]" = weakref.WeakSet()
_is_guarded: list[bool] = []


def forget_in_children(one: Forgetful) -> None:
    """Has `forget_in_child` called in each child that is forked from now on, until `discard`."""
    if not _is_guarded:
        os.register_at_fork(after_in_child=_forget_all)
        _is_guarded.append(True)
    _open.add(one)


def discard(one: Forgetful) -> None:
    """Takes it back."""
    _open.discard(one)


def _forget_all() -> None:
    for one in list(_open):
        one.forget_in_child()
    _open.clear()
