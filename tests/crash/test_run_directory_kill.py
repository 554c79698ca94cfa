"""Processes that log metrics are killed: each row whose call returned is there once, and none is torn."""

import contextlib
import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from destinations import RunDirectory
from destinations.run_directory import RunInUseError, read_rows, read_series
from destinations.run_directory.folder import WriterLock
from destinations.run_directory.frames import MAGIC
from destinations.run_directory.layout import POSITION, journal_path, segment_paths
from events import Engine, Logger, State
from tests.effort import times

CHILD = Path(__file__).with_name("run_directory_child.py")
KILLS_OF_A_BLOCK = times(3, 10)


class Child:
    """A logging process, forked by the server, that waits for permission to begin."""

    was_killed = False

    def __init__(self, server: socket.socket, **job: Any) -> None:
        self.stdout, output = os.pipe()
        gate, self._gate = os.pipe()
        self._said, said = os.pipe()
        socket.send_fds(server, [json.dumps(job).encode()], [output, gate, said])
        for descriptor in (output, gate, said):
            os.close(descriptor)
        self.pid = int(os.read(self._said, 100))

    def go(self) -> "Child":
        """Lets it begin."""
        os.close(self._gate)
        return self

    def kill(self) -> None:
        """Sends SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def output_until(self, step: int, is_ready: Callable[[], bool] = lambda: True) -> bytes:
        """Reads its output until the call of a step has returned and any other awaited text has appeared."""
        output = b""
        while acknowledged(output) < step or not is_ready():
            data = os.read(self.stdout, 1 << 16)
            assert data, output[-100:]
            output += data
        return output

    def rest(self) -> bytes:
        """Reads its output to the end, and waits for its exit."""
        output = b""
        while data := os.read(self.stdout, 1 << 16):
            output += data
        status = int(os.read(self._said, 100))
        self.was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        os.close(self.stdout)
        os.close(self._said)
        return output


@pytest.fixture(autouse=True)
def _outside_of_any_repository(tmp_path_factory, monkeypatch):
    """Spares each run, which describes its surroundings, three programs."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())


@contextlib.contextmanager
def child_server(folder: Path) -> Iterator[Callable[..., Child]]:
    """Starts processes that log, one after the other, from a server that has imported everything."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, str(CHILD), str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL, cwd=folder)
        theirs.close()

        def start(folder: Path, mode: str = "fast", **options: Any) -> Child:
            return Child(ours, folder=str(folder), mode=mode, **options)

        yield start
    process.wait(timeout=300)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Callable[..., Child]]:
    """Starts processes that log."""
    with child_server(tmp_path_factory.mktemp("server")) as start:
        yield start


def acknowledged(output: bytes) -> int:
    """Returns the last step whose call had returned, or -1."""
    lines = [line for line in output.split(b"\n")[:-1] if line]
    return int(lines[-1]) if lines else -1


def check(folder: Path, last: int, first: int = 0) -> int:
    """Checks every row up to the last acknowledged one; returns how many rows there are."""
    rows = read_rows(folder)
    steps = [row.step for row in rows]
    assert steps == list(range(first, first + len(rows)))
    assert len(rows) >= last + 1 - first, f"{last + 1 - first - len(rows)} rows lost"
    for row in rows:
        step = row.step
        expected = {"a": step + 0.5, "b": float(step)}
        if step % 40 == 39:
            expected[f"extra{step // 40}"] = step
        assert row.metrics == expected
    return len(rows)


def reopen(folder: Path, steps: int = 0) -> None:
    """Opens the run again, logs some more, and closes it."""
    before = len(read_rows(folder))
    destination = RunDirectory(folder, flush_seconds=0.01, if_exists="resume")
    state = State("again")
    logger = Logger(state, [destination], raise_errors=True)
    engine = Engine(state, logger)
    engine.run_event("init")
    for step in range(before, before + steps):
        metrics = {"a": step + 0.5, "b": float(step)}
        if step % 40 == 39:
            metrics[f"extra{step // 40}"] = step
        logger.log_metrics(metrics, step)
    engine.close()


@pytest.mark.parametrize("block", range(times(1, 5)))
def test_random_kills_lose_no_row(tmp_path, start, block):
    """SIGKILL at a random moment: every acknowledged row is there before and after the run is opened again."""
    source = random.Random(block)
    for attempt in range(KILLS_OF_A_BLOCK):
        folder = tmp_path / str(attempt)
        child = start(folder, mode=source.choice(["fast", "paced"])).go()
        output = child.output_until(source.randrange(1, 1500))
        child.kill()
        output += child.rest()

        last = acknowledged(output)
        found = check(folder, last)
        reopen(folder, steps=50)
        again = check(folder, last)

        assert again == found + 50
        assert not (folder / "journal").exists()
        assert not list(folder.glob(".*"))


@pytest.mark.parametrize("block", range(times(1, 4)))
def test_kills_of_a_busy_process_lose_no_row(tmp_path, start, block):
    """SIGKILL while segments change constantly and threads compete: every acknowledged row is there."""
    source = random.Random(block)
    folder = tmp_path / "run"
    child = start(folder, mode="busy", flush_seconds=source.choice([0.001, 0.02])).go()
    output = child.output_until(source.randrange(100, 600))
    child.kill()
    output += child.rest()
    last = acknowledged(output)

    for _ in range(2):
        series = [read_series(folder, name) for name in ("b", "wide0", "wide999")]
        found = len(series[0])
        assert found > last
        assert all(one == [(step, float(step)) for step in range(found)] for one in series)
        destination = RunDirectory(folder, if_exists="resume")
        engine = Engine(state := State("again"), Logger(state, [destination], raise_errors=True))
        engine.run_event("init")
        engine.close()


def test_a_run_killed_again_and_again_keeps_every_row(tmp_path, start):
    """Each process continues where the previous one was killed; readers don't see the abandoned steps."""
    folder, first = tmp_path / "run", 0
    for round_ in range(6):
        child = start(folder, mode="paced", first=first).go()
        output = child.output_until(first + 200)
        child.kill()
        output += child.rest()
        last = acknowledged(output)
        check(folder, last)
        first = max(1, last - 60 * (round_ % 2))

    reopen(folder)
    check(folder, last)


def parts_of(folder: Path, suffix: str) -> list[Path]:
    """Returns the parts with a suffix."""
    return sorted((folder / "parts" / "metrics").glob(f"[0-9]*{suffix}"))


@pytest.mark.parametrize("block", range(times(1, 5)))
def test_kills_while_parts_are_closed_lose_no_row(tmp_path, start, block):
    """SIGKILL at random moments of a run that closes a part every few rows: each row is there once."""
    source = random.Random(block)
    folder, first = tmp_path / "run", 0
    for _ in range(5):
        child = start(folder, mode="paced", first=first, in_parts=True).go()
        output = child.output_until(first + source.randrange(200, 1000))
        time.sleep(source.random() * 0.3)
        child.kill()
        output += child.rest()
        last = acknowledged(output)
        check(folder, last)
        first = max(1, last - source.choice([0, 60]))

    child = start(folder, mode="paced", first=first, last=last + 200, in_parts=True).go()
    child.output_until(last + 100)
    child.rest()
    check(folder, last + 199)
    assert parts_of(folder, ".parquet")
    assert not list(folder.glob("parts/metrics/.*"))


SYSCALLS = (
    "openat",
    "write",
    "pwrite64",
    "rename",
    "fdatasync",
    "fsync",
    "unlink",
    "ftruncate",
    "fallocate",
    "close",
    "rmdir",
)
# A more frequent syscall gets half as many points; test_run_directory_model.py has all of them.
MOST_POINTS = times(4, 10)
TRACED_STEPS = 90  # Two changes of columns.


def traced(child: Child, log: str, *options: str) -> bytes:
    """Lets a child go once strace is attached to it; returns the child's output."""
    command = ["strace", "-f", "-o", log, *options, "-p", str(child.pid)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as strace:
        # strace prints this once it has stopped the process: before, the first calls would go by unseen.
        if f"Process {child.pid} attached" not in strace.stderr.readline():
            child.kill()
            child.go().rest()
            strace.communicate(timeout=300)
            pytest.skip("strace may not be attached to a process here")
        output = child.go().rest()
        strace.communicate(timeout=300)
    return output


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("syscall", SYSCALLS)
def test_a_kill_at_any_syscall_loses_no_row(tmp_path, start, syscall):
    """A SIGKILL hits the syscalls that touch the run: drain, column change, position, close.

    Frequent syscalls are hit at a few of their calls.
    """
    counted = tmp_path / "count"
    trace = tmp_path / "trace.txt"
    traced(start(counted, last=TRACED_STEPS), str(trace), "-e", f"trace={syscall}")
    # strace counts calls for each thread, and injects into the first thread that reaches its n-th call.
    counts: Counter[str] = Counter()
    points = set()
    for line in trace.read_text(errors="replace").splitlines():
        thread, call = line.split(maxsplit=1)
        if not call.startswith(f"{syscall}("):
            continue  # A signal, or the end of a call that another thread interrupted.
        counts[thread] += 1
        # Files of the run are named below its folder's descriptor.
        if str(counted) in line or "/proc/self/fd/" in line or _is_unnamed(syscall, line):
            points.add(counts[thread])
    source = random.Random(syscall)
    drawn = points if len(points) <= MOST_POINTS else source.sample(sorted(points), MOST_POINTS // 2)
    # Two runs differ in their number of calls; all runs make the first call.
    chosen = sorted({min(points), *drawn})

    kills = 0
    for when in chosen:
        folder = tmp_path / f"at{when}"
        inject = f"inject={syscall}:signal=SIGKILL:when={when}"
        child = start(folder, last=TRACED_STEPS)
        output = traced(child, "/dev/null", "-e", f"trace={syscall}", "-e", inject)
        kills += child.was_killed
        last = acknowledged(output)
        if not folder.exists():
            continue
        found = check(folder, last)
        reopen(folder, steps=3)
        assert check(folder, last) == found + 3

    assert kills > 0


def _is_unnamed(syscall: str, line: str) -> bool:
    """Returns whether a call that names no path may be one of ours."""
    return syscall not in {"openat", "rename", "unlink", "rmdir"} and "write(1," not in line


def dead_run(start: Callable[..., Child], folder: Path, rows: int = 300) -> Path:
    """Leaves a run whose journal was never drained; returns its only segment."""
    child = start(folder, mode="left", last=rows, flush_seconds=1000.0).go()
    child.output_until(rows - 1)
    child.kill()
    child.rest()
    (segment,) = segment_paths(journal_path(folder, 0))
    return segment


def test_a_torn_tail_is_skipped_and_overwritten(tmp_path, start):
    """A journal cut or zeroed anywhere shows the rows before, and takes new ones after."""
    origin = tmp_path / "origin"
    segment = dead_run(start, origin)
    data = segment.read_bytes()
    used = len(data.rstrip(b"\0"))
    whole = len(read_rows(origin))
    source = random.Random(5)

    for index, cut in enumerate(source.sample(range(len(MAGIC), used), 30)):
        folder = tmp_path / str(index)
        shutil.copytree(origin, folder)
        (path,) = segment_paths(journal_path(folder, 0))
        path.write_bytes(data[:cut] if index % 2 else data[:cut] + bytes(len(data) - cut))
        rows = read_rows(folder)
        assert [row.step for row in rows] == list(range(len(rows)))
        assert len(rows) <= whole
        check(folder, -1)
        reopen(folder, steps=3)
        check(folder, -1)
        assert len(read_rows(folder)) == len(rows) + 3


def test_flipped_bytes_are_never_shown(tmp_path, start):
    """A corrupted byte ends the readable part; no wrong data is presented as a row."""
    origin = tmp_path / "origin"
    segment = dead_run(start, origin)
    data = segment.read_bytes()
    used = len(data.rstrip(b"\0"))
    source = random.Random(7)

    for index in range(30):
        folder = tmp_path / str(index)
        shutil.copytree(origin, folder)
        (path,) = segment_paths(journal_path(folder, 0))
        changed = bytearray(data)
        changed[source.randrange(len(MAGIC), used)] ^= source.randrange(1, 256)
        path.write_bytes(changed)
        check(folder, -1)
        reopen(folder)
        check(folder, -1)


LOCKING = """
import os, signal, sys, time
from pathlib import Path
from destinations.run_directory.folder import WriterLock
WriterLock(Path(sys.argv[1])).acquire()
if os.fork() == 0:
    # As a program that is being started, which has not closed what it inherited.
    print("forked", flush=True)
    time.sleep(0.3)
    os._exit(0)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_opening_waits_for_a_lock_that_a_killed_process_left_to_its_child(tmp_path):
    """The child closes it when it starts another program; until then, nobody uses the run."""
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", LOCKING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"forked\n"
        lock = WriterLock(path)
        with pytest.raises(RunInUseError, match=f"process {child.pid} "):
            lock.acquire()
        child.stdin.close()
        child.wait(300)
        lock.acquire()
        lock.release()


def test_a_torn_line_of_the_csv_is_written_again(tmp_path, start):
    """Bytes after what the position counts, whole lines or not, are not counted twice and not kept."""
    folder = tmp_path / "run"
    position = journal_path(folder, 0) / POSITION
    child = start(folder, mode="paced").go()
    output = child.output_until(300, position.exists)
    child.kill()
    output += child.rest()

    with (folder / "metrics.csv").open("ab") as file:
        file.write(b"7,0,1.0,9.9\n8,0,")
    last = acknowledged(output)
    check(folder, last)
    reopen(folder, steps=2)

    check(folder, last)
    with (folder / "metrics.csv").open(newline="") as file:
        assert len({len(row) for row in csv.reader(file)}) == 1
    assert len(read_series(folder, "a")) == len(read_rows(folder))
