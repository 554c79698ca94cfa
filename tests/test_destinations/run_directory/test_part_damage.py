"""Deleted, cut or replaced parts: the loss is reported, and no reader mixes two branches."""

import contextlib
import os
import shutil

import pytest
from pyarrow.parquet import ParquetFile

from destinations.history.snapshot import last_rows, take_snapshot
from destinations.run_directory import read_rows
from destinations.run_directory.layout import part_path, parts_path
from destinations.runs import Run
from destinations.runs.content.follow import Follower
from destinations.runs.content.series import read_series, run_blocks
from destinations.runs.move.ledger import ReadPosition
from destinations.runs.move.stored import records_of
from destinations.runs.summary import computed_summary
from destinations.viewer.columns import ColumnCache
from tests.test_destinations.run_directory.test_parts import Writer, WrittenInParts, numbers

STEPS = 500


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with several parts."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    with WrittenInParts(run_dir, flush_seconds=1000) as run:
        write(run)
    assert len(numbers(run_dir)) > 2
    return run_dir


def write(run):
    """Logs and drains."""
    for step in range(STEPS):
        run.log({"loss": step / 8}, step)
        if step % 50 == 49:
            run.flush()


@pytest.fixture
def copy(written, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(written, tmp_path / "run")


def file_of(run_dir, number):
    """Returns the path of a part."""
    return part_path(parts_path(run_dir / "metrics.csv"), number)


def halved(path):
    """Keeps half of the bytes."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    """Truncates the file to nothing."""
    path.write_bytes(b"")


def unlinked(path):
    """Deletes the file."""
    path.unlink()


def changed(path):
    """Changes a bit of a value."""
    content = bytearray(path.read_bytes())
    about = ParquetFile(path).metadata.row_group(0).column(3)
    content[about.data_page_offset + about.total_compressed_size - 3] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [halved, emptied, unlinked, changed])
def test_damage_of_a_part_is_a_problem_of_the_run(copy, caplog, damage):
    """Its rows are lost and all others are there, for every reader; a new session continues after it."""
    assert Run.open(copy).problems() == []
    expected = read_rows(copy)
    assert caplog.text == ""
    with take_snapshot(copy, 0) as snapshot, contextlib.closing(snapshot.parts[1].open()) as file:
        lost = len(list(file.rows()))
    damage(file_of(copy, 2))
    caplog.clear()

    rows = read_rows(copy)

    assert len(rows) == len(expected) - lost
    text = "00000002.parquet is missing" if damage is unlinked else "00000002.parquet is damaged"
    assert text in caplog.text or (
        damage is changed and f"{lost} of {lost} rows cannot be read" in caplog.text
    )
    assert text in Run.open(copy).problems()[0]
    # A scan compares names and sizes only.
    assert (Run.open(copy).record.problem is None) == (damage is changed)
    readings = {name: len(read(copy)) for name, read in READINGS.items()}
    if damage is changed:
        # The index of the part is still there, with the written values.
        assert readings.pop("summary") == len(expected)
    assert readings == dict.fromkeys(readings, len(rows))
    with WrittenInParts(copy, batch=STEPS - 10) as run:
        run.log({"loss": -1.0}, STEPS - 10)
    assert [row.step for row in read_rows(copy)][-2:] == [STEPS - 11, STEPS - 10]
    assert text in Run.open(copy).problems()[0]


def test_damage_of_a_metric_leaves_other_metrics_readable(copy):
    """A reader of another column reads no damaged page."""
    changed(file_of(copy, 2))

    assert len(read_series(copy, "epoch")) == STEPS


def test_missing_last_parts_are_a_problem_of_an_ended_run(copy):
    """The sidecar has their number, even if the indexes are gone too."""
    for path in file_of(copy, 1).parent.iterdir():
        path.unlink()
    assert "is missing: its rows are lost" in Run.open(copy).record.problem

    shutil.rmtree(copy / "parts")
    assert "parts cannot be read" in Run.open(copy).record.problem


def test_a_hostile_number_of_parts_takes_no_time(copy):
    """A part 99,999,999 that is in no history doesn't count."""
    shutil.copy(file_of(copy, numbers(copy)[-1]), file_of(copy, 99_999_999))

    with take_snapshot(copy, 0) as snapshot:
        assert snapshot.missing == ()
        assert snapshot.closed == numbers(copy)[-2]


def go_back(writer, step):
    """Resumes at a step, and logs a few more rows."""
    writer.go_back(step)
    for start in range(step, 400, 10):
        writer.log(range(start, start + 10))
        writer.drain.run()


READINGS = {
    "rows": lambda run_dir: [row.step for row in read_rows(run_dir)],
    "last": lambda run_dir: [row.step for row in last_rows(run_dir, 1000)],
    "blocks": lambda run_dir: [step for block in run_blocks(run_dir) for step in block.step.tolist()],
    "send": lambda run_dir: [item.step for item in records_of(run_dir, ReadPosition())],
    "summary": lambda run_dir: list(range(computed_summary(run_dir, 0)["loss"].count)),
    "chart": lambda run_dir: ColumnCache().read(run_dir, 0, ["loss"]).block.step.tolist(),
    "follow": lambda run_dir: [row.step for row in _polled(run_dir)],
}


def _polled(run_dir):
    with contextlib.closing(Follower(run_dir)) as follower:
        return follower.poll()


@pytest.mark.parametrize("name", READINGS)
def test_a_resume_does_not_change_what_a_reader_sees(tmp_path, monkeypatch, name):
    """Training goes back between a reader's look at the folder and its first open part: no part changes."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(300))
    opened = os.open
    seen = []

    def opened_after_a_resume(path, *arguments, **options):
        if not seen and str(path).endswith(".parquet") and "/parts/" in str(path):
            seen.append(path)
            go_back(writer, 105)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened_after_a_resume)
    found = READINGS[name](tmp_path)
    writer.die()

    assert seen
    # A second look sees the current content.
    assert found in (list(range(300)), list(range(405)))
