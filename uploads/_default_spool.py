"""Where a spool is when nobody says: a place that a second start of the same training finds again, however many processes it has."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from .backlog import Backlog
from .errors import ManifestUnreadable, SpoolOwned
from .ownership import owner_of
from .spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .upload_queue import UploadQueue

__all__ = ["LeftBehind", "default_spools"]

_log = logging.getLogger("uploads")

_LOOK_SECONDS = 0.5


def default_spools(store_uri: str) -> Iterator[Path]:
    """Spools for this store, numbered from 0, without end. A queue takes the first that no live queue has: what an earlier process left there is uploaded along.

    Under `$UPLOADS_HOME`, else `$XDG_STATE_HOME/uploads`, else `~/.local/state/uploads`.
    """
    home = os.environ.get("UPLOADS_HOME")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    root = Path(home or f"{state}/uploads").expanduser()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", store_uri.partition("?")[0]).strip("-")[:60]
    digest = hashlib.sha256(store_uri.encode()).hexdigest()[:8]
    for number in itertools.count():
        yield root / f"{readable}-{digest}" / str(number)


class LeftBehind:
    """Uploads what processes that are gone left in the other default spools for the same store.

    A thread of its own opens a queue for each, one after the other, and closes it when it is empty; a spool that a live process has is
    left to it. So a training that is started again with fewer ranks leaves nothing behind.

    Args:
        own: The spool of the queue that this belongs to.
        open_queue: Opens a queue on one of the others.
    """

    def __init__(self, own: Path, open_queue: Callable[[Path], UploadQueue]) -> None:
        self._open_queue = open_queue
        self._backlogs = {
            path: found
            for path in sorted(own.parent.iterdir())
            if path != own and path.is_dir() and (found := _backlog_of(path)).remaining
        }
        self._current: tuple[Path, UploadQueue] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads-left-behind", daemon=True)
        if self._backlogs:
            self._thread.start()

    def backlogs(self) -> tuple[Backlog, ...]:
        """What is left in each of them, but for those that a live process has."""
        current = self._current
        found = dict(self._backlogs)  # Entries are replaced, by the thread alone.
        if current is not None:
            found[current[0]] = current[1].backlog()
        return tuple(backlog for backlog in found.values() if not backlog.is_empty)

    def wait(self, timeout_seconds: float) -> bool:
        """Whether nothing more is done within this time."""
        if self._backlogs and not self._stopping.is_set():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def stop(self, timeout_seconds: float) -> None:
        """Puts back what is in flight, and leaves the rest where it is."""
        self._stopping.set()
        if self._backlogs:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        for path in self._backlogs:
            if self._stopping.is_set():
                return
            try:
                self._finish(path)
            except SpoolOwned:
                self._backlogs[path] = Backlog(path, (), ())
            except Exception as error:  # noqa: BLE001  # what is wrong with one must not keep the others waiting
                _log.warning("what an earlier process left in %s is not uploaded: %s", path, error)

    def _finish(self, path: Path) -> None:
        queue = self._open_queue(path)
        self._current = path, queue
        try:
            while queue.unsettled() and not self._stopping.is_set():
                queue.drain(_LOOK_SECONDS)
        finally:
            self._backlogs[path] = queue.close(0.0)
            self._current = None


def _backlog_of(path: Path) -> Backlog:
    """What is in a spool that nobody has; nothing in one that cannot be looked at."""
    spool = Spool(path)
    try:
        if owner_of(spool.queue_lock) is not None:
            return Backlog(path, (), ())
        folders = [*spool.list_inflight(), *spool.list_pending()]
    except OSError:
        return Backlog(path, (), ())
    return Backlog(path, tuple(_name_of(spool, folder) for folder in folders), ())


def _name_of(spool: Spool, folder: str) -> str:
    try:
        entry = spool.entry_of(folder)
    except (ManifestUnreadable, OSError):
        return folder
    return folder if entry is None else entry.remote_name
