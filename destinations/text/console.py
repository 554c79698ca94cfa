"""`Console`: prints records as short blocks of aligned lines, on rank 0 only.

Everything runs in the training thread: a call between two blocks costs about a microsecond, a block costs one
write to the stream.
"""

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TextIO

import attrs

from destinations.base import LoggerDestination
from events import Interval, Logger, State, Time, TimeUnit, WriteRate

from .formatting import (
    cut,
    describe,
    elapsed_text,
    flattened,
    header,
    metric_direction,
    one_line,
    pad,
    short,
    shortened,
    table_text,
    width_of,
    yaml_text,
)
from .run_summary import RunSummary
from .streams import columns_of, has_colors, write_text

__all__ = ["Console"]

_MARKS_PER_EVALUATION = 10
_RULE = "*" * 30
_COUNTED_BY_EPOCH = frozenset({TimeUnit.EPOCH, TimeUnit.ITERATION})
_MAX_HYPERPARAMETERS = 12
_MAX_NAME = 40
_MAX_CELL = 32
_INDENT = "  "
_GAP = "   "
# More metrics than this are shown in two columns if their names fit, and more than that in any case.
_ONE_COLUMN, _TWO_COLUMNS = 4, 8
# The default interval of a run of unknown length, and within a longer epoch.
_UNKNOWN_LENGTH = timedelta(minutes=1)
_PATIENCE = timedelta(minutes=5)
# The user's hyperparameters come before the trainer's.
_OF_TRAINER = "trainer."
# Within this range Composer's format rounds numbers; outside, they are shown in full.
_SMALLEST_ROUNDED, _LARGEST_ROUNDED = 1e-3, 1e6


@attrs.define
class _PendingText:
    """Metrics and blocks of text waiting to be printed."""

    metrics: dict[str, float] = attrs.field(factory=dict)
    blocks: list[str] = attrs.field(factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.metrics and not self.blocks

    def add(self, other: "_PendingText") -> None:
        self.metrics |= other.metrics
        self.blocks += other.blocks
        other.take()

    def take(self) -> tuple[dict[str, float], str]:
        """Returns the metrics and the text pending, and clears them."""
        taken = self.metrics, "".join(self.blocks)
        self.metrics, self.blocks = {}, []
        return taken


@attrs.frozen
class _BlockStyle:
    """Aligned columns in the width of the terminal, or 80."""

    _stream: TextIO | None
    _patterns: tuple[str, ...] | None
    _max_metrics: int

    def train(self, state: State, batch_in_epoch: int, metrics: dict[str, float], text: str) -> str:
        """Returns a block of training."""
        return self._block(_position(state, batch_in_epoch), metrics, text)

    def evaluation_mark(self, state: State) -> str:
        """Returns the text printed at each tenth of an evaluation."""
        return ""

    def evaluation(self, state: State, metrics: dict[str, float], text: str) -> str:
        """Returns the block of an evaluation."""
        label = state.dataloader_label or "eval"
        title = "Eval" if label == "eval" else f"Eval {one_line(label)}"
        batches = int(state.timestamp.batch)
        return self._block(f"{title}, after batch {batches}" if batches else title, metrics, text)

    def rendered(self, name: str, value: Any) -> dict[str, str]:
        """Returns a hyperparameter as text: the caller may change the value later."""
        return {key: short(item) for key, item in flattened({name: describe(value)}).items()}

    def hyperparameters(self, texts: dict[str, str]) -> str:
        """Returns a block of rendered hyperparameters."""
        # A flag that is off isn't worth a line.
        names = [name for name, text in texts.items() if text not in {"False", "None"}]
        names.sort(key=lambda name: name.startswith(_OF_TRAINER))
        pairs = [f"{shortened(one_line(name), _MAX_NAME)}={cut(texts[name], _MAX_CELL)}" for name in names]
        if len(pairs) > _MAX_HYPERPARAMETERS:
            pairs[_MAX_HYPERPARAMETERS:] = [f"and {len(pairs) - _MAX_HYPERPARAMETERS} more"]
        lines = _wrapped(pairs, columns_of(self._stream))
        return f"{self._bold('Hyperparameters')}\n{lines}" if pairs else ""

    def table(self, title: str, columns: list[str], rows: list[list[Any]], max_rows: int) -> str:
        """Returns a table below its title."""
        room = columns_of(self._stream)
        lines = table_text(columns, rows, max_rows, max_cell=_MAX_CELL).splitlines()
        body = "".join(f"{_INDENT}{cut(line, room - len(_INDENT))}\n" for line in lines)
        return f"{self._bold(cut(title, room))}\n{body}"

    def _block(self, title: str, metrics: dict[str, float], text: str) -> str:
        shown = {name: short(value) for name, value in metrics.items() if self._is_shown(name)}
        rest = len(shown) - self._max_metrics
        if rest > 0:
            # The main ones first, in the order in which they were logged.
            kept = set(sorted(shown, key=lambda name: not metric_direction(name))[: self._max_metrics])
            shown = {name: value for name, value in shown.items() if name in kept}
        if not shown and rest <= 0:
            return text
        more = f"{_INDENT}and {rest} more\n" if rest > 0 else ""
        return f"{self._bold(title)}\n{self._columns(shown)}{more}{text}"

    def _is_shown(self, name: str) -> bool:
        if self._patterns is None:
            # The title has the epoch and the batch already.
            return not name.startswith("time/")
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)

    def _columns(self, texts: dict[str, str]) -> str:
        """Returns names and values in one or two columns, to be read downwards."""
        room = columns_of(self._stream) - len(_INDENT)
        names = list(map(one_line, texts))
        longest = max(map(width_of, names), default=0)
        widest = max(map(len, texts.values()), default=0)
        room_in_half = (room - len(_GAP)) // 2 - widest - 2
        is_double = len(names) > (_ONE_COLUMN if longest <= room_in_half else _TWO_COLUMNS)
        width = min(longest, room_in_half if is_double else min(room - widest - 2, _MAX_NAME))
        cells = [
            f"{pad(shortened(name, width), width)}  {pad(text, widest, right=True)}"
            for name, text in zip(names, texts.values(), strict=True)
        ]
        height = -(-len(cells) // (2 if is_double else 1))
        rows = itertools.zip_longest(cells[:height], cells[height:], fillvalue="")
        return "".join(f"{_INDENT}{_GAP.join(row).rstrip()}\n" for row in rows)

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if has_colors(self._stream) else text


class _ComposerStyle:
    """The format of Composer's `ConsoleLogger`: `[epoch=1/5][batch=2/150]:`, a line for each metric."""

    def train(self, state: State, batch_in_epoch: int, metrics: dict[str, float], text: str) -> str:
        return f"{header(_progress(state, batch_in_epoch))}:\n{_composer_lines('Train', metrics)}{text}"

    def evaluation_mark(self, state: State) -> str:
        return f"{_eval_header(state)}\n"

    def evaluation(self, state: State, metrics: dict[str, float], text: str) -> str:
        block = f"{_composer_lines('Eval', metrics)}{text}"
        return f"{_eval_header(state)}{':' if block else ''}\n{block}"

    def rendered(self, name: str, value: Any) -> dict[str, str]:
        return {name: yaml_text({name: value})}

    def hyperparameters(self, texts: dict[str, str]) -> str:
        return f"{_RULE}\nHyperparameters:\n{''.join(texts.values())}{_RULE}\n"

    def table(self, title: str, columns: list[str], rows: list[list[Any]], max_rows: int) -> str:
        return f"{title}:\n{table_text(columns, rows, max_rows)}"


class Console(LoggerDestination):
    """Prints metrics, tables, texts and hyperparameters, and a summary at the end.

    ```python
    Trainer(..., loggers=[Console(log_interval="100ba")])
    ```

    prints

    ```
    Epoch 1/8, 0:03
      loss/train/total              0.4331
      metrics/train_epoch/accuracy  0.6265
    Eval test, after batch 21
      loss/test/total        0.7896
      metrics/test/accuracy  0.9044
    ```

    **When.** By default it prints a block for each epoch, and every five minutes in between. If the run is
    not measured in epochs, it prints one for each tenth of the run; if its length is unknown, every minute
    and each epoch. With a `log_interval`, it prints after the first batch (or epoch, for an interval in
    epochs), and then after each interval. The rest is printed at the end of `fit`. Each metric is printed
    with its last value, and an interval without records prints nothing. Records between the block of an epoch
    and the next epoch, such as an evaluation after `epoch_end`, form a second block. An evaluation prints its
    metrics at its end. Pending training metrics are then printed at the end of their interval.

    **How.** Numbers have four significant digits. Metrics are aligned, in two columns if there are many, and
    fit the width of the terminal, 80 columns elsewhere. Long names are cut in the middle. If there are many
    metrics, losses, errors and accuracies come first, and the others are counted. Hyperparameters are printed
    once, before the first block; each table and text is printed once, with the next block. Titles are bold if
    the terminal supports styles and `NO_COLOR` is not set.

    **At the end** it prints how the run ended, the best and last values of the main metrics, the location of
    each destination's files, errors, and the command that shows the run; see
    `destinations.text.run_summary`.

    With `style="composer"` it prints the blocks of Composer's `ConsoleLogger`, one per batch by default,
    and no summary.

    Args:
        log_interval: any duration: "1ba", "1ep", "1000sp", "90s", "0.1dur". Default: see above.
        stream: output stream; default: the `sys.stderr` at the time of printing, `sys.stdout` in a notebook.
        log_traces: print traces.
        style: "blocks" or "composer".
        metrics: patterns (`fnmatch`) of the metrics shown; default: all but "time/*", the position.
        max_metrics: max number of metrics in a block; a last line counts the others.
        table_rows: max number of rows printed of a table.
        summary: print a summary at the end; never in the style of Composer.
        write_rate: rate limit of metrics; None for no limit.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `metrics` is one string.
    """

    summary_priority: int | None = 0

    def __init__(
        self,
        log_interval: Time | str | timedelta | None = None,
        stream: TextIO | None = None,
        log_traces: bool = False,
        *,
        style: Literal["blocks", "composer"] = "blocks",
        metrics: Sequence[str] | None = None,
        max_metrics: int = 12,
        table_rows: int = 20,
        summary: bool = True,
        write_rate: WriteRate | None = None,
    ) -> None:
        super().__init__(write_rate=write_rate)
        if table_rows < 0:
            raise ValueError(f"table_rows must be at least 0, got {table_rows}.")
        if max_metrics < 1:
            raise ValueError(f"max_metrics must be at least 1, got {max_metrics}.")
        if style not in {"blocks", "composer"}:
            raise ValueError(f"style must be 'blocks' or 'composer', got {style!r}.")
        if isinstance(metrics, str):
            raise TypeError(f"metrics must be a list of patterns, got {metrics!r}. Write [{metrics!r}].")
        if log_interval is None and style == "composer":
            log_interval = "1ba"
        self._given_interval = None if log_interval is None else Interval(log_interval).time
        self._stream = stream
        self._log_traces = log_traces
        self._table_rows = table_rows
        self._style: _BlockStyle | _ComposerStyle
        if style == "composer":
            self._style = _ComposerStyle()
        else:
            self._style = _BlockStyle(stream, None if metrics is None else tuple(metrics), max_metrics)
        if style == "composer" or not summary:
            self.summary_priority = None
        self._reset()

    def _reset(self) -> None:
        self._interval = Interval(self._given_interval or "1ep")
        self._patience = Interval(_PATIENCE)
        self._is_silent = False
        self._is_first = True
        self._is_evaluating = False
        self._batch_in_epoch = 0
        # Whether an epoch has ended with a block, and no epoch has begun since.
        self._is_after_epoch = False
        self._train = _PendingText()
        self._eval = _PendingText()
        self._hyperparameters: dict[str, str] = {}
        self._printed_hyperparameters: dict[str, str] = {}
        self._summary = RunSummary()

    def init(self, state: State, logger: Logger) -> None:
        if state.rank:
            self._reset()
            self._is_silent = True
        self._summary = RunSummary.of(self, state)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self._is_silent:
            (self._eval if self._is_evaluating else self._train).metrics.update(metrics)
            self._summary.update(metrics, step, is_evaluation=self._is_evaluating)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if not self._is_silent:
            for name, value in hyperparameters.items():
                self._hyperparameters |= self._style.rendered(name, value)

    def log_table(
        self,
        columns: list[str],
        rows: list[list[Any]],
        name: str = "Table",
        step: int | None = None,
        *,
        caption: str | None = None,
    ) -> None:
        if not self._is_silent:
            title = f"Table {one_line(name)}{_at(step)}"
            title = f"{title}: {one_line(caption)}" if caption else title
            self._pending().blocks.append(self._style.table(title, columns, rows, self._table_rows))

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        if not self._is_silent:
            lines = "".join(f"{_INDENT}{one_line(line)}\n" for line in text.splitlines())
            self._pending().blocks.append(f"Text {one_line(name)}{_at(step)}:\n{lines}")

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self._log_traces and not self._is_silent:
            for name, value in traces.items():
                line = f"Trace {one_line(name)}: {one_line(str(describe(value)))}\n"
                self._pending().blocks.append(line)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._is_first = True
        self._batch_in_epoch = int(state.timestamp.batch_in_epoch)
        self._summary.note_places(logger)
        self._print_hyperparameters()
        if self._given_interval is None:
            self._interval = Interval(_default_interval(state))
        self._interval.start(state)
        self._patience.start(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        # Otherwise records from after the end of an epoch would be in the next epoch's block.
        if self._is_after_epoch:
            self._print_train(state)
            self._is_after_epoch = False

    epoch_start = batch_start

    def batch_end(self, state: State, logger: Logger) -> None:
        self._batch_in_epoch = int(state.timestamp.batch_in_epoch)
        is_due = self._interval.passed(state)
        if self._given_interval is None:
            is_due = self._patience.passed(state) or is_due
        elif self._is_first:
            is_due = is_due or self._interval.time.unit not in _COUNTED_BY_EPOCH
        if is_due:
            self._print_train(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        is_first = self._is_first and self._interval.time.unit is TimeUnit.EPOCH
        if (
            self._interval.passed(state)
            or is_first
            or (self._given_interval is None and not state.max_duration)
        ):
            self._print_train(state)

    def iteration_end(self, state: State, logger: Logger) -> None:
        is_first = self._is_first and self._interval.time.unit is TimeUnit.ITERATION
        if self._interval.passed(state) or is_first:
            self._print_train(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._print_train(state)

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self._summary.note_places(logger)
        self._print_hyperparameters()

    def eval_start(self, state: State, logger: Logger) -> None:
        self._is_evaluating = True

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        length = 0 if state.dataloader_len is None else int(state.dataloader_len)
        done = int(state.eval_timestamp.batch)
        # The last mark is the block printed at the end of the evaluation.
        is_mark = length > 0 and (done == 1 or _tenths(done, length) > _tenths(done - 1, length))
        if is_mark and done < length:
            self._print(self._style.evaluation_mark(state))

    def eval_end(self, state: State, logger: Logger) -> None:
        self._is_evaluating = False
        self._print(self._style.evaluation(state, *self._eval.take()))

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._print_rest(state)

    predict_start, predict_end = eval_standalone_start, eval_standalone_end

    def close(self, state: State, logger: Logger) -> None:
        summary = self._summary
        try:
            summary.close(state, logger)
            self._print_rest(state)
        finally:
            self._reset()
            self._summary = summary

    def post_close(self) -> None:
        summary, self._summary = self._summary, RunSummary()
        self._print(summary.text())

    def _pending(self) -> _PendingText:
        return self._eval if self._is_evaluating else self._train

    def _print_rest(self, state: State) -> None:
        """Prints everything pending, at the end of a run."""
        self._train.add(self._eval)
        self._is_evaluating = False
        self._print_train(state)

    def _print_train(self, state: State) -> None:
        self._print_hyperparameters()
        if not self._train.is_empty:
            self._is_first = False
            self._patience.start(state)
            self._is_after_epoch = not state.timestamp.batch_in_epoch
            self._print(self._style.train(state, self._batch_in_epoch, *self._train.take()))

    def _print_hyperparameters(self) -> None:
        news = {
            name: text
            for name, text in self._hyperparameters.items()
            if self._printed_hyperparameters.get(name) != text
        }
        if news:
            self._printed_hyperparameters |= news
            self._print(self._style.hyperparameters(news))

    def _print(self, text: str) -> None:
        if text and not self._is_silent:
            write_text(self._stream, text)


def _default_interval(state: State) -> Time | str | timedelta:
    length = state.max_duration
    if length is None or length.unit is TimeUnit.DURATION:
        return _UNKNOWN_LENGTH
    return "1ep" if length.unit in _COUNTED_BY_EPOCH else "0.1dur"


def _progress(state: State, batch_in_epoch: int) -> dict[str, str]:
    """Returns how far training is: epoch and batch for a run measured in epochs, else its own unit."""
    length = state.max_duration
    if length is None or length.unit is TimeUnit.DURATION:
        return {"batch": str(state.timestamp.batch.value)}
    if length.unit is not TimeUnit.EPOCH:
        return {length.unit.name.lower(): f"{_count(state.timestamp.get(length.unit))}/{_count(length)}"}
    # The timestamp counts completed epochs; inside of one, the current one is added.
    epoch = int(state.timestamp.epoch) + bool(state.timestamp.batch_in_epoch)
    batches = "" if state.dataloader_len is None else f"/{int(state.dataloader_len)}"
    return {"epoch": f"{epoch}/{length.value}", "batch": f"{batch_in_epoch}{batches}"}


def _position(state: State, batch_in_epoch: int) -> str:
    """Returns how far training is: "Epoch 3/8, batch 12/21, 0:09"."""
    parts = [f"{name} {count}" for name, count in _progress(state, batch_in_epoch).items()]
    text = ", ".join(parts if state.timestamp.batch_in_epoch else parts[:1]).capitalize()
    seconds = state.timestamp.total_wct.total_seconds()
    return f"{text}, {elapsed_text(seconds)}" if seconds >= 1 else text


def _wrapped(texts: Sequence[str], width: int) -> str:
    """Returns texts in lines of at most `width` cells, joined with commas."""
    lines = [""]
    for number, text in enumerate(texts, 1):
        item = text if number == len(texts) else f"{text}, "
        if lines[-1] and width_of(f"{_INDENT}{lines[-1]}{item}".rstrip()) > width:
            lines.append("")
        lines[-1] += item
    return "".join(f"{_INDENT}{cut(line.rstrip(), width - len(_INDENT))}\n" for line in lines)


def _eval_header(state: State) -> str:
    length = "" if state.dataloader_len is None else f"/{int(state.dataloader_len)}"
    count = header({"Eval batch": f"{int(state.eval_timestamp.batch)}{length}"})
    return f"{count} Eval on {one_line(state.dataloader_label or 'eval')} data"


def _composer_lines(prefix: str, metrics: Mapping[str, float]) -> str:
    return "".join(f"  {prefix} {one_line(name)}: {_rounded(value)}\n" for name, value in metrics.items())


def _rounded(value: Any) -> str:
    """Returns a number with four decimals or digits, or in full if rounding would lose much."""
    if not isinstance(value, float):
        return one_line(str(value))
    full, size = repr(float(value)), abs(value)
    if not _SMALLEST_ROUNDED <= size < _LARGEST_ROUNDED:
        return full
    rounded = f"{value:.4f}" if size >= 1 else f"{value:#.4g}"
    return full if len(full) <= len(rounded) else rounded


def _tenths(done: int, length: int) -> int:
    return done * _MARKS_PER_EVALUATION // length


def _count(time: Time) -> str:
    return short(round(time.value, 1))


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
