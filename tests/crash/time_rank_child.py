"""The program of each rank in test_time_ledger.py: `time_rank_child.py FAULT RANK FOLDER`, under torchrun.

A Trainer of 30 batches. Rank RANK takes 20 ms more for each of them, at the place that FAULT says.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from destinations import RunDirectory
from events import Callback, Trainer

FAULT, SLOW, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
IS_SLOW = int(os.environ["RANK"]) == SLOW
BATCHES, MORE = 30, 0.02


def slow(fault):
    """Takes long on the slow rank."""
    if IS_SLOW and fault == FAULT:
        time.sleep(MORE)


class Data(TensorDataset):
    """Samples that take time to read."""

    def __getitem__(self, index):
        if index // int(os.environ["WORLD_SIZE"]) % 4 == 0:
            slow("data")
        return super().__getitem__(index)


class Network(torch.nn.Module):
    """Layers that take time."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Linear(16, 4)

    def forward(self, inputs):
        slow("forward")
        return self.layers(inputs)


class SlowCallback(Callback):
    """Takes long at the end of each batch."""

    def batch_end(self, state, logger):
        slow("callbacks")


class SlowDestination(RunDirectory):
    """Takes long for each row."""

    def log_metrics(self, metrics, step=None):
        slow("logging")
        super().log_metrics(metrics, step)


torch.manual_seed(1)
model = Network()
ranks = int(os.environ["WORLD_SIZE"])
data = Data(torch.randn(4 * BATCHES * ranks, 16), torch.randint(4, (4 * BATCHES * ranks,)))
trainer = Trainer(
    model,
    DataLoader(
        data, batch_size=4, sampler=DistributedSampler(data, ranks, int(os.environ["RANK"]), shuffle=False)
    ),
    max_duration="1ep",
    loss_fn=torch.nn.functional.cross_entropy,
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    callbacks=[SlowCallback()],
    loggers=[SlowDestination(FOLDER, all_ranks=True)],
    run_name="mine",
    device="cpu",
)
trainer.fit()
trainer.close()
