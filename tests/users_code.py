"""Typical uses, as a user would write them: what type checkers must accept without an error.

mypy reads it with `make types`, pyright with `make test-package`. Nothing here is run.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from destinations import Artifacts, Console, InMemory, LoggerDestination, ProgressBar, RunDirectory, TextFile
from destinations.runs import open_runs
from events import Callback, Event, Logger, Run, State, Time, Timestamp, Trainer, WriteRate
from events.monitor import Aggregation, Stat
from uploads import UploadQueue, download_file, open_store


class GradientNorm(Callback):
    """Logs the norm of the gradients."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Runs after the backward pass."""
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), torch.inf)
        logger.log_metrics({"grad_norm": norm, "half": lambda: norm / 2})


class Printed(LoggerDestination):
    """A destination of a user's own."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Prints them."""
        print(step, dict(metrics))

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Receives every event."""
        if event is Event.FIT_END:
            print(state.timestamp.batch.value)


def train(data: DataLoader[Any], model: torch.nn.Module) -> float:
    """Trains with destinations, and reads the result."""
    memory = InMemory()
    trainer = Trainer(
        model,
        data,
        max_duration="2ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.Adam(model.parameters()),
        callbacks=[GradientNorm()],
        loggers=[memory, ProgressBar(), Console("1ep"), RunDirectory("runs/{run_name}"), Artifacts("store")],
        save_folder="runs/{run_name}/checkpoints",
    )
    trainer.fit()
    stamp: Timestamp = trainer.state.timestamp
    epochs: Time = stamp.epoch
    return float(epochs.value)


def own_loop(folder: Path) -> None:
    """Logs from a loop of one's own."""
    with Run(
        loggers=[RunDirectory(folder, write_rate=WriteRate(every_steps=10)), Printed()], run_name="mine"
    ) as run:
        run.log_hyperparameters({"lr": 0.1, "layers": [1, 2]})
        for step in range(10):
            run.batch_start()
            run.log_metrics({"loss": 1 / (step + 1), "tensor": torch.tensor(1.0)})
            run.log_images(
                torch.rand(2, 3, 8, 8), name="images", masks={"truth": torch.zeros(2, 8, 8).long()}
            )
            run.log_table(["a", "b"], [[1, "x"]], name="table")
            run.log_histogram(torch.randn(100), name="weights")
            run.batch_end()
        run.upload_file("model.pt", folder / "model.pt")


def look_back(root: str) -> list[float]:
    """Reads runs."""
    runs = open_runs(root)
    names = [run.name for run in runs]
    return [value for name in names for value in runs[name].series("loss").value.tolist()]


def upload(path: Path) -> str:
    """Uploads a file in the background."""
    with UploadQueue("s3://bucket/prefix", spool=path.parent / "spool") as queue:
        handle = queue.submit(path, "model.pt", overwrite=False)
        handle.result(timeout_seconds=60.0)
    download_file("model.pt", path, store=open_store("store"))
    return handle.remote_name


def monitor() -> None:
    """Keeps statistics as torch.monitor does."""
    stat = Stat("time", [Aggregation.MEAN, Aggregation.MAX], timedelta(seconds=1))
    stat.add(1.0)
    text = TextFile("log.txt")
    print(stat.name, text)
