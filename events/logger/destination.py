"""What a `Logger` calls: the shape of a destination, without saying how one is made.

`destinations.LoggerDestination` is the base class to subclass; this protocol is what keeps the loop independent of it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import attrs

from events.event import Event
from events.state import Phase, State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .logger import Logger

__all__ = ["Destination", "WriteRate", "clock_of", "due_at", "is_due", "note_written"]

Aggregate = Literal["last", "first", "mean", "min", "max", "sum", "count"]


def _check_seconds(_: Any, attribute: Any, value: float | None) -> None:
    if value is not None and not value >= 0:
        raise ValueError(f"{attribute.name} must be a number of seconds, at least 0, got {value!r}.")


def _seconds() -> Any:
    return attrs.field(default=None, kw_only=True, validator=_check_seconds)


@attrs.frozen
class WriteRate:
    """How often a destination is written to.

    ```python
    Console(write_rate=WriteRate(train_seconds=10, eval_seconds=0))
    RunDirectory("runs/mine", write_rate=WriteRate(every_steps=50, aggregate="mean"))
    ```

    **Which number counts.** While training, `train_seconds`, else `every_seconds`; in every other phase `eval_seconds`,
    else `every_seconds`; where that leaves nothing, and there are no `every_steps`, the destination's
    `default_write_seconds`. Each phase has its own clock, and the first record of a phase is written at once. With seconds
    and steps, the destination is written to as soon as either has passed.

    **What comes in between** is not lost: of each metric one value waits, and is written with its own step when the
    destination is due next in that phase, at the end of `fit`, and where the logger is flushed or closed.

    Args:
        every_seconds: the least time between two writes, in every phase.
        train_seconds: the same while training.
        eval_seconds: the same in evaluation and prediction.
        every_steps: completed training batches between two writes.
        aggregate: which value of a metric is written for those that came since the last write: "last" or "first", their
            "mean", "min", "max" or "sum", or their "count". It has the step of the last of them.
        media: whether images, sounds, videos, histograms, point clouds, tables and texts wait too, the last of each name.
        clock: a clock in seconds that never goes back.

    Raises:
        ValueError: a number is negative, or there is no such aggregate.
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
        """Returns the seconds that count in a phase, or None where none were given for it."""
        own = self.train_seconds if phase is Phase.TRAIN else self.eval_seconds
        return self.every_seconds if own is None else own


_NO_RATE = WriteRate()


def is_due(destination: "Destination", state: State) -> bool:
    """Says whether a destination's rate lets it be written to now; what `should_write` says unless it is overridden.

    Asking changes nothing. When a destination was last written to in a phase is kept in the state, so that a new run
    begins anew.
    """
    rate = destination.write_rate or _NO_RATE
    last = state.last_writes.get((id(destination), state.phase))
    if last is None:
        return True
    wrote_at, wrote_batch = last
    seconds = rate.seconds(state.phase)
    if seconds is None and rate.every_steps is None:
        seconds = destination.default_write_seconds
    if seconds is not None and rate.clock() - wrote_at >= seconds:
        return True
    steps = state.timestamp.batch.value - wrote_batch
    # Fewer than before: a checkpoint was loaded.
    return rate.every_steps is not None and (steps >= rate.every_steps or steps < 0)


def due_at(destination: "Destination", state: State) -> float | None:
    """Returns when a destination is due next in this phase, by its clock; None where that is not a matter of time alone."""
    rate = destination.write_rate or _NO_RATE
    last = state.last_writes.get((id(destination), state.phase))
    if last is None or rate.every_steps is not None:
        return None
    seconds = rate.seconds(state.phase)
    return last[0] + (destination.default_write_seconds if seconds is None else seconds)


def clock_of(destination: "Destination") -> Callable[[], float]:
    """Returns the clock of a destination's rate."""
    return (destination.write_rate or _NO_RATE).clock


def note_written(destination: "Destination", state: State) -> None:
    """Notes that a destination is written to now."""
    clock = (destination.write_rate or _NO_RATE).clock
    state.last_writes[id(destination), state.phase] = (clock(), int(state.timestamp.batch))


class Destination(Protocol):
    """A callback that also takes records and files.

    Attributes:
        write_rate: how often it is written to; None for every time.
        default_write_seconds: what a rate without seconds and steps means.
    """

    write_rate: WriteRate | None
    default_write_seconds: float

    def should_write(self, state: "State") -> bool:
        """Says whether metrics are to be written now; what is not written waits."""

    def log_hyperparameters(self, hyperparameters: "dict[str, Any]") -> None:
        """Takes hyperparameters; a later call adds to an earlier one."""

    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
        """Takes scalars of one step."""

    def log_table(
        self, columns: "list[str]", rows: "list[list[Any]]", name: str = "Table", step: int | None = None
    ) -> None:
        """Takes a table."""

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: "dict[str, Any] | None" = None,
        mask_class_labels: "dict[int, str] | None" = None,
        use_table: bool = True,
    ) -> None:
        """Takes images, with or without masks."""

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        """Takes a text."""

    def log_audio(self, audio: Any, sample_rate: int, name: str = "Audio", step: int | None = None) -> None:
        """Takes a sound."""

    def log_video(
        self, video: Any, fps: float | None = None, name: str = "Video", step: int | None = None
    ) -> None:
        """Takes a video."""

    def log_histogram(
        self,
        values: Any,
        name: str = "Histogram",
        step: int | None = None,
        bins: "int | Sequence[float]" = 64,
    ) -> None:
        """Takes values of which the distribution is wanted."""

    def log_point_cloud(
        self, points: Any, name: str = "Points", step: int | None = None, colors: Any = None
    ) -> None:
        """Takes points in space."""

    def log_traces(self, traces: "dict[str, Any]") -> None:
        """Takes debugging traces."""

    def upload_file(self, state: "State", remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Takes a file."""

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Brings a file back."""

    def can_upload_files(self) -> bool:
        """Says whether `upload_file` does anything."""

    def flush(self) -> None:
        """Hands on what is held back."""

    def run_event(self, event: Event, state: "State", logger: "Logger") -> None:
        """Reacts to an event."""

    def close(self, state: "State", logger: "Logger") -> None:
        """Ends the work."""

    def post_close(self) -> None:
        """Lets go of everything."""
