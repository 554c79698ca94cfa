"""`WandBSink`: logs records with the package `wandb`, in the background thread.

`values.py` converts names and values to what W&B accepts. Strings must be valid UTF-8: an invalid one in the
config or the summary makes every later call fail.
"""

import functools
import html
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from PIL import Image

from destinations.media import histogram_record, video_file, wav_bytes
from destinations.text.formatting import plain
from destinations.trackers.names import Names, clean_texts, without_surrogates
from destinations.trackers.tracker import (
    Images,
    Row,
    Sink,
    Stamp,
    colored_clouds,
    log_each_row,
    number,
)
from events import RecordError, redact_arguments

from .values import artifact_name, cell_of, few_bins, mask_of, media_key, metric_key, path_in_artifact

__all__ = ["WandBSink"]

_log = logging.getLogger("destinations")

_INT64 = 2**63
_EXIT_CODES = {"completed": 0, "stopped": 0, "interrupted": 255}


@attrs.define(eq=False, slots=False, repr=False)
class WandBSink(Sink):
    """Logs to one W&B run.

    The run is created with the first record, or at the start of training: until then, a checkpoint can select
    the run to continue.

    Args:
        given: arguments of `wandb.init`; None for its defaults, `settings` may be a dict.
        step_metric: name of the metric that contains the step.
        finish_seconds: max time to finish the run.
        run_id: its id; None for a generated one.
    """

    captioned = frozenset({"log_images", "log_audio", "log_video", "log_point_cloud"})

    _given: Mapping[str, Any]
    _step_metric: str
    _finish_seconds: float
    run_id: str | None

    def __attrs_post_init__(self) -> None:
        # Guards the id until the run is created.
        self._lock = threading.Lock()
        self.run: Any = None
        self._is_created = False
        self._error: Exception | None = None
        self._metric_names = Names(self._metric_key)
        self._media_names = Names(media_key)
        self._exit_code: int | None = None

    # In the training thread.

    def continue_run(self, run_id: str) -> None:
        """Selects the run of a checkpoint, unless an id was given or the run already created."""
        with self._lock:
            if not self._is_created and self.run_id is None:
                self.run_id = run_id

    def warn_if_unfinished(self) -> None:
        """Says where the data of a run is that did not finish in time."""
        if self.run is not None:
            _log.warning(
                "WandB: run %s did not finish within %g seconds. Its data is in %s; "
                "upload it with `wandb sync`.",
                self.run_id,
                self._finish_seconds,
                Path(str(self.run.settings.sync_dir)),
            )

    # The run.

    def resume(self, step: int, time: float | None) -> None:
        self._run()

    def _run(self) -> Any:
        """Returns the run; creates it at the first call.

        Raises:
            Exception: it could not be created; the same at every call.
        """
        with self._lock:
            is_first, self._is_created = not self._is_created, True
        if is_first:
            try:
                self._create()
            except Exception as error:
                self._error = error
                raise
        if self.run is None:
            raise self._error or RuntimeError("the W&B run is closed.")
        return self.run

    def open(self) -> None:
        """Checks the credentials, so that missing ones are reported when the run begins."""
        if self._given.get("mode") != "online":
            return
        import wandb

        try:
            _require_login(wandb, self._arguments(wandb))
        except Exception as error:
            with self._lock:
                self._error, self._is_created = error, True
            raise

    def _arguments(self, wandb: Any) -> dict[str, Any]:
        """Returns the arguments of `wandb.init`."""
        arguments: dict[str, Any] = {"id": self.run_id, **self._given}
        if arguments["id"] is not None and arguments.get("resume") is None:
            arguments["resume"] = "allow"
        settings = arguments.pop("settings", None) or {}
        given = settings if isinstance(settings, Mapping) else settings.model_dump(exclude_unset=True)
        arguments["settings"] = _settings(wandb, given, self._finish_seconds)
        return {name: clean_texts(value) for name, value in arguments.items() if value is not None}

    def _create(self) -> None:
        import wandb

        arguments = self._arguments(wandb)
        if "dir" in arguments:
            # W&B would replace a missing folder by that of temporary files.
            Path(arguments["dir"]).mkdir(parents=True, exist_ok=True)
        arguments.setdefault("reinit", "create_new")
        _require_login(wandb, arguments)
        self.run = run = wandb.init(**arguments)
        self.run_id = run.id
        run.define_metric(self._step_metric)
        run.define_metric("*", step_metric=self._step_metric)

    def finish(self, status: str, exception: str | None, time: float) -> None:
        run = self._run()
        if status == "preempted" and hasattr(run, "mark_preempting"):
            run.mark_preempting()
        if exception is not None:
            run.summary.update({"exception": without_surrogates(exception)})
        self._exit_code = _EXIT_CODES.get(status, 1)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish(exit_code=1 if self._exit_code is None else self._exit_code)
            self.run = None

    # Records.

    @functools.cached_property
    def _wandb(self) -> Any:
        import wandb

        return wandb

    def log_metrics(self, rows: Sequence[Row]) -> None:
        run, key, step_metric = self._run(), self._metric_names.key, self._step_metric

        def log(row: Row) -> None:
            metrics, step, at = row
            values = {
                key(name): value if -_INT64 <= value < _INT64 else number(value)
                for name, value in metrics.items()
            }
            run.log({**values, step_metric: step, "_timestamp": at})

        log_each_row(rows, log)

    def log_hyperparameters(self, hyperparameters: dict[str, Any], time: float) -> None:
        self._run().config.update(clean_texts(plain(hyperparameters)), allow_val_change=True)

    def log_table(self, stamp: Stamp, columns: list[str], rows: list[list[Any]]) -> None:
        data = [[cell_of(self._wandb, value) for value in row] for row in rows]
        titles = [without_surrogates(str(column)) for column in columns]
        self._log(stamp, self._wandb.Table(columns=titles, data=data, allow_mixed_types=True))

    def log_images(self, stamp: Stamp, images: Images) -> None:
        by_mask = {media_key(name): found for name, found in images.class_masks().items()}
        labels, shown = images.mask_class_labels, []
        for index, pixels in enumerate(images.pixels()):
            masked = {name: mask_of(one[index], labels) for name, one in by_mask.items()}
            picture = Image.fromarray(pixels)
            shown.append(self._wandb.Image(picture, masks=masked or None, caption=_caption(stamp, index)))
        if images.use_table:
            self._log(stamp, self._wandb.Table(columns=["image"], data=[[image] for image in shown]))
        else:
            self._log(stamp, shown)

    def log_text(self, stamp: Stamp, text: str) -> None:
        shown = (
            f'<pre style="white-space: pre-wrap">{html.escape(without_surrogates(text), quote=False)}</pre>'
        )
        self._log(stamp, self._wandb.Html(shown, inject=False))

    def log_audio(self, stamp: Stamp, audio: Any, sample_rate: int) -> None:
        data = wav_bytes(audio, sample_rate)
        self._log_file(stamp, ".wav", data, self._wandb.Audio, sample_rate=sample_rate)

    def log_video(self, stamp: Stamp, video: Any, fps: float | None) -> None:
        data, suffix = video_file(video, fps)
        if suffix == ".avi":
            raise RecordError("W&B does not support AVI video. Convert it to MP4, WebM, GIF or Ogg.")
        self._log_file(stamp, suffix, data, self._wandb.Video, format=suffix[1:])

    def log_histogram(self, stamp: Stamp, values: Any, bins: int | Sequence[float]) -> None:
        record = histogram_record(values, bins)
        counts, edges = few_bins(record["counts"] or [0], record["edges"] or [0.0, 0.0])
        self._log(stamp, self._wandb.Histogram(np_histogram=(counts, edges)))

    def log_point_cloud(self, stamp: Stamp, points: Any, colors: Any) -> None:
        caption = _caption(stamp)
        # W&B writes them as JSON, which has no NaN.
        clouds = [rows[np.isfinite(rows).all(axis=1)] for rows in colored_clouds(points, colors)]
        self._log(stamp, [self._wandb.Object3D(rows, caption=caption) for rows in clouds])

    def log_traces(self, stamp: Stamp, traces: dict[str, Any]) -> None:
        rows = [
            [without_surrogates(str(name)), json.dumps(clean_texts(plain(trace)), ensure_ascii=False)]
            for name, trace in traces.items()
        ]
        self._log(
            attrs.evolve(stamp, name="traces"),
            self._wandb.Table(columns=["name", "trace"], data=rows),
        )

    def log_file(self, name: str, copy: Path, *, overwrite: bool) -> None:
        """Logs a file as a version of an artifact."""
        run = self._run()
        artifact = self._wandb.Artifact(artifact_name(f"{run.id}-{name}"), type="file")
        # W&B makes its own copy, which its service deletes after the upload.
        artifact.add_file(str(copy), name=path_in_artifact(name), skip_cache=True)
        run.log_artifact(artifact)

    def _log_file(self, stamp: Stamp, suffix: str, data: bytes, kind: Any, **options: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="destinations-wandb-") as folder:
            path = Path(folder) / f"media{suffix}"
            path.write_bytes(data)
            self._log(stamp, kind(str(path), caption=_caption(stamp), **options))

    def _log(self, stamp: Stamp, value: Any) -> None:
        row = {
            self._media_names.key(stamp.name): value,
            self._step_metric: stamp.step,
            "_timestamp": stamp.time,
        }
        self._run().log(row)

    def _metric_key(self, name: str) -> str:
        return metric_key(name, self._step_metric)


def _caption(stamp: Stamp, index: int = 0) -> str | None:
    caption = stamp.caption(index)
    return caption and without_surrogates(caption)


def _settings(wandb: Any, given: Mapping[str, Any], finish_seconds: float) -> Any:
    """Returns settings without side effects on the process and without secrets; `given` takes precedence."""
    known = set(getattr(wandb.Settings, "model_fields", None) or ())
    own: dict[str, Any] = {"console": "off", "silent": True, "save_code": False}
    if redact_arguments(sys.argv[1:]) != sys.argv[1:]:
        # W&B records the command line as metadata.
        own["x_disable_meta"] = True
    if finish_seconds > 0:
        own |= {"finish_timeout": finish_seconds, "finish_timeout_raises": True}
    own = {name: value for name, value in own.items() if not known or name in known}
    return wandb.Settings(**{**own, **given})


def _require_login(wandb: Any, arguments: Mapping[str, Any]) -> None:
    """Checks for credentials in online mode: W&B would prompt for them on the terminal, in a thread.

    Raises:
        RuntimeError: no credentials.
    """
    mode = arguments.get("mode")
    settings = arguments["settings"]
    if mode != "online" or settings.api_key:
        return
    try:
        from wandb.sdk.lib.wbauth import authenticate_session

        host = wandb.setup().settings.base_url
        found = authenticate_session(host=host, source="WandB", prompt=False)
    except (ImportError, TypeError, AttributeError):
        # Another version of W&B, with other internals.
        return
    if found is None:
        raise RuntimeError(
            "WandB needs an API key for mode='online'. Set WANDB_API_KEY, run `wandb login`, "
            "or pass mode='offline'."
        )
