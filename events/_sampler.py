"""What asks for measurements in a thread of its own, and logs them in the one that trains."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from ._handover import Handover
from .logger import Logger
from .redaction import redact_text
from .state import State

__all__ = ["Sample", "Sampler"]

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
