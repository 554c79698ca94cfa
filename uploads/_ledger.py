"""What a queue has taken in and not heard the end of: who waits for it, by which name, and how it ended."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING

import attrs

from .entry import identifier_of, key_of, number_of
from .errors import ManifestUnreadable
from .names import name_key
from .outcome import Outcome, UploadState

if TYPE_CHECKING:
    from collections.abc import Callable

    from .handle import UploadHandle
    from .spool import Spool

__all__ = ["Ledger"]


class Ledger:
    """Entries from acceptance to their end. Every method may be called from any thread; the lock guards everything.

    Kept of an entry are the name of its folder and two numbers; its remote name is looked up in the spool when somebody asks.

    Args:
        spool: Where what nobody told us is looked up.
        free: Called with the bytes of each entry that has left the spool.
    """

    def __init__(self, spool: Spool, free: Callable[[int], None]) -> None:
        self._spool = spool
        self._free = free
        self._changed = threading.Condition()
        self._folders: dict[int, str] = {}  # By identity.
        self._sizes: dict[int, int] = {}  # What was booked; what an earlier process left was not.
        self._handles: weakref.WeakValueDictionary[int, UploadHandle] = weakref.WeakValueDictionary()
        self._keys: Counter[int] = Counter()
        self._failures: list[Outcome] = []
        self._missing: set[str] = set()

    def open(self, folder: str, handle: UploadHandle | None = None, size: int = 0) -> None:
        """Takes an entry in, before anybody can tell us that it has ended."""
        with self._changed:
            number = number_of(identifier_of(folder))
            self._folders[number] = folder
            self._keys[number_of(key_of(folder))] += 1
            if size:
                self._sizes[number] = size
            if handle is not None:
                self._handles[number] = handle

    def strike(self, identifier: str) -> None:
        """Takes an entry out that never came to be."""
        with self._changed:
            self._remove(number_of(identifier))

    def is_on_its_way(self, name: str) -> bool:
        """Whether an entry of this remote name has not ended."""
        with self._changed:
            return self._keys[number_of(name_key(name))] > 0

    def close(self, outcome: Outcome) -> None:
        """The end of an entry; the second time it is told nothing happens."""
        with self._changed:
            number = number_of(outcome.identifier)
            if number not in self._folders:
                return
            handle = self._handles.get(number)
            size = self._remove(number)
            if outcome.state is UploadState.LOST and handle is not None:
                # Its manifest, and so its name, is lost as well.
                outcome = attrs.evolve(outcome, remote_name=handle.remote_name)
            if outcome.state.is_failure:
                self._failures.append(outcome)
            else:
                self._free(size)
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

    def state_of(self, identifier: str) -> UploadState | None:
        """How an entry stands in the spool now; None where it has just left it."""
        with self._changed:
            folder = self._folders.get(number_of(identifier))
        return None if folder is None else self._spool.state_of(folder)

    def remaining(self) -> tuple[str, ...]:
        """The remote names of what has not ended, in the order of submission."""
        with self._changed:
            folders = sorted(self._folders.values())
        return tuple(self._name_of(folder) for folder in folders)

    def failures(self) -> tuple[Outcome, ...]:
        """What ended badly, in the order in which it was heard."""
        with self._changed:
            return tuple(self._failures)

    def look_up(self) -> None:
        """Finds in the spool what a worker did not live to tell: gone twice in a row without a trace means deleted."""
        with self._changed:
            folders = {identifier_of(folder): folder for folder in self._folders.values()}
        waiting = {*self._spool.list_pending(), *self._spool.list_inflight()}
        gone = {identifier: folder for identifier, folder in folders.items() if folder not in waiting}
        if not gone:
            return
        for state, failed in self._spool.list_failed().items():
            for folder in set(failed) & set(gone.values()):
                noted = self._spool.reason_of(self._spool.failed / state / folder)
                self.close(noted or Outcome(identifier_of(folder), folder, state))
        for outcome in self._spool.delivered():
            if outcome.identifier in gone:
                self.close(outcome)
        with self._changed:
            missing = {identifier for identifier in gone if number_of(identifier) in self._folders}
            lost, self._missing = missing & self._missing, missing
        reason = f"its folder was deleted from {self._spool.path}"
        for identifier in lost:
            self.close(Outcome(identifier, gone[identifier], UploadState.LOST, reason=reason))

    def forget_after_fork(self) -> None:
        """In a forked child: the parent's lock may be held by a thread that does not exist here."""
        self._changed = threading.Condition()

    def _remove(self, number: int) -> int:
        """Forgets an entry, where it is known; returns how many bytes were booked for it."""
        folder = self._folders.pop(number, None)
        if folder is not None:
            key = number_of(key_of(folder))
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]
        self._handles.pop(number, None)
        return self._sizes.pop(number, 0)

    def _name_of(self, folder: str) -> str:
        handle = self._handles.get(number_of(identifier_of(folder)))
        if handle is not None:
            return handle.remote_name
        with contextlib.suppress(ManifestUnreadable, OSError):
            entry = self._spool.entry_of(folder)
            if entry is not None:
                return entry.remote_name
        return folder
