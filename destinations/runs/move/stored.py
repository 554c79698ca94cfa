"""Reads a run folder as a source: everything, or only new data since a position. Never writes to it."""

import contextlib
import itertools
import operator
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from destinations.history.chain import Chain
from destinations.history.cursor import Cursor
from destinations.history.fork import lineage
from destinations.history.rows import MetricRow
from destinations.history.snapshot import metric_columns, take_snapshot
from destinations.kinds import KINDS, indexes, kind_of_line
from destinations.kinds.artifacts import ARTIFACTS_INDEX
from destinations.kinds.line import Line
from destinations.kinds.media import MEDIA_INDEX
from destinations.run_directory.layout import SIDECAR, column_of, label_name
from destinations.runs.content.rank_reader import RankReader
from destinations.runs.content.sources import ranks_of
from destinations.runs.errors import RunNotFoundError
from destinations.runs.files import json_lines, number_of, read_object_file, whole_of
from destinations.runs.run import RecordedRun
from destinations.runs.streams import Stream, by_time, reported, streams_of

from .ledger import ReadPosition
from .stream import Logged, Record, SourceRun, Values

# Metrics that are stored in a column of another name.
_NAMES = {column_of(name): name for name in ("step", "time")}
# A call writes its lines one by one, so the last call of a live run may be incomplete.
_SETTLED_SECONDS = 5.0


class RewoundError(Exception):
    """Rows yielded before are no longer in the run, because training resumed from a checkpoint."""


class StoredRun:
    """Reads a run folder; each read returns only new data.

    Args:
        run: the run.
        position: where reading begins, updated when it ends. Default: the beginning.

    Attributes:
        source: the run as a source.
        settled_at: the current time while the run is followed: calls of the last seconds wait for their
            remaining lines.
        is_over: whether to use the recorded status of the run; otherwise the status is "preempted".
    """

    def __init__(self, run: RecordedRun, position: ReadPosition | None = None) -> None:
        self.run = run
        self.settled_at: float | None = None
        self.is_over = True
        self._path = run.record.path
        self._position = ReadPosition() if position is None else position
        self.source = _source_of(run)
        self.source.read = lambda _: self._read()
        self.source.names = lambda: _names_of_trainer(self._path)
        self.refresh()

    def refresh(self) -> None:
        """Reads the current state of the run and its writers; keeps the last one if the run is gone."""
        with contextlib.suppress(RunNotFoundError):
            self.run = self.run.reload()
        for writer in self.run.writer_runs():
            about = self.source.writers.setdefault(writer.path.name, _source_of(writer))
            _update(about, writer, is_over=self.is_over)
        _update(self.source, self.run, is_over=self.is_over)

    def _read(self) -> Iterator[Record]:
        for record in records_of(self._path, self._position, self.settled_at, about=self.source):
            if record.writer and record.writer not in self.source.writers:
                self.refresh()
            yield record


def _source_of(run: RecordedRun) -> SourceRun:
    """Returns a run or writer as a source, without reading it."""
    return SourceRun(
        run.run_id,
        _name_inside(run.record.name),
        f"{run.record.kind} {run.record.path}",
        "",
        lambda _run: iter(()),
        tags=tuple(run.tags),
        notes=run.notes,
    )


def _update(about: SourceRun, run: RecordedRun, *, is_over: bool) -> None:
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
    """Returns the name of a run, sanitized so that a path made from it stays inside its folder."""
    parts = name.split("/")
    return label_name(name) if {"..", "."} & {*parts} or not parts[0] or "\0" in name else name


# Records.


def records_of(
    run_dir: Path,
    position: ReadPosition,
    settled_at: float | None = None,
    *,
    about: SourceRun | None = None,
) -> Iterator[Values | Logged]:
    """Yields the records of all writers after a position, oldest first, and updates the position.

    Args:
        run_dir: the folder of the run.
        position: updated when the iteration ends.
        settled_at: the current time, for a live run: calls of the last seconds wait for their remaining
            lines.
        about: gets the problems. Default: they are logged.

    Raises:
        RewoundError: rows yielded before are gone.
    """
    problems = None if about is None else about.problems
    sources: list[Iterator[Values | Logged]] = []
    positions: dict[str, ReadPosition] = {}
    for stream in streams_of(run_dir):
        own = position
        if stream.writer:
            own = positions[stream.writer] = ReadPosition(**position.writers.get(stream.writer, {}))
        reader = _StreamReader(stream, own, settled_at, about)
        sources += [_reported(one, stream, problems) for one in reader.sources()]
    yield from by_time(sources, operator.attrgetter("time"))
    position.writers |= {name: attrs.asdict(own) for name, own in positions.items()}


def _reported(
    records: Iterator[Values | Logged], stream: Stream, problems: list[str] | None
) -> Iterator[Values | Logged]:
    with reported(stream, problems=problems):
        yield from records


class _StreamReader:
    """Reads the records of one writer after a position."""

    def __init__(
        self, stream: Stream, position: ReadPosition, settled_at: float | None, about: SourceRun | None
    ) -> None:
        self._folder, self._writer = stream.folder, stream.writer
        self._position = position
        self._settled_at = settled_at
        self._unknown = Counter[str]() if about is None else about.left_out
        self._lost = Counter[str]() if about is None else about.lost

    def sources(self) -> list[Iterator[Values | Logged]]:
        """Returns an iterator of records for each file."""
        ranks = dict.fromkeys([0, *ranks_of(self._folder)])
        found: list[Iterator[Values | Logged]] = [self._new_rows(rank) for rank in ranks]
        *parents, (_, chain) = lineage(self._folder)
        for path, of_parent in parents:
            found += [self._new_lines(path / name, of_parent, f"{path.name}/") for name in indexes()]
        return found + [self._new_lines(self._folder / name, chain) for name in indexes()]

    def _new_rows(self, rank: int) -> Iterator[Values]:
        known = self._position.rows.get(str(rank))
        reader = RankReader(self._folder, rank, None if known is None else Cursor.from_json(known))
        with reader.look() as look:
            if look.taken_back:
                raise RewoundError
            for row in look.new_rows():
                if row.metrics:
                    yield self._values_of(row, rank)
            if look.taken_back:
                raise RewoundError
        self._position.rows = {**self._position.rows, str(rank): reader.cursor.to_json()}

    def _values_of(self, row: MetricRow, rank: int) -> Values:
        metrics = row.metrics
        if not _NAMES.keys().isdisjoint(metrics):
            metrics = {_NAMES.get(name, name): value for name, value in metrics.items()}
        return Values(metrics, row.step, row.time, row.epoch, rank, self._writer)

    def _new_lines(self, path: Path, chain: Chain, prefix: str = "") -> Iterator[Logged]:
        """Yields the records of an index; a prefix marks a parent's index."""
        lines, name, key = self._position.lines, path.name, prefix + path.name
        begin = lines.get(key, 0)
        last = _last_of_each(path) if name == ARTIFACTS_INDEX else {}
        belongs = chain.belongs(lambda: json_lines(path))
        pending: list[dict[str, Any]] = []
        count = 0
        for number, line in enumerate(itertools.islice(json_lines(path), begin, None), begin):
            if pending and not _is_of_same_call(pending[-1], line):
                lines[key] = lines.get(key, 0) + count
                yield from self._record_of(path, pending)
                pending, count = [], 0
            count += 1
            self._lost[f"damaged lines of {name}"] += line is None
            # Skips artifacts that were overwritten or deleted, and records that don't belong to the run.
            is_last = line is not None and last.get(str(line.get("name")), number) == number
            if line is not None and is_last and line.get("is_deleted") is not True and belongs(line):
                pending.append(line)
        if pending and not prefix and name == MEDIA_INDEX and self._may_grow(pending[-1]):
            return
        if count:
            lines[key] = lines.get(key, 0) + count
        yield from self._record_of(path, pending)

    def _may_grow(self, line: dict[str, Any]) -> bool:
        """Returns whether the last call of a live run may still write more lines."""
        written_at = number_of(line.get("time"))
        if self._settled_at is None or written_at is None:
            return False
        return self._settled_at - written_at < _SETTLED_SECONDS

    def _record_of(self, path: Path, found: list[dict[str, Any]]) -> Iterator[Logged]:
        """Yields the record of one call's lines, if there are any."""
        if not found:
            return
        first, kind = Line(path.parent, found[0]), kind_of_line(path.name, found[0])
        if kind is None:
            self._unknown[str(first.fields.get("type"))] += 1
            return

        def arguments() -> dict[str, Any]:
            lines = [Line(path.parent, fields) for fields in found]
            given = {**kind.replay(lines), "caption": first.text("caption")}
            return {name: value for name, value in given.items() if "caption" not in name or value}

        size = sum(max(0, whole_of(fields.get("size")) or 0) for fields in found)
        yield Logged(kind, first.name, first.step, first.time, arguments, self._writer, size)


def _last_of_each(path: Path) -> dict[str, int]:
    """Returns the index of the last line of each name."""
    return {str(line.get("name")): number for number, line in enumerate(json_lines(path)) if line is not None}


def _is_of_same_call(one: dict[str, Any], other: dict[str, Any] | None) -> bool:
    if other is None:
        return True
    return (
        any(kind.is_grouped and kind.name == other.get("type") for kind in KINDS)
        and all(one.get(key) == other.get(key) for key in ("type", "name", "tag", "step", "time"))
        and (index := whole_of(one.get("index"))) is not None
        and other.get("index") == index + 1
    )
