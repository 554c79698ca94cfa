"""Runs of a newer release are listed with the release to use, and never changed."""

import json
import shutil

import pytest

from destinations import RunDirectory, cli
from destinations.run_directory import NewerFormatError, RunPathError, read_rows
from destinations.runs import Run as ReadRun
from destinations.runs import open_runs
from destinations.runs.dataset import compact
from events import Run

SAYS = r"format version 99; this one knows versions up to \d+\. Use training-destinations 9\.8\.7 or newer\."


def write(place, **options):
    """Writes a run with one row and one text."""
    with Run(loggers=[RunDirectory(place, **options)], run_name="run") as run:
        run.log_metrics({"loss": 0.5})
        run.log_text("a text", "note")


def make_newer(folder):
    """Makes a folder look as a newer release would leave it."""
    for name, change in (
        ("sidecar.json", {"format_version": 99}),
        ("environment.json", {"packages": {"training-destinations": "9.8.7"}}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))


def content(folder):
    """All files of a folder, with bytes and times, and the time of each folder in it."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in (folder, *folder.rglob("*"))
    }


@pytest.fixture
def newer(tmp_path):
    """A run folder of a newer release, beside one of this release."""
    write(tmp_path / "runs/run")
    write(tmp_path / "runs/other")
    make_newer(tmp_path / "runs/run")
    return tmp_path / "runs/run"


@pytest.mark.parametrize(
    "options",
    [{}, {"if_exists": "resume"}, {"if_exists": "error"}, {"writer": "eval"}],
    ids=lambda options: "-".join(options.values()) or "auto",
)
def test_a_writer_refuses_it_and_changes_nothing(newer, options):
    """A run in the folder is refused in the caller's thread, and no file or folder changes."""
    before = content(newer.parent)

    with pytest.raises(RunPathError, match=SAYS):
        write(newer, **options)

    assert content(newer.parent) == before


def test_a_writer_refuses_it_in_a_store(newer, tmp_path, monkeypatch):
    """A run of a newer release that lies in a store is refused too, and the store stays as it was."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = content(newer.parent)

    with pytest.raises(RunPathError, match=SAYS):
        write(newer.as_uri(), if_exists="resume")

    assert content(newer.parent) == before


@pytest.mark.parametrize(
    "read",
    [
        lambda run: read_rows(run.path),
        lambda run: run.series("loss"),
        lambda run: run.metric_names(),
        lambda run: list(run.blocks()),
        lambda run: list(run.follow(until_end=True)),
        lambda run: run.texts(),
        lambda run: run.record_counts(),
    ],
    ids=["read_rows", "series", "metric_names", "blocks", "follow", "texts", "record_counts"],
)
def test_reading_it_raises_the_error_that_names_the_release(newer, read):
    """No reader returns rows or records of a format that it may misread."""
    run = ReadRun.open(newer)

    with pytest.raises(NewerFormatError, match=SAYS):
        read(run)


def test_it_is_listed_as_unreadable(newer):
    """A scan lists the run with its status and the release to use, beside the readable runs."""
    with open_runs(newer.parent) as runs:
        report = runs.scan()
        found = {run.name: (run.shown_status, run.record.problem) for run in runs}

    assert report.damaged == 1
    assert found["other"] == ("completed", None)
    status, problem = found["run"]
    assert status == "unreadable"
    assert "Use training-destinations 9.8.7 or newer." in problem


def test_a_hyperparameter_named_format_version_is_harmless(tmp_path):
    """A run with its own hyperparameter `format_version` stays readable."""
    with Run(loggers=[RunDirectory(tmp_path / "run")], run_name="run") as run:
        run.log_hyperparameters({"format_version": 99})
        run.log_metrics({"loss": 0.5})

    assert len(read_rows(tmp_path / "run")) == 1


def test_a_newer_writer_loses_only_its_own_rows(tmp_path, caplog):
    """A named writer of a newer release is left out and reported; the trainer's rows are read."""
    write(tmp_path / "run")
    write(tmp_path / "run", writer="eval")
    make_newer(tmp_path / "run/writers/eval")

    with open_runs(tmp_path) as runs:
        run = runs["run"]
        values = run.series("loss").value
        problem = run.record.problem

    assert list(values) == [0.5]
    assert "9.8.7 or newer" in problem
    assert "left out writer eval" in caplog.text


def test_a_dataset_leaves_it_out_and_reports_it(newer, tmp_path):
    """`compact` writes the other runs, and reports this one as damaged."""
    pytest.importorskip("deltalake")

    with open_runs(newer.parent) as runs:
        report = compact(runs, tmp_path / "dataset")

    assert report.added == 1
    ((path, problem),) = report.damaged
    assert path == newer
    assert "Use training-destinations 9.8.7 or newer." in problem


def test_garbage_collection_keeps_it(newer, monkeypatch, capsys):
    """`runs gc` does not take a run for empty because it cannot read its rows."""
    monkeypatch.chdir(newer.parents[1])
    (newer / "metrics.csv").unlink()
    shutil.rmtree(newer / "texts", ignore_errors=True)

    assert cli.main(["runs", "gc", "--older-than", "0s", "--delete"]) == 0

    assert newer.is_dir()
    capsys.readouterr()
