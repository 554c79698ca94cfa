"""The program of each rank in test_distributed.py: trains, and records what it saw.

`two_ranks.py FOLDER MODE ...` trains in each mode in turn. With one mode, the Trainer creates the process
group itself; with several, this program has created it, as users may.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from destinations import LoggerDestination
from events import Callback, CheckpointError, Logger, State, Trainer
from events.trainer.distributed import leave

# On machines without a shared disk, rank 0 alone has what rank 0 has saved.
_FOLDERS = {
    "save": "{run_name}",
    "resume": "{run_name}",
    "apart": "{run_name}-rank{rank}",
    "rejoin": "{run_name}-rank{rank}",
    "signal": "{run_name}",
}


class Rows(LoggerDestination):
    """Writes the metrics of rank 0 into a file, as a destination should."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics, step=None):
        if self.rank == 0:
            with self.path.open("a") as file:
                file.write(json.dumps([step, dict(metrics)]) + "\n")

    def init(self, state: State, logger: Logger) -> None:
        self.rank = state.rank


class StopsOnRankOne(Callback):
    """One rank alone asks to stop."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.rank == 1 and state.timestamp.batch == 7:
            state.stop_training("rank 1 has seen enough")


class GetsSignalOnRankOne(Callback):
    """One rank alone gets SIGTERM, within an evaluation."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if state.rank == 1 and state.timestamp.batch == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def own_step(state: State, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trains without the wrapper that averages gradients, twice."""
    for optimizer in state.optimizers * 2:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(state.model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    return {"loss": loss, "metrics/train/rank": torch.tensor(float(state.rank))}


CALLBACKS = {"stop": StopsOnRankOne, "signal": GetsSignalOnRankOne}


class Samples(Callback):
    """Notes which samples are trained on."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.seen += state.batch[0][:, 3].int().tolist()
        state.batch = (state.batch[0][:, :3], state.batch[1])


def main(folder: Path, mode: str) -> None:
    """Trains ten batches a rank, in the way that the test asks for."""
    torch.manual_seed(0)
    points = torch.randn(40, 3)
    data = TensorDataset(torch.cat([points, torch.arange(40.0)[:, None]], 1), (points.sum(1) > 0).long())
    samples = Samples()
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    sampler = None
    kind, _, run_name = mode.partition(":")
    trainer = Trainer(
        model,
        None,
        DataLoader(TensorDataset(points, data.tensors[1]), batch_size=8),
        max_duration="2ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
        callbacks=[samples, *([CALLBACKS[kind]()] if kind in CALLBACKS else [])],
        train_step=own_step if kind == "own-step" else None,
        loggers=[Rows(folder / f"{kind}.jsonl")],
        device="cpu",
        device_train_microbatch_size=None if kind == "own-step" else 2,
        seed=3,
        run_name=run_name or None,
        save_folder=_FOLDERS.get(kind) and folder / _FOLDERS[kind],
        save_interval="3ba",
        autoresume=kind in {"resume", "rejoin"},
    )
    if kind != "no-sampler":
        sampler = DistributedSampler(data, trainer.state.world_size, trainer.state.rank, seed=5)
    trainer.state.train_dataloader = DataLoader(data, batch_size=4, sampler=sampler)
    seen = {"run_name": trainer.state.run_name, "refused": ""}
    seen["began_at"] = int(trainer.state.timestamp.batch)
    seen["began_with"] = [parameter.flatten().tolist() for parameter in model.parameters()]
    try:
        with trainer:
            trainer.fit()
    except (ValueError, CheckpointError) as error:
        seen["refused"] = str(error)
    except SystemExit as error:
        seen["exit"] = error.code
    seen |= {
        "seen": samples.seen,
        "status": str(trainer.state.status),
        "reason": trainer.state.stop_reason,
        "batch": int(trainer.state.timestamp.batch),
        "sample": int(trainer.state.timestamp.sample),
        "total_wct": trainer.state.timestamp.total_wct.total_seconds(),
        "loss": None if trainer.state.loss is None else float(trainer.state.loss),
        "weights": [parameter.flatten().tolist() for parameter in model.parameters()],
    }
    (folder / f"{kind}.rank{trainer.state.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    place, *modes = sys.argv[1:]
    # A forked rank has the handler of torch's agent.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if len(modes) > 1:
        distributed.init_process_group("gloo")
    for one in modes:
        main(Path(place), one)
    if len(modes) > 1:
        leave()
