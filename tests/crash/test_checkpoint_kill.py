"""SIGKILL of the trainer, of the process that writes its checkpoints, and of both, at random moments."""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from events import read_checkpoint
from tests.crash.checkpoint_child import BATCHES
from tests.effort import times
from uploads import UploadQueue

ROOT = Path(__file__).parents[2]
VICTIMS = ("trainer", "writer", "both")
KILLS = int(os.environ.get("CHECKPOINT_KILLS", times(2, 6)))
SEED = int(os.environ.get("CHECKPOINT_SEED", "0"))
LONGEST_SECONDS = 4.0
WAIT_SECONDS = 240.0


@pytest.fixture
def trainers(torch_python, tmp_path):
    """Starts the program that trains in a folder for each line that it reads."""
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [torch_python, "-m", "tests.crash.checkpoint_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        with process:
            yield process
            process.stdin.close()


def start(trainers, folder):
    """Returns the id of a process that trains in a folder."""
    folder.mkdir(exist_ok=True)
    trainers.stdin.write(f"{folder}\n")
    trainers.stdin.flush()
    return int(trainers.stdout.readline())


def status(trainers):
    """Waits for the process, and returns its wait status."""
    return int(trainers.stdout.readline())


def writer_of(pid):
    """Returns the id of the process that writes the checkpoints of another, or None."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def kill(pid):
    """Kills a process, if it is still there."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def check_folder(folder):
    """Checks that every checkpoint is whole, and that the pointer, if there is one, names one of them."""
    saved = folder / "saved"
    whole = sorted(path.name for path in saved.glob("[!.]*.pt")) if saved.exists() else []
    for name in whole:
        assert read_checkpoint(saved / name)["run_name"] == "run"
    if (saved / "latest.symlink").exists():
        assert (saved / "latest.symlink").read_text().rpartition("/")[2] in whole
    store = folder / "store"
    if (store / "run/checkpoints/latest.symlink").exists():
        read_checkpoint(store / (store / "run/checkpoints/latest.symlink").read_text().strip())


def test_a_run_resumed_after_each_kill_equals_an_uninterrupted_run(trainers, tmp_path):
    """It is equal to the last bit; everything visible in between, here and in the store, is whole."""
    start(trainers, tmp_path / "whole")
    assert status(trainers) == 0, (tmp_path / "errors").read_text()
    draw = random.Random(SEED)
    kills = folders = 0

    while kills < KILLS:
        folders += 1
        folder = tmp_path / f"killed{folders}"
        ended = 1
        while ended != 0:
            trainer = start(trainers, folder)
            victim = VICTIMS[kills % 3] if kills < KILLS else "nobody"
            if victim != "nobody":
                time.sleep(draw.uniform(0.0, LONGEST_SECONDS))
            writer = writer_of(trainer)
            if victim in {"writer", "both"}:
                kill(writer)
            if victim in {"trainer", "both"}:
                kill(trainer)
            kills += victim != "nobody"
            ended = status(trainers)
            assert ended in {0, signal.SIGKILL}, (tmp_path / "errors").read_text()
            check_folder(folder)
        with UploadQueue(folder / "store", spool=folder / "spool", free_bytes=0) as queue:
            assert queue.drain(WAIT_SECONDS).is_empty
        check_folder(folder)

        assert (folder / "weights").read_text() == (tmp_path / "whole" / "weights").read_text()
        # A process that outlived its trainer removes its unfinished file itself.
        deadline = time.monotonic() + WAIT_SECONDS
        while list((folder / "saved").glob(".*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not list((folder / "saved").glob(".*"))
        # The next session has deleted what the killed session had not.
        assert len(list((folder / "saved").glob("*.pt"))) == 3
        assert len(list((folder / "store/run/checkpoints").glob("*.pt"))) == 2
        newest = (folder / "store/run/checkpoints/latest.symlink").read_text()
        assert read_checkpoint(folder / "store" / newest)["timestamp"]["batch"] == BATCHES
