"""Which entry is next: order, one in flight per remote name, what waits for what, and when to leave the store alone.

Pure bookkeeping in memory, rebuilt from a listing of the spool; it reads no file and knows no store.
"""

from __future__ import annotations

import enum
import heapq
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from .entry import identifier_of, key_of, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Counts", "Schedule", "Standing"]


class Standing(enum.Enum):
    """How an entry stands towards those it comes after: all there, some still on their way, or one failed."""

    FREE = enum.auto()
    HELD = enum.auto()
    BROKEN = enum.auto()


@attrs.frozen
class Counts:
    """How many entries wait, and how many are in flight."""

    waiting: int
    inflight: int

    @property
    def unsettled(self) -> int:
        """Both together."""
        return self.waiting + self.inflight


class Schedule:
    """Entries by the name of their folder. Every method may be called from any thread; the lock guards everything.

    Entries of one remote name form a line, in the order of submission; the head of a line is either ready, in flight,
    waiting for its retry time, or held until what it comes after has settled.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # Something may be due.
        self._emptied = threading.Condition(lock)  # Nothing is left.
        # Keys and identities are numbers here: half the memory, for a hundred thousand entries.
        self._lines: dict[int, list[str]] = defaultdict(list)
        self._ready: list[str] = []  # Heads of lines; a folder's name starts with its sequence number.
        self._queued: set[int] = set()  # Keys that have a place in _ready.
        self._delayed: list[tuple[float, int]] = []
        self._resting: set[int] = set()  # Keys in _delayed.
        self._inflight: dict[int, str] = {}  # Key → folder.
        self._known: set[int] = set()  # Identities that are waiting or in flight.
        self._failed: set[int] = set()
        self._replaced_by: dict[int, int] = {}
        self._holding: dict[int, set[int]] = defaultdict(set)  # Identity → keys held until it settles.
        self._waiting = 0
        self._closed_until = float("-inf")
        self._probing_only = False
        self._probe_out = False
        self._probed: int | None = None  # The key that was denied last, while only probes are given out.
        self._stopped = False

    def add(self, folders: Iterable[str], is_there: Callable[[str], bool] = lambda _: True) -> None:
        """Takes entries in; those it knows already are passed over.

        Args:
            folders: From an announcement or a listing.
            is_there: Asked of those it does not know: an entry of a listing may have been delivered and forgotten since.
        """
        added = 0
        with self._changed:
            for folder in folders:
                identity, key = _identity(folder), _key(folder)
                if identity in self._known or not is_there(folder):
                    continue
                self._known.add(identity)
                heapq.heappush(self._lines[key], folder)
                self._waiting += 1
                if key not in self._resting:
                    self._queue(key)
                added += 1
            self._changed.notify(
                added
            )  # Not all: waking eight threads for one entry costs as much as sending a small file.

    def remember(self, failed: Iterable[str] = (), replaced: Iterable[tuple[str, str]] = ()) -> None:
        """Takes in what earlier processes left: identifiers that failed, and pairs (older, newer)."""
        with self._changed:
            self._failed.update(map(number_of, failed))
            self._replaced_by.update((number_of(older), number_of(newer)) for older, newer in replaced)

    def next(self, timeout_seconds: float) -> str | None:
        """The folder to work on, which counts as in flight from here; None when nothing was due in time, or after `stop`."""
        deadline = self._clock() + timeout_seconds
        with self._changed:
            while not self._stopped:
                now = self._clock()
                folder = self._take(now)
                if folder is not None:
                    return folder
                wait_seconds = min(deadline, self._next_change(now)) - now
                if now >= deadline:
                    return None
                self._changed.wait(max(wait_seconds, 0.0))
            return None

    def newer_than(self, folder: str) -> str | None:
        """The newest waiting entry of the same remote name, where there is one."""
        with self._changed:
            line = self._lines.get(_key(folder))
            return max(line) if line else None

    def hold(self, folder: str, after: Iterable[str]) -> Standing:
        """How the entry stands; where it is HELD it waits again, until one of those it comes after has settled."""
        with self._changed:
            for identifier in after:
                wanted = self._newest(number_of(identifier))
                if wanted in self._failed:
                    return Standing.BROKEN
                if wanted in self._known:
                    self._holding[wanted].add(_key(folder))
                    self._return(folder)
                    return Standing.HELD
            return Standing.FREE

    def settle(self, folder: str, *, failed: bool = False, replaced_by: str | None = None) -> None:
        """The entry has left the line for good."""
        identity = _identity(folder)
        with self._changed:
            self._leave(folder)
            self._known.discard(identity)
            if failed:
                self._failed.add(identity)
            if replaced_by is not None:
                self._replaced_by[identity] = number_of(replaced_by)
            held = self._holding.pop(identity, ())
            for key in held:
                self._queue(key)
            due = len(held) + (_key(folder) in self._queued) + self._probing_only
            if due:  # A thread that is woken for nothing takes the interpreter from those that send.
                self._changed.notify(due)
            if not self._known:
                self._emptied.notify_all()

    def retry(self, folder: str, delay_seconds: float) -> None:
        """The entry, where it is in flight, waits again for a while."""
        key = _key(folder)
        with self._changed:
            if self._inflight.get(key) != folder:
                return
            self._return(folder)
            self._probed = key if self._probing_only else None
            self._resting.add(key)
            heapq.heappush(self._delayed, (self._clock() + delay_seconds, key))
            self._changed.notify_all()

    def rest(self, seconds: float, *, probing_only: bool = False) -> None:
        """Nothing is given out for this long; afterwards everything, or (`probing_only`) one entry at a time until `wake`, never the same twice in a row where there are others."""
        with self._changed:
            self._closed_until = max(self._closed_until, self._clock() + seconds)
            self._probing_only = self._probing_only or probing_only
            self._probe_out = False
            self._changed.notify_all()

    def wake(self) -> None:
        """The store works: everything that is ready is given out."""
        with self._changed:
            if self._closed_until == float("-inf") and not self._probing_only:
                return
            self._closed_until = float("-inf")
            self._probing_only = False
            self._probe_out = False
            self._probed = None
            self._changed.notify_all()

    def probe_now(self) -> None:
        """Ends the rest at once, for one entry."""
        with self._changed:
            self._closed_until = float("-inf")
            while self._delayed:
                _, key = heapq.heappop(self._delayed)
                self._resting.discard(key)
                self._queue(key)
            self._changed.notify_all()

    def counts(self) -> Counts:
        """How many wait, how many are in flight."""
        with self._changed:
            return Counts(self._waiting, len(self._inflight))

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Whether nothing is left within this time."""
        with self._emptied:
            return self._emptied.wait_for(lambda: not self._known, timeout_seconds)

    def stop(self) -> None:
        """Nothing more is given out."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _take(self, now: float) -> str | None:
        while self._delayed and self._delayed[0][0] <= now:
            _, key = heapq.heappop(self._delayed)
            self._resting.discard(key)
            self._queue(key)
        if now < self._closed_until or (self._probing_only and self._probe_out) or not self._ready:
            return None
        head = heapq.heappop(self._ready)
        if (
            _key(head) == self._probed and self._ready
        ):  # It may be denied for its name alone: another one tells.
            head = heapq.heapreplace(self._ready, head)
        key = _key(head)
        self._queued.discard(key)
        line = self._lines[key]
        folder = heapq.heappop(line)
        if not line:
            del self._lines[key]
        self._inflight[key] = folder
        self._waiting -= 1
        self._probe_out = self._probing_only
        return folder

    def _next_change(self, now: float) -> float:
        """When to look again, if nobody says anything before."""
        times = [time for time, _ in self._delayed[:1]]
        if now < self._closed_until:
            times.append(self._closed_until)
        return min(times, default=float("inf"))

    def _queue(self, key: int) -> None:
        if key in self._lines and key not in self._queued and key not in self._inflight:
            self._queued.add(key)
            heapq.heappush(self._ready, self._lines[key][0])

    def _return(self, folder: str) -> None:
        """In flight → the head of its line, without being ready."""
        del self._inflight[_key(folder)]
        heapq.heappush(self._lines[_key(folder)], folder)
        self._waiting += 1
        self._probe_out = False
        self._changed.notify_all()

    def _leave(self, folder: str) -> None:
        key = _key(folder)
        if self._inflight.get(key) == folder:
            del self._inflight[key]
            self._probe_out = False
            self._queue(key)

    def _newest(self, identity: int) -> int:
        while identity in self._replaced_by:
            identity = self._replaced_by[identity]
        return identity


def _identity(folder: str) -> int:
    return number_of(identifier_of(folder))


def _key(folder: str) -> int:
    return number_of(key_of(folder))
