"""Metrics of the trainer: means over batches and ranks; sums stay on the device of the values."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from .batches import samples_in
from .distributed import sum_over_ranks

__all__ = ["MeanMetric", "WeightedMeans", "as_metrics"]

MetricFunction = Callable[[Any, Any], Any]


@attrs.define(eq=False, slots=False)
class MeanMetric:
    """The mean of a function of outputs and targets over batches, weighted by their samples.

    Sums stay on the device of the function's values: a batch costs no synchronization.
    """

    _function: MetricFunction
    _total: Any = 0.0
    _samples: int = 0

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Returns the value for one batch, and adds it to the mean."""
        value = self._function(outputs, targets)
        if isinstance(value, torch.Tensor):
            value = value.detach()
        samples = samples_in(targets)
        self._total = self._total + value * samples
        self._samples += samples
        return value

    def compute(self) -> Any:
        """Returns the mean over all batches of all ranks since the last `reset`; NaN without batches."""
        total, samples = sum_over_ranks(self._total, self._samples)
        return total / samples if samples else float("nan")

    def reset(self) -> None:
        """Discards all batches so far."""
        self._total = 0.0
        self._samples = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums so far."""
        return {"total": self._total, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._total, self._samples = state["total"], state["samples"]


class WeightedMeans:
    """Weighted means by name; sums stay on the device of the values."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}

    def add(self, name: str, value: Any, weight: float) -> None:
        """Adds a value with its weight."""
        total, weights = self._sums.get(name, (0.0, 0.0))
        detached = value.detach() if isinstance(value, torch.Tensor) else value
        self._sums[name] = (total + detached * weight, weights + weight)

    def over_ranks(self) -> dict[str, Any]:
        """Returns the means over all values of all ranks; every rank must call it."""
        sums = {name: sum_over_ranks(total, weight) for name, (total, weight) in self._sums.items()}
        return {name: total / weight for name, (total, weight) in sums.items()}


def as_metrics(metrics: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """Returns fresh metrics: functions become `MeanMetric`s, torchmetrics are copied to the device.

    Raises:
        TypeError: a metric is neither a function nor an object with `compute` and `reset`.
    """
    fresh: dict[str, Any] = {}
    for name, metric in (metrics or {}).items():
        if hasattr(metric, "compute") and hasattr(metric, "reset"):
            fresh[name] = copy.deepcopy(metric)
            if hasattr(metric, "to"):
                fresh[name] = fresh[name].to(device)
            if hasattr(metric, "persistent"):
                # By default, the state_dict() of torchmetrics is empty.
                fresh[name].persistent(mode=True)
        elif callable(metric):
            fresh[name] = MeanMetric(metric)
        else:
            raise TypeError(
                f"metric {name!r} must be a function of (outputs, targets) or a torchmetrics.Metric, "
                f"got {type(metric).__name__}."
            )
    return fresh
