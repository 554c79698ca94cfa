"""Which entry is next: order, one in flight per remote name, what waits for what, and when to leave the store alone.

Pure bookkeeping in memory; it reads no file and knows no store. The spool is the queue, this is a window on it: the next few
thousand entries by counter are here, and `_reading` brings those that follow when they run low. So memory does not grow with
what waits, and whatever an entry comes after is in the window before it, or has settled.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import threading
from array import array
from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from uploads.spool.entry import folder_of, identifier_of, key_of, number_of, sequence_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from uploads.spool.spool import Spool

__all__ = ["Counts", "NumberTable", "PackedFolders", "Past", "Reader", "Reading", "Schedule", "Standing"]

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


class Standing(enum.Enum):
    """How an entry stands towards those it comes after: all there, some still on their way, one failed, or nothing known of one."""

    FREE = enum.auto()
    HELD = enum.auto()
    BROKEN = enum.auto()
    UNKNOWN = enum.auto()


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

    Every waiting entry up to the highest that was taken in, the window's reach, is here. Beyond it nothing is kept but a count.
    Where four windows full of entries are here, since they wait for others, the rest stays in the spool until some have settled.

    Args:
        clock: Seconds, monotonic.
        window: How many entries to have ready.
    """

    def __init__(self, clock: Callable[[], float], window: int = 2048) -> None:
        self._clock = clock
        self._window = window
        self._limit = 4 * window
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # Something may be due.
        self._emptied = threading.Condition(lock)  # Nothing is left.
        # Keys and identities are numbers here: half the memory.
        self._lines: dict[int, list[str]] = defaultdict(list)
        self._ready: list[str] = []  # Heads of lines; a folder's name starts with its sequence number.
        self._queued: set[int] = set()  # Keys that have a place in _ready.
        self._delayed: list[tuple[float, int]] = []
        self._resting: set[int] = set()  # Keys in _delayed.
        self._inflight: dict[int, str] = {}  # Key → folder.
        self._known: set[int] = set()  # Identities that are waiting or in flight.
        self._newest: dict[
            int, str
        ] = {}  # Of each key that has an entry here and another here or beyond: the newest.
        self._reach = ""
        self._beyond = 0  # At least as many wait in the spool alone.
        self._unread = 0  # Of them were announced since the last reading began.
        self._is_being_read = False
        self._past = Past()
        self._delivered_sequence = (
            NumberTable()
        )  # Key → of the newest that was delivered and may replace others.
        self._delivered_identity = NumberTable()
        self._holding: dict[int, set[int]] = defaultdict(set)  # Identity → keys held until it settles.
        self._waiting = 0
        self._closed_until = float("-inf")
        self._probing_only = False
        self._probe_out = False
        self._probed: int | None = None  # The key that was denied last, while only probes are given out.
        self._stopped = False

    def add(self, folders: Iterable[str], is_there: Callable[[str], bool] = lambda _: True) -> None:
        """Hears of new entries; those it knows already are passed over, those beyond its reach are counted.

        Args:
            folders: As they were announced.
            is_there: Asked of those it does not know: an entry may have been found, delivered and forgotten before it is announced.
        """
        with self._changed:
            added = sum(self._hear_of(folder, is_there) for folder in folders)
            self._changed.notify(
                added
            )  # Not all: waking eight threads for one entry costs as much as sending a small file.

    def remember(self, identifier: str, *, failed: bool = False, replaced_by: str | None = None) -> None:
        """Takes in how an entry left in the time of an earlier process; in the order in which they did."""
        with self._changed:
            self._note_end(number_of(identifier), failed=failed, replaced_by=replaced_by)

    def is_low(self) -> bool:
        """Whether it is time to read on: little is ready, more is in the spool, and there is room for it."""
        if self._beyond == 0 or self._is_being_read:
            return False
        enough = max(self._window // 4, 1)  # For one listing, so that it does not come once per entry.
        return len(self._ready) <= enough <= self._room()

    def begin_reading(self) -> tuple[str, int]:
        """The window's reach, and how many entries beyond it there is room for. `take_in` may follow, `end_reading` must."""
        with self._changed:
            self._is_being_read = True
            self._unread = 0
            return self._reach, self._room()

    def end_reading(self) -> None:
        """The next reading may begin."""
        with self._changed:
            self._is_being_read = False
            if self.is_low():  # Somebody who waits for an entry is to read.
                self._changed.notify()

    def knows(self, folder: str) -> bool:
        """Whether the entry is here, waiting or in flight. Takes no lock, since it is asked of every name in a listing."""
        return _identity(folder) in self._known

    def keys(self) -> list[str]:
        """Of the remote names that have an entry here."""
        with self._changed:
            return [f"{key:016x}" for key in self._lines.keys() | self._inflight.keys()]

    def take_in(self, reading: Reading, is_there: Callable[[str], bool]) -> None:
        """Takes in what was read.

        Args:
            reading: Begun with `begin_reading`.
            is_there: Asked of entries within the reach: they may have been delivered since they were listed.
        """
        with self._changed:
            added = 0
            for folder in sorted(reading.found):
                if not self.knows(folder) and (folder > self._reach or is_there(folder)):
                    self._insert(folder)
                    added += 1
            for folder in reading.newer.values():
                self._note_newer(folder)
            self._beyond = reading.beyond + self._unread
            if not self._beyond:  # Everything is here: what is not was deleted, and is not waited for.
                added += sum(self._let_go(wanted) for wanted in self._holding.keys() - self._known)
            self._changed.notify(added)
            if self._is_empty():
                self._emptied.notify_all()

    def next(self, timeout_seconds: float) -> str | None:
        """The folder to work on, which counts as in flight from here; None when nothing was due in time, it is time to read on, or after `stop`."""
        deadline = self._clock() + timeout_seconds
        with self._changed:
            while not self._stopped:
                now = self._clock()
                folder = self._take(now)
                if folder is not None:
                    return folder
                wait_seconds = min(deadline, self._next_change(now)) - now
                if now >= deadline or self.is_low():
                    return None
                self._changed.wait(max(wait_seconds, 0.0))
            return None

    def newer_than(self, folder: str) -> str | None:
        """The newest waiting entry of the same remote name, where it is newer; it may be beyond the window."""
        with self._changed:
            newest = self._newest.get(_key(folder), folder)
            return newest if newest > folder else None

    def hold(self, folder: str, after: Iterable[str]) -> Standing:
        """How the entry stands; where it is HELD it waits again, until one of those it comes after has settled."""
        standing = Standing.FREE
        with self._changed:
            for identifier in after:
                identity = number_of(identifier)
                wanted = self._past.newest(identity)
                if self._past.has_failed(wanted):
                    return Standing.BROKEN
                if self._past.was_delivered(wanted):
                    continue
                # What took its place came later, and may be beyond the window.
                if wanted in self._known or (wanted != identity and self._beyond):
                    self._holding[wanted].add(_key(folder))
                    self._return(folder)
                    return Standing.HELD
                standing = Standing.UNKNOWN
            return standing

    def delay(self, folder: str, seconds: float) -> None:
        """Leaves the entry and those behind it in its line alone for a while, whether or not they are here already."""
        key = _key(folder)
        with self._changed:
            self._resting.add(key)
            heapq.heappush(self._delayed, (self._clock() + seconds, key))

    def note_delivered(self, folder: str) -> None:
        """The entry, which may replace others of its name, is in the store: those that came before it are not to follow."""
        with self._changed:
            key, sequence = _key(folder), sequence_of(folder)
            if sequence > self._delivered_sequence[key]:
                self._delivered_sequence[key] = sequence
                self._delivered_identity[key] = _identity(folder)

    def delivered_after(self, folder: str) -> str | None:
        """The identifier of a newer entry of the same remote name that is in the store; a forked child's may be found late."""
        key = _key(folder)
        with self._changed:
            is_newer = self._delivered_sequence[key] > sequence_of(folder)
            return f"{self._delivered_identity[key]:016x}" if is_newer else None

    def settle(self, folder: str, *, failed: bool = False, replaced_by: str | None = None) -> None:
        """The entry has left the line for good."""
        identity = _identity(folder)
        with self._changed:
            self._leave(folder)
            self._known.discard(identity)
            self._note_end(identity, failed=failed, replaced_by=replaced_by)
            due = self._let_go(identity) + (_key(folder) in self._queued) + self._probing_only
            if due:  # A thread that is woken for nothing takes the interpreter from those that send.
                self._changed.notify(due)
            if self._is_empty():
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
        """How many wait, how many are in flight. Those beyond the window are counted when it is read on, and as they are announced."""
        with self._changed:
            return Counts(self._waiting + self._beyond, len(self._inflight))

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Whether nothing is left within this time."""
        with self._emptied:
            return self._emptied.wait_for(self._is_empty, timeout_seconds)

    def stop(self) -> None:
        """Nothing more is given out."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _is_empty(self) -> bool:
        return not self._known and not self._beyond

    def _stands_still(self) -> bool:
        """Whether nothing here can go on by itself: all that is here is held by what is beyond."""
        return not (self._ready or self._inflight or self._delayed)

    def _room(self) -> int:
        """How many entries to read. Beyond the limit none, unless nothing would ever get below it again."""
        room = self._window - len(self._ready)
        if not self._stands_still():
            room = min(room, self._limit - len(self._known))
        return max(room, 0)

    def _let_go(self, wanted: int) -> int:
        """Queues what was held until this entry settled; returns how many."""
        held = self._holding.pop(wanted, set())
        for key in held:
            self._queue(key)
        return len(held)

    def _hear_of(self, folder: str, is_there: Callable[[str], bool]) -> bool:
        """Whether it was taken in."""
        if self.knows(folder):
            return False
        if folder > self._reach and (self._beyond or not self._room()):
            self._beyond += 1
            self._unread += 1
            self._note_newer(folder)
            return False
        if not is_there(folder):
            return False
        self._insert(folder)
        return True

    def _insert(self, folder: str) -> None:
        key = _key(folder)
        self._known.add(_identity(folder))
        self._reach = max(self._reach, folder)
        self._waiting += 1
        self._note_newer(folder)
        heapq.heappush(self._lines[key], folder)
        if key not in self._resting:
            self._queue(key)

    def _note_newer(self, folder: str) -> None:
        """Keeps the newest of a name that has another entry here; most have none."""
        key = _key(folder)
        newest = self._newest.get(key) or max(
            [*self._lines.get(key, ()), self._inflight.get(key, "")]
        )  # Until now one waits, or is in flight, or both.
        if newest:
            self._newest[key] = max(folder, newest)

    def _note_end(self, identity: int, *, failed: bool, replaced_by: str | None) -> None:
        newer = None if replaced_by is None else number_of(replaced_by)
        self._past.settle(identity, failed=failed, replaced_by=newer)

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
            if key not in self._lines:
                self._newest.pop(key, None)


def _identity(folder: str) -> int:
    return number_of(identifier_of(folder))


def _key(folder: str) -> int:
    return number_of(key_of(folder))


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
