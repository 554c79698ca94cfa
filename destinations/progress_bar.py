"""Shows how far training, evaluation and prediction are, with tqdm.

Everything runs in the training thread. A step costs about a microsecond: what it does is look at the clock, ten times a
second it draws.
"""

import fnmatch
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from events import Logger, State, Timestamp, TimeUnit, WriteRate

from . import _bars
from ._formatting import one_line, short
from ._streams import encodable, is_terminal
from .base import LoggerDestination

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ProgressBar"]


_DEFAULT_METRICS = ("loss*", "*_loss", "*/loss*", "metrics/*", "*accuracy*")
_SCALED_UNITS = frozenset({TimeUnit.SAMPLE, TimeUnit.TOKEN})


class ProgressBar(LoggerDestination):
    """Shows a bar for each epoch, or for the whole run, and one for each evaluation and prediction.

    ```
    Epoch 2/5:  40%|████      | 60/150 [00:03<00:04, 20.1 batch/s, loss/train=0.6931]
    ```

    **Which bar.** Where `max_duration` is in epochs there is a bar for each; with `whole_run=True`, or another unit, there
    is one over the whole run in that unit. A total that the dataloader does not know is taken from `max_duration` where
    that says it, otherwise it is known from the second epoch on.

    **Where.** A widget in a notebook; a bar on a terminal; whole lines every `line_seconds`, and one at the end, where the
    stream is neither. On each node local rank 0 has bars.

    **Printing.** While a bar is on the terminal, `sys.stdout` and `sys.stderr` have stand-ins that take the bar away,
    write, and draw it again, line by line: what is printed without a newline at its end waits for one. Handlers of the
    root logger that write to the terminal are taken along.

    Args:
        metrics: which metrics are shown, as patterns (`fnmatch`); losses, accuracies and what begins with "metrics/"
            where none are given.
        stream: where to draw; what `sys.stderr` is when a bar begins where none is given.
        whole_run: one bar over the whole run, though `max_duration` is in epochs.
        refresh_seconds: how long a bar stands before it is drawn again.
        line_seconds: the same for lines.
        write_rate: how often metrics are taken; None for every time.
        clock: a clock in seconds that never goes back.
    """

    def __init__(
        self,
        metrics: Sequence[str] = _DEFAULT_METRICS,
        stream: TextIO | None = None,
        *,
        whole_run: bool = False,
        refresh_seconds: float = 0.1,
        line_seconds: float = 10.0,
        write_rate: WriteRate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(write_rate=write_rate)
        if isinstance(metrics, str):
            raise TypeError(f"metrics must be a list of patterns, got {metrics!r}. Write [{metrics!r}].")
        if refresh_seconds < 0 or line_seconds < 0:
            raise ValueError(
                f"refresh_seconds and line_seconds must not be negative, got {refresh_seconds} and {line_seconds}."
            )
        self._patterns = tuple(metrics)
        self._stream = stream
        self._whole_run = whole_run
        self._refresh_seconds = refresh_seconds
        self._line_seconds = line_seconds
        self._clock = clock
        self._lengths: dict[str, int] = {}
        self._reset()

    def _reset(self) -> None:
        self._is_silent = False
        self._train: _Progress | None = None
        self._other: _Progress | None = None
        self._train_values: dict[str, float] = {}
        # Where metrics go: to training, or to the evaluation or prediction that is going on.
        self._values = self._train_values
        self._guard = _bars.PrintGuard()

    def init(self, state: State, logger: Logger) -> None:
        self._is_silent = state.local_rank != 0

    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
        if not self._is_silent:
            self._values.update(metrics)

    def fit_start(self, state: State, logger: Logger) -> None:
        if not self._by_epoch(state):
            self._begin_train(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._begin_train(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        # A run that goes on inside an epoch, or a loop of one's own, has had no start of either.
        if self._train is None:
            self._begin_train(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._train is not None:
            self._train.move(state.timestamp)

    def epoch_end(self, state: State, logger: Logger) -> None:
        progress = self._train
        if progress is None:
            return
        self._lengths.setdefault("train", int(progress.timestamp.batch_in_epoch))
        if self._by_epoch(state):
            self._end_train()
        else:
            progress.total = self._train_total(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._end_train()

    def eval_start(self, state: State, logger: Logger) -> None:
        label = state.dataloader_label or "eval"
        self._begin_other("Eval" if label == "eval" else f"Eval {label}", f"eval/{label}", state)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self._other is not None:
            self._other.move(state.eval_timestamp)

    def eval_end(self, state: State, logger: Logger) -> None:
        self._end_other(f"eval/{state.dataloader_label or 'eval'}")

    def predict_start(self, state: State, logger: Logger) -> None:
        self._begin_other("Predict", "predict", state)

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        if self._other is not None:
            self._other.move(state.predict_timestamp)

    def predict_end(self, state: State, logger: Logger) -> None:
        self._end_other("predict")

    def close(self, state: State, logger: Logger) -> None:
        try:
            self._end_other(None)
            self._end_train()
        finally:
            self._guard.stop()
            self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns how many batches each dataloader had; where a run stands is in its timestamp."""
        return {"lengths": dict(self._lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lengths = {str(name): int(length) for name, length in state.get("lengths", {}).items()}

    def _by_epoch(self, state: State) -> bool:
        length = state.max_duration
        return length is not None and length.unit is TimeUnit.EPOCH and not self._whole_run

    def _begin_train(self, state: State) -> None:
        if self._train is not None or self._is_silent:
            return
        unit = _unit(state)
        if self._by_epoch(state):
            title = f"Epoch {int(state.timestamp.epoch) + 1}/{state.max_duration.value}"  # type: ignore[union-attr]
            count: Callable[[Timestamp], float] = _batch_in_epoch
        else:
            title = "Train"
            count = functools.partial(_total, unit=unit)
        plan = _bars.BarPlan(
            title, unit.name.lower(), unit in _SCALED_UNITS, count(state.timestamp), self._train_total(state)
        )
        self._train = self._begin(plan, count, state.timestamp, self._train_values)

    def _train_total(self, state: State) -> float | None:
        batches = state.dataloader_len if state.dataloader_len is not None else self._lengths.get("train")
        length = state.max_duration
        if length is None or length.unit is TimeUnit.DURATION:
            return None
        if length.unit is not TimeUnit.EPOCH:
            return length.value
        if batches is None or not self._whole_run:
            return batches
        return length.value * batches

    def _begin_other(self, title: str, key: str, state: State) -> None:
        if self._is_silent:
            return
        self._end_other(None)
        self._values = {}
        total = state.dataloader_len if state.dataloader_len is not None else self._lengths.get(key)
        plan = _bars.BarPlan(title, "batch", total=total)
        self._other = self._begin(plan, _batch, Timestamp(), self._values)

    def _begin(
        self,
        plan: "_bars.BarPlan",
        count: Callable[[Timestamp], float],
        timestamp: Timestamp,
        values: dict[str, float],
    ) -> "_Progress":
        stream = sys.stderr if self._stream is None else self._stream
        in_notebook = self._stream is None and _bars.is_notebook()
        is_drawn = in_notebook or is_terminal(stream)
        bar = _bars.open_bar(plan, stream, in_notebook=in_notebook, clock=self._clock)
        if is_drawn and not in_notebook:
            self._guard.start()
        return _Progress(
            bar,
            plan.total,
            count,
            timestamp,
            lambda: encodable(stream, self._shown(values)),
            self._refresh_seconds if is_drawn else self._line_seconds,
            self._clock,
        )

    def _end_train(self) -> None:
        progress, self._train = self._train, None
        if progress is not None:
            progress.close()
        self._end_guard()

    def _end_other(self, key: str | None) -> None:
        progress, self._other = self._other, None
        self._values = self._train_values
        if progress is not None:
            if key is not None:
                self._lengths[key] = int(progress.timestamp.batch)
            progress.close()
        self._end_guard()

    def _end_guard(self) -> None:
        if self._train is None and self._other is None:
            self._guard.stop()

    def _shown(self, values: dict[str, float]) -> str:
        """Returns the chosen metrics as `name=value, name=value`."""
        return ", ".join(
            f"{one_line(name)}={short(value)}"
            for name, value in values.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
        )


class _Progress:
    """A bar, how far it is, and when it is to be drawn again."""

    def __init__(
        self,
        bar: "_bars.Bar",
        total: float | None,
        count: Callable[[Timestamp], float],
        timestamp: Timestamp,
        values: Callable[[], str],
        refresh_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.total = total
        self.timestamp = timestamp
        self._bar = bar
        self._count = count
        self._values = values
        self._refresh_seconds = refresh_seconds
        self._clock = clock
        self._due = clock() + refresh_seconds

    def move(self, timestamp: Timestamp) -> None:
        """Takes note of where it is; draws where that is due."""
        self.timestamp = timestamp
        now = self._clock()
        if now >= self._due:
            self._due = now + self._refresh_seconds
            self.draw()

    def draw(self) -> None:
        """Shows where it is."""
        count = self._count(self.timestamp)
        # The last batch may go beyond the end of a run that is measured in samples.
        total = None if self.total is None else max(self.total, count)
        self._bar.draw(count, total, self._values())

    def close(self) -> None:
        """Shows where it came to, and ends."""
        try:
            self.draw()
        finally:
            self._bar.close()


def _total(timestamp: Timestamp, unit: TimeUnit) -> float:
    """Returns the count of the whole run; of seconds, tenths are enough."""
    value = round(timestamp.get(unit).value, 1)
    return int(value) if value == int(value) else value


def _batch(timestamp: Timestamp) -> int:
    return int(timestamp.batch)


def _batch_in_epoch(timestamp: Timestamp) -> int:
    return int(timestamp.batch_in_epoch)


def _unit(state: State) -> TimeUnit:
    """Returns what a bar over the whole run counts."""
    length = state.max_duration
    if length is None or length.unit in {TimeUnit.DURATION, TimeUnit.EPOCH}:
        return TimeUnit.BATCH
    return length.unit
