"""`SpeedMonitor` and `RuntimeEstimator`: how fast training is, and how long it will take.

All read the clock of the run (`state.timestamp`), which leaves evaluation out, and wait for no device.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from events.callback import Callback
from events.logger.logger import Logger
from events.state import State
from events.timestamp import Timestamp, TimeUnit

__all__ = ["GPU_FLOPS", "RuntimeEstimator", "SpeedMonitor"]

_SECONDS_PER = {"seconds": 1, "minutes": 60, "hours": 3_600, "days": 86_400}


def _tensor_cores(lower: float, fp32: float, tf32: float | None = None) -> dict[str, float]:
    """Returns dense operations per second by precision, in TFLOPS."""
    return {
        "fp32": fp32 * 1e12,
        "tf32": (fp32 if tf32 is None else tf32) * 1e12,
        **dict.fromkeys(("fp16", "amp_fp16", "bf16", "amp_bf16"), lower * 1e12),
    }


GPU_FLOPS: dict[str, dict[str, float]] = {
    "B200": _tensor_cores(2250, 75, 1100),
    "H200": _tensor_cores(989.4, 67, 494.7),
    "H100 PCIe": _tensor_cores(756.5, 51, 378),
    "H100 NVL": _tensor_cores(835.5, 60, 417.5),
    "H100": _tensor_cores(989.4, 67, 494.7),
    "A100": _tensor_cores(312, 19.5, 156),
    "L40S": _tensor_cores(362, 91.6, 183),
    "L4": _tensor_cores(121, 30.3, 60),
    "A10": _tensor_cores(125, 31.2, 62.5),
    "RTX 4090": _tensor_cores(165.2, 82.6, 82.6),
    "T4": {"fp32": 8.1e12, "fp16": 65e12, "amp_fp16": 65e12},
    "V100": {"fp32": 15.7e12, "fp16": 125e12, "amp_fp16": 125e12},
}
"""Peak dense operations per second by a part of the device's name, first match, and precision.

From NVIDIA's data sheets, without the factor of two for sparsity.
"""


def _peak_flops(device_name: str, precision: str) -> float | None:
    for name, by_precision in GPU_FLOPS.items():
        if all(part in device_name.replace("-", " ").split() for part in name.split()):
            return by_precision.get(precision)
    return None


def _divider(time_unit: str) -> int:
    if time_unit not in _SECONDS_PER:
        raise ValueError(f"time_unit must be one of {', '.join(_SECONDS_PER)}, got {time_unit!r}.")
    return _SECONDS_PER[time_unit]


def _rates(since: Timestamp, now: Timestamp, seconds: float) -> dict[str, float]:
    """Returns what was counted in a second between two timestamps; counts that stood still are left out."""
    counts = {
        "batches": (now.batch - since.batch).value,
        "samples": (now.sample - since.sample).value,
        "tokens": (now.token - since.token).value,
    }
    return {f"{name}_per_sec": count / seconds for name, count in counts.items() if count > 0}


def _prefixed(prefix: str, rates: Mapping[str, float], ranks: int = 1) -> dict[str, float]:
    return {f"{prefix}/{name}": rate / ranks for name, rate in rates.items()}


class SpeedMonitor(Callback):
    """Logs the speed of training over the last batches, and the time spent.

    ```python
    Trainer(..., callbacks=[SpeedMonitor(window_size=50)])
    ```

    | metric | value |
    |---|---|
    | `throughput/batches_per_sec`, `throughput/samples_per_sec` | over the last `window_size`, all ranks |
    | `throughput/tokens_per_sec` | the same, if the loop counts tokens |
    | `throughput/flops_per_sec` | the same, if the model has `flops_per_batch(batch)` for one rank |
    | `throughput/device/…` | each of these divided by the number of ranks |
    | `throughput/device/mfu` | operations per second as a share of the GPU's maximum |
    | `time/train`, `time/val`, `time/total` | time spent, with each batch |

    The first four begin once the window is full. All ranks are assumed to do the same number of operations,
    so there is no collective.

    Args:
        window_size: the number of batches.
        gpu_flops_available: peak operations per second of a device. Default: from the table `GPU_FLOPS`, by
            the name of the GPU and the precision; without either there is no `mfu`.
        time_unit: "seconds", "minutes", "hours" or "days".

    Raises:
        ValueError: the unit is unknown, or the window is empty.
    """

    def __init__(
        self,
        window_size: int = 100,
        gpu_flops_available: float | None = None,
        time_unit: str = "hours",
    ) -> None:
        super().__init__()
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, got {window_size}.")
        self._window: deque[Timestamp] = deque(maxlen=window_size + 1)
        self._flops: deque[float] = deque(maxlen=window_size)
        self.gpu_flops_available = gpu_flops_available
        self.total_eval_wct = 0.0
        self._divider = _divider(time_unit)

    def init(self, state: State, logger: Logger) -> None:
        """Looks up what the GPU can do."""
        if self.gpu_flops_available is None and state.device is not None and state.device.type == "cuda":
            import torch

            name = torch.cuda.get_device_name(state.device.index)
            self.gpu_flops_available = _peak_flops(name, state.precision.value)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Counts a batch, and logs."""
        self._window.append(state.timestamp)
        flops_per_batch: Any = getattr(state.model, "flops_per_batch", None)
        if flops_per_batch is not None:
            if not callable(flops_per_batch):
                raise TypeError(
                    "flops_per_batch of the model must be a function of a batch, "
                    f"got {type(flops_per_batch).__name__}."
                )
            self._flops.append(float(flops_per_batch(state.batch)) * state.world_size)
        train_wct = state.timestamp.total_wct.total_seconds()
        logger.log_metrics(
            {
                **self._rates(state.world_size),
                "time/train": train_wct / self._divider,
                "time/val": self.total_eval_wct / self._divider,
                "time/total": (train_wct + self.total_eval_wct) / self._divider,
            }
        )

    def eval_end(self, state: State, logger: Logger) -> None:
        """Counts the time of an evaluation."""
        self.total_eval_wct += state.eval_timestamp.total_wct.total_seconds()

    def state_dict(self) -> dict[str, Any]:
        """Returns the time spent in evaluations."""
        return {"total_eval_wct": self.total_eval_wct}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the time spent in evaluations."""
        self.total_eval_wct = state["total_eval_wct"]

    def _rates(self, ranks: int) -> dict[str, float]:
        since, now = self._window[0], self._window[-1]
        seconds = (now.total_wct - since.total_wct).total_seconds()
        if len(self._window) < (self._window.maxlen or 0) or seconds <= 0:
            return {}
        rates = {"samples_per_sec": 0.0} | _rates(since, now, seconds)
        if len(self._flops) == self._flops.maxlen:
            rates["flops_per_sec"] = sum(self._flops) / seconds
        metrics = _prefixed("throughput", rates) | _prefixed("throughput/device", rates, ranks)
        if self.gpu_flops_available and "flops_per_sec" in rates:
            metrics["throughput/device/mfu"] = rates["flops_per_sec"] / ranks / self.gpu_flops_available
        return metrics


class RuntimeEstimator(Callback):
    """Logs how much time is left, `time/remaining_estimate`, with each batch.

    ```python
    Trainer(..., callbacks=[RuntimeEstimator(time_unit="minutes")])
    ```

    The estimate is the time per share of the run so far, plus the mean time of each evaluation for those
    still to come. Within the first epoch of a run in epochs, the length of the dataloader gives the share.

    Args:
        skip_batches: how many batches not to count at first: they compile and warm up.
        time_unit: "seconds", "minutes", "hours" or "days"; logged as the hyperparameter
            `time/remaining_estimate_unit`.

    Raises:
        ValueError: the unit is unknown.
    """

    def __init__(self, skip_batches: int = 1, time_unit: str = "hours") -> None:
        super().__init__()
        self._divider = _divider(time_unit)
        self._time_unit = time_unit
        self._skip_batches = skip_batches
        # The seconds of training, and the share of the run, at the first batch that counts.
        self._start: tuple[float, float] | None = None
        self._epoch_batches: int | None = None
        # The durations of the evaluations since the start, by label, in seconds.
        self._evaluations: dict[str, list[float]] = {}
        self.eval_frequency_per_label: dict[str, float] = {}

    def init(self, state: State, logger: Logger) -> None:
        """Logs the unit."""
        logger.log_hyperparameters({"time/remaining_estimate_unit": self._time_unit})

    def batch_start(self, state: State, logger: Logger) -> None:
        """Starts the estimate, after the batches to skip."""
        if state.dataloader_len is not None:
            self._epoch_batches = state.dataloader_len.value
        if self._start is None and self._skip_batches <= 0:
            share = self._share(state)
            if share is not None:
                self._start = state.timestamp.total_wct.total_seconds(), share

    def batch_end(self, state: State, logger: Logger) -> None:
        """Logs the estimate."""
        if self._skip_batches > 0:
            self._skip_batches -= 1
            return
        share = self._share(state)
        if self._start is None or share is None or share <= self._start[1]:
            return
        started, first_share = self._start
        trained = state.timestamp.total_wct.total_seconds() - started
        if trained <= 0:
            return
        remaining = trained / (share - first_share) * (1 - share)
        for label, durations in self._evaluations.items():
            # The first may have downloaded its data.
            counted = durations[1:] or durations
            frequency = self.eval_frequency_per_label[label]
            still_to_come = (1 - first_share) / frequency - len(durations) if frequency > 0 else 0.0
            remaining += max(still_to_come, 0.0) * sum(counted) / len(counted)
        logger.log_metrics({"time/remaining_estimate": max(remaining, 0.0) / self._divider})

    def eval_end(self, state: State, logger: Logger) -> None:
        """Counts the time of an evaluation."""
        share = self._share(state)
        if self._start is None or share is None:
            return
        label = state.dataloader_label or "eval"
        durations = self._evaluations.setdefault(label, [])
        durations.append(state.eval_timestamp.total_wct.total_seconds())
        self.eval_frequency_per_label[label] = (share - self._start[1]) / len(durations)

    def _share(self, state: State) -> float | None:
        """Returns the completed share of the run, within epochs too, or None if its length is unknown."""
        length, now = state.max_duration, state.timestamp
        if length is not None and length.unit is TimeUnit.EPOCH and length.value:
            epoch_batches: float | None = self._epoch_batches
            if now.epoch.value:
                epoch_batches = (now.batch - now.batch_in_epoch).value / now.epoch.value
            return min(now.batch.value / (length.value * epoch_batches), 1.0) if epoch_batches else None
        elapsed = state.get_elapsed_duration()
        return None if elapsed is None else float(elapsed)
