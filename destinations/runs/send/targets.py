"""Targets of `send`: `tensorboard:FOLDER`, `run:FOLDER`, `wandb:PROJECT`, `mlflow:URI`, `trackio:PROJECT`.

A target creates the destination, locates the ledger, and removes the remains of an interrupted attempt.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from destinations.run_directory.layout import EDITS
from destinations.runs.files import path_inside
from destinations.runs.own_files import FOLDERS, KNOWN
from destinations.runs.record import RunRecord
from destinations.runs.run import Run
from uploads.disk import closing, copy_all, is_locked, open_regular, replacement

from .ledger import SendingError, read_ledger

__all__ = ["Target", "TargetError", "target_of"]

_log = logging.getLogger("destinations")

LEDGER = ".sent.json"
_MLFLOW_TAG = "training_destinations.run"
# Blocking is fine: no training is running in this process.
_BLOCKING: dict[str, Any] = {"when_full": "wait", "wait_seconds": 600.0, "close_seconds": 3600.0}


class TargetError(SendingError):
    """Invalid target."""


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


class Target:
    """A place that a run can be sent to.

    Args:
        place: the part after "KIND:".
        record: the run.
        cache: folder for the ledgers of targets that are not folders.

    Attributes:
        starts_over: everything is sent, replacing what is there; otherwise only new records.
        with_abandoned: include abandoned rows.
    """

    kind: str
    copies_abandoned = False
    """`finish` copies the files of abandoned rows."""

    def __init__(self, place: str, record: RunRecord, cache: Path) -> None:
        self.place = place
        self.record = record
        self._cache = cache
        self.starts_over = True
        self.with_abandoned = False

    @property
    def name(self) -> str:
        """Name in messages and in the ledger."""
        return f"{self.kind}:{self.place}"

    @property
    def ledger_path(self) -> Path:
        """Path of the ledger."""
        key = _digest(f"{self.name}\n{self.record.run_id}", 24)
        return self._cache / "sent" / f"{key}.json"

    def make(self, clock: Callable[[], float]) -> Any:
        """Returns the destination; it gets `clock` as its clock."""
        raise NotImplementedError

    def rank_factory(self, clock: Callable[[], float]) -> Callable[[int], Any] | None:
        """Returns a factory of destinations for other ranks; None if their metrics go to that of rank 0."""
        return None

    def check(self) -> None:
        """Checks that the target may be written to.

        Raises:
            SendingError: it contains something that `send` did not write.
        """

    def is_gone(self) -> bool:
        """Returns whether what was sent has been deleted."""
        return False

    def check_restart(self) -> None:
        """Checks that `restart` removes nothing else.

        Raises:
            SendingError: there is something that `send` did not write.
        """

    def restart(self) -> None:
        """Removes what was sent before, so that everything can be sent again."""

    def finish(self, run: Run) -> None:
        """Adds what cannot be logged through a destination."""


class FolderTarget(Target):
    """A folder with a subfolder for each run, which also contains the ledger."""

    own_files: re.Pattern[str]
    """Names of files that `send` writes."""
    own_folders: re.Pattern[str]

    def __init__(self, place: str, record: RunRecord, cache: Path) -> None:
        super().__init__(str(Path(place).absolute()), record, cache)
        self.folder = self._find_folder(Path(self.place))

    def _find_folder(self, parent: Path) -> Path:
        """Returns the subfolder that already contains the run, else a new one with its name."""
        for path in parent.glob(f"*/{LEDGER}"):
            if read_ledger(path).get("run_id") == self.record.run_id:
                return path.parent
        # Braces would be placeholders.
        name = re.sub(r"[{}]", "_", self.record.path.name)
        if name in {"", ".", ".."}:
            raise SendingError(f"the run folder has no name: {str(self.record.path)!r}.")
        run_id = re.sub(r"[^\w.-]", "_", self.record.run_id)
        plain = parent / name
        return plain if not _has_content(plain) else parent / f"{name}-{run_id}"

    @property
    def ledger_path(self) -> Path:
        """Path of the ledger, inside the folder, so that both are moved or deleted together."""
        return self.folder / LEDGER

    def check(self) -> None:
        """Rejects the folder of the run itself, and folders with files but no ledger."""
        if self.folder.resolve() == self.record.path.resolve():
            raise SendingError(f"cannot send a run to its own folder {str(self.folder)!r}.")
        if _has_content(self.folder) and not self.ledger_path.exists():
            raise SendingError(
                f"target {str(self.folder)!r} contains other files. "
                "Use a new folder, or one that was sent to before."
            )

    def check_restart(self) -> None:
        if any(map(is_locked, self.folder.glob(".lock*"))):
            raise SendingError(f"target {str(self.folder)!r} is to be replaced, and a process writes to it.")
        for path in self._content():
            is_folder = path.is_dir() and not path.is_symlink()
            if not (self.own_folders if is_folder else self.own_files).fullmatch(path.name):
                raise SendingError(
                    f"target {str(self.folder)!r} is to be replaced, and has {path.name!r}, which was not "
                    "sent. Move it elsewhere, or choose another folder."
                )

    def restart(self) -> None:
        self.check_restart()
        for path in self._content():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _content(self) -> list[Path]:
        """Returns what is in the folder, but for the ledger and the edits of the user."""
        names = self.folder.iterdir() if self.folder.is_dir() else ()
        return [path for path in names if not path.name.startswith(LEDGER) and path.name != EDITS]

    def is_gone(self) -> bool:
        return not _has_content(self.folder)


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(not path.name.startswith(LEDGER) for path in folder.iterdir())


class TensorBoardTarget(FolderTarget):
    """A folder of event files."""

    kind = "tensorboard"
    own_files = re.compile(r"events\.out\.tfevents\..*")
    own_folders = re.compile(r"(?!)")

    def make(self, clock: Callable[[], float]) -> Any:
        from destinations.trackers.tensorboard.destination import TensorBoard

        return TensorBoard(self.folder, clock=clock, **_BLOCKING)


class RunTarget(FolderTarget):
    """A copy as a run folder."""

    kind = "run"
    copies_abandoned = True
    own_files = KNOWN
    own_folders = FOLDERS

    def make(self, clock: Callable[[], float]) -> Any:
        from destinations.run_directory import RunDirectory

        return RunDirectory(
            self.folder,
            run_id=self.record.run_id,
            tags=self.record.tags,
            notes=self.record.notes,
            if_exists="resume",
            keep_files="copy",
            close_seconds=_BLOCKING["close_seconds"],
            clock=clock,
        )

    def rank_factory(self, clock: Callable[[], float]) -> Callable[[int], Any]:
        from destinations.run_directory import RunDirectory

        return lambda _: RunDirectory(
            self.folder,
            if_exists="resume",
            all_ranks=True,
            close_seconds=_BLOCKING["close_seconds"],
            clock=clock,
        )

    def finish(self, run: Run) -> None:
        """Copies the environment and sessions of the original run, and the files of abandoned rows."""
        from destinations.run_directory.layout import ABANDONED_FOLDER, ENVIRONMENT, SESSIONS

        names = [ENVIRONMENT, SESSIONS]
        if self.with_abandoned:
            paths = (run.record.path / ABANDONED_FOLDER).glob("*.csv")
            names += [f"{ABANDONED_FOLDER}/{path.name}" for path in paths]
        for name in names:
            try:
                source = open_regular(path_inside(run.record.path, name))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                _log.warning("left out %s of run %s: %s", name, run.record.run_id, error)
                continue
            with closing(source), replacement(self.folder / name) as copy:
                copy_all(source, copy)


class WandBTarget(Target):
    """A Weights & Biases project; the remote run id is derived from the local one."""

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
            init_kwargs={"resume": None} if self.starts_over else None,
            log_artifacts=True,
            clock=clock,
            **_BLOCKING,
        )

    @property
    def remote_id(self) -> str:
        """Id of the run in the project: letters, digits and "-"."""
        run_id = self.record.run_id
        return re.sub(r"[^A-Za-z0-9-]", "-", run_id)[:40] + f"-{_digest(run_id, 8)}"


class QueriedTarget(Target):
    """A tracker that is queried for the runs that this run was sent to."""

    def _found(self) -> list[Any]:
        raise NotImplementedError

    def is_gone(self) -> bool:
        try:
            return not self._found()
        except ImportError:
            # `make` raises the better message.
            return False


class MLflowTarget(QueriedTarget):
    """An MLflow tracking URI: `mlflow:URI#EXPERIMENT`; default experiment: the name of the parent folder.

    MLflow chooses run ids itself, so the run is found by a tag. Sending everything again deletes the earlier
    run, which MLflow can restore.
    """

    kind = "mlflow"

    def make(self, clock: Callable[[], float]) -> Any:
        from destinations.trackers.mlflow.destination import MLflow

        # Constructing it checks that the package is installed, before `_found` imports it.
        arguments: dict[str, Any] = {
            "run_name": self.record.name,
            "log_artifacts": True,
            "clock": clock,
            **_BLOCKING,
        }
        tags = {_MLFLOW_TAG: self._tag, "mlflow.note.content": self.record.notes}
        tags |= {f"tag.{name}"[:250]: name for name in self.record.tags}
        tracker = MLflow(self._uri, self._experiment, tags={k: v for k, v in tags.items() if v}, **arguments)
        found = [] if self.starts_over else self._found()
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
        return _digest(self.record.run_id, 24)

    def _found(self) -> list[str]:
        """Returns the ids of the MLflow runs that this run was sent to."""
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


class TrackioTarget(QueriedTarget):
    """A local Trackio project; its runs are identified by name, so the name contains a hash of the run id."""

    kind = "trackio"

    def make(self, clock: Callable[[], float]) -> Any:
        from destinations.trackers.trackio import Trackio

        return Trackio(self.place, name=self.remote_name, resume="allow", clock=clock, **_BLOCKING)

    @property
    def remote_name(self) -> str:
        """Name of the run in the project, without braces, which would be placeholders."""
        return re.sub(r"[{}]", "_", self.record.name) + f"-{_digest(self.record.run_id, 8)}"

    def _found(self) -> list[Any]:
        import trackio

        try:
            runs = trackio.Api().runs(self.place)
        except ValueError:  # The project does not exist yet.
            return []
        return [run for run in runs if run.name == self.remote_name]

    def restart(self) -> None:
        for run in self._found():
            run.delete()


_TARGETS: dict[str, type[Target]] = {
    one.kind: one for one in (TensorBoardTarget, RunTarget, WandBTarget, MLflowTarget, TrackioTarget)
}


def target_of(text: str, record: RunRecord, cache: Path) -> Target:
    """Parses a target.

    Raises:
        TargetError: invalid target.
    """
    kind, separator, place = text.partition(":")
    if not separator or kind not in _TARGETS or not place:
        raise TargetError(
            f"unknown target {text!r}; expected tensorboard:FOLDER, run:FOLDER, wandb:PROJECT, mlflow:URI "
            "or trackio:PROJECT."
        )
    return _TARGETS[kind](place, record, cache)
