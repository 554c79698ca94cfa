"""Exports runs, all their metrics, or the rows of one run to one file: CSV, JSON lines, or Parquet.

Runs are read one at a time, in blocks, so memory does not grow with the export. A file is written under a
temporary name and renamed when it is complete.
"""

import contextlib
import csv
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import attrs

from destinations.run_directory.layout import (
    OWN_COLUMNS,
    format_cells,
    header_line,
    strict_json,
)

from .files import clean_text, number_of, written_beside
from .record import FIELDS, flat_record
from .run import Branch, Run
from .streams import Stream

if TYPE_CHECKING:
    from destinations.history.rows import MetricRow
    from destinations.run_directory.blocks import Block

    from .record import RunRecord

__all__ = ["ExportFormat", "export_metrics", "export_rows", "export_runs"]

ExportFormat = Literal["csv", "jsonl", "parquet"]

_log = logging.getLogger("destinations")

_SUFFIXES: dict[str, ExportFormat] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_METRIC_COLUMNS = ("run_id", "metric", "step", "time", "value")
_WRITER = "writer"
_GROUP_POINTS = 1_000_000
_GROUP_VALUES = 1 << 22

Destination = str | PathLike[str] | IO[str] | IO[bytes]


def export_runs(
    runs: "Iterable[Run | RunRecord]",
    destination: Destination,
    *,
    format: ExportFormat | None = None,  # the word
    overwrite: bool = False,
    clock: Callable[[], float] = time.time,
) -> int:
    """Writes a row for each run: fields, `hparams.…`, `summary.…`. Returns the number of rows.

    ```python
    with open_runs("runs") as runs:
        print(export_runs(runs, "runs.jsonl"))  # 1
    ```

    Columns are those of all runs. In CSV, missing values are empty, and tags are a JSON list. In JSON lines,
    NaN and infinities are texts. In Parquet, a column has the narrowest type that holds all its values, or
    else is JSON text.

    Args:
        runs: the runs to export; their records are held in memory.
        destination: a path, or a stream open for writing; it is not closed.
        format: "csv", "jsonl" or "parquet". Default: by the suffix of the path.
        overwrite: whether to replace an existing file.
        clock: returns the time in seconds since 1970: a run without a heartbeat is "killed", as where it is
            shown.

    Raises:
        ValueError: the format is unknown.
        FileExistsError: the file exists, and `overwrite` is False.
    """
    target = _Target.of(destination, format, overwrite=overwrite)
    now = clock()
    rows = [flat_record(run.record if isinstance(run, Run) else run, now) for run in runs]
    names = dict.fromkeys(name for name, field in FIELDS.items() if field.is_recorded)
    for group in ("hparams.", "summary."):
        names.update(dict.fromkeys(name for row in rows for name in row if name.startswith(group)))
    if target.format == "parquet":
        with target.binary() as opened:
            _write_parquet_rows(rows, list(names), opened)
    else:
        with target.text() as stream:
            if target.format == "jsonl":
                stream.writelines(f"{strict_json(row)}\n" for row in rows)
            else:
                writer = csv.writer(stream, lineterminator="\n")
                writer.writerow(names)
                writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    return len(rows)


def export_metrics(
    runs: Iterable[Run],
    destination: Destination,
    *,
    format: ExportFormat | None = None,  # the word
    metrics: Collection[str] | None = None,
    rank: int = 0,
    overwrite: bool = False,
    on_damaged: Callable[[Run, Exception], object] | None = None,
) -> int:
    """Writes a row for each value: `run_id`, `metric`, `step`, `time`, `value`. Returns the number of rows.

    Where several writers have added to one of the runs, `writer` is the last column: the name of the writer,
    "" for the trainer.

    ```python
    with open_runs("runs") as runs:
        print(export_metrics(runs, "metrics.csv", metrics=["loss"]))  # 4
    ```

    Rows are ordered by run, by writer, then in the order of logging, then by column. A missing step or time
    is empty, or null. Values are exact; integers become floats.

    Args:
        runs: the runs to export.
        destination: a path, or a stream open for writing; it is not closed.
        format: "csv", "jsonl" or "parquet". Default: by the suffix of the path.
        metrics: columns to export; None for all.
        rank: of the rows.
        overwrite: whether to replace an existing file.
        on_damaged: called with a run whose rows cannot be read completely, and the error; the export
            continues. Default: logs a warning to "destinations".

    Raises:
        ValueError: the format is unknown.
        FileExistsError: the file exists, and `overwrite` is False.
    """
    target = _Target.of(destination, format, overwrite=overwrite)
    runs = list(runs)
    has_writers = any(run.writers for run in runs)
    blocks = _blocks_of(runs, metrics, rank, on_damaged or _warn_of)
    if target.format == "parquet":
        with target.binary() as opened:
            return _write_parquet_points(blocks, opened, has_writers=has_writers)
    lines_of = _csv_lines if target.format == "csv" else _json_lines
    count = 0
    with target.text() as stream:
        if target.format == "csv":
            stream.write(",".join([*_METRIC_COLUMNS, *([_WRITER] * has_writers)]) + "\n")
        for run_id, block in blocks:
            lines = lines_of(run_id, block, has_writers=has_writers)
            stream.writelines(lines)
            count += len(lines)
    return count


def export_rows(
    run: Run,
    destination: Destination,
    *,
    format: ExportFormat | None = None,  # the word
    rank: int = 0,
    overwrite: bool = False,
) -> int:
    """Writes the rows of a run as one `metrics.csv` would have them: a column for each metric.

    ```python
    from destinations.runs import Run
    from destinations.runs.export import export_rows

    print(export_rows(Run.open("runs/digits"), "digits.csv"))  # 4
    ```

    The rows of closed parts, of the CSV and of the journal, in this order; CSV and JSON lines have every
    number as it was logged. In Parquet steps are integers and all else floats, and a missing value is null.

    Args:
        run: the run; memory does not grow with it.
        destination: a path, or a stream open for writing; it is not closed.
        format: "csv", "jsonl" or "parquet". Default: by the suffix of the path.
        rank: of the rows.
        overwrite: whether to replace an existing file.

    Returns:
        The number of rows.

    Raises:
        ValueError: the format is unknown, or the run is one of a dataset, which has values and no rows.
        FileExistsError: the file exists, and `overwrite` is False.
        OSError: a file of the run cannot be read.
    """
    if type(run) not in {Run, Branch}:
        raise ValueError(f"run {run.run_id} is of a dataset, which has no rows. Use export_metrics.")
    target = _Target.of(destination, format, overwrite=overwrite)
    names, rows = _rows_of(Stream(run.path, end=run.end), rank, in_blocks=target.format == "parquet")
    if target.format == "parquet":
        with target.binary() as opened:
            return _write_parquet_blocks(rows, names, opened)
    line_of = _csv_line if target.format == "csv" else _json_line
    count = 0
    with target.text() as stream:
        if target.format == "csv":
            stream.write(header_line([*OWN_COLUMNS, *names]).decode())
        for row in rows:
            stream.write(line_of(row, names))
            count += 1
    return count


def _rows_of(stream: Stream, rank: int, *, in_blocks: bool) -> tuple[list[str], Iterator[Any]]:
    """Returns the columns of the metrics, and the rows or their blocks, of one moment."""
    from destinations.history.snapshot import metric_columns, take_snapshot

    from .content.series import blocks_in

    def items() -> Iterator[Any]:
        with take_snapshot(stream.folder, rank, end=stream.row_end) as snapshot:
            yield (names := metric_columns(snapshot))
            yield from blocks_in(snapshot, ["epoch", *names]) if in_blocks else snapshot.rows()

    found = items()
    return next(found), found


def _csv_line(row: "MetricRow", names: list[str]) -> str:
    cells = [row.step, row.epoch, row.time, *map(row.metrics.get, names)]
    return ",".join(["" if cell is None else repr(cell) for cell in cells]) + "\n"


def _json_line(row: "MetricRow", names: list[str]) -> str:
    del names
    return strict_json({"step": row.step, "epoch": row.epoch, "time": row.time, **row.metrics}) + "\n"


def _blocks_of(
    runs: Iterable[Run],
    metrics: Collection[str] | None,
    rank: int,
    on_damaged: Callable[[Run, Exception], object],
) -> "Iterator[tuple[str, Block]]":
    for run in runs:
        try:
            yield from ((run.run_id, _picked(block, metrics)) for block in run.blocks(rank))
        except (OSError, ValueError) as error:
            on_damaged(run, error)


def _warn_of(run: Run, error: Exception) -> None:
    _log.warning("metrics of run %s in %s cannot be read completely: %s", run.run_id, run.path, error)


# Destinations.


@attrs.frozen
class _Target:
    """What an export is written to: a new file, or a stream, which is not closed."""

    format: ExportFormat
    path: Path | None
    stream: Any
    overwrite: bool

    @classmethod
    def of(cls, destination: Destination, wanted: ExportFormat | None, *, overwrite: bool) -> "_Target":
        path = Path(destination) if isinstance(destination, str | PathLike) else None
        suffix = "" if path is None else path.suffix.lower()
        found = wanted or _SUFFIXES.get(suffix)
        if found is None:
            raise ValueError(
                f'unknown suffix {suffix!r}. Use .csv, .jsonl or .parquet, or pass format="csv".'
            )
        if found not in _SUFFIXES.values():
            raise ValueError(f"unknown format {wanted!r}. Use csv, jsonl or parquet.")
        if path is not None and not overwrite and os.path.lexists(path):
            raise FileExistsError(f"file {os.fspath(path)!r} exists. Choose another, or overwrite it.")
        return cls(found, path, destination, overwrite)

    @contextlib.contextmanager
    def text(self) -> Iterator[IO[str]]:
        """Yields a stream of text."""
        if self.path is not None:
            with (
                written_beside(self.path, overwrite=self.overwrite) as path,
                path.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file,
            ):
                yield file
        elif isinstance(self.stream, io.TextIOBase) or not hasattr(self.stream, "readinto"):
            yield self.stream
        else:
            wrapper = io.TextIOWrapper(self.stream, encoding="utf-8", newline="", errors="backslashreplace")
            try:
                yield wrapper
                wrapper.flush()
            finally:
                with contextlib.suppress(ValueError):
                    wrapper.detach()

    @contextlib.contextmanager
    def binary(self) -> Iterator[Any]:
        """Yields a path, or a stream of bytes."""
        if self.path is None:
            yield getattr(self.stream, "buffer", self.stream)  # Of a text stream such as sys.stdout.
        else:
            with written_beside(self.path, overwrite=self.overwrite) as path:
                yield path


# Points.


def _picked(block: "Block", metrics: Collection[str] | None) -> "Block":
    if metrics is None:
        return block
    return attrs.evolve(
        block, columns={name: column for name, column in block.columns.items() if name in metrics}
    )


def _points(block: "Block") -> tuple[list[str], Any, Any, Any]:
    """Returns the metrics of a block, and row, metric (an index) and value of each point, row by row."""
    import numpy as np

    names = list(block.columns)
    if not names:
        return [], np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    present = np.stack([there for _, there in block.columns.values()], axis=1)
    values = np.stack([values for values, _ in block.columns.values()], axis=1)
    rows, columns = np.nonzero(present)
    return names, rows, columns, values[rows, columns]


def _lines(
    block: "Block", heads: Callable[[list[str]], list[str]], middles: list[str], end: str
) -> list[str]:
    names, rows, columns, values = _points(block)
    if not len(values):
        return []
    cells = format_cells(values.tolist()).split(",")
    starts = heads(names)
    return [
        f"{starts[column]}{middles[row]}{cell}{end}"
        for column, row, cell in zip(columns.tolist(), rows.tolist(), cells, strict=True)
    ]


def _csv_lines(run_id: str, block: "Block", *, has_writers: bool) -> list[str]:
    from destinations.run_directory.blocks import MISSING_STEP

    def heads(names: list[str]) -> list[str]:
        run = _csv_text(run_id)
        return [f"{run},{_csv_text(name)}," for name in names]

    middles = [
        f"{'' if step == MISSING_STEP else step},{'' if math.isnan(time) else repr(time)},"
        for step, time in zip(block.step.tolist(), block.time.tolist(), strict=True)
    ]
    return _lines(block, heads, middles, f",{block.writer}\n" if has_writers else "\n")


def _json_lines(run_id: str, block: "Block", *, has_writers: bool) -> list[str]:
    from destinations.run_directory.blocks import MISSING_STEP

    def heads(names: list[str]) -> list[str]:
        run = f'{{"run_id": {json.dumps(run_id)}, '
        run += f'"{_WRITER}": {json.dumps(block.writer)}, ' if has_writers else ""
        return [f'{run}"metric": {json.dumps(name)}, ' for name in names]

    middles = [
        f'"step": {"null" if step == MISSING_STEP else step}, '
        f'"time": {repr(time) if math.isfinite(time) else "null"}, "value": '
        for step, time in zip(block.step.tolist(), block.time.tolist(), strict=True)
    ]
    lines = _lines(block, heads, middles, "}\n")
    for mark, text in ((": nan}\n", "NaN"), (": inf}\n", "Infinity"), (": -inf}\n", "-Infinity")):
        if any(line.endswith(mark) for line in lines):
            lines = [f'{line[: -len(mark)]}: "{text}"}}\n' if line.endswith(mark) else line for line in lines]
    return lines


def _csv_text(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n\r') else text


def _csv_cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


# Parquet.


def _write_parquet_points(blocks: "Iterable[tuple[str, Block]]", target: Any, *, has_writers: bool) -> int:
    """Writes the points in row groups of a million."""
    import pyarrow as pa
    import pyarrow.parquet

    schema = pa.schema(
        [
            ("run_id", pa.string()),
            ("metric", pa.string()),
            ("step", pa.int64()),
            ("time", pa.float64()),
            ("value", pa.float64()),
            *([(_WRITER, pa.string())] if has_writers else ()),
        ]
    )
    count = 0
    pending: list[Any] = []
    # These encodings halve the size of steps, times and values.
    encodings = {"step": "DELTA_BINARY_PACKED", "time": "BYTE_STREAM_SPLIT", "value": "BYTE_STREAM_SPLIT"}
    with pa.parquet.ParquetWriter(
        target,
        schema,
        compression="zstd",
        use_dictionary=["run_id", "metric", _WRITER],
        column_encoding=encodings,
    ) as writer:
        for run_id, block in blocks:
            table = _points_table(pa, schema, run_id, block)
            pending.append(table)
            count += len(table)
            if sum(map(len, pending)) >= _GROUP_POINTS:
                writer.write_table(pa.concat_tables(pending))
                pending = []
        writer.write_table(pa.concat_tables([schema.empty_table(), *pending]))
    return count


def _points_table(pa: Any, schema: Any, run_id: str, block: "Block") -> Any:
    import numpy as np

    from destinations.run_directory.blocks import MISSING_STEP

    names, rows, columns, values = _points(block)
    steps, times = block.step[rows], block.time[rows]
    return pa.table(
        [
            pa.repeat(run_id, len(rows)),
            pa.array(names, pa.string()).take(pa.array(columns)),
            pa.array(steps, mask=steps == MISSING_STEP),
            pa.array(times, mask=np.isnan(times)),
            pa.array(values),
            *([pa.repeat(block.writer, len(rows))] if _WRITER in schema.names else ()),
        ],
        schema,
    )


def _write_parquet_blocks(blocks: "Iterable[Block]", names: list[str], target: Any) -> int:
    """Writes rows, which have these metrics and the epoch, in row groups of some million values."""
    import pyarrow as pa
    import pyarrow.parquet

    from destinations.run_directory.blocks import MISSING_STEP
    from destinations.run_directory.parquet import distinct_names

    columns = distinct_names(map(clean_text, (*OWN_COLUMNS, *names)))
    schema = pa.schema([(name, pa.float64() if at else pa.int64()) for at, name in enumerate(columns)])
    encodings = dict.fromkeys(columns[1:], "BYTE_STREAM_SPLIT") | {columns[0]: "DELTA_BINARY_PACKED"}
    group_rows = max(1, _GROUP_VALUES // len(columns))
    count = 0
    pending: list[Any] = []
    with pa.parquet.ParquetWriter(
        target, schema, compression="zstd", use_dictionary=False, column_encoding=encodings
    ) as writer:
        for block in blocks:
            found = [block.columns[name] for name in ("epoch", *names)]
            values = [pa.array(one, mask=~there) for one, there in found]
            step = pa.array(block.step, mask=block.step == MISSING_STEP)
            time = pa.array(block.time, mask=block.time != block.time)  # NaN
            pending.append(pa.table([step, values[0], time, *values[1:]], schema=schema))
            count += len(block)
            if sum(map(len, pending)) >= group_rows:
                writer.write_table(pa.concat_tables(pending))
                pending = []
        writer.write_table(pa.concat_tables([schema.empty_table(), *pending]))
    return count


def _write_parquet_rows(rows: list[dict[str, Any]], names: list[str], target: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    from destinations.run_directory.parquet import distinct_names

    columns = [_arrow_column(pa, name, [row.get(name) for row in rows]) for name in names]
    pa.parquet.write_table(
        pa.table(columns, distinct_names(map(clean_text, names))), target, compression="zstd"
    )


def _arrow_column(pa: Any, name: str, values: list[Any]) -> Any:
    """Returns a column of the narrowest type that has room for all values, or else of JSON texts."""
    if name in FIELDS and FIELDS[name].type == "texts":
        return pa.array(values, pa.list_(pa.string()))
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    numbers = [number_of(value) for value in values]
    if kinds == {int} and all(isinstance(number, int | None) for number in numbers):
        return pa.array(values, pa.int64())
    if kinds and kinds <= {int, float}:
        return pa.array([None if number is None else float(number) for number in numbers], pa.float64())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array([text and clean_text(text) for text in texts], pa.string())
