"""What a `Logger` calls: the shape of a destination, without saying how one is made.

`destinations.LoggerDestination` is the base class to subclass; this protocol is what keeps the loop independent of it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .event import Event
from .write_rate import WriteRate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .logger import Logger
    from .state import State

__all__ = ["Destination", "MetricsTaker"]


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


class MetricsTaker(Destination, Protocol):
    """A destination that finds out by itself, faster than a look at each value, whether metrics are plain numbers.

    A `Logger` asks the first of its destinations that is one before all others, and looks at the values no more.
    """

    def try_log_metrics(self, metrics: Any, step: int, read: "Callable[[Any], Any] | None" = None) -> bool:
        """Takes metrics that are a dict of `float`, `int` and `bool` under names that are strings, and says whether it did.

        Where it returns False, or raises, nothing was taken, and `log_metrics` is called with what the logger made of them.

        Args:
            metrics: what was given to the logger.
            step: the step that they belong to.
            read: makes a number of each value; None where they are numbers, if they are what the metrics before were.
        """
