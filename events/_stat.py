"""`Stat`: adds up measurements, and says once per window what they amount to.

Any thread may add. Windows are closed by one background thread for all Stats of the process.
"""

import atexit
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Any

from ._monitor_event import Event, log_event
from ._summary import Aggregation, Summary

__all__ = ["STAT_EVENT", "Stat", "WindowCloser", "flush"]

_log = logging.getLogger("events")

STAT_EVENT = "events.monitor.Stat"

# An add that finds this many samples waiting folds them in itself: a tenth of a millisecond, once in so many calls.
_PENDING_SAMPLES = 4096
_SHORTEST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 3600.0
# Whoever holds the lock of a window computes for a millisecond at most. If it takes this long, a signal handler has
# interrupted the holder, in this very thread.
_LOCK_SECONDS = 1.0

Log = Callable[[Event], object]


class _Window:
    """What a Stat has collected since it last logged; outlives its Stat until that is logged too.

    `samples` is appended to from any thread, one call that cannot be interrupted; everything else is guarded by the lock.
    Nothing is called while it is held.
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
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self.summary = Summary(self.aggregations)
        # The cap was reached and the window logged: what else comes before its time is over is discarded.
        self.is_full = False
        self._set_room()

    def _set_room(self) -> None:
        if isinstance(self.samples, _CappedSamples) and self.max_samples is not None:
            room = _PENDING_SAMPLES if self.is_full else self.max_samples - self.summary.count
            self.samples.room = min(room, _PENDING_SAMPLES)

    def collect(self) -> None:
        """Folds in what waits; logs a window that has reached its cap."""
        if not self._lock.acquire(blocking=False):
            # Somebody else is at it.
            return
        try:
            self._fold()
            event = self._event() if self.summary.count == self.max_samples else None
            if event is not None:
                self._begin()
                self.is_full = True
            self._set_room()
        finally:
            self._lock.release()
        self._hand_over(event)

    def close(self) -> None:
        """Logs what there is, if anything, and begins anew."""
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return
        try:
            self._fold()
            event = self._event()
            self._begin()
        finally:
            self._lock.release()
        self._hand_over(event)

    def count(self) -> int:
        """Returns how many samples the open window has."""
        if self.is_full:
            return 0
        count = self.summary.count + len(self.samples)
        return count if self.max_samples is None else min(count, self.max_samples)

    def values(self) -> dict[Aggregation, float]:
        """Returns what the samples of the open window amount to."""
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return Summary(()).values(self.aggregations)
        try:
            self._fold()
            self._set_room()
            return self.summary.values(self.aggregations)
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Lets go of what another process collected, and of the lock, which a thread of it may have held."""
        self._lock = threading.Lock()
        self.samples.clear()
        self._begin()

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
        for start in range(0, min(room, count), _PENDING_SAMPLES):
            self.summary.fold(taken[start : min(start + _PENDING_SAMPLES, room)])

    def _event(self) -> Event | None:
        if self.summary.count == 0:
            return None
        values = self.summary.values(self.aggregations)
        data = {f"{self.name}.{aggregation.value}": value for aggregation, value in values.items()}
        return Event(STAT_EVENT, datetime.now(UTC), data)

    def _hand_over(self, event: Event | None) -> None:
        if event is None:
            return
        try:
            self._log(event)
        except Exception:  # noqa: BLE001  # who adds, and the other windows, must not suffer from it
            if not self._log_has_failed:
                self._log_has_failed = True
                _log.exception(
                    "the window of stat %r could not be logged; further failures are not reported.", self.name
                )


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
        self._windows: dict[int, tuple[_Window, float]] = {}
        self._deadlines: dict[int, float] = {}
        self._lock = threading.Lock()
        self._begin()
        self._watches_process = False

    def _begin(self) -> None:
        self._news: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, window: _Window) -> int:
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
        """Closes all windows now, in this thread."""
        for window, _ in list(self._windows.values()):
            window.close()

    def close_due(self) -> float:
        """Closes the windows of which the time is over; returns how many seconds until the next one's is."""
        now = self._clock()
        for key, deadline in list(self._deadlines.items()):
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


_closer = WindowCloser()


class Stat:
    """Adds up measurements, and logs once per window what they amount to.

    ```python
    seconds = Stat("data_seconds", [Aggregation.MEAN, Aggregation.P95], window_size=timedelta(seconds=60))
    ...
    seconds.add(0.012)      # in any thread
    ```

    **Windows.** They follow one another from the making of the Stat on. When one ends, an event "events.monitor.Stat" is
    logged, its data named as in "data_seconds.p95"; a window without samples logs nothing. It ends on time, give or take
    ten milliseconds, whether anything more is added or not. What an open window holds is logged by `flush`, when the Stat
    is forgotten, and where the interpreter ends.

    **Threading.** All of it may be used from any thread. `add` neither waits nor calls anybody: handlers run in the thread
    that closes windows, or in the thread that calls `flush`, or, where `max_samples` is given, in the one whose `add`
    reached it.

    **After fork.** The child's Stats begin empty, and their windows end on time once the child has made a Stat itself.

    Args:
        name: what is measured, its unit included where it has one.
        aggregations: what is to be known of each window.
        window_size: how long a window lasts: more than no time.
        max_samples: how many samples a window takes: with the last of them it is logged, and more are discarded, and
            counted, until its time is over. None for no limit.
        log: what takes the event, instead of the handlers that are registered.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a window or a cap of nothing, or no aggregation at all.
    """

    __slots__ = ("__weakref__", "_room", "_samples", "_window")

    def __init__(
        self,
        name: str,
        aggregations: Iterable[Aggregation],
        window_size: timedelta,
        max_samples: int | None = None,
        *,
        log: Log = log_event,
    ) -> None:
        wanted = _check(name, aggregations, window_size, max_samples)
        self._window = _Window(name, wanted, window_size.total_seconds(), max_samples, log)
        self._samples = self._window.samples
        self._room = itertools.repeat(None, _PENDING_SAMPLES)
        finalizer = weakref.finalize(self, _closer.retire, _closer.open(self._window))
        # There, the windows are closed all at once.
        finalizer.atexit = False

    def add(self, value: float) -> None:
        """Adds a sample.

        Args:
            value: a number; a tensor of one element is read, which on a device waits for the device.

        Raises:
            TypeError: it is no number.
        """
        # The append is one call that no other thread can interrupt. So is the step of the iterator, which ends when enough
        # samples wait: a third of the price of looking at their number each time.
        if value.__class__ is float:
            for _ in self._room:
                self._samples.append(value)
                return
        self._add_carefully(value)

    def _add_carefully(self, value: Any) -> None:
        """Adds what is no float, or finds that enough samples wait."""
        if isinstance(value, str | bytes):
            raise TypeError(f"sample of stat {self.name!r} must be a number, got {value!r:.40}.")
        try:
            sample = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"sample of stat {self.name!r} must be a number, got {type(value).__name__}: {error}."
            ) from error
        self._samples.append(sample)
        if len(self._samples) >= _PENDING_SAMPLES:
            self._window.collect()
        if value.__class__ is float:
            self._room = itertools.repeat(None, max(_PENDING_SAMPLES - len(self._samples), 0))

    @property
    def name(self) -> str:
        """What is measured."""
        return self._window.name

    @property
    def count(self) -> int:
        """How many samples the open window has; zero again when it was logged."""
        return self._window.count()

    @property
    def discarded(self) -> int:
        """How many samples came after a window had reached `max_samples`."""
        return self._window.discarded

    def get(self) -> dict[Aggregation, float]:
        """Returns what the samples of the open window amount to; zeros where it has none."""
        return self._window.values()

    def flush(self) -> None:
        """Logs what the open window holds, if anything, in this thread."""
        self._window.close()

    def __repr__(self) -> str:
        return f"Stat({self.name!r}, count={self.count})"


def _check(
    name: str, aggregations: Iterable[Aggregation], window_size: timedelta, max_samples: int | None
) -> tuple[Aggregation, ...]:
    if not isinstance(name, str):
        raise TypeError(f"name of a stat must be a string, got {name!r} ({type(name).__name__}).")
    if isinstance(aggregations, str) or not isinstance(aggregations, Iterable):
        raise TypeError(f"aggregations of stat {name!r} must be a list, got {aggregations!r}.")
    wanted = tuple(dict.fromkeys(Aggregation(aggregation) for aggregation in aggregations))
    if not wanted:
        raise ValueError(
            f"aggregations of stat {name!r} must be at least one, got none. The choice is {', '.join(Aggregation)}."
        )
    if not isinstance(window_size, timedelta):
        raise TypeError(
            f"window_size of stat {name!r} must be a timedelta, got {window_size!r}. Write timedelta(seconds=60)."
        )
    if window_size <= timedelta():
        raise ValueError(f"window_size of stat {name!r} must be longer than nothing, got {window_size!r}.")
    if max_samples is not None and (isinstance(max_samples, bool) or not isinstance(max_samples, int)):
        raise TypeError(f"max_samples of stat {name!r} must be an integer or None, got {max_samples!r}.")
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples of stat {name!r} must be at least 1, got {max_samples}.")
    return wanted


def flush() -> None:
    """Logs what the open windows of all Stats of this process hold, in this thread."""
    _closer.flush()
