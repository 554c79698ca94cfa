"""Processes that log metrics are killed: rows whose call had returned are there, each once, and none is torn."""

import csv
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from destinations import RunDirectory
from destinations.run_directory import read_rows, read_series
from destinations.run_directory.frames import MAGIC
from destinations.run_directory.layout import journal_path, segment_paths
from events import Engine, Logger, State

CHILD = Path(__file__).with_name("run_directory_child.py")
KILLS = 50


def start(folder: Path, *prefix: str, mode: str = "fast", **environment: str) -> "subprocess.Popen[bytes]":
    """Starts the child under a prefix such as strace."""
    command = [*prefix, sys.executable, str(CHILD), str(folder), mode]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )


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
    destination = RunDirectory(folder, flush_seconds=0.01)
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


@pytest.mark.parametrize("block", range(5))
def test_fifty_random_kills_lose_no_row(tmp_path, block):
    """SIGKILL at a random moment: every acknowledged row is there before and after the run is opened again."""
    source = random.Random(block)
    for attempt in range(KILLS // 5):
        folder = tmp_path / str(attempt)
        process = start(folder, mode=source.choice(["fast", "paced"]))
        assert process.stdout is not None
        target, output = source.randrange(1, 1500), b""
        while acknowledged(output) < target:
            output += os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(signal.SIGKILL)
        output += process.stdout.read()
        process.stdout.close()
        process.wait(timeout=30)

        last = acknowledged(output)
        found = check(folder, last)
        reopen(folder, steps=50)
        again = check(folder, last)

        assert again == found + 50
        assert not (folder / "journal").exists()
        assert not list(folder.glob(".*"))


def test_a_run_killed_again_and_again_keeps_every_row(tmp_path):
    """Each process goes on where the one before was killed; the abandoned steps are in no reader's way."""
    folder, first = tmp_path / "run", 0
    for round_ in range(6):
        process = start(folder, FIRST_STEP=str(first), mode="paced")
        assert process.stdout is not None
        output = b""
        while acknowledged(output) < first + 200:
            output += os.read(process.stdout.fileno(), 1 << 16)
        process.kill()
        output += process.stdout.read()
        process.stdout.close()
        process.wait(timeout=30)
        last = acknowledged(output)
        check(folder, last)
        first = max(1, last - 60 * (round_ % 2))

    reopen(folder)
    check(folder, last)


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
MOST_POINTS = 10  # Of a syscall that is made more often, some points are drawn.
TRACED_STEPS = "90"  # Two changes of columns.


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("syscall", SYSCALLS)
def test_a_kill_at_any_syscall_loses_no_row(tmp_path, syscall):
    """SIGKILL at each call of the syscalls that touch the run: drain, column change, position, close; at some of the frequent ones."""
    counted = tmp_path / "count"
    trace = tmp_path / "trace.txt"
    process = start(
        counted, "strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={syscall}", LAST_STEP=TRACED_STEPS
    )
    process.communicate(timeout=120)
    lines = trace.read_text(errors="replace").splitlines()
    calls = [
        index for index, line in enumerate(lines, 1) if str(counted) in line or _is_unnamed(syscall, line)
    ]
    source = random.Random(syscall)
    chosen = calls if len(calls) <= MOST_POINTS else sorted(source.sample(calls, 3))

    for when in chosen:
        folder = tmp_path / f"at{when}"
        inject = f"inject={syscall}:signal=SIGKILL:when={when}"
        process = start(
            folder,
            "strace",
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-e",
            f"trace={syscall}",
            "-e",
            inject,
            LAST_STEP=TRACED_STEPS,
        )
        output, _ = process.communicate(timeout=120)
        last = acknowledged(output)
        if not folder.exists():
            continue
        found = check(folder, last)
        reopen(folder)
        assert check(folder, last) == found


def _is_unnamed(syscall: str, line: str) -> bool:
    """Whether a call that names no path may be one of ours."""
    return syscall not in {"openat", "rename", "unlink", "rmdir"} and "write(1," not in line


def dead_run(folder: Path, rows: int = 300) -> Path:
    """Leaves a run whose journal nobody drained; returns its only segment."""
    process = start(folder, LAST_STEP=str(rows), FLUSH_SECONDS="1000", mode="no-fit")
    assert process.stdout is not None
    output = b""
    while acknowledged(output) < rows - 1:
        # The child would drain when it ends; it is stopped before.
        output += os.read(process.stdout.fileno(), 1 << 16)
        if acknowledged(output) >= rows - 50:
            break
    process.kill()
    process.stdout.close()
    process.wait(timeout=30)
    (segment,) = segment_paths(journal_path(folder, 0))
    return segment


def test_a_torn_tail_is_left_out_and_written_over(tmp_path):
    """A journal cut or zeroed anywhere shows the rows before, and takes new ones after."""
    origin = tmp_path / "origin"
    segment = dead_run(origin)
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


def test_flipped_bytes_are_never_shown(tmp_path):
    """A byte that the disk got wrong ends the readable part; nothing wrong is presented as a row."""
    origin = tmp_path / "origin"
    segment = dead_run(origin)
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


def test_a_torn_line_of_the_csv_is_written_again(tmp_path):
    """Bytes after what the position counts, whole lines or not, are not counted twice and not kept."""
    folder = tmp_path / "run"
    process = start(folder, mode="paced")
    assert process.stdout is not None
    output = b""
    while acknowledged(output) < 300:
        output += os.read(process.stdout.fileno(), 1 << 16)
    process.kill()
    output += process.stdout.read()
    process.stdout.close()
    process.wait(timeout=30)

    with (folder / "metrics.csv").open("ab") as file:
        file.write(b"7,0,1.0,9.9\n8,0,")
    last = acknowledged(output)
    check(folder, last)
    reopen(folder, steps=2)

    check(folder, last)
    with (folder / "metrics.csv").open(newline="") as file:
        assert len({len(row) for row in csv.reader(file)}) == 1
    assert len(read_series(folder, "a")) == len(read_rows(folder))
