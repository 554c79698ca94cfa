"""Trains with `save_interval=AutoInterval(...)` on each rank: `auto_program.py FOLDER MODE [KILLED_AT]`.

Its clock is its own: 1 s for a batch, 20 ms for the snapshot on rank 0, more on others, which do not decide.
MODE is "whole" or "sharded"; at the end of batch KILLED_AT the process kills itself.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from events import AutoInterval, Callback, CheckpointSaver, CheckpointWriting, Trainer


class Seconds(Callback):
    """A clock that moves by what is done, and the batches of the checkpoints."""

    def __init__(self, killed_at):
        self.now = 0.0
        self.saved_at = []
        self.killed_at = killed_at

    def batch_start(self, state, logger):
        self.now += 1.0 + 5 * state.rank

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.batch = state.timestamp.batch.value

    def state_dict(self):
        self.now += 0.02
        self.saved_at.append(self.batch)
        return {}


def main(folder, mode, killed_at="0"):
    """Trains twenty batches, from the newest checkpoint on."""
    torch.manual_seed(0)
    points = torch.randn(160, 3)
    data = TensorDataset(points, (points.sum(1) > 0).long())
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    seconds = Seconds(int(killed_at))
    policy = AutoInterval(save_overhead=0.005, min_seconds=2, clock=lambda: seconds.now)
    saver = CheckpointSaver(
        folder / "saved",
        save_interval=policy,
        sharded=mode == "sharded",
        writing=CheckpointWriting(asynchronous=False),
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        model,
        DataLoader(data, batch_size=8 // ranks, sampler=DistributedSampler(data, ranks, 0)),
        max_duration="20ba",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[seconds, saver],
        device="cpu",
        seed=3,
        run_name="run",
        autoresume=True,
    )
    seen = {"began_at": trainer.state.timestamp.batch.value}
    with trainer:
        trainer.fit()
    seen |= {"saved_at": seconds.saved_at, "weights": [one.tolist() for one in model.parameters()]}
    (folder / f"rank{trainer.state.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
