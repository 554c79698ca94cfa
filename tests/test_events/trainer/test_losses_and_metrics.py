"""What a loss or a metric may be, and optimizers and schedulers that do not just step."""

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from events import PlateauScheduler, Trainer

from .conftest import network

cross_entropy = torch.nn.functional.cross_entropy


def unreduced(outputs, targets):
    """Returns the loss of each sample."""
    return cross_entropy(outputs, targets, reduction="none")


def losses_of(trainer_and_list):
    """Returns the losses that are logged, and the weights after them."""
    trainer, metric_list = trainer_and_list
    trainer.fit()
    weights = [parameter.tolist() for parameter in trainer.state.model.parameters()]
    return metric_list.series("loss/train/total"), weights


@pytest.mark.parametrize(
    "loss_fn",
    [
        unreduced,
        lambda outputs, targets: {"entropy": cross_entropy(outputs, targets)},
        lambda outputs, targets: [unreduced(outputs, targets)],
        lambda outputs, targets: {"total": cross_entropy(outputs, targets), "size": outputs.sum()},
        lambda outputs, targets: (cross_entropy(outputs, targets), 0.0),
    ],
    ids=["of samples", "by name", "list", "with a total", "with a number"],
)
def test_a_loss_in_any_form_trains_as_its_one_number_does(make_trainer, metric_list, loss_fn):
    """Losses of samples are averaged, several are summed, one that is called total is taken."""
    expected = losses_of((make_trainer(loggers=metric_list), metric_list))
    other = type(metric_list)()

    found = losses_of((make_trainer(loggers=other, loss_fn=loss_fn), other))

    assert found[0] == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected[0]]
    assert [np.shape(one) for one in found[1]] == [np.shape(one) for one in expected[1]]
    assert np.concatenate([np.ravel(one) for one in found[1]]) == pytest.approx(
        np.concatenate([np.ravel(one) for one in expected[1]]), abs=1e-4
    )


def test_each_of_several_losses_is_logged(make_trainer, make_dataloader, metric_list):
    """Training and evaluation log it by its name, with or without microbatches."""
    trainer = make_trainer(
        loggers=metric_list,
        loss_fn=lambda outputs, targets: {
            "entropy": unreduced(outputs, targets),
            "size": 0.1 * outputs.pow(2),
        },
        eval_dataloader=make_dataloader(),
        device_train_microbatch_size=2,
        max_duration="1ba",
    )

    trainer.fit()
    results = trainer.eval()

    row = metric_list.metrics[0][1]
    assert row["loss/train/total"] == pytest.approx(row["loss/train/entropy"] + row["loss/train/size"])
    values = trainer.state.eval_values
    assert values["loss/eval/total"] == pytest.approx(values["loss/eval/entropy"] + values["loss/eval/size"])
    assert set(results["eval"]) == {"loss", "loss/entropy", "loss/size", "accuracy"}


@pytest.mark.parametrize("loss", ["much", None, {}, []])
def test_invalid_losses_raise(make_trainer, loss):
    """The error lists valid losses."""
    with pytest.raises(TypeError, match="loss must be a tensor, or several by name or in a list"):
        make_trainer(loss_fn=lambda outputs, targets: loss).fit()


def test_vectors_are_logged_by_element_and_matrices_as_tables(make_trainer, make_dataloader, metric_list):
    """In batches, epochs and evaluations; a matrix has no place in a batch."""
    tables = []

    class WithTables(type(metric_list)):
        def log_table(self, columns, rows, name="Table", step=None):
            tables.append((name, step, columns, [list(row) for row in rows]))

    listed = WithTables()
    trainer = make_trainer(
        loggers=listed,
        eval_dataloader=make_dataloader(),
        metrics={
            "classes": MulticlassAccuracy(2, average=None),
            "confusion": MulticlassConfusionMatrix(2),
            "outputs": lambda outputs, targets: outputs.mean(0),
            "numpy": lambda outputs, targets: np.ones(2),
        },
        max_duration="1ep",
    )

    trainer.fit()

    names = {
        f"{start}/{name}"
        for start in ("metrics/train", "metrics/train_epoch", "metrics/eval")
        for name in ("classes/0", "classes/1", "outputs/0", "outputs/1", "numpy/0", "numpy/1")
    }
    assert {name for _, row in listed.metrics for name in row if name.startswith("metrics/")} == names
    assert [(name, step, columns, np.sum(rows)) for name, step, columns, rows in tables] == [
        ("metrics/train_epoch/confusion", 5, ["0", "1"], 20),
        ("metrics/eval/confusion", 5, ["0", "1"], 6),
    ]
    assert trainer.state.eval_values["metrics/eval/classes/1"] >= 0


def test_the_metrics_of_a_collection_are_logged_each(make_trainer, make_dataloader, metric_list):
    """A `MetricCollection` is one metric with several names."""
    both = torchmetrics.MetricCollection(
        {"mean": MulticlassAccuracy(2), "classes": MulticlassAccuracy(2, average=None)}
    )
    trainer = make_trainer(
        loggers=metric_list, eval_dataloader=make_dataloader(), metrics={"both": both}, max_duration="1ep"
    )

    trainer.fit()

    names = {name for _, row in metric_list.metrics for name in row if name.startswith("metrics/")}
    assert names == {
        f"metrics/{place}/both/{name}"
        for place in ("train", "train_epoch", "eval")
        for name in ("mean", "classes/0", "classes/1")
    }


def test_values_that_cannot_be_logged_are_left_out_with_a_warning(
    make_trainer, make_dataloader, metric_list, caplog
):
    """A text, None and a cube are each reported once, and training continues."""

    class Returns(torchmetrics.Metric):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def update(self, outputs, targets):
            pass

        def compute(self):
            return self.value

    trainer = make_trainer(
        loggers=metric_list,
        eval_dataloader=make_dataloader(),
        metrics={
            "text": Returns("good"),
            "nothing": Returns(None),
            "cube": Returns(torch.ones(2, 2, 2)),
            "complex": Returns(torch.tensor(1j)),
            "curve": Returns((torch.ones(3), torch.ones(4))),
        },
    )

    trainer.fit()

    assert trainer.state.timestamp.batch == "10ba"
    assert not {name for _, row in metric_list.metrics for name in row if name.startswith("metrics/")}
    for name in ("text", "nothing", "cube", "complex", "curve"):
        assert caplog.text.count(f"metric 'metrics/eval/{name}' is not logged") == 1


@pytest.mark.parametrize("name", ["metrics", "collection"])
def test_torchmetrics_within_an_epoch_are_resumed(make_trainer, metric_list, tmp_path, name):
    """The epoch's value equals the one of an uninterrupted run, even if no batch is left."""
    made = {"mean": torchmetrics.MeanSquaredError(), "classes": MulticlassAccuracy(2, average=None)}
    metrics = (
        {"both": torchmetrics.MetricCollection({"a": MulticlassAccuracy(2), "c": made["classes"]})}
        if name == "collection"
        else {"classes": made["classes"]}
    )

    def epoch_values(**arguments):
        listed = type(metric_list)()
        make_trainer(loggers=listed, metrics=metrics, run_name="run", **arguments).fit()
        return [row for _, row in listed.metrics if any("train_epoch" in one for one in row)]

    expected = epoch_values(max_duration="1ep")
    for batches in (3, 5):
        folder = tmp_path / str(batches)
        epoch_values(max_duration=f"{batches}ba", save_folder=folder, save_interval="1ba")
        if batches == 5:
            for path in folder.glob("ep1*"):
                path.unlink()
            (folder / "latest.symlink").write_text("ep0-ba5.pt")
        assert epoch_values(max_duration="1ep", save_folder=folder, autoresume=True) == expected


def lbfgs(model):
    """Returns an optimizer that computes the loss several times in a step."""
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def trained_by_lbfgs(make_trainer, metric_list, duration, **arguments):
    """Trains a network without random layers; returns its weights and what was logged."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    trainer = make_trainer(max_duration=duration)
    data = trainer.state.train_dataloader
    trainer.close()
    listed = type(metric_list)()
    trainer = Trainer(
        model,
        data,
        max_duration=duration,
        loss_fn=cross_entropy,
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
        optimizers=lbfgs(model),
        loggers=listed,
        device="cpu",
        seed=1,
        run_name="lbfgs",
        **arguments,
    )
    with trainer:
        trainer.fit()
    return model.weight.tolist(), listed


def test_lbfgs_steps_by_a_closure(make_trainer, metric_list):
    """Each batch is one step, logged with the loss and the metrics before it, and counted once."""
    _, listed = trained_by_lbfgs(make_trainer, metric_list, "2ep")

    losses = listed.series("loss/train/total")
    assert [step for step, _ in losses] == list(range(10))
    assert losses[-1][1] < losses[0][1] / 2
    batches = [value for _, value in listed.series("metrics/train/accuracy")]
    assert listed.series("metrics/train_epoch/accuracy")[0] == (5, pytest.approx(sum(batches[:5]) / 5))


def test_lbfgs_is_resumed_to_the_last_bit(make_trainer, metric_list, tmp_path):
    """Its history is in the checkpoint."""
    whole, _ = trained_by_lbfgs(make_trainer, metric_list, "2ep")
    trained_by_lbfgs(make_trainer, metric_list, "7ba", save_folder=tmp_path)

    resumed, _ = trained_by_lbfgs(make_trainer, metric_list, "2ep", save_folder=tmp_path, autoresume=True)

    assert resumed == whole


@pytest.mark.parametrize("arguments", [{"precision": "fp16"}, {"others": 1}])
def test_lbfgs_beside_another_optimizer_or_with_fp16_raises(make_trainer, arguments):
    """Its closure computes the gradients of all, several times."""
    model = network()
    others = [torch.optim.SGD(model.parameters(), lr=0.1)] * arguments.pop("others", 0)

    with pytest.raises(ValueError, match="LBFGS must be the only optimizer, without fp16"):
        make_trainer(optimizers=[lbfgs(model), *others], schedulers=(), **arguments)


def with_plateau(make_trainer, monitor="loss/eval/total", **arguments):
    """Makes a trainer whose rate falls whenever a value does not become less than it can."""
    trainer = make_trainer()
    optimizer = trainer.state.optimizers[0]
    trainer.close()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=1e9, threshold_mode="abs"
    )
    return make_trainer(
        optimizers=optimizer, schedulers=PlateauScheduler(plateau, monitor=monitor), **arguments
    )


def rates(trainer):
    """Returns the learning rate."""
    return trainer.state.optimizers[0].param_groups[0]["lr"]


def test_a_plateau_is_stepped_by_each_evaluation_in_fit(make_trainer, make_dataloader, metric_list):
    """The first value is the best, every other lowers the rate; `eval` does not count."""
    trainer = with_plateau(
        make_trainer, eval_dataloader=make_dataloader(), eval_interval="2ba", loggers=metric_list
    )

    trainer.eval()
    trainer.fit("6ba")

    assert [rate for _, rate in metric_list.series("lr/Adam/group0")] == pytest.approx(
        [0.05, 0.05, 0.05, 0.05, 0.005, 0.005]
    )


def test_a_plateau_is_resumed(make_trainer, make_dataloader, tmp_path):
    """Its state is in the checkpoint, and a finished evaluation isn't repeated."""
    arguments = {"eval_dataloader": make_dataloader(), "eval_interval": "2ba", "save_folder": tmp_path}
    whole = with_plateau(make_trainer, eval_dataloader=make_dataloader(), eval_interval="2ba")
    whole.fit()
    with_plateau(make_trainer, max_duration="6ba", **arguments).fit()
    resumed = with_plateau(make_trainer, autoresume=True, **arguments)

    resumed.fit()

    assert rates(resumed) == rates(whole) < 0.05
    assert resumed.state.schedulers[0].state_dict() == whole.state.schedulers[0].state_dict()


@pytest.mark.parametrize("monitor", ["metrics/eval/accuracy", "loss/eval/total", "loss/eval/entropy"])
def test_a_plateau_may_monitor_any_value_of_an_evaluation(make_trainer, make_dataloader, monitor):
    """Losses by name have names that only their values show."""
    with_plateau(
        make_trainer,
        monitor,
        eval_dataloader=make_dataloader(),
        loss_fn=lambda outputs, targets: {"entropy": cross_entropy(outputs, targets)},
    ).fit()


@pytest.mark.parametrize("monitor", ["metrics/eval/acuracy", "loss/far/total", "accuracy"])
def test_a_plateau_without_a_value_raises(make_trainer, make_dataloader, monitor):
    """It would never be stepped."""
    with pytest.raises(ValueError, match="There are: metrics/eval/accuracy, loss/eval/total"):
        with_plateau(make_trainer, monitor, eval_dataloader=make_dataloader())


def test_a_bare_plateau_raises(make_trainer):
    """What it monitors is not known; the message names what takes both."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)

    with pytest.raises(ValueError, match="Write PlateauScheduler"):
        make_trainer(optimizers=optimizer, schedulers=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_another_scheduler_as_a_plateau_raises():
    """Only a plateau takes a value."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)

    with pytest.raises(TypeError, match="must be torch's ReduceLROnPlateau, got StepLR"):
        PlateauScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), "loss/eval/total")
