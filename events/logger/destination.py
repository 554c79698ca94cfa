"""The interface between a `Logger` and a destination, and the rate of writes.

`destinations.LoggerDestination` is the base class to subclass; the protocol keeps the logger independent of
it, and names neither `Logger` nor `Callback`.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import attrs

from events.state import Phase, State

__all__ = ["Destination", "MetricsPacker", "WriteRate", "WriteSchedule"]

Aggregate = Literal["last", "first", "mean", "min", "max", "sum", "count"]


def _check_seconds(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not (isinstance(value, int | float) and value >= 0):
        raise ValueError(f"{attribute.name} must be a number of seconds, at least 0, got {value!r}.")


def _seconds() -> Any:
    return attrs.field(default=None, kw_only=True, validator=_check_seconds)


@attrs.frozen
class WriteRate:
    """Limits how often a destination is written to.

    ```python
    Console(write_rate=WriteRate(train_seconds=10, eval_seconds=0))
    RunDirectory("runs/mine", write_rate=WriteRate(every_steps=50, aggregate="mean"))
    ```

    **Limits.** `train_seconds` applies while training and `eval_seconds` in every other phase;
    `every_seconds` is the default of both. Without any of these and without `every_steps`, there is no limit.
    Each phase has its own clock, and the first record of a phase is written at once. With seconds and steps,
    the destination is due as soon as either has passed.

    **Between writes** nothing is lost: the latest value of each metric is kept, and written with its own step
    when the destination is next due in that phase, at the end of `fit`, and when the logger is flushed or
    closed.

    Args:
        every_seconds: the minimum time between two writes, in every phase.
        train_seconds: the same while training.
        eval_seconds: the same in evaluation and prediction.
        every_steps: completed training batches between two writes.
        aggregate: which value of a metric is written for those logged since the last write: "last" or
            "first", their "mean", "min", "max" or "sum", or their "count". It has the step of the last of
            them.
        media: whether images, audio, videos, histograms, point clouds, tables and texts are limited too; the
            latest of each name is kept.
        clock: a monotonic clock in seconds.

    Raises:
        ValueError: a number is negative, or the aggregate is unknown.
    """

    every_seconds: float | None = attrs.field(default=None, validator=_check_seconds)
    train_seconds: float | None = _seconds()
    eval_seconds: float | None = _seconds()
    every_steps: int | None = attrs.field(default=None, kw_only=True)
    aggregate: Aggregate = attrs.field(default="last", kw_only=True)
    media: bool = attrs.field(default=False, kw_only=True)
    clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True, eq=False, repr=False)

    @every_steps.validator
    def _check_steps(self, _: Any, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"every_steps must be a number of batches, at least 1, got {value!r}.")

    @aggregate.validator
    def _check_aggregate(self, _: Any, value: str) -> None:
        if value not in get_args(Aggregate):
            raise ValueError(f"aggregate must be one of {', '.join(get_args(Aggregate))}, got {value!r}.")

    def seconds(self, phase: Phase) -> float | None:
        """Returns the seconds that apply in a phase, or None where none were given for it."""
        own = self.train_seconds if phase is Phase.TRAIN else self.eval_seconds
        return self.every_seconds if own is None else own


@attrs.define(eq=False)
class WriteSchedule:
    """When a destination was last written to in each phase, and when it is due next.

    ```python
    console = Console(write_rate=WriteRate(every_steps=10))
    print(type(console.write_schedule).__name__)
    ```

    A logger keeps one per destination, so that a new run starts a new one. Training thread only.
    """

    rate: WriteRate = attrs.field(default=WriteRate())
    _last_writes: dict[Phase, tuple[float, int]] = attrs.field(factory=dict, init=False)

    def is_due(self, state: State) -> bool:
        """Returns whether the rate allows a write now; changes nothing."""
        last = self._last_writes.get(state.phase)
        if last is None:
            return True
        wrote_at, wrote_batch = last
        seconds = self.rate.seconds(state.phase)
        if seconds is None and self.rate.every_steps is None:
            return True
        if seconds is not None and self.rate.clock() - wrote_at >= seconds:
            return True
        steps = state.timestamp.batch.value - wrote_batch
        # Fewer than before: a checkpoint was loaded.
        return self.rate.every_steps is not None and (steps >= self.rate.every_steps or steps < 0)

    def due_at(self, state: State) -> float | None:
        """Returns when the next write of this phase is due, by the rate's clock; None with `every_steps`."""
        last = self._last_writes.get(state.phase)
        if last is None or self.rate.every_steps is not None:
            return None
        return last[0] + (self.rate.seconds(state.phase) or 0.0)

    def note_write(self, state: State) -> None:
        """Records that the destination is written to now."""
        self._last_writes[state.phase] = (self.rate.clock(), int(state.timestamp.batch))


class Destination(Protocol):
    """Takes records and files; the engine calls its hooks like a callback's.

    ```python
    def names_of(destinations: list[Destination]) -> list[str]:
        return [type(one).__name__ for one in destinations]

    print(names_of([Console(), InMemory()]))  # ['Console', 'InMemory']
    ```

    It gets the kinds of records that it has a method for, with the names and the order of arguments of
    `destinations.LoggerDestination`. With a method `log_record(kind, arguments)` it gets all others too.

    Attributes:
        write_rate: limits how often it is written to; None for no limit.
    """

    write_rate: WriteRate | None

    def should_write(self, state: State) -> bool:
        """Returns whether metrics are to be written now; otherwise they wait."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Takes scalars of one step."""

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Takes a file."""

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Downloads a file."""

    def can_upload_files(self) -> bool:
        """Returns whether `upload_file` does anything."""

    def flush(self) -> None:
        """Writes what is buffered."""


class MetricsPacker(Destination, Protocol):
    """A destination that finds out while it packs metrics whether they are plain numbers.

    A `Logger` offers metrics to the first of its destinations that is one before it looks at them itself,
    which would take longer than to pack them.
    """

    def try_log_metrics(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Takes metrics that are a dict of `float`, `int` and `bool` by names that are strings.

        Returns whether it took them; otherwise, or if it raises, it has taken nothing, and `log_metrics` gets
        them once the logger has checked and converted them.
        """
