"""Reading the metrics of a run, also while it is being written: the CSV, and what the journal has beyond it.

Reads and never writes. No row is returned twice, and none is left out whose call had returned before the reading began,
whatever the writer does meanwhile, and however it ended.
"""

import csv
import io
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from .csv_text import number, parse_header
from .frames import Boundary, Resume
from .layout import OWN_COLUMNS, column_of
from .snapshot import CsvPart, take_snapshot

__all__ = [
    "MetricRow",
    "csv_rows",
    "has_any",
    "last_csv_rows",
    "last_rows",
    "read_rows",
    "read_series",
    "rows_of",
    "with_journal",
    "within_float",
]


@attrs.frozen
class MetricRow:
    """One row: what was logged by one call, or by several of one step."""

    step: int | None
    epoch: float | None
    time: float | None
    metrics: dict[str, float]


def read_rows(run_dir: Path | str, rank: int = 0) -> list[MetricRow]:
    """Returns all rows of a rank, oldest first, with their metrics by column.

    Args:
        run_dir: the folder of the run.
        rank: whose rows; others than rank 0 have some only where the run was made with `all_ranks=True`.
    """
    with take_snapshot(Path(run_dir), rank) as snapshot:
        rows = list(rows_of(parse_header(snapshot.csv.header), snapshot.csv.read()))
        return with_journal(rows, snapshot.records)


def read_series(run_dir: Path | str, name: str, rank: int = 0) -> list[tuple[int | None, float]]:
    """Returns step and value of every row that has a metric."""
    column = column_of(name)
    return [(row.step, row.metrics[column]) for row in read_rows(run_dir, rank) if column in row.metrics]


def last_rows(
    run_dir: Path | str, count: int, rank: int = 0, wanted: Collection[str] = ()
) -> list[MetricRow]:
    """Returns the last rows of a rank, oldest first, reading the CSV from its end; see `read_rows`.

    The file of another program may name its columns anew in the middle: it is read from its beginning, in little memory.

    Args:
        run_dir: the folder of the run.
        count: how many at most.
        rank: whose rows.
        wanted: columns; rows that have none of them do not count. All rows where empty.
    """
    with take_snapshot(Path(run_dir), rank) as snapshot:
        resumes = [record for record in snapshot.records if isinstance(record, Resume)]
        found = deque(_wanted(with_journal([], snapshot.records), wanted, ()), maxlen=count)
        in_csv = last_csv_rows(snapshot.csv, count - len(found), wanted, resumes)
        return [*in_csv, *found]


def last_csv_rows(
    csv_part: CsvPart, count: int, wanted: Collection[str] = (), resumes: Sequence[Resume] = ()
) -> list[MetricRow]:
    """Returns the last rows of a CSV, oldest first, without those that a resume drops; see `last_rows`."""
    if count <= 0:
        return []
    columns = parse_header(csv_part.header)
    pieces: list[list[MetricRow]] = []
    if tuple(columns[: len(OWN_COLUMNS)]) == OWN_COLUMNS:
        for chunk in csv_part.chunks_from_end():
            if b'"' in chunk:
                break  # A quoted cell may hold the end of a line.
            pieces.append(list(_wanted(rows_of(list(columns), chunk), wanted, resumes)))
            if sum(map(len, pieces)) >= count:
                return [row for piece in reversed(pieces) for row in piece][-count:]
        else:
            return [row for piece in reversed(pieces) for row in piece]
    rows = itertools.chain.from_iterable(rows_of(columns, chunk) for chunk in csv_part.chunks())
    return list(deque(_wanted(rows, wanted, resumes), maxlen=count))


def _wanted(
    rows: Iterable[MetricRow], wanted: Collection[str], resumes: Sequence[Resume]
) -> Iterator[MetricRow]:
    for row in rows:
        time = float("nan") if row.time is None else row.time
        if any(resume.drops(row.step, time) for resume in resumes):
            continue
        if has_any(row, wanted):
            yield row


def has_any(row: MetricRow, wanted: Collection[str]) -> bool:
    """Says whether a row has one of some columns; of none, any row has."""
    return not wanted or any(name in row.metrics for name in wanted)


def csv_rows(data: bytes, header_bytes: int) -> Iterator[MetricRow]:
    """Returns the rows of a CSV; cells that hold no number are left out.

    Args:
        data: the file, up to where it counts.
        header_bytes: how long its first line is.
    """
    return rows_of(parse_header(data[:header_bytes]), data[header_bytes:])


def rows_of(columns: list[str], body: bytes) -> Iterator[MetricRow]:
    """Returns the rows of whole lines; lines that cannot be understood are rows without metrics, or left out.

    Args:
        columns: what the first line named. A line that names columns, as some programs write when they go on in a file, replaces
            the content of this list.
        body: the lines.
    """
    reader = csv.reader(io.StringIO(body.decode("utf-8", "replace"), newline=""))
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:  # A line that is too long to be one of numbers.
            continue
        found = {
            column: value
            for column, cell in zip(columns, cells, strict=False)
            if cell and (value := number(cell)) is not None
        }
        if not found and any(cell in OWN_COLUMNS for cell in cells):
            columns[:] = cells
            continue
        step, epoch, time = (found.pop(name, None) for name in OWN_COLUMNS)
        yield MetricRow(_whole(step), within_float(epoch), within_float(time), found)


def within_float(value: Any) -> Any:
    """Returns a number that is surely within what a float holds: an integer that is not becomes infinite."""
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    return value


def _whole(step: float | None) -> int | None:
    try:
        return None if step is None else int(step)
    except (ValueError, OverflowError):  # NaN and infinities.
        return None


def with_journal(rows: list[MetricRow], records: tuple[object, ...]) -> list[MetricRow]:
    """Adds what the journal has to the rows of the CSV, as the writer would have."""
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
