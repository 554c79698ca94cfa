"""The core destinations in a real Trainer, and in a Run."""

import io

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from destinations import Artifacts, Console, InMemory, ProgressBar, RunDirectory, TensorBoard, TextFile
from destinations.runs import open_runs
from destinations.text.formatting import short
from events import Trainer


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Each test has its own working directory."""
    monkeypatch.chdir(tmp_path)


def trainer(loggers, **options):
    """Returns a trainer of a linear model on twelve random samples."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(0, 2, (12,))), batch_size=4)
    model = torch.nn.Linear(4, 2)
    return Trainer(
        model,
        data,
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        run_name="mine",
        loggers=loggers,
        **options,
    )


def test_all_core_destinations_show_the_same_run(tmp_path):
    """Console, bar, memory and file have the losses of the same three batches."""
    console, bar, memory = io.StringIO(), io.StringIO(), InMemory()
    loggers = [
        Console(stream=console, style="composer"),
        ProgressBar(stream=bar, line_seconds=1e9),
        memory,
        TextFile("log.txt"),
    ]

    with trainer(loggers, max_duration="1ep") as running:
        running.fit()

    losses = memory.get_timeseries("loss/train/total")["loss/train/total"].tolist()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(losses) == 3
    assert [line for line in lines if "loss/train/total" in line] == [
        f"[metric][batch={batch}]: loss/train/total: {loss!r}" for batch, loss in enumerate(losses)
    ]
    assert [line for line in console.getvalue().splitlines() if line.startswith("[")] == [
        f"[epoch=1/1][batch={batch}/3]:" for batch in (1, 2, 3)
    ]
    assert f"loss/train/total  best {short(min(losses))} at step" in bar.getvalue()
    assert bar.getvalue().startswith("Epoch 1/1: 100% 3/3 [")
    assert bar.getvalue().count("batch/s") == 1


def test_a_run_that_continues_from_a_checkpoint_appends_to_its_file(tmp_path):
    """The file of a resumed run has each batch of both sessions once.

    A third run that starts anew doesn't change it.
    """
    with trainer([TextFile("log.txt")], max_duration="1ep", save_folder="saved") as running:
        running.fit()
    latest = next(path for path in sorted(tmp_path.glob("saved/**/*")) if "latest" in path.name)

    with trainer([TextFile("log.txt")], max_duration="2ep", load_path=str(latest)) as running:
        running.fit()
    both = (tmp_path / "log.txt").read_text()
    with trainer([TextFile("log.txt")], max_duration="1ep") as running:
        running.fit()
        counts = running.logger.faults.counts

    batches = [line for line in both.splitlines() if "loss/train/total" in line]
    assert [line.split("]")[1] for line in batches] == [f"[batch={batch}" for batch in range(6)]
    assert (tmp_path / "log.txt").read_text() == both
    assert counts == {("TextFile", "after_load", "FileExistsError"): 1}


def test_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """Readers and writers expand it; none creates a "~" in the working directory."""
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    loggers = [
        RunDirectory("~/runs/{run_name}"),
        TextFile("~/log.txt"),
        TensorBoard("~/boards"),
        Artifacts("~/store", spool="~/spool", wait="uploaded"),
    ]

    first = trainer(loggers, max_duration="1ep", save_folder="~/checkpoints", raise_errors=True)
    first.fit()
    first.close()
    second = trainer([], max_duration="2ep", load_path="~/checkpoints/ep1-ba3.pt")
    second.fit()
    second.close()

    assert list(here.iterdir()) == []
    assert {path.name for path in home.iterdir()} == {
        *("boards", "checkpoints", "log.txt", "runs", "spool", "store")
    }
    with open_runs("~/runs") as runs:
        assert runs["mine"].status == "completed"
