"""A Lightning run on two ranks, started by Lightning's launcher: `python lightning_two_ranks.py FOLDER`."""

# ruff: noqa: E402  # what is hidden must be hidden before it is imported

import sys
from pathlib import Path

# One of the two packages is enough here, and halves the ranks' imports.
sys.modules["pytorch_lightning"] = None

import torch
from lightning.pytorch import LightningModule, Trainer

from destinations import RunDirectory
from destinations.adapters.lightning_logger import LightningLogger
from events import Callback

FOLDER = Path(sys.argv[1])


class Listener(Callback):
    """Records each event of a rank."""

    def __init__(self):
        self.heard = []

    def run_event(self, event, state, logger):
        self.heard.append(
            f"{event.value} {state.timestamp.batch.value} samples={state.timestamp.sample.value}"
        )
        self.rank = state.rank


class Tiny(LightningModule):
    """A model of one layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    """Trains two batches on each rank."""
    listener = Listener()
    with LightningLogger(RunDirectory(FOLDER / "run"), callbacks=listener, raise_errors=True) as logger:
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=1,
            logger=logger,
            callbacks=[logger.callback()],
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2))
    (FOLDER / f"rank{listener.rank}.txt").write_text("\n".join(listener.heard))


if __name__ == "__main__":
    main()
