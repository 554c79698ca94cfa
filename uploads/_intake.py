"""From a path to a pending entry: books room, stages, publishes. Runs in the caller's thread."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import threading
import time
import weakref
from typing import TYPE_CHECKING, Literal

from ._notes import utc_now
from .entry import DATA_FILE, MAXIMUM_SEQUENCE, Entry
from .errors import SpoolFull
from .staging import Staged, is_on_same_disk, measure_to_move, stage_copy, stage_link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ._room import Room
    from .spool import Spool

__all__ = ["How", "Intake"]

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
            SpoolFull: No room.
            UnstableSource: The file kept changing.
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
                raise SpoolFull(
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
