"""`SystemMonitor`: logs the load of the machine: CPUs, memory, GPUs."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from .stats_monitor import Sample, Sampler

__all__ = ["Gpus", "SystemMonitor"]

_MILLIWATTS_PER_WATT = 1000


class Gpus:
    """The GPUs of this process, in torch's order.

    Args:
        nvml: the module `pynvml`, initialized.
        visible: the value of `CUDA_VISIBLE_DEVICES`, or None if it is not set.
    """

    def __init__(self, nvml: Any, visible: str | None = None) -> None:
        self._nvml = nvml
        self._handles = _visible_handles(nvml, visible)

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Returns the GPUs of this process, or None without library, driver or GPU."""
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
        """Returns the readings of each GPU; unsupported ones are left out."""
        return self._readings(self._utilization, self._memory, self._temperature, self._power)

    def health(self) -> dict[str, float]:
        """Returns utilization and throttle reasons (NVML's bits) of each GPU, where supported."""
        return self._readings(self._utilization, self._throttling)

    def _readings(self, *reads: Callable[[Any], dict[str, float]]) -> dict[str, float]:
        readings: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for read in reads:
                # A MIG slice has no utilization, some GPUs have no power sensor.
                with contextlib.suppress(self._nvml.NVMLError):
                    readings |= {f"gpu{index}/{name}": value for name, value in read(handle).items()}
        return readings

    def _throttling(self, handle: Any) -> dict[str, float]:
        # Renamed in CUDA 12.
        read = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        read = read or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return {"throttle_reasons": read(handle)}

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

    As CUDA does, stops at the first entry that names no device.
    """
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for entry in filter(None, visible.replace(" ", "").split(",")):
        try:
            if entry.isdecimal():
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
            else:
                handles.append(nvml.nvmlDeviceGetHandleByUUID(entry))
        except nvml.NVMLError:
            break
    return handles


class SystemMonitor(Sampler):
    """Logs the load of the machine.

    ```python
    Trainer(..., callbacks=[SystemMonitor(every_seconds=30)])
    ```

    | metric | value |
    |---|---|
    | `system/cpu_percent` | of all CPUs, since the last sample |
    | `system/memory_percent`, `system/memory_bytes` | in use on the machine |
    | `system/process/cpu_percent` | of one CPU; above 100 if several are used |
    | `system/process/memory_bytes` | resident set size |
    | `system/process/threads` | number of threads |
    | `system/gpu0/utilization_percent` | share of the time in which a kernel ran |
    | `system/gpu0/memory_percent`, `system/gpu0/memory_bytes` | in use on the device |
    | `system/gpu0/temperature_celsius`, `system/gpu0/power_watts` | temperature and power draw |

    GPUs are those visible to this process, numbered as in torch. Readings that a device does not support are
    left out, as are all GPUs without an NVIDIA driver or without `nvidia-ml-py`.

    **Threading.** A background thread samples. Samples are queued, with the step at their time, and logged by
    the training thread at the end of a batch, epoch, evaluation or `fit`. The thread starts at `INIT` and
    ends at close.

    **Ranks.** One process per machine samples: local rank 0.

    **Errors.** Failed samples are counted in `failures`; the first is reported.

    Args:
        every_seconds: the interval between samples.
        sample: returns one sample, its names without "system/"; replaces psutil and NVML.

    Raises:
        ImportError: psutil is missing.
        ValueError: the interval is not positive.
    """

    thread_name = "events-system-monitor"

    def __init__(self, every_seconds: float = 10.0, *, sample: Sample | None = None) -> None:
        super().__init__(sample or _Machine().sample, every_seconds, "system/")


class _Machine:
    """Reads psutil and NVML."""

    def __init__(self) -> None:
        try:
            import psutil
        except ImportError as error:
            raise ImportError(
                "SystemMonitor needs psutil, which is not installed. Run: pip install psutil"
            ) from error
        self._psutil: Any = psutil
        self._process: Any = None
        self._gpus: Gpus | None = None

    def sample(self) -> dict[str, float]:
        if self._process is None:
            # In the sampling thread: NVML may take a second to start. Loads are relative to the previous
            # call.
            self._process = self._psutil.Process()
            self._process.cpu_percent()
            self._psutil.cpu_percent()
            self._gpus = Gpus.detect()
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
