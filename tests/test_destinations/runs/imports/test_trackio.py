"""Imports runs of Trackio, and compares them with Trackio's own storage."""

import contextlib
import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.imports import import_runs

pytestmark = [
    pytest.mark.xdist_group("trackio"),
    pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed"),
]

# Trackio reads its folder's location when it is imported, so a separate process logs to it.
PROGRAM = """
import json
import numpy as np, pandas as pd, trackio
trackio.init(project="My digits", name="first", config={"lr": 0.1, "net": {"depth": 3}}, group="sweep",
             auto_log_cpu=False, auto_log_gpu=False)
for step in range(3):
    trackio.log({"loss": 1 / (step + 1), "nested": {"x": step / 7}})
trackio.log({"image": trackio.Image(np.full((4, 5, 3), 9, np.uint8), caption="a nine"), "text": "hello",
             "table": trackio.Table(dataframe=pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})),
             "sound": trackio.Audio(np.arange(100, dtype=np.int16), sample_rate=8000, format="wav"),
             "histogram": trackio.Histogram(np_histogram=([1, 2], [0.0, 0.5, 1.0])), "nan": float("nan"),
             "markdown": trackio.Markdown("# A title")}, step=7)
trackio.log_system({"gpu": 0.5})
trackio.finish()
from trackio.sqlite_storage import SQLiteStorage
(project,) = SQLiteStorage.get_projects()
(run,) = SQLiteStorage.get_run_records(project)
logs = SQLiteStorage.get_logs(project, run["name"], run_id=run["id"])
print(json.dumps({"run": run, "logs": logs}))
"""


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Trackio's folder, and what its own storage finds."""
    folder = tmp_path_factory.mktemp("trackio")
    environment = {**os.environ, "TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def imported(logged, tmp_path_factory):
    """The report, and the run."""
    root = tmp_path_factory.mktemp("imported")
    report = import_runs(logged[0], root)
    return report, Run.open(root / "first")


def test_imported_run_has_trackios_facts(logged, imported):
    """Its id, name, start and configuration are there."""
    report, run = imported

    assert (report.runs, report.failures, dict(report.left_out)) == (1, [], {})
    assert run.run_id == logged[1]["run"]["id"]
    assert run.hyperparameters == {"lr": 0.1, "net": {"depth": 3}}
    about = run.environment["imported"]
    assert (about["source"], about["project"], about["group"]) == ("trackio", "Mydigits", "sweep")


def test_rows_equal_trackios(logged, imported):
    """Every number has its step; nested names are joined with slashes."""
    theirs = [(log["step"], log["loss"], log["nested"]["x"]) for log in logged[1]["logs"] if "loss" in log]

    rows = list(read_rows(imported[1].path))

    found = [
        (row.step, row.metrics["loss"], row.metrics["nested/x"]) for row in rows if "loss" in row.metrics
    ]
    assert found == theirs
    assert [row.step for row in rows if "nan" in row.metrics] == [7]
    assert [row.metrics["system/gpu"] for row in rows if "system/gpu" in row.metrics] == [0.5]


def test_records_equal_the_logged_ones(logged, imported):
    """Pixels, samples, bins, cells and words are equal."""
    run = imported[1]
    (image,), (sound,), (histogram,) = run.images(), run.audio(), run.histograms()
    table = run.table("table")
    (png,) = logged[0].glob("media/*/*/*/*.png")

    np.testing.assert_array_equal(image.array(), np.array(PIL.Image.open(png)))
    assert (image.array()[..., :3] == 9).all()
    assert (image.caption, image.step) == ("a nine", 7)
    np.testing.assert_array_equal(sound.load()[0][:, 0], np.arange(100))
    assert (histogram.counts.tolist(), histogram.edges.tolist()) == ([1, 2], [0.0, 0.5, 1.0])
    assert (table.columns, table.rows) == (("a", "b"), ((1, "x"), (2, "y")))
    assert {text.name: text.text for text in run.texts()} == {"text": "hello", "markdown": "# A title"}


def test_second_import_finds_nothing_new(logged, tmp_path):
    """The source is the folder or the database of the project, whatever the environment names."""
    first = import_runs(logged[0], tmp_path / "runs")
    again = import_runs(logged[0] / "Mydigits.db", tmp_path / "runs")

    assert (first.runs, again.runs, again.unchanged) == (1, 0, 1)


def test_changed_run_is_imported_again(logged, tmp_path):
    """This includes a value that was replaced. A damaged database is reported."""
    folder = tmp_path / "trackio"
    shutil.copytree(logged[0], folder)
    first = import_runs(folder, tmp_path / "runs")
    with contextlib.closing(sqlite3.connect(folder / "Mydigits.db")) as database:
        database.execute("update metrics set metrics = replace(metrics, '0.5', '0.25')")
        database.commit()
    (folder / "other.db").write_bytes((folder / "Mydigits.db").read_bytes()[:5000])

    changed = import_runs(folder, tmp_path / "runs")

    assert (first.runs, first.failures, changed.runs) == (1, [], 1)
    (failure,) = changed.failures
    assert failure.startswith("other.db: SQLite finds damage in ")
    assert 0.25 in [row.metrics.get("loss") for row in read_rows(tmp_path / "runs/first")]
