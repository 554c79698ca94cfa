"""What a queue has taken in and not heard the end of: who waits for it, by which name, and how it ended."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import TYPE_CHECKING

import attrs

from .errors import ManifestError
from .handle import Outcome, UploadState
from .names import name_key
from .spool.entry import identifier_of, key_of, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .handle import UploadHandle
    from .spool.spool import Spool

__all__ = ["Ledger"]


class Ledger:
    """Entries from acceptance to their end. Every method may be called from any thread; the lock guards everything.

    Kept of an entry are some fifty bytes: its folder's name, packed, and that its remote name is on its way.
    The remote name itself is looked up in the spool when somebody asks, and a handle is known only as long as somebody else holds it.

    Args:
        spool: Where what nobody told us is looked up.
        free: Called with the bytes of each entry that has left the spool, and not for `failed/`.
    """

    def __init__(self, spool: Spool, free: Callable[[int], None]) -> None:
        self._spool = spool
        self._free = free
        self._changed = threading.Condition()
        self._folders: set[str] = set()
        self._keys: dict[str, int] = {}  # Key of a remote name → number of its entries.
        self._handles: weakref.WeakValueDictionary[str, UploadHandle] = weakref.WeakValueDictionary()
        self._on_the_way_in = (
            ""  # The entry that is opened and not yet in the spool; they come one at a time.
        )
        self._failures: list[Outcome] = []
        self._missing: set[str] = set()
        self._adopted: set[str] = set()  # Of other processes that submit here; nothing is booked for them.

    def inherit(self, folders: Iterable[str]) -> None:
        """Takes in what earlier processes left."""
        with self._changed:
            for folder in sorted(folders):
                self._add(folder)

    def open(self, folder: str, handle: UploadHandle) -> None:
        """Takes an entry in, before anybody can tell us that it has ended."""
        with self._changed:
            self._add(folder)
            self._handles[folder] = handle
            self._on_the_way_in = folder

    def adopt(self) -> list[str]:
        """Takes in what other processes, such as a forked child, submitted to the spool; returns their folders.

        Raises:
            OSError: The spool cannot be listed.
        """
        adopted = []
        for folder in itertools.chain(self._spool.pending_folders(), self._spool.inflight_folders()):
            with self._changed:
                if folder in self._folders:
                    continue
                self._add(folder)
                self._adopted.add(folder)
            # Only now: what has ended since it was listed would never be heard of.
            if self._spool.state_of(folder) in {UploadState.PENDING, UploadState.INFLIGHT}:
                adopted.append(folder)
            else:
                self.strike(folder)
        return adopted

    def knows(self, folder: str) -> bool:
        """Whether the entry is on its way."""
        with self._changed:
            return folder in self._folders

    def confirm(self, folder: str) -> None:
        """The entry that was opened is in the spool now."""
        with self._changed:
            if self._on_the_way_in == folder:
                self._on_the_way_in = ""

    def strike(self, folder: str) -> None:
        """Takes an entry out that never came to be."""
        with self._changed:
            self._remove(folder)
            if not self._folders:
                self._changed.notify_all()

    def is_on_its_way(self, name: str) -> bool:
        """Whether an entry of this remote name has not ended."""
        with self._changed:
            return name_key(name) in self._keys

    def close(self, folder: str, outcome: Outcome) -> None:
        """The end of an entry; the second time it is told nothing happens."""
        with self._changed:
            handle = self._handles.get(folder)
            is_booked = folder not in self._adopted
            if not self._remove(folder):
                return
            if outcome.state is UploadState.LOST and handle is not None:
                # Its manifest, and so its name, is lost as well.
                outcome = attrs.evolve(outcome, remote_name=handle.remote_name)
            if outcome.state.is_failure:
                self._failures.append(outcome)
            elif is_booked:
                self._free(outcome.size)
            if not self._folders:
                self._changed.notify_all()
            # Before the lock is given back: whoever waited until nothing was left finds that every handle knows its end.
            if handle is not None:
                handle._settle(outcome)  # noqa: SLF001  # the queue is the other half of a handle

    def add_failure(self, outcome: Outcome) -> None:
        """A file that never became an entry."""
        with self._changed:
            self._failures.append(outcome)

    def wait_empty(self, timeout_seconds: float) -> bool:
        """Whether everything has ended within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._folders, timeout_seconds)

    def count(self) -> int:
        """How many have not ended."""
        with self._changed:
            return len(self._folders)

    def state_of(self, folder: str) -> UploadState | None:
        """How an entry stands in the spool now; None where it has just left it."""
        with self._changed:
            is_known = folder in self._folders
        return self._spool.state_of(folder) if is_known else None

    def remaining(self) -> tuple[str, ...]:
        """The remote names of what has not ended, in the order of submission."""
        with self._changed:
            folders = sorted(self._folders)
        return tuple(self._name_of(folder) for folder in folders)

    def failures(self) -> tuple[Outcome, ...]:
        """What ended badly, in the order in which it was heard."""
        with self._changed:
            return tuple(self._failures)

    def look_up(self) -> None:
        """Finds in the spool what nobody lived to tell: gone twice in a row without a trace means deleted."""
        with self._changed:
            unseen = self._folders - {self._on_the_way_in}
        if not unseen:
            return
        unseen.difference_update(itertools.chain(*self._spool.list_unfinished()))
        gone = {identifier_of(folder): folder for folder in unseen}
        if not gone:
            return
        for state, failed in self._spool.list_failed().items():
            for folder in set(failed) & set(gone.values()):
                noted = reason_of(self._spool.failed / state / folder)
                self.close(folder, noted or Outcome(identifier_of(folder), folder, state))
        for outcome in self._spool.delivered(gone):
            if outcome.identifier in gone:
                self.close(gone[outcome.identifier], outcome)
        with self._changed:
            missing = {folder for folder in gone.values() if folder in self._folders}
        # It may have changed its place while the places were listed one after the other, or its line is still to be written.
        missing = {folder for folder in missing if self._spool.place_of(folder) is None}
        with self._changed:
            lost, self._missing = missing & self._missing, missing
        reason = f"its folder was deleted from {self._spool.path}"
        for folder in sorted(lost):
            self.close(folder, Outcome(identifier_of(folder), folder, UploadState.LOST, reason=reason))

    def forget_after_fork(self) -> None:
        """In a forked child: the parent's lock may be held by a thread that does not exist here."""
        self._changed = threading.Condition()

    def _add(self, folder: str) -> None:
        if folder not in self._folders:
            self._folders.add(folder)
            key = key_of(folder)
            self._keys[key] = self._keys.get(key, 0) + 1

    def _remove(self, folder: str) -> bool:
        """Forgets an entry; returns whether it was known."""
        self._handles.pop(folder, None)
        self._adopted.discard(folder)
        if folder not in self._folders:
            return False
        self._folders.remove(folder)
        key = key_of(folder)
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
        return True

    def _name_of(self, folder: str) -> str:
        handle = self._handles.get(folder)
        if handle is not None:
            return handle.remote_name
        with contextlib.suppress(ManifestError, OSError):
            entry = self._spool.entry_of(folder)
            if entry is not None:
                return entry.remote_name
        return folder
