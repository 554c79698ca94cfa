"""What a run is and where it stands, as every callback and destination sees it."""

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import attrs

from .timestamp import Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    import torch

__all__ = ["Phase", "RunStatus", "State"]


class Phase(StrEnum):
    """What the loop is doing."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


class RunStatus(StrEnum):
    """How a run stands, or how it ended."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Ctrl-C."""
    PREEMPTED = "preempted"
    """Ended from outside, to be continued: SIGTERM, a requeued job."""


def _environment_int(*names: str, default: int) -> Any:
    """A field that is read from the environment that `torchrun` and its kin set, at the time a state is made."""

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
    """What a run is and where it stands.

    `State("my-run")` is complete; a `Trainer` or a `Run` fills in the rest and moves it. Callbacks may read everything
    and may attach attributes of their own. It is moved in the training thread alone: read it in a hook or a `log_*`
    call, and take with you what a thread of yours needs.

    Attributes:
        run_name: the name of the run, the same on all ranks.
        max_duration: when training ends, or None where nobody has said.
        timestamp: what training has completed.
        eval_timestamp: what the evaluation that is going on has completed.
        predict_timestamp: what the prediction that is going on has completed.
        phase: what the loop is doing.
        rank: the global rank; rank 0 writes what is shared.
        local_rank: the rank on this node.
        world_size: how many ranks there are.
        local_world_size: how many ranks there are on this node.
        node_rank: which node this is.
        model: the model, without the wrapper that distributed training puts around it.
        optimizers: the optimizers.
        schedulers: the learning-rate schedulers.
        device: where the model is.
        precision: "fp32", "bf16" or "fp16".
        train_dataloader: what training reads, or None.
        eval_dataloader: what evaluation reads: a dataloader, or a mapping from label to dataloader, or None.
        dataloader: what is being read right now.
        dataloader_label: its label: "train", "eval", "predict", or the label given to an evaluation dataloader.
        dataloader_len: its length in batches, or None where it is not known.
        batch: the batch at hand.
        batch_samples: how many samples it has, over all ranks.
        outputs: what the model made of it.
        loss: the loss of the batch, detached.
        train_metrics: metrics by name, computed over training batches.
        eval_metrics: metrics by evaluation label and name.
        scaler: the gradient scaler of "fp16", or None.
        random_at_epoch_start: the random number generators as the epoch's dataloader found them; a checkpoint holds them, so
            that a run can go on in the middle of an epoch with the batches that were still to come.
        last_checkpoint: the path of the newest checkpoint that is complete, or None.
        callbacks: every callback of the run, destinations included.
        last_writes: when each destination was last written to in each phase, in the seconds of its clock, and at which batch;
            by the identity of the destination. What a `WriteRate` goes by.
        status: how the run stands.
        exception: what ended the run, where something did.
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
    model: "torch.nn.Module | None" = attrs.field(default=None, kw_only=True)
    optimizers: "tuple[torch.optim.Optimizer, ...]" = attrs.field(default=(), kw_only=True)
    schedulers: tuple[Any, ...] = attrs.field(default=(), kw_only=True)
    device: "torch.device | None" = attrs.field(default=None, kw_only=True)
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
    last_writes: dict[tuple[int, Phase], tuple[float, int]] = attrs.field(factory=dict, kw_only=True)
    status: RunStatus = attrs.field(default=RunStatus.RUNNING, kw_only=True)
    exception: BaseException | None = attrs.field(default=None, kw_only=True)
    _stop_requested: bool = attrs.field(default=False, init=False)

    def stop_training(self) -> None:
        """Asks the loop to end after the batch at hand; `FIT_END` still comes, and the run counts as completed."""
        self._stop_requested = True

    def begin_training(self) -> None:
        """Marks the run as running; takes back what `stop_training` asked of an earlier `fit`."""
        self._stop_requested = False
        self.status, self.exception = RunStatus.RUNNING, None

    @property
    def is_stopping(self) -> bool:
        """Whether `stop_training` was called."""
        return self._stop_requested

    @property
    def is_done(self) -> bool:
        """Whether training has reached its maximum, or was asked to stop."""
        if self._stop_requested or self.max_duration is None:
            return self._stop_requested
        if self.max_duration.unit is TimeUnit.DURATION:
            return False
        return self.timestamp >= self.max_duration

    def get_elapsed_duration(self) -> Time | None:
        """Returns the share of the run that is completed, from 0 to 1, as a `Time` in durations, or None."""
        if not self.max_duration or self.max_duration.unit is TimeUnit.DURATION:
            return None
        elapsed = self.timestamp.get(self.max_duration.unit) / self.max_duration
        return min(elapsed, Time(1.0, TimeUnit.DURATION))

    def __repr__(self) -> str:
        """Names the run and where it stands; a model would fill the screen."""
        position = f"batch={self.timestamp.batch}, epoch={self.timestamp.epoch}"
        return f"State({self.run_name!r}, {position}, phase={self.phase}, status={self.status}, rank={self.rank})"
