"""A training run small enough to count on one's fingers, and who listens to it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from destinations import LoggerDestination
from events import Callback, Event, Logger, State, Trainer


class EventList(Callback):
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)


class MetricList(LoggerDestination):
    """Writes down every metric, and how the run stood when it was closed."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int | None, dict[str, float]]] = []
        self.hyperparameters: dict[str, Any] = {}
        self.closed_as: list[tuple[str, BaseException | None]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hyperparameters.update(hyperparameters)

    def close(self, state: State, logger: Logger) -> None:
        self.closed_as.append((state.status.value, state.exception))

    def series(self, name: str) -> list[tuple[int | None, float]]:
        return [(step, metrics[name]) for step, metrics in self.metrics if name in metrics]


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the share of right answers."""
    return (outputs.argmax(1) == targets).float().mean()


def dataset(samples: int) -> TensorDataset:
    """Returns points in space, and on which side of a plane they are."""
    points = torch.randn(samples, 3, generator=torch.Generator().manual_seed(7))
    return TensorDataset(points, (points.sum(1) > 0).long())


def network() -> torch.nn.Module:
    """Returns a network that draws random numbers when it trains."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2))


@pytest.fixture
def event_list() -> EventList:
    """Gives a callback that writes down events."""
    return EventList()


@pytest.fixture
def metric_list() -> MetricList:
    """Gives a destination that writes down metrics."""
    return MetricList()


@pytest.fixture
def make_trainer() -> Iterator[Callable[..., Trainer]]:
    """Makes trainers of 20 samples in batches of 4, and closes each before the next is made."""
    made: list[Trainer] = []

    def make(samples: int = 20, batch_size: int = 4, **arguments: Any) -> Trainer:
        for trainer in made:
            trainer.close()
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        defaults: dict[str, Any] = {
            "train_dataloader": DataLoader(dataset(samples), batch_size=batch_size, shuffle=True),
            "max_duration": "2ep",
            "loss_fn": torch.nn.functional.cross_entropy,
            "optimizers": optimizer,
            "schedulers": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9),
            "metrics": {"accuracy": accuracy},
            "run_name": "test",
            "device": "cpu",
            "seed": 1,
        }
        made.append(Trainer(model, **(defaults | arguments)))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def make_dataloader() -> Callable[..., DataLoader[Any]]:
    """Makes dataloaders of 6 samples in batches of 4."""
    return lambda samples=6, batch_size=4, **arguments: DataLoader(
        dataset(samples), batch_size=batch_size, **arguments
    )
