"""Tests `FlightRecorder`: the content of a rank's file, and when it is written."""

import json
import logging
import os
import pickle
import resource
import signal
import threading
from pathlib import Path, PurePath

import pytest
import torch

from destinations import Artifacts, InMemory, RunDirectory
from destinations.runs.content.flight import read_flights
from events import Callback, Run
from events.callbacks import FlightRecorder
from events.callbacks.collectives import read_dump
from events.callbacks.flight_recorder import StallClock
from tests.waiting import until


def read(path):
    """Returns a file of strict JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_bytes(), parse_constant=refuse)


class Heard(logging.Handler):
    """Lets a thread wait for a message."""

    def __init__(self, part):
        super().__init__()
        self.part, self.came = part, threading.Event()

    def emit(self, record):
        if self.part in record.getMessage():
            self.came.set()


@pytest.fixture
def hang_heard():
    """Is set when a hang is reported."""
    heard = Heard("no step ended")
    logging.getLogger("events").addHandler(heard)
    yield heard.came
    logging.getLogger("events").removeHandler(heard)


@pytest.fixture
def many_descriptors():
    """Opens so many that the next one is above what `select` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4096 else max(soft, 4096), hard))
    with Path(os.devnull).open() as file:
        opened = [os.dup(file.fileno()) for _ in range(1100)]
    yield opened
    for one in opened:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_job_with_many_open_files_is_recorded_too(tmp_path, many_descriptors):
    """A large job has descriptors above 1,023."""
    assert max(many_descriptors) > 1023
    with Run([RunDirectory(tmp_path / "run")], FlightRecorder(), run_name="mine") as run:
        run.batch_start()
        run.log_metrics({"loss": float("nan")})
        run.batch_end()

    assert read(tmp_path / "run/flight/rank-0.json")["reason"] == "nan"


def test_a_nan_loss_writes_the_last_steps_into_the_folder_of_the_run(tmp_path):
    """It does so once; every metric of the last steps is there, and the file is strict JSON."""
    recorder = FlightRecorder(steps=3)
    with Run([RunDirectory(tmp_path / "run"), InMemory()], recorder, run_name="mine") as run:
        for step in range(6):
            run.batch_start()
            run.log_metrics({"train/loss": float("nan") if step > 4 else 1.0 / (step + 1), "lr": 0.1})
            run.log_metrics({"accuracy": step / 10})
            run.batch_end()

    found = read(tmp_path / "run/flight/rank-0.json")
    assert (found["reason"], found["detail"]) == ("nan", "train/loss is NaN at step 5")
    assert len(found["reasons"]) == 1
    assert [one["step"] for one in found["steps"]][:3] == [3, 4, 5]
    assert found["steps"][1]["metrics"] == {"train/loss": 0.2, "lr": 0.1, "accuracy": 0.4}
    assert found["steps"][2]["metrics"]["train/loss"] == "NaN"
    assert (found["rank"], found["world_size"], found["run_name"]) == (0, 1, "mine")


def test_a_nan_of_another_metric_is_no_reason(tmp_path):
    """Nor is an infinite loss: the pattern decides about names, NaN about values."""
    with Run(callbacks=FlightRecorder(folder=tmp_path), run_name="mine") as run:
        run.log_metrics({"accuracy": float("nan"), "loss": float("inf")})
        run.log_metrics({"loss": -(10**400), "nan": float("nan")})

    assert list(tmp_path.iterdir()) == []


def test_an_exception_is_kept_with_its_frames_and_causes(tmp_path, make_trainer):
    """The frames say which line of the user raised; secrets in the message are redacted."""

    class Fails(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 4:
                raise RuntimeError("no access with password=hunter2")

    with (
        pytest.raises(RuntimeError),
        make_trainer(callbacks=[FlightRecorder(folder=tmp_path), Fails()]) as one,
    ):
        one.fit()

    found = read(tmp_path / "rank-0.json")
    assert found["reason"] == "exception"
    assert found["exception"]["type"] == "RuntimeError"
    assert "hunter2" not in (tmp_path / "rank-0.json").read_text()
    last = found["exception"]["frames"][-1]
    assert (last["file"], last["function"].split(".")[-1]) == (__file__, "batch_end")
    assert last["code"].startswith("raise RuntimeError")
    assert (last["is_library"], found["position"]["batch"]) == (False, 4)
    assert "loss/train/total" in found["steps"][-1]["metrics"]


def test_a_hang_says_where_each_thread_waits_and_is_reported_again_after_progress(tmp_path, hang_heard):
    """The main thread is first; its innermost line is the call that waits."""
    with Run(callbacks=FlightRecorder(hang_seconds=0.1, folder=tmp_path), run_name="mine") as run:
        run.log_metrics({"loss": 1.0})
        run.batch_end()
        assert hang_heard.wait(60)
        first = read(tmp_path / "rank-0.json")
        hang_heard.clear()
        run.batch_end()
        assert hang_heard.wait(60)
        second = read(tmp_path / "rank-0.json")

    assert first["reason"] == "hang"
    main = first["threads"][0]
    assert (main["is_main"], main["name"]) == (True, "MainThread")
    own = [frame for frame in main["frames"] if frame["file"] == __file__]
    assert own[-1]["code"] == "assert hang_heard.wait(60)"
    assert not own[-1]["is_library"]
    assert main["frames"][-1]["function"].endswith("wait")
    assert main["frames"][-1]["is_library"]
    assert "events-flight-recorder" not in [one["name"] for one in first["threads"]]
    assert [one["reason"] for one in second["reasons"]] == ["hang", "hang"]
    assert second["position"]["batch"] == 2


def test_a_run_without_steps_does_not_hang_before_fit_and_after_it(tmp_path):
    """A long set-up and a long close are no hangs: nothing is expected there."""
    looks = []

    class Clock:
        now = 0.0

        def __call__(self):
            # An hour passes between any two looks.
            self.now += 3600
            looks.append(self.now)
            if len(looks) == 50:
                looked.set()
            return self.now

    looked = threading.Event()
    recorder = FlightRecorder(hang_seconds=0.01, folder=tmp_path, clock=Clock())
    with Run(callbacks=recorder, run_name="mine"):
        assert looked.wait(60)

    assert list(tmp_path.iterdir()) == []


def test_time_in_which_the_process_was_stopped_is_no_hang():
    """Of a long gap between two looks, two ticks count; being awake without a step is a hang, once."""
    now = [0.0]
    stall = StallClock(10.0, 1.0, lambda: now[0])

    def after(seconds, progress=1):
        now[0] += seconds
        return stall.look(progress)

    assert not after(1)
    assert not after(100_000)
    assert stall.waited_seconds == 2
    assert [after(1) for _ in range(9)] == [False] * 7 + [True, False]
    assert not after(1, progress=2)
    assert not after(100, progress=None)
    assert stall.waited_seconds == 0


def test_identifiers_of_batches_are_kept_on_request(tmp_path, make_trainer):
    """They are read by a key or a function."""

    class Fails(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 2:
                raise RuntimeError

    recorder = FlightRecorder(folder=tmp_path, batch_ids=lambda batch: batch[1])
    with pytest.raises(RuntimeError), make_trainer(callbacks=[recorder, Fails()]) as trainer:
        trainer.fit()

    step = read(tmp_path / "rank-0.json")["steps"][1]
    assert step["step"] == 1
    assert len(step["batch_ids"]) > 0
    assert set(step["batch_ids"]) <= {0, 1}


@pytest.mark.parametrize(
    ("batch", "kept"),
    [
        ({"id": ["a", "b"]}, ["a", "b"]),
        ({"id": torch.arange(100)}, list(range(64))),
        ({"id": torch.zeros(3, device="meta")}, "on meta: not read"),
        (
            {"id": [PurePath("a"), PurePath("b?token=ghp_0123456789abcdefghijklmnopqrstuvwxyz")]},
            ["a", "b?token=[redacted]"],
        ),
        ({"other": 1}, "unreadable: KeyError: \"batch (dict) has no part 'id'.\""),
    ],
)
def test_identifiers_are_bounded_and_never_waited_for(tmp_path, batch, kept):
    """A batch without them does not stop training."""
    run = Run(callbacks=FlightRecorder(folder=tmp_path, batch_ids="id"), run_name="mine")
    run.batch_start(batch)
    run.close(ZeroDivisionError())

    assert read(tmp_path / "rank-0.json")["steps"][0]["batch_ids"] == kept


def test_the_file_is_bounded_by_leaving_out_the_oldest_steps(tmp_path):
    """The number is reported."""
    recorder = FlightRecorder(steps=500, folder=tmp_path, max_bytes=64 << 10)
    run = Run(callbacks=recorder, run_name="mine")
    for step in range(500):
        run.log_metrics({f"metric/{index}": index / 3 for index in range(50)}, step)
    run.close(ZeroDivisionError())

    path = tmp_path / "rank-0.json"
    found = read(path)
    assert path.stat().st_size <= 64 << 10
    assert found["dropped_steps"] + len(found["steps"]) == 500
    assert found["steps"][-1]["step"] == 499
    assert 5 < len(found["steps"]) < 100


def test_a_run_that_goes_well_leaves_no_file_thread_handler_or_fork_hook(tmp_path):
    """Everything is as before."""

    def handler(number, frame):
        pass

    earlier = signal.signal(signal.SIGTERM, handler)
    try:
        threads = set(threading.enumerate())
        with Run(
            [RunDirectory(tmp_path / "run")], FlightRecorder(), run_name="mine", raise_errors=True
        ) as run:
            inside = signal.getsignal(signal.SIGTERM)
            run.log_metrics({"loss": 1.0})
            run.batch_end()
            run.upload_file("note.txt", __file__)
            run.log_text("words")
            run.flush()

        assert inside is not handler
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.set_wakeup_fd(-1) == -1
        # What is known of the machine may be written later than close returns, on a busy one.
        until(lambda: set(threading.enumerate()) <= threads)
        assert not (tmp_path / "run/flight").exists()
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_an_earlier_handler_of_sigterm_still_runs_after_the_file_is_written(tmp_path):
    """The file is there when it is called; training continues if it returns."""
    seen = []

    def handler(number, frame):
        seen.append((tmp_path / "rank-0.json").exists())

    earlier = signal.signal(signal.SIGTERM, handler)
    try:
        with Run(callbacks=FlightRecorder(folder=tmp_path), run_name="mine") as run:
            run.log_metrics({"loss": 1.0})
            os.kill(os.getpid(), signal.SIGTERM)
            run.log_metrics({"loss": 2.0})
    finally:
        signal.signal(signal.SIGTERM, earlier)

    assert seen == [True]
    found = read(tmp_path / "rank-0.json")
    assert (found["reason"], found["threads"][0]["is_main"]) == ("sigterm", True)


def test_a_folder_that_cannot_be_written_does_not_stop_training(tmp_path, caplog):
    """One warning is logged."""
    (tmp_path / "file").write_text("")
    memory = InMemory()
    with Run(memory, FlightRecorder(folder=tmp_path / "file"), run_name="mine") as run:
        run.log_metrics({"loss": float("nan")})
        run.log_metrics({"loss": 1.0})

    assert len(memory.records) == 2
    assert [record.getMessage() for record in caplog.records if "flight recorder" in record.getMessage()]


def test_a_recorder_without_a_folder_is_refused_before_training(tmp_path):
    """So are numbers that make no sense, and a recorder among the destinations."""
    with pytest.raises(ValueError, match="FlightRecorder needs a folder"), Run(callbacks=FlightRecorder()):
        pass
    with pytest.raises(ValueError, match="steps must be at least 1"):
        FlightRecorder(0)
    with pytest.raises(ValueError, match="hang_seconds must be positive"):
        FlightRecorder(hang_seconds=0)
    with pytest.raises(ValueError, match="max_bytes must be at least"):
        FlightRecorder(max_bytes=1)
    with pytest.raises(TypeError, match="must be a LoggerDestination"):
        Run(FlightRecorder(folder=tmp_path), run_name="mine")


def test_another_rank_writes_into_the_folder_of_the_run_of_rank_0(tmp_path, monkeypatch):
    """It does so though its own `RunDirectory` writes nothing."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with (
        pytest.raises(ZeroDivisionError),
        Run(RunDirectory(tmp_path / "{run_name}"), FlightRecorder(), run_name="mine"),
    ):
        raise ZeroDivisionError

    assert [path.name for path in (tmp_path / "mine/flight").iterdir()] == ["rank-2.json"]


def test_a_file_is_uploaded_with_the_run(tmp_path):
    """Destinations that send files away take it: the machine may go before anybody looks."""
    store = tmp_path / "store"
    with (
        pytest.raises(ValueError, match="no"),
        Run(
            [RunDirectory(tmp_path / "run"), Artifacts(store, spool=tmp_path / "spool")],
            FlightRecorder(),
            "mine",
        ),
    ):
        raise ValueError("no")

    uploaded = json.loads((store / "mine/flight/rank-0.json").read_bytes())
    assert uploaded["reason"] == "exception"


@pytest.fixture
def dumps(tmp_path, monkeypatch):
    """Has NCCL's watchdog write into a folder of the test; returns the file of rank 0."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    return tmp_path / "trace_0"


COLLECTIVE = {
    "profiling_name": "nccl:all_reduce",
    "collective_seq_id": 41,
    "process_group": ("0", "default_pg"),
    "frames": [{"name": "all_reduce", "filename": "train.py", "line": 3}],
    "input_sizes": [[3]],
    "state": "started",
    "retired": False,
    "time_created_ns": 1795641095930502135,
}


def test_the_dump_of_nccls_watchdog_is_joined_and_uploaded(tmp_path, dumps):
    """The recorder includes its last collectives and uploads the dump with the files of the run."""
    recorder = FlightRecorder(folder=tmp_path / "flight", hang_seconds=None)
    with Run(Artifacts(tmp_path / "store", spool=tmp_path / "spool"), recorder, "mine") as run:
        run.batch_start()
        dumps.write_bytes(pickle.dumps({"version": "2.10", "entries": [COLLECTIVE]}, protocol=2))
        run.batch_end()

    (flight,) = read_flights(tmp_path / "flight")
    assert (flight.reason, flight.detail) == ("nccl", f"NCCL's watchdog wrote {dumps}")
    assert flight.last_collectives == {"['0', 'default_pg']": (41, "nccl:all_reduce")}
    assert (tmp_path / "store/mine/flight/trace_0").read_bytes() == dumps.read_bytes()


class Harmful:
    """Runs a program where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "content",
    [
        b"no pickle",
        b"\x80\x04\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
        pickle.dumps([1, 2]),
        pickle.dumps({"entries": [3]}),
        pickle.dumps({"entries": range(3)}),
    ],
)
def test_an_invalid_dump_is_ignored(tmp_path, dumps, content):
    """It neither harms nor is it reported."""
    recorder = FlightRecorder(folder=tmp_path / "flight", hang_seconds=None)
    with Run(None, recorder, "mine") as run:
        dumps.write_bytes(content)
        run.batch_end()

    assert not (tmp_path / "flight").exists()


def test_a_dump_runs_no_code(tmp_path, dumps):
    """A pickle may name any function, and another user's program may have written it."""
    path = tmp_path / "harm"
    dumps.write_bytes(pickle.dumps({"entries": [{"profiling_name": Harmful(path)}]}))

    assert read_dump(dumps, 3) == []
    assert not path.exists()


def test_an_old_dump_is_of_another_job(tmp_path, dumps):
    """A dump from before the run is ignored, except in torchrun's next attempt."""
    dumps.write_bytes(pickle.dumps({"entries": [COLLECTIVE]}))
    os.utime(dumps, (1.0, 1.0))
    with Run(None, FlightRecorder(folder=tmp_path / "flight", hang_seconds=None), "mine") as run:
        run.batch_end()

    assert not (tmp_path / "flight").exists()
