"""Injects faults into runs of one, two and four ranks, and checks whether the time report names them.

`python -m tests.crash.time_faults 100` draws that many at random and counts how many were right.
"""

import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import attrs

from destinations.runs import Run
from tests.servers.fork_server import ForkServer
from tests.waiting import until

__all__ = ["FAULTS", "Fault", "draw", "is_stopped", "run_fault", "wrong"]

PROGRAM = Path(__file__).with_name("time_rank_child.py")
# The bucket of each fault.
BUCKETS = {
    "loader": "data",
    "rank": "forward",
    "backward": "backward",
    "callback": "callbacks",
    "disk": "checkpoint",
    "destination": "logging",
    "store": "closing",
    "killed": "gone",
    "stopped": "stopped",
    "evaluation": "evaluation",
    "garbage": "garbage",
    "checkpoints": "checkpoint",
    "start": "start",
}
# For these, the others wait for a rank; a checkpoint belongs to rank 0.
OF_A_RANK = {"loader", "rank", "backward", "callback", "destination", "stopped", "garbage", "start"}
# The most seconds of the other buckets in a run without a fault.
USUAL = {"start": 1e9, "forward": 0.45, "backward": 0.1, "batch": 0.1, "data": 0.1, "waiting": 1e9}
# Side effects of a fault.
BESIDE = {"killed": {"repeated", "restore", "checkpoint", "forward"}, "checkpoints": {"optimizer"}}
PAUSE = 1.0


@attrs.frozen
class Fault:
    """A fault: its kind, its rank, and the number of ranks."""

    kind: str
    rank: int
    ranks: int


FAULTS = [
    Fault(kind, rank, ranks)
    for ranks in (1, 2, 4)
    for kind in BUCKETS
    for rank in (range(ranks) if kind in OF_A_RANK or kind == "killed" else [0])
    # A single rank waits for none: its start and its backward pass are as they are.
    if ranks > 1 or kind != "start"
]


def draw(count, seed):
    """Returns that many random faults, with each kind and each number of ranks equally often."""
    numbers = random.Random(seed)
    drawn = []
    while len(drawn) < count:
        kind, ranks = numbers.choice(list(BUCKETS)), numbers.choice([1, 2, 4])
        drawn.append(
            numbers.choice([one for one in FAULTS if (one.kind, one.ranks) == (kind, ranks)] or [None])
        )
        drawn = [one for one in drawn if one is not None]
    return drawn


def _port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _begin(fault, folder, server):
    common = {
        "WORLD_SIZE": str(fault.ranks),
        "LOCAL_WORLD_SIZE": str(fault.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return [
        server.start(
            PROGRAM.read_text(encoding="utf-8"),
            fault.kind,
            fault.rank,
            folder / "run",
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(fault.ranks)
    ]


def is_stopped(pid):
    """Returns whether SIGSTOP has stopped a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def run_fault(fault, folder, server):
    """Runs a fault; returns its begin and end, and how long a process was stopped or the run was gone.

    Args:
        fault: the fault.
        folder: for the run.
        server: a `ForkServer` that has torch, which starts the ranks.
    """
    began, took = time.time(), 0.0
    ranks = _begin(fault, folder, server)
    try:
        if fault.kind == "stopped":
            pid = ranks[fault.rank].pid
            until(lambda: is_stopped(pid))
            time.sleep(PAUSE)
            took = PAUSE
            os.kill(pid, signal.SIGCONT)
        if fault.kind == "killed":
            ranks[fault.rank].wait(120)
            for one in ranks:
                one.kill()
            time.sleep(PAUSE)
            took = PAUSE
            ranks = _begin(fault, folder, server)
        ended = [one.wait(180) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert not any(one.returncode for one in ended), [one.stderr for one in ended]
    return began, float(ended[0].stdout.split()[-1]), took


def wrong(fault, folder, server, *, is_busy=False):
    """Runs a fault, and returns the report's mistakes about it; nothing if it is right.

    Args:
        fault: the fault.
        folder: for the run.
        server: as for `run_fault`.
        is_busy: whether the machine has other work. Then a run's end may wait for the disk, and a process
            may take a tenth of a second to begin, which the ledger doesn't count.
    """
    began, ended, took = run_fault(fault, folder, server)
    report = Run.open(folder / "run").time_report()
    bucket = BUCKETS[fault.kind]
    seconds = report.ranks[fault.rank] if bucket != "gone" else report.seconds
    ends_late = is_busy or fault.ranks > 1
    ignored = (BESIDE.get(fault.kind, set()) | ({"closing"} if ends_late else set())) - {bucket}
    more = {
        name: value - USUAL.get(name, 0.05)
        for name, value in seconds.items()
        if name == bucket or name not in ignored
    }
    if fault.kind == "start":
        more["start"] = report.ranks[fault.rank]["start"] - 1.0
    found = []
    if max(more, key=more.get) != bucket and fault.kind != "start":
        found.append(f"{max(more, key=more.get)} instead of {bucket}")
    if took and seconds.get(bucket, 0.0) < took * 0.7:
        found.append(f"{bucket} has {seconds.get(bucket, 0.0):.2f} s of {took:.2f}")
    if fault.ranks > 1 and fault.kind in OF_A_RANK and (report.slow_rank or ())[:2] != (fault.rank, bucket):
        found.append(f"slow rank {report.slow_rank}")
    if bucket == "gone" and not (len(report.faults) == 1 and report.faults[0].status in {"killed", "failed"}):
        found.append(f"faults {[one.status for one in report.faults]}")
    wall = ended - began
    if abs(report.wall - wall) > 0.01 * wall + 0.1 * is_busy:
        found.append(f"{report.wall:.3f} s of {wall:.3f}")
    return (
        "; ".join(found)
        and f"{'; '.join(found)} of { {name: round(one, 2) for name, one in seconds.items()} }"
    )


def main(arguments):
    """Prints the mistakes, and how many reports were right."""
    count, seed = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else random.randrange(10**6)
    print(f"seed {seed}")
    right = 0
    with ForkServer("torch", "torch._dynamo") as server:
        for number, fault in enumerate(draw(count, seed), 1):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    text = wrong(fault, Path(folder), server)
                except Exception as error:  # noqa: BLE001  # counted as wrong
                    text = f"{type(error).__name__}: {error}"
            right += not text
            print(
                f"{number}: {fault.kind} in rank {fault.rank} of {fault.ranks}: {text or 'right'}", flush=True
            )
    print(f"{right} of {count} right")
    return 0 if right >= 0.95 * count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
