"""The program of each rank in test_ranks.py: `rank_child.py MODE FOLDER`, started by torchrun.

`train`: a Trainer with every destination. `elastic`: a loop of its own; in the first session, the last rank
kills itself with SIGKILL in the middle. `hang`: rank 1 sleeps for ever instead of entering a collective.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from destinations import Artifacts, Console, ProgressBar, RunDirectory
from events import Callback, FlightRecorder, Run, TimeLedger, Trainer
from events.trainer.distributed import join

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class CountsCollectives:
    """Counts the collectives that are entered by code of this repository other than the trainer's own."""

    NAMES = (
        "all_reduce",
        "all_gather_object",
        "barrier",
        "broadcast_object_list",
        "gather_object",
        "broadcast",
    )

    def __init__(self):
        self.callers = []
        for name in self.NAMES:
            setattr(distributed, name, self.counted(getattr(distributed, name)))

    def counted(self, function):
        def call(*args, **kwargs):
            self.callers.append(sys._getframe(1).f_code.co_filename)
            return function(*args, **kwargs)

        return call


class UploadsAFile(Callback):
    """Each rank gives a file to the destinations."""

    def fit_end(self, state, logger):
        path = FOLDER / f"source{RANK}"
        path.write_text(f"of rank {RANK}")
        logger.upload_file(f"note-{RANK}.txt", path)


def train():
    """Two epochs with a Trainer; the ranks agree on the name of the run, which isn't given."""
    counts = CountsCollectives()
    torch.manual_seed(0)
    points = torch.randn(32, 3)
    data = TensorDataset(points, (points.sum(1) > 0).long())
    model = torch.nn.Linear(3, 2)
    join(torch.device("cpu"))
    sampler = DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK)
    with Trainer(
        model,
        DataLoader(data, batch_size=4, sampler=sampler),
        max_duration="2ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[UploadsAFile(), FlightRecorder()],
        loggers=[
            RunDirectory(FOLDER / "runs" / "{run_name}", all_ranks=True),
            Artifacts(FOLDER / "store" / "rank{rank}", spool=FOLDER / "spools" / str(RANK), free_bytes=0),
            Console(),
            ProgressBar(),
        ],
        device="cpu",
        raise_errors=True,
    ) as trainer:
        trainer.fit()
        trainer.logger.log_metrics({"own": float(RANK)})
    strangers = [one for one in counts.callers if "/destinations/" in one or "/uploads/" in one]
    (FOLDER / f"seen{RANK}").write_text(f"{trainer.state.run_name} {len(counts.callers) > 0} {strangers}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


def elastic():
    """Ten steps; in the first session, the last rank is killed after the fifth."""
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    has_begun = (FOLDER / "begun").exists()
    # As the Trainer does: restarted ranks must not find the addresses of dead ones.
    is_joined = join(torch.device("cpu"))
    folder = FOLDER / "runs" / "{run_name}"
    with Run(RunDirectory(folder, all_ranks=True, flush_seconds=0.05, if_exists="resume")) as run:
        for step in range(5 if has_begun else 0, 10):
            if is_joined:
                distributed.all_reduce(torch.zeros(1))
            run.log_metrics({"loss": float(RANK + step), "session": restart}, step=step)
            if step == 4 and not has_begun:
                (FOLDER / f"row{RANK}").touch()
                if RANK == WORLD_SIZE - 1:
                    while len(list(FOLDER.glob("row*"))) < WORLD_SIZE:
                        time.sleep(0.01)
                    (FOLDER / "begun").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
    if is_joined:
        distributed.destroy_process_group()


def hang():
    """Rank 1 never enters the collective; the others wait for it."""
    distributed.init_process_group("gloo")
    recorder = FlightRecorder(hang_seconds=2)
    run = Run(RunDirectory(FOLDER / "run"), [recorder, TimeLedger()], run_name="hangs")
    for step in range(3):
        run.log_metrics({"loss": 1.0 / (step + 1)})
        run.batch_end()
        if step == 2 and RANK == 1:
            with run.span("tokenize"):
                time.sleep(3600)
        distributed.all_reduce(torch.ones(1))


{"train": train, "elastic": elastic, "hang": hang}[MODE]()
