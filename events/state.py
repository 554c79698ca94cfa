"""`State`: what a run is and how far it is, as every callback and destination sees it."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import attrs

from .timestamp import Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Phase", "RunStatus", "State"]


class Phase(StrEnum):
    """What the loop is doing."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


class RunStatus(StrEnum):
    """Whether a run is running, or how it ended."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Ctrl-C."""
    PREEMPTED = "preempted"
    """Ended by SIGTERM, to be resumed: a requeued job."""


def _environment_int(*names: str, default: int) -> Any:
    """Returns a field whose default is read from the environment (as set by `torchrun`) on creation."""

    def read() -> int:
        for name in names:
            if text := os.environ.get(name):
                try:
                    return int(text)
                except ValueError:
                    raise ValueError(
                        f"environment variable {name} must be a whole number, got {text!r}. Unset it."
                    ) from None
        return default

    return attrs.field(factory=read)


def _optional_time(value: Time | str | None) -> Time | None:
    return None if value is None else Time.from_input(value)


@attrs.define(slots=False, eq=False, repr=False)
class State:
    """The state of a run: its identity, its progress and its current objects.

    `State("my-run")` is complete; a `Trainer` or a `Run` fills in the rest and updates it. Callbacks may read
    everything and may attach attributes of their own.

    **Threading.** It changes in the training thread only: read it in a hook or a `log_*` call, and copy what
    another thread needs.

    Attributes:
        run_name: the name of the run, the same on all ranks.
        max_duration: when training ends, or None if unknown.
        timestamp: the progress of training.
        eval_timestamp: the progress of the current evaluation.
        predict_timestamp: the progress of the current prediction.
        phase: what the loop is doing.
        rank: the global rank; rank 0 writes the shared files.
        local_rank: the rank on this node.
        world_size: the number of ranks.
        local_world_size: the number of ranks on this node.
        node_rank: the index of this node.
        model: the model, without the wrapper for distributed training.
        optimizers: the optimizers.
        schedulers: the learning-rate schedulers.
        device: the device of the model.
        precision: "fp32", "bf16" or "fp16".
        train_dataloader: the dataloader of training, or None.
        eval_dataloader: that of evaluation, or several by label, or None.
        dataloader: the current dataloader.
        dataloader_label: its label: "train", "eval", "predict", or the label given to an evaluation
            dataloader.
        dataloader_len: its length in batches, or None if unknown.
        batch: the current batch.
        batch_samples: its number of samples, over all ranks.
        outputs: the outputs of the model for it.
        loss: the loss of the batch, detached.
        train_metrics: metrics by name, computed over training batches.
        eval_metrics: metrics by evaluation label and name.
        scaler: the gradient scaler of "fp16", or None.
        random_at_epoch_start: the random state at the start of the epoch; checkpoints hold it, so that a run
            can resume within an epoch with the remaining batches.
        last_checkpoint: the path of the newest complete checkpoint, or None.
        callbacks: every callback of the run, destinations included.
        status: whether the run is running, or how it ended.
        exception: the exception that ended the run, or None.
    """

    run_name: str
    max_duration: Time | None = attrs.field(
        default=None,
        converter=_optional_time,
    )
    timestamp: Timestamp = attrs.field(factory=Timestamp, kw_only=True)
    eval_timestamp: Timestamp = attrs.field(factory=Timestamp, kw_only=True)
    predict_timestamp: Timestamp = attrs.field(factory=Timestamp, kw_only=True)
    phase: Phase = attrs.field(default=Phase.TRAIN, kw_only=True)
    rank: int = _environment_int("RANK", default=0)
    local_rank: int = _environment_int("LOCAL_RANK", default=0)
    world_size: int = _environment_int("WORLD_SIZE", default=1)
    local_world_size: int = _environment_int("LOCAL_WORLD_SIZE", default=1)
    node_rank: int = _environment_int("NODE_RANK", "GROUP_RANK", default=0)
    model: torch.nn.Module | None = attrs.field(default=None, kw_only=True)
    optimizers: tuple[torch.optim.Optimizer, ...] = attrs.field(default=(), kw_only=True)
    schedulers: tuple[Any, ...] = attrs.field(default=(), kw_only=True)
    device: torch.device | None = attrs.field(default=None, kw_only=True)
    precision: str = attrs.field(default="fp32", kw_only=True)
    train_dataloader: Any = attrs.field(default=None, kw_only=True)
    eval_dataloader: Any = attrs.field(default=None, kw_only=True)
    dataloader: Any = attrs.field(default=None, kw_only=True)
    dataloader_label: str | None = attrs.field(default=None, kw_only=True)
    dataloader_len: int | None = attrs.field(default=None, kw_only=True)
    batch: Any = attrs.field(default=None, kw_only=True)
    batch_samples: int = attrs.field(default=0, kw_only=True)
    outputs: Any = attrs.field(default=None, kw_only=True)
    loss: Any = attrs.field(default=None, kw_only=True)
    train_metrics: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    eval_metrics: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, kw_only=True)
    scaler: Any = attrs.field(default=None, kw_only=True)
    random_at_epoch_start: dict[str, Any] | None = attrs.field(default=None, kw_only=True)
    last_checkpoint: str | None = attrs.field(default=None, kw_only=True)
    callbacks: tuple[Any, ...] = attrs.field(default=(), kw_only=True)
    status: RunStatus = attrs.field(default=RunStatus.RUNNING, kw_only=True)
    exception: BaseException | None = attrs.field(default=None, kw_only=True)
    _stop_requested: bool = attrs.field(default=False, init=False)

    def stop_training(self) -> None:
        """Stops training after the current batch; `FIT_END` still runs, and the run counts as completed."""
        self._stop_requested = True

    def begin_training(self) -> None:
        """Marks the run as running; resets `stop_training` of an earlier `fit`."""
        self._stop_requested = False
        self.status, self.exception = RunStatus.RUNNING, None

    @property
    def is_stopping(self) -> bool:
        """Whether `stop_training` was called."""
        return self._stop_requested

    @property
    def is_done(self) -> bool:
        """Whether training has reached its maximum duration, or was asked to stop."""
        if self._stop_requested or self.max_duration is None:
            return self._stop_requested
        if self.max_duration.unit is TimeUnit.DURATION:
            return False
        return self.timestamp >= self.max_duration

    def get_elapsed_duration(self) -> Time | None:
        """Returns the completed share of the run, from 0 to 1, as a `Time` in durations, or None."""
        if not self.max_duration or self.max_duration.unit is TimeUnit.DURATION:
            return None
        elapsed = self.timestamp.get(self.max_duration.unit) / self.max_duration
        return min(elapsed, Time(1.0, TimeUnit.DURATION))

    def __repr__(self) -> str:
        """Shows the run and its progress, not the model, which would fill the screen."""
        position = f"batch={self.timestamp.batch}, epoch={self.timestamp.epoch}"
        status = f"phase={self.phase}, status={self.status}, rank={self.rank}"
        return f"State({self.run_name!r}, {position}, {status})"
