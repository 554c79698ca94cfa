"""Training data: skipping, restoring, and warnings."""

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from events import Callback, CheckpointError, read_checkpoint
from events.trainer.random_state import generator_states, generators_in, random_state_of, restore_random_state
from events.trainer.train_data import samplers_of


class Counted(Dataset):
    """Counts what is read."""

    def __init__(self, samples=20):
        self.samples, self.read = samples, []

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((3,), float(index)), index % 2


class Batches(Callback):
    """Notes what each batch holds, and ends training after some."""

    def __init__(self, end=None):
        self.seen, self.end = [], end

    def batch_start(self, state, logger):
        self.seen.append(state.batch[0][:, 0].tolist())

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == self.end:
            raise KeyboardInterrupt


@pytest.fixture
def resume(make_trainer, tmp_path):
    """Trains without and with an interruption; returns the batches of both, and of the resumed part."""

    def resume(make_loader, *, after=7, **arguments):
        whole, first, second = Batches(), Batches(after), Batches()
        make_trainer(train_dataloader=make_loader(), callbacks=whole, **arguments).fit()
        saving = {
            "save_folder": tmp_path / "saved",
            "save_interval": f"{after - 1}ba",
            "autoresume": True,
            **arguments,
        }
        with pytest.raises(KeyboardInterrupt):
            make_trainer(train_dataloader=make_loader(), callbacks=first, **saving).fit()
        at = read_checkpoint(tmp_path / "saved")["timestamp"]["batch"]
        loader = make_loader()

        make_trainer(train_dataloader=loader, callbacks=second, **saving).fit()

        return whole.seen, first.seen[:at] + second.seen, loader

    return resume


def test_a_map_dataset_is_not_read_again(resume):
    """The dataset is asked for the remaining samples alone, and not for one that was trained on."""
    whole, resumed, loader = resume(lambda: DataLoader(Counted(), batch_size=4, shuffle=True), after=9)

    assert resumed == whole
    assert loader.dataset.read == [index for batch in whole[8:] for index in batch]


def test_a_map_dataset_with_workers_is_read_again_with_a_warning(resume, caplog):
    """Workers may draw random numbers for each sample; the message names the argument that reads none."""
    whole, resumed, _ = resume(
        lambda: DataLoader(
            Counted(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="fork"
        ),
        after=9,
    )

    assert resumed == whole
    assert caplog.text.count("3 batches of this epoch are read again and thrown away") == 1


def test_by_reading_it_is_read_again(resume):
    """The argument says so."""
    whole, resumed, loader = resume(
        lambda: DataLoader(Counted(), batch_size=4, shuffle=True), skip_by="reading"
    )

    assert resumed == whole
    assert len(loader.dataset.read) == 20


def test_an_unknown_way_is_refused(make_trainer):
    """With those that there are."""
    with pytest.raises(ValueError, match="skip_by must be one of auto, index, reading, got 'magic'"):
        make_trainer(skip_by="magic")


def test_persistent_workers_are_resumed_with_the_same_order(resume):
    """A new process draws their seed, which a reused one does not: the order differed, and samples were missing."""
    whole, resumed, _ = resume(
        lambda: DataLoader(
            Counted(),
            batch_size=4,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
    )

    assert resumed == whole
    assert sorted(index for batch in resumed[5:10] for index in batch) == [
        float(index) for index in range(20)
    ]


class Noisy(Counted):
    """Draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self.draws = {"numpy": np.random.default_rng(1), "legacy": np.random.RandomState(2)}

    def __getitem__(self, index):
        points, target = super().__getitem__(index)
        return points + self.draws["numpy"].random() + self.draws["legacy"].rand(), target


def moved(draw, samples):
    """Collates samples, and moves them."""
    points, targets = torch.utils.data.default_collate(samples)
    return points + draw.random(), targets


class NumpyOrder(Sampler):
    """Shuffles by numpy."""

    def __init__(self):
        self.draw = np.random.default_rng(3)

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(self.draw.permutation(20).tolist())


def test_generators_of_dataset_sampler_and_collate_are_saved(resume):
    """Numpy's and Python's, wherever they are held."""
    whole, resumed, _ = resume(
        lambda: DataLoader(
            Noisy(), batch_size=4, sampler=NumpyOrder(), collate_fn=functools.partial(moved, random.Random(4))
        )
    )

    assert resumed == whole


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_each_generator_of_numpy_is_saved_as_plain_values(tmp_path, kind):
    """It draws the same after it was loaded."""
    loader = DataLoader(
        [0], collate_fn=functools.partial(moved, np.random.Generator(getattr(np.random, kind)(5)))
    )
    draw = loader.collate_fn.args[0]
    draw.integers(9, dtype=np.uint8)
    torch.save(random_state_of(loader), tmp_path / "state.pt")
    expected = [draw.random(), draw.normal(), draw.integers(9, dtype=np.uint8)]

    missing = restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True), loader)

    assert missing == []
    assert [draw.random(), draw.normal(), draw.integers(9, dtype=np.uint8)] == expected


def test_generators_are_named_by_their_place():
    """The same one in two places has one name."""
    shared = torch.Generator()
    loader = DataLoader(Noisy(), sampler=RandomSampler(range(3), generator=shared), generator=shared)

    assert sorted(generator_states(generators_in(loader))) == [
        "dataset.draws['legacy']",
        "dataset.draws['numpy']",
        "generator",
    ]


def test_a_missing_generator_is_reported(make_trainer, tmp_path, caplog):
    """A warning names it when the run resumes."""
    make_trainer(
        train_dataloader=DataLoader(Noisy(), batch_size=4), save_folder=tmp_path, max_duration="3ba"
    ).fit()
    loader = DataLoader(Counted(), batch_size=4)

    make_trainer(train_dataloader=loader, save_folder=tmp_path, autoresume=True, max_duration="4ba").fit()

    assert "generators that no longer exist: dataset.draws['numpy'], dataset.draws['legacy']" in caplog.text


class Stream(IterableDataset):
    """Knows where it is."""

    def __init__(self):
        self.next, self.read = 0, []

    def __iter__(self):
        while self.next < 20:
            self.next += 1
            self.read.append(self.next)
            yield torch.full((3,), float(self.next)), self.next % 2
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_dataset_with_a_state_is_given_it_back(resume):
    """Nothing is read again."""
    whole, resumed, loader = resume(lambda: DataLoader(Stream(), batch_size=4))

    assert resumed == whole
    assert len(loader.dataset.read) < 20


def test_a_dataset_whose_last_batch_ended_it_does_not_begin_anew_in_the_same_epoch(resume):
    """A smaller batch ends the dataset's epoch, and its state then belongs to the next one."""
    whole, resumed, _ = resume(lambda: DataLoader(Stream(), batch_size=3), after=8)

    assert resumed == whole


class Loader:
    """A loader that knows where it is."""

    def __init__(self):
        self.order, self.next = [], 0

    def __iter__(self):
        if not self.order:
            self.order = torch.randperm(20).split(4)
        while self.next < len(self.order):
            yield self.batch()
        self.order, self.next = [], 0

    def batch(self):
        self.next += 1
        indices = self.order[self.next - 1]
        return indices.float().unsqueeze(1).expand(-1, 3), indices % 2

    def state_dict(self):
        return {"order": [one.clone() for one in self.order], "next": self.next}

    def load_state_dict(self, state):
        self.order, self.next = state["order"], state["next"]


def test_a_loader_with_a_state_is_given_it_back(resume):
    """It goes on where it was."""
    whole, resumed, _ = resume(Loader)

    assert resumed == whole


class BeginsAnew(Loader):
    """One that begins its next epoch where it is asked at the end of one."""

    def __len__(self):
        return 5

    def __iter__(self):
        self.next %= 5
        if self.next == 0:
            self.order = torch.randperm(20).split(4)
        while self.next < 5:
            yield self.batch()


def test_a_loader_that_begins_anew_is_resumed_at_the_end_of_an_epoch(resume):
    """Its length says that the epoch is over, which has no batch of the next."""
    whole, resumed, _ = resume(BeginsAnew, after=6)

    assert resumed == whole


class Plain(IterableDataset):
    """A stream without a state."""

    def __iter__(self):
        return ((torch.zeros(3), 0) for _ in range(20))


class OwnOrder(NumpyOrder):
    """A sampler without a state."""


def out_of_order():
    """Returns a loader that gives batches as they come, which torch has an argument for from 2.6 on."""
    loader = DataLoader(Counted(), num_workers=1, multiprocessing_context="fork")
    loader.in_order = False
    return loader


@pytest.mark.parametrize(
    ("make_loader", "arguments", "words"),
    [
        (lambda: DataLoader(Plain(), batch_size=4), {}, "the IterableDataset Plain has no state_dict"),
        (
            lambda: DataLoader(Stream(), batch_size=4, num_workers=1, multiprocessing_context="fork"),
            {},
            "the IterableDataset Stream is iterated by workers",
        ),
        (lambda: iter([(torch.zeros(4, 3), torch.zeros(4).long())] * 9), {}, "list_iterator is an iterator"),
        (Loader, {}, "the Loader has no length, and may start over"),
        (
            lambda: DataLoader(Stream(), batch_size=4),
            {"train_subset_num_batches": 2},
            "ends an epoch where the dataset may want to continue",
        ),
        (
            out_of_order,
            {},
            "in_order=False gives batches in the order in which workers read them",
        ),
        (lambda: DataLoader(Counted(), sampler=OwnOrder()), {}, "the sampler OwnOrder has neither"),
        (
            lambda: DataLoader(Counted(), num_workers=1, multiprocessing_context="fork"),
            {"skip_by": "index"},
            "skip_by='index': random numbers that workers draw for Counted",
        ),
        (
            lambda: DataLoader(
                Counted(), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
            ),
            {},
            "persistent_workers=True: random numbers that workers draw for Counted from the second",
        ),
    ],
)
def test_inexact_loaders_cause_a_warning_when_training_begins(
    make_trainer, tmp_path, caplog, make_loader, arguments, words
):
    """One warning names it."""
    trainer = make_trainer(
        train_dataloader=make_loader(), save_folder=tmp_path, max_duration="1ba", **arguments
    )
    trainer.fit()
    trainer.fit("1ba")

    assert caplog.text.count(words) == 1


def test_exact_loaders_cause_no_warning(make_trainer, tmp_path, caplog):
    """A shuffled dataset without workers is."""
    make_trainer(save_folder=tmp_path).fit()

    assert "may not read the same samples" not in caplog.text


def test_a_sampler_inside_a_batch_sampler_gets_the_epoch(make_trainer):
    """Torchvision's references have such a sampler, which ranks need."""
    sampler = DistributedSampler(range(20), num_replicas=2, rank=0)
    loader = DataLoader(Counted(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))

    make_trainer(train_dataloader=loader).fit()

    assert sampler.epoch == 1
    assert samplers_of(loader)["batch_sampler.sampler"] is sampler


def test_training_twice_reads_all_data_in_between(make_trainer):
    """An epoch that one call of `fit` has begun is ended by the next, from an iterator too."""
    batches = Batches()
    loader = iter([(torch.full((4, 3), float(index)), torch.zeros(4).long()) for index in range(4)])
    trainer = make_trainer(train_dataloader=loader, callbacks=batches)

    trainer.fit("2ba")
    trainer.fit("2ba")

    assert [batch[0] for batch in batches.seen] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda size: DataLoader(Counted(18), batch_size=size, shuffle=True),
        lambda size: DataLoader(
            Counted(18), batch_size=size, shuffle=True, num_workers=1, multiprocessing_context="fork"
        ),
        lambda size: DataLoader(
            Counted(18), batch_sampler=BatchSampler(RandomSampler(range(18)), size, drop_last=False)
        ),
        lambda size: DataLoader(Stream(), batch_size=size),
    ],
    ids=["map", "workers", "batch-sampler", "stream"],
)
def test_another_batch_size_goes_on_at_the_same_sample(make_trainer, tmp_path, make_loader):
    """The samples and their order don't change, however often the batch size changes within an epoch."""
    seen, epochs = [], []
    for folder, parts in (("whole", ((2, None),)), ("parts", ((2, 3), (4, 5), (3, None)))):
        seen.append([])
        for size, end in parts:
            batches = Batches(end)
            trainer = make_trainer(
                train_dataloader=make_loader(size),
                callbacks=batches,
                save_folder=tmp_path / folder,
                save_interval="1ba",
                autoresume=True,
            )
            try:
                trainer.fit()
            except KeyboardInterrupt:
                # Its own callback comes before the saver's.
                batches.seen.pop()
            seen[-1] += [sample for batch in batches.seen for sample in batch]
        epochs.append(int(trainer.state.timestamp.sample))

    assert seen[1] == seen[0]
    assert epochs[1] == epochs[0]


class OwnBatches(BatchSampler):
    """May put batches together as it likes."""


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda size: DataLoader(Plain(), batch_size=size),
        lambda size: DataLoader(
            Counted(18), batch_sampler=OwnBatches(RandomSampler(range(18)), size, drop_last=False)
        ),
    ],
    ids=["stream", "own-batch-sampler"],
)
def test_a_batch_size_by_which_the_epoch_cannot_go_on_is_refused(make_trainer, tmp_path, make_loader):
    """It does not divide what was read, or only the sampler knows its batches."""
    with pytest.raises(KeyboardInterrupt):
        make_trainer(
            train_dataloader=make_loader(2), callbacks=Batches(4), save_folder=tmp_path, save_interval="1ba"
        ).fit()

    trainer = make_trainer(train_dataloader=make_loader(4), save_folder=tmp_path, autoresume=True)

    with pytest.raises(CheckpointError, match=r"after 3 batches of 2 .* with batches of 4"):
        trainer.fit()
    with make_trainer(train_dataloader=make_loader(2), save_folder=tmp_path, autoresume=True) as trainer:
        trainer.fit("1ep")


@pytest.mark.parametrize(
    ("make_before", "make_now", "said"),
    [
        (
            lambda: list(DataLoader(Counted(16), batch_size=2)),
            lambda: list(DataLoader(Counted(16), batch_size=4)),
            "now has 4 (list)",
        ),
        (
            lambda: DataLoader(Counted(16), batch_size=2),
            lambda: DataLoader(Counted(24), batch_size=2),
            "now has 12 (SequentialSampler, BatchSampler)",
        ),
        (
            lambda: DataLoader(Counted(16), batch_size=2),
            lambda: DataLoader(Counted(16), batch_size=2, shuffle=True),
            "now has 8 (RandomSampler, BatchSampler)",
        ),
    ],
    ids=["other-batches", "other-length", "other-order"],
)
def test_changed_training_data_is_reported(make_trainer, tmp_path, caplog, make_before, make_now, said):
    """A run that continues in the middle of an epoch says that the samples before it were others."""
    with pytest.raises(KeyboardInterrupt):
        make_trainer(
            train_dataloader=make_before(), callbacks=Batches(4), save_folder=tmp_path, save_interval="1ba"
        ).fit()

    make_trainer(train_dataloader=make_now(), save_folder=tmp_path, autoresume=True).fit()

    assert "train_dataloader had 8 batches in an epoch" in caplog.text
    assert said in caplog.text
