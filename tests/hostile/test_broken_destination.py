"""Destinations that raise anything, anywhere: training and the other destinations continue."""

import os
import signal
import subprocess
import sys

import pytest

from destinations import Artifacts, InMemory, LoggerDestination, RunDirectory, TextFile
from events import Engine, Logger, RecordError, Run, State

RECORDS = {
    "log_hyperparameters": ({"lr": 0.1},),
    "log_metrics": ({"loss": 1.0},),
    "log_text": ("a text",),
    "log_table": (["a"], [[1]]),
    "log_images": ([[0.0, 1.0], [1.0, 0.0]],),
    "log_traces": ({"a": 1},),
}


class PanicException(BaseException):
    """What pyo3 raises when Rust panics; it isn't an `Exception` either."""


class Raises(LoggerDestination):
    """Raises at one method."""

    def __init__(self, method, error):
        super().__init__()
        setattr(self, method, self._raise)
        self.error = error
        self.closed = []

    def _raise(self, *_, **__):
        raise self.error

    def close(self, state, logger):
        self.closed.append("close")

    def post_close(self):
        self.closed.append("post_close")


class Records(LoggerDestination):
    """Counts the calls of every method of a destination."""

    def __init__(self):
        super().__init__()
        self.calls = []
        for method in RECORDS:
            setattr(self, method, lambda *_, method=method, **__: self.calls.append(method))


def _log_everything(run):
    import numpy as np

    for method, arguments in RECORDS.items():
        given = (np.array(arguments[0]),) if method == "log_images" else arguments
        getattr(run, method)(*given)


ERRORS = [OSError("disk"), SystemExit(1), PanicException("rust"), GeneratorExit(), MemoryError()]
HOOKS = ["init", "fit_start", "batch_start", "batch_end", "fit_end", "close", "post_close", *RECORDS, "flush"]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", [*HOOKS, "should_write", "can_upload_files", "state_dict"])
def test_exceptions_of_a_destination_affect_no_other(method, error, tmp_path):
    """Training completes, the other destination gets every record, and both are closed."""
    broken, beside = Raises("init", error), Records()
    if method == "can_upload_files":
        broken = Raises("upload_file", error)
    elif method != "init":
        broken = Raises(method, error)
    (tmp_path / "file").write_text("x")

    with Run([broken, beside], run_name="r") as run:
        if method == "can_upload_files":
            broken.can_upload_files = broken._raise
        run.epoch_start()
        for _ in range(2):
            run.batch_start()
            _log_everything(run)
            run.batch_end()
        run.upload_file("name", tmp_path / "file")
        run.flush()

    assert beside.calls == [*RECORDS] * 2
    assert run.engine.is_closed
    if method not in {"close", "post_close"}:
        assert broken.closed == ["close", "post_close"]


@pytest.mark.parametrize("error", [OSError("no server"), SystemExit(2)], ids=["Exception", "BaseException"])
def test_records_missed_by_a_failed_destination_are_counted_and_logged(error, caplog):
    """Only `close` and `post_close` are still called; files and hyperparameters don't arrive either."""
    broken, beside = Raises("init", error), Records()
    broken.log_metrics = broken.log_hyperparameters = lambda *_: pytest.fail("called without init")

    with Run([broken, beside], run_name="r") as run:
        run.log_hyperparameters({"lr": 0.1})
        for step in range(1200):
            run.log_metrics({"loss": 1.0}, step)

    assert len(beside.calls) == 1201
    assert broken.closed == ["close", "post_close"]
    why = f"{type(error).__name__}: {error}"
    assert f"Raises is not open: records for it are lost, and counted ({why})." in caplog.text
    assert caplog.messages[-1] == f"Raises lost 1,201 records: it was not open, {why}"


def test_a_file_that_cannot_be_opened_is_one_log_line_with_lost_records(tmp_path, monkeypatch, caplog):
    """A restarted script finds the text file of an earlier run and writes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_text("of the first run")
    (tmp_path / "folder").mkdir()
    late, early = TextFile("log.txt"), TextFile("folder")

    with Run([late, early], run_name="r") as run:
        run.log_hyperparameters({"lr": 0.1})
        for _ in range(3):
            run.batch_start()
            run.log_metrics({"loss": 1.0})
            run.batch_end()
        run.log_text("done")

    assert "Traceback" not in caplog.text
    taken = [line for line in caplog.messages if "log.txt' already exists" in line]
    assert taken[0].startswith("TextFile is not open: records for it are lost, and counted (FileExistsError")
    assert taken[1].startswith("TextFile lost 5 records: it was not open, FileExistsError")
    assert [line.partition(":")[0] for line in caplog.messages if "IsADirectoryError: " in line] == [
        "TextFile is not open",
        "TextFile lost 5 records",
    ]
    assert (tmp_path / "log.txt").read_text() == "of the first run"


def test_a_full_disk_at_the_end_is_logged_in_one_line(caplog):
    """For a file or a store the message is enough; other errors come with a traceback."""
    full, broken = (
        Raises("close", OSError(28, "about 25 lines are lost")),
        Raises("close", KeyError("handle")),
    )

    with Run([full, broken], run_name="r") as run:
        run.log_metrics({"loss": 1.0})

    first, second = (text for text in caplog.messages if text.startswith("Raises.close failed; training"))
    assert first.splitlines()[1:] == ["OSError: [Errno 28] about 25 lines are lost"]
    assert second.splitlines()[1].startswith("Traceback")


def test_bad_file_names_do_not_park_a_destination(tmp_path, caplog):
    """After twenty taken or refused names the next file is still kept."""
    (tmp_path / "model.pt").write_text("weights")
    places = [
        RunDirectory(tmp_path / "run", keep_files="copy"),
        Artifacts(tmp_path / "store", wait="uploaded"),
    ]

    with Run(places, run_name="r") as run:
        run.upload_file("first.pt", tmp_path / "model.pt")
        for _ in range(20):
            run.upload_file("../x.pt", tmp_path / "model.pt")
        for _ in range(20):
            run.upload_file("first.pt", tmp_path / "model.pt", overwrite=False)
        run.upload_file("last.pt", tmp_path / "model.pt")

    assert "Traceback" not in caplog.text
    assert "a remote name must have no empty part, '.' or '..', got 'r/../x.pt'" in caplog.text
    assert "artifact 'first.pt' exists already. Pass overwrite=True" in caplog.text
    assert (tmp_path / "run/artifacts/last.pt").read_text() == "weights"
    assert (tmp_path / "store/r/last.pt").read_text() == "weights"


def test_a_required_destination_that_fails_init_stops_the_run_before_training():
    """`init` may raise any exception, in a `Run` and a `Trainer`; an attribute or an argument requires it."""
    broken = Raises("init", OSError("no server"))
    broken.require = True

    with pytest.raises(OSError, match="no server"), Run(broken, run_name="r"):
        pytest.fail("the run began")

    assert broken.closed == ["close", "post_close"]
    assert LoggerDestination(require=True).require
    assert not LoggerDestination().require


def test_a_destination_that_failed_to_open_is_reported_last(caplog):
    """The last lines of the output report it, even if there were no records."""
    with Run(Raises("init", OSError("no server")), run_name="r"):
        pass

    assert caplog.messages[-1] == "Raises lost 0 records: it was not open, OSError: no server"


def test_a_misconfigured_destination_raises_when_the_run_begins():
    """The caller gets `RecordError` before training begins, and everything is closed."""
    broken, beside = Raises("init", RecordError("folder must be new.")), Raises("flush", OSError())

    with pytest.raises(RecordError, match="folder must be new"), Run([broken, beside], run_name="r"):
        pytest.fail("the run has begun")

    assert broken.closed == beside.closed == ["close", "post_close"]


def test_an_exit_from_a_signal_handler_leaves_the_destination():
    """SIGTERM from a scheduler ends training even if it arrives inside a destination."""
    before = signal.getsignal(signal.SIGTERM)

    def end(number, frame):
        sys.exit(128 + number)

    class IsTerminated(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            os.kill(os.getpid(), signal.SIGTERM)

        def batch_end(self, state, logger):
            os.kill(os.getpid(), signal.SIGTERM)

    state = State("r")
    logger = Logger(state, IsTerminated())
    engine = Engine(state, logger)
    signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit) as logged:
            logger.log_metrics({"loss": 1.0})
        with pytest.raises(SystemExit):
            engine.run_event("batch_end")
    finally:
        signal.signal(signal.SIGTERM, before)
        engine.close(logged.value)

    assert logged.value.code == 143
    assert state.status == "preempted"
    assert logger.faults.counts == {}


def test_a_destination_that_logs_from_its_own_methods_does_not_stop_training():
    """The recursion loses only the destination's own record."""

    class Recursive(LoggerDestination):
        def init(self, state, logger):
            self.logger = logger

        def log_metrics(self, metrics, step=None):
            self.logger.log_metrics({"again": 1.0}, step)

    beside = InMemory()

    with Run([beside, Recursive()], run_name="r") as run:
        run.log_metrics({"loss": 1.0}, 0)
        run.log_metrics({"loss": 2.0}, 1)

    assert list(beside.get_timeseries("loss")["loss"]) == [1.0, 2.0]


def test_a_destination_that_closes_the_logger_does_not_stop_training():
    """Later records are reported as logged after close, and a second close does nothing."""

    class Closes(LoggerDestination):
        def batch_end(self, state, logger):
            self.engine.close()

    closes, beside = Closes(), Raises("flush", OSError())
    run = Run([closes, beside], run_name="r")
    closes.engine = run.engine

    with run:
        run.epoch_start()
        run.batch_start()
        with pytest.raises(RuntimeError, match="must be run before close"):
            run.batch_end()

    assert beside.closed == ["close", "post_close"]


def test_one_destination_in_two_loggers_serves_the_first():
    """The second engine raises when it's made, and the first one loses nothing."""
    shared = InMemory()

    with Run([shared], run_name="first") as first:
        with pytest.raises(RuntimeError, match="must be closed before another engine takes it"):
            Run([shared], run_name="second")
        first.log_metrics({"loss": 1.0}, 0)

    assert list(shared.get_timeseries("loss")["loss"]) == [1.0]


def test_sys_exit_in_a_destination_of_a_child_process_is_reported(tmp_path):
    """The program ends as it would have without the destination."""
    script = """
import sys
from destinations import LoggerDestination
from events import Run

class Exits(LoggerDestination):
    def batch_end(self, state, logger):
        sys.exit(3)

with Run([Exits()], run_name="r") as run:
    run.batch_start()
    run.batch_end()
print("trained", run.state.status.value)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )

    assert (result.returncode, result.stdout) == (0, "trained completed\n")
    assert "Exits.batch_end raised SystemExit 1 time." in result.stderr
