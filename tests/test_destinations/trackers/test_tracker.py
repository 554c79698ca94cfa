"""The base of trackers: a misbehaving sink in its own thread doesn't affect the training thread."""

import errno
import importlib.util
import logging
import os
import pickle
import threading

import numpy as np
import pytest

import destinations
from destinations import LoggerDestination
from destinations.background import Lane, RetryLaterError
from destinations.testing import DestinationContract, DryRun
from destinations.trackers.tracker import RowsRefusedError, Sink, Stamp, Tracker
from events import RecordError

SECONDS = 60.0


class Recording(Sink):
    """Keeps its arguments, in order."""

    def __init__(self):
        self.calls = []

    def open(self):
        self.calls.append(("open",))

    def resume(self, step, time):
        self.calls.append(("resume", step, time))

    def log_metrics(self, rows):
        self.calls += [("metrics", *row) for row in rows]

    def log_hyperparameters(self, hyperparameters, time):
        self.calls.append(("hyperparameters", hyperparameters, time))

    def log_images(self, stamp, images):
        self.calls.append(("images", stamp, images.images, images.masks))

    def log_text(self, stamp, text):
        self.calls.append(("text", stamp, text))

    def log_table(self, stamp, columns, rows):
        self.calls.append(("table", stamp, columns, rows))

    def finish(self, status, exception, time):
        self.calls.append(("finish", status, exception))

    def close(self):
        self.calls.append(("close",))

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


class Recorder(Tracker):
    """A tracker whose sinks can be inspected."""

    sink_class = Recording

    def __init__(self, *sinks, **options):
        super().__init__(**{"close_seconds": SECONDS, **options})
        self.sinks = list(sinks)
        self.made = []

    def make_sink(self, state):
        self.made.append(self.sinks.pop(0) if self.sinks else Recording())
        return self.made[-1]


class Hanging(Recording):
    """Hangs at its first row until it is released."""

    def __init__(self):
        super().__init__()
        self.hangs, self.may_go_on = threading.Event(), threading.Event()

    def log_metrics(self, rows):
        self.hangs.set()
        assert self.may_go_on.wait(SECONDS)
        super().log_metrics(rows)


class Refusing(Recording):
    """Raises at every record."""

    def log_metrics(self, rows):
        raise ConnectionError("nobody there, token=hf_abcdefghijklmnopqrstuvwxyz0123456789")

    def log_text(self, stamp, text):
        raise ConnectionError("nobody there either")


class OutOfOrder(Recording):
    """Refuses its first calls, like a full disk, then accepts everything."""

    def __init__(self, failures):
        super().__init__()
        self.failures = failures

    def log_metrics(self, rows):
        self._fail()
        super().log_metrics(rows)

    def log_text(self, stamp, text):
        self._fail()
        super().log_text(stamp, text)

    def _fail(self):
        if self.failures:
            self.failures -= 1
            raise RetryLaterError from OSError(errno.ENOSPC, "No space left on device")


class Ticking:
    """A clock that counts its calls."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 1
        return self.now


def hanging_run(**options):
    """Returns a tracker in a run, its hanging sink, which has one row, and the run."""
    sink = Hanging()
    tracker = Recorder(sink, flush_seconds=0.01, **options)
    run = DryRun(tracker)
    run.init()
    run.logger.log_metrics({"first": 0.0}, 0)
    assert sink.hangs.wait(SECONDS)
    return tracker, sink, run


class TestRecorder(DestinationContract):
    @pytest.fixture
    def destination(self):
        """Returns a tracker with a sink that keeps everything."""
        return Recorder()

    def read_metrics(self, destination):
        sinks = getattr(destination, "made", [])
        return [(step, values) for sink in sinks for values, step, _ in sink.of("metrics")]

    def read_output(self, destination):
        return [repr(sink.calls) for sink in destination.made]


def test_records_arrive_in_logged_order():
    """Metrics and other records come between `open` and `close`, which gets the run's end."""
    tracker = Recorder(clock=Ticking())
    run = DryRun(tracker)
    run.init()

    run.logger.log_metrics({"loss": 1.0}, 1)
    run.logger.log_text("hello", "words", 2)
    run.logger.log_metrics({"loss": 3.0}, 3)
    run.logger.log_hyperparameters({"lr": 0.1})
    run.logger.log_metrics({"loss": 4.0}, 4)
    run.close()

    assert tracker.made[0].calls == [
        ("open",),
        ("metrics", {"loss": 1.0}, 1, 101.0),
        ("text", Stamp("words", 2, 102.0), "hello"),
        ("metrics", {"loss": 3.0}, 3, 103.0),
        ("hyperparameters", {"lr": 0.1}, 104.0),
        ("metrics", {"loss": 4.0}, 4, 105.0),
        ("finish", "completed", None),
        ("close",),
    ]


def test_records_before_init_are_bounded_and_counted():
    """Rows that are logged before `init` wait in the same queue."""
    tracker = Recorder(max_waiting_values=20)
    for step in range(100):
        tracker.log_metrics({"loss": 1.0}, step)
    run = DryRun(tracker)

    run.init()
    run.close()

    assert [step for _, step, _ in tracker.made[0].of("metrics")] == [*range(90, 100)]
    assert (tracker.counts.rows, tracker.counts.dropped_rows) == (100, 90)


def test_a_run_that_never_begins_reports_its_records(caplog):
    """What was logged before is counted as dropped at the end."""
    tracker = Recorder()
    tracker.log_metrics({"loss": 1.0}, 0)
    tracker.log_text("hello")

    tracker.post_close()

    assert "of 1 rows of metrics 1 were dropped and 0 failed; of 1 other records 1 were" in caplog.text


def test_records_before_init_are_kept():
    """They keep the step and the time of the call."""
    tracker = Recorder(clock=Ticking())
    run = DryRun(tracker)

    run.logger.log_metrics({"loss": 1.0}, 7)
    run.logger.log_text("hello", "words", 8)
    run.init()
    run.close()

    assert tracker.made[0].of("metrics") == [({"loss": 1.0}, 7, 101.0)]
    assert tracker.made[0].of("text") == [(Stamp("words", 8, 102.0), "hello")]


def test_the_sink_owns_what_it_gets():
    """Arrays, masks and rows of tables may change after the call returns."""
    tracker, sink, run = hanging_run()
    image, mask, row = np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.uint8), [1, [2]]

    run.logger.log_images(image, "image", masks={"mask": mask})
    run.logger.log_table(["a", "b"], [row], "table")
    image[:], mask[:] = 9, 9
    row[1][0] = 9
    sink.may_go_on.set()
    run.close()

    ((_, images, masks),) = sink.of("images")
    assert not images.any()
    assert not masks["mask"].any()
    assert sink.of("table")[0][2] == [[1, [2]]]
    assert tracker.counts.written_records == tracker.counts.records


def test_records_that_the_sink_ignores_are_not_copied():
    """The tracker keeps the base class's method, which loggers skip."""
    assert Recorder.log_video is LoggerDestination.log_video
    assert Recorder.log_images is Tracker.log_images


def test_a_path_that_is_not_there_is_the_callers_error():
    """The error comes before anything is queued."""
    tracker = Recorder()
    run = DryRun(tracker)
    run.init()

    with pytest.raises(RecordError, match=r"media file .* does not exist"):
        tracker.log_images("nowhere.png", "image", step=1)

    run.close()
    assert tracker.made[0].of("images") == []


def test_a_hanging_sink_drops_only_old_metrics():
    """Beyond the bound the oldest rows are dropped one by one, and all rows are counted."""
    tracker, sink, run = hanging_run(max_waiting_values=20)

    for step in range(1, 101):
        run.logger.log_metrics({"loss": float(step)}, step)
    sink.may_go_on.set()
    run.close()

    # A row counts as one more than its number of values.
    assert [step for _, step, _ in sink.of("metrics")] == [0, *range(91, 101)]
    assert (tracker.counts.rows, tracker.counts.written_rows, tracker.counts.dropped_rows) == (101, 11, 90)


def test_drop_newest_policy_keeps_waiting_metrics():
    """New rows are dropped while the queue is full."""
    tracker, sink, run = hanging_run(max_waiting_values=20, when_full="drop_newest")

    for step in range(1, 101):
        run.logger.log_metrics({"loss": float(step)}, step)
    sink.may_go_on.set()
    run.close()

    assert [step for _, step, _ in sink.of("metrics")] == [*range(11)]
    assert (tracker.counts.rows, tracker.counts.written_rows, tracker.counts.dropped_rows) == (101, 11, 90)


def test_wait_policy_waits_for_room():
    """If there is room in time, nothing is dropped."""
    tracker, sink, run = hanging_run(max_waiting_values=20, when_full="wait", wait_seconds=SECONDS)
    opener = threading.Timer(0.05, sink.may_go_on.set)
    opener.start()

    for step in range(1, 101):
        run.logger.log_metrics({"loss": float(step)}, step)
    run.close()
    opener.join(SECONDS)

    assert [step for _, step, _ in sink.of("metrics")] == [*range(101)]
    assert tracker.counts.dropped_rows == 0


def test_a_hanging_sink_costs_one_wait():
    """One call waits in vain, and later rows are dropped at once."""
    tracker, sink, run = hanging_run(max_waiting_values=2, when_full="wait", wait_seconds=0.01)
    run.logger.log_metrics({"loss": 1.0}, 1)
    run.logger.log_metrics({"loss": 2.0}, 2)
    tracker._feed._wait_seconds = 3600.0

    for step in range(3, 10):
        run.logger.log_metrics({"loss": float(step)}, step)
    sink.may_go_on.set()
    run.close()

    assert [step for _, step, _ in sink.of("metrics")] == [0, 1]
    assert tracker.counts.dropped_rows == 8


def test_media_and_hyperparameters_outlive_a_hang():
    """Within the bound of bytes no record is dropped; hyperparameters are accepted beyond it."""
    tracker, sink, run = hanging_run(max_waiting_bytes=100, wait_seconds=0.01, max_waiting_values=2)
    pixels = np.zeros((8, 8), np.uint8)

    run.logger.log_images(pixels, "fits")
    run.logger.log_images(pixels, "does not fit")
    run.logger.log_hyperparameters({"lr": 0.1})
    for step in range(9):
        run.logger.log_metrics({"loss": 1.0}, step)
    sink.may_go_on.set()
    run.close()

    assert [stamp.name for stamp, *_ in sink.of("images")] == ["fits"]
    assert [values for values, _ in sink.of("hyperparameters")] == [{"lr": 0.1}]
    assert tracker.counts.dropped_records == 1


def test_a_raising_sink_is_counted_and_reported_once(caplog):
    """Training doesn't notice, and the message shows no secrets."""
    tracker = Recorder(Refusing(), flush_seconds=0.01)
    run = DryRun(tracker)
    run.init()

    for step in range(10):
        run.logger.log_metrics({"loss": 1.0}, step)
        run.logger.log_text("hello", "words", step)
    assert tracker._feed.flush(SECONDS)
    with caplog.at_level(logging.WARNING, "destinations"):
        run.close()

    reports = [record.getMessage() for record in caplog.records if "ConnectionError" in record.getMessage()]
    assert [report.split(" failed with")[0] for report in reports] == [
        "Recorder-dry-run: metrics",
        "Recorder-dry-run: text 'words'",
    ]
    assert "abcdefghij" not in "".join(reports)
    assert tracker.counts.failed_rows == tracker.counts.rows == 10
    assert tracker.counts.failed_records == 10
    assert "of 10 rows of metrics 0 were dropped and 10 failed" in caplog.records[-1].getMessage()


def test_refused_rows_do_not_affect_others():
    """A sink can say how many rows of a chunk it rejected."""

    class RefusesOne(Recording):
        def log_metrics(self, rows):
            raise RowsRefusedError(1) from ValueError("step must be small")

    tracker = Recorder(RefusesOne(), flush_seconds=SECONDS)
    run = DryRun(tracker)
    run.init()

    for step in range(5):
        run.logger.log_metrics({"loss": 1.0}, step)
    run.close()

    assert (tracker.counts.written_rows, tracker.counts.failed_rows) == (4, 1)
    assert tracker.counts.errors == {"metrics: ValueError": 1}


def test_a_transient_failure_is_retried_in_order():
    """Nothing is lost or reordered, and the cause is reported once."""
    sink = OutOfOrder(failures=5)
    tracker = Recorder(sink, flush_seconds=0.01)
    run = DryRun(tracker)
    run.init()

    for step in range(3):
        run.logger.log_metrics({"loss": 1.0}, step)
        run.logger.log_text("hello", "words", step)
    run.close()

    assert [call[0] for call in sink.calls] == ["open", *["metrics", "text"] * 3, "finish", "close"]
    assert tracker.counts.failed_rows == tracker.counts.failed_records == tracker.counts.dropped_rows == 0
    assert {name.split(": ")[1] for name in tracker.counts.errors} == {"OSError"}


def test_a_sink_gets_nothing_until_it_opens():
    """It isn't even flushed before; then everything arrives in order."""

    class OpensLate(Recording):
        refusals = 3

        def open(self):
            self.refusals -= 1
            if self.refusals >= 0:
                raise RetryLaterError from ConnectionError("nobody there")
            super().open()

        def flush(self):
            self.calls.append(("flush",))

    tracker = Recorder(OpensLate(), flush_seconds=0.001)
    run = DryRun(tracker)
    run.init()
    run.logger.log_metrics({"loss": 1.0}, 1)
    run.logger.log_text("hello", step=1)
    run.close()

    calls = [call[0] for call in tracker.made[0].calls]
    assert calls[0] == "open"
    assert [call for call in calls if call != "flush"] == ["open", "metrics", "text", "finish", "close"]
    assert tracker.counts.errors == {"open: ConnectionError": 3}


def test_close_has_a_deadline(caplog):
    """Records that a hanging sink hasn't processed by then are dropped and counted."""
    tracker, sink, run = hanging_run(close_seconds=0.05)
    for step in range(1, 10):
        run.logger.log_metrics({"loss": 1.0}, step)
    thread = tracker._feed._thread

    run.close()

    counts = tracker.counts
    assert thread.is_alive()
    assert (counts.rows, counts.dropped_rows) == (10, 9)
    assert "9 were dropped" in caplog.text
    sink.may_go_on.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert [call[0] for call in sink.calls] == ["open", "metrics", "close"]


def test_a_second_run_is_independent_of_a_hanging_sink():
    """The next run receives its own records."""
    tracker, sink, run = hanging_run(close_seconds=0.05)
    thread = tracker._feed._thread
    run.close()
    # The deadline was for the first run: this one may take as long as it needs.
    tracker._close_seconds = SECONDS

    second = DryRun(tracker)
    second.init()
    second.logger.log_metrics({"loss": 1.0}, 5)
    second.close()

    assert [step for _, step, _ in tracker.made[1].of("metrics")] == [5]
    assert tracker.counts.dropped_rows == 0
    assert thread.is_alive()
    sink.may_go_on.set()
    thread.join(SECONDS)
    assert [step for _, step, _ in sink.of("metrics")] == [0]


def test_close_works_if_the_tracker_could_not_be_created():
    """If the sink can't be made, the run continues, and nothing is kept forever."""

    class Unmade(Tracker):
        def make_sink(self, state):
            raise PermissionError("not here")

    tracker = Unmade()
    run = DryRun(tracker, raise_errors=False)
    run.init()

    run.logger.log_metrics({"loss": 1.0}, 1)
    assert tracker._feed is None
    run.close()

    assert run.logger.faults.counts == {("Unmade", "init", "PermissionError"): 1}


@pytest.mark.parametrize(("all_ranks", "sinks"), [(False, 0), (True, 1)])
def test_other_ranks_have_a_sink_on_request(all_ranks, sinks):
    """By default only rank 0 has one."""
    tracker = Recorder(all_ranks=all_ranks)
    run = DryRun(tracker, rank=1)

    run.logger.log_metrics({"loss": 1.0}, 0)
    run.init()
    run.logger.log_metrics({"loss": 1.0}, 1)
    run.close()

    assert len(tracker.made) == sinks
    assert [step for sink in tracker.made for _, step, _ in sink.of("metrics")] == [0, 1] * sinks


def test_the_sink_gets_the_step_at_which_training_continues():
    """It is called once per load, with the time of the checkpoint by the tracker's clock."""
    tracker = Recorder(clock=lambda: 1234.5)
    saved = pickle.loads(pickle.dumps(tracker.state_dict()))  # noqa: S301  # our own bytes
    run = DryRun(tracker)

    run.fire("init", "before_load")
    run.state.timestamp = run.state.timestamp.copy(epoch=1, batch=3, sample=12)
    tracker.load_state_dict(saved)
    run.fire("after_load", "fit_start", "fit_end", "fit_start", "fit_end")
    run.close()

    assert tracker.made[0].of("resume") == [(3, 1234.5)]


def test_how_a_run_failed_is_reported():
    """The report has the exception, without secrets."""
    tracker = Recorder()
    run = DryRun(tracker)
    run.init()

    run.close(ValueError("bad, token=hf_abcdefghijklmnopqrstuvwxyz0123456789"))

    ((status, text),) = tracker.made[0].of("finish")
    assert status == "failed"
    assert text.startswith("ValueError: bad")
    assert "abcdefghij" not in text


def test_a_forked_child_logs_nothing():
    """It neither writes for its parent nor keeps records, and the parent continues."""
    tracker = Recorder()
    run = DryRun(tracker)
    run.init()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            tracker.log_metrics({"loss": 1.0}, 1)
            tracker.log_text("hello", "words", 1)
            tracker.flush()
            tracker.post_close()
            status = 0 if tracker._feed is None else 2
        finally:
            os._exit(status)

    _, ended = os.waitpid(child, 0)
    run.logger.log_metrics({"loss": 2.0}, 2)
    run.close()

    assert os.waitstatus_to_exitcode(ended) == 0
    assert [step for _, step, _ in tracker.made[0].of("metrics")] == [2]


@pytest.mark.parametrize(
    "options",
    [{"flush_seconds": 0}, {"max_waiting_values": 0}, {"max_waiting_bytes": 0}, {"when_full": "panic"}],
)
def test_out_of_range_arguments_are_refused(options):
    """The constructor raises."""
    with pytest.raises(ValueError, match="must be"):
        Recorder(**options)


def test_each_tracker_names_its_missing_package(monkeypatch):
    """The constructor raises, not `init`."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    for name, arguments, package in (
        ("TensorBoard", [], "tensorboard"),
        ("WandB", ["digits"], "wandb"),
        ("MLflow", [None, "digits"], "mlflow"),
        ("Trackio", ["digits"], "trackio"),
        ("Comet", ["digits"], "comet_ml"),
    ):
        with pytest.raises(ImportError, match=f"pip install {package}") as caught:
            getattr(destinations, name)(*arguments)

        assert caught.value.name == package


def test_a_hanging_lane_costs_one_wait():
    """Until an item finishes, later items are dropped without waiting."""
    hangs, may_go_on = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        assert may_go_on.wait(SECONDS)

    lane = Lane("test", limit=1, wait_seconds=0.01)
    lane.put(hang)
    assert hangs.wait(SECONDS)
    taken = [lane.put(lambda: None), lane.put(lambda: None)]
    lane._wait_seconds = 3600.0

    taken += [lane.put(lambda: None), lane.put(lambda: None, is_kept=True)]
    may_go_on.set()

    assert lane.flush(SECONDS)
    assert taken == [True, False, False, True]
    assert lane.put(lambda: None)
    assert lane.stop(SECONDS)
    assert (lane.counts.done, lane.counts.dropped) == (4, 2)


class FileSink(Recording):
    """Keeps the content of files; asks for one retry, and rejects the file "bad"."""

    def __init__(self):
        super().__init__()
        self.has_failed = False
        self.folders = set()

    def log_file(self, name, copy, *, overwrite):
        self.folders.add(copy.parent)
        if not self.has_failed:
            self.has_failed = True
            raise RetryLaterError from ConnectionError("the server does not answer")
        if name == "bad":
            raise ValueError("rejected")
        self.calls.append((name, copy.read_text(), overwrite))


class FileRecorder(Recorder):
    """A tracker that accepts files."""

    def can_upload_files(self):
        return True


def test_a_copy_of_a_file_is_kept_until_it_is_uploaded(tmp_path):
    """It survives a retry and changes to the original, and is deleted afterwards."""
    sink, source = FileSink(), tmp_path / "source"
    run = DryRun(FileRecorder(sink, flush_seconds=0.01))
    run.init()

    for name in ("a/good", "bad"):
        source.write_text(name)
        run.logger.upload_file(name, source, overwrite=True)
    source.unlink()
    run.close()

    assert sink.of("a/good") == [("a/good", True)]
    assert run.logger.destinations[0].counts.failed_records == 1
    assert len(sink.folders) == 2
    assert not any(folder.exists() or folder.parent.exists() for folder in sink.folders)
