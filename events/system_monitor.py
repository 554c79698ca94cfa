"""`SystemMonitor`: what the machine does while a model trains: processors, memory, GPUs."""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ._handover import Handover
from ._nvml import Gpus
from .logger import Logger
from .redaction import redact_text
from .state import State

__all__ = ["SystemMonitor"]

_log = logging.getLogger("events")

_STOP_SECONDS = 5.0

Sample = Callable[[], dict[str, float]]


class SystemMonitor(Handover):
    """Logs how busy the machine is.

    | metric | what |
    |---|---|
    | `system/cpu_percent` | of all processors, since the last sample |
    | `system/memory_percent`, `system/memory_bytes` | in use on the machine |
    | `system/process/cpu_percent` | of one processor; above 100 where several are used |
    | `system/process/memory_bytes` | resident |
    | `system/process/threads` | how many |
    | `system/gpu0/utilization_percent` | of the time, some kernel ran |
    | `system/gpu0/memory_percent`, `system/gpu0/memory_bytes` | in use on the device |
    | `system/gpu0/temperature_celsius`, `system/gpu0/power_watts` | |

    GPUs are those that this process may use, numbered as torch numbers them; what a device does not tell is left out, and
    so are all of them where there is no NVIDIA driver or no `nvidia-ml-py`.

    **Threading.** A thread of its own samples; a sample waits, with the step at its time, for the end of a batch, epoch,
    evaluation or `fit`, where the training thread logs it. The thread begins at `INIT` and ends at close.

    **Ranks.** One process per machine samples, that of local rank 0.

    **Errors.** A sample that fails is counted in `failures`, and the first is reported.

    Args:
        every_seconds: how long between two samples.
        sample: returns one sample, its names without "system/", instead of asking psutil and NVML.

    Raises:
        ImportError: psutil is missing.
        ValueError: the time between two samples is nothing.
    """

    def __init__(self, every_seconds: float = 10.0, *, sample: Sample | None = None) -> None:
        super().__init__(max_waiting=1000)
        if not every_seconds > 0:
            raise ValueError(f"every_seconds must be more than nothing, got {every_seconds!r}.")
        self.failures = 0
        self._every_seconds = every_seconds
        self._sample = sample or _Machine().sample
        self._thread: threading.Thread | None = None
        self._is_stopping = threading.Event()

    def init(self, state: State, logger: Logger) -> None:
        """Starts the thread that samples."""
        super().init(state, logger)
        if state.local_rank == 0 and self._thread is None:
            self._is_stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._is_stopping,), name="events-system-monitor", daemon=True
            )
            self._thread.start()

    def deliver(self, item: tuple[int | None, dict[str, float]]) -> None:
        """Logs a sample."""
        step, sample = item
        if self._logger is not None:
            self._logger.log_metrics({f"system/{name}": value for name, value in sample.items()}, step)

    def stop(self) -> None:
        """Ends the thread, and logs what is there; a second time does nothing. Waits five seconds at most."""
        if os.getpid() != self._pid:
            # A forked child has neither the thread nor, maybe, the event's lock.
            return
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_stopping.set()
            thread.join(_STOP_SECONDS)
            if thread.is_alive():
                _log.warning(
                    "SystemMonitor: a sample takes longer than %.0f s; its thread is left behind.",
                    _STOP_SECONDS,
                )
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
                    "SystemMonitor could not sample; further failures are not reported: %s",
                    redact_text(f"{type(error).__name__}: {error}"),
                )
            return
        self.put((step, sample))


class _Machine:
    """Asks psutil and NVML."""

    def __init__(self) -> None:
        try:
            import psutil
        except ImportError as error:
            raise ImportError(
                "SystemMonitor must have psutil, got none installed. "
                "Run pip install 'training-destinations[system]'."
            ) from error
        self._psutil: Any = psutil
        self._process: Any = None
        self._gpus: Gpus | None = None

    def sample(self) -> dict[str, float]:
        if self._process is None:
            # Here, in the thread that samples: asking for GPUs may take a second. Loads are since the last look.
            self._process = self._psutil.Process()
            self._process.cpu_percent()
            self._psutil.cpu_percent()
            self._gpus = Gpus.found()
            time.sleep(0.1)
        memory = self._psutil.virtual_memory()
        with self._process.oneshot():
            sample = {
                "cpu_percent": self._psutil.cpu_percent(),
                "memory_percent": memory.percent,
                "memory_bytes": memory.total - memory.available,
                "process/cpu_percent": self._process.cpu_percent(),
                "process/memory_bytes": self._process.memory_info().rss,
                "process/threads": self._process.num_threads(),
            }
        return sample | (self._gpus.sample() if self._gpus is not None else {})
