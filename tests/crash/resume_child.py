"""Draws trainings, interrupts and resumes each, and compares it with an uninterrupted one.

`python -m tests.crash.resume_child FOLDER FIRST COUNT`, or by torchrun on several ranks: prints a line for each draw
that differs, and how many there were. A draw is made by its number: `python -m tests.crash.resume_child /tmp/x 17 1`.
"""

import contextlib
import copy
import functools
import gc
import importlib
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from destinations import LoggerDestination
from events import Callback, Event, Trainer
from events.trainer.distributed import leave
from events.trainer.train_data import data_state

LOADERS = (
    "map", "map", "own-generator", "replacement", "subset-random", "weighted", "subset", "batch-sampler", "unbatched",
    "hidden-order", "position-sampler", "yielded-sampler", "epoch-sampler", "iterable", "stateful-iterable",
    "stateful-loader", "plain-loader", "list",
)  # fmt: skip
OF_RANKS = ("distributed", "distributed-batches", "rank-stream", "rank-loader")
NOISES = ("none", "torch", "numpy", "python", "own-torch", "own-numpy", "own-legacy", "own-python")
LOSSES = ("plain", "plain", "centers", "partial", "noisy", "parameter")
CALLBACKS = ("mixup", "average", "freeze", "unfreeze", "group")
RESIZED = (
    "map", "own-generator", "replacement", "subset-random", "weighted", "subset", "batch-sampler", "hidden-order",
    "epoch-sampler", "distributed", "distributed-batches",
)  # fmt: skip
DURATIONS = ("3ep", "8ba", "13ba", "37sp", "90tok", "2iter")
INTERVALS = ("1ba", "2ba", "3ba", "5ba", "1ep", "2ep", "11sp", "30tok", "1iter")
ITERATORS = []
WAYS = ("raise", "raise", "signal", "kill", "exit")
WAYS_OF_RANKS = ("raise", "signal")
# `fit` does not watch for signals here yet.
BEFORE_FIT = {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD}


@attrs.frozen
class Draw:
    """A training, and how it is interrupted."""

    number: int
    loader: str
    noise: str
    collate_noise: str
    samples: int
    batch_size: int
    drop_last: bool
    workers: int
    persistent: bool
    prefetch: int
    skip_by: str
    limit: int | None
    duration: str
    save_interval: str
    evaluation: str | None
    optimizer: str
    each_batch: bool
    microbatch: int | None
    ways: tuple[str, ...]
    loss: str
    callbacks: tuple[str, ...]
    resized: tuple[int, ...]
    own_step: bool


def draw_number(number, ranks):
    """Returns the draw for a number, the same in every process."""
    pick = random.Random(number)
    loader = pick.choice(OF_RANKS if ranks > 1 else LOADERS)
    has_workers = pick.random() < 0.2 and loader not in {
        "stateful-loader",
        "plain-loader",
        "rank-loader",
        "list",
    }
    persistent = has_workers and pick.random() < 0.5
    noise, collate_noise = pick.choice(NOISES), pick.choice(("none", "none", *NOISES))
    if persistent:
        # Random numbers that workers draw in a later epoch can't be saved; a warning reports it.
        noise = collate_noise = "none"
    # Loaders that continue in the next epoch may leave it less than a batch. One that continues only where
    # it was loaded looks the same; a warning reports it.
    goes_on = loader in {"position-sampler", "stateful-iterable", "rank-stream"}
    # These may be at their end where the limit ends an epoch: the next would be empty.
    has_end = loader in {
        "yielded-sampler",
        "stateful-iterable",
        "stateful-loader",
        "rank-stream",
        "rank-loader",
    }
    draw = Draw(
        number=number,
        loader=loader,
        noise=noise,
        collate_noise=collate_noise,
        samples=pick.randint(7, 23) * ranks,
        batch_size=pick.randint(2, 4),
        drop_last=pick.random() < 0.4 and not goes_on,
        workers=pick.choice((1, 2)) if has_workers else 0,
        persistent=persistent,
        prefetch=pick.randint(1, 3),
        # By index, workers draw different numbers; a warning reports it.
        skip_by=pick.choice(("auto", "auto", "reading")),
        limit=None if has_end else pick.choice((None, None, None, 1, 2, 3)),
        duration=pick.choice(DURATIONS),
        save_interval=pick.choice(INTERVALS),
        evaluation=pick.choice((None, "1ep", "2ba", "3ba")),
        optimizer=pick.choice(("SGD", "Adam", "AdamW", "RMSprop", "NAdam")),
        each_batch=pick.random() < 0.5,
        microbatch=pick.choice((None, None, 1, 2)),
        ways=tuple(pick.choice(WAYS if ranks == 1 else WAYS_OF_RANKS) for _ in range(pick.choice((1, 1, 2)))),
        loss=pick.choice(LOSSES),
        callbacks=tuple(pick.choice(CALLBACKS) for _ in range(pick.choice((0, 1, 2)))),
        resized=(),
        own_step=pick.random() < 0.25,
    )
    if draw.own_step:
        draw = attrs.evolve(draw, microbatch=None)
    if pick.random() < 0.2 and loader in RESIZED:
        # Other batches have other losses: the samples are compared, and the state that a resume begins with.
        sizes = tuple(pick.randint(1, 5) for _ in draw.ways)
        plain = {"noise": "none", "collate_noise": "none", "callbacks": (), "drop_last": False, "limit": None}
        plain["own_step"] = False
        draw = attrs.evolve(draw, resized=sizes, duration="3ep", evaluation=None, **plain)
    if draw.duration == "90tok" and loader in {"unbatched", "list", "subset"}:
        # Their batches have no tokens: such a run never ends, and is refused.
        draw = attrs.evolve(draw, duration="13ba")
    if loader in {"stateful-iterable", "rank-stream"}:
        # The state that a worker keeps from epoch to epoch is invisible; a warning reports it.
        draw = attrs.evolve(draw, persistent=False)
    if ranks > 1:
        # With Python 3.11, a process that is forked while a thread of gloo comes or goes may never begin.
        # DistributedDataParallel waits for the gradient of each weight that had one when it was made.
        callbacks = tuple(one for one in draw.callbacks if one != "unfreeze")
        draw = attrs.evolve(draw, workers=0, persistent=False, callbacks=callbacks)
    return draw


class DataLoader(torch.utils.data.DataLoader):
    """Notes its iterators: one that is left to the garbage collector waits five seconds for each worker."""

    def _get_iterator(self):
        iterator = super()._get_iterator()
        ITERATORS.append(iterator)
        return iterator


def end_workers():
    """Ends the processes of all loaders."""
    while ITERATORS:
        iterator = ITERATORS.pop()
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


class Noise:
    """Draws numbers from one of the generators that a user may use."""

    def __init__(self, kind, seed):
        self.kind = kind
        self.generators = {
            "own-torch": lambda: [torch.Generator().manual_seed(seed)],
            "own-numpy": lambda: [np.random.default_rng(seed)],
            "own-legacy": lambda: [np.random.RandomState(seed)],
            "own-python": lambda: [random.Random(seed)],
        }.get(kind, list)()

    def __call__(self):
        if self.kind == "none":
            return 0.0
        if self.generators and self.kind != "own-torch":
            return self.generators[0].random()
        if "torch" in self.kind:
            return float(torch.rand((), generator=self.generators[0] if self.generators else None))
        return np.random.random() if self.kind == "numpy" else random.random()  # noqa: NPY002  # as users do


def sample(index, noise):
    """Returns a point and its class."""
    return torch.tensor([index % 5, index % 3 - 1.0, 1.0]) + noise(), index % 2


class Points(Dataset):
    """Points in space, moved at random."""

    max_seq_len = 3

    def __init__(self, samples, noise):
        self.samples, self.noise = samples, noise

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return sample(index, self.noise)


class Stream(IterableDataset):
    """The same points, one after the other, by rank and worker."""

    max_seq_len = 3

    def __init__(self, samples, noise, rank=0, ranks=1):
        self.samples, self.noise, self.rank, self.ranks = samples, noise, rank, ranks

    def order(self):
        worker = torch.utils.data.get_worker_info()
        own = range(self.samples)[self.rank :: self.ranks]
        return own if worker is None else own[worker.id :: worker.num_workers]

    def __iter__(self):
        for index in self.order():
            yield sample(index, self.noise)


class StatefulStream(Stream):
    """A stream that knows its position, and takes another order each time."""

    epoch = next = 0

    def __iter__(self):
        order = list(self.order())
        random.Random(self.epoch).shuffle(order)
        while self.next < len(order):
            self.next += 1
            yield sample(order[self.next - 1], self.noise)
        self.epoch, self.next = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state):
        self.epoch, self.next = state["epoch"], state["next"]


class HiddenOrder(Sampler):
    """Shuffles by a generator of numpy."""

    def __init__(self, samples):
        self.samples, self.draw = samples, {"order": np.random.default_rng(5)}

    def __len__(self):
        return self.samples

    def __iter__(self):
        return iter(self.draw["order"].permutation(self.samples).tolist())


class PositionSampler(HiddenOrder):
    """Continues at its position, in this process too."""

    def __init__(self, samples):
        self.samples, self.rest, self.seed = samples, [], 0

    def __iter__(self):
        if not self.rest:
            self.seed += 1
            self.rest = random.Random(self.seed).sample(range(self.samples), self.samples)
        while self.rest:
            yield self.rest.pop()

    def state_dict(self):
        return {"rest": self.rest, "seed": self.seed}

    def load_state_dict(self, state):
        self.rest, self.seed = list(state["rest"]), state["seed"]


class YieldedSampler(HiddenOrder):
    """Like torchdata's: counts the indices it has given, and skips as many after it was loaded."""

    epoch = yielded = 0
    next_yielded = None

    def __init__(self, samples):
        self.samples = samples

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.yielded, self.next_yielded = self.next_yielded or 0, None
        for index in random.Random(self.epoch).sample(range(self.samples), self.samples)[self.yielded :]:
            self.yielded += 1
            yield index

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.next_yielded = state["yielded"]


class EpochSampler(HiddenOrder):
    """Its state describes an epoch, not a position in it."""

    def __init__(self, samples):
        self.samples, self.epoch = samples, 0

    def __iter__(self):
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(self.samples), self.samples))

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class PlainLoader:
    """A loader that is not torch's, with generators somewhere in it."""

    def __init__(self, dataset, batch_size, indices):
        self.dataset, self.batch_size, self.indices = dataset, batch_size, indices
        self.inside = {"draw": np.random.default_rng(9)}

    def batches(self):
        order = self.inside["draw"].permutation(self.indices).tolist()
        return [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]

    def batch(self, indices):
        return torch.utils.data.default_collate([self.dataset[index] for index in indices])

    def __iter__(self):
        for indices in self.batches():
            yield self.batch(indices)


class StatefulLoader(PlainLoader):
    """A loader that knows its position, and begins anew if that is the end."""

    rest = ()

    def __len__(self):
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self):
        if not self.rest:
            self.rest = self.batches()
        while self.rest:
            indices, *self.rest = self.rest
            yield self.batch(indices)

    def state_dict(self):
        return {"rest": [list(one) for one in self.rest]}

    def load_state_dict(self, state):
        self.rest = state["rest"]


def collate(noise, samples):
    """Returns a batch, moved at random as a whole."""
    points, classes = torch.utils.data.default_collate(samples)
    return points + noise(), classes


def samplers(draw, count, ranks):
    """Returns samplers by the kind of loader."""
    generator = torch.Generator().manual_seed(3)
    return {
        "own-generator": lambda: RandomSampler(range(count), generator=generator),
        "replacement": lambda: RandomSampler(
            range(count), replacement=True, num_samples=count, generator=generator
        ),
        "subset-random": lambda: SubsetRandomSampler(range(0, count, 2)),
        "weighted": lambda: WeightedRandomSampler(
            torch.arange(1.0, count + 1).tolist(), count, generator=generator
        ),
        "hidden-order": lambda: HiddenOrder(count),
        "position-sampler": lambda: PositionSampler(count),
        "yielded-sampler": lambda: YieldedSampler(count),
        "epoch-sampler": lambda: EpochSampler(count),
        "distributed": lambda: DistributedSampler(range(count), ranks, seed=draw.number),
    }


def make_loader(draw, rank, ranks):
    """Returns the loader of training."""
    noise, own = Noise(draw.noise, 11 + rank), Noise(draw.collate_noise, 12 + rank)
    points = Points(draw.samples, noise)
    own_indices = range(rank, draw.samples, ranks)
    if draw.loader == "list":
        return list(PlainLoader(points, draw.batch_size, own_indices))
    if draw.loader in {"plain-loader", "stateful-loader", "rank-loader"}:
        return (PlainLoader if draw.loader == "plain-loader" else StatefulLoader)(
            points, draw.batch_size, own_indices
        )
    options = {
        "num_workers": draw.workers,
        "persistent_workers": draw.persistent,
        "prefetch_factor": draw.prefetch if draw.workers else None,
        "multiprocessing_context": "fork" if draw.workers else None,
    }
    if draw.collate_noise != "none":
        options["collate_fn"] = functools.partial(collate, own)
    batches = options | {"batch_size": draw.batch_size, "drop_last": draw.drop_last}
    if draw.loader in {"iterable", "stateful-iterable", "rank-stream"}:
        kind = Stream if draw.loader == "iterable" else StatefulStream
        return DataLoader(kind(draw.samples, noise, rank, ranks), **batches)
    if draw.loader == "subset":
        return DataLoader(Subset(points, range(0, draw.samples, 2)), shuffle=True, **batches)
    if draw.loader in {"batch-sampler", "distributed-batches"}:
        inner = (
            RandomSampler(points)
            if ranks == 1
            else BatchSampler(DistributedSampler(points, ranks, rank), 1, drop_last=False).sampler
        )
        return DataLoader(
            points, batch_sampler=BatchSampler(inner, draw.batch_size, draw.drop_last), **options
        )
    if draw.loader == "unbatched":
        order = BatchSampler(SequentialSampler(points), draw.batch_size, draw.drop_last)
        data = [collate(own, [points[index] for index in indices]) for indices in order]
        options.pop("collate_fn", None)
        return DataLoader(data, batch_size=None, shuffle=True, **options)
    if draw.loader == "map":
        generator = torch.Generator().manual_seed(2) if draw.number % 2 else None
        return DataLoader(points, shuffle=True, generator=generator, **batches)
    if draw.loader == "distributed":
        return DataLoader(
            points, sampler=DistributedSampler(points, ranks, rank, seed=draw.number), **batches
        )
    return DataLoader(points, sampler=samplers(draw, draw.samples, ranks)[draw.loader](), **batches)


class Rows(LoggerDestination):
    """Writes rows into a file, and drops the rows that a loaded checkpoint doesn't know."""

    def __init__(self, path):
        self.path, self.count, self.lines = path, 0, []

    def fit_start(self, state, logger):
        self.lines = self.path.read_text().splitlines()[: self.count] if self.path.exists() else []
        self.path.write_text("".join(f"{line}\n" for line in self.lines))

    def log_metrics(self, metrics, step=None):
        values = {name: float(value).hex() for name, value in metrics.items()}
        self.lines.append(json.dumps([step, values]))
        with self.path.open("a") as file:
            file.write(f"{self.lines[-1]}\n")

    def state_dict(self):
        return {"count": len(self.lines)}

    def load_state_dict(self, state):
        self.count = state["count"]


class Samples(Rows):
    """Writes the samples of each batch: they are the same in batches of any size."""

    def log_metrics(self, metrics, step=None):
        """Leaves out the values."""

    def batch_start(self, state, logger):
        for point in state.batch[0].tolist():
            self.lines.append(json.dumps(point))
        self.path.write_text("".join(f"{line}\n" for line in self.lines))


class Centers(torch.nn.Module):
    """A loss with a trained center for each class, and numbers of its own."""

    def __init__(self, is_noisy):
        super().__init__()
        self.centers = torch.nn.Parameter(torch.zeros(2, 2))
        self.generator = torch.Generator().manual_seed(8) if is_noisy else None

    def forward(self, outputs, targets, share=1.0):
        if self.generator is not None:
            outputs = outputs + torch.randn(outputs.shape, generator=self.generator)
        distance = (outputs - self.centers[targets]).pow(2).mean()
        return torch.nn.functional.cross_entropy(outputs, targets) + share * distance


def make_loss(kind):
    """Returns a loss, and its parameters."""
    if kind == "plain":
        return torch.nn.functional.cross_entropy, []
    loss = Centers(kind == "noisy")
    if kind == "parameter":
        centers = loss.centers
        return lambda outputs, targets: (outputs - centers[targets]).pow(2).mean(), [centers]
    return functools.partial(loss, share=0.5) if kind == "partial" else loss, list(loss.parameters())


class Changes(Callback):
    """Changes training in one of the ways in which callbacks do, and has no state."""

    def __init__(self, kind, number):
        self.kind, self.noise, self.average = kind, [Noise("own-numpy", number)], None

    def fit_start(self, state, logger):
        if self.kind == "average":
            self.average = copy.deepcopy(state.model).requires_grad_(requires_grad=False)

    def batch_start(self, state, logger):
        if self.kind == "mixup":
            state.batch = (state.batch[0] * (0.5 + self.noise[0]()), state.batch[1])
        if self.kind == "average":
            state.batch = (state.batch[0] + 0.01 * self.average[0].weight.sum(), state.batch[1])

    def batch_end(self, state, logger):
        batch, model = state.timestamp.batch, state.model
        if self.kind == "average":
            for mean, weight in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.data.mul_(0.9).add_(0.1 * weight.data)
        if self.kind == "freeze" and batch == 3:
            model[1].eval()
        if self.kind == "unfreeze" and batch in {2, 4}:
            model[0].bias.requires_grad_(requires_grad=batch == 4)
        if self.kind == "group" and batch == 3:
            groups = state.optimizers[0].param_groups
            known = {id(one) for group in groups for one in group["params"]}
            new = [one for one in model.parameters() if id(one) not in known]
            if new:
                state.optimizers[0].add_param_group({"params": new, "lr": 0.01})


class Interrupted(BaseException):
    """Ends training at an event."""


class Interrupts(Callback):
    """Notes events, and ends training at one of them."""

    def __init__(self, at=None, way="raise"):
        self.seen, self.at, self.way = [], at, way

    def run_event(self, event, state, logger):
        self.seen.append(event)
        if self.at == (event, self.seen.count(event)):
            if self.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.way == "exit":
                os._exit(3)
            if self.way != "signal" or event in BEFORE_FIT:
                raise Interrupted
            if state.rank == state.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)


def take_turns(loss_fn, state, batch):
    """Trains the halves of the model in turn, each by its optimizer."""
    losses = {}
    for name, optimizer in zip(("first", "second"), state.optimizers, strict=True):
        losses[name] = loss_fn(state.model(batch[0]), batch[1])
        optimizer.zero_grad()
        losses[name].backward()
        optimizer.step()
    return losses


def train(draw, folder, interrupts, rank=0, ranks=1, attempt=None):
    """Trains from the last position; returns everything that must be equal at the end."""
    if attempt is not None and draw.resized:
        draw = attrs.evolve(draw, batch_size=draw.resized[attempt])
    torch.manual_seed(draw.number)
    np.random.seed(draw.number)  # noqa: NPY002  # as users do
    random.seed(draw.number)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 2))
    options = {"momentum": 0.9} if draw.optimizer == "SGD" else {}
    loss, more = make_loss(draw.loss)
    # Without the last bias, which a callback may add later.
    trained = [*model.parameters()][: -1 if "group" in draw.callbacks else None]
    of_first = (trained[:2] if draw.own_step else trained) + more
    optimizer = getattr(torch.optim, draw.optimizer)(of_first, lr=0.05, **options)
    optimizers = [optimizer, torch.optim.Adam(trained[2:], lr=0.03)] if draw.own_step else [optimizer]
    evaluation = {}
    if draw.evaluation is not None:
        workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        points = Points(
            5, Noise("own-numpy" if draw.number % 3 else "torch", 4) if draw.number % 7 else Noise("none", 0)
        )
        evaluation = {
            "eval_dataloader": DataLoader(
                points, batch_size=2, shuffle=bool(draw.number % 2), **({} if draw.number % 7 else workers)
            ),
            "eval_interval": draw.evaluation,
        }
    rows = (Samples if draw.resized else Rows)(folder / "rows" if rank == 0 else Path(os.devnull))
    trainer = Trainer(
        model,
        make_loader(draw, rank, ranks),
        max_duration=draw.duration,
        loss_fn=loss,
        optimizers=optimizers,
        train_step=functools.partial(take_turns, loss) if draw.own_step else None,
        schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        step_schedulers_every_batch=draw.each_batch,
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
        callbacks=[*(Changes(kind, index) for index, kind in enumerate(draw.callbacks)), interrupts],
        loggers=rows,
        run_name="run",
        seed=draw.number,
        device="cpu",
        iteration_length="2ep",
        train_subset_num_batches=draw.limit,
        device_train_microbatch_size=draw.microbatch,
        save_folder=folder / "saved",
        save_interval=draw.save_interval,
        autoresume=True,
        skip_by=draw.skip_by,
        **evaluation,
    )
    try:
        with trainer:
            trainer.fit()
    finally:
        end_workers()
    state = trainer.state
    drawn = data_state(state)
    if draw.resized:
        return {"rows": rows.lines if rank == 0 else [], "sample": int(state.timestamp.sample)}
    return {
        "held": drawn["held"],
        "parts": state.parts.states(state.parts.find())["modules"],
        "modes": [one.training for one in model.modules()],
        "weights": model.state_dict(),
        "optimizers": [one.state_dict() for one in optimizers],
        "schedulers": [one.state_dict() for one in state.schedulers],
        "random": drawn["global"],
        "generators": drawn["dataloader"],
        "evaluation": drawn["evaluators"],
        "timestamp": {name: one for name, one in state.timestamp.to_numbers().items() if "wct" not in name},
        "rows": rows.lines if rank == 0 else [],
    }


def difference(one, other, place=""):
    """Returns where two values differ first, or None."""
    if isinstance(one, torch.Tensor):
        # Some draws diverge: NaN equals NaN here.
        is_same = one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        return None if is_same else f"{place}: {one} and {other}"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{place}: {sorted(map(str, one))} and {sorted(map(str, other))}"
        found = (difference(one[key], other[key], f"{place}/{key}") for key in one)
        return next((text for text in found if text is not None), None)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{place}: {len(one)} and {len(other)} items"
        found = (
            difference(*pair, f"{place}/{index}") for index, pair in enumerate(zip(one, other, strict=True))
        )
        return next((text for text in found if text is not None), None)
    return None if one == other else f"{place}: {one} and {other}"


def interrupt(draw, way, folder, interrupts, rank, ranks, attempt):
    """Trains until the interruption, in a separate process if the interruption ends it."""
    if way in WAYS_OF_RANKS:
        # A worker forked by torchrun has a handler of its own, which `fit` calls.
        with contextlib.suppress(Interrupted, SystemExit, SignalException):
            train(draw, folder, interrupts, rank, ranks, attempt)
        return
    child = os.fork()
    if child == 0:
        try:
            train(draw, folder, interrupts, attempt=attempt)
        except BaseException:  # noqa: BLE001  # the status says it
            traceback.print_exc()
            os._exit(4)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in {-signal.SIGKILL if way == "kill" else 3, 0}:
        raise RuntimeError(f"the interrupted process ended with {code}")


def check(number, folder, rank=0, ranks=1):
    """Returns how the resumed run of a draw differs, or None."""
    draw = draw_number(number, ranks)
    place = folder / str(number)
    (place / "whole").mkdir(parents=True, exist_ok=True)
    (place / "resumed").mkdir(parents=True, exist_ok=True)
    seen = Interrupts()
    expected = train(draw, place / "whole", seen, rank, ranks)
    pick = random.Random(-number - 1)
    points = []
    for index, way in enumerate(draw.ways):
        event = pick.choice([one for one in Event if one in seen.seen])
        points.append((event, pick.randint(1, seen.seen.count(event))))
        # The first attempt starts like the uninterrupted run.
        attempt = None if index == 0 else index - 1
        interrupt(draw, way, place / "resumed", Interrupts(points[-1], way), rank, ranks, attempt)
    found = difference(
        expected, train(draw, place / "resumed", Interrupts(), rank, ranks, attempt=len(draw.ways) - 1)
    )
    if found is None:
        return None
    return f"{draw}, interrupted at {[f'{event} {time}' for event, time in points]}: {found[:400]}"


def main(folder, first, count):
    """Checks draws, and says which differ."""
    torch.set_num_threads(1)
    logging.disable()
    importlib.import_module("torch._dynamo")  # As the first optimizer of each process would.
    gc.freeze()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if ranks > 1:
        distributed.init_process_group("gloo")
    failed = 0
    for number in range(first, first + count):
        try:
            found = check(number, folder, rank, ranks)
        except Exception:  # noqa: BLE001  # it is shown, with the draw
            found = f"{draw_number(number, ranks)}\n{traceback.format_exc()}"
            if ranks > 1:
                print(f"DIFFERS {number} on rank {rank}: {found}", flush=True)
                os._exit(1)
        # The interrupted run is in reference cycles, and its loaders' processes go with it.
        gc.collect()
        if found is not None:
            failed += 1
            print(f"DIFFERS {number} on rank {rank}: {found}", flush=True)
        if ranks > 1:
            distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder / str(number), ignore_errors=True)
    if rank == 0:
        print(f"{count} draws from {first} on {ranks} ranks, {failed} differ", flush=True)
    if ranks > 1:
        leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
