"""`Series`: a metric of a run as numpy arrays; or all metrics in blocks, including rows in the journal.

Never writes; may read a run that is being written, see `run_directory.reader`. Importing this module imports
numpy.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.run_directory.blocks import (
    MISSING_STEP,
    Block,
    Floats,
    Steps,
    block_of_rows,
    read_blocks,
    without_abandoned,
)
from destinations.run_directory.layout import column_of, parse_header
from destinations.run_directory.reader import merge_journal, metric_columns, retried, retried_items
from destinations.runs.errors import MetricNotFoundError

from .rank_reader import Look, RankReader

__all__ = ["Series", "read_series", "run_blocks"]


@attrs.frozen(eq=False, repr=False)
class Series:
    """The values of one metric, in the order of logging.

    Attributes:
        name: of the metric.
        step: int64 `(n,)`; `MISSING_STEP`, the min of int64, if missing.
        time: float64 `(n,)`, seconds since 1970; NaN if unknown.
        value: float64 `(n,)`; NaN and infinities were logged as such. An integer becomes the nearest float.
    """

    name: str
    step: Steps
    time: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return f"Series({self.name!r}, {len(self)} values)"

    def _repr_html_(self) -> str:
        from destinations.runs.notebook import series_html

        return series_html(self.name, self.value)

    @property
    def has_step(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """A mask of the values that have a step, bool `(n,)`."""
        return np.not_equal(self.step, MISSING_STEP)


def _no_rows_of(rank: int) -> str:
    return f"Rank {rank} has no rows here. Write them with RunDirectory(..., all_ranks=True)."


def read_series(run_dir: Path, name: str, rank: int = 0) -> Series:
    """Returns the values of a metric; see `Series`.

    Args:
        run_dir: the folder of the run.
        name: of the metric, as logged or as in the CSV; "epoch" is the epoch of each row.
        rank: of the rows.

    Raises:
        MetricNotFoundError: the run has no such metric; the message suggests the closest.
    """
    return retried(lambda: _read(run_dir, name, rank))


def _read(run_dir: Path, name: str, rank: int) -> Series:
    with RankReader(run_dir, rank).look() as look:
        known = metric_columns(look.snapshot)
        column = next((one for one in (column_of(name), name) if one in known or one == "epoch"), None)
        if column is None:
            raise MetricNotFoundError(name, known, "" if known or not rank else _no_rows_of(rank))
        step: list[Steps] = [np.empty(0, np.int64)]
        time: list[Floats] = [np.empty(0)]
        value: list[Floats] = [np.empty(0)]
        for block in _blocks(look, [column]):
            values, present = block.columns[column]
            chosen = slice(None) if present.all() else present
            step.append(block.step[chosen])
            time.append(block.time[chosen])
            value.append(values[chosen])
    return Series(name, _joined(step), _joined(time), _joined(value))


def _joined(pieces: list[Any]) -> Any:
    """Returns the pieces as one array, and drops them, so that only one column is there twice."""
    found = np.concatenate(pieces)
    pieces.clear()
    return found


def run_blocks(run_dir: Path, rank: int = 0) -> Iterator[Block]:
    """Yields all rows of a rank in blocks; a block has only the metrics that occur in it."""

    def blocks() -> Iterator[Block]:
        with RankReader(run_dir, rank).look() as look:
            yield from _blocks(look, None)

    return retried_items(blocks)


def _blocks(look: Look, wanted: Sequence[str] | None) -> Iterator[Block]:
    resumes = look.snapshot.resumes
    for csv, start in look.pieces():
        if wanted is not None and not set(wanted).intersection(parse_header(csv.header)):
            continue
        for block in read_blocks(csv.header, csv.chunks(start), wanted):
            yield without_abandoned(block, resumes)
    rows = merge_journal([], look.snapshot.records)
    if rows:
        yield block_of_rows(rows, wanted)
