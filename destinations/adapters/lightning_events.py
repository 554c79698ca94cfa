"""The callback that fires our events in a Lightning `Trainer`.

Everything runs in the training thread.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from events import Event, Time, Timestamp, TimeUnit

from ._lightning import CallbackBase
from ._session import Session
from ._values import samples_in

__all__ = ["LightningEvents"]

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
