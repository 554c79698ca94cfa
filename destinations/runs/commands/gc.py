"""`gc`: which run folders could go, and, when told to, their deletion."""

import argparse
import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import attrs

from destinations.run_directory.layout import (
    ARTIFACTS_INDEX,
    HISTOGRAMS_INDEX,
    MEDIA_INDEX,
    SIDECAR,
    TABLES_INDEX,
    TEXTS_INDEX,
    TRACES_INDEX,
    metrics_name,
)
from destinations.runs import RunRecord, is_alive

from .fields import status_of, status_style
from .running import EXIT_FAILED, EXIT_OK, open_selected
from .screen import Session
from .table import Cell, Column, table_lines
from .text import age_text, bytes_text

__all__ = ["gc"]

_INDEXES = (ARTIFACTS_INDEX, HISTOGRAMS_INDEX, MEDIA_INDEX, TABLES_INDEX, TEXTS_INDEX, TRACES_INDEX)
_SUCCESS = {"completed", "finished"}


@attrs.frozen
class Candidate:
    """A folder that could go."""

    record: RunRecord
    reason: str
    untouched_seconds: float
    size: int


def gc(options: argparse.Namespace, session: Session) -> int:
    """Shows what could go, and deletes it with `--delete`."""
    with open_selected(options, session) as runs:
        found = list(_candidates(runs.records(archived=None), options.older_than, session.clock()))
        failed = {}
        if options.delete:
            for candidate in found:
                try:
                    _delete(candidate.record.path)
                except OSError as error:
                    failed[candidate.record.path] = str(error)
            runs.scan()
    if options.json:
        session.screen.json(
            [
                {
                    "run_id": one.record.run_id,
                    "path": str(one.record.path),
                    "reason": one.reason,
                    "bytes": one.size,
                    "deleted": options.delete and one.record.path not in failed,
                }
                for one in found
            ]
        )
    else:
        _show(found, options, session)
    for path, problem in failed.items():
        session.note(f"run folder must be one that can be deleted, got {str(path)!r}: {problem}.")
    return EXIT_FAILED if failed else EXIT_OK


def _show(found: list[Candidate], options: argparse.Namespace, session: Session) -> None:
    screen = session.screen
    if not found:
        session.note("nothing to delete")
        return
    columns = [
        Column("run", is_whole=True),
        Column("status"),
        Column("why"),
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
    session.note(
        f"{len(found)} runs, {total}: {'deleted' if options.delete else 'nothing was deleted; add --delete to delete them for good'}"
    )


def _candidates(records: list[RunRecord], older_than: float, now: float) -> Iterator[Candidate]:
    for record in records:
        # A folder that is not there any more, or a link to one elsewhere, is not ours to delete.
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
            yield Candidate(record, reason, now - touched_at, size)


def _why_empty(record: RunRecord) -> str | None:
    """Says that a run is of no use to anybody: it ended without success, and nothing was logged that is still there."""
    if record.status in _SUCCESS or record.summary or record.checkpoint_path or record.notes:
        return None
    # A folder that cannot be read well is for people to look at.
    if record.problem or not (record.path / SIDECAR).is_file():
        return None
    has_rows = any(
        _has_content(path) for path in (record.path / metrics_name(0), *record.path.glob("metrics*.csv"))
    )
    has_rows = has_rows or any((record.path / "journal").rglob("*.journal"))
    has_records = any(_has_content(record.path / name) for name in _INDEXES)
    return (
        None
        if has_rows or has_records or any(record.path.rglob("*.ckpt"))
        else "ended without success, empty"
    )


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _size_and_time(folder: Path) -> tuple[int, float]:
    """Returns how large a folder is, and when something in it was last changed."""
    size, touched_at = 0, folder.stat().st_mtime
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(parent, name))  # noqa: PTH118  # a Path for each file takes four times as long
                size += about.st_size if name in names else 0
                touched_at = max(touched_at, about.st_mtime)
    return size, touched_at


def _delete(folder: Path) -> None:
    """Deletes a folder; what is interrupted half-way is no run any more, and goes with the next `gc --delete`."""
    doomed = folder.with_name(f".deleted-{folder.name}-{uuid.uuid4().hex[:8]}")
    folder.rename(doomed)
    shutil.rmtree(doomed)
