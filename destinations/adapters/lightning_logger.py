"""`LightningLogger` for a Lightning `Trainer(logger=…)`, and a callback that fires our events.

`lightning` and `pytorch_lightning` contain the same classes twice: if both are installed, the classes here
inherit from both. Everything runs in the training thread.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from destinations.base import LoggerDestination
from destinations.compat.summary_calls import SummaryCalls
from destinations.compat.wandb.items import Items
from destinations.run_directory import RunDirectory
from events import Callback, Destination, Event, Logger, Phase, RunStatus, State, Time, Timestamp, TimeUnit
from uploads import needs_package

from .media import WandbMedia
from .session import Session, SessionContext, as_tuple, log_values, samples_in
from .watch import ModelHistograms

__all__ = ["Experiment", "LightningEvents", "LightningLogger", "RegistryLogger"]


def _class_trees() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Returns the base classes of loggers and of callbacks in each Lightning package that is installed."""
    loggers, callbacks, error = [], [], None
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            if importlib.util.find_spec(package.partition(".")[0]) is None:
                continue
            loggers.append(importlib.import_module(f"{package}.loggers").Logger)
            callbacks.append(importlib.import_module(f"{package}.callbacks").Callback)
        except (ImportError, ValueError) as failure:
            # If one is broken, the other can still be used.
            error = failure
    if not loggers:
        with needs_package("this adapter", "lightning"):
            raise ImportError(error or "neither lightning nor pytorch_lightning is installed")
    return tuple(loggers), tuple(callbacks)


_LOGGERS, _CALLBACKS = _class_trees()
_LoggerBase: Any = type("_LoggerBase", _LOGGERS, {})
_CallbackBase: Any = type("_CallbackBase", _CALLBACKS, {})

_log = logging.getLogger("destinations")

# Key of our state in Lightning checkpoints.
_KEY = "training_destinations"


class LightningEvents(_CallbackBase):
    """Fires our events in a Lightning `Trainer` and advances the timestamp.

    ```python
    logger = LightningLogger(RunDirectory("runs/digits"))
    trainer = Trainer(logger=logger, callbacks=[LightningEvents(logger)])
    ```

    `LightningLogger.callback()` creates it; the page "Adapters for other trainers" maps hooks to events. If
    it is created without arguments, as from a configuration file of `LightningCLI`, it joins the first
    `LightningLogger` of the trainer.

    With gradient accumulation, a batch of ours is one optimizer step, so that `timestamp.batch` is the step
    that Lightning logs; a batch of Lightning is a microbatch.

    Args:
        logger: the logger whose events it fires. Default: the trainer's first `LightningLogger`.
    """

    # Set by `_join`, before any other hook.
    _session: Session
    _answer: Callable[[Any], None]

    def __init__(self, logger: "LightningLogger | None" = None) -> None:
        super().__init__()
        if logger is not None:
            self._join(logger)
        self.is_attached = False
        self._saved: dict[str, Any] | None = None
        self._loading: State | None = None
        self._is_inside_batch = False
        self._has_stepped = False
        self._samples = 0
        self._dataloader_index = 0

    def _join(self, logger: "LightningLogger") -> None:
        self._session, self._answer = logger.join(self)

    # The run.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Opens the run; fires `BEFORE_LOAD` before a `fit`.

        Raises:
            ValueError: it was made without a logger, and the trainer has no `LightningLogger`.
        """
        if not hasattr(self, "_session"):
            ours = [one for one in trainer.loggers if isinstance(one, LightningLogger)]
            if not ours:
                raise ValueError(
                    f"LightningEvents needs a LightningLogger among the loggers of the trainer, got "
                    f"{[type(one).__name__ for one in trainer.loggers]}. Pass logger=LightningLogger(...)."
                )
            self._join(ours[0])
        self.is_attached = True
        self._saved = None
        self._session.open()
        self._describe(trainer, pl_module)
        if stage == "fit":
            self._session.run_event(Event.BEFORE_LOAD)
            self._loading = self._session.state

    def _describe(self, trainer: Any, pl_module: Any) -> None:
        state = self._session.state
        state.model, state.device = pl_module, trainer.strategy.root_device
        if trainer.state.fn == "fit":
            state.max_duration = _max_duration(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Decides whether the run is continued, if Lightning has loaded its checkpoint by now."""
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._answer(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Fires `AFTER_LOAD`, `FIT_START`; Lightning has already loaded its checkpoint."""
        self._answer(trainer)
        self._describe(trainer, pl_module)
        state, saved, self._saved = self._session.state, self._saved, None
        state.optimizers = tuple(trainer.optimizers)
        if saved is not None:
            timestamp = Timestamp.from_state_dict(saved["timestamp"])
        else:
            timestamp = Timestamp.from_state_dict(
                {"batch": _batches_at_start(trainer), "epoch": trainer.current_epoch}
            )
        self._is_inside_batch = False
        # A fit that begins anew has a different run than `setup`.
        self._session.fit_start(timestamp, saved, is_before_load_due=state is not self._loading)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fires `FIT_END`."""
        self._session.fit_end()

    # Not through state_dict(), which Lightning keys by class: there may be two loggers.

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the timestamp, and the state of callbacks and destinations."""
        checkpoint.setdefault(_KEY, {})[self._own_index(trainer)] = self._session.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Stores our state for the start of training."""
        self._saved = checkpoint.get(_KEY, {}).get(self._own_index(trainer))

    def _own_index(self, trainer: Any) -> int:
        """Returns the index of this callback among the callbacks of its class."""
        return [one for one in trainer.callbacks if isinstance(one, LightningEvents)].index(self)

    # Training.

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Fires `EPOCH_START`."""
        state = self._session.state
        if state.timestamp.epoch.value != trainer.current_epoch:
            state.timestamp = state.timestamp.copy(epoch=trainer.current_epoch, batch_in_epoch=0)
        self._session.epoch_start(_length(trainer.num_training_batches))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Fires `BATCH_START`, `BEFORE_TRAIN_BATCH` with the first microbatch, `BEFORE_FORWARD` with each."""
        session = self._session
        if not self._is_inside_batch:
            self._is_inside_batch, self._has_stepped, self._samples = True, False, 0
            session.batch_start(batch)
        session.state.batch = batch
        self._samples += samples_in(batch) * session.state.world_size
        session.run_event(Event.BEFORE_FORWARD)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Fires `AFTER_LOSS` and `BEFORE_BACKWARD`."""
        self._session.state.loss = loss.detach()
        self._session.run_event(Event.AFTER_LOSS)
        self._session.run_event(Event.BEFORE_BACKWARD)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Fires `AFTER_BACKWARD`."""
        self._session.run_event(Event.AFTER_BACKWARD)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Fires `AFTER_TRAIN_BATCH`, with the first optimizer of the batch."""
        if not self._has_stepped:
            self._has_stepped = True
            self._session.run_event(Event.AFTER_TRAIN_BATCH)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Fires `BATCH_END` when Lightning counts a step."""
        # Private, like the count below, but used by Lightning's own loggers, also in manual optimization.
        if trainer.fit_loop._should_accumulate():  # noqa: SLF001
            return
        self._is_inside_batch = False
        state = self._session.state
        state.outputs = outputs
        if isinstance(outputs, Mapping) and "loss" in outputs:
            state.loss = outputs["loss"]
        count = trainer.fit_loop.epoch_loop._batches_that_stepped + 1  # noqa: SLF001
        self._session.batch_end(self._samples, batch=count)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Fires `EPOCH_END`."""
        self._session.epoch_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Fires the pending checkpoint event."""
        self._session.fire_pending_checkpoint()

    # Evaluation.

    def _start_dataloader(self, trainer: Any, index: int) -> None:
        """Fires `EVAL_START` for one of the dataloaders of an evaluation."""
        label, lengths = (
            ("test", trainer.num_test_batches) if trainer.testing else ("eval", trainer.num_val_batches)
        )
        self._dataloader_index = index
        label = f"{label}/dataloader_idx_{index}" if index else label
        self._session.stage_start(Phase.EVAL, label, _length(lengths[index]))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Fires `EVAL_BEFORE_ALL` or `EVAL_STANDALONE_START`, then `EVAL_START`; not in the sanity check."""
        if not trainer.sanity_checking:
            self._session.evaluation_start()
            self._start_dataloader(trainer, 0)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Fires `EVAL_BATCH_START`, `EVAL_BEFORE_FORWARD`.

        For a new dataloader also `EVAL_END`, `EVAL_START`.
        """
        if trainer.sanity_checking:
            return
        if dataloader_idx != self._dataloader_index:
            self._session.run_event(Event.EVAL_END)
            self._start_dataloader(trainer, dataloader_idx)
        self._session.stage_batch_start(batch)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Fires `EVAL_AFTER_FORWARD` and `EVAL_BATCH_END`; while predicting, the events of `PREDICT`."""
        if not trainer.sanity_checking:
            self._session.stage_batch_end(samples_in(batch) * self._session.state.world_size, outputs)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Fires `EVAL_END`, then `EVAL_AFTER_ALL` inside `fit`, else `EVAL_STANDALONE_END`."""
        if not trainer.sanity_checking:
            self._session.stage_end()
            self._session.evaluation_end()

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    # Prediction.

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Fires `PREDICT_START`."""
        self._session.stage_start(Phase.PREDICT, "predict", _length(trainer.num_predict_batches[0]))

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Fires `PREDICT_BATCH_START`, `PREDICT_BEFORE_FORWARD`."""
        self._session.stage_batch_start(batch)

    on_predict_batch_end = on_validation_batch_end

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Fires `PREDICT_END`."""
        self._session.stage_end()


def _max_duration(trainer: Any) -> Time | None:
    """Returns the maximum duration of the trainer, preferably in batches."""
    if trainer.max_steps and trainer.max_steps > 0:
        return Time(int(trainer.max_steps), TimeUnit.BATCH)
    if trainer.max_epochs and trainer.max_epochs > 0:
        return Time(int(trainer.max_epochs), TimeUnit.EPOCH)
    return None


def _batches_at_start(trainer: Any) -> int:
    """Returns the number of optimizer steps before the start, for a checkpoint saved without our callback."""
    # Lightning's saved batch count is one too small and corrected only later; the optimizer's count is exact.
    optimizers = max(1, len(trainer.optimizers))
    return int(trainer.global_step) // (1 if trainer.lightning_module.automatic_optimization else optimizers)


def _length(batches: float) -> int | None:
    """Returns a number of batches; None if it is infinite."""
    return int(batches) if math.isfinite(batches) else None


class Experiment(SummaryCalls, Logger):
    """The `Logger` of a run, with the methods of `SummaryWriter` for programs that expect one.

    ```python
    logger = LightningLogger(RunDirectory("runs/digits"))
    logger.experiment.add_scalar("loss/train", 0.5, global_step=1)
    print(logger.experiment.log_dir)
    ```

    It has all logging methods of `destinations.compat.SummaryWriter`. Without `global_step` a record has the
    step of the run; `walltime` is ignored. For programs written for `WandbLogger`, it has `log`, `config`,
    `define_metric` and `dir`.
    """

    def log(
        self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None, sync: Any = None
    ) -> None:
        """Logs numbers, texts, and arrays as histograms, as `wandb.log` does, at the step of the run."""
        log_values(self, data, step, are_histograms=True)

    def define_metric(self, name: str, *_: Any, **__: Any) -> None:
        """Does nothing: the page draws any metric over any other."""

    @functools.cached_property
    def config(self) -> Items:
        """The hyperparameters that are set here: `config.update({...})`, `config["lr"]`, `config.lr`."""
        return Items(self.log_hyperparameters)

    @property
    def dir(self) -> str | None:
        """The same as `log_dir`."""
        return self.log_dir

    @property
    def log_dir(self) -> str | None:
        """The folder of the run, if one of its destinations has one."""
        found = (one.run_dir for one in self.destinations if isinstance(one, RunDirectory))
        return next((str(folder) for folder in found if folder is not None), None)

    def get_logdir(self) -> str | None:
        """Returns `log_dir`."""
        return self.log_dir

    def put(self, method: str, value: Any, step: int | None, walltime: float | None, **others: Any) -> None:
        """Logs one record."""
        if method != "log_hyperparameters":
            others["step"] = step
        getattr(self, method)(value, **others)


class _BetweenStages(Callback):
    """Hyperparameters logged after a stage. They belong to the next stage, which may be another run."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def write(self, logger: Logger) -> None:
        kept, self.kept = self.kept, []
        for hyperparameters in kept:
            logger.log_hyperparameters(hyperparameters)

    def close(self, state: State, logger: Logger) -> None:
        """Logs them to the last stage's run if no other stage follows."""
        self.write(logger)


class LightningLogger(WandbMedia, SessionContext, _LoggerBase):
    """Logs the records of a Lightning `Trainer` to destinations.

    ```python
    logger = LightningLogger(RunDirectory("runs/digits"), ProgressBar())
    trainer = Trainer(logger=logger, callbacks=[logger.callback()])
    trainer.fit(model, data)
    ```

    **Files.** With a `RunDirectory` among the destinations, its folder is `trainer.log_dir`, and checkpoints
    are written to its subfolder `checkpoints`.

    **Lifecycle.** The run opens with the first record or event. A successful `fit` or `test` marks it as
    completed and flushes it, but leaves it open for further calls, until `close` or interpreter exit. A run
    that failed, was interrupted or preempted is closed at once; a later record opens it again.

    **Ranks.** Each rank has its own logger; rank 0, as of Lightning's `rank_zero_only`, writes shared files.

    **Without `callback()`** destinations receive records, but only the events `INIT`, `FIT_START` before the
    first record of a `fit`, and `FIT_END`; the batch count of the run is the largest step logged. A `fit`
    that begins at an earlier step than the rows of the run replaces them, as with a callback.

    Args:
        given: destinations that receive the records, or lists of them.
        destinations: more of them, as a list; for configuration files.
        callbacks: callbacks of this project.
        run_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name, the same on all ranks of a `torchrun`.
        save_dir: folder for checkpoints. Default: the folder of a `RunDirectory`, else chosen by Lightning.
        upload_checkpoints: pass each checkpoint to destinations that accept files, by hard link if possible,
            under `checkpoints/` with its path below the folder of `ModelCheckpoint`, or below the common
            folder of several.
        log_model: as in `WandbLogger`: "all" is `upload_checkpoints=True`; True uploads the checkpoints that
            are kept at the end of a successful `fit`.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
    """

    # The status of a run when SLURM is about to queue its job again.
    _requeued_status: RunStatus | str = RunStatus.PREEMPTED
    # Whether the run names the best checkpoint, if there is one, instead of the newest.
    _names_best_checkpoint = False

    def __init__(
        self,
        *given: Destination | Sequence[Destination],
        destinations: Sequence[LoggerDestination] = (),
        callbacks: Callback | Sequence[Callback] = (),
        run_name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        upload_checkpoints: bool = False,
        log_model: bool | Literal["all"] = False,
        raise_errors: bool = False,
    ) -> None:
        super().__init__()
        if log_model not in {True, False, "all"}:
            raise ValueError(f'log_model must be True, False or "all", got {log_model!r}.')
        self._between = _BetweenStages()
        self._session = Session(
            (*(one for some in given for one in as_tuple(some)), *destinations),
            (*as_tuple(callbacks), self._between),
            run_name,
            raise_errors=raise_errors,
            logger_type=Experiment,
        )
        self._session.answers_later = True
        self._save_dir = save_dir
        self._upload_checkpoints = upload_checkpoints or log_model == "all"
        self._upload_last = log_model is True
        self._checkpoint_callbacks: dict[int, Any] = {}
        # The folder that contains the folders of all of the trainer's checkpoint callbacks.
        self._checkpoint_folder: Path | None = None
        self._has_said_checkpoints_stay = False
        self._is_watch_due = False
        self._events: LightningEvents | None = None
        self._is_requeued = False
        # Known without a callback: whether a trainer is running; whether a `fit` has completed, and the next
        # may continue it; and the trainer of a `fit` that has logged nothing yet.
        self._is_in_stage = False
        self._has_fitted = False
        self._may_go_on = False
        self._silent_trainer: Any = None

    # Properties for Lightning.

    @property
    def name(self) -> str:
        """Empty: Lightning appends name and version to the checkpoint path, which needs neither."""
        return ""

    @property
    def version(self) -> str:
        """Empty, like `name`."""
        return ""

    @property
    def save_dir(self) -> str | None:
        """The folder of the run; `trainer.log_dir` in Lightning."""
        if self._save_dir is not None:
            return os.fspath(self._save_dir)
        folder = self._session.folder
        return None if folder is None else str(folder)

    root_dir = save_dir
    log_dir = save_dir

    @property
    def run_name(self) -> str:
        """The name of the run."""
        return self._session.state.run_name

    @property
    def experiment(self) -> Experiment:
        """The `Logger` of the run, which also has `log_dir`, `add_scalar` and others of `SummaryWriter`."""
        if self._silent_trainer is not None:
            self._begin_fit()
        return cast("Experiment", self._session.logger)

    def callback(self) -> LightningEvents:
        """Returns the callback that fires our events, always the same object, for the same trainer."""
        return LightningEvents(self) if self._events is None else self._events

    def join(self, events: LightningEvents) -> tuple[Session, Callable[[Any], None]]:
        """Makes a callback the one that fires the events.

        Returns:
            The run, and a function to call with the trainer before each stage.

        Raises:
            ValueError: another callback already fires them.
        """
        if self._events is not None:
            raise ValueError(
                "LightningLogger must have one callback that fires its events, got a second one. "
                "Pass logger.callback(), or LightningEvents() once for each logger."
            )
        self._events = events
        return self._session, self._answer

    def _answer(self, trainer: Any) -> None:
        """Decides whether a stage continues the run, before its first record, once its checkpoint is loaded.

        A fit that loads nothing and has no steps begins a new run.
        """
        session, is_fit = self._session, trainer.state.fn == "fit"
        if is_fit and trainer.ckpt_path is None and not trainer.global_step:
            if session.state.continues_run or session.state.timestamp.batch > 0:
                session.begin_again()
            session.state.continues_run = False
        elif is_fit or trainer.ckpt_path is not None or session.state.timestamp.batch > 0:
            session.state.continues_run = True
        session.open()
        session.choose_folder()
        # Checkpoint callbacks have requested the folder before it was known.
        given, folder = session.given_folder, session.folder
        for one in trainer.checkpoint_callbacks:
            path = getattr(one, "dirpath", None)
            if given is not None and path and Path(path) == given / "checkpoints":
                one.dirpath = str((folder or given) / "checkpoints")

    # Records.

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs numbers as metrics, strings as texts, and other values as traces."""
        session = self._session
        if self._silent_trainer is not None:
            self._begin_fit(step)
        try:
            log_values(session.logger, metrics, step)
        finally:
            if not self._has_events:
                epoch = metrics.get("epoch")
                session.advance_to(step, epoch if isinstance(epoch, int | float) else None)
                if self._is_watch_due:
                    self._is_watch_due = False
                    _log.warning(
                        "watch() logs nothing: the trainer does not have the callback that fires events. "
                        "Pass callbacks=[logger.callback()] to it."
                    )

    def log_hyperparams(
        self,
        params: Any = None,
        metrics: Mapping[str, Any] | None = None,
        step: int | None = None,
        **more: Any,
    ) -> None:
        """Logs hyperparameters; later calls add to earlier ones.

        Args:
            params: a mapping, namespace, dataclass or other configuration; None for none.
            metrics: metrics to log with them, as with `TensorBoardLogger`.
            step: the step of the metrics.
            more: hyperparameters by name.
        """
        logger, session = self.experiment, self._session
        given = [one for one in (params, more) if one]
        if session.state.status is RunStatus.COMPLETED and not self._is_in_stage:
            self._between.kept += given
        else:
            for one in given:
                logger.log_hyperparameters(one)
        if metrics:
            self.log_metrics(metrics, step)

    def watch(
        self,
        model: Any,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Logs histograms of gradients and parameters, with the signature of `WandbLogger`.

        Needs `callback()` among the callbacks of the trainer.

        Args:
            model: the model, or a part of it.
            log: "gradients", "parameters", "all", or None for nothing.
            log_freq: the number of steps from one record to the next.
            log_graph: ignored.
        """
        self._session.add_callback(ModelHistograms(model, log, log_freq))
        self._is_watch_due = True

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Marks the run as running: Lightning calls this at the start of each stage. The graph is ignored."""
        trainer: Any = None
        stage: str | None = None
        with contextlib.suppress(AttributeError, RuntimeError):  # The model has no trainer.
            trainer, stage = model.trainer, model.trainer.state.fn
        is_fit = stage == "fit"
        is_late = is_fit and trainer.strategy.restore_checkpoint_after_setup
        if stage is not None and not (is_late or (is_fit and self._has_events)):
            kept, self._between.kept = self._between.kept, []
            self._answer(trainer)
            self._between.kept = kept
        is_completed = self._session.is_open and self._session.state.status is RunStatus.COMPLETED
        self._session.begin_stage()
        self._is_in_stage = True
        self._between.write(self._session.logger)
        self._may_go_on = is_completed and self._has_fitted
        self._silent_trainer = trainer if is_fit and not self._has_events else None
        with contextlib.suppress(AttributeError):
            folders = [getattr(one, "dirpath", None) or "" for one in trainer.checkpoint_callbacks]
            folders = [one for one in map(str, folders) if os.path.isabs(one)]  # noqa: PTH117  # or a URI
            self._checkpoint_folder = Path(os.path.commonpath(folders)) if folders else None

    @property
    def _has_events(self) -> bool:
        return self._events is not None and self._events.is_attached

    def _begin_fit(self, step: int | None = None) -> None:
        """Fires `FIT_START` at the trainer's step, before the first record of a `fit` without a callback."""
        session, trainer, self._silent_trainer = self._session, self._silent_trainer, None
        batch = _batches_at_start(trainer)
        # Lightning logs the values of a batch once it is counted.
        batch -= step is not None and step == batch - 1
        if self._may_go_on and batch >= session.state.timestamp.batch.value:
            session.begin_fit()
            session.run_event(Event.FIT_START)
        else:
            session.fit_start(session.state.timestamp.copy(batch=batch))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_silent_trainer": None}

    def save(self) -> None:
        """Waits until everything logged is written; does nothing while a trainer is at work.

        A trainer calls it after each record, which is already safe then.
        """
        if self._session.is_open and not self._is_in_stage and not self._has_events:
            self._session.logger.flush()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Records the newest checkpoint, and uploads it with `upload_checkpoints`."""
        # Only the private attribute has the checkpoint just written; the others may have the best one.
        path = getattr(checkpoint_callback, "_last_checkpoint_saved", "") or (
            checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        )
        if not path:
            return
        if self._upload_last:
            self._checkpoint_callbacks[id(checkpoint_callback)] = checkpoint_callback
        self._session.open()
        named = checkpoint_callback.best_model_path if self._names_best_checkpoint else ""
        self._session.state.last_checkpoint = str(named or path)
        self.save()
        if not self._upload_checkpoints:
            self._say_checkpoints_stay(Path(path))
        elif Path(path).exists():
            # Lightning writes "last" in place if /tmp is on another disk; a link that
            # Lightning makes comes after this call.
            is_last = str(path) == str(checkpoint_callback.last_model_path)
            has_pointer = checkpoint_callback.save_last == "link" and not is_last
            last = f"{checkpoint_callback.CHECKPOINT_NAME_LAST}{checkpoint_callback.FILE_EXTENSION}"
            pointer = Path(checkpoint_callback.dirpath, last) if has_pointer else None
            self._upload_checkpoint(path, checkpoint_callback, pointer=pointer, link=not is_last)

    def _upload_checkpoint(self, path: str, checkpoint_callback: Any, **options: Any) -> None:
        folder = self._checkpoint_folder or Path(getattr(checkpoint_callback, "dirpath", None) or "")
        self._session.upload_checkpoint(Path(path), folder, **options)

    def _say_checkpoints_stay(self, path: Path) -> None:
        """Warns once that checkpoints stay on this machine while the run goes to a store."""
        if self._upload_last or self._has_said_checkpoints_stay or not self._session.is_in_store:
            return
        self._has_said_checkpoints_stay = True
        _log.warning(
            "checkpoints stay on this machine, in %s: they do not follow the run to its store. Pass "
            "LightningLogger(..., upload_checkpoints=True).",
            path.parent,
        )

    def _upload_kept_checkpoints(self) -> None:
        callbacks, self._checkpoint_callbacks = self._checkpoint_callbacks.values(), {}
        kept = {
            str(path): one
            for one in callbacks
            for path in (*one.best_k_models, one.best_model_path, one.last_model_path)
            if path and Path(path).is_file()
        }
        for path, callback in kept.items():
            # The file no longer changes; if `fit` is called again, it gets a new name.
            self._upload_checkpoint(path, callback, link="last" not in Path(path).name)

    # The end.

    def finalize(self, status: str) -> None:
        """Records how a `fit`, `test` or other call ended; further calls may follow.

        Args:
            status: "success", "failed", or "finished", passed from a signal handler when SLURM is about to
                requeue the job, before the checkpoint is saved. Any other word becomes the status of the
                run, which is closed.
        """
        if status == "finished":
            # In a signal handler the interrupted code may hold any lock, so this must not block.
            self._is_requeued = True
            self._session.state.status = self._requeued_status
            return
        is_requeued, self._is_requeued = self._is_requeued, False
        self._is_in_stage, self._silent_trainer = False, None
        if status == "success":
            if self._upload_last:
                self._upload_kept_checkpoints()
            if not self._has_events:
                self._has_fitted |= self._session.is_fitting
                self._session.fit_end()
            self._session.succeed()
            return
        self._has_fitted = False
        # Lightning calls this while handling the exception, but does not pass it.
        exception = sys.exc_info()[1]
        if is_requeued:
            word: RunStatus | str | None = self._requeued_status
        else:
            word = _status_after(exception) if status == "failed" else status
        self._session.close(exception, word)

    def close(self) -> None:
        """Ends the run: flushes and closes the destinations. Also done at interpreter exit."""
        self._has_fitted = False
        self._session.close()

    def _end(self, exception: BaseException | None) -> None:
        self._session.close(exception, None if exception is None else _status_after(exception))


def _status_after(exception: BaseException | None) -> RunStatus | None:
    """Returns the run status for an exception; None if the exception itself determines it."""
    # SIGTERMException is a SystemExit without a code, which would otherwise mean success.
    names = {kind.__name__ for kind in type(exception).__mro__}
    if "SIGTERMException" in names:
        return RunStatus.PREEMPTED
    # A SystemExit during fit is a failure, whatever its code; so is a failure without an exception.
    if exception is None or (isinstance(exception, SystemExit) and not exception.code):
        return RunStatus.FAILED
    return None


class RegistryLogger(LightningLogger):
    """A `LightningLogger` on a `RunDirectory`, with the constructor of stable-pretraining's `RegistryLogger`.

    ```python
    logger = RegistryLogger("runs/digits", "digits", tags=["baseline"])
    trainer = Trainer(logger=logger)
    ```

    A drop-in replacement: only the import changes, and the files are readable by its reader. As there, the
    run names the best checkpoint before the last one, and "finished" stays the status of a job that SLURM
    queues again.

    Args:
        run_dir: the folder of the run.
        run_id: the id of a new run.
        tags: tags of the run; in a SLURM array, "sweep:" with the id of the array is added.
        notes: notes of the run.
        flush_logs_every_n_steps: ignored; a row is safe when its call returns.
        destinations: further destinations.
    """

    _requeued_status = "finished"
    _names_best_checkpoint = True

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        run_id: str,
        *,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        flush_logs_every_n_steps: int = 50,
        destinations: Iterable[Destination] = (),
    ) -> None:
        self._run_dir = Path(run_dir).expanduser().resolve()
        self._run_id = str(run_id)
        # Read now, because the environment may change before the run begins.
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        self._tags = list(dict.fromkeys([*(tags or ()), *([f"sweep:{array}"] if array else [])]))
        directory = RunDirectory(self._run_dir, run_id=self._run_id, tags=self._tags, notes=notes or "")
        super().__init__(directory, *destinations)

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._run_id

    def save(self) -> None:
        """Like `LightningLogger.save`; also opens a run that has logged nothing yet."""
        self._open_first()
        super().save()

    def finalize(self, status: str) -> None:
        """Like `LightningLogger.finalize`; also opens a run that ends before its first record."""
        if status != "finished":  # in a signal handler
            self._open_first()
        super().finalize(status)

    def _open_first(self) -> None:
        if not self._session.has_begun:
            self._session.open()

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return self._run_dir
