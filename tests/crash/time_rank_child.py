"""The program of each rank in `time_faults.py`: `time_rank_child.py FAULT RANK FOLDER`.

A Trainer of 30 batches of some 10 ms. Rank RANK has a fault, or every rank if the fault affects all. It
prints when its ledger stopped counting, by the system's clock.
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from destinations import Artifacts, RunDirectory
from events import Callback, CheckpointSaver, CheckpointWriting, TimeLedger, Trainer

FAULT, SLOW, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HAS_FAULT = RANK == SLOW
BATCHES, MORE = 30, 0.03


def slow(fault, times=1):
    """Takes long on the rank that has the fault."""
    if HAS_FAULT and fault == FAULT:
        time.sleep(MORE * times)


class Data(TensorDataset):
    """Samples; one of each batch takes long to read."""

    def __getitem__(self, index):
        if index // RANKS % 4 == 0:
            slow("loader")
        return super().__getitem__(index)


class Held(TensorDataset):
    """Evaluation samples, slower each time."""

    times = 0

    def __getitem__(self, index):
        self.times += index == 0
        if index == 0 and FAULT == "evaluation":
            time.sleep(MORE * self.times)
        return super().__getitem__(index)


class Ledger(TimeLedger):
    """Notes when it has stopped counting."""

    ended_at = 0.0

    def post_close(self):
        super().post_close()
        Ledger.ended_at = time.time()


class SlowBackward(torch.autograd.Function):
    """Takes long in the backward pass."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        slow("backward")
        return gradient


class Network(torch.nn.Module):
    """Layers that take four milliseconds."""

    def __init__(self):
        super().__init__()
        # Some megabytes, so that a checkpoint takes time.
        self.layers = torch.nn.Linear(16, 100_000 if FAULT in {"checkpoints", "disk"} else 4)

    def forward(self, inputs):
        time.sleep(0.004)
        slow("rank")
        return SlowBackward.apply(self.layers(inputs)[:, :4])


class Garbage:
    """Takes a while to be collected."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(MORE)


class Faults(Callback):
    """Injects faults between batches."""

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) == 2 * BATCHES // 3:
            with logger.span("read shard"):
                slow("step", 20)

    def batch_end(self, state, logger):
        slow("callback")
        batch = int(state.timestamp.batch)
        if FAULT == "garbage" and HAS_FAULT:
            Garbage()
            gc.collect()
        if FAULT == "store" and RANK == 0:
            logger.upload_file("{run_name}/file-{batch}", torch.__file__)
        if HAS_FAULT and batch == BATCHES // 2:
            if FAULT == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if FAULT == "killed" and not (FOLDER.parent / "killed").exists():
                (FOLDER.parent / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Blocked(RunDirectory):
    """A destination that blocks."""

    def log_metrics(self, metrics, step=None):
        slow("destination")
        super().log_metrics(metrics, step)


def slow_disk():
    """Makes each flush of a file slow, as on a busy disk."""
    flush = os.fsync

    def slow_flush(fd):
        slow("disk")
        flush(fd)

    os.fsync = slow_flush


torch.manual_seed(1)
torch.set_num_threads(1)
samples = 4 * BATCHES * RANKS
data = Data(torch.randn(samples, 16), torch.randint(4, (samples,)))
sampler = DistributedSampler(data, RANKS, RANK, shuffle=False) if RANKS > 1 else None
loggers = [Blocked(FOLDER, all_ranks=True, if_exists="resume")]
if FAULT == "store":
    # Nobody listens there.
    store = "s3://nowhere?endpoint_url=http://127.0.0.1:9"
    os.environ |= {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
    spool = FOLDER.parent / f"spool-{RANK}"
    loggers.append(Artifacts(store, close_seconds=4.0, spool=spool, isolation="threads"))
saver = {}
if FAULT in {"checkpoints", "disk", "killed"}:
    saver["saver"] = CheckpointSaver(
        FOLDER.parent / "checkpoints",
        save_interval="10ba" if FAULT == "killed" else "1ba",
        keep=2,
        writing=CheckpointWriting(asynchronous=FAULT == "killed"),
    )
    saver["autoresume"] = FAULT == "killed"
if FAULT == "disk":
    slow_disk()
if FAULT == "start" and HAS_FAULT:
    time.sleep(1.5)
network = Network()
trainer = Trainer(
    network,
    DataLoader(data, batch_size=4, sampler=sampler),
    DataLoader(Held(*(one[:40] for one in data.tensors)), batch_size=40),
    eval_interval="5ba" if FAULT == "evaluation" else "1ep",
    max_duration="1ep",
    loss_fn=torch.nn.functional.cross_entropy,
    optimizers=torch.optim.SGD(network.parameters(), lr=0.1),
    callbacks=[Ledger(), Faults()],
    loggers=loggers,
    run_name="mine",
    device="cpu",
    **saver,
)
trainer.fit()
trainer.close()
print(Ledger.ended_at)
