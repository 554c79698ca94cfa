"""Sends runs to folders and replays them to destinations: everything arrives, and arrives once."""

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from destinations import InMemory, LoggerDestination, RunDirectory
from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.index.edits import edit_run
from destinations.runs.move.ledger import SentLedger
from destinations.runs.send import SendingError, TargetError, send
from destinations.runs.send.replay import RecordClock, RewoundError, replay
from destinations.testing import RecordingDestination
from destinations.testing.samples import every_kind_of_record
from events import Engine, Logger, State, Timestamp
from events import Run as WritingRun

ROOT = Path(__file__).parents[4]
LIMIT_SECONDS = 300
INDEXES = ("media", "tables", "histograms", "texts", "traces", "artifacts")


class Clock:
    """A clock that a test sets; each reading advances it by an eighth of a second."""

    def __init__(self, now=1_700_000_000.0):
        self.now = now

    def __call__(self):
        self.now += 0.125
        return self.now


def write_run(folder, steps=range(5), *, clock=None, error=None, batch=None, **options):
    """Writes a run with two metrics per step, one call each; starts at `batch` if given."""
    destination = RunDirectory(folder, clock=clock or time.time, **options)
    run = WritingRun(loggers=[destination], run_name=folder.name, raise_errors=True).__enter__()
    run.log_hyperparameters({"optim": {"lr": 0.1}, "layers": [1, 2]})
    run.fit_start(batch=batch)
    for step in steps:
        run.log_metrics({"loss": 1 / (step + 1)}, step=step)
        run.log_metrics({"acc": step / 10}, step=step)
    run.__exit__(type(error), error, None) if error else run.__exit__(None, None, None)
    return Run.open(folder)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A run with every kind of record, ended by an error."""
    folder = tmp_path_factory.mktemp("everything")
    error = RuntimeError("out of luck")
    destination = RunDirectory(
        folder / "run", run_id="abc123", tags=["one"], notes="a note", keep_files="copy", clock=Clock()
    )
    run = WritingRun(loggers=[destination], run_name="run", raise_errors=True).__enter__()
    run.log_hyperparameters({"optim": {"lr": 0.1}, "layers": [1, 2], "name": "größe"})
    for step in range(20):
        # In one call, because the writer may not join two calls into one row.
        run.log_metrics({"loss": 1 / (step + 1), "acc": step / 10, "big": 10**25, "flag": True})
        run.batch_end()
    run.epoch_end()
    for call in every_kind_of_record(folder):
        call(run.logger)
    run.log_images(np.array([[-3.0, 7.0], [0.1, 2.0]]), "clipped", step=7)
    run.log_images(np.array([[-300, 70_000], [40_000, 2]]), "scaled", step=7)
    run.log_metrics({"nan": math.nan, "inf": math.inf, "epoch": 0.5, "step": 3}, step=30)
    (folder / "weights.bin").write_bytes(b"first")
    run.upload_file("nested/weights.bin", folder / "weights.bin", overwrite=True)
    (folder / "weights.bin").write_bytes(b"second")
    run.upload_file("nested/weights.bin", folder / "weights.bin", overwrite=True)
    run.log_metrics({"after": 1.0}, step=31)
    run.__exit__(RuntimeError, error, None)
    return Run.open(folder / "run")


def lines_of(folder, index):
    """Returns the lines of an index, without the fields that a copy can't keep."""
    path = folder / f"{index}.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        del line["session"], line["record"]
        if line.get("type") == "video":
            # The file is copied without decoding.
            line.pop("shape")
        if "sum" in line and line["sum"] is not None:
            line["sum"] = pytest.approx(line["sum"])
    if index == "artifacts":
        lines = list({line["name"]: line for line in lines}.values())
    return lines


def assert_same_run(copy, original):
    """Asserts that a copy equals the original when read back."""
    assert repr(read_rows(copy)) == repr(read_rows(original))
    for index in INDEXES:
        assert lines_of(copy, index) == lines_of(original, index)
    for folder in ("media", "tables", "artifacts"):
        files = {
            path.relative_to(original): path.read_bytes()
            for path in (original / folder).rglob("*")
            if path.is_file()
        }
        assert files == {
            path.relative_to(copy): path.read_bytes() for path in (copy / folder).rglob("*") if path.is_file()
        }
    told = ("run_id", "status", "exception", "created_at", "ended_at", "tags", "notes", "hparams", "summary")
    sidecars = [json.loads((folder / "sidecar.json").read_text()) for folder in (copy, original)]
    assert {name: sidecars[0][name] for name in told} == {name: sidecars[1][name] for name in told}
    names = ["environment.json", "sessions.jsonl", "hparams.yaml"]
    names = [name for name in names if (original / name).exists()]
    assert [(copy / name).read_bytes() for name in names] == [
        (original / name).read_bytes() for name in names
    ]


def test_copy_equals_the_run(everything, tmp_path):
    """The copy has every row, record and file, with steps, epochs, times, facts and status."""
    report = send(everything, f"run:{tmp_path / 'copies'}", cache=tmp_path)

    assert (report.failures, report.missing, dict(report.left_out)) == ([], [], {})
    assert len(read_rows(everything.path)) == report.rows == 22
    assert_same_run(tmp_path / "copies" / "run", everything.path)


def test_run_sent_twice_arrives_once(everything, tmp_path):
    """The second call finds nothing new and changes no file."""
    send(everything, f"run:{tmp_path}", cache=tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix != ".lock"}

    report = send(everything, f"run:{tmp_path}", cache=tmp_path / "cache")

    assert (report.rows, report.values, dict(report.records)) == (0, 0, {})
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_destination_gets_each_record_as_it_was_logged(everything):
    """Steps, timestamps, times, masks, labels, colours and rates are the original ones.

    Files are readable.
    """
    seen = []

    class Watching(RecordingDestination):
        def run_event(self, event, state, logger):
            self.state = state

        def log_metrics(self, metrics, step=None):
            seen.append((step, int(self.state.timestamp.batch), int(self.state.timestamp.epoch), clock()))
            super().log_metrics(metrics, step)

    clock = RecordClock()
    destination = Watching(stores_files=True)

    replay(everything, destination, clock=clock)

    rows = read_rows(everything.path)
    assert seen == [(row.step, row.step, int(row.epoch), row.time) for row in rows]
    assert [step for step, _ in destination.metrics] == [row.step for row in rows]
    assert destination.hyperparameters == {"optim": {"lr": 0.1}, "layers": [1, 2], "name": "größe"}
    assert destination.files == {"nested/weights.bin": b"second"}
    masked = next(
        call for call in destination.of("log_images") if call.arguments["name"] == "masked"
    ).arguments
    assert [len(masked["images"]), *map(len, masked["masks"].values())] == [2, 2, 2]
    assert masked["mask_class_labels"] == {0: "nothing", 1: "cat"}
    clouds = next(
        call for call in destination.of("log_point_cloud") if call.arguments["name"] == "clouds"
    ).arguments
    assert (clouds["points"].shape, clouds["colors"].shape) == ((2, 4, 3), (2, 4, 4))
    assert {call.arguments["sample_rate"] for call in destination.of("log_audio")} == {8000}
    assert destination.of("log_text")[0].arguments["text"] == "first line\nsecond line\n"
    assert [call.method for call in destination.calls][-2:] == ["close", "post_close"]


def test_in_memory_gets_the_series_of_the_run(everything):
    """`InMemory` holds the same values as the run."""
    memory = InMemory()

    replay(everything, memory)

    for name in ("loss", "acc"):
        mine, theirs = memory.get_timeseries(name), everything.series(name)
        assert mine["step"].tolist() == theirs.step.tolist()
        assert mine[name].tolist() == theirs.value.tolist()


def test_new_rows_of_a_live_run_are_sent(tmp_path):
    """The second call sends only what is new since the first."""
    run = write_run(tmp_path / "a", range(5))
    first = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    run = write_run(tmp_path / "a", range(5, 8), if_exists="resume")

    second = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

    assert (first.values, second.values) == (10, 6)
    assert repr(read_rows(tmp_path / "to/a")) == repr(read_rows(tmp_path / "a"))


def test_copy_drops_an_abandoned_branch(tmp_path):
    """After training resumed from an earlier step, the copy is rebuilt."""
    run = write_run(tmp_path / "a", range(10))
    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    run = write_run(tmp_path / "a", range(4, 7), if_exists="resume", batch=4)

    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

    assert [row.step for row in read_rows(tmp_path / "to/a")] == [
        row.step for row in read_rows(tmp_path / "a")
    ]
    assert read_rows(tmp_path / "to/a")[-1].step == 6


class Rank:
    """A rank of a run, driven by a test."""

    def __init__(self, folder, rank, clock, batch=0):
        self.state = State("run", rank=rank, world_size=2, timestamp=Timestamp(batch=batch))
        destination = RunDirectory(folder, all_ranks=True, if_exists="resume", clock=clock)
        self.logger = Logger(self.state, [destination], raise_errors=True)
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event("init")
        self.engine.run_event("fit_start")


def write_ranks(folder, steps, clock, *, batch=0, more=None):
    """Writes a session of a run with two ranks."""
    ranks = [Rank(folder, rank, clock, batch) for rank in range(2)]
    for step in steps:
        for number, rank in enumerate(ranks):
            rank.logger.log_metrics({"loss": step + number / 2, **(more or {})}, step)
    for rank in ranks:
        rank.engine.close(None)
    return Run.open(folder)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """A run with two ranks that went back to step 4 once."""
    folder = tmp_path_factory.mktemp("ranked") / "run"
    clock = Clock()
    write_ranks(folder, range(6), clock)
    return write_ranks(folder, range(4, 8), clock, batch=4)


def test_copy_has_all_ranks(ranked, tmp_path):
    """Each rank's rows are in its own file, once, without the rows of a branch."""
    reports = [send(ranked, f"run:{tmp_path / 'to'}", cache=tmp_path) for _ in range(2)]

    copy = tmp_path / "to/run"
    for rank in (0, 1):
        assert [row.step for row in read_rows(ranked.path, rank)] == list(range(8))
        assert repr(read_rows(copy, rank)) == repr(read_rows(ranked.path, rank))
    assert [(one.rows, one.failures) for one in reports] == [(16, []), (0, [])]


def test_metrics_of_other_ranks_get_a_prefix(ranked):
    """Metrics of rank 1 are named `rank1/…`."""
    memory = InMemory()

    report = replay(ranked, memory)
    again = replay(ranked, InMemory(), position=report.position)

    losses = {name: memory.get_timeseries(name)[name].tolist() for name in ("loss", "rank1/loss")}
    assert losses == {
        "loss": [float(step) for step in range(8)],
        "rank1/loss": [step + 0.5 for step in range(8)],
    }
    assert memory.get_timeseries("rank1/loss")["step"].tolist() == list(range(8))
    assert (report.rows, again.rows) == (16, 0)


def test_replay_raises_for_a_position_in_an_abandoned_branch(tmp_path):
    """The caller decides whether to start over."""
    run = write_run(tmp_path / "a", range(10))
    position = replay(run, RecordingDestination()).position
    run = write_run(tmp_path / "a", range(4, 7), if_exists="resume", batch=4)
    destination = RecordingDestination()

    with pytest.raises(RewoundError):
        replay(run, destination, position=position)

    assert destination.metrics == []
    assert destination.calls[-1].method == "post_close"


def test_run_is_followed_until_it_ends(tmp_path):
    """Rows, texts and the end of the run arrive as they are logged, each once."""
    destination = RunDirectory(tmp_path / "a", flush_seconds=0.05)
    writing = WritingRun(loggers=[destination], run_name="a", raise_errors=True)
    writing.__enter__()
    writing.log_metrics({"loss": 0.0}, step=0)
    passes = []

    def wait(seconds):
        passes.append(seconds)
        if len(passes) == 3:
            writing.__exit__(None, None, None)
        elif len(passes) < 3:
            # The second value of a step arrives after the first was sent.
            writing.log_metrics({"acc": 1.0}, step=len(passes) - 1)
            writing.log_metrics({"loss": 2.0}, step=len(passes))
            writing.log_text("hello", step=len(passes))
            writing.flush()

    recording = RecordingDestination()

    report = replay(Run.open(tmp_path / "a"), recording, follow=True, wait=wait)

    assert report.is_over
    assert report.records == {"text": 2}
    cells = [(step, name, value) for step, metrics in recording.metrics for name, value in metrics.items()]
    assert cells == [(0, "loss", 0.0), (0, "acc", 1.0), (1, "loss", 2.0), (1, "acc", 1.0), (2, "loss", 2.0)]
    assert len(recording.of("flush")) == len(passes)


def test_ctrl_c_ends_following(tmp_path):
    """The position is kept, and the destination is closed."""
    destination = RunDirectory(tmp_path / "a", flush_seconds=0.05)

    def interrupt(seconds):
        raise KeyboardInterrupt

    with WritingRun(loggers=[destination], run_name="a", raise_errors=True) as writing:
        writing.log_metrics({"loss": 0.0}, step=0)
        report = send(
            Run.open(tmp_path / "a"), f"run:{tmp_path / 'to'}", follow=True, cache=tmp_path, wait=interrupt
        )
        status = json.loads((tmp_path / "to/a/sidecar.json").read_text())["status"]
        writing.log_metrics({"loss": 1.0}, step=1)

    assert (report.was_interrupted, report.is_over, status) == (True, False, "preempted")
    assert send(Run.open(tmp_path / "a"), f"run:{tmp_path / 'to'}", cache=tmp_path).rows == 1
    assert repr(read_rows(tmp_path / "to/a")) == repr(read_rows(tmp_path / "a"))
    assert json.loads((tmp_path / "to/a/sidecar.json").read_text())["status"] == "completed"


@pytest.mark.parametrize(
    ("error", "status", "exception"),
    [
        (None, "completed", None),
        (KeyboardInterrupt(), "interrupted", None),
        (SystemExit(143), "preempted", None),
        (ValueError("bad: worse"), "failed", "ValueError: bad: worse"),
    ],
)
def test_destination_learns_how_the_run_ended(tmp_path, error, status, exception):
    """It gets the status and the exception of the run."""
    run = write_run(tmp_path / "a", range(2), error=error)

    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

    sidecar = json.loads((tmp_path / "to/a/sidecar.json").read_text())
    assert (sidecar["status"], sidecar["exception"]) == (status, exception)


def test_killed_run_is_sent_as_failed(tmp_path):
    """Its sidecar says "running", and its heartbeat is old."""
    run = write_run(tmp_path / "a", range(2))
    sidecar = json.loads((tmp_path / "a/sidecar.json").read_text())
    (tmp_path / "a/sidecar.json").write_text(json.dumps(sidecar | {"status": "running", "ended_at": None}))
    os.utime(tmp_path / "a/heartbeat", (1_700_000_000, 1_700_000_000))

    report = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

    sidecar = json.loads((tmp_path / "to/a/sidecar.json").read_text())
    assert report.is_over
    assert (sidecar["status"], sidecar["ended_at"]) == ("failed", 1_700_000_000)
    assert sidecar["exception"] == "Killed: the heartbeat stopped"


def test_unsupported_records_are_counted(everything):
    """These are the kinds that the destination doesn't override, and files if it keeps none."""

    class MetricsOnly(LoggerDestination):
        rows = 0

        def log_metrics(self, metrics, step=None):
            self.rows += 1

    destination = MetricsOnly()

    report = replay(everything, destination)

    assert report.rows == destination.rows == 22
    assert (report.left_out["artifact"], report.left_out["text"], dict(report.records)) == (1, 2, {})


def test_rejected_records_are_reported_and_sent_again(tmp_path):
    """The other records are sent. The next call starts over, so nothing arrives twice."""
    run = write_run(tmp_path / "a", range(3), keep_files="copy")
    (tmp_path / "a/texts.jsonl").write_text('{"step": 1, "name": "../up", "time": 1.0, "text": "words"}\n')
    (tmp_path / "a/media.jsonl").write_text(
        '{"step": 1, "name": "/up", "tag": "/up", "type": "audio", "path": "metrics.csv", "index": 0, "time": 1.0, '
        '"sample_rate": 8, "shape": null}\n'
    )

    first = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    second = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

    assert (first.failure_count, second.failure_count, second.values) == (1, 1, 6)
    assert first.failures[0].startswith(f"{run.run_id}: audio: RecordError: name '")
    assert repr(read_rows(tmp_path / "to/a")) == repr(read_rows(tmp_path / "a"))
    assert len((tmp_path / "to/a/texts.jsonl").read_text().splitlines()) == 1


def test_missing_files_are_reported(tmp_path):
    """Files outside the run are too. A damaged line is a failure; a torn last line is not there yet."""
    run = write_run(tmp_path / "a", range(3))
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (tmp_path / "a/media.jsonl").write_text(
        "".join(
            f'{{"step": 1, "name": "v", "type": "video", "path": "{path}", "index": 0, "time": 1.0, "fps": 2}}\n'
            for path in ("media/v/gone.mp4", "../secret.mp4")
        )
        + "damaged\n"
        + '{"step": 1, "torn'
    )
    destination = RecordingDestination()

    report = replay(run, destination)

    assert report.missing == [
        "file 'media/v/gone.mp4' of a record is not in the folder of its run.",
        "file '../secret.mp4' of a record is not in the folder of its run.",
    ]
    assert destination.of("log_video") == []
    assert report.failures == [f"{run.run_id}: 1 damaged lines of media.jsonl"]


def test_damaged_line_is_reported_once(tmp_path):
    """Trying again would not fix it, so the rest is not sent again."""
    run = write_run(tmp_path / "a", range(3))
    (tmp_path / "a/texts.jsonl").write_text("damaged\n")

    first = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    second = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

    assert (first.values, first.failures) == (6, [f"{run.run_id}: 1 damaged lines of texts.jsonl"])
    assert (second.values, second.unchanged, second.failures) == (0, 1, [])


@pytest.mark.parametrize("text", ["tensorboard", "run:", "neptune:x", ""])
def test_unknown_target_raises(tmp_path, text):
    """The error lists the targets."""
    run = write_run(tmp_path / "a", range(1))

    with pytest.raises(
        TargetError,
        match=r"^unknown target .*; expected run:FOLDER, comet:PROJECT, mlflow:URI, tensorboard:FOLDER, "
        r"trackio:PROJECT or wandb:PROJECT\.$",
    ):
        send(run, text, cache=tmp_path)


def test_foreign_folder_is_not_written_to(tmp_path):
    """The run gets a new folder that is named by its id."""
    run = write_run(tmp_path / "a", range(1), run_id="id7")
    (tmp_path / "to/a").mkdir(parents=True)
    (tmp_path / "to/a/mine").write_text("mine")
    (tmp_path / "to/a-id7").mkdir()
    (tmp_path / "to/a-id7/mine").write_text("mine")

    with pytest.raises(
        SendingError, match=r"contains other files\. Use a new folder, or one that was sent to before"
    ):
        send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    (tmp_path / "to/a-id7/mine").unlink()
    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

    assert [path.name for path in (tmp_path / "to/a").iterdir()] == ["mine"]
    assert len(read_rows(tmp_path / "to/a-id7")) == 1


def test_two_runs_of_one_name_get_a_folder_each(tmp_path):
    """A copy that was moved is found by its id."""
    one = write_run(tmp_path / "1/a", range(1), run_id="one")
    two = write_run(tmp_path / "2/a", range(2), run_id="two")
    send(one, f"run:{tmp_path / 'to'}", cache=tmp_path)
    send(two, f"run:{tmp_path / 'to'}", cache=tmp_path)
    (tmp_path / "1/a").rename(tmp_path / "1/moved")

    again = send(Run.open(tmp_path / "1/moved"), f"run:{tmp_path / 'to'}", cache=tmp_path)

    assert again.rows == 0
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["a", "a-two"]


def test_run_is_not_sent_to_its_own_folder(tmp_path):
    """Otherwise its folder would be emptied."""
    run = write_run(tmp_path / "a", range(1))
    (tmp_path / "a/.sent.json").write_text(json.dumps({"run_id": run.run_id, "state": "open"}))

    with pytest.raises(SendingError, match=r"^cannot send a run to its own folder"):
        send(run, f"run:{tmp_path}", cache=tmp_path)

    assert len(read_rows(tmp_path / "a")) == 1


def test_deleted_copy_is_sent_again(tmp_path):
    """The ledger may be outside the deleted folder."""
    import shutil

    run = write_run(tmp_path / "a", range(3))
    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    shutil.rmtree(tmp_path / "to")

    assert send(run, f"run:{tmp_path / 'to'}", cache=tmp_path).values == 6
    assert send(run, f"run:{tmp_path / 'to'}", cache=tmp_path, again=True).values == 6
    assert len(read_rows(tmp_path / "to/a")) == len(read_rows(tmp_path / "a"))


@pytest.mark.parametrize("kind", ["run", "tensorboard"])
@pytest.mark.parametrize("name", ["thesis.tex", ".git/HEAD"])
def test_added_files_prevent_replacing_a_copy(tmp_path, kind, name):
    """If the copy contains files that were not sent, nothing is removed."""
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
    run = write_run(tmp_path / "a", range(3))
    send(run, f"{kind}:{tmp_path / 'to'}", cache=tmp_path)
    (tmp_path / "to/a" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "to/a" / name).write_text("mine")
    before = sorted((tmp_path / "to").rglob("*"))

    with pytest.raises(SendingError, match=rf"contains '{name.partition('/')[0]}', which was not sent"):
        send(run, f"{kind}:{tmp_path / 'to'}", cache=tmp_path, again=True)

    assert sorted((tmp_path / "to").rglob("*")) == before
    assert send(run, f"{kind}:{tmp_path / 'to'}", cache=tmp_path).rows == 0


def test_edits_of_a_copy_are_kept(tmp_path):
    """The user's tags and notes survive when the run is sent again."""
    run = write_run(tmp_path / "a", range(3))
    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    edit_run(tmp_path / "to/a", (), notes="mine")

    assert send(run, f"run:{tmp_path / 'to'}", cache=tmp_path, again=True).values == 6
    assert Run.open(tmp_path / "to/a").notes == "mine"


def test_copy_with_a_live_writer_is_not_replaced(tmp_path):
    """Training continues in the copy."""
    run = write_run(tmp_path / "a", range(3))
    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    destination = RunDirectory(tmp_path / "to/a", if_exists="resume")

    with (
        WritingRun(loggers=[destination], run_name="a"),
        pytest.raises(SendingError, match="a process writes to it"),
    ):
        send(run, f"run:{tmp_path / 'to'}", cache=tmp_path, again=True)

    assert len(read_rows(tmp_path / "to/a")) == len(read_rows(tmp_path / "a"))


def test_target_moved_during_sending_raises(tmp_path, monkeypatch):
    """Nothing is removed from whatever is at its path now."""
    run = write_run(tmp_path / "a", range(3))
    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    with SentLedger(tmp_path / "to/a/.sent.json", run.run_id, "run") as ledger:
        (tmp_path / "to").rename(tmp_path / "moved")
        send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

        with pytest.raises(SendingError, match="was moved or replaced"):
            ledger.begin("")

    assert json.loads((tmp_path / "to/a/.sent.json").read_text())["state"] == "done"


@pytest.mark.parametrize(
    "position",
    [
        {"values": 3, "crc32": 7},
        {"rows": 5},
        {"lines": [1]},
        {"rows": {"0": {}}},
        {"writers": {"a": 1}},
        [],
        None,
    ],
)
def test_ledger_with_a_malformed_position_is_ignored(tmp_path, position):
    """Everything is sent again."""
    run = write_run(tmp_path / "a", range(3))
    send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)
    ledger = json.loads((tmp_path / "to/a/.sent.json").read_text())
    (tmp_path / "to/a/.sent.json").write_text(json.dumps(ledger | {"position": position, "facts": {}}))

    assert send(run, f"run:{tmp_path / 'to'}", cache=tmp_path).rows == 3
    assert len(read_rows(tmp_path / "to/a")) == 3


def test_second_sender_is_rejected_while_the_first_runs(tmp_path):
    """The error names the run and the target."""
    destination = RunDirectory(tmp_path / "a", flush_seconds=0.05)

    def send_again(seconds):
        with pytest.raises(SendingError, match=r"^another process is sending run"):
            send(Run.open(tmp_path / "a"), f"run:{tmp_path / 'to'}", cache=tmp_path)
        raise KeyboardInterrupt

    with WritingRun(loggers=[destination], run_name="a", raise_errors=True) as writing:
        writing.log_metrics({"loss": 0.0}, step=0)
        report = send(
            Run.open(tmp_path / "a"), f"run:{tmp_path / 'to'}", follow=True, cache=tmp_path, wait=send_again
        )

    assert report.was_interrupted


def test_killed_and_repeated_sending_arrives_once(tmp_path):
    """This holds wherever the process was killed."""
    run = write_run(tmp_path / "a", range(5_000))
    ledger = tmp_path / "to/a/.sent.json"
    code = (
        "import sys; from destinations.runs import Run; from destinations.runs.send import send\n"
        "send(Run.open(sys.argv[1]), sys.argv[2], cache=sys.argv[3])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "a", f"run:{tmp_path / 'to'}", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (tmp_path / "to/a/journal").exists() and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.01)
            break
    child.kill()
    child.wait(LIMIT_SECONDS)
    state = json.loads(ledger.read_text())["state"] if ledger.exists() else "open"

    report = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path)

    assert state in {"open", "done"}
    assert report.values == (10_000 if state == "open" else 0)
    assert repr(read_rows(tmp_path / "to/a")) == repr(read_rows(tmp_path / "a"))
