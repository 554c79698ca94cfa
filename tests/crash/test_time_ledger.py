"""Faults are injected into real processes: the right bucket has their time, and all sum to the wall time."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from destinations.runs import Run
from destinations.runs.content.ledger import write_trace
from tests.crash.time_faults import FAULTS as ALL_FAULTS
from tests.crash.time_faults import Fault, is_stopped, run_fault, wrong
from tests.effort import times
from tests.waiting import until

PROGRAM = Path(__file__).with_name("time_child.py")
FAULTS = (
    "start",
    "data",
    "batch",
    "forward",
    "backward",
    "optimizer",
    "evaluation",
    "checkpoint",
    "logging",
    "callbacks",
    "garbage",
)
INJECTED = 0.6
# The time that this machine needs for everything else in a session of a second.
SLACK = 0.35


@pytest.fixture
def begin(torch_server):
    """Starts the program, which prints when its loop ended."""

    def begin(fault, folder):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return torch_server.start(PROGRAM.read_text(encoding="utf-8"), fault, folder, env=environment)

    return begin


def usual(name, seconds):
    """Returns a bucket's time without a fault; for `start`, the time in this very process."""
    expected = {"batch": 60 * 0.002, "forward": 60 * 0.004, "evaluation": 0.05}
    return min(seconds.get(name, 0.0), expected.get(name, 0.0))


@pytest.mark.parametrize("fault", [one for one in FAULTS for _ in range(times(1, 10))])
def test_a_fault_is_in_its_bucket(begin, tmp_path, fault):
    """It has the injected time, and no other bucket has as much; the buckets sum to the wall time."""
    started = time.time()
    output = begin(fault, tmp_path / "run").wait().stdout
    report = Run.open(tmp_path / "run").time_report()

    # The end of a run waits for the disk, which others may keep busy.
    more = {
        name: value - usual(name, report.seconds)
        for name, value in report.seconds.items()
        if name == fault or name not in {"start", "closing"}
    }
    assert max(more, key=more.get) == fault
    assert more[fault] >= INJECTED * 0.95
    wall = float(output) - started
    # The ledger counts neither the time before the process has its name nor the time after its last line.
    assert abs(report.wall - wall) <= 0.01 * wall + 0.1
    assert sum(report.seconds.values()) == pytest.approx(report.wall)


@pytest.mark.parametrize("fault", ["stopped", "stopped-late"])
def test_a_stopped_process_is_not_slow(begin, tmp_path, fault):
    """SIGSTOP for a second is not charged to the interrupted bucket, even in a busy, hour-old process."""
    # The stop goes unnoticed if it comes while the ledger's thread writes, which is rare.
    for number in range(4):
        folder = tmp_path / f"run{number}"
        process = begin(fault, folder)
        until(lambda pid=process.pid: is_stopped(pid))
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGCONT)
        process.wait()
        report = Run.open(folder).time_report()
        if "stopped" in report.seconds:
            break

    # A quarter of a second may pass between two looks.
    assert report.seconds["stopped"] >= 0.7
    others = report.seconds.keys() - {"start", "stopped", "closing"}
    assert max(report.seconds[name] for name in others) <= 0.9
    assert sum(report.seconds.values()) == pytest.approx(report.wall)


def test_holding_the_interpreter_lock_is_not_a_stop(begin, tmp_path):
    """A library that waits while it holds the interpreter's lock is charged where it does so."""
    begin("held", tmp_path / "run").wait()
    seconds = Run.open(tmp_path / "run").time_report().seconds

    assert seconds["data"] >= INJECTED * 0.95
    assert "stopped" not in seconds


def test_a_span_that_a_kill_cut_short_is_in_the_trace(begin, tmp_path):
    """It had been open for a second; it ends where the session did."""
    begin("killed-in-span", tmp_path / "run").wait()
    with (tmp_path / "trace.json").open("w") as file:
        write_trace(tmp_path / "run/time", file, name="mine", uploads={})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    (span,) = [one for one in events if one["name"] == "tokenize (did not end)"]
    assert span["dur"] >= 1.0e6


def test_standing_by_does_not_count_as_start(begin, tmp_path):
    """It began before the session that it follows; the time between them counts as gone, not as start."""
    second = begin("stands-by", tmp_path / "run")
    began = time.time()
    begin("killed", tmp_path / "run").wait()
    time.sleep(0.7)
    (tmp_path / "run/go").touch()
    output = second.wait().stdout
    report = Run.open(tmp_path / "run").time_report()

    assert [one.status for one in report.sessions] == ["killed", "completed"]
    (fault,) = report.faults
    assert fault.gone >= 0.65
    assert fault.start <= 0.3
    assert report.wall <= float(output) - began + 0.1


def test_a_kill_loses_only_the_time_after_the_last_write(begin, tmp_path):
    """The killed session's batches count as repeated; sessions and gaps sum to the wall time."""
    started = time.time()
    begin("killed", tmp_path / "run").wait()
    killed = time.time()
    time.sleep(0.7)
    pause = time.time() - killed
    output = begin("none", tmp_path / "run").wait().stdout
    wall = float(output) - started
    report = Run.open(tmp_path / "run").time_report()

    (fault,) = report.faults
    assert fault.status == "killed"
    assert 0.65 <= fault.gone <= pause + SLACK
    # No checkpoint was loaded: all known batches were trained again.
    assert fault.repeated == pytest.approx(report.seconds["repeated"])
    assert fault.step >= 25
    assert fault.repeated >= (fault.step - 1) * 0.006
    assert abs(report.wall - wall) <= 0.01 * wall + 0.1


def test_the_rank_that_made_others_wait_is_named(tmp_path, torch_server):
    """One rank has one slow step, and isn't slow in total; its open span is named too."""
    run_fault(Fault("step", 1, 2), tmp_path, torch_server)
    report = Run.open(tmp_path / "run").time_report()

    # A busy machine has others.
    step = max(report.slow_steps, key=lambda one: one.seconds)
    assert (step.step, step.rank, step.bucket, step.spans) == (20, 1, "callbacks", ("read shard",))
    assert step.seconds >= 0.55
    assert report.slow_steps_text.startswith("rank 1 made the others wait")
    assert "for callbacks, in 'read shard'" in report.slow_steps_text


FEW = [
    Fault("stopped", 0, 1),
    Fault("store", 0, 1),
    Fault("killed", 1, 2),
    Fault("backward", 1, 2),
]


@pytest.mark.parametrize("fault", times(FEW, ALL_FAULTS), ids=str)
def test_a_fault_of_a_trainer_is_named(tmp_path, torch_server, fault):
    """On one, two and four ranks, bucket and rank are right; the sum is the wall's within 1 % and 0.1 s."""
    found = []
    for number in range(4 if fault.kind == "stopped" else 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(wrong(fault, folder, torch_server, is_busy=True))
        if not found[-1]:
            break

    assert "" in found
