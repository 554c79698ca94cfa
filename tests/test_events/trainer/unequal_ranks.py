"""The program of each rank in test_unequal_ranks.py: ranks that do not have the same data.

`unequal_ranks.py FOLDER MODE ...` trains in each mode in turn, and writes what this rank saw.
"""

import json
import sys
from pathlib import Path

import torch
import torchmetrics
from torch import distributed

from destinations import LoggerDestination
from events import Callback, Trainer
from events.trainer.distributed import leave


class Rows(LoggerDestination):
    """Keeps every metric of this rank."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append([step, {name: float(value) for name, value in metrics.items()}])


class Stops(Callback):
    """Rank 1 alone asks to stop."""

    def __init__(self, event):
        super().__init__()
        self._event = event

    def run_event(self, event, state, logger):
        if event.value == self._event and state.rank == 1:
            state.stop_training("enough")


class Unsized:
    """Batches without a length."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


class Network(torch.nn.Module):
    """Two classes of three numbers; also from what a batch calls its tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, points=None, input_ids=None, targets=None):
        return self.layer(points if input_ids is None else input_ids.float())


def batch(samples, seed):
    """Returns points in space, and on which side of a plane they are."""
    points = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed))
    return points, (points.sum(1) > 0).long()


def tokens(samples, seed):
    """Returns the same as a batch of text: three tokens a sample."""
    points, targets = batch(samples, seed)
    return {"input_ids": (points * 10).long(), "targets": targets}


def cross_entropy(outputs, targets):
    """Returns the loss of a pair or of a mapping."""
    return torch.nn.functional.cross_entropy(
        outputs, targets["targets"] if isinstance(targets, dict) else targets
    )


def accuracy(outputs, targets):
    """Returns the share of right answers."""
    targets = targets["targets"] if isinstance(targets, dict) else targets
    return (outputs.argmax(1) == targets).float().mean()


def per_class(outputs, targets):
    """Returns a vector: the mean of each output."""
    return outputs.mean(0)


def parts(outputs, targets):
    """Returns losses by name; odd batches have one more."""
    losses = {"entropy": cross_entropy(outputs, targets), "size": outputs.pow(2).mean(1)}
    return losses | ({"odd": outputs.abs().mean()} if len(outputs) % 2 else {})


class Correct(torchmetrics.Metric):
    """The share of right answers, from lists of outputs and of targets, which are integers."""

    def __init__(self):
        super().__init__()
        self.add_state("outputs", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, outputs, targets):
        self.outputs.append(outputs)
        self.targets.append(targets)

    def compute(self):
        outputs, targets = (
            torch.cat(list(one)) if isinstance(one, list) else one for one in (self.outputs, self.targets)
        )
        return torch.nn.functional.one_hot(targets, 2)[outputs.argmax(1) == targets].float().sum(0) / len(
            targets
        )


def arguments(mode, rank, folder):
    """Returns the arguments of the Trainer in one mode."""
    uneven = [batch(4 - rank, seed) for seed in range(rank, 12, 2)]
    by_mode = {
        "tokens": {
            "train_dataloader": [tokens(2 + 3 * rank, seed) for seed in range(rank, 12, 2)],
            "max_duration": "96tok",
        },
        "samples": {"train_dataloader": uneven, "max_duration": "20sp"},
        "evaluation": {
            "train_dataloader": uneven,
            "max_duration": "1ep",
            "eval_dataloader": [] if rank else [batch(4, 50), batch(3, 51)],
            "metrics": {"accuracy": accuracy, "vector": per_class, "correct": Correct()},
        },
        "longer-evaluation": {
            "train_dataloader": uneven,
            "max_duration": "1ep",
            "loss_fn": parts,
            "eval_dataloader": [batch(4, 50)] if rank else [batch(4, 51), batch(3, 52), batch(2, 53)],
        },
        "shorter": {"train_dataloader": uneven[rank:], "max_duration": "2ep"},
        "unsized": {"train_dataloader": Unsized(uneven[rank:]), "max_duration": "2ep"},
        "ending": {"train_dataloader": uneven[rank:], "max_duration": "5ba"},
        "none": {"train_dataloader": [] if rank else uneven, "max_duration": "2ep"},
        "unsized-none": {"train_dataloader": Unsized([] if rank else uneven), "max_duration": "2ep"},
        "stop-init": {"train_dataloader": uneven, "callbacks": Stops("init")},
        "stop-epoch": {"train_dataloader": uneven, "callbacks": Stops("epoch_start")},
        "losses": {"train_dataloader": uneven, "max_duration": "1ep", "loss_fn": parts},
        "lbfgs": {"train_dataloader": uneven, "max_duration": "4ba"},
        "whole": {"train_dataloader": uneven, "max_duration": "1ep"},
        "half": {
            "train_dataloader": uneven,
            "max_duration": "3ba",
            "save_folder": folder / "saved",
            "run_name": "resumed",
        },
        "resumed": {
            "train_dataloader": uneven,
            "max_duration": "1ep",
            "save_folder": folder / "saved",
            "run_name": "resumed",
            "autoresume": True,
        },
    }
    return by_mode[mode]


def main(folder, mode):
    """Trains in one mode, and writes what this rank saw."""
    model = Network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")
    rows = Rows()
    trainer = Trainer(
        model,
        **{
            "loss_fn": cross_entropy,
            "metrics": {"accuracy": accuracy},
            "optimizers": lbfgs if mode == "lbfgs" else sgd,
            "loggers": rows,
            "device": "cpu",
            "max_duration": "2ep",
        }
        | arguments(mode, distributed.get_rank(), folder),
    )
    error = ""
    try:
        with trainer:
            trainer.fit()
    except ValueError as raised:
        error = str(raised)
    seen = {
        "error": error,
        "timestamp": trainer.state.timestamp.to_numbers(),
        "evaluated": {name: trainer.state.eval_timestamp.to_numbers()[name] for name in ("batch", "sample")},
        "values": dict(trainer.state.eval_values),
        "weights": [parameter.flatten().tolist() for parameter in model.parameters()],
        "rows": rows.rows,
    }
    (folder / f"{mode}.rank{trainer.state.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    place, *modes = sys.argv[1:]
    distributed.init_process_group("gloo")
    for one in modes:
        main(Path(place), one)
    leave()
