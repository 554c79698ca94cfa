"""`HealthChecker`: GPUs that slow down."""

import functools
import logging
from collections.abc import Mapping

from .stats_monitor import Sample, Sampler
from .system_monitor import Gpus

__all__ = ["HealthChecker"]

_log = logging.getLogger("events")

# Bits of `nvmlDeviceGetCurrentClocksEventReasons` that mean trouble, from NVML's nvml.h.
_THROTTLE_REASONS = {
    0x08: "hardware slowdown (temperature or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class HealthChecker(Sampler):
    """Warns of GPUs that are throttled, and of those that work less than the others of the machine.

    ```python
    Trainer(..., callbacks=[HealthChecker(sample_freq=30)])
    ```

    Logs `health/gpu<i>/throttled` (0 or 1) and `health/gpu<i>/utilization_percent` at an interval. A GPU is
    reported once when it starts to be throttled, with the reasons that NVML gives, and once when it stops;
    utilizations that differ by more than `threshold` are reported once per episode. Needs `nvidia-ml-py` and
    an NVIDIA driver; without them it does nothing.

    **Threading.** A background thread samples; see `SystemMonitor`. One process per machine samples.

    Args:
        threshold: the greatest difference of utilizations of the machine's GPUs, in percent.
        sample_freq: seconds between samples.
        sample: returns one sample: `gpu<i>/utilization_percent` and `gpu<i>/throttle_reasons`, NVML's bits;
            replaces NVML.
    """

    thread_name = "events-health-checker"

    def __init__(
        self, threshold: float = 10.0, sample_freq: float = 5.0, *, sample: Sample | None = None
    ) -> None:
        self._threshold = threshold
        self._read = sample or self._read_nvml
        self._throttled: dict[str, str] = {}
        self._is_uneven = False
        super().__init__(self._check, sample_freq, "health/")

    @functools.cached_property
    def _gpus(self) -> Gpus | None:
        # Used in the sampling thread alone: NVML may take a second to start.
        return Gpus.detect()

    def _read_nvml(self) -> Mapping[str, float]:
        return {} if self._gpus is None else self._gpus.health()

    def _check(self) -> Mapping[str, float]:
        sample = dict(self._read())
        metrics: dict[str, float] = {}
        for name, value in sample.items():
            gpu, _, reading = name.partition("/")
            if reading == "throttle_reasons":
                reasons = [text for bit, text in _THROTTLE_REASONS.items() if int(value) & bit]
                self._report_throttling(gpu, ", ".join(reasons))
                metrics[f"{gpu}/throttled"] = float(bool(reasons))
            else:
                metrics[name] = value
        loads = {name: value for name, value in metrics.items() if name.endswith("/utilization_percent")}
        if len(loads) > 1:
            self._report_uneven(loads)
        return metrics

    def _report_throttling(self, gpu: str, reasons: str) -> None:
        before = self._throttled.get(gpu, "")
        if reasons and reasons != before:
            _log.warning("%s is throttled: %s.", gpu, reasons)
        elif before and not reasons:
            _log.warning("%s is no longer throttled.", gpu)
        self._throttled[gpu] = reasons

    def _report_uneven(self, loads: Mapping[str, float]) -> None:
        lowest = min(loads, key=loads.__getitem__)
        spread = max(loads.values()) - loads[lowest]
        if spread > self._threshold and not self._is_uneven:
            _log.warning(
                "utilization of GPUs differs by %.0f %%; the lowest is %s with %.0f %%.",
                spread,
                lowest.partition("/")[0],
                loads[lowest],
            )
        self._is_uneven = spread > self._threshold
