"""Much in little memory: what must be known of each of a hundred thousand waiting entries, in arrays of 64-bit numbers.

A name of a folder as a string in a set takes two hundred bytes, here 24; a number in a dictionary takes a hundred, here 21 to 32.
Neither class has a lock. Every step leaves something that can be read, for another thread may fork the process between any two.
"""

from __future__ import annotations

import bisect
from array import array
from typing import TYPE_CHECKING

from .entry import folder_of, identifier_of, key_of, number_of, sequence_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["NumberTable", "PackedFolders"]

_SMALLEST = 16
_ROW = 3  # Sequence, key, identity.


class NumberTable:
    """A dictionary from numbers to numbers, both of 64 bits; a value of 0 is none.

    Open addressing with linear probing in one array of pairs, a half to three quarters full (Knuth, TAOCP 3, section 6.4,
    algorithms L and R). The numbers are digests or random, so that they need no hashing.
    """

    def __init__(self) -> None:
        self._used = 0
        self._pairs = array("Q", bytes(16 * _SMALLEST))

    def __len__(self) -> int:
        return self._used

    def __contains__(self, number: int) -> bool:
        return self[number] > 0

    def __getitem__(self, number: int) -> int:
        return self._pairs[self._slot(number) + 1]

    def __setitem__(self, number: int, value: int) -> None:
        slot = self._slot(number)
        is_new = not self._pairs[slot + 1]
        if not value:
            if not is_new:
                self._close_gap(slot)
                self._used -= 1
                self._fit()
            return
        self._pairs[slot] = number  # First: without a value it does not count.
        self._pairs[slot + 1] = value
        if is_new:
            self._used += 1
            self._fit()

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return len(self._pairs) * 8

    def _slot(self, number: int) -> int:
        """Where the number is, or would be."""
        pairs = self._pairs
        slot = number * 2 % len(pairs)
        while pairs[slot + 1] and pairs[slot] != number:
            slot = (slot + 2) % len(pairs)
        return slot

    def _close_gap(self, gap: int) -> None:
        """Empties a slot, having moved into it what would not be found behind an empty one."""
        pairs = self._pairs
        slot = (gap + 2) % len(pairs)
        while pairs[slot + 1]:
            home = pairs[slot] * 2 % len(pairs)
            if (slot - home) % len(pairs) >= (slot - gap) % len(pairs):
                pairs[gap : gap + 2] = pairs[slot : slot + 2]
                gap = slot
            slot = (slot + 2) % len(pairs)
        pairs[gap + 1] = 0

    def _fit(self) -> None:
        slots = len(self._pairs) // 2
        if slots * 3 < self._used * 4 or (slots > _SMALLEST and slots > self._used * 4):
            self._resize(max(_SMALLEST, self._used * 2))

    def _resize(self, slots: int) -> None:
        old, pairs = self._pairs, array("Q", bytes(16 * slots))
        for index in range(0, len(old), 2):
            if old[index + 1]:
                slot = old[index] * 2 % len(pairs)
                while pairs[slot + 1]:
                    slot = (slot + 2) % len(pairs)
                pairs[slot : slot + 2] = old[index : index + 2]
        self._pairs = pairs


class PackedFolders:
    """A set of names of entries' folders, in the order of submission. One array of rows, sorted; a row of zeros after its sequence is a gap.

    Args:
        folders: In any order.
    """

    def __init__(self, folders: Iterable[str] = ()) -> None:
        self._gaps = 0
        self._rows = array("Q")
        for folder in sorted(folders):
            self.add(folder)

    def __len__(self) -> int:
        return len(self._rows) // _ROW - self._gaps

    def __contains__(self, folder: str) -> bool:
        return self._find(folder) is not None

    def __iter__(self) -> Iterator[str]:
        rows = self._rows
        for index in range(0, len(rows), _ROW):
            if rows[index + 1] or rows[index + 2]:
                yield folder_of(rows[index], f"{rows[index + 1]:016x}", f"{rows[index + 2]:016x}")

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return len(self._rows) * 8

    def add(self, folder: str) -> bool:
        """Takes it in; whether it was not there."""
        rows = self._rows
        row = array("Q", _row_of(folder))
        if not rows or rows[-_ROW] < row[0]:
            rows.extend(row)
            return True
        if self._find(folder) is not None:
            return False
        place = self._first_of(row[0])
        rows[place:place] = row
        return True

    def remove(self, folder: str) -> bool:
        """Takes it out; whether it was there."""
        place = self._find(folder)
        if place is None:
            return False
        self._rows[place + 1 : place + _ROW] = array("Q", (0, 0))
        self._gaps += 1
        if self._gaps * 2 * _ROW > len(self._rows):
            self._close_gaps()
        return True

    def copy(self) -> PackedFolders:
        """Another set with the same names."""
        other = PackedFolders()
        other._gaps, other._rows = self._gaps, self._rows[:]
        return other

    def _find(self, folder: str) -> int | None:
        sequence, key, identity = _row_of(folder)
        rows = self._rows
        # Entries of a forked child have the same numbers as its parent's.
        for place in range(self._first_of(sequence), len(rows), _ROW):
            if rows[place] != sequence:
                break
            if rows[place + 1] == key and rows[place + 2] == identity:
                return place
        return None

    def _first_of(self, sequence: int) -> int:
        rows = self._rows
        return _ROW * bisect.bisect_left(
            range(len(rows) // _ROW), sequence, key=lambda index: rows[index * _ROW]
        )

    def _close_gaps(self) -> None:
        rows = array("Q")
        for index in range(0, len(self._rows), _ROW):
            if self._rows[index + 1] or self._rows[index + 2]:
                rows.extend(self._rows[index : index + _ROW])
        self._gaps = 0  # First: rather too many names for an instant than less than none.
        self._rows = rows


def _row_of(folder: str) -> tuple[int, int, int]:
    return sequence_of(folder), number_of(key_of(folder)), number_of(identifier_of(folder))
