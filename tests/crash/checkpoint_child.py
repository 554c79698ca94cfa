"""Trains a small network with checkpoints, to be killed: `python -m tests.crash.checkpoint_child`.

Reads folders from standard input, forks a process for each that trains there or resumes, and prints its process
id and then its wait status: torch is imported once.
"""

import hashlib
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from destinations import Artifacts
from events import Callback, CheckpointSaver, CheckpointWriting, Trainer

BATCHES = 150
PACE_SECONDS = 0.004


class Pace(Callback):
    """Leaves time between two saves."""

    def batch_end(self, state, logger):
        time.sleep(PACE_SECONDS)


def train(folder: Path) -> None:
    """Trains to the end from the last checkpoint, and writes down the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 2))
    points = torch.randn(64, 3, generator=torch.Generator().manual_seed(7))
    saver = CheckpointSaver(
        folder / "saved",
        save_interval="5ba",
        keep=3,
        keep_in_store=2,
        writing=CheckpointWriting(process_bytes=0),
        close_seconds=60,
    )
    trainer = Trainer(
        model,
        DataLoader(TensorDataset(points, (points.sum(1) > 0).long()), batch_size=4, shuffle=True),
        max_duration=f"{BATCHES}ba",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        callbacks=[Pace(), saver],
        loggers=Artifacts(folder / "store", spool=folder / "spool", free_bytes=0, progress_bar=False),
        run_name="run",
        device="cpu",
        seed=1,
        load_path=pointer if (pointer := folder / "saved" / "latest.symlink").exists() else None,
    )
    with trainer:
        trainer.fit()
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    (folder / "weights").write_text(digest.hexdigest())


def main() -> None:
    """Forks a process for each line."""
    importlib.import_module("torch._dynamo")  # As the first optimizer of each fork would.
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                train(Path(line.strip()))
            except BaseException:  # noqa: BLE001  # the status says it
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
