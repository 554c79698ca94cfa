"""`SystemMonitor`: what the machine does while a model trains: processors, memory, GPUs."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from .stats_monitor import Sample, Sampler

__all__ = ["Gpus", "SystemMonitor"]

_MILLIWATTS_PER_WATT = 1000


class Gpus:
    """GPUs, in torch's order.

    Args:
        nvml: the module `pynvml`, initialised.
        visible: the value of `CUDA_VISIBLE_DEVICES`, or None where it is not set.
    """

    def __init__(self, nvml: Any, visible: str | None = None) -> None:
        self._nvml = nvml
        self._handles = _visible_handles(nvml, visible)

    @classmethod
    def found(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Returns the GPUs of this process, or None where there is no library, driver or GPU."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            gpus = cls(pynvml, environment.get("CUDA_VISIBLE_DEVICES"))
        except pynvml.NVMLError:
            return None
        return gpus if gpus._handles else None

    def sample(self) -> dict[str, float]:
        """Returns what each GPU tells; what one does not is left out."""
        sample: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for read in (self._utilization, self._memory, self._temperature, self._power):
                sample |= {f"gpu{index}/{name}": value for name, value in self._tell(read, handle).items()}
        return sample

    def _tell(self, read: Callable[[Any], dict[str, float]], handle: Any) -> dict[str, float]:
        try:
            return read(handle)
        except self._nvml.NVMLError:
            # A slice of a GPU has no utilization, some have no power sensor.
            return {}

    def _utilization(self, handle: Any) -> dict[str, float]:
        return {"utilization_percent": self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu}

    def _memory(self, handle: Any) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_bytes": memory.used, "memory_percent": 100 * memory.used / memory.total}

    def _temperature(self, handle: Any) -> dict[str, float]:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return {"temperature_celsius": self._nvml.nvmlDeviceGetTemperature(handle, sensor)}

    def _power(self, handle: Any) -> dict[str, float]:
        return {"power_watts": self._nvml.nvmlDeviceGetPowerUsage(handle) / _MILLIWATTS_PER_WATT}


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """Returns the devices that `CUDA_VISIBLE_DEVICES` names, by index or by UUID, in its order.

    As CUDA reads it: the list ends at the first entry that names no device.
    """
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for entry in filter(None, visible.replace(" ", "").split(",")):
        try:
            by_index = entry.isdecimal()
            handles.append(
                nvml.nvmlDeviceGetHandleByIndex(int(entry))
                if by_index
                else nvml.nvmlDeviceGetHandleByUUID(entry)
            )
        except nvml.NVMLError:
            break
    return handles


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
