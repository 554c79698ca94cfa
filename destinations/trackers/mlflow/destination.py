"""`MLflow`: logs a run to an MLflow tracking server or database.

The package `mlflow` takes seconds to import; it is imported in the background thread only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from destinations.trackers.names import short_hash
from destinations.trackers.target import Target
from destinations.trackers.tracker import Sink, Tracker, require_package
from events import State, redact

from .sink import MLflowSink

__all__ = ["MLflow"]


_RUN_TAG = "training_destinations.run"
_MAX_TAG_KEY = 250


class _Experiment(Target):
    """An experiment at a tracking URI; by default that of the name of the parent folder.

    MLflow chooses run ids itself, so the run is found by a tag. Sending everything again deletes the earlier
    run, which MLflow can restore.
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
    `log_artifacts`. docs/trackers.md describes each, and how names that are invalid in MLflow are mapped.

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
    require_package("mlflow", "mlflow", "MLflow")
