"""Training stops when it should, says why, and never waits for a device to find out."""

import json

import pytest
import torch

from destinations import InMemory, RunDirectory
from events import Callback, EarlyStopper, LossSpike, NaNMonitor, Run, ThresholdStopper


class Fixed:
    """A metric that has the next of some values each time it is computed."""

    def __init__(self, values):
        self._values = iter(values)
        self.value = 0.0

    def __call__(self, outputs, targets):
        return 0.0

    def compute(self):
        self.value = next(self._values, self.value)
        return self.value

    def reset(self):
        pass


class Sets(Callback):
    """Puts a metric into the state of a trainer."""

    def __init__(self, label, metric):
        super().__init__()
        self.label, self.metric = label, metric

    def fit_start(self, state, logger):
        if self.label == "train":
            state.train_metrics = {"accuracy": self.metric}

    def eval_start(self, state, logger):
        if self.label == "eval":
            state.eval_metrics = {"eval": {"accuracy": self.metric}}


def test_early_stopper_stops_after_its_patience_and_the_run_says_why(make_trainer, make_dataloader, tmp_path):
    """The best value, its batch and the patience are in the sidecar; `FIT_END` has run."""
    # The trainer computes each metric once to log it, and the stopper once more.
    values = [0.1, 0.1, 0.5, 0.5] + [0.4] * 20
    trainer = make_trainer(
        max_duration="30ep",
        eval_dataloader=make_dataloader(),
        metrics=None,
        callbacks=[Sets("eval", Fixed(values)), EarlyStopper("accuracy", "eval", patience="3ep")],
        loggers=[RunDirectory(tmp_path / "run")],
    )

    trainer.fit()
    trainer.close()

    assert trainer.state.timestamp.epoch == 2 + 4
    written = json.loads((tmp_path / "run" / "sidecar.json").read_text())
    assert (written["status"], written["stop_reason"]) == (
        "stopped",
        "EarlyStopper: accuracy of 'eval' has not improved on 0.5 since batch 10 (patience 3ep).",
    )


@pytest.mark.parametrize(
    ("monitor", "label"),
    [
        ("loss", "eval"),
        ("loss/eval/total", "eval"),
        ("metrics/eval/accuracy", "eval"),
        ("loss/train/total", "train"),
    ],
)
def test_stoppers_take_the_names_of_the_log(make_trainer, make_dataloader, monitor, label):
    """This holds for the loss of an evaluation too."""
    stopper = EarlyStopper(monitor, label, comp=lambda current, best: False)
    trainer = make_trainer(max_duration="30ep", eval_dataloader=make_dataloader(), callbacks=stopper)

    trainer.fit()

    assert trainer.state.timestamp.epoch == 3
    assert trainer.state.stop_reason.startswith(f"EarlyStopper: {monitor} of {label!r} has not improved")


def test_a_metric_that_never_occurs_is_reported(make_trainer, make_dataloader, caplog):
    """No evaluation with that label ended; the log names the evaluations that did."""
    stopper = ThresholdStopper("accuracy", "evla", 0.9)
    make_trainer(eval_dataloader=make_dataloader(), callbacks=stopper).fit()

    assert "ThresholdStopper has seen no 'accuracy' of 'evla'" in caplog.text
    assert "Evaluated were: eval." in caplog.text


def test_nan_is_never_the_best_of_an_early_stopper(make_trainer, make_dataloader):
    """A first value of NaN gives way to any number; the patience counts from it where none comes."""
    nan = float("nan")
    stopper = EarlyStopper("accuracy", "eval", patience="2ep")
    trainer = make_trainer(
        eval_dataloader=make_dataloader(),
        max_duration="30ep",
        metrics=None,
        callbacks=[Sets("eval", Fixed([nan, nan, nan, nan, 0.2, 0.2, nan, nan, 0.1])), stopper],
    )

    trainer.fit()

    assert (stopper.best, trainer.state.timestamp.epoch) == (0.2, 6)


def test_an_early_stopper_that_sees_nothing_but_nan_stops_and_has_no_best(make_trainer, make_dataloader):
    """Its state has no best either."""
    stopper = EarlyStopper("accuracy", "eval", patience="2ep")
    trainer = make_trainer(
        eval_dataloader=make_dataloader(),
        max_duration="30ep",
        metrics=None,
        callbacks=[Sets("eval", Fixed([float("nan")] * 30)), stopper],
    )

    trainer.fit()

    assert (stopper.state_dict()["best"], trainer.state.timestamp.epoch) == (None, 4)


def test_early_stopper_takes_training_metrics_at_the_end_of_epochs_and_batches(make_trainer):
    """A patience in epochs looks once an epoch, at what the epoch computed; one in batches at each batch."""
    looks = []

    def better(current, best):
        looks.append((float(current), float(best)))
        return False

    trainer = make_trainer(
        max_duration="30ep", callbacks=EarlyStopper("accuracy", "train", comp=better, patience=1)
    )
    trainer.fit()
    assert trainer.state.timestamp.epoch == 3
    assert len(looks) == 2
    assert all(0 < value <= 1 for value, _ in looks)

    trainer = make_trainer(max_duration="30ep", callbacks=EarlyStopper("loss", "train", "gt", patience="2ba"))
    trainer.fit()
    assert trainer.state.stop_reason.startswith("EarlyStopper: loss of 'train' has not improved on")


def test_an_early_stopper_resumes_with_its_best_value(make_trainer):
    """The state of a checkpoint has the best value and its time."""
    first = EarlyStopper("accuracy", "train", patience="3ep")
    make_trainer(callbacks=first).fit()
    second = EarlyStopper("accuracy", "train", patience="3ep")

    second.load_state_dict(first.state_dict())

    assert float(second.best) == float(first.best)
    assert second.best_occurred == first.best_occurred
    assert EarlyStopper("accuracy", "train").state_dict() == {}


def test_threshold_stopper_stops_at_a_batch_or_an_epoch(make_trainer):
    """By default losses fall and others rise; `stop_on_batch` does not wait for the epoch."""
    trainer = make_trainer(
        max_duration="30ep", callbacks=ThresholdStopper("loss", "train", 1e9, stop_on_batch=True)
    )
    trainer.fit()
    assert trainer.state.timestamp.batch == 1
    assert trainer.state.stop_reason.startswith("ThresholdStopper: loss of 'train' is 0.")
    assert trainer.state.stop_reason.endswith("at batch 1 (threshold 1e+09).")

    trainer = make_trainer(max_duration="3ep", callbacks=ThresholdStopper("accuracy", "train", 2.0))
    trainer.fit()
    assert (trainer.state.timestamp.epoch, trainer.state.status) == (3, "completed")


def test_wrong_arguments_of_stoppers_are_refused():
    """The comparison, the unit of the patience and the name of the metric are checked."""
    with pytest.raises(ValueError, match="comp must be 'greater'"):
        EarlyStopper("accuracy", "eval", comp="best")
    with pytest.raises(ValueError, match="patience must be in epochs or batches"):
        EarlyStopper("accuracy", "eval", patience="3sp")
    with Run(callbacks=EarlyStopper("acuracy", "train"), run_name="r") as run:
        run.epoch_start()
        run.state.train_metrics = {"accuracy": Fixed([1.0])}
        with pytest.raises(ValueError, match=r"got 'acuracy'\. Did you mean 'accuracy'"):
            run.epoch_end()
        run.state.train_metrics = {"acuracy": Fixed([1.0])}


def spike(losses, **options):
    """Returns the state after a run with these losses."""
    memory = InMemory()
    with Run(memory, LossSpike(window_size=4, **options), "r") as run:
        for loss in losses:
            run.batch_start()
            run.state.loss = torch.tensor(loss)
            run.batch_end()
            if run.state.is_done:
                break
    return run.state, memory


def test_a_loss_spike_is_reported_or_stops_training(caplog):
    """It needs more outliers in a row than the patience; a single one is counted and forgotten."""
    state, memory = spike([1.0] * 4 + [9.0] + [1.0] * 2 + [9.0, 9.0, 9.0, 1.0], patience=2)
    assert (state.status, len(caplog.records)) == ("completed", 1)
    assert "3 losses in a row are more than 2 times the mean of 1, the last 9 at batch 10" in caplog.text
    assert [value for _, value in memory.data["loss_spike/outliers"]] == [1, 0, 1, 2, 3]

    state, _ = spike([1.0] * 4 + [9.0] * 5, patience=2, log_only=False)
    assert (state.status, state.timestamp.batch) == ("stopped", 7)
    state, _ = spike([20.0] * 9, log_only=False)
    assert state.stop_reason == "LossSpike: 4 of the last 4 losses are above 10, at batch 5."


def test_losses_that_are_not_finite_are_outliers():
    """NaN doesn't compare, and still counts."""
    state, _ = spike([1.0] * 4 + [float("nan")] * 9, log_only=False, patience=1)

    assert state.timestamp.batch == 6


class Breaks(torch.nn.Module):
    """Returns NaN from its third call on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (float("nan") if self.calls > 2 else 1.0)


def test_nan_monitor_names_the_first_module(make_trainer):
    """The run fails with the batch and the module; its parameters are named if they are to blame."""
    trainer = make_trainer(callbacks=NaNMonitor(), metrics=None)
    trainer.state.model.add_module("0", torch.nn.Sequential(torch.nn.Linear(3, 8), Breaks()))

    with pytest.raises(RuntimeError, match="Train loss contains a NaN") as caught:
        trainer.fit()

    assert str(caught.value) == (
        "Train loss contains a NaN in batch 2. The first module with a non-finite output is '0.1' (Breaks)."
    )
    assert trainer.state.status == "failed"

    trainer = make_trainer(callbacks=NaNMonitor(), metrics=None)
    torch.nn.init.constant_(trainer.state.model[2].bias, float("inf"))
    with pytest.raises(RuntimeError, match=r"'2' \(Linear\)\. Its parameters .* either: bias\."):
        trainer.fit()


def test_nan_monitor_looks_into_outputs_by_name(make_trainer):
    """A module that returns a dict is named like any other."""

    class ByName(torch.nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x) * float("nan")}

    class Logits(torch.nn.Module):
        def forward(self, by_name):
            return by_name["logits"]

    trainer = make_trainer(callbacks=NaNMonitor(), metrics=None)
    trainer.state.model.add_module("2", torch.nn.Sequential(ByName(8, 2), Logits()))

    with pytest.raises(RuntimeError, match=r"non-finite output is '2\.0' \(ByName\)"):
        trainer.fit()


def test_nan_monitor_says_when_the_loss_itself_is_to_blame(make_trainer):
    """All outputs are finite; without `find_module` there are no hooks."""

    def bad(outputs, targets):
        return outputs.sum() * float("nan")

    with pytest.raises(
        RuntimeError, match="outputs of all modules are finite, so the NaN comes from the loss function"
    ):
        make_trainer(callbacks=NaNMonitor(), loss_fn=bad).fit()
    trainer = make_trainer(callbacks=NaNMonitor(find_module=False), loss_fn=bad)
    with pytest.raises(RuntimeError, match=r"a NaN in batch 0\.$"):
        trainer.fit()
    assert not any(module._forward_hooks for module in trainer.state.model.modules())


def test_nan_monitor_costs_one_reduction_for_all_modules(make_trainer):
    """However many modules: the norms of all outputs are one multi-tensor call; hooks are removed at the end."""
    calls = []

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    trainer = make_trainer(callbacks=NaNMonitor(), max_duration="3ba", metrics=None)
    with Counts():
        trainer.fit()

    assert sum("_foreach_norm" in name for name in calls) == 3
    assert not any(module._forward_hooks for module in trainer.state.model.modules())
