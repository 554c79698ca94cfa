"""Norms are right, and are one operation for all parameters, without a wait."""

import pytest
import torch

from destinations import InMemory
from events import ActivationMonitor, Callback, OptimizerMonitor

SYNCHRONIZING = ("aten._local_scalar_dense", "aten.is_nonzero", "aten._to_copy", "aten.nonzero")


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operations that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    def count(self, *parts):
        return sum(any(part in name for part in parts) for name in self.names)


class Keeps(Callback):
    """Computes what is expected, one parameter at a time."""

    def after_train_batch(self, state, logger):
        self.before = [one.detach().clone() for one in state.model.parameters()]

    def batch_end(self, state, logger):
        parameters = list(state.model.parameters())
        moments = [state.optimizers[0].state[one] for one in parameters]
        self.norms = {
            "grad": _norm([one.grad for one in parameters]),
            "param": _norm(parameters),
            "moment": _norm([one["exp_avg"] for one in moments]),
            "second_moment": _norm([one["exp_avg_sq"] for one in moments]),
            "update": _norm([one - old for one, old in zip(parameters, self.before, strict=True)]),
        }
        self.layer = float(parameters[0].grad.norm())


def _norm(tensors):
    return float(torch.cat([one.detach().flatten() for one in tensors]).norm())


def test_norms_of_gradients_weights_moments_and_updates(make_trainer):
    """Global norms are logged at the interval, and norms per layer only on request."""
    memory, keeps = InMemory(), Keeps()
    monitor = OptimizerMonitor(batch_log_interval=2, per_layer=True, log_updates=True)
    make_trainer(callbacks=[keeps, monitor], loggers=memory, max_duration="4ba").fit()

    for kind, norm in keeps.norms.items():
        assert [time.batch.value for time, _ in memory.data[f"l2_norm/{kind}/global"]] == [2, 4]
        assert memory.most_recent_values[f"l2_norm/{kind}/global"] == pytest.approx(norm, rel=1e-5)
    assert memory.most_recent_values["l2_norm/grad/0.weight"] == pytest.approx(keeps.layer)

    memory = InMemory()
    make_trainer(
        callbacks=OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=1),
        loggers=memory,
        max_duration="1ba",
    ).fit()
    assert [name for name in memory.data if name.startswith("l2_norm")] == ["l2_norm/grad/global"]


@pytest.mark.parametrize("layers", [2, 40])
def test_the_cost_does_not_grow_with_the_number_of_parameters(make_trainer, layers):
    """One multi-tensor norm per kind; nothing is read on the host before the logger does."""
    trainer = make_trainer(max_duration="1ba", metrics=None)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    trainer.state.model, trainer.state.optimizers = model, (optimizer,)
    logged = []

    class Logs:
        def log_metrics(self, metrics):
            logged.append(metrics)

    with Calls() as calls:
        OptimizerMonitor(batch_log_interval=1).batch_end(trainer.state, Logs())

    assert calls.count("_foreach_norm") == 4
    assert calls.count("_local_scalar_dense", "is_nonzero") == 0
    assert len(logged) == 1
    assert all(isinstance(value, torch.Tensor) for value in logged[0].values())


def test_sgd_has_a_momentum_and_a_frozen_parameter_has_none(make_trainer):
    """The monitor logs the states that the optimizer keeps."""
    memory = InMemory()
    trainer = make_trainer(loggers=memory, callbacks=OptimizerMonitor(batch_log_interval=1, per_layer=True))
    model = trainer.state.model
    model[0].weight.requires_grad_(requires_grad=False)
    trainer.state.optimizers = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),)
    trainer.state.schedulers = ()

    trainer.fit("1ba")

    assert "l2_norm/moment/2.bias" in memory.data
    assert "l2_norm/second_moment/global" not in memory.data
    assert not any(name.endswith("/0.weight") for name in memory.data)


def test_activations_are_measured_at_the_interval(make_trainer):
    """Inputs and outputs of each module, on the first microbatch; no hook stays behind."""
    memory = InMemory()
    monitor = ActivationMonitor("2ba", ignore_module_types=["1"])
    trainer = make_trainer(
        callbacks=monitor, loggers=memory, max_duration="5ba", device_train_microbatch_size=2
    )
    first = []

    def look(_module, inputs, output):
        first.append((inputs[0], output.detach()))

    trainer.state.model[0].register_forward_hook(look)
    trainer.fit()

    name = "activations/{}/0_output.0"
    assert [time.batch.value for time, _ in memory.data[name.format("max")]] == [0, 2, 4]
    given, made = first[8]
    assert memory.most_recent_values["activations/average/0_input.0"] == pytest.approx(float(given.mean()))
    assert memory.most_recent_values[name.format("max")] == pytest.approx(float(made.amax(1).mean()))
    assert memory.most_recent_values[name.format("l2_norm")] == pytest.approx(float(made.norm(dim=1).mean()))
    assert "activations/kurtosis/_output.0" in memory.data
    assert not any("/1_" in name for name in memory.data)
    assert sum(len(module._forward_hooks) for module in trainer.state.model.modules()) == 1


def test_kurtosis_is_three_for_a_normal_distribution(make_trainer):
    """It is the fourth standardized moment."""
    memory = InMemory()
    trainer = make_trainer(callbacks=ActivationMonitor("1ba"), loggers=memory, max_duration="1ba")
    generator = torch.Generator().manual_seed(0)
    trainer.state.model = torch.nn.Identity()
    hooked = ActivationMonitor("1ba")
    hooked.fit_start(trainer.state, trainer.logger)
    hooked.before_forward(trainer.state, trainer.logger)
    trainer.state.model(torch.randn(4, 100_000, generator=generator))
    hooked.after_forward(trainer.state, trainer.logger)

    assert memory.most_recent_values["activations/kurtosis/_output.0"] == pytest.approx(3.0, abs=0.05)


def test_unsupported_arguments_of_activation_monitor_raise():
    """Units that make no sense, and the argument of one tracker, are errors."""
    with pytest.raises(ValueError, match="interval must be in batches or epochs"):
        ActivationMonitor("10sp")
    with pytest.raises(ValueError, match="only_log_wandb=True is not supported"):
        ActivationMonitor(only_log_wandb=True)
    with pytest.raises(ValueError, match="batch_log_interval must be at least 1"):
        OptimizerMonitor(batch_log_interval=0)
