"""`StatsMonitor`: what something that counts by itself has to say: a replay buffer, a collector, a data loader, a cache."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any

from events.logger.logger import Logger
from events.monitor.forward import Handover
from events.redaction import redact_text
from events.state import State

__all__ = ["Sample", "Sampler", "StatsMonitor"]

_log = logging.getLogger("events")

_STOP_SECONDS = 5.0

Sample = Callable[[], Mapping[str, float]]


class Sampler(Handover):
    """Calls a function again and again, and logs what it returns.

    **Threading.** A thread of its own calls; what comes waits, with the step at its time, for the end of a batch, epoch,
    evaluation or `fit`, where the training thread logs it. The thread begins at `INIT` and ends at close.

    **Ranks.** One process per machine samples, that of local rank 0.

    **Errors.** A sample that fails is counted in `failures`, and the first is reported.

    Args:
        sample: returns metrics; it is called in the thread, and one that is empty is not logged.
        every_seconds: how long between two samples.
        prefix: stands before the name of each metric, as it is.
        thread_name: the name of the thread.
        samples_at_end: whether one more is taken at close.
    """

    def __init__(
        self,
        sample: Sample,
        every_seconds: float,
        prefix: str,
        *,
        thread_name: str,
        samples_at_end: bool = False,
    ) -> None:
        super().__init__(max_waiting=1000)
        if not every_seconds > 0:
            raise ValueError(f"every_seconds must be more than nothing, got {every_seconds!r}.")
        self.failures = 0
        self._every_seconds = every_seconds
        self._sample = sample
        self._prefix = prefix
        self._thread_name = thread_name
        self._samples_at_end = samples_at_end
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
                name=self._thread_name,
                daemon=True,
            )
            self._thread.start()

    def deliver(self, item: tuple[int | None, Mapping[str, float]]) -> None:
        """Logs a sample."""
        step, sample = item
        if self._logger is not None:
            self._logger.log_metrics({f"{self._prefix}{name}": value for name, value in sample.items()}, step)

    def stop(self) -> None:
        """Ends the thread, and logs what is there; a second time does nothing. Waits five seconds at most."""
        super().stop()
        if os.getpid() != self._pid:
            # A forked child has neither the thread nor, maybe, the event's lock.
            return
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_stopping.set()
            thread.join(_STOP_SECONDS)
            if thread.is_alive():
                _log.warning(
                    "%s: a sample takes longer than %.0f s; its thread is left behind.",
                    type(self).__name__,
                    _STOP_SECONDS,
                )
            elif self._samples_at_end:
                self._take_sample()
        self.drain()

    def _run(self, is_stopping: threading.Event) -> None:
        next_at = time.monotonic()
        while True:
            self._take_sample()
            # Late samples are not made up for.
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
                    redact_text(f"{type(error).__name__}: {error}"),
                )
            return
        if sample:
            self.put((step, sample))


class StatsMonitor(Sampler):
    """Asks something for its numbers from time to time, and logs them.

    ```python
    Trainer(..., callbacks=[StatsMonitor(replay_buffer, name="buffer", rates=["written"])])
    ```

    What is asked has a method `stats()`, or is a function, that returns numbers by name, nested or not; names are joined
    with "/", and what is no number is left out. It is called in another thread than the one that trains: it must be safe
    there.

    **Rates.** Of a counter named in `rates`, "name_per_sec" is logged too: by how much it grew since it was logged last, for
    each second between. A counter that fell was reset; it has no rate until the next time.

    **When.** Every `every_seconds`; with `every_count=("frames", 10_000)`, it is asked as often, and logged where the counter
    crossed a multiple of 10,000 since. Several crossed at once are one. A counter that fell is counted from there.
    One more sample is logged at close.

    **Threading, ranks, errors.** A thread asks, on the process of local rank 0; the training thread logs at the end of
    batches, epochs, evaluations and `fit`, with the step at which it was asked. An error of what is asked is counted in
    `failures`, and the first is reported.

    Args:
        source: has `stats()`, or is a function, that returns a mapping.
        name: stands before the name of each metric, with "/" between them.
        every_seconds: how long between two questions.
        every_count: the counter that decides what is logged, and its multiple.
        rates: the counters of which a rate is logged.
        clock: seconds that never go back.

    Raises:
        TypeError: the source has no `stats()`, and is no function.
        ValueError: the time between two questions, or the multiple, is nothing.
    """

    def __init__(
        self,
        source: Any,
        *,
        name: str = "",
        every_seconds: float = 10.0,
        every_count: tuple[str, float] | None = None,
        rates: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ask = getattr(source, "stats", source)
        if not callable(ask):
            raise TypeError(
                f"source must have stats(), or be a function, got {source!r:.80} ({type(source).__name__})."
            )
        if every_count is not None and not every_count[1] > 0:
            raise ValueError(f"every_count must have a positive multiple, got {every_count!r}.")
        super().__init__(
            self._next,
            every_seconds,
            f"{name}/" if name else "",
            thread_name="events-stats-monitor",
            samples_at_end=True,
        )
        self._ask: Callable[[], Mapping[str, Any]] = ask
        self._every_count = every_count
        self._rates = frozenset(rates)
        self._clock = clock
        self._counted: float | None = None
        self._logged_at = 0.0
        self._logged: dict[str, float] = {}

    def _next(self) -> Mapping[str, float]:
        numbers = dict(_numbers(self._ask()))
        if not self._is_due(numbers):
            return {}
        now = self._clock()
        seconds = now - self._logged_at
        grown = {
            f"{name}_per_sec": (numbers[name] - self._logged[name]) / seconds
            for name in numbers
            if name in self._rates
            and name in self._logged
            and seconds > 0
            and numbers[name] >= self._logged[name]
        }
        self._logged_at, self._logged = now, numbers
        return numbers | grown

    def _is_due(self, numbers: Mapping[str, float]) -> bool:
        if self._every_count is None or self._is_stopping.is_set():
            return True
        name, multiple = self._every_count
        if name not in numbers:
            return False
        before, self._counted = self._counted, numbers[name]
        return (
            before is not None
            and numbers[name] >= before
            and math.floor(numbers[name] / multiple) > math.floor(before / multiple)
        )


def _numbers(stats: Mapping[str, Any], prefix: str = "") -> "list[tuple[str, float]]":
    found: list[tuple[str, float]] = []
    for name, value in stats.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int):
            found.append((f"{prefix}{name}", value))
        elif isinstance(value, Real):
            found.append((f"{prefix}{name}", float(value)))
        elif getattr(value, "ndim", None) == 0:
            found.append((f"{prefix}{name}", value.item()))
    return found
