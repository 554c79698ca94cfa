"""Running a model over a dataloader: what training, evaluation and prediction share, and the latter two themselves."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from events.engine import Engine
from events.event import Event
from events.logger.logger import Logger
from events.state import Phase, State
from events.timestamp import Time, Timestamp

from .distributed import sum_over_ranks
from .set_up import AUTOCAST_DTYPES, labelled, length_of

__all__ = ["MeanMetric", "ModelLoops", "WeightedMeans", "as_metrics", "move", "samples_in", "split"]


def samples_in(batch: Any) -> int:
    """Returns how many samples a batch has: the length of the first tensor in it, or 1 where there is none."""
    return next((int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim() > 0), 1)


def move(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on a device, without waiting where memory is pinned."""
    return _map(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split(batch: Any, samples: int | None) -> list[Any]:
    """Returns microbatches of at most that many samples; the batch itself where no number is given.

    Raises:
        ValueError: the tensors of the batch differ in their number of samples, so that there is no way to cut them.
    """
    total = samples_in(batch)
    if samples is None or samples >= total:
        return [batch]
    lengths = {int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim() > 0}
    if len(lengths) > 1:
        raise ValueError(
            f"batch must have the same number of samples in all its tensors to be cut into microbatches, "
            f"got {sorted(lengths)}. Leave device_train_microbatch_size out, or split in the dataloader."
        )
    return [
        _map(
            batch, lambda tensor, start=start: tensor[start : start + samples] if tensor.dim() > 0 else tensor
        )
        for start in range(0, total, samples)
    ]


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _map(batch: Any, change: Any) -> Any:
    """Applies a change to every tensor and keeps the shape of what holds them."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(_map(value, change) for value in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(_map(value, change) for value in batch)
    return batch


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


class ModelLoops:
    """Evaluates and predicts; `Trainer` adds training.

    Attributes:
        state: the run.
        logger: where it is logged.
        engine: what runs its events.
    """

    state: State
    logger: Logger
    engine: Engine
    _device: torch.device
    _module: torch.nn.Module
    _loss_fn: Any
    _metrics: Mapping[str, Any] | None
    _evaluated_at: Time | None
    # When the lap that is going on began; evaluation moves it, for the clock of a run counts training alone.
    _mark: float

    def forward(self, module: torch.nn.Module, batch: Any) -> Any:
        """Returns the model's outputs for a batch; override it for batches of another kind.

        Args:
            module: the model, or what distributed training wraps it in.
            batch: a (micro)batch on the device.
        """
        if isinstance(batch, Mapping):
            return module(**batch)
        if isinstance(batch, list | tuple):
            return module(*batch[:-1]) if len(batch) > 1 else module(batch[0])
        return module(batch)

    def targets(self, batch: Any) -> Any:
        """Returns what loss and metrics compare outputs with; override it for batches of another kind."""
        return batch[-1] if isinstance(batch, list | tuple) else batch

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Returns the mean loss of a (micro)batch; override it for batches of another kind.

        Raises:
            ValueError: there is no `loss_fn`, and the outputs hold no loss.
        """
        if self._loss_fn is not None:
            loss: torch.Tensor = self._loss_fn(outputs, self.targets(batch))
            return loss
        found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if found is None:
            raise ValueError(
                f"loss must come from loss_fn or from the model's outputs, got {type(outputs).__name__} without one. "
                "Pass loss_fn=... to the Trainer."
            )
        return torch.as_tensor(found)

    def eval(
        self, eval_dataloader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None
    ) -> dict[str, dict[str, float]]:
        """Evaluates now, outside of `fit`.

        Args:
            eval_dataloader: what to evaluate on; default: what the trainer was given.

        Returns:
            For each label, metrics by name; the loss among them, where there is one.

        Raises:
            ValueError: there is nothing to evaluate on.
            EngineClosedError: the trainer is closed.
        """
        dataloader = self.state.eval_dataloader if eval_dataloader is None else eval_dataloader
        if dataloader is None:
            raise ValueError("eval_dataloader must be given to eval or to the Trainer, got neither.")
        self.engine.run_event(Event.EVAL_STANDALONE_START)
        results = {label: self._evaluate(label, one) for label, one in labelled(dataloader).items()}
        self.engine.run_event(Event.EVAL_STANDALONE_END)
        return results

    def _evaluate_all(self) -> None:
        if self.state.eval_dataloader is None:
            return
        started = time.perf_counter()
        self.engine.run_event(Event.EVAL_BEFORE_ALL)
        for label, dataloader in labelled(self.state.eval_dataloader).items():
            self._evaluate(label, dataloader)
        self.engine.run_event(Event.EVAL_AFTER_ALL)
        self._evaluated_at = self.state.timestamp.batch
        self._mark += time.perf_counter() - started

    def _evaluate(self, label: str, dataloader: Iterable[Any]) -> dict[str, float]:
        state = self.state
        if label not in state.eval_metrics:
            state.eval_metrics = {**state.eval_metrics, label: as_metrics(self._metrics, self._device)}
        metrics = state.eval_metrics[label]
        for metric in metrics.values():
            metric.reset()
        losses = WeightedMeans()
        with self._reading(dataloader, Phase.EVAL, label), self._inference():
            state.eval_timestamp = Timestamp()
            self.engine.run_event(Event.EVAL_START)
            for batch in dataloader:
                self._evaluate_batch(batch, metrics, losses)
            results = {f"loss/{label}/total": loss for loss in losses.over_ranks().values()}
            results |= {f"metrics/{label}/{name}": metric.compute() for name, metric in metrics.items()}
            self.logger.log_metrics(results)
            self.engine.run_event(Event.EVAL_END)
        return {
            name.split("/", 2)[2] if name.startswith("metrics/") else "loss": float(results[name])
            for name in results
        }

    def _evaluate_batch(self, batch: Any, metrics: Mapping[str, Any], losses: WeightedMeans) -> None:
        state = self.state
        state.batch = move(batch, self._device)
        samples = samples_in(state.batch)
        state.batch_samples = samples * state.world_size
        self.engine.run_event(Event.EVAL_BATCH_START)
        started = time.perf_counter()
        with self._autocast():
            self.engine.run_event(Event.EVAL_BEFORE_FORWARD)
            state.outputs = self.forward(self._bare_module, state.batch)
            self.engine.run_event(Event.EVAL_AFTER_FORWARD)
            if self._loss_fn is not None:
                losses.add("loss", self.loss(state.outputs, state.batch), samples)
        for metric in metrics.values():
            metric(state.outputs, self.targets(state.batch))
        seconds = timedelta(seconds=time.perf_counter() - started)
        state.eval_timestamp = state.eval_timestamp.to_next_batch(state.batch_samples, 0, seconds)
        self.engine.run_event(Event.EVAL_BATCH_END)

    def predict(self, dataloader: Iterable[Any], *, return_outputs: bool = True) -> list[Any]:
        """Runs the model over a dataloader.

        Args:
            dataloader: yields batches.
            return_outputs: whether to keep the outputs; without, use them in a callback's `predict_batch_end`.

        Returns:
            The outputs of each batch, in host memory; empty without `return_outputs`.

        Raises:
            EngineClosedError: the trainer is closed.
        """
        state = self.state
        collected = []
        with self._reading(dataloader, Phase.PREDICT, "predict"), self._inference():
            state.predict_timestamp = Timestamp()
            self.engine.run_event(Event.PREDICT_START)
            for batch in dataloader:
                state.batch = move(batch, self._device)
                state.batch_samples = samples_in(state.batch) * state.world_size
                self.engine.run_event(Event.PREDICT_BATCH_START)
                with self._autocast():
                    self.engine.run_event(Event.PREDICT_BEFORE_FORWARD)
                    state.outputs = self.forward(self._bare_module, state.batch)
                    self.engine.run_event(Event.PREDICT_AFTER_FORWARD)
                if return_outputs:
                    collected.append(move(state.outputs, torch.device("cpu")))
                state.predict_timestamp = state.predict_timestamp.to_next_batch(state.batch_samples)
                self.engine.run_event(Event.PREDICT_BATCH_END)
            self.engine.run_event(Event.PREDICT_END)
        return collected

    @contextmanager
    def _reading(self, dataloader: Any, phase: Phase, label: str) -> Iterator[None]:
        """Says in the state what is being read, and puts back what was before."""
        state = self.state
        names = (
            "dataloader",
            "dataloader_label",
            "dataloader_len",
            "phase",
            "batch",
            "batch_samples",
            "outputs",
        )
        before = {name: getattr(state, name) for name in names}
        state.dataloader, state.dataloader_label, state.phase = dataloader, label, phase
        state.dataloader_len = length_of(dataloader)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(state, name, value)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        was_training = self._bare_module.training
        self._bare_module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._bare_module.train(was_training)

    @property
    def _bare_module(self) -> torch.nn.Module:
        """The model without its wrapper: ranks need not evaluate the same number of batches."""
        module = self._module
        return module.module if isinstance(module, DistributedDataParallel) else module

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = AUTOCAST_DTYPES.get(self.state.precision)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype)
