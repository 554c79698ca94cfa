"""A small, complete trainer: `fit`, `eval` and `predict`, on one device or on several ranks.

It gives the events a loop to run in and does not compete with larger trainers. Use it from one thread.
"""

import itertools
import logging
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch.nn.parallel import DistributedDataParallel

from events.callback import Callback
from events.engine import Engine
from events.event import Event
from events.interval import Interval
from events.logger.destination import Destination
from events.logger.device import DeviceCopies
from events.logger.logger import Logger
from events.run import agreed_run_name, new_run_name
from events.state import Phase, State
from events.timestamp import Time, Timestamp

from . import distributed
from .batches import move, samples_in, split, train_batches
from .checkpoint.contents import load_checkpoint, load_weights
from .checkpoint.reading import find_checkpoint
from .checkpoint.saver import CheckpointSaver
from .evaluator import ComposerSteps, Evaluator, as_evaluators
from .metrics import WeightedMeans, as_metrics
from .random_state import restore_random_state, seed_all
from .schedulers import BoundSchedule, bind_schedules
from .set_up import (
    AUTOCAST_DTYPES,
    as_limit,
    as_tuple,
    check_can_fit,
    check_choices,
    check_iterations,
    check_progress,
    find_device,
    learning_rates,
    length_of,
    move_optimizers,
    step_schedulers_of_epoch,
    weights_options,
    without_gradient_sync,
)

__all__ = ["Trainer"]

_log = logging.getLogger("events")

_MIN_TO_HALVE = 2
_NO_BATCH = object()


class Trainer:
    """Trains a model and runs the 40 events of `Event`.

    ```python
    trainer = Trainer(model, train_dataloader, eval_dataloader, max_duration="5ep", loss_fn=loss_fn,
                      optimizers=optimizer, loggers=[ProgressBar(), RunDirectory("runs/mine")])
    trainer.fit()
    ```

    **Batches.** A batch is a pair `(inputs, targets)`, of tensors or of containers of tensors, or a mapping.
    The loss of a pair is `loss_fn(model(inputs), targets)`, that of a mapping
    `loss_fn(model(**batch), batch)`; without `loss_fn` it is the model's `outputs.loss` or `outputs["loss"]`.
    A model with `loss` and `eval_forward` of its own gets whole batches, and its `get_metrics` and
    `update_metric` are used. For other batches, override `forward`, `targets`, `loss` and `tokens_in`.

    **Metrics.** Logged with each batch, at the step that counts the batches before it: `loss/train/total`,
    `metrics/train/<name>`, `lr/<optimizer>/group<i>`, `time/epoch`, `time/sample`; with each epoch
    `metrics/train_epoch/<name>`; with each evaluation `loss/<label>/total` and `metrics/<label>/<name>`.

    **Ranks.** Under `torchrun` each rank makes its own Trainer. Gradients, losses, metrics and the clock are
    reduced over ranks; give the training dataloader a `DistributedSampler`. `state.stop_training()` on any
    rank stops all.

    **Close.** `close`, or the end of a `with` block, closes callbacks and destinations; so do `fit` when it
    raises, and interpreter exit. A closed trainer cannot be used again.

    Args:
        model: the model; moved to the device, not copied.
        train_dataloader: yields training batches.
        eval_dataloader: yields evaluation batches; or several dataloaders by label, or `Evaluator`s.
        max_duration: when training ends, such as "5ep", "1000ba" or "2h"; a bare integer counts epochs.
        loss_fn: takes outputs and targets, returns the mean loss of a (micro)batch. Not needed for a model
            with `loss(outputs, batch)` and `eval_forward(batch, outputs)`, such as Composer's.
        optimizers: one or several; all step with each batch.
        schedulers: torch's, one or several; or schedules of training time, such as
            `CosineAnnealingWithWarmupScheduler("100ba")`, "linear", "cosine", "constant", or a function of
            the state that returns a factor. All step with each batch, or with each epoch.
        step_schedulers_every_batch: whether schedulers step with each batch rather than each epoch.
        metrics: by name, functions of outputs and targets that return a batch's mean, or torchmetrics.
        eval_interval: how often to evaluate within `fit`, such as "1ep" or "500ba"; the end of training is
            always evaluated.
        train_subset_num_batches: ends each epoch after as many batches, at least 1; None or -1 for all.
        eval_subset_num_batches: ends each evaluation after as many, at least 1; an `Evaluator`'s own number goes first.
        iteration_length: the length of an iteration in epochs ("3ep"); None for no iterations.
        callbacks: the callbacks.
        loggers: the destinations.
        run_name: the name of the run, the same on all ranks. Default: the environment variable `RUN_NAME`,
            else a new one.
        device: where to train. Default: the accelerator that torch finds, else the CPU.
        device_train_microbatch_size: samples per forward pass; gradients accumulate over a batch. "auto":
            halved whenever memory runs out, for the rest of the run; on a single rank.
        precision: "fp32", or "bf16" or "fp16" (also "amp_bf16", "amp_fp16") for `torch.autocast`.
        seed: seeds Python's, numpy's and torch's generators, differently on each rank.
        save_folder: where to save checkpoints, such as "{run_name}/checkpoints", or the URI of a folder in a
            store, "s3://bucket/{run_name}"; None for no checkpoints. See `CheckpointSaver`, which as a
            callback has more options.
        save_filename: the name of a checkpoint.
        save_latest_filename: the name of the pointer to the newest; None for no pointer.
        save_overwrite: whether a new run may save where another has saved.
        save_weights_only: whether a checkpoint holds the model alone; no run can be resumed from it.
        save_interval: how often to save.
        save_num_checkpoints_to_keep: how many of the newest to keep locally; None for all.
        save_sharded: whether each rank saves its part; None where the model is divided by `fully_shard`.
        load_path: the checkpoint to start from: a local path, a URI in a store, "latest" for the newest where
            this run saves, or a name that a destination can download.
        load_weights_only: whether only the model is loaded from `load_path`: a new run begins with it.
        load_strict: whether the names of the weights must be those of the model; with `load_weights_only`.
        load_exclude: patterns, as of `fnmatch`, of weights not to load; with `load_weights_only`.
        autoresume: resumes from the newest whole checkpoint in `save_folder` or of a `CheckpointSaver`, if
            there is one; needs `run_name`.
        raise_errors, strict, namespace, device_copies: those of the `Logger`.

    Raises:
        ValueError: the arguments are invalid or inconsistent.
        CheckpointError: the checkpoint does not match.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Any = None,
        *,
        max_duration: str | int | Time | None = None,
        loss_fn: Any = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        schedulers: Any = (),
        step_schedulers_every_batch: bool = True,
        metrics: Mapping[str, Any] | None = None,
        eval_interval: str | int | Time = "1ep",
        train_subset_num_batches: int | None = None,
        eval_subset_num_batches: int | None = None,
        iteration_length: str | int | Time | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: Destination | Iterable[Destination] | None = None,
        run_name: str | None = None,
        device: str | torch.device | None = None,
        device_train_microbatch_size: int | Literal["auto"] | None = None,
        precision: str = "fp32",
        seed: int | None = None,
        save_folder: str | Path | None = None,
        save_filename: str = "ep{epoch}-ba{batch}.pt",
        save_latest_filename: str | None = "latest.symlink",
        save_overwrite: bool = False,
        save_weights_only: bool = False,
        save_interval: str | int | Time = "1ep",
        save_num_checkpoints_to_keep: int | None = None,
        save_sharded: bool | None = None,
        load_path: str | Path | None = None,
        load_weights_only: bool = False,
        load_strict: bool = True,
        load_exclude: Sequence[str] = (),
        autoresume: bool = False,
        raise_errors: bool = False,
        strict: bool = False,
        namespace: str = "",
        device_copies: DeviceCopies = DeviceCopies(),  # noqa: B008  # frozen
    ) -> None:
        savers = [one for one in as_tuple(callbacks) if isinstance(one, CheckpointSaver)]
        check_choices(
            device_train_microbatch_size,
            run_name,
            saves=save_folder is not None or bool(savers),
            autoresume=autoresume,
        )
        weights = weights_options(load_path, load_exclude, weights_only=load_weights_only, strict=load_strict)
        if save_weights_only and autoresume:
            raise ValueError("autoresume needs whole checkpoints. Leave out save_weights_only.")
        own_savers = (
            []
            if save_folder is None
            else [
                CheckpointSaver(
                    save_folder,
                    save_filename,
                    save_interval=save_interval,
                    latest_filename=save_latest_filename,
                    keep=save_num_checkpoints_to_keep,
                    overwrite=save_overwrite,
                    weights_only=save_weights_only,
                    sharded=save_sharded,
                )
            ]
        )
        self._eval_interval = Interval(eval_interval, default_unit="ep")
        self._iteration_length = None if iteration_length is None else Time.from_input(iteration_length, "ep")
        check_iterations(
            self._iteration_length,
            max_duration,
            eval_interval,
            None if save_folder is None else save_interval,
        )
        self._loss_fn = loss_fn
        self._metrics = metrics
        self._microbatch_size = device_train_microbatch_size
        # The size that "auto" has found.
        self._auto_size = sys.maxsize
        self._step_schedulers_every_batch = step_schedulers_every_batch
        self._train_subset = as_limit(train_subset_num_batches, "train_subset_num_batches")
        self._eval_subset = as_limit(eval_subset_num_batches, "eval_subset_num_batches")
        # Whether any rank has asked to stop, as all know.
        self._is_stopping = False
        # When the current lap began; evaluation moves it, for the clock of a run counts training alone.
        self._lap_start = 0.0
        self._device = find_device(device)
        # Before the engine, so that at interpreter exit it runs after it: callbacks may still use the process
        # group.
        self._leave_ranks = (
            weakref.finalize(self, distributed.leave) if distributed.join(self._device) else None
        )
        self.state = State(
            distributed.from_rank_zero(run_name or agreed_run_name() or new_run_name()),
            None if max_duration is None else Time.from_input(max_duration, "ep"),
            model=model.module if isinstance(model, DistributedDataParallel) else model,
            optimizers=as_tuple(optimizers),
            device=self._device,
            precision=precision,
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
            dataloader=train_dataloader,
            dataloader_label=None if train_dataloader is None else "train",
            dataloader_len=_shorter(length_of(train_dataloader), self._train_subset),
        )
        self.state.continues_run = autoresume or (load_path is not None and not load_weights_only)
        self.state.schedulers = bind_schedules(schedulers, self.state)
        if seed is not None:
            self.state.seed = seed + self.state.rank
            seed_all(self.state.seed)
        self.logger = Logger(
            self.state,
            loggers,
            raise_errors=raise_errors,
            strict=strict,
            namespace=namespace,
            device_copies=device_copies,
        )
        # The saver comes last: a checkpoint includes what other callbacks do at its events.
        self.engine = Engine(self.state, self.logger, (*as_tuple(callbacks), *own_savers))
        with self._closing_on_error():
            self._set_up(model)
            self._resumed = self._load(load_path, [*own_savers, *savers], weights, autoresume=autoresume)

    def _set_up(self, model: torch.nn.Module) -> None:
        state = self.state
        model.to(self._device)
        move_optimizers(state.optimizers, self._device)
        self._module = distributed.wrap(model, self._device)
        self._steps = None if self._loss_fn is not None else ComposerSteps.of(state.model)
        own = {} if self._steps is None else self._steps.metrics(is_train=True)
        state.train_metrics = as_metrics({**own, **(self._metrics or {})}, self._device)
        state.evaluators = as_evaluators(state.eval_dataloader)
        check_iterations(self._iteration_length, *(one.eval_interval for one in state.evaluators))
        state.eval_metrics = {one.label: self._eval_metrics(one) for one in state.evaluators}
        is_scaled = AUTOCAST_DTYPES.get(state.precision) is torch.float16 and self._device.type != "cpu"
        # Where it is disabled, it steps the optimizers and leaves the gradients as they are.
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=is_scaled)
        state.scaler = self._scaler if is_scaled else None
        self.engine.run_event(Event.INIT)
        self.logger.log_hyperparameters({"trainer": self._description()})

    def _description(self) -> dict[str, Any]:
        """Returns the hyperparameters of the trainer itself."""
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
        self,
        load_path: str | Path | None,
        savers: list[CheckpointSaver],
        weights: dict[str, Any] | None,
        *,
        autoresume: bool,
    ) -> Mapping[str, Any] | None:
        self.engine.run_event(Event.BEFORE_LOAD)
        is_latest = load_path == "latest" and bool(savers)
        place = savers[0].place if autoresume or is_latest else None
        found = None if place is None else find_checkpoint(None, place, self.state, self.logger)
        is_new = found is None or is_latest
        if found is None and not is_latest:
            found = find_checkpoint(load_path, None, self.state, self.logger)
        if found is None and is_latest and not autoresume:
            raise FileNotFoundError(f"load_path='latest' found no checkpoint in {savers[0].place.folder!r}.")
        checkpoint, path = (None, "") if found is None else found
        if checkpoint is not None and weights is not None and is_new:
            load_weights(checkpoint["model"], self.state, **weights)
            checkpoint = None
        elif checkpoint is not None:
            load_checkpoint(checkpoint, self.state, self.logger)
            self.state.last_checkpoint = path
        self.engine.run_event(Event.AFTER_LOAD)
        return checkpoint

    def fit(self, duration: str | int | Time | None = None) -> None:
        """Trains until `max_duration`, or for another `duration`.

        Args:
            duration: how much longer to train, such as "1ep"; moves `max_duration`.

        Raises:
            ValueError: the dataloader, the optimizers or the duration are missing.
            EngineClosedError: the trainer is closed.
            BaseException: what the model, the data or a callback raised, after everything is closed.
        """
        state = self.state
        if duration is not None:
            more = Time.from_input(duration, "ep")
            state.max_duration = state.timestamp.get(more.unit) + more
        check_can_fit(state)
        check_iterations(self._iteration_length, state.max_duration)
        reading = self._reading(state.train_dataloader, Phase.TRAIN, "train", self._train_subset)
        with self._closing_on_error(), reading:
            state.begin_training()
            self._module.train()
            self._eval_interval.start(state)
            for evaluator in state.evaluators:
                evaluator.start(state)
            for scheduler in state.schedulers:
                if isinstance(scheduler, BoundSchedule):
                    scheduler.step()
            self.engine.run_event(Event.FIT_START)
            self._restore_random_state()
            self._agree_on_stopping()
            self._lap_start = time.perf_counter()
            self._end_iteration()
            while self._what_is_over() != "training":
                self._train_epoch()
            self._evaluate([one for one in state.evaluators if not self._is_evaluated(one)])
            self.engine.run_event(Event.FIT_END)
            state.end_training()

    def _restore_random_state(self) -> None:
        """Restores the random state of the checkpoint: draws before training do not count."""
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is not None and self.state.rank < len(checkpoint["random"]):
            restore_random_state(checkpoint["random"][self.state.rank], self.state.train_dataloader)

    def _train_epoch(self) -> None:
        state = self.state
        if state.timestamp.batch_in_epoch == 0:
            # Not at the end of the last epoch: callbacks compute metrics at EPOCH_END.
            for metric in state.train_metrics.values():
                metric.reset()
            if state.timestamp.epoch_in_iteration == 0:
                self.engine.run_event(Event.ITERATION_START)
            self.engine.run_event(Event.EPOCH_START)
        batches = train_batches(state, self.engine)
        while not (over := self._what_is_over()) and next(batches, _NO_BATCH) is not _NO_BATCH:
            self._train_batch()
        if over == "training":
            return
        if state.timestamp.batch_in_epoch == 0:
            raise ValueError("train_dataloader must yield at least one batch in each epoch, got none.")
        self._end_epoch()

    def _what_is_over(self) -> Literal["", "epoch", "training"]:
        """Returns what has ended where the run is: nothing, the epoch, or training, maybe within an epoch.

        It is the one place that decides this: asked before each batch, also the first of a resumed run. The
        end of the data is not known before it is reached.

        Raises:
            ValueError: the maximum is in tokens, and batches have none.
        """
        state = self.state
        batches = state.timestamp.batch_in_epoch.value
        if batches and self._train_subset is not None and batches >= self._train_subset:
            return "epoch"
        if self._is_stopping or state.has_reached_maximum:
            length = state.dataloader_len
            return "epoch" if batches and length is not None and batches >= length.value else "training"
        if batches:
            check_progress(state)
        return ""

    def _end_epoch(self) -> None:
        state = self.state
        epoch_metrics = {
            f"metrics/train_epoch/{name}": metric.compute() for name, metric in state.train_metrics.items()
        }
        if epoch_metrics:
            self.logger.log_metrics(epoch_metrics)
        state.timestamp = state.timestamp.to_next_epoch(self._lap())
        if not self._step_schedulers_every_batch:
            step_schedulers_of_epoch(state.schedulers)
        self.engine.run_event(Event.EPOCH_END)
        self._evaluate_due()
        self.engine.run_event(Event.EPOCH_CHECKPOINT)
        self._end_iteration()
        self._agree_on_stopping()

    def _end_iteration(self) -> None:
        """Ends the iteration if it is over, also where the run resumes at that point."""
        state, length = self.state, self._iteration_length
        if length is None or state.timestamp.batch_in_epoch or state.timestamp.epoch_in_iteration < length:
            return
        state.timestamp = state.timestamp.to_next_iteration(self._lap())
        self.engine.run_event(Event.ITERATION_END)
        self._evaluate_due()
        self.engine.run_event(Event.ITERATION_CHECKPOINT)

    def _train_batch(self) -> None:
        state = self.state
        state.batch = move(state.batch, self._device)
        state.batch_samples = samples_in(state.batch) * state.world_size
        self.engine.run_event(Event.BATCH_START)
        metrics = self._forward_and_backward()
        for optimizer in state.optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        self.logger.log_metrics(
            {
                "loss/train/total": state.loss,
                **metrics,
                **learning_rates(state.optimizers),
                "time/epoch": state.timestamp.epoch.value,
                "time/sample": state.timestamp.sample.value,
            }
        )
        tokens = self.tokens_in(state.batch) * state.world_size
        state.timestamp = state.timestamp.to_next_batch(state.batch_samples, tokens, self._lap())
        if self._step_schedulers_every_batch:
            for scheduler in state.schedulers:
                scheduler.step()
        self.engine.run_event(Event.BATCH_END)
        self._evaluate_due()
        self.engine.run_event(Event.BATCH_CHECKPOINT)
        self._agree_on_stopping()

    def _forward_and_backward(self) -> dict[str, Any]:
        """Computes the gradients of the batch and its loss (`state.loss`); returns its metrics."""
        state, batch = self.state, self.state.batch
        for optimizer in state.optimizers:
            optimizer.zero_grad()
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        means = self._accumulate(batch)
        state.batch = batch
        for optimizer in state.optimizers:
            self._scaler.unscale_(optimizer)
        averages = means.over_ranks()
        state.loss = averages.pop("loss")
        # The model's own metrics take batches and return nothing: their value so far.
        own = set() if self._steps is None else state.train_metrics.keys() - (self._metrics or {}).keys()
        averages |= {f"metrics/train/{name}": state.train_metrics[name].compute() for name in own}
        state.train_metric_values = {
            name.removeprefix("metrics/train/"): value for name, value in averages.items()
        }
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return averages

    def _accumulate(self, batch: Any) -> WeightedMeans:
        """Runs the passes over the microbatches, smaller ones if memory runs out and the size is "auto"."""
        samples = samples_in(batch)
        size = min(samples, self._auto_size) if self._microbatch_size == "auto" else self._microbatch_size
        while True:
            try:
                return self._pass_over(split(batch, size), samples)
            except RuntimeError as error:
                if self._microbatch_size != "auto" or not size or size < _MIN_TO_HALVE or not _is_oom(error):
                    raise
            # Outside of the handler: the exception holds the activations.
            size = self._auto_size = (size + 1) // 2
            _log.warning("out of memory: device_train_microbatch_size is now %d.", size)
            for optimizer in self.state.optimizers:
                optimizer.zero_grad()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _pass_over(self, microbatches: Sequence[Any], samples: int) -> WeightedMeans:
        means = WeightedMeans()
        for index, microbatch in enumerate(microbatches):
            self.state.batch = microbatch
            is_last = index == len(microbatches) - 1
            with nullcontext() if is_last else without_gradient_sync(self._module):
                self._microbatch(samples_in(microbatch) / samples, means)
        return means

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
        self._scaler.scale(state.loss * share).backward()
        self.engine.run_event(Event.AFTER_BACKWARD)
        state.loss = state.loss.detach()
        means.add("loss", state.loss, share)
        with torch.no_grad():
            for name, value in self._update(state.train_metrics).items():
                means.add(f"metrics/train/{name}", value, share)

    def _update(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the batch to metrics; returns the values for it of those that tell."""
        state, steps = self.state, self._steps
        own = frozenset() if steps is None else metrics.keys() - (self._metrics or {}).keys()
        outputs = (
            state.outputs if steps is None or not own else steps.eval_forward(state.batch, state.outputs)
        )
        values = {}
        for name, metric in metrics.items():
            if steps is not None and name in own:
                state.metric_outputs = steps.update(metric, outputs, state.batch)
            else:
                values[name] = metric(state.outputs, self.targets(state.batch))
        return values

    def _lap(self) -> timedelta:
        """Returns the time since the last lap, averaged over ranks so that their timestamps agree."""
        now = time.perf_counter()
        seconds, self._lap_start = now - self._lap_start, now
        return timedelta(seconds=distributed.mean_over_ranks(seconds))

    def _agree_on_stopping(self) -> None:
        """Stops every rank if one stops: a rank that continued alone would wait for the others forever."""
        self._is_stopping = distributed.any_rank(self.state.is_stopping)
        if self._is_stopping:
            self.state.stop_training()

    def eval(self, eval_dataloader: Any = None) -> dict[str, dict[str, float]]:
        """Evaluates, outside of `fit`.

        Args:
            eval_dataloader: one dataloader, or several by label. Default: that of the trainer.

        Returns:
            Metrics by name, for each label; with a `loss_fn` also the loss.

        Raises:
            ValueError: there is no dataloader.
            EngineClosedError: the trainer is closed.
        """
        evaluators = self.state.evaluators if eval_dataloader is None else as_evaluators(eval_dataloader)
        if not evaluators:
            raise ValueError("eval_dataloader must be given to eval or to the Trainer.")
        self.engine.run_event(Event.EVAL_STANDALONE_START)
        results = {one.label: self._evaluate_one(one) for one in evaluators}
        self.engine.run_event(Event.EVAL_STANDALONE_END)
        return results

    def _evaluate_due(self) -> None:
        is_due = self._eval_interval.passed(self.state)
        due = [one for one in self.state.evaluators if one.is_due(self.state, by_default=is_due)]
        self._evaluate(due)

    def _is_evaluated(self, evaluator: Evaluator) -> bool:
        return self.state.eval_batches.get(evaluator.label) == self.state.timestamp.batch.value

    def _evaluate(self, evaluators: Sequence[Evaluator]) -> None:
        if not evaluators:
            return
        started = time.perf_counter()
        self.engine.run_event(Event.EVAL_BEFORE_ALL)
        for evaluator in evaluators:
            self._evaluate_one(evaluator)
            batch = int(self.state.timestamp.batch)
            self.state.eval_batches = {**self.state.eval_batches, evaluator.label: batch}
        self.engine.run_event(Event.EVAL_AFTER_ALL)
        self._lap_start += time.perf_counter() - started

    def _eval_metrics(self, evaluator: Evaluator) -> dict[str, Any]:
        own = {} if self._steps is None else self._steps.metrics(is_train=False)
        return as_metrics(evaluator.chosen({**own, **(self._metrics or {})}), self._device)

    def _evaluate_one(self, evaluator: Evaluator) -> dict[str, float]:
        state, label = self.state, evaluator.label
        if label not in state.eval_metrics:
            state.eval_metrics = {**state.eval_metrics, label: self._eval_metrics(evaluator)}
        metrics = state.eval_metrics[label]
        for metric in metrics.values():
            metric.reset()
        losses = WeightedMeans()
        own = evaluator.subset_num_batches
        limit = self._eval_subset if own is None else as_limit(own, "subset_num_batches")
        with self._reading(evaluator.dataloader, Phase.EVAL, label, limit), self._inference():
            state.eval_timestamp = Timestamp()
            self.engine.run_event(Event.EVAL_START)
            for batch in itertools.islice(evaluator.dataloader, limit):
                self._evaluate_batch(batch, metrics, losses)
            results = {f"loss/{label}/total": loss for loss in losses.over_ranks().values()}
            computed = {name: metric.compute() for name, metric in metrics.items()}
            results |= {f"metrics/{label}/{name}": value for name, value in computed.items()}
            self.logger.log_metrics(results)
            values = {name: float(value) for name, value in results.items()}
            state.eval_values = {**state.eval_values, **values}
            state.eval_batches = {**state.eval_batches, **dict.fromkeys(values, int(state.timestamp.batch))}
            state.eval_metric_values = {**state.eval_metric_values, **computed}
            self.engine.run_event(Event.EVAL_END)
        return {
            name.split("/", 2)[2] if name.startswith("metrics/") else "loss": value
            for name, value in values.items()
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
            if self._steps is None:
                state.outputs = self.forward(self._bare_module, state.batch)
            else:
                state.outputs = self._steps.eval_forward(state.batch)
            self.engine.run_event(Event.EVAL_AFTER_FORWARD)
            if self._loss_fn is not None:
                losses.add("loss", self.loss(state.outputs, state.batch), samples)
        self._update(metrics)
        seconds = timedelta(seconds=time.perf_counter() - started)
        state.eval_timestamp = state.eval_timestamp.to_next_batch(state.batch_samples, 0, seconds)
        self.engine.run_event(Event.EVAL_BATCH_END)

    def predict(self, dataloader: Iterable[Any], *, return_outputs: bool = True) -> list[Any]:
        """Runs the model over a dataloader.

        Args:
            dataloader: yields batches.
            return_outputs: whether to collect the outputs; otherwise use them in a callback's
                `predict_batch_end`.

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

    def forward(self, module: torch.nn.Module, batch: Any) -> Any:
        """Returns the model's outputs for a batch; may be overridden.

        Args:
            module: the model, possibly wrapped for distributed training.
            batch: a (micro)batch on the device.
        """
        if self._steps is not None:
            return module(batch)
        if isinstance(batch, Mapping):
            return module(**batch)
        if isinstance(batch, list | tuple):
            return module(*batch[:-1]) if len(batch) > 1 else module(batch[0])
        return module(batch)

    def targets(self, batch: Any) -> Any:
        """Returns what loss and metrics compare the outputs with; may be overridden."""
        return batch[-1] if isinstance(batch, list | tuple) else batch

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Returns the mean loss of a (micro)batch; may be overridden.

        Raises:
            ValueError: there is no `loss_fn`, and the outputs have no loss.
        """
        if self._loss_fn is not None:
            loss: torch.Tensor = self._loss_fn(outputs, self.targets(batch))
            return loss
        if self._steps is not None:
            return self._steps.loss(outputs, batch)
        found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if found is None:
            raise ValueError(
                f"loss must come from loss_fn or from the model's outputs, got {type(outputs).__name__} "
                "without a loss. Pass loss_fn=... to the Trainer."
            )
        return torch.as_tensor(found)

    def tokens_in(self, batch: Any) -> int:
        """Returns the number of tokens of a batch; may be overridden.

        The size of its "input_ids", else its samples times `max_seq_len` of the dataset, else 0.
        """
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor):
            return int(ids.numel())
        length = getattr(getattr(self.state.dataloader, "dataset", None), "max_seq_len", 0)
        return samples_in(batch) * length if isinstance(length, int) else 0

    @contextmanager
    def _reading(self, dataloader: Any, phase: Phase, label: str, limit: int | None = None) -> Iterator[None]:
        """Sets dataloader, phase and label of the state; restores them at the end.

        Args:
            dataloader: what is read.
            phase: what the loop does with it.
            label: its label.
            limit: how many batches of it are read; None for all.
        """
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
        state.dataloader_len = _shorter(length_of(dataloader), limit)
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
        """The unwrapped model: ranks may evaluate different numbers of batches."""
        module = self._module
        return module.module if isinstance(module, DistributedDataParallel) else module

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = AUTOCAST_DTYPES.get(self.state.precision)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype)

    def close(self) -> None:
        """Closes callbacks and destinations; a second call does nothing.

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


def _shorter(length: int | None, limit: int | None) -> int | None:
    """Returns the length of a dataloader of which only so many batches are read."""
    return limit if limit is not None and (length is None or length > limit) else length


def _is_oom(error: RuntimeError) -> bool:
    """Returns whether an error says that a device is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
