"""Reading the metrics of a run, also while it is being written: the CSV, and what the journal has beyond it.

Reads and never writes. No row is returned twice, and none is left out whose call had returned before the reading began,
whatever the writer does meanwhile, and however it ended.
"""

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from .csv_text import header_end, number, parse_header
from .frames import MAGIC, Boundary, Keys, Resume, frames
from .layout import (
    OWN_COLUMNS,
    POSITION,
    Position,
    column_of,
    journal_path,
    metrics_name,
    segment_number,
    segment_paths,
)

__all__ = ["MetricRow", "csv_rows", "read_rows", "read_series"]

_TRIES = 100


@attrs.frozen
class MetricRow:
    """One row: what was logged by one call, or by several of one step."""

    step: int | None
    epoch: float | None
    time: float | None
    metrics: dict[str, float]


@attrs.frozen
class _Snapshot:
    """What the files held at one moment."""

    csv: bytes
    header_bytes: int
    records: tuple[object, ...]


def read_rows(run_dir: Path | str, rank: int = 0) -> list[MetricRow]:
    """Returns all rows of a rank, oldest first, with their metrics by column.

    Args:
        run_dir: the folder of the run.
        rank: whose rows; others than rank 0 have some only where the run was made with `all_ranks=True`.
    """
    run_dir = Path(run_dir)
    for _ in range(_TRIES):
        snapshot = _snapshot(run_dir, rank)
        if snapshot is not None:
            break
    else:
        raise RuntimeError(
            f"metrics in {run_dir} must stand still for a moment, got a new file each of {_TRIES} times. Try again."
        )
    rows = list(csv_rows(snapshot.csv, snapshot.header_bytes))
    return _with_journal(rows, snapshot.records)


def read_series(run_dir: Path | str, name: str, rank: int = 0) -> list[tuple[int | None, float]]:
    """Returns step and value of every row that has a metric."""
    column = column_of(name)
    return [(row.step, row.metrics[column]) for row in read_rows(run_dir, rank) if column in row.metrics]


def csv_rows(data: bytes, header_bytes: int) -> Iterator[MetricRow]:
    """Returns the rows of a CSV; cells that hold no number are left out.

    Args:
        data: the file, up to where it counts.
        header_bytes: how long its first line is.
    """
    columns = parse_header(data[:header_bytes])
    text = data[header_bytes:].decode("utf-8", "replace")
    for cells in csv.reader(io.StringIO(text, newline="")):
        found = {
            column: value
            for column, cell in zip(columns, cells, strict=False)
            if cell and (value := number(cell)) is not None
        }
        step, epoch, time = (found.pop(name, None) for name in OWN_COLUMNS)
        yield MetricRow(
            None if step is None else int(step),
            epoch,
            time,
            found,
        )


def _snapshot(run_dir: Path, rank: int) -> _Snapshot | None:
    """Reads everything once; None where the writer replaced or took away a file meanwhile."""
    folder = journal_path(run_dir, rank)
    position = Position.read(folder / POSITION)
    data = _read(run_dir / metrics_name(rank))
    size, header_bytes = len(data), header_end(data)
    segment, offset = 0, len(MAGIC)
    if position is not None:
        state = position.state_of(data[:header_bytes], len(data))
        if state is None and data and Position.read(folder / POSITION) != position:
            return None
        known = state or position.states[-1]
        segment, offset = known.segment, known.offset
        if state is not None:
            data = data[: state.csv_bytes]
    if position is None or state is None:
        data = data[: data.rfind(b"\n") + 1]
    records, last = _journal_records(folder, segment, offset)
    after = Position.read(folder / POSITION)
    if after is None and position is None:
        # A CSV that was only just begun, or that somebody else wrote; unless a whole session took place meanwhile.
        is_same = len(_read(run_dir / metrics_name(rank))) == size
        return _Snapshot(data, header_bytes, tuple(records)) if is_same else None
    if after is None or position is None or after.generation != position.generation:
        return None
    drained_beyond = any(state.segment > last for state in after.states)
    return None if drained_beyond else _Snapshot(data, header_bytes, tuple(records))


def _journal_records(folder: Path, segment: int, offset: int) -> tuple[list[object], int]:
    """Returns what the segments hold from a place on, and the number of the last one that was read."""
    records: list[object] = []
    last = segment
    while True:
        paths = [path for path in segment_paths(folder) if segment_number(path) >= segment]
        if not paths:
            return records, last
        # Listed before it is read: what is complete now cannot grow while it is read.
        has_successor = len(paths) > 1
        path = paths[0]
        start = offset if segment_number(path) == segment else len(MAGIC)
        records += _segment_records(path, start)
        last = segment_number(path)
        if not has_successor:
            return records, last
        segment, offset = last + 1, len(MAGIC)


def _segment_records(path: Path, start: int) -> Iterator[object]:
    """Returns the records of a segment from an offset on; rows as names, step, epoch, time and values."""
    names: dict[int, tuple[str, ...]] = {}
    data = _read(path)
    if not data.startswith(MAGIC):
        return
    for end, record in frames(data, len(MAGIC)):
        if isinstance(record, Keys):
            names[record.schema] = record.names
        elif end <= start:
            continue
        elif isinstance(record, tuple):
            schema, *rest, values = record
            if len(names.get(schema, ())) == len(values):
                yield (names[schema], *rest, values)
        else:
            yield record


def _with_journal(rows: list[MetricRow], records: tuple[object, ...]) -> list[MetricRow]:
    """Adds what the journal has, as the writer would have."""
    may_join = False
    for record in records:
        if isinstance(record, Resume):
            rows = [
                row
                for row in rows
                if not record.drops(row.step, float("nan") if row.time is None else row.time)
            ]
            may_join = False
        elif isinstance(record, Boundary):
            may_join = False
        elif isinstance(record, tuple):
            names, step, epoch, time, values = record
            metrics = {
                column_of(name): int(value) if isinstance(value, bool) else value
                for name, value in zip(names, values, strict=True)
            }
            epoch = metrics.pop("epoch", epoch)
            before = rows[-1] if may_join else None
            if (
                before
                and before.step == step
                and before.epoch == epoch
                and before.metrics.keys().isdisjoint(metrics)
            ):
                rows[-1] = MetricRow(step, epoch, time, {**before.metrics, **metrics})
            else:
                rows.append(MetricRow(step, epoch, time, metrics))
            may_join = True
    return rows


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read()
