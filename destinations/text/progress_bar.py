"""Shows how far training, evaluation and prediction are, with tqdm.

Everything runs in the training thread. A step costs about a microsecond: what it does is look at the clock, ten times a
second it draws.
"""

import fnmatch
import functools
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import attrs

from destinations.base import LoggerDestination
from events import Logger, State, Timestamp, TimeUnit, WriteRate

from .formatting import one_line, short
from .streams import Redirection, StandIn, encodable, is_terminal, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Bar", "BarPlan", "PrintGuard", "ProgressBar", "is_notebook", "open_bar"]

_ROWS_THAT_TQDM_LEAVES_EMPTY = 2
_USUAL_COLUMNS = 80
_USUAL_ROWS = 24


@attrs.frozen
class BarPlan:
    """What stays as it is while a bar moves.

    Attributes:
        title: what stands before it.
        unit: what is counted, in the singular.
        is_scaled: whether counts are shortened: "12.3k".
        initial: the count at which this session begins.
        total: where it ends, as far as that is known at the beginning.
    """

    title: str
    unit: str
    is_scaled: bool = False
    initial: float = 0
    total: float | None = None


class Bar(Protocol):
    """Something that shows how far something is."""

    def draw(self, count: float, total: float | None, values: str) -> None:
        """Shows a count, of a total if that is known, and some values."""

    def close(self) -> None:
        """Ends it; what it showed last stays."""


class _TqdmBar:
    """A bar of tqdm's, drawn when this project says so."""

    def __init__(self, plan: BarPlan, make: Callable[..., Any], **options: Any) -> None:
        self._bar = make(
            desc=one_line(plan.title),
            unit=f" {plan.unit}",
            unit_scale=plan.is_scaled,
            initial=plan.initial,
            total=plan.total,
            mininterval=0,
            leave=True,
            **options,
        )

    def draw(self, count: float, total: float | None, values: str) -> None:
        bar = self._bar
        if total != bar.total:
            bar.total = total
            if hasattr(bar, "container"):
                # A widget has its end in the middle one of its three parts; `reset` would set it, and begin at zero.
                bar.container.children[1].max = total
        bar.set_postfix_str(values, refresh=False)
        # The speed is computed in `update`, which draws too where there is something new.
        if not bar.update(count - bar.n):
            bar.refresh()

    def close(self) -> None:
        if hasattr(self._bar, "container"):
            self._bar.close()
            return
        # A bar below another ends in the other's place, and would leave the end of a longer one standing.
        with type(self._bar).external_write_mode(file=self._bar.fp):
            self._bar.close()


class _Lines:
    """A line at each draw."""

    def __init__(self, plan: BarPlan, stream: Any, clock: Callable[[], float]) -> None:
        self._plan = plan
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._shown: tuple[Any, ...] = ()

    def draw(self, count: float, total: float | None, values: str) -> None:
        if self._shown == (count, total, values):
            return
        self._shown = (count, total, values)
        line = _terminal_tqdm().format_meter(
            count,
            total,
            self._clock() - self._start,
            ncols=0,
            prefix=one_line(self._plan.title),
            unit=f" {self._plan.unit}",
            unit_scale=self._plan.is_scaled,
            initial=self._plan.initial,
            postfix=values,
        )
        write_text(self._stream, f"{line}\n")

    def close(self) -> None:
        """A line has its end already."""


def open_bar(plan: BarPlan, stream: Any, *, in_notebook: bool, clock: Callable[[], float]) -> Bar:
    """Returns a bar that suits the place where it is shown.

    Args:
        plan: what it is about.
        stream: where a terminal or a file is to get it.
        in_notebook: whether to show it as a widget instead.
        clock: the seconds that lines show.
    """
    if in_notebook:
        return _TqdmBar(plan, _notebook_tqdm())
    if is_terminal(stream):
        return _TqdmBar(plan, _terminal_tqdm(), file=stream, **_room(stream))
    return _Lines(plan, stream, clock)


def _room(stream: Any) -> dict[str, Any]:
    """Returns how large a bar may be: what the terminal says, again and again.

    A terminal in a container often says that it has no rows; tqdm would then draw nothing.
    """
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return {"dynamic_ncols": True}
    if rows > _ROWS_THAT_TQDM_LEAVES_EMPTY:
        return {"dynamic_ncols": True}
    return {"ncols": columns or _USUAL_COLUMNS, "nrows": _USUAL_ROWS}


def is_notebook() -> bool:
    """Says whether this is a notebook that can show widgets; asks nothing of who has not imported IPython."""
    ipython = sys.modules.get("IPython")
    if ipython is None or "IPKernelApp" not in getattr(ipython.get_ipython(), "config", {}):
        return False
    return importlib.util.find_spec("ipywidgets") is not None


@functools.cache
def _terminal_tqdm() -> Any:
    from tqdm.std import tqdm

    return _without_monitor(tqdm)


@functools.cache
def _notebook_tqdm() -> Any:
    from tqdm.notebook import tqdm

    return _without_monitor(tqdm)


def _without_monitor(base: Any) -> Any:
    # tqdm would start a thread that redraws bars that stand still; here nobody redraws but the loop.
    return type(base.__name__, (base,), {"monitor_interval": 0})


class PrintGuard:
    """Keeps what is printed to the terminal in whole lines above the bars, from `start` to `stop`.

    Standard streams that are terminals get a stand-in, and so do the handlers of the root logger that write to them. A
    line that has no end yet is shown when it has one.
    """

    def __init__(self) -> None:
        self._redirection: Redirection | None = None
        self._stand_ins: list[_AboveBars] = []
        self._handlers: list[tuple[Any, _AboveBars]] = []

    def start(self) -> None:
        """Begins; once more does nothing."""
        if self._redirection is not None:
            return
        names = tuple(name for name in ("stdout", "stderr") if is_terminal(getattr(sys, name)))
        self._redirection = Redirection(self._make, names)
        for handler in logging.getLogger().handlers:
            for stand_in in self._stand_ins:
                if getattr(handler, "stream", None) is stand_in.beneath:
                    handler.setStream(stand_in)  # type: ignore[attr-defined]  # a handler with a stream has it
                    self._handlers.append((handler, stand_in))

    def stop(self) -> None:
        """Ends, when the bars are closed."""
        if self._redirection is None:
            return
        for handler, stand_in in self._handlers:
            if handler.stream is stand_in:
                handler.setStream(stand_in.beneath)
        self._redirection.undo()
        for stand_in in self._stand_ins:
            stand_in.finish()
        self._redirection = None
        self._stand_ins, self._handlers = [], []

    def _make(self, _name: str, stream: Any) -> StandIn:
        stand_in = _AboveBars(stream)
        self._stand_ins.append(stand_in)
        return stand_in


class _AboveBars(StandIn):
    """Takes bars off the screen, writes whole lines, and draws the bars again."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._partial = ""

    @property
    def beneath(self) -> Any:
        """The stream."""
        return self._wrapped

    def write(self, text: str) -> int:
        # Bars of the user's own, and `tqdm.write`, know where they are on the screen.
        is_tqdm = sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm.")  # noqa: SLF001
        if is_tqdm or not self.is_listening:
            return super().write(text)
        tqdm = _terminal_tqdm()
        # One lock, tqdm's: the bars and the half line belong to whoever holds it. It is reentrant.
        with tqdm.get_lock():
            lines, end, self._partial = (self._partial + text).rpartition("\n")
            if end:
                with tqdm.external_write_mode(file=self):
                    self._wrapped.write(lines + end)
                    self._wrapped.flush()
        return len(text)

    def finish(self) -> None:
        """Writes a last line that has no end."""
        partial, self._partial = self._partial, ""
        if partial:
            self._wrapped.write(partial)


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
        self._guard = PrintGuard()

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
        plan = BarPlan(
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
        plan = BarPlan(title, "batch", total=total)
        self._other = self._begin(plan, _batch, Timestamp(), self._values)

    def _begin(
        self,
        plan: "BarPlan",
        count: Callable[[Timestamp], float],
        timestamp: Timestamp,
        values: dict[str, float],
    ) -> "_Progress":
        stream = sys.stderr if self._stream is None else self._stream
        in_notebook = self._stream is None and is_notebook()
        is_drawn = in_notebook or is_terminal(stream)
        bar = open_bar(plan, stream, in_notebook=in_notebook, clock=self._clock)
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
        bar: "Bar",
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
