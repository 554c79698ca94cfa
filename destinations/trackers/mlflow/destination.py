"""`MLflow`: logs a run to an MLflow tracking server or database.

The package `mlflow` takes seconds to import; it is imported in the background thread only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from destinations.trackers.tracker import Sink, Tracker, require_package
from events import State, redact

from .sink import MLflowSink

__all__ = ["MLflow"]


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
        require_package("mlflow", "mlflow", "MLflow")
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
