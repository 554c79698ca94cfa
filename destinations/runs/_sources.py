"""What a run folder holds, as calls to be made again: rows of metrics and the lines of its indexes, in the order of their times.

Reads and never writes. A `Position` says what was handed on before, so that a run that is being written can be read again and
again, and each thing comes once.
"""

import heapq
import itertools
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.csv_text import parse_header
from destinations.run_directory.frames import Resume
from destinations.run_directory.layout import (
    ARTIFACTS_INDEX,
    HISTOGRAMS_INDEX,
    MEDIA_INDEX,
    TABLES_INDEX,
    TEXTS_INDEX,
    TRACES_INDEX,
)
from destinations.run_directory.rows import MetricRow, rows_of, with_journal
from destinations.run_directory.snapshot import take_snapshot

__all__ = ["INDEXES", "Item", "Position", "RewoundError", "items_of"]

INDEXES = (MEDIA_INDEX, TABLES_INDEX, HISTOGRAMS_INDEX, TEXTS_INDEX, TRACES_INDEX, ARTIFACTS_INDEX)

# Lines of one call are written one after the other; while a run is alive, its last call may not have all of them yet.
_SETTLED_SECONDS = 5.0
# What one call of a `log_*` method makes several lines of.
_GROUPED = {"image", "point_cloud"}


class RewoundError(Exception):
    """What was handed on before is not what the run holds now: training went back to a checkpoint."""


@attrs.define
class Position:
    """What was handed on before.

    Rows of one step may be one row in the CSV, or several, and change from the one to the other when they leave the journal. What
    stays is a group of rows, those of one step and epoch that follow each other, and how many values it has.

    Attributes:
        values: how many values all groups before the last one have.
        crc32: of step, epoch and number of values of each of these groups.
        step: of the last group.
        epoch: of the last group.
        names: how often each metric was handed on of the last group.
        lines: how many lines of each index were handed on.
    """

    values: int = 0
    crc32: int = 0
    step: int | None = None
    epoch: float | None = None
    names: dict[str, int] = attrs.field(factory=dict)
    lines: dict[str, int] = attrs.field(factory=dict)


@attrs.frozen
class Item:
    """One call to be made again.

    Attributes:
        kind: "metrics", "image", "audio", "video", "point_cloud", "table", "histogram", "text", "traces" or "artifact".
        time: when it was logged, in seconds since 1970; None where the run does not say.
        step: its step; None where it has none.
        epoch: its epoch; None where it is not known.
        metrics: the values, for metrics.
        lines: the lines of the index, for everything else; several where one call made them.
    """

    kind: str
    time: float | None
    step: int | None
    epoch: float | None = None
    metrics: dict[str, float] = attrs.field(factory=dict)
    lines: tuple[dict[str, Any], ...] = ()


def items_of(run_dir: Path, position: Position, settled_at: float | None = None) -> Iterator[Item]:
    """Yields what is new since a position, oldest first, and moves the position on.

    Args:
        run_dir: the folder of the run.
        position: what was handed on before; changed as items are taken.
        settled_at: for a run that is being written, the time now: calls of a few seconds ago wait for their last lines.

    Raises:
        RewoundError: rows that were handed on are not there any more.
    """
    sources: list[Iterator[Item]] = [_new_rows(_rows(run_dir), position)]
    sources += [_new_lines(run_dir / name, name, position, settled_at) for name in INDEXES]
    streams = [_timed(source) for source in sources]
    for _, item in heapq.merge(*streams, key=lambda pair: pair[0]):
        yield item


def _timed(items: Iterable[Item]) -> Iterator[tuple[float, Item]]:
    """Adds to each item a time to sort by, which never falls, so that the order of a source stays."""
    latest = -math.inf
    for item in items:
        if item.time is not None and item.time > latest:
            latest = item.time
        yield latest, item


# --- rows ----------------------------------------------------------------------------------------------------------


def _rows(run_dir: Path) -> Iterator[MetricRow]:
    """Yields the rows of rank 0, one chunk of the file at a time."""
    with take_snapshot(run_dir, 0) as snapshot:
        columns = parse_header(snapshot.csv.header)
        in_csv = itertools.chain.from_iterable(rows_of(columns, chunk) for chunk in snapshot.csv.chunks())
        if any(isinstance(record, Resume) for record in snapshot.records):
            # It may take rows of the CSV back.
            yield from with_journal(list(in_csv), snapshot.records)
        else:
            yield from in_csv
            yield from with_journal([], snapshot.records)


def _new_rows(rows: Iterable[MetricRow], position: Position) -> Iterator[Item]:
    before = attrs.evolve(position)
    values = crc32 = 0
    is_found = not before.values and not before.names
    for key, group in itertools.groupby(rows, key=_group_of):
        held = list(group)
        size = sum(len(row.metrics) for row in held)
        if not size:
            continue
        already: Counter[str] = Counter()
        if not is_found and values == before.values:
            if crc32 != before.crc32 or key != (before.step, before.epoch):
                raise RewoundError
            is_found, already = True, Counter(before.names)
        if is_found:
            position.values, position.crc32, (position.step, position.epoch) = values, crc32, key
            position.names = dict(already)
            yield from _new_in_group(held, already, position)
        values += size
        crc32 = zlib.crc32(repr((key, size)).encode(), crc32)
    if not is_found:
        raise RewoundError


def _new_in_group(rows: list[MetricRow], already: Counter[str], position: Position) -> Iterator[Item]:
    """Yields rows without what was handed on of their group before."""
    skip = Counter(already)
    for row in rows:
        new = {}
        for name, value in row.metrics.items():
            if skip[name] > 0:
                skip[name] -= 1
            else:
                new[name] = value
                position.names[name] = position.names.get(name, 0) + 1
        if new:
            yield Item("metrics", row.time, row.step, row.epoch, metrics=new)


def _group_of(row: MetricRow) -> tuple[int | None, float | None]:
    # The journal has whole numbers where the CSV has any.
    return row.step, None if row.epoch is None or math.isnan(row.epoch) else float(row.epoch)


# --- indexes -------------------------------------------------------------------------------------------------------


def _new_lines(path: Path, name: str, position: Position, settled_at: float | None) -> Iterator[Item]:
    lines = itertools.islice(_json_lines(path), position.lines.get(name, 0), None)
    last = _last_of_each(path) if name == ARTIFACTS_INDEX else {}
    waiting: list[dict[str, Any]] = []
    count = 0

    def item() -> Item:
        position.lines[name] = position.lines.get(name, 0) + count
        first = waiting[0]
        kind = str(first.get("type")) if name == MEDIA_INDEX else _KINDS[name]
        return Item(kind, _time_of(first), _step_of(first), lines=tuple(waiting))

    for number, line in enumerate(lines, position.lines.get(name, 0)):
        if waiting and not _is_of_same_call(waiting[-1], line):
            yield item()
            waiting, count = [], 0
        count += 1
        # Of a file that was written over, the first state is gone.
        if line is not None and last.get(str(line.get("name")), number) == number:
            waiting.append(line)
    if waiting:
        written_at = _time_of(waiting[-1])
        is_settled = settled_at is None or written_at is None or settled_at - written_at >= _SETTLED_SECONDS
        if is_settled or name != MEDIA_INDEX:
            yield item()
    elif count:
        position.lines[name] = position.lines.get(name, 0) + count


_KINDS = {
    TABLES_INDEX: "table",
    HISTOGRAMS_INDEX: "histogram",
    TEXTS_INDEX: "text",
    TRACES_INDEX: "traces",
    ARTIFACTS_INDEX: "artifact",
}


def _json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the whole lines of an index; None for one that is damaged."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with file:
        for text in file:
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            yield line if isinstance(line, dict) else None


def _last_of_each(path: Path) -> dict[str, int]:
    """Returns the number of the last line of each name."""
    return {
        str(line.get("name")): number for number, line in enumerate(_json_lines(path)) if line is not None
    }


def _is_of_same_call(one: dict[str, Any], other: dict[str, Any] | None) -> bool:
    if other is None:
        return True
    return (
        other.get("type") in _GROUPED
        and all(one.get(key) == other.get(key) for key in ("type", "name", "tag", "step", "time"))
        and one.get("index") is not None
        and other.get("index") == int(one["index"]) + 1
    )


def _time_of(line: dict[str, Any]) -> float | None:
    value = line.get("time")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _step_of(line: dict[str, Any]) -> int | None:
    value = line.get("step")
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else None


def path_inside(run_dir: Path, relative: str) -> Path:
    """Returns a file that an index names.

    Raises:
        FileNotFoundError: it is not there, or not inside the folder of the run.
    """
    path = run_dir / relative
    inside = os.path.realpath(run_dir) + os.sep
    if not os.path.realpath(path).startswith(inside) or not path.is_file():
        raise FileNotFoundError(f"file of a record must be in the folder of its run, got {relative!r}.")
    return path
