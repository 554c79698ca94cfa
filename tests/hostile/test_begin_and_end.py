"""Runs that begin or end badly: nothing of an earlier session is moved, and close releases everything."""

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from destinations import RunDirectory, TensorBoard, TextFile
from destinations.run_directory import RunPathError, read_series
from destinations.runs.content.sources import branches_of
from events import Engine, Logger, Run, State


@pytest.fixture(autouse=True)
def _outside_of_any_repository(tmp_path, monkeypatch):
    """Spares each run the three programs that describe its environment."""
    monkeypatch.chdir(tmp_path)


def _train(path, steps, batch=None, **options):
    with Run(RunDirectory(path, **options), run_name="r") as run:
        run.fit_start(batch=batch)
        for step in range(steps):
            run.batch_start()
            run.log_metrics({"loss": float(step)})
            run.batch_end()


def _evaluate(path, **options):
    with Run(RunDirectory(path, **options), run_name="r") as run:
        run.eval_start("test")
        run.eval_batch_start()
        run.eval_batch_end()
        run.log_metrics({"test/accuracy": 0.75})
        run.eval_end()


def test_reopening_a_run_for_evaluation_keeps_training_rows(tmp_path):
    """Rows are moved aside only when training restarts."""
    _train(tmp_path / "run", 10)

    _evaluate(tmp_path / "run", if_exists="resume")
    with Run(RunDirectory(tmp_path / "run", if_exists="resume"), run_name="r") as run:
        run.log_metrics({"note": 1.0})

    assert read_series(tmp_path / "run", "loss") == [(step, float(step)) for step in range(10)]
    assert read_series(tmp_path / "run", "test/accuracy") == [(0, 0.75)]
    assert branches_of(tmp_path / "run") == []


def test_an_evaluation_without_the_completed_run_gets_its_own_folder(tmp_path, caplog):
    """The training keeps its rows; the warning names the evaluation's folder and how to add it to the run."""
    _train(tmp_path / "run", 3)

    _evaluate(tmp_path / "run")

    assert read_series(tmp_path / "run", "loss") == [(step, float(step)) for step in range(3)]
    assert read_series(tmp_path / "run", "test/accuracy") == []
    assert read_series(tmp_path / "run-2", "test/accuracy") == [(0, 0.75)]
    (message,) = caplog.messages
    assert f"a run that was completed: this run is written to {tmp_path / 'run-2'}." in message
    assert 'To continue the earlier run, pass if_exists="resume"' in message


def test_training_again_from_the_start_abandons_the_old_rows(tmp_path):
    """If the loop names its batch, each step appears once."""
    _train(tmp_path / "run", 10)
    _train(tmp_path / "run", 3, batch=0, if_exists="resume")

    assert read_series(tmp_path / "run", "loss") == [(step, float(step)) for step in range(3)]
    assert len(branches_of(tmp_path / "run")) == 1


class InterruptsWait(float):
    """Wait times that raise Ctrl-C at the start of the n-th wait."""

    def __new__(cls, nth):
        one = super().__new__(cls, 60.0)
        one.left = nth
        return one

    def __radd__(self, other):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return other + float(self)


def _join_threads_of(name):
    for thread in threading.enumerate():
        if thread.name.startswith(f"run-directory-{name}"):
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("nth", [1, 2], ids=["while media are written", "while rows are written"])
def test_ctrl_c_during_close_releases_the_folder(nth, tmp_path):
    """In a notebook the process continues: lock and threads are gone, and the folder can be reopened."""
    destination = RunDirectory(tmp_path / "run", flush_seconds=1000, close_seconds=InterruptsWait(nth))

    def interrupted():
        with Run(destination, run_name="r") as run:
            run.batch_start()
            run.log_metrics({"loss": 1.0}, 0)
            run.log_text("a text")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    _join_threads_of("run")

    assert read_series(tmp_path / "run", "loss") == [(0, 1.0)]
    with Run(destination, run_name="r") as run:
        run.eval_start()
        run.log_metrics({"test": 2.0}, 0)
    assert read_series(tmp_path / "run", "loss") == [(0, 1.0)]


def test_a_clock_that_fails_at_close_keeps_no_lock(tmp_path):
    """If `close` raises, `post_close` still releases the folder."""

    class Clock:
        fails = False

        def __call__(self):
            if self.fails:
                raise OSError("no clock")
            return time.time()

    clock = Clock()
    with Run(RunDirectory(tmp_path / "run", clock=clock), run_name="r"):
        clock.fails = True

    _join_threads_of("run")
    with Run(RunDirectory(tmp_path / "run"), run_name="r"):
        pass


def test_a_folder_that_cannot_be_opened_raises_when_the_run_begins(tmp_path):
    """Nothing stays open, so the folder and the destination can be used again."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal").write_text("in the way")
    destination = RunDirectory(tmp_path / "run")

    with (
        pytest.raises(RunPathError, match="must be writable"),
        Run(destination, run_name="r"),
    ):
        pytest.fail("the run has begun")

    assert destination.run_dir is None
    (tmp_path / "run" / "journal").unlink()
    with Run(destination, run_name="r") as run:
        run.log_metrics({"loss": 1.0}, 0)
    assert read_series(tmp_path / "run", "loss") == [(0, 1.0)]


@pytest.mark.parametrize(
    "run_name", ["../elsewhere", "a/../../elsewhere", "/elsewhere", "a\\..\\..\\b", "C:\\b"]
)
@pytest.mark.parametrize("destination_type", [RunDirectory, TextFile, TensorBoard])
def test_a_run_name_cannot_leave_its_folder(destination_type, run_name, tmp_path):
    """`init` refuses it before anything is written."""
    destination = destination_type(f"{tmp_path}/runs/{{run_name}}")

    with pytest.raises(ValueError, match="leads out of the folder"), Run(destination, run_name=run_name):
        pytest.fail("the run has begun")

    assert list(tmp_path.rglob("*")) == []


def test_a_run_without_init_never_raises_and_reports_lost_records(tmp_path, caplog):
    """The first thousand records wait for `init`; later ones are counted."""
    logger = Logger(State("r"), RunDirectory(tmp_path / "run"))
    engine = Engine(logger.state, logger)

    for step in range(1500):
        logger.log_metrics({"loss": 1.0}, step)
    engine.close()

    assert f"run folder {tmp_path / 'run'} is not open: 1000 records are buffered for init" in caplog.text
    assert "lost 1,500 records logged before init." in caplog.text


def test_records_before_init_are_copied(tmp_path):
    """The caller may change an array or a dict as soon as the call returns."""
    destination = RunDirectory(tmp_path / "run")
    values, hyperparameters = np.zeros(3), {"optimizer": {"lr": 0.5}}

    destination.log_histogram(values, "weights", 1)
    destination.log_hyperparameters(hyperparameters)
    values[:] = 9.0
    hyperparameters["optimizer"]["lr"] = 1.0
    with Run(destination, run_name="r"):
        pass

    (line,) = (tmp_path / "run" / "histograms.jsonl").read_text().splitlines()
    assert json.loads(line)["max"] == 0.0
    assert json.loads((tmp_path / "run" / "sidecar.json").read_text())["hparams"]["optimizer.lr"] == 0.5


def test_a_record_that_fails_at_init_affects_only_itself(tmp_path, caplog):
    """The run begins, with the other records that came before it."""
    destination = RunDirectory(tmp_path / "run")
    destination.log_metrics({"before": 1.0}, 0)
    destination.log_text("bad", "../outside")
    destination.log_metrics({"after": 2.0}, 1)

    with Run(destination, run_name="r"):
        pass

    assert read_series(tmp_path / "run", "before") == [(0, 1.0)]
    assert read_series(tmp_path / "run", "after") == [(1, 2.0)]


def test_a_missing_working_directory_is_named(tmp_path, monkeypatch):
    """A relative folder is refused at once; an absolute one works."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    with pytest.raises(RunPathError, match="must be an absolute path where the working directory is gone"):
        RunDirectory("run")
    with Run(RunDirectory(tmp_path / "run"), run_name="r") as run:
        run.log_metrics({"loss": 1.0}, 0)

    assert read_series(tmp_path / "run", "loss") == [(0, 1.0)]


def test_a_destination_without_a_run_is_reported_at_exit(tmp_path):
    """The error says that its records are lost; a destination with a run logs nothing."""
    program = (
        "from destinations import RunDirectory, TensorBoard, TextFile\n"
        "from events import Run\n"
        "alone = [RunDirectory('mine'), TextFile('mine.txt'), TensorBoard('mine')]\n"
        "for destination in alone:\n"
        "    destination.log_metrics({'loss': 1.0}, 0)\n"
    )
    used = program + "with Run(alone, run_name='mine'): pass\n"

    outputs = [
        subprocess.run(
            [sys.executable, "-c", text],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stderr
        for text in (program, used)
    ]

    for what in ("run folder mine", "TextFile", "TensorBoard"):
        assert f"{what} was never opened: what was logged to it is lost." in outputs[0]
    assert "never opened" not in outputs[1]
