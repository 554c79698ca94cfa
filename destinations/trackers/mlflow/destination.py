"""Sends a run to MLflow: a tracking server, or a database of its own.

The package `mlflow` takes seconds to import; that is done in the thread of the lane, never at `import destinations`, and never
in the thread that trains.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from destinations.trackers.tracker import Sink, Tracker, require_package
from events import State, redact

from .sink import MLflowPlan, MLflowSink

__all__ = ["MLflow"]


class MLflow(Tracker):
    """Sends everything that is logged to MLflow.

    ```python
    Trainer(..., loggers=[MLflow("sqlite:///mlflow.db", "digits")])
    ```

    Metrics and hyperparameters go where MLflow has them; images too, with their steps; tables, texts, sounds, videos,
    histograms, point clouds and traces are artifacts of the run, and so are files that are given to `upload_file`, with
    `log_artifacts`. docs/trackers.md says what becomes of each, and of names that MLflow does not take.

    **What it leaves alone.** Everything goes through an `MlflowClient` of its own. There is no active run, and the tracking URI
    and the experiment that others in the process use are theirs.

    **The end.** The run is FINISHED, FAILED, or, where it was interrupted or preempted, KILLED.

    **Going on.** A run that goes on from a checkpoint has the id that the checkpoint holds. MLflow cannot take back what was
    logged after the checkpoint: those steps have two values.

    **A server that does not answer** is asked again until `close`, and what waits for it waits in memory, within bounds.

    Threading, bounds, failures and close are those of `Tracker`.

    Args:
        tracking_uri: `http(s)://…` of a server, `sqlite:///mlflow.db`, or whatever else MLflow takes; None for MLflow's default.
        experiment: the name of the experiment, made where there is none.
        run_name: what the run is called; the name of the run where it is None. May hold `{rank}`.
        run_id: the id of a run to go on with; a new run where it is None.
        tags: tags of the run.
        artifact_location: where an experiment that is made keeps its artifacts; MLflow's default where it is None.
        log_artifacts: whether files given to `upload_file` become artifacts.
        log_system_metrics: whether MLflow's own monitor of the machine runs along; takes psutil.
        options: `flush_seconds`, `all_ranks`, `close_seconds`, `max_waiting_values`, `max_waiting_bytes`, `when_full`,
            `wait_seconds`, `clock` and `write_rate`, as in `Tracker`.

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
            raise ValueError("experiment must be a name, got an empty one.")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._run_id = run_id
        self._tags = redact(dict(tags or {}))
        self._artifact_location = artifact_location
        self._log_artifacts = log_artifacts
        self._log_system_metrics = log_system_metrics
        super().__init__(**options)

    def _forget(self) -> None:
        super()._forget()
        self._sink: MLflowSink | None = None

    @property
    def run_id(self) -> str | None:
        """The id of the run; None before it is made in the lane, and after close."""
        return None if self._sink is None else self._sink.run_id

    def make_sink(self, state: State) -> MLflowSink:
        name = state.run_name if self._run_name is None else self._run_name.replace("{rank}", str(state.rank))
        tags, run_id = dict(self._tags), self._run_id
        if self._all_ranks and state.world_size > 1:
            tags |= {"run_group": state.run_name, "rank": str(state.rank)}
            name = name if self._run_name and "{rank}" in self._run_name else f"{name}-rank{state.rank}"
            # One run is one rank's.
            run_id = run_id if state.rank == 0 else None
        plan = MLflowPlan(
            self._tracking_uri,
            self._experiment,
            name,
            tags,
            self._artifact_location,
            self._log_system_metrics,
            self._clock(),
        )
        self._sink = MLflowSink(plan, run_id)
        return self._sink

    def can_upload_files(self) -> bool:
        return self._log_artifacts

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Copies the file, which takes as long as `cp`; the lane makes an artifact of it, in place of one of its name."""
        feed, sink = self._feed, self._sink
        if not self._log_artifacts or feed is None or sink is None:
            return
        copy = sink.stage(remote_file_name, file_path)
        work = functools.partial(sink.log_file, remote_file_name, copy)
        if not feed.put(f"file {remote_file_name!r}", 0, work, is_kept=True):
            copy.unlink(missing_ok=True)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        sink, target = self._sink, Path(destination)
        if target.exists() and not overwrite:
            raise FileExistsError(
                f"file {destination!r} must be new, got one that exists. Pass overwrite=True."
            )
        self.flush()
        if sink is None or sink.run_id is None:
            raise FileNotFoundError(f"file {remote_file_name!r} must be in a run that is open, got none.")
        sink.download(remote_file_name, target)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        if self._sink is not None and self._sink.run_id is not None and self._state is not None:
            # With its rank: a checkpoint that rank 0 wrote may be loaded by all.
            saved |= {"run_id": self._sink.run_id, "rank": self._state.rank}
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        run_id, sink, run = state.get("run_id"), self._sink, self._state
        if sink is not None and run is not None and isinstance(run_id, str) and state.get("rank") == run.rank:
            sink.go_on_with(run_id)
