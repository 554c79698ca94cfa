"""Writes staged entries to the disk within about a second, in a thread of its own.

With `durability="process"` an entry survives the death of the process as soon as `submit` returns, because
the page cache does. This thread makes it survive a power loss soon after.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import attrs

from uploads.disk import Wakeup, fsync_path, sync_disk_of
from uploads.messages import log_error, log_warning

from .entry import note_crc32, note_flushed
from .spool import Spool, fsync_entry

__all__ = ["Flusher"]


_BURST = 8


@attrs.define(eq=False, slots=False, repr=False)
class Flusher:
    """One daemon thread, started with the first entry. The lock guards the list of folders to sync.

    Args:
        spool: The spool.
        delay_seconds: The time within which an entry is synced.
        fsync: Syncs an entry's folder.
        sync_disk: Syncs the whole file system of a path.

    Attributes:
        suspect: Number of entries that could not be synced. The kernel reports such an error once, so a
            second fsync would succeed wrongly. The entry stays, and its bytes are compared with their
            checksum before the upload.
    """

    _spool: Spool
    _delay_seconds: float = attrs.field(default=1.0, kw_only=True)
    _fsync: Callable[[Path], None] = attrs.field(default=fsync_entry, kw_only=True)
    _sync_disk: Callable[[Path], None] = attrs.field(default=sync_disk_of, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.suspect = 0
        # A signal handler may submit a file while this thread holds it.
        self._lock = threading.RLock()
        self._folders: list[tuple[str, bool]] = []
        self._wanted = Wakeup()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, folder: str, *, unchecked: bool = False) -> None:
        """Schedules an entry to be synced within the delay; returns at once.

        Args:
            folder: The entry's.
            unchecked: Whether it has no checksum: one is computed before, and a note says afterwards that the
                data is synced.
        """
        with self._lock:
            self._folders.append((folder, unchecked))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="uploads-flusher", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    # The next entry tries again; the kernel eventually syncs this one.
                    log_warning("cannot start the thread that syncs staged files: %s", error)
                    return
                self._thread = thread
        self._wanted.set()

    def stop(self, timeout_seconds: float) -> None:
        """Syncs what is left and stops the thread; waits for at most the timeout."""
        self._stopping.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        elif self._folders:
            self._run()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._stopping.wait(self._delay_seconds / 2)  # Gathers a burst, which is synced together.
            self._wanted.clear()
            with self._lock:
                added, self._folders = self._folders, []
            try:
                self._sync(added)
            except OSError as error:  # No descriptor to list the spool, for instance.
                self._report(self._spool.path, len(added), error)
            if self._stopping.is_set() and not self._wanted.is_set():
                return

    def _sync(self, added: list[tuple[str, bool]]) -> None:
        for folder, unchecked in added:
            if unchecked:  # Not for an upload in flight, which reads the file itself.
                note_crc32(self._spool.pending / folder)
        if len(added) > _BURST:  # Syncing for entries that have left the spool slows the rest.
            added = [one for one in added if self._spool.place_of(one[0]) is not None]
        if len(added) > _BURST:
            self._sync_all(added)
        else:
            for folder, unchecked in added:
                self._sync_entry(folder, unchecked=unchecked)
            with contextlib.suppress(OSError):
                fsync_path(self._spool.pending)

    def _sync_entry(self, folder: str, *, unchecked: bool) -> None:
        # Both places, and the first again: between two looks the entry may have been claimed or released.
        for place in (self._spool.pending, self._spool.inflight, self._spool.pending):
            try:
                self._fsync(place / folder)
                if unchecked:
                    note_flushed(place / folder)
            except FileNotFoundError:
                continue  # After the last place: it was uploaded meanwhile.
            except OSError as error:
                self._report(place / folder, 1, error)
            return

    def _sync_all(self, folders: list[tuple[str, bool]]) -> None:
        """Syncs many entries with one pass over the disk instead of three waits for its journal per entry."""
        try:
            self._sync_disk(self._spool.pending)
        except OSError as error:
            self._report(self._spool.path, len(folders), error)
            return
        for folder, unchecked in folders:
            if unchecked:
                self._sync_entry(folder, unchecked=True)

    def _report(self, place: Path, count: int, error: OSError) -> None:
        self.suspect += count
        log_error(
            "cannot sync %s: %s. Its bytes are compared with their checksum before the upload; "
            "a power loss may lose them.",
            place,
            error.strerror,
        )
