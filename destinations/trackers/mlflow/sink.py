"""`MLflowSink`: logs records with the MLflow client, in the background thread.

`values.py` converts names and values to what MLflow accepts.
"""

import io
import itertools
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from PIL import Image

from destinations.background import RetryLaterError
from destinations.copies import merged
from destinations.media import (
    histogram_record,
    iter_point_clouds,
    mask_png,
    overlay_png,
    ply_bytes,
    video_file,
    wav_bytes,
)
from destinations.text.formatting import plain, yaml_text
from destinations.trackers.names import Names, clean_texts, numbered, without_surrogates
from destinations.trackers.tracker import Images, Row, Sink, Stamp, log_each_row, number

from .values import (
    artifact_key,
    artifact_path,
    batches,
    call_service,
    cut,
    entity_key,
    is_transient,
    json_bytes,
    json_list,
    milliseconds,
    tag_key,
)

__all__ = ["MLflowSink"]

_PARAMS_AT_ONCE = 100
_MAX_TAG = 5000
# Limit of servers before 2.x; a client does not know the version of its server.
_MAX_OLD_PARAM = 500
_MAX_LIST_OF_TABLES = 4500
_NAME_TAG = "metric_name."
_CHANGED_TAG = "changed_param."
_STATUSES = {
    "completed": "FINISHED",
    "stopped": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "preempted": "KILLED",
}


@attrs.define(eq=False, slots=False, repr=False)
class MLflowSink(Sink):
    """Logs to one MLflow run.

    The run is created with the first record, or at the start of training: until then, a checkpoint can select
    the run to continue.

    Args:
        tracking_uri: the tracking URI; None for MLflow's default.
        experiment: name of the experiment.
        run_name: name of the run.
        tags: tags of the run.
        artifact_location: artifact location of a new experiment.
        log_system_metrics: run MLflow's system metrics monitor.
        started_at: start of the run, in seconds since 1970.
        wanted_id: id of a run to continue; None for a new one.
    """

    _tracking_uri: str | None
    _experiment: str
    _run_name: str
    _tags: Mapping[str, str]
    _artifact_location: str | None
    _log_system_metrics: bool
    _started_at: float
    _wanted_id: str | None

    def __attrs_post_init__(self) -> None:
        # Guards the id until the run is created.
        self._lock = threading.Lock()
        self._is_created = False
        self._client: Any = None
        self._sequence = itertools.count()
        self._metric_names = Names(entity_key)
        self._tagged_keys: set[str] = set()
        self._artifact_names = Names(artifact_key)
        self._params: dict[str, str] = {}
        self._hyperparameters: dict[str, Any] = {}
        self._tables: list[dict[str, str]] = []
        self._monitor: Any = None

    # In the training thread.

    def continue_run(self, run_id: str) -> None:
        """Selects the run of a checkpoint, unless a run was given or already created."""
        with self._lock:
            if not self._is_created and self._wanted_id is None:
                self._wanted_id = run_id

    def download(self, name: str, target: Path) -> None:
        """Downloads an artifact.

        Raises:
            FileNotFoundError: the run has no such artifact.
            OSError: transient failure.
        """
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._tracking_uri)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            try:
                found = client.download_artifacts(self.run_id, artifact_path(name), folder)
            except Exception as error:
                if is_transient(error):
                    raise OSError(f"cannot download {name!r}: {error}") from error
                raise FileNotFoundError(f"the run has no artifact {name!r}.") from error
            Path(found).replace(target)

    # The run.

    def open(self) -> None:
        # Takes seconds; done before the first record needs it.
        import mlflow.tracking  # noqa: F401

    def resume(self, step: int, time: float | None) -> None:
        self._run()

    def _run(self) -> str:
        """Returns the id of the run; creates or continues it at the first call.

        Raises:
            RetryLaterError: transient failure.
        """
        if self.run_id is None:
            with self._lock:
                self._is_created = True
            self.run_id = call_service(self._create)
        return self.run_id

    def _create(self) -> str:
        from mlflow.tracking import MlflowClient

        if self._client is None:
            self._client = MlflowClient(self._tracking_uri)
        run_id = self._new_run() if self._wanted_id is None else self._old_run(self._wanted_id)
        if self._log_system_metrics and self._monitor is None:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(
                run_id, resume_logging=self._wanted_id is not None, tracking_uri=self._tracking_uri
            )
            self._monitor.start()
        return run_id

    def _new_run(self) -> str:
        tags = {entity_key(key): cut(str(value), _MAX_TAG) for key, value in self._tags.items()}
        run = self._client.create_run(
            self._experiment_id(),
            start_time=milliseconds(self._started_at),
            tags=tags,
            run_name=without_surrogates(self._run_name),
        )
        run_id: str = run.info.run_id
        return run_id

    def _experiment_id(self) -> str:
        name = self._experiment
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                made: str = self._client.create_experiment(name, artifact_location=self._artifact_location)
            except Exception:
                # Another rank or run has just created it.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
            else:
                return made
        if found.lifecycle_stage != "active":
            raise ValueError(f"experiment {name!r} is deleted. Restore it, or use another name.")
        experiment_id: str = found.experiment_id
        return experiment_id

    def _old_run(self, run_id: str) -> str:
        run = self._client.get_run(run_id)
        self._client.update_run(run_id, status="RUNNING")
        for key in run.data.metrics:
            name = run.data.tags.get(tag_key(_NAME_TAG, key), key)
            self._metric_names.take(name, key)
        self._params = dict(run.data.params)
        self._tables = json_list(run.data.tags.get("mlflow.loggedArtifacts"))
        for key, value in self._tags.items():
            self._client.set_tag(run_id, entity_key(key), cut(str(value), _MAX_TAG))
        return run_id

    def finish(self, status: str, exception: str | None, time: float) -> None:
        self._run()
        self._stop_monitor()
        if exception is not None:
            self._set_tag("exception", exception)
        ended = {"status": _STATUSES.get(status, "FAILED"), "end_time": milliseconds(time)}
        self._call("set_terminated", **ended)

    def close(self) -> None:
        self._stop_monitor()
        self._client = None

    def _stop_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.finish()

    # Records.

    def log_metrics(self, rows: Sequence[Row]) -> None:
        self._run()
        for name in dict.fromkeys(name for row in rows for name in row[0]):
            # The original name of a renamed metric is a tag.
            key = self._metric_names.key(name)
            if key != name and key not in self._tagged_keys:
                self._set_tag(tag_key(_NAME_TAG, key), name)
                self._tagged_keys.add(key)
        try:
            self._log_rows(*rows)
        except RetryLaterError:
            raise
        except Exception:  # noqa: BLE001  # MLflow ignores the rows that it has already
            log_each_row(rows, self._log_rows)

    def _log_rows(self, *rows: Row) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(self._metric_names.key(name), number(value), milliseconds(at), step)
            for values, step, at in rows
            for name, value in values.items()
        ]
        for batch in batches(metrics):
            self._log_batch(metrics=batch)

    def log_hyperparameters(self, hyperparameters: dict[str, Any], time: float) -> None:
        from destinations.run_directory.documents import flat_hyperparameters

        self._run()
        self._hyperparameters = merged(self._hyperparameters, hyperparameters)
        text = without_surrogates(yaml_text(self._hyperparameters))
        names = Names(entity_key)
        params = {
            names.key(name): without_surrogates(str(plain(value)))
            for name, value in flat_hyperparameters(self._hyperparameters).items()
        }
        self._log_params(params)
        self._log_bytes("hparams.yaml", text.encode())

    def _log_params(self, params: Mapping[str, str]) -> None:
        """Logs new parameters; MLflow rejects changes, so changed values become tags."""
        from mlflow.entities import Param
        from mlflow.utils import validation

        longest = validation.MAX_PARAM_VAL_LENGTH
        new = {key: cut(value, longest) for key, value in params.items() if key not in self._params}
        changed = {
            key: value
            for key, value in params.items()
            if key in self._params and self._params[key] != cut(value, len(self._params[key]))
        }
        for start in range(0, len(new), _PARAMS_AT_ONCE):
            some = list(new.items())[start : start + _PARAMS_AT_ONCE]
            try:
                self._log_batch(params=[Param(key, value) for key, value in some])
            except RetryLaterError:
                raise
            except Exception:  # noqa: BLE001  # one rejected parameter must not block the others
                for key, value in some:
                    self._log_param(key, value)
            self._params.update(some)
        for key, value in changed.items():
            self._set_tag(tag_key(_CHANGED_TAG, key), value)

    def _log_param(self, key: str, value: str) -> None:
        from mlflow.entities import Param

        for shorter in (value, cut(value, _MAX_OLD_PARAM)):
            try:
                self._log_batch(params=[Param(key, shorter)])
            except RetryLaterError:
                raise
            except Exception:  # noqa: BLE001, S112  # too long for an older server, or has another value
                continue
            return
        self._set_tag(tag_key(_CHANGED_TAG, key), value)

    def log_table(self, stamp: Stamp, columns: list[str], rows: list[list[Any]]) -> None:
        # The format of MLflow's log_table and load_table.
        document = clean_texts({"columns": columns, "data": [[plain(cell) for cell in row] for row in rows]})
        path = self._log_medium("tables", stamp, ".json", json_bytes(document))
        entry = {"path": path, "type": "table"}
        if len(json.dumps([*self._tables, entry])) < _MAX_LIST_OF_TABLES:
            self._tables.append(entry)
            self._set_tag("mlflow.loggedArtifacts", json.dumps(self._tables))

    def log_images(self, stamp: Stamp, images: Images) -> None:
        by_mask = images.class_masks()
        # MLflow shows one image for each key and step.
        for index, (name, pixels) in enumerate(numbered(stamp.name, images.pixels())):
            self._log_image(name, stamp, Image.fromarray(pixels))
            for mask_name, one in by_mask.items():
                masked = f"{name}/{mask_name}"
                overlay = overlay_png(pixels, one[index])
                self._log_image(masked, stamp, Image.open(io.BytesIO(overlay)))
                self._log_medium("masks", attrs.evolve(stamp, name=masked), ".png", mask_png(one[index]))
        if by_mask and images.mask_class_labels:
            labels = {str(key): label for key, label in images.mask_class_labels.items()}
            self._log_medium("masks", stamp, ".labels.json", json_bytes(clean_texts(labels)))

    def _log_image(self, name: str, stamp: Stamp, image: Image.Image) -> None:
        key = self._artifact_names.key(name)
        self._call("log_image", image, key=key, step=stamp.step, timestamp=milliseconds(stamp.time))

    def log_text(self, stamp: Stamp, text: str) -> None:
        self._log_medium("texts", stamp, ".txt", without_surrogates(text).encode())

    def log_audio(self, stamp: Stamp, audio: Any, sample_rate: int) -> None:
        self._log_medium("audio", stamp, ".wav", wav_bytes(audio, sample_rate))

    def log_video(self, stamp: Stamp, video: Any, fps: float | None) -> None:
        data, suffix = video_file(video, fps)
        self._log_medium("videos", stamp, suffix, data)

    def log_histogram(self, stamp: Stamp, values: Any, bins: int | Sequence[float]) -> None:
        self._log_medium("histograms", stamp, ".json", json_bytes(histogram_record(values, bins)))

    def log_point_cloud(self, stamp: Stamp, points: Any, colors: Any) -> None:
        for cloud, shades in iter_point_clouds(points, colors):
            self._log_medium("point_clouds", stamp, ".ply", ply_bytes(cloud, shades))

    def log_traces(self, stamp: Stamp, traces: dict[str, Any]) -> None:
        self._log_medium(
            "traces", attrs.evolve(stamp, name="traces"), ".json", json_bytes(clean_texts(plain(traces)))
        )

    def log_file(self, name: str, copy: Path, *, overwrite: bool) -> None:
        """Logs a file as an artifact, replacing an older one."""
        folder, _, file_name = artifact_path(name).rpartition("/")
        # MLflow takes the name of the local file.
        named = copy.parent / "named" / file_name
        named.parent.mkdir(exist_ok=True)
        if not named.exists():
            copy.rename(named)
        self._call("log_artifact", str(named), folder or None)

    # Requests.

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        """Calls a method of the client for the run."""
        run_id = self._run()
        call_service(lambda: getattr(self._client, method)(run_id, *args, **options))

    def _log_batch(self, **entities: Any) -> None:
        # Synchronous even if MLflow's own thread is enabled in the environment: this is a background thread
        # already.
        self._call("log_batch", **entities, synchronous=True)

    def _set_tag(self, key: str, value: str) -> None:
        self._call("set_tag", key, cut(without_surrogates(value), _MAX_TAG), synchronous=True)

    def _log_medium(self, folder: str, stamp: Stamp, suffix: str, data: bytes) -> str:
        """Logs a file under its name, step and time; returns its artifact path."""
        at = f"{stamp.step:08d}_{milliseconds(stamp.time)}_{next(self._sequence)}{suffix}"
        return self._log_bytes(f"{folder}/{self._artifact_names.key(stamp.name)}/{at}", data)

    def _log_bytes(self, path: str, data: bytes) -> str:
        parent, _, name = path.rpartition("/")
        with tempfile.TemporaryDirectory(prefix="destinations-mlflow-") as folder:
            file = Path(folder) / name
            file.write_bytes(data)
            self._call("log_artifact", str(file), parent or None)
        return path
