"""A small, complete training loop: fit, evaluate, predict, on one device or on several ranks.

It is here so that the events have a loop and the destinations a use; it does not compete with larger trainers.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.parallel import DistributedDataParallel

from . import _batches, _distributed, _rng
from ._metrics import WeightedMeans, as_metrics
from ._resume import find_checkpoint, train_batches
from ._run_name import new_run_name
from .callback import Callback
from .checkpoint import CheckpointSaver, load_checkpoint, read_checkpoint
from .destination import Destination
from .engine import Engine
from .event import Event
from .interval import Interval
from .logger import Logger
from .state import Phase, RunStatus, State
from .timestamp import Time, Timestamp, TimeUnit

__all__ = ["Trainer"]

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a model and fires the 40 events of `Event` at their places.

    ```python
    trainer = Trainer(model, train_dataloader, eval_dataloader, max_duration="5ep", loss_fn=cross_entropy,
                      optimizers=Adam(model.parameters()), loggers=[ProgressBar(), RunDirectory("runs/mine")])
    trainer.fit()
    ```

    **Batches.** A batch is a pair `(inputs, targets)`, of tensors or of whatever holds tensors, or a mapping. A pair is
    trained as `loss_fn(model(inputs), targets)`, a mapping as `loss_fn(model(**batch), batch)`; without `loss_fn` the
    loss is what the model returns as `outputs.loss` or `outputs["loss"]`. For another kind override `forward` and `loss`.

    **What is logged.** With each batch, at the step that counts the batches before it: `loss/train/total`,
    `metrics/train/<name>`, `lr/<optimizer>/group<i>`, `time/epoch`, `time/sample`; with each epoch
    `metrics/train_epoch/<name>`; with each evaluation `loss/<label>/total` and `metrics/<label>/<name>`.

    **Ranks.** Under `torchrun` each rank makes its own Trainer. Gradients, losses, metrics and the clock are agreed on;
    give the training dataloader a `DistributedSampler`. Call `state.stop_training()` on any rank: all stop.

    **Close.** `close`, or the end of a `with` block, closes callbacks and destinations; so does `fit` when it raises, and
    the end of the interpreter where nobody did. A closed trainer refuses to go on.

    Args:
        model: what is trained; moved to the device, not copied.
        train_dataloader: yields training batches; may be given to `fit` instead.
        eval_dataloader: yields evaluation batches; or several such by label.
        max_duration: when training ends, such as "5ep", "1000ba" or "2h"; a bare integer counts epochs.
        loss_fn: takes outputs and targets, returns the mean loss of a (micro)batch.
        optimizers: one, or several; all take a step with each batch.
        schedulers: one, or several; all take a step with each batch, or with each epoch.
        step_schedulers_every_batch: which of the two.
        metrics: by name, functions of outputs and targets that return a batch's mean, or torchmetrics.
        eval_interval: how often to evaluate within `fit`, such as "1ep" or "500ba"; there is also an evaluation where
            training ends between two.
        iteration_length: the length of an iteration in epochs ("3ep"), or None for none.
        callbacks: who reacts to events.
        loggers: the destinations.
        run_name: the name of the run; the same on all ranks. Default: `RUN_NAME` of the environment, else a new one.
        device: where to train; default: the accelerator that torch finds, else the CPU.
        device_train_microbatch_size: the samples that go through the model at once; gradients add up over a batch.
        precision: "fp32", or "bf16" or "fp16" for `torch.autocast`.
        seed: seeds Python's, numpy's and torch's generators, on each rank differently.
        save_folder: where to save checkpoints, such as "{run_name}/checkpoints"; None for none.
        save_interval: how often.
        save_num_checkpoints_to_keep: how many of the newest to keep there; None for all.
        load_path: a checkpoint to go on from: a local path, or a name that a destination can download.
        autoresume: goes on from the newest checkpoint in `save_folder`, if there is one; needs `run_name`.

    Raises:
        ValueError: arguments do not go together; the message says which.
        CheckpointError: the checkpoint does not fit.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        *,
        max_duration: str | int | Time | None = None,
        loss_fn: Any = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        schedulers: Any = (),
        step_schedulers_every_batch: bool = True,
        metrics: Mapping[str, Any] | None = None,
        eval_interval: str | int | Time = "1ep",
        iteration_length: str | int | Time | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: Destination | Iterable[Destination] | None = None,
        run_name: str | None = None,
        device: str | torch.device | None = None,
        device_train_microbatch_size: int | None = None,
        precision: str = "fp32",
        seed: int | None = None,
        save_folder: str | Path | None = None,
        save_interval: str | int | Time = "1ep",
        save_num_checkpoints_to_keep: int | None = None,
        load_path: str | Path | None = None,
        autoresume: bool = False,
    ) -> None:
        _check_choices(precision, device_train_microbatch_size, save_folder, run_name, autoresume=autoresume)
        length = None if max_duration is None else Time.from_input(max_duration, "ep")
        savers = (
            [] if save_folder is None else [_saver(save_folder, save_interval, save_num_checkpoints_to_keep)]
        )
        self._eval_interval = Interval(eval_interval, default_unit="ep")
        self._iteration_length = None if iteration_length is None else Time.from_input(iteration_length, "ep")
        self._loss_fn = loss_fn
        self._metrics = metrics
        self._microbatch_size = device_train_microbatch_size
        self._step_schedulers_every_batch = step_schedulers_every_batch
        self._evaluated_at: Time | None = None
        self._mark = 0.0
        self._device = _device(device)
        self._owns_process_group = _distributed.join(self._device)
        self.state = State(
            _distributed.from_rank_zero(run_name or new_run_name()),
            length,
            model=model.module if isinstance(model, DistributedDataParallel) else model,
            optimizers=_several(optimizers),
            schedulers=_several(schedulers),
            device=self._device,
            precision=precision,
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
        )
        if seed is not None:
            _rng.seed_all(seed + self.state.rank)
        self.logger = Logger(self.state, loggers)
        # The saver comes last: what other callbacks do at its events is in the checkpoint.
        self.engine = Engine(self.state, self.logger, (*_several(callbacks), *savers))
        with self._closing_on_error():
            self._set_up(model)
            self._resumed = self._load(load_path, save_folder if autoresume else None)

    def _set_up(self, model: torch.nn.Module) -> None:
        state = self.state
        model.to(self._device)
        _move_optimizers(state.optimizers, self._device)
        self._module = _distributed.wrap(model, self._device)
        state.train_metrics = as_metrics(self._metrics, self._device)
        state.eval_metrics = {
            label: as_metrics(self._metrics, self._device) for label in _labelled(state.eval_dataloader)
        }
        if state.precision == "fp16" and self._device.type != "cpu":
            state.scaler = torch.amp.GradScaler(self._device.type)
        self.engine.run_event(Event.INIT)
        self.logger.log_hyperparameters({"trainer": self._description()})

    def _description(self) -> dict[str, Any]:
        """Returns what is worth knowing of the set-up when runs are compared."""
        state = self.state
        return {
            "model": type(state.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self._module.parameters()),
            "optimizers": {
                type(optimizer).__name__: {
                    key: value for key, value in optimizer.defaults.items() if value is not None
                }
                for optimizer in state.optimizers
            },
            "max_duration": None if state.max_duration is None else str(state.max_duration),
            "batch_size": getattr(state.train_dataloader, "batch_size", None),
            "device": str(self._device),
            "precision": state.precision,
            "world_size": state.world_size,
            "torch": torch.__version__,
        }

    def _load(
        self, load_path: str | Path | None, resume_folder: str | Path | None
    ) -> Mapping[str, Any] | None:
        self.engine.run_event(Event.BEFORE_LOAD)
        path = find_checkpoint(load_path, resume_folder, self.state, self.logger)
        checkpoint = None if path is None else read_checkpoint(path)
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.state, self.logger)
            self.state.last_checkpoint = str(path)
        self.engine.run_event(Event.AFTER_LOAD)
        return checkpoint

    def fit(self, duration: str | int | Time | None = None) -> None:
        """Trains until `max_duration`, or for `duration` more.

        Args:
            duration: how much longer than now, such as "1ep"; makes that the new `max_duration`.

        Raises:
            ValueError: there is no dataloader, optimizer or duration to train with.
            EngineClosedError: the trainer is closed.
            BaseException: whatever the model, the data or a callback raised, after everything is closed.
        """
        state = self.state
        if duration is not None:
            more = Time.from_input(duration, "ep")
            state.max_duration = state.timestamp.get(more.unit) + more
        _check_can_fit(state)
        with self._closing_on_error(), self._reading(state.train_dataloader, Phase.TRAIN, "train"):
            state.begin_training()
            self._module.train()
            self._eval_interval.start(state)
            self.engine.run_event(Event.FIT_START)
            self._go_on_from_checkpoint()
            self._mark = time.perf_counter()
            while not state.is_done:
                self._train_epoch()
            if state.eval_dataloader is not None and self._evaluated_at != state.timestamp.batch:
                self._evaluate_all()
            self.engine.run_event(Event.FIT_END)
            state.status = RunStatus.COMPLETED

    def _go_on_from_checkpoint(self) -> None:
        """Puts the random numbers where the checkpoint has them: nothing that came before training counts."""
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is not None and self.state.rank < len(checkpoint["random"]):
            _rng.restore_random_state(checkpoint["random"][self.state.rank], self.state.train_dataloader)

    def _train_epoch(self) -> None:
        state = self.state
        if state.timestamp.batch_in_epoch == 0:
            if state.timestamp.epoch_in_iteration == 0:
                self.engine.run_event(Event.ITERATION_START)
            self.engine.run_event(Event.EPOCH_START)
        for _ in train_batches(state, self.engine):
            self._train_batch()
            if state.is_done:
                if state.timestamp.batch_in_epoch != state.dataloader_len:
                    return
                break
        if state.timestamp.batch_in_epoch == 0:
            raise ValueError("train_dataloader must yield at least one batch in each epoch, got none.")
        self._end_epoch()

    def _end_epoch(self) -> None:
        state = self.state
        epoch_metrics = {
            f"metrics/train_epoch/{name}": metric.compute() for name, metric in state.train_metrics.items()
        }
        if epoch_metrics:
            self.logger.log_metrics(epoch_metrics)
        for metric in state.train_metrics.values():
            metric.reset()
        if not self._step_schedulers_every_batch:
            for scheduler in state.schedulers:
                scheduler.step()
        state.timestamp = state.timestamp.to_next_epoch(self._lap())
        self.engine.run_event(Event.EPOCH_END)
        if self._eval_interval.passed(state):
            self._evaluate_all()
        self.engine.run_event(Event.EPOCH_CHECKPOINT)
        if (
            self._iteration_length is not None
            and state.timestamp.epoch_in_iteration >= self._iteration_length
        ):
            state.timestamp = state.timestamp.to_next_iteration(self._lap())
            self.engine.run_event(Event.ITERATION_END)
            self.engine.run_event(Event.ITERATION_CHECKPOINT)

    def _train_batch(self) -> None:
        state = self.state
        state.batch = _batches.move(state.batch, self._device)
        state.batch_samples = _batches.samples_in(state.batch) * state.world_size
        self.engine.run_event(Event.BATCH_START)
        metrics = self._forward_and_backward()
        for optimizer in state.optimizers:
            if state.scaler is None:
                optimizer.step()
            else:
                state.scaler.step(optimizer)
        if state.scaler is not None:
            state.scaler.update()
        self.logger.log_metrics(
            {
                "loss/train/total": state.loss,
                **metrics,
                **_learning_rates(state.optimizers),
                "time/epoch": state.timestamp.epoch.value,
                "time/sample": state.timestamp.sample.value,
            }
        )
        if self._step_schedulers_every_batch:
            for scheduler in state.schedulers:
                scheduler.step()
        tokens = self.tokens_in(state.batch) * state.world_size
        state.timestamp = state.timestamp.to_next_batch(state.batch_samples, tokens, self._lap())
        self.engine.run_event(Event.BATCH_END)
        if self._eval_interval.passed(state):
            self._evaluate_all()
        self.engine.run_event(Event.BATCH_CHECKPOINT)

    def _forward_and_backward(self) -> dict[str, Any]:
        """Leaves the gradients of the batch in the model, its loss in the state; returns its metrics."""
        state, batch = self.state, self.state.batch
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        microbatches = _batches.split(batch, self._microbatch_size)
        samples = _batches.samples_in(batch)
        means = WeightedMeans()
        for index, microbatch in enumerate(microbatches):
            state.batch = microbatch
            is_last = index == len(microbatches) - 1
            with nullcontext() if is_last else _without_gradient_sync(self._module):
                self._microbatch(_batches.samples_in(microbatch) / samples, means)
        state.batch = batch
        if state.scaler is not None:
            for optimizer in state.optimizers:
                state.scaler.unscale_(optimizer)
        averages = means.over_ranks()
        state.loss = averages.pop("loss")
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return averages

    def _microbatch(self, share: float, means: WeightedMeans) -> None:
        state = self.state
        with self._autocast():
            self.engine.run_event(Event.BEFORE_FORWARD)
            state.outputs = self.forward(self._module, state.batch)
            self.engine.run_event(Event.AFTER_FORWARD)
            self.engine.run_event(Event.BEFORE_LOSS)
            state.loss = self.loss(state.outputs, state.batch)
            self.engine.run_event(Event.AFTER_LOSS)
        self.engine.run_event(Event.BEFORE_BACKWARD)
        scaled = state.loss * share
        (scaled if state.scaler is None else state.scaler.scale(scaled)).backward()
        self.engine.run_event(Event.AFTER_BACKWARD)
        state.loss = state.loss.detach()
        means.add("loss", state.loss, share)
        with torch.no_grad():
            targets = self.targets(state.batch)
            for name, metric in state.train_metrics.items():
                means.add(f"metrics/train/{name}", metric(state.outputs, targets), share)

    def _lap(self) -> timedelta:
        """Returns the time since the last lap, the same on all ranks, and hears whether one of them asks to stop."""
        now = time.perf_counter()
        seconds, stop = _distributed.agree(now - self._mark, self.state.is_stopping)
        self._mark = now
        if stop:
            self.state.stop_training()
        return timedelta(seconds=seconds)

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

    def tokens_in(self, batch: Any) -> int:
        """Returns the number of tokens of a batch: the size of its "input_ids", where it has them, else 0."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0

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
        results = {label: self._evaluate(label, one) for label, one in _labelled(dataloader).items()}
        self.engine.run_event(Event.EVAL_STANDALONE_END)
        return results

    def _evaluate_all(self) -> None:
        if self.state.eval_dataloader is None:
            return
        started = time.perf_counter()
        self.engine.run_event(Event.EVAL_BEFORE_ALL)
        for label, dataloader in _labelled(self.state.eval_dataloader).items():
            self._evaluate(label, dataloader)
        self.engine.run_event(Event.EVAL_AFTER_ALL)
        self._evaluated_at = self.state.timestamp.batch
        # The clock of the run counts training alone.
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

    def close(self) -> None:
        """Closes callbacks and destinations, once; further calls do nothing.

        Raises:
            Exception: the first that a callback raised in its `close`.
        """
        self._close(None)

    def _close(self, exception: BaseException | None) -> None:
        try:
            self.engine.close(exception)
        finally:
            if self._owns_process_group:
                self._owns_process_group = False
                _distributed.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(exception)

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise

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
        state.dataloader_len = _length(dataloader)
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
        dtype = _AUTOCAST_DTYPES.get(self.state.precision)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype)


def _check_choices(
    precision: str,
    microbatch_size: int | None,
    save_folder: str | Path | None,
    run_name: str | None,
    *,
    autoresume: bool,
) -> None:
    if precision != "fp32" and precision not in _AUTOCAST_DTYPES:
        raise ValueError(f"precision must be 'fp32', 'bf16' or 'fp16', got {precision!r}.")
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"device_train_microbatch_size must be at least 1, got {microbatch_size}.")
    if autoresume and (save_folder is None or run_name is None):
        missing = "save_folder" if save_folder is None else "run_name"
        raise ValueError(
            f"autoresume must know which run to go on with, got no {missing}. Pass it to the Trainer."
        )


def _check_can_fit(state: State) -> None:
    for name, hint in (
        ("train_dataloader", "Pass a DataLoader."),
        ("optimizers", "Pass torch.optim.Adam(model.parameters()), say."),
        ("max_duration", 'Pass max_duration="5ep" to the Trainer, or duration="1ep" to fit.'),
    ):
        if not getattr(state, name) and getattr(state, name) in {None, ()}:
            raise ValueError(f"{name} must be given to train, got none. {hint}")
    if state.max_duration is not None and state.max_duration.unit is TimeUnit.DURATION:
        raise ValueError(
            f'max_duration must say how long the whole run is, got {state.max_duration}. Write "5ep".'
        )
    _distributed.check_sampler(state.train_dataloader)


def _saver(folder: str | Path, interval: str | int | Time, keep: int | None) -> CheckpointSaver:
    return CheckpointSaver(folder, save_interval=interval, keep=keep)


def _device(device: str | torch.device | None) -> torch.device:
    """Returns the device asked for, or this rank's accelerator, or the CPU."""
    if device is not None:
        return torch.device(device)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    # torch.accelerator came with torch 2.6.
    accelerator = getattr(torch, "accelerator", None)
    found = (
        accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    )
    return torch.device("cpu") if found is None else torch.device(found.type)


def _several(one_or_more: Any) -> tuple[Any, ...]:
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple) else (one_or_more,)


def _labelled(dataloader: Any) -> dict[str, Any]:
    if dataloader is None:
        return {}
    return dict(dataloader) if isinstance(dataloader, Mapping) else {"eval": dataloader}


def _length(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except TypeError:
        return None


def _learning_rates(optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, float]:
    """Returns the learning rate of each group by "lr/<optimizer>/group<i>"; a second optimizer of a class has a number."""
    rates: dict[str, float] = {}
    names: list[str] = []
    for optimizer in optimizers:
        base = type(optimizer).__name__
        names.append(base if base not in names else f"{base}{names.count(base) + 1}")
        for index, group in enumerate(optimizer.param_groups):
            rates[f"lr/{names[-1]}/group{index}"] = group["lr"]
    return rates


def _move_optimizers(optimizers: tuple[torch.optim.Optimizer, ...], device: torch.device) -> None:
    """Moves what an optimizer has gathered already to where the parameters now are."""
    for optimizer in optimizers:
        for values in optimizer.state.values():
            for name, value in values.items():
                # Step counters stay on the CPU, where optimizers expect them.
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    values[name] = value.to(device)


def _without_gradient_sync(module: torch.nn.Module) -> AbstractContextManager[None]:
    if isinstance(module, DistributedDataParallel):
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()
