"""`Comet`: logs to an experiment of Comet, online or into an archive for `comet upload`.

Its methods run in the training thread and queue records; a background thread calls comet_ml.
"""

import inspect
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.media import histogram_record, video_file, wav_bytes
from events import BinnedValues, State, redact

from .names import numbered
from .target import Target
from .tracker import (
    Images,
    Row,
    Sink,
    Stamp,
    Tracker,
    colored_clouds,
    log_each_row,
    number,
    require_package,
)

__all__ = ["Comet"]

# Everything that Comet collects by itself is off: it patches other libraries, or may contain secrets.
_OFF = dict.fromkeys(
    (
        "auto_histogram_activation_logging",
        "auto_histogram_gradient_logging",
        "auto_histogram_weight_logging",
        "auto_metric_logging",
        "auto_param_logging",
        "log_code",
        "log_env_details",
        "log_git_metadata",
        "log_git_patch",
        "log_graph",
        "parse_args",
    ),
    False,
)


@attrs.define(eq=False, slots=False, repr=False)
class _CometSink(Sink):
    """Writes to an experiment with comet_ml."""

    _name: str
    _tags: Sequence[str]
    _arguments: Mapping[str, Any]
    _folder: str | None
    _key: str | None
    _is_continued: bool
    _sounds: str | None = attrs.field(default=None, init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    experiment: Any = attrs.field(default=None, init=False)

    def open(self) -> None:
        import comet_ml

        online: Any
        offline: Any
        arguments: dict[str, Any] = {
            **_OFF,
            "auto_output_logging": False,
            "display_summary_level": 0,
            **self._arguments,
        }
        if self._folder is not None:
            arguments["offline_directory"] = self._folder
        if self._is_continued:
            arguments["experiment_key"] = self._key
            online, offline = comet_ml.ExistingExperiment, comet_ml.ExistingOfflineExperiment
        else:
            if self._key is not None:
                arguments["experiment_key"] = self._key
            online, offline = comet_ml.Experiment, comet_ml.OfflineExperiment
        kind = online if self._folder is None else offline
        known = inspect.signature(kind).parameters
        if "kwargs" not in known:
            # `ExistingOfflineExperiment` takes fewer arguments; the missing options are off by default.
            arguments = {name: value for name, value in arguments.items() if name in known}
        self.experiment = kind(**arguments)
        self.experiment.set_name(self._name)
        if self._tags:
            self.experiment.add_tags(list(self._tags))

    def log_metrics(self, rows: Sequence[Row]) -> None:
        def log(row: Row) -> None:
            metrics, step, _ = row
            self.experiment.log_metrics({name: number(value) for name, value in metrics.items()}, step=step)

        log_each_row(rows, log)

    def log_hyperparameters(self, hyperparameters: dict[str, Any], time: float) -> None:
        self.experiment.log_parameters(hyperparameters, nested_support=True)

    def log_table(self, stamp: Stamp, columns: list[str], rows: list[list[Any]]) -> None:
        text = json.dumps({"columns": columns, "data": rows}, default=str, ensure_ascii=False)
        self._log_asset(stamp, text, f"{stamp.name}.json")

    def log_text(self, stamp: Stamp, text: str) -> None:
        self.experiment.log_text(text, step=stamp.step, metadata={"name": stamp.name})

    def log_traces(self, stamp: Stamp, traces: dict[str, Any]) -> None:
        text = json.dumps(traces, indent=2, default=str, ensure_ascii=False)
        self.experiment.log_text(text, step=stamp.step, metadata={"name": "traces"})

    def log_images(self, stamp: Stamp, images: Images) -> None:
        from PIL import Image

        pixels = images.pixels()
        for name, one in numbered(stamp.name, pixels):
            # Comet scales an array by its own min and max, so it gets a picture instead.
            self.experiment.log_image(Image.fromarray(one), name=name, step=stamp.step)
        for mask_name, overlays in images.overlays(pixels).items():
            for name, overlay in numbered(f"{stamp.name}/{mask_name}", overlays):
                self.experiment.log_image(Image.open(io.BytesIO(overlay)), name=name, step=stamp.step)

    def log_audio(self, stamp: Stamp, audio: Any, sample_rate: int) -> None:
        # A file that is kept until the end: Comet accepts no open file here, and copies it later in a thread.
        path = Path(self._folder_of_sounds()) / f"{next(self._numbers)}.wav"
        path.write_bytes(wav_bytes(audio, sample_rate))
        self.experiment.log_audio(
            str(path), sample_rate=sample_rate, file_name=f"{stamp.name}.wav", step=stamp.step
        )

    def _folder_of_sounds(self) -> str:
        if self._sounds is None:
            self._sounds = tempfile.mkdtemp(prefix="comet-")
        return self._sounds

    def log_video(self, stamp: Stamp, video: Any, fps: float | None) -> None:
        data, suffix = video_file(video, fps)
        kind = "gif" if suffix == ".gif" else "mp4"
        self.experiment.log_video(io.BytesIO(data), name=f"{stamp.name}.{kind}", format=kind, step=stamp.step)

    def log_histogram(self, stamp: Stamp, values: Any, bins: int | Sequence[float]) -> None:
        # Comet computes its own bins from values; the given bins are kept beside them.
        numbers = np.asarray(values, np.float64).reshape(-1)
        numbers = numbers[np.isfinite(numbers)]
        if numbers.size:
            self.experiment.log_histogram_3d(numbers, name=stamp.name, step=stamp.step)
        if isinstance(values, BinnedValues) or not isinstance(bins, int):
            record = json.dumps(histogram_record(values, bins), default=str)
            self._log_asset(stamp, record, f"{stamp.name}.histogram.json")

    def log_point_cloud(self, stamp: Stamp, points: Any, colors: Any) -> None:
        for name, rows in numbered(stamp.name, colored_clouds(points, colors)):
            self.experiment.log_points_3d(name, points=rows.tolist(), step=stamp.step)

    def _log_asset(self, stamp: Stamp, content: str, file_name: str) -> None:
        self.experiment.log_asset(io.BytesIO(content.encode()), file_name=file_name, step=stamp.step)

    def log_file(self, name: str, copy: Path, *, overwrite: bool) -> None:
        """Logs a file as an asset, from an open file, because Comet copies its contents."""
        with copy.open("rb") as file:
            self.experiment.log_asset(file, file_name=name, overwrite=overwrite)

    def flush(self) -> None:
        if self.experiment is not None:
            self.experiment.flush()

    def finish(self, status: str, exception: str | None, time: float) -> None:
        self.experiment.log_other("status", status)
        if exception is not None:
            self.experiment.log_other("exception", exception)

    def close(self) -> None:
        if self.experiment is not None:
            self.experiment.end()
        if self._sounds is not None:
            shutil.rmtree(self._sounds, ignore_errors=True)


class _Project(Target):
    """A Comet project; each time everything is sent, a new experiment is created.

    With `--option offline_dir=FOLDER`, each call adds an archive to that folder; `comet upload` sends it.
    """

    places = ("PROJECT", "WORKSPACE/PROJECT")

    def make(self, tracker: type, shared: Mapping[str, Any]) -> Any:
        workspace, _, project = self.place.rpartition("/")
        given = {
            "workspace": workspace or None,
            "name": self.name,
            "tags": self.run.tags,
            "experiment_key": self.copy_id,
            "resume": not self.starts_over,
            "log_artifacts": True,
        }
        return tracker(project, **{**given, **shared, **self.options})

    def restart(self) -> None:
        """Deletes the archives of earlier calls. An experiment at Comet stays, and the log says so."""
        offline_dir = self.options.get("offline_dir")
        if offline_dir is None:
            super().restart()
        elif self.earlier_id:
            for path in Path(offline_dir).glob(f"{self.earlier_id}*.zip"):
                path.unlink()


class Comet(Tracker):
    """Logs to an experiment of Comet, online or into an archive.

    ```python
    comet = Comet("digits", offline_dir="comet")
    trainer = Trainer(model, train_dataloader, max_duration="5ep", loggers=[comet])
    ```

    Supports metrics, hyperparameters, images with masks as overlays, texts, audio, video, histograms, point
    clouds and traces; tables are JSON assets; with `log_artifacts` also files passed to `upload_file`.
    Metrics have the steps of their calls, but the times at which they are written. The experiment's other
    value "status" says how the run ended.

    **Offline.** With `offline_dir`, nothing is sent. `close` writes an archive `<key>.zip` to that folder,
    and `comet upload` sends it later. A killed process leaves no archive.

    **Isolation.** Everything that comet_ml collects by itself is off: code, command line, environment, git,
    output, and the metrics of other libraries. The background thread imports it, which still installs its
    exception hook.

    Threading, bounds, failures, close and fork: see `Tracker`.

    Args:
        project: name of the project.
        workspace: the workspace; default: the API key's workspace.
        name: name of the experiment; placeholders as in `events.format_run_name`.
        tags: tags of the experiment.
        api_key: the key; default: `COMET_API_KEY`, or Comet's configuration file. Not needed offline.
        offline_dir: folder for the archive; None to log online.
        experiment_key: key of a new experiment, 32 to 50 letters and digits; with `resume`, the key of the
            experiment to continue.
        resume: continue the experiment of `experiment_key`.
        log_artifacts: log files passed to `upload_file` as assets.
        options: arguments of `Tracker`.

    Raises:
        ImportError: the package comet_ml is not installed.
        ValueError: `resume` without `experiment_key`.
    """

    sink_class = _CometSink
    target = _Project

    def __init__(
        self,
        project: str,
        *,
        workspace: str | None = None,
        name: str = "{run_name}",
        tags: Sequence[str] = (),
        api_key: str | None = None,
        offline_dir: str | Path | None = None,
        experiment_key: str | None = None,
        resume: bool = False,
        log_artifacts: bool = False,
        **options: Any,
    ) -> None:
        require_package("comet_ml", "Comet")
        if resume and experiment_key is None:
            raise ValueError("resume needs the key of the experiment. Pass experiment_key=...")
        self._name = name
        self._tags = tuple(redact(tuple(tags)))
        self._arguments = {"project_name": project, "workspace": workspace}
        if api_key is not None:
            self._arguments["api_key"] = api_key
        self._offline_dir = None if offline_dir is None else str(Path(offline_dir).absolute())
        self._experiment_key = experiment_key
        self._is_continued = resume
        self._log_artifacts = log_artifacts
        super().__init__(**options)

    @property
    def experiment(self) -> Any:
        """The experiment, for features without a method here; None until it is created, and after close."""
        return None if self._sink is None else self._sink.experiment

    def make_sink(self, state: State) -> Sink:
        """Returns the sink of a run; comet_ml is imported in the background thread."""
        if self._offline_dir is not None:
            Path(self._offline_dir).mkdir(parents=True, exist_ok=True)
        return _CometSink(
            self._name_of(self._name, state),
            self._tags,
            self._arguments,
            folder=self._offline_dir,
            key=self._experiment_key,
            is_continued=self._is_continued,
        )
