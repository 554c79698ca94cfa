"""Takes a file into the spool, so that the caller may rewrite, rename or delete it from then on.

Runs in the caller's thread. A reflink or a link takes the same short time for any size; a copy takes about
as long as `cp`. The flusher checksums a file of 1 MiB or more later, unless the caller waits for the disk.

A copy shows one state of the file, as far as that can be detected: size, mtime and ctime are the same before
and after it. The kernel takes both times from a clock that ticks every 1 to 10 ms, so a write in the tick in
which a copy begins would not show. A file that was written in the present tick is therefore copied in the
next. A file below 1 MiB is read again and compared. Two kinds of changes are not detected: writes to a large
file through a memory map, which need not change its times, and writes on a file system with coarser times, or
times of another machine's clock.
"""

import contextlib
import errno
import itertools
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import attrs

from uploads.disk import (
    READ_BYTES,
    closing,
    copy_all,
    crc32_of,
    is_open_file,
    link_open,
    open_regular,
    reflink,
    remove_if,
)
from uploads.errors import InvalidSourceError, SpoolFullError, UnstableSourceError
from uploads.messages import log_warning
from uploads.names import MAX_NAME_BYTES

from .entry import DATA_FILE, MAX_SEQUENCE, Entry, utc_now
from .spool import Spool

__all__ = [
    "DiskQuota",
    "How",
    "StagedData",
    "Stager",
    "Submission",
    "files_of",
    "opened",
    "size_of",
    "stage_copy",
    "stage_link",
]


How = Literal["copy", "move", "link"]

_QUOTA_CHECK_SECONDS = 1.0  # Other processes use the disk too.
_FILE_CLOCK = 5 if sys.platform == "linux" else time.CLOCK_REALTIME  # CLOCK_REALTIME_COARSE
_TICK_SECONDS = 0.001
_MAX_TICKS = 20
_DIGITS = 12  # As in the name of an entry's folder.
_MAX_NOTED = 9 * 10 ** (_DIGITS - 1)  # We never write a larger number.
_MAX_ITEMS = 1_000_000  # A folder may show one file under any number of names, by symlinks.
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}


@attrs.frozen
class Submission:
    """A file to stage.

    Attributes:
        source: A regular file.
        name: Its remote name.
        how: How to take the bytes.
        overwrite: For the manifest.
        after: For the manifest: remote names by identifier.
        to_disk: Whether to wait for the disk.
        crc32: Of the bytes of a file to move or link, if the caller knows it; saves reading the file.
        unless: For the manifest.
        instead: For the manifest.
    """

    source: Path
    name: str
    how: How = "copy"
    overwrite: bool = False
    after: dict[str, str] = attrs.field(factory=dict)
    to_disk: bool = False
    crc32: int | None = None
    unless: str = ""
    instead: str = ""


@attrs.frozen
class StagedData:
    """Staged data: size in bytes, CRC-32 if the bytes were read, and how they were taken."""

    size: int
    crc32: int | None
    staging: str


@attrs.define(eq=False, slots=False, repr=False)
class DiskQuota:
    """Accounts for the bytes in a spool. The condition's lock guards the account.

    Args:
        spool: The spool's folder, on the disk whose free space counts.
        spool_bytes: The limit; None for none.
        free_bytes: Bytes that must stay free on the disk.
        wait_seconds: How long `reserve` waits for room.
        clock: Seconds, monotonic.
    """

    _spool: Path
    _spool_bytes: int | None = attrs.field(kw_only=True)
    _free_bytes: int = attrs.field(kw_only=True)
    _wait_seconds: float = attrs.field(kw_only=True)
    _clock: Callable[[], float] = attrs.field(kw_only=True)
    _held_bytes: int = attrs.field(default=0, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)

    def reserve(self, size: int, *, adds_to_disk: bool) -> None:
        """Reserves bytes, waiting for room.

        Args:
            size: The number of bytes.
            adds_to_disk: Whether they are copied, and not renamed or linked.

        Raises:
            SpoolFullError: There was no room within `wait_seconds`.
        """
        deadline = self._clock() + self._wait_seconds
        with self._changed:
            while (problem := self._problem(size, adds_to_disk=adds_to_disk)) is not None:
                left = deadline - self._clock()
                if left <= 0:
                    raise SpoolFullError(
                        f"{problem}. Make room, raise the limit, "
                        "or wait longer with Timeouts(full_wait_seconds=…)"
                    )
                self._changed.wait(min(left, _QUOTA_CHECK_SECONDS))
            self._held_bytes += size

    def has_room(self, size: int, *, adds_to_disk: bool) -> bool:
        """Returns whether `reserve` would succeed now."""
        with self._changed:
            return self._problem(size, adds_to_disk=adds_to_disk) is None

    def room_bytes(self) -> int:
        """Returns how many more bytes the limit and the disk allow."""
        disk = os.statvfs(self._spool)
        on_disk = disk.f_bavail * disk.f_frsize - self._free_bytes
        with self._changed:
            limit = on_disk if self._spool_bytes is None else self._spool_bytes - self._held_bytes
        return max(0, min(limit, on_disk))

    @contextlib.contextmanager
    def lent(self, size: int) -> Iterator[None]:
        """Leaves bytes out of the account while a file that replaces them is staged."""
        self.release(size)
        try:
            yield
        finally:
            self.add_existing(size)

    def add_existing(self, size: int) -> None:
        """Counts bytes that earlier processes left, even above the limit."""
        with self._changed:
            self._held_bytes += size

    def release(self, size: int) -> None:
        """Releases bytes that have left the spool."""
        with self._changed:
            self._held_bytes -= size
            self._changed.notify_all()

    def _problem(self, size: int, *, adds_to_disk: bool) -> str | None:
        if self._spool_bytes is not None and self._held_bytes + size > self._spool_bytes:
            return (
                f"spool {self._spool} must hold at most {self._spool_bytes} bytes, "
                f"got {self._held_bytes} and {size} more"
            )
        if adds_to_disk:
            disk = os.statvfs(self._spool)
            free = disk.f_bavail * disk.f_frsize
            if free - size < self._free_bytes:
                return (
                    f"the disk of spool {self._spool} must keep {self._free_bytes} bytes free, "
                    f"got {free} free and {size} more to store"
                )
        return None


@attrs.define(eq=False, slots=False, repr=False)
class Stager:
    """Makes files entries of a spool. The lock guards numbers and order; data is copied outside it.

    Args:
        spool: The spool, which exists.
        quota: Where bytes are reserved.
        store: The identity of the store, for manifests.
    """

    _spool: Spool
    _quota: DiskQuota
    _store: str = ""

    def __attrs_post_init__(self) -> None:
        self._numbers = _SequenceCounter(self._spool.sequence_file, self._spool.last_sequence())
        # A signal handler may submit a file while this thread holds it.
        self._lock = threading.RLock()

    def stage(
        self,
        identifier: str,
        submission: Submission,
        size: int,
        *,
        register: Callable[[Entry], None],
        announce: Callable[[Entry], None] = lambda _: None,
    ) -> Entry:
        """Makes a file an entry, which is pending when this returns; if it raises, nothing has changed.

        Args:
            identifier: Identifier of the new entry.
            submission: The file, and values for its manifest.
            size: Bytes to reserve; released if this raises.
            register: Called just before the entry becomes visible; if it raises, nothing has changed.
            announce: Called when the entry is visible, in the order of numbers, so that older versions of a
                name come first.

        Raises:
            SpoolFullError: No room.
            UnstableSourceError: The file kept changing.
            OSError: The spool could not be written.
        """
        with (
            opened(submission.source, is_moved=submission.how == "move") as descriptor,
            self._spool.staging() as folder,
        ):
            before = os.fstat(descriptor)
            linked = _linked(submission, descriptor, folder / DATA_FILE)
            self._quota.reserve(size, adds_to_disk=linked is None)
            try:
                staged = linked or stage_copy(
                    submission.source, descriptor, folder / DATA_FILE, checksum=submission.to_disk
                )
                if staged.size != size:  # It was changed or replaced since it was measured.
                    self._quota.release(size - staged.size)
                    size = staged.size
                with self._lock:
                    entry = self._entry(identifier, submission, staged)
                    self._spool.write_manifest(folder, entry)
                    register(entry)
                    self._spool.publish(folder, entry, to_disk=submission.to_disk)
                    # It is pending and can no longer be refused.
                    if submission.how == "move":
                        _remove_moved(submission.source, descriptor, before)
                    announce(entry)
            except BaseException:
                self._quota.release(size)
                raise
        return entry

    def _entry(self, identifier: str, submission: Submission, staged: StagedData) -> Entry:
        return Entry(
            identifier,
            self._next_sequence(),
            submission.name,
            submission.overwrite,
            staged.size,
            staged.crc32,
            staged.staging,
            # For people: bytes that aren't UTF-8 are escaped for the manifest.
            os.fsencode(submission.source.absolute()).decode(errors="backslashreplace"),
            submission.after,
            utc_now(),
            boot="" if staged.crc32 is not None else self._spool.boot,
            store=self._store,
            unless=submission.unless,
            instead=submission.instead,
        )

    def _next_sequence(self) -> int:
        sequence = self._numbers.next()
        if sequence > MAX_SEQUENCE:
            raise SpoolFullError(
                f"spool {self._spool.path} has no sequence number left. Choose another with spool=…"
            )
        return sequence


class _SequenceCounter:
    """The sequence numbers of a spool. The last one is noted in a file, for later processes.

    Not thread-safe. If the file can't be used, numbers continue after the highest one in the spool.

    Args:
        path: The file.
        last: The highest number in the spool.
    """

    def __init__(self, path: Path, last: int) -> None:
        noted, self._descriptor = 0, -1
        with contextlib.suppress(OSError, ValueError):
            self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
            weakref.finalize(self, os.close, self._descriptor)
            noted = int(os.pread(self._descriptor, _DIGITS, 0))
        # Drawn in one step, so that an interrupting signal handler gets another number.
        self._numbers = itertools.count(max(last, noted if noted < _MAX_NOTED else 0) + 1)

    def next(self) -> int:
        """Returns a number above all earlier ones."""
        number = next(self._numbers)
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, b"%0*d" % (_DIGITS, number), 0)
        return number


def _linked(submission: Submission, descriptor: int, target: Path) -> StagedData | None:
    """Links an open file to the target; returns None if it is to be copied.

    A file to move is linked too, and loses its old name once its entry is pending. Where files can't be
    linked, they are copied: on FAT, without `/proc`, and a file to move from another file system.
    """
    if submission.how == "copy":
        return None
    try:
        return stage_link(
            submission.source,
            descriptor,
            target,
            crc32=submission.crc32,
            checksum=submission.to_disk or submission.how == "link",
            staging="linked" if submission.how == "link" else "moved",
        )
    except InvalidSourceError:
        if submission.how == "link":
            raise
    except OSError:
        if os.path.lexists(target):  # A copy to a target that is a link already would overwrite the source.
            raise
    return None


def stage_copy(source: Path, descriptor: int, target: Path, *, checksum: bool = False) -> StagedData:
    """Reflinks a file, or else copies it; the file must not change meanwhile.

    Args:
        source: The caller's file, for messages.
        descriptor: The same file, from `opened`.
        target: In the spool.
        checksum: Whether to read a large copy once more for its checksum.

    Raises:
        InvalidSourceError: Its file system does not know its size.
        UnstableSourceError: Size or modification time changed during two copies in a row.
        OSError: The spool could not be written.
    """
    for _ in range(2):
        before = _wait_for_tick(descriptor)
        if before is None:
            continue
        staged = _copy_once(descriptor, target, checksum=checksum)
        if _unchanged(before, os.fstat(descriptor)) and _has_copied_bytes(descriptor, staged):
            if staged.size == before.st_size:
                return staged
            raise InvalidSourceError(
                f"{source} has {staged.size} bytes, but its file system reports {before.st_size}. "
                "Copy it to a regular file first."
            )
    raise UnstableSourceError(
        f"{source} changed while it was copied, twice. Submit it when its writer has closed it."
    )


def stage_link(
    source: Path,
    descriptor: int,
    target: Path,
    *,
    crc32: int | None = None,
    checksum: bool = True,
    staging: str = "linked",
) -> StagedData:
    """Hard-links an open file.

    A file that replaces the source meanwhile changes nothing. An in-place rewrite of the source changes the
    link too; the upload detects it.

    Args:
        source: The caller's file, for messages.
        descriptor: The same file, from `opened`.
        target: In the spool.
        crc32: Its checksum, if the caller knows it, which saves reading the file.
        checksum: Whether to read a file of 1 MiB or more for its checksum.
        staging: "linked", or "moved" if it will lose its old name.

    Raises:
        InvalidSourceError: It is on another file system than the spool.
        OSError: The spool could not be written, or the file system has no hard links.
    """
    try:
        link_open(descriptor, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise InvalidSourceError(
            f"a source to link must be on the spool's file system, got {source}. Submit it without link=True."
        ) from error
    size = os.fstat(descriptor).st_size
    if crc32 is None and (checksum or size < READ_BYTES):
        crc32 = crc32_of(descriptor)
    return StagedData(size, crc32, staging)


def files_of(folder: Path, *, is_moved: bool = False) -> list[tuple[Path, str]]:
    """Returns each file under a folder with its relative name, sorted; symlinks are followed within it.

    Args:
        folder: May be a symlink itself.
        is_moved: Whether the files will be moved, which refuses symlinks, because only the link would move.

    Raises:
        InvalidSourceError: A folder cannot be read, or is in itself by a symlink; a symlink leads nowhere or
            out of the folder, or is to be moved; a name has more than `MAX_NAME_BYTES`, or there are more
            than a million files and folders.
        OSError: No descriptor is left.
    """
    root = os.path.realpath(folder)
    found: list[tuple[Path, str]] = []
    count = 0
    # Each folder to list has its path, its relative name, and the identities of those above it.
    waiting: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(str(folder), "", ())]
    while waiting:
        path, prefix, above = waiting.pop()
        identity, items = _list(path)
        if identity in above:
            raise InvalidSourceError(
                f"a folder to submit must not be in itself, got {folder / prefix}, where a symlink leads to "
                "a folder above. Remove the link."
            )
        for item in items:
            name = prefix + item.name
            count += 1
            if count > _MAX_ITEMS or len(os.fsencode(name)) > MAX_NAME_BYTES:
                raise InvalidSourceError(
                    f"a folder to submit must have at most {_MAX_ITEMS} files and folders, with names of at "
                    f"most {MAX_NAME_BYTES} bytes, got more at {folder / name[:100]}…"
                )
            is_link = item.is_symlink()
            place = _target_within(root, item.path, is_moved=is_moved) if is_link else item.path
            if os.path.isdir(place) if is_link else item.is_dir():  # noqa: PTH112  # see `_list`
                waiting.append((place, f"{name}/", (*above, identity)))
            else:
                found.append((Path(place), name))
    return sorted(found, key=lambda one: one[1])


def _list(folder: str) -> tuple[tuple[int, int], list[os.DirEntry[str]]]:
    """Returns the identity of a folder, and what is in it."""
    try:
        about = os.stat(folder)  # noqa: PTH116  # strings, as below: ten times as fast as Path
        with os.scandir(folder) as listing:
            return (about.st_dev, about.st_ino), list(listing)
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            raise
        raise InvalidSourceError(f"a folder to submit must be readable, got {error}") from error


def _target_within(root: str, link: str, *, is_moved: bool) -> str:
    """Returns the target of a symlink in a folder, which must be in that folder too."""
    if is_moved:
        raise InvalidSourceError(f"a folder to move must have no symlinks, got {link}. Submit it by copy.")
    try:
        target = os.path.realpath(link, strict=True)
    except OSError as error:
        raise InvalidSourceError(
            f"a symlink in a folder to submit must lead to a file or folder, got {link}: {error.strerror}"
        ) from error
    if target != root and not target.startswith(root.rstrip("/") + "/"):
        raise InvalidSourceError(
            f"a symlink in a folder to submit must lead to something in that folder, got {link}, which leads "
            f"to {target}. Submit {target} by itself, under a name in the same folder."
        )
    return target


def size_of(source: Path) -> int:
    """Returns the source's size in bytes.

    Raises:
        InvalidSourceError: Not a readable regular file.
    """
    with opened(source) as descriptor:
        return os.fstat(descriptor).st_size


@contextlib.contextmanager
def opened(source: Path, *, is_moved: bool = False) -> Iterator[int]:
    """Yields the source's descriptor.

    Raises:
        InvalidSourceError: Not a readable regular file; or a symlink to move, because only the link would
            move.
        OSError: No descriptor is left.
    """
    try:
        descriptor = open_regular(source, follow_symlink=not is_moved)
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            raise
        if error.errno == errno.ELOOP and source.is_symlink():
            raise InvalidSourceError(
                f"a source to move must be a regular file, got the symlink {source}. Submit its target."
            ) from error
        raise InvalidSourceError(
            f"a source must be a readable regular file, got {source}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise InvalidSourceError(f"a source must be a path without NUL, got {source!r}") from error
    with closing(descriptor):
        yield descriptor


def _wait_for_tick(descriptor: int) -> os.stat_result | None:
    """Returns the file's state once a later write would change its ctime; None while it is being written.

    Waits a few milliseconds if the file was just written, and up to 20 if its clock is ahead of ours.
    """
    first = None
    for _ in range(_MAX_TICKS):
        # Read the clock first: a later write has this time or a later one.
        now = time.clock_gettime_ns(_FILE_CLOCK)
        about = _stat_between_writes(descriptor)
        if about.st_ctime_ns < now:
            return about
        first = first or about
        time.sleep(_TICK_SECONDS)
    return about if first is not None and _unchanged(first, about) else None


def _stat_between_writes(descriptor: int) -> os.stat_result:
    """Returns the file's state while no write(2) is under way, because a write has the time of its beginning.

    On ext4, seeking a hole waits for a writer, but reading doesn't. Nobody uses the descriptor's position.
    """
    with contextlib.suppress(OSError):
        os.lseek(descriptor, 0, os.SEEK_HOLE)
    return os.fstat(descriptor)


def _copy_once(descriptor: int, target: Path, *, checksum: bool) -> StagedData:
    with closing(open_regular(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)) as written:
        # A folder store gives the object the source's permissions; the drain must be able to read the copy.
        os.fchmod(written, stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o777 | stat.S_IRUSR)
        if reflink(descriptor, written):
            size = os.fstat(written).st_size
            return StagedData(size, crc32_of(written) if checksum or size < READ_BYTES else None, "reflinked")
        size, crc32 = copy_all(descriptor, written)
        return StagedData(size, crc32_of(written) if checksum and crc32 is None else crc32, "copied")


def _unchanged(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )


def _has_copied_bytes(descriptor: int, staged: StagedData) -> bool:
    """Returns whether a small source still has the copied bytes; a memory map may not change times."""
    return (
        staged.staging != "copied"
        or staged.crc32 is None
        or staged.size >= READ_BYTES
        or crc32_of(descriptor) == staged.crc32
    )


def _same_bytes(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def _remove_moved(source: Path, descriptor: int, before: os.stat_result) -> None:
    """Removes the old name of a moved file if the file is the same, with the same bytes; or logs why not."""
    try:
        is_removed = _same_bytes(before, os.fstat(descriptor)) and remove_if(source, is_open_file(descriptor))
    except OSError as error:
        log_warning("%s was taken, but could not be removed: %s", source, error.strerror)
    else:
        if not is_removed:
            log_warning("%s was taken, and not removed: it was changed or replaced since", source)
