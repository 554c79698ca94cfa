"""Several processes write a run: each named writer has its own run folder in it."""

import json
import logging
import subprocess
import sys

import pytest

import events
from destinations import RunDirectory
from destinations.adapters.session import Session
from destinations.run_directory import read_rows, read_series
from events import Run
from tests.test_destinations.run_directory.conftest import steps_left


def sidecar(folder):
    """Returns the sidecar of a folder."""
    return json.loads((folder / "sidecar.json").read_text())


def loss(folder):
    """Returns the statistics of the loss in a folder."""
    return json.loads((folder / "summary.json").read_text())["metrics"]["loss"]


def test_a_writer_has_a_run_folder_inside_the_run(drive, tmp_path):
    """`writers/NAME` has its rows, documents and records; the run's own folder gets nothing."""
    eval_ = drive(writer="eval")

    eval_.log({"loss": 0.5}, 40)
    eval_.logger.log_text("good", "Notes", step=40)
    eval_.close()

    folder = tmp_path / "run" / "writers" / "eval"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["writers"]
    assert [(row.step, row.metrics) for row in read_rows(folder)] == [(40, {"loss": 0.5})]
    assert (folder / "texts.jsonl").is_file()
    assert (sidecar(folder)["writer"], sidecar(folder)["status"]) == ("eval", "completed")
    assert eval_.destination.writer == "eval"


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".eval", "a/b", "../eval", "a b", "ä", "{rank}", "a\0", "a\n", "a" * 101]
)
def test_a_writer_name_must_be_a_safe_path_component(tmp_path, name):
    """The message lists the allowed characters."""
    with pytest.raises(ValueError, match="writer must be a name of letters"):
        RunDirectory(tmp_path / "run", writer=name)
    assert not (tmp_path / "run").exists()


def test_a_non_text_writer_name_raises(tmp_path):
    """Like other arguments, it is checked at once."""
    with pytest.raises(TypeError, match='Write writer="eval"'):
        RunDirectory(tmp_path / "run", writer=3)


def test_a_completed_writer_is_continued(tmp_path, caplog):
    """An evaluation may start again and again: it creates no second folder and logs no message."""
    for step in (100, 200):
        with Run(RunDirectory(tmp_path / "run", writer="eval"), run_name="eval") as run:
            run.log_metrics({"loss": float(step)}, step=step)

    assert read_series(tmp_path / "run" / "writers" / "eval", "loss") == [(100, 100.0), (200, 200.0)]
    assert [path.name for path in (tmp_path / "run" / "writers").iterdir()] == ["eval"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def trainer_of(tmp_path, *, duration, **options):
    """Returns a Trainer of a small model, which saves in `tmp_path / "checkpoints"` every five batches."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.zeros(40, 2), torch.zeros(40, 1))
    model = torch.nn.Linear(2, 1)
    saver = events.CheckpointSaver(tmp_path / "checkpoints", save_interval="5ba", keep=10)
    return events.Trainer(
        model,
        torch.utils.data.DataLoader(data, batch_size=4),
        loss_fn=torch.nn.functional.mse_loss,
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        max_duration=duration,
        loggers=[RunDirectory(tmp_path / "run", writer="student")],
        callbacks=[saver],
        run_name="student",
        **options,
    )


def steps_of(folder):
    """Returns the steps of the losses of training."""
    return [row.step for row in read_rows(folder) if any("loss" in name for name in row.metrics)]


def test_a_trainer_that_continues_from_a_checkpoint_replaces_rows_of_its_own_writer(tmp_path):
    """Steps after the checkpoint are trained again, and are there once."""
    with trainer_of(tmp_path, duration="8ba") as trainer:
        trainer.fit()
    folder = tmp_path / "run" / "writers" / "student"
    before = steps_of(folder)

    checkpoint = next((tmp_path / "checkpoints").glob("*ba5*"))
    with trainer_of(tmp_path, duration="9ba", load_path=checkpoint) as trainer:
        trainer.fit()

    assert before == list(range(8))
    assert steps_of(folder) == list(range(9))
    assert [left[0] for left in steps_left(folder)] == [5]


def test_a_trainer_that_evaluates_a_checkpoint_abandons_nothing(tmp_path):
    """An earlier checkpoint is evaluated after a later one, and both evaluations stay."""
    torch = pytest.importorskip("torch")
    with trainer_of(tmp_path, duration="10ba") as trainer:
        trainer.fit()
    folder = tmp_path / "run" / "writers" / "student"
    before = read_rows(folder)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1)), batch_size=4
    )

    for name in ("ba10", "ba5"):
        checkpoint = next((tmp_path / "checkpoints").glob(f"*{name}*"))
        with trainer_of(tmp_path, duration="10ba", load_path=checkpoint) as trainer:
            trainer.eval(data)

    rows = read_rows(folder)
    assert rows[: len(before)] == before
    assert {row.step for row in rows[len(before) :]} == {10, 5}
    assert not (folder / "abandoned").exists()


SECOND = """
import sys
from destinations import RunDirectory
from destinations.run_directory import RunInUseError
from events import Run
try:
    Run(RunDirectory(sys.argv[1], writer="eval"), run_name="second", raise_errors=True).__enter__()
except RunInUseError as error:
    print(error)
"""


def test_a_second_process_of_the_same_name_is_refused(drive, tmp_path):
    """The message names the writer and the run."""
    drive(writer="eval")

    command = [sys.executable, "-c", SECOND, str(tmp_path / "run")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert said.startswith(f"writer 'eval' of run folder '{tmp_path / 'run'}' is in use: process ")
    assert "choose another name" in said


def test_the_last_value_of_a_writer_has_the_greatest_step(drive, tmp_path):
    """This holds in any order, across sessions, and if the statistics are computed again from all rows."""
    folder = tmp_path / "run" / "writers" / "eval"
    for steps in ((300, 500, 500, 400), (100, 200)):
        one = drive(writer="eval")
        for number, step in enumerate(steps):
            one.log({"loss": float(step + number)}, step)
        one.close()
    assert (loss(folder)["last"], loss(folder)["last_step"]) == (502.0, 500)

    (folder / "summary.json").unlink()
    one = drive(writer="eval")
    one.log({"loss": 0.0}, 50)
    one.close()

    assert (loss(folder)["last"], loss(folder)["last_step"], loss(folder)["count"]) == (502.0, 500, 7)
    assert sidecar(folder)["summary"] == {"loss": 502.0}


def test_a_session_of_another_trainer_is_called_as_the_run(tmp_path):
    """Its folder has the writer's name, because another session in this process may train the run."""
    session = Session([RunDirectory(tmp_path / "digits", writer="eval")])

    assert session.first_name == "digits"
    assert session.folder == tmp_path / "digits" / "writers" / "eval"
