"""The tables of a dataset: their columns, and how they are written.

| table | a row is |
|---|---|
| metrics | a point: metric, run_id, rank, step, row, time, value |
| runs | a run: what `RunRecord` has of it |
| hparams | a hyperparameter of a run: type, as JSON, and as a number where it is one |
| summary | a metric of a run: last, least, greatest, mean, and how many |
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.runs.record import RunRecord, Scalar
from destinations.runs.run import MetricSummary, Run
from destinations.runs.sql import NOT_A_NUMBER, PARQUET, quoted

from .staging import Batch

__all__ = [
    "COLUMNS",
    "METRIC_COLUMNS",
    "RunRow",
    "json_of",
    "scalar_of",
    "write_batch",
    "write_rows",
    "write_table",
]

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "runs": {
        "run_id": "VARCHAR",
        "path": "VARCHAR",
        "kind": "VARCHAR",
        "status": "VARCHAR",
        "created_at": "DOUBLE",
        "ended_at": "DOUBLE",
        "updated_at": "DOUBLE",
        "tags": "VARCHAR[]",
        "notes": "VARCHAR",
        "display_name": "VARCHAR",
        "archived": "BOOLEAN",
        "checkpoint_path": "VARCHAR",
        "points": "BIGINT",
        "part": "VARCHAR",
        "metrics_state": "VARCHAR",
        "record_state": "VARCHAR",
    },
    "hparams": {
        "run_id": "VARCHAR",
        "name": "VARCHAR",
        "type": "VARCHAR",
        "json": "VARCHAR",
        "number": "DOUBLE",
    },
    "summary": {
        "run_id": "VARCHAR",
        "metric": "VARCHAR",
        "last": "DOUBLE",
        "min": "DOUBLE",
        "max": "DOUBLE",
        "min_step": "BIGINT",
        "max_step": "BIGINT",
        "count": "BIGINT",
        "non_finite": "BIGINT",
        "mean": "DOUBLE",
    },
}

METRIC_COLUMNS: Mapping[str, str] = {
    "metric": "VARCHAR",
    "run_id": "VARCHAR",
    "rank": "INTEGER",
    "step": "BIGINT",
    "row": "BIGINT",
    "time": "TIMESTAMP",
    "value": "DOUBLE",
}

_MISSING = "nullif({}, -9223372036854775808)"


@attrs.frozen
class RunRow:
    """A run as the tables have it.

    Attributes:
        record: of the run.
        summary: of its metrics, rank 0.
        points: how many points it has.
        part: which part has them.
        metrics_state: changes when the metrics do.
        record_state: changes when the record does.
    """

    record: RunRecord
    summary: Mapping[str, MetricSummary]
    points: int
    part: str
    metrics_state: str
    record_state: str

    @classmethod
    def of(cls, run: Run, points: int, part: str, metrics_state: str, record_state: str) -> "RunRow":
        """Returns the row of a run; a summary that its end did not write is computed."""
        return cls(run.record, run.summary, points, part, metrics_state, record_state)


def write_batch(connection: Any, batch: Batch, path: Path) -> None:
    """Writes points to a Parquet file, in the order that they have."""
    columns = {
        name: batch.columns[name] for name in ("metric", "run", "rank", "step", "row", "time", "value")
    }
    connection.register("points", columns)
    # Names by index, for a join would not keep the order.
    connection.execute(
        f"""COPY (SELECT metrics[metric + 1] AS metric, runs[run + 1] AS run_id, rank,
            {_MISSING.format("step")} AS step,
            row, make_timestamp({_MISSING.format("time")}) AS time,
            {NOT_A_NUMBER} AS value
            FROM points, (SELECT $metrics::VARCHAR[] AS metrics, $runs::VARCHAR[] AS runs))
            TO {quoted(path)} {PARQUET}""",
        {"metrics": list(batch.metrics), "runs": list(batch.runs)},
    )
    connection.unregister("points")


def write_rows(rows: Iterable[RunRow], folder: Path) -> dict[str, Path]:
    """Writes rows as lines of JSON, a file for each table; returns their paths."""
    paths = {table: folder / f"{table}.jsonl" for table in COLUMNS}
    files = {table: path.open("w", encoding="utf-8") for table, path in paths.items()}
    try:
        for row in rows:
            files["runs"].write(_line(_run(row)))
            run_id = row.record.run_id
            files["hparams"].writelines(_line(_hparam(run_id, *one)) for one in row.record.hparams.items())
            files["summary"].writelines(
                _line({"run_id": run_id, "metric": name, **attrs.asdict(metric)})
                for name, metric in row.summary.items()
            )
    finally:
        for file in files.values():
            file.close()
    return paths


def write_table(
    connection: Any, table: str, lines: Path, old: str | None, parts: Mapping[str, str], path: Path
) -> None:
    """Writes a table: the rows of its last version, those of some runs replaced.

    Args:
        connection: of DuckDB; it has a table `replaced` of the ids of these runs.
        table: its name.
        lines: the rows of these runs, from `write_rows`.
        old: the last version, as DuckDB calls it; None where there is none.
        parts: parts that have another id now.
        path: the new version.
    """
    columns = COLUMNS[table]
    types = ", ".join(f"'{name}': '{kind}'" for name, kind in columns.items())
    names = ", ".join(columns)
    new = f"SELECT {names} FROM read_json({quoted(lines)}, columns={{{types}}}, format='newline_delimited')"
    source = new
    parameters: dict[str, Any] = {}
    if old is not None:
        kept = names
        if table == "runs":
            kept = names.replace(
                ", part,",
                ", coalesce(map_extract_value(map($old::VARCHAR[], $new::VARCHAR[]), part), part) AS part,",
            )
            parameters |= {"old": list(parts), "new": list(parts.values())}
        source = (
            f"SELECT {kept} FROM read_parquet({quoted(old)}) "
            f"WHERE run_id NOT IN (FROM replaced) UNION ALL {new}"
        )
    order = "run_id" if table == "runs" else ", ".join(list(columns)[:2])
    connection.execute(
        f"COPY (SELECT * FROM ({source}) ORDER BY {order}) TO {quoted(path)} {PARQUET}", parameters or None
    )


def json_of(value: Scalar) -> tuple[str, str, float | None]:
    """Returns type, JSON and number of a hyperparameter."""
    if isinstance(value, bool):
        return "bool", json.dumps(value), float(value)
    if isinstance(value, int):
        try:
            return "int", json.dumps(value), float(value)
        except OverflowError:
            return "int", json.dumps(value), None
    if isinstance(value, float):
        return "float", json.dumps(value if math.isfinite(value) else _non_finite(value)), value
    return ("null", "null", None) if value is None else ("str", json.dumps(str(value)), None)


def scalar_of(kind: str, value: str) -> Scalar:
    """Returns what `json_of` took."""
    found: Scalar = json.loads(value)
    return float(found) if kind == "float" and found is not None else found


def _run(row: RunRow) -> dict[str, Any]:
    record = row.record
    own = {
        "path": str(record.path),
        "tags": list(record.tags),
        "points": row.points,
        "part": row.part,
        "metrics_state": row.metrics_state,
        "record_state": row.record_state,
    }
    return {name: own[name] if name in own else getattr(record, name) for name in COLUMNS["runs"]}


def _hparam(run_id: str, name: str, value: Scalar) -> dict[str, Any]:
    kind, text, number = json_of(value)
    return {"run_id": run_id, "name": name, "type": kind, "json": text, "number": number}


def _line(record: Mapping[str, Any]) -> str:
    return (
        json.dumps(
            {
                name: _non_finite(value) if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in record.items()
            }
        )
        + "\n"
    )


def _non_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
