"""Notices that a store's credentials changed on disk. Used by one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .stores.store import Renewable

if TYPE_CHECKING:
    from pathlib import Path

    from .stores.store import Store

__all__ = ["CredentialWatch"]


class CredentialWatch:
    """Compares the credential files of a store with how they were when the watch was made, or last asked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = self._look()

    def renew(self, *, anyway: bool) -> bool:
        """Has the store start over where its files changed, or else where it is to be done anyway; returns whether they changed."""
        seen, self._seen = self._seen, self._look()
        changed = seen != self._seen
        if isinstance(self._store, Renewable) and (changed or anyway):
            self._store.renew()
        return changed

    def _look(self) -> tuple[object, ...]:
        if not isinstance(self._store, Renewable):
            return ()
        return tuple(_stamp(path) for path in self._store.credential_files())


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)
