"""Tests what the Trainer computes, logs, refuses, and leaves behind."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from events import Callback, CheckpointSaver, EngineClosedError, RunStatus, TimeStringError, Trainer

from .conftest import dataset


def test_each_batch_is_logged_at_the_step_of_the_batches_before_it(make_trainer, metric_list):
    """Steps of the loss run from 0 to one less than the batches, without gaps."""
    make_trainer(loggers=metric_list).fit()

    assert [step for step, _ in metric_list.series("loss/train/total")] == list(range(10))
    assert set(metric_list.metrics[0][1]) == {
        "loss/train/total",
        "metrics/train/accuracy",
        "lr/Adam/group0",
        "time/epoch",
        "time/sample",
    }
    assert metric_list.series("time/sample") == [(step, 4 * step) for step in range(10)]


def test_the_learning_rate_logged_is_the_one_that_was_used(make_trainer, metric_list):
    """The scheduler moves after the batch is logged."""
    make_trainer(loggers=metric_list, max_duration="4ba").fit()

    assert [rate for _, rate in metric_list.series("lr/Adam/group0")] == pytest.approx(
        [0.05, 0.05, 0.05, 0.045]
    )


def test_schedulers_may_step_with_each_epoch(make_trainer, metric_list):
    """With step_schedulers_every_batch=False the rate changes between epochs only."""
    trainer = make_trainer(loggers=metric_list, max_duration="4ep", step_schedulers_every_batch=False)

    trainer.fit()

    rates = dict(metric_list.series("lr/Adam/group0"))
    assert rates[14] == pytest.approx(0.05)
    assert rates[15] == pytest.approx(0.045)


def test_epoch_metrics_are_means_over_all_samples(make_trainer, metric_list):
    """Batches of different sizes weigh what they hold."""
    make_trainer(samples=5, loggers=metric_list, max_duration="1ep").fit()

    batches = [value for _, value in metric_list.series("metrics/train/accuracy")]
    assert metric_list.series("metrics/train_epoch/accuracy") == [
        (2, pytest.approx((4 * batches[0] + batches[1]) / 5))
    ]


def test_microbatches_give_the_gradients_of_the_whole_batch(make_trainer):
    """Without random layers, cutting a batch changes nothing but rounding."""

    def weights(microbatch_size):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        make_trainer(
            samples=10, optimizers=optimizer, schedulers=(), device_train_microbatch_size=microbatch_size
        ).close()
        trainer = Trainer(
            model,
            make_trainer(samples=10).state.train_dataloader,
            max_duration="2ep",
            loss_fn=torch.nn.functional.cross_entropy,
            optimizers=optimizer,
            device_train_microbatch_size=microbatch_size,
            device="cpu",
            seed=3,
        )
        with trainer:
            trainer.fit()
        return model.weight.detach()

    assert torch.allclose(weights(None), weights(3), atol=1e-6)


def test_evaluation_results_are_logged_by_label_and_returned(make_trainer, make_dataloader, metric_list):
    """`eval` says in Python what it says to the destinations."""
    trainer = make_trainer(loggers=metric_list)

    results = trainer.eval({"near": make_dataloader(), "far": make_dataloader(samples=8)})

    assert set(results) == {"near", "far"}
    assert metric_list.series("metrics/far/accuracy") == [(0, results["far"]["accuracy"])]
    assert metric_list.series("loss/near/total") == [(0, results["near"]["loss"])]


def test_evaluation_leaves_the_model_training_and_the_state_as_it_was(make_trainer, make_dataloader):
    """After an evaluation within fit, the batch at hand is the training batch again."""
    seen = []

    class Looker(Callback):
        def batch_checkpoint(self, state, logger):
            seen.append(
                (state.dataloader_label, state.phase.value, len(state.batch[0]), state.model.training)
            )

    make_trainer(
        eval_dataloader=make_dataloader(), eval_interval="1ba", max_duration="1ba", callbacks=Looker()
    ).fit()

    assert seen == [("train", "train", 4, True)]


def test_evaluation_is_not_counted_as_training_time(make_trainer, make_dataloader):
    """total_wct sums the durations of batches and of the gaps between epochs, without evaluation."""
    trainer = make_trainer(eval_dataloader=make_dataloader(), eval_interval="1ba", max_duration="3ba")

    trainer.fit()

    timestamp = trainer.state.timestamp
    assert timestamp.total_wct >= timestamp.batch_wct
    assert timestamp.epoch_wct == timestamp.total_wct


def test_predict_returns_the_outputs_of_each_batch(make_trainer, make_dataloader):
    """Outputs come back in host memory, in order."""
    trainer = make_trainer()

    outputs = trainer.predict(make_dataloader(samples=6, batch_size=4))

    assert [tuple(output.shape) for output in outputs] == [(4, 2), (2, 2)]
    assert trainer.predict(make_dataloader(), return_outputs=False) == []


def test_batches_may_be_mappings_and_losses_the_models_own(make_trainer, metric_list):
    """A model in the manner of Hugging Face trains without a loss function, and its tokens are counted."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 2)

        def forward(self, input_ids, labels):
            logits = self.embedding(input_ids).mean(1)
            return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits, labels), logits=logits)

    model = Model()
    batch = {"input_ids": torch.arange(10).reshape(2, 5), "labels": torch.tensor([0, 1])}
    trainer = make_trainer(loggers=metric_list)
    trainer.close()
    trainer = Trainer(
        model,
        [batch, batch],
        max_duration="20tok",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device_train_microbatch_size=1,
        loggers=metric_list,
        device="cpu",
    )

    with trainer:
        trainer.fit()

    assert trainer.state.timestamp.token == "20tok"
    assert len(metric_list.series("loss/train/total")) == 2


def test_tokens_default_to_the_longest_sequence(make_trainer):
    """A dataset says how long its sequences are, as for Composer."""
    data = DataLoader(dataset(8), batch_size=4)
    data.dataset.max_seq_len = 100

    with make_trainer(train_dataloader=data, max_duration="1ep") as trainer:
        trainer.fit()

    assert trainer.state.timestamp.token == "800tok"


def test_training_may_last_for_a_time(make_trainer):
    """A duration in seconds ends when the clock of the run has passed it."""
    trainer = make_trainer(max_duration="0.05sec")

    trainer.fit()

    assert trainer.state.timestamp.total_wct.total_seconds() >= 0.05


@pytest.mark.parametrize("precision", ["bf16", "fp16", "amp_bf16", "amp_fp16"])
def test_mixed_precision_runs_the_model_under_autocast(make_trainer, precision):
    """Outputs have the lower precision, weights keep theirs."""
    dtypes = []

    class Looker(Callback):
        def after_forward(self, state, logger):
            dtypes.append(state.outputs.dtype)

    trainer = make_trainer(precision=precision, max_duration="1ba", callbacks=Looker())

    trainer.fit()

    assert dtypes == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision.removeprefix("amp_")]]
    assert next(trainer.state.model.parameters()).dtype is torch.float32


def test_hyperparameters_of_the_setup_are_logged(make_trainer, metric_list):
    """What one wants to know when runs are compared."""
    make_trainer(loggers=metric_list)

    described = metric_list.hyperparameters["trainer"]
    assert described["optimizers"]["Adam"]["lr"] == 0.05
    assert described["max_duration"] == "2ep"
    assert described["batch_size"] == 4
    assert described["parameters"] == 50
    assert described["num_nodes"] == 1
    assert {"version", "commit", "rank_zero_seed"} <= described.keys()


class TestEnds:
    """How a run ends, and what its destinations see of it."""

    def test_completed(self, make_trainer, metric_list):
        """A run that reaches its duration is completed."""
        trainer = make_trainer(loggers=metric_list)

        trainer.fit()
        trainer.close()
        trainer.close()

        assert metric_list.closed_as == [("completed", None)]

    def test_a_dataloader_that_raises(self, make_trainer, metric_list):
        """The error reaches the caller; the run is closed as failed, with the records logged so far."""

        def broken():
            yield torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
            raise OSError("disk gone")

        trainer = make_trainer(train_dataloader=broken(), loggers=metric_list)

        with pytest.raises(OSError, match="disk gone") as raised:
            trainer.fit()

        assert metric_list.closed_as == [("failed", raised.value)]
        assert len(metric_list.series("loss/train/total")) == 1
        assert trainer.engine.is_closed

    def test_a_nan_loss_is_logged_as_it_is(self, make_trainer, metric_list):
        """A NaN loss is logged as NaN, and training continues."""
        trainer = make_trainer(
            loss_fn=lambda outputs, targets: outputs.sum() * math.nan, loggers=metric_list, max_duration="3ba"
        )

        trainer.fit()

        assert [math.isnan(value) for _, value in metric_list.series("loss/train/total")] == [True] * 3
        assert trainer.state.status is RunStatus.COMPLETED

    def test_a_destination_that_fails_does_not_stop_training(self, make_trainer, metric_list, caplog):
        """Its failures are counted and reported once."""

        class AlwaysBroken(type(metric_list)):
            def log_metrics(self, metrics, step=None):
                raise RuntimeError("no route to host")

        trainer = make_trainer(loggers=[AlwaysBroken(), metric_list])

        trainer.fit()

        assert trainer.state.timestamp.batch == "10ba"
        assert len(metric_list.series("loss/train/total")) == 10
        assert trainer.logger.faults.counts[("AlwaysBroken", "log_metrics", "RuntimeError")] == 10
        assert caplog.text.count("AlwaysBroken.log_metrics failed; training continues.") == 1

    def test_a_failed_trainer_closes_its_destinations(self, make_trainer, metric_list):
        """A checkpoint that is not there leaves the destinations free for the next trainer."""
        with pytest.raises(FileNotFoundError):
            make_trainer(load_path="nowhere.pt", loggers=metric_list)

        assert [status for status, _ in metric_list.closed_as] == ["failed"]
        make_trainer(loggers=metric_list).fit()

    def test_after_close_nothing_is_taken_any_more(self, make_trainer):
        """Training, and logging, after close are errors that say what to do."""
        trainer = make_trainer()
        trainer.close()

        with pytest.raises(EngineClosedError, match="must be run before close"):
            trainer.fit()
        with pytest.raises(EngineClosedError, match="Make a new Trainer"):
            trainer.logger.log_text("too late")


class TestBadInput:
    """Each mistake has an error that says what must be, what was got, and what to do."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"precision": "int4"},
                "precision must be one of fp32, bf16, fp16, amp_bf16, amp_fp16, got 'int4'",
            ),
            ({"device_train_microbatch_size": 0}, "device_train_microbatch_size must be at least 1, got 0"),
            ({"autoresume": True}, "autoresume needs save_folder to find the run"),
            ({"max_duration": "10"}, "time must be a number with a unit, got '10'"),
            ({"eval_interval": "0ba"}, "interval must be positive, got 0ba"),
            ({"save_folder": "x", "save_num_checkpoints_to_keep": 0}, "keep must be at least 1, got 0"),
            (
                {"saver": CheckpointSaver("x"), "save_folder": "x", "save_interval": "2ba"},
                "saver must not be given with save_folder, save_interval, which are short cuts to one",
            ),
        ],
    )
    def test_arguments(self, make_trainer, arguments, message):
        """A bad argument is refused by the constructor."""
        with pytest.raises(ValueError, match=message):
            make_trainer(**arguments)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"train_dataloader": None}, "train_dataloader must be given to train"),
            ({"optimizers": (), "schedulers": ()}, "optimizers must be given to train"),
            ({"max_duration": None}, "max_duration must be given to train"),
            ({"max_duration": "0.5dur"}, "max_duration must not be a share of the run"),
        ],
    )
    def test_nothing_to_train_with(self, make_trainer, arguments, message):
        """What fit lacks can be given to a new trainer, and the old one is still open."""
        trainer = make_trainer(**arguments)

        with pytest.raises(ValueError, match=message):
            trainer.fit()

        assert not trainer.engine.is_closed

    def test_an_empty_dataloader(self, make_trainer):
        """Epochs without batches would loop for ever."""
        with pytest.raises(ValueError, match="must yield at least one batch"):
            make_trainer(train_dataloader=[]).fit()

    def test_no_loss(self, make_trainer):
        """The trainer has no loss function, and the outputs have no loss."""
        with pytest.raises(
            ValueError, match="loss must come from loss_fn or from the model's outputs, got Tensor"
        ):
            make_trainer(loss_fn=None).fit()

    def test_none_metric_raises(self, make_trainer):
        """A metric is a function or a torchmetric."""
        with pytest.raises(TypeError, match="metric 'accuracy' must be a function"):
            make_trainer(metrics={"accuracy": 1})

    def test_a_batch_that_cannot_be_cut(self, make_trainer):
        """Tensors of different lengths cannot be cut into microbatches."""
        with pytest.raises(ValueError, match="same number of samples in all its tensors"):
            make_trainer(
                train_dataloader=[(torch.zeros(4, 3), torch.zeros(3, dtype=torch.long))],
                device_train_microbatch_size=2,
            ).fit()

    def test_a_duration_without_unit(self, make_trainer):
        """A string of digits is no duration."""
        with pytest.raises(TimeStringError, match="must be a number with a unit"):
            make_trainer().fit("3")
