"""Tests our destinations in Composer's trainer and Composer's in ours: `make test-composer`."""

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
from composer.core import Timestamp as TheirTimestamp
from composer.loggers import ConsoleLogger, FileLogger, InMemoryLogger
from composer.loggers import LoggerDestination as TheirDestination
from composer.models import ComposerClassifier

from destinations import InMemory, RunDirectory
from destinations.adapters.composer_logger import ComposerDestination, from_composer
from destinations.testing import RecordingDestination
from events import Callback, Run, Trainer

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


def test_composers_destinations_work_in_our_trainer(tmp_path):
    """A file logger and an in-memory logger get metrics, hyperparameters and Composer's times, and are closed."""
    memory = InMemoryLogger()
    file = FileLogger(str(tmp_path / "log.txt"), capture_stdout=False, capture_stderr=False)
    model = torch.nn.Linear(3, 2)
    data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))] * 2

    with Trainer(
        model,
        data,
        max_duration="1ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        loggers=[from_composer(memory), from_composer(file)],
        run_name="ours",
        device="cpu",
    ) as trainer:
        trainer.fit()
        assert trainer.logger.faults.counts == {}

    series = memory.get_timeseries("loss/train/total")
    assert list(series["batch"]) == [0, 1]
    assert all(type(timestamp) is TheirTimestamp for timestamp in memory.most_recent_timestamps.values())
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("[metric][batch=1]: loss/train/total")]
    assert [line for line in lines if line.startswith("[hyperparameter]")]


def test_files_and_states_pass_through_the_wrapper(tmp_path):
    """The wrapper forwards the file and checkpoint methods that the destination has, and refuses others at once."""

    class Storing(TheirDestination):
        def __init__(self):
            self.seen = []

        def can_upload_files(self):
            return True

        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            self.seen.append(
                (type(state.timestamp), remote_file_name, Path(file_path).read_text(), overwrite)
            )

        def download_file(self, remote_file_name, destination, overwrite=False, progress_bar=True):
            Path(destination).write_text(remote_file_name)

        def state_dict(self):
            return {"n": 1}

        def post_close(self):
            self.seen.append("post_close")

    theirs = Storing()
    (tmp_path / "a.txt").write_text("a")

    with Run(loggers=[from_composer(theirs)], run_name="mine", raise_errors=True) as run:
        run.upload_file("{run_name}/a.txt", tmp_path / "a.txt")
        run.download_file("b.txt", tmp_path / "b.txt")

    assert theirs.seen == [(TheirTimestamp, "mine/a.txt", "a", False), "post_close"]
    assert (tmp_path / "b.txt").read_text() == "b.txt"
    assert from_composer(theirs).state_dict() == {"n": 1}
    with pytest.raises(TypeError, match=r"must be a composer\.loggers\.LoggerDestination"):
        from_composer(InMemory())


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


def test_composers_console_prints_our_evaluations(capsys):
    """In our Trainer and in a Run, each evaluation and its metrics are printed."""
    model = torch.nn.Linear(3, 2)
    data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))] * 3
    trainer = Trainer(
        model,
        data,
        data,
        max_duration="1ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        loggers=from_composer(ConsoleLogger(log_interval="1ba", stream="stdout")),
        device="cpu",
    )
    trainer.fit()
    trainer.close()

    printed = capsys.readouterr().out
    assert "[Eval batch=3/3] Eval on eval data" in printed
    assert "Eval loss/eval/total" in printed

    with Run(from_composer(ConsoleLogger(log_interval="1ba", stream="stdout")), run_name="r") as run:
        run.eval_start("test", length=2)
        run.eval_batch_end(4)
        run.log_metrics({"metrics/test/accuracy": 0.5})
        run.eval_end()
    assert "Eval metrics/test/accuracy" in capsys.readouterr().out


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
