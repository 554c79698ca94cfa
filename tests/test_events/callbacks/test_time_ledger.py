"""Tests that each moment of a session is charged to one bucket, and the files, by a clock that is set."""

import contextlib
import csv
import gc
import itertools
import logging
import os
import sys
import threading

import pytest
import torch

from destinations import Artifacts, InMemory, RunDirectory, runs
from destinations.cli import main
from events import Callback, CheckpointSaver, Event, Run, TimeLedger
from events.callbacks import time_ledger
from events.callbacks.time_files import GrowingCsv, TimeFiles
from tests.trace_format import checked_trace


class Clock:
    """A clock of nanoseconds that is set, and counts how often it is read."""

    def __init__(self):
        self.seconds = 5.0
        self.reads = 0

    def __call__(self):
        self.reads += 1
        return round(self.seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    """Gives a clock; the beginning of this process does not count."""
    monkeypatch.setattr(time_ledger, "_counted_process", os.getpid())
    return Clock()


class Takes(Callback):
    """Takes some seconds at one event."""

    def __init__(self, clock, **seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def run_event(self, event, state, logger):
        self.clock.seconds += self.seconds.get(event.value, 0.0)


class SlowDestination(InMemory):
    """A destination that takes a second for each call, and two at the end of each batch."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def log_metrics(self, metrics, step=None):
        self.clock.seconds += 1

    def batch_end(self, state, logger):
        self.clock.seconds += 2


def charged(ledger):
    """Returns the seconds of the buckets that have any."""
    _, totals = ledger.snapshot()
    grown = ledger.divided(totals, [0] * len(totals))
    return {name: one / 1e9 for name, one in zip(time_ledger.BUCKETS, grown, strict=True) if one}


def rows(path):
    """Returns the rows of a file of a ledger, without spaces."""
    with path.open(newline="") as file:
        return [{name: text.strip() for name, text in row.items()} for row in csv.DictReader(file)]


def test_moments_of_a_loop_are_charged(clock):
    """Reading, a batch, its passes, an evaluation, and what follows: each second is in one bucket."""
    ledger = TimeLedger(clock=clock)
    with Run(None, ledger, "mine") as run:
        clock.seconds += 1
        run.epoch_start()
        for _ in range(2):
            clock.seconds += 2
            run.batch_start()
            clock.seconds += 3
            run.run_event(Event.BEFORE_FORWARD)
            clock.seconds += 4
            run.run_event(Event.AFTER_FORWARD)
            run.run_event(Event.AFTER_LOSS)
            run.run_event(Event.BEFORE_BACKWARD)
            clock.seconds += 5
            run.run_event(Event.AFTER_BACKWARD)
            run.run_event(Event.AFTER_TRAIN_BATCH)
            clock.seconds += 6
            run.batch_end()
        run.eval_start()
        clock.seconds += 7
        run.eval_end()
        clock.seconds += 8
        # The first reading comes before this loop is known to tell where its batches begin.
        assert charged(ledger) == {
            "start": 1,
            "data": 2 + 8,
            "batch": 2 + 2 * 3,
            "forward": 2 * 4,
            "backward": 2 * 5,
            "optimizer": 2 * 6,
            "evaluation": 7,
        }


def test_a_loop_that_tells_of_ends_alone(clock):
    """If a loop doesn't report the beginnings of batches, all their time is charged to the batches."""
    ledger = TimeLedger(clock=clock)
    with Run(None, ledger, "mine") as run:
        run.fit_start()
        for _ in range(3):
            clock.seconds += 2
            run.batch_end()

        assert charged(ledger) == {"start": 2, "batch": 4}


def test_hooks_are_charged_to_their_callbacks(clock):
    """A destination, another callback and a saver have buckets of their own, wherever they are called."""

    class Saves(Takes):
        time_bucket = CheckpointSaver.time_bucket

    ledger = TimeLedger(clock=clock)
    slow = Takes(clock, batch_end=3, eval_batch_end=4)
    with Run(SlowDestination(clock), [slow, Saves(clock, batch_checkpoint=5), ledger], "mine") as run:
        run.batch_start()
        run.log_metrics({"loss": 1.0})
        clock.seconds += 10
        run.batch_end()
        run.eval_start()
        run.eval_batch_end()
        clock.seconds += 20
        run.eval_end()

        assert charged(ledger) == {
            "batch": 10,
            "logging": 1 + 2,
            "callbacks": 3 + 4,
            "checkpoint": 5,
            "evaluation": 20,
        }


def test_an_exception_of_a_hook_ends_its_bucket(clock):
    """The callback that raised isn't charged for later time."""

    class Raises(Callback):
        def batch_start(self, state, logger):
            clock.seconds += 1
            raise ZeroDivisionError

    ledger = TimeLedger(clock=clock)
    with Run(None, [Raises(), ledger], "mine") as run:
        with contextlib.suppress(ZeroDivisionError):
            run.batch_start()
        clock.seconds += 2

        assert charged(ledger) == {"callbacks": 1, "batch": 2}


def test_collections_of_garbage_are_charged(clock):
    """Collections of older generations in the training thread are charged."""
    ledger = TimeLedger(clock=clock)

    def collecting(phase, info):
        clock.seconds += 3 if phase == "stop" and info["generation"] == 2 else 0

    gc.callbacks.insert(0, collecting)
    try:
        with Run(None, ledger, "mine") as run:
            run.fit_start()
            before = charged(ledger).get("garbage", 0)
            gc.collect()
            assert charged(ledger)["garbage"] - before == 3
    finally:
        gc.callbacks.remove(collecting)
    assert not any(getattr(one, "__self__", None) is ledger for one in gc.callbacks)


def test_a_device_divides_the_time_of_batches(clock, monkeypatch):
    """The device may spend time elsewhere than the host waits; unfinished batches wait for the device."""
    now = [0.0]
    is_done = [False]

    class DeviceEvent:
        """An event of a device with a clock of its own, in milliseconds."""

        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def query(self):
            return is_done[0]

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    ledger = TimeLedger(clock=clock)
    with Run(None, ledger, "mine") as run:
        ledger._device = time_ledger.DeviceClock(time_ledger._PARTS)
        for _ in range(2):
            run.batch_start()
            run.run_event(Event.BEFORE_FORWARD)
            now[0] += 1
            run.run_event(Event.BEFORE_BACKWARD)
            now[0] += 3
            run.run_event(Event.AFTER_TRAIN_BATCH)
            clock.seconds += 4
            run.batch_end()
            is_done[0] = True
        assert charged(ledger) == {"forward": 2, "backward": 6}
        is_done[0] = False
        run.batch_start()
        now[0] += 8
        run.batch_end()
        is_done[0] = True
        ledger.close(run.state, run.logger)

        # The device spent the last batch neither in the forward nor in the backward pass.
        assert charged(ledger) == {"batch": 4, "forward": 1, "backward": 3}


def test_few_of_short_batches_are_divided(clock):
    """Batches in between read the clock at their beginning and end only, and get the same shares."""
    ledger = TimeLedger(clock=clock)
    reads = []
    with Run(None, ledger, "mine") as run:
        run.epoch_start()
        for _ in range(40):
            before = clock.reads
            run.batch_start()
            clock.seconds += 0.0002
            run.run_event(Event.BEFORE_FORWARD)
            clock.seconds += 0.0003
            run.run_event(Event.AFTER_TRAIN_BATCH)
            clock.seconds += 0.0005
            run.batch_end()
            reads.append(clock.reads - before)

        assert reads == [4] + 25 * [2] + [4] + 13 * [2]
        assert charged(ledger) == {
            "batch": pytest.approx(40 * 0.0002),
            "forward": pytest.approx(40 * 0.0003),
            "optimizer": pytest.approx(40 * 0.0005),
        }


def test_shares_are_metrics(clock):
    """They are logged at a rate and at the end, for the time since the last ones."""
    kept = InMemory()
    with Run(kept, TimeLedger(metrics_seconds=10, clock=clock), "mine") as run:
        run.fit_start()
        for _ in range(2):
            run.batch_start()
            clock.seconds += 6
            run.batch_end()
            clock.seconds += 2
        run.batch_start()
        run.batch_end()

        clock.seconds += 1

    assert [value for _, value in kept.data["time/batch"]] == [12 / 14, 0]
    assert [value for _, value in kept.data["time/data"]] == [2 / 14, (2 + 1) / (2 + 1)]


def test_files_contain_the_charged_time(clock, tmp_path):
    """It has rows for each session, and spans for batches and for the user's own."""
    for _ in range(2):
        with Run(RunDirectory(tmp_path / "run", if_exists="resume"), TimeLedger(clock=clock), "mine") as run:
            run.batch_start()
            clock.seconds += 1
            with run.span('tokenize, "fast"'):
                clock.seconds += 2
            run.batch_end()
    found = rows(tmp_path / "run/time/rank-0.csv")
    spans = rows(tmp_path / "run/time/spans-0.csv")

    assert len({row["session"] for row in found}) == 2
    assert sum(float(row["batch"] or 0) for row in found) == 6
    assert found[-1]["step"] == "1"
    own = [span for span in spans if span["track"] == "spans"]
    assert [(span["name"], span["microseconds"]) for span in own] == [('tokenize, "fast"', "2000000")] * 2
    assert ("batch", "3000000") in [(span["name"], span["microseconds"]) for span in spans]


def test_the_last_part_of_a_minute_has_shares_too(clock):
    """They are logged where a run ends that had some; a run of seconds has no row that its program did not log."""
    for seconds, expected in ((3, None), (63, [63 / 63, 3 / 4])):
        kept = InMemory()
        with Run(kept, TimeLedger(clock=clock), "mine") as run:
            run.batch_start()
            clock.seconds += seconds
            run.batch_end()
            run.batch_start()
            clock.seconds += 3
            run.batch_end()
            clock.seconds += 1

        found = kept.data.get("time/batch")
        assert (found and [value for _, value in found]) == expected


def test_a_ledger_that_is_used_again_begins_anew(clock):
    """The pause between two runs counts for neither."""
    ledger = TimeLedger(clock=clock)
    for _ in range(2):
        with Run(None, ledger, "mine") as run:
            run.batch_start()
            clock.seconds += 1
            run.batch_end()

            assert charged(ledger) == {"batch": 1}
        clock.seconds += 100


@pytest.mark.parametrize(("is_shell", "seconds"), [(False, 3600), (True, 0)])
def test_time_before_init_counts_for_the_first_run(clock, monkeypatch, is_shell, seconds):
    """From the beginning of the process, an hour at most; not in a shell or a notebook, nor for a second run."""
    monkeypatch.setattr(time_ledger, "_counted_process", 0)
    monkeypatch.setattr(time_ledger, "seconds_of_process", lambda: 5000.0)
    if is_shell:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    for expected in (seconds, 0):
        ledger = TimeLedger(clock=clock)
        with Run(None, ledger, "mine") as run:
            run.fit_start()
            assert charged(ledger).get("start", 0) == expected


def test_waiting_for_the_process_group_is_not_start(clock, monkeypatch):
    """The trainer measures the wait, which distinguishes a late rank from the ranks waiting for it."""
    monkeypatch.setattr(time_ledger, "_counted_process", 0)
    monkeypatch.setattr(time_ledger, "seconds_of_process", lambda: 10.0)
    ledger = TimeLedger(clock=clock)
    ledger.add_waiting(4 * 10**9)
    with Run(None, ledger, "mine") as run:
        run.fit_start()
        assert charged(ledger) == {"start": 6, "waiting": 4}


def in_thread(function):
    """Calls a function in another thread and waits for it."""
    thread = threading.Thread(target=function, name="worker")
    thread.start()
    thread.join()


def test_calls_of_other_threads_are_not_charged(clock):
    """A slow destination in another thread takes nothing from the training thread's bucket."""
    ledger = TimeLedger(clock=clock)
    with Run(SlowDestination(clock), ledger, "mine") as run:
        run.batch_start()
        run.run_event(Event.BEFORE_FORWARD)
        in_thread(lambda: run.log_metrics({"gpu": 1.0}, step=0))
        in_thread(lambda: run.log_text("text", "name"))

        assert charged(ledger) == {"forward": 1}


def test_spans_of_threads_have_tracks_of_their_own(clock, tmp_path):
    """Spans of one thread nest; two threads with the same name get two tracks."""

    def work():
        with run.span("read"):
            clock.seconds += 1

    with Run(RunDirectory(tmp_path / "run"), TimeLedger(clock=clock), "mine") as run:
        work()
        first = threading.Thread(target=lambda: (work(), in_thread(work)), name="worker")
        first.start()
        first.join()
    spans = rows(tmp_path / "run/time/spans-0.csv")

    assert [span["track"] for span in spans if span["name"] == "read"] == [
        "spans",
        "spans of worker",
        "spans of worker (2)",
    ]


def test_a_full_trace_keeps_rare_spans(clock, tmp_path):
    """Batches go first: evaluations, checkpoints, epochs, collections and own spans are kept."""
    ledger = TimeLedger(clock=clock)
    saver = type("Saves", (Takes,), {"time_bucket": "checkpoint"})(clock, batch_checkpoint=0.01)
    with Run(RunDirectory(tmp_path / "run"), [ledger, saver], "mine") as run:
        ledger._files.stride = 0
        run.epoch_start()
        run.batch_start()
        clock.seconds += 0.01
        run.batch_end()
        run.eval_start()
        clock.seconds += 0.01
        run.eval_end()
        with run.span("own"):
            clock.seconds += 0.01
        run.epoch_end()
        ledger.begin_span("ep1.pt", "checkpoints")()
    spans = rows(tmp_path / "run/time/spans-0.csv")

    assert {(span["track"], span["name"]) for span in spans} == {
        ("time", "checkpoint"),
        ("time", "evaluation"),
        ("loop", "evaluation eval"),
        ("loop", "epoch 0"),
        ("spans", "own"),
        ("checkpoints", "ep1.pt"),
    }


def test_uploads_and_checkpoints_have_spans(make_trainer, tmp_path):
    """The span lasts from the call to the arrival; the training thread doesn't wait for it."""
    trainer = make_trainer(
        loggers=[
            RunDirectory(tmp_path / "run"),
            Artifacts(tmp_path / "store", spool=tmp_path / "spool", remote_file_name="{remote_file_name}"),
        ],
        save_folder=tmp_path / "checkpoints",
        max_duration="1ep",
    )
    trainer.fit()
    trainer.close()
    spans = rows(tmp_path / "run/time/spans-0.csv")

    (checkpoint,) = [span["name"] for span in spans if span["track"] == "checkpoints"]
    uploads = [span["name"] for span in spans if span["track"] == "uploads"]
    assert checkpoint.startswith("ep1-ba")
    assert any(name.endswith(checkpoint) for name in uploads)
    assert all(span["microseconds"] for span in spans if span["track"] in {"uploads", "checkpoints"})


def test_files_of_traces_are_kept_and_joined_to_the_trace(tmp_path):
    """Traces of `torch.profiler` are kept by name, step and rank, and joined to its trace on request."""
    with torch.profiler.profile() as profiler:
        torch.ones(3).sum()
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    with Run(RunDirectory(tmp_path / "run"), TimeLedger(), "mine") as run:
        run.batch_start()
        run.log_traces({"profile{1}": tmp_path / "trace.json.gz", "missing": tmp_path / "none", "other": 3})
        run.batch_end()
    found = runs.Run.open(tmp_path / "run")
    (artifact,) = found.artifacts()
    (trace,) = found.traces()
    trace_path = tmp_path / "whole.json"
    where = ["--root", str(tmp_path), "-o", str(trace_path)]

    assert artifact.name == "mine/traces/profile{1}-ba0-rank0.json.gz"
    assert artifact.path.read_bytes() == (tmp_path / "trace.json.gz").read_bytes()
    assert trace.traces["profile{1}"] == {"file": artifact.name, "size": artifact.size}
    assert trace.traces["other"] == 3
    assert main(["runs", "trace", "run", *where]) == 0
    without = checked_trace(trace_path)
    assert main(["runs", "trace", "run", "--profiles", "--overwrite", *where]) == 0
    events = checked_trace(trace_path, is_ours=False)
    assert events[: len(without)] == without
    assert len(events) > len(without)
    sums = [one for one in events if one["name"] == "aten::sum"]
    own = [one for one in events if one.get("ph") == "X" and one["pid"] == 0]
    # Both have the clock of the machine.
    assert abs(sums[0]["ts"] - own[0]["ts"]) < 60e6


def test_the_trace_of_a_trainer_is_one_that_perfetto_opens(make_trainer, tmp_path):
    """With spans of threads, evaluations, checkpoints and uploads: complete, and nested on each track."""

    class Spans(Callback):
        def batch_start(self, state, logger):
            def read():
                with logger.span("read"):
                    pass

            with logger.span("outer"), logger.span("inner"):
                in_thread(read)

    trainer = make_trainer(
        loggers=[RunDirectory(tmp_path / "run"), Artifacts(tmp_path / "store", spool=tmp_path / "spool")],
        save_folder=tmp_path / "checkpoints",
        callbacks=Spans(),
        max_duration="2ep",
    )
    trainer.fit()
    trainer.close()

    assert main(["runs", "trace", "run", "--root", str(tmp_path), "-o", str(tmp_path / "trace.json")]) == 0
    events = checked_trace(tmp_path / "trace.json")
    names = {one["name"] for one in events}
    assert {"forward", "backward", "epoch 1", "batch 0", "outer", "inner", "checkpoint"} <= names
    assert {one["ph"] for one in events} >= {"M", "X", "b", "e"}


def files_of(ledger, folder, run, **arguments):
    """Returns the writer of a ledger, to be called by the test itself."""
    return TimeFiles(ledger, folder, run.state, **arguments)


def test_open_spans_are_written_before_they_end(clock, tmp_path):
    """After a second, once: it is there if the process is killed."""
    ledger = TimeLedger(clock=clock)
    with Run(None, ledger, "mine") as run:
        files = files_of(ledger, tmp_path, run)
        with run.span("tokenize"):
            clock.seconds += 0.9
            files._write(*ledger.snapshot())
            assert not (tmp_path / "spans-0.csv").exists()
            clock.seconds += 0.2
            files._write(*ledger.snapshot())
            files._write(*ledger.snapshot())
    spans = rows(tmp_path / "spans-0.csv")

    assert [(span["name"], span["microseconds"]) for span in spans] == [("start", ""), ("tokenize", "")]


def test_a_machine_that_slept_was_stopped(clock, tmp_path):
    """The ledger's clock does not count it; rows do."""
    slept = [100 * 10**9]
    ledger = TimeLedger(clock=clock)
    with Run(None, ledger, "mine") as run:
        files = files_of(ledger, tmp_path, run, asleep=lambda: slept[0])
        run.batch_start()
        clock.seconds += 2
        slept[0] += 30 * 10**9
        files._look()
        files._write(*ledger.snapshot())
    (row,) = rows(tmp_path / "rank-0.csv")

    assert (row["batch"], row["stopped"]) == ("2", "30")
    assert float(row["end"]) - float(row["begin"]) == pytest.approx(32)


def test_a_look_that_was_interrupted_is_not_sleep(clock, tmp_path):
    """A thread that waits between the looks at two clocks knows less: spans that it writes are not moved."""
    looks = [100, 100 - 5 * 10**6, 100 + 5 * 10**6, 110]
    ledger = TimeLedger(clock=clock)
    with Run(None, ledger, "mine") as run:
        files = files_of(ledger, tmp_path, run, asleep=lambda: looks.pop(0))
        while looks:
            with run.span("one"):
                clock.seconds += 1
            files._look()
            files._write(*ledger.snapshot())
    begins = [float(span["begin"]) for span in rows(tmp_path / "spans-0.csv") if span["name"] == "one"]

    assert [after - before for before, after in itertools.pairwise(begins)] == pytest.approx([1, 1])


def test_slow_steps_are_kept_of_several_ranks(clock, tmp_path):
    """Steps that take twice as long as usual are kept, with what they spent their time on."""
    ledger = TimeLedger(clock=clock)
    with Run(None, ledger, "mine") as run:
        ledger._has_ranks = True
        files = files_of(ledger, tmp_path, run)
        for batch in range(10):
            run.batch_start()
            clock.seconds += 0.1
            run.batch_end()
            clock.seconds += 0.5 if batch == 7 else 0.01
            files._write(*ledger.snapshot())
    found = rows(tmp_path / "slow-0.csv")

    assert [(row["step"], row["data"], row["batch"]) for row in found] == [("8", "0.5", "0.1")]


def test_without_a_folder_nothing_is_written(clock, tmp_path, monkeypatch):
    """A span costs nothing without a ledger."""
    monkeypatch.chdir(tmp_path)
    with Run(InMemory(), TimeLedger(clock=clock), "mine") as run, run.span("any"):
        run.batch_end()
    with Run(InMemory(), run_name="mine") as run, run.span("any"):
        run.batch_end()

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    """Training continues."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/time").write_text("in the way")
    with Run(RunDirectory(tmp_path / "run"), TimeLedger(), "mine") as run:
        run.batch_end()

    (said,) = [one for one in map(logging.LogRecord.getMessage, caplog.records) if "time ledger" in one]
    assert said.startswith(f"time ledger: could not write to {tmp_path / 'run/time'}: FileExistsError")


def test_a_last_line_is_replaced_in_place(tmp_path):
    """A shorter one is filled up with spaces; a torn one of an earlier session ends before the next."""
    path = tmp_path / "rank-0.csv"
    path.write_text("name\ntor")
    file = GrowingCsv(path, "name")
    file.write("a long one", is_last=False)
    file.write("short", is_last=True)
    file.write("next", is_last=False)
    file.close()

    assert path.read_text() == "name\ntor\nshort     \nnext\n"


def test_a_trainer_has_one(make_trainer):
    """It adds one unless the user has one, or wants none."""
    own = TimeLedger()

    def ledgers(**arguments):
        return [one for one in make_trainer(**arguments).state.callbacks if isinstance(one, TimeLedger)]

    assert len(ledgers()) == 1
    assert ledgers(callbacks=own) == [own]
    assert ledgers(time_ledger=False) == []


def test_metrics_seconds_is_positive():
    """None turns them off."""
    with pytest.raises(ValueError, match="metrics_seconds must be positive"):
        TimeLedger(metrics_seconds=0)
