"""`MLflow`: logs a run to an MLflow tracking server or database.

The package `mlflow` takes seconds to import; it is imported in the background thread only.
"""

import io
import itertools
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

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
from destinations.trackers.names import Names, clean_texts, numbered, short_hash, without_surrogates
from destinations.trackers.target import Target
from destinations.trackers.tracker import (
    Images,
    Row,
    Sink,
    Stamp,
    Tracker,
    log_each_row,
    number,
    require_package,
)
from events import State, redact

__all__ = ["MLflow"]

T = TypeVar("T")

# Limits of a request: MLflow REST API, "Log Batch".
_METRICS_AT_ONCE = 1000
_REQUEST_BYTES = 900_000
_BYTES_OF_A_METRIC = 120
_MAX_KEY = 250
_MAX_ARTIFACT_KEY = 80
_TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
_TRANSIENT_MESSAGES = (
    "failed with exception",
    "database is locked",
    "too many 429",
    "too many 502",
    "too many 503",
    "too many 504",
)


# Names.


def entity_key(name: str) -> str:
    """Returns the key of a metric, parameter or tag: its name, if valid in MLflow.

    A valid name has at most 250 letters, digits, "_", "-", ".", ":", " " and "/", and is a normal path,
    unlike "a//b" or "../a". Other characters become "_".
    """
    return _key(name, r"[^/\w.\- :]", _MAX_KEY) or "unnamed"


def artifact_key(name: str) -> str:
    """Returns a name as a relative path of at most 80 ASCII letters, digits, "_", "-", ".", " " and "/"."""
    key = _key(name, r"[^/A-Za-z0-9_.\- ]", _MAX_ARTIFACT_KEY)
    return key if key.strip() else "unnamed"


def _key(name: str, forbidden: str, longest: int) -> str:
    key = "/".join(_parts(re.sub(forbidden, "_", name)))
    return key if len(key) <= longest else f"{key[: longest - 7]}-{short_hash(name)}"


def _parts(path: str) -> Iterator[str]:
    for part in path.split("/"):
        if part:
            yield "_" * len(part) if part in {".", ".."} else part


def artifact_path(name: str) -> str:
    """Returns the name of a file as a relative artifact path, without characters that servers reject."""
    return "/".join(_parts(re.sub(r"[\x00-\x1f\x7f\"':#%?*<>|\\]", "_", without_surrogates(name)))) or "file"


# Values.


def milliseconds(seconds: float) -> int:
    """Returns a time in milliseconds, as in MLflow."""
    return max(0, round(seconds * 1000))


def cut(text: str, longest: int) -> str:
    """Returns the text truncated to `longest` characters, with an ellipsis."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def batches(metrics: list[Any]) -> Iterator[list[Any]]:
    """Splits metrics into requests, by number and by bytes."""
    batch: list[Any] = []
    size = 0
    for metric in metrics:
        key = metric.key
        more = _BYTES_OF_A_METRIC + (len(key) if key.isascii() else 12 * len(key))
        if batch and (len(batch) == _METRICS_AT_ONCE or size + more > _REQUEST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(metric)
        size += more
    if batch:
        yield batch


def json_bytes(value: Any) -> bytes:
    """Encodes a value as strict JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


# Errors.


def call_service(request: Callable[[], T]) -> T:
    """Calls `request` and returns its result.

    Raises:
        RetryLaterError: transient failure: the server is unreachable or busy.
        Exception: permanent failure.
    """
    try:
        return request()
    except RetryLaterError:
        raise
    except Exception as error:
        if is_transient(error):
            raise RetryLaterError from error
        raise


def is_transient(error: Exception) -> bool:
    """Returns whether a retry may succeed."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # Errors of Python, requests and urllib3, matched by name to avoid importing the latter two.
    if kinds & {"ConnectionError", "TimeoutError", "Timeout", "RetryError", "MaxRetryError"}:
        return True
    if "MlflowException" not in kinds:
        return False
    status = getattr(error, "get_http_status_code", int)()
    text = str(error)
    return status in _TRANSIENT_STATUSES or any(words in text for words in _TRANSIENT_MESSAGES)


_PARAMS_AT_ONCE = 100
_MAX_TAG = 5000
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
            name = run.data.tags.get(entity_key(_NAME_TAG + key), key)
            self._metric_names.take(name, key)
        self._params = dict(run.data.params)
        self._tables = json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]"))
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
                self._set_tag(entity_key(_NAME_TAG + key), name)
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
            self._set_tag(entity_key(_CHANGED_TAG + key), value)

    def _log_param(self, key: str, value: str) -> None:
        from mlflow.entities import Param

        try:
            self._log_batch(params=[Param(key, value)])
        except RetryLaterError:
            raise
        except Exception:  # noqa: BLE001  # too long for an older server, or has another value
            self._set_tag(entity_key(_CHANGED_TAG + key), value)

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


_RUN_TAG = "training_destinations.run"
_MAX_TAG_KEY = 250


class _Experiment(Target):
    """An experiment at a tracking URI; by default, it has the name of the parent folder.

    MLflow chooses run ids itself, so the run is found by a tag. Sending everything again deletes the earlier
    run; MLflow can restore it.
    """

    places = ("URI", "URI#EXPERIMENT")

    def make(self, tracker: type, shared: Mapping[str, Any]) -> Any:
        run = self.run
        found = [] if self.starts_over else self._found()
        tags = {_RUN_TAG: self._tag, "mlflow.note.content": run.notes} if not found else {}
        tags |= {f"tag.{name}"[:_MAX_TAG_KEY]: name for name in run.tags if not found}
        given = {
            "run_name": self.name,
            "run_id": found[0] if found else None,
            "tags": {key: text for key, text in tags.items() if text},
            "log_artifacts": True,
        }
        return tracker(self._uri, self._experiment, **{**given, **shared, **self.options})

    @property
    def _uri(self) -> str:
        return self.place.partition("#")[0]

    @property
    def _experiment(self) -> str:
        return self.place.partition("#")[2] or self.run.path.parent.name or "runs"

    @property
    def _tag(self) -> str:
        return short_hash(self.run.run_id, 24)

    @property
    def _client(self) -> Any:
        _require_mlflow()
        import mlflow

        return mlflow.MlflowClient(self._uri)

    def _found(self) -> list[str]:
        """Returns the ids of the MLflow runs that this run was sent to."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return []
        runs = self._client.search_runs([experiment.experiment_id], f"tags.`{_RUN_TAG}` = '{self._tag}'")
        return [run.info.run_id for run in runs]

    def is_gone(self) -> bool:
        return not self._found()

    def restart(self) -> None:
        for run_id in self._found():
            self._client.delete_run(run_id)


class MLflow(Tracker):
    """Logs all records to MLflow.

    ```python
    Trainer(..., loggers=[MLflow("sqlite:///mlflow.db", "digits")])
    ```

    Metrics, hyperparameters and images use the corresponding features of MLflow; tables, texts, audio, video,
    histograms, point clouds and traces become artifacts, and so do files passed to `upload_file`, with
    `log_artifacts`. The page "Trackers" describes each, and how names that are invalid in MLflow are mapped.

    **Isolation.** Uses its own `MlflowClient`: no active run is set, and the tracking URI and experiment of
    the process are not changed.

    **End of the run.** FINISHED, FAILED, or KILLED if interrupted or preempted.

    **Resume.** A run resumed from a checkpoint continues the run whose id is in the checkpoint. MLflow cannot
    delete values logged after the checkpoint: those steps have two values.

    **An unreachable server** is retried until `close`; pending records wait in memory, within bounds.

    Threading, bounds, failures and close: see `Tracker`.

    Args:
        tracking_uri: `http(s)://…` of a server, `sqlite:///mlflow.db`, or another MLflow URI; None for
            MLflow's default.
        experiment: name of the experiment; created if missing.
        run_name: name in MLflow; placeholders as in `events.format_run_name`; default: the name of the run.
        run_id: id of an MLflow run to continue; default: a new run.
        tags: tags of the run.
        artifact_location: artifact location of a new experiment; default: MLflow's.
        log_artifacts: log files passed to `upload_file` as artifacts.
        log_system_metrics: run MLflow's system metrics monitor; needs psutil.
        options: arguments of `Tracker`.

    Raises:
        ImportError: the package mlflow is not installed.
        ValueError: an argument is out of its range.
    """

    sink_class: ClassVar[type[Sink]] = MLflowSink
    target = _Experiment

    def __init__(
        self,
        tracking_uri: str | None,
        experiment: str,
        *,
        run_name: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        artifact_location: str | None = None,
        log_artifacts: bool = False,
        log_system_metrics: bool = False,
        **options: Any,
    ) -> None:
        _require_mlflow()
        if not experiment:
            raise ValueError("experiment must not be empty.")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._run_id = run_id
        self._tags = redact(dict(tags or {}))
        self._artifact_location = artifact_location
        self._log_artifacts = log_artifacts
        self._log_system_metrics = log_system_metrics
        super().__init__(**options)

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until it is created in the background thread, and after close."""
        return None if self._sink is None else self._sink.run_id

    def make_sink(self, state: State) -> MLflowSink:
        tags, run_id = dict(self._tags), self._run_id
        if self._all_ranks and state.world_size > 1:
            tags |= {"run_group": state.run_name, "rank": str(state.rank)}
            # A given run belongs to rank 0.
            run_id = run_id if state.rank == 0 else None
        return MLflowSink(
            self._tracking_uri,
            self._experiment,
            self._name_of(self._run_name, state),
            tags,
            self._artifact_location,
            self._log_system_metrics,
            self._clock(),
            run_id,
        )

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        sink, target = self._sink, Path(destination)
        if target.exists() and not overwrite:
            raise FileExistsError(f"file {destination!r} already exists. Pass overwrite=True.")
        self.flush()
        if sink is None or sink.run_id is None:
            raise FileNotFoundError(f"cannot download {remote_file_name!r}: no run is open.")
        sink.download(remote_file_name, target)


def _require_mlflow() -> None:
    require_package("mlflow", "MLflow")
