"""Reads the spool on for the schedule, which has the next few thousand entries in memory and leaves the others where they are.

A reading lists `pending/` twice. It costs about as much for a hundred thousand entries as delivering a few hundred,
and comes once per few thousand of them.
"""

from __future__ import annotations

import heapq
import threading
from typing import TYPE_CHECKING

import attrs

from .entry import key_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from ._schedule import Schedule
    from .spool import Spool

__all__ = ["Reader", "Reading"]


@attrs.frozen
class Reading:
    """What a listing brought.

    Attributes:
        found: Entries that the schedule is to take in.
        newer: By key, the newest entry that stays in the spool of each remote name that the schedule has or gets.
        beyond: How many entries stay in the spool.
    """

    found: AbstractSet[str]
    newer: dict[str, str]
    beyond: int


class Reader:
    """Every method may be called from any thread; the lock lets one read at a time. Raises OSError where the spool cannot be listed."""

    def __init__(self, spool: Spool, schedule: Schedule) -> None:
        self._spool = spool
        self._schedule = schedule
        self._turn = threading.Lock()

    def read(self) -> None:
        """Finds entries that nobody announced, and as many of the next as there is room for."""
        with self._turn:
            self._read()

    def read_if_low(self) -> None:
        """Reads on where the schedule is about to run out and nobody else is reading."""
        if self._schedule.is_low() and self._turn.acquire(blocking=False):
            try:
                if self._schedule.is_low():  # Still: another may have read since.
                    self._read()
            finally:
                self._turn.release()

    def _read(self) -> None:
        reach, room = self._schedule.begin_reading()
        try:
            reading = self._first_look(reach, room)
            if reading.found:
                reading = self._look_again(reach, reading)
            self._schedule.take_in(reading, self._spool.is_pending)
        finally:
            self._schedule.end_reading()

    def _first_look(self, reach: str, room: int) -> Reading:
        unannounced: set[str] = set()
        beyond = 0

        def names() -> Iterator[str]:
            nonlocal beyond
            for folder in self._spool.pending_folders():
                if folder > reach:
                    beyond += 1
                    yield folder
                elif not self._schedule.knows(folder):
                    unannounced.add(folder)

        smallest = heapq.nsmallest(room + 1, names())[:room]  # Of none it would not even look at the names.
        return Reading(unannounced.union(smallest), {}, beyond - len(smallest))

    def _look_again(self, reach: str, reading: Reading) -> Reading:
        """Until a listing brings nothing more: one may show an entry and not what it comes after, where both appeared while it was made.

        What an entry comes after was there before it, and so before the next listing began, which shows all that was there.
        """
        top = max(reach, *reading.found)
        while True:
            before = reading
            reading = self._list_to(top, {*self._schedule.keys(), *map(key_of, before.found)})
            if reading.found <= before.found:
                return reading

    def _list_to(self, top: str, keys: set[str]) -> Reading:
        found: set[str] = set()
        newer: dict[str, str] = {}
        beyond = 0
        for folder in self._spool.pending_folders():
            if folder > top:
                beyond += 1
                key = key_of(folder)
                if key in keys and folder > newer.get(key, ""):
                    newer[key] = folder
            elif not self._schedule.knows(folder):
                found.add(folder)
        return Reading(found, newer, beyond)
