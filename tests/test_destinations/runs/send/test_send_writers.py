"""Sends runs with several writers: unchanged to a folder, and as one run to a tracker."""

import numpy as np
import pytest

from destinations import InMemory, RunDirectory
from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.send import SendingError, send
from destinations.runs.send.replay import replay
from destinations.testing import RecordingDestination
from tests.test_destinations.runs.written import Written, write_shared


@pytest.fixture
def run(tmp_path):
    """A run with three writers."""
    return Run.open(write_shared(tmp_path / "digits"))


@pytest.fixture
def sent(run, tmp_path):
    """Sends the run to another folder; returns what was sent."""

    def sent(**options):
        return send(run, f"run:{tmp_path / 'to'}", cache=tmp_path, **options)

    return sent


def rows_of(folder):
    """Returns the rows of the trainer and of each writer."""
    return {
        writer: repr(read_rows(folder / "writers" / writer if writer else folder))
        for writer in ("", *Run.open(folder).writers)
    }


def test_copy_has_a_folder_for_each_writer(run, sent, tmp_path):
    """Each writer keeps its id, its rows in order, and its sessions. A second call sends nothing."""
    report, again = sent(), sent()

    copy = tmp_path / "to" / "digits"
    assert rows_of(copy) == rows_of(run.path)
    assert (report.rows, report.values, report.failures, report.is_over) == (7, 9, [], True)
    assert (again.rows, again.is_over) == (0, True)
    for name in run.writers:
        there, here = Run.open(copy).writer(name), run.writer(name)
        assert (there.run_id, there.status, there.sessions) == (here.run_id, here.status, here.sessions)
    assert Run.open(copy).summary == run.summary


def test_additions_of_a_writer_are_sent(run, sent, tmp_path):
    """This includes late rows, records, hyperparameters and new writers; nothing is sent twice."""
    sent()
    with Written(run.path, writer="eval") as late:
        late.log({"acc": 0.7}, 2)
        late.logger.log_hyperparameters({"beams": 4})
        late.logger.log_images(np.zeros((1, 4, 4), np.uint8), "Inputs", step=2)
    with Written(run.path, writer="new") as new:
        new.log({"acc": 0.9}, 8)

    report = sent()

    copy = Run.open(tmp_path / "to" / "digits")
    assert (report.rows, dict(report.records), report.failures) == (2, {"image": 1}, [])
    assert rows_of(copy.path) == rows_of(run.path)
    assert copy.writer("eval").hyperparameters == {"beams": 4}
    (image,) = copy.images("Inputs")
    assert image.path.is_relative_to(copy.path / "writers" / "eval" / "media")


def test_copy_is_replaced_with_its_writers(run, sent, tmp_path):
    """It is not replaced if it has writers that were not sent, or while a writer is alive."""
    sent()
    assert sent(again=True).rows == 7
    assert rows_of(tmp_path / "to" / "digits") == rows_of(run.path)
    with (
        Written(tmp_path / "to" / "digits", writer="eval"),
        pytest.raises(SendingError, match="writes to it"),
    ):
        sent(again=True)
    with Written(tmp_path / "to" / "digits", writer="mine") as mine:
        mine.log({"acc": 1.0}, 1)
    with pytest.raises(SendingError, match="writer 'mine', which were not sent"):
        sent(again=True)

    assert len(read_rows(tmp_path / "to" / "digits" / "writers" / "mine")) == 1


def test_tracker_gets_rows_of_writers_with_a_prefix(run):
    """Rows arrive in the order of logging; the trainer's metrics have no prefix."""
    memory = InMemory()

    report = replay(run, memory)

    losses = {name: memory.get_timeseries(name)[name].tolist() for name in sorted(memory.data)}
    assert losses == {
        "loss": [10.0, 20.0],
        "lr": [0.1],
        "eval/loss": [11.0, 0.5],
        "eval/acc": [0.3, 0.1],
        "probe/loss": [12.0],
        "probe/norm": [4.0],
    }
    assert memory.get_timeseries("eval/loss")["step"].tolist() == [1, 0]
    assert (report.rows, report.values) == (7, 9)
    assert replay(run, InMemory(), position=report.position).rows == 0


def test_tracker_gets_records_of_writers_with_a_prefix(tmp_path):
    """This includes texts, tables and files."""
    (tmp_path / "file").write_bytes(b"x")
    with Written(tmp_path / "digits", writer="eval", keep_files="copy") as late:
        late.logger.log_text("good", "Notes", step=3)
        late.logger.log_table(["a"], [[1]], "Table", step=3)
        late.logger.upload_file("model.pt", tmp_path / "file")
    destination = RecordingDestination(stores_files=True)

    report = replay(Run.open(tmp_path / "digits"), destination)

    assert report.failures == []
    assert {name for call in destination.calls for name in map(str, [*call.arguments.values()])} >= {
        "eval/Notes",
        "eval/Table",
        "eval/model.pt",
    }


def test_prefix_of_a_writer_avoids_metrics_of_that_name(tmp_path):
    """An underscore tells them apart, as for ranks."""
    with Written(tmp_path / "digits") as trainer, Written(tmp_path / "digits", writer="eval") as late:
        trainer.log({"eval/loss": 1.0}, 1)
        late.log({"loss": 2.0}, 1)
    memory = InMemory()

    replay(Run.open(tmp_path / "digits"), memory)

    assert sorted(memory.data) == ["eval/loss", "eval_/loss"]


def test_run_is_followed_until_its_last_writer_ends(tmp_path):
    """Rows of both writers arrive as they are logged, each once."""
    run_dir = tmp_path / "digits"
    trainer, late = Written(run_dir), Written(run_dir, writer="eval")
    acts = [
        lambda: (trainer.log({"loss": 1.0}, 1), late.log({"acc": 0.5}, 1)),
        lambda: (trainer.log({"loss": 2.0}, 2), trainer.close()),
        lambda: late.log({"acc": 0.6}, 0),
        late.close,
    ]

    def wait(_):
        acts.pop(0)()
        if acts:
            late.flush()

    run = Run.open(run_dir)
    report = send(run, f"run:{tmp_path / 'to'}", cache=tmp_path, follow=True, wait=wait)

    assert (report.rows, report.is_over, acts) == (4, True, [])
    assert rows_of(tmp_path / "to" / "digits") == rows_of(run_dir)


@pytest.mark.parametrize("target", ["run", "tracker"])
def test_unreadable_writer_does_not_stop_the_others(run, sent, target):
    """The failure is reported, and everything is sent again later."""
    (run.path / "writers" / "eval" / "metrics.csv").unlink()
    (run.path / "writers" / "eval" / "metrics.csv").mkdir()

    report = sent() if target == "run" else replay(run, InMemory())

    assert (report.rows, report.failure_count) == (4, 1)
    assert report.failures[0].startswith(f"{run.run_id}: writer eval cannot be read: ")


def test_copy_of_a_writer_can_be_continued(sent, tmp_path):
    """A process with the writer's name can continue its copy."""
    sent()

    destination = RunDirectory(tmp_path / "to" / "digits", writer="eval")
    assert destination.writer == "eval"
    with Written(tmp_path / "to" / "digits", writer="eval") as late:
        late.log({"acc": 1.0}, 9)
    assert Run.open(tmp_path / "to" / "digits").series("acc").step.tolist() == [0, 3, 9]
