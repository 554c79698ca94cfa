"""One metric of a run as numpy arrays, or all of them block by block; rows that are still in the journal are in it.

Reads and never writes, also while the run is being written; see `run_directory.snapshot` for what a reader sees then. Importing
this module imports numpy.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.run_directory.frames import Resume
from destinations.run_directory.layout import column_of
from destinations.run_directory.rows import with_journal
from destinations.run_directory.snapshot import Snapshot, metric_columns, take_snapshot

from ._columns import MISSING_STEP, Block, Floats, Steps, block_of_rows, read_blocks
from .errors import MetricNotFoundError

__all__ = ["MISSING_STEP", "Block", "Series", "read_series", "run_blocks"]


@attrs.frozen(eq=False, repr=False)
class Series:
    """The values of one metric, in the order in which they were logged.

    Attributes:
        name: of the metric.
        step: int64 `(n,)`; `MISSING_STEP`, the least int64, where a row has none.
        time: float64 `(n,)`, seconds since 1970; NaN where the file does not say.
        value: float64 `(n,)`; NaN and infinities are values that were logged. An integer that a float does not hold is the
            nearest float.
    """

    name: str
    step: Steps
    time: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return f"Series({self.name!r}, {len(self)} values)"

    @property
    def has_step(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Which values have a step, bool `(n,)`."""
        return np.not_equal(self.step, MISSING_STEP)


def read_series(run_dir: Path, name: str, rank: int = 0) -> Series:
    """Returns all values of a metric; see `Series`.

    Args:
        run_dir: the folder of the run.
        name: of the metric, as it was logged or as its column is called; "epoch" is the epoch of each row.
        rank: whose.

    Raises:
        MetricNotFoundError: the run has no such metric; the text names near ones.
    """
    with take_snapshot(run_dir, rank) as snapshot:
        known = metric_columns(snapshot)
        column = next((one for one in (column_of(name), name) if one in known or one == "epoch"), None)
        if column is None:
            raise MetricNotFoundError(name, known)
        pieces: list[tuple[Steps, Floats, Floats]] = []
        for block in _blocks(snapshot, [column]):
            values, present = block.columns[column]
            if present.all():
                pieces.append((block.step, block.time, values))
            elif present.any():
                pieces.append((block.step[present], block.time[present], values[present]))
    if not pieces:
        return Series(name, np.empty(0, np.int64), np.empty(0), np.empty(0))
    step, time, value = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    return Series(name, step, time, value)


def run_blocks(run_dir: Path, rank: int = 0, wanted: Sequence[str] | None = None) -> Iterator[Block]:
    """Returns all rows of a rank block by block; a metric that a block does not have is not in its columns.

    Args:
        run_dir: the folder of the run.
        rank: whose rows.
        wanted: columns; all metrics where None.
    """
    with take_snapshot(run_dir, rank) as snapshot:
        yield from _blocks(snapshot, wanted)


def _blocks(snapshot: Snapshot, wanted: Sequence[str] | None) -> Iterator[Block]:
    resumes = [record for record in snapshot.records if isinstance(record, Resume)]
    for block in read_blocks(snapshot.csv.header, snapshot.csv.chunks(), wanted):
        yield _without(block, resumes)
    rows = with_journal([], snapshot.records)
    if rows:
        yield block_of_rows(rows, wanted)


def _without(block: Block, resumes: list[Resume]) -> Block:
    """Leaves out the rows that no longer count, though the CSV still has them."""
    for resume in resumes:
        at = resume.time
        is_later = np.True_ if at is None else ~(block.time <= at)
        drops = (block.step > resume.step) | ((block.step == resume.step) & is_later)
        drops &= block.step != MISSING_STEP
        if drops.any():
            keep = ~drops
            columns = {name: (values[keep], there[keep]) for name, (values, there) in block.columns.items()}
            block = Block(block.step[keep], block.time[keep], columns)
    return block
