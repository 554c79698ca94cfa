"""Learning-rate schedules in training time: "1dur", "10ep" or "500ba" rather than a number of steps.

A schedule is a function of the state that returns a factor for the learning rate; `Trainer` takes it, and any
function like it, in place of one of torch's schedulers. Names, arguments and formulas are the same as in
Composer's schedulers: https://docs.mosaicml.com/projects/composer/en/stable/trainer/schedulers.html
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from events.state import State, as_tuple
from events.timestamp import Time, TimeUnit

from .set_up import length_of

__all__ = [
    "BoundSchedule",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "PlateauScheduler",
    "bind_schedules",
    "check_monitors",
]

Schedule = Callable[[State], float]


def _as_time(value: Time | str) -> Time:
    return Time.from_input(value)


_time: Any = attrs.field(default=Time(1.0, TimeUnit.DURATION), converter=_as_time)


def _share(time: Time, state: State) -> float:
    """Returns how much of a span has passed, from 0; more than 1 after it."""
    length = _absolute(time, state)
    return state.timestamp.get(length.unit).value / length.value if length.value else 1.0


def _absolute(time: Time, state: State) -> Time:
    """Returns a span in a unit that the timestamp counts; epochs become batches if their length is known.

    Raises:
        ValueError: the span is a share of a run of unknown length.
    """
    if time.unit is TimeUnit.DURATION:
        if state.max_duration is None:
            raise ValueError(
                f"schedule of {time} must have a run of known length. Pass max_duration to the Trainer, "
                'or give the schedule a time such as "10ep".'
            )
        return _scaled(state.max_duration, float(time), state)
    if time.unit is TimeUnit.EPOCH:
        return _scaled(time, 1.0, state)
    return time


def _scaled(time: Time, share: float, state: State) -> Time:
    batches = length_of(state.train_dataloader)
    if time.unit is TimeUnit.EPOCH and batches:
        return Time(round(time.value * batches * share), TimeUnit.BATCH)
    return time * share


def _between(first: float, last: float, share: float) -> float:
    return first + (last - first) * min(share, 1.0)


@attrs.frozen
class ConstantScheduler:
    """A learning-rate factor that is `alpha` until `t_max`, then 1.

    ```python
    Trainer(..., schedulers=ConstantScheduler(alpha=0.1, t_max="2ep"))
    ```
    """

    alpha: float = 1.0
    t_max: Time = _time

    def __call__(self, state: State) -> float:
        """Returns the factor."""
        return self.alpha if _share(self.t_max, state) < 1 else 1.0


@attrs.frozen
class LinearScheduler:
    """A learning-rate factor that goes linearly from `alpha_i` to `alpha_f` until `t_max`.

    ```python
    Trainer(..., schedulers=LinearScheduler(alpha_f=0.1, t_max="0.9dur"))
    ```
    """

    alpha_i: float = 1.0
    alpha_f: float = 0.0
    t_max: Time = _time

    def __call__(self, state: State) -> float:
        """Returns the factor."""
        return _between(self.alpha_i, self.alpha_f, _share(self.t_max, state))


@attrs.frozen
class CosineAnnealingScheduler:
    """A learning-rate factor that goes from 1 to `alpha_f` along half a period of a cosine until `t_max`.

    ```python
    Trainer(..., schedulers=CosineAnnealingScheduler(alpha_f=0.1))
    ```
    """

    t_max: Time = _time
    alpha_f: float = 0.0

    def __call__(self, state: State) -> float:
        """Returns the factor."""
        return _cosine(_share(self.t_max, state), self.alpha_f)


def _cosine(share: float, last: float) -> float:
    return last + (1 - last) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


def _warm(t_warmup: Time, t_max: Time, state: State) -> tuple[float, float]:
    """Returns the factor of the warm-up, at most 1, and the share of the time after it."""
    warmup, length = _absolute(t_warmup, state), _absolute(t_max, state)
    if warmup.unit is not length.unit:
        raise ValueError(
            f"t_warmup and t_max must be in the same unit, got {t_warmup} and {t_max}. "
            'Give both in batches, or both as a share of the run ("0.1dur").'
        )
    now = state.timestamp.get(warmup.unit).value
    if now < warmup.value:
        return now / warmup.value, 0.0
    rest = length.value - warmup.value
    return 1.0, (now - warmup.value) / rest if rest > 0 else 1.0


@attrs.frozen
class ConstantWithWarmupScheduler:
    """A learning-rate factor: rises from 0 to `alpha` until `t_warmup`, then stays, and is 1 after `t_max`.

    ```python
    Trainer(..., schedulers=ConstantWithWarmupScheduler("100ba"))
    ```
    """

    t_warmup: Time = attrs.field(converter=_as_time)
    alpha: float = 1.0
    t_max: Time = _time

    def __call__(self, state: State) -> float:
        """Returns the factor."""
        warm, share = _warm(self.t_warmup, self.t_max, state)
        return warm * self.alpha if share < 1 else 1.0


@attrs.frozen
class LinearWithWarmupScheduler:
    """A learning-rate factor: linear from 0 to `alpha_i` until `t_warmup`, then to `alpha_f` until `t_max`.

    ```python
    Trainer(..., schedulers=LinearWithWarmupScheduler("100ba"))
    ```
    """

    t_warmup: Time = attrs.field(converter=_as_time)
    alpha_i: float = 1.0
    alpha_f: float = 0.0
    t_max: Time = _time

    def __call__(self, state: State) -> float:
        """Returns the factor."""
        warm, share = _warm(self.t_warmup, self.t_max, state)
        return warm * _between(self.alpha_i, self.alpha_f, share)


@attrs.frozen
class CosineAnnealingWithWarmupScheduler:
    """A learning-rate factor: linear from 0 to 1 until `t_warmup`, then a cosine to `alpha_f` until `t_max`.

    ```python
    Trainer(..., schedulers=CosineAnnealingWithWarmupScheduler("100ba", alpha_f=0.1))
    ```
    """

    t_warmup: Time = attrs.field(converter=_as_time)
    t_max: Time = _time
    alpha_f: float = 0.0

    def __call__(self, state: State) -> float:
        """Returns the factor."""
        warm, share = _warm(self.t_warmup, self.t_max, state)
        return warm if warm < 1 else _cosine(share, self.alpha_f)


_BY_NAME: Mapping[str, Callable[[], Schedule]] = {
    "constant": ConstantScheduler,
    "cosine": CosineAnnealingScheduler,
    "linear": LinearScheduler,
}


class BoundSchedule:
    """A schedule with the optimizer that it sets the learning rate of.

    It computes the rate from the state alone, so that a resumed run continues where it was, and a checkpoint
    holds nothing of it.
    """

    def __init__(self, schedule: Schedule, optimizer: torch.optim.Optimizer, state: State) -> None:
        self._schedule = schedule
        self._optimizer = optimizer
        self._state = state
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self) -> None:
        """Sets the learning rates for the current timestamp."""
        factor = self._schedule(self._state)
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each group."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the state decides."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores nothing."""


class PlateauScheduler:
    """Steps torch's `ReduceLROnPlateau` with a value of each evaluation within `fit`.

    ```python
    plateau = PlateauScheduler(
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3), monitor="loss/eval/total"
    )
    Trainer(..., eval_dataloader=eval_dataloader, schedulers=plateau).fit()
    ```

    Args:
        scheduler: torch's; checkpoints hold its state.
        monitor: the value of an evaluation, by the name it is logged with: "metrics/<label>/<name>" or
            "loss/<label>/total".

    Raises:
        TypeError: the scheduler is another.
    """

    def __init__(self, scheduler: torch.optim.lr_scheduler.ReduceLROnPlateau, monitor: str) -> None:
        if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                f"scheduler must be torch's ReduceLROnPlateau, got {type(scheduler).__name__}. "
                "Pass others to the Trainer as they are."
            )
        self._scheduler = scheduler
        self.monitor = monitor

    def step(self) -> None:
        """Does nothing: evaluations step it, not batches or epochs."""

    def evaluated(self, value: float) -> None:
        """Steps torch's scheduler with the value of an evaluation."""
        self._scheduler.step(value)

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each group."""
        return [group["lr"] for group in self._scheduler.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of torch's scheduler."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._scheduler.load_state_dict(state)


def check_monitors(state: State, *, has_loss: bool) -> None:
    """Raises ValueError where a scheduler monitors what no evaluation has."""
    known = [f"metrics/{label}/{name}" for label, metrics in state.eval_metrics.items() for name in metrics]
    losses = [f"loss/{one.label}" for one in state.evaluators if has_loss]
    # A vector, a collection or a loss may have parts, which only its values show.
    starts = tuple(f"{name}/" for name in (*known, *losses))
    known += [f"{loss}/total" for loss in losses]
    for one in state.schedulers:
        if isinstance(one, PlateauScheduler) and not (one.monitor in known or one.monitor.startswith(starts)):
            raise ValueError(
                f"monitor must be a value of an evaluation, got {one.monitor!r}. "
                f"There are: {', '.join(known) or 'none, without eval_dataloader'}."
            )


def bind_schedules(schedulers: Any, state: State) -> tuple[Any, ...]:
    """Returns torch's schedulers as they are, and schedules bound to the optimizer of the state.

    Raises:
        ValueError: a name is unknown, there are several optimizers, or torch's `ReduceLROnPlateau` is bare.
        TypeError: one is neither a scheduler, nor a name or function.
    """
    bound: list[Any] = []
    for one in as_tuple(schedulers):
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(  # noqa: TRY004  # its type is right, what it monitors is missing
                "ReduceLROnPlateau must be given with what it monitors. "
                'Write PlateauScheduler(scheduler, monitor="loss/eval/total").'
            )
        if callable(getattr(one, "step", None)):
            bound.append(one)
            continue
        schedule = one
        if isinstance(one, str):
            if one not in _BY_NAME:
                raise ValueError(
                    f"schedulers must be torch's, or one of {', '.join(map(repr, _BY_NAME))}, got {one!r}."
                )
            schedule = _BY_NAME[one]()
        if isinstance(schedule, type) or not callable(schedule):
            hint = f" Write {schedule.__name__}(...)." if isinstance(schedule, type) else ""
            raise TypeError(
                "schedulers must be torch.optim.lr_scheduler's, names, or functions of the state that return "
                f"a factor, got {schedule!r}.{hint}"
            )
        if len(state.optimizers) != 1:
            raise ValueError(
                f"a schedule of training time must have one optimizer, got {len(state.optimizers)}. "
                "Use torch's schedulers with several."
            )
        bound.append(BoundSchedule(schedule, state.optimizers[0], state))
    return tuple(bound)
