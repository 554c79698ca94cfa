"""`destinations demo`: trains a small network on handwritten digits, with every core destination attached.

The images are scikit-learn's: 1,797 of them, 8 by 8 pixels, part of the package; nothing is downloaded.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from destinations.artifacts import Artifacts
from destinations.base import LoggerDestination
from destinations.in_memory import InMemory
from destinations.run_directory import RunDirectory
from destinations.text.console import Console
from destinations.text.progress_bar import ProgressBar
from destinations.text.text_file import TextFile
from events import Callback, Logger, State, Trainer
from uploads import UploadQueue

__all__ = ["main", "network", "trainer"]

INK = 0.5


class Misclassified(Callback):
    """Logs misclassified digits after each evaluation, as a table and as images with masks."""

    def __init__(self, most: int = 16) -> None:
        self.most = most

    def eval_start(self, state: State, logger: Logger) -> None:
        """Begins with none."""
        self.images: list[torch.Tensor] = []
        self.rows: list[list[Any]] = []

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Collects the digits that the model got wrong."""
        images, labels = state.batch
        confidence, predicted = state.outputs.softmax(1).max(1)
        for index in (predicted != labels).nonzero().flatten().tolist():
            self.images.append(images[index])
            self.rows.append([int(labels[index]), int(predicted[index]), round(float(confidence[index]), 4)])

    def eval_end(self, state: State, logger: Logger) -> None:
        """Logs them."""
        logger.log_table(["digit", "taken for", "confidence"], self.rows, name="Misclassified")
        if self.images:
            images = torch.stack(self.images[: self.most])
            ink = (images[:, 0] > INK).long()
            logger.log_images(
                images, "Misclassified", masks={"ink": ink}, mask_class_labels={0: "paper", 1: "ink"}
            )


class Weights(Callback):
    """Logs the distribution of the weights, and a trace of each parameter, at the end of each epoch."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Logs a histogram of all weights, and a trace of each parameter."""
        assert state.model is not None  # noqa: S101  # the trainer has set it
        parameters = dict(state.model.named_parameters())
        logger.log_histogram(torch.cat([weight.flatten() for weight in parameters.values()]), "weights")
        logger.log_traces({f"shape/{name}": list(weight.shape) for name, weight in parameters.items()})


def digits(batch_size: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Returns three quarters of the digits to train on, shuffled, and a quarter to test on."""
    bunch = load_digits()
    images = torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(bunch.target)
    train, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=bunch.target)
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(images[test], labels[test]), 4 * batch_size),
    )


def network(dropout: float = 0.3) -> nn.Module:
    """Returns a convolutional network of 85,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(dropout), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the share of digits that were recognised."""
    return (outputs.argmax(1) == labels).float().mean()


def trainer(
    loggers: list[LoggerDestination],
    callbacks: list[Callback],
    *,
    epochs: int = 8,
    lr: float = 1e-2,
    dropout: float = 0.3,
    seed: int = 1,
    save_folder: str | None = "runs/{run_name}/checkpoints",
    run_name: str | None = None,
) -> Trainer:
    """Returns a trainer of the network on the digits."""
    torch.manual_seed(seed)
    train_dataloader, test_dataloader = digits()
    model = network(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = epochs * len(train_dataloader)
    return Trainer(
        model,
        train_dataloader,
        {"test": test_dataloader},
        max_duration=f"{epochs}ep",
        loss_fn=nn.functional.cross_entropy,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1),
        metrics={"accuracy": accuracy},
        callbacks=callbacks,
        loggers=loggers,
        device="cpu",
        seed=seed,
        save_folder=save_folder,
        run_name=run_name,
    )


def main(store: str = "store", *, epochs: int = 8) -> Path:
    """Trains, uploads checkpoints and the folder of the run, and says where everything is.

    Args:
        store: a folder or URI.
        epochs: how long to train.

    Returns:
        The folder of the run.
    """
    loggers = [
        ProgressBar(),
        Console(),
        InMemory(),
        RunDirectory("runs/{run_name}"),
        TextFile("runs/{run_name}/log.txt"),
        Artifacts(store),
    ]
    with trainer(loggers, [Misclassified(), Weights()], epochs=epochs) as digits_trainer:
        digits_trainer.logger.log_hyperparameters({"data": "scikit-learn digits", "dropout": 0.3})
        digits_trainer.fit()
        run_name = digits_trainer.state.run_name
    folder = Path("runs") / run_name
    with UploadQueue(store) as queue:
        queue.submit(folder, run_name)
    sys.stdout.write(f"uploaded to {queue.uri(run_name)}\n")
    return folder
