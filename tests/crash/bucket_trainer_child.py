"""Trains a run that lives in a bucket: `python -m tests.crash.bucket_trainer_child URI MACHINE BATCHES DIES`.

MACHINE is a folder, which is made. It prints "began N" and "batch N". If DIES is 1, it is killed once
the checkpoint of batch 12 has reached the store.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch


def main(uri, machine, batches, dies):
    """Trains."""
    Path(machine).mkdir()
    os.chdir(machine)
    os.environ["XDG_STATE_HOME"] = machine
    os.environ["UPLOADS_HOME"] = f"{machine}/uploads"
    from destinations import RunDirectory
    from events import Callback, CheckpointSaver, Trainer
    from uploads import open_store

    class Watch(Callback):
        """Prints its position, and dies."""

        def fit_start(self, state, logger):
            """Prints the batch at which training starts."""
            print("began", state.timestamp.batch.value, flush=True)

        def batch_end(self, state, logger):
            """Dies at the right batch."""
            print("batch", state.timestamp.batch.value, flush=True)
            if not dies:
                return
            # Leaves time for the checkpoints, which go to the store between batches.
            time.sleep(0.2)
            store = open_store(uri)
            if any("ep0-ba12.pt" in info.name for info in store.list("artifacts/")):
                # One more interval, so that the rows are there too.
                time.sleep(1.5)
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.randn(100, 2), torch.randn(100, 1))
    trainer = Trainer(
        model,
        torch.utils.data.DataLoader(data, batch_size=2),
        loss_fn=torch.nn.functional.mse_loss,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        max_duration=f"{batches}ba",
        loggers=[RunDirectory(uri, mirror_seconds=0.5, flush_seconds=0.1, close_seconds=120.0)],
        callbacks=[Watch()],
        saver=CheckpointSaver("checkpoints", save_interval="4ba"),
        autoresume=True,
        run_name="trained",
    )
    with trainer:
        trainer.fit()
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
