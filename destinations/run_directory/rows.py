"""Reading the metrics of a run, also while it is being written: the CSV, and what the journal has beyond it.

Reads and never writes. No row is returned twice, and none is left out whose call had returned before the reading began,
whatever the writer does meanwhile, and however it ended.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from .csv_text import number, parse_header
from .frames import Boundary, Resume
from .layout import OWN_COLUMNS, column_of
from .snapshot import take_snapshot

__all__ = ["MetricRow", "csv_rows", "read_rows", "read_series", "rows_of", "with_journal", "within_float"]


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
