"""`Stat`: adds up measurements, and says once per window what they amount to.

Any thread may add. Windows are closed by one background thread for all Stats of the process.
"""

import itertools
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from ._monitor_event import log_event
from ._summary import Aggregation
from ._window import PENDING_SAMPLES, Log, Window, WindowCloser

__all__ = ["Stat", "flush"]

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
