"""The targets of `send`: `run:FOLDER`, and `NAME:PLACE` for each tracker of `destinations.registry`.

A place creates the destination, locates the ledger, and removes the remains of an interrupted attempt. Each
tracker declares how it is reached; see `destinations.trackers.target`.
"""

import inspect
import logging
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.registry import trackers
from destinations.run_directory import RunDirectory
from destinations.run_directory.layout import EDITS
from destinations.runs.files import path_inside
from destinations.runs.move.ledger import SendingError, TargetError, read_ledger
from destinations.runs.move.sink import MakeDestination
from destinations.runs.move.stream import SourceRun
from destinations.runs.own_files import FOLDERS, KNOWN
from destinations.runs.record import RunRecord
from destinations.runs.run import RecordedRun
from destinations.runs.streams import streams_of, writers_of
from destinations.trackers.names import short_hash
from destinations.trackers.target import SentRun, Target
from uploads.disk import closing, copy_all, is_locked, open_regular, replacement

_log = logging.getLogger("destinations")

LEDGER = ".sent.json"
"""Name of the ledger in a folder that was sent to."""
# Blocking is fine here, because this process doesn't train.
_BLOCKING: dict[str, Any] = {"when_full": "wait", "wait_seconds": 600.0, "close_seconds": 3600.0}


@attrs.frozen
class _Kind:
    """A kind of target, named before the ":".

    Attributes:
        name: its name.
        tracker: the class of the destination.
        target: its declaration.
        place: the class of its places.
    """

    name: str
    tracker: type
    target: type[Target]
    place: "type[Place]"

    @property
    def forms(self) -> list[str]:
        """The forms of a target, "wandb:PROJECT"."""
        return [f"{self.name}:{form}".rstrip(":") for form in self.target.places_of(self.tracker)]

    @property
    def options(self) -> str:
        """The options that only this tracker has."""
        parameters = inspect.signature(self.tracker).parameters.values()
        return ", ".join(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)


class Place:
    """The place that a run is sent to.

    Args:
        kind: the kind of the target.
        target: the declaration of the tracker.
        cache: folder for the ledgers of places that are not folders.

    Attributes:
        name: its name in messages and in the ledger.
    """

    def __init__(self, kind: _Kind, target: Target, cache: Path) -> None:
        self.target = target
        self.run = target.run
        self.name = f"{kind.name}:{target.place}".rstrip(":")
        self._kind = kind
        self._cache = cache

    @property
    def ledger_path(self) -> Path:
        """Path of the ledger."""
        key = short_hash(f"{self.name}\n{self.run.run_id}", 24)
        return self._cache / "sent" / f"{key}.json"

    def make(self, clock: Callable[[], float]) -> Any:
        """Returns the destination, with `clock` as its clock.

        Raises:
            TargetError: the place or an option is invalid.
        """
        try:
            return self.target.make(self._kind.tracker, {"clock": clock, **_BLOCKING})
        except (TypeError, ValueError) as error:
            raise TargetError(
                f"cannot send to {self.name!r}: {error} Options: {self._kind.options}."
            ) from error

    def make_beside(self, clock: Callable[[], float]) -> MakeDestination | None:
        """Returns a function that makes destinations for other ranks and writers; None if all share one."""
        return None

    def check(self) -> None:
        """Checks that `send` may write here.

        Raises:
            SendingError: there is something that `send` did not write.
        """

    def is_gone(self) -> bool:
        """Returns whether the earlier copy was deleted."""
        return self.target.is_gone()

    def check_restart(self) -> None:
        """Checks that `restart` removes nothing else.

        Raises:
            SendingError: there is something that `send` did not write.
        """

    def restart(self) -> None:
        """Removes the earlier copy, so that everything can be sent again."""
        self.target.restart()

    def finish(self, run: RecordedRun) -> None:
        """Adds the files that can't be logged through a destination."""


class FolderPlace(Place):
    """A folder with a subfolder for each run; the subfolder also contains the ledger."""

    own_folders = re.compile(r"(?!)")

    def __init__(self, kind: _Kind, target: Target, cache: Path, folder: Path | None = None) -> None:
        target.place = str(Path(target.place).absolute())
        super().__init__(kind, target, cache)
        self.folder = folder or self._find_folder(Path(target.place))
        target.place = str(self.folder)

    def _find_folder(self, parent: Path) -> Path:
        """Returns the subfolder that already contains the run, or else a new one with its name."""
        for path in parent.glob(f"*/{LEDGER}"):
            if read_ledger(path).get("run_id") == self.run.run_id:
                return path.parent
        # Braces would be placeholders.
        name = re.sub(r"[{}]", "_", self.run.path.name)
        if name in {"", ".", ".."}:
            raise SendingError(f"the run folder has no name: {str(self.run.path)!r}.")
        run_id = re.sub(r"[^\w.-]", "_", self.run.run_id)
        plain = parent / name
        beside = run_id if run_id.startswith(name) else f"{name}-{run_id}"
        return plain if not has_content(plain) else parent / beside

    @property
    def ledger_path(self) -> Path:
        """Path of the ledger, inside the folder, so that both are moved or deleted together."""
        return self.folder / LEDGER

    def check(self) -> None:
        """Rejects the folder of the run itself, and folders with files but no ledger."""
        if self.folder.resolve() == self.run.path.resolve():
            raise SendingError(f"cannot send a run to its own folder {str(self.folder)!r}.")
        if has_content(self.folder) and not self.ledger_path.exists():
            raise SendingError(
                f"target {str(self.folder)!r} contains other files. "
                "Use a new folder, or one that was sent to before."
            )

    def check_restart(self) -> None:
        if any(map(is_locked, self._locks())):
            raise SendingError(f"target {str(self.folder)!r} is to be replaced, but a process writes to it.")
        for path in self._content():
            is_folder = path.is_dir() and not path.is_symlink()
            own = self.own_folders if is_folder else self.target.own_files
            if own is None or not own.fullmatch(path.name):
                raise SendingError(
                    f"target {str(self.folder)!r} is to be replaced, but contains {path.name!r}, which was "
                    "not sent. Move it elsewhere, or choose another folder."
                )

    def _locks(self) -> Iterator[Path]:
        return self.folder.glob(".lock*")

    def restart(self) -> None:
        self.check_restart()
        for path in self._content():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _content(self) -> list[Path]:
        """Returns the paths in the folder, except for the ledger and the user's edits."""
        names = self.folder.iterdir() if self.folder.is_dir() else ()
        return [path for path in names if not path.name.startswith(LEDGER) and path.name != EDITS]

    def is_gone(self) -> bool:
        return not has_content(self.folder)


def has_content(folder: Path) -> bool:
    """Returns whether a folder contains anything besides a ledger."""
    return folder.is_dir() and any(not path.name.startswith(LEDGER) for path in folder.iterdir())


class RunPlace(FolderPlace):
    """A copy as a run folder."""

    own_folders = FOLDERS

    def make_beside(self, clock: Callable[[], float]) -> MakeDestination:
        def make(about: SourceRun, writer: str, rank: int) -> RunDirectory:
            options: dict[str, Any] = {"all_ranks": bool(rank)}
            if writer:
                options |= {
                    "run_id": about.run_id,
                    "tags": about.tags,
                    "notes": about.notes,
                    "writer": writer,
                }
            return RunDirectory(
                self.folder,
                clock=clock,
                if_exists="resume",
                keep_files="copy",
                close_seconds=_BLOCKING["close_seconds"],
                **options,
            )

        return make

    def _locks(self) -> Iterator[Path]:
        for stream in streams_of(self.folder):
            yield from stream.folder.glob(".lock*")

    def check_restart(self) -> None:
        super().check_restart()
        position = read_ledger(self.ledger_path).get("position")
        sent = {
            *writers_of(self.run.path),
            *(position.get("writers", {}) if isinstance(position, dict) else ()),
        }
        for name in writers_of(self.folder):
            if name not in sent:
                raise SendingError(
                    f"target {str(self.folder)!r} is to be replaced, but contains rows of writer {name!r}, "
                    "which were not sent. Move them elsewhere, or choose another folder."
                )

    def finish(self, run: RecordedRun) -> None:
        """Copies the environment and sessions of the original run."""
        from destinations.history.sessions import SESSIONS, SESSIONS_FOLDER
        from destinations.run_directory.layout import ENVIRONMENT

        names = []
        for stream in streams_of(run.record.path):
            names += [stream.prefix + ENVIRONMENT, stream.prefix + SESSIONS]
            documents = (stream.folder / SESSIONS_FOLDER).glob("*")
            names += [f"{stream.prefix}{SESSIONS_FOLDER}/{path.name}" for path in documents]
        for name in names:
            try:
                source = open_regular(path_inside(run.record.path, name))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                _log.warning("left out %s of run %s: %s", name, run.record.run_id, error)
                continue
            (self.folder / name).parent.mkdir(exist_ok=True)
            with closing(source), replacement(self.folder / name) as copy:
                copy_all(source, copy)


class _RunFolder(Target):
    """A folder with a run folder for each run."""

    places = ("FOLDER",)
    own_files = KNOWN

    def make(self, tracker: type, shared: Mapping[str, Any]) -> Any:
        given = {
            "run_id": self.run.run_id,
            "tags": self.run.tags,
            "notes": self.run.notes,
            "if_exists": "resume",
            "keep_files": "copy",
            "close_seconds": shared["close_seconds"],
            "clock": shared["clock"],
        }
        return tracker(self.place, **{**given, **self.options})


_RUN = _Kind("run", RunDirectory, _RunFolder, RunPlace)


def run_place(
    root: Path,
    run: SentRun,
    options: Mapping[str, Any],
    *,
    tracker: type[RunDirectory],
    folder: Path,
) -> RunPlace:
    """Returns the place of a run in a folder of run folders.

    Args:
        root: the folder of run folders.
        run: the run.
        options: further arguments of `RunDirectory`.
        tracker: the class of its destination.
        folder: the folder of the run.
    """
    target = _RunFolder(os.fspath(root), run, options)
    return RunPlace(attrs.evolve(_RUN, tracker=tracker), target, Path(), folder)


def _kinds() -> dict[str, _Kind]:
    """Returns the kinds of targets by name: `run`, and every tracker."""
    found = {"run": _RUN}
    for name, tracker in trackers().items():
        place = Place if tracker.target.own_files is None else FolderPlace
        found.setdefault(name, _Kind(name, tracker, tracker.target, place))
    return found


def help_text() -> str:
    """Returns the targets with the options of each."""
    lines = ["targets, and the options of each:"]
    for kind in _kinds().values():
        lines.append(f"  {' or '.join(kind.forms)}")
        lines += textwrap.wrap(kind.options, 88, initial_indent="      ", subsequent_indent="      ")
    return "\n".join((*lines, ""))


def place_of(text: str, record: RunRecord, cache: Path, options: Mapping[str, Any]) -> Place:
    """Parses a target.

    Raises:
        TargetError: invalid target.
    """
    name, separator, where = text.partition(":")
    kinds = _kinds()
    kind = kinds.get(name)
    if kind is None or bool(where) != bool(separator) or bool(where) != (":" in kind.forms[0]):
        *others, last = (one.forms[0] for one in kinds.values())
        raise TargetError(f"unknown target {text!r}; expected {', '.join(others)} or {last}.")
    run = SentRun(record.run_id, record.name, record.path, record.tags, record.notes)
    return kind.place(kind, kind.target(where, run, options), cache)
