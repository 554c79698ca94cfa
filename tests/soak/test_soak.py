"""Tests the parts of `make soak`: the jumping clock, the faults in turn, and the check for growth."""

import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.servers.fault_proxy import Request
from tests.soak import faults
from tests.soak.faults import FAULTS, FaultsInTurn
from tests.soak.long_run import Sample, grown
from tests.soak.trainer import content, difference


def test_the_wall_clock_of_another_process_jumps_and_the_monotonic_one_does_not(tmp_path):
    """The clock jumps while the process runs, and files keep the system's time."""
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("d", 0.0))
    program = (
        "import sys, time\n"
        "for line in sys.stdin: print(time.time(), time.time_ns(), time.monotonic(), flush=True)"
    )
    environment = os.environ | {
        "PYTHONPATH": str(Path(faults.__file__).with_name("clock")),
        "SOAK_CLOCK": str(clock),
    }
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:

        def ask():
            process.stdin.write("\n")
            return [float(one) for one in process.stdout.readline().split()]

        before = ask()
        with clock.open("r+b") as stream:
            stream.write(struct.pack("d", -86400.0))
        after = ask()
        process.stdin.close()

    moved = [later - earlier for earlier, later in zip(before, after, strict=True)]
    assert -86400 <= moved[0] < -80000
    assert -86400e9 <= moved[1] < -80000e9
    assert moved[2] >= 0


def test_each_fault_has_its_turn_until_the_end(monkeypatch):
    """A fault of single requests hits some, an outage hits all, and afterwards the server answers."""
    monkeypatch.setattr(faults, "_SPAN_SECONDS", (0.0, 0.0))
    proxy = SimpleNamespace(seen=[None] * 1000)
    plan = FaultsInTurn(proxy, random.Random(1))
    request = Request("PUT", "/bucket/name", {}, b"bytes")

    for _ in range(20 * len(FAULTS)):
        plan(request)
    counts = dict(plan.counts)
    plan.stop()

    assert set(counts) == {name for name, share, _ in FAULTS if share}
    assert counts["outage"] == 20
    assert 0 < counts["connection reset"] < 20
    assert [plan(request) for _ in range(len(FAULTS))] == [None] * len(FAULTS)
    assert len(proxy.seen) == 100


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (Sample(100.0, 10, 20), None),
        (Sample(112.0, 10, 20), None),
        (Sample(114.0, 10, 20), "memory of the trainer grew from 100.0 to 114.0"),
        (Sample(100.0, 13, 20), "threads of the trainer grew from 10.0 to 13.0"),
        (Sample(100.0, 10, 30), "descriptors of the trainer grew from 20.0 to 30.0"),
    ],
)
def test_growth_in_the_last_third_is_reported(last, what):
    """Growth in the first third doesn't count, and neither does the noise of an allocator."""
    samples = [Sample(10.0, 1, 1)] * 20 + [Sample(100.0, 10, 20)] * 20 + [last] * 20

    assert [text.removeprefix("the ") for text in grown("trainer", samples)] == ([what] if what else [])


def test_missing_and_damaged_objects_are_reported():
    """The report has the offset of the first wrong byte."""
    whole = content(20)

    assert difference(whole, 20) == ""
    assert difference(None, 20) == "is missing"
    assert "differs from byte 7" in difference(whole[:7] + b"x" + whole[8:], 20)
