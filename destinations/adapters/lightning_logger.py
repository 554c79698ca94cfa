"""Our destinations in a Lightning `Trainer`: a logger for `logger=…`, and a callback that fires our events.

For `lightning` and `pytorch_lightning`, which are two packages with the same classes twice: where both are installed, the
classes here belong to both. Everything runs in the training thread.
"""

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from destinations.run_directory import RunDirectory
from events import Callback, Destination, Event, Logger, RunStatus, Time, Timestamp, TimeUnit

from .media import log_images, log_videos
from .session import Session, missing, samples_in, several

__all__ = ["CallbackBase", "LightningEvents", "LightningLogger", "LoggerBase", "RegistryLogger"]


def _class_trees() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Returns the base classes of loggers and of callbacks in each Lightning package that is installed."""
    loggers, callbacks, error = [], [], None
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            if importlib.util.find_spec(package.partition(".")[0]) is None:
                continue
            loggers.append(importlib.import_module(f"{package}.loggers").Logger)
            callbacks.append(importlib.import_module(f"{package}.callbacks").Callback)
        except (
            ImportError,
            ValueError,
        ) as failure:  # One that is broken must not keep the other from being used.
            error = failure
    if not loggers:
        raise missing(
            "lightning", "lightning", ImportError(error or "neither it nor pytorch_lightning is there")
        )
    return tuple(loggers), tuple(callbacks)


_LOGGERS, _CALLBACKS = _class_trees()
LoggerBase: Any = type("LoggerBase", _LOGGERS, {})
CallbackBase: Any = type("CallbackBase", _CALLBACKS, {})

# Where checkpoints of Lightning have what is ours.
_KEY = "training_destinations"


class LightningEvents(CallbackBase):
    """Fires our events in a Lightning `Trainer`, moves the timestamp, and notes what ended the run.

    Made by `LightningLogger.callback()`. docs/adapters.md says which hook is which event. With gradient accumulation, a
    batch of ours is what one optimizer step takes, so that `timestamp.batch` is the step that Lightning logs; what Lightning
    calls a batch is a microbatch.

    Args:
        session: the run.
        find_rank: reads the rank from where Lightning keeps it.
    """

    def __init__(self, session: Session, find_rank: Callable[[], None]) -> None:
        super().__init__()
        self._session = session
        self._find_rank = find_rank
        self.is_attached = False
        self._saved: dict[str, Any] | None = None
        self._is_inside_batch = False
        self._has_stepped = False
        self._samples = 0
        self._dataloader_index = 0

    # --- the run -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Opens the run."""
        self.is_attached = True
        self._saved = None
        self._find_rank()
        session = self._session
        session.open()
        state = session.state
        state.model, state.device = pl_module, trainer.strategy.root_device
        if stage == "fit":
            state.max_duration = _max_duration(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """`BEFORE_LOAD`, `AFTER_LOAD`, `FIT_START`: by now Lightning has loaded what there is."""
        state, saved, self._saved = self._session.state, self._saved, None
        state.optimizers = tuple(trainer.optimizers)
        if saved is not None:
            timestamp = Timestamp.from_state_dict(saved["timestamp"])
        else:
            timestamp = Timestamp.from_state_dict(
                {"batch": _batches_at_start(trainer), "epoch": trainer.current_epoch}
            )
        self._is_inside_batch = False
        self._session.fit_start(timestamp, saved)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """`FIT_END`."""
        self._session.fit_end()

    # By these hooks, and not as a callback's own state, of which Lightning allows one for each class: there may be two loggers.

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds where the run stands, and what its callbacks and destinations keep in checkpoints."""
        checkpoint.setdefault(_KEY, {})[self._place(trainer)] = self._session.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Takes up where the run stood, once training begins."""
        self._saved = checkpoint.get(_KEY, {}).get(self._place(trainer))

    def _place(self, trainer: Any) -> int:
        """Returns how many of this class the trainer has before this one."""
        return [one for one in trainer.callbacks if isinstance(one, LightningEvents)].index(self)

    # --- training ----------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """`EPOCH_START`."""
        state = self._session.state
        if state.timestamp.epoch.value != trainer.current_epoch:
            state.timestamp = state.timestamp.copy(epoch=trainer.current_epoch, batch_in_epoch=0)
        self._session.epoch_start(_length(trainer.num_training_batches))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """`BATCH_START` and `BEFORE_TRAIN_BATCH` with the first microbatch, `BEFORE_FORWARD` with each."""
        session = self._session
        if not self._is_inside_batch:
            self._is_inside_batch, self._has_stepped, self._samples = True, False, 0
            session.batch_start(batch)
        session.state.batch = batch
        self._samples += samples_in(batch) * session.state.world_size
        session.run_event(Event.BEFORE_FORWARD)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """`AFTER_LOSS` and `BEFORE_BACKWARD`."""
        self._session.state.loss = loss.detach()
        self._session.run_event(Event.AFTER_LOSS)
        self._session.run_event(Event.BEFORE_BACKWARD)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """`AFTER_BACKWARD`."""
        self._session.run_event(Event.AFTER_BACKWARD)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """`AFTER_TRAIN_BATCH`, with the first optimizer of the batch."""
        if not self._has_stepped:
            self._has_stepped = True
            self._session.run_event(Event.AFTER_TRAIN_BATCH)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """`BATCH_END`, where Lightning counts a step."""
        # Private, as is the count below; but it is what Lightning's own loggers count by, also in manual optimization.
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
        """`EPOCH_END`."""
        self._session.epoch_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The checkpoint event that is due."""
        self._session.settle()

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _eval_start(self, trainer: Any, lengths: Any) -> None:
        if trainer.sanity_checking:
            return
        session = self._session
        session.run_event(Event.EVAL_BEFORE_ALL if session.is_fitting else Event.EVAL_STANDALONE_START)
        self._dataloader_index = 0
        session.eval_start(self._label(trainer, 0), _length(lengths, 0))

    def _eval_batch_start(self, trainer: Any, lengths: Any, batch: Any, index: int) -> None:
        if trainer.sanity_checking:
            return
        if index != self._dataloader_index:
            self._dataloader_index = index
            self._session.run_event(Event.EVAL_END)
            self._session.eval_start(self._label(trainer, index), _length(lengths, index))
        self._session.eval_batch_start(batch)

    def _eval_batch_end(self, trainer: Any, outputs: Any, batch: Any) -> None:
        if not trainer.sanity_checking:
            self._session.eval_batch_end(samples_in(batch) * self._session.state.world_size, outputs)

    def _eval_end(self, trainer: Any) -> None:
        if trainer.sanity_checking:
            return
        session = self._session
        session.eval_end()
        session.run_event(Event.EVAL_AFTER_ALL if session.is_fitting else Event.EVAL_STANDALONE_END)

    def _label(self, trainer: Any, index: int) -> str:
        label = "test" if trainer.testing else "eval"
        return label if not index else f"{label}/dataloader_idx_{index}"

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """`EVAL_BEFORE_ALL` inside `fit`, else `EVAL_STANDALONE_START`; `EVAL_START`. Not in the sanity check."""
        self._eval_start(trainer, trainer.num_val_batches)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """`EVAL_STANDALONE_START`, `EVAL_START`."""
        self._eval_start(trainer, trainer.num_test_batches)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """`EVAL_BATCH_START`, `EVAL_BEFORE_FORWARD`; before, with the next dataloader, `EVAL_END` and `EVAL_START`."""
        self._eval_batch_start(trainer, trainer.num_val_batches, batch, dataloader_idx)

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """As in validation."""
        self._eval_batch_start(trainer, trainer.num_test_batches, batch, dataloader_idx)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """`EVAL_AFTER_FORWARD`, `EVAL_BATCH_END`."""
        self._eval_batch_end(trainer, outputs, batch)

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """`EVAL_END`, then `EVAL_AFTER_ALL` inside `fit`, else `EVAL_STANDALONE_END`."""
        self._eval_end(trainer)

    on_test_end = on_validation_end

    # --- prediction --------------------------------------------------------------------------------------------------

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """`PREDICT_START`."""
        self._session.predict_start(_length(trainer.num_predict_batches, 0))

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """`PREDICT_BATCH_START`, `PREDICT_BEFORE_FORWARD`."""
        self._session.predict_batch_start(batch)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """`PREDICT_AFTER_FORWARD`, `PREDICT_BATCH_END`."""
        self._session.predict_batch_end(samples_in(batch) * self._session.state.world_size, outputs)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """`PREDICT_END`."""
        self._session.predict_end()


def _max_duration(trainer: Any) -> Time | None:
    """Returns the maximum that the trainer was given; of several, the one in batches."""
    if trainer.max_steps and trainer.max_steps > 0:
        return Time(int(trainer.max_steps), TimeUnit.BATCH)
    if trainer.max_epochs and trainer.max_epochs > 0:
        return Time(int(trainer.max_epochs), TimeUnit.EPOCH)
    return None


def _batches_at_start(trainer: Any) -> int:
    """Returns how many batches stepped before, in a run that was saved without our callback."""
    # What Lightning saves of its own count is one too small, and set right only later; the optimizer's is not.
    optimizers = max(1, len(trainer.optimizers))
    return int(trainer.global_step) // (1 if trainer.lightning_module.automatic_optimization else optimizers)


def _length(batches: Any, index: int | None = None) -> int | None:
    """Returns a number of batches, of one of several dataloaders where an index is given; None where it has no end."""
    if index is not None and isinstance(batches, list | tuple):
        batches = batches[index] if index < len(batches) else None
    return int(batches) if isinstance(batches, int | float) and math.isfinite(batches) else None


class LightningLogger(LoggerBase):
    """Logs what a Lightning `Trainer` logs to destinations of ours.

    ```python
    logger = LightningLogger(RunDirectory("runs/digits"), ProgressBar())
    trainer = Trainer(logger=logger, callbacks=[logger.callback()])
    trainer.fit(model, data)
    ```

    **Files.** Where a `RunDirectory` is among the destinations, its folder is `trainer.log_dir`, and checkpoints go to
    `checkpoints` in it.

    **Life.** The run opens with the first thing that happens. After `fit` or `test` that went well it is marked as
    completed, everything is written, and it stays open for what may follow, until `close`, or the end of the program. A
    run that failed, was interrupted or preempted is closed at once; what is logged later opens it again.

    **Ranks.** Each rank has its own; destinations that write what is shared do so on rank 0, which is the one that
    Lightning's `rank_zero_only` says.

    **Without `callback()`** destinations receive records, but no events of the loop, and the batch count of the run is the
    largest step logged.

    Args:
        destinations: where records go.
        callbacks: callbacks of ours that hear the events.
        run_name: the name of the run. Default: `RUN_NAME` of the environment, else the name of the folder of a
            `RunDirectory`, else a new one; with several ranks there must be one of the first three.
        save_dir: where checkpoints go. Default: the folder of a `RunDirectory`; None where there is none, and Lightning
            chooses.
        upload_checkpoints: whether each checkpoint is given to destinations that take files, as `checkpoints/<name>`.
        raise_errors: lets what a destination raises come out, for tests.
    """

    def __init__(
        self,
        *destinations: Destination,
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        upload_checkpoints: bool = False,
        raise_errors: bool = False,
    ) -> None:
        super().__init__()
        self._session = Session(destinations, several(callbacks), run_name, raise_errors=raise_errors)
        self._save_dir = save_dir
        self._upload_checkpoints = upload_checkpoints
        self._events: LightningEvents | None = None
        self._is_requeued = False

    # --- what Lightning asks -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Empty: name and version are parts of the path of checkpoints, and the folder of the run is enough."""
        return ""

    @property
    def version(self) -> str:
        """Empty, as the name."""
        return ""

    @property
    def save_dir(self) -> str | None:
        """The folder of the run, which Lightning calls `trainer.log_dir`."""
        if self._save_dir is not None:
            return os.fspath(self._save_dir)
        folder = self._session.folder
        return None if folder is None else str(folder)

    @property
    def root_dir(self) -> str | None:
        """The folder of the run."""
        return self.save_dir

    @property
    def log_dir(self) -> str | None:
        """The folder of the run."""
        return self.save_dir

    @property
    def run_name(self) -> str:
        """The name of the run."""
        return self._session.state.run_name

    @property
    def experiment(self) -> Logger:
        """Our own logger, with all that it can log: `logger.experiment.log_histogram(...)`."""
        self._find_rank()
        return self._session.logger

    def callback(self) -> LightningEvents:
        """Returns the callback that fires our events, each time the same; give it to the same trainer."""
        if self._events is None:
            self._events = LightningEvents(self._session, self._find_rank)
        return self._events

    # --- records -----------------------------------------------------------------------------------------------------

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs metrics; Lightning calls it with these names."""
        session = self._session
        if not session.is_open:
            self._find_rank()
        try:
            session.logger.log_metrics(metrics, step)
        finally:
            if self._events is None or not self._events.is_attached:
                epoch = metrics.get("epoch")
                session.follow(step, epoch if isinstance(epoch, int | float) else None)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Logs hyperparameters; a later call adds to an earlier one."""
        self.experiment.log_hyperparameters(params)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Takes no graph; Lightning calls it when it begins to fit, validate, test or predict: the run goes on."""
        self._session.begin_stage()

    def log_image(
        self,
        key: str,
        images: Any,
        step: int | None = None,
        caption: Sequence[str] | str | None = None,
        masks: Sequence[Mapping[str, Any]] | None = None,
        **_: Any,
    ) -> None:
        """Logs images in the shape of Lightning's `WandbLogger`, on which many callbacks rely.

        Args:
            key: their name.
            images: a list of arrays `(H, W, C)` or `(C, H, W)`, tensors `(C, H, W)`, PIL images, or paths.
            step: the step; the number of completed batches where none is given.
            caption: one for each; kept as the text `<key>/caption`.
            masks: for each image, by name, `{"mask_data": (H, W), "class_labels": {index: label}}`.
        """
        log_images(self.experiment, key, images, step, caption, masks)

    def log_video(
        self,
        key: str,
        videos: Any,
        step: int | None = None,
        caption: Sequence[str] | str | None = None,
        fps: float | Sequence[float] | None = None,
        format: str | Sequence[str] | None = None,  # noqa: A002  # the word of those that call it
        **_: Any,
    ) -> None:
        """Logs videos in the shape of `WandbLogger`.

        Args:
            key: their name.
            videos: a list of frames `(T, C, H, W)`, of paths, or of the bytes of video files.
            step: the step; the number of completed batches where none is given.
            caption: one for each; kept as the text `<key>/caption`.
            fps: frames per second, one for all or one for each; 4 where frames come without, as in W&B.
            format: not needed: a file says itself what it is.
        """
        log_videos(self.experiment, key, videos, step, caption, fps)

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table in the shape of `WandbLogger`: columns and rows, or a data frame."""
        if dataframe is not None:
            columns, data = [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
        self.experiment.log_table(list(columns or ()), list(data or ()), name=key, step=step)

    def save(self) -> None:
        """Does nothing, because Lightning calls it after each record: records are safe when their call returns."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Notes the newest checkpoint, and uploads it where that was asked for."""
        # Only the private attribute names the checkpoint that was just written, and not the best one.
        path = getattr(checkpoint_callback, "_last_checkpoint_saved", "") or (
            checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        )
        if not path:
            return
        logger, self._session.state.last_checkpoint = self.experiment, str(path)
        if self._upload_checkpoints and Path(path).is_file():
            logger.upload_file(f"checkpoints/{Path(path).name}", path, overwrite=True)

    # --- the end -----------------------------------------------------------------------------------------------------

    def finalize(self, status: str) -> None:
        """Takes note of how a `fit`, `test` or other call ended; further calls may follow.

        Args:
            status: "success", "failed", or "finished", which Lightning says from a signal handler when SLURM is about to
                queue the job again: the checkpoint is saved after it.
        """
        if status == "finished":
            # In a signal handler: whoever was interrupted may hold any lock, so that nothing may be waited for here.
            self._is_requeued = True
            self._session.state.status = RunStatus.PREEMPTED
        elif status == "success":
            self._is_requeued = False
            self._session.succeed()
        else:
            # Lightning calls this while it handles the exception, but does not pass it on.
            exception = sys.exc_info()[1]
            self._session.close(exception, _status_after(exception, is_requeued=self._is_requeued))
            self._is_requeued = False

    def close(self) -> None:
        """Ends the run: destinations write everything and close; the end of the program does it too."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session.close(exception, None if exception is None else _status_after(exception))

    def _find_rank(self) -> None:
        """Reads the rank where Lightning keeps it: its own launcher does not tell the environment."""
        if not self._session.is_open:
            from lightning_utilities.core.rank_zero import rank_zero_only

            self._session.state.rank = getattr(rank_zero_only, "rank", None) or 0


def _status_after(exception: BaseException | None, *, is_requeued: bool = False) -> RunStatus | None:
    """Returns the status that an exception of Lightning's means; None where it speaks for itself."""
    # SIGTERMException is a SystemExit without a code, which otherwise means that all is well.
    names = {kind.__name__ for kind in type(exception).__mro__}
    if is_requeued or "SIGTERMException" in names:
        return RunStatus.PREEMPTED
    # A SystemExit in the middle of a fit is no good end, whatever its code; and no exception is a failure unexplained.
    if exception is None or (isinstance(exception, SystemExit) and not exception.code):
        return RunStatus.FAILED
    return None


class RegistryLogger(LightningLogger):
    """A `LightningLogger` on a `RunDirectory`, with the constructor of stable-pretraining's `RegistryLogger`.

    Whoever used that one changes the import; its reader opens what this one writes.

    Args:
        run_dir: the folder of the run.
        run_id: the id of a new run.
        tags: tags of the run.
        notes: notes of the run.
        flush_logs_every_n_steps: not needed: a row is safe when its call returns.
        destinations: further destinations.
    """

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
        directory = RunDirectory(
            self._run_dir, run_id=self._run_id, tags=tuple(tags or ()), notes=notes or ""
        )
        super().__init__(directory, *destinations)

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._run_id

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return self._run_dir
