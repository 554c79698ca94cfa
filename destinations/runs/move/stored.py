"""A run folder as a source: everything that is in it, or what is new since a position."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from destinations.history.snapshot import metric_columns, take_snapshot
from destinations.kinds import KINDS
from destinations.kinds.line import Line
from destinations.run_directory.layout import SIDECAR, column_of, label_name, writer_path
from destinations.runs.content.sources import Item, ReadPosition, items_of, ranks_of
from destinations.runs.errors import RunNotFoundError
from destinations.runs.files import read_object_file, whole_of
from destinations.runs.run import Run

from .stream import Logged, Record, SourceRun, Values

__all__ = ["StoredRun"]

# Metrics that are stored in a column of another name.
_NAMES = {column_of(name): name for name in ("step", "time")}


class StoredRun:
    """Reads a run folder; never writes.

    Args:
        run: the run.
        position: where reading begins, updated when it ends. Default: the beginning.
        abandoned: whether to read branches that were left, too.

    Attributes:
        source: the run as a source.
        settled_at: the present time, while the run is followed: a call of the last seconds waits for the
            lines that it may still write.
        is_over: whether the run ends as it says; otherwise it is "preempted".
    """

    def __init__(self, run: Run, position: ReadPosition | None = None, *, abandoned: bool = False) -> None:
        self.run = run
        self.settled_at: float | None = None
        self.is_over = True
        self._path = run.record.path
        self._position = ReadPosition() if position is None else position
        self._abandoned = abandoned
        self.source = _source_of(run)
        self.source.read = lambda _: self._read()
        self.source.names = lambda: _names_of_trainer(self._path)
        self.refresh()

    def refresh(self) -> None:
        """Takes the state that the run and its writers have now; the last known one of a run that is gone."""
        with contextlib.suppress(RunNotFoundError):
            self.run = self.run.reload()
        for writer in self.run.writer_runs():
            about = self.source.writers.setdefault(writer.path.name, _source_of(writer))
            _update(about, writer, is_over=self.is_over)
        _update(self.source, self.run, is_over=self.is_over)

    def _read(self) -> Iterator[Record]:
        items = items_of(
            self._path,
            self._position,
            self.settled_at,
            abandoned=self._abandoned,
            problems=self.source.problems,
        )
        for item in items:
            if item.writer and item.writer not in self.source.writers:
                self.refresh()
            if item.kind == "metrics":
                metrics = item.metrics
                if not _NAMES.keys().isdisjoint(metrics):
                    metrics = {_NAMES.get(name, name): value for name, value in metrics.items()}
                about = item.step, item.time, item.epoch, item.rank, item.writer, item.branch
                yield Values(metrics, *about)
            elif (record := self._record_of(item)) is not None:
                yield record
            else:
                self.source.left_out[item.kind] += 1

    def _record_of(self, item: Item) -> Logged | None:
        kind = next((kind for kind in KINDS if kind.name == item.kind), None)
        if kind is None:
            return None
        folder = item.parent or writer_path(self._path, item.writer)
        lines = [Line(folder, fields) for fields in item.lines]

        def arguments() -> dict[str, Any]:
            found = {**kind.replay(lines), "caption": lines[0].text("caption")}
            return {name: value for name, value in found.items() if "caption" not in name or value}

        size = sum(max(0, whole_of(fields.get("size")) or 0) for fields in item.lines)
        return Logged(kind, lines[0].name, item.step, item.time, arguments, item.writer, size)


def _source_of(run: Run) -> SourceRun:
    """Returns what is known of a run or writer without reading it."""
    return SourceRun(
        run.run_id,
        _name_inside(run.record.name),
        f"{run.record.kind} {run.record.path}",
        "",
        lambda _run: iter(()),
        tags=tuple(run.tags),
        notes=run.notes,
    )


def _update(about: SourceRun, run: Run, *, is_over: bool) -> None:
    record = run.record
    about.created_at = run.created_at or 0.0
    about.hyperparameters = run.hyperparameters
    if not is_over:
        about.status, about.exception, about.ended_at = "preempted", "", None
        return
    about.ended_at = record.ended_at or record.heartbeat_at or record.updated_at
    about.status, about.exception = "completed", ""
    if run.status in {"interrupted", "preempted", "stopped"}:
        about.status = run.status
    elif run.status in {"failed", "killed", "orphaned"} or (run.status == "running" and record.heartbeat_at):
        exception = read_object_file(run.record.path / SIDECAR).get("exception")
        about.status, about.exception = "failed", str(exception or "Killed: the heartbeat stopped")


def _names_of_trainer(run_dir: Path) -> list[str]:
    if 0 not in ranks_of(run_dir):
        return []
    with take_snapshot(run_dir, 0) as snapshot:
        return metric_columns(snapshot)


def _name_inside(name: str) -> str:
    """Returns the name of a run, sanitized so that as part of a path it stays inside a folder."""
    parts = name.split("/")
    return label_name(name) if {"..", "."} & {*parts} or not parts[0] or "\0" in name else name
