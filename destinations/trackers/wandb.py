"""`WandB`: logs a run to Weights & Biases, or offline to its files.

The package `wandb` is imported and called in the background thread only, so that it cannot block training.
"""

import functools
import html
import json
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import numpy as np
from PIL import Image

from destinations.media import histogram_record, video_file, wav_bytes
from destinations.text.formatting import describe, plain
from destinations.trackers.names import Names, as_text, clean_texts, short_hash, without_surrogates
from destinations.trackers.target import Target
from destinations.trackers.tracker import (
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
from events import RecordError, State, redact, redact_arguments

__all__ = ["WandB"]

# Keys that W&B adds to each row.
_RESERVED = frozenset({"_step", "_timestamp", "_runtime", "_wandb"})
_MAX_MEDIA_KEY = 60
_MAX_ARTIFACT_NAME = 120
_MAX_BINS = 512
_MAX_CLASSES = 256


# Names.


def metric_key(name: str, step_metric: str) -> str:
    """Returns the key of a metric: its name, if valid in W&B.

    Lone surrogates are escaped; an empty name becomes "unnamed"; reserved names and the step metric get the
    prefix "metric/".
    """
    key = without_surrogates(name)
    if not key:
        return "unnamed"
    return f"metric/{key}" if key in _RESERVED or key == step_metric else key


def media_key(name: str) -> str:
    """Returns the key of media or a table, a relative path of at most 60 bytes in W&B's folder."""
    parts = [part for part in re.sub(r"[\x00-\x1f\x7f]", "_", without_surrogates(name)).split("/") if part]
    key = "/".join("_" * len(part) if set(part) == {"."} else part for part in parts)
    if not key.strip():
        return "unnamed"
    if len(key.encode()) > _MAX_MEDIA_KEY or key in _RESERVED:
        key = f"{key.encode()[: _MAX_MEDIA_KEY - 7].decode(errors='ignore')}-{short_hash(name)}"
    return key


def artifact_name(name: str) -> str:
    """Returns a valid artifact name: at most 120 letters, digits, "-", "_" and "."."""
    clean = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    return (
        clean if len(clean) <= _MAX_ARTIFACT_NAME else f"{clean[: _MAX_ARTIFACT_NAME - 7]}-{short_hash(name)}"
    )


def path_in_artifact(name: str) -> str:
    """Returns a valid relative path of a file in an artifact."""
    parts = [part for part in without_surrogates(name).replace("\\", "/").split("/") if part]
    return "/".join("_" if part in {".", ".."} else part for part in parts) or "file"


# Values.


def cell_of(wandb: Any, value: Any) -> Any:
    """Returns a table cell: a number, a text, an image, or a description of anything else."""
    if hasattr(value, "getbands"):
        return wandb.Image(value)
    value = describe(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return without_surrogates(as_text(value))


def mask_of(mask: Any, labels: Mapping[int, str] | None) -> dict[str, Any]:
    """Returns a mask in W&B's form; with classes above 255, which W&B lacks, all classes are renumbered."""
    texts = {int(key): without_surrogates(str(text)) for key, text in (labels or {}).items()}
    if mask.size and int(mask.max()) >= _MAX_CLASSES:
        classes, numbers = np.unique(mask, return_inverse=True)
        texts = {
            number: f"{one}: {texts[one]}" if one in texts else str(one)
            for number, one in enumerate(classes.tolist())
        }
        if len(classes) > _MAX_CLASSES:
            raise RecordError(f"W&B supports at most {_MAX_CLASSES} classes in a mask, got {len(classes)}.")
        mask = numbers.reshape(mask.shape)
    # Without labels, W&B generates one for each possible byte; only the classes in the mask are wanted.
    texts = texts or {one: str(one) for one in np.unique(mask).tolist()}
    return {"mask_data": mask.astype(np.int64), "class_labels": texts}


def few_bins(counts: list[int], edges: list[float]) -> tuple[list[int], list[float]]:
    """Merges neighbouring bins down to the maximum of W&B."""
    size = -(-len(counts) // _MAX_BINS)
    if size == 1:
        return counts, edges
    joined = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
    return joined, [*edges[:-1:size], edges[-1]]


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
        """Logs the location of a run's data if the run didn't finish in time."""
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
            Exception: the run could not be created; every call raises the same exception.
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
            # W&B would replace a missing folder by the system's temporary folder.
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


_MODES = ("online", "offline", "disabled")


class _Project(Target):
    """A W&B project; the remote run id is derived from the local one."""

    places = ("PROJECT", "ENTITY/PROJECT")

    @property
    def remote_id(self) -> str:
        """Id of the run in the project: letters, digits and "-"."""
        run_id = self.run.run_id
        return re.sub(r"[^A-Za-z0-9-]", "-", run_id)[:40] + f"-{short_hash(run_id, 8)}"

    def make(self, tracker: type, shared: Mapping[str, Any]) -> Any:
        entity, _, project = self.place.rpartition("/")
        mode = os.environ.get("WANDB_MODE")
        given = {
            "entity": entity or None,
            "name": self.name,
            "tags": self.run.tags,
            "notes": self.run.notes or None,
            "mode": mode if mode in _MODES else "online",
            "run_id": self.remote_id,
            "resume": "allow",
            "init_kwargs": {"resume": None} if self.starts_over else None,
            "log_artifacts": True,
        }
        return tracker(project, **{**given, **shared, **self.options})

    def restart(self) -> None:
        """Does nothing: without `resume`, a new run replaces the run with the same id."""


class WandB(Tracker):
    """Logs all records to Weights & Biases.

    ```python
    Trainer(..., loggers=[WandB("digits", mode="offline")])
    ```

    Supports metrics, hyperparameters (as the config), tables, images with masks and class labels, texts,
    audio, video, histograms, point clouds and traces; with `log_artifacts` also files passed to
    `upload_file`. The page "Trackers" describes each.

    **Steps.** W&B drops rows whose step is smaller than the last one. So W&B's own step only counts rows, and
    the logged step is the metric `step_metric`, the x axis of all charts: no row is lost, whatever the order.

    **Ranks.** Rank 0, or with `all_ranks` every rank as a run of its own, grouped by the name of the run.

    **Resume.** A run resumed from a checkpoint continues the run whose id is in the checkpoint, with
    `resume="allow"`.

    **Isolation.** `wandb.run` and the functions of the module are not used; the property `run` has the run.
    Console output is not captured. W&B's own process, `wandb-core`, ends with the program.

    Threading, bounds, failures and close: see `Tracker`.

    Args:
        project: name of the project.
        entity: user or team; default: W&B's.
        name: name in W&B; placeholders as in `events.format_run_name`; default: the name of the run.
        group: group of the run.
        tags: tags of the run.
        notes: notes of the run.
        mode: "online", "offline" for files that `wandb sync` uploads later, or "disabled".
        run_id: id of the run, new or existing; default: a generated one.
        resume: "allow", "must", "never" or "auto", as in `wandb.init`; default: "allow" if there is an id.
        dir: parent of W&B's folder "wandb"; default: `WANDB_DIR`, or the working directory.
        log_artifacts: log files passed to `upload_file` as artifacts.
        step_metric: name of the metric that contains the step.
        init_kwargs: further arguments of `wandb.init`, which take precedence; `settings` may be a dict.
        options: arguments of `Tracker`.

    Raises:
        ImportError: the package wandb is not installed.
        ValueError: an argument is out of its range.
    """

    sink_class: ClassVar[type[Sink]] = WandBSink
    target = _Project

    def __init__(
        self,
        project: str,
        *,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        mode: Literal["online", "offline", "disabled"] = "online",
        run_id: str | None = None,
        resume: str | None = None,
        dir: str | Path | None = None,  # noqa: A002  # the name in wandb.init
        log_artifacts: bool = False,
        step_metric: str = "global_step",
        init_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        require_package("wandb", "WandB")
        if mode not in _MODES:
            raise ValueError(f'mode must be "online", "offline" or "disabled", got {mode!r}.')
        if not step_metric or step_metric.startswith("_"):
            raise ValueError(f'step_metric must be a name that does not begin with "_", got {step_metric!r}.')
        self._project = project
        self._options = {
            "entity": entity,
            "group": group,
            "tags": redact(tuple(tags)),
            "notes": redact(notes),
            "mode": mode,
            "resume": resume,
        }
        self._name = name
        self._run_id = run_id
        self._dir = None if dir is None else str(dir)
        self._log_artifacts = log_artifacts
        self._step_metric = step_metric
        self._init_kwargs = dict(init_kwargs or {})
        super().__init__(**options)

    @property
    def run(self) -> Any:
        """The W&B run, for features without a method here; None until it is created, and after close."""
        return None if self._sink is None else self._sink.run

    def make_sink(self, state: State) -> WandBSink:
        # Resolved now: the run is created later, and W&B would use the working directory at its first use.
        folder = self._dir or os.environ.get("WANDB_DIR") or str(Path.cwd())
        arguments: dict[str, Any] = {"project": self._project, **self._options, "dir": folder}
        run_id = self._run_id
        if self._all_ranks and state.world_size > 1:
            arguments["group"] = arguments["group"] or state.run_name
            run_id = None if run_id is None else f"{run_id}-rank{state.rank}"
        arguments |= {"name": self._name_of(self._name, state), **self._init_kwargs}
        return WandBSink(arguments, self._step_metric, self._close_seconds, run_id)

    def post_close(self) -> None:
        sink = self._sink
        super().post_close()
        if sink is not None:
            sink.warn_if_unfinished()
