"""`Stat`: adds up measurements, and says once per window what they amount to.

Any thread may add. Windows are closed by one background thread for all Stats of the process.
"""

import atexit
import contextlib
import itertools
import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Any

import attrs

from .monitor_event import Event, log_event

__all__ = [
    "PENDING_SAMPLES",
    "STAT_EVENT",
    "Aggregation",
    "Log",
    "Stat",
    "Summary",
    "Window",
    "WindowCloser",
    "flush",
]

# Up to here percentiles are exact.
RESERVOIR_SAMPLES = 10_000


class Aggregation(StrEnum):
    """What is to be known of the samples of a window; the value is the suffix of its name, as in "loss.mean".

    One NaN among the samples makes all of it NaN but `VALUE` and `COUNT`, wherever it stood.
    """

    VALUE = "value"
    """The last sample."""
    MEAN = "mean"
    COUNT = "count"
    """How many samples; an integer."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """The standard deviation of the samples themselves: divided by their number, 0.0 for a single one."""
    P50 = "p50"
    """The median. Percentiles interpolate linearly between samples, as numpy's do by default."""
    P90 = "p90"
    P95 = "p95"
    P99 = "p99"


_RANKS = {Aggregation.P50: 0.5, Aggregation.P90: 0.9, Aggregation.P95: 0.95, Aggregation.P99: 0.99}


class Summary:
    """Samples, folded in chunk by chunk.

    Percentiles are exact up to 10,000 samples. Beyond, they are those of 10,000 drawn uniformly from all: algorithm L,
    Li, "Reservoir-sampling algorithms of time complexity O(n(1+log(N/n)))", ACM TOMS 20(4), 1994. The draw has a
    generator of its own with a fixed seed: training draws the same random numbers with and without it.

    Args:
        aggregations: what will be asked for; nothing else is kept.
    """

    def __init__(self, aggregations: Iterable[Aggregation]) -> None:
        wanted = frozenset(aggregations)
        self._needs_deviation = Aggregation.STD in wanted
        self._needs_samples = not wanted.isdisjoint(_RANKS)
        self._needs_extremes = not wanted.isdisjoint({Aggregation.MIN, Aggregation.MAX})
        self.count = 0
        self._last = 0.0
        self._sum = 0.0
        self._lowest = math.inf
        self._highest = -math.inf
        self._has_nan = False
        self._mean = 0.0
        self._squares = 0.0
        self._reservoir: list[float] = []
        self._random = random.Random(0)  # noqa: S311  # a sample of measurements, not a secret
        self._weight = 1.0
        self._next_draw = 0

    def fold(self, samples: list[float]) -> None:
        """Adds samples, in their order.

        Args:
            samples: at least one.
        """
        if self._needs_deviation:
            self._fold_deviation(samples)
        if self._needs_samples:
            self._fold_reservoir(samples)
        total = sum(samples)
        # A NaN among the samples makes the sum NaN; so do opposite infinities, whose extremes are known all the same.
        self._has_nan = self._has_nan or (math.isnan(total) and any(map(math.isnan, samples)))
        self._sum += total
        self.count += len(samples)
        self._last = samples[-1]
        if self._needs_extremes:
            lowest, highest = min(samples), max(samples)
            self._lowest = min(self._lowest, lowest)
            self._highest = max(self._highest, highest)

    def _fold_deviation(self, samples: list[float]) -> None:
        """Merges means and squared deviations: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm", 1979."""
        added = len(samples)
        mean = sum(samples) / added
        squares = sum([(sample - mean) * (sample - mean) for sample in samples])
        count = self.count + added
        delta = mean - self._mean
        self._squares += squares + delta * delta * (self.count * added / count)
        self._mean += delta * (added / count)

    def _fold_reservoir(self, samples: list[float]) -> None:
        room = RESERVOIR_SAMPLES - len(self._reservoir)
        self._reservoir += samples[:room]
        if len(self._reservoir) < RESERVOIR_SAMPLES:
            return
        if self._next_draw == 0:
            self._next_draw = RESERVOIR_SAMPLES - 1
            self._skip()
        while self._next_draw < self.count + len(samples):
            self._reservoir[self._random.randrange(RESERVOIR_SAMPLES)] = samples[self._next_draw - self.count]
            self._skip()

    def _skip(self) -> None:
        """Draws which sample is the next to enter the reservoir."""
        self._weight *= math.exp(math.log(1.0 - self._random.random()) / RESERVOIR_SAMPLES)
        self._next_draw += int(math.log(1.0 - self._random.random()) / math.log1p(-self._weight)) + 1

    def values(self, aggregations: Iterable[Aggregation]) -> dict[Aggregation, float]:
        """Returns what was asked for; zeros where there are no samples."""
        if self.count == 0:
            return {
                aggregation: 0 if aggregation is Aggregation.COUNT else 0.0 for aggregation in aggregations
            }
        ordered = sorted(self._reservoir) if not self._has_nan else []
        return {aggregation: self._value(aggregation, ordered) for aggregation in aggregations}

    def _value(self, aggregation: Aggregation, ordered: list[float]) -> float:
        if aggregation is Aggregation.COUNT:
            return self.count
        if aggregation is Aggregation.VALUE:
            return self._last
        if self._has_nan:
            return math.nan
        if aggregation in _RANKS:
            return _percentile(ordered, _RANKS[aggregation])
        if aggregation is Aggregation.STD:
            return math.sqrt(self._squares / self.count)
        return {
            Aggregation.SUM: self._sum,
            Aggregation.MEAN: self._sum / self.count,
            Aggregation.MAX: self._highest,
            Aggregation.MIN: self._lowest,
        }[aggregation]


def _percentile(ordered: list[float], share: float) -> float:
    """Interpolates linearly: the seventh definition of Hyndman and Fan, The American Statistician 50(4), 1996."""
    position = share * (len(ordered) - 1)
    below = ordered[math.floor(position)]
    above = ordered[math.ceil(position)]
    # Equal neighbours are returned as they are: infinity minus infinity is no number.
    return below if below == above else below + (above - below) * (position - math.floor(position))


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
        self._window = Window(name, wanted, window_size.total_seconds(), max_samples, log)
        self._samples = self._window.samples
        self._room = itertools.repeat(None, PENDING_SAMPLES)
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
        if len(self._samples) >= PENDING_SAMPLES:
            self._window.collect()
        if value.__class__ is float:
            self._room = itertools.repeat(None, max(PENDING_SAMPLES - len(self._samples), 0))

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
        self._window.settle()

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
