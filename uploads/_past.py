"""What has settled and still matters to what comes after it: entries that failed, those that were delivered of late, and which took whose place."""

from __future__ import annotations

from array import array
from collections import defaultdict

from ._packed import NumberTable

__all__ = ["Past"]

_MOST_DELIVERED = 1 << 16


class Past:
    """Identities as numbers. Has no lock; a schedule's guards it.

    Of what was replaced is kept who took its place until that one has settled: afterwards it stands as that one does.
    Of what was delivered the last 65,536 at least are known; whoever asks for an older one is to ask the store.
    """

    def __init__(self) -> None:
        self._failed = NumberTable()
        self._delivered = NumberTable()
        self._delivered_before = NumberTable()
        self._replaced_by = NumberTable()
        self._replaces: dict[int, array[int]] = defaultdict(lambda: array("Q"))

    def __len__(self) -> int:
        """How many entries it remembers."""
        return len(self._failed) + len(self._replaced_by)

    def settle(self, identity: int, *, failed: bool = False, replaced_by: int | None = None) -> None:
        """Notes how an entry left."""
        replaced = self._replaces.pop(identity, array("Q"))
        if failed:
            for older in (*replaced, identity):
                self._replaced_by[older] = 0
                self._failed[older] = 1
        elif replaced_by is not None:
            replaced.append(identity)
            self._replaces[replaced_by].extend(replaced)
            for older in replaced:
                self._replaced_by[older] = replaced_by
        else:
            for older in (*replaced, identity):
                self._replaced_by[older] = 0
                self._delivered[older] = 1
            if len(self._delivered) >= _MOST_DELIVERED:
                self._delivered_before, self._delivered = self._delivered, NumberTable()

    def has_failed(self, identity: int) -> bool:
        """Whether it failed, or what took its place did."""
        return identity in self._failed

    def was_delivered(self, identity: int) -> bool:
        """Whether it is known to have been delivered, or what took its place."""
        return identity in self._delivered or identity in self._delivered_before

    def newest(self, identity: int) -> int:
        """The entry that took its place; itself where none did."""
        return self._replaced_by[identity] or identity
