"""`gc`: lists run folders that can be deleted, and deletes them with `--delete`. `rm`: deletes named runs.

`gc` deletes only files that a run wrote: those of `run_directory.layout`, and those listed in the indexes of
the run. A folder that contains anything else, such as code, weights or another run, is kept, and the command
says why.
"""

import argparse
import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from destinations.run_directory.layout import (
    ABANDONED_FOLDER,
    ARTIFACTS_FOLDER,
    ARTIFACTS_INDEX,
    EDITS,
    ENVIRONMENT,
    HEARTBEAT,
    HISTOGRAMS_INDEX,
    HPARAMS,
    JOURNAL_FOLDER,
    MEDIA_FOLDER,
    MEDIA_INDEX,
    SESSIONS,
    SIDECAR,
    SUMMARY,
    TABLES_FOLDER,
    TABLES_INDEX,
    TEXTS_INDEX,
    TRACES_INDEX,
    metrics_name,
)
from destinations.runs import Run, RunNotFoundError, RunRecord, is_alive
from destinations.runs.files import json_lines
from destinations.runs.record import status_of
from uploads.disk import is_locked

from .fields import status_style
from .running import EXIT_FAILED, EXIT_OK, UsageError, find_runs, open_selected
from .screen import Cell, Column, CommandContext, age_text, bytes_text, table_lines

__all__ = ["gc", "rm"]

_INDEXES = (ARTIFACTS_INDEX, HISTOGRAMS_INDEX, MEDIA_INDEX, TABLES_INDEX, TEXTS_INDEX, TRACES_INDEX)
# "unknown" may well be a success.
_KEPT_STATUSES = {"completed", "stopped", "finished", "unknown"}
_WEIGHTS = frozenset(
    (
        ".bin",
        ".ckpt",
        ".distcp",
        ".gguf",
        ".ggml",
        ".h5",
        ".hdf5",
        ".joblib",
        ".keras",
        ".mlmodel",
        ".msgpack",
        ".npy",
        ".npz",
        ".onnx",
        ".orbax",
        ".pb",
        ".pickle",
        ".pkl",
        ".pt",
        ".pt2",
        ".pte",
        ".pth",
        ".safetensors",
        ".tflite",
        ".torchscript",
        ".weights",
    )
)
_NAMES = {SIDECAR, SUMMARY, HEARTBEAT, HPARAMS, ENVIRONMENT, SESSIONS, EDITS, *_INDEXES, ".lock"}
# Paths relative to the run folder; for the names of temporary files see `uploads.disk.open_temporary`.
_KNOWN = re.compile(
    "|".join(
        (
            *map(re.escape, sorted(_NAMES)),
            r"(metrics|summary)(\.rank\d+)?\.(csv|json)",
            r"\.lock\.rank\d+",
            rf"{ABANDONED_FOLDER}/\.?metrics(\.rank\d+)?\.step-?\d+(\.[0-9a-f]+\.csv|\.tmp)",
            rf"{JOURNAL_FOLDER}/rank\d+/(\d+\.journal|position\.json|spare[\w.-]*|\.[\w.-]+\.tmp)",
            r"\.(sidecar|summary|hparams|environment|sessions|edits|metrics|reserve)[\w.-]*\.tmp",
        )
    )
)
_FOLDERS = re.compile(
    rf"({MEDIA_FOLDER}|{TABLES_FOLDER}|{ARTIFACTS_FOLDER})(/.*)?"
    rf"|{ABANDONED_FOLDER}|{JOURNAL_FOLDER}(/rank\d+)?"
)
# Deleted last: an interrupted deletion leaves a run that the next `gc --delete` recognizes.
_LAST = (EDITS, SIDECAR)


class _KeptError(Exception):
    """The folder must not be deleted; the message is the reason."""


@attrs.frozen
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
        found = list(_candidates(runs.records(archived=None), options.older_than, session.clock()))
        failed: dict[Path, str] = {}
        if options.delete:
            for number, candidate in enumerate(found):
                if candidate.kept is None:
                    try:
                        _delete(candidate.record.path, session.clock())
                    except _KeptError as error:
                        found[number] = attrs.evolve(candidate, kept=str(error))
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
    screen = session.screen
    if not found:
        session.note("nothing to delete")
        return
    columns = [
        Column("run", is_whole=True),
        Column("status"),
        Column("reason"),
        Column("untouched", is_right=True),
    ]
    columns += [Column("size", is_right=True), Column("path")]
    rows = [
        [
            Cell(one.record.run_id),
            Cell(status := status_of(one.record, session.clock()), status_style(status)),
            Cell(one.reason),
            Cell(age_text(one.untouched_seconds)),
            Cell(bytes_text(one.size)),
            Cell(str(one.record.path)),
        ]
        for one in found
    ]
    screen.lines(table_lines(columns, rows, screen))
    total = bytes_text(sum(one.size for one in found))
    outcome = "deleted" if options.delete else "not deleted; add --delete to delete them permanently"
    session.note(f"{len(found)} runs, {total}: {outcome}")


def _candidates(records: list[RunRecord], older_than: float, now: float) -> Iterator[Candidate]:
    for record in records:
        # Missing folders and symbolic links are not ours to delete.
        if (
            is_alive(record.status, record.heartbeat_at, now)
            or record.path.is_symlink()
            or not record.path.is_dir()
        ):
            continue
        reason = "archived" if record.archived else _why_empty(record)
        if reason is None:
            continue
        size, touched_at = _size_and_time(record.path)
        if now - touched_at >= older_than:
            yield Candidate(record, reason, now - touched_at, size, _why_kept(record.path))


def _why_empty(record: RunRecord) -> str | None:
    """Returns a reason if the run did not complete and contains nothing that was logged, else None."""
    if record.status in _KEPT_STATUSES or record.summary or record.checkpoint_path or record.notes:
        return None
    # A damaged folder is left for a person to inspect.
    if record.problem or not (record.path / SIDECAR).is_file():
        return None
    has_rows = any(
        _has_content(path) for path in (record.path / metrics_name(0), *record.path.glob("metrics*.csv"))
    )
    has_rows = has_rows or any((record.path / JOURNAL_FOLDER).rglob("*.journal"))
    has_records = any(_has_content(record.path / name) for name in _INDEXES)
    return (
        None if has_rows or has_records or _has_checkpoints(record.path) else "ended without success, empty"
    )


def _has_checkpoints(folder: Path) -> bool:
    try:
        return any(_is_weights(name) for name, is_folder in _content(folder) if not is_folder)
    except OSError:
        # An unreadable folder may contain anything.
        return True


def _is_weights(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in _WEIGHTS


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _content(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yields (relative path, is folder) for everything below a folder, contents first; links count as files.

    Raises:
        OSError: part of it cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, topdown=False, onerror=refuse):
        base = os.path.relpath(parent, folder)
        prefix = "" if base == "." else f"{base}/"
        # os.path is four times as fast here as a Path per file.
        paths = {name: os.path.join(parent, name) for name in folders}  # noqa: PTH118
        links = [name for name, path in paths.items() if os.path.islink(path)]  # noqa: PTH114
        yield from ((f"{prefix}{name}", False) for name in (*names, *links))
        if prefix:
            yield base, True


def _why_kept(folder: Path) -> str | None:
    try:
        _files_to_delete(folder)
    except _KeptError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def _files_to_delete(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the files of a run and the folders that contain nothing else, deepest first.

    Raises:
        _KeptError: the folder contains something else.
        OSError: part of it cannot be read.
    """
    files, folders = [], []
    named = _named_by_indexes(folder)
    for name, is_folder in _content(folder):
        if is_folder:
            if not _FOLDERS.fullmatch(name):
                raise _KeptError(f"it contains {name}/, which is not part of a run")
            folders.append(name)
        elif _is_weights(name):
            raise _KeptError(f"it contains {name}, which looks like model weights")
        elif not _KNOWN.fullmatch(name) and name not in named:
            raise _KeptError(f"it contains {name}, which was not written by a run")
        else:
            files.append(name)
    return files, folders


def _named_by_indexes(folder: Path) -> set[str]:
    """Returns the files listed in the indexes of a run."""
    named: set[str] = set()
    for index in (MEDIA_INDEX, TABLES_INDEX, ARTIFACTS_INDEX):
        for line in json_lines(folder / index, with_torn=True):
            waiting: list[Any] = [line]
            while waiting:
                value = waiting.pop()
                if isinstance(value, dict):
                    named.update(
                        str(value[key]) for key in ("path", "overlay") if isinstance(value.get(key), str)
                    )
                    waiting.extend(value.values())
    return {name for name in named if PurePosixPath(name).parts[:1] in _RECORD_FOLDERS}


_RECORD_FOLDERS = {(MEDIA_FOLDER,), (TABLES_FOLDER,), (ARTIFACTS_FOLDER,)}


def _size_and_time(folder: Path) -> tuple[int, float]:
    """Returns the size of a folder in bytes and the time of its last change."""
    size, touched_at = 0, folder.stat().st_mtime
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(parent, name))  # noqa: PTH118  # as above
                size += about.st_size if name in names else 0
                touched_at = max(touched_at, about.st_mtime)
    return size, touched_at


def _is_written(record: RunRecord, now: float) -> bool:
    return is_alive(record.status, record.heartbeat_at, now) or any(
        map(is_locked, record.path.glob(".lock*"))
    )


def _delete(folder: Path, now: float) -> None:
    """Deletes the files of a run and its folder, after checking everything again."""
    try:
        record = Run.open(folder).record
    except RunNotFoundError:
        raise _KeptError("it is no longer a run") from None
    if _is_written(record, now):
        raise _KeptError("it is being written")
    files, folders = _files_to_delete(folder)
    for name in [*(name for name in files if name not in _LAST), *(name for name in _LAST if name in files)]:
        (folder / name).unlink()
    # Fails for a folder that something was added to meanwhile.
    for name in folders:
        (folder / name).rmdir()
    folder.rmdir()


def rm(options: argparse.Namespace, session: CommandContext) -> int:
    """Deletes runs with everything in their folders, after asking."""
    runs = find_runs(options.run_name, options, session)
    paths = list(dict.fromkeys(run.path.resolve() for run in runs))
    for run in runs:
        _require_removable(run, session.clock())
    if not options.yes:
        for path in paths:
            size, _ = _size_and_time(path)
            session.note(f"{path}: {sum(1 for _ in _content(path))} entries, {bytes_text(size)}")
        if session.ask is None:
            raise UsageError("cannot ask without a terminal. Add --yes to delete these runs.")
        what = "this run" if len(paths) == 1 else f"these {len(paths)} runs"
        if session.ask(f"Delete {what} permanently? [y/N] ").strip().lower() not in {"y", "yes"}:
            session.note("nothing was deleted")
            return EXIT_FAILED
    deleted = []
    for run, path in zip(runs, (run.path.resolve() for run in runs), strict=True):
        if path.exists():
            # Again: it may have been resumed while the question was open.
            _require_removable(Run.open(path), session.clock())
            shutil.rmtree(path)
            deleted.append({"run_id": run.record.run_id, "path": str(path)})
    if options.json:
        session.screen.json(deleted)
    else:
        session.screen.lines(f"deleted {one['path']}" for one in deleted)
    return EXIT_OK


def _require_removable(run: Run, now: float) -> None:
    record, folder = run.record, run.path
    if _is_written(record, now):
        raise UsageError(f"run {record.run_id} is running, and was not deleted. Stop it first.")
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"run {record.run_id} was not deleted: {str(folder)!r} is no folder of its own.")
    nested = next((path.parent for path in folder.rglob(SIDECAR) if path.parent != folder), None)
    if nested is not None:
        raise UsageError(f"run {record.run_id} was not deleted: another run is in {str(nested)!r}.")
