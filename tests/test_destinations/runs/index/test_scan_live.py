"""Scans while runs start, log, finish, crash, move and are deleted: nothing raises, and all are found."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from destinations import RunDirectory
from destinations.runs import open_runs
from events import Engine, Logger, State

ROOT = Path(__file__).resolve().parents[4]
WAIT_SECONDS = 300
HOUR = 3600.0

KILLED = """
import json
import pathlib
import sys
from destinations import RunDirectory
from events import Engine, Logger, State

engines = []
for folder in sys.argv[1:]:
    state = State("test")
    logger = Logger(state, [RunDirectory(folder, flush_seconds=0.02)], raise_errors=True)
    engines.append(Engine(state, logger))
    engines[-1].run_event("init")
    logger.log_hyperparameters({"kind": "crash"})
    logger.log_metrics({"loss": 0.5}, 1)
    content = {"hparams": {}}
    # On a busy machine a flush may give up before all is written.
    while not (content["hparams"] and content["summary"]):
        logger.flush()
        content = json.loads(pathlib.Path(folder, "sidecar.json").read_bytes())
print("logged", flush=True)
sys.stdin.read()
"""


def write(folder, kind, errors):
    """Runs one writer: logs, then ends in the way of its kind."""
    try:
        state = State("test")
        run = RunDirectory(folder, run_id=folder.name, flush_seconds=0.02, close_seconds=WAIT_SECONDS)
        logger = Logger(state, [run], raise_errors=True)
        engine = Engine(state, logger)
        engine.run_event("init")
        logger.log_hyperparameters({"kind": kind, "optim": {"lr": 0.1}})
        for step in range(50):
            logger.log_metrics({"loss": 1.0 / (step + 1)}, step)
            if step % 10 == 9:
                logger.flush()
        engine.close(ValueError("no") if kind == "fail" else None)
        if kind == "move":
            (folder.parent / "moved").mkdir(exist_ok=True)
            folder.rename(folder.parent / "moved" / folder.name)
        elif kind == "delete":
            shutil.rmtree(folder)
    except BaseException as error:
        errors.append(error)
        raise


@pytest.fixture
def killed(tmp_path):
    """A process that writes four runs, killed once all have logged."""
    folders = [str(tmp_path / "runs" / f"crash{number}") for number in range(4)]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:

        def kill():
            assert process.stdout.readline() == "logged\n"
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_SECONDS)

        yield kill
        process.kill()


def test_a_scan_while_twenty_writers_are_at_work(killed, tmp_path):
    """Each scan continues, and the last one has the status of each run."""
    root, errors = tmp_path / "runs", []
    root.mkdir()
    kinds = [kind for kind in ("finish", "fail", "move", "delete") for _ in range(4)]
    names = [f"{kind}{number}" for number, kind in enumerate(kinds)]
    writers = [
        threading.Thread(target=write, args=(root / name, kind, errors))
        for name, kind in zip(names, kinds, strict=True)
    ]
    crash = threading.Thread(target=killed)

    with open_runs(root, cache=tmp_path / "cache") as runs:
        for thread in (*writers, crash):
            thread.start()
        reports = [runs.scan(full=False)]
        while busy := [thread for thread in (*writers, crash) if thread.is_alive()]:
            busy[0].join(0.05)
            reports.append(runs.scan(full=len(reports) % 5 == 4))
            runs.query(where="summary.loss < 1 or alive", sort_by="created_at")
        for thread in (*writers, crash):
            thread.join(WAIT_SECONDS)
        report = runs.scan(full=True)
        statuses = {run.record.path.name: run.record.status for run in runs}
        kept = {
            run.record.path.relative_to(root).as_posix() for run in runs.query(where="hparams.kind == 'move'")
        }
        losses = {run.record.summary["loss"] for run in runs.query(where="status in ('completed', 'failed')")}

    assert errors == []
    assert {one.warnings for one in reports} == {()}
    endings = {"finish": "completed", "fail": "failed", "move": "completed"}
    expected = {name: endings[kind] for name, kind in zip(names, kinds, strict=True) if kind in endings}
    assert statuses == expected | {f"crash{number}": "running" for number in range(4)}
    assert (report.runs, report.damaged, report.duplicates) == (16, 0, {})
    assert kept == {f"moved/{name}" for name in names if name.startswith("move")}
    assert losses == {1.0 / 50}


KILLED_BETWEEN_FLUSHES = """
import os
import signal
import sys
from destinations import RunDirectory
from events import Engine, Logger, State

state = State("test")
logger = Logger(state, [RunDirectory(sys.argv[1], flush_seconds=3600.0)], raise_errors=True)
engine = Engine(state, logger)
engine.run_event("init")
logger.log_metrics({"acc": 0.5, "early": 1.0}, 1)
logger.flush()
print("flushed", flush=True)
sys.stdin.readline()
for step in range(2, 50):
    logger.log_metrics({"acc": step / 100}, step)
logger.log_metrics({"late": 0.25}, 50)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_summary_of_a_killed_run_covers_its_rows(tmp_path):
    """The record, the statistics and `best` include rows after the last flush, and nothing is written."""
    root, hours = tmp_path / "runs", [0.0]
    folder = root / "killed"
    root.mkdir()
    command = [sys.executable, "-c", KILLED_BETWEEN_FLUSHES, str(folder)]
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        ) as process,
        open_runs(root, cache=tmp_path / "cache", clock=lambda: time.time() + hours[0]) as runs,
    ):
        assert process.stdout.readline() == "flushed\n"
        beats = folder.joinpath("heartbeat").stat()
        for path in (folder / "sidecar.json", folder):
            os.utime(path, (1e9, 1e9))  # The scan trusts an older time.
        runs.scan()
        before = runs.best("acc", is_max=True)[0].value
        process.communicate("go\n", WAIT_SECONDS)
        os.utime(folder / "heartbeat", ns=(beats.st_atime_ns, beats.st_mtime_ns))
        files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        hours[0] = HOUR

        runs.scan()

        (run,) = runs
        assert run.record.summary == {"acc": 0.49, "early": 1.0, "late": 0.25}
        assert (run.summary["acc"].last, run.summary["acc"].count, run.summary["acc"].min_step) == (
            0.49,
            49,
            2,
        )
        best = runs.best("acc", is_max=True)[0]
        assert (before, best.value, best.step, runs.best("acc", is_max=False)[0].value) == (0.5, 0.5, 1, 0.02)
        assert runs.scan().unchanged == 1
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == files
