"""Tests our destinations in Composer's trainer: `make test-composer`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip(
    "composer", reason="Composer needs torch < 2.7.1, and so an environment of its own: make test-composer"
)

import torch
from composer import Callback as TheirCallback
from composer import Trainer as TheirTrainer
from composer.models import ComposerClassifier

from destinations import InMemory, RunDirectory
from destinations.adapters.composer_logger import ComposerDestination
from destinations.testing import RecordingDestination
from events import Callback, Event

# Composer and its imports warn about their own code.
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]


class Listener(Callback):
    """Records each of our events, with batches and epochs."""

    def __init__(self):
        self.heard = []

    def run_event(self, event, state, logger):
        self.heard.append((event.value, int(state.timestamp.batch), int(state.timestamp.epoch)))


class Witness(TheirCallback):
    """Records each of Composer's events; logs and uploads in `close`."""

    def __init__(self, file=None):
        self.heard = []
        self.file = file

    def run_event(self, event, state, logger):
        self.heard.append((event.value, int(state.timestamp.batch), int(state.timestamp.epoch)))
        return super().run_event(event, state, logger)

    def close(self, state, logger):
        logger.log_metrics({"last": 1.0})
        if self.file is not None:
            logger.upload_file("late.txt", self.file)


def make_trainer(destination, **options):
    """Returns a trainer of Composer's: two batches of two."""
    samples = [(torch.randn(3), torch.tensor(index % 2)) for index in range(4)]
    data = torch.utils.data.DataLoader(samples, batch_size=2)
    return TheirTrainer(
        model=ComposerClassifier(torch.nn.Linear(3, 2), num_classes=2),
        train_dataloader=data,
        max_duration="1ep",
        loggers=[destination],
        progress_bar=False,
        device="cpu",
        run_name="theirs",
        **{"eval_dataloader": data, **options},
    )


def status(folder):
    """Returns how a run ended."""
    written = json.loads((folder / "sidecar.json").read_text())
    return written["status"], written["exception"]


def test_all_events_arrive_with_composers_names_order_and_counts(tmp_path):
    """Records and files arrive too, and a second close does nothing."""
    memory, listener, store = InMemory(), Listener(), RecordingDestination(stores_files=True)
    (tmp_path / "late.txt").write_text("late")
    witness = Witness(tmp_path / "late.txt")
    ours = ComposerDestination(
        RunDirectory(tmp_path / "run"), memory, store, callbacks=listener, raise_errors=True
    )
    trainer = make_trainer(ours, callbacks=[witness], save_folder=str(tmp_path / "checkpoints"))

    trainer.fit()
    trainer.logger.log_images(np.zeros((2, 3, 4, 4)), name="view", masks={"m": np.zeros((2, 4, 4))})
    trainer.logger.log_table(["a"], [[1]], name="t")
    trainer.logger.log_traces({"x": 1})
    trainer.logger.log_metrics({"tensor": torch.tensor(2.0), "text": "no metric"})
    trainer.close()
    trainer.close()

    assert listener.heard == witness.heard
    assert [name for name, *_ in listener.heard][:4] == ["init", "before_load", "after_load", "fit_start"]
    assert listener.heard[-1] == ("fit_end", 2, 1)
    metrics = [record for record in memory.records if record.kind == "metrics"]
    losses = [record for record in metrics if "loss/train/total" in record.value]
    assert [record.step for record in losses] == [0, 1]
    assert memory.most_recent_values["tensor"] == 2.0
    assert memory.most_recent_values["last"] == 1.0
    assert memory.hyperparameters["composer_version"]
    assert [record.name for record in memory.records if record.kind in {"images", "table"}] == ["view", "t"]
    assert status(tmp_path / "run") == ("completed", None)
    assert store.files["late.txt"] == b"late"
    assert [call.method for call in store.calls].count("close") == 1


def test_a_standalone_evaluation_and_a_prediction_fire_their_events():
    """All 40 events arrive, including the events of `eval` and `predict`."""
    listener, witness = Listener(), Witness()
    trainer = make_trainer(ComposerDestination(callbacks=listener, raise_errors=True), callbacks=[witness])

    trainer.eval()
    trainer.predict([torch.randn(2, 3)])
    trainer.close()

    names = {name for name, *_ in listener.heard}
    assert listener.heard == witness.heard
    assert {"eval_standalone_start", "eval_batch_end", "predict_start", "predict_end"} <= names


def test_a_fit_that_raises_is_a_failed_run(tmp_path):
    """Composer closes at the end of the program, and the exception is known there."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_composer import ComposerDestination, RunDirectory, TheirCallback, make_trainer

class Failing(TheirCallback):
    def batch_end(self, state, logger):
        raise ValueError("diverged")

make_trainer(ComposerDestination(RunDirectory("run")), callbacks=[Failing()]).fit()
"""

    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert "ValueError: diverged" in finished.stderr
    assert status(tmp_path / "run") == ("failed", "ValueError: diverged")


def test_composers_checkpoint_holds_the_state_of_our_destinations(tmp_path):
    """A run that resumes from it continues its rows at the same place."""
    folder = tmp_path / "run"
    options = {"save_folder": str(tmp_path / "checkpoints"), "save_interval": "1ba"}
    first = make_trainer(ComposerDestination(RunDirectory(folder), raise_errors=True), **options)
    first.fit()
    first.close()
    listener = Listener()
    ours = ComposerDestination(RunDirectory(folder), callbacks=listener, raise_errors=True)

    second = make_trainer(ours, load_path=str(tmp_path / "checkpoints" / "ep0-ba1-rank0.pt"))
    second.fit()
    second.close()

    assert ("fit_start", 1, 0) in listener.heard
    rows = (folder / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("loss/train/total")
    assert [line.split(",")[0] for line in rows[1:] if line.split(",")[column]] == ["0", "1"]


def test_the_docs_list_every_event_for_composer():
    """Each row of the table has an entry for Composer."""
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")

    rows = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("| the same |")]

    assert len(rows) == len(Event)


class LogsAtEnds(TheirCallback):
    """Logs where Composer's own callbacks log: after a batch and after an epoch were counted."""

    def batch_end(self, state, logger):
        logger.log_metrics({"at_batch_end": int(state.timestamp.epoch)})

    def epoch_end(self, state, logger):
        logger.log_metrics({"at_epoch_end": int(state.timestamp.epoch)})


def test_records_at_an_end_have_composers_timestamp():
    """The epoch is counted at EPOCH_END already, and the batch at BATCH_END."""
    memory = InMemory()
    trainer = make_trainer(
        ComposerDestination(memory, raise_errors=True), callbacks=[LogsAtEnds()], eval_dataloader=None
    )
    trainer.fit()
    trainer.close()

    assert [(int(at.epoch), int(at.batch)) for at, _ in memory.data["at_batch_end"]] == [(0, 1), (0, 2)]
    assert [(int(at.epoch), value) for at, value in memory.data["at_epoch_end"]] == [(1, 1)]


def test_composers_checkpoint_is_hard_linked(tmp_path):
    """The file in the run is the one that Composer wrote, so its bytes are on the disk once."""
    destination = ComposerDestination(RunDirectory(tmp_path / "run"))

    trainer = make_trainer(destination, save_folder=str(tmp_path / "saved"), save_interval="1ep")
    trainer.fit()
    trainer.close()

    saved = [path for path in (tmp_path / "saved").rglob("*.pt") if not path.is_symlink()]
    kept = list((tmp_path / "run/artifacts").rglob("*.pt"))
    assert len(saved) == 1
    assert [path.stat().st_ino for path in kept] == [path.stat().st_ino for path in saved]
