"""Takes a file's bytes into the spool, so that the caller may rewrite, rename or delete it from then on.

Runs in the caller's thread. What it costs: a reflink or a rename is instant whatever the size; a copy takes about as long as `cp`.
A file of 1 MiB or more is checksummed later, by the flusher, unless the caller waits for the disk anyway.

A copy is of one state of the file, as far as can be seen: size, mtime and ctime are the same before and after it. The kernel
gives both times by a clock that ticks every 1 to 10 ms, so that a write in the tick in which a copy begins would not show;
a file that was written in the present tick is copied in the next. A file below 1 MiB is read again and compared.
What cannot be seen: a large file that is written through a memory map, since that need not touch its times, and a file
on a file system whose times are coarser than that, or by another machine's clock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from typing import TYPE_CHECKING

import attrs

from ._copying import READ_BYTES, copy_all, crc32_of, reflink
from .errors import InvalidSource, UnstableSource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE_CLOCK = 5 if sys.platform == "linux" else time.CLOCK_REALTIME  # CLOCK_REALTIME_COARSE
_TICK_SECONDS = 0.001
_MOST_TICKS = 20

__all__ = ["Staged", "files_of", "is_on_same_disk", "measure_to_move", "size_of", "stage_copy", "stage_link"]


@attrs.frozen
class Staged:
    """What staging found out: size in bytes, the CRC-32 where the bytes were read, and how they were taken."""

    size: int
    crc32: int | None
    staging: str


def stage_copy(source: Path, target: Path, *, checksum: bool = False) -> Staged:
    """Reflinks, or else copies; the file must not change meanwhile.

    Args:
        source: The caller's file.
        target: In the spool.
        checksum: Whether to read a large copy once more for its checksum.

    Raises:
        InvalidSource: Not a readable regular file.
        UnstableSource: Size or modification time moved during two copies in a row.
        OSError: The spool could not be written.
    """
    with _opened(source) as descriptor:
        for _ in range(2):
            before = _at_rest(descriptor)
            if before is None:
                continue
            staged = _copy_once(descriptor, target, checksum=checksum)
            if _unchanged(before, os.fstat(descriptor)) and _is_still(descriptor, staged):
                if staged.size == before.st_size:
                    return staged
                raise InvalidSource(
                    f"a source must have the size that its file system says, got {staged.size} bytes of {before.st_size} in {source}. "
                    "Copy it to a regular file first."
                )
    raise UnstableSource(
        f"{source} must not change while it is submitted, got two different states. Submit it when its writer has closed it."
    )


def _at_rest(descriptor: int) -> os.stat_result | None:
    """The file's state, once a write from now on would give it another ctime; None where it is written all the time.

    Waits a few milliseconds where the file was just written, up to twenty where its time is that of a clock ahead of ours.
    """
    first = None
    for _ in range(_MOST_TICKS):
        now = time.clock_gettime_ns(
            _FILE_CLOCK
        )  # First: a write that begins after it has this time or a later one.
        about = _settled(descriptor)
        if about.st_ctime_ns < now:
            return about
        first = first or about
        time.sleep(_TICK_SECONDS)
    return about if first is not None and _unchanged(first, about) else None


def _settled(descriptor: int) -> os.stat_result:
    """The file's state when no write(2) that began before is under way, which has its time from when it began.

    ext4 does not have readers wait for a writer, but who looks for a hole does; the position of the descriptor is not used.
    """
    with contextlib.suppress(OSError):
        os.lseek(descriptor, 0, os.SEEK_HOLE)
    return os.fstat(descriptor)


def _is_still(descriptor: int, staged: Staged) -> bool:
    """Whether a small file that was copied still has the bytes of the copy: a memory map writes without touching the times."""
    return (
        staged.staging != "copied"
        or staged.crc32 is None
        or staged.size >= READ_BYTES
        or crc32_of(descriptor) == staged.crc32
    )


def measure_to_move(source: Path, *, checksum: bool = False) -> Staged:
    """What a rename will bring, without touching the file; a small one is read for its checksum.

    Raises:
        InvalidSource: Not a readable regular file; a symlink is refused, since only the link would move.
    """
    if source.is_symlink():
        raise InvalidSource(
            f"a source to move must be a regular file, got the symlink {source}. Submit what it points to."
        )
    with _opened(source) as descriptor:
        size = os.fstat(descriptor).st_size
        return Staged(size, crc32_of(descriptor) if checksum or size < READ_BYTES else None, "moved")


def is_on_same_disk(source: Path, folder: Path) -> bool:
    """Whether a rename can bring the source into the folder."""
    return source.lstat().st_dev == folder.stat().st_dev


def stage_link(source: Path, target: Path) -> Staged:
    """Hard-links, and reads the file once to know it again. An in-place rewrite of the source reaches the link: it is detected at upload, not prevented.

    Raises:
        InvalidSource: Not a readable regular file, or on another file system than the spool.
        OSError: The spool could not be written.
    """
    with _opened(source) as descriptor:
        size, crc32 = os.fstat(descriptor).st_size, crc32_of(descriptor)
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise InvalidSource(
            f"a source to link must be on the spool's file system, got {source}. Submit it without link=True."
        ) from error
    return Staged(size, crc32, "linked")


def files_of(folder: Path) -> list[tuple[Path, str]]:
    """Each file under the folder with its name relative to it, sorted; links to folders are not followed."""
    found = []
    for parent, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = os.path.join(parent, name)  # noqa: PTH118  # os.walk gives strings; ten times as fast as Path
            found.append(
                (folder / os.path.relpath(path, folder), os.path.relpath(path, folder).replace(os.sep, "/"))
            )
    return sorted(found, key=lambda item: item[1])


def size_of(source: Path) -> int:
    """The source's size in bytes, having made sure that it can be staged.

    Raises:
        InvalidSource: Not a readable regular file.
    """
    with _opened(source) as descriptor:
        return os.fstat(descriptor).st_size


def _raise(error: OSError) -> None:
    raise InvalidSource(f"a folder to submit must be readable, got {error}") from error


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[int]:
    """The source's descriptor. O_NONBLOCK, so that a FIFO without a writer is refused rather than waited for."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        raise InvalidSource(f"a source must be a readable file, got {source}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidSource(f"a source must be a path without NUL, got {source!r}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidSource(f"a source must be a regular file, got {_kind(mode)} {source}")
        yield descriptor
    finally:
        os.close(descriptor)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "the folder",
        stat.S_ISFIFO: "the FIFO",
        stat.S_ISCHR: "the device",
        stat.S_ISBLK: "the device",
        stat.S_ISSOCK: "the socket",
    }
    return next((kind for test, kind in kinds.items() if test(mode)), "the special file")


def _copy_once(descriptor: int, target: Path, *, checksum: bool) -> Staged:
    written = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # A store of files gives the object the source's permissions; the drain must be able to read the copy.
        os.fchmod(written, stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o777 | stat.S_IRUSR)
        if reflink(descriptor, written):
            size = os.fstat(written).st_size
            return Staged(size, crc32_of(written) if checksum or size < READ_BYTES else None, "reflinked")
        size, crc32 = copy_all(descriptor, written)
        return Staged(size, crc32_of(written) if checksum and crc32 is None else crc32, "copied")
    finally:
        os.close(written)


def _unchanged(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )
