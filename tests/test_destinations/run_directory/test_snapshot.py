"""Reads a rank's files while the writer continues between two looks of the reader."""

import pytest

from destinations.history.snapshot import read_series
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import POSITION, Position, journal_path, segment_paths
from destinations.run_directory.metrics_csv import MetricsCsv
from events import State


@pytest.fixture
def written(tmp_path):
    """A journal with small segments, and its drain."""
    folder = journal_path(tmp_path, 0)
    folder.mkdir(parents=True)
    journal = Journal(folder, State("x"), segment_bytes=4096)
    csv = MetricsCsv(tmp_path / "metrics.csv")
    yield journal, JournalDrain(tmp_path, folder, csv, journal)
    journal.close()
    for segment in list(journal.files.segments):
        segment.close()
    csv.close()


def log(journal, steps):
    """Logs wide rows; the first segment holds a few thousand, the others a few."""
    for step in steps:
        journal.append({f"m{index}": float(step) for index in range(20)}, step)


def begin_with(position, monkeypatch):
    """Lets the next reader begin with an earlier position."""
    earlier, read = [position], Position.read
    monkeypatch.setattr(Position, "read", lambda path: earlier.pop() if earlier else read(path))


@pytest.mark.parametrize("more", [0, 10], ids=["and the next is empty", "and the next has rows"])
def test_a_segment_drained_and_removed_meanwhile_is_not_skipped(tmp_path, written, more, monkeypatch):
    """If it goes between the reads of position and journal, the reader repeats both."""
    journal, drain = written
    log(journal, range(100))
    drain.run()
    before = Position.read(tmp_path / "journal" / "rank0" / POSITION)
    log(journal, range(100, 5000))
    journal.start_new_segment()
    log(journal, range(5000, 5001))
    drain.run()
    log(journal, range(5001, 5001 + more))

    begin_with(before, monkeypatch)
    seen = read_series(tmp_path, "m0")

    assert before.states[0].segment < int(segment_paths(tmp_path / "journal" / "rank0")[0].name[:8])
    assert seen == [(step, float(step)) for step in range(5001 + more)]


def test_a_journal_removed_at_the_end_is_not_mistaken_for_an_empty_one(tmp_path, written, monkeypatch):
    """If the last segment goes between the two reads, its rows are in lines unknown to the first one."""
    journal, drain = written
    log(journal, range(100))
    drain.run()
    before = Position.read(tmp_path / "journal" / "rank0" / POSITION)
    log(journal, range(100, 200))
    drain.run()
    for path in segment_paths(tmp_path / "journal" / "rank0"):
        path.unlink()

    begin_with(before, monkeypatch)
    seen = read_series(tmp_path, "m0")

    assert seen == [(step, float(step)) for step in range(200)]


def test_a_deleted_segment_does_not_hide_the_rest(tmp_path, written):
    """If rows are missing although the position hasn't moved, the remaining ones are returned."""
    journal, drain = written
    log(journal, range(100))
    drain.run()
    log(journal, range(100, 200))
    journal.start_new_segment()
    log(journal, range(200, 300))
    segment_paths(tmp_path / "journal" / "rank0")[0].unlink()

    seen = [step for step, _ in read_series(tmp_path, "m0")]

    assert seen == [*range(100), *range(200, 300)]
