"""New rows of a run as they come."""

import threading

import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.follow import Follower
from tests.test_runs.written import Written, change_sidecar, write_csv


def cells(rows):
    """What rows hold, value by value: calls of one step may share a row, or not."""
    return [(row.step, name, value) for row in rows for name, value in row.metrics.items()]


def logged(steps, **others):
    """What was logged at these steps."""
    return [(step, "loss", step / 2) for step in steps] + list(others.values())


@pytest.mark.parametrize("gap", [1, 7, 400, 15_000])
def test_each_row_comes_once_and_in_order(tmp_path, gap):
    """However seldom one looks, rows come once each, across drains, new columns and segments that are gone."""
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


def test_rows_that_were_there_come_first(tmp_path):
    """A follower begins with the rows of the CSV and of the journal."""
    with Written(tmp_path / "run", flush_seconds=1000) as written, Follower(tmp_path / "run") as follower:
        written.log({"loss": 0.0}, 0)
        written.flush()
        written.log({"loss": 0.5}, 1)

        first = follower.poll()
        written.log({"loss": 1.0}, 2)
        second = follower.poll()

    assert cells(first) == logged([0, 1])
    assert cells(second) == logged([2])


def test_calls_of_one_step_come_once_though_they_share_a_row_later(tmp_path):
    """What was read from the journal is not read again when the CSV has it in one row with what came after."""
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
    """After a resume at an earlier step the rows of the new branch come, and no other row comes again."""
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
    """A branch that was left before its rows were ever drained is no reason to lose or repeat rows."""
    with Written(tmp_path / "run", flush_seconds=1000) as written, Follower(tmp_path / "run") as follower:
        for step in range(6):
            written.log({"loss": step / 2}, step)
        first = follower.poll()
        written.destination._writer.journal.mark_resume(2, None)
        for step in range(2, 5):
            written.log({"loss": step / 2}, step)
        second = follower.poll()
        written.close()
        third = follower.poll()

    assert cells(first) == logged(range(6))
    assert cells(second) == logged(range(2, 5))
    assert third == []


def test_the_points_of_one_metric(tmp_path):
    """Following one metric yields its values with step and time, and ends with the run."""
    with Written(tmp_path / "run") as written:
        for step in range(4):
            written.log({"loss": step / 2, **({"acc": 1.0} if step == 2 else {})}, step)

    points = list(Run.open(tmp_path / "run").follow("acc", until_end=True, poll_seconds=60))

    assert [(point.step, point.value) for point in points] == [(2, 1.0)]
    assert points[0].time == pytest.approx(Run.open(tmp_path / "run").series("acc").time[0])


class Acting(threading.Event):
    """An event whose waits are when a test acts."""

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
    """Rows logged up to the end come before the iterator ends; a set event ends it at once."""
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


def test_a_run_that_died_ends_the_following(tmp_path):
    """A run that says it is running, but has no fresh heartbeat, is over."""
    with Written(tmp_path / "run") as written:
        written.log({"loss": 0.0}, 0)
    change_sidecar(tmp_path / "run", status="running")

    run = Run(Run.open(tmp_path / "run").record, clock=lambda: 4e9)

    assert cells(run.follow(until_end=True)) == logged([0])


def test_a_csv_of_another_program_is_followed(tmp_path):
    """Rows that are appended come once, also when the file is written anew with more columns, or by another run."""
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


def test_a_run_that_has_nothing_yet(tmp_path):
    """A folder without metrics has no rows, and the first ones come when they are there."""
    with Follower(tmp_path / "run") as follower:
        before = follower.poll()
        with Written(tmp_path / "run") as written:
            written.log({"loss": 0.0}, 0)
            during = follower.poll()
        after = follower.poll()

    assert (before, cells(during), after) == ([], logged([0]), [])
