"""`Trackio`: logs to a Trackio project, on this machine, on a server, or in a Hugging Face Space.

Its methods run in the training thread and queue records; a background thread calls Trackio.
"""

import functools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from destinations.media import histogram_record, video_file, wav_bytes
from destinations.text.formatting import describe
from events import State

from .names import numbered, short_hash
from .target import Target
from .tracker import (
    Images,
    Row,
    Sink,
    Stamp,
    Tracker,
    colored_clouds,
    log_each_row,
    require_package,
)

__all__ = ["Trackio"]

# At most 30 s.
_IMPORT_TRIES, _IMPORT_SECONDS = 1000, 0.03


class _TrackioSink(Sink):
    """Writes to a Trackio run with Trackio's own client."""

    captioned = frozenset({"log_images", "log_audio", "log_video", "log_point_cloud"})

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._config: dict[str, Any] = {}
        self._run: Any = None
        self._last_step = 0

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._run is None:
            # Not in `open`: Trackio writes the configuration only with the first row.
            config = self._earlier_config() | self._config
            self._run = self._trackio.init(
                **self._options, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False
            )
        self._last_step = step
        self._wait_for_figures()
        self._run.log(values, step)

    def _wait_for_figures(self) -> None:
        """Waits while another thread imports plotly or matplotlib.

        Trackio checks whether each value is one of their figures, and drops the value if the check fails.
        """
        # Older versions don't check.
        ask: Any = getattr(getattr(self._trackio, "Html", None), "is_loggable_figure", None)
        for _ in range(_IMPORT_TRIES if ask else 0):
            try:
                ask(0.0)
            except AttributeError:
                time.sleep(_IMPORT_SECONDS)
            else:
                return

    def _earlier_config(self) -> dict[str, Any]:
        """Returns the configuration of a continued run, which Trackio would replace."""
        options = self._options
        if options["resume"] == "never" or options["space_id"] or options["server_url"]:
            return {}
        try:
            runs = self._trackio.Api().runs(options["project"])
        except ValueError:  # The project does not exist yet.
            return {}
        config = next((run.config for run in runs if run.name == options["name"]), None) or {}
        return {name: value for name, value in config.items() if not name.startswith("_")}

    def log_metrics(self, rows: Sequence[Row]) -> None:
        log_each_row(rows, lambda row: self._log(row[0], row[1]))

    def log_hyperparameters(self, hyperparameters: dict[str, Any], time: float) -> None:
        # Trackio reserves names that begin with "_".
        named = {
            f"+{name}" if name.startswith("_") else name: value for name, value in hyperparameters.items()
        }
        if self._run is None:
            self._config |= named
        else:
            self._log({"hyperparameters": self._markdown(named)}, self._last_step)

    def log_table(self, stamp: Stamp, columns: list[str], rows: list[list[Any]]) -> None:
        cells = [[describe(cell) for cell in row] for row in rows]
        self._log({stamp.name: self._trackio.Table(columns=columns, data=cells)}, stamp.step)

    def log_text(self, stamp: Stamp, text: str) -> None:
        self._log({stamp.name: self._trackio.Markdown(text)}, stamp.step)

    def log_traces(self, stamp: Stamp, traces: dict[str, Any]) -> None:
        self._log({"traces": self._markdown(traces)}, stamp.step)

    def log_images(self, stamp: Stamp, images: Images) -> None:
        pixels = images.pixels()
        values = {
            name: self._trackio.Image(_rgb(one), caption=stamp.caption(index))
            for index, (name, one) in enumerate(numbered(stamp.name, pixels))
        }
        with tempfile.TemporaryDirectory(prefix="trackio-") as folder:
            for mask_name, overlays in images.overlays(pixels).items():
                for name, overlay in numbered(f"{stamp.name}/{mask_name}", overlays):
                    path = Path(folder) / f"{len(values)}.png"
                    path.write_bytes(overlay)
                    values[name] = self._trackio.Image(str(path))
            self._log(values, stamp.step)

    def log_audio(self, stamp: Stamp, audio: Any, sample_rate: int) -> None:
        self._log_file(stamp, wav_bytes(audio, sample_rate), ".wav", self._trackio.Audio)

    def log_video(self, stamp: Stamp, video: Any, fps: float | None) -> None:
        data, suffix = video_file(video, fps)
        self._log_file(stamp, data, ".gif" if suffix == ".gif" else ".mp4", self._trackio.Video)

    def log_histogram(self, stamp: Stamp, values: Any, bins: int | Sequence[float]) -> None:
        record = histogram_record(values, bins)
        if record["counts"]:
            counted = (np.asarray(record["counts"]), np.asarray(record["edges"]))
            self._log({stamp.name: self._trackio.Histogram(np_histogram=counted)}, stamp.step)

    def log_point_cloud(self, stamp: Stamp, points: Any, colors: Any) -> None:
        caption = stamp.caption()
        clouds = numbered(stamp.name, colored_clouds(points, colors))
        self._log({name: self._trackio.Object3D(one, caption=caption) for name, one in clouds}, stamp.step)

    def close(self) -> None:
        if self._run is None and self._config:
            self._log({}, 0)
        if self._run is not None:
            self._run.finish()

    def _log_file(self, stamp: Stamp, content: bytes, suffix: str, kind: Callable[..., Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="trackio-") as folder:
            path = Path(folder) / f"media{suffix}"
            path.write_bytes(content)
            self._log({stamp.name: kind(str(path), caption=stamp.caption())}, stamp.step)

    def _markdown(self, value: Any) -> Any:
        text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
        return self._trackio.Markdown(f"```json\n{text}\n```")

    @functools.cached_property
    def _trackio(self) -> Any:
        import trackio

        return trackio


class _Project(Target):
    """A local Trackio project; its runs are identified by name, so the name contains a hash of the run id."""

    places = ("PROJECT",)

    def make(self, tracker: type, shared: Mapping[str, Any]) -> Any:
        return tracker(self.place, **{"name": self._remote_name, **shared, **self.options})

    @property
    def _remote_name(self) -> str:
        return f"{self.name}-{short_hash(self.run.run_id, 8)}"

    def _found(self) -> list[Any]:
        _require_trackio()
        import trackio

        try:
            runs = trackio.Api().runs(self.place)
        except ValueError:  # The project does not exist yet.
            return []
        return [run for run in runs if run.name == self._remote_name]

    def is_gone(self) -> bool:
        return not self._found()

    def restart(self) -> None:
        for run in self._found():
            run.delete()


class Trackio(Tracker):
    """Logs to Trackio, which has the interface of W&B and stores runs in a local SQLite file.

    ```python
    trainer = Trainer(model, train_dataloader, max_duration="5ep", loggers=[Trackio("digits")])
    ```

    Then run `trackio show --project digits`. Metrics have the steps of their calls, but the times at which
    they are written. Texts, traces, and hyperparameters logged after the first record are Markdown; each mask
    is a separate overlay image; several images of one call are numbered. The environment variable
    `TRACKIO_DIR` is the storage folder.

    Threading, bounds, failures, close and fork: see `Tracker`.

    Args:
        project: name of the project.
        name: name of the run; placeholders as in `events.format_run_name`.
        group: group of runs.
        resume: "never" starts a new run of that name, "allow" continues an existing one, "must" requires one.
        space_id: log to this Hugging Face Space instead of this machine.
        server_url: log to this server instead of this machine.
        options: arguments of `Tracker`.

    Raises:
        ImportError: the package `trackio` is not installed.
        ValueError: an argument is out of its range.
    """

    sink_class = _TrackioSink
    target = _Project

    def __init__(
        self,
        project: str,
        *,
        name: str = "{run_name}",
        group: str | None = None,
        resume: str = "allow",
        space_id: str | None = None,
        server_url: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if resume not in {"never", "allow", "must"}:
            raise ValueError(f'resume must be "never", "allow" or "must", got {resume!r}.')
        _require_trackio()
        self._name = name
        self._options = {
            "project": project,
            "group": group,
            "resume": resume,
            "space_id": space_id,
            "server_url": server_url,
        }

    def make_sink(self, state: State) -> Sink:
        """Returns the sink of a run; Trackio is imported in the background thread."""
        return _TrackioSink(name=self._name_of(self._name, state), **self._options)


def _require_trackio() -> None:
    require_package("trackio", "Trackio")


def _rgb(pixels: Any) -> Any:
    return np.repeat(pixels[..., None], 3, axis=-1) if pixels.ndim == 2 else pixels  # noqa: PLR2004
