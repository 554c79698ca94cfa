"""Writes runs of any source: once, again after a change, and to the end after an interruption."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import ANY

import attrs
import pytest

from destinations import RunDirectory
from destinations.kinds.texts import TEXT
from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.content.sources import branches_of
from destinations.runs.imports import MoveReport, SendingError, SourceError, import_runs
from destinations.runs.imports.writing import Writer
from destinations.runs.move.stream import Logged, Restart, SourceRun, Values, move
from events import Run as WritingRun

ROOT = str(Path(__file__).parents[4])
NOW = 1_600_000_000.0


def source_run(*items, **given):
    """Returns a run of a made-up source."""
    given = {"identity": "test mine", "stamp": "1", "created_at": NOW, **given}
    return SourceRun("mine", "mine", read=lambda run: iter(items), **given)


def write(root, *runs):
    """Writes runs; returns the report."""
    report = MoveReport()
    root.mkdir(exist_ok=True)
    writer = Writer(root, "test", report)
    for run in runs:
        writer.write(run)
    return report


def rows_of(folder):
    """Returns step, time and values of each row."""
    return [(row.step, row.time, dict(row.metrics)) for row in read_rows(folder)]


def test_imported_run_has_the_facts_of_its_source(tmp_path):
    """Id, times, tags, notes, hyperparameters, status and environment are the source's."""
    (tmp_path / "{run_name}").write_bytes(b"weights")
    run = source_run(
        Values({"loss": 0.5}, 3, NOW + 3, epoch=1.0),
        Logged(TEXT, "words", 3, NOW + 4, {"text": "hello"}),
        Logged.file("best{run_name}.bin", tmp_path / "{run_name}", NOW + 5),
        ended_at=NOW + 9,
        status="failed",
        exception="ValueError: out of luck",
        tags=("good",),
        notes="a note",
        hyperparameters={"optim": {"lr": 0.1}},
        environment={"host": "theirs", "api_key": "sk-1234567890abcdef"},
    )

    report = write(tmp_path / "runs", run)

    found = Run.open(tmp_path / "runs/mine")
    assert (report.runs, report.rows, report.values) == (1, 1, 1)
    assert report.records == Counter(text=1, artifact=1)
    assert (found.run_id, found.status, found.created_at, found.record.ended_at) == (
        "mine",
        "failed",
        NOW,
        NOW + 9,
    )
    assert (found.record.tags, found.record.notes) == (("good",), "a note")
    assert found.hyperparameters == {"optim": {"lr": 0.1}}
    assert json.loads((found.path / "sidecar.json").read_text())["exception"] == "ValueError: out of luck"
    assert rows_of(found.path) == [(3, NOW + 3, {"loss": 0.5})]
    assert [row.epoch for row in read_rows(found.path)] == [1]
    assert [(text.text, text.step, text.time) for text in found.texts("words")] == [("hello", 3, NOW + 4)]
    assert found.artifacts("best{run_name}.bin")[0].path.read_bytes() == b"weights"
    assert "1234567890" not in json.dumps(found.environment)
    assert found.environment.keys() == {"imported"}
    about = {"source": "test", "run_id": "mine", "name": "mine", "host": "theirs", "api_key": ANY}
    assert found.environment["imported"] == about
    assert not (found.path / "sessions.jsonl").exists()


def test_values_logged_together_share_a_row(tmp_path):
    """A repeated name, a gap of a second or another step begins a new row."""
    run = source_run(
        Values({"a": 1}, 0, NOW),
        Values({"b": 2}, 0, NOW + 0.5),
        Values({"a": 3}, 0, NOW + 0.6),
        Values({"b": 4}, 0, NOW + 5),
        Values({}, 1, NOW + 5),
        Values({"b": 5}, 1, NOW + 5),
    )

    write(tmp_path / "runs", run)

    assert rows_of(tmp_path / "runs/mine") == [
        (0, NOW + 0.5, {"a": 1, "b": 2}),
        (0, NOW + 0.6, {"a": 3}),
        (0, NOW + 5, {"b": 4}),
        (1, NOW + 5, {"b": 5}),
    ]


def test_rows_after_a_restart_replace_earlier_ones(tmp_path):
    """The earlier rows become a branch, as in a run that is resumed here."""
    first = [Values({"a": step}, step, NOW + step) for step in range(4)]
    again = [Values({"a": 10 + step}, step, NOW + 10 + step) for step in range(2, 5)]

    write(tmp_path / "runs", source_run(*first, Restart(2), *again))

    assert [(step, values["a"]) for step, _, values in rows_of(tmp_path / "runs/mine")] == [
        (0, 0),
        (1, 1),
        (2, 12),
        (3, 13),
        (4, 14),
    ]
    assert len(branches_of(tmp_path / "runs/mine")) == 1


def test_run_is_written_again_only_if_it_changed(tmp_path):
    """The user's edits are kept, wherever the folder was moved."""
    runs = tmp_path / "runs"
    write(runs, source_run(Values({"a": 1}, 0, NOW)))
    (runs / "mine").rename(runs / "renamed")
    (runs / "renamed/edits.json").write_text('{"display_name": "Mine"}')

    again = write(runs, source_run(Values({"a": 1}, 0, NOW)))
    changed = write(runs, source_run(Values({"a": 2}, 0, NOW), stamp="2"))

    assert (again.runs, again.unchanged, changed.runs) == (0, 1, 1)
    assert [path.name for path in runs.iterdir()] == ["renamed"]
    assert rows_of(runs / "renamed") == [(0, NOW, {"a": 2})]
    assert (runs / "renamed/edits.json").read_text() == '{"display_name": "Mine"}'


def test_interrupted_import_is_continued(tmp_path):
    """Complete runs are skipped, and the interrupted run is written again, without duplicate rows."""

    def interrupted(run):
        yield Values({"a": 1}, 0, NOW)
        raise KeyboardInterrupt

    first = source_run(Values({"a": 0}, 0, NOW))
    second = attrs.evolve(first, run_id="second", name="second", identity="test second", read=interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "runs", first, second)

    report = write(tmp_path / "runs", first, attrs.evolve(second, read=first.read))

    assert (report.unchanged, report.runs) == (1, 1)
    assert rows_of(tmp_path / "runs/second") == [(0, NOW, {"a": 0})]


KILLED = """
import os, signal, sys
from destinations.runs.move.stream import MoveReport, SourceRun, Values
from destinations.runs.imports.writing import Writer
from pathlib import Path

def killed(run):
    for step in range(500):
        yield Values({"a": step}, step, 1.6e9 + step)
    os.kill(os.getpid(), signal.SIGKILL)

root = Path(sys.argv[1])
root.mkdir()
Writer(root, "test", MoveReport()).write(
    SourceRun("mine", "mine", "test mine", "1", killed, created_at=1.6e9)
)
"""


def test_killed_import_is_continued(tmp_path):
    """Its partial run is replaced, and every row is there once."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "runs")],
        env=os.environ | {"PYTHONPATH": ROOT},
        check=False,
    )
    left = [path.name for path in (tmp_path / "runs").iterdir()]

    report = write(
        tmp_path / "runs", source_run(*(Values({"a": step}, step, NOW + step) for step in range(600)))
    )

    assert (process.returncode, left) == (-signal.SIGKILL, ["mine"])
    assert (report.runs, report.failure_count) == (1, 0)
    assert [row.step for row in read_rows(tmp_path / "runs/mine")] == list(range(600))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


def test_two_concurrent_imports_write_a_run_once(tmp_path):
    """The second import skips the run. Another run with the same name gets a folder of its own."""
    runs, reports = tmp_path / "runs", []

    def read(run):
        yield Values({"a": 1}, 0, NOW)
        namesake = source_run(Values({"a": 2}, 0, NOW), identity="test other")
        report = MoveReport()
        move([source_run(Values({"a": 1}, 0, NOW)), namesake], Writer(runs, "test", report).write, report)
        reports.append(report)
        yield Values({"a": 1}, 1, NOW)

    first = write(runs, attrs.evolve(source_run(), read=read))

    assert (first.runs, first.busy, first.rows) == (1, 0, 2)
    assert [(report.runs, report.busy, report.unchanged) for report in reports] == [(1, 1, 0)]
    assert sorted(rows_of(path)[0][2]["a"] for path in runs.iterdir()) == [1, 2]
    assert write(runs, source_run()).unchanged == 1


def test_run_written_by_a_concurrent_import_is_skipped(tmp_path):
    """The import finds it once it holds the folder's lock."""
    runs, report = tmp_path / "runs", MoveReport()
    runs.mkdir()
    late = Writer(runs, "test", report)
    write(runs, source_run(Values({"a": 1}, 0, NOW)))

    late.write(source_run(Values({"a": 1}, 0, NOW)))

    assert (report.runs, report.unchanged) == (0, 1)
    assert [path.name for path in runs.iterdir()] == ["mine"]


def test_run_named_like_a_placeholder_or_path_stays_in_the_root(tmp_path):
    """Its folder gets a harmless name; its own name is in the environment."""
    names = ["{run_name}", "../../{rank}", "{epoch}/..", "/abs"]
    runs = [
        attrs.evolve(source_run(Values({"a": 1}, 0, NOW), identity=name), name=name, run_id=name)
        for name in names
    ]

    (tmp_path / "top").mkdir()
    write(tmp_path / "top/runs", *runs)

    found = [Run.open(path) for path in (tmp_path / "top/runs").iterdir()]
    assert sorted(run.environment["imported"]["name"] for run in found) == sorted(names)
    assert [path.name for path in tmp_path.iterdir()] == ["top"]


def test_imported_run_that_was_continued_is_kept(tmp_path):
    """It belongs to the user now, so a changed source does not replace it."""
    runs = tmp_path / "runs"
    write(runs, source_run(Values({"a": 1}, 0, NOW)))
    with WritingRun(loggers=[RunDirectory(runs / "mine", if_exists="resume")], run_name="mine") as run:
        run.log_metrics({"a": 9.0}, step=7)

    with pytest.raises(SendingError, match="was written to after it was imported"):
        write(runs, source_run(Values({"a": 2}, 0, NOW), stamp="2"))

    assert [values for *_, values in rows_of(runs / "mine")] == [{"a": 1}, {"a": 9}]


def test_record_that_cannot_be_written_is_a_failure(tmp_path):
    """The other records are written, and the next import writes the run again."""
    bad = Logged(TEXT, "../outside", 0, NOW, {"text": "x"}), Logged(TEXT, "bad", 0, NOW, {"text": 3})

    first = write(tmp_path / "runs", source_run(*bad, Values({"a": 1}, 0, NOW)))
    again = write(tmp_path / "runs", source_run(Values({"a": 1}, 0, NOW)))

    assert first.failure_count == 1
    assert first.failures[0].startswith("mine: text: RecordError: ")
    assert rows_of(tmp_path / "runs/mine") == [(0, NOW, {"a": 1})]
    assert (again.runs, again.unchanged, again.failure_count) == (1, 0, 0)


def lossy_run(**given):
    """Returns a run with three unreadable pictures."""

    def read(run):
        yield Values({"a": 1}, 0, NOW)
        run.lost["unreadable pictures"] += 3
        run.seen.there, run.seen.read = 100, 90

    return attrs.evolve(source_run(**given), read=read)


def test_unreadable_records_are_failures_and_are_tried_again(tmp_path):
    """The rest is there, and the report has the bytes there and the bytes read."""
    reports = [write(tmp_path / "runs", lossy_run()) for _ in range(2)]
    mended = write(tmp_path / "runs", source_run(Values({"a": 1}, 0, NOW)))

    for report in reports:
        assert (report.runs, report.rows, report.failure_count) == (1, 1, 4)
        assert (report.seen.there, report.seen.read) == (100, 90)
        assert report.failures == [
            "mine: 3 unreadable pictures",
            "mine: 10 of 100 bytes are damaged or cut off, and could not be read",
        ]
    assert (mended.runs, mended.failures) == (1, [])
    assert write(tmp_path / "runs", source_run()).unchanged == 1


def test_damaged_run_that_was_continued_is_kept(tmp_path):
    """The next attempt does not remove what the user added."""
    runs = tmp_path / "runs"
    write(runs, lossy_run())
    with WritingRun(loggers=[RunDirectory(runs / "mine", if_exists="resume")], run_name="mine") as run:
        run.log_metrics({"a": 9.0}, step=7)

    with pytest.raises(SendingError, match="was written to after it was imported"):
        write(runs, lossy_run())

    assert [values for *_, values in rows_of(runs / "mine")] == [{"a": 1}, {"a": 9}]


def test_dry_run_reports_the_same_and_writes_nothing(tmp_path):
    """Rows, records, what is left out, and what can't be read are the same."""
    text = Logged(TEXT, "words", 3, NOW + 4, {"text": "hello"})
    (tmp_path / "table.csv").write_text("step,a,b\n0,1,x\n1,2\n")
    reports = []
    for is_dry in (True, False):
        report = MoveReport()
        writer = Writer(tmp_path, "test", report, is_dry=is_dry)
        writer.write(source_run(Values({"a": 1}, 0, NOW), text))
        writer.write(lossy_run(identity="test lossy"))
        reports += [report, import_runs(tmp_path / "table.csv", tmp_path / "runs", dry_run=is_dry)]
        if is_dry:
            assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]

    assert reports[:2] == reports[2:]


@pytest.mark.parametrize(
    ("place", "given", "message"),
    [
        ("nowhere", {}, "nothing exists at"),
        ("empty", {}, "no runs were recognised in"),
        ("empty", {"source": "neptune"}, "there are no runs of neptune in"),
        ("empty", {"source": "tensorbord"}, "source must be one of tensorboard, "),
    ],
)
def test_place_without_runs_raises(tmp_path, place, given, message):
    """The message says whether nothing is there, nothing is recognised, or the source is unknown."""
    (tmp_path / "empty").mkdir()

    with pytest.raises(SourceError, match=message):
        import_runs(tmp_path / place, tmp_path / "runs", **given)


def test_missing_package_of_a_source_raises(tmp_path, monkeypatch):
    """The message names it, and nothing is written."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "run-one.wandb").write_bytes(b"")

    with pytest.raises(ImportError, match="the import from wandb needs the package 'wandb'"):
        import_runs(tmp_path / "run-one.wandb", tmp_path / "runs")

    assert not (tmp_path / "runs").exists()
