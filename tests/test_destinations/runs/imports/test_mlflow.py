"""Imports runs of MLflow from a database and from files, and compares them with MLflow's own client."""

import contextlib
import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.imports import SourceError, import_runs

pytestmark = [
    pytest.mark.xdist_group("mlflow"),
    # Warnings of MLflow's own code while it writes runs.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", params=["mlflow.db", "mlruns"])
def store(request, tmp_path_factory):
    """A store of each form with two runs, the client, and the ids of the runs."""
    folder = tmp_path_factory.mktemp("mlflow")
    path = folder / request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{path}" if request.param == "mlflow.db" else path.as_uri())
        experiment = client.create_experiment("digits", artifact_location=(folder / "artifacts").as_uri())
        run = client.create_run(experiment, start_time=1000_000, run_name="first", tags={"stage": "tuning"})
        first = run.info.run_id
        client.set_tag(first, "mlflow.note.content", "a note")
        for name, value in {"lr": 0.1, "epochs": 3, "name": "adam", "nesterov": True}.items():
            client.log_param(first, name, value)
        for step in range(4):
            client.log_metric(first, "loss", 1 / (step + 1), timestamp=1000_000 + 5000 * step, step=step)
            client.log_metric(first, "val/acc", step / 7, timestamp=1000_003 + 5000 * step, step=step)
        client.log_metric(first, "loss", float("nan"), timestamp=1060_000, step=3)
        client.log_text(first, "hello", "texts/hello.txt")
        # Links in an untrusted run may lead anywhere.
        (artifacts,) = (folder / "artifacts").glob("*/artifacts")
        (folder / "key.txt").write_text("private")
        (artifacts / "key.txt").symlink_to(folder / "key.txt")
        client.log_image(first, np.eye(4, 5, dtype=np.uint8)[..., None] * 200, key="eye/one", step=3)
        client.set_terminated(first, status="FAILED", end_time=1070_000)
        running = client.create_run(experiment, run_name="first").info.run_id
        yield path, client, first, running


@pytest.fixture(scope="module")
def imported(store, tmp_path_factory):
    """The report, and the runs by id."""
    root = tmp_path_factory.mktemp("imported")
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        report = import_runs(store[0], root)
        assert list(Path.cwd().iterdir()) == []
    assert dict(os.environ) == before
    return report, {run.run_id: run for run in map(Run.open, root.iterdir())}


def test_imported_run_has_mlflows_facts(store, imported):
    """Id, times, status, tags and notes are there, and parameters are numbers again."""
    _, _, first, running = store
    report, runs = imported
    run = runs[first]

    assert runs.keys() == {first, running}
    assert (run.status, run.created_at, run.record.ended_at) == ("failed", 1000.0, 1070.0)
    assert (run.record.tags, run.record.notes) == (("stage:tuning",), "a note")
    assert run.hyperparameters == {"lr": 0.1, "epochs": 3, "name": "adam", "nesterov": True}
    assert run.environment["imported"]["experiment"] == "digits"
    assert runs[running].status == "preempted"
    assert (report.runs, report.failures, report.left_out) == (
        2,
        [],
        Counter({"links": 1}),
    )
    assert not list(run.path.rglob("key.txt"))


@pytest.mark.parametrize("name", ["loss", "val/acc"])
def test_metrics_equal_mlflows(store, imported, name):
    """Every value has its step; values of a step that were logged together are one row."""
    _, client, first, _ = store
    theirs = sorted((one.timestamp, one.step, one.value) for one in client.get_metric_history(first, name))

    rows = [row for row in read_rows(imported[1][first].path) if name in row.metrics]

    assert [row.step for row in rows] == [step for _, step, _ in theirs]
    np.testing.assert_array_equal([row.metrics[name] for row in rows], [value for *_, value in theirs])
    np.testing.assert_allclose([row.time for row in rows], [time / 1000 for time, *_ in theirs], atol=0.0031)


def test_files_and_images_equal_mlflows(store, imported):
    """An image has its name, step and time; the smaller copy is left out."""
    _, _, first, _ = store
    run = imported[1][first]

    (image,) = run.images()
    assert (image.name, image.step) == ("eye/one", 3)
    np.testing.assert_array_equal(image.array().reshape(4, 5, -1)[..., 0], np.eye(4, 5) * 200)
    assert [(one.name, one.path.read_bytes()) for one in run.artifacts()] == [("texts/hello.txt", b"hello")]


def test_import_leaves_the_store_unchanged(store, tmp_path):
    """Only changed runs are imported again, such as one with a new file or a value at an earlier step."""
    path, client, first, running = store
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    before = {file: file.read_bytes() for file in files}

    import_runs(path, tmp_path / "runs")
    again = import_runs(path.parent, tmp_path / "runs")

    assert {file: file.read_bytes() for file in files} == before
    assert (again.runs, again.unchanged) == (0, 2)
    client.log_metric(running, "loss", 1.0, step=0)
    assert import_runs(path, tmp_path / "runs").runs == 1
    client.log_metric(first, "loss", 9.0, timestamp=1000_000, step=1)
    assert import_runs(path, tmp_path / "runs").runs == 1
    client.log_text(first, "later", "later.txt")
    assert import_runs(path, tmp_path / "runs").runs == 1
    assert import_runs(path, tmp_path / "runs").unchanged == 2


def test_damaged_store_is_reported(store, tmp_path):
    """The readable runs are imported, and each problem has a message."""
    path, _, first, running = store
    copy = tmp_path / "store" / path.name
    if path.is_dir():
        shutil.copytree(path, copy)
        (metric,) = copy.glob(f"*/{first}/metrics/loss")
        metric.write_text(metric.read_text()[:-20] + "\nnonsense\n")
        (copy / metric.parents[2].name / ("0" * 32)).mkdir()
    else:
        copy.parent.mkdir()
        # A page of one of its tables, as a disk would lose it.
        with contextlib.closing(sqlite3.connect(path)) as database:
            (page,) = database.execute("select rootpage from sqlite_master where name = 'metrics'").fetchone()
            (size,) = database.execute("pragma page_size").fetchone()
        data = bytearray(path.read_bytes())
        data[(page - 1) * size : page * size] = b"\xff" * size
        copy.write_bytes(data)

    report = import_runs(copy, tmp_path / "runs")

    if path.is_dir():
        assert [text.partition(":")[0] for text in report.failures] == ["0" * 32, first]
        assert [Run.open(folder).run_id for folder in (tmp_path / "runs").iterdir()] == [running]
    else:
        assert report.failures[-1].startswith("mlflow.db: SQLite finds damage in ")


def test_artifact_folders_outside_mlflow_are_not_read(tmp_path):
    """An untrusted database may name any folder of this machine."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key.txt").write_text("private")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        client = MlflowClient((tmp_path / "mlruns").as_uri())
        client.log_metric(client.create_run("0").info.run_id, "loss", 1.0)
    (about,) = (tmp_path / "mlruns/0").glob("*/meta.yaml")
    lines = about.read_text().splitlines()
    own = f"artifact_uri: {(tmp_path / 'private').as_uri()}"
    about.write_text("\n".join(own if "artifact_uri" in line else line for line in lines))

    report = import_runs(tmp_path, tmp_path / "runs")

    assert (report.runs, report.failures) == (1, [])
    assert dict(report.left_out) == {"artifact folders outside MLflow": 1}
    assert not list((tmp_path / "runs").rglob("key.txt"))


def test_missing_artifacts_are_counted(tmp_path):
    """The rest is imported, and the next import looks for them again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        client = MlflowClient((tmp_path / "mlruns").as_uri())
        experiment = client.create_experiment("digits", artifact_location="nowhere://bucket/artifacts")
        client.log_metric(client.create_run(experiment).info.run_id, "loss", 1.0)

    report = import_runs(tmp_path, tmp_path / "runs")

    assert (report.runs, report.rows, dict(report.left_out)) == (1, 1, {})
    (failure,) = report.failures
    assert failure.endswith(": 1 folders of artifacts that are missing")


def test_other_databases_are_not_recognised(tmp_path):
    """The name of the file does not matter."""
    Path(tmp_path / "mlflow.db").write_bytes(b"not so")

    with pytest.raises(SourceError, match="no runs were recognised"):
        import_runs(tmp_path / "mlflow.db", tmp_path / "runs")
    with pytest.raises(SourceError, match="is not a database, folder or server of MLflow"):
        import_runs(tmp_path / "mlflow.db", tmp_path / "runs", source="mlflow")
