"""Exports runs, their metrics, or the rows of one run to a single CSV, JSON lines or Parquet file.

Runs are read one at a time, in blocks, so memory does not grow with the export. A file is written under a
temporary name and renamed once it is complete.
"""

import contextlib
import csv
import io
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import attrs
import orjson

from destinations.run_directory.layout import OWN_COLUMNS, header_line, strict_json

from .files import clean_text, number_of, written_beside
from .record import FIELDS, flat_record
from .run import Branch, RecordedRun
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
_WRITER = "writer"
_GROUP_POINTS = 1_000_000
_GROUP_VALUES = 1 << 22
_CHUNK_ROWS = 4096

Destination = str | PathLike[str] | IO[str] | IO[bytes]


def export_runs(
    runs: "Iterable[RecordedRun | RunRecord]",
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

    The file has the columns of all runs. In CSV, missing values are empty, and tags are a JSON list. In JSON
    lines, NaN and infinities are strings. In Parquet, a column has the narrowest type that holds all its
    values, or else is JSON text.

    Args:
        runs: the runs to export; their records are held in memory.
        destination: a path, or a stream open for writing; it is not closed.
        format: "csv", "jsonl" or "parquet". Default: by the suffix of the path.
        overwrite: whether to replace an existing file.
        clock: returns the time in seconds since 1970. A running run with an old heartbeat has the status
            "killed", as in listings.

    Raises:
        ValueError: the format is unknown.
        FileExistsError: the file exists, and `overwrite` is False.
    """
    import pyarrow as pa

    from destinations.run_directory.parquet import distinct_names

    now = clock()
    rows = [flat_record(run.record if isinstance(run, RecordedRun) else run, now) for run in runs]
    names = dict.fromkeys(name for name, field in FIELDS.items() if field.is_recorded)
    for group in ("hparams.", "summary."):
        names.update(dict.fromkeys(name for row in rows for name in row if name.startswith(group)))

    def arrow_of(rows: list[dict[str, Any]]) -> Any:
        columns = [_arrow_column(name, [row.get(name) for row in rows]) for name in names]
        return pa.table(columns, distinct_names(map(clean_text, names)))

    with _opened(destination, format, overwrite=overwrite) as table:
        return table.write(list(names), [rows], rows_of=list, arrow_of=arrow_of)


def export_metrics(
    runs: Iterable[RecordedRun],
    destination: Destination,
    *,
    format: ExportFormat | None = None,  # the word
    metrics: Collection[str] | None = None,
    rank: int = 0,
    overwrite: bool = False,
    on_damaged: Callable[[RecordedRun, Exception], object] | None = None,
) -> int:
    """Writes a row for each value: `run_id`, `metric`, `step`, `time`, `value`. Returns the number of rows.

    If several writers have added to one of the runs, the last column is `writer`: the name of the writer, or
    "" for the trainer.

    ```python
    with open_runs("runs") as runs:
        print(export_metrics(runs, "metrics.csv", metrics=["loss"]))  # 4
    ```

    Rows are ordered by run, writer, order of logging, and column. A missing step or time is empty or null.
    Values are exact; integers become floats.

    Args:
        runs: the runs to export.
        destination: a path, or a stream open for writing; it is not closed.
        format: "csv", "jsonl" or "parquet". Default: by the suffix of the path.
        metrics: columns to export; None for all.
        rank: of the rows.
        overwrite: whether to replace an existing file.
        on_damaged: called with each run whose rows can't be read completely, and the error. The export
            continues. Default: logs a warning to "destinations".

    Raises:
        ValueError: the format is unknown.
        FileExistsError: the file exists, and `overwrite` is False.
    """
    import pyarrow as pa

    runs = list(runs)
    kinds = {"run_id": "string", "metric": "string", "step": "int64", "time": "double", "value": "double"}
    if any(run.writers for run in runs):
        kinds[_WRITER] = "string"
    schema = pa.schema(list(kinds.items()))
    # These encodings halve the size of steps, times and values.
    encodings = {"step": "DELTA_BINARY_PACKED", "time": "BYTE_STREAM_SPLIT", "value": "BYTE_STREAM_SPLIT"}
    tables = (_points_of(schema, run, block, metrics) for run, block in _blocks_of(runs, rank, on_damaged))
    with _opened(destination, format, overwrite=overwrite) as table:
        return table.write(
            schema.names,
            itertools.chain([schema.empty_table()], tables),
            rows_of=pa.Table.to_pylist,
            arrow_of=lambda points: points,
            text_of=_text_of_points,
            use_dictionary=["run_id", "metric", _WRITER],
            column_encoding=encodings,
        )


def export_rows(
    run: RecordedRun,
    destination: Destination,
    *,
    format: ExportFormat | None = None,  # the word
    rank: int = 0,
    overwrite: bool = False,
) -> int:
    """Writes the rows of a run with a column for each metric, like one complete `metrics.csv`.

    ```python
    from destinations.runs import RecordedRun
    from destinations.runs.export import export_rows

    print(export_rows(RecordedRun.open("runs/digits"), "digits.csv"))  # 4
    ```

    The file has the rows of closed parts, of the CSV and of the journal, in this order. CSV and JSON lines
    have every number as it was logged. In Parquet, steps are integers, everything else is a float, and a
    missing value is null.

    Args:
        run: the run; memory does not grow with it.
        destination: a path, or a stream open for writing; it is not closed.
        format: "csv", "jsonl" or "parquet". Default: by the suffix of the path.
        rank: of the rows.
        overwrite: whether to replace an existing file.

    Returns:
        The number of rows.

    Raises:
        ValueError: the format is unknown, or the run belongs to a dataset, which has values but no rows.
        FileExistsError: the file exists, and `overwrite` is False.
        OSError: a file of the run cannot be read.
    """
    if type(run) not in {RecordedRun, Branch}:
        raise ValueError(f"run {run.run_id} belongs to a dataset, which has no rows. Use export_metrics.")
    import pyarrow as pa

    from destinations.history.snapshot import metric_columns, take_snapshot
    from destinations.run_directory.blocks import MISSING_STEP
    from destinations.run_directory.parquet import distinct_names

    from .content.series import blocks_in

    with (
        take_snapshot(run.path, rank, end=Stream(run.path, end=run.end).row_end) as snapshot,
        _opened(destination, format, overwrite=overwrite) as table,
    ):
        names = [*OWN_COLUMNS, *metric_columns(snapshot)]
        columns = distinct_names(map(clean_text, names))
        schema = pa.schema([(name, pa.float64() if at else pa.int64()) for at, name in enumerate(columns)])
        rows = snapshot.rows()
        chunks: Iterator[Any] = iter(lambda: list(itertools.islice(rows, _CHUNK_ROWS)), [])
        if table.format == "parquet":
            chunks = blocks_in(snapshot, ["epoch", *names[len(OWN_COLUMNS) :]])

        def arrow_of(block: Any) -> Any:
            if not block:
                return schema.empty_table()
            values = {name: pa.array(one, mask=~there) for name, (one, there) in block.columns.items()}
            values["step"] = pa.array(block.step, mask=block.step == MISSING_STEP)
            values["time"] = pa.array(block.time, mask=block.time != block.time)  # NaN
            return pa.table([values[name] for name in names], schema)

        encodings = dict.fromkeys(columns[1:], "BYTE_STREAM_SPLIT") | {columns[0]: "DELTA_BINARY_PACKED"}
        return table.write(
            names,
            itertools.chain([[]], chunks),
            rows_of=lambda rows: map(_cells_of, rows),
            arrow_of=arrow_of,
            use_dictionary=False,
            column_encoding=encodings,
        )


def _cells_of(row: "MetricRow") -> dict[str, Any]:
    return {"step": row.step, "epoch": row.epoch, "time": row.time, **row.metrics}


def _blocks_of(
    runs: Iterable[RecordedRun], rank: int, on_damaged: Callable[[RecordedRun, Exception], object] | None
) -> "Iterator[tuple[RecordedRun, Block]]":
    """Yields the blocks of runs. If a writer can't be read, the others still are."""
    for run in runs:
        for writer in ("", *run.writers):
            try:
                yield from ((run, block) for block in run.blocks(rank, writer))
            except (OSError, ValueError) as error:
                (on_damaged or _warn_of)(run, error)


def _warn_of(run: RecordedRun, error: Exception) -> None:
    _log.warning("metrics of run %s in %s cannot be read completely: %s", run.run_id, run.path, error)


def _points_of(schema: Any, run: RecordedRun, block: "Block", metrics: Collection[str] | None) -> Any:
    """Returns the values of a block as a table of points, row by row."""
    import numpy as np
    import pyarrow as pa

    from destinations.run_directory.blocks import MISSING_STEP

    columns = {name: found for name, found in block.columns.items() if metrics is None or name in metrics}
    if not columns:
        return schema.empty_table()
    present = np.stack([there for _, there in columns.values()], axis=1)
    values = np.stack([values for values, _ in columns.values()], axis=1)
    rows, metric = np.nonzero(present)
    steps, times = block.step[rows], block.time[rows]
    found = {
        "run_id": pa.repeat(run.run_id, len(rows)),
        "metric": pa.array(list(columns), pa.string()).take(pa.array(metric)),
        "step": pa.array(steps, mask=steps == MISSING_STEP),
        "time": pa.array(times, mask=np.isnan(times)),
        "value": pa.array(values[rows, metric]),
        _WRITER: pa.repeat(block.writer, len(rows)),
    }
    return pa.table([found[name] for name in schema.names], schema)


def _text_of_points(points: Any, *, is_json: bool) -> str:
    """Returns points as lines of CSV or JSON; row by row, it would take five times as long."""
    return "".join(_text_of_batch(batch, is_json=is_json) for batch in points.to_batches())


def _text_of_batch(points: Any, *, is_json: bool) -> str:
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pa.compute
    columns = []
    for name, column in zip(points.schema.names, points.columns, strict=True):
        if column.type == pa.string():
            known = column.dictionary_encode()
            quoted = [json.dumps(one) if is_json else _csv_text(one) for one in known.dictionary.to_pylist()]
            texts = pa.array(quoted, pa.string()).take(known.indices)
        elif name == "value":
            texts = _number_texts(column, is_json=is_json)
        else:
            # All values of a row share its step and time, so each text is made once.
            runs = compute.run_end_encode(column)
            texts = _number_texts(runs.values, is_json=is_json)
            texts = compute.run_end_decode(pa.RunEndEncodedArray.from_arrays(runs.run_ends, texts))
        columns.append(texts)
    if is_json:
        pairs = zip([f',"{name}":' for name in points.schema.names], columns, strict=True)
        pieces = ["{", *itertools.chain.from_iterable(pairs), "}"]
        pieces[1] = pieces[1].removeprefix(",")
    else:
        pieces = columns
    lines = compute.binary_join_element_wise(*pieces, "" if is_json else ",")
    text: str = compute.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "\n")[0].as_py()
    return f"{text}\n"


def _number_texts(numbers: Any, *, is_json: bool) -> Any:
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pa.compute
    texts = numbers.cast(pa.string()).fill_null("null" if is_json else "")
    if is_json and not compute.all(compute.is_finite(numbers)).as_py():
        for number, text in (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
            texts = compute.if_else(compute.equal(texts, number), f'"{text}"', texts)
    return texts


def _csv_text(text: str) -> str:
    return text and header_line([text]).decode().removesuffix("\n")


def _arrow_column(name: str, values: list[Any]) -> Any:
    """Returns a column of the narrowest type that holds all values, or else of JSON texts."""
    import pyarrow as pa

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


# Tables.


@contextlib.contextmanager
def _opened(destination: Destination, wanted: ExportFormat | None, *, overwrite: bool) -> "Iterator[_Table]":
    """Yields the table to write: a new file, or a stream, which is not closed."""
    path = Path(destination) if isinstance(destination, str | PathLike) else None
    suffix = "" if path is None else path.suffix.lower()
    found = wanted or _SUFFIXES.get(suffix)
    if found is None:
        raise ValueError(f'unknown suffix {suffix!r}. Use .csv, .jsonl or .parquet, or pass format="csv".')
    if found not in _SUFFIXES.values():
        raise ValueError(f"unknown format {wanted!r}. Use csv, jsonl or parquet.")
    if path is None:
        yield _Table(found, destination)
        return
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(f"file {os.fspath(path)!r} exists. Choose another, or overwrite it.")
    with written_beside(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        yield _Table(found, file)


@attrs.frozen
class _Table:
    """A table in one of the formats.

    Attributes:
        format: its format.
        stream: a stream of bytes or text, open for writing.
    """

    format: ExportFormat
    stream: Any

    def write(
        self,
        names: Sequence[str],
        chunks: Iterable[Any],
        *,
        rows_of: Callable[[Any], Iterable[Mapping[str, Any]]],
        arrow_of: Callable[[Any], Any],
        text_of: Callable[..., str] | None = None,
        **options: Any,
    ) -> int:
        """Writes rows chunk by chunk, and returns their number.

        Args:
            names: the names of the columns.
            chunks: at least one chunk, which may be empty; each has a length.
            rows_of: returns the rows of a chunk as mappings; columns may be missing.
            arrow_of: returns a chunk as a `pyarrow.Table`.
            text_of: returns the lines of a chunk, if that is faster than row by row.
            options: options of `pyarrow.parquet.ParquetWriter`.
        """
        if self.format == "parquet":
            # The buffer of a text stream such as sys.stdout.
            return _write_parquet(map(arrow_of, chunks), getattr(self.stream, "buffer", self.stream), options)

        def text_of_rows(chunk: Any, *, is_json: bool) -> str:
            if is_json:
                return "".join(map(_json_line, rows_of(chunk)))
            text = io.StringIO()
            lines = csv.writer(text, lineterminator="\n")
            lines.writerows([_csv_cell(row.get(name)) for name in names] for row in rows_of(chunk))
            return text.getvalue()

        count, is_json = 0, self.format == "jsonl"
        with _text_of(self.stream) as stream:
            stream.write("" if is_json else header_line(map(clean_text, names)).decode())
            for chunk in chunks:
                stream.write((text_of or text_of_rows)(chunk, is_json=is_json))
                count += len(chunk)
        return count


def _json_line(row: Mapping[str, Any]) -> str:
    with contextlib.suppress(TypeError):
        line: bytes = orjson.dumps(row)
        # orjson writes null for NaN, too; `strict_json` writes "NaN".
        if b"null" not in line:
            return line.decode() + "\n"
    return strict_json(row) + "\n"


def _csv_cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


@contextlib.contextmanager
def _text_of(stream: Any) -> Iterator[IO[str]]:
    """Yields a text stream that writes to a stream of text or bytes."""
    if isinstance(stream, io.TextIOBase) or not hasattr(stream, "readinto"):
        yield stream
        return
    wrapper = io.TextIOWrapper(stream, encoding="utf-8", newline="", errors="backslashreplace")
    try:
        yield wrapper
        wrapper.flush()
    finally:
        with contextlib.suppress(ValueError):
            wrapper.detach()


def _write_parquet(tables: Iterable[Any], stream: Any, options: Mapping[str, Any]) -> int:
    """Writes tables in row groups of at most a million rows or a few million values."""
    import pyarrow as pa
    import pyarrow.parquet

    found = iter(tables)
    pending = [next(found)]
    schema, count = pending[0].schema, len(pending[0])
    group_rows = min(_GROUP_POINTS, max(1, _GROUP_VALUES // len(schema)))
    with pa.parquet.ParquetWriter(stream, schema, compression="zstd", **options) as writer:
        for table in found:
            pending.append(table)
            count += len(table)
            if sum(map(len, pending)) >= group_rows:
                writer.write_table(pa.concat_tables(pending))
                pending = [schema.empty_table()]
        writer.write_table(pa.concat_tables(pending))
    return count
