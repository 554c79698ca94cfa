"""Exports runs and their metrics to one file."""

import csv
import io
import json
import math

import attrs
import pytest

from destinations import RunDirectory
from destinations.run_directory import read_rows
from destinations.runs import Run, RunRecord
from destinations.runs.export import export_metrics, export_rows, export_runs
from tests.test_destinations.run_directory.test_parts import as_csv
from tests.test_destinations.runs.written import Written, write_csv, write_shared


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with metrics: one without steps, one with sparse rows and odd names."""
    folder = tmp_path_factory.mktemp("runs")
    with Written(folder / "a") as written:
        for step, value in enumerate([0.1, math.nan, -math.inf, 5e-324]):
            written.log({"loss": value, **({"val/acc": step} if step % 2 else {})}, step)
    write_csv(folder / "b", ['step,loss,"a,""b"""', ",0.25,1", "3,,2"])
    return [Run.open(folder / "a"), Run.open(folder / "b")]


def expected(runs):
    """Returns each value by run and metric, in long form."""
    found = []
    for run in runs:
        for name in run.metric_names():
            series = run.series(name)
            for step, time, value, has_step in zip(
                *(array.tolist() for array in (series.step, series.time, series.value, series.has_step)),
                strict=True,
            ):
                found.append(
                    (
                        run.run_id,
                        name,
                        int(step) if has_step else None,
                        None if math.isnan(time) else time,
                        value,
                    )
                )
    return sorted(map(repr, found))


def number(text):
    """Returns a number as strict JSON has it."""
    return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(text, text)


def test_metrics_as_csv(runs, tmp_path):
    """Every value is a row, exact and in the order of logging."""
    path = tmp_path / "metrics.csv"

    count = export_metrics(runs, path)

    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    back = [
        (
            row["run_id"],
            row["metric"],
            int(row["step"]) if row["step"] else None,
            float(row["time"]) if row["time"] else None,
            float(row["value"]),
        )
        for row in rows
    ]
    assert count == len(rows) == 9
    assert sorted(map(repr, back)) == expected(runs)
    assert [row["metric"] for row in rows[:3]] == ["loss", "loss", "val/acc"]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv"}


def test_metrics_as_json_lines(runs):
    """Every line is strict JSON; NaN and infinities are strings."""
    stream = io.StringIO()

    count = export_metrics(runs, stream, format="jsonl")

    records = [
        json.loads(line, parse_constant=lambda _: pytest.fail("not strict"))
        for line in stream.getvalue().splitlines()
    ]
    back = [
        (*(one[name] for name in ("run_id", "metric", "step", "time")), float(number(one["value"])))
        for one in records
    ]
    assert count == 9
    assert sorted(map(repr, back)) == expected(runs)


def test_metrics_as_parquet(runs, tmp_path):
    """Parquet has the same rows in the same order, and null for a missing step or time."""
    pandas, duckdb = pytest.importorskip("pandas"), pytest.importorskip("duckdb")
    path = tmp_path / "it's.parquet"

    count = export_metrics(runs, path)

    frame = pandas.read_parquet(path)
    assert list(frame.columns) == ["run_id", "metric", "step", "time", "value"]
    back = [
        (
            run,
            metric,
            None if math.isnan(step) else int(step),
            None if math.isnan(time) else time,
            float(value),
        )
        for run, metric, step, time, value in frame.itertuples(index=False)
    ]
    assert count == len(frame) == 9
    with duckdb.connect() as connection:
        nulls = connection.execute("SELECT count(*) FROM read_parquet(?) WHERE value IS NULL", [str(path)])
        assert nulls.fetchall() == [(0,)]
    assert sorted(map(repr, back)) == expected(runs)


def test_parquet_to_a_stream(runs):
    """A byte stream gets the file and stays open; a text stream gets it through its buffer."""
    pandas = pytest.importorskip("pandas")
    stream = io.BytesIO()
    text = io.TextIOWrapper(io.BytesIO())

    counts = [export_metrics(runs, one, format="parquet") for one in (stream, text)]

    assert counts == [9, 9]
    assert stream.getvalue() == text.buffer.getvalue()
    assert len(pandas.read_parquet(io.BytesIO(stream.getvalue()))) == 9


RECORDS = [
    {
        "run_id": "a",
        "hparams": {"lr": 0.1, "n": 1, "mixed": 1},
        "summary": {"loss": math.nan},
        "tags": ("x", "y"),
    },
    {"run_id": "b", "hparams": {"lr": 1, "flag": True, "mixed": "text", "LR": 2}, "notes": 'say "hi",\nthen'},
]


class InParts(RunDirectory):
    """Closes a part after a few kilobytes."""

    _part_bytes = 2000


class WrittenInParts(Written):
    """A run with small parts."""

    kind = InParts


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run with parts, one from an earlier version, and rows in its open file; some metrics come and go."""
    folder = tmp_path_factory.mktemp("long") / "run"
    with WrittenInParts(folder) as written:
        for step in range(200):
            more = {"val/acc": step} if step % 3 == 0 else {}
            late = {"late": math.nan if step == 150 else 5e-324} if step > 120 else {}
            written.log({"loss": step / 7, **more, **late}, step)
            if step % 20 == 19:
                written.flush()
        written.log({"loss": 2**60}, None)
    as_csv(folder, [2])
    return Run.open(folder)


def _by_name(row):
    """Returns a row with its metrics by name: each part has them in the order of its own rows."""
    return attrs.evolve(row, metrics=dict(sorted(row.metrics.items())))


def test_rows_as_csv_are_a_complete_metrics_csv(long_run, tmp_path):
    """One file has the rows of the parts, the CSV and the journal, with all columns and exact numbers."""
    count = export_rows(long_run, tmp_path / "metrics.csv")

    assert count == 201
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,epoch,time,loss,val/acc,late"
    (tmp_path / "run").mkdir()
    (tmp_path / "metrics.csv").rename(tmp_path / "run/metrics.csv")
    found, written = (
        [_by_name(row) for row in read_rows(path)] for path in (tmp_path / "run", long_run.path)
    )
    assert repr(found) == repr(written)


def test_rows_as_json_lines(long_run):
    """A line has the metrics of its row; NaN is a string."""
    stream = io.StringIO()

    count = export_rows(long_run, stream, format="jsonl")

    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert count == len(lines) == 201
    assert list(lines[1]) == ["step", "epoch", "time", "loss"]
    assert (lines[150]["late"], lines[151]["late"], lines[150]["val/acc"]) == ("NaN", 5e-324, 150)


def test_rows_as_parquet(long_run, tmp_path):
    """Each metric is a column, with null for missing values; NaN is not missing."""
    from pyarrow import parquet

    count = export_rows(long_run, tmp_path / "rows.parquet")

    table = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    rows = read_rows(long_run.path)
    assert count == len(table) == 201
    assert list(table[0]) == ["step", "epoch", "time", "loss", "val/acc", "late"]
    assert [one["step"] for one in table] == [row.step for row in rows]
    assert [one["time"] for one in table] == [row.time for row in rows]
    for name in ("loss", "val/acc", "late"):
        found = [one[name] for one in table]
        expected = [row.metrics.get(name) for row in rows]
        assert repr(found) == repr([None if one is None else float(one) for one in expected])


@pytest.fixture
def records(tmp_path):
    """The records of two runs that have little in common."""
    return [
        RunRecord(path=tmp_path / one["run_id"], kind="run-directory", status="completed", **one)
        for one in RECORDS
    ]


def test_runs_as_csv(records, tmp_path):
    """Each run is a row, and each hyperparameter and metric of any run a column; missing values are empty."""
    export_runs(records, tmp_path / "runs.csv")

    with (tmp_path / "runs.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["run_id"], first["tags"], first["hparams.lr"], first["summary.loss"]) == (
        "a",
        '["x", "y"]',
        "0.1",
        "nan",
    )
    assert (first["hparams.flag"], second["hparams.flag"], second["notes"]) == ("", "True", 'say "hi",\nthen')


def test_runs_as_parquet(records, tmp_path):
    """Columns have the narrowest type; names that differ only in case are kept apart."""
    pandas = pytest.importorskip("pandas")

    export_runs(records, tmp_path / "runs.parquet")

    frame = pandas.read_parquet(tmp_path / "runs.parquet")
    assert frame["hparams.lr"].tolist() == [0.1, 1.0]
    assert frame["hparams.mixed"].tolist() == ["1", "text"]
    assert frame["hparams.flag"].tolist() == [None, True]
    assert frame["hparams.LR_"].dropna().tolist() == [2]
    assert math.isnan(frame["summary.loss"][0])
    assert frame["tags"][0].tolist() == ["x", "y"]


def test_values_without_a_parquet_type_are_converted(tmp_path):
    """An integer beyond 64 bits becomes the nearest float, and a lone surrogate is escaped."""
    pandas = pytest.importorskip("pandas")
    hparams = {"huge": 2**70, "text": "a\ud800", "b\ud800": 1}
    record = RunRecord(path=tmp_path / "a", run_id="a", kind="run-directory", hparams=hparams)

    export_runs([record], tmp_path / "runs.parquet")

    frame = pandas.read_parquet(tmp_path / "runs.parquet")
    assert frame["hparams.huge"].tolist() == [2.0**70]
    assert frame["hparams.text"].tolist() == ["a\\ud800"]
    assert frame["hparams.b\\ud800"].tolist() == [1]


def test_unknown_format_raises(tmp_path):
    """The error for an unknown suffix or a stream without a format says what to give."""
    with pytest.raises(ValueError, match=r"'\.xlsx'.*format="):
        export_runs([], tmp_path / "runs.xlsx")
    with pytest.raises(ValueError, match="format="):
        export_metrics([], io.StringIO())
    with pytest.raises(ValueError, match="'xml'"):
        export_metrics([], io.StringIO(), format="xml")


def test_failed_export_keeps_the_earlier_file(tmp_path):
    """Only a complete file replaces an earlier one."""
    path = tmp_path / "metrics.csv"
    path.write_text("before")

    def broken():
        raise OSError("disk")
        yield

    with pytest.raises(OSError, match="disk"):
        export_metrics(broken(), path, overwrite=True)

    assert path.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv"}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_values_of_several_writers_have_a_writer_column(runs, tmp_path, kind):
    """An export without such a run has no such column."""
    shared, path = Run.open(write_shared(tmp_path / "shared")), tmp_path / f"metrics.{kind}"

    count = export_metrics([*runs, shared], path, metrics=["loss"])
    export_metrics(runs, tmp_path / f"without.{kind}", metrics=["loss"])

    rows, without = rows_of(path), rows_of(tmp_path / f"without.{kind}")
    found = [(row["step"], row["value"], row["writer"]) for row in rows if row["run_id"] == shared.run_id]
    found = [(int(step), float(value), writer) for step, value, writer in found]
    assert found == [(1, 10.0, ""), (2, 20.0, ""), (1, 11.0, "eval"), (0, 0.5, "eval"), (1, 12.0, "probe")]
    assert {row["writer"] for row in rows if row["run_id"] != shared.run_id} == {""}
    assert count == len(rows) == len(without) + 5
    assert "writer" not in without[0]
    if kind == "csv":
        assert path.read_text().startswith("run_id,metric,step,time,value,writer\n")


def rows_of(path):
    """Returns the rows of an export, each by column."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()
