"""`gc`: lists run folders that can be deleted, and deletes them with `--delete`. `rm`: deletes named runs.

`gc` deletes only files that a run wrote: files named in `run_directory.layout`, or listed in the indexes of
the run. A folder that contains anything else, such as code, weights or another run, is kept, and the command
says why.

The index only knows where a run was. So before anything is deleted, the folder is opened, its id is compared
with the index, and its locks are taken. Files are deleted through the open folder, so a run that starts at
the same path meanwhile loses nothing.
"""

import argparse
import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import attrs

from destinations.history.fork import forks_of
from destinations.kinds import indexes, record_folders
from destinations.run_directory.layout import (
    EDITS,
    JOURNAL_FOLDER,
    SIDECAR,
    WRITERS_FOLDER,
    lock_name,
    metrics_name,
)
from destinations.runs import RecordedRun, RunNotFoundError, RunRecord, is_alive, open_runs
from destinations.runs.files import json_lines, read_object
from destinations.runs.index.bucket import BucketCopy
from destinations.runs.own_files import FOLDERS, KNOWN, LOCK
from destinations.runs.record import read_sidecar, status_of
from destinations.runs.streams import Stream, streams_of
from uploads.disk import (
    ABSENT,
    closing,
    is_locked,
    is_open_file,
    open_regular,
    read_json,
    read_regular,
    try_lock,
)

from .fields import status_style
from .running import EXIT_FAILED, EXIT_OK, UsageError, find_runs, given_roots, open_selected
from .screen import Cell, Column, CommandContext, age_text, bytes_text, numbers

if TYPE_CHECKING:
    from destinations.runs.dataset import Dataset

__all__ = ["gc", "rm"]

# "unknown" may well be a success.
_KEPT_STATUSES = {"completed", "stopped", "finished", "unknown"}
_WEIGHTS = re.compile(
    r"\.(bin|ckpt|distcp|gg(uf|ml)|h5|hdf5|joblib|keras|mlmodel|msgpack|np[yz]|onnx|orbax|pb|pickle|pkl"
    r"|pt[2eh]?|safetensors|tflite|torchscript|weights)",
    re.IGNORECASE,
)
# Deleted last: an interrupted deletion leaves a run that the next `gc --delete` recognizes.
_LAST = (EDITS, SIDECAR)
# `os.fwalk` takes a descriptor and a frame for each level.
_MAX_DEPTH = 500


class _KeptError(Exception):
    """The folder must not be deleted; the message is the reason."""


class _WrittenError(_KeptError):
    """A process writes to the run."""

    def __init__(self) -> None:
        super().__init__("it is being written")


@attrs.define
class Candidate:
    """A folder that may be deleted.

    Attributes:
        record: the run.
        reason: why it may be deleted.
        untouched_seconds: time since the last change in the folder.
        size: bytes.
        kept: why it is kept nevertheless, or None.
    """

    record: RunRecord
    reason: str
    untouched_seconds: float
    size: int
    kept: str | None


def gc(options: argparse.Namespace, session: CommandContext) -> int:
    """Lists the candidates, and deletes them with `--delete`."""
    with open_selected(options, session) as runs:
        _check_are_folders(runs.copies, is_dataset=not runs.roots)
        found = list(_candidates(runs.records(archived=None), options.older_than, session.clock()))
        failed: dict[Path, str] = {}
        if options.delete:
            for candidate in [one for one in found if one.kept is None]:
                try:
                    _collect(candidate.record, session.clock())
                except _KeptError as error:
                    candidate.kept = str(error)
                except OSError as error:
                    failed[candidate.record.path] = str(error)
            runs.scan()
    if options.json:
        session.screen.json([_as_json(one, options, failed) for one in found])
    else:
        _show([one for one in found if one.kept is None], options, session)
        for one in found:
            if one.kept is not None:
                session.note(f"kept {one.record.path}: {one.kept}")
    for path, problem in failed.items():
        session.note(f"cannot delete {str(path)!r}: {problem}.")
    return EXIT_FAILED if failed else EXIT_OK


def _check_are_folders(copies: Iterable[BucketCopy | None], *, is_dataset: bool = False) -> None:
    """Rejects runs in a store, where only a copy would be deleted, and datasets, which have no folders."""
    if is_dataset:
        raise UsageError("a dataset has no folders. Delete its runs with `destinations runs rm`.")
    for copy in copies:
        if copy is not None:
            raise UsageError(
                f"runs in {copy.uri} are deleted by the tools of the store, not by this command."
            )


def _as_json(one: Candidate, options: argparse.Namespace, failed: dict[Path, str]) -> dict[str, Any]:
    return {
        "run_id": one.record.run_id,
        "path": str(one.record.path),
        "reason": one.reason,
        "bytes": one.size,
        "kept": one.kept,
        "deleted": options.delete and one.kept is None and one.record.path not in failed,
    }


def _show(found: list[Candidate], options: argparse.Namespace, session: CommandContext) -> None:
    if not found:
        session.note("nothing to delete")
        return
    columns: list[Column | str] = [
        Column("run", is_whole=True),
        "status",
        "reason",
        *numbers("untouched", "size"),
        "path",
    ]
    rows = [
        (
            one.record.run_id,
            Cell(status := status_of(one.record, session.clock()), status_style(status)),
            *(one.reason, age_text(one.untouched_seconds), bytes_text(one.size), str(one.record.path)),
        )
        for one in found
    ]
    session.screen.table(columns, rows)
    total = bytes_text(sum(one.size for one in found))
    outcome = "deleted" if options.delete else "not deleted; add --delete to delete them permanently"
    session.note(f"{len(found)} runs, {total}: {outcome}")


def _candidates(records: list[RunRecord], older_than: float, now: float) -> Iterator[Candidate]:
    for record in records:
        # Missing folders and symbolic links are skipped.
        if record.path.is_symlink() or not record.path.is_dir():
            continue
        reason, untouched, size, kept = "unknown", 0.0, 0, None
        try:
            found = None if _is_written(RecordedRun(record), now) else _why_deletable(record)
            if found is None:
                continue
            reason, (size, touched_at) = found, _size_and_time(record.path)
            untouched = now - touched_at
            if untouched < older_than:
                continue
            _require_unforked(record.path, record.run_id)
            _names_to_delete(record.path)
        except _KeptError as error:
            kept = str(error)
        except OSError as error:
            kept = f"it cannot be read: {error}"
        yield Candidate(record, reason, untouched, size, kept)


def _why_deletable(record: RunRecord) -> str | None:
    """Returns a reason if the run is archived, or did not complete and contains nothing that was logged."""
    if record.archived:
        return "archived"
    if record.status in _KEPT_STATUSES or record.summary or record.checkpoint_path or record.notes:
        return None
    # A damaged folder is left for a person to inspect.
    if record.problem or not (record.path / SIDECAR).is_file():
        return None
    has_weights = any(_is_weights(name) for name, is_folder in _content(record.path) if not is_folder)
    has_logged = has_weights or any(map(_has_logged, streams_of(record.path)))
    return None if has_logged else "ended without success, empty"


def _has_logged(stream: Stream) -> bool:
    """Returns whether there are rows or records of a writer."""
    folder = stream.folder
    has_rows = any(_has_content(path) for path in (folder / metrics_name(0), *folder.glob("metrics*.csv")))
    has_rows = has_rows or any((folder / JOURNAL_FOLDER).rglob("*.journal"))
    return has_rows or any(_has_content(folder / name) for name in indexes())


def _is_weights(name: str) -> bool:
    return _WEIGHTS.fullmatch(PurePosixPath(name).suffix) is not None


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except ABSENT:
        return False


def _content(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yields (relative path, is folder) for everything below a folder; links count as files.

    Raises:
        OSError: part of it cannot be read, or is nested too deeply.
    """
    waiting = [""]
    while waiting:
        base = waiting.pop()
        if base.count("/") > _MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, "its folders are nested too deeply", str(folder))
        # os.path is four times as fast here as a Path per file.
        with os.scandir(os.path.join(folder, base)) as entries:  # noqa: PTH118
            for one in entries:
                is_folder = one.is_dir(follow_symlinks=False)
                yield f"{base}{one.name}", is_folder
                if is_folder:
                    waiting.append(f"{base}{one.name}/")


def _names_to_delete(folder: Path) -> list[str]:
    """Returns the files of a run and the folders that contain nothing else.

    Raises:
        _KeptError: the folder contains something else.
        OSError: part of it cannot be read.
    """
    names = []
    named = _named_by_indexes(folder)
    for name, is_folder in _content(folder):
        if is_folder:
            if not FOLDERS.fullmatch(name):
                raise _KeptError(f"it contains {name}/, which is not part of a run")
        elif _is_weights(name):
            raise _KeptError(f"it contains {name}, which looks like model weights")
        elif not KNOWN.fullmatch(name) and name not in named:
            raise _KeptError(f"it contains {name}, which was not written by a run")
        names.append(name)
    return names


def _named_by_indexes(folder: Path) -> set[str]:
    """Returns the files listed in the indexes of a run."""
    return {stream.prefix + name for stream in streams_of(folder) for name in _named_by(stream)}


def _named_by(stream: Stream) -> set[str]:
    named: set[str] = set()
    for index in indexes(with_files=True):
        for line in json_lines(stream.folder / index, with_torn=True):
            waiting: list[Any] = [line]
            while waiting:
                value = waiting.pop()
                if isinstance(value, dict):
                    named.update(
                        str(value[key]) for key in ("path", "overlay") if isinstance(value.get(key), str)
                    )
                    waiting.extend(value.values())
    return {name for name in named if PurePosixPath(name).parts[:1] in _RECORD_FOLDERS}


_RECORD_FOLDERS = {(folder,) for folder in record_folders()}


def _size_and_time(folder: Path) -> tuple[int, float]:
    """Returns the size of a folder in bytes and the time of its last change."""
    size, touched_at = 0, folder.stat().st_mtime
    for name, is_folder in _content(folder):
        with contextlib.suppress(OSError):
            about = os.lstat(os.path.join(folder, name))  # noqa: PTH118  # as above
            size += 0 if is_folder else about.st_size
            touched_at = max(touched_at, about.st_mtime)
    return size, touched_at


def _is_written(run: RecordedRun, now: float) -> bool:
    """Returns whether the trainer or a writer of the run is alive."""
    records = (one.record for one in (run, *run.writer_runs()))
    return any(is_alive(record.status, record.heartbeat_at, now) for record in records)


def _require_ended(run: RecordedRun, now: float) -> None:
    if _is_written(run, now):
        raise _WrittenError


def _require_unforked(folder: Path, run_id: str, others: Collection[str] = ()) -> None:
    """Raises `_KeptError` for a run whose rows a fork beside it needs; `others` go with it."""
    if forks := [name for name in forks_of(folder, run_id) if name not in others]:
        raise _KeptError(f"{', '.join(forks)} was forked from it and needs its rows")


def _collect(record: RunRecord, now: float) -> None:
    """Deletes a run and its folder, after checking everything again; raises `_KeptError`."""
    _require_unforked(record.path, record.run_id)

    def what_goes(folder: Path) -> Collection[str]:
        found = _run_in(folder)
        _require_ended(found, now)
        if _why_deletable(found.record) is None:
            raise _KeptError("it is no longer archived or empty")
        return _names_to_delete(folder)

    with _opened(record) as held:
        _delete(record.path, *held, what_goes)


def rm(options: argparse.Namespace, session: CommandContext) -> int:
    """Deletes runs with everything in their folders, or from a dataset, after asking."""
    if roots := given_roots(options, session):
        from destinations.runs.dataset.reading import Dataset

        with open_runs(*roots, scan=False, clock=session.clock) as opened:
            if isinstance(opened, Dataset):
                return _rm_of_dataset(opened, options, session)
    return _rm_folders(options, session)


def _rm_folders(options: argparse.Namespace, session: CommandContext) -> int:
    found = find_runs(options.run_name, options, session)
    _check_are_folders(run.copy for run in found)
    runs = list({run.path.resolve(): run for run in found}.items())
    now = session.clock

    def what_goes(folder: Path) -> Collection[str]:
        _require_ended(_run_in(folder), now())
        return _names_without_run(folder)

    with contextlib.ExitStack() as stack:
        # Deletes only the runs that the user confirmed, even if their paths have other content by now.
        held = []
        for path, run in runs:
            with _refusing(run):
                if run.path.is_symlink():
                    raise _KeptError(f"{str(run.path)!r} is no folder of its own")
                if not options.force:
                    _require_unforked(path, run.run_id, {other.name for other, _ in runs})
                record = attrs.evolve(run.record, path=path)
                held.append(stack.enter_context(_opened(record)))
                what_goes(held[-1][1])
                if any(is_locked(held[-1][1] / name) for name in _lock_names(held[-1][1])):
                    raise _WrittenError
        sizes = {path: _size_and_time(one)[0] for (path, _), (_, one) in zip(runs, held, strict=True)}
        if not _is_confirmed(sizes, options, session):
            return EXIT_FAILED
        deleted = []
        for (path, run), one in zip(runs, held, strict=True):
            with _refusing(run):
                _delete(path, *one, what_goes)
            deleted.append({"run_id": run.record.run_id, "path": str(path)})
    if options.json:
        session.screen.json(deleted)
    else:
        session.screen.lines(f"deleted {one['path']}" for one in deleted)
    return EXIT_OK


def _is_confirmed(sizes: dict[Path, int], options: argparse.Namespace, session: CommandContext) -> bool:
    for path, size in () if options.yes else sizes.items():
        session.note(f"{path}: {sum(1 for _ in _content(path))} entries, {bytes_text(size)}")
    what = "this run" if len(sizes) == 1 else f"these {len(sizes)} runs"
    return _is_agreed(f"Delete {what} permanently? [y/N] ", options, session)


def _is_agreed(question: str, options: argparse.Namespace, session: CommandContext) -> bool:
    """Returns whether the user wants to delete, as `--yes` says without a question."""
    if options.yes:
        return True
    if session.ask is None:
        raise UsageError("cannot ask without a terminal. Add --yes to delete these runs.")
    if session.ask(question).strip().lower() in {"y", "yes"}:
        return True
    session.note("nothing was deleted")
    return False


def _rm_of_dataset(dataset: "Dataset", options: argparse.Namespace, session: CommandContext) -> int:
    """Deletes runs from a dataset; their folders are kept."""
    found = list({run.run_id: run for run in map(dataset.__getitem__, options.run_name)}.values())
    names = ", ".join(run.name for run in found)
    if not _is_agreed(f"Delete {names} from {dataset.uri}? [y/N] ", options, session):
        return EXIT_FAILED
    dataset.delete(found)
    if options.json:
        session.screen.json([{"run_id": run.run_id, "path": str(run.path)} for run in found])
    else:
        session.screen.lines(f"deleted {run.run_id} from {dataset.uri}" for run in found)
    return EXIT_OK


@contextlib.contextmanager
def _refusing(run: RecordedRun) -> Iterator[None]:
    try:
        yield
    except _WrittenError as error:
        raise UsageError(
            f"run {run.record.run_id} is running, and was not deleted. Stop it first."
        ) from error
    except _KeptError as error:
        raise UsageError(f"run {run.record.run_id} was not deleted: {error}.") from error


def _names_without_run(folder: Path) -> list[str]:
    """Returns everything below the folder of a run; raises `_KeptError` if another run is there."""
    names = [name for name, _ in _content(folder)]
    own = {SIDECAR, *(f"{stream.prefix}{SIDECAR}" for stream in streams_of(folder) if _is_of_writer(stream))}
    for name in names:
        if PurePosixPath(name).name == SIDECAR and name not in own:
            raise _KeptError(f"another run is in {str(PurePosixPath(name).parent)!r} of its folder")
    return names


def _is_of_writer(stream: Stream) -> bool:
    """Returns whether a folder has the sidecar of this writer; another run may be there."""
    return read_json(stream.folder / SIDECAR).get("writer") == stream.writer


# Deleting through open folders.


@contextlib.contextmanager
def _opened(record: RunRecord) -> Iterator[tuple[int, Path]]:
    """Yields a descriptor of the folder of a run, and a path that always leads to this folder.

    Raises:
        _KeptError: another run or no run is there.
    """
    try:
        fd = os.open(record.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise _KeptError("it is no longer a run") from None
    with closing(fd):
        through = Path(f"/proc/self/fd/{fd}")
        path = through if through.is_dir() else record.path
        found = _id_in(path)
        if found not in {None, record.run_id}:
            raise _KeptError(f"another run, {found}, is now at {str(record.path)!r}")
        yield fd, path


def _id_in(folder: Path) -> str | None:
    """Returns the id that a run has in its folder; None if its sidecar is missing or damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found: str = read_sidecar(read_object(read_regular(folder / SIDECAR)), dict)["run_id"]
    except (*ABSENT, ValueError):
        return None
    return found


def _run_in(folder: Path) -> RecordedRun:
    try:
        return RecordedRun.open(folder)
    except RunNotFoundError:
        raise _KeptError("it is no longer a run") from None


def _delete(place: Path, fd: int, folder: Path, what_goes: Callable[[Path], Collection[str]]) -> None:
    """Deletes files and folders of a run, then its folder, while holding its locks.

    Args:
        place: the path at which the folder was found.
        fd: the descriptor of the folder.
        folder: a path that always leads to the folder.
        what_goes: returns the names to delete below the folder, or raises `_KeptError`. Called once before
            anything changes, and once with the locks.

    Raises:
        _KeptError: the folder is kept.
        OSError: something can't be deleted, or was added meanwhile.
    """
    if not is_open_file(fd)(str(place)):
        raise _KeptError("its folder was moved")
    what_goes(folder)
    locks = _lock_names(folder)
    holders = {parent for name in locks if (parent := name.rpartition("/")[0])}
    holders |= {WRITERS_FOLDER} if holders else set()
    with contextlib.ExitStack() as held:
        for name in sorted(locks):
            held.enter_context(_locked(folder / name))
        _unlink(fd, {*what_goes(folder)} - locks - holders)
    # Here and below, `rmdir` only removes empty folders.
    if holders:
        _unlink(fd, holders)
    place.rmdir()


def _lock_names(folder: Path) -> set[str]:
    """Returns the locks of a run and of its writers, by their path in its folder."""
    names = set()
    for stream in streams_of(folder):
        found = (path.name for path in stream.folder.glob(".lock*") if LOCK.fullmatch(path.name))
        # Resuming a run takes the lock of rank 0, whether its file exists or not.
        names |= {f"{stream.prefix}{name}" for name in (lock_name(0), *found)}
    return names


def _unlink(fd: int, names: Collection[str]) -> None:
    """Deletes these names below a folder, contents first; follows no links."""
    for parent, folders, files, parent_fd in os.fwalk(".", topdown=False, dir_fd=fd):
        prefix = parent.removeprefix(".").removeprefix("/") + "/" * (parent != ".")
        for name in sorted((*files, *folders), key=lambda name: (name in _LAST, name)):
            if prefix + name not in names:
                continue
            is_folder = stat.S_ISDIR(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode)
            (os.rmdir if is_folder else os.unlink)(name, dir_fd=parent_fd)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock of a run, and removes its file at the end.

    On file systems without locks, the file itself is the lock of a writer that starts now.

    Raises:
        _KeptError: a process holds the lock.
    """
    with closing(open_regular(path, os.O_RDWR | os.O_CREAT, 0o666)) as fd:
        is_mine = True
        with contextlib.suppress(OSError):
            is_mine = try_lock(fd)
        if not is_mine or not is_open_file(fd)(str(path)):
            raise _WrittenError
        try:
            yield
        finally:
            # Only the holder of a lock may replace its file.
            if is_open_file(fd)(str(path)):
                path.unlink()
