"""Faults are injected in real processes: the right bucket has their time, and all add up to the wall's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from destinations.runs import Run
from tests.effort import times

PROGRAM = Path(__file__).with_name("time_child.py")
RANK_PROGRAM = Path(__file__).with_name("time_rank_child.py")
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
# What this machine takes for everything else of a session of a second.
SLACK = 0.35


def begin(fault, folder):
    """Starts the program."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), fault, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def usual(name, seconds):
    """Returns what a bucket has without a fault; of `start`, what it had in this very process."""
    expected = {"batch": 60 * 0.002, "forward": 60 * 0.004, "evaluation": 0.05}
    return min(seconds.get(name, 0.0), expected.get(name, 0.0))


@pytest.mark.parametrize("fault", [one for one in FAULTS for _ in range(times(1, 10))])
def test_a_fault_is_in_its_bucket(tmp_path, fault):
    """It has the time that was injected, and no other has as much; the buckets add up to the wall's time."""
    started = time.time()
    process = begin(fault, tmp_path / "run")
    output, _ = process.communicate()
    report = Run.open(tmp_path / "run").time_report()

    more = {name: value - usual(name, report.seconds) for name, value in report.seconds.items()}
    if fault != "start":
        del more["start"]
    assert max(more, key=more.get) == fault
    assert more[fault] >= INJECTED * 0.95
    wall = float(output) - started
    # What comes before the process has its name and after its last line is not the ledger's.
    assert abs(report.wall - wall) <= 0.01 * wall + 0.1
    assert sum(report.seconds.values()) == pytest.approx(report.wall)


def test_a_stopped_process_is_not_slow(tmp_path):
    """SIGSTOP for a second: the bucket that it came into is not charged."""
    process = begin("stopped", tmp_path / "run")
    while not _is_stopped(process.pid):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    process.communicate()
    seconds = Run.open(tmp_path / "run").time_report().seconds

    assert seconds["stopped"] >= 0.9
    assert max(value for name, value in seconds.items() if name not in {"start", "stopped"}) <= 0.6


def _is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_kill_costs_what_came_after_it(tmp_path):
    """Until the next session had trained what the killed one had; sessions and gaps add up to the wall's."""
    started = time.time()
    begin("killed", tmp_path / "run").communicate()
    time.sleep(0.7)
    output, _ = begin("none", tmp_path / "run").communicate()
    wall = float(output) - started
    report = Run.open(tmp_path / "run").time_report()

    (fault,) = report.faults
    assert fault.status == "killed"
    assert 0.65 <= fault.gone <= 0.7 + SLACK
    # Nothing was loaded: all 30 batches were trained again.
    assert fault.repeated == pytest.approx(report.seconds["repeated"])
    assert fault.repeated >= 29 * 0.006
    assert abs(report.wall - wall) <= 0.01 * wall + 0.1


RANK_FAULTS = [
    (fault, slow, ranks)
    for ranks in (2, 4)
    for fault in ("data", "forward", "callbacks", "logging")
    for slow in range(ranks)
]


@pytest.mark.xdist_group("torchrun")
@pytest.mark.parametrize(("fault", "slow", "ranks"), times([("data", 1, 2)], RANK_FAULTS))
def test_the_slow_rank_is_named(tmp_path, fault, slow, ranks):
    """Ranks meet in each batch: what one takes longer for, the others wait for."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [*launcher, str(RANK_PROGRAM), fault, str(slow), str(tmp_path / "run")],
        env=os.environ | variables,
        check=True,
        capture_output=True,
        timeout=120,
    )
    report = Run.open(tmp_path / "run").time_report()

    assert set(report.ranks) == set(range(ranks))
    rank, bucket, seconds = report.slow_rank
    assert (rank, bucket) == (slow, fault)
    assert seconds >= 0.9 * 30 * 0.02
