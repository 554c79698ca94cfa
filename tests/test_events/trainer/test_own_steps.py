"""Losses that models compute themselves, and steps of training and evaluation that users write."""

import pytest
import torch

from events import Callback, Evaluator, Trainer

from .conftest import dataset


class WithLoss(torch.nn.Module):
    """Computes its own loss, and returns it in one of the usual ways."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = torch.nn.Linear(3, 2), how

    def forward(self, points, targets=None):
        logits = self.layer(points)
        loss = None if targets is None else torch.nn.functional.cross_entropy(logits, targets)
        return {
            "dict": {"loss": loss, "logits": logits},
            "last": (logits, loss),
            "first": (loss, logits),
            "bare": loss,
        }[self.how]


def pairs(count=5):
    """Returns batches of pairs, the last one smaller."""
    points, sides = dataset(4 * count).tensors
    return [*zip(points[:-2].split(4), sides[:-2].split(4), strict=True)]


@pytest.mark.parametrize("shape", ["pair", "mapping"])
@pytest.mark.parametrize("how", ["dict", "last", "first", "bare"])
def test_the_loss_of_a_model_is_trained_on_and_evaluated(make_trainer, metric_list, how, shape):
    """The loss of an evaluation is the mean over samples, as with a `loss_fn`."""
    model = WithLoss(how)
    data = pairs() if shape == "pair" else [{"points": x, "targets": y} for x, y in pairs()]
    options = {"metrics": None, "schedulers": (), "loggers": metric_list, "max_duration": "1ep"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    trainer = Trainer(model, data, data, optimizers=optimizer, run_name="own", device="cpu", **options)
    with trainer:
        trainer.fit()

    points, sides = dataset(20).tensors
    expected = torch.nn.functional.cross_entropy(model.layer(points[:18]), sides[:18])
    assert metric_list.series("loss/eval/total")[0][1] == pytest.approx(expected.item(), abs=1e-6)
    assert len(metric_list.series("loss/train/total")) == 5


def test_a_model_without_a_parameter_for_targets_gets_the_inputs_alone(make_trainer):
    """A second parameter with a default is not taken for one of targets."""

    class Autoencoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, points, noise=0.0):
            assert noise == 0.0
            return {"loss": (self.layer(points) - points).square().mean()}

    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(
        model, pairs(), max_duration="1ep", optimizers=optimizer, run_name="a", device="cpu"
    ) as trainer:
        trainer.fit()

    assert trainer.state.timestamp.sample == 18


def test_evaluation_uses_an_overridden_loss_and_weight(metric_list):
    """`loss_weight` weighs batches of an evaluation, and the microbatches of a batch."""

    class Weighted(Trainer):
        def loss(self, outputs, batch):
            return (outputs.squeeze(1) * batch[1]).sum() / self.loss_weight(batch)

        def loss_weight(self, batch):
            return float(batch[1].sum())

    def weighted(**options):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = [(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 0.0, 1.0]))]
        held_out = [
            (torch.tensor([[1.0]]), torch.tensor([3.0])),
            (torch.tensor([[5.0]]), torch.tensor([1.0])),
        ]
        with Weighted(
            model,
            data,
            held_out,
            max_duration="1ep",
            optimizers=optimizer,
            run_name="a",
            device="cpu",
            **options,
        ) as trainer:
            trainer.fit()
        return model.weight.item(), trainer.state.eval_values["loss/eval/total"]

    whole = weighted(loggers=metric_list)

    assert whole == pytest.approx((1 - 2.5, (3 * 1 + 1 * 5) / 4 * -1.5))
    assert weighted(device_train_microbatch_size=2) == pytest.approx(whole)


def test_two_optimizers_take_turns_in_a_custom_step(metric_list, event_list):
    """What `train_step` returns is logged as losses are; the trainer counts, schedules and evaluates."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"generator": torch.nn.Linear(2, 3), "critic": torch.nn.Linear(3, 1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values()]

    class Adversarial(Trainer):
        def train_step(self, batch):
            generator, critic = self.state.model["generator"], self.state.model["critic"]
            of_generator, of_critic = self.state.optimizers
            fake = generator(torch.ones(len(batch[0]), 2))
            critic_loss = critic(fake.detach()).mean() - critic(batch[0]).mean()
            of_critic.zero_grad()
            critic_loss.backward()
            of_critic.step()
            generator_loss = -critic(fake).mean()
            of_generator.zero_grad()
            generator_loss.backward()
            of_generator.step()
            return {"critic": critic_loss, "generator": generator_loss, "metrics/train/fakes": len(fake)}

        def eval_step(self, batch):
            self.state.outputs = self.state.model["critic"](batch[0])

    before = [part.weight.clone() for part in model.values()]
    with Adversarial(
        model,
        pairs(),
        [Evaluator(label="eval", dataloader=pairs())],
        metrics={"height": lambda outputs, targets: outputs.mean()},
        max_duration="1ep",
        optimizers=optimizers,
        loggers=metric_list,
        callbacks=event_list,
        run_name="gan",
        device="cpu",
    ) as trainer:
        trainer.fit()

    assert not any(torch.equal(one, part.weight) for one, part in zip(before, model.values(), strict=True))
    step, row = metric_list.metrics[4]
    assert (step, row["metrics/train/fakes"], row["lr/SGD2/group0"]) == (4, 2, 0.1)
    assert row["loss/train/total"] == pytest.approx(row["loss/train/critic"] + row["loss/train/generator"])
    assert trainer.state.timestamp.sample == 18
    assert "metrics/eval/height" in trainer.state.eval_values
    assert "loss/eval/total" not in trainer.state.eval_values
    start = event_list.events.index("batch_start")
    assert event_list.events[start : start + 4] == [
        "batch_start",
        "before_train_batch",
        "after_train_batch",
        "batch_end",
    ]


def test_a_step_may_call_the_usual_one_and_may_have_no_loss(make_trainer, metric_list):
    """`super().train_step` trains; additions to its losses and metrics are logged beside them."""

    class Adds(Trainer):
        def train_step(self, batch):
            return super().train_step(batch) | {"metrics/train/extra": 1.0}

    def weights(kind, **options):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with kind(
            model,
            pairs(),
            max_duration="1ep",
            loss_fn=torch.nn.functional.cross_entropy,
            optimizers=optimizer,
            loggers=metric_list,
            run_name="a",
            device="cpu",
            **options,
        ) as trainer:
            trainer.fit()
        return model.weight.tolist()

    usual = weights(Trainer)
    adding = weights(Adds)
    values = [row for _, row in metric_list.metrics if "lr/SGD/group0" in row]
    weights(Trainer, train_step=lambda state, batch: None)

    assert adding == usual
    assert values[0]["loss/train/total"] == values[5]["loss/train/total"]
    assert values[5]["metrics/train/extra"] == 1.0
    assert len(metric_list.series("loss/train/total")) == 10


def test_a_custom_step_with_microbatches_raises(make_trainer):
    """The trainer would split nothing."""
    with pytest.raises(ValueError, match="must be None with train_step"):
        make_trainer(train_step=lambda state, batch: None, device_train_microbatch_size=2)


def test_fit_within_fit_raises_and_an_evaluation_within_fit_does_not(make_trainer, make_dataloader):
    """A callback may evaluate; `fit` of its own trainer would end the training around it."""

    class Nests(Callback):
        values: object = None

        def batch_end(self, state, logger):
            if state.timestamp.batch == 2:
                self.values = self.trainer.eval(make_dataloader())
                self.trainer.fit("1ba")

    nests = Nests()
    nests.trainer = make_trainer(callbacks=nests)

    with pytest.raises(RuntimeError, match="fit must not be called while fit runs"):
        nests.trainer.fit()
    assert nests.values["eval"].keys() == {"accuracy", "loss"}
    assert nests.trainer.state.status == "failed"


@pytest.mark.parametrize("persistent", [True, False])
def test_the_training_dataloader_may_be_evaluated(make_trainer, caplog, persistent):
    """Each batch is trained on; an iterator that is one for all is copied, with a word."""
    loader = torch.utils.data.DataLoader(
        dataset(20), 4, num_workers=1, persistent_workers=persistent, multiprocessing_context="fork"
    )
    trainer = make_trainer(
        train_dataloader=loader, eval_dataloader={"train": loader}, eval_interval="2ba", max_duration="1ep"
    )

    trainer.fit()

    assert trainer.state.timestamp.batch == 5
    assert trainer.state.eval_timestamp.sample == 20
    assert ("a copy with separate worker processes" in caplog.text) == persistent


def test_an_iterator_of_training_cannot_be_evaluated(make_trainer):
    """The evaluation would take its batches."""
    batches = iter(pairs())

    with pytest.raises(ValueError, match="Make a second one"):
        make_trainer(train_dataloader=batches, eval_dataloader=batches)


def test_metrics_are_weighed_by_the_samples_of_the_batch(metric_list):
    """Targets that are lists of lists have as many samples as the batch."""
    model = torch.nn.Linear(3, 2)
    data = [(torch.zeros(3, 3), [[0, 1], [1], [0]]), (torch.zeros(1, 3), [[1]])]
    with Trainer(
        model,
        None,
        data,
        loss_fn=lambda outputs, targets: outputs.sum(),
        metrics={"labels": lambda outputs, targets: float(sum(map(len, targets)) / len(targets))},
        run_name="a",
        device="cpu",
    ) as trainer:
        assert trainer.eval()["eval"]["labels"] == 5 / 4
