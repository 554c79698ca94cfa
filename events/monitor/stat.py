"""`Stat`: aggregates measurements and logs the aggregates once per time window.

Any thread may add samples. One background thread closes the windows of all Stats of the process; it starts
with the first Stat. `Stat` is the interface, `Window` holds what has been collected, `Summary` computes the
aggregates and `WindowCloser` is the thread.
"""

import atexit
import contextlib
import functools
import itertools
import logging
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, ClassVar

import attrs

from events.redaction import error_trace

from .monitor_event import STAT_EVENT, Event, log_event

__all__ = [
    "MAX_PENDING_SAMPLES",
    "RESERVOIR_SAMPLES",
    "STAT_EVENT",
    "Aggregation",
    "Stat",
    "Summary",
    "Window",
    "WindowCloser",
    "flush",
]

_log = logging.getLogger("events")

# Percentiles are exact up to this many samples.
RESERVOIR_SAMPLES = 10_000
# The `add` that finds this many pending samples folds them, which takes a tenth of a millisecond.
MAX_PENDING_SAMPLES = 4096
# If this many windows of a Stat wait for slow handlers, later windows are merged.
_MAX_WAITING_WINDOWS = 1000
_MIN_WAIT_SECONDS = 0.01
_MAX_WAIT_SECONDS = 3600.0
# The lock of a window is held for a millisecond at most. If it takes this long, two threads wait for each
# other, by way of the garbage collector.
_LOCK_TIMEOUT_SECONDS = 30.0
# How long a flush waits for a handler that is running in another thread.
_DELIVERY_TIMEOUT_SECONDS = 10.0


class Aggregation(StrEnum):
    """An aggregate of the samples of a window; the value is the suffix of its name, as in "loss.mean".

    ```python
    seconds = Stat("data_seconds", [Aggregation.MEAN, Aggregation.MAX], window_size=timedelta(seconds=60))
    print(Aggregation.P95.value)  # p95
    ```

    A NaN among the samples makes all aggregates NaN but `VALUE` and `COUNT`, whatever its position.
    """

    VALUE = "value"
    """The last sample."""
    MEAN = "mean"
    COUNT = "count"
    """The number of samples, an integer."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """The population standard deviation (divided by n); 0.0 for a single sample."""
    P50 = "p50"
    """The median. Percentiles interpolate linearly between samples, as numpy's do by default."""
    P90 = "p90"
    P95 = "p95"
    P99 = "p99"


_QUANTILES = {Aggregation.P50: 0.5, Aggregation.P90: 0.9, Aggregation.P95: 0.95, Aggregation.P99: 0.99}


class Stat:
    """Aggregates measurements and logs the aggregates once per time window.

    ```python
    seconds = Stat("data_seconds", [Aggregation.MEAN, Aggregation.P95], window_size=timedelta(seconds=60))
    ...
    seconds.add(0.012)      # in any thread
    ```

    **Windows.** Windows follow one another from the creation of the Stat on, and a sample belongs to the
    window of the time when it is added. When one ends, an event "events.monitor.Stat" is logged, its data
    named as in "data_seconds.p95"; an empty window logs nothing. It is logged within ten milliseconds,
    whether or not samples are added; later if a handler is slow or the interpreter busy, with the time of its
    end all the same. An open window is logged by `flush`, when the Stat is garbage-collected, and at
    interpreter exit.

    **Threading.** Everything may be called from any thread. `add` neither blocks nor calls handlers: these
    run in the thread that closes windows, in the thread that calls `flush`, or, with `max_samples`, in the
    thread whose `add` reached the limit. They run one at a time.

    **After fork.** The child's Stats begin empty; their windows end on time once the child has made a Stat
    itself.

    Args:
        name: the name of the measurement, including its unit.
        aggregations: what to compute for each window; members of `torch.monitor.Aggregation` are taken too.
        window_size: the length of a window, more than zero.
        max_samples: the limit of samples per window: the window is logged when it is reached, and further
            samples are discarded and counted until its time is over. None for no limit.
        log: called with the event instead of the registered handlers.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the window size or `max_samples` is not positive, or there is no aggregation.
    """

    __slots__ = ("__weakref__", "_samples", "_window")

    def __init__(
        self,
        name: str,
        aggregations: Iterable[Aggregation],
        window_size: timedelta,
        max_samples: int | None = None,
        *,
        log: Callable[[Event], object] = log_event,
    ) -> None:
        wanted = _check(name, aggregations, window_size, max_samples)
        self._window = Window(name, wanted, window_size.total_seconds(), max_samples, log)
        self._samples = self._window.samples
        finalizer = weakref.finalize(self, _closer.retire, _closer.open(self._window))
        # At interpreter exit all windows are closed at once.
        finalizer.atexit = False

    def add(self, v: float) -> None:
        """Adds a sample.

        Args:
            v: a number; a tensor of one element is read, which for a CUDA tensor waits for the device.

        Raises:
            TypeError: the value is not a number.
        """
        # `append` is atomic.
        samples, window = self._samples, self._window
        # The clock is a name of the module: an attribute would take 10 ns more.
        if monotonic() >= window.deadline:
            window.collect()
        samples.append(v if v.__class__ is float else self._float(v))
        if len(samples) >= window.max_pending:
            window.collect()

    def _float(self, value: Any) -> float:
        if isinstance(value, str | bytes):
            raise TypeError(f"sample of stat {self.name!r} must be a number, got {value!r:.40}.")
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"sample of stat {self.name!r} must be a number, got {type(value).__name__}: {error}."
            ) from error

    @property
    def name(self) -> str:
        """The name of the measurement."""
        return self._window.name

    @property
    def count(self) -> int:
        """The number of samples in the open window; zero once it is logged."""
        return self._window.count()

    @property
    def discarded(self) -> int:
        """The number of samples added after their window had reached `max_samples`."""
        return self._window.discarded

    def get(self) -> dict[Aggregation, float]:
        """Returns the aggregates of the open window; zeros if it is empty.

        A window that was logged because it reached `max_samples` is open until its time is over.
        """
        return self._window.values()

    def flush(self) -> None:
        """Logs the open window, unless it is empty, in this thread."""
        self._window.close()

    def __repr__(self) -> str:
        return f"Stat({self.name!r}, count={self.count})"


def flush() -> None:
    """Logs the open windows of all Stats of this process, in this thread.

    ```python
    requests = Stat("requests", [Aggregation.COUNT], window_size=timedelta(seconds=60))
    requests.add(1)
    monitor.flush()         # logs what the open window holds, without waiting for its end
    ```
    """
    _closer.flush()


def _aggregation(given: Any) -> Aggregation:
    """Returns an aggregation for its value, or for the member of `torch.monitor` with its name."""
    name = str(getattr(given, "name", ""))
    if type(given).__module__ == "torch._C._monitor" and name in Aggregation.__members__:
        return Aggregation[name]
    return Aggregation(given)


def _check(
    name: str, aggregations: Iterable[Aggregation], window_size: timedelta, max_samples: int | None
) -> tuple[Aggregation, ...]:
    if not isinstance(name, str):
        raise TypeError(f"name of a stat must be a string, got {name!r} ({type(name).__name__}).")
    if isinstance(aggregations, str) or not isinstance(aggregations, Iterable):
        raise TypeError(f"aggregations of stat {name!r} must be a list, got {aggregations!r}.")
    wanted = tuple(dict.fromkeys(map(_aggregation, aggregations)))
    if not wanted:
        raise ValueError(
            f"aggregations of stat {name!r} must not be empty. Choose from {', '.join(Aggregation)}."
        )
    if not isinstance(window_size, timedelta):
        raise TypeError(
            f"window_size of stat {name!r} must be a timedelta, got {window_size!r}. "
            "Write timedelta(seconds=60)."
        )
    if window_size <= timedelta():
        raise ValueError(f"window_size of stat {name!r} must be positive, got {window_size!r}.")
    if max_samples is not None:
        if type(max_samples) is not int:
            raise TypeError(f"max_samples of stat {name!r} must be an integer or None, got {max_samples!r}.")
        if max_samples < 1:
            raise ValueError(f"max_samples of stat {name!r} must be at least 1, got {max_samples}.")
    return wanted


class Summary:
    """Aggregates of samples that are folded in chunk by chunk; not thread-safe.

    Percentiles are exact up to 10,000 samples. Beyond, they are computed from 10,000 uniformly drawn samples:
    algorithm L, Li, "Reservoir-sampling algorithms of time complexity O(n(1+log(N/n)))", ACM TOMS 20(4),
    1994. The draw has its own generator with a fixed seed: it does not change the random numbers of training.

    Args:
        aggregations: what to compute; nothing else is kept.
    """

    def __init__(self, aggregations: Iterable[Aggregation]) -> None:
        wanted = frozenset(aggregations)
        self._needs_deviation = Aggregation.STD in wanted
        self._needs_samples = not wanted.isdisjoint(_QUANTILES)
        self._needs_extremes = not wanted.isdisjoint({Aggregation.MIN, Aggregation.MAX})
        self.count = 0
        self._last = 0.0
        # An integer as long as all samples are: then it is exact.
        self._sum: float = 0
        self._min = math.inf
        self._max = -math.inf
        self._has_nan = False
        self._mean = 0.0
        self._squares = 0.0
        self._reservoir: list[float] = []
        self._weight = 1.0
        self._next_draw = 0

    @functools.cached_property
    def _random(self) -> random.Random:
        # Made for the first draw: a generator takes 10 µs and 2 KB.
        return random.Random(0)  # noqa: S311  # a sample of measurements, not a secret

    def fold(self, samples: list[float]) -> None:
        """Adds samples, at least one, in their order."""
        if self._needs_deviation:
            self._fold_deviation(samples)
        if self._needs_samples:
            self._fold_reservoir(samples)
        total = sum(samples)
        # A NaN sample makes the sum NaN; so do opposite infinities, whose min and max are known all the same.
        self._has_nan = self._has_nan or (math.isnan(total) and any(map(math.isnan, samples)))
        self._sum += total
        self.count += len(samples)
        self._last = samples[-1]
        if self._needs_extremes:
            self._min = min(self._min, *samples)
            self._max = max(self._max, *samples)

    def _fold_deviation(self, samples: list[float]) -> None:
        """Merges means and squared deviations.

        Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
        1979.
        """
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
        """Draws the index of the next sample to enter the reservoir."""
        self._weight *= math.exp(math.log(1.0 - self._random.random()) / RESERVOIR_SAMPLES)
        self._next_draw += int(math.log(1.0 - self._random.random()) / math.log1p(-self._weight)) + 1

    def values(self, aggregations: Iterable[Aggregation]) -> dict[Aggregation, float]:
        """Returns the aggregates; zeros if there are no samples."""
        if self.count == 0:
            return {
                aggregation: 0 if aggregation is Aggregation.COUNT else 0.0 for aggregation in aggregations
            }
        exact = {Aggregation.COUNT: self.count, Aggregation.VALUE: self._last}
        known = exact | {
            Aggregation.SUM: self._sum,
            Aggregation.MEAN: self._sum / self.count,
            Aggregation.MAX: self._max,
            Aggregation.MIN: self._min,
            Aggregation.STD: math.sqrt(self._squares / self.count),
        }
        if self._reservoir and not self._has_nan:
            ordered = sorted(self._reservoir)
            known |= {one: _quantile(ordered, share) for one, share in _QUANTILES.items()}
        return {one: math.nan if self._has_nan and one not in exact else known[one] for one in aggregations}


def _quantile(ordered: list[float], share: float) -> float:
    """Interpolates linearly: definition 7 of Hyndman and Fan, The American Statistician 50(4), 1996."""
    position = share * (len(ordered) - 1)
    below = ordered[math.floor(position)]
    above = ordered[math.ceil(position)]
    # Equal neighbours are returned as they are: infinity minus infinity is NaN.
    return below if below == above else below + (above - below) * (position - math.floor(position))


@attrs.define(slots=False, eq=False)
class Window:
    """The samples of a Stat since it last logged; outlives its Stat until they are logged too.

    Any thread may append to `samples`, which is atomic; everything else is guarded by the lock. Handlers are
    called after the lock is released.
    """

    name: str
    aggregations: tuple[Aggregation, ...]
    seconds: float
    max_samples: int | None
    _log: Callable[[Event], object]
    # The closer sets these.
    clock: Callable[[], float] = attrs.field(default=monotonic, init=False)
    opened_at: float = attrs.field(default=0.0, init=False)
    # When the time of the window is over.
    deadline: float = attrs.field(default=0.0, init=False)
    discarded: int = attrs.field(default=0, init=False)
    samples: list[float] = attrs.field(factory=list, init=False)
    # The events of windows that have ended and are not logged yet.
    _ended: deque[Event] = attrs.field(factory=deque, init=False)
    _log_has_failed: bool = attrs.field(default=False, init=False)
    # Reentrant, to tell a signal handler in the holding thread, which must not wait, from another thread.
    _lock: Any = attrs.field(factory=threading.RLock, init=False)
    _is_held: bool = attrs.field(default=False, init=False)

    # Held while handlers are called, for all windows: whoever takes it has waited until they returned.
    delivering: ClassVar[Any] = threading.RLock()

    def __attrs_post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.summary = Summary(self.aggregations)
        self._update_max_pending()

    def _update_max_pending(self) -> None:
        """Sets at how many pending samples `Stat.add` calls `collect`."""
        room = (self.max_samples or 0) - self.summary.count
        self.max_pending = min(room, MAX_PENDING_SAMPLES) if room > 0 else MAX_PENDING_SAMPLES

    @property
    def _is_full(self) -> bool:
        """Whether the window reached `max_samples`: further samples of its time are discarded."""
        return self.summary.count == self.max_samples

    def is_due(self) -> bool:
        """Returns whether a window has ended and is not logged; an `add` may have begun the next one."""
        return self.clock() >= self.deadline or bool(self._ended)

    def collect(self) -> None:
        """Folds pending samples; logs a window that has reached `max_samples`. Skipped if locked."""
        with self._folding(timeout=0) as is_folded:
            is_full = is_folded and self._is_full
        if is_full:
            self._log_ended()

    def close(self, *, open_too: bool = True) -> None:
        """Logs the windows that have ended, and the open one, unless it is empty.

        Waits until windows that other threads are logging are logged, for ten seconds at most.
        """
        with self._folding() as is_folded:
            if is_folded and open_too:
                self._end()
        self._log_ended()

    def count(self) -> int:
        """Returns the number of samples in the open window."""
        with self._folding() as is_folded:
            return self.summary.count if is_folded and not self._is_full else 0

    def values(self) -> dict[Aggregation, float]:
        """Returns the aggregates of the open window."""
        with self._folding() as is_folded:
            return (self.summary if is_folded else Summary(())).values(self.aggregations)

    def clear_after_fork(self) -> None:
        """Drops the samples of the parent process, and the lock, which one of its threads may have held."""
        self._lock = threading.RLock()
        self._is_held = False
        self.samples.clear()
        self._ended.clear()
        self._reset()

    @contextlib.contextmanager
    def _folding(self, timeout: float = _LOCK_TIMEOUT_SECONDS) -> Iterator[bool]:
        """Folds pending samples and holds the lock; yields False if this very thread was interrupted in it.

        Also yields False if another thread has the lock for longer than the timeout.
        """
        if not self._lock.acquire(timeout=timeout):
            yield False
            return
        is_reentered, self._is_held = self._is_held, True
        try:
            if not is_reentered:
                self._fold()
            yield not is_reentered
        finally:
            self._is_held = is_reentered
            self._lock.release()

    def _fold(self) -> None:
        """Takes the pending samples; if the time of the window is over, ends it."""
        count = len(self.samples)
        taken = self.samples[:count]
        # In place: other threads append to this very list, behind what is taken.
        del self.samples[:count]
        room = count if self.max_samples is None else self.max_samples - self.summary.count
        self.discarded += max(count - room, 0)
        for start in range(0, min(room, count), MAX_PENDING_SAMPLES):
            self.summary.fold(taken[start : min(start + MAX_PENDING_SAMPLES, room)])
        if room and self._is_full:
            self._ended.append(self._event())
        now = self.clock()
        if now >= self.deadline:
            if len(self._ended) < _MAX_WAITING_WINDOWS or self._is_full:
                self._end()
            # One that ends late does not delay the next.
            number = math.floor((now - self.opened_at) / self.seconds)
            self.deadline = self.opened_at + (number + 1) * self.seconds
        self._update_max_pending()

    def _end(self) -> None:
        """Makes the event of the window, unless it is empty or was logged when full, and begins another."""
        if self.summary.count and not self._is_full:
            self._ended.append(self._event())
        self._reset()

    def _event(self) -> Event:
        values = self.summary.values(self.aggregations)
        data = {f"{self.name}.{aggregation.value}": value for aggregation, value in values.items()}
        late = timedelta(seconds=max(self.clock() - self.deadline, 0.0))
        return Event(STAT_EVENT, datetime.now(UTC) - late, data)

    def _log_ended(self) -> None:
        # A handler may fork, and a child has a lock of its own.
        lock = self.delivering
        is_alone = lock.acquire(timeout=_DELIVERY_TIMEOUT_SECONDS)
        try:
            while self._ended:
                # Without the lock, another thread may have been faster.
                with contextlib.suppress(IndexError):
                    self._log_one(self._ended.popleft())
        finally:
            if is_alone:
                lock.release()

    def _log_one(self, event: Event) -> None:
        try:
            self._log(event)
        except Exception as error:  # noqa: BLE001  # must not affect the caller of `add`, nor other windows
            if not self._log_has_failed:
                self._log_has_failed = True
                _log.error(
                    "the window of stat %r could not be logged; further failures are not reported.\n%s",
                    self.name,
                    error_trace(error),
                )


class WindowCloser:
    """The thread that closes windows on time, and logs the last window of Stats that are deleted.

    The thread starts with the first Stat and runs as long as the process. Windows are retired through a queue
    that may be put to from anywhere, the garbage collector included; the table of windows is changed by
    `open` and by the thread.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._keys = itertools.count()
        self._windows: dict[int, Window] = {}
        self._lock = threading.Lock()
        self._is_registered = False
        self._reset()

    def _reset(self) -> None:
        self._wake_ups: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, window: Window) -> int:
        """Adds a window; returns the key to retire it with."""
        from uploads.disk import call_in_forked_children

        key = self._add(window)
        with self._lock:
            if not self._is_registered:
                self._is_registered = True
                atexit.register(self.flush)
                call_in_forked_children(self._after_fork)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, args=(self._wake_ups,), name="events-monitor", daemon=True
                )
                self._thread.start()
        self._wake_ups.put(-1)
        return key

    def _add(self, window: Window) -> int:
        key = next(self._keys)
        window.clock, window.opened_at = self._clock, self._clock()
        window.deadline = window.opened_at + window.seconds
        self._windows[key] = window
        return key

    def retire(self, key: int) -> None:
        """Has the thread log a window for the last time, and remove it."""
        # The garbage collector may call this at any point: nothing here takes a lock.
        self._wake_ups.put(key)

    def flush(self) -> None:
        """Closes all windows in this thread; waits for windows that another thread is logging."""
        for window in self._windows.copy().values():
            window.close()

    def close_due(self) -> float:
        """Closes the windows whose time is over; returns the seconds until the next one is due."""
        # `copy` is atomic; during a loop, another thread may open a window.
        for window in self._windows.copy().values():
            if window.is_due():
                window.close(open_too=False)
        deadlines = [window.deadline for window in self._windows.copy().values()]
        return min(deadlines, default=math.inf) - self._clock()

    def _run(self, wake_ups: "SimpleQueue[int]") -> None:
        while True:
            wait = self.close_due()
            try:
                key = wake_ups.get(timeout=min(max(wait, _MIN_WAIT_SECONDS), _MAX_WAIT_SECONDS))
            except Empty:
                continue
            window = self._windows.get(key)
            if window is not None:
                window.close()
                # Only now: at interpreter exit another thread closes what is still in the table.
                del self._windows[key]

    def _after_fork(self) -> None:
        """Drops, in a forked child, what the parent collected and will log itself."""
        self._lock = threading.Lock()
        Window.delivering = threading.RLock()
        self._reset()
        for window in self._windows.values():
            window.clear_after_fork()


_closer = WindowCloser()
