"""What a process may do while it logs: threads, signals, stops, clock jumps, several runs in a row."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from destinations import Artifacts, Console, InMemory, ProgressBar, RunDirectory, TensorBoard, TextFile
from destinations.run_directory import read_rows
from destinations.runs import Run as FinishedRun
from events import EngineClosedError, Run, Timestamp, Trainer
from tests.waiting import until

PROGRAM = Path(__file__).with_name("one_process_child.py")
LIMIT_SECONDS = 120


@pytest.fixture
def child(tmp_path):
    """Starts a mode of the program in its own process, which is killed after the test."""
    started = []

    def start(*arguments):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(PROGRAM), str(tmp_path), *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answer(process):
    """Returns the JSON that a process prints at its end."""
    said, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, errors
    return json.loads(said.splitlines()[-1])


def logged(folder, name):
    """Returns the steps at which a run folder has a metric."""
    return [row.step for row in read_rows(folder) if name in row.metrics]


@pytest.mark.parametrize("isolation", ["threads", "process"])
def test_a_signal_handler_may_log_and_upload(child, tmp_path, isolation):
    """A handler that saves a checkpoint before preemption may interrupt any call."""
    counts = answer(child("signals", isolation))

    assert counts["handler"] >= 200
    for name in ("handler", "loop"):
        assert logged(tmp_path / "run", name) == list(range(counts[name]))
        stored = {path.name for path in (tmp_path / "store/signals").glob(f"{name}-*")}
        assert stored == {f"{name}-{step}" for step in range(counts[name])}
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum(f"text of {name} " in line for line in lines for name in ("handler", "loop")) == (
        counts["handler"] + counts["loop"]
    )


def test_logging_to_an_open_run_imports_nothing(child):
    """A handler that interrupts an import would find a half-loaded module."""
    assert answer(child("imported by calls")) == []


def test_rows_of_several_threads_are_written_once_each(tmp_path):
    """Four threads log with their own steps, beside the training thread."""
    memory = InMemory()
    begin = threading.Barrier(4)
    destinations = [
        RunDirectory(tmp_path / "run", flush_seconds=0.01),
        TextFile(str(tmp_path / "log.jsonl"), format="jsonl"),
        memory,
    ]

    def log(thread):
        begin.wait(60)
        for step in range(250):
            run.log_metrics({f"of/{thread}": float(step), "shared": float(thread)}, 4 * step + thread)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with Run(destinations, run_name="mine", raise_errors=True) as run:
            run.batch_start()
            threads = [threading.Thread(target=log, args=(thread,)) for thread in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    finally:
        sys.setswitchinterval(interval)

    rows = {row.step: dict(row.metrics) for row in read_rows(tmp_path / "run")}
    assert rows == {
        4 * step + thread: {f"of/{thread}": float(step), "shared": float(thread)}
        for step in range(250)
        for thread in range(4)
    }
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum('"shared"' in line for line in lines) == 1000
    assert len(memory.get_timeseries("shared")["shared"]) == 1000


def test_a_stopped_and_continued_process_loses_no_row(child, tmp_path):
    """After SIGSTOP, sent by a scheduler or when a laptop's lid closes, logged rows stay readable."""
    process = child("until told")
    acknowledged = [int(process.stdout.readline()) for _ in range(100)]
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    assert set(acknowledged) <= set(logged(tmp_path / "run", "loss"))

    os.kill(process.pid, signal.SIGCONT)
    process.stdin.close()
    process.stdin = None
    last = answer(process)
    assert logged(tmp_path / "run", "loss") == list(range(last + 1))
    assert FinishedRun.open(tmp_path / "run").status == "completed"


def test_a_jumping_wall_clock_loses_and_delays_nothing(tmp_path):
    """After a suspend, or when the clock is set back, rows keep their order and a resume keeps its steps."""
    now = [1.7e9]
    memory = InMemory()

    def train(first, jumps):
        directory = RunDirectory(
            tmp_path / "run", if_exists="resume", flush_seconds=0.01, clock=lambda: now[0]
        )
        run = Run([directory, memory], run_name="mine", raise_errors=True)
        run.state.timestamp = Timestamp(batch=first)
        with run:
            for step, jump in enumerate(jumps, first):
                now[0] += jump
                run.batch_start()
                run.log_metrics({"loss": float(step)}, step)
                run.batch_end()
                run.flush()

    train(0, [1.0, 86400.0, -2 * 86400.0, 1.0, -1.0])
    train(5, [-365 * 86400.0, 1.0, 1.0])

    assert [(row.step, dict(row.metrics)) for row in read_rows(tmp_path / "run")] == [
        (step, {"loss": float(step)}) for step in range(8)
    ]
    assert FinishedRun.open(tmp_path / "run").status == "completed"


def test_an_interrupted_notebook_cell_leaves_the_run_open(child, tmp_path):
    """The stop button sends SIGINT: that cell's rows are kept, and the next cell continues to log."""
    counts = answer(child("notebook"))

    assert counts["interrupted"] == "KeyboardInterrupt"
    assert logged(tmp_path / "run", "loss") == list(range(counts["rows"]))
    assert logged(tmp_path / "run", "after") == [counts["rows"]]
    assert FinishedRun.open(tmp_path / "run").status == "completed"
    assert FinishedRun.open(tmp_path / "block").status == "interrupted"
    assert logged(tmp_path / "block", "loss") == [0]


def test_two_trainers_in_a_row_leave_nothing_behind(tmp_path):
    """Each trainer has its own destinations, then reuses the first one's; both runs are complete."""
    data = [(torch.randn(3), torch.tensor(0)) for _ in range(4)]

    def destinations():
        return [
            RunDirectory(tmp_path / "{run_name}"),
            Artifacts(tmp_path / "store" / "{run_name}", spool=tmp_path / "spool", free_bytes=0),
            TextFile(str(tmp_path / "{run_name}.jsonl"), format="jsonl"),
            TensorBoard(tmp_path / "{run_name}" / "tensorboard"),
            Console(stream=io.StringIO()),
            ProgressBar(stream=io.StringIO()),
        ]

    def fit(name, loggers):
        model = torch.nn.Linear(3, 2)
        trainer = Trainer(
            model,
            torch.utils.data.DataLoader(data, batch_size=2),
            max_duration="1ep",
            loss_fn=torch.nn.functional.cross_entropy,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            loggers=loggers,
            run_name=name,
            device="cpu",
            raise_errors=True,
        )
        trainer.fit()
        (tmp_path / "note.txt").write_text(name)
        trainer.logger.upload_file("note.txt", tmp_path / "note.txt")
        trainer.close()
        with pytest.raises(EngineClosedError):
            trainer.logger.log_metrics({"late": 1.0})

    first = destinations()
    fit("one", first)
    threads = {thread.name for thread in threading.enumerate()}
    fit("two", destinations())
    fit("three", first)

    # On a busy machine the environment may be written after close returns.
    until(lambda: {thread.name for thread in threading.enumerate()} <= threads)
    for name in ("one", "two", "three"):
        assert FinishedRun.open(tmp_path / name).status == "completed"
        assert len(logged(tmp_path / name, "loss/train/total")) == 2
        assert (tmp_path / "store" / name / "note.txt").read_text() == name


def test_logging_after_close_is_reported_by_name(tmp_path):
    """The run refuses it with any destination; nothing is written, and nothing stays open."""
    run = Run([RunDirectory(tmp_path / "run"), InMemory()], run_name="mine")
    run.log_metrics({"loss": 1.0})
    run.close()

    for call in (
        lambda: run.log_metrics({"late": 1.0}),
        lambda: run.log_text("late"),
        lambda: run.log_images(np.zeros((2, 2, 3), np.uint8), "late", channels_last=True),
        lambda: run.upload_file("late", tmp_path / "run" / "metrics.csv"),
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            call()

    assert logged(tmp_path / "run", "late") == []
    run.close()
