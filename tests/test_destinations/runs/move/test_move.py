"""Runs move one by one, and the report accounts for everything that did not arrive."""

import json

import pytest

from destinations.kinds.texts import TEXT
from destinations.runs.move.ledger import BusyError, TargetError
from destinations.runs.move.sink import DestinationSink, RecordClock
from destinations.runs.move.stream import Logged, MoveReport, SourceRun, Values, move
from destinations.testing import RecordingDestination


def run_of(*records, **given):
    """Returns a run of a made-up source."""
    return SourceRun("mine", "mine", "test mine", "1", lambda run: iter(records), **given)


def log(run, destination):
    """Logs a run to a destination; returns the report."""
    report = MoveReport()
    with DestinationSink(run, destination, RecordClock(), report) as sink:
        sink.take(run.read(run))
    report.add(run)
    return report


def test_failed_run_does_not_stop_the_others():
    """Its message is in the report. A run that another process writes is skipped."""
    runs = [run_of(), run_of(), run_of()]
    errors = iter([OSError("disk"), BusyError("busy"), None])
    report, seen = MoveReport(), []

    def take(run):
        if (error := next(errors)) is not None:
            raise error
        report.count(Values({"a": 1.0, "b": 2.0}, 0))

    move(runs, take, report, lambda done, count, new: seen.append((done, count, new)))

    assert (report.failures, report.failure_count, report.busy) == (["mine: disk"], 1, 1)
    assert (report.rows, report.values) == (1, 2)
    assert seen == [(0, 3, 0), (1, 3, 0), (2, 3, 0), (2, 3, 2), (3, 3, 0)]


@pytest.mark.parametrize("error", [ImportError("no package"), TargetError("no target"), KeyboardInterrupt()])
def test_error_that_affects_every_run_ends_the_move(error):
    """It is raised at the first run."""
    taken = []

    def take(run):
        taken.append(run)
        raise error

    with pytest.raises(type(error)):
        move([run_of(), run_of()], take, MoveReport())

    assert len(taken) == 1


def test_only_files_missing_from_the_source_count_as_missing():
    """A file that the destination lacks is a failure."""

    class Lacking(RecordingDestination):
        def log_text(self, text, name="Text", step=None):
            if name == "lacking":
                raise FileNotFoundError("folder of the destination")
            super().log_text(text, name, step)

    def gone():
        raise FileNotFoundError("file of the record")

    texts = [
        Logged(TEXT, "lacking", 0, 1.0, {"text": "a"}),
        Logged(TEXT, "gone", 0, 1.0, gone),
        Logged(TEXT, "kept", 0, 1.0, lambda: {"text": "b"}),
    ]

    report = log(run_of(*texts), Lacking())

    assert report.failures == ["mine: text: FileNotFoundError: folder of the destination"]
    assert report.missing == ["file of the record"]
    assert report.records == {"text": 1}


def test_records_lost_by_the_run_folder_are_failures(tmp_path):
    """The sidecar counts what was accepted and could not be written."""

    class Losing(RecordingDestination):
        run_dir = tmp_path

    (tmp_path / "sidecar.json").write_text(json.dumps({"lost": {"media": 2, "files": 0}}))

    report = log(run_of(Values({"a": 1.0}, 0, 1.0)), Losing())

    assert report.failures == ["mine: 2 media could not be written"]
    assert report.failure_count == 2


def test_source_that_raises_closes_the_destination():
    """The error is raised, the earlier records are logged, and the run is preempted."""

    def read(run):
        yield Values({"a": 1.0}, 0, 1.0)
        raise OSError("unplugged")

    run = SourceRun("mine", "mine", "test mine", "1", read, status="completed")
    destination = RecordingDestination()

    with pytest.raises(OSError, match="unplugged"):
        log(run, destination)

    assert destination.metrics == [(0, {"a": 1.0})]
    assert [call.method for call in destination.calls][-2:] == ["close", "post_close"]


def test_report_lists_at_most_a_hundred_failures():
    """It counts all of them."""
    report = MoveReport()
    for number in range(150):
        report.fail(str(number))

    assert (len(report.failures), report.failure_count) == (100, 150)
    assert json.loads(json.dumps(report.to_json()))["failures"] == 150
