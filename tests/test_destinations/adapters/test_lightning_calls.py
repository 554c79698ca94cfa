"""Users of other Lightning loggers call, configure and run twice; ours accepts the same."""

import logging
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from destinations import InMemory, RunDirectory
from destinations.adapters.lightning_logger import LightningEvents, LightningLogger
from destinations.runs import Run as ReadRun

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
]
DATA = torch.arange(8.0).reshape(4, 2)


class Tiny(pl.LightningModule):
    """A model of two batches per epoch that logs a loss in each."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(logger, folder, model=None, **options):
    """Trains one epoch."""
    if "callbacks" not in options:
        options["callbacks"] = [logger.callback()]
    trainer = pl.Trainer(
        logger=logger,
        default_root_dir=folder,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(model or Tiny(), torch.utils.data.DataLoader(DATA, batch_size=2))
    return trainer


def rows(folder):
    """Returns the lines of a run's metrics, without the header."""
    return (folder / "metrics.csv").read_text().splitlines()[1:]


def test_a_string_among_metrics_does_not_end_training(tmp_path):
    """It becomes a text; numbers beside it are metrics, other values are traces, nested names are joined."""

    class Noting(Tiny):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.logger.log_metrics({"note": "blue", "deep": {"a": 1}, "pair": [1, 2]}, step=batch_idx)

    memory = InMemory()

    fit(LightningLogger(memory, raise_errors=True), tmp_path, Noting(), enable_checkpointing=False)

    texts = [(one.name, one.value, one.step) for one in memory.records if one.kind == "text"]
    assert texts == [("note", "blue", 0), ("note", "blue", 1)]
    metrics = [one.value for one in memory.records if one.kind == "metrics"]
    assert [sorted(value) for value in metrics] == [["deep/a"], ["epoch", "loss"]] * 2
    assert [one.value for one in memory.records if one.kind == "traces"] == [{"pair": [1, 2]}] * 2


def test_hyperparameters_with_and_without_arguments():
    """None, a mapping, names, and metrics as for `TensorBoardLogger` are accepted."""
    memory = InMemory()
    logger = LightningLogger(memory, raise_errors=True)

    logger.log_hyperparams()
    logger.log_hyperparams({"lr": 0.1})
    logger.log_hyperparams(depth=3)
    logger.log_hyperparams({"width": 8}, {"hp_metric": 0.5}, 4)

    assert memory.hyperparameters == {"lr": 0.1, "depth": 3, "width": 8}
    assert [(one.value, one.step) for one in memory.records if one.kind == "metrics"] == [
        ({"hp_metric": 0.5}, 4)
    ]


def test_media_calls_of_the_wandb_logger():
    """Texts and tables, sounds of either layout, and images in a list or a batch arrive."""
    memory = InMemory()
    logger = LightningLogger(memory, raise_errors=True)

    logger.log_text("note", "fine", step=1)
    logger.log_text("answers", columns=["q", "a"], data=[["x", "y"]], step=1)
    logger.log_audio("tone", [np.zeros((100, 2), np.float32)], step=2, sample_rate=[8000], caption=["low"])
    logger.log_audio("tone", [torch.zeros(2, 100), np.zeros(50)], step=3)
    logger.log_image("view", [np.zeros((4, 4, 3))], step=4, caption=["a cat"])
    logger.log_image("views", np.zeros((2, 4, 4, 3), np.uint8), step=5)
    logger.log_table("t", columns=["a"], data=[[1]], step=6)

    kinds = [(one.kind, one.name, one.step) for one in memory.records if one.kind != "text"]
    assert kinds == [
        ("table", "answers", 1),
        ("audio", "tone", 2),
        ("audio", "tone", 3),
        ("audio", "tone", 3),
        ("images", "view", 4),
        ("images", "views", 5),
        ("table", "t", 6),
    ]
    sounds = [one.value for one in memory.records if one.kind == "audio"]
    assert [tuple(one["audio"].shape) for one in sounds] == [(2, 100), (2, 100), (50,)]
    assert [one["sample_rate"] for one in sounds] == [8000, 44_100, 44_100]
    assert ("text", "note", 1) in [(one.kind, one.name, one.step) for one in memory.records]


def test_a_watched_model_has_histograms(tmp_path):
    """Gradients and parameters are logged every second step, with the names of `wandb.watch`."""
    memory = InMemory()
    logger = LightningLogger(memory, raise_errors=True)
    model = Tiny()

    logger.watch(model, log="all", log_freq=2)
    fit(logger, tmp_path, model, enable_checkpointing=False, max_epochs=2)

    histograms = [(one.name, one.step) for one in memory.records if one.kind == "histogram"]
    names = ["layer.weight", "layer.bias"]
    once = [f"{kind}/{name}" for name in names for kind in ("gradients", "parameters")]
    assert histograms == [(name, step) for step in (0, 2) for name in once]


def test_a_watched_model_without_events_warns(tmp_path, caplog):
    """One warning says what to do."""
    logger = LightningLogger(InMemory(), raise_errors=True)
    model = Tiny()
    logger.watch(model)

    with caplog.at_level(logging.WARNING, "destinations"):
        fit(logger, tmp_path, model, enable_checkpointing=False, callbacks=[])

    (said,) = [line for line in caplog.messages if "watch()" in line]
    assert "Pass callbacks=[logger.callback()]" in said


@pytest.mark.parametrize(("log_model", "expected"), [("all", 3), (True, 1), (False, 0)])
def test_log_model_uploads_the_same_checkpoints_as_the_wandb_logger(tmp_path, log_model, expected):
    """Every checkpoint is uploaded when saved, the kept ones at the end, or none."""
    from destinations import Artifacts

    store = tmp_path / "store"
    logger = LightningLogger(Artifacts(str(store)), run_name="mine", log_model=log_model, raise_errors=True)

    fit(logger, tmp_path / "work", max_epochs=3)
    logger.close()

    uploaded = list(store.rglob("*.ckpt")) if store.exists() else []
    assert len(uploaded) == expected


def test_a_cell_that_runs_twice_keeps_the_second_run(tmp_path, sidecar, caplog):
    """A message says that the first run ends, and the second has its rows in its own folder."""
    folder = tmp_path / "run"
    for epochs in (1, 2):  # The names are reassigned, as in a notebook; nothing is closed.
        logger = LightningLogger(RunDirectory(folder))
        with caplog.at_level(logging.WARNING, "destinations"):
            fit(logger, tmp_path, max_epochs=epochs, enable_checkpointing=False)
    second = logger.save_dir
    logger.close()

    assert f"the run in {folder} was still open, and is closed (completed)" in caplog.text
    assert len(rows(Path(second))) == 4
    assert sidecar(second)["status"] == "completed"


def test_a_failed_cell_can_run_again(tmp_path, sidecar):
    """The next logger takes the folder of one whose `fit` never returned."""
    from destinations.adapters.session import Session
    from events import Timestamp

    interrupted = Session([RunDirectory(tmp_path / "run")])
    interrupted.fit_start(Timestamp())
    interrupted.logger.log_metrics({"loss": 1.0})

    with LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True) as logger:
        fit(logger, tmp_path, enable_checkpointing=False)

    assert not interrupted.is_open
    assert sidecar(logger.save_dir)["status"] == "completed"
    assert len(rows(Path(logger.save_dir))) == 2


def test_events_without_a_logger_use_the_trainers(tmp_path, listener):
    """If the trainer has no logger, an error says what to do."""
    logger = LightningLogger(callbacks=listener, raise_errors=True)

    fit(logger, tmp_path, callbacks=[LightningEvents()], enable_checkpointing=False)
    with pytest.raises(ValueError, match="second one"):
        LightningEvents(logger)
    trainer = pl.Trainer(logger=False, callbacks=[LightningEvents()], accelerator="cpu", max_epochs=1)
    with pytest.raises(ValueError, match="needs a LightningLogger"):
        trainer.fit(Tiny(), torch.utils.data.DataLoader(DATA, batch_size=2))

    assert listener.names.count("batch_end") == 2


CONFIGURATION = """
trainer:
  max_epochs: 1
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  log_every_n_steps: 1
  logger:
    class_path: destinations.adapters.lightning_logger.LightningLogger
    init_args:
      destinations:
        - class_path: destinations.RunDirectory
          init_args:
            run_dir: {folder}
            tags: [cli]
        - class_path: destinations.Console
          init_args:
            log_interval: 1ba
      callbacks:
        - class_path: events.SpeedMonitor
          init_args:
            window_size: 1
  callbacks:
    - class_path: destinations.adapters.lightning_logger.LightningEvents
"""


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(DATA, batch_size=2)


def test_destinations_and_callbacks_from_a_configuration_file(tmp_path, monkeypatch, sidecar):
    """`class_path` and `init_args` build ours, and the callback finds the logger of its trainer."""
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse[signatures]")
    from lightning.pytorch.cli import LightningCLI

    configuration = tmp_path / "config.yaml"
    configuration.write_text(CONFIGURATION.format(folder=tmp_path / "run"))

    # jsonargparse's warning about the way Lightning calls it.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", str(configuration)])

    cli = LightningCLI(
        Tiny,
        Data,
        save_config_callback=None,
        seed_everything_default=False,
    )
    cli.trainer.logger.close()

    written = sidecar(tmp_path / "run")
    assert (written["status"], "cli" in written["tags"]) == ("completed", True)
    header, *lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert "throughput/batches_per_sec" in header
    assert len(lines) >= 2


def test_the_experiment_accepts_summary_writer_calls(tmp_path):
    """A module written for TensorBoardLogger logs through it, with or without a step."""

    class Drawn(Tiny):
        def training_step(self, batch, batch_idx):
            writer = self.logger.experiment
            writer.add_scalar("norm", batch.norm(), self.global_step)
            writer.add_histogram("inputs", batch)
            assert writer.log_dir == writer.get_logdir() == self.logger.log_dir
            return super().training_step(batch, batch_idx)

    logger = LightningLogger(RunDirectory(tmp_path / "run"))
    fit(logger, tmp_path, Drawn())
    logger.experiment.add_hparams({"lr": 0.001}, {"hparam/loss": 0.5})
    logger.close()

    run = ReadRun.open(tmp_path / "run")
    want = [(step, DATA[2 * step : 2 * step + 2].norm().item()) for step in range(2)]
    assert list(zip(run.series("norm").step, run.series("norm").value, strict=True)) == want
    assert [found.step for found in run.records("histograms", "inputs")] == [0, 1]
    assert (run.hyperparameters["lr"], run.series("hparam/loss").value) == (0.001, [0.5])


def test_fabric_logs_to_it(tmp_path):
    """Fabric passes numbers on, and its programs use the experiment for everything else."""
    from lightning.fabric import Fabric

    logger = LightningLogger(InMemory(), RunDirectory(tmp_path / "run"))
    fabric = Fabric(accelerator="cpu", loggers=logger)

    fabric.log("loss", torch.tensor(0.5), step=3)
    fabric.logger.experiment.add_scalar("rate", 0.1, 3)
    logger.close()

    run = ReadRun.open(tmp_path / "run")
    points = {name: (run.series(name).step, run.series(name).value) for name in ("loss", "rate")}
    assert points == {"loss": ([3], [0.5]), "rate": ([3], [0.1])}


def test_a_named_writer_adds_to_a_run_in_training(tmp_path):
    """Both loggers are open at once; the second has the run's name and its own subfolder."""
    trained, evaluated = (
        LightningLogger(RunDirectory(tmp_path / "digits", writer=writer)) for writer in (None, "eval")
    )
    fit(trained, tmp_path)
    for step in (9, 4):
        evaluated.log_metrics({"val/acc": step / 10}, step=step)
    trained.log_metrics({"more": 1.0}, step=2)
    evaluated.finalize("success")
    for logger in (trained, evaluated):
        logger.close()

    run = ReadRun.open(tmp_path / "digits")
    assert Path(evaluated.log_dir) == tmp_path / "digits" / "writers" / "eval"
    assert (run.status, run.writer("eval").status) == ("completed", "completed")
    assert run.series("val/acc").step.tolist() == [4, 9]
    assert {"loss", "more", "val/acc"} <= {*run.metric_names()}


def test_the_experiment_accepts_wandb_calls(tmp_path):
    """Programs written for `WandbLogger` log and set hyperparameters unchanged."""
    with LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True) as logger:
        logger.log_metrics({"loss": 1.0}, step=3)
        logger.experiment.define_metric("extra", step_metric="loss")
        logger.experiment.log({"extra": 2.0, "word": "blue"})
        logger.experiment.config.update({"lr": 0.5})
        assert logger.experiment.dir == str(tmp_path / "run")

    series = ReadRun.open(tmp_path / "run").series("extra")
    assert (series.step.tolist(), series.value.tolist()) == ([3], [2.0])
    assert (tmp_path / "run" / "hparams.yaml").read_text() == "lr: 0.5\n"
