"""What NVIDIA's management library tells about the GPUs that this process may use.

https://docs.nvidia.com/deploy/nvml-api/ through `nvidia-ml-py`, which is imported here alone. One thread at a time.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Self

__all__ = ["Gpus"]

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
