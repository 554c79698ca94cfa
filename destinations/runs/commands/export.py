"""`export`: the table of runs, or all metrics in long form, as CSV, Parquet or JSON lines.

Metrics are read and written block by block, so that memory does not grow with their number. A file appears when it is whole.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from destinations._formatting import plain
from destinations.runs import Run

from .fields import as_json
from .listing import selection_of
from .running import EXIT_OK, UsageError, find_runs, open_selected
from .screen import Session

__all__ = ["export"]

_SUFFIXES = (".csv", ".parquet", ".jsonl")
_METRIC_COLUMNS = ("run_id", "metric", "step", "time", "value")
_FIRST_COLUMNS = (
    "run_id",
    "name",
    "path",
    "status",
    "alive",
    "created_at",
    "ended_at",
    "updated_at",
    "tags",
    "notes",
)

Row = Sequence[Any]


def export(options: argparse.Namespace, session: Session) -> int:
    """Writes a table."""
    output = None if options.output in {None, "-"} else Path(options.output)
    if output is not None and output.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"output must end with {', '.join(_SUFFIXES)}, got {str(output)!r}.")
    runs = _selected(options, session)
    columns, rows = _all_metrics(runs) if options.metrics else _run_rows(runs, session.clock())
    counted = _Counted(rows)
    if output is None:
        stream = session.screen.stream
        _write_lines(stream, columns, counted) if options.json else _write_csv(stream, columns, counted)
        return EXIT_OK
    _write_file(output, columns, counted)
    if options.json:
        session.screen.json({"output": str(output), "runs": len(runs), "rows": counted.count})
    else:
        session.screen.line(f"{counted.count} rows of {len(runs)} runs in {output}")
    return EXIT_OK


def _selected(options: argparse.Namespace, session: Session) -> list[Run]:
    if options.run_name:
        if options.where or options.tag or options.status:
            raise UsageError(
                "runs must be named or selected, got both. Leave out the names, or --where, --tag and --status."
            )
        return find_runs(options.run_name, options, session)
    with open_selected(options, session) as runs:
        return runs.query(**selection_of(options))


class _Counted:
    """Rows that are counted as they go by."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows
        self.count = 0

    def __iter__(self) -> Iterator[Row]:
        for row in self._rows:
            self.count += 1
            yield row


def _run_rows(runs: Sequence[Run], now: float) -> tuple[Sequence[str], Iterable[Row]]:
    """Returns a row for each run: its fields, then `hparams.…`, then `summary.…`."""
    flat = []
    for run in runs:
        record = as_json(run.record, now)
        hparams, summary = record.pop("hparams"), record.pop("summary")
        record["tags"] = ";".join(record["tags"])
        record |= {f"hparams.{name}": value for name, value in hparams.items()}
        flat.append(record | {f"summary.{name}": value for name, value in summary.items()})
    names = dict.fromkeys((*_FIRST_COLUMNS, *(name for record in flat for name in record)))
    columns = sorted(names, key=lambda name: (name.startswith("summary."), name.startswith("hparams.")))
    return columns, ([record.get(name) for name in columns] for record in flat)


def _all_metrics(runs: Sequence[Run]) -> tuple[Sequence[str], Iterable[Row]]:
    return _METRIC_COLUMNS, itertools.chain.from_iterable(map(_metric_rows, runs))


def _metric_rows(run: Run) -> Iterator[Row]:
    """Yields every value of every metric of a run, block by block."""
    import numpy as np

    from destinations.runs.series import MISSING_STEP, run_blocks

    for block in run_blocks(run.path):
        for name, (values, is_there) in block.columns.items():
            steps: list[int | None] = block.step[is_there].tolist()
            times: list[float | None] = block.time[is_there].tolist()
            if MISSING_STEP in steps:
                steps = [None if step == MISSING_STEP else step for step in steps]
            if np.isnan(block.time).any():
                times = [None if time is None or time != time else time for time in times]  # noqa: PLR0124  # NaN
            yield from zip(
                itertools.repeat(run.run_id),
                itertools.repeat(name),
                steps,
                times,
                values[is_there].tolist(),
                strict=False,
            )


# --- files ---------------------------------------------------------------------------------------------------------


def _write_file(output: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    kind = output.suffix.lower()
    if kind == ".parquet":
        _require_duckdb()
    handle, name = tempfile.mkstemp(dir=output.absolute().parent, prefix=f".{output.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            (_write_lines if kind == ".jsonl" else _write_csv)(file, columns, rows)
        if kind == ".parquet":
            _to_parquet(temporary, columns)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_csv(file: IO[str], columns: Sequence[str], rows: Iterable[Row]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)


def _write_lines(file: IO[str], columns: Sequence[str], rows: Iterable[Row]) -> None:
    for row in rows:
        record = plain({name: value for name, value in zip(columns, row, strict=True) if value is not None})
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")


def _to_parquet(path: Path, columns: Sequence[str]) -> None:
    """Turns a CSV into Parquet, in its place; a column has the narrowest type that holds all its values."""
    import duckdb

    target = path.with_name(f"{path.name}.parquet")
    types = "types={'run_id': 'VARCHAR', 'metric': 'VARCHAR', 'step': 'BIGINT', 'time': 'DOUBLE', 'value': 'DOUBLE'}"
    how = types if tuple(columns) == _METRIC_COLUMNS else "types={'run_id': 'VARCHAR'}, sample_size=-1"
    connection = duckdb.connect(
        ":memory:", config={"memory_limit": "1GB", "temp_directory": str(path.parent)}
    )
    try:
        connection.execute("SET preserve_insertion_order = true")
        source = f"read_csv({_quoted(path)}, header=true, delim=',', quote='\"', escape='\"', {how})"
        connection.execute(f"COPY (FROM {source}) TO {_quoted(target)} (FORMAT parquet, COMPRESSION zstd)")
        target.replace(path)
    except duckdb.Error as error:
        raise OSError(f"Parquet file must be one that DuckDB can write, got: {error}") from error
    finally:
        connection.close()
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _require_duckdb() -> None:
    try:
        import duckdb  # noqa: F401  # asked for before anything is read
    except ImportError as error:
        raise ImportError(
            f"package 'duckdb' must be installed for Parquet, got: {error}. "
            'Run: pip install "training-destinations[query]". CSV and JSON lines need nothing.',
            name="duckdb",
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
