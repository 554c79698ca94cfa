"""Decides which entry is uploaded next: order, one upload per remote name, dependencies, delays and pauses.

It works in memory, reads no file and calls no store. It lists every waiting entry by the name of its folder:
100,000 of them take 37 MB, and the queue's ledger adds 18 MB.
"""

import bisect
import enum
import heapq
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable

from uploads.spool.entry import identifier_of, key_of

__all__ = ["DependencyState", "History", "Schedule"]

_RECENT = 1 << 14


class DependencyState(enum.Enum):
    """The state of the entries that an entry depends on (`after`), taken together.

    SATISFIED: all are in the store. PENDING: one is still waiting or in flight. FAILED: one failed.
    UNKNOWN: one is neither waiting nor remembered, so the store has to be asked.
    """

    SATISFIED = enum.auto()
    PENDING = enum.auto()
    FAILED = enum.auto()
    UNKNOWN = enum.auto()


class Schedule:
    """Entries in the order of submission.

    Every method may be called from any thread; one lock guards all state.

    Entries of one remote name share a key and form a line. The head of a line is ready, in flight, delayed (a
    retry), or held until an entry that it depends on has settled; the others of the line wait behind it.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # An entry may be due.
        self._emptied = threading.Condition(lock)  # Nothing is left.
        self._known: set[str] = set()  # Identifiers of all entries that wait or are in flight.
        self._lines: dict[str, list[str]] = {}  # Key → folders that wait, in order.
        # Folders that were at the head of their line when they were added. If one no longer is, or its key is
        # in flight or delayed, it is dropped when it is popped; its key is pushed again later.
        self._ready: list[str] = []
        self._inflight: dict[str, str] = {}  # Key → folder.
        self._delayed: list[tuple[float, str]] = []  # Due times and keys, a heap.
        self._delayed_keys: set[str] = set()
        self._held: dict[str, set[str]] = defaultdict(set)  # Identifier → keys that wait for it to settle.
        self._history = History()
        self._paused_until = float("-inf")
        self._is_probing = False
        self._is_probe_out = False
        self._last_denied: str | None = None  # The key of the probe that failed last.
        self._is_stopped = False

    def add(self, folders: Iterable[str], is_there: Callable[[str], bool] = lambda _: True) -> None:
        """Adds new entries; duplicates are ignored.

        Args:
            folders: In any order.
            is_there: Called with each unknown folder, because a listing or an announcement may come after the
                entry was delivered.
        """
        with self._changed:
            new = [folder for folder in folders if not self.knows(folder) and is_there(folder)]
            for folder in new:
                key = key_of(folder)
                self._known.add(identifier_of(folder))
                bisect.insort(self._lines.setdefault(key, []), folder)
                self._make_ready(key)
            # Waking all eight threads for one entry would cost as much as sending a small file.
            self._changed.notify(len(new))

    def restore(self, identifier: str, *, failed: bool = False, replaced_by: str | None = None) -> None:
        """Records how an entry of an earlier process ended. Call it in the order in which they ended."""
        with self._changed:
            self._history.record(identifier, failed=failed, replaced_by=replaced_by)

    def knows(self, folder: str) -> bool:
        """Returns whether the entry waits or is in flight.

        Takes no lock: it is called for every name of a listing.
        """
        return identifier_of(folder) in self._known

    def next(self, timeout_seconds: float) -> str | None:
        """Returns the folder to upload, which is in flight from here; None after the timeout or `stop`."""
        deadline = self._clock() + timeout_seconds
        with self._changed:
            while not self._is_stopped:
                now = self._clock()
                folder = self._take(now)
                if folder is not None or now >= deadline:
                    return folder
                self._changed.wait(max(min(deadline, self._next_change(now)) - now, 0.0))
            return None

    def newer_than(self, folder: str) -> str | None:
        """Returns the newest waiting entry of the same remote name if it is newer than this one."""
        with self._changed:
            line = self._lines.get(key_of(folder))
            return line[-1] if line and line[-1] > folder else None

    def check_dependencies(self, folder: str, after: Iterable[str]) -> DependencyState:
        """Returns the state of the dependencies of an entry in flight.

        If PENDING, the entry is held until one of them has settled.

        Args:
            folder: The entry.
            after: The identifiers of the entries it depends on.
        """
        state = DependencyState.SATISFIED
        with self._changed:
            for identifier in after:
                current = self._history.current(identifier)
                if self._history.has_failed(current):
                    return DependencyState.FAILED
                if current in self._known:
                    self._held[current].add(key_of(folder))
                    self._put_back(folder)
                    return DependencyState.PENDING
                if not self._history.was_delivered(current):
                    state = DependencyState.UNKNOWN
            return state

    def delay(self, folder: str, seconds: float) -> None:
        """Delays the entry and all entries behind it in its line, including later ones."""
        key = key_of(folder)
        with self._changed:
            self._delayed_keys.add(key)
            heapq.heappush(self._delayed, (self._clock() + seconds, key))

    def settle(self, folder: str, *, failed: bool = False, replaced_by: str | None = None) -> None:
        """Removes an entry that has ended."""
        identifier, key = identifier_of(folder), key_of(folder)
        with self._changed:
            if self._inflight.get(key) == folder:
                del self._inflight[key]
                self._is_probe_out = False
                self._make_ready(key)
            self._known.discard(identifier)
            self._history.record(identifier, failed=failed, replaced_by=replaced_by)
            held = self._held.pop(identifier, set())
            for other in held:
                self._make_ready(other)
            due = len(held) + (key in self._lines) + self._is_probing
            if due:  # A thread that is woken for nothing takes the interpreter from sending threads.
                self._changed.notify(due)
            if not self._known:
                self._emptied.notify_all()

    def retry(self, folder: str, delay_seconds: float) -> None:
        """Puts an entry in flight back into its line, to be retried after the delay; others are ignored."""
        key = key_of(folder)
        with self._changed:
            if self._inflight.get(key) != folder:
                return
            self._put_back(folder)
            self._last_denied = key if self._is_probing else None
            self.delay(folder, delay_seconds)
            self._changed.notify_all()

    def pause(self, seconds: float, *, probing_only: bool = False) -> None:
        """Hands out nothing for this long.

        Args:
            seconds: Never shortens a running pause.
            probing_only: Whether to hand out one entry at a time afterwards, until `resume`, and not the same
                twice in a row if there are others.
        """
        with self._changed:
            self._paused_until = max(self._paused_until, self._clock() + seconds)
            self._is_probing = self._is_probing or probing_only
            self._is_probe_out = False
            self._changed.notify_all()

    def resume(self) -> None:
        """Ends a pause and the probing after it."""
        with self._changed:
            if self._paused_until == float("-inf") and not self._is_probing:
                return
            self._paused_until = float("-inf")
            self._is_probing = self._is_probe_out = False
            self._last_denied = None
            self._changed.notify_all()

    def probe_now(self) -> None:
        """Ends a pause and all delays at once; probing stays one at a time."""
        with self._changed:
            self._paused_until = float("-inf")
            self._end_delays(float("inf"))
            self._changed.notify_all()

    def counts(self) -> tuple[int, int]:
        """Returns the number of entries that wait, and of those in flight."""
        with self._changed:
            return len(self._known) - len(self._inflight), len(self._inflight)

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Blocks until nothing is left, or for the timeout; returns whether nothing is left."""
        with self._emptied:
            return self._emptied.wait_for(lambda: not self._known, timeout_seconds)

    def stop(self) -> None:
        """Hands out nothing more; `next` returns at once."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _take(self, now: float) -> str | None:
        self._end_delays(now)
        if now < self._paused_until or (self._is_probing and self._is_probe_out):
            return None
        folder = self._pop_ready()
        if folder is None:
            return None
        if key_of(folder) == self._last_denied and (other := self._pop_ready()):
            # Only this name may be denied; another one shows whether the store is available.
            heapq.heappush(self._ready, folder)
            folder = other
        key = key_of(folder)
        line = self._lines[key]
        del line[0]
        if not line:
            del self._lines[key]
        self._inflight[key] = folder
        self._is_probe_out = self._is_probing
        return folder

    def _pop_ready(self) -> str | None:
        while self._ready:
            folder = heapq.heappop(self._ready)
            key = key_of(folder)
            line = self._lines.get(key)
            if line and line[0] == folder and not self._is_blocked(key):
                return folder
        return None

    def _make_ready(self, key: str) -> None:
        line = self._lines.get(key)
        if line and not self._is_blocked(key):
            heapq.heappush(self._ready, line[0])

    def _is_blocked(self, key: str) -> bool:
        return key in self._inflight or key in self._delayed_keys

    def _end_delays(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            _, key = heapq.heappop(self._delayed)
            self._delayed_keys.discard(key)
            self._make_ready(key)

    def _next_change(self, now: float) -> float:
        times = [time for time, _ in self._delayed[:1]]
        if now < self._paused_until:
            times.append(self._paused_until)
        return min(times, default=float("inf"))

    def _put_back(self, folder: str) -> None:
        """In flight → waiting, without being ready."""
        key = key_of(folder)
        del self._inflight[key]
        bisect.insort(self._lines.setdefault(key, []), folder)
        self._is_probe_out = False
        self._changed.notify_all()


class History:
    """How entries ended, by identifier. Not thread-safe; a schedule's lock guards it.

    Failures are kept. A replaced entry is kept until its replacement has settled, and then has the same end.
    At least the last 16,384 delivered entries are kept; older ones have to be looked up in the store.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        # Two generations, for half the memory of an `OrderedDict`.
        self._delivered: set[str] = set()
        self._delivered_before: set[str] = set()
        self._replaced_by: dict[str, str] = {}
        self._replaces: dict[str, list[str]] = {}

    def __len__(self) -> int:
        """The number of failed and replaced entries."""
        return len(self._failed) + len(self._replaced_by)

    def record(self, identifier: str, *, failed: bool = False, replaced_by: str | None = None) -> None:
        """Records how an entry ended."""
        ended = [*self._replaces.pop(identifier, ()), identifier]
        if replaced_by is not None and not failed:
            self._replaces.setdefault(replaced_by, []).extend(ended)
            self._replaced_by.update(dict.fromkeys(ended, replaced_by))
            return
        for older in ended:
            self._replaced_by.pop(older, None)
            if failed:
                self._failed.add(older)
            else:
                self._delivered.add(older)
        if len(self._delivered) >= _RECENT:
            self._delivered_before, self._delivered = self._delivered, set()

    def has_failed(self, identifier: str) -> bool:
        """Returns whether the entry, or the one that replaced it, failed."""
        return identifier in self._failed

    def was_delivered(self, identifier: str) -> bool:
        """Returns whether the entry, or the one that replaced it, is known to have been delivered."""
        return identifier in self._delivered or identifier in self._delivered_before

    def current(self, identifier: str) -> str:
        """Returns the entry that replaced this one, or this one."""
        return self._replaced_by.get(identifier, identifier)
