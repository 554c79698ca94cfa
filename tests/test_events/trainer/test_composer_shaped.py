"""A model, evaluators and schedules written for Composer train here as they do there."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from events import (
    Callback,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWithWarmupScheduler,
    Evaluator,
    LinearScheduler,
    LinearWithWarmupScheduler,
    State,
    Timestamp,
    Trainer,
)
from events.trainer.set_up import find_device

from .conftest import accuracy, dataset


class Shaped(torch.nn.Module):
    """Has the methods of a ComposerModel, and none of its code."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)
        self.train_accuracy = MulticlassAccuracy(2, average="micro")

    def forward(self, batch):
        inputs, _ = batch
        return self.layer(inputs)

    def loss(self, outputs, batch):
        return {"total": torch.nn.functional.cross_entropy(outputs, batch[1]), "extra": torch.tensor(9.0)}

    def eval_forward(self, batch, outputs=None):
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train=False):
        if is_train:
            return {"accuracy": self.train_accuracy}
        return {"accuracy": self.train_accuracy, "recall": MulticlassAccuracy(2)}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


def train(model, metric_list, **options):
    """Trains for two epochs of five batches of four samples, and returns the trainer."""
    defaults = {
        "max_duration": "2ep",
        "optimizers": torch.optim.SGD(model.parameters(), lr=1.0),
        "loggers": metric_list,
        "device": "cpu",
    }
    trainer = Trainer(model, DataLoader(dataset(20), batch_size=4), **(defaults | options))
    trainer.fit()
    trainer.close()
    return trainer


def test_a_model_with_its_own_loss_and_metrics_needs_no_loss_fn(metric_list):
    """The loss is its "total"; its metrics are updated by itself, in training and in evaluation."""
    model = Shaped()
    data = DataLoader(dataset(6), batch_size=4)
    points, sides = dataset(20)[:4]
    first = float(torch.nn.functional.cross_entropy(model.layer(points), sides).detach())

    train(model, metric_list, eval_dataloader=data)

    assert metric_list.series("loss/train/total")[0] == (0, pytest.approx(first))
    found = float(accuracy(model.layer(dataset(6)[:][0]), dataset(6)[:][1]))
    assert metric_list.series("metrics/eval/accuracy")[-1] == (10, pytest.approx(found))
    assert len(metric_list.series("metrics/eval/recall")) == 2
    assert len(metric_list.series("metrics/train/accuracy")) == 10
    assert len(metric_list.series("metrics/train_epoch/accuracy")) == 2
    assert all(0 < value <= 1 for _, value in metric_list.series("metrics/train_epoch/accuracy"))


def test_callbacks_read_metric_values_and_results_of_updates(metric_list):
    """Callbacks of llm-foundry do so; a metric of another evaluation keeps its value."""
    seen = []

    class Tells(Shaped):
        def update_metric(self, batch, outputs, metric):
            super().update_metric(batch, outputs, metric)
            return {"right": (outputs.argmax(1) == batch[1]).tolist()}

    class Reads(Callback):
        def batch_end(self, state, logger):
            seen.append(("train", dict(state.train_metric_values)))

        def eval_end(self, state, logger):
            seen.append(("eval", dict(state.eval_metric_values), state.metric_outputs))

    data = DataLoader(dataset(4), batch_size=4)
    train(
        Tells(),
        metric_list,
        eval_dataloader={"near": data, "far": data},
        callbacks=Reads(),
        max_duration="1ep",
    )

    assert [values for kind, values, *_ in seen if kind == "train"] == [
        {"accuracy": pytest.approx(value)} for _, value in metric_list.series("metrics/train/accuracy")
    ]
    (_, values, outputs) = seen[-1]
    assert {name: float(value) for name, value in values.items()} == {
        name: metric_list.series(f"metrics/far/{name}")[-1][1] for name in ("accuracy", "recall")
    }
    assert sum(outputs["right"]) / 4 == pytest.approx(float(values["accuracy"]))


def test_evaluators_have_their_own_metrics_intervals_and_lengths(metric_list):
    """Names are patterns; the end of training is always evaluated, once."""
    batches = []

    class Counts(Callback):
        def eval_start(self, state, logger):
            batches.append((state.dataloader_label, int(state.timestamp.batch), state.dataloader_len.value))

    data = DataLoader(dataset(8), batch_size=2)
    evaluators = [
        Evaluator(label="near", dataloader=data, metric_names=["accu.*y"], subset_num_batches=1),
        Evaluator(label="far", dataloader=data, eval_interval="4ba"),
    ]
    trainer = train(Shaped(), metric_list, eval_dataloader=evaluators, callbacks=Counts())

    assert batches == [("far", 4, 4), ("near", 5, 1), ("far", 8, 4), ("near", 10, 1), ("far", 10, 4)]
    assert [one.label for one in trainer.state.evaluators] == ["near", "far"]
    assert set(trainer.state.eval_metrics["near"]) == {"accuracy"}
    assert not metric_list.series("metrics/near/recall")
    assert len(metric_list.series("metrics/far/recall")) == 3


def test_epochs_and_evaluations_may_be_cut_short(metric_list):
    """The shortened length is reported; an evaluator's own number takes precedence, and -1 means all."""
    lengths = []

    class Lengths(Callback):
        def epoch_end(self, state, logger):
            lengths.append((state.dataloader_len.value, int(state.timestamp.batch)))

        def eval_end(self, state, logger):
            lengths.append((state.dataloader_len.value, int(state.eval_timestamp.batch)))

    data = DataLoader(dataset(8), batch_size=2)
    evaluators = [
        Evaluator(label="all", dataloader=data, subset_num_batches=-1),
        Evaluator(label="default", dataloader=data),
    ]
    train(
        Shaped(),
        metric_list,
        eval_dataloader=evaluators,
        callbacks=Lengths(),
        train_subset_num_batches=3,
        eval_subset_num_batches=2,
    )

    assert lengths == [(3, 3), (4, 4), (2, 2), (3, 6), (4, 4), (2, 2)]


def test_wrong_evaluators_are_refused(make_trainer):
    """A pattern that matches nothing, two of a name, and a name for a list."""
    data = DataLoader(dataset(8), batch_size=2)
    with pytest.raises(ValueError, match="must match metrics, got 'f1'"):
        make_trainer(eval_dataloader=Evaluator(label="a", dataloader=data, metric_names=["f1"]))
    with pytest.raises(ValueError, match=r"labels of evaluators must differ, got \['a', 'a'\]"):
        make_trainer(eval_dataloader=[Evaluator(label="a", dataloader=data) for _ in range(2)])
    with pytest.raises(TypeError, match="metric_names must be a list"):
        Evaluator(label="a", dataloader=data, metric_names="accuracy")


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0] * 10),
        ("linear", [1 - step / 10 for step in range(10)]),
        (LinearScheduler(1.0, 0.5, "1ep"), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ("cosine", [1.0, 0.97553, 0.90451, 0.79389, 0.65451, 0.5, 0.34549, 0.20611, 0.09549, 0.02447]),
        (CosineAnnealingScheduler("5ba", 0.1), [1.0, 0.91406, 0.68906, 0.41094, 0.18594, *[0.1] * 5]),
        (ConstantScheduler(0.5, "0.3dur"), [0.5] * 3 + [1.0] * 7),
        (ConstantWithWarmupScheduler("4ba"), [0.0, 0.25, 0.5, 0.75, *[1.0] * 6]),
        (LinearWithWarmupScheduler("2ba", t_max="6ba"), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0, 0, 0, 0]),
        (CosineAnnealingWithWarmupScheduler("0.2dur"), [0.0, 0.5, 1.0, 0.96194, 0.85355, 0.69134, 0.5]),
        (lambda state: 1 / (1 + state.timestamp.batch.value), [1.0, 0.5, 1 / 3]),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_schedules_of_training_time(metric_list, schedule, rates):
    """The learning rate of each batch is the factor where it begins."""
    train(Shaped(), metric_list, schedulers=schedule)

    found = [rate for _, rate in metric_list.series("lr/SGD/group0")]
    assert found[: len(rates)] == pytest.approx(rates, abs=1e-5)


def test_a_schedule_continues_where_a_resumed_run_is(tmp_path, metric_list):
    """It depends only on the timestamp."""
    folder = tmp_path / "checkpoints"
    train(Shaped(), None, max_duration="1ep", schedulers=LinearScheduler(t_max="10ba"), save_folder=folder)

    train(
        Shaped(), metric_list, schedulers=LinearScheduler(t_max="10ba"), load_path=folder / "latest.symlink"
    )

    rates = [rate for _, rate in metric_list.series("lr/SGD/group0")]
    assert rates == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])


def test_a_schedule_of_epochs_counts_batches_where_their_number_is_known():
    """Otherwise epochs; without the length of the run a share of it is an error."""
    schedule = LinearScheduler(t_max="4ep")

    assert schedule(State("r", timestamp=Timestamp(batch=5, epoch=1), train_dataloader=[0] * 5)) == 0.75
    assert schedule(State("r", timestamp=Timestamp(batch=5, epoch=2))) == 0.5
    assert LinearScheduler()(State("r", "10sec")) == 1.0
    with pytest.raises(ValueError, match=r"schedule of 1\.0dur must have a run of known length"):
        LinearScheduler()(State("r"))
    with pytest.raises(ValueError, match=r"t_warmup and t_max must be in the same unit"):
        LinearWithWarmupScheduler("10sp", t_max="10ba")(State("r"))


def test_other_schedulers_are_refused(make_trainer):
    """A name that is unknown, a class, a number; and a schedule for several optimizers."""
    for given, message in (
        ("cosin", "schedulers must be torch's, or one of 'constant', 'cosine', 'linear', got 'cosin'"),
        (LinearScheduler, r"got <class .*LinearScheduler'>. Write LinearScheduler\(\.\.\.\)"),
        (0.1, "functions of the state that return a factor, got 0.1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            make_trainer(schedulers=given)
    model = Shaped()
    with pytest.raises(ValueError, match="must have one optimizer, got 2"):
        train(
            model,
            None,
            optimizers=[torch.optim.SGD([one], 0.1) for one in model.parameters()],
            schedulers="linear",
        )


class Crowded(Shaped):
    """Runs out of memory with more than two samples, as a device would."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, batch):
        self.sizes.append(len(batch[0]))
        if self.training and len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(batch)


def test_auto_halves_the_microbatch_until_it_fits(metric_list, caplog):
    """It halves once, and later batches start with the size that fitted. Gradients cover the whole batch."""
    model, whole = Crowded(), Shaped()
    train(model, metric_list, max_duration="2ba", device_train_microbatch_size="auto")
    train(whole, None, max_duration="2ba")

    assert model.sizes == [4, 2, 2, 2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory: device_train_microbatch_size is now 2."
    ]
    assert torch.allclose(model.layer.weight, whole.layer.weight, atol=1e-6)


def test_auto_gives_up_at_one_sample_and_other_errors_pass(metric_list):
    """A sample that does not fit is an error, and so is what is no lack of memory."""

    class Full(Shaped):
        def forward(self, batch):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    class Broken(Shaped):
        def forward(self, batch):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(torch.OutOfMemoryError):
        train(Full(), metric_list, device_train_microbatch_size="auto")
    with pytest.raises(RuntimeError, match="shapes"):
        train(Broken(), metric_list, device_train_microbatch_size="auto")
    with pytest.raises(torch.OutOfMemoryError):
        train(Full(), metric_list)
    with pytest.raises(ValueError, match="must be a number or 'auto', got 'max'"):
        train(Full(), metric_list, device_train_microbatch_size="max")


def test_the_seed_and_the_precision_are_in_the_state(metric_list):
    """As in Composer, the state has the seed of the rank."""
    trainer = train(Shaped(), metric_list, seed=7, precision="amp_bf16", max_duration="1ba")

    assert (trainer.state.seed, trainer.state.precision.value) == (7, "amp_bf16")
    assert metric_list.hyperparameters["trainer"]["precision"] == "amp_bf16"


def test_devices_are_taken_as_composer_names_them(metric_list):
    """An object with a name, and "gpu"; the state has a dataloader before and after training."""
    trainer = train(Shaped(), metric_list, device=SimpleNamespace(name="cpu"), max_duration="1ba")

    assert (trainer.state.device, trainer.state.dataloader_label) == ("cpu", "train")
    assert (trainer.state.dataloader is trainer.state.train_dataloader, trainer.state.dataloader_len) == (
        True,
        5,
    )
    assert find_device("gpu") == torch.device("cuda", 0)


@pytest.mark.parametrize(("device", "count"), [("gpu", 0), ("cuda:1", 0), (None, 1)])
def test_a_process_that_was_forked_after_cuda_was_used_says_so(monkeypatch, device, count):
    """Torch's own error comes later, from the first tensor, and names no way out; the CPU can be used all the same."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    with pytest.raises(RuntimeError, match=r"forked after CUDA was used in its parent .* by 'spawn'"):
        find_device(device)

    assert find_device("cpu") == torch.device("cpu")


def test_two_ranks_refuse_auto(monkeypatch):
    """A rank that runs out of memory alone would leave the others waiting."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ValueError, match="'auto' needs a single rank"):
        Trainer(Shaped(), TensorDataset(), device_train_microbatch_size="auto", run_name="r")


def test_several_dataloaders_need_no_labels(make_trainer, make_dataloader):
    """The first is "eval"; an evaluator among them has its own label."""
    data = make_dataloader()
    trainer = make_trainer(eval_dataloader=(data, Evaluator(label="far", dataloader=data), data))

    assert [one.label for one in trainer.state.evaluators] == ["eval", "far", "eval_2"]
    assert list(trainer.eval()) == ["eval", "far", "eval_2"]


def test_an_argument_that_the_trainer_lacks_is_named(make_trainer):
    """The error names the nearest one."""
    with pytest.raises(TypeError, match=r"no argument 'save_foldr'.*'save_folder'"):
        make_trainer(save_foldr=True)
