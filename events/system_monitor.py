"""`SystemMonitor`: what the machine does while a model trains: processors, memory, GPUs."""

import time
from typing import Any

from ._nvml import Gpus
from ._sampler import Sample, Sampler

__all__ = ["SystemMonitor"]


class SystemMonitor(Sampler):
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
        super().__init__(
            sample or _Machine().sample, every_seconds, "system/", thread_name="events-system-monitor"
        )


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
