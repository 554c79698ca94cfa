"""`MetricRow`: which calls share a row, how text and journal become rows, and which rows count."""

from __future__ import annotations

import csv
import functools
import io
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from destinations.run_directory.layout import OWN_COLUMNS, column_of, parse_number, whole_number

from .row_chain import Limit, drops

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = [
    "Call",
    "MetricRow",
    "has_any_metric",
    "is_sound",
    "keeps",
    "merge_journal",
    "parse_rows",
    "row_of",
    "row_of_cells",
]


class Call(NamedTuple):
    """A call of `log_metrics`, or several consecutive ones that share a row.

    They share it if step and epoch are the same, no metric is in two of them, none is named `epoch`, and
    nothing is between them in the journal: no checkpoint, and no end of a segment.
    """

    names: tuple[str, ...]
    step: int | None
    epoch: int | None
    time: float
    values: Any
    """A tuple of numbers, or float64 `(metrics,)`."""

    def joined(self, later: Call) -> Call | None:
        """Returns the row of both calls, with the time of the later one; None if they share no row."""
        if self.step != later.step or self.epoch != later.epoch or self.names is later.names:
            return None
        names = _joined(self.names, later.names)
        if names is None:
            return None
        # numpy's numbers are formatted differently.
        values = self.values if isinstance(self.values, tuple) else self.values.tolist()
        return later._replace(names=names, values=(*values, *later.values))


# Always returns the same tuple, since it is the key of a row's formatter.
@functools.lru_cache(maxsize=256)
def _joined(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...] | None:
    columns = [column_of(name) for name in first + second]
    is_shared = "epoch" not in columns and len(set(columns)) == len(columns)
    return first + second if is_shared else None


@attrs.frozen
class MetricRow:
    """One row, logged by one call or by several calls of one step.

    ```python
    row = read_rows("runs/digits")[-1]
    print(row.step, row.metrics["loss"])  # 3 0.25
    ```
    """

    step: int | None
    epoch: float | None
    time: float | None
    metrics: dict[str, float]
    writer: str = ""
    """The name of the row's writer, if a reader of a run with several writers sets it; else ""."""


def row_of_cells(found: dict[str, float]) -> MetricRow:
    """Returns a row from the numbers of a line by column."""
    step, epoch, time = (found.pop(name, None) for name in OWN_COLUMNS)
    return MetricRow(whole_number(step), epoch, time, found)


def parse_rows(columns: list[str], pieces: Iterable[bytes]) -> Iterator[MetricRow]:
    """Yields the rows of complete lines; invalid lines become rows without metrics, or are skipped.

    Args:
        columns: the columns of the header. Some programs repeat the header when they continue a file; such a
            line replaces the content of this list.
        pieces: the lines, in pieces of whole lines.
    """
    lines = (io.StringIO(piece.decode("utf-8", "replace"), newline="") for piece in pieces)
    reader = csv.reader(itertools.chain.from_iterable(lines))
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:  # A line too long to consist of numbers.
            continue
        found = {
            column: value
            for column, cell in zip(columns, cells, strict=False)
            if cell and (value := parse_number(cell)) is not None
        }
        if not found and cells:
            cells[0] = cells[0].removeprefix("\ufeff")
            if any(cell in OWN_COLUMNS for cell in cells):
                columns[:] = cells
                continue
        yield row_of_cells(found)


@functools.lru_cache(maxsize=64)
def _columns_of(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(column_of, names))


def row_of(
    names: Sequence[str], step: int | None, epoch: float | None, time: float, values: Sequence[float]
) -> MetricRow:
    """Returns a row of the journal as it will be in the CSV."""
    # The CSV has 1 for True.
    numbers = [int(value) if type(value) is bool else value for value in values]
    metrics = dict(zip(_columns_of(tuple(names)), numbers, strict=True))
    return MetricRow(step, metrics.pop("epoch", epoch), time, metrics)


def merge_journal(records: Iterable[object]) -> list[MetricRow]:
    """Returns the rows that the writer will make from a session's records."""
    rows: list[MetricRow] = []
    pending: Call | None = None
    for record in records:
        both = pending.joined(record) if pending and isinstance(record, Call) else None
        if pending and both is None:
            rows.append(row_of(*pending))
        pending = both or (record if isinstance(record, Call) else None)
    return [*rows, row_of(*pending)] if pending else rows


def is_sound(row: MetricRow) -> bool:
    """Returns whether a row isn't blank; lines of damaged blocks are."""
    return bool(row.metrics) or (row.step, row.time) != (None, None)


def keeps(limit: Limit | None, row: MetricRow) -> bool:
    """Returns whether a row counts within a limit."""
    if limit is None:
        return True
    step, time = (float("nan") if one is None else one for one in (row.step, row.time))
    return not drops(limit, step, time)


def has_any_metric(row: MetricRow, wanted: Collection[str]) -> bool:
    """Returns whether a row has a wanted column; True if `wanted` is empty."""
    return not wanted or any(name in row.metrics for name in wanted)
