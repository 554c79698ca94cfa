"""A small, complete trainer: `fit`, `eval` and `predict`, on one device or on several ranks.

It provides a loop for the events and does not compete with larger trainers. Use it from one thread.
"""

import inspect
import itertools
import logging
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Literal, Never, Self

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import IterableDataset

from events.callback import Callback
from events.callbacks.time_ledger import TimeLedger
from events.engine import Engine
from events.errors import RecordError, without_own_frames
from events.event import Event
from events.interval import Interval
from events.logger.destination import Destination
from events.logger.device import DeviceCopies
from events.logger.logger import Logger
from events.names import check_unknown
from events.run import agreed_run_name, new_run_name
from events.state import Phase, RunStatus, State, as_tuple
from events.timestamp import Time, Timestamp

from . import distributed
from .batches import has_parts, move, samples_in, split
from .checkpoint.contents import load_checkpoint, load_optimizers, load_weights
from .checkpoint.parts import RunParts
from .checkpoint.reading import find_checkpoint, newest_checkpoint
from .checkpoint.saver import CheckpointSaver
from .checkpoint.schedule import AutoInterval
from .evaluator import Evaluator, apart_from, as_evaluators
from .metrics import (
    MeanMetric,
    WeightedMeans,
    as_metrics,
    log_values,
    losses_by_name,
    own_loss,
    scalars,
    total_loss,
)
from .preemption import Preemption, SignalWatch
from .random_state import seed_all
from .schedulers import BoundSchedule, PlateauScheduler, bind_schedules, check_monitors
from .set_up import (
    AUTOCAST_DTYPES,
    as_limit,
    check_can_fit,
    check_choices,
    check_iterations,
    check_progress,
    closure_optimizer,
    find_device,
    learning_rates,
    length_of,
    move_optimizers,
    parts_taken,
    shorter,
    step_schedulers_of_epoch,
    versions,
    weights_options,
    without_gradient_sync,
)
from .train_data import SkipBy, TrainData, random_numbers

__all__ = ["Trainer"]

_log = logging.getLogger("events")

_MIN_TO_HALVE = 2
_open_trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
_NO_BATCH = object()


class Trainer:
    """Trains a model and runs the 40 events of `Event`.

    ```python
    trainer = Trainer(model, train_dataloader, eval_dataloader, max_duration="5ep", loss_fn=loss_fn,
                      optimizers=optimizer, loggers=[ProgressBar(), RunDirectory("runs/mine")])
    trainer.fit()
    ```

    **Batches.** A batch is a pair `(inputs, targets)` of tensors or containers of tensors, or a mapping, or
    anything else that the model takes. The loss of a pair is `loss_fn(model(inputs), targets)`; for a mapping
    it is `loss_fn(model(**batch), batch)`. Without `loss_fn` it is `outputs.loss`, `outputs["loss"]`, or the
    one number among the outputs; such a model gets the targets too if it has a parameter for them. A model
    with the methods `loss` and `eval_forward` gets whole batches, and its `get_metrics` and `update_metric`
    are used. An object with a method `to` is moved as a whole. For other batches, override `forward`,
    `targets`, `loss`, `samples_in`, `loss_weight` and `tokens_in`; for other ways to train and evaluate,
    `train_step` and `eval_step`.

    **Losses.** A loss is a mean, or one loss per sample; or several by name or in a list. Several are logged
    as `loss/train/<name>`, and the one called "total", or else their sum, is trained on.

    **Metrics.** Logged with each batch, at the step that counts the batches before it: `loss/train/total`,
    `metrics/train/<name>`, `lr/<optimizer>/group<i>`, `time/epoch`, `time/sample`; with each epoch
    `metrics/train_epoch/<name>`; with each evaluation `loss/<label>/total` and `metrics/<label>/<name>`. A
    vector is logged as `<name>/0` and so on, a matrix as a table, but not with each batch.

    **Ranks.** Under `torchrun` each rank makes its own Trainer. Gradients, losses, metrics and the clock are
    reduced over ranks; give the training dataloader a `DistributedSampler`. `state.stop_training()` on any
    rank stops all, and the first rank without a batch ends the epoch of all.

    **Close.** `close`, or the end of a `with` block, closes callbacks and destinations. So does `fit` if it
    raises, and interpreter exit. A closed trainer cannot be used again.

    Args:
        model: the model; moved to the device, not copied.
        train_dataloader: yields training batches.
        eval_dataloader: yields evaluation batches; or several dataloaders by label; or a list of dataloaders
            ("eval", "eval_1" and so on) and `Evaluator`s.
        max_duration: when training ends, such as "5ep", "1000ba" or "2h"; a bare integer counts epochs.
        loss_fn: takes outputs and targets, returns the mean loss of a (micro)batch. Not needed for a model
            with `loss(outputs, batch)` and `eval_forward(batch, outputs)`, such as Composer's.
        train_step: a function of state and batch that trains on the batch; it replaces the method
            `train_step`.
        optimizers: one or several; all step with each batch. One that needs a closure, such as LBFGS, must be
            the only one, and the events of a batch run as often as it computes the loss.
        schedulers: torch's, one or several; or schedules of training time, such as
            `CosineAnnealingWithWarmupScheduler("100ba")`, "linear", "cosine", "constant", or a function of
            the state that returns a factor. All step with each batch, or with each epoch; `PlateauScheduler`
            with each evaluation.
        step_schedulers_every_batch: whether schedulers step with each batch rather than each epoch.
        metrics: by name, functions of outputs and targets that return a batch's mean, or torchmetrics.
        eval_interval: how often to evaluate within `fit`, such as "1ep" or "500ba"; the end of training is
            always evaluated.
        train_subset_num_batches: ends each epoch after as many batches, at least 1; None or -1 for all.
        eval_subset_num_batches: ends each evaluation after as many; an `Evaluator`'s own number takes
            precedence.
        iteration_length: the length of an iteration in epochs ("3ep"); None for no iterations.
        callbacks: the callbacks.
        loggers: the destinations.
        run_name: the name of the run, the same on all ranks. Default: the environment variable `RUN_NAME`,
            or a new name.
        device: where to train. Default: the accelerator that torch finds, else the CPU.
        device_train_microbatch_size: samples per forward pass; gradients accumulate over a batch. "auto":
            halved whenever memory runs out, for the rest of the run; on a single rank.
        precision: "fp32", or "bf16" or "fp16" (also "amp_bf16", "amp_fp16") for `torch.autocast`.
        seed: seeds Python's, numpy's and torch's generators, differently on each rank.
        saver: saves checkpoints: `CheckpointSaver("{run_name}/checkpoints", save_interval="500ba", keep=3)`.
            Savers among the callbacks work too; this one runs last.
        save_folder: a short cut for `saver=CheckpointSaver(save_folder)`; None for no checkpoints. The
            following arguments are passed to that saver.
        save_filename, save_interval, save_overwrite, save_weights_only, save_sharded: the saver's `filename`,
            `save_interval`, `overwrite`, `weights_only` and `sharded`.
        save_latest_filename: the saver's `latest_filename`.
        save_num_checkpoints_to_keep: the saver's `keep`.
        load_path: the checkpoint to start from: a local path, a URI in a store, "latest" for the newest of
            this run, or a name that a destination can download.
        load_weights_only: whether to load only the model from `load_path`, for a new run.
        load_strict: whether the names of the weights must match the model's; with `load_weights_only`.
        load_exclude: `fnmatch` patterns of weights not to load; with `load_weights_only`.
        autoresume: whether to resume from the newest intact checkpoint in `save_folder` or of a
            `CheckpointSaver`, if there is one; needs `run_name`.
        skip_by: how a run that resumes within an epoch skips batches that were already trained on. "index"
            skips indices of the sampler, "reading" reads the batches; "auto" skips by index if that gives
            the same random numbers, which is always so without workers.
        preemption: how training ends on SIGTERM or SIGUSR1: by default after the current batch, with a
            checkpoint; None leaves these signals alone.
        time_ledger: whether to add a `TimeLedger` to the callbacks, if they have none.
        raise_errors, strict, namespace, device_copies: see `Logger`.
        state: further objects for checkpoints, by name: objects with `state_dict` and `load_state_dict`, or
            random number generators, such as `{"teacher": teacher}`. Modules and generators of the model, the
            loss, metrics and callbacks are found automatically; None excludes the one of that name.

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
        train_step: Callable[[State, Any], Any] | None = None,
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
        saver: CheckpointSaver | None = None,
        save_folder: str | Path | None = None,
        save_filename: str | EllipsisType = ...,
        save_latest_filename: str | EllipsisType | None = ...,
        save_overwrite: bool | EllipsisType = ...,
        save_weights_only: bool | EllipsisType = ...,
        save_interval: str | int | Time | AutoInterval | EllipsisType = ...,
        save_num_checkpoints_to_keep: int | EllipsisType | None = ...,
        save_sharded: bool | EllipsisType | None = ...,
        load_path: str | Path | None = None,
        load_weights_only: bool = False,
        load_strict: bool = True,
        load_exclude: Sequence[str] = (),
        autoresume: bool = False,
        skip_by: SkipBy = "auto",
        preemption: Preemption | None = Preemption(),  # noqa: B008  # frozen
        time_ledger: bool = True,
        raise_errors: bool = False,
        strict: bool = False,
        namespace: str = "",
        device_copies: DeviceCopies = DeviceCopies(),  # noqa: B008  # frozen
        state: Mapping[str, Any] | None = None,
        **others: Never,
    ) -> None:
        check_unknown("Trainer", others, inspect.signature(type(self)).parameters)
        own_saver = _saver_of(
            saver,
            folder=... if save_folder is None else save_folder,
            filename=save_filename,
            latest_filename=save_latest_filename,
            overwrite=save_overwrite,
            weights_only=save_weights_only,
            save_interval=save_interval,
            keep=save_num_checkpoints_to_keep,
            sharded=save_sharded,
        )
        own_savers = [] if own_saver is None else [own_saver]
        savers = [*own_savers, *(one for one in as_tuple(callbacks) if isinstance(one, CheckpointSaver))]
        self._step_function = train_step
        check_choices(device_train_microbatch_size, run_name, saves=bool(savers), autoresume=autoresume)
        weights = weights_options(load_path, load_exclude, weights_only=load_weights_only, strict=load_strict)
        if autoresume and savers[0].weights_only:
            raise ValueError("autoresume needs whole checkpoints. Leave out save_weights_only.")
        self._savers = savers
        _close_earlier(run_name, savers[:autoresume])
        self._eval_interval = Interval(eval_interval, default_unit="ep")
        self._iteration_length = None if iteration_length is None else Time.from_input(iteration_length, "ep")
        check_iterations(
            self._iteration_length, max_duration, eval_interval, *(one.interval for one in savers)
        )
        self._loss_fn = loss_fn
        self._metrics = metrics
        self._microbatch_size = device_train_microbatch_size
        # The size that "auto" has found.
        self._auto_size = sys.maxsize
        self._step_schedulers_every_batch = step_schedulers_every_batch
        self._train_subset = as_limit(train_subset_num_batches, "train_subset_num_batches")
        self._eval_subset = as_limit(eval_subset_num_batches, "eval_subset_num_batches")
        # Whether any rank has asked to stop; the same on all ranks.
        self._is_stopping = False
        # The signal of any rank, and whether it ends training; the same on all ranks.
        self._signal: int | None = None
        self._is_preempted, self._signals = False, SignalWatch(preemption)
        # The number of batches that each rank certainly has in this epoch; 0 if ranks must ask.
        self._certain_batches = 0
        # The names of losses and metrics that a batch has on any rank; None before the first of `fit`.
        self._batch_names: tuple[str, ...] | None = None
        # Warnings that were already logged, by key.
        self._said: set[str] = set()
        # When the current lap began; evaluations move it, because the clock of a run counts only training.
        self._lap_start = 0.0
        self._device = find_device(device)
        # Registered before the engine, so that at interpreter exit it runs after it: callbacks may still use
        # the process group.
        self._leave_ranks = (
            weakref.finalize(self, distributed.leave) if distributed.join(self._device) else None
        )
        self.state = State(
            distributed.from_rank_zero(run_name or agreed_run_name() or new_run_name()),
            None if max_duration is None else Time.from_input(max_duration, "ep"),
            model=model.module if isinstance(model, DistributedDataParallel) else model,
            optimizers=optimizers,
            device=self._device,
            precision=precision,
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
            dataloader=train_dataloader,
            dataloader_label=None if train_dataloader is None else "train",
            dataloader_len=shorter(length_of(train_dataloader), self._train_subset),
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
        roots = {"loss_fn": loss_fn, "train_step": train_step}
        roots |= {f"metrics.{name}": one for name, one in (metrics or {}).items()}
        # The saver comes last: a checkpoint includes what other callbacks do at its events.
        self._make_engine((*as_tuple(callbacks), *own_savers), with_ledger=time_ledger)
        self.state.parts = RunParts(self.state, self.logger, roots, state or {})
        self._data = TrainData(
            self.state,
            self.engine,
            skip_by=skip_by,
            is_saved=bool(savers) or self.state.continues_run,
            is_limited=self._train_subset is not None,
        )
        try:
            with self._closing_on_error():
                self._set_up(model)
                self._resumed = self._load(load_path, savers, weights, autoresume=autoresume)
            _open_trainers.add(self)
        except RecordError as error:
            raise without_own_frames(error) from None

    def _make_engine(self, callbacks: tuple[Callback, ...], *, with_ledger: bool) -> None:
        self._ledger = next((one for one in callbacks if isinstance(one, TimeLedger)), None)
        if self._ledger is None and with_ledger:
            self._ledger = TimeLedger()
            callbacks = (*callbacks, self._ledger)
        self.engine = Engine(self.state, self.logger, callbacks)
        distributed.charge_waiting(self._ledger)

    def _set_up(self, model: torch.nn.Module) -> None:
        state = self.state
        self._has_own_step = bool(self._step_function) or type(self).train_step is not Trainer.train_step
        model.to(self._device)
        for name, part in state.parts.find().parts.items():
            if name.startswith("loss_fn") and isinstance(part, torch.nn.Module):
                part.to(self._device)
        move_optimizers(state.optimizers, self._device)
        if self._has_own_step and self._microbatch_size is not None:
            raise ValueError(
                "device_train_microbatch_size must be None with train_step, which splits batches."
            )
        self._module = distributed.wrap(model, self._device, is_called=not self._has_own_step)
        # Evaluations don't use the wrapped module, because ranks may evaluate different numbers of batches.
        self._bare_module: torch.nn.Module = state.model
        self._closure_optimizer = closure_optimizer(state.optimizers, state.precision)
        # The model, if it computes loss and metrics itself, like Composer's.
        has_steps = all(callable(getattr(state.model, name, None)) for name in ("loss", "eval_forward"))
        self._steps: Any = state.model if has_steps and self._loss_fn is None else None
        has_own_loss = self._loss_fn is None and self._steps is None and type(self).loss is Trainer.loss
        # How many parts of a batch the model needs; one that computes its loss needs the targets.
        self._parts_given = parts_taken(state.model) if has_own_loss else 0
        # A custom step returns its measurements.
        of_batches = {} if self._has_own_step else self._all_metrics(is_train=True)
        state.train_metrics = as_metrics(of_batches, self._device)
        state.evaluators = self._evaluators(state.eval_dataloader)
        check_iterations(self._iteration_length, *(one.eval_interval for one in state.evaluators))
        state.eval_metrics = {one.label: self._eval_metrics(one) for one in state.evaluators}
        check_monitors(state, has_loss=self._steps is None)
        is_scaled = AUTOCAST_DTYPES.get(state.precision) is torch.float16 and self._device.type != "cpu"
        # Trained parameters outside of DistributedDataParallel, and parameters that no optimizer has.
        self._unsynced: list[torch.nn.Parameter] = []
        self._untrained: list[torch.nn.Parameter] = []
        # If disabled, it steps the optimizers and doesn't change the gradients.
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=is_scaled)
        state.scaler = self._scaler if is_scaled else None
        self.engine.run_event(Event.INIT)
        self.logger.log_hyperparameters({"trainer": self._description()})

    def _description(self) -> dict[str, Any]:
        """Returns the hyperparameters of the trainer itself."""
        state = self.state
        return {
            "model": type(state.model).__name__,
            "parameters": sum(
                one.numel()
                for one in self._module.parameters()
                if not isinstance(one, UninitializedParameter)
            ),
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
            "num_nodes": state.found_ranks.node_count,
            "rank_zero_seed": state.rank_zero_seed,
            "torch": torch.__version__,
            **versions(state.rank),
        }

    def _load(
        self,
        load_path: str | Path | None,
        savers: list[CheckpointSaver],
        weights: dict[str, Any] | None,
        *,
        autoresume: bool,
    ) -> Mapping[str, Any] | None:
        self.state.parts.note()
        self.engine.run_event(Event.BEFORE_LOAD)
        is_latest = load_path == "latest" and bool(savers)
        folder = savers[0].folder if autoresume or is_latest else None
        found = None if folder is None else newest_checkpoint(folder, self.state, self.logger)
        is_new = found is None or is_latest
        if found is None and not is_latest:
            found = find_checkpoint(load_path, self.state, self.logger)
        if found is None and is_latest and not autoresume:
            raise FileNotFoundError(
                f"load_path='latest' found no checkpoint in {savers[0].folder.template!r}."
            )
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
        if self._signals.is_watching:
            raise RuntimeError(
                "fit must not be called while fit runs, as a callback of the same trainer would. "
                "Make another Trainer."
            )
        check_can_fit(state)
        check_iterations(self._iteration_length, state.max_duration)
        reading = self._reading(state.train_dataloader, Phase.TRAIN, "train", self._train_subset)
        with self._closing_on_error(), reading:
            with self._signals.watching():
                self._fit()
            if (number := self._signal or self._signals.number) is not None:
                raise self._signals.end(number)

    def _fit(self) -> None:
        state = self.state
        state.begin_training()
        self._module.train()
        self._eval_interval.start(state)
        for evaluator in state.evaluators:
            evaluator.start(state)
        for scheduler in state.schedulers:
            if isinstance(scheduler, BoundSchedule):
                scheduler.step()
        self.engine.run_event(Event.FIT_START)
        interrupted = self._begin_data()
        self._agree_on_stopping()
        self._agree_on_batches(has_batch=True)
        self._batch_names = None
        self._lap_start = time.perf_counter()
        self._evaluate([one for one in state.evaluators if one.label in interrupted])
        self._end_iteration()
        while self._what_is_over() != "training":
            self._train_epoch()
        if not self._is_preempted:
            self._evaluate([one for one in state.evaluators if not self._is_evaluated(one)])
            self._agree_on_stopping()
        if not self._is_preempted:
            self.engine.run_event(Event.FIT_END)
            state.end_training()
            return
        state.status = RunStatus.PREEMPTED
        if not self._savers:
            _log.warning("The run is not saved: pass save_folder=... to the Trainer to continue it later.")
        for saver in self._savers:
            saver.limit(self._signals.seconds_left)
        self.engine.run_event(Event.FIT_END)

    def _begin_data(self) -> Sequence[str]:
        """Goes to the position of the checkpoint in the data; random numbers drawn before do not count.

        Returns the labels of evaluations that a signal had interrupted.
        """
        checkpoint, self._resumed = self._resumed, None
        saved = [] if checkpoint is None else checkpoint["random"]
        if saved and len(saved) != self.state.world_size and self.state.rank == 0:
            _log.warning(
                "The checkpoint was saved by %d ranks and is loaded on %d: ranks draw other random numbers.",
                len(saved),
                self.state.world_size,
            )
        self._begin_parts(checkpoint)
        self._data.begin(saved)
        self._set_length()
        first: Mapping[str, Any] = next((one for one in saved if one), {})
        labels: Sequence[str] = first.get("evaluating", ())
        return labels

    def _begin_parts(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Restores parts that callbacks made at FIT_START, and lists the parameters of all parts."""
        state = self.state
        if checkpoint is not None:
            load_optimizers(checkpoint, state, is_late=True)
            state.parts.load(checkpoint)
        state.parts.begin(checkpoint, is_saved=bool(self._savers))
        trained = state.parts.trained()
        if not distributed.is_alone():
            own = {id(one) for one in state.model.parameters()}
            others = [one for one in trained if id(one) not in own]
            self._unsynced = [one for one in others if not distributed.is_dtensor(one)]
        for parameter in self._unsynced:
            if self._has_own_step:
                distributed.average_as_made(parameter)
            else:
                distributed.from_first(parameter.detach())
        known = {id(one) for one in trained}
        # Callbacks handle their own parameters.
        self._untrained = [
            one
            for name, one in state.parts.parameters().items()
            if id(one) not in known and name.startswith(("model.", "loss_fn"))
        ]

    def _set_length(self) -> None:
        if distributed.is_alone():
            self.state.dataloader_len = shorter(self._data.length, self._train_subset)

    def _zero_gradients(self) -> None:
        for optimizer in self.state.optimizers:
            optimizer.zero_grad()
        # Otherwise gradients of parameters without an optimizer would add up.
        for parameter in self._untrained:
            parameter.grad = None

    def _train_epoch(self) -> None:
        state = self.state
        if state.timestamp.batch_in_epoch == 0:
            # Not at the end of the last epoch: callbacks compute metrics at EPOCH_END.
            for metric in state.train_metrics.values():
                metric.reset()
            if state.timestamp.epoch_in_iteration == 0:
                self.engine.run_event(Event.ITERATION_START)
            self.engine.run_event(Event.EPOCH_START)
        self._set_length()
        batches = self._data.epoch()
        self._certain_batches = 0
        while not (over := self._what_is_over()) and self._has_next(batches):
            self._train_batch()
        if over == "training":
            return
        if state.timestamp.batch_in_epoch == 0:
            raise ValueError("train_dataloader must yield at least one batch in each epoch, got none.")
        self._end_epoch()

    def _has_next(self, batches: Iterator[Any]) -> bool:
        """Reads a batch; returns whether every rank has one, as any rank without one ends the epoch.

        If all ranks know their numbers of batches, they communicate only at the beginning and the end.

        Raises:
            ValueError: with several ranks, the dataloader yields fewer batches than its length.
        """
        has_batch = next(batches, _NO_BATCH) is not _NO_BATCH
        if distributed.is_alone():
            return has_batch
        if self.state.timestamp.batch_in_epoch.value >= self._certain_batches:
            return self._agree_on_batches(has_batch=has_batch)
        if not has_batch:
            raise ValueError(
                f"train_dataloader must yield the {self._certain_batches} batches of its length on each "
                f"rank, got {self.state.timestamp.batch_in_epoch.value} on rank {self.state.rank}."
            )
        return True

    def _agree_on_batches(self, *, has_batch: bool) -> bool:
        """Returns whether every rank has a batch, and finds how many each has."""
        if distributed.is_alone():
            return has_batch
        state = self.state
        length = self._data.length
        known = -1 if length is None else length
        all_have, none_has, least, most = distributed.least(has_batch, not has_batch, known, -known)
        # Workers of an iterable dataset may yield more or fewer than its length.
        is_certain = not isinstance(getattr(state.train_dataloader, "dataset", None), IterableDataset)
        self._certain_batches = int(least) if least > 0 and is_certain else 0
        state.dataloader_len = shorter(int(least) if least >= 0 else None, self._train_subset)
        if not (all_have or none_has) or 0 <= least != -most:
            self._say_once(
                "ranks",
                "Ranks have unequal numbers of training batches: each epoch ends with the first without one.",
            )
        return bool(all_have)

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._said and self.state.rank == 0:
            _log.warning(text)
        self._said.add(key)

    def _what_is_over(self) -> Literal["", "epoch", "training"]:
        """Returns what ends at this point: nothing, the epoch, or training, possibly within an epoch.

        This alone decides it, before each batch, including the first of a resumed run. The end of the data is
        not known before it is reached.

        Raises:
            ValueError: the maximum is in tokens, and batches have none.
        """
        if self._is_preempted:
            return "training"
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
        log_values(self.logger, epoch_metrics, self._said)
        state.timestamp = state.timestamp.to_next_epoch(self._lap())
        if not self._step_schedulers_every_batch:
            step_schedulers_of_epoch(state.schedulers)
        self.engine.run_event(Event.EPOCH_END)
        self._evaluate_due()
        self.engine.run_event(Event.EPOCH_CHECKPOINT)
        self._end_iteration()
        self._agree_on_stopping()

    def _end_iteration(self) -> None:
        """Ends the iteration if it is over, even if the run resumes at that point."""
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
        own_samples = self.samples_in(state.batch)
        state.batch_samples = own_samples * state.world_size
        self.engine.run_event(Event.BATCH_START)
        metrics = self._run_own_step() if self._has_own_step else self._step()
        self.logger.log_metrics(
            {
                **({} if state.loss is None else {"loss/train/total": state.loss}),
                **metrics,
                **learning_rates(state.optimizers),
                "time/epoch": state.timestamp.epoch.value,
                "time/sample": state.timestamp.sample.value,
            }
        )
        seconds, samples, tokens, *due = distributed.sum_numbers(
            self._seconds(),
            own_samples,
            self.tokens_in(state.batch),
            *(one.is_due() for one in self._savers),
        )
        for saver, is_due in zip(self._savers, due, strict=True):
            saver.agree(is_due=is_due > 0)
        state.batch_samples = int(samples)
        lap = timedelta(seconds=seconds / distributed.ranks())
        state.timestamp = state.timestamp.to_next_batch(state.batch_samples, int(tokens), lap)
        if self._step_schedulers_every_batch:
            for scheduler in state.schedulers:
                scheduler.step()
        self.engine.run_event(Event.BATCH_END)
        self._evaluate_due()
        self.engine.run_event(Event.BATCH_CHECKPOINT)
        self._agree_on_stopping()

    def _step(self) -> dict[str, Any]:
        """Trains on the batch; returns its metrics."""
        if self._closure_optimizer is not None:
            return self._step_with_closure(self._closure_optimizer)
        metrics = self._forward_and_backward()
        for optimizer in self.state.optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        return metrics

    def _run_own_step(self) -> dict[str, Any]:
        """Lets `train_step` train on the batch; returns its results, averaged over ranks."""
        state, batch = self.state, self.state.batch
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        with self._autocast():
            returned = self.train_step(batch)
        state.batch, means = batch, WeightedMeans()
        for name, value in losses_by_name(returned).items():
            means.add(name, value, 1.0)
        averages = means.over_ranks(self._names_of_batch(means), self._device)
        state.loss = averages.pop("loss", None)
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return averages

    def _step_with_closure(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Lets an optimizer compute gradients as often as it needs; returns the metrics from before its step.

        Its decisions depend on the loss over all ranks, so all ranks compute it equally often.
        """
        state, batch = self.state, self.state.batch
        before: list[tuple[Any, dict[str, Any]]] = []

        def closure() -> Any:
            state.batch = batch
            metrics = self._forward_and_backward(is_measured=not before)
            if not before:
                before.append((state.loss, metrics))
            return state.loss

        optimizer.step(closure)
        state.loss, metrics = before[0]
        return metrics

    def _forward_and_backward(self, *, is_measured: bool = True) -> dict[str, Any]:
        """Computes the gradients of the batch and its loss (`state.loss`); returns its metrics."""
        state, batch = self.state, self.state.batch
        self._zero_gradients()
        # `_run_own_step` runs this event around a custom step.
        if not self._has_own_step:
            self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        means = self._accumulate(batch, is_measured=is_measured)
        state.batch = batch
        for parameter in self._unsynced:
            parameter.grad = distributed.mean_gradient(parameter)
        for optimizer in state.optimizers:
            self._scaler.unscale_(optimizer)
        averages = means.over_ranks(self._names_of_batch(means), self._device)
        state.loss = averages.pop("loss")
        if is_measured:
            # The model's own metrics return nothing for a batch, so their current value is logged.
            for name, metric in state.train_metrics.items():
                if self._is_models_own(name):
                    averages |= scalars(f"metrics/train/{name}", metric.compute())
            state.train_metric_values = {
                name.removeprefix("metrics/train/"): value
                for name, value in averages.items()
                if name.startswith("metrics/")
            }
        if not self._has_own_step:
            self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return averages

    def _names_of_batch(self, means: WeightedMeans) -> tuple[str, ...]:
        """Returns the names to average over ranks: the names on any rank in the first batch of `fit`."""
        if distributed.is_alone():
            return means.names
        if self._batch_names is None:
            self._batch_names = distributed.union(means.names)
        for name in means.names:
            if name not in self._batch_names:
                self._say_once(name, f"{name!r} is not logged: no rank had it in the first batch.")
        return self._batch_names

    def _accumulate(self, batch: Any, *, is_measured: bool) -> WeightedMeans:
        """Runs the passes over the microbatches; with "auto", uses smaller ones if memory runs out."""
        samples = self.samples_in(batch)
        size = min(samples, self._auto_size) if self._microbatch_size == "auto" else self._microbatch_size
        while True:
            try:
                return self._pass_over(split(batch, size, samples), is_measured=is_measured)
            except RuntimeError as error:
                if self._microbatch_size != "auto" or not size or size < _MIN_TO_HALVE or not _is_oom(error):
                    raise
            # Outside of the handler: the exception holds the activations.
            size = self._auto_size = (size + 1) // 2
            _log.warning("out of memory: device_train_microbatch_size is now %d.", size)
            self._zero_gradients()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _pass_over(self, microbatches: Sequence[Any], *, is_measured: bool) -> WeightedMeans:
        means = WeightedMeans()
        weights = [1.0] if len(microbatches) == 1 else [self.loss_weight(one) for one in microbatches]
        total = sum(weights) or 1.0
        for index, microbatch in enumerate(microbatches):
            self.state.batch = microbatch
            is_last = index == len(microbatches) - 1
            share = weights[index] / total
            with nullcontext() if is_last else without_gradient_sync(self._module):
                self._microbatch(share, means)
            if is_measured:
                with torch.no_grad():
                    for name, value in self._update(self.state.train_metrics).items():
                        for part, number in scalars(f"metrics/train/{name}", value).items():
                            means.add(part, number, share)
        return means

    def _microbatch(self, share: float, means: WeightedMeans) -> None:
        state = self.state
        with self._autocast():
            self.engine.run_event(Event.BEFORE_FORWARD)
            state.outputs = self.forward(self._module, state.batch)
            self.engine.run_event(Event.AFTER_FORWARD)
            self.engine.run_event(Event.BEFORE_LOSS)
            state.loss, parts = total_loss(self.loss(state.outputs, state.batch))
            self.engine.run_event(Event.AFTER_LOSS)
        self.engine.run_event(Event.BEFORE_BACKWARD)
        loss = self._scaler.scale(state.loss * share)
        if self._ledger is not None and isinstance(self._module, DistributedDataParallel):
            self._ledger.wait_after_backward(loss)
        loss.backward()
        self.engine.run_event(Event.AFTER_BACKWARD)
        state.loss = state.loss.detach()
        means.add("loss", state.loss, share)
        for name, part in parts.items():
            means.add(f"loss/train/{name}", part, share)

    def _update(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the batch to metrics; returns the values for this batch, if the metrics return them."""
        state, steps = self.state, self._steps
        own = [name for name in metrics if self._is_models_own(name)]
        outputs = (
            state.outputs if steps is None or not own else steps.eval_forward(state.batch, state.outputs)
        )
        values = {}
        for name, metric in metrics.items():
            if steps is not None and name in own:
                returned = steps.update_metric(state.batch, outputs, metric)
                state.metric_outputs = {} if returned is None else returned
            else:
                samples = [self.samples_in(state.batch)] * isinstance(metric, MeanMetric)
                values[name] = metric(state.outputs, self.targets(state.batch), *samples)
        return values

    def _is_models_own(self, name: str) -> bool:
        """Returns whether the model updates this metric itself."""
        return self._steps is not None and name not in (self._metrics or {})

    def _seconds(self) -> float:
        """Returns the time since the last lap, on this rank."""
        now = time.perf_counter()
        seconds, self._lap_start = now - self._lap_start, now
        return seconds

    def _lap(self) -> timedelta:
        """Returns the time since the last lap, averaged over ranks so that their timestamps agree."""
        return timedelta(seconds=distributed.sum_numbers(self._seconds())[0] / distributed.ranks())

    def _agree_on_stopping(self) -> None:
        """Stops every rank if one stops: a rank that continued alone would wait for the others forever."""
        state = self.state
        stops, signals = distributed.sum_numbers(state.is_stopping, self._signals.number is not None)
        self._is_stopping = stops > 0
        if not stops and not signals:
            return
        ends = distributed.gather((state.stop_reason, self._signals.number))
        self._signal = next((number for _, number in ends if number is not None), None)
        if self._is_stopping or self._signal is None:
            state.stop_training()
            state.stop_reason = next((reason for reason, _ in ends if reason is not None), None)
            return
        ranks = [str(rank) for rank, (_, number) in enumerate(ends) if number is not None]
        name, several = signal.Signals(self._signal).name, "s" * (len(ranks) > 1)
        self._is_preempted, state.stop_reason = True, f"{name} on rank{several} {', '.join(ranks)}"
        if state.rank == 0:
            _log.warning("%s: training ends after %s.", state.stop_reason, state.timestamp.batch)

    def _is_leaving(self) -> bool:
        """Returns whether this rank has a signal to end training that has not ended by itself."""
        return self._signals.is_watching and self._signals.number is not None and not self._is_stopping

    def eval(self, eval_dataloader: Any = None) -> dict[str, dict[str, float]]:
        """Evaluates, outside of `fit`.

        Args:
            eval_dataloader: one dataloader, or several by label. Default: the trainer's.

        Returns:
            Metrics by name, for each label; with a `loss_fn` also the loss.

        Raises:
            ValueError: there is no dataloader.
            EngineClosedError: the trainer is closed.
        """
        evaluators = self.state.evaluators if eval_dataloader is None else self._evaluators(eval_dataloader)
        if not evaluators:
            raise ValueError("eval_dataloader must be given to eval or to the Trainer.")
        self.engine.run_event(Event.EVAL_STANDALONE_START)
        results = {one.label: self._evaluate_one(one) or {} for one in evaluators}
        self.engine.run_event(Event.EVAL_STANDALONE_END)
        return {
            label: {_short_name(name, label): value for name, value in values.items()}
            for label, values in results.items()
        }

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
        for index, evaluator in enumerate(evaluators):
            before = random_numbers(self.state) if self._savers and self._signals.preemption else {}
            values = self._evaluate_one(evaluator, may_leave=True)
            if values is None:
                # The resumed run begins with this evaluation, from this random state.
                earlier = self.state.interrupted_evaluation
                labels = [*earlier.get("evaluating", ()), *(one.label for one in evaluators[index:])]
                self.state.interrupted_evaluation = {**before, **earlier, "evaluating": labels}
                return
            batch = int(self.state.timestamp.batch)
            self.state.eval_batches = {**self.state.eval_batches, evaluator.label: batch}
            for scheduler in self.state.schedulers:
                if isinstance(scheduler, PlateauScheduler) and scheduler.monitor in values:
                    scheduler.evaluated(values[scheduler.monitor])
        self.engine.run_event(Event.EVAL_AFTER_ALL)
        self._lap_start += time.perf_counter() - started

    def _eval_metrics(self, evaluator: Evaluator) -> dict[str, Any]:
        return as_metrics(evaluator.chosen(self._all_metrics(is_train=False)), self._device)

    def _all_metrics(self, *, is_train: bool) -> dict[str, Any]:
        get: Any = getattr(self._steps, "get_metrics", None)
        return {**({} if get is None else get(is_train=is_train)), **(self._metrics or {})}

    def _evaluators(self, eval_dataloader: Any) -> tuple[Evaluator, ...]:
        """Returns evaluators that share no dataloader with training."""
        found = as_evaluators(eval_dataloader)
        for one in found:
            one.dataloader = apart_from(self.state.train_dataloader, one.dataloader)
        return found

    def _evaluate_one(self, evaluator: Evaluator, *, may_leave: bool = False) -> dict[str, float] | None:
        """Evaluates; returns the values, or None where a signal on any rank has interrupted it."""
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
            batches = itertools.islice(evaluator.dataloader, limit)
            for batch in self._in_step(batches, label, may_leave=may_leave):
                self._evaluate_batch(batch, label, metrics, losses)
            names = self._agree_on_evaluation(losses.names, is_whole=not (may_leave and self._is_leaving()))
            if names is None:
                return None
            results = losses.over_ranks(names, self._device)
            computed = {name: metric.compute() for name, metric in metrics.items()}
            results |= {f"metrics/{label}/{name}": value for name, value in computed.items()}
            numbers = log_values(self.logger, results, self._said)
            values = {name: float(value) for name, value in numbers.items()}
            state.eval_values = {**state.eval_values, **values}
            state.eval_batches = {**state.eval_batches, **dict.fromkeys(values, int(state.timestamp.batch))}
            state.eval_metric_values = {**state.eval_metric_values, **computed}
            self.engine.run_event(Event.EVAL_END)
        return values

    def _in_step(self, batches: Iterable[Any], label: str, *, may_leave: bool = False) -> Iterator[Any]:
        """Yields batches; with `may_leave`, until a signal comes.

        Only ranks with parts of the model need each other for every batch.

        Raises:
            ValueError: these ranks have unequal numbers of batches; raised on all of them.
        """
        if distributed.is_alone() or not distributed.is_sharded(self.state.model):
            for batch in batches:
                yield batch
                if may_leave and self._is_leaving():
                    return
            return
        iterator = iter(batches)
        while True:
            batch = next(iterator, _NO_BATCH)
            has_batch = batch is not _NO_BATCH
            stays = not (may_leave and self._is_leaving())
            all_have, none_has, all_stay = distributed.least(has_batch, not has_batch, stays)
            if none_has or not all_stay:
                return
            if not all_have:
                raise ValueError(
                    f"ranks that each have a part of the model must have as many batches of {label!r}. "
                    "Pass a DistributedSampler to its DataLoader."
                )
            yield batch

    def _agree_on_evaluation(self, names: Sequence[str], *, is_whole: bool) -> tuple[str, ...] | None:
        """Returns the names of the losses on any rank, and adds up the counts of all ranks.

        Returns None if one was interrupted.
        """
        state, now = self.state, self.state.eval_timestamp
        if distributed.is_alone():
            return tuple(names) if is_whole else None
        ranks = distributed.gather((tuple(names) if is_whole else None, now.to_numbers()))
        if any(of_rank is None for of_rank, _ in ranks):
            return None
        counts = {name: sum(numbers[name] for _, numbers in ranks) for name in ("sample", "sample_in_epoch")}
        longest = {
            name: max(numbers[name] for _, numbers in ranks)
            for name in now.to_numbers()
            if name not in counts
        }
        state.eval_timestamp = Timestamp.from_state_dict(counts | longest)
        return tuple(dict.fromkeys(name for of_rank, _ in ranks for name in of_rank))

    def _evaluate_batch(
        self, batch: Any, label: str, metrics: Mapping[str, Any], losses: WeightedMeans
    ) -> None:
        state = self.state
        state.batch = move(batch, self._device)
        # Ranks may evaluate different numbers of batches, so they don't communicate before the end.
        state.batch_samples = self.samples_in(state.batch)
        self.engine.run_event(Event.EVAL_BATCH_START)
        started = time.perf_counter()
        with self._autocast():
            loss = self.eval_step(state.batch)
        if loss is not None:
            weight = self.loss_weight(state.batch)
            total, parts = total_loss(loss)
            for name, part in {"total": total, **parts}.items():
                losses.add(f"loss/{label}/{name}", part, weight)
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
            for batch in self._in_step(apart_from(state.train_dataloader, dataloader), "predict"):
                state.batch = move(batch, self._device)
                state.batch_samples = self.samples_in(state.batch)
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
        if not has_parts(batch):
            return module(batch)
        return module(*batch[: max(1, len(batch) - (len(batch) > self._parts_given))])

    def targets(self, batch: Any) -> Any:
        """Returns the targets for loss and metrics; may be overridden."""
        return batch[-1] if has_parts(batch) else batch

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Returns the loss of a (micro)batch; may be overridden.

        It is a mean, or one loss per sample, or several of these by name or in a list. The one called
        "total", or else their sum, is trained on.

        Raises:
            ValueError: there is no `loss_fn`, and the outputs have no loss.
        """
        if self._loss_fn is not None:
            return self._loss_fn(outputs, self.targets(batch))
        if self._steps is not None:
            return self._steps.loss(outputs, batch)
        if (found := own_loss(outputs)) is None:
            raise ValueError(
                f"loss must come from loss_fn or from the model's outputs, got {type(outputs).__name__} "
                "without a loss. Pass loss_fn=... to the Trainer."
            )
        return found

    def train_step(self, batch: Any) -> Any:
        """Trains on a batch; may be overridden, or given to the trainer as a function of state and batch.

        ```python
        class Alternating(Trainer):
            def train_step(self, batch):
                for optimizer in self.state.optimizers:
                    loss = self.loss(self.forward(self.state.model, batch), batch)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                return loss
        ```

        Your step computes gradients and steps the optimizers itself. The trainer moves the batch, counts,
        steps schedulers, logs, evaluates and saves. With several ranks each gradient is averaged once
        computed, so all ranks must compute gradients of the same parameters. The step runs under the
        `torch.autocast` of `precision`; with "fp16", scale losses and step optimizers with `state.scaler`,
        and update it. `metrics` are computed in evaluations only. Between BEFORE_TRAIN_BATCH and
        AFTER_TRAIN_BATCH, your step may run events with `engine.run_event`.

        Returns:
            The loss; or several by name, logged as `loss/train/<name>`; or None. The loss of the batch is
            "total" or "loss", or else the sum. A value with a "/" in its name, such as
            "metrics/train/return", is not a loss and is logged under that name.
        """
        if self._step_function is not None:
            return self._step_function(self.state, batch)
        metrics = self._step()
        return {"total": self.state.loss, **metrics}

    def eval_step(self, batch: Any) -> Any:
        """Evaluates a batch; returns its loss or losses, or None without one; may be overridden.

        It must set `state.outputs` for the metrics. It runs without gradients, under the `torch.autocast`
        of `precision`; EVAL_BEFORE_FORWARD and EVAL_AFTER_FORWARD are run here.
        """
        state = self.state
        self.engine.run_event(Event.EVAL_BEFORE_FORWARD)
        if self._steps is None:
            state.outputs = self.forward(self._bare_module, state.batch)
        else:
            state.outputs = self._steps.eval_forward(state.batch)
        self.engine.run_event(Event.EVAL_AFTER_FORWARD)
        has_loss = self._loss_fn is not None or type(self).loss is not Trainer.loss
        if not has_loss and (self._steps is not None or own_loss(state.outputs) is None):
            return None
        return self.loss(state.outputs, state.batch)

    def samples_in(self, batch: Any) -> int:
        """Returns the number of samples of a batch; may be overridden.

        It is the length of its first tensor or array, or an object's `num_graphs` or `batch_size`. Without
        these, it is the length of the first list with one entry per sample, such as images of different
        sizes, dicts or texts.
        """
        return samples_in(batch)

    def loss_weight(self, batch: Any) -> float:
        """Returns the weight of a batch in the loss of an evaluation, and of a microbatch in its batch.

        Default: its samples. Return the number of tokens if the loss is a mean over tokens.
        """
        return self.samples_in(batch)

    def tokens_in(self, batch: Any) -> int:
        """Returns the number of tokens of a batch; may be overridden.

        The size of its "input_ids", else its samples times `max_seq_len` of the dataset, else 0.
        """
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor):
            return int(ids.numel())
        length = getattr(getattr(self.state.dataloader, "dataset", None), "max_seq_len", 0)
        return self.samples_in(batch) * length if length and isinstance(length, int) else 0

    @contextmanager
    def _reading(self, dataloader: Any, phase: Phase, label: str, limit: int | None = None) -> Iterator[None]:
        """Sets dataloader, phase and label of the state; restores them at the end.

        Args:
            dataloader: the dataloader.
            phase: what the loop does with it.
            label: its label.
            limit: how many batches to read; None for all.
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
        state.dataloader_len = shorter(length_of(dataloader), limit)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(state, name, value)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        roots = [one for one in (self._bare_module, self._loss_fn) if isinstance(one, torch.nn.Module)]
        modes = [(module, module.training) for root in roots for module in root.modules()]
        for root in roots:
            root.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            # Each module separately, because some may be frozen.
            for module, was_training in modes:
                module.training = was_training

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = AUTOCAST_DTYPES.get(self.state.precision)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype)

    def close(self) -> None:
        """Closes callbacks and destinations; a second call does nothing.

        Raises:
            Exception: the first exception from a callback's `close`.
        """
        self._close(None)

    def _close(self, exception: BaseException | None) -> None:
        try:
            self.engine.close(exception)
        finally:
            distributed.charge_waiting(None)
            if self._leave_ranks is not None:
                self._leave_ranks()
            if self._is_preempted and self.state.rank == 0:
                self._is_preempted = False
                self._signals.requeue()

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


def _saver_of(saver: CheckpointSaver | None, **given: Any) -> CheckpointSaver | None:
    """Returns the saver, or the one that the arguments `save_...` of the trainer describe, or None.

    Args:
        saver: the saver that was passed.
        given: arguments of `CheckpointSaver`; `...` for those that were not passed.

    Raises:
        ValueError: both were passed.
    """
    given = {name: value for name, value in given.items() if value is not ...}
    if saver is not None and given:
        names = {"keep": "save_num_checkpoints_to_keep", "save_interval": "save_interval"}
        listed = ", ".join(names.get(name, f"save_{name}") for name in given)
        raise ValueError(
            f"saver must not be given with {listed}, which are short cuts to one. "
            "Give these to the CheckpointSaver."
        )
    return CheckpointSaver(**given) if "folder" in given else saver


def _close_earlier(run_name: str | None, savers: list[CheckpointSaver]) -> None:
    """Closes a trainer of this process that has the run, such as one from an earlier cell."""
    folders = {one.folder.template for one in savers}
    for one in tuple(_open_trainers):
        is_same = any(other.folder.template in folders for other in one._savers)  # noqa: SLF001
        if is_same and one.state.run_name == run_name and not one._signals.is_watching:  # noqa: SLF001
            one.close()


def _short_name(name: str, label: str) -> str:
    """Returns the name of a value in what `eval` returns: "accuracy", "loss", "loss/<part>"."""
    if name.startswith("metrics/"):
        return name.removeprefix(f"metrics/{label}/")
    return "loss" if name == f"loss/{label}/total" else f"loss/{name.removeprefix(f'loss/{label}/')}"


def _is_oom(error: RuntimeError) -> bool:
    """Returns whether an error says that a device is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
