"""Rows after a checkpoint stay where they were written, as a branch, and don't belong to the run."""

import re

import numpy as np
import pytest

from destinations import RunDirectory
from destinations.history.sessions import read_sessions
from destinations.run_directory import documents
from destinations.runs import Run as Opened
from events import Event, Run, Timestamp

RED = np.zeros((3, 2, 2), np.uint8)


def log_everything(run, step):
    """Logs a record of several kinds."""
    run.log_text(f"step {step}", "note", step=step)
    run.log_images(RED, "picture", step=step)
    run.log_table(["a"], [[step]], "table", step=step)
    run.log_histogram(np.arange(3.0), "weights", step=step)


def steps_of(folder):
    """Returns the steps of the records, which are equal for all kinds."""
    run = Opened.open(folder)
    found = {
        kind: [one.step for one in run.records(kind)] for kind in ("texts", "images", "tables", "histograms")
    }
    assert len(set(map(tuple, found.values()))) == 1, found
    return found["texts"]


class Session:
    """A run in one process that continues from a saved state, as a trainer does."""

    def __init__(self, folder, saved=None, batch=0, **hyperparameters):
        self.ours = RunDirectory(folder)
        self.run = Run(self.ours, run_name="mine", raise_errors=True)
        self.run.__enter__()
        if saved is not None:
            self.load(saved, batch)
        if hyperparameters:
            self.run.log_hyperparameters(hyperparameters)
        self.run.run_event(Event.FIT_START)

    def load(self, saved, batch):
        self.run.run_event(Event.BEFORE_LOAD)
        self.run.state.continues_run = True
        self.ours.load_state_dict(saved)
        self.run.state.timestamp = Timestamp(batch=batch)
        self.run.run_event(Event.AFTER_LOAD)

    def log(self, *steps):
        for step in steps:
            self.run.state.timestamp = Timestamp(batch=step)
            log_everything(self.run, step)
        return self.ours.state_dict()

    def close(self):
        self.run.close()


def test_training_that_goes_back_in_one_process_begins_a_session(tmp_path):
    """Rows since the checkpoint become a branch, as if another process had loaded it."""
    folder = tmp_path / "mine"
    session = Session(folder)
    at_2 = session.log(1, 2)
    session.log(3)
    session.load(at_2, 2)
    session.run.run_event(Event.FIT_START)
    session.log(3, 4)
    session.close()

    assert steps_of(folder) == [1, 2, 3, 4]
    lines = read_sessions(folder)
    assert [(one["number"], one["status"], one["resume_step"]) for one in lines] == [
        (1, "stopped", None),
        (2, "completed", 2),
    ]
    assert lines[1]["follows"] == {"session": lines[0]["session"], "records": 9, "step": 2}


def test_each_session_keeps_its_own_configuration(tmp_path):
    """The run has the hyperparameters of the sessions that led to it; a branch keeps its own."""
    folder = tmp_path / "mine"
    first = Session(folder, lr=0.1, width=8)
    at_1 = first.log(1)
    first.close()
    second = Session(folder, at_1, 1, lr=0.2, warmup=5)
    second.log(2)
    second.close()
    third = Session(folder, at_1, 1, lr=0.3)
    third.close()

    run = Opened.open(folder)
    assert run.hyperparameters == {"lr": 0.3, "width": 8}
    assert [run.configuration(number)["hyperparameters"] for number in (1, 2, 3)] == [
        {"lr": 0.1, "width": 8},
        {"lr": 0.2, "warmup": 5},
        {"lr": 0.3},
    ]
    first_id = run.sessions[0]["session"]
    assert run.configuration(first_id)["environment"]["python"] == run.environment["python"]
    with pytest.raises(ValueError, match=rf"session must be one of 1 \({first_id}\), .*, got 4"):
        run.configuration(4)


def test_files_after_the_checkpoint_do_not_belong_but_its_own_do(tmp_path):
    """A checkpoint and its pointer are uploaded after its state was taken; other files count like records."""
    folder, file = tmp_path / "mine", tmp_path / "file"
    file.write_text("content")
    first = Session(folder)
    first.run.upload_file("before.txt", file)
    at_1 = first.log(1)
    first.run.upload_file("after.txt", file)
    first.run.upload_file("ba1.pt", file, link=True)
    first.run.upload_file("latest.symlink", file)
    first.log(2)
    first.run.upload_file("ba2.pt", file, link=True)
    first.close()

    Session(folder, at_1, 1).run.close()

    assert [one.name for one in Opened.open(folder).artifacts()] == ["before.txt", "ba1.pt", "latest.symlink"]
    assert (folder / "artifacts" / "after.txt").read_text() == "content"


def test_branch_is_the_run_as_its_session_had_it(tmp_path):
    """Its rows, records and hyperparameters read like a run's, while and after the run is written."""
    folder = tmp_path / "mine"
    first = Session(folder, lr=0.1)
    first.run.log_metrics({"loss": 1.0}, step=1)
    at_1 = first.log(1)
    first.run.log_metrics({"loss": 2.0, "acc": 0.5}, step=2)
    first.log(2)
    first.close()
    second = Session(folder, at_1, 1, lr=0.2)
    second.run.log_metrics({"loss": 3.0}, step=2)
    second.run.flush()

    def look():
        run = Opened.open(folder)
        (branch,) = run.branches()
        assert branch.session == run.sessions[0]["session"]
        assert (branch.status, branch.alive) == ("completed", False)
        assert (branch.hyperparameters, run.hyperparameters) == ({"lr": 0.1}, {"lr": 0.2})
        assert branch.hparams == {"lr": 0.1}
        assert branch.metric_names() == ["loss", "acc"]
        assert branch.series("loss").value.tolist() == [1.0, 2.0]
        assert branch.summary["loss"].max == 2.0
        assert branch.record_counts()["texts"].count == 2
        assert [one.text for one in branch.texts()] == ["step 1", "step 2"]
        assert run.branch(2).series("loss").value.tolist() == run.series("loss").value.tolist() == [1.0, 3.0]
        assert run.branch(f"step2.{branch.session}").session == branch.session
        with pytest.raises(ValueError, match="a branch does not grow"):
            branch.follow()

    look()
    second.close()
    look()
    with pytest.raises(ValueError, match="session must be one of 1 "):
        Opened.open(folder).branch(3)


def test_folder_of_an_earlier_version_is_continued(tmp_path):
    """Its records name no session, so they belong to the run up to the step where training continues."""
    folder = tmp_path / "mine"
    first = Session(folder)
    first.log(1, 2, 3)
    first.close()
    sessions = read_sessions(folder)
    for path in folder.glob("*.jsonl"):
        lines = re.sub(r', "sum": \d+}', "}", path.read_text()).replace('"follows": null, ', "")
        for session in sessions:
            lines = lines.replace(f', "session": "{session["session"]}", "record"', ', "was"')
        path.write_text(lines)

    second = Session(folder, {"time": 0.0}, 2)
    second.log(2)
    second.close()

    assert steps_of(folder) == [1, 2]


def test_listing_branches_reads_no_hyperparameters(tmp_path, monkeypatch):
    """A run may have a thousand sessions, so a branch reads its hyperparameters on request."""
    folder = tmp_path / "mine"
    first = Session(folder, lr=0.1)
    at_2 = first.log(1, 2)
    first.log(3)
    first.close()
    for _ in range(3):
        later = Session(folder, at_2, 3, lr=0.2)
        later.log(3)
        later.close()
    run, read, original = Opened.open(folder), [], documents.read_hparams
    monkeypatch.setattr(documents, "read_hparams", lambda path: read.append(path) or original(path))

    branches = run.branches()

    assert [one.status for one in branches] == ["completed"] * 3
    assert read == []
    assert [one.hparams["lr"] for one in branches] == [0.1, 0.2, 0.2]


def test_a_branch_has_earlier_records_of_named_writers(tmp_path):
    """Named writers follow no trainer session: their records count for the newest session at that time."""
    folder = tmp_path / "mine"
    first = Session(folder)
    at_2 = first.log(1, 2)
    first.run.log_metrics({"loss": 3.0}, step=3)
    first.close()
    with Run(RunDirectory(folder, writer="eval"), run_name="mine") as run:
        run.log_metrics({"accuracy": 0.5}, step=3)
        run.log_text("half", "note", step=3)
    Session(folder, at_2, 3).close()
    with Run(RunDirectory(folder, writer="eval"), run_name="mine") as run:
        run.log_metrics({"accuracy": 0.75}, step=4)
        run.log_text("better", "note", step=4)

    opened = Opened.open(folder)
    (branch,) = opened.branches()

    assert opened.series("accuracy").value.tolist() == [0.5, 0.75]
    assert [one.text for one in opened.texts("note") if one.step in {3, 4}] == ["half", "better"]
    assert branch.writers == ["eval"]
    assert branch.series("accuracy").value.tolist() == [0.5]
    assert branch.series("loss").value.tolist() == [3.0]
    assert branch.metric_names() == ["loss", "accuracy"]
    assert branch.summary["accuracy"].last == 0.5
    notes = [one.text for one in branch.texts("note")]
    assert "half" in notes
    assert "better" not in notes
