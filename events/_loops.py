"""Running a model over a dataloader: what training, evaluation and prediction share, and the latter two themselves."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from . import _batches
from ._metrics import WeightedMeans, as_metrics
from ._set_up import AUTOCAST_DTYPES, labelled, length_of
from .engine import Engine
from .event import Event
from .logger import Logger
from .state import Phase, State
from .timestamp import Time, Timestamp

__all__ = ["ModelLoops"]


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
        state.batch = _batches.move(batch, self._device)
        samples = _batches.samples_in(state.batch)
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
                state.batch = _batches.move(batch, self._device)
                state.batch_samples = _batches.samples_in(state.batch) * state.world_size
                self.engine.run_event(Event.PREDICT_BATCH_START)
                with self._autocast():
                    self.engine.run_event(Event.PREDICT_BEFORE_FORWARD)
                    state.outputs = self.forward(self._bare_module, state.batch)
                    self.engine.run_event(Event.PREDICT_AFTER_FORWARD)
                if return_outputs:
                    collected.append(_batches.move(state.outputs, torch.device("cpu")))
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
