"""Where training code logs: one call here reaches every destination.

Runs in the training thread. `log_metrics` is the hot path: about a microsecond for ten numbers, plus what each
destination takes; everything else on this page may cost more.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from . import checks
from ._faults import Faults
from .config import plain_config
from .destination import Destination
from .errors import EngineClosedError, RecordError
from .host_values import host_metrics, is_plain, to_host
from .names import format_name
from .redaction import redact
from .state import State

__all__ = ["Logger"]

_log = logging.getLogger("events")


class Logger:
    """Hands what is logged to every destination.

    **Steps.** Where no `step` is given, it is the number of batches completed: a loss logged while batch 0 is trained has
    step 0; what a callback logs on `BATCH_END` after it has step 1.

    **Errors.** A bad argument raises `RecordError` here, at the call; of several metrics, the good ones are logged all the
    same. A destination may raise it too, for what it cannot take, which the other destinations get all the same.
    Everything else that a destination raises does not come out: it is counted in `faults`, reported once per kind, and
    summed up at close.

    **Threading.** Call it from one thread, the one that trains. No call waits for a disk or a network, other than
    `upload_file`, which takes a copy, and `download_file`.

    **Ownership.** What is given stays the caller's, who may change it as soon as the call returns.

    Args:
        state: the run; its timestamp gives the steps.
        destinations: one, or several.
        raise_errors: lets what a destination raises come out, for tests.
    """

    def __init__(
        self,
        state: State,
        destinations: Destination | Iterable[Destination] | None = None,
        raise_errors: bool = False,
    ) -> None:
        self._state = state
        self._destinations = _several(destinations)
        self._is_stopped = False
        self.faults = Faults(raise_errors=raise_errors)

    @property
    def destinations(self) -> tuple[Destination, ...]:
        """Who is logged to."""
        return self._destinations

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs scalars.

        Args:
            metrics: numbers by name: Python's, numpy's, or tensors of one element. Nested mappings are flattened, their
                names joined with "/".
            step: the step they belong to; the number of completed batches where none is given.

        Raises:
            RecordError: a value is no scalar; the others are logged.
            EngineClosedError: the run is closed.
        """
        step = self._state.timestamp.batch.value if step is None else _step(step)  # type: ignore[assignment]
        if self._is_stopped or self.faults.streaks or not is_plain(metrics):
            self._log_metrics_carefully(metrics, step)
            return
        refusal = None
        for destination in self._destinations:
            try:
                destination.log_metrics(metrics, step)
            except RecordError as error:
                refusal = error
            except Exception as error:  # noqa: BLE001  # a destination must not stop training
                self.faults.failed(destination, "log_metrics", error)
        if refusal is not None:
            raise refusal

    def _log_metrics_carefully(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Does what the hot path leaves out: conversion, and destinations that have begun to fail."""
        if not isinstance(metrics, Mapping):
            raise RecordError(
                f"metrics must be a dict from name to number, got {metrics!r:.80} ({type(metrics).__name__})."
            )
        values, errors = host_metrics(metrics)
        if values or not errors:
            try:
                self._each("log_metrics", lambda destination: destination.log_metrics(values, step))
            except RecordError as refusal:
                errors.append(str(refusal))
                raise RecordError(" ".join(errors)) from refusal
        if errors:
            raise RecordError(" ".join(errors))

    def log_scalar(self, name: str, value: Any, step: int | None = None) -> None:
        """Logs one scalar; see `log_metrics`."""
        self.log_metrics({name: value}, step)

    def log_hyperparameters(self, parameters: Any) -> None:
        """Logs hyperparameters: a dict, attrs class, dataclass, Namespace, pydantic model or OmegaConf, nested as it is.

        Secrets are taken out by name and by look. A later call adds to an earlier one.

        Raises:
            TypeError: the value is no such thing.
            EngineClosedError: the run is closed.
        """
        plain = redact(plain_config(parameters))
        self._each("log_hyperparameters", lambda destination: destination.log_hyperparameters(plain))

    def log_table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        name: str = "Table",
        step: int | None = None,
    ) -> None:
        """Logs a table.

        Args:
            columns: the names of the columns.
            rows: for each row, a value for each column.
            name: the name of the table.
            step: as for `log_metrics`.

        Raises:
            RecordError: a row has another length than the header.
            EngineClosedError: the run is closed.
        """
        checks.check_table(columns, rows, name)
        header, body = list(columns), [[to_host(value) for value in row] for row in rows]
        step = self._step(step)
        self._each("log_table", lambda destination: destination.log_table(header, body, name, step))

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Logs images.

        Args:
            images: one array or tensor, `(H, W)`, `(C, H, W)` or `(N, C, H, W)`, uint8 or float in [0, 1], with 1, 3 or 4
                channels; or a list of them, of PIL images, or of paths.
            name: the name of the images.
            channels_last: the shapes are `(H, W, C)` and `(N, H, W, C)`.
            step: as for `log_metrics`.
            masks: by name, an integer array `(H, W)` or `(N, H, W)` of class indices for the images, or a list of them.
            mask_class_labels: what each class index means.
            use_table: for destinations that can show images either way, to show them in a table.

        Raises:
            RecordError: something is no image, or a mask has another size than its image.
            EngineClosedError: the run is closed.
        """
        checks.check_images(images, name, channels_last, masks)
        images = to_host(images)
        host_masks = None if masks is None else {key: to_host(mask) for key, mask in masks.items()}
        labels = None if mask_class_labels is None else dict(mask_class_labels)
        step = self._step(step)
        # By position, as Composer calls it: a subclass may have named its arguments as it liked.
        self._each(
            "log_images",
            lambda destination: destination.log_images(
                images, name, channels_last, step, host_masks, labels, use_table
            ),
        )

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        """Logs a text.

        Raises:
            RecordError: it is no string.
            EngineClosedError: the run is closed.
        """
        checks.check_text(text, name)
        step = self._step(step)
        self._each("log_text", lambda destination: destination.log_text(text, name, step))

    def log_audio(self, audio: Any, sample_rate: int, name: str = "Audio", step: int | None = None) -> None:
        """Logs a sound.

        Args:
            audio: `(samples,)` or `(channels, samples)`, float in [-1, 1] or int16; or the path or bytes of a WAV file.
            sample_rate: samples per second.
            name: the name of the sound.
            step: as for `log_metrics`.

        Raises:
            RecordError: the shape or the sample rate is none.
            EngineClosedError: the run is closed.
        """
        checks.check_audio(audio, sample_rate, name)
        audio, sample_rate, step = to_host(audio), int(sample_rate), self._step(step)
        self._each("log_audio", lambda destination: destination.log_audio(audio, sample_rate, name, step))

    def log_video(
        self, video: Any, fps: float | None = None, name: str = "Video", step: int | None = None
    ) -> None:
        """Logs a video.

        Args:
            video: frames `(T, C, H, W)`, uint8 or float in [0, 1]; or the path or bytes of a video file.
            fps: frames per second; needed for frames.
            name: the name of the video.
            step: as for `log_metrics`.

        Raises:
            RecordError: the frames have another shape, or no rate.
            EngineClosedError: the run is closed.
        """
        checks.check_video(video, fps, name)
        video, step = to_host(video), self._step(step)
        self._each("log_video", lambda destination: destination.log_video(video, fps, name, step))

    def log_histogram(
        self, values: Any, name: str = "Histogram", step: int | None = None, bins: int | Sequence[float] = 64
    ) -> None:
        """Logs how values are distributed.

        Args:
            values: numbers in any shape.
            name: the name of the histogram.
            step: as for `log_metrics`.
            bins: how many bins of equal width, or their rising edges.

        Raises:
            RecordError: there are no values, or the bins are none.
            EngineClosedError: the run is closed.
        """
        checks.check_histogram(values, bins, name)
        values, bins, step = to_host(values), to_host(bins), self._step(step)
        self._each("log_histogram", lambda destination: destination.log_histogram(values, name, step, bins))

    def log_point_cloud(
        self, points: Any, name: str = "Points", step: int | None = None, colors: Any = None
    ) -> None:
        """Logs points in space.

        Args:
            points: `(N, 3)`, or `(B, N, 3)` for several clouds; x, y, z.
            name: the name of the points.
            step: as for `log_metrics`.
            colors: `(N, 3)` or `(N, 4)`, with B where the points have it; uint8 or float in [0, 1]; red, green, blue
                and opacity.

        Raises:
            RecordError: a shape is another, or colours and points differ in number.
            EngineClosedError: the run is closed.
        """
        checks.check_point_cloud(points, colors, name)
        points, colors, step = to_host(points), to_host(colors), self._step(step)
        self._each(
            "log_point_cloud", lambda destination: destination.log_point_cloud(points, name, step, colors)
        )

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Logs debugging traces: values of any kind by name.

        Raises:
            RecordError: they have no names.
            EngineClosedError: the run is closed.
        """
        checks.check_traces(traces)
        traces = dict(traces)
        self._each("log_traces", lambda destination: destination.log_traces(traces))

    def upload_file(self, remote_file_name: str, file_path: Path | str, *, overwrite: bool = False) -> None:
        """Hands a file to every destination that takes files; their copy is theirs when the call returns.

        Both names may hold placeholders such as `{run_name}`, `{rank}`, `{epoch}` and `{batch}`; see `format_name`.

        Args:
            remote_file_name: what the file is called where it goes.
            file_path: where it is.
            overwrite: whether it may take the place of an older file of that name.

        Raises:
            FileNotFoundError: there is no such file, and a destination would have taken it.
            IsADirectoryError: it is a directory.
            EngineClosedError: the run is closed.
        """
        name = format_name(remote_file_name, self._state)
        path = Path(format_name(str(file_path), self._state))
        if self.has_file_upload_destination():
            if path.is_dir():
                raise IsADirectoryError(
                    f"file to upload as {name!r} must be a file, got the directory {str(path)!r}. "
                    "Upload its files one by one, or an archive of it."
                )
            if not path.exists():
                raise FileNotFoundError(f"file to upload as {name!r} must exist, got {str(path)!r}.")
        self._each(
            "upload_file",
            lambda destination: destination.upload_file(self._state, name, path, overwrite=overwrite),
        )

    def download_file(
        self,
        remote_file_name: str,
        destination: str | Path,
        overwrite: bool = False,
        progress_bar: bool = True,
    ) -> None:
        """Brings a file back from the first destination that has it.

        Args:
            remote_file_name: what it is called there; placeholders as in `upload_file`.
            destination: the local path to write.
            overwrite: whether a file that is there already may be replaced.
            progress_bar: whether to show how far the download is.

        Raises:
            FileNotFoundError: no destination has it.
            FileExistsError: there is a local file already.
            EngineClosedError: the run is closed.
        """
        self._require_open("download_file")
        name = format_name(remote_file_name, self._state)
        path = format_name(str(destination), self._state)
        asked = [one for one in self._destinations if one.can_upload_files()]
        for one in asked:
            try:
                one.download_file(name, path, overwrite, progress_bar)
            except (NotImplementedError, FileNotFoundError):
                continue
            return
        names = ", ".join(type(one).__name__ for one in asked) or "none: no destination stores files"
        raise FileNotFoundError(f"file {name!r} must be in a destination, got asked for in {names}.")

    def has_file_upload_destination(self) -> bool:
        """Says whether `upload_file` reaches anybody."""
        return any(destination.can_upload_files() for destination in self._destinations)

    def flush(self) -> None:
        """Makes every destination hand on what it holds back."""
        self._each("flush", lambda destination: destination.flush())

    def stop(self) -> None:
        """Refuses whatever is logged from now on; an engine calls it when its destinations are closed."""
        self._is_stopped = True

    def report_faults(self) -> None:
        """Says, once the run is over, what the destinations did wrong, if anything."""
        for line in self.faults.summary(self._destinations):
            _log.warning("%s", line)

    def _each(self, action: str, call: Callable[[Destination], None]) -> None:
        self._require_open(action)
        refusals = [self.faults.attempt(destination, action, call) for destination in self._destinations]
        for refusal in refusals:
            if refusal is not None:
                raise refusal

    def _require_open(self, action: str) -> None:
        if self._is_stopped:
            raise EngineClosedError(
                f"{action} must be called before the run is closed, got called after. Make a new Trainer or Run."
            )

    def _step(self, step: int | None) -> int:
        return int(self._state.timestamp.batch) if step is None else _step(step)


def _step(step: SupportsIndex) -> int:
    if type(step) is int:
        return step
    try:
        return operator.index(step)
    except TypeError:
        raise RecordError(f"step must be a whole number, got {step!r} ({type(step).__name__}).") from None


def _several(destinations: Any) -> tuple[Destination, ...]:
    """Returns the destinations as a tuple, and refuses what is none."""
    if destinations is None:
        return ()
    several = tuple(destinations) if isinstance(destinations, list | tuple | set) else (destinations,)
    for destination in several:
        if isinstance(destination, type) or not hasattr(destination, "log_metrics"):
            hint = (
                f"Write {destination.__name__}(...)."
                if isinstance(destination, type)
                else "See LoggerDestination."
            )
            raise TypeError(f"logger destination must be a LoggerDestination, got {destination!r}. {hint}")
    return several
