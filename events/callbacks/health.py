"""`HealthChecker` and `StragglerDetector`: GPUs that slow down, and ranks that the others wait for."""

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from events.logger.logger import Logger
from events.state import State
from events.timestamp import Time

from .periodic import Periodic
from .stats_monitor import Sample, Sampler
from .system_monitor import Gpus

__all__ = ["HealthChecker", "StragglerDetector"]

_log = logging.getLogger("events")

# Bits of `nvmlDeviceGetCurrentClocksEventReasons` that mean trouble, from NVML's nvml.h.
_THROTTLE_REASONS = {
    0x08: "hardware slowdown (temperature or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_MIN_RANKS = 2


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


class StragglerDetector(Periodic):
    """Detects ranks that are slower than the others and make them wait in each step.

    ```python
    Trainer(..., callbacks=[StragglerDetector("100ba", threshold=1.2)])
    ```

    Measures on each rank the time from the end of a batch to the beginning of the next backward pass:
    reading, transfers, forward pass, where ranks do not wait for each other. At an interval, logs
    `straggler/slowest_rank`, `straggler/slowest_seconds`, `straggler/median_seconds` (per batch) and
    `straggler/ratio`, and reports a rank beyond the threshold, again only after it has been another one or
    none.

    **Cost.** One collective per interval, on host memory. It uses the host's clock: on a GPU it shows
    slow reading and slow hosts, while slow kernels show up where the host waits for them.

    Args:
        interval: how often to compare; a bare number counts batches.
        threshold: how many times the median makes a straggler.
        clock: returns monotonic seconds.

    Raises:
        ValueError: the threshold is not above 1.
    """

    def __init__(
        self,
        interval: Time | str | int = "50ba",
        threshold: float = 1.5,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(interval)
        if not threshold > 1:
            raise ValueError(f"threshold must be above 1, got {threshold!r}.")
        self._threshold = threshold
        self._clock = clock
        self._start: float | None = None
        self._seconds = 0.0
        self._batches = 0
        self._reported: int | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Starts the interval."""
        super().fit_start(state, logger)
        self._start = None

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Starts the clock."""
        if self._start is None:
            self._start = self._clock()

    def before_backward(self, state: State, logger: Logger) -> None:
        """Stops the clock, at the first microbatch."""
        if self._start is not None:
            self._seconds += self._clock() - self._start
            self._batches += 1
            self._start = None

    def batch_end(self, state: State, logger: Logger) -> None:
        """Compares, if the interval has passed."""
        # What the collectives of the backward pass waited for is not counted; nor is an evaluation.
        self._start = None
        super().batch_end(state, logger)

    def due(self, state: State, logger: Logger) -> None:
        """Compares the ranks."""
        if self._batches:
            from events.trainer import distributed

            own, self._seconds, self._batches = self._seconds / self._batches, 0.0, 0
            self._compare(distributed.gather(own), state, logger)

    def _compare(self, seconds: list[float], state: State, logger: Logger) -> None:
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        median = statistics.median_low(seconds)
        ratio = seconds[slowest] / median if median > 0 else 1.0
        metrics: dict[str, Any] = {
            "straggler/slowest_rank": slowest,
            "straggler/slowest_seconds": seconds[slowest],
            "straggler/median_seconds": median,
            "straggler/ratio": ratio,
        }
        logger.log_metrics(metrics)
        if len(seconds) < _MIN_RANKS or ratio <= self._threshold:
            self._reported = None
        elif slowest != self._reported:
            self._reported = slowest
            if state.rank == 0:
                _log.warning(
                    "rank %d takes %.3g s per batch before the backward pass, %.2g times the median; "
                    "the others wait for it.",
                    slowest,
                    seconds[slowest],
                    ratio,
                )
