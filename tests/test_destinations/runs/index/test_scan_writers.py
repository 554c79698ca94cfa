"""Scans runs with several writers, and measures the cost for other runs."""

import json
import os

import pytest

from tests.test_destinations.runs.folders import HOUR, NOW, age, write_run
from tests.test_destinations.runs.index.test_scan import CountingDisk


def write_writer(run, name, *, beat=NOW - HOUR, metrics=(), **fields):
    """Writes the folder of a writer, with a summary."""
    folder = run / "writers" / name
    write_run(folder, f"{name}-id", beat=beat, **{"writer": name, "updated_at": NOW - HOUR, **fields})
    statistics = {
        metric: {"last": value, "min": value, "max": value, "count": 1, "last_step": 1}
        for metric, value in dict(metrics).items()
    }
    (folder / "summary.json").write_text(json.dumps({"metrics": statistics}))
    age(folder, run / "writers", run)
    return folder


def counts(report):
    """Returns the nonzero counts of a report."""
    names = ("runs", "added", "changed", "unchanged", "moved", "gone", "alive", "damaged", "orphans")
    return {name: value for name in names if (value := getattr(report, name))}


def test_writers_are_no_runs_of_their_own(root, opened):
    """The run has their last values; other runs inside it are found."""
    digits = write_run(root / "digits", summary={"loss": 1.0})
    write_writer(digits, "eval", metrics={"acc": 0.5})
    write_run(digits / "nested")

    assert counts(opened.scan()) == {"runs": 2, "added": 2}
    assert opened["digits"].record.summary == {"acc": 0.5}
    assert {run.path.relative_to(root).as_posix() for run in opened} == {"digits", "digits/nested"}


def test_a_run_without_writers_costs_no_more(root, with_disk):
    """In a first, an unchanged and a changed scan, no call looks for missing writers."""
    for name in ("plain", "media"):
        write_run(root / name, beat=NOW)
    (root / "media" / "media").mkdir()
    age(root / "media", root)
    disk = CountingDisk()
    runs = with_disk(disk)

    runs.scan()
    first, disk.calls = disk.calls, []
    runs.scan()
    second, disk.calls = disk.calls, []
    write_run(root / "plain", beat=NOW, notes="changed")
    write_run(root / "media", beat=NOW, notes="changed")
    runs.scan()

    assert not [call for call in (*first, *second, *disk.calls) if "/writers" in call[1]]
    assert [kind for kind, _ in second] == ["stat"] * 3


@pytest.mark.parametrize("is_live", [False, True])
def test_a_change_of_a_writer_is_a_change_of_the_run(root, opened, is_live):
    """The run is read again only then, even if nothing changes in its own folder."""
    digits = write_run(root / "digits", status="running" if is_live else "completed", beat=NOW - HOUR)
    folder = write_writer(digits, "eval", metrics={"acc": 0.5})
    opened.scan()
    before = digits.stat().st_mtime_ns
    idle = counts(opened.scan())

    write_writer(digits, "eval", metrics={"acc": 0.75})
    os.utime(digits, ns=(before, before))
    age(folder)

    assert idle == {"runs": 1, "unchanged": 1}
    assert counts(opened.scan()) == {"runs": 1, "changed": 1}
    assert opened["digits"].record.summary["acc"] == 0.75
    assert counts(opened.scan()) == {"runs": 1, "unchanged": 1}


def test_new_and_deleted_writers_are_changes(root, opened):
    """The first writer creates the folder of writers; the second doesn't change the run's folder."""
    digits = write_run(root / "digits")
    opened.scan()
    write_writer(digits, "eval", metrics={"acc": 0.5})
    first = counts(opened.scan())
    write_writer(digits, "probe", metrics={"norm": 2.0})
    before = digits.stat().st_mtime_ns
    os.utime(digits, ns=(before, before))
    second = counts(opened.scan())
    summary = dict(opened["digits"].record.summary)
    for path in (digits / "writers" / "eval").iterdir():
        path.unlink()
    (digits / "writers" / "eval").rmdir()
    third = counts(opened.scan())

    assert first == second == third == {"runs": 1, "changed": 1}
    assert summary == {"acc": 0.5, "norm": 2.0}
    assert opened["digits"].record.summary == {"norm": 2.0}


def test_run_with_a_live_writer_is_read_at_each_scan(root, with_disk):
    """Its rows may be newer than its documents; once its heartbeat is old, it is read one last time."""
    digits = write_run(root / "digits")
    write_writer(digits, "eval", beat=NOW - 10, status="running", metrics={"acc": 0.5})

    first, second = with_disk(CountingDisk()), with_disk(CountingDisk(), now=NOW + HOUR)
    assert counts(first.scan()) == {"runs": 1, "added": 1}
    assert counts(first.scan()) == {"runs": 1, "changed": 1}
    assert counts(first.scan()) == {"runs": 1, "changed": 1}
    assert counts(second.scan()) == {"runs": 1, "changed": 1}
    assert counts(second.scan()) == {"runs": 1, "unchanged": 1}


def test_run_of_ended_writers_is_not_read_again(root, opened):
    """It is gone once they are deleted."""
    folder = write_writer(root / "digits", "eval", metrics={"acc": 0.5})
    opened.scan()
    assert counts(opened.scan()) == {"runs": 1, "unchanged": 1}
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    age(root / "digits" / "writers")

    assert counts(opened.scan()) == {"gone": 1}


def test_renamed_copy_is_not_a_writer(root, opened):
    """Its sidecar has another name, so it is a run in an ordinary folder."""
    write_writer(root / "digits", "eval")
    (root / "digits" / "writers" / "eval").rename(root / "digits" / "writers" / "copy")

    assert counts(opened.scan()) == {"runs": 1, "added": 1}
    assert [run.path.name for run in opened] == ["copy"]


@pytest.mark.parametrize("what", ["sidecar", "summary"])
def test_a_damaged_writer_is_a_problem_or_counts_from_its_rows(root, opened, what):
    """The trainer's values are there."""
    digits = write_run(root / "digits")
    (digits / "summary.json").write_text(json.dumps({"metrics": {"loss": {"last": 1.0, "count": 1}}}))
    folder = write_writer(digits, "eval", metrics={"acc": 0.5})
    (folder / f"{what}.json").write_text("{")
    (folder / "metrics.csv").write_text("step,epoch,time,acc\n1,0,1.0,0.75\n")

    opened.scan()

    assert opened["digits"].record.summary == {"loss": 1.0, "acc": 0.5 if what == "sidecar" else 0.75}


def test_unreadable_writer_is_a_problem_of_the_run(root, opened):
    """The problem disappears once it can be read."""
    digits = write_run(root / "digits")
    folder = write_writer(digits, "eval")
    (folder / "summary.json").unlink()
    (folder / "metrics.csv").mkdir()
    age(folder, digits / "writers", digits)
    first = counts(opened.scan())
    problem = opened["digits"].record.problem
    (folder / "metrics.csv").rmdir()
    age(folder)
    second = counts(opened.scan())

    assert first == {"runs": 1, "added": 1, "damaged": 1}
    assert problem.startswith("writer eval cannot be read: ")
    assert second == {"runs": 1, "changed": 1}
    assert opened["digits"].record.problem is None


def test_more_writers_than_are_read_are_a_problem_of_the_run(root, opened, caplog):
    """In a folder that someone has filled, a reader looks at a thousand at most."""
    digits = write_run(root / "digits")
    for number in range(1002):
        (digits / "writers" / f"w{number:04}").mkdir(parents=True)
    age(digits / "writers", digits)

    opened.scan()

    assert opened["digits"].record.problem == "it has 1002 writers, of which the first 1000 are read"
    assert len(opened["digits"].writers) == 1000
    assert "has 1002 writers" in caplog.text
