"""The records of a `RunDirectory` that are no metrics, and files: copied at the call, written by a lane.

Every method runs in the training thread.
"""

import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from destinations.base import LoggerDestination
from events import RecordError, State

from .layout import ARTIFACTS_FOLDER
from .media_writer import FileKeeping, MediaWriter, artifact_path

__all__ = ["MediaRecords"]


class MediaRecords(LoggerDestination):
    """What `RunDirectory` does with images, sounds, tables and their kin, and with files."""

    _run_dir: Path | None
    _keep_files: FileKeeping
    _keeping: FileKeeping

    @abstractmethod
    def _with_media(self, call: Callable[[MediaWriter, int], None], step: int | None) -> None:
        """Calls with what writes media and a step; later, where the run is not open yet."""

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: dict[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Writes images as PNG, masks as indexed PNG beside overlays."""
        self._with_media(
            lambda media, at: media.log_images(images, name, channels_last, at, masks, mask_class_labels),
            step,
        )

    def log_audio(self, audio: Any, sample_rate: int, name: str = "Audio", step: int | None = None) -> None:
        """Writes a sound as WAV."""
        if not sample_rate > 0:
            raise RecordError(
                f"audio {name!r} must have a sample rate of at least 1 Hz, got {sample_rate!r}."
            )
        self._with_media(lambda media, at: media.log_audio(audio, sample_rate, name, at), step)

    def log_video(
        self, video: Any, fps: float | None = None, name: str = "Video", step: int | None = None
    ) -> None:
        """Writes frames as MP4, bytes and files as they are."""
        if not isinstance(video, bytes | str | os.PathLike) and not (fps and fps > 0):
            raise RecordError(f"video {name!r} must have frames per second, got fps={fps!r}. Write fps=30.")
        self._with_media(lambda media, at: media.log_video(video, fps, name, at), step)

    def log_point_cloud(
        self, points: Any, name: str = "Points", step: int | None = None, colors: Any = None
    ) -> None:
        """Writes points as PLY."""
        self._with_media(lambda media, at: media.log_point_cloud(points, name, at, colors), step)

    def log_histogram(
        self,
        values: Any,
        name: str = "Histogram",
        step: int | None = None,
        bins: "int | Sequence[float]" = 64,
    ) -> None:
        """Writes counts, edges and moments into `histograms.jsonl`."""
        self._with_media(lambda media, at: media.log_histogram(values, name, at, bins), step)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Writes a table as CSV."""
        self._with_media(lambda media, at: media.log_table(columns, rows, name, at), step)

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        """Writes a text into `texts.jsonl`."""
        self._with_media(lambda media, at: media.log_text(text, name, at), step)

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Writes traces into `traces.jsonl`."""
        self._with_media(lambda media, at: media.log_traces(traces, at), None)

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Copies or links a file into `artifacts/`, as `keep_files` says."""
        keeping = self._keeping
        if keeping != "off":
            self._with_media(
                lambda media, at: media.keep_file(
                    file_path, remote_file_name, overwrite=overwrite, keeping=keeping, step=at
                ),
                None,
            )

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Copies a file out of `artifacts/`."""
        if self._run_dir is None:
            raise FileNotFoundError(f"artifact {remote_file_name!r} must be in an open run, got none.")
        source = artifact_path(self._run_dir, remote_file_name)
        if not source.is_file():
            raise FileNotFoundError(
                f"artifact {remote_file_name!r} must be in {ARTIFACTS_FOLDER}/, got no such file."
            )
        if Path(destination).exists() and not overwrite:
            raise FileExistsError(
                f"local file {destination!r} must be new, got one that exists. Pass overwrite=True."
            )
        Path(destination).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination)

    def can_upload_files(self) -> bool:
        """Says whether files may be kept; where another destination takes files too, `init` decides."""
        return self._keep_files != "off"
