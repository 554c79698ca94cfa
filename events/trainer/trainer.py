"""A small, complete training loop: fit, evaluate, predict, on one device or on several ranks.

It is here so that the events have a loop and the destinations a use; it does not compete with larger trainers.
"""

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.parallel import DistributedDataParallel

from events.callback import Callback
from events.engine import Engine
from events.event import Event
from events.interval import Interval
from events.logger.destination import Destination
from events.logger.logger import Logger
from events.run import new_run_name
from events.state import Phase, RunStatus, State
from events.timestamp import Time

from . import checkpoint as _rng
from . import distributed
from . import loops as _batches
from .checkpoint import CheckpointSaver, find_checkpoint, load_checkpoint, read_checkpoint, train_batches
from .loops import ModelLoops, WeightedMeans, as_metrics
from .set_up import (
    check_can_fit,
    check_choices,
    find_device,
    labelled,
    learning_rates,
    move_optimizers,
    several,
    without_gradient_sync,
)

__all__ = ["Trainer"]


class Trainer(ModelLoops):
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
        check_choices(precision, device_train_microbatch_size, save_folder, run_name, autoresume=autoresume)
        length = None if max_duration is None else Time.from_input(max_duration, "ep")
        savers = (
            []
            if save_folder is None
            else [
                CheckpointSaver(save_folder, save_interval=save_interval, keep=save_num_checkpoints_to_keep)
            ]
        )
        self._eval_interval = Interval(eval_interval, default_unit="ep")
        self._iteration_length = None if iteration_length is None else Time.from_input(iteration_length, "ep")
        self._loss_fn = loss_fn
        self._metrics = metrics
        self._microbatch_size = device_train_microbatch_size
        self._step_schedulers_every_batch = step_schedulers_every_batch
        self._evaluated_at: Time | None = None
        self._mark = 0.0
        self._device = find_device(device)
        # Made before the engine, so that at the interpreter's end it comes after it: callbacks may still talk to other ranks.
        self._leave_ranks = (
            weakref.finalize(self, distributed.leave) if distributed.join(self._device) else None
        )
        self.state = State(
            distributed.from_rank_zero(run_name or new_run_name()),
            length,
            model=model.module if isinstance(model, DistributedDataParallel) else model,
            optimizers=several(optimizers),
            schedulers=several(schedulers),
            device=self._device,
            precision=precision,
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
        )
        if seed is not None:
            _rng.seed_all(seed + self.state.rank)
        self.logger = Logger(self.state, loggers)
        # The saver comes last: what other callbacks do at its events is in the checkpoint.
        self.engine = Engine(self.state, self.logger, (*several(callbacks), *savers))
        with self._closing_on_error():
            self._set_up(model)
            self._resumed = self._load(load_path, save_folder if autoresume else None)

    def _set_up(self, model: torch.nn.Module) -> None:
        state = self.state
        model.to(self._device)
        move_optimizers(state.optimizers, self._device)
        self._module = distributed.wrap(model, self._device)
        state.train_metrics = as_metrics(self._metrics, self._device)
        state.eval_metrics = {
            label: as_metrics(self._metrics, self._device) for label in labelled(state.eval_dataloader)
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
        check_can_fit(state)
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
        self._hear_who_stops()

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
                **learning_rates(state.optimizers),
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
        self._hear_who_stops()

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
            with nullcontext() if is_last else without_gradient_sync(self._module):
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
        """Returns the time since the last lap: the mean over ranks, so that their timestamps do not part."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return timedelta(seconds=distributed.mean_over_ranks(seconds))

    def _hear_who_stops(self) -> None:
        """Makes every rank stop where one does: a rank that went on alone would wait for the others for ever."""
        if distributed.any_rank(self.state.is_stopping):
            self.state.stop_training()

    def tokens_in(self, batch: Any) -> int:
        """Returns the number of tokens of a batch: the size of its "input_ids", where it has them, else 0."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0

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
            if self._leave_ranks is not None:
                self._leave_ranks()

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
