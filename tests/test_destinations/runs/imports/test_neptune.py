"""Imports the output of Neptune's exporter, and compares it with what pyarrow reads."""

from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.imports import import_runs

# The schema of its files.
SCHEMA = pa.schema(
    [
        ("project_id", pa.string()),
        ("run_id", pa.string()),
        ("attribute_path", pa.string()),
        ("attribute_type", pa.string()),
        ("step", pa.decimal128(18, 6)),
        ("timestamp", pa.timestamp("ms", tz="UTC")),
        ("int_value", pa.int64()),
        ("float_value", pa.float64()),
        ("string_value", pa.string()),
        ("bool_value", pa.bool_()),
        ("datetime_value", pa.timestamp("ms", tz="UTC")),
        ("string_set_value", pa.list_(pa.string())),
        ("file_value", pa.struct([("path", pa.string())])),
        (
            "histogram_value",
            pa.struct(
                [
                    ("type", pa.string()),
                    ("edges", pa.list_(pa.float64())),
                    ("values", pa.list_(pa.float64())),
                ]
            ),
        ),
    ]
)
BEGAN = 1_700_000_000


def at(seconds):
    """Returns a time of the run."""
    return datetime.fromtimestamp(BEGAN + seconds, UTC)


def row(kind, path, value=None, step=None, column=None):
    """Returns a row of a run."""
    step = None if step is None else Decimal(step)
    column = column or f"{kind.removesuffix('_series')}_value"
    time = None if step is None else at(int(step) * 60)
    about = {"project_id": "team/digits", "run_id": "DIG-1", "attribute_path": path, "attribute_type": kind}
    return {**about, "step": step, "timestamp": time, column: value}


@pytest.fixture
def exported(tmp_path):
    """The folders of an export, in two parts."""
    data, files = (tmp_path / f"exports/{name}/team_digits-0011" for name in ("data", "files"))
    data.mkdir(parents=True)
    (files / "DIG-1").mkdir(parents=True)
    PIL.Image.fromarray(np.eye(4, 5, dtype=np.uint8) * 200).save(files / "DIG-1/step_1.png")
    (files / "DIG-1/weights.bin").write_bytes(b"weights")
    (tmp_path / "exports/secret").write_text("secret")
    first = [
        row("string", "sys/name", "The first"),
        row("datetime", "sys/creation_time", at(0)),
        row("string_set", "sys/tags", ["good", "small"]),
        row("string", "sys/description", "a note"),
        row("bool", "sys/failed", value=True),
        row("float", "parameters/lr", 0.1),
        row("int", "parameters/epochs", 3),
        *(row("float_series", "metrics/loss", 1 / (step + 1), step) for step in range(3)),
        row("float_series", "metrics/loss", float("nan"), "2.5"),
    ]
    second = [
        *(row("float_series", "metrics/acc", step / 7, step) for step in range(3)),
        row("string_series", "logs/stdout", "hello", 1),
        row("histogram_series", "weights", {"type": "COUNTING", "edges": [0, 0.5, 1], "values": [1, 2]}, 2),
        row("file_series", "images", {"path": "DIG-1/step_1.png"}, 1),
        row("file", "model/weights", {"path": "DIG-1/weights.bin"}),
        row("file", "gone", {"path": "DIG-1/gone"}),
        row("file", "outside", {"path": "../../secret"}),
    ]
    for number, rows in enumerate((first, second)):
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), data / f"DIG-1-00ff_part_{number}.parquet")
    return tmp_path / "exports"


@pytest.mark.parametrize("place", [".", "data"])
def test_imported_run_equals_the_export(exported, tmp_path, place):
    """It has facts, metrics, texts, histograms, images and files; what can't be imported is counted."""
    report = import_runs(exported / place, tmp_path / "runs")

    run = Run.open(tmp_path / "runs/The first")
    assert (run.run_id, run.status, run.created_at) == ("DIG-1", "failed", BEGAN)
    assert (run.record.tags, run.record.notes) == (("good", "small"), "a note")
    assert run.hyperparameters == {"parameters.lr": 0.1, "parameters.epochs": 3}
    assert run.environment["imported"]["project"] == "team/digits"
    assert [(text.text, text.step, text.time) for text in run.texts("logs/stdout")] == [
        ("hello", 1, BEGAN + 60)
    ]
    (histogram,), (image,) = run.histograms("weights"), run.images("images")
    assert (histogram.counts.tolist(), histogram.edges.tolist()) == ([1, 2], [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(image.array(), np.eye(4, 5) * 200)
    assert (image.step, image.time) == (1, BEGAN + 60)
    assert [(one.name, one.path.read_bytes()) for one in run.artifacts()] == [
        ("model/weights.bin", b"weights")
    ]
    assert dict(report.left_out) == {
        "paths out of the folder": 1,
        "fractions of steps": 1,
    }
    assert report.failures == ["DIG-1: 1 files that are missing"]


@pytest.mark.parametrize("name", ["metrics/loss", "metrics/acc"])
def test_metrics_equal_those_that_pyarrow_reads(exported, tmp_path, name):
    """Every value is there, and values with the same step and time are one row."""
    import_runs(exported, tmp_path / "runs")

    table = pa.concat_tables(pq.read_table(path) for path in sorted(exported.rglob("*.parquet")))
    theirs = [
        (int(one["step"]), one["timestamp"].timestamp(), one["float_value"])
        for one in table.to_pylist()
        if one["attribute_path"] == name
    ]
    rows = [one for one in read_rows(tmp_path / "runs/The first") if name in one.metrics]
    np.testing.assert_array_equal([(one.step, one.time, one.metrics[name]) for one in rows], theirs)
    assert len(list(read_rows(tmp_path / "runs/The first"))) == 4


def test_second_import_finds_only_changes(exported, tmp_path):
    """A new part is imported, and a file that was missing is looked for again."""
    import_runs(exported, tmp_path / "runs")
    next((exported / "files").rglob("weights.bin")).with_name("gone").write_bytes(b"found")
    found = import_runs(exported, tmp_path / "runs")

    again = import_runs(exported, tmp_path / "runs")
    rows = [row("float_series", "metrics/acc", 1.0, 3)]
    (folder,) = (exported / "data").iterdir()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / "DIG-1-00ff_part_2.parquet")
    more = import_runs(exported, tmp_path / "runs")

    assert (found.runs, found.failures) == (1, [])
    assert (again.runs, again.unchanged, more.runs) == (0, 1, 1)
    assert [one.step for one in read_rows(tmp_path / "runs/The first")] == [0, 1, 2, 2, 3]


def test_linked_folders_of_files_are_not_followed(exported, tmp_path):
    """An untrusted export may link them to any folder of this machine."""
    (files,) = (exported / "files").iterdir()
    files.rename(tmp_path / "private")
    files.symlink_to(tmp_path / "private")

    report = import_runs(exported, tmp_path / "runs")

    assert not report.records["artifact"]
    assert not report.records["image"]
    assert (report.runs, report.left_out["paths out of the folder"]) == (1, 4)
