"""`Series`: a metric of a run as numpy arrays; also all metrics in blocks. Both include rows in the journal.

Never writes, and may read a live run, see `history.snapshot`. Importing this module imports numpy.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.history.snapshot import MetricsSnapshot, metric_columns, take_snapshot
from destinations.run_directory.blocks import MISSING_STEP, Block, Floats, Steps, block_of_rows, blocks_of
from destinations.run_directory.layout import column_of
from destinations.runs.errors import MetricNotFoundError
from destinations.runs.streams import Stream, reported, streams_of

__all__ = [
    "Series",
    "blocks_in",
    "count_rows",
    "dataframe_of",
    "merged_by_step",
    "read_series",
    "run_blocks",
]

_FIRST_ROWS = 1024


@attrs.frozen(eq=False, repr=False)
class Series:
    """The values of one metric, in the order of logging; values of named writers by step.

    Attributes:
        name: the name of the metric.
        step: int64 `(n,)`; `MISSING_STEP`, the smallest int64, if missing.
        time: float64 `(n,)`, seconds since 1970; NaN if unknown.
        value: float64 `(n,)`; NaN and infinities were logged as such. An integer becomes the nearest float.
        writer: the writer of each value, str `(n,)`, "" for the trainer; None if all have the same writer.
    """

    name: str
    step: Steps
    time: Floats
    value: Floats
    writer: "np.ndarray[Any, np.dtype[np.str_]] | None" = None

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return f"Series({self.name!r}, {len(self)} values)"

    def _repr_html_(self) -> str:
        from destinations.runs.notebook import series_html

        return series_html(self.name, self.value)

    def by_writer(self) -> "dict[str, Series]":
        """Returns the values of each writer by name, "" for the trainer; a single writer's as "" too."""
        if self.writer is None:
            return {"": self}
        found = {}
        for name in np.unique(self.writer).tolist():
            chosen = self.writer == name
            found[name] = Series(self.name, self.step[chosen], self.time[chosen], self.value[chosen])
        return found

    @property
    def has_step(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """A mask of the values that have a step, bool `(n,)`."""
        return np.not_equal(self.step, MISSING_STEP)


def _no_rows_of(rank: int) -> str:
    return f"Rank {rank} has no rows here. Write them with RunDirectory(..., all_ranks=True)."


def read_series(
    run_dir: Path, name: str, rank: int = 0, writer: str | None = None, end: str | None = None
) -> Series:
    """Returns the values of a metric; see `Series`.

    If several writers have it, their values are merged by step. Within a step, the trainer's values come
    first, then the writers' by name, each in the order of logging.

    Args:
        run_dir: the folder of the run.
        name: the metric's name, as logged or as in the CSV; "epoch" is the epoch of each row.
        rank: the rank that logged the rows.
        writer: return only this writer's values; "" for the trainer's.
        end: as for `streams_of`.

    Raises:
        MetricNotFoundError: the run has no such metric; the message suggests the closest.
        WriterNotFoundError: the run has no such writer.
    """
    found: list[tuple[str, Series]] = []
    known: list[str] = []
    for stream in streams_of(run_dir, writer, end):
        with reported(stream, writer):
            names, series = _read(stream, name, rank)
            known += names
            if series is not None:
                found.append((stream.writer, series))
    if not found:
        raise MetricNotFoundError(name, known, "" if known or not rank else _no_rows_of(rank))
    return merged_by_step(found)


def _read(stream: Stream, name: str, rank: int) -> tuple[list[str], Series | None]:
    """Returns the metrics of a stream, and one metric's values in the order of logging; None without it."""
    with take_snapshot(stream.folder, rank, end=stream.row_end) as snapshot:
        known = metric_columns(snapshot)
        column = next((one for one in (column_of(name), name) if one in known or one == "epoch"), None)
        if column is None:
            return known, None
        step, time, value = np.empty(0, np.int64), np.empty(0), np.empty(0)
        size = 0
        for block in blocks_in(snapshot, [column], stream.until):
            values, present = block.columns[column]
            chosen = slice(None) if present.all() else present
            size, _, _ = (
                _append(array, size, new[chosen])
                for array, new in ((step, block.step), (time, block.time), (value, values))
            )
    for array in (step, time, value):
        array.resize(size, refcheck=False)
    return known, Series(name, step, time, value)


def merged_by_step(found: Sequence[tuple[str, Series]]) -> Series:
    """Returns the values of a metric of one writer or several.

    Args:
        found: the name of each writer, "" for the trainer, and its values in the order of logging. The
            trainer's values alone keep this order.
    """
    (writer, first), *others = found
    if not others and (not writer or (first.step[1:] >= first.step[:-1]).all()):
        return first
    every = [series for _, series in found]
    writers = None
    if others:
        writers = np.repeat([writer for writer, _ in found], [len(series) for series in every])
    step = np.concatenate([series.step for series in every])
    order = np.argsort(step, kind="stable")
    return Series(
        first.name,
        step[order],
        np.concatenate([series.time for series in every])[order],
        np.concatenate([series.value for series in every])[order],
        None if writers is None else writers[order],
    )


def _append(array: Any, size: int, new: Any) -> int:
    """Writes values into an array that grows in place, after the first `size`; returns the new size.

    Joining the pieces of 30 million values at the end took 1.6 GiB; this takes only the values' memory.
    """
    end = size + len(new)
    if end > len(array):
        # The array has no views yet. The allocator moves large arrays without a copy.
        array.resize(max(end, len(array) + (len(array) >> 4), _FIRST_ROWS), refcheck=False)
    array[size:end] = new
    return end


def run_blocks(
    run_dir: Path, rank: int = 0, writer: str | None = None, end: str | None = None
) -> Iterator[Block]:
    """Yields all rows of a rank in blocks; a block has only the metrics that occur in it.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows.
        writer: yield only this writer's rows; "" for the trainer's. Default: all, the trainer's first.
        end: as for `streams_of`.
    """
    for stream in streams_of(run_dir, writer, end):
        with (
            reported(stream, writer),
            take_snapshot(stream.folder, rank, end=stream.row_end) as snapshot,
        ):
            for block in blocks_in(snapshot, None, stream.until):
                yield attrs.evolve(block, writer=stream.writer) if stream.writer else block


def dataframe_of(blocks: Iterable[Block], *, has_writers: bool) -> Any:
    """Returns rows as a `pandas.DataFrame`, see `RecordedRun.to_dataframe`.

    Args:
        blocks: the rows.
        has_writers: whether to add a column with the name of each row's writer.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(f"to_dataframe needs pandas ({error}). Install pandas, or use blocks().") from error
    frames = []
    for block in blocks:
        columns = {name: values for name, (values, _) in block.columns.items()}
        steps = pd.Series(block.step, dtype="Int64").mask(block.step == MISSING_STEP)
        whose = {"writer": block.writer} if has_writers else {}
        frames.append(pd.DataFrame({"step": steps, "time": block.time, **whose, **columns}))
    if not frames:
        return pd.DataFrame({"step": pd.Series(dtype="Int64"), "time": pd.Series(dtype="float64")})
    return pd.concat(frames, ignore_index=True)


def count_rows(folder: Path, rank: int = 0) -> int:
    """Returns the number of rows of a stream, without reading their values."""
    with take_snapshot(folder, rank) as snapshot:
        blocks = (block for file in snapshot.files() for block in blocks_of(file, (), with_time=False))
        return len(snapshot.journal_rows()) + sum(map(len, blocks))


def blocks_in(
    snapshot: MetricsSnapshot, wanted: Sequence[str] | None, until: float | None = None
) -> Iterator[Block]:
    """Yields the rows of a snapshot in blocks of the wanted columns, or of the metrics that occur.

    Args:
        snapshot: the rows.
        wanted: columns; None for all metrics.
        until: the time of the last row, in seconds since 1970. Default: all rows.
    """
    for file in snapshot.files(wanted):
        for block in blocks_of(file, wanted):
            yield block.until(until)
    if rows := snapshot.journal_rows():
        yield block_of_rows(rows, wanted).until(until)
