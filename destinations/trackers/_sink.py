"""What a tracker does in the thread of its lane: the shape to fill in."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

__all__ = ["Row", "RowsRefused", "Sink", "Stamp", "number"]

Row = tuple[dict[str, float], int, float]
"""The metrics of one call, their step, and when that was, in seconds since the epoch."""


@attrs.frozen
class Stamp:
    """What every record has: its name, its step, and when it was logged, in seconds since the epoch."""

    name: str
    step: int
    time: float


class RowsRefused(Exception):
    """Raised by `Sink.log_metrics` from the cause, where it took all rows but some.

    Args:
        count: how many it did not take.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def number(value: float) -> float:
    """Returns a number as a float; an integer that is too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class Sink:
    """Where the records of one run go; subclass it, and override what it can take.

    **Threading.** Made in the training thread, at `init`, where the constructor must not block; every method is called in the
    thread of the lane, `open` first and `close` last, one at a time, in the order in which things were logged.

    **Ownership.** What is given is the sink's own: nobody else has it.

    **Errors.** What a method raises is counted, and reported once per kind; the record is lost. Raise
    `destinations._lane.TryLater` from the cause where it cannot be taken *now*: the same call comes again a little later,
    and everything behind it waits in memory, within the bounds of the lane.

    **Time.** Nothing that a method takes is felt by training, but while Python code runs here, training code waits for
    the interpreter: work in C or in chunks.
    """

    def open(self) -> None:
        """Begins; comes before anything else, and again where it raised TryLater."""

    def resume(self, step: int, time: float | None) -> None:
        """Training goes on from before what an earlier session logged.

        Args:
            step: the step from which on it is gone through again.
            time: when the checkpoint was made: what was logged before belongs to it whatever its step; None where unknown.
        """

    def log_metrics(self, rows: Sequence[Row]) -> None:
        """Takes metrics, of up to 64 calls; where it raises anything but `RowsRefused`, none of them counts as written."""

    def log_hyperparameters(self, hyperparameters: dict[str, Any], time: float) -> None:
        """Takes hyperparameters; each call adds to the ones before."""

    def log_table(self, stamp: Stamp, columns: list[str], rows: list[list[Any]]) -> None:
        """Takes a table."""

    def log_images(
        self,
        stamp: Stamp,
        images: Any,
        *,
        channels_last: bool,
        masks: Mapping[str, Any] | None,
        mask_class_labels: Mapping[int, str] | None,
        use_table: bool,
    ) -> None:
        """Takes images: numpy arrays, PIL images, the bytes of files, or lists of these; `media.images_of` reads them."""

    def log_text(self, stamp: Stamp, text: str) -> None:
        """Takes a text."""

    def log_audio(self, stamp: Stamp, audio: Any, sample_rate: int) -> None:
        """Takes a sound: a numpy array, or the bytes of a file."""

    def log_video(self, stamp: Stamp, video: Any, fps: float | None) -> None:
        """Takes a video: a numpy array, or the bytes of a file."""

    def log_histogram(self, stamp: Stamp, values: Any, bins: "int | Sequence[float]") -> None:
        """Takes values of which the distribution is wanted: a numpy array, or `BinnedValues`."""

    def log_point_cloud(self, stamp: Stamp, points: Any, colors: Any) -> None:
        """Takes points: numpy arrays."""

    def log_traces(self, stamp: Stamp, traces: dict[str, Any]) -> None:
        """Takes traces; the stamp has no name."""

    def flush(self) -> None:
        """Hands on what is held back; comes every `flush_seconds`, and where somebody asks for it."""

    def finish(self, status: str, exception: str | None, time: float) -> None:
        """The run has ended; records may still come.

        Args:
            status: "completed", "failed", "interrupted" or "preempted".
            exception: what ended it, without secrets.
            time: when.
        """

    def close(self) -> None:
        """Lets go of everything; comes at the end of the thread, also where `open` failed or the deadline passed."""
