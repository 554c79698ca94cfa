"""Losses and metrics of the trainer: means over batches and ranks; sums stay on the device of the values."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import attrs
import numpy as np
import torch

from events.logger.logger import Logger
from events.state import as_tuple

from . import distributed

__all__ = [
    "MeanMetric",
    "StatefulMetric",
    "WeightedMeans",
    "as_metrics",
    "log_values",
    "losses_by_name",
    "own_loss",
    "scalars",
    "states_of",
    "total_loss",
]

_log = logging.getLogger("events")

MetricFunction = Callable[[Any, Any], Any]

_MATRIX = 2
# A larger matrix is no table that anyone reads.
_MAX_CELLS = 10_000


@attrs.define(eq=False, slots=False)
class MeanMetric:
    """The mean of a function of outputs and targets over batches, weighted by their samples.

    The sums stay on the device of the function's values, so a batch causes no synchronization.
    """

    _function: MetricFunction
    _device: torch.device
    _total: Any = 0.0
    _samples: int = 0

    def __call__(self, outputs: Any, targets: Any, samples: int) -> Any:
        """Returns the value for a batch, and adds it to the mean, weighted by its samples."""
        value = self._function(outputs, targets)
        if isinstance(value, torch.Tensor):
            value = value.detach()
        self._total = self._total + value * samples
        self._samples += samples
        return value

    def compute(self) -> Any:
        """Returns the mean over all batches of all ranks since the last `reset`; NaN without batches.

        Every rank must call it, also one that has had no batch.

        Raises:
            ValueError: ranks have values of different shapes.
        """
        if distributed.is_alone():
            return self._total / self._samples if self._samples else float("nan")
        # A rank without batches does not know the shape.
        known = [
            one
            for one in distributed.gather(np.shape(self._total) if self._samples else None)
            if one is not None
        ]
        if len(set(known)) > 1:
            raise ValueError(f"a metric must have the same shape on all ranks, got {known}.")
        shape = known[0] if known else ()
        total = torch.as_tensor(self._total, dtype=torch.float64, device=self._device).expand(shape)
        samples = torch.tensor([self._samples], dtype=torch.float64, device=self._device)
        sums = distributed.sum_tensor(torch.cat([total.flatten(), samples]))
        return (sums[:-1] / sums[-1]).reshape(shape)

    def reset(self) -> None:
        """Discards all batches so far."""
        self._total = 0.0
        self._samples = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums so far, of this rank."""
        return {"total": self._total, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._total, self._samples = state["total"], state["samples"]


class WeightedMeans:
    """Weighted means by name; sums stay on the device of the values."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names that this rank has values of."""
        return tuple(self._sums)

    def add(self, name: str, value: Any, weight: float) -> None:
        """Adds a value with its weight."""
        total, weights = self._sums.get(name, (0.0, 0.0))
        detached = value.detach() if isinstance(value, torch.Tensor) else value
        self._sums[name] = (total + detached * weight, weights + weight)

    def over_ranks(self, names: Sequence[str], device: torch.device) -> dict[str, Any]:
        """Returns the means over the values of all ranks; NaN if no rank has a value.

        One collective, even if this rank has no values; every rank must call it.

        Args:
            names: the names of all ranks, the same on each; ignored on a single rank.
            device: the device of the values.
        """
        if distributed.is_alone():
            return {name: total / weight for name, (total, weight) in self._sums.items()}
        pairs = [self._sums.get(name, (0.0, 0.0)) for name in names]
        if not pairs:
            return {}
        weights = torch.tensor([weight for _, weight in pairs], dtype=torch.float64, device=device)
        totals = torch.stack(
            [torch.as_tensor(total, dtype=torch.float64, device=device) for total, _ in pairs]
        )
        sums = distributed.sum_tensor(torch.stack([totals, weights]))
        return dict(zip(names, sums[0] / sums[1], strict=True))


def total_loss(loss: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns a loss as one number, and its parts by name.

    The total of several losses, by name or in a list, is the one called "total", or else their sum. The total
    of losses per sample is their mean.

    Raises:
        TypeError: it is no loss.
    """
    if isinstance(loss, torch.Tensor):
        return (loss if loss.dim() == 0 else loss.mean()), {}
    if isinstance(loss, list | tuple):
        loss = dict(enumerate(loss))
    if isinstance(loss, Mapping) and loss:
        parts: dict[str, Any] = {str(name): total_loss(one)[0] for name, one in loss.items()}
        total = parts.pop("total", None)
        return torch.as_tensor(sum(parts.values()) if total is None else total), parts
    if isinstance(loss, Real):
        return torch.as_tensor(loss), {}
    raise TypeError(
        f"loss must be a tensor, or several by name or in a list, got {loss!r:.80}. "
        "Return it from loss_fn or from Trainer.loss."
    )


def own_loss(outputs: Any) -> Any:
    """Returns the loss that a model has computed, or None.

    It is called "loss", or is the only number among the outputs, as in minGPT's `logits, loss`.
    """
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None or callable(found):
        numbers = [one for one in as_tuple(outputs) if isinstance(one, torch.Tensor) and one.ndim == 0]
        found = numbers[0] if len(numbers) == 1 and numbers[0].is_floating_point() else None
    return found


def losses_by_name(returned: Any) -> dict[str, Any]:
    """Returns what `Trainer.train_step` returned under the names of the log, and the total as "loss"."""
    named = {} if returned is None else returned if isinstance(returned, Mapping) else {"total": returned}
    logged = {name: value for name, value in named.items() if "/" in name}
    losses = {name: value for name, value in named.items() if "/" not in name}
    if "total" not in losses and "loss" in losses:
        losses["total"] = losses.pop("loss")
    if not losses:
        return logged
    total, parts = total_loss(losses)
    return {"loss": total, **{f"loss/train/{name}": part for name, part in parts.items()}, **logged}


def scalars(name: str, value: Any) -> dict[str, Any]:
    """Returns the numbers of a metric's value by name: `name/0` in a vector, `name/key` in a mapping.

    Other values, such as a matrix, are left out.
    """
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return {name: value}
    found: dict[str, Any] = {}
    for leaf_name, leaf in _leaves(name, value):
        found |= _numbers(leaf_name, leaf)
    return found


def log_values(logger: Logger, values: Mapping[str, Any], said: set[str]) -> dict[str, Any]:
    """Logs the values of metrics, a matrix as a table, and returns the numbers.

    Args:
        logger: the logger.
        values: the values by name.
        said: the names for which a warning was already logged.
    """
    numbers: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for name, value in values.items():
        for leaf_name, leaf in _leaves(name, value):
            found = _numbers(leaf_name, leaf)
            numbers |= found
            if found:
                continue
            if _is_array(leaf) and leaf.ndim == _MATRIX and 0 < math.prod(leaf.shape) <= _MAX_CELLS:
                tables[leaf_name] = leaf
            elif leaf_name not in said:
                said.add(leaf_name)
                _log.warning(
                    "metric %r is not logged: it must be a number, a vector, or a matrix of at most %d "
                    "cells, got %s.",
                    leaf_name,
                    _MAX_CELLS,
                    f"shape {tuple(leaf.shape)}" if _is_array(leaf) else type(leaf).__name__,
                )
    if numbers:
        logger.log_metrics(numbers)
    for name, table in tables.items():
        logger.log_table([str(column) for column in range(table.shape[1])], table.tolist(), name)
    return numbers


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}/{key}", one)
    else:
        yield name, value


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return math.prod(value.shape) == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, Real)


def _numbers(name: str, value: Any) -> dict[str, Any]:
    """Returns a number, or the numbers of a vector, by name; otherwise an empty dict."""
    if _is_number(value):
        return {name: value}
    if isinstance(value, list | tuple) or (_is_array(value) and value.ndim == 1):
        elements = list(value)
        if all(map(_is_number, elements)):
            return {f"{name}/{index}": one for index, one in enumerate(elements)}
    return {}


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
            for one in _parts(fresh[name]):
                # Their own takes what a rank without batches has for another shape, and waits for ever.
                if getattr(one, "dist_sync_fn", False) is None:
                    one.dist_sync_fn = distributed.gather_parts
        elif callable(metric):
            fresh[name] = MeanMetric(metric, device)
        else:
            raise TypeError(
                f"metric {name!r} must be a function of (outputs, targets) or a torchmetrics.Metric, "
                f"got {type(metric).__name__}."
            )
    return fresh


def states_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of metrics on this rank, by name, of those that have one."""
    return {
        name: StatefulMetric(metric).state_dict()
        for name, metric in metrics.items()
        if hasattr(metric, "state_dict")
    }


@attrs.frozen
class StatefulMetric:
    """The complete state of a metric, with the update counts that torchmetrics leaves out."""

    _metric: Any

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, of this rank."""
        counts = {name: one.update_count for name, one in self._named() if hasattr(one, "_update_count")}
        state = dict(self._metric.state_dict())
        return {"state": state, "updates": counts} if counts else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        has_counts = state.keys() == {"state", "updates"}
        self._metric.load_state_dict(state["state"] if has_counts else state)
        for name, one in self._named():
            if has_counts and name in state["updates"]:
                one._update_count = state["updates"][name]  # noqa: SLF001  # there is no public way

    def _named(self) -> Iterator[tuple[str, Any]]:
        is_module = isinstance(self._metric, torch.nn.Module)
        return iter(self._metric.named_modules()) if is_module else iter(())


def _parts(metric: Any) -> Iterator[Any]:
    """Yields a metric and the metrics in it, as a collection has."""
    return iter(metric.modules()) if isinstance(metric, torch.nn.Module) else iter((metric,))
