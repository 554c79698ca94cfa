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
import fcntl
import logging
import os
import shutil
import stat
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Literal

import attrs

from uploads.disk import READ_BYTES, copy_all, crc32_of, reflink
from uploads.errors import InvalidSourceError, SpoolFullError, UnstableSourceError

from .entry import DATA_FILE, MAXIMUM_SEQUENCE, Entry, utc_now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .spool import Spool

__all__ = [
    "How",
    "Intake",
    "Room",
    "Staged",
    "files_of",
    "is_on_same_disk",
    "measure_to_move",
    "size_of",
    "stage_copy",
    "stage_link",
]

_LOOK_AGAIN_SECONDS = 1.0  # Others fill and empty the disk without telling us.


class Room:
    """Keeps account of the bytes in a spool. The condition's lock guards the account.

    Args:
        spool: The spool's folder, to ask its disk.
        spool_bytes: The limit; None for none.
        free_bytes: What must stay free on the disk.
        wait_seconds: How long `take` waits for room.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        spool: Path,
        *,
        spool_bytes: int | None,
        free_bytes: int,
        wait_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._spool = spool
        self._limit_bytes = spool_bytes
        self._free_bytes = free_bytes
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._held_bytes = 0

    def take(self, size: int, *, adds_to_disk: bool = True) -> None:
        """Books the bytes, waiting for room up to the limit.

        Raises:
            SpoolFullError: There was none.
        """
        deadline = self._clock() + self._wait_seconds
        with self._changed:
            while (objection := self._objection(size, adds_to_disk=adds_to_disk)) is not None:
                left = deadline - self._clock()
                if left <= 0:
                    raise SpoolFullError(
                        f"{objection}. Make room, raise the limit, or wait longer with full_wait_seconds=…"
                    )
                self._changed.wait(min(left, _LOOK_AGAIN_SECONDS))
            self._held_bytes += size

    def hold(self, size: int) -> None:
        """Books bytes that earlier processes left, whether there is room or not."""
        with self._changed:
            self._held_bytes += size

    def give(self, size: int) -> None:
        """Returns bytes that have left the spool."""
        with self._changed:
            self._held_bytes -= size
            self._changed.notify_all()

    def forget_after_fork(self) -> None:
        """In a forked child: the parent's lock may be held by a thread that does not exist here."""
        self._changed = threading.Condition()

    def _objection(self, size: int, *, adds_to_disk: bool) -> str | None:
        if self._limit_bytes is not None and self._held_bytes + size > self._limit_bytes:
            return f"spool {self._spool} must hold at most {self._limit_bytes} bytes, got {self._held_bytes} and {size} more"
        if adds_to_disk:
            disk = os.statvfs(self._spool)
            free = disk.f_bavail * disk.f_frsize
            if free - size < self._free_bytes:
                return f"the disk of spool {self._spool} must keep {self._free_bytes} bytes free, got {free} free and {size} more to store"
        return None


_FILE_CLOCK = 5 if sys.platform == "linux" else time.CLOCK_REALTIME  # CLOCK_REALTIME_COARSE
_TICK_SECONDS = 0.001
_MOST_TICKS = 20


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
        InvalidSourceError: Not a readable regular file.
        UnstableSourceError: Size or modification time moved during two copies in a row.
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
                raise InvalidSourceError(
                    f"a source must have the size that its file system says, got {staged.size} bytes of {before.st_size} in {source}. "
                    "Copy it to a regular file first."
                )
    raise UnstableSourceError(
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
        InvalidSourceError: Not a readable regular file; a symlink is refused, since only the link would move.
    """
    if source.is_symlink():
        raise InvalidSourceError(
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
        InvalidSourceError: Not a readable regular file, or on another file system than the spool.
        OSError: The spool could not be written.
    """
    with _opened(source) as descriptor:
        size, crc32 = os.fstat(descriptor).st_size, crc32_of(descriptor)
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise InvalidSourceError(
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
        InvalidSourceError: Not a readable regular file.
    """
    with _opened(source) as descriptor:
        return os.fstat(descriptor).st_size


def _raise(error: OSError) -> None:
    raise InvalidSourceError(f"a folder to submit must be readable, got {error}") from error


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[int]:
    """The source's descriptor. O_NONBLOCK, so that a FIFO without a writer is refused rather than waited for."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        raise InvalidSourceError(
            f"a source must be a readable file, got {source}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise InvalidSourceError(f"a source must be a path without NUL, got {source!r}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidSourceError(f"a source must be a regular file, got {_kind(mode)} {source}")
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


_log = logging.getLogger("uploads")

How = Literal["copy", "move", "link"]

_DIGITS = 12  # As in the name of an entry's folder.
_MOST = 9 * 10 ** (_DIGITS - 1)  # A number beyond was not counted by us.
_TRIES = 100
_TRY_SECONDS = 0.001


class Intake:
    """Gives entries their numbers. Its lock guards the numbers and their order on disk; staging itself is done outside it.

    Args:
        spool: Exists already.
        room: Where bytes are booked.
        store: The identity of the store, for manifests.
    """

    def __init__(self, spool: Spool, room: Room, store: str = "") -> None:
        self._spool = spool
        self._room = room
        self._store = store
        self._numbers = _Numbers(spool.numbers, spool.last_sequence())
        self._lock = threading.Lock()
        self._is_child = False

    def accept(
        self,
        identifier: str,
        source: Path,
        name: str,
        size: int,
        how: How,
        *,
        overwrite: bool,
        after: dict[str, str],
        to_disk: bool,
        register: Callable[[Entry], None],
        announce: Callable[[Entry], None] = lambda _: None,
    ) -> Entry:
        """Makes the file an entry. Either it is pending when this returns, or nothing has changed.

        Args:
            identifier: Of the entry to be.
            source: A regular file.
            name: Its remote name.
            size: Bytes to book; returned where this raises.
            how: To take the bytes.
            overwrite: For the manifest.
            after: For the manifest: remote names by identifier.
            to_disk: Whether to wait for the disk.
            register: Called just before the entry becomes visible; where it raises, nothing has changed.
            announce: Called when it is visible, in the order of numbers: the older of two entries of one name is heard of first.

        Raises:
            SpoolFullError: No room.
            UnstableSourceError: The file kept changing.
            OSError: The spool could not be written.
        """
        self._room.take(size, adds_to_disk=how == "copy")
        try:
            folder = self._spool.new_folder()
            try:
                return self._stage(
                    identifier,
                    source,
                    folder,
                    name,
                    how,
                    overwrite=overwrite,
                    after=after,
                    to_disk=to_disk,
                    register=register,
                    announce=announce,
                )
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        except BaseException:
            self._room.give(size)
            raise

    def forget_after_fork(self) -> None:
        """In a forked child: the parent's lock may be held by a thread that does not exist here."""
        self._lock = threading.Lock()
        self._is_child = True

    def _stage(
        self,
        identifier: str,
        source: Path,
        folder: Path,
        name: str,
        how: How,
        *,
        overwrite: bool,
        after: dict[str, str],
        to_disk: bool,
        register: Callable[[Entry], None],
        announce: Callable[[Entry], None],
    ) -> Entry:
        rename = how == "move" and is_on_same_disk(source, folder)
        # A forked child has no flusher that would compute it later.
        checksum = to_disk or self._is_child
        staged = _take(source, folder / DATA_FILE, how, rename=rename, checksum=checksum)
        with self._lock:
            sequence = self._numbers.next()
            if sequence > MAXIMUM_SEQUENCE:
                raise SpoolFullError(
                    f"spool {self._spool.path} has no number left for an entry. Choose another with spool=…"
                )
            entry = Entry(
                identifier,
                sequence,
                name,
                overwrite,
                staged.size,
                staged.crc32,
                staged.staging,
                # For people: bytes that are not UTF-8 are shown, since no manifest could hold them.
                os.fsencode(source.absolute()).decode(errors="backslashreplace"),
                tuple(after),
                utc_now(),
                boot="" if to_disk or staged.crc32 is not None else self._spool.boot,
                store=self._store,
                after_names=tuple(after.values()),
            )
            # The manifest comes first: should we die right after the rename below, the file is gone from where it was,
            # and the next queue finds an entry that is complete.
            self._spool.write_manifest(folder, entry)
            register(entry)
            with _moved(source, folder / DATA_FILE) if rename else contextlib.nullcontext():
                self._spool.publish(folder, entry, to_disk=to_disk)
            announce(entry)
        if how == "move" and not rename:
            try:
                source.unlink()
            except OSError as error:  # What is pending can no longer be refused.
                _log.warning("%s was taken, but could not be removed: %s", source, error.strerror)
        return entry


class _Numbers:
    """The sequence numbers of a spool, shared with forked children and with later processes through the file `sequence`.

    A lock of the system's, which dies with its process, guards the file. Where the lock or the file cannot be had, numbers
    go on from the last that this process knows: training does not wait for a child that was stopped at the wrong moment.
    Not thread-safe.

    Args:
        path: The file.
        last: The highest number that is known to have been given.
    """

    def __init__(self, path: Path, last: int) -> None:
        self._last = last
        self._descriptor = -1
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
            weakref.finalize(self, os.close, descriptor)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                self._descriptor = descriptor

    def next(self) -> int:
        """One more than any process has given."""
        noted = 0
        has_lock = self._descriptor >= 0 and self._acquire()
        try:
            if has_lock:
                with contextlib.suppress(OSError, ValueError):
                    noted = int(os.pread(self._descriptor, _DIGITS, 0))
            self._last = max(self._last, noted if 0 <= noted < _MOST else 0) + 1
            if has_lock:
                with contextlib.suppress(OSError):
                    os.pwrite(self._descriptor, b"%0*d" % (_DIGITS, self._last), 0)
        finally:
            if has_lock:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return self._last

    def _acquire(self) -> bool:
        for _ in range(_TRIES):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_TRY_SECONDS)
            except OSError:
                return False
            else:
                return True
        return False


def _take(source: Path, target: Path, how: How, *, rename: bool, checksum: bool) -> Staged:
    if rename:
        return measure_to_move(source, checksum=checksum)
    if how == "link":
        return stage_link(source, target)
    return stage_copy(source, target, checksum=checksum)


@contextlib.contextmanager
def _moved(source: Path, target: Path) -> Iterator[None]:
    """The source is at the target; back where it was if the block raises."""
    source.rename(target)
    try:
        yield
    except BaseException:
        target.rename(source)
        raise
