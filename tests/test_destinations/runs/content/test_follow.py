"""Follows new rows of a run as they arrive."""

import threading
import time

import pytest

from destinations.run_directory import read_rows
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.journal_files import make_journal, remove_journal
from destinations.run_directory.layout import journal_path, segment_paths
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.run_directory.segments import AppendedSegment
from destinations.runs import Run
from destinations.runs.content.follow import Follower
from events import State
from tests.test_destinations.runs.written import Written, change_sidecar, write_csv


def cells(rows):
    """Returns the values of rows one by one, because calls of one step may share a row."""
    return [(row.step, name, value) for row in rows for name, value in row.metrics.items()]


def logged(steps, **others):
    """Returns the values logged at these steps."""
    return [(step, "loss", step / 2) for step in steps] + list(others.values())


@pytest.mark.parametrize("gap", [1, 7, 400, 15_000])
def test_each_row_comes_once_and_in_order(tmp_path, gap):
    """This holds for a slow reader, and across drains, new columns and deleted segments."""
    found = []
    expected = []
    with Written(tmp_path / "run", flush_seconds=0.01) as written, Follower(tmp_path / "run") as follower:
        count = max(1200, 3 * gap)
        for step in range(count):
            metrics = {"loss": step / 2} if step < count // 2 else {"loss": step / 2, "late": step}
            written.log(metrics, step)
            expected += [(step, name, value) for name, value in metrics.items()]
            if step % gap == gap - 1:
                found += follower.poll()
            if step % 5000 == 4999:
                written.flush()
        written.close()
        found += follower.poll()
        again = follower.poll()

    assert cells(found) == expected
    assert again == []


def test_calls_of_one_step_come_once_though_they_share_a_row_later(tmp_path):
    """A row read from the journal isn't read again when the CSV merges it with later calls."""
    with Written(tmp_path / "run", flush_seconds=1000) as written, Follower(tmp_path / "run") as follower:
        written.log({"loss": 0.0, "acc": 0.0}, 0)
        written.flush()
        written.log({"loss": 0.5}, 1)
        first = follower.poll()
        written.log({"acc": 0.25}, 1)
        written.log({"loss": 1.0}, 2)
        written.close()
        rest = follower.poll()

    assert cells(first) == [(0, "loss", 0.0), (0, "acc", 0.0), (1, "loss", 0.5)]
    assert cells(rest) == [(1, "acc", 0.25), (2, "loss", 1.0)]


@pytest.mark.parametrize("polls_meanwhile", [True, False])
def test_a_resume_shows_the_new_branch(tmp_path, polls_meanwhile):
    """After a resume at an earlier step, the new branch's rows arrive, and no other row arrives again."""
    found = []
    with Follower(tmp_path / "run") as follower:
        with Written(tmp_path / "run") as written:
            for step in range(10):
                written.log({"loss": step / 2}, step)
            found += follower.poll()
        with Written(tmp_path / "run", batch=4) as written:
            for step in range(4, 8):
                written.log({"loss": step / 2, "late": 1.0}, step)
                if polls_meanwhile:
                    found += follower.poll()
            written.flush()
        found += follower.poll()

    expected = logged(range(10))
    for step in range(4, 8):
        expected += [(step, "loss", step / 2), (step, "late", 1.0)]
    assert cells(found) == expected
    assert [row.step for row in read_rows(tmp_path / "run")] == list(range(8))


def test_a_resume_before_there_was_a_csv(tmp_path):
    """If a branch is abandoned before its rows are drained, no row is lost or repeated."""
    with Written(tmp_path / "run", flush_seconds=1000) as written, Follower(tmp_path / "run") as follower:
        for step in range(6):
            written.log({"loss": step / 2}, step)
        first = follower.poll()
        written.destination._run.begin_session(time.time())
        written.destination._writer.journal.mark_resume(2, None)
        for step in range(2, 5):
            written.log({"loss": step / 2}, step)
        second = follower.poll()
        written.close()
        third = follower.poll()

    assert cells(first) == logged(range(6))
    assert cells(second) == logged(range(2, 5))
    assert third == []


class Acting(threading.Event):
    """An event whose waits let a test act."""

    def __init__(self, *acts):
        super().__init__()
        self.acts = list(acts)

    def wait(self, timeout=None):
        if self.acts:
            self.acts.pop(0)()
        else:
            self.set()
        return self.is_set()


def test_following_ends_when_asked_or_when_the_run_has_ended(tmp_path):
    """Rows logged up to the end arrive before the iterator ends; a set event ends it at once."""
    written = Written(tmp_path / "run")
    written.log({"loss": 0.0}, 0)
    written.flush()
    run = Run.open(tmp_path / "run")
    stop = Acting(
        lambda: written.log({"loss": 0.5}, 1), lambda: (written.log({"loss": 1.0}, 2), written.close())
    )

    rows = list(run.follow(until_end=True, stop=stop))

    assert cells(rows) == logged([0, 1, 2])
    assert not stop.is_set()
    stopped = threading.Event()
    stopped.set()
    assert list(run.follow(stop=stopped)) == []


def test_following_ends_when_the_run_dies(tmp_path):
    """A run without a fresh heartbeat has ended, even if its status says running."""
    with Written(tmp_path / "run") as written:
        written.log({"loss": 0.0}, 0)
    change_sidecar(tmp_path / "run", status="running")

    run = Run(Run.open(tmp_path / "run").record, clock=lambda: 4e9)

    assert cells(run.follow(until_end=True)) == logged([0])


def test_a_csv_of_another_program_is_followed(tmp_path):
    """Appended rows arrive once, even if the file is replaced by another run or gets more columns."""
    run_dir = tmp_path / "version_0"
    write_csv(run_dir, ["epoch,step,loss", "0,1,0.5"])
    with Follower(run_dir) as follower:
        first = follower.poll()
        with (run_dir / "metrics.csv").open("a") as file:
            file.write("0,2,1.0\n0,3,1.")
        second = follower.poll()
        (run_dir / "metrics.csv").write_text("epoch,step,acc,loss\n0,1,,0.5\n")
        half = follower.poll()
        (run_dir / "metrics.csv").write_text("epoch,step,acc,loss\n0,1,,0.5\n0,2,,1.0\n0,3,0.75,1.5\n")
        third = follower.poll()
        (run_dir / "metrics.csv").unlink()
        gone = follower.poll()
        write_csv(run_dir, ["epoch,step,loss", "0,7,3.5"])
        anew = follower.poll()

    assert cells(first) == logged([1])
    assert cells(second) == logged([2])
    assert half == []
    assert cells(third) == [(3, "acc", 0.75), (3, "loss", 1.5)]
    assert gone == []
    assert cells(anew) == logged([7])


class Writer:
    """A writer whose clock and drains the test controls, with segments of about thirty rows."""

    def __init__(self, run_dir):
        self.now = 1000.0
        self.folder = journal_path(run_dir, 0)
        make_journal(self.folder)
        self.journal = Journal(
            self.folder, State("x"), make_segment=AppendedSegment, segment_bytes=2048, clock=lambda: self.now
        )
        self.drain = JournalDrain(run_dir, self.folder, MetricsCsv(run_dir / "metrics.csv"), self.journal)

    def log(self, metrics, step):
        self.now += 0.001
        self.journal.append(metrics, step)

    def close(self):
        """Ends the session; the open segment stays, as after a kill."""
        self.journal.close()
        for segment in list(self.journal.files.segments):
            segment.close()


@pytest.mark.parametrize("ends", [False, True])
def test_a_clock_set_back_hides_no_row(tmp_path, ends):
    """Segments and the CSV are replaced while the clock goes back: each row arrives once."""
    writer = Writer(tmp_path)
    with Follower(tmp_path) as follower:
        for step in range(5):
            writer.log({"loss": step / 2}, step)
        writer.drain.run()
        for step in range(5, 10):
            writer.log({"loss": step / 2}, step)
        first = follower.poll()
        writer.now = 500.0
        for step in range(10, 150):
            writer.log({"loss": step / 2, "late": 1.0}, step)
        writer.drain.run()
        if ends:
            writer.close()
            remove_journal(writer.folder)
        second = follower.poll()
        third = follower.poll()

    assert writer.drain.file.rewrites == 1
    assert cells(first) == logged(range(10))
    assert cells(second) == [
        cell for step in range(10, 150) for cell in ((step, "loss", step / 2), (step, "late", 1.0))
    ]
    assert third == []


def test_a_branch_with_an_earlier_clock_comes_whole(tmp_path):
    """A resume removes rows, and a clock that is behind logs the new ones: each row arrives once."""
    writer = Writer(tmp_path)
    with Follower(tmp_path) as follower:
        for step in range(60):
            writer.log({"loss": step / 2}, step)
            if step == 30:
                writer.drain.run()
        first = follower.poll()
        writer.now = 500.0
        writer.journal.begin_session("second")
        writer.journal.mark_resume(45, None)
        for step in range(45, 150):
            writer.log({"loss": step / 2, "late": 1.0}, step)
        writer.drain.run()
        second = follower.poll()
        third = follower.poll()

    assert cells(first) == logged(range(60))
    assert cells(second) == [
        cell for step in range(45, 150) for cell in ((step, "loss", step / 2), (step, "late", 1.0))
    ]
    assert third == []


@pytest.mark.parametrize("is_left", [False, True])
def test_a_row_that_was_seen_in_part(tmp_path, is_left):
    """A call at the last step shares a line with it now, or a resume replaced it with a similar line."""
    writer = Writer(tmp_path)
    with Follower(tmp_path) as follower:
        writer.log({"loss": 0.0, "acc": 0.0}, 0)
        writer.drain.run()
        writer.log({"loss": 0.5}, 1)
        first = follower.poll()
        if is_left:
            writer.journal.begin_session("second")
            writer.journal.mark_resume(1, None)
            writer.log({"loss": 0.5, "acc": 0.25}, 1)
        else:
            writer.journal.start_new_segment()
            writer.log({"acc": 0.25}, 1)
        for step in range(2, 80):
            writer.log({"loss": step / 2}, step)
        writer.drain.run()
        # The follower has to read the CSV: its open segment is gone, and so is the next one.
        second = follower.poll()

    assert cells(first) == [(0, "loss", 0.0), (0, "acc", 0.0), (1, "loss", 0.5)]
    half = [(1, "loss", 0.5), (1, "acc", 0.25)] if is_left else [(1, "acc", 0.25)]
    assert cells(second) == half + logged(range(2, 80))


def test_the_memory_of_a_follower_is_bounded(tmp_path):
    """A follower that keeps up remembers no more rows than the journal has."""
    writer = Writer(tmp_path)
    found, most = [], 0
    with Follower(tmp_path) as follower:
        for step in range(1000):
            writer.log({"loss": step / 2}, step)
            if step % 10 == 9:
                found += follower.poll()
                most = max(most, *(tail.total() for tail in follower._reader.cursor.tail.values()))
            if step % 50 == 49:
                writer.drain.run()

    assert cells(found) == logged(range(1000))
    assert most < 150


def test_rows_after_a_gap_are_skipped(tmp_path):
    """If a power loss cut a segment, the next one isn't read; the following session's is."""
    writer = Writer(tmp_path)
    for step in range(60):
        writer.log({"loss": step / 2}, step)
    writer.close()
    segments = segment_paths(writer.folder)
    whole = segments[0].stat().st_size
    with segments[0].open("r+b") as file:
        file.truncate(whole - 20)
    with Follower(tmp_path) as follower:
        found = follower.poll()
        held = len(found)
        writer = Writer(tmp_path)
        for step in range(held, 80):
            writer.log({"loss": step / 2}, step)
        found += follower.poll()
        read = read_rows(tmp_path)
        writer.drain.run()
        found += follower.poll()

    assert len(segments) > 1
    assert 10 < held < 59
    assert cells(found) == logged(range(80))
    assert cells(read) == logged(range(80))
    assert cells(read_rows(tmp_path)) == logged(range(80))
    assert writer.drain.source.damaged_bytes > 0
