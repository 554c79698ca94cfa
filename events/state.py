"""`State`: the properties and the position of a run, as callbacks and destinations see them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import attrs

from .ranks import Ranks, find_ranks
from .timestamp import Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

__all__ = ["Device", "Phase", "Precision", "RunStatus", "State", "as_tuple", "length_of", "read_part"]


class Phase(StrEnum):
    """The phase of the training loop: train, eval or predict.

    ```python
    class Prints(Callback):
        def batch_end(self, state, logger):
            print(state.phase is Phase.TRAIN, state.phase.value)
    ```
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


class RunStatus(StrEnum):
    """The status of a run: running, or how it ended.

    ```python
    print([status.value for status in RunStatus])
    ```
    """

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Ctrl-C."""
    PREEMPTED = "preempted"
    """Ended by SIGTERM, to be resumed: a requeued job."""
    STOPPED = "stopped"
    """Ended early, in order, by `State.stop_training` with a reason, such as an `EarlyStopper`."""


class Precision(StrEnum):
    """The number formats of a run, with Composer's names.

    ```python
    Trainer(..., precision=Precision.AMP_BF16)
    ```

    `AMP_BF16` and `BF16` are the same here, as are `AMP_FP16` and `FP16`: weights stay in fp32, and
    `torch.autocast` chooses the operations that run in the lower precision.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    AMP_BF16 = "amp_bf16"
    AMP_FP16 = "amp_fp16"

    @classmethod
    def _missing_(cls, value: object) -> Precision:
        for one in cls:
            if str(value).lower() == one.value:
                return one
        raise ValueError(f"precision must be one of {', '.join(cls)}, got {value!r}.")


class Device(str):
    """The name of a torch device, such as "cuda:0", with the methods of Composer's devices.

    torch takes it wherever it takes a device: `tensor.to(state.device)`. It equals the `torch.device`.
    """

    __slots__ = ()

    @property
    def type(self) -> str:
        """The kind of device: "cpu", "cuda"."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]  # the index of a device
        """The number of the device, or None."""
        number = self.partition(":")[2]
        return int(number) if number else None

    @property
    def name(self) -> str:
        """Composer's name of the kind: "gpu" for "cuda", otherwise `type`."""
        return "gpu" if self.type == "cuda" else self.type

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor on this device."""
        return tensor.to(self)

    def module_to_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """Moves a module to this device, and returns it."""
        return module.to(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _batches(value: Time | int) -> Time:
    return Time.from_input(value, TimeUnit.BATCH)


def _duration(value: Time | str) -> Time:
    return Time.from_input(value)


def _found(name: str) -> Any:
    """Returns a field with its default from `find_ranks`."""
    return attrs.field(default=attrs.Factory(lambda state: getattr(state.found_ranks, name), takes_self=True))


def read_part(batch: Any, key: Any) -> Any:
    """Returns a part of a batch; see `State.batch_get_item`.

    Raises:
        KeyError: the batch has no such part.
    """
    read, _ = _accessors(key) or (key, None)
    if callable(read):
        return read(batch)
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError):
        if isinstance(key, str) and hasattr(batch, key):
            return getattr(batch, key)
        raise KeyError(f"batch ({type(batch).__name__}) has no part {key!r}.") from None


def _accessors(key: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the functions of a key that is a pair of functions, or None."""
    match key:
        case (read, write) if callable(read) and callable(write):
            return read, write
    return None


def as_tuple(one_or_more: Any) -> tuple[Any, ...]:
    """Returns one value or a sequence of values as a tuple; none for None."""
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple) else (one_or_more,)


def length_of(state: State) -> Time | None:
    """Returns how long training is, or None if that is unknown: no maximum, or a share of one."""
    longest = state.max_duration
    return None if longest is None or longest.unit is TimeUnit.DURATION else longest


@attrs.define(slots=False, eq=False, repr=False)
class State:
    """The state of a run: its identity, its progress and its current objects.

    ```python
    class Progress(Callback):
        def epoch_end(self, state, logger):
            print(state.run_name, state.timestamp.epoch, state.get_elapsed_duration())
    ```

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
        found_ranks: what `find_ranks` found, and where.
        model: the model, without the wrapper for distributed training.
        optimizers: the optimizers; one that is assigned becomes a tuple.
        schedulers: the learning-rate schedulers; one that is assigned becomes a tuple.
        device: the device of the model.
        precision: a `Precision`, which equals its string: "fp32", "amp_bf16".
        seed: the seed of this rank, or None.
        train_dataloader: the dataloader of training, or None.
        eval_dataloader: the evaluation dataloader, or several by label, or None.
        dataloader: the current dataloader.
        dataloader_label: its label: "train", "eval", "predict", or the label given to an evaluation
            dataloader.
        dataloader_len: its length in batches (a `Time`), or None if unknown.
        batch: the current batch.
        batch_samples: its number of samples over all ranks; before BATCH_END, this rank's samples times the
            number of ranks. In evaluation and prediction, this rank's samples.
        outputs: the outputs of the model for it.
        loss: the loss of the batch, detached.
        train_metrics: metrics by name, computed over training batches.
        eval_metrics: metrics by evaluation label and name.
        train_metric_values: the values of training metrics in the last batch, by name.
        eval_metric_values: the values of evaluation metrics in their last evaluation, by name.
        metric_outputs: the result of the model's `update_metric` for the batch, or an empty dict.
        eval_values: the values of the last evaluation of each label, by their names in the log, such as
            "metrics/eval/accuracy" and "loss/eval/total".
        eval_batches: how many batches were trained before each of these values was computed, by the same
            names; and, by label, before its last evaluation within `fit`.
        scaler: the gradient scaler of "fp16", or None.
        random_at_epoch_start: the random state at the start of the epoch, and the states of samplers and
            dataset; checkpoints hold it, so that a run can resume within an epoch with the remaining batches.
        interrupted_evaluation: the random state before an evaluation that a signal interrupted, and the
            labels of the remaining evaluations; checkpoints hold it. Otherwise empty.
        last_checkpoint: the path of the newest complete checkpoint, or None.
        last_checkpoint_uris: where destinations put that file, or will.
        callbacks: every callback of the run, destinations included. Before there is an engine, a list to
            which callbacks for it may be appended; then a tuple, and `logger.attach` adds one.
        evaluators: the evaluators of `Trainer`, one per evaluation dataloader.
        parts: what a `Trainer` saves beside model, optimizers and data: modules and generators that it found.
        status: whether the run is running, or how it ended: a `RunStatus`, or the word of another trainer.
        exception: the exception that ended the run, or None.
        stop_reason: why training was stopped early, or None.
        continues_run: whether the run continues an earlier one, if there is one: True with a proof, such as a
            checkpoint that is loaded or `Run.fit_start(batch=...)`; "unless completed" after
            `Run.fit_start(batch=0)`; False where training begins anew; None as long as that is not known.
            Then no earlier run is continued.
    """

    run_name: str = attrs.field()
    max_duration: Time | None = attrs.field(default=None, converter=attrs.converters.optional(_duration))
    timestamp: Timestamp = attrs.field(factory=Timestamp, kw_only=True)
    eval_timestamp: Timestamp = attrs.field(factory=Timestamp, kw_only=True)
    predict_timestamp: Timestamp = attrs.field(factory=Timestamp, kw_only=True)
    phase: Phase = attrs.field(default=Phase.TRAIN, kw_only=True)
    found_ranks: Ranks = attrs.field(factory=find_ranks, init=False)
    rank: int = _found("rank")
    local_rank: int = _found("local_rank")
    world_size: int = _found("world_size")
    local_world_size: int = _found("local_world_size")
    node_rank: int = _found("node_rank")
    # `Any` beside it: in a trainer there is one, and a hook need not ask.
    model: torch.nn.Module | Any = attrs.field(default=None, kw_only=True)
    optimizers: tuple[torch.optim.Optimizer, ...] = attrs.field(default=(), kw_only=True, converter=as_tuple)
    schedulers: tuple[Any, ...] = attrs.field(default=(), kw_only=True, converter=as_tuple)
    device: Any = attrs.field(default=None, kw_only=True, converter=attrs.converters.optional(Device))
    precision: Precision = attrs.field(default=Precision.FP32, kw_only=True, converter=Precision)
    seed: int | None = attrs.field(default=None, kw_only=True)
    train_dataloader: Any = attrs.field(default=None, kw_only=True)
    eval_dataloader: Any = attrs.field(default=None, kw_only=True)
    dataloader: Any = attrs.field(default=None, kw_only=True)
    dataloader_label: str | None = attrs.field(default=None, kw_only=True)
    dataloader_len: Any = attrs.field(
        default=None, kw_only=True, converter=attrs.converters.optional(_batches)
    )
    batch: Any = attrs.field(default=None, kw_only=True)
    batch_samples: int = attrs.field(default=0, kw_only=True)
    outputs: Any = attrs.field(default=None, kw_only=True)
    loss: Any = attrs.field(default=None, kw_only=True)
    train_metrics: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    eval_metrics: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, kw_only=True)
    train_metric_values: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    eval_metric_values: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    metric_outputs: Any = attrs.field(factory=dict, kw_only=True)
    eval_values: Mapping[str, float] = attrs.field(factory=dict, kw_only=True)
    eval_batches: Mapping[str, int] = attrs.field(factory=dict, kw_only=True)
    scaler: Any = attrs.field(default=None, kw_only=True)
    random_at_epoch_start: dict[str, Any] | None = attrs.field(default=None, kw_only=True)
    interrupted_evaluation: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    last_checkpoint: str | None = attrs.field(default=None, kw_only=True)
    last_checkpoint_uris: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    callbacks: Any = attrs.field(factory=list, kw_only=True)
    evaluators: tuple[Any, ...] = attrs.field(default=(), kw_only=True)
    parts: Any = attrs.field(default=None, kw_only=True)
    status: RunStatus | str = attrs.field(default=RunStatus.RUNNING, kw_only=True)
    exception: BaseException | None = attrs.field(default=None, kw_only=True)
    stop_reason: str | None = attrs.field(default=None, init=False)
    continues_run: bool | Literal["unless completed"] | None = attrs.field(default=None, kw_only=True)
    _stop_requested: bool = attrs.field(default=False, init=False)
    _has_begun: bool = attrs.field(default=False, init=False)

    @run_name.validator
    def _check_run_name(self, _: object, name: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"run_name must be a string, got {name!r}. Write run_name={str(name)!r}.")

    def read_ranks(self) -> None:
        """Reads the ranks once more, for a process group may have been made since; a given rank stays."""
        if (found := find_ranks()) != self.found_ranks:
            self.found_ranks = found
            for name in ("rank", "local_rank", "world_size", "local_world_size", "node_rank"):
                setattr(self, name, getattr(found, name))

    def stop_training(self, reason: str | None = None) -> None:
        """Stops training after the current batch; `FIT_END` still runs.

        Before the first `fit`, such as in `init` or `after_load`, it stops that one before its first batch.

        Args:
            reason: why, for the record of the run, whose status is then "stopped"; the first reason counts.
                Without one, the run counts as completed.
        """
        self._stop_requested = True
        if self.stop_reason is None:
            self.stop_reason = reason

    def begin_training(self) -> None:
        """Marks the run as running; resets `stop_training` of an earlier `fit`, not one before the first."""
        if self._has_begun:
            self._stop_requested, self.stop_reason = False, None
        self._has_begun = True
        self.status, self.exception = RunStatus.RUNNING, None

    def end_training(self) -> None:
        """Marks the run as completed, or as stopped if `stop_training` was given a reason."""
        self.status = RunStatus.COMPLETED if self.stop_reason is None else RunStatus.STOPPED

    def batch_get_item(self, key: Any) -> Any:
        """Returns a part of the batch.

        Args:
            key: an index or a name; an attribute, if the batch has no such item; a function of the batch; or
                a pair of functions; the first one reads.
        """
        return read_part(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replaces a part of the batch.

        Args:
            key: an index, a name, an attribute, or a pair of functions; the second one takes the batch and
                the value, and returns the new batch.
            value: the new part.
        """
        batch = self.batch
        if functions := _accessors(key):
            self.batch = functions[1](batch, value)
        elif isinstance(batch, tuple):
            parts = list(batch)
            parts[key] = value
            self.batch = batch._make(parts) if hasattr(batch, "_make") else tuple(parts)
        elif isinstance(key, str) and not hasattr(batch, "__setitem__"):
            setattr(batch, key, value)
        else:
            batch[key] = value

    @property
    def is_stopping(self) -> bool:
        """Whether `stop_training` was called."""
        return self._stop_requested

    @property
    def is_done(self) -> bool:
        """Whether training has reached its maximum duration, or was asked to stop."""
        return self._stop_requested or self.has_reached_maximum

    @property
    def has_reached_maximum(self) -> bool:
        """Whether training has reached its maximum duration."""
        length = length_of(self)
        return length is not None and self.timestamp >= length

    def get_elapsed_duration(self) -> Time | None:
        """Returns the completed share of the run, from 0 to 1, as a `Time` in durations, or None."""
        length = length_of(self)
        if not length:
            return None
        return min(self.timestamp.get(length.unit) / length, Time(1.0, TimeUnit.DURATION))

    @property
    def rank_zero_seed(self) -> int | None:
        """The seed of rank 0, or None."""
        return None if self.seed is None else self.seed - self.rank

    @property
    def fsdp_enabled(self) -> bool:
        """Whether the parameters of the model are divided among ranks."""
        from .trainer.distributed import is_sharded

        return self.model is not None and is_sharded(self.model)

    def __repr__(self) -> str:
        """Shows the run and its progress, not the model, which would fill the screen."""
        position = f"batch={self.timestamp.batch}, epoch={self.timestamp.epoch}"
        status = f"phase={self.phase}, status={self.status}, rank={self.rank}"
        return f"State({self.run_name!r}, {position}, {status})"
