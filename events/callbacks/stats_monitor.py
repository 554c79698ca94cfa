"""`StatsMonitor`: logs the counters of another object: a replay buffer, a collector, a data loader, a cache.

`Sampler`, its base, calls a function at an interval in a thread of its own; `SystemMonitor` uses it too.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from events.logger.logger import Logger
from events.logger.values import host_metrics
from events.monitor.bridges import QueuedCallback
from events.redaction import error_text
from events.state import State

__all__ = ["Sample", "Sampler", "StatsMonitor"]

_log = logging.getLogger("events")

_JOIN_TIMEOUT_SECONDS = 5.0

Sample = Callable[[], Mapping[str, float]]


class Sampler(QueuedCallback):
    """Calls a function at an interval and logs the metrics that it returns.

    **Threading.** A thread calls the function. Samples are queued, with the step at their time, and logged by
    the training thread at the end of a batch, epoch, evaluation or `fit`. The thread starts at `INIT` and
    ends at close.

    **Ranks.** One process per machine samples: local rank 0.

    **Errors.** Failed samples are counted in `failures`; the first is reported.

    Args:
        sample: returns metrics; called in the thread. An empty sample is not logged.
        every_seconds: the interval between samples.
        prefix: prepended to the name of each metric, as it is.

    Raises:
        ValueError: the interval is not positive.
    """

    thread_name = "events-sampler"
    # Whether a last sample is taken at close.
    samples_at_end = False

    def __init__(self, sample: Sample, every_seconds: float, prefix: str) -> None:
        super().__init__(max_pending=1000)
        if not every_seconds > 0:
            raise ValueError(f"every_seconds must be positive, got {every_seconds!r}.")
        self.failures = 0
        self._every_seconds = every_seconds
        self._sample = sample
        self._prefix = prefix
        self._thread: threading.Thread | None = None
        self._is_stopping = threading.Event()

    def init(self, state: State, logger: Logger) -> None:
        """Starts the thread that samples."""
        super().init(state, logger)
        if state.local_rank == 0 and self._thread is None:
            self._is_stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._run,
                args=(self._is_stopping,),
                name=self.thread_name,
                daemon=True,
            )
            self._thread.start()

    def deliver(self, item: tuple[int | None, Mapping[str, float]]) -> None:
        """Logs a sample."""
        step, sample = item
        if self._logger is not None:
            self._logger.log_metrics({f"{self._prefix}{name}": value for name, value in sample.items()}, step)

    def stop(self) -> None:
        """Ends the thread and logs pending samples; a second call does nothing. Blocks for 5 s at most."""
        super().stop()
        if os.getpid() != self._pid:
            # A forked child has no thread, and the event's lock may never be released.
            return
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_stopping.set()
            thread.join(_JOIN_TIMEOUT_SECONDS)
            if thread.is_alive():
                _log.warning(
                    "%s: a sample takes longer than %.0f s; its thread is abandoned.",
                    type(self).__name__,
                    _JOIN_TIMEOUT_SECONDS,
                )
            elif self.samples_at_end:
                self._take_sample()
        self.drain()

    def _run(self, is_stopping: threading.Event) -> None:
        next_at = time.monotonic()
        while True:
            self._take_sample()
            # Missed samples are skipped.
            next_at = max(next_at + self._every_seconds, time.monotonic())
            if is_stopping.wait(max(next_at - time.monotonic(), 0.0)):
                return

    def _take_sample(self) -> None:
        step = self.step()
        try:
            sample = self._sample()
        except Exception as error:  # noqa: BLE001  # a sensor must not end the thread
            self.failures += 1
            if self.failures == 1:
                _log.warning(
                    "%s could not sample; further failures are not reported: %s",
                    type(self).__name__,
                    error_text(error),
                )
            return
        if sample:
            self.put((step, sample))


class StatsMonitor(Sampler):
    """Logs the counters of another object at an interval.

    ```python
    buffer = {"written": 0, "size": 0}
    Trainer(..., callbacks=[StatsMonitor(lambda: buffer, name="buffer", rates=["written"])])
    ```

    The source has a method `stats()`, or is a function, that returns numbers by name. Nested names are joined
    with "/"; values that are not numbers are left out. It is called in a background thread and must be safe
    there.

    **Rates.** For each counter named in `rates`, "name_per_sec" is logged too: its increase per second since
    it was last logged. A counter that decreased was reset: it has no rate until the next sample.

    **When.** Every `every_seconds`, and at close.

    **Threading, ranks, errors.** As for `SystemMonitor`: a thread on local rank 0 samples; the training
    thread logs at the end of batches, epochs, evaluations and `fit`, with the step of the sample. Errors are
    counted in `failures`; the first is reported.

    Args:
        source: has `stats()`, or is a function, that returns a mapping.
        name: prepended to the name of each metric, followed by "/".
        every_seconds: the interval between samples.
        rates: the counters whose rates are logged.
        clock: returns monotonic seconds.

    Raises:
        TypeError: the source has no `stats()` and is not a function.
        ValueError: the interval is not positive.
    """

    thread_name = "events-stats-monitor"
    samples_at_end = True

    def __init__(
        self,
        source: Any,
        *,
        name: str = "",
        every_seconds: float = 10.0,
        rates: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        read_stats = getattr(source, "stats", source)
        if not callable(read_stats):
            raise TypeError(
                f"source must have stats() or be a function, got {source!r:.80} ({type(source).__name__})."
            )
        super().__init__(self._next_sample, every_seconds, f"{name}/" if name else "")
        self._read_stats: Callable[[], Mapping[str, Any]] = read_stats
        self._rates = frozenset(rates)
        self._clock = clock
        self._last_logged_at = 0.0
        self._last_logged: dict[str, float] = {}

    def _next_sample(self) -> Mapping[str, float]:
        numbers, _ = host_metrics(self._read_stats())
        now = self._clock()
        seconds = now - self._last_logged_at
        rates = {
            f"{name}_per_sec": (numbers[name] - self._last_logged[name]) / seconds
            for name in numbers
            if name in self._rates
            and name in self._last_logged
            and seconds > 0
            and numbers[name] >= self._last_logged[name]
        }
        self._last_logged_at, self._last_logged = now, numbers
        return numbers | rates
