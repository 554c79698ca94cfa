"""Our logger and callback in real Lightning trainers, of both packages."""

import contextlib
import importlib
import json
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from destinations import Artifacts, InMemory, LoggerDestination, RunDirectory
from destinations.adapters.lightning_logger import LightningEvents, LightningLogger, RegistryLogger
from destinations.run_directory import read_rows
from destinations.runs.content.sources import branches_of
from destinations.testing import RecordingDestination
from events import Event

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    # Lightning's warnings about tiny runs: few workers, few batches, an existing folder; and about newer
    # releases of torch.
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
]
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
DATA = torch.arange(8.0).reshape(4, 2)


def make_model(package, **hooks):
    """Returns a model of a package that logs in each step; further hooks are given by name."""
    pl = importlib.import_module(package)

    class Tiny(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.save_hyperparameters({"lr": 0.1, "optim": {"name": "sgd"}})

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val", self.layer(batch).mean())

        def test_step(self, batch, batch_idx):
            self.log("test", self.layer(batch).mean())

        def predict_step(self, batch, batch_idx):
            return self.layer(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.001)

    for name, hook in hooks.items():
        setattr(Tiny, name, hook)
    return Tiny()


def loader():
    """Returns two batches of two."""
    return torch.utils.data.DataLoader(DATA, batch_size=2)


def make_trainer(package, logger, folder, **options):
    """Returns a small, silent trainer, by default with the logger's callback."""
    pl = importlib.import_module(package)
    if isinstance(logger, LightningLogger):
        options.setdefault("callbacks", [logger.callback()])
    return pl.Trainer(
        logger=logger,
        default_root_dir=folder,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **options},
    )


@pytest.fixture(params=PACKAGES)
def package(request):
    """Returns the name of each package."""
    return request.param


@pytest.fixture
def interrupts():
    """Restores Ctrl-C for the tests: Lightning ignores it after the first one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


TRAINING = [
    ("before_forward", 0),
    ("after_loss", 0),
    ("before_backward", 0),
    ("after_backward", 0),
    ("after_train_batch", 0),
    ("batch_end", 1),
]
EVALUATION = [
    "eval_start",
    *["eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"] * 2,
    "eval_end",
]
PREDICTION = [
    "predict_start",
    *["predict_batch_start", "predict_before_forward", "predict_after_forward", "predict_batch_end"] * 2,
    "predict_end",
]


def test_fit_validate_test_and_predict(package, tmp_path, listener, sidecar, documented):
    """Events have their batches and epochs, records have Lightning's steps, and the run has the files."""
    memory = InMemory()
    logger = LightningLogger(RunDirectory(tmp_path / "run"), memory, callbacks=listener, raise_errors=True)
    trainer = make_trainer(package, logger, tmp_path, num_sanity_val_steps=2)
    model = make_model(package)

    trainer.fit(model, loader(), loader())
    after_fit = list(listener.heard)
    listener.heard.clear()
    trainer.test(model, loader(), verbose=False)
    trainer.predict(model, loader())
    log_dir, checkpoint = trainer.log_dir, Path(trainer.checkpoint_callback.best_model_path)
    logger.close()

    first = [("batch_start", 0), ("before_train_batch", 0), *TRAINING]
    assert after_fit == [
        *[(name, 0, 0) for name in ("init", "before_load", "after_load", "fit_start", "epoch_start")],
        *[(name, batch, 0) for name, batch in first],
        ("batch_checkpoint", 1, 0),
        *[(name, batch + 1, 0) for name, batch in first],
        *[(name, 2, 0) for name in ("eval_before_all", *EVALUATION, "eval_after_all", "batch_checkpoint")],
        *[(name, 2, 1) for name in ("epoch_end", "epoch_checkpoint", "fit_end")],
    ]
    assert listener.names == ["eval_standalone_start", *EVALUATION, "eval_standalone_end", *PREDICTION]
    assert {name for name, *_ in after_fit} | set(listener.names) == documented("Lightning")
    assert listener.labels == [("eval", 2, "eval"), ("test", 2, "eval")]
    metrics = [record for record in memory.records if record.kind == "metrics"]
    assert [(record.step, sorted(record.value), record.value["epoch"]) for record in metrics[:3]] == [
        (0, ["epoch", "loss"], 0),
        (1, ["epoch", "loss"], 0),
        (1, ["epoch", "val"], 0),
    ]
    assert [(record.step, "test" in record.value) for record in metrics[3:]] == [(2, True)]
    assert memory.hyperparameters == {"lr": 0.1, "optim": {"name": "sgd"}}
    assert log_dir == str(tmp_path / "run")
    assert checkpoint.parent == tmp_path / "run" / "checkpoints"
    assert checkpoint.is_file()
    written = sidecar(tmp_path / "run")
    assert (written["status"], written["checkpoint_path"]) == ("completed", str(checkpoint))
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0] == "step,epoch,time,loss,val,test"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_logger_and_callback_belong_to_both_packages(package):
    """`isinstance` and command lines accept them in either package."""
    logger = LightningLogger()

    assert isinstance(logger, importlib.import_module(f"{package}.loggers").Logger)
    assert isinstance(logger.callback(), importlib.import_module(f"{package}.callbacks").Callback)
    assert isinstance(logger.callback(), LightningEvents)
    assert logger.callback() is logger.callback()


ENDINGS = {
    "exception": (ValueError("diverged"), "failed", "ValueError: diverged"),
    "ctrl-c": (KeyboardInterrupt(), "interrupted", None),
    "exit": (SystemExit(0), "failed", "SystemExit: 0"),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("has_callback", [True, False])
@pytest.mark.usefixtures("interrupts")
def test_the_end_of_a_run_determines_its_status(tmp_path, sidecar, ending, has_callback):
    """An exception, Ctrl-C and `sys.exit` in a hook differ; rows are kept, with and without our callback."""
    error, status, text = ENDINGS[ending]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            raise error

    logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    options = {} if has_callback else {"callbacks": []}
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, enable_checkpointing=False, **options)

    with pytest.raises((type(error), SystemExit)):
        trainer.fit(make_model("lightning.pytorch", on_train_batch_end=on_train_batch_end), loader())

    written = sidecar(tmp_path / "run")
    assert (written["status"], written["exception"]) == (status, text)
    assert written["ended_at"] is not None
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 2


def test_sigterm_is_a_preemption(tmp_path, sidecar):
    """Lightning turns SIGTERM into an exit without a code, which doesn't count as completed."""

    def on_train_batch_start(self, batch, batch_idx):
        signal.raise_signal(signal.SIGTERM)

    logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    trainer = make_trainer("lightning.pytorch", logger, tmp_path)
    model = make_model("lightning.pytorch", on_train_batch_start=on_train_batch_start)

    with pytest.raises(SystemExit):
        trainer.fit(model, loader())

    assert sidecar(tmp_path / "run")["status"] == "preempted"


@pytest.mark.parametrize("has_callback", [True, False])
def test_the_files_show_the_status_of_an_open_run(tmp_path, sidecar, has_callback):
    """The status is completed after fit, running during a test, and then completed before and after close."""
    seen = []

    def look(expected):
        deadline = time.monotonic() + 60
        while (written := sidecar(tmp_path / "run"))["status"] != expected and time.monotonic() < deadline:
            logger.experiment.flush()  # Waits a few seconds, which a busy disk may exceed.
        session = json.loads((tmp_path / "run" / "sessions.jsonl").read_text())
        seen.append((written["status"], written["ended_at"] is not None, session["status"]))

    logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    options = {} if has_callback else {"callbacks": []}
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, enable_checkpointing=False, **options)
    model = make_model(
        "lightning.pytorch",
        on_train_epoch_end=lambda _: look("running"),
        on_test_epoch_start=lambda _: look("running"),
    )

    trainer.fit(model, loader())
    look("completed")
    trainer.test(model, loader(), verbose=False)
    look("completed")
    logger.close()
    last = sidecar(tmp_path / "run")

    running, completed = ("running", False, "running"), ("completed", True, "completed")
    assert seen == [running, completed, running, completed]
    assert (last["status"], last["exception"]) == ("completed", None)
    assert last["ended_at"] is not None


@pytest.mark.parametrize("ends", ["killed", "completes"])
def test_a_slurm_requeue_is_a_preemption_unless_the_run_completes(tmp_path, sidecar, ends):
    """Training continues after the signal, which comes before the checkpoint, until it's killed or done."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:
            # Lightning's handler of SLURM's signal does this.
            self.trainer.logger.finalize("finished")
        elif ends == "killed":
            raise RuntimeError("DataLoader worker is killed by signal")

    logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    trainer = make_trainer("lightning.pytorch", logger, tmp_path)
    model = make_model("lightning.pytorch", on_train_batch_start=on_train_batch_start)

    if ends == "killed":
        with pytest.raises(RuntimeError):
            trainer.fit(model, loader())
    else:
        trainer.fit(model, loader())
    logger.close()

    expected = {"killed": "preempted", "completes": "completed"}[ends]
    assert sidecar(tmp_path / "run")["status"] == expected


def test_a_failed_run_may_continue(tmp_path, sidecar):
    """A trainer that fits again after a failure reopens the folder and completes the run."""
    failures = [RuntimeError("once")]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if failures:
            raise failures.pop()

    logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    model = make_model("lightning.pytorch", on_train_batch_end=on_train_batch_end)
    trainer = make_trainer("lightning.pytorch", logger, tmp_path)
    with pytest.raises(RuntimeError):
        trainer.fit(model, loader())
    assert sidecar(tmp_path / "run")["status"] == "failed"

    trainer.fit(model, loader())
    logger.close()

    assert sidecar(tmp_path / "run")["status"] == "completed"
    assert len((tmp_path / "run" / "sessions.jsonl").read_text().splitlines()) == 2


def test_two_loggers_get_the_same_values(tmp_path):
    """Ours gets the same values beside another of ours or Lightning's, and keeps the dictionary unchanged."""
    pl = importlib.import_module("lightning.pytorch")
    seen = []

    class Keeping(pl.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            seen.append((dict(metrics), step))
            super().log_metrics(metrics, step)

    class Greedy(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            raise OSError("disk full")

    first, second = InMemory(), InMemory()
    loggers = [LightningLogger(Greedy(), first), LightningLogger(second), Keeping(tmp_path)]
    trainer = make_trainer(
        "lightning.pytorch", loggers, tmp_path, callbacks=[one.callback() for one in loggers[:2]]
    )

    trainer.fit(make_model("lightning.pytorch"), loader(), loader())

    rows = [
        [(record.value, record.step) for record in memory.records if record.kind == "metrics"]
        for memory in (first, second)
    ]
    assert rows[0] == rows[1] == seen
    assert len(seen) == 3


def test_accumulated_batches_are_one_batch(tmp_path, listener):
    """Two Lightning batches are microbatches of one step: one BATCH_END, with the logger's steps."""
    memory = InMemory()
    logger = LightningLogger(memory, callbacks=listener, raise_errors=True)
    trainer = make_trainer(
        "lightning.pytorch", logger, tmp_path, accumulate_grad_batches=2, max_epochs=2, barebones=False
    )

    trainer.fit(make_model("lightning.pytorch"), loader())

    in_training = [one for one in listener.heard if "forward" in one[0] or one[0].endswith("_batch")]
    assert [one for one in listener.heard if one[0] == "batch_end"] == [
        ("batch_end", 1, 0),
        ("batch_end", 2, 1),
    ]
    assert [name for name, *_ in in_training].count("before_forward") == 4
    assert [name for name, *_ in in_training].count("after_train_batch") == 2
    assert memory.records[-1].timestamp.sample.value == 8
    assert {record.step for record in memory.records if record.kind == "metrics"} == {0, 1}


def test_several_validation_dataloaders_have_labels(tmp_path, listener):
    """Each dataloader has its start and end."""
    logger = LightningLogger(callbacks=listener, raise_errors=True)

    make_trainer("lightning.pytorch", logger, tmp_path, enable_checkpointing=False).validate(
        make_model("lightning.pytorch"), [loader(), loader()], verbose=False
    )

    assert listener.names == [
        "init",
        "eval_standalone_start",
        *EVALUATION,
        *EVALUATION,
        "eval_standalone_end",
    ]
    assert [label for label, *_ in listener.labels] == ["eval", "eval/dataloader_idx_1"]


def test_resume_from_a_checkpoint_continues_its_position(tmp_path, listener):
    """Timestamp and epoch continue from the checkpoint; later rows leave the CSV, earlier ones stay."""
    folder = tmp_path / "run"
    model = make_model("lightning.pytorch")
    with LightningLogger(RunDirectory(folder), raise_errors=True) as logger:
        trainer = make_trainer("lightning.pytorch", logger, tmp_path, max_epochs=1)
        trainer.fit(model, loader(), loader())
        checkpoint = trainer.checkpoint_callback.best_model_path
        # This branch of training is abandoned: its rows belong to no run any more.
        make_trainer("lightning.pytorch", logger, tmp_path, max_epochs=2, enable_checkpointing=False).fit(
            model, loader(), loader(), ckpt_path=checkpoint
        )

    with LightningLogger(RunDirectory(folder), callbacks=listener, raise_errors=True) as logger:
        trainer = make_trainer("lightning.pytorch", logger, tmp_path, max_epochs=2)
        trainer.fit(model, loader(), loader(), ckpt_path=checkpoint)

    assert ("fit_start", 2, 1) in listener.heard
    assert ("epoch_start", 2, 1) in listener.heard
    assert listener.heard[-1] == ("fit_end", 4, 2)
    rows = [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    assert rows == ["0", "1", "1", "2", "3", "3"]
    (left,) = branches_of(folder)
    assert [row.step for file in left.files() for row in file.rows()] == [2, 3, 3]


def test_a_checkpoint_without_our_callback_is_resumed(tmp_path, listener):
    """A checkpoint written with another logger still has Lightning's position."""
    model = make_model("lightning.pytorch")
    trainer = make_trainer("lightning.pytorch", logger=False, folder=tmp_path, max_epochs=1)
    trainer.fit(model, loader())
    checkpoint = tmp_path / "other.ckpt"
    trainer.save_checkpoint(checkpoint)
    logger = LightningLogger(callbacks=listener, raise_errors=True)

    make_trainer("lightning.pytorch", logger, tmp_path, max_epochs=2).fit(
        model, loader(), ckpt_path=checkpoint
    )

    assert ("fit_start", 2, 1) in listener.heard
    assert listener.heard[-1] == ("fit_end", 4, 2)


def test_records_advance_a_run_without_the_callback(tmp_path, listener):
    """INIT, FIT_START and FIT_END are fired; batches and epochs follow the largest logged step."""
    memory = InMemory()
    logger = LightningLogger(memory, callbacks=listener, raise_errors=True)
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, callbacks=[], max_epochs=2)

    trainer.fit(make_model("lightning.pytorch"), loader())
    logger.close()

    assert listener.names == ["init", "before_load", "after_load", "fit_start", "fit_end"]
    assert [record.step for record in memory.records if record.kind == "metrics"] == [0, 1, 2, 3]
    assert (int(memory.records[-1].timestamp.batch), int(memory.records[-1].timestamp.epoch)) == (2, 1)


def test_save_does_nothing_while_a_trainer_runs(tmp_path):
    """Lightning calls it after each record, so it calls no destination. Before and after, it flushes."""
    destination = RecordingDestination()
    logger = LightningLogger(destination, raise_errors=True)
    logger.log_metrics(metrics={"loss": 1.0}, step=0)
    logger.save()
    model = make_model("lightning.pytorch", on_train_end=lambda _: flushes.append(count()))

    def count():
        return sum(call.method == "flush" for call in destination.calls)

    flushes = [count()]
    make_trainer("lightning.pytorch", logger, tmp_path, callbacks=[], max_epochs=3).fit(model, loader())
    flushes.append(count())
    logger.save()

    assert flushes == [1, 1, 2]
    assert count() == 3


@pytest.mark.parametrize("has_callback", [True, False])
def test_rows_before_the_first_logged_batch_are_kept(tmp_path, has_callback):
    """A module may log in `on_fit_start` and in each step; a new run and a restarted one keep those rows."""
    value = 0.0

    def on_fit_start(self):
        self.logger.experiment.add_scalar("begins", value, 0)

    def on_train_batch_start(self, batch, batch_idx):
        self.logger.experiment.add_scalar("mine", value, self.global_step)
        if value == 0.0 and self.global_step == 3:
            raise RuntimeError("once")

    def fit():
        logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
        options = {"max_epochs": 2} if has_callback else {"max_epochs": 2, "callbacks": []}
        model = make_model(
            "lightning.pytorch", on_fit_start=on_fit_start, on_train_batch_start=on_train_batch_start
        )
        with contextlib.closing(logger):
            make_trainer("lightning.pytorch", logger, tmp_path, **options).fit(model, loader())

    def rows_of(folder, name):
        rows = read_rows(tmp_path / folder)
        return [(row.step, row.metrics[name]) for row in rows if name in row.metrics]

    with pytest.raises(RuntimeError, match="once"):
        fit()
    value = 1.0
    fit()

    for folder, expected in (("run", 0.0), ("run-2", 1.0)):
        assert rows_of(folder, "begins") == [(0, expected)]
        assert rows_of(folder, "mine") == [(step, expected) for step in range(4)]


def test_a_fit_starts_at_its_trainers_position(tmp_path):
    """Without a callback, a first record with custom steps keeps the rows before the checkpoint."""

    def on_train_epoch_start(self):
        self.logger.experiment.add_scalar("by_epoch", 0.5, self.current_epoch)

    def fit(**options):
        with contextlib.closing(LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)) as logger:
            trainer = make_trainer("lightning.pytorch", logger, tmp_path, callbacks=[], **options)
            model = make_model("lightning.pytorch", on_train_epoch_start=on_train_epoch_start)
            trainer.fit(model, loader(), ckpt_path=checkpoint)
            logger.log_metrics({"loss": 9.0}, step=5)
            (tmp_path / "run" / "sidecar.json").write_text("{}")  # It didn't complete.
            return trainer.checkpoint_callback.best_model_path

    checkpoint = None
    checkpoint = fit(max_epochs=2)
    fit(max_epochs=3)

    rows = read_rows(tmp_path / "run")
    assert [row.step for row in rows if "loss" in row.metrics] == [0, 1, 2, 3, 4, 5, 5]
    assert [row.step for row in rows if "by_epoch" in row.metrics] == [0, 1, 2]


def test_a_second_fit_keeps_its_first_records(tmp_path):
    """A restarted fit with the same logger is a run beside the first, with everything it logs."""
    logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    for value in (1.0, 2.0):
        model = make_model(
            "lightning.pytorch",
            on_fit_start=lambda self, value=value: self.logger.experiment.add_scalar("begins", value, 0),
        )
        make_trainer("lightning.pytorch", logger, tmp_path, max_epochs=1).fit(model, loader())
    logger.close()

    for folder, value in (("run", 1.0), ("run-2", 2.0)):
        rows = read_rows(tmp_path / folder)
        assert [(row.step, row.metrics["begins"]) for row in rows if "begins" in row.metrics] == [(0, value)]
        assert [row.step for row in rows if "loss" in row.metrics] == [0, 1]


def test_a_continued_fit_keeps_all_rows(tmp_path):
    """A trainer that continues to fit, without a callback, moves no row aside."""
    logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, callbacks=[])
    model = make_model("lightning.pytorch")

    for _ in range(3):
        trainer.fit(model, loader(), loader())
        trainer.fit_loop.max_epochs += 1
    logger.close()

    rows = read_rows(tmp_path / "run")
    assert [row.step for row in rows if "loss" in row.metrics] == [0, 1, 2, 3, 4, 5]
    assert sum("val" in row.metrics for row in rows) == 3
    assert not (tmp_path / "run" / "abandoned").exists()


def test_a_fit_that_resumes_after_a_test_keeps_earlier_rows(tmp_path):
    """Without a callback, an earlier program has tested the model and logged a row of step 0."""

    def begin(**options):
        logger = LightningLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
        return logger, make_trainer("lightning.pytorch", logger, tmp_path, callbacks=[], **options)

    logger, trainer = begin(max_epochs=2)
    trainer.fit(make_model("lightning.pytorch"), loader())
    checkpoint = trainer.checkpoint_callback.best_model_path
    logger.log_metrics({"loss": 9.0}, step=5)
    logger.close()

    logger, trainer = begin(max_epochs=3)
    trainer.test(make_model("lightning.pytorch"), loader(), verbose=False)
    trainer.fit(make_model("lightning.pytorch"), loader(), ckpt_path=checkpoint)
    logger.close()

    rows = read_rows(tmp_path / "run")
    assert [row.step for row in rows if "loss" in row.metrics] == [0, 1, 2, 3, 4, 5]
    assert 9.0 not in [row.metrics.get("loss") for row in rows]


def test_the_sidecar_names_the_best_checkpoint_during_training(tmp_path, sidecar):
    """RegistryLogger without a callback: if the program is killed, the name is already there."""
    seen = []

    def on_train_epoch_start(self):
        logger.experiment.flush()
        seen.append(sidecar(tmp_path / "run")["checkpoint_path"])

    def training_step(self, batch, batch_idx):
        self.log("score", float(self.current_epoch))
        return self.layer(batch).mean()

    logger = RegistryLogger(tmp_path / "run", "abc123")
    best = ModelCheckpoint(monitor="score", mode="min", save_top_k=2, filename="{epoch}")
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, callbacks=[best], max_epochs=3)

    trainer.fit(
        make_model(
            "lightning.pytorch", on_train_epoch_start=on_train_epoch_start, training_step=training_step
        ),
        loader(),
    )
    logger.close()

    first = str(tmp_path / "run" / "checkpoints" / "epoch=0.ckpt")
    assert seen == [None, first, first]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["failed"], "failed"),
        (["diverged"], "diverged"),
        (["finished"], "finished"),
        (["success"], "completed"),
    ],
)
def test_finalize_sets_the_status(tmp_path, sidecar, words, kept):
    """RegistryLogger translates Lightning's words as stable-pretraining does, and keeps others."""
    logger = RegistryLogger(tmp_path / "run", "abc123")
    logger.log_metrics({"loss": 1.0}, step=0)

    for word in words:
        logger.finalize(word)
    logger.save()

    written = sidecar(tmp_path / "run")
    assert (written["status"], written["summary"]) == (kept, {"loss": 1.0})
    logger.close()


def test_images_videos_and_tables_in_the_shapes_that_callbacks_use(tmp_path):
    """Lists with captions, masks and rates are accepted, as by W&B's logger and stable-pretraining's."""
    memory = InMemory()
    logger = LightningLogger(memory, raise_errors=True)
    last, first = np.zeros((4, 6, 3), np.uint8), torch.zeros(3, 4, 6)
    masks = [{"truth": {"mask_data": np.ones((4, 6), int), "class_labels": {1: "cat"}}}] * 2
    frames = np.zeros((2, 5, 3, 8, 8), np.uint8)

    logger.log_image("a/b", [last, first], step=3, caption=["one", "two"], masks=masks, boxes=[1, 2])
    logger.log_image(key="one", images=first)
    logger.log_video("clip", [frames[0], b"\x00mp4"], step=4, caption=["x"], fps=[8, None], format="mp4")
    logger.log_video("batch", frames, step=5)
    logger.log_table("t", columns=["x", "y"], data=[[1, "z"]], step=6)
    logger.close()

    images, one, clip, clip_bytes, *batch, table = memory.records
    assert [tuple(image.shape) for image in images.value["images"]] == [(3, 4, 6), (3, 4, 6)]
    assert (images.name, images.step, images.value["mask_class_labels"]) == ("a/b", 3, {1: "cat"})
    assert [mask.shape for mask in images.value["masks"]["truth"]] == [(4, 6), (4, 6)]
    assert images.value["captions"] == ["one", "two"]
    assert (one.name, one.step) == ("one", 3)
    assert (clip.name, clip.value["video"].shape, clip.value["fps"]) == ("clip", (5, 3, 8, 8), 8)
    assert (clip_bytes.value["video"], clip_bytes.value["fps"]) == (b"\x00mp4", None)
    assert (clip.value["caption"], "caption" in clip_bytes.value) == ("x", False)
    assert [(video.step, video.value["fps"]) for video in batch] == [(5, 4), (5, 4)]
    assert (table.name, table.step, table.value.rows) == ("t", 6, [[1, "z"]])


def test_a_table_from_a_data_frame():
    """The table has the columns and rows of the frame."""
    pandas = pytest.importorskip("pandas")
    destination = RecordingDestination()

    LightningLogger(destination, raise_errors=True).log_table("t", dataframe=pandas.DataFrame({"x": [1, 2]}))

    (call,) = destination.of("log_table")
    assert (call.arguments["columns"], call.arguments["rows"]) == (["x"], [[1], [2]])


def test_checkpoints_keep_their_paths_below_the_callbacks_folder(tmp_path):
    """A metric with a slash makes a folder per epoch, so that the files in them have equal names."""
    logger = LightningLogger(RunDirectory(tmp_path / "run"), upload_checkpoints=True, raise_errors=True)
    saver = ModelCheckpoint(filename="{epoch}-{val/acc:.2f}", monitor="epoch", mode="max", save_top_k=-1)
    options = {"max_epochs": 2, "callbacks": [logger.callback(), saver]}

    make_trainer("lightning.pytorch", logger, tmp_path, **options).fit(
        make_model("lightning.pytorch"), loader()
    )
    logger.close()

    names = ["epoch=0-val/acc=0.00.ckpt", "epoch=1-val/acc=0.00.ckpt"]
    assert files_below(tmp_path / "run/checkpoints") == names
    assert files_below(tmp_path / "run/artifacts/checkpoints") == names


def files_below(folder):
    """Returns the paths of all files below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_checkpoints_of_several_callbacks_keep_their_folders(tmp_path):
    """Files with equal names stay apart; a checkpoint that Lightning deleted goes with the next one."""
    logger = LightningLogger(RunDirectory(tmp_path / "run"), upload_checkpoints=True, raise_errors=True)
    savers = [
        ModelCheckpoint(tmp_path / folder, "{epoch}", monitor="epoch", mode=mode, save_last="link")
        for folder, mode in (("best", "min"), ("periodic", "max"))
    ]
    options = {"max_epochs": 2, "callbacks": [logger.callback(), *savers]}

    make_trainer("lightning.pytorch", logger, tmp_path, **options).fit(
        make_model("lightning.pytorch"), loader()
    )
    logger.close()

    assert files_below(tmp_path / "run/artifacts/checkpoints") == [
        "best/epoch=0.ckpt",
        "best/last.ckpt.symlink",
        "periodic/epoch=0.ckpt",
        "periodic/epoch=1.ckpt",
        "periodic/last.ckpt.symlink",
    ]


def test_local_checkpoints_of_a_run_in_a_store_are_reported(tmp_path, caplog):
    """The run goes to its store, but Lightning's files stay local; one message says so."""
    logger = LightningLogger(RunDirectory(f"file://{tmp_path}/bucket/mine"), raise_errors=True)
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, max_epochs=2)

    trainer.fit(make_model("lightning.pytorch"), loader())
    logger.close()

    (line,) = [one.getMessage() for one in caplog.records if "checkpoints stay" in one.getMessage()]
    assert trainer.checkpoint_callback.dirpath in line


def test_an_open_logger_and_callback_can_be_pickled(tmp_path):
    """`ddp_spawn` pickles them: the copy is closed, knows the run's position and opens on use."""
    logger = LightningLogger(RunDirectory(tmp_path / "run"), run_name="mine", raise_errors=True)
    logger.callback()
    logger.log_metrics({"a": 1.0}, 7)

    data = pickle.dumps((logger, logger.callback()))
    logger.close()
    copy, callback = pickle.loads(data)  # noqa: S301  # made in the line above
    copy.log_metrics({"a": 2.0}, 8)
    copy.close()

    assert copy.run_name == "mine"
    assert copy.callback() is callback
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["7", "8"]


def test_registry_logger_accepts_the_original_arguments(tmp_path, sidecar):
    """A user changes only the import: id, tags and notes are kept, and checkpoints are beside them."""
    logger = RegistryLogger(
        tmp_path / "run", "abc123", tags=["vit"], notes="first", flush_logs_every_n_steps=10
    )
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, callbacks=None)

    trainer.fit(make_model("lightning.pytorch"), loader())
    logger.log_image("view", [np.zeros((4, 4, 3), np.uint8)], step=1, caption=["c"])
    logger.close()

    written = sidecar(tmp_path / "run")
    assert (logger.run_id, logger.run_dir) == ("abc123", tmp_path / "run")
    assert (written["run_id"], written["tags"], written["notes"]) == ("abc123", ["vit"], "first")
    assert written["status"] == "completed"
    assert written["checkpoint_path"].startswith(str(tmp_path / "run" / "checkpoints"))
    assert (tmp_path / "run" / "media" / "view").is_dir()


@pytest.mark.parametrize("calls", [["finalize"], ["save", "finalize"]])
def test_a_job_without_records_is_in_the_registry(tmp_path, sidecar, calls):
    """Its documents exist, with its status; a second call changes nothing."""
    logger = RegistryLogger(tmp_path / "run", "abc123")
    for call in [*calls, "finalize"]:
        logger.save() if call == "save" else logger.finalize("failed")

    assert (sidecar(tmp_path / "run")["status"], sidecar(tmp_path / "run")["run_id"]) == ("failed", "abc123")


@pytest.mark.parametrize("epoch", [3, torch.tensor(3)])
def test_the_summary_has_the_epoch_that_was_logged(tmp_path, epoch):
    """It may be a tensor, and stays if later metrics have none."""
    logger = RegistryLogger(tmp_path / "run", "abc123")
    logger.log_metrics({"loss": 1.0, "epoch": epoch}, step=0)
    logger.save()
    assert json.loads((tmp_path / "run/summary.json").read_text())["epoch"] == 3
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.close()

    assert json.loads((tmp_path / "run/summary.json").read_text())["epoch"] == 3


def test_images_may_have_fewer_captions(tmp_path):
    """The first images get the captions, as in stable-pretraining's logger."""
    memory = InMemory()
    with LightningLogger(memory, run_name="mine", raise_errors=True) as logger:
        logger.log_image("view", [np.zeros((2, 2, 3), np.uint8)] * 3, caption=["a cat"])

    (images,) = memory.records
    assert images.value["captions"] == ["a cat", "", ""]


def test_without_a_folder_lightning_chooses_the_checkpoint_folder(tmp_path):
    """We don't invent a path."""
    logger = LightningLogger(InMemory(), raise_errors=True)
    trainer = make_trainer("lightning.pytorch", logger, tmp_path)

    trainer.fit(make_model("lightning.pytorch"), loader())

    assert (logger.save_dir, trainer.log_dir) == (None, None)
    assert Path(trainer.checkpoint_callback.best_model_path).parent == tmp_path / "checkpoints"


def test_an_exception_in_our_callback_ends_the_run(tmp_path, raising, sidecar):
    """Training stops with the callback's error, and the run has failed."""
    logger = LightningLogger(
        RunDirectory(tmp_path / "run"), callbacks=raising(Event.BATCH_END, RuntimeError("no"))
    )
    trainer = make_trainer("lightning.pytorch", logger, tmp_path)

    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(make_model("lightning.pytorch"), loader())

    assert sidecar(tmp_path / "run")["exception"] == "RuntimeError: no"


def test_two_ranks_write_once(tmp_path, environment, sidecar):
    """With two gloo processes, rank 0 writes the folder, events are equal, and samples count both ranks."""
    program = Path(__file__).with_name("lightning_two_ranks.py")

    # Bound until the ranks have met, so that no other process gets the port; listeners may share it.
    with socket.socket() as meeting:
        meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        meeting.bind(("127.0.0.1", 0))
        outcome = subprocess.run(
            [sys.executable, str(program), str(tmp_path)],
            env={
                **environment,
                "MASTER_PORT": str(meeting.getsockname()[1]),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    assert outcome.returncode == 0, outcome.stderr
    heard = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert heard[0] == heard[1]
    assert "batch_end 2 samples=8" in heard[0]
    rows = [line.split(",")[0] for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]]
    assert rows == ["0", "1"]
    assert sidecar(tmp_path / "run")["status"] == "completed"
    assert (tmp_path / "run" / "checkpoints").is_dir()


def save_each_epoch(**options):
    """Returns a `ModelCheckpoint` that keeps only the newest."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(filename="{epoch}", monitor="epoch", mode="max", **options)


@pytest.mark.parametrize("save_last", ["link", True])
def test_checkpoints_are_uploaded_without_a_second_copy(tmp_path, slow_store, inodes, save_last):
    """The spool links Lightning's files, and they stay whole although Lightning deletes them."""
    artifacts = Artifacts(slow_store, spool=tmp_path / "spool", free_bytes=0, progress_bar=False)
    logger = LightningLogger(
        artifacts, upload_checkpoints=True, save_dir=tmp_path, raise_errors=True, run_name="mine"
    )
    options = {"max_epochs": 3, "callbacks": [logger.callback(), save_each_epoch(save_last=save_last)]}
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, **options)

    trainer.fit(make_model("lightning.pytorch"), loader())
    folder = Path(trainer.checkpoint_callback.dirpath)
    newest = folder / "epoch=2.ckpt"
    assert newest.stat().st_ino in inodes(tmp_path / "spool")
    # Files that Lightning may rewrite in place are copied.
    assert (folder / "last.ckpt").is_symlink() == (save_last == "link")
    if save_last is True:
        assert (folder / "last.ckpt").stat().st_ino not in inodes(tmp_path / "spool")
    slow_store.may_put.set()
    logger.close()

    names = [f"mine/checkpoints/epoch={epoch}.ckpt" for epoch in range(3)]
    last = "mine/checkpoints/last.ckpt.symlink" if save_last == "link" else "mine/checkpoints/last.ckpt"
    assert [one.name for one in slow_store.list("")] == [*names, last]
    for name in names:
        torch.load(slow_store.root / name, weights_only=False)
    if save_last == "link":
        assert (slow_store.root / last).read_text() == names[-1]


def test_a_run_directory_keeps_the_checkpoints_that_lightning_keeps(tmp_path, inodes):
    """It links them; a checkpoint that Lightning deleted goes with the next one."""
    run = RunDirectory(tmp_path / "run")
    logger = LightningLogger(run, upload_checkpoints=True, raise_errors=True)
    options = {"max_epochs": 4, "callbacks": [logger.callback(), save_each_epoch()]}
    trainer = make_trainer("lightning.pytorch", logger, tmp_path, **options)

    trainer.fit(make_model("lightning.pytorch"), loader())
    logger.close()

    kept = tmp_path / "run/artifacts/checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["epoch=2.ckpt", "epoch=3.ckpt"]
    assert inodes(tmp_path / "run/checkpoints") <= inodes(kept)


def test_destinations_may_be_lists():
    """Lists and single destinations are joined into one list, as loggers are elsewhere."""
    one, two, three = InMemory(), InMemory(), InMemory()

    with LightningLogger([one, two], three, run_name="list") as logger:
        logger.log_metrics({"loss": 0.5}, 3)

    for memory in (one, two, three):
        assert memory.get_timeseries("loss")["loss"].tolist() == [0.5]
