"""Has what was staged written to the disk within a second, behind the training loop's back.

With `durability="process"` an entry is safe from the death of the process as soon as `submit` returns, since the page
cache outlives it; this thread makes it safe from a loss of power soon after.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from uploads.disk import exists, fsync_path, sync_disk_of

from .entry import note_crc32, note_flushed
from .spool import fsync_entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .spool import Spool

__all__ = ["Flusher"]

_log = logging.getLogger("uploads")

_BURST = 8


class Flusher:
    """One daemon thread, started with the first entry. The lock guards the list of folders to sync.

    Attributes:
        suspect: How many entries the disk refused to take. The kernel reports such an error once and forgets it, so that
            a second fsync would lie: the entry stays, its bytes are compared with their checksum before they are uploaded.
    """

    def __init__(
        self,
        spool: Spool,
        *,
        delay_seconds: float = 1.0,
        fsync: Callable[[Path], None] = fsync_entry,
        sync_disk: Callable[[Path], None] = sync_disk_of,
    ) -> None:
        self.suspect = 0
        self._spool = spool
        self._delay_seconds = delay_seconds
        self._fsync = fsync
        self._sync_disk = sync_disk
        self._lock = threading.Lock()
        self._folders: list[tuple[str, bool]] = []
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, folder: str, *, unchecked: bool = False) -> None:
        """Has the entry written out within the delay; returns at once.

        Args:
            folder: The entry's.
            unchecked: Whether it has no checksum: one is computed and noted before, and that the disk has its bytes is noted after.
        """
        with self._lock:
            self._folders.append((folder, unchecked))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="uploads-flusher", daemon=True)
                try:
                    thread.start()
                except (
                    RuntimeError
                ) as error:  # The next entry tries again; the kernel writes this one out by itself.
                    _log.warning("the disk is not told to write entries out: %s", error)
                    return
                self._thread = thread
        self._wanted.set()

    def stop(self, timeout_seconds: float) -> None:
        """Writes out what is left, for at most this long."""
        self._stopping.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        elif self._folders:
            self._run()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._stopping.wait(self._delay_seconds / 2)  # Gathers a burst, whose folder is then synced once.
            self._wanted.clear()
            with self._lock:
                added, self._folders = self._folders, []
            try:
                self._write_out(added)
            except OSError as error:  # No descriptor to list the spool, for instance.
                self._doubt(self._spool.path, len(added), error)
            if self._stopping.is_set() and not self._wanted.is_set():
                return

    def _write_out(self, added: list[tuple[str, bool]]) -> None:
        for folder, unchecked in added:
            if unchecked:  # Not while it is being uploaded: then it is being read already.
                note_crc32(self._spool.pending / folder)
        left = self._left(added) if len(added) > _BURST else added
        if len(left) > _BURST:
            self._flush_disk(left)
        else:
            for folder, unchecked in left:
                self._flush(folder, unchecked=unchecked)
            with contextlib.suppress(OSError):
                fsync_path(self._spool.pending)

    def _left(self, added: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Those that still have bytes here: to have the whole disk written out for what is in the store already slows the rest down."""
        places = (self._spool.pending, self._spool.inflight, self._spool.pending)  # As in _flush.
        failed = {folder for folders in self._spool.list_failed().values() for folder in folders}
        return [
            one for one in added if any(exists(f"{place}/{one[0]}") for place in places) or one[0] in failed
        ]

    def _flush(self, folder: str, *, unchecked: bool) -> None:
        # In both places, and in the first again: between two looks it may have been taken for uploading, or returned.
        for place in (self._spool.pending, self._spool.inflight, self._spool.pending):
            try:
                self._fsync(place / folder)
                if unchecked:
                    note_flushed(place / folder)
            except FileNotFoundError:
                continue  # In the end it was uploaded meanwhile.
            except OSError as error:
                self._doubt(place / folder, 1, error)
            return

    def _flush_disk(self, folders: list[tuple[str, bool]]) -> None:
        """Many entries at once: one pass over the disk instead of three waits for its journal per entry."""
        try:
            self._sync_disk(self._spool.pending)
        except OSError as error:
            self._doubt(self._spool.path, len(folders), error)
            return
        for folder, unchecked in folders:
            if unchecked:
                self._flush(folder, unchecked=True)

    def _doubt(self, place: Path, count: int, error: OSError) -> None:
        self.suspect += count
        _log.error(
            "the disk must keep %s, got %s. Its bytes are compared with their checksum before they are uploaded; a loss of power may lose them.",
            place,
            error.strerror,
        )
