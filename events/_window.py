"""The windows of Stats: what has been added since the last time, and the thread that closes them when their time is over.

`Window` may be used from any thread; `WindowCloser` has one thread for all Stats of the process.
"""

import atexit
import contextlib
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from queue import Empty, SimpleQueue

import attrs

from ._monitor_event import Event
from ._summary import Aggregation, Summary

__all__ = ["PENDING_SAMPLES", "STAT_EVENT", "Log", "Window", "WindowCloser"]

_log = logging.getLogger("events")

STAT_EVENT = "events.monitor.Stat"

# An add that finds this many samples waiting folds them in itself: a tenth of a millisecond, once in so many calls.
PENDING_SAMPLES = 4096
_SHORTEST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 3600.0
# Whoever holds the lock of a window computes for a millisecond at most. If it takes this long, two threads hold what the
# other one waits for, by way of the garbage collector.
_LOCK_SECONDS = 30.0
# A handler that takes longer than this, in another thread, is not waited for.
_HAND_OVER_SECONDS = 10.0

Log = Callable[[Event], object]


class Window:
    """What a Stat has collected since it last logged; outlives its Stat until that is logged too.

    `samples` is appended to from any thread, one call that cannot be interrupted; everything else is guarded by the lock.
    Nothing is called while it is held: what a window amounted to is handed over behind it, and meanwhile noted in
    `_handing_over`, for those who must not go on before it has arrived.
    """

    def __init__(
        self,
        name: str,
        aggregations: tuple[Aggregation, ...],
        seconds: float,
        max_samples: int | None,
        log: Log,
    ) -> None:
        self.name = name
        self.aggregations = aggregations
        self.seconds = seconds
        self.max_samples = max_samples
        self.discarded = 0
        self.samples: list[float] = [] if max_samples is None else _CappedSamples(self.collect)
        self._log = log
        self._log_has_failed = False
        # A lock that lets its holder in again, to tell a signal handler, which must not wait, from another thread.
        self._lock = threading.RLock()
        self._is_held = False
        self._handing_over: list[_HandOver] = []
        self._begin()

    def _begin(self) -> None:
        self.summary = Summary(self.aggregations)
        # The cap was reached and the window logged: what else comes before its time is over is discarded.
        self.is_full = False
        self._set_room()

    def _set_room(self) -> None:
        if isinstance(self.samples, _CappedSamples) and self.max_samples is not None:
            room = PENDING_SAMPLES if self.is_full else self.max_samples - self.summary.count
            self.samples.room = min(room, PENDING_SAMPLES)

    def collect(self) -> None:
        """Folds in what waits; logs a window that has reached its cap."""
        if not self._enter(waits=False):
            # Somebody else is at it.
            return
        try:
            self._fold()
            hand_over = self._take() if self.summary.count == self.max_samples else None
            if hand_over is not None:
                self._begin()
                self.is_full = True
            self._set_room()
        finally:
            self._leave()
        self._hand_over(hand_over)

    def close(self) -> None:
        """Logs what there is, if anything, and begins anew."""
        if not self._enter():
            return
        try:
            self._fold()
            hand_over = self._take()
            self._begin()
        finally:
            self._leave()
        self._hand_over(hand_over)

    def settle(self) -> None:
        """Waits until what other threads have taken from here has been logged; ten seconds at most.

        Who is being handed something waits for nobody: two handlers could wait for each other.
        """
        if getattr(_handing_over, "depth", 0):
            return
        for hand_over in tuple(self._handing_over):
            # One of this very thread was cut short by Ctrl-C.
            if hand_over.thread == threading.get_ident() or not hand_over.is_over.wait(_HAND_OVER_SECONDS):
                self._forget_hand_over(hand_over)

    def count(self) -> int:
        """Returns how many samples the open window has."""
        if self.is_full:
            return 0
        count = self.summary.count + len(self.samples)
        return count if self.max_samples is None else min(count, self.max_samples)

    def values(self) -> dict[Aggregation, float]:
        """Returns what the samples of the open window amount to."""
        if not self._enter():
            return Summary(()).values(self.aggregations)
        try:
            self._fold()
            self._set_room()
            return self.summary.values(self.aggregations)
        finally:
            self._leave()

    def forget(self) -> None:
        """Lets go of what another process collected, and of the lock, which a thread of it may have held."""
        self._lock = threading.RLock()
        self._is_held = False
        self._handing_over = []
        self.samples.clear()
        self._begin()

    def _enter(self, *, waits: bool = True) -> bool:
        """Takes the lock, and says whether it is had: not where this very thread has it, which a signal interrupted."""
        if not self._lock.acquire(blocking=waits, timeout=_LOCK_SECONDS if waits else -1):
            return False
        if self._is_held:
            self._lock.release()
            return False
        self._is_held = True
        return True

    def _leave(self) -> None:
        self._is_held = False
        self._lock.release()

    def _fold(self) -> None:
        count = len(self.samples)
        taken = self.samples[:count]
        # In place: who is adding right now holds this very list, and adds behind what is taken.
        del self.samples[:count]
        if self.is_full:
            room = 0
        else:
            room = count if self.max_samples is None else self.max_samples - self.summary.count
        self.discarded += max(count - room, 0)
        for start in range(0, min(room, count), PENDING_SAMPLES):
            self.summary.fold(taken[start : min(start + PENDING_SAMPLES, room)])

    def _take(self) -> "_HandOver | None":
        """Returns what there is to log, noted as being on its way."""
        if self.summary.count == 0:
            return None
        values = self.summary.values(self.aggregations)
        data = {f"{self.name}.{aggregation.value}": value for aggregation, value in values.items()}
        hand_over = _HandOver(Event(STAT_EVENT, datetime.now(UTC), data))
        self._handing_over.append(hand_over)
        return hand_over

    def _hand_over(self, hand_over: "_HandOver | None") -> None:
        if hand_over is None:
            return
        _handing_over.depth = getattr(_handing_over, "depth", 0) + 1
        try:
            self._log(hand_over.event)
        except Exception:  # noqa: BLE001  # who adds, and the other windows, must not suffer from it
            if not self._log_has_failed:
                self._log_has_failed = True
                _log.exception(
                    "the window of stat %r could not be logged; further failures are not reported.", self.name
                )
        finally:
            _handing_over.depth -= 1
            hand_over.is_over.set()
            self._forget_hand_over(hand_over)

    def _forget_hand_over(self, hand_over: "_HandOver") -> None:
        # Somebody else may have done so, or the process was forked.
        with contextlib.suppress(ValueError):
            self._handing_over.remove(hand_over)


@attrs.frozen(eq=False)
class _HandOver:
    """What a window amounted to, on its way to who logs it."""

    event: Event
    thread: int = attrs.field(factory=threading.get_ident)
    is_over: threading.Event = attrs.field(factory=threading.Event)


# How many hand-overs the thread at hand is in: a handler may flush other windows, which has them handed over too.
_handing_over = threading.local()


class _CappedSamples(list[float]):
    """Samples that call when there is no room for more: for the Stats that have a cap, to notice it at once."""

    def __init__(self, full: Callable[[], None]) -> None:
        super().__init__()
        self.room = 0
        # Weak: the window holds these samples, and is to go with its Stat without the help of the garbage collector.
        self._full = weakref.WeakMethod(full)

    def append(self, value: float) -> None:
        super().append(value)
        if len(self) >= self.room:
            full = self._full()
            if full is not None:
                full()


class WindowCloser:
    """The thread that closes windows when their time is over, and logs the rest of the Stats that are gone.

    The thread begins with the first Stat and lasts as long as the process. Windows reach it through a queue that may be
    put to from anywhere, the garbage collector included; the table of windows is written by `open` and by the thread.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys = itertools.count()
        self._windows: dict[int, tuple[Window, float]] = {}
        self._deadlines: dict[int, float] = {}
        self._lock = threading.Lock()
        self._begin()
        self._watches_process = False

    def _begin(self) -> None:
        self._news: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, window: Window) -> int:
        """Takes a window in; returns the key to retire it with."""
        key = next(self._keys)
        now = self._clock()
        self._deadlines[key] = now + window.seconds
        self._windows[key] = (window, now)
        with self._lock:
            if not self._watches_process:
                self._watches_process = True
                atexit.register(self.flush)
                if hasattr(os, "register_at_fork"):
                    os.register_at_fork(after_in_child=self._after_fork)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, args=(self._news,), name="events-monitor", daemon=True
                )
                self._thread.start()
        self._news.put(-1)
        return key

    def retire(self, key: int) -> None:
        """Has the rest of a window logged, and the window forgotten."""
        # The garbage collector may call this in the middle of anything: nothing here takes a lock.
        self._news.put(key)

    def flush(self) -> None:
        """Closes all windows now, in this thread; what another thread has just closed is logged too when this returns."""
        windows = [window for window, _ in list(self._windows.values())]
        for window in windows:
            window.close()
        for window in windows:
            window.settle()

    def close_due(self) -> float:
        """Closes the windows of which the time is over; returns how many seconds until the next one's is."""
        now = self._clock()
        # Copied in one step: where tuples are made, the garbage collector may let another thread open a window meanwhile.
        for key, deadline in self._deadlines.copy().items():
            entry = self._windows.get(key)
            if entry is not None and now >= deadline:
                window, opened = entry
                passed = math.floor((now - opened) / window.seconds)
                # A window that ends late is followed by one that ends where it would have ended anyway.
                self._deadlines[key] = opened + (passed + 1) * window.seconds
                window.close()
        return min(list(self._deadlines.values()), default=math.inf) - self._clock()

    def _run(self, news: "SimpleQueue[int]") -> None:
        while True:
            wait = self.close_due()
            try:
                key = news.get(timeout=min(max(wait, _SHORTEST_WAIT_SECONDS), _LONGEST_WAIT_SECONDS))
            except Empty:
                continue
            self._deadlines.pop(key, None)
            entry = self._windows.get(key)
            if entry is not None:
                entry[0].close()
                # Only now: at the end of the interpreter another thread closes what is still in the table.
                del self._windows[key]

    def _after_fork(self) -> None:
        """Lets go, in a forked child, of what the parent collected and will log itself."""
        self._lock = threading.Lock()
        self._begin()
        for window, _ in self._windows.values():
            window.forget()
