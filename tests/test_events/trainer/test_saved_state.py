"""Tests the contents of a checkpoint besides model and data, such as losses and generators, and its names."""

import copy
import functools
import logging
import random

import numpy as np
import pytest
import torch

from events import Callback, CheckpointError, Trainer, export_weights, read_checkpoint
from events.trainer.reachable import reach

LINEAR = torch.nn.Linear


class Killed(Callback):
    """Ends training before a batch, and notes the losses until then."""

    def __init__(self, at=None):
        self.at, self.losses = at, []

    def before_dataloader(self, state, logger):
        if state.timestamp.batch == self.at:
            raise KeyboardInterrupt

    def batch_end(self, state, logger):
        self.losses.append(float(state.loss))


def batches():
    """Returns eight batches, the same each time."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator))
        for _ in range(8)
    ]


def train(folder, make, killed, **arguments):
    """Trains for eight batches, or until it is killed; returns the trainer."""
    torch.manual_seed(0)
    made = {"model": torch.nn.Sequential(LINEAR(3, 4), LINEAR(4, 2)), "callbacks": []} | make()
    model, callbacks = made.pop("model"), made.pop("callbacks")
    defaults = {
        "train_dataloader": batches(),
        "max_duration": "8ba",
        "loss_fn": torch.nn.functional.cross_entropy,
        "optimizers": None,
        "run_name": "test",
        "device": "cpu",
        "seed": 1,
        "save_folder": folder,
        "save_interval": "1ba",
        "autoresume": True,
    }
    settings = defaults | made | arguments
    settings["optimizers"] = settings["optimizers"] or torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9
    )
    with Trainer(model, callbacks=[*callbacks, killed], **settings) as trainer:
        try:
            trainer.fit()
        except KeyboardInterrupt:
            assert killed.at is not None
    return trainer


def resumed(tmp_path, make, at=4, **arguments):
    """Returns the losses and weights of an uninterrupted run, and of a run that is killed and resumed."""
    runs = []
    for folder, ends in (("whole", (None,)), ("resumed", (at, None))):
        losses = []
        for end in ends:
            killed = Killed(end)
            trainer = train(tmp_path / folder, make, killed, save_interval=f"{at}ba", **arguments)
            losses += killed.losses
        runs.append((losses, {name: one.tolist() for name, one in trainer.state.model.state_dict().items()}))
    return runs


class CenterLoss(torch.nn.Module):
    """Has a center for each class, which is trained."""

    def __init__(self):
        super().__init__()
        self.centers = torch.nn.Parameter(torch.zeros(2, 2))

    def forward(self, outputs, targets, share=1.0):
        own = (outputs - self.centers[targets]).pow(2).mean()
        return torch.nn.functional.cross_entropy(outputs, targets) + share * own

    def compute(self, outputs, targets):
        return self(outputs, targets)


def with_loss(wrap):
    """Returns a training of a loss with weights, which is wrapped."""
    loss, model = CenterLoss(), torch.nn.Sequential(LINEAR(3, 4), LINEAR(4, 2))
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.1)
    return {"model": model, "loss_fn": wrap(loss), "optimizers": optimizer}


def of_parameter(loss):
    """Returns a function that has captured a parameter, and no module."""
    centers = loss.centers
    return lambda outputs, targets: (outputs - centers[targets]).pow(2).mean()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: functools.partial(loss, share=0.5),
        lambda loss: loss.compute,
        lambda loss: lambda outputs, targets: loss(outputs, targets, share=0.7),
        of_parameter,
    ],
    ids=["module", "partial", "method", "closure", "parameter"],
)
def test_a_loss_with_weights_is_resumed(tmp_path, wrap):
    """Its weights are found and saved however the loss is given."""
    whole, after = resumed(tmp_path, lambda: with_loss(wrap))

    assert after == whole


class Mixes(Callback):
    """Scales each batch by a random number."""

    def __init__(self, make, draw):
        self.inside, self.draw = {"generators": [make()]}, draw

    def before_forward(self, state, logger):
        inputs, targets = state.batch
        state.batch = (inputs * float(self.draw(self.inside["generators"][0])), targets)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand((), generator=one)),
        (lambda: np.random.default_rng(1), lambda one: one.random()),
        (lambda: np.random.RandomState(1), lambda one: one.rand()),
        (lambda: random.Random(1), lambda one: one.random()),
    ],
    ids=["torch", "numpy", "legacy", "python"],
)
def test_generators_of_callbacks_are_resumed(tmp_path, make, draw):
    """Two callbacks of one class have one each, in a list in a dictionary."""
    whole, after = resumed(tmp_path, lambda: {"callbacks": [Mixes(make, draw), Mixes(make, draw)]})

    assert after == whole


class Averages(Callback):
    """Keeps an average of the weights, which moves the inputs; made where training begins."""

    def __init__(self, first=0):
        self.first, self.average = first, None

    def fit_start(self, state, logger):
        self.average = copy.deepcopy(state.model).requires_grad_(requires_grad=False)

    def before_forward(self, state, logger):
        state.batch = (state.batch[0] + 0.01 * self.average[0].weight.sum(), state.batch[1])

    def batch_end(self, state, logger):
        pairs = zip(self.average.parameters(), state.model.parameters(), strict=True)
        for mean, weight in pairs if state.timestamp.batch > self.first else ():
            mean.data.mul_(0.9).add_(0.1 * weight.data)


class Switches(Callback):
    """Freezes a layer's mode within training, and thaws another's weights."""

    def fit_start(self, state, logger):
        if state.timestamp.batch == 0:
            state.model[0].requires_grad_(requires_grad=False)

    def batch_end(self, state, logger):
        if state.timestamp.batch == 2:
            state.model[1].eval()
            state.model[0].requires_grad_(requires_grad=True)


class Unfreezes(Callback):
    """Adds a parameter group after some batches, or where training begins."""

    def __init__(self, after):
        self.after = after

    def fit_start(self, state, logger):
        if self.after == 0:
            self.add(state)

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.after:
            self.add(state)

    def add(self, state):
        state.optimizers[0].add_param_group({"params": list(state.model[0].parameters()), "lr": 0.01})


def normalized():
    """Returns a model with modes."""
    return torch.nn.Sequential(LINEAR(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), LINEAR(4, 2))


def with_group(callback):
    """Returns a training whose optimizer begins with the last layer."""
    model = torch.nn.Sequential(LINEAR(3, 4), LINEAR(4, 2))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
    return {"model": model, "optimizers": optimizer, "callbacks": [callback]}


def compiled_part():
    """Returns a training with one compiled layer."""
    model = torch.nn.Sequential(LINEAR(3, 4), LINEAR(4, 2))
    model[0] = torch.compile(model[0], backend="eager")
    return {"model": model}


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"callbacks": [Averages()]},
        lambda: {"callbacks": [Averages(first=6)]},
        lambda: {"model": normalized(), "callbacks": [Switches()], "eval_dataloader": batches()[:1]},
        lambda: with_group(Unfreezes(2)),
        lambda: with_group(Unfreezes(0)),
        compiled_part,
    ],
    ids=["average", "late-average", "switches", "group", "group-at-start", "compiled-part"],
)
def test_changes_by_callbacks_are_resumed(tmp_path, make):
    """Modules that they hold, modes, gradients that are switched on and off, and groups that they add."""
    whole, after = resumed(tmp_path, make, at=5, eval_interval="2ba")

    assert after == whole


def test_lazy_modules_are_trained_and_resumed(tmp_path):
    """Their shapes come with the first batch, or the checkpoint."""
    whole, after = resumed(
        tmp_path, lambda: {"model": torch.nn.Sequential(torch.nn.LazyLinear(4), LINEAR(4, 2))}
    )

    assert after == whole


def test_evaluation_leaves_each_module_in_its_mode(tmp_path):
    """A frozen layer stays frozen, and a loss with a mode is evaluated as the model is."""

    class Freezes(Callback):
        def __init__(self):
            self.modes = []

        def fit_start(self, state, logger):
            state.model[1].eval()

        def batch_start(self, state, logger):
            self.modes.append([one.training for one in (*state.model, loss)])

        def eval_batch_start(self, state, logger):
            self.modes.append([one.training for one in (*state.model, loss)])

    freezes, loss = Freezes(), CenterLoss()

    train(
        tmp_path,
        lambda: {
            "model": normalized(),
            "loss_fn": loss,
            "callbacks": [freezes],
            "eval_dataloader": batches()[:1],
        },
        Killed(),
        max_duration="2ba",
        eval_interval="1ba",
    )

    own = [True, False, True, True, True]
    assert freezes.modes == [own, [False] * 5, own, [False] * 5]


def test_gradients_of_no_optimizer_do_not_add_up(tmp_path):
    """A layer that is not trained has the gradient of the batch alone."""

    class Norms(Callback):
        def __init__(self):
            self.seen = []

        def after_train_batch(self, state, logger):
            self.seen.append(float(state.model[0].weight.grad.norm()))

    model, norms = torch.nn.Sequential(LINEAR(3, 4), LINEAR(4, 2)), Norms()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)

    train(
        tmp_path,
        lambda: {"model": model, "optimizers": optimizer, "callbacks": [norms]},
        Killed(),
        train_dataloader=[batches()[0]] * 8,
    )

    assert norms.seen == [norms.seen[0]] * 8


class Distills(torch.nn.Module):
    """A loss that holds a teacher."""

    def __init__(self):
        super().__init__()
        self.teacher = LINEAR(3, 2).requires_grad_(requires_grad=False)

    def forward(self, outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets)


def test_a_module_that_nothing_trains_is_saved_once_it_changes(tmp_path, caplog):
    """A teacher is not saved; a different one in the resumed run is reported."""
    train(tmp_path / "same", lambda: {"loss_fn": Distills()}, Killed())
    assert read_checkpoint(tmp_path / "same")["modules"] == {}
    loss = Distills()
    loss.teacher.weight.add_(1)

    train(tmp_path / "same", lambda: {"loss_fn": loss}, Killed(), max_duration="9ba")

    assert "was saved with a different loss_fn" in caplog.text


def test_declared_objects_are_saved_and_none_leaves_one_out(tmp_path):
    """Declared parts have their own name; None takes the name under which a part is found."""
    teacher, loss = LINEAR(3, 3), CenterLoss()
    train(
        tmp_path,
        lambda: {"loss_fn": loss},
        Killed(),
        state={"teacher": teacher, "order": random.Random(1), "loss_fn": None},
    )

    checkpoint = read_checkpoint(tmp_path)

    assert sorted(checkpoint["modules"]) == ["teacher"]
    assert list(checkpoint["random"][0]["held"]) == ["order"]


def test_a_declared_object_without_a_state_is_refused(make_trainer):
    """The message names it."""
    with pytest.raises(TypeError, match="got a list for 'seen'"):
        make_trainer(state={"seen": []})


def test_a_shared_module_is_saved_once(tmp_path):
    """Neither parts of the model nor what the loss has are saved again for a callback that holds them."""

    class Holds(Callback):
        def fit_start(self, state, logger):
            self.model, self.layer, self.loss = (
                torch.compile(state.model, backend="eager"),
                state.model[0],
                loss,
            )

    loss = CenterLoss()
    train(tmp_path, lambda: {"loss_fn": loss, "callbacks": [Holds()]}, Killed())

    assert list(read_checkpoint(tmp_path)["modules"]) == ["loss_fn"]


def test_saved_parts_are_listed_before_training(tmp_path, caplog):
    """One message names parts, generators, and callbacks that only their order tells apart."""
    caplog.set_level(logging.INFO, "events")
    mixes = [Mixes(lambda: random.Random(1), lambda one: one.random()) for _ in range(2)]

    train(tmp_path, lambda: {"loss_fn": CenterLoss(), "callbacks": mixes}, Killed())

    (text,) = (one.getMessage() for one in caplog.records if "Checkpoints hold" in one.getMessage())
    assert "\n  loss_fn: CenterLoss\n" in text
    assert "\n  callbacks.Mixes#2.inside['generators'][0]: Random\n" in text
    assert "callbacks.Mixes#2: identified by its order among others of its name; set state_key" in text


def test_a_part_that_the_checkpoint_lacks_is_reported(tmp_path, caplog):
    """The run is resumed, and one line says what begins anew."""
    train(tmp_path, lambda: with_loss(lambda loss: loss), Killed(3))
    path = tmp_path / "ep0-ba3.pt"
    checkpoint = read_checkpoint(path)
    torch.save(checkpoint | {"modules": {}}, path)

    train(tmp_path, lambda: with_loss(lambda loss: loss), Killed())

    assert caplog.text.count("has no state of loss_fn: they are as the script made them") == 1


class Counts(Callback):
    """Has a state."""

    count = 0

    def batch_end(self, state, logger):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Renamed(Counts):
    """The same class by another name."""


def test_a_renamed_callback_finds_its_state_by_its_key(tmp_path, caplog):
    """Without a key, an unused state is reported."""
    train(tmp_path, lambda: {"callbacks": [Counts()]}, Killed(3))
    renamed = Renamed()
    train(tmp_path, lambda: {"callbacks": [renamed]}, Killed(3))
    assert (renamed.count, "set its state_key = 'Counts'" in caplog.text) == (0, True)
    renamed.state_key = "Counts"

    train(tmp_path, lambda: {"callbacks": [renamed]}, Killed(3))

    assert renamed.count == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "got Adam for SGD"),
        (lambda model: torch.optim.AdamW(model.parameters()), "got Adam for AdamW"),
        (
            lambda model: torch.optim.Adam(list(model.parameters())[::-1]),
            r"got 'model.0.weight' in the place of 'model.1.bias'",
        ),
    ],
    ids=["sgd", "adamw", "order"],
)
def test_another_optimizer_is_refused_when_the_trainer_is_made(tmp_path, make, message):
    """So is one with the same parameters in another order."""

    def made(optimizer):
        model = torch.nn.Sequential(LINEAR(3, 4), LINEAR(4, 2))
        return {"model": model, "optimizers": optimizer(model)}

    train(tmp_path, lambda: made(lambda model: torch.optim.Adam(model.parameters())), Killed(3))

    with pytest.raises(CheckpointError, match=message):
        train(tmp_path, lambda: made(make), Killed(3))


def test_compiled_models_have_the_names_of_plain_ones(tmp_path):
    """A run goes on without `torch.compile`, and with it again; old checkpoints have other names."""
    compiled = torch.compile(torch.nn.Sequential(LINEAR(3, 4), LINEAR(4, 2)), backend="eager")
    train(tmp_path, lambda: {"model": compiled}, Killed(2))
    export_weights(tmp_path, tmp_path / "weights.pt")
    assert list(torch.load(tmp_path / "weights.pt")) == ["0.weight", "0.bias", "1.weight", "1.bias"]

    train(tmp_path, dict, Killed(4))
    path = tmp_path / "ep0-ba4.pt"
    checkpoint = read_checkpoint(path)
    checkpoint["model"] = {f"_orig_mod.{name}": one for name, one in checkpoint["model"].items()}
    torch.save(checkpoint, path)
    trainer = train(tmp_path, lambda: {"model": compiled}, Killed(6))

    assert trainer.state.timestamp.batch == 6


def test_a_deep_model_is_searched_whole():
    """Neither its depth nor its number of layers hides a generator."""
    model = torch.nn.Sequential()
    inner = model
    for _ in range(20):
        inner.extend([torch.nn.Conv2d(1, 1, 1) for _ in range(40)])
        inner.append(torch.nn.Sequential())
        inner = inner[-1]
    inner.generator = torch.Generator()

    reached = reach({"model": model})

    assert reached.is_whole
    assert list(reached.generators) == ["model" + ".40" * 20 + ".generator"]
