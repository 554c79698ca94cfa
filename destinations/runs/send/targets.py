"""Where a run can be sent, by name: `tensorboard:FOLDER`, `run:FOLDER`, `wandb:PROJECT`, `mlflow:URI`, `trackio:PROJECT`.

A target makes the destination, knows where its ledger is, and takes back what a sending that was killed has left.
"""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from destinations.runs.record import RunRecord
from destinations.runs.run import Run

from .ledger import SendingError, read_ledger

__all__ = ["Target", "TargetError", "target_of"]

LEDGER = ".sent.json"
_MLFLOW_TAG = "training_destinations.run"
# As long as it takes: nobody trains meanwhile.
_PATIENT: dict[str, Any] = {"when_full": "wait", "wait_seconds": 600.0, "close_seconds": 3600.0}


class TargetError(SendingError):
    """A text names no target."""


class Target:
    """Where a run goes.

    Args:
        place: what stands behind the kind, as it was given.
        record: the run.
        cache: where ledgers are of targets that have no folder of their own.

    Attributes:
        is_anew: whether everything is sent, in the place of what may be there, or what is new.
        with_abandoned: whether rows are wanted that training left.
    """

    kind: str
    copies_abandoned = False
    """Whether `finish` takes such rows, as files."""

    def __init__(self, place: str, record: RunRecord, cache: Path) -> None:
        self.place = place
        self.record = record
        self._cache = cache
        self.is_anew = True
        self.with_abandoned = False

    @property
    def name(self) -> str:
        """What the target is called in messages and in the ledger."""
        return f"{self.kind}:{self.place}"

    @property
    def ledger_path(self) -> Path:
        """Where the ledger is."""
        key = hashlib.sha256(
            f"{self.name}\n{self.record.run_id}".encode("utf-8", "surrogatepass")
        ).hexdigest()[:24]
        return self._cache / "sent" / f"{key}.json"

    def make(self, clock: Callable[[], float]) -> Any:
        """Returns the destination, which takes the time from `clock`."""
        raise NotImplementedError

    def maker_of_ranks(self, clock: Callable[[], float]) -> Callable[[int], Any] | None:
        """Returns what makes the destination of another rank; None where its metrics go to the one of rank 0."""
        return None

    def check(self) -> None:
        """Refuses a target that must not be written to.

        Raises:
            SendingError: it holds something of somebody else's.
        """

    def is_gone(self) -> bool:
        """Says whether what was sent is no more."""
        return False

    def restart(self) -> None:
        """Takes back what an earlier sending left, so that everything can be sent anew."""

    def finish(self, run: Run) -> None:
        """Adds what no method of a destination takes."""


class FolderTarget(Target):
    """A folder of files, one folder in it for each run; the ledger is inside."""

    def __init__(self, place: str, record: RunRecord, cache: Path) -> None:
        super().__init__(str(Path(place).absolute()), record, cache)
        self.folder = self._find_folder(Path(self.place))

    def _find_folder(self, parent: Path) -> Path:
        """Returns the folder that holds the run already, whatever it is called; else a new one with its name."""
        for path in parent.glob(f"*/{LEDGER}"):
            if read_ledger(path).get("run_id") == self.record.run_id:
                return path.parent
        # Braces would be placeholders.
        name = re.sub(r"[{}]", "_", self.record.path.name)
        if name in {"", ".", ".."}:
            raise SendingError(f"run must be in a folder with a name, got {str(self.record.path)!r}.")
        run_id = re.sub(r"[^\w.-]", "_", self.record.run_id)
        plain = parent / name
        return plain if not _has_content(plain) else parent / f"{name}-{run_id}"

    @property
    def ledger_path(self) -> Path:
        """Inside the folder, so that it moves and goes with it."""
        return self.folder / LEDGER

    def check(self) -> None:
        """Refuses the run's own folder, and one with files that no ledger knows."""
        if self.folder.resolve() == self.record.path.resolve():
            raise SendingError(
                f"target must be another folder than that of the run, got {str(self.folder)!r}."
            )
        if _has_content(self.folder) and not self.ledger_path.exists():
            raise SendingError(
                f"target must be a new folder, or one that was sent to before, got {str(self.folder)!r} with other files in it."
            )

    def restart(self) -> None:
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.startswith(LEDGER):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def is_gone(self) -> bool:
        return not _has_content(self.folder)


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(not path.name.startswith(LEDGER) for path in folder.iterdir())


class TensorBoardTarget(FolderTarget):
    """Event files."""

    kind = "tensorboard"

    def make(self, clock: Callable[[], float]) -> Any:
        from destinations.trackers.tensorboard.destination import TensorBoard

        return TensorBoard(self.folder, clock=clock, **_PATIENT)


class RunTarget(FolderTarget):
    """A run folder like the one that is read."""

    kind = "run"
    copies_abandoned = True

    def make(self, clock: Callable[[], float]) -> Any:
        from destinations.run_directory import RunDirectory

        return RunDirectory(
            self.folder,
            run_id=self.record.run_id,
            tags=self.record.tags,
            notes=self.record.notes,
            keep_files="copy",
            close_seconds=_PATIENT["close_seconds"],
            clock=clock,
        )

    def maker_of_ranks(self, clock: Callable[[], float]) -> Callable[[int], Any]:
        from destinations.run_directory import RunDirectory

        return lambda _: RunDirectory(
            self.folder, all_ranks=True, close_seconds=_PATIENT["close_seconds"], clock=clock
        )

    def finish(self, run: Run) -> None:
        """Keeps where the run took place, and by which processes: not where it was sent from."""
        from destinations.run_directory.layout import ABANDONED_FOLDER, ENVIRONMENT, SESSIONS

        for name in (ENVIRONMENT, SESSIONS):
            if (run.record.path / name).is_file():
                shutil.copyfile(run.record.path / name, self.folder / name)
        for path in (run.record.path / ABANDONED_FOLDER).glob("*.csv") if self.with_abandoned else ():
            (self.folder / ABANDONED_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(path, self.folder / ABANDONED_FOLDER / path.name)


class WandBTarget(Target):
    """A project of Weights & Biases; the id of the run there is made of the id here, so that it is one run however often it is sent."""

    kind = "wandb"

    def make(self, clock: Callable[[], float]) -> Any:
        import os

        from destinations.trackers.wandb.destination import WandB

        entity, _, project = self.place.rpartition("/")
        mode: Any = os.environ.get("WANDB_MODE", "online")
        return WandB(
            project,
            entity=entity or None,
            name=self.record.name,
            tags=self.record.tags,
            notes=self.record.notes or None,
            mode=mode if mode in {"online", "offline", "disabled"} else "online",
            run_id=self.remote_id,
            resume="allow",
            init_kwargs={"resume": None} if self.is_anew else None,
            log_artifacts=True,
            clock=clock,
            **_PATIENT,
        )

    @property
    def remote_id(self) -> str:
        """The id of the run in the project: letters, digits and "-" alone."""
        key = hashlib.sha256(self.record.run_id.encode("utf-8", "surrogatepass")).hexdigest()
        return re.sub(r"[^A-Za-z0-9-]", "-", self.record.run_id)[:40] + f"-{key[:8]}"


class FoundTarget(Target):
    """A tracker that is asked which of its runs this run was sent to."""

    def _found(self) -> list[Any]:
        raise NotImplementedError

    def is_gone(self) -> bool:
        try:
            return not self._found()
        except ImportError:
            # `make` says so better.
            return False


class MLflowTarget(FoundTarget):
    """A tracking server or store of MLflow: `mlflow:URI` or `mlflow:URI#EXPERIMENT`; the experiment is else that of the run's root.

    MLflow chooses ids itself: the run is known there by a tag. One that is sent anew takes the place of the one before, which is
    deleted as MLflow deletes runs: it can be restored.
    """

    kind = "mlflow"

    def make(self, clock: Callable[[], float]) -> Any:
        from destinations.trackers.mlflow.destination import MLflow

        # The package is asked for before it is used below.
        arguments: dict[str, Any] = {
            "run_name": self.record.name,
            "log_artifacts": True,
            "clock": clock,
            **_PATIENT,
        }
        tags = {_MLFLOW_TAG: self._tag, "mlflow.note.content": self.record.notes}
        tags |= {f"tag.{name}"[:250]: name for name in self.record.tags}
        tracker = MLflow(self._uri, self._experiment, tags={k: v for k, v in tags.items() if v}, **arguments)
        found = [] if self.is_anew else self._found()
        if not found:
            return tracker
        return MLflow(self._uri, self._experiment, run_id=found[0], **arguments)

    @property
    def _uri(self) -> str:
        return self.place.partition("#")[0]

    @property
    def _experiment(self) -> str:
        return self.place.partition("#")[2] or self.record.path.parent.name or "runs"

    @property
    def _tag(self) -> str:
        return hashlib.sha256(self.record.run_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    def _found(self) -> list[str]:
        """Returns the ids of the runs at MLflow that this run was sent to."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return []
        runs = self._client.search_runs([experiment.experiment_id], f"tags.`{_MLFLOW_TAG}` = '{self._tag}'")
        return [run.info.run_id for run in runs]

    @property
    def _client(self) -> Any:
        import mlflow

        return mlflow.MlflowClient(self._uri)

    def restart(self) -> None:
        for run_id in self._found():
            self._client.delete_run(run_id)


class TrackioTarget(FoundTarget):
    """A project of Trackio on this machine; its runs are known by their names, so the id of the run is a part of the name there."""

    kind = "trackio"

    def make(self, clock: Callable[[], float]) -> Any:
        from destinations.trackers.trackio import Trackio

        return Trackio(self.place, name=self.remote_name, resume="allow", clock=clock, **_PATIENT)

    @property
    def remote_name(self) -> str:
        """The name of the run in the project; braces would be placeholders."""
        key = hashlib.sha256(self.record.run_id.encode("utf-8", "surrogatepass")).hexdigest()
        return re.sub(r"[{}]", "_", self.record.name) + f"-{key[:8]}"

    def _found(self) -> list[Any]:
        import trackio

        try:
            runs = trackio.Api().runs(self.place)
        except ValueError:  # There is no such project yet.
            return []
        return [run for run in runs if run.name == self.remote_name]

    def restart(self) -> None:
        for run in self._found():
            run.delete()


_TARGETS: dict[str, type[Target]] = {
    one.kind: one for one in (TensorBoardTarget, RunTarget, WandBTarget, MLflowTarget, TrackioTarget)
}


def target_of(text: str, record: RunRecord, cache: Path) -> Target:
    """Returns the target of a text.

    Raises:
        TargetError: it names none.
    """
    kind, separator, place = text.partition(":")
    if not separator or kind not in _TARGETS or not place:
        raise TargetError(
            f"target must be tensorboard:FOLDER, run:FOLDER, wandb:PROJECT, mlflow:URI or trackio:PROJECT, got {text!r}."
        )
    return _TARGETS[kind](place, record, cache)
