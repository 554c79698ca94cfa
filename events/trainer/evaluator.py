"""`Evaluator`: a dataloader to evaluate on, with its label, metrics and interval."""

import copy
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from torch.utils.data import DataLoader

from events.interval import Interval
from events.state import State
from events.timestamp import Time

from .set_up import as_limit

__all__ = ["Evaluator", "apart_from", "as_evaluators"]

_log = logging.getLogger("events")


@attrs.define(eq=False, kw_only=True)
class Evaluator:
    """A named dataloader for evaluation, with its interval and metrics.

    ```python
    near = Evaluator(label="near", dataloader=eval_dataloader, subset_num_batches=10)
    far = Evaluator(label="far", dataloader=eval_dataloader, eval_interval="5ep")
    Trainer(..., eval_dataloader=[near, far])
    ```

    Args:
        label: names it in metrics (`metrics/<label>/…`) and in `state.dataloader_label`.
        dataloader: yields evaluation batches.
        metric_names: regular expressions; only metrics whose name matches one are used. Default: all metrics.
        subset_num_batches: how many batches to evaluate on, at least 1; -1 for all. Default: the
            trainer's.
        eval_interval: how often, such as "1ep" or "500ba"; a bare integer counts epochs. Default: the
            trainer's. The end of training is always evaluated.
    """

    label: str
    dataloader: Iterable[Any]
    metric_names: list[str] | None = None
    subset_num_batches: int | None = None
    eval_interval: str | int | Time | None = None
    _interval: Interval | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.metric_names, str):
            raise TypeError(f"metric_names must be a list of names, got {self.metric_names!r}.")
        as_limit(self.subset_num_batches, "subset_num_batches")
        if self.eval_interval is not None:
            self._interval = Interval(self.eval_interval, "ep")

    def start(self, state: State) -> None:
        """Starts its own interval, if it has one."""
        if self._interval is not None:
            self._interval.start(state)

    def is_due(self, state: State, *, by_default: bool) -> bool:
        """Returns whether its interval has passed; without one, `by_default`."""
        return by_default if self._interval is None else self._interval.passed(state)

    def chosen(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns its metrics among all.

        Raises:
            ValueError: one of `metric_names` matches none.
        """
        if self.metric_names is None:
            return dict(metrics)
        for pattern in self.metric_names:
            if not any(re.search(pattern, name) for name in metrics):
                raise ValueError(
                    f"metric_names of evaluator {self.label!r} must match metrics, got {pattern!r}. "
                    f"There are: {', '.join(metrics) or 'none'}."
                )
        return {
            name: metric
            for name, metric in metrics.items()
            if any(re.search(pattern, name) for pattern in self.metric_names)
        }


def as_evaluators(eval_dataloader: Any) -> tuple[Evaluator, ...]:
    """Returns evaluators for a dataloader, several by label, or a list of dataloaders and evaluators.

    A dataloader without a label is "eval", the next ones in a list "eval_1", "eval_2".

    Raises:
        ValueError: two have the same label.
    """
    if eval_dataloader is None:
        return ()
    if isinstance(eval_dataloader, Mapping):
        return tuple(_as_evaluator(one, label) for label, one in eval_dataloader.items())
    several = isinstance(eval_dataloader, list | tuple) and eval_dataloader
    # A list of anything else is a dataloader itself, one of batches.
    if several and all(isinstance(one, Evaluator | DataLoader) for one in eval_dataloader):
        found = tuple(
            _as_evaluator(one, f"eval_{index}" if index else "eval")
            for index, one in enumerate(eval_dataloader)
        )
        labels = [one.label for one in found]
        if len(set(labels)) < len(labels):
            raise ValueError(f"labels of evaluators must differ, got {labels}.")
        return found
    return (_as_evaluator(eval_dataloader, "eval"),)


def apart_from(train_dataloader: Any, dataloader: Any) -> Any:
    """Returns a dataloader that can be read within an epoch of training; a copy if it would disturb that.

    Raises:
        ValueError: it is the training dataloader, has a position, and cannot be copied.
    """
    has_position = hasattr(dataloader, "__next__") or hasattr(dataloader, "load_state_dict")
    if dataloader is not train_dataloader or not (
        has_position or getattr(dataloader, "persistent_workers", False)
    ):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise ValueError(  # noqa: TRY004  # its type is right
            f"eval_dataloader must be another {type(dataloader).__name__} than train_dataloader: reading it "
            "would move the position of training. Make a second one."
        )
    _log.warning("The training dataloader is evaluated too, through a copy with separate worker processes.")
    apart = copy.copy(dataloader)
    # All readers share one iterator of persistent workers.
    vars(apart)["_iterator"] = None
    return apart


def _as_evaluator(given: Any, label: str) -> Evaluator:
    return given if isinstance(given, Evaluator) else Evaluator(label=label, dataloader=given)
