"""Callbacks that watch a value and stop training: no improvement, a threshold, a loss that is NaN or jumps.

Nothing here waits for a device: values are copied without waiting and judged once they have arrived, on a GPU
a few batches later. A callback that stops a run sets `state.stop_reason`, and the status becomes "stopped".
"""

import difflib
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from events.callback import Callback
from events.logger.device import DeviceCopies, HostCopies, PendingCopy
from events.logger.logger import Logger
from events.state import RunStatus, State
from events.timestamp import Time, Timestamp, TimeUnit

from .norms import floating_tensors

__all__ = ["EarlyStopper", "LossSpike", "NaNMonitor", "ThresholdStopper"]

_log = logging.getLogger("events")

_SMALLER_IS_BETTER = ("loss", "error", "perplexity")
_MAX_SHOWN_PARAMETERS = 3


class _Watcher(Callback):
    """Judges values once they are on the host, in order, each with a note that says what it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self._copies = HostCopies(DeviceCopies())
        self._waiting: deque[tuple[Any, PendingCopy]] = deque()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Looks at what has arrived."""
        self._judge_arrivals(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Waits for the rest, and looks at it."""
        self._copies.wait()
        self._judge_arrivals(state, logger)

    def _watch(self, note: Any, value: Any) -> None:
        """Starts the copy of a tensor; another value arrives at once."""
        is_tensor = hasattr(value, "device") and hasattr(value, "detach")
        copied = self._copies.start_array(value.detach()) if is_tensor else value
        is_pending = isinstance(copied, PendingCopy)
        self._waiting.append((note, copied if is_pending else PendingCopy(is_ready=True, value=copied)))

    def _judge_arrivals(self, state: State, logger: Logger) -> None:
        self._copies.collect()
        while self._waiting:
            note, copy = self._waiting[0]
            if not copy.is_ready:
                return
            self._waiting.popleft()
            if not copy.is_lost:
                self._judge(note, copy.value, state, logger)

    def _judge(self, note: Any, value: Any, state: State, logger: Logger) -> None:
        """Decides with a value, which may be a tensor on the host."""
        raise NotImplementedError


Comparison = Callable[[Any, Any], Any]


def _comparison(comp: str | Comparison | None, monitor: str) -> Comparison:
    """Returns `comp(current, best)`, by default the direction that the metric's name suggests."""
    if callable(comp):
        return comp
    if comp is None:
        comp = "less" if any(word in monitor.lower() for word in _SMALLER_IS_BETTER) else "greater"
    if comp.lower() in {"greater", "gt"}:
        return lambda current, best: current > best
    if comp.lower() in {"less", "lt"}:
        return lambda current, best: current < best
    raise ValueError(f"comp must be 'greater', 'gt', 'less', 'lt' or a function, got {comp!r}.")


class _MetricWatcher(_Watcher):
    """Computes a metric of the state where it may have changed, and judges it with its timestamp."""

    def __init__(
        self, monitor: str, dataloader_label: str, comp: str | Comparison | None, *, every_batch: bool
    ) -> None:
        super().__init__()
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self.comp_func = _comparison(comp, monitor)
        self._every_batch = every_batch
        self._has_looked = False

    def eval_end(self, state: State, logger: Logger) -> None:
        """Looks at an evaluation metric."""
        self._look(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Looks at a training metric."""
        self._look(state, logger)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Looks at a training metric, if it is watched with each batch."""
        if self._every_batch:
            self._look(state, logger)
        else:
            self._judge_arrivals(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Waits for the last values; warns if there were none."""
        super().fit_end(state, logger)
        if not self._has_looked and state.status is RunStatus.RUNNING:
            _log.warning(
                "%s has seen no %r of %r: no such evaluation, or epoch of training, has ended. "
                "Evaluated were: %s.",
                type(self).__name__,
                self.monitor,
                self.dataloader_label,
                ", ".join(one.label for one in state.evaluators) or "none",
            )

    def _look(self, state: State, logger: Logger) -> None:
        if state.dataloader_label == self.dataloader_label:
            self._has_looked = True
            self._watch(state.timestamp, self._value(state))
        self._judge_arrivals(state, logger)

    def _value(self, state: State) -> Any:
        label = self.dataloader_label
        is_train = label == "train"
        metrics = state.train_metrics if is_train else state.eval_metrics.get(label, {})
        # Names in the log, and a short name for the loss.
        values: dict[str, Any] = {f"loss/{label}/total": state.loss} if is_train else {**state.eval_values}
        values = {name: one for name, one in values.items() if f"/{label}/" in name and one is not None}
        name = self.monitor.removeprefix(f"metrics/{label}/")
        if name in metrics:
            return metrics[name].compute()
        name = f"loss/{label}/total" if name == "loss" else self.monitor
        if name in values:
            return values[name]
        known = [*metrics, *values]
        near = difflib.get_close_matches(self.monitor, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known) or 'none'}."
        raise ValueError(
            f"monitor must be a metric of the dataloader {label!r}, got {self.monitor!r}. {hint}"
        )


class EarlyStopper(_MetricWatcher):
    """Stops training when a metric has not improved for a while.

    ```python
    EarlyStopper("accuracy", "eval", patience="3ep")
    ```

    Looks at the end of each evaluation of that dataloader; for "train", at the end of each epoch, and with a
    patience in batches at the end of each batch. A checkpoint has the best value and its time.

    Args:
        monitor: the name of the metric, or the one in the log, such as "loss/eval/total"; "loss" is short for
            that loss.
        dataloader_label: "train", "eval", or the label of an evaluation dataloader.
        comp: "less" or "greater": what is better; or a function of the current and the best value. Default:
            "less" for names with "loss", "error" or "perplexity".
        min_delta: by how much a value must differ from the best to be an improvement; NaN is none.
        patience: how long to wait for one, in epochs or batches; a bare number counts epochs.

    Raises:
        ValueError: the comparison or the unit of the patience is unknown.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        comp: str | Comparison | None = None,
        min_delta: float = 0.0,
        patience: Time | str | int = 1,
    ) -> None:
        self.patience = Time.from_input(patience, TimeUnit.EPOCH)
        if self.patience.unit not in {TimeUnit.EPOCH, TimeUnit.BATCH}:
            raise ValueError(f'patience must be in epochs or batches ("3ep", "500ba"), got {self.patience}.')
        super().__init__(monitor, dataloader_label, comp, every_batch=self.patience.unit is TimeUnit.BATCH)
        self.min_delta = abs(min_delta)
        self.best: Any = None
        self.best_occurred: Timestamp | None = None

    def _judge(self, note: Timestamp, value: Any, state: State, logger: Logger) -> None:
        is_better = not math.isnan(float(value)) and (
            self.best is None
            or (bool(self.comp_func(value, self.best)) and abs(value - self.best) > self.min_delta)
        )
        if is_better:
            self.best = value
        if is_better or self.best_occurred is None:
            self.best_occurred = note
            return
        if note.get(self.patience.unit) - self.best_occurred.get(self.patience.unit) > self.patience:
            state.stop_training(
                f"EarlyStopper: {self.monitor} of {self.dataloader_label!r} has not improved on "
                f"{math.nan if self.best is None else float(self.best):g} "
                f"since batch {self.best_occurred.batch.value} "
                f"(patience {self.patience})."
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and its time."""
        if self.best_occurred is None:
            return {}
        best = None if self.best is None else float(self.best)
        return {"best": best, "best_occurred": self.best_occurred.to_numbers()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the best value and its time."""
        self.best = state["best"]
        self.best_occurred = Timestamp.from_state_dict(state["best_occurred"])


class ThresholdStopper(_MetricWatcher):
    """Stops training when a metric reaches a threshold.

    ```python
    ThresholdStopper("accuracy", "eval", 0.95)
    ```

    Args:
        monitor: the name of the metric, or the one in the log, such as "loss/eval/total"; "loss" is short for
            that loss.
        dataloader_label: "train", "eval", or the label of an evaluation dataloader.
        threshold: the value to reach.
        comp: "less" or "greater": on which side of the threshold to stop; or a function of the current value
            and the threshold. Default: "less" for names with "loss", "error" or "perplexity".
        stop_on_batch: look at a training metric with each batch rather than each epoch.

    Raises:
        ValueError: the comparison is unknown.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str,
        threshold: float,
        *,
        comp: str | Comparison | None = None,
        stop_on_batch: bool = False,
    ) -> None:
        super().__init__(monitor, dataloader_label, comp, every_batch=stop_on_batch)
        self.threshold = threshold
        self.stop_on_batch = stop_on_batch

    def _judge(self, note: Timestamp, value: Any, state: State, logger: Logger) -> None:
        if bool(self.comp_func(value, self.threshold)):
            state.stop_training(
                f"ThresholdStopper: {self.monitor} of {self.dataloader_label!r} is {float(value):g} "
                f"at batch {note.batch.value} (threshold {self.threshold:g})."
            )


class LossSpike(_Watcher):
    """Detects jumps of the training loss, and losses that stay high.

    ```python
    Trainer(..., callbacks=[LossSpike(log_only=False, patience=10, window_size=200)])
    ```

    A loss is an outlier if it is `outlier_multiplier` times the mean of the last `window_size` others; more
    than `patience` outliers in a row are a spike. The loss is high if half of the window is above `loss_cap`.
    Logs `loss_spike/outliers`, the current number in a row, when it changes.

    Args:
        log_only: whether a spike or a high loss is only reported; otherwise it stops training.
        patience: how many outliers in a row are tolerated.
        outlier_multiplier: what makes an outlier.
        window_size: the number of batches of the mean; nothing is judged before there are as many.
        loss_cap: the loss above which one is high; None for none.
    """

    def __init__(
        self,
        log_only: bool = True,
        patience: int = 4,
        outlier_multiplier: float = 2.0,
        window_size: int = 100,
        loss_cap: float | None = 10.0,
    ) -> None:
        super().__init__()
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, got {window_size}.")
        self._log_only = log_only
        self._patience = patience
        self._outlier_multiplier = outlier_multiplier
        self._loss_cap = loss_cap
        self._window: deque[float] = deque(maxlen=window_size)
        self._outliers = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        """Looks at the losses that have arrived."""
        if state.loss is not None:
            self._watch(state.timestamp.batch.value, state.loss)
        self._judge_arrivals(state, logger)

    def _judge(self, note: int, value: Any, state: State, logger: Logger) -> None:
        batch, loss = note, float(value)
        if len(self._window) < (self._window.maxlen or 0):
            self._window.append(loss)
            return
        mean = math.fsum(self._window) / len(self._window)
        before = self._outliers
        if loss > mean * self._outlier_multiplier or not math.isfinite(loss):
            # Not part of the mean, which a jump would soon make look normal.
            self._outliers += 1
        else:
            self._outliers = 0
            self._window.append(loss)
        if self._outliers != before:
            logger.log_metrics({"loss_spike/outliers": self._outliers}, batch)
        if self._outliers > self._patience:
            self._report(
                f"{self._outliers} losses in a row are more than {self._outlier_multiplier:g} times the mean "
                f"of {mean:g}, the last {loss:g} at batch {batch}.",
                state,
            )
        elif self._loss_cap is not None:
            high = sum(one > self._loss_cap for one in self._window)
            if high * 2 >= len(self._window):
                self._report(
                    f"{high} of the last {len(self._window)} losses are above {self._loss_cap:g}, "
                    f"at batch {batch}.",
                    state,
                )

    def _report(self, text: str, state: State) -> None:
        # Starts over: one report for a jump, not one for each batch after it.
        self._window.clear()
        self._outliers = 0
        if self._log_only:
            _log.warning("LossSpike: %s", text)
        else:
            state.stop_training(f"LossSpike: {text}")


class NaNMonitor(_Watcher):
    """Raises when the training loss is NaN, and names the first module whose output is not finite.

    ```python
    Trainer(..., callbacks=[NaNMonitor()])
    ```

    To find the module, the outputs of all innermost modules are reduced in one multi-tensor operation per
    microbatch, which reads each of them once and waits for nothing. The model must be one that runs forward
    hooks: `torch.compile` does so with graph breaks; `find_module=False` does without.

    **Errors.** `RuntimeError`, which ends the run as failed; on a GPU a few batches after the NaN.

    Args:
        find_module: whether to name the module.
    """

    def __init__(self, find_module: bool = True) -> None:
        super().__init__()
        self._find_module = find_module
        self._handles: list[Any] = []
        # The outputs of the current forward pass by module; None outside of one in training.
        self._outputs: list[tuple[str, Any]] | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Adds hooks to the innermost modules."""
        if not self._find_module or state.model is None:
            return
        self._remove_hooks()
        for name, module in state.model.named_modules():
            if next(module.children(), None) is None:
                self._handles.append(module.register_forward_hook(self._hook_of(name)))

    def before_forward(self, state: State, logger: Logger) -> None:
        """Starts to collect outputs."""
        self._outputs = []

    def after_loss(self, state: State, logger: Logger) -> None:
        """Starts the copy of the loss, and looks at those that have arrived."""
        import torch

        outputs, self._outputs = self._outputs or [], None
        values = [value for _, value in outputs]
        losses = [one.detach().sum().reshape(1) for one in _losses_in(state.loss)]
        largest = torch._foreach_norm(values, math.inf) if values else []  # noqa: SLF001
        found = torch.cat([*losses, *(one.reshape(1).to(losses[0].device) for one in largest)])
        names = [name for name, _ in outputs]
        self._watch((state.timestamp.batch.value, len(losses), names), found)
        self._judge_arrivals(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Removes the hooks; waits for the last losses."""
        self._remove_hooks()
        super().fit_end(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Removes the hooks."""
        self._remove_hooks()

    def _hook_of(self, name: str) -> Callable[[Any, Any, Any], None]:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            if self._outputs is not None:
                self._outputs += [(name, one) for _, one in floating_tensors(output)]

        return keep

    def _judge(self, note: tuple[int, int, list[str]], value: Any, state: State, logger: Logger) -> None:
        (batch, count, names), values = note, value.tolist()
        if not any(math.isnan(loss) for loss in values[:count]):
            return
        text = f"Train loss contains a NaN in batch {batch}."
        first = next(
            (name for name, value in zip(names, values[count:], strict=True) if not math.isfinite(value)),
            None,
        )
        if first is not None and state.model is not None:
            module = state.model.get_submodule(first)
            text += f" The first module with a non-finite output is {first!r} ({type(module).__name__})."
            bad = [name for name, one in module.named_parameters() if not bool(one.isfinite().all())]
            if bad:
                text += f" Its parameters are not finite either: {', '.join(bad[:_MAX_SHOWN_PARAMETERS])}."
        elif names:
            text += " The outputs of all modules are finite, so the NaN comes from the loss function."
        raise RuntimeError(text)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs = None


def _losses_in(loss: Any) -> list[Any]:
    """Returns the tensors of a loss.

    Raises:
        TypeError: it has none.
    """
    match loss:
        case Mapping():
            losses = [*loss.values()]
        case list() | tuple():
            losses = [*loss]
        case _:
            losses = [loss]
    if not losses or not all(hasattr(one, "detach") for one in losses):
        raise TypeError(f"loss must be a tensor, or several, got {type(loss).__name__}.")
    return losses
