"""Metrics over batches, in the manner of torchmetrics: call for a batch's value, `compute` for the value over all."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ._batches import samples_in
from ._distributed import sum_over_ranks

__all__ = ["MeanMetric", "WeightedMeans", "as_metrics"]

MetricFunction = Callable[[Any, Any], Any]


class MeanMetric:
    """Turns a function of outputs and targets into a metric: its mean over batches, weighted by their samples.

    Sums stay on the device of what the function returns, so that a batch costs no synchronisation.
    """

    def __init__(self, function: MetricFunction) -> None:
        self._function = function
        self._total: Any = 0.0
        self._samples = 0

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Returns the value for one batch, and counts it in."""
        value = self._function(outputs, targets)
        if isinstance(value, torch.Tensor):
            value = value.detach()
        samples = samples_in(targets)
        self._total = self._total + value * samples
        self._samples += samples
        return value

    def compute(self) -> Any:
        """Returns the mean over all batches, of all ranks, since the last `reset`; NaN where there were none."""
        total, samples = sum_over_ranks(self._total, self._samples)
        return total / samples if samples else float("nan")

    def reset(self) -> None:
        """Forgets the batches so far."""
        self._total = 0.0
        self._samples = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what has been counted so far."""
        return {"total": self._total, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` returned."""
        self._total, self._samples = state["total"], state["samples"]


class WeightedMeans:
    """Means of values that come in parts, by name; sums stay on the device that the values are on."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}

    def add(self, name: str, value: Any, weight: float) -> None:
        """Counts in a part of a value, with its weight."""
        total, weights = self._sums.get(name, (0.0, 0.0))
        part = value.detach() if isinstance(value, torch.Tensor) else value
        self._sums[name] = (total + part * weight, weights + weight)

    def over_ranks(self) -> dict[str, Any]:
        """Returns the means over all parts of all ranks; every rank must call it."""
        sums = {name: sum_over_ranks(total, weight) for name, (total, weight) in self._sums.items()}
        return {name: total / weight for name, (total, weight) in sums.items()}


def as_metrics(metrics: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """Returns metrics of one's own: functions become `MeanMetric`s, torchmetrics and their kin are copied.

    Raises:
        TypeError: a metric is neither a function nor has `compute` and `reset`.
    """
    mine: dict[str, Any] = {}
    for name, metric in (metrics or {}).items():
        if hasattr(metric, "compute") and hasattr(metric, "reset"):
            mine[name] = copy.deepcopy(metric)
            if hasattr(metric, "to"):
                mine[name] = mine[name].to(device)
            if hasattr(metric, "persistent"):
                # torchmetrics leave what they counted out of state_dict() unless told otherwise.
                mine[name].persistent(mode=True)
        elif callable(metric):
            mine[name] = MeanMetric(metric)
        else:
            raise TypeError(
                f"metric {name!r} must be a function of (outputs, targets) or a torchmetrics.Metric, "
                f"got {type(metric).__name__}."
            )
    return mine
