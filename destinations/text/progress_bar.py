"""`ProgressBar`: shows the progress of training, evaluation and prediction with tqdm.

Everything runs in the training thread. A step costs about a microsecond, to read the clock; bars are redrawn
ten times a second.
"""

import contextlib
import fnmatch
import functools
import importlib.util
import itertools
import logging
import operator
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import attrs

from destinations.base import LoggerDestination
from events import Logger, State, Timestamp, TimeUnit, WriteRate
from uploads import encodable

from .formatting import one_line, short, shortened, width_of
from .run_summary import RunSummary
from .streams import (
    Redirection,
    StreamWrapper,
    columns_of,
    default_stream,
    is_kernel,
    is_terminal,
    write_text,
)

__all__ = ["PrintGuard", "ProgressBar", "is_notebook"]

# tqdm draws nothing on a terminal with fewer rows.
_MIN_TQDM_ROWS = 2
_DEFAULT_COLUMNS = 80
_DEFAULT_ROWS = 24
# The cells of a bar beside its metrics: title, counts, times, and the bar itself; and the cells that metrics
# get in a narrow terminal.
_BAR_COLUMNS, _MIN_METRIC_COLUMNS = 64, 30
_SHORT_NAME = 16
_DEFAULT_METRICS = ("loss*", "*_loss", "*/loss*", "metrics/*", "*accuracy*")
_SCALED_UNITS = frozenset({TimeUnit.SAMPLE, TimeUnit.TOKEN})


def _size_options(stream: Any) -> dict[str, Any]:
    """Returns the size options of tqdm: dynamic, or fixed if the terminal does not report a usable size.

    A terminal in a container often reports zero rows, and tqdm would draw nothing.
    """
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return {"dynamic_ncols": True}
    if rows > _MIN_TQDM_ROWS:
        return {"dynamic_ncols": True}
    return {"ncols": columns or _DEFAULT_COLUMNS, "nrows": _DEFAULT_ROWS}


def is_notebook() -> bool:
    """Returns whether this is a notebook that can show widgets; does not import IPython."""
    return is_kernel() and importlib.util.find_spec("ipywidgets") is not None


@functools.cache
def _terminal_tqdm() -> Any:
    from tqdm.std import tqdm

    return _without_monitor(tqdm)


@functools.cache
def _notebook_tqdm() -> Any:
    from tqdm.notebook import tqdm

    return _without_monitor(tqdm)


def _without_monitor(base: Any) -> Any:
    # Disables the monitor thread of tqdm, which redraws stalled bars.
    return type(base.__name__, (base,), {"monitor_interval": 0})


@attrs.define(eq=False, slots=False, repr=False)
class _Bar:
    """A bar with its position: a widget, a bar on a terminal, or lines of text elsewhere.

    Attributes:
        title: the text in front of it.
        unit: its unit.
        total: the expected final count, if known.
        timestamp: the position.
    """

    title: str
    unit: TimeUnit
    total: float | None
    timestamp: Timestamp
    _count: Callable[[Timestamp], float]
    _values: Callable[[], str]
    _stream: Any
    _in_notebook: bool
    _refresh_seconds: float
    _clock: Callable[[], float]

    def __attrs_post_init__(self) -> None:
        self._start = self._clock()
        self._due = self._start + self._refresh_seconds
        self._looks: dict[str, Any] = {
            "unit": f" {self.unit.name.lower()}",
            "unit_scale": self.unit in _SCALED_UNITS,
            "initial": self._count(self.timestamp),
        }
        self._drawn: tuple[Any, ...] = ()
        self._drawn_tenth = self._tenth()
        self._tqdm: Any = None
        looks = {**self._looks, "desc": one_line(self.title), "total": self.total, "mininterval": 0}
        if self._in_notebook:
            self._tqdm = _notebook_tqdm()(**looks)
        elif is_terminal(self._stream):
            self._tqdm = _terminal_tqdm()(**looks, file=self._stream, **_size_options(self._stream))

    def move(self, timestamp: Timestamp) -> None:
        """Updates the position, and redraws the bar if that is due."""
        self.timestamp = timestamp
        now = self._clock()
        # Lines of text come for each tenth, if the total is known.
        is_same = self._tqdm is None and self.total and self._tenth() == self._drawn_tenth
        if now >= self._due and not is_same:
            self._due = now + self._refresh_seconds
            self._draw()

    def close(self) -> None:
        """Draws the final position and closes the bar; it stays visible."""
        try:
            self._draw()
        finally:
            if self._in_notebook:
                self._tqdm.close()
            elif self._tqdm is not None:
                # A nested bar is closed in the place of the outer one, whose longer text would remain visible
                # behind it.
                with type(self._tqdm).external_write_mode(file=self._stream):
                    self._tqdm.close()

    def _tenth(self) -> int:
        return int(10 * self._count(self.timestamp) / self.total) if self.total else 0

    def _draw(self) -> None:
        self._drawn_tenth, count, values = self._tenth(), self._count(self.timestamp), self._values()
        # The last batch may exceed the duration of a run measured in samples.
        total = None if self.total is None else max(self.total, count)
        if self._tqdm is None:
            self._write_line(count, total, values)
            return
        if total != self._tqdm.total:
            self._tqdm.total = total
            if self._in_notebook:
                # The total of a widget is in the second of its three children; `reset` would set it, but
                # restart at zero.
                self._tqdm.container.children[1].max = total
        self._tqdm.set_postfix_str(values, refresh=False)
        # `update` computes the speed, and redraws if the count has changed.
        if not self._tqdm.update(count - self._tqdm.n):
            self._tqdm.refresh()

    def _write_line(self, count: float, total: float | None, values: str) -> None:
        """Writes a line unless nothing has changed."""
        if self._drawn != (count, total, values):
            self._drawn = (count, total, values)
            seconds, prefix = self._clock() - self._start, one_line(self.title)
            meter = _terminal_tqdm().format_meter
            line = meter(count, total, seconds, ncols=0, prefix=prefix, postfix=values, **self._looks)
            write_text(self._stream, f"{line}\n")


class PrintGuard:
    """Prints output to the terminal as whole lines above the bars, from `start` to `stop`.

    Wraps standard streams that are terminals, also in the handlers of all loggers. A line without a newline
    is held back until it is complete.
    """

    def __init__(self) -> None:
        self._installed = contextlib.ExitStack()
        self._is_installed = False

    def start(self) -> None:
        """Installs the wrappers; idempotent."""
        if self._is_installed:
            return
        self._is_installed = True
        names = [name for name in ("stdout", "stderr") if is_terminal(getattr(sys, name))]
        redirection = Redirection(lambda _, stream: _AboveBars(stream), names)
        self._installed.callback(redirection.undo)
        for handler in _handlers():
            for wrapper in redirection.wrappers.values():
                if getattr(handler, "stream", None) is wrapper.wrapped:
                    handler.setStream(wrapper)  # type: ignore[attr-defined]  # every StreamHandler has it
                    self._installed.callback(_restore, handler, wrapper)

    def stop(self) -> None:
        """Removes the wrappers, after the bars are closed; idempotent."""
        self._installed.close()
        self._is_installed = False


def _restore(handler: Any, wrapper: StreamWrapper) -> None:
    if handler.stream is wrapper:
        handler.setStream(wrapper.wrapped)


def _handlers() -> list[logging.Handler]:
    """Returns the handlers of all loggers, each once."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    found = itertools.chain.from_iterable(getattr(logger, "handlers", ()) for logger in loggers)
    return list(dict.fromkeys(found))


class _AboveBars(StreamWrapper):
    """Clears the bars, writes whole lines, and redraws the bars."""

    keeps_bars = True

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._partial = ""

    def write(self, text: str) -> int:
        # Calls from tqdm itself, for bars of the user or `tqdm.write`, position the cursor themselves.
        is_tqdm = sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm.")  # noqa: SLF001
        if is_tqdm or not self.is_active:
            return super().write(text)
        tqdm = _terminal_tqdm()
        # tqdm's reentrant lock guards the bars and the partial line.
        with tqdm.get_lock():
            lines, end, self._partial = (self._partial + text).rpartition("\n")
            if end:
                with tqdm.external_write_mode(file=self):
                    self._wrapped.write(lines + end)
                    self._wrapped.flush()
        return len(text)

    def finish(self) -> None:
        partial, self._partial = self._partial, ""
        if partial:
            self._wrapped.write(partial)


class ProgressBar(LoggerDestination):
    """Shows a bar for each epoch, or for the whole run, and one for each evaluation and prediction.

    ```python
    Trainer(..., loggers=[ProgressBar(metrics=["loss/train/total"])])
    ```

    shows

    ```
    Epoch 2/5:  40%|████      | 60/150 [00:03<00:04, 20.1 batch/s, loss/train=0.6931]
    ```

    **Which bar.** If `max_duration` is in epochs, one bar per epoch; with `whole_run=True` or another unit,
    one bar for the whole run in that unit. If the dataloader has no length, the total is taken from
    `max_duration` if possible, else from the length of the first epoch.

    **Where.** A widget in a notebook; a bar on a terminal; elsewhere a line for each tenth, not more often
    than every `line_seconds`, and at the end. Only local rank 0 of each node shows bars.

    **Printing.** While a bar is on the terminal, `sys.stdout` and `sys.stderr` are wrapped, so that printed
    lines appear above the bar; text without a newline is held back until its line is complete. The same
    applies to handlers of loggers that write to the terminal. Other code's tqdm bars have their own lines.

    **At the end.** The summary of the run, unless a `Console` prints it; see
    `destinations.text.run_summary`.

    Args:
        metrics: patterns (`fnmatch`) of the metrics shown; default: losses, accuracies and "metrics/*". On a
            terminal, as many as leave room for the bar. Or the stream: `ProgressBar(sys.stdout)`.
        stream: output stream; default: the `sys.stderr` when a bar starts, `sys.stdout` in a notebook.
        whole_run: show one bar for the whole run even if `max_duration` is in epochs.
        refresh_seconds: time between redraws of a bar.
        line_seconds: min time between lines of text; if the total is unknown, the time between them.
        summary: print a summary at the end.
        write_rate: rate limit of metrics; None for no limit.
        clock: monotonic clock in seconds.
    """

    summary_priority: int | None = 1

    def __init__(
        self,
        metrics: Sequence[str] | TextIO = _DEFAULT_METRICS,
        stream: TextIO | None = None,
        *,
        whole_run: bool = False,
        refresh_seconds: float = 0.1,
        line_seconds: float = 10.0,
        summary: bool = True,
        write_rate: WriteRate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(write_rate=write_rate)
        if hasattr(metrics, "write"):
            stream, metrics = metrics, _DEFAULT_METRICS  # type: ignore[assignment]  # a stream, see the docs
        if isinstance(metrics, str):
            raise TypeError(f"metrics must be a list of patterns, got {metrics!r}. Write [{metrics!r}].")
        if refresh_seconds < 0 or line_seconds < 0:
            raise ValueError(
                "refresh_seconds and line_seconds must not be negative, "
                f"got {refresh_seconds} and {line_seconds}."
            )
        self._patterns = tuple(metrics)
        if not summary:
            self.summary_priority = None
        self._stream = stream
        self._whole_run = whole_run
        self._refresh_seconds = refresh_seconds
        self._line_seconds = line_seconds
        self._clock = clock
        self._lengths: dict[str, int] = {}
        self._reset()

    def _reset(self) -> None:
        self._is_silent = False
        self._train: _Bar | None = None
        self._other: _Bar | None = None
        self._train_values: dict[str, float] = {}
        # Metrics of the current phase: training, or a running evaluation or prediction.
        self._values = self._train_values
        self._guard = PrintGuard()
        self._summary = RunSummary()

    def init(self, state: State, logger: Logger) -> None:
        self._is_silent = state.local_rank != 0
        self._summary = RunSummary.of(self, state)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self._is_silent:
            self._values.update(metrics)
            self._summary.update(metrics, step, is_evaluation=self._values is not self._train_values)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._summary.note_places(logger)
        if not self._by_epoch(state):
            self._begin_train(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._begin_train(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        # A run resumed inside an epoch, or a custom loop, has fired neither fit_start nor epoch_start.
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
        summary = self._summary
        try:
            summary.close(state, logger)
            self._end_other(None)
            self._end_train()
        finally:
            self._guard.stop()
            self._reset()
            self._summary = summary

    def post_close(self) -> None:
        summary, self._summary = self._summary, RunSummary()
        if text := summary.text():
            write_text(self._stream, text)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of batches of each dataloader; the position of the run is in its timestamp."""
        return {"lengths": dict(self._lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lengths = {str(name): int(length) for name, length in state.get("lengths", {}).items()}

    def _by_epoch(self, state: State) -> bool:
        length = state.max_duration
        return length is not None and length.unit is TimeUnit.EPOCH and not self._whole_run

    def _begin_train(self, state: State) -> None:
        if self._train is not None or self._is_silent:
            return
        unit = TimeUnit.BATCH if self._by_epoch(state) else _unit(state)
        title = "Train"
        count: Callable[[Timestamp], float] = functools.partial(_total, unit=unit)
        if self._by_epoch(state):
            epochs = state.max_duration.value  # type: ignore[union-attr]  # not None by _by_epoch
            title = f"Epoch {int(state.timestamp.epoch) + 1}/{epochs}"
            count = operator.attrgetter("batch_in_epoch.value")
        total = self._train_total(state)
        self._train = self._begin(title, unit, total, count, state.timestamp)

    def _train_total(self, state: State) -> float | None:
        batches = self._batches("train", state)
        length = state.max_duration
        if length is None or length.unit is TimeUnit.DURATION:
            return None
        if length.unit is not TimeUnit.EPOCH:
            return length.value
        if batches is None or not self._whole_run:
            return batches
        return length.value * batches

    def _batches(self, key: str, state: State) -> int | None:
        """Returns the length of the current dataloader, if known."""
        return self._lengths.get(key) if state.dataloader_len is None else int(state.dataloader_len)

    def _begin_other(self, title: str, key: str, state: State) -> None:
        if self._is_silent:
            return
        self._end_other(None)
        self._values = {}
        total, count = self._batches(key, state), operator.attrgetter("batch.value")
        self._other = self._begin(title, TimeUnit.BATCH, total, count, Timestamp())

    def _begin(
        self,
        title: str,
        unit: TimeUnit,
        total: float | None,
        count: Callable[[Timestamp], float],
        timestamp: Timestamp,
    ) -> _Bar:
        stream = default_stream() if self._stream is None else self._stream
        in_notebook = self._stream is None and is_notebook()
        is_drawn = in_notebook or is_terminal(stream)
        values = self._values

        def shown() -> str:
            return encodable(
                self._shown(values, columns_of(stream) - _BAR_COLUMNS if is_drawn else None), stream
            )

        seconds = self._refresh_seconds if is_drawn else self._line_seconds
        bar = _Bar(title, unit, total, timestamp, count, shown, stream, in_notebook, seconds, self._clock)
        if is_drawn and not in_notebook:
            self._guard.start()
        return bar

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

    def _shown(self, values: dict[str, float], room: int | None) -> str:
        """Returns the chosen metrics as `name=value, name=value`, within so many cells beside a bar."""
        chosen = [
            (one_line(name), short(value))
            for name, value in values.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
        ]
        text = _joined(chosen)
        if room is None or width_of(text) <= max(room, _MIN_METRIC_COLUMNS):
            return text
        chosen = [(shortened(name, _SHORT_NAME), value) for name, value in chosen]
        # The first value always stays: a short bar with a value is more useful than a bar without one.
        while len(chosen) > 1 and width_of(_joined(chosen)) > max(room, _MIN_METRIC_COLUMNS):
            chosen.pop()
        return _joined(chosen)


def _joined(texts: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={text}" for name, text in texts)


def _total(timestamp: Timestamp, unit: TimeUnit) -> float:
    """Returns the count for the whole run; seconds rounded to tenths."""
    value = round(timestamp.get(unit).value, 1)
    return int(value) if value == int(value) else value


def _unit(state: State) -> TimeUnit:
    """Returns the unit of a bar for the whole run."""
    length = state.max_duration
    if length is None or length.unit in {TimeUnit.DURATION, TimeUnit.EPOCH}:
        return TimeUnit.BATCH
    return length.unit
