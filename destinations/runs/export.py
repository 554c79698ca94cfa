"""Exports runs, or all their metrics, to one file: CSV, JSON lines, or Parquet.

Runs are read one at a time, in blocks, so memory does not grow with the export. A file is written under a
temporary name and renamed when it is complete. Parquet needs DuckDB: `pip install
"training-destinations[query]"`.
"""

import contextlib
import csv
import io
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from destinations.run_directory.layout import format_cells, strict_json

from .record import FIELDS, flat_record
from .run import Run

if TYPE_CHECKING:
    from .content.series import Block
    from .record import RunRecord

__all__ = ["ExportFormat", "export_metrics", "export_runs"]

# Version 2 has delta encoding and byte stream split, which halve the size of steps, times and values.
_PARQUET = "(FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2)"

# DuckDB reads a NaN in a numpy array as NULL.
_NOT_A_NUMBER = "coalesce(value, 'nan'::DOUBLE)"

ExportFormat = Literal["csv", "jsonl", "parquet"]

_log = logging.getLogger("destinations")

_SUFFIXES: dict[str, ExportFormat] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_METRIC_COLUMNS = ("run_id", "metric", "step", "time", "value")
_PIECE_POINTS = 1_000_000
_LARGEST_INT = (1 << 63) - 1

Destination = str | PathLike[str] | IO[str] | IO[bytes]


def export_runs(
    runs: "Iterable[Run | RunRecord]",
    destination: Destination,
    *,
    format: ExportFormat | None = None,  # the word
    overwrite: bool = False,
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

    Raises:
        ValueError: the format is unknown.
        FileExistsError: the file exists, and `overwrite` is False.
        ImportError: DuckDB is not installed, for Parquet.
    """
    chosen = _format(destination, format)
    _check_new(destination, overwrite=overwrite)
    rows = [flat_record(run.record if isinstance(run, Run) else run) for run in runs]
    names = dict.fromkeys(name for name in FIELDS if name != "alive")
    for group in ("hparams.", "summary."):
        names.update(dict.fromkeys(name for row in rows for name in row if name.startswith(group)))
    if chosen == "parquet":
        with _parquet_path(destination) as (path, folder):
            _write_parquet_rows(rows, list(names), path, folder)
    else:
        with _text_stream(destination) as stream:
            if chosen == "jsonl":
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

    ```python
    with open_runs("runs") as runs:
        print(export_metrics(runs, "metrics.csv", metrics=["loss"]))  # 4
    ```

    Rows are ordered by run, then in the order of logging, then by column. A missing step or time is empty, or
    null. Values are exact; integers become floats.

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
        ImportError: DuckDB is not installed, for Parquet.
    """
    chosen = _format(destination, format)
    _check_new(destination, overwrite=overwrite)
    blocks = _blocks_of(runs, metrics, rank, on_damaged or _warn_of)
    if chosen == "parquet":
        with _parquet_path(destination) as (path, folder):
            return _write_parquet_points(blocks, path, folder)
    lines_of = _csv_lines if chosen == "csv" else _json_lines
    count = 0
    with _text_stream(destination) as stream:
        if chosen == "csv":
            stream.write(",".join(_METRIC_COLUMNS) + "\n")
        for run_id, block in blocks:
            lines = lines_of(run_id, block)
            stream.writelines(lines)
            count += len(lines)
    return count


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


def _format(destination: Destination, wanted: ExportFormat | None) -> ExportFormat:
    if wanted is not None:
        if wanted not in {"csv", "jsonl", "parquet"}:
            raise ValueError(f"unknown format {wanted!r}. Use csv, jsonl or parquet.")
        return wanted
    suffix = Path(destination).suffix.lower() if isinstance(destination, str | PathLike) else ""
    found = _SUFFIXES.get(suffix)
    if found is None:
        raise ValueError(f'unknown suffix {suffix!r}. Use .csv, .jsonl or .parquet, or pass format="csv".')
    return found


def _check_new(destination: Destination, *, overwrite: bool) -> None:
    if isinstance(destination, str | PathLike) and not overwrite and os.path.lexists(destination):
        raise FileExistsError(f"file {os.fspath(destination)!r} exists. Choose another, or overwrite it.")


@contextlib.contextmanager
def _text_stream(destination: Destination) -> Iterator[IO[str]]:
    if isinstance(destination, str | PathLike):
        with (
            _beside(Path(destination)) as path,
            path.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file,
        ):
            yield file
    elif isinstance(destination, io.TextIOBase) or not hasattr(destination, "readinto"):
        yield destination  # type: ignore[misc]  # a stream of texts
    else:
        wrapper = io.TextIOWrapper(
            cast("IO[bytes]", destination), encoding="utf-8", newline="", errors="backslashreplace"
        )
        try:
            yield wrapper
            wrapper.flush()
        finally:
            with contextlib.suppress(ValueError):
                wrapper.detach()


@contextlib.contextmanager
def _parquet_path(destination: Destination) -> Iterator[tuple[Path, Path]]:
    """Yields the path to write to and a folder for temporary files; then moves the file into place."""
    with tempfile.TemporaryDirectory(prefix="export-") as name:
        folder = Path(name)
        if isinstance(destination, str | PathLike):
            with _beside(Path(destination)) as path:
                yield path, folder
            return
        path = folder / "export.parquet"
        yield path, folder
        stream = getattr(destination, "buffer", destination)  # Of a text stream such as sys.stdout.
        with path.open("rb") as file:
            shutil.copyfileobj(file, stream)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    # A unique name: the folder may be shared, and two exports may run at once.
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# Points.


def _picked(block: "Block", metrics: Collection[str] | None) -> "Block":
    if metrics is None:
        return block
    import attrs

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


def _csv_lines(run_id: str, block: "Block") -> list[str]:
    from .content.series import MISSING_STEP

    def heads(names: list[str]) -> list[str]:
        run = _csv_text(run_id)
        return [f"{run},{_csv_text(name)}," for name in names]

    middles = [
        f"{'' if step == MISSING_STEP else step},{'' if math.isnan(time) else repr(time)},"
        for step, time in zip(block.step.tolist(), block.time.tolist(), strict=True)
    ]
    return _lines(block, heads, middles, "\n")


def _json_lines(run_id: str, block: "Block") -> list[str]:
    from .content.series import MISSING_STEP

    def heads(names: list[str]) -> list[str]:
        return [f'{{"run_id": {json.dumps(run_id)}, "metric": {json.dumps(name)}, ' for name in names]

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


def _connection() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise ImportError(
            'Parquet needs DuckDB. Run: pip install "training-destinations[query]", or export CSV.'
        ) from error
    return duckdb.connect(config={"memory_limit": "1GB"})


def _write_parquet_points(blocks: "Iterable[tuple[str, Block]]", path: Path, folder: Path) -> int:
    """Writes pieces of a million points, then concatenates them in order."""
    count = 0
    pieces: list[Path] = []
    pending: list[tuple[str, Block]] = []
    points = 0
    connection = _connection()
    try:
        for run_id, block in blocks:
            pending.append((run_id, block))
            points += sum(int(there.sum()) for _, there in block.columns.values())
            if points >= _PIECE_POINTS:
                pieces.append(folder / f"{len(pieces):08d}.parquet")
                count += _write_piece(connection, pending, pieces[-1])
                pending, points = [], 0
        pieces.append(folder / f"{len(pieces):08d}.parquet")
        count += _write_piece(connection, pending, pieces[-1])
        sources = ", ".join(_quoted(piece) for piece in pieces)
        connection.execute(f"COPY (FROM read_parquet([{sources}])) TO {_quoted(path)} {_PARQUET}")
    finally:
        connection.close()
    return count


def _write_piece(connection: Any, blocks: "list[tuple[str, Block]]", path: Path) -> int:
    import numpy as np

    from .content.series import MISSING_STEP

    metrics: dict[str, int] = {}
    parts: dict[str, list[Any]] = {name: [np.empty(0, np.int64)] for name in ("run", "metric", "step")}
    parts |= {"time": [np.empty(0)], "value": [np.empty(0)]}
    runs = list(dict.fromkeys(run_id for run_id, _ in blocks))
    for run_id, block in blocks:
        names, rows, columns, values = _points(block)
        numbers = np.array([metrics.setdefault(name, len(metrics)) for name in names], np.int64)
        parts["run"].append(np.full(len(rows), runs.index(run_id), np.int64))
        parts["metric"].append(numbers[columns] if len(names) else columns)
        parts["step"].append(block.step[rows])
        parts["time"].append(block.time[rows])
        parts["value"].append(values)
    points = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    connection.register("points", points)
    connection.execute(
        f"""COPY (SELECT runs[run + 1] AS run_id, metrics[metric + 1] AS metric,
            nullif(step, {MISSING_STEP}) AS step,
            CASE WHEN isnan(time) THEN NULL ELSE time END AS time, {_NOT_A_NUMBER} AS value
            FROM points, (SELECT $runs::VARCHAR[] AS runs, $metrics::VARCHAR[] AS metrics))
            TO {_quoted(path)} {_PARQUET}""",
        {"runs": runs, "metrics": list(metrics)},
    )
    connection.unregister("points")
    return len(points["value"])


def _write_parquet_rows(rows: list[dict[str, Any]], names: list[str], path: Path, folder: Path) -> None:
    types = {name: _sql_type(name, [row.get(name) for row in rows]) for name in names}
    lines = folder / "rows.jsonl"
    with lines.open("w", encoding="utf-8") as file:
        for row in rows:
            cells = {
                str(index): json.dumps(row[name])
                if types[name] == "VARCHAR" and not _is_text(row[name])
                else row[name]
                for index, name in enumerate(names)
                if row.get(name) is not None
            }
            file.write(f"{strict_json(cells)}\n")
    # Columns by number, because DuckDB ignores the case of names in JSON.
    columns = ", ".join(f"'{index}': '{types[name]}'" for index, name in enumerate(names))
    shown = ", ".join(f'"{index}" AS {_identifier(name)}' for index, name in enumerate(_distinct(names)))
    connection = _connection()
    try:
        connection.execute(
            f"COPY (SELECT {shown} FROM read_json({_quoted(lines)}, columns={{{columns}}}, "
            f"format='newline_delimited')) TO {_quoted(path)} {_PARQUET}"
        )
    finally:
        connection.close()


def _distinct(names: list[str]) -> list[str]:
    """Returns names that differ in more than case, which DuckDB ignores."""
    seen: set[str] = set()
    distinct = []
    for name in names:
        found = name
        while found.lower() in seen:
            found += "_"
        seen.add(found.lower())
        distinct.append(found)
    return distinct


def _sql_type(name: str, values: list[Any]) -> str:
    if name in FIELDS and FIELDS[name].type == "texts":
        return "VARCHAR[]"
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return "BOOLEAN"
    if kinds == {int} and all(
        -_LARGEST_INT <= value <= _LARGEST_INT for value in values if value is not None
    ):
        return "BIGINT"
    return "DOUBLE" if kinds and kinds <= {int, float} else "VARCHAR"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _quoted(text: str | Path) -> str:
    """Returns a text as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def _identifier(name: str) -> str:
    """Returns the name of a column as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
