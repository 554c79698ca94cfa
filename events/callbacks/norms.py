"""`OptimizerMonitor` and `ActivationMonitor`: norms of gradients, weights, moments, updates and activations.

Norms are computed on the device, in one multi-tensor operation for all tensors of a kind and dtype, and are
copied without waiting for it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from events.callback import Callback
from events.logger.logger import Logger
from events.state import State
from events.timestamp import Time

from .periodic import BATCHES_OR_EPOCHS, Periodic

__all__ = ["ActivationMonitor", "OptimizerMonitor"]

# The moments of torch's optimizers (Adam and its kin, RMSprop, SGD) and the names that they are logged under.
_MOMENTS = {
    "exp_avg": "moment",
    "exp_avg_sq": "second_moment",
    "momentum_buffer": "moment",
    "square_avg": "second_moment",
}


class OptimizerMonitor(Callback):
    """Logs L2 norms of gradients, weights, moments and updates, as `l2_norm/<kind>/global`.

    ```python
    Trainer(..., callbacks=[OptimizerMonitor(batch_log_interval=50, per_layer=True)])
    ```

    | kind | of | when |
    |---|---|---|
    | `grad` | the gradients, as the optimizer saw them | always |
    | `param` | the weights after the step | `log_optimizer_metrics` |
    | `moment`, `second_moment` | the optimizer's state, if it has one | `log_optimizer_metrics` |
    | `update` | the difference that the step made | `log_updates` |

    **Cost.** One multi-tensor operation per kind, device and dtype, however many parameters there are;
    nothing waits for the device. `log_updates` keeps a copy of the trained weights on the device during a
    step that is logged. Sharded tensors (`DTensor`) are reduced over ranks.

    Args:
        log_optimizer_metrics: whether to log weights and moments.
        batch_log_interval: how often to log, in batches.
        per_layer: whether to log `l2_norm/<kind>/<parameter>` too: as many metrics as there are parameters.
        log_updates: whether to log updates.

    Raises:
        ValueError: the interval is not positive.
    """

    def __init__(
        self,
        log_optimizer_metrics: bool = True,
        batch_log_interval: int = 10,
        *,
        per_layer: bool = False,
        log_updates: bool = False,
    ) -> None:
        super().__init__()
        if batch_log_interval < 1:
            raise ValueError(f"batch_log_interval must be at least 1, got {batch_log_interval}.")
        self.log_optimizer_metrics = log_optimizer_metrics
        self.batch_log_interval = batch_log_interval
        self._per_layer = per_layer
        self._log_updates = log_updates
        self._before: dict[str, Any] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Keeps the weights before a step whose update is logged."""
        if self._log_updates and (state.timestamp.batch.value + 1) % self.batch_log_interval == 0:
            self._before = {name: one.detach().clone() for name, one in _trained(state)}

    def batch_end(self, state: State, logger: Logger) -> None:
        """Logs the norms, if they are due."""
        if state.timestamp.batch.value % self.batch_log_interval != 0:
            return
        metrics: dict[str, Any] = {}
        for kind, tensors in self._tensors(state).items():
            norms = l2_norms(list(tensors.values()))
            metrics[f"l2_norm/{kind}/global"] = stacked(norms).norm()
            if self._per_layer:
                metrics |= {f"l2_norm/{kind}/{name}": norm for name, norm in zip(tensors, norms, strict=True)}
        if metrics:
            logger.log_metrics(metrics)

    def _tensors(self, state: State) -> dict[str, dict[str, Any]]:
        """Returns the tensors of each kind by the name of their parameter."""
        before, self._before = self._before, {}
        trained = dict(_trained(state))
        kinds = {"grad": {name: one.grad for name, one in trained.items() if one.grad is not None}}
        if before:
            kinds["update"] = {
                name: old.neg_().add_(trained[name].detach())
                for name, old in before.items()
                if name in trained
            }
        if self.log_optimizer_metrics:
            kinds["param"] = {name: one.detach() for name, one in trained.items()}
            kinds |= _moments(state, {one: name for name, one in trained.items()})
        return {kind: tensors for kind, tensors in kinds.items() if tensors}


def _trained(state: State) -> Iterable[tuple[str, Any]]:
    """Yields the parameters that are trained, by name."""
    if state.model is not None:
        yield from ((name, one) for name, one in state.model.named_parameters() if one.requires_grad)


def _moments(state: State, names: Mapping[Any, str]) -> dict[str, dict[str, Any]]:
    """Returns the moments of the optimizers, by kind and name."""
    kinds: dict[str, dict[str, Any]] = defaultdict(dict)
    for optimizer in state.optimizers:
        for parameter, values in optimizer.state.items():
            for key, kind in _MOMENTS.items():
                if parameter in names and values.get(key) is not None:
                    kinds[kind][names[parameter]] = values[key]
    return kinds


def l2_norms(tensors: list[Any]) -> list[Any]:
    """Returns the L2 norm of each tensor, in fp32 on its device."""
    import torch

    groups: dict[Any, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype, type(tensor)].append(index)
    norms: list[Any] = [None] * len(tensors)
    for indices in groups.values():
        # As `torch.nn.utils.clip_grad_norm_` does.
        group = [tensors[index] for index in indices]
        found = torch._foreach_norm(group, 2, dtype=torch.float32)  # noqa: SLF001
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return norms


def stacked(norms: list[Any]) -> Any:
    """Returns norms as one tensor, on the device of the first."""
    import torch

    return torch.stack([norm.to(norms[0].device) for norm in norms])


def floating_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the floating-point tensors in nested lists, tuples and mappings, named by their positions."""
    match value:
        case Mapping():
            yield from floating_tensors([*value.values()], name)
        case list() | tuple():
            for index, one in enumerate(value):
                yield from floating_tensors(one, f"{name}.{index}")
        case _ if hasattr(value, "is_floating_point") and value.is_floating_point() and value.numel():
            yield name, value.detach()


class ActivationMonitor(Periodic):
    """Logs statistics of the inputs and outputs of each module, at an interval.

    ```python
    Trainer(..., callbacks=[ActivationMonitor("100ba", ignore_module_types=["Dropout"])])
    ```

    `activations/<statistic>/<module>_input.<i>` and `…_output.<i>`, for `l2_norm`, `max` and `kurtosis`
    over the last dimension, each averaged over the others, and `average` over all. The outermost module
    has an empty name. Floating-point tensors only.

    **Cost.** Hooks are there for one forward pass per interval (the first microbatch); the statistics are
    about a dozen kernels per tensor, and are copied without waiting for the device.

    Args:
        interval: how often, in batches or epochs; a bare number counts batches.
        ignore_module_types: modules whose name contains one of these are left out.
        only_log_wandb: not supported: every destination gets the metrics; limit others with `write_rate`.

    Raises:
        ValueError: the interval is in another unit, or `only_log_wandb` is true.
    """

    def __init__(
        self,
        interval: Time | str | int = "25ba",
        ignore_module_types: Iterable[str] | None = None,
        only_log_wandb: bool = False,
    ) -> None:
        super().__init__(interval, BATCHES_OR_EPOCHS)
        if only_log_wandb:
            raise ValueError(
                "only_log_wandb=True is not supported. Every destination gets the metrics: "
                "give the others a write_rate, or leave them out."
            )
        self._ignored = tuple(ignore_module_types or ())
        self._handles: list[Any] = []
        self._found: dict[str, Any] = {}

    def before_forward(self, state: State, logger: Logger) -> None:
        """Adds the hooks, if statistics are due."""
        if not self._is_due or state.model is None:
            return
        for name, module in state.model.named_modules():
            if not any(word in name for word in self._ignored):
                hook = self._hook_of(name)
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def after_forward(self, state: State, logger: Logger) -> None:
        """Removes the hooks, and logs."""
        if not self._handles:
            return
        self._is_due = False
        self._remove_hooks()
        found, self._found = self._found, {}
        logger.log_metrics(found)

    def close(self, state: State, logger: Logger) -> None:
        """Removes the hooks of a forward pass that raised."""
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_of(self, name: str) -> Any:
        def measure(_module: Any, inputs: Any, keywords: Mapping[str, Any], output: Any) -> None:
            outputs = output if isinstance(output, list | tuple) else [output]
            for one, tensor in (
                *floating_tensors([*inputs, *keywords.values()], f"{name}_input"),
                *floating_tensors(outputs, f"{name}_output"),
            ):
                for statistic, number in _statistics(tensor).items():
                    self._found[f"activations/{statistic}/{one}"] = number

        return measure


def _statistics(value: Any) -> dict[str, Any]:
    """Returns statistics of a floating-point tensor over its last dimension, averaged over the others."""
    import torch

    value = value.float()
    if value.dim() == 0:
        value = value[None]
    centred = value - value.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1)
    return {
        "l2_norm": torch.linalg.vector_norm(value, dim=-1).mean(),
        "average": value.mean(),
        # https://en.wikipedia.org/wiki/Kurtosis: the fourth standardized moment, 3 for a normal distribution.
        "kurtosis": (centred.pow(4).mean(dim=-1) / variance.square()).mean(),
        "max": value.amax(dim=-1).mean(),
    }
