"""The program of the ranks in test_shards.py; every rank gets the same data, whatever their number.

`shard_child.py folder PLAN ...`, started by torchrun, trains once for each plan. Without arguments it reads from
standard input lines `RANKS PORT folder PLAN ...`, forks as many ranks for each, and prints their wait statuses:
torch is imported once.

A plan is `NAME:KEY=VALUE,...`, the keys are the arguments of `run`. Each rank writes what it saw to
`folder/NAME.rankN.json`.
"""

import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import uploads
from destinations import Artifacts
from events import Callback, CheckpointSaver, CheckpointWriting, Trainer
from events.trainer.distributed import leave

# Files that this rank has fetched from a store.
FETCHED = []


def download_file(name, path, **options):
    """Downloads a file, and notes it."""
    FETCHED.append(name.partition("?")[0].rpartition("/")[2])
    return uploads.download.download_file(name, path, **options)


class Counts(Callback):
    """Has a state of its own on each rank."""

    def __init__(self):
        self.seen = []

    def batch_end(self, state, logger):
        torch.rand(1)
        self.seen.append(state.rank * 1000 + int(state.timestamp.batch))

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


class DiskIsFull(Callback):
    """Limits the last rank to files of a few bytes, from one batch to another."""

    def __init__(self, first, last):
        self.limits = {first: 100, last: resource.RLIM_INFINITY}

    def batch_start(self, state, logger):
        limit = self.limits.get(int(state.timestamp.batch))
        if state.rank == state.world_size - 1 and limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


class IsKilled(Callback):
    """Kills the last rank, like a failing node, once it has written the first file of a checkpoint."""

    def __init__(self, batch, folder):
        self.batch = batch
        self.folder = folder

    def batch_checkpoint(self, state, logger):
        # Runs after the saver, which has begun to write.
        if state.rank != state.world_size - 1 or state.timestamp.batch != self.batch:
            return
        while not list(self.folder.glob(f"*-ba{self.batch}/rank-{state.rank}.pt")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def network():
    """Returns a model with a tied parameter, a buffer, and sizes that no number of ranks divides."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 7),
        torch.nn.BatchNorm1d(7),
        torch.nn.Linear(7, 7),
        torch.nn.Linear(7, 7),
        torch.nn.Linear(7, 2),
    )
    model[3].weight = model[2].weight
    return model


def run(folder, name, **options):
    """Trains once.

    Args:
        folder: where ranks write what they saw.
        name: of the plan.
        options: `save`, the folder of checkpoints; `shard`, "fsdp" or "ddp"; `load`, a path, and `weights`,
            whether these alone; `resume`; `run`, its name; `store`, where `Artifacts` uploads; `kill`, the
            batch at whose checkpoint the last rank is killed; `full`, from which batch to which its disk is
            full; `batches`, how many; `keep`; `keep_in_store`; `process_bytes`.
    """
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    model = network()
    is_divided = options.get("shard", "fsdp") == "fsdp"
    if is_divided:
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    # With one state for each parameter: every operation on a part is planned once in each rank, which takes longest.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(7))
    FETCHED.clear()
    uploads.download_file = download_file
    saver = CheckpointSaver(
        options["save"],
        save_interval="4ba",
        sharded=None if is_divided else True,
        writing=CheckpointWriting(process_bytes=int(options.get("process_bytes", 1 << 30))),
        keep=int(options["keep"]) if "keep" in options else None,
        keep_in_store=int(options["keep_in_store"]) if "keep_in_store" in options else None,
        close_seconds=60,
    )
    counts = Counts()
    callbacks = [counts, saver]
    if "kill" in options:
        callbacks.append(IsKilled(int(options["kill"]), Path(options["save"])))
    if "full" in options:
        callbacks.append(DiskIsFull(*map(int, options["full"].split("-"))))
    destinations = []
    if "store" in options:
        spool = folder / f"spool{rank}"
        destinations = [Artifacts(options["store"], spool=spool, progress_bar=False, free_bytes=0)]
    trainer = Trainer(
        model,
        # Every rank has the same samples, so that the result does not depend on their number.
        [
            (points[start : start + 8], (points[start : start + 8].sum(1) > 0).long())
            for start in range(0, 40, 8)
        ],
        max_duration=f"{options.get('batches', 10)}ba",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9),
        callbacks=callbacks,
        loggers=destinations,
        run_name=options.get("run", "r"),
        device="cpu",
        load_path=options.get("load"),
        load_weights_only="weights" in options,
        autoresume="resume" in options,
        seed=3,
    )
    seen = {
        "start": int(trainer.state.timestamp.batch),
        "began": trainer.state.last_checkpoint,
        "seen": list(counts.seen),
        "fetched": sorted(FETCHED),
        "weights": [whole(value).flatten().tolist() for value in model.state_dict().values()],
    }
    with trainer:
        if options.get("batches") != "0":
            trainer.fit()
    states = optimizer.state_dict()["state"].values()
    digest = hashlib.sha256()
    for value in [*model.state_dict().values(), *(value for values in states for value in values.values())]:
        digest.update(whole(value).numpy().tobytes())
    seen |= {
        "digest": digest.hexdigest(),
        "failed": saver.counts.failed,
        "saved": saver.counts.saved,
        "last": trainer.state.last_checkpoint,
        "random": float(torch.rand(())),
    }
    (folder / f"{name}.rank{rank}.json").write_text(json.dumps(seen))


def whole(value):
    """Returns a tensor joined from the parts of all ranks."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def main(folder, plans):
    """Trains once for each plan."""
    distributed.init_process_group("gloo")
    for plan in plans:
        name, _, options = plan.partition(":")
        run(Path(folder), name, **dict(option.split("=", 1) for option in options.split(",") if option))
    leave()


def serve():
    """Forks ranks for each line."""
    for name in ("torch.distributed.checkpoint", "torch.distributed.elastic.agent.server"):
        importlib.import_module(name)  # As each fork would.
    for line in sys.stdin:
        ranks, port, folder, *plans = line.split()
        children = []
        for rank in range(int(ranks)):
            children.append(os.fork())
            if children[-1]:
                continue
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            try:
                main(folder, plans)
            except BaseException:  # noqa: BLE001  # the status says it
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(*(os.waitpid(child, 0)[1] for child in children), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else serve()
