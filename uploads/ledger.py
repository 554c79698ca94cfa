"""The accepted entries of a queue that have not ended: their handles, names and failures."""

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import attrs

from .handle import Outcome, UploadHandle, UploadState
from .names import name_key
from .spool.entry import identifier_of, key_of, read_reason
from .spool.spool import Spool

__all__ = ["Ledger"]


@attrs.define(eq=False, slots=False, repr=False)
class Ledger:
    """Tracks entries from acceptance to their end. Thread-safe; one lock guards all state.

    It keeps the name of each entry's folder and the key of its remote name. Remote names are read from the
    spool when needed, and handles are weak references.

    Args:
        spool: Where to look up outcomes that were not reported.
        free: Called with the size of each entry that has left the spool, except for `failed/`.
    """

    _spool: Spool
    _free: Callable[[int], None]

    def __attrs_post_init__(self) -> None:
        self._changed = threading.Condition()
        self._folders: set[str] = set()
        self._keys: Counter[str] = Counter()  # Key of a remote name → number of its entries.
        self._handles: weakref.WeakValueDictionary[str, UploadHandle] = weakref.WeakValueDictionary()
        self._staging = ""  # The added entry that is not in the spool yet; there is one at a time.
        self._failures: list[Outcome] = []
        self._settling: set[str] = set()
        self._missing: set[str] = set()

    def add_existing(self, folders: Iterable[str]) -> None:
        """Adds entries that earlier processes left."""
        with self._changed:
            for folder in sorted(folders):
                self._add(folder)

    def add(self, folder: str, handle: UploadHandle) -> None:
        """Adds an entry, before its outcome can arrive."""
        with self._changed:
            self._add(folder)
            self._handles[folder] = handle
            self._staging = folder

    def knows(self, folder: str) -> bool:
        """Returns whether the entry has not ended."""
        with self._changed:
            return folder in self._folders

    def confirm(self, folder: str) -> None:
        """Records that the entry added last is in the spool now."""
        with self._changed:
            if self._staging == folder:
                self._staging = ""

    def discard(self, folder: str) -> None:
        """Removes an entry that could not be staged."""
        with self._changed:
            self._remove(folder)
            if not self._folders:
                self._changed.notify_all()

    def has_name(self, name: str) -> bool:
        """Returns whether an entry of this remote name has not ended."""
        with self._changed:
            return name_key(name) in self._keys

    def folders_of(self, name: str) -> list[str]:
        """Returns the entries of a remote name that have not ended, oldest first."""
        key = name_key(name)
        with self._changed:
            return sorted(one for one in self._folders if key_of(one) == key) if key in self._keys else []

    def settle(self, folder: str, outcome: Outcome) -> None:
        """Records the outcome of an entry and settles its handle; a second call has no effect."""
        with self._changed:
            if folder not in self._folders or folder in self._settling:
                return
            self._settling.add(folder)
            is_freed = not outcome.state.is_failure
        # Without the lock: a signal handler in a thread that waits for room may need it.
        if is_freed:
            self._free(outcome.size)
        with self._changed:
            self._settling.discard(folder)
            handle = self._handles.get(folder)
            if not self._remove(folder):
                return
            if outcome.state is UploadState.LOST and handle is not None:
                # Its manifest, and so its name, is lost too.
                outcome = attrs.evolve(outcome, remote_name=handle.remote_name)
            if outcome.state.is_failure:
                self._failures.append(outcome)
            if not self._folders:
                self._changed.notify_all()
            # Under the lock, so that every handle is settled after `wait_empty`.
            if handle is not None:
                handle._settle(outcome)  # noqa: SLF001  # the queue is the other half of a handle

    def add_failure(self, outcome: Outcome) -> None:
        """Records the failure of a file that never became an entry."""
        with self._changed:
            self._failures.append(outcome)

    def wait_empty(self, timeout_seconds: float) -> bool:
        """Blocks until no entry is left, or for the timeout; returns whether none is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._folders, timeout_seconds)

    def count(self) -> int:
        """Returns the number of entries that have not ended."""
        with self._changed:
            return len(self._folders)

    def state_of(self, folder: str) -> UploadState | None:
        """Returns the state of an entry in the spool; None if it has just left it."""
        with self._changed:
            is_known = folder in self._folders
        return self._spool.state_of(folder) if is_known else None

    def remaining(self) -> tuple[str, ...]:
        """Returns the remote names of entries that have not ended, in the order of submission."""
        return tuple(self._name_of(folder) for folder in self.folders())

    def folders(self) -> list[str]:
        """Returns the entries that have not ended, in the order of submission."""
        with self._changed:
            return sorted(self._folders)

    def failures(self) -> tuple[Outcome, ...]:
        """Returns the failures, in the order in which they were recorded."""
        with self._changed:
            return tuple(self._failures)

    def reconcile(self) -> None:
        """Finds outcomes in the spool that were not reported.

        An entry missing in two calls in a row counts as lost.
        """
        with self._changed:
            unseen = self._folders - {self._staging}
        if not unseen:
            return
        unseen.difference_update(itertools.chain(*self._spool.list_unfinished()))
        gone = {identifier_of(folder): folder for folder in unseen}
        if not gone:
            return
        for state, failed in self._spool.list_failed().items():
            for folder in set(failed) & set(gone.values()):
                noted = read_reason(self._spool.failed / state / folder)
                self.settle(folder, noted or Outcome(identifier_of(folder), folder, state))
        for outcome in self._spool.delivered(gone):
            if outcome.identifier in gone:
                self.settle(gone[outcome.identifier], outcome)
        with self._changed:
            missing = {folder for folder in gone.values() if folder in self._folders}
        # It may have moved during the listing, or its line in the log isn't written yet.
        missing = {folder for folder in missing if self._spool.place_of(folder) is None}
        with self._changed:
            lost, self._missing = missing & self._missing, missing
        reason = f"its folder was deleted from the spool {self._spool.path}"
        for folder in sorted(lost):
            self.settle(folder, Outcome(identifier_of(folder), folder, UploadState.LOST, reason=reason))

    def forget_after_fork(self) -> None:
        """Replaces the lock in a forked child: a thread of the parent may hold it."""
        self._changed = threading.Condition()

    def _add(self, folder: str) -> None:
        if folder not in self._folders:
            self._folders.add(folder)
            self._keys[key_of(folder)] += 1

    def _remove(self, folder: str) -> bool:
        """Forgets an entry; returns whether it was known."""
        self._handles.pop(folder, None)
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
        return self._spool.name_of(folder) if handle is None else handle.remote_name
