"""`Console`: prints logged records as blocks of lines at an interval, on rank 0 only.

Everything runs in the training thread: a call between two blocks costs about a microsecond, a block costs one
write to the stream.
"""

import itertools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO

from destinations.base import LoggerDestination
from events import Interval, Logger, State, Time, TimeUnit, WriteRate

from .formatting import describe, header, one_line, short, table_text, yaml_text
from .streams import write_text

__all__ = ["Console"]

_MARKS_PER_EVALUATION = 10
_RULE = "*" * 30
_COUNTED_BY_EPOCH = frozenset({TimeUnit.EPOCH, TimeUnit.ITERATION})


class _Pending:
    """Metrics and blocks of text waiting to be printed."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.blocks: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self.metrics and not self.blocks

    def add(self, other: "_Pending") -> None:
        self.metrics |= other.metrics
        self.blocks += other.blocks
        other.take("")

    def take(self, prefix: str) -> str:
        """Returns everything pending as lines, and clears it."""
        lines = (f"  {prefix} {one_line(name)}: {short(value)}\n" for name, value in self.metrics.items())
        text = "".join(itertools.chain(lines, self.blocks))
        self.metrics, self.blocks = {}, []
        return text


class Console(LoggerDestination):
    """Prints metrics, tables, texts and hyperparameters.

    ```
    [epoch=1/5][batch=2/150]:
      Train loss/train: 0.6931
      Train lr: 1e-05
    ```

    **When.** After the first batch (or epoch, for an interval in epochs), then after each interval, and at
    the end of `fit`. Each metric is printed with its last value. An interval without records prints nothing.
    An evaluation prints its progress in tenths, and all its metrics at its end. Training metrics pending when
    an evaluation starts are printed at the end of their interval.

    **How.** Numbers below 0.001, and from a million, are printed in full, others with four digits.
    Hyperparameters are printed once as YAML, before the first block; each table and text is printed once,
    with the next block.

    Args:
        log_interval: any duration: "1ba", "1ep", "1000sp", "90s", "0.1dur".
        stream: output stream; default: the `sys.stderr` at the time of printing.
        log_traces: print traces.
        table_rows: max number of rows printed of a table.
        write_rate: rate limit of metrics; None for no limit.
    """

    def __init__(
        self,
        log_interval: Time | str | timedelta = "1ba",
        stream: TextIO | None = None,
        log_traces: bool = False,
        *,
        table_rows: int = 20,
        write_rate: WriteRate | None = None,
    ) -> None:
        super().__init__(write_rate=write_rate)
        if table_rows < 0:
            raise ValueError(f"table_rows must be at least 0, got {table_rows}.")
        self._interval = Interval(log_interval)
        self._stream = stream
        self._log_traces = log_traces
        self._table_rows = table_rows
        self._reset()

    def _reset(self) -> None:
        self._interval = Interval(self._interval.time)
        self._is_silent = False
        self._is_first = True
        self._is_evaluating = False
        self._batch_in_epoch = 0
        self._train = _Pending()
        self._eval = _Pending()
        self._hyperparameters: dict[str, Any] = {}
        self._printed_hyperparameters: dict[str, Any] = {}

    def init(self, state: State, logger: Logger) -> None:
        if state.rank:
            self._reset()
            self._is_silent = True

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self._is_silent:
            (self._eval if self._is_evaluating else self._train).metrics.update(metrics)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if not self._is_silent:
            # Rendered at once: the caller may change the values later.
            for name, value in hyperparameters.items():
                self._hyperparameters[name] = yaml_text({name: value})

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        if not self._is_silent:
            title = f"Table {one_line(name)}{_at(step)}:\n"
            self._pending().blocks.append(title + table_text(columns, rows, self._table_rows))

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        if not self._is_silent:
            lines = "".join(f"  {one_line(line)}\n" for line in text.splitlines())
            self._pending().blocks.append(f"Text {one_line(name)}{_at(step)}:\n{lines}")

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self._log_traces and not self._is_silent:
            for name, value in traces.items():
                line = f"Trace {one_line(name)}: {one_line(str(describe(value)))}\n"
                self._pending().blocks.append(line)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._is_first = True
        self._batch_in_epoch = int(state.timestamp.batch_in_epoch)
        self._print_hyperparameters()
        self._interval.start(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._batch_in_epoch = int(state.timestamp.batch_in_epoch)
        is_first = self._is_first and self._interval.time.unit not in _COUNTED_BY_EPOCH
        if self._interval.passed(state) or is_first:
            self._print_train(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        is_first = self._is_first and self._interval.time.unit is TimeUnit.EPOCH
        if self._interval.passed(state) or is_first:
            self._print_train(state)

    def iteration_end(self, state: State, logger: Logger) -> None:
        is_first = self._is_first and self._interval.time.unit is TimeUnit.ITERATION
        if self._interval.passed(state) or is_first:
            self._print_train(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._print_train(state)

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self._print_hyperparameters()

    def eval_start(self, state: State, logger: Logger) -> None:
        self._is_evaluating = True

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        length = None if state.dataloader_len is None else int(state.dataloader_len)
        done = int(state.eval_timestamp.batch)
        # The last mark is the block printed at the end of the evaluation.
        if length and done < length and _tenths(done, length) > _tenths(done - 1, length):
            self._print(f"{_eval_header(state)}:\n")

    def eval_end(self, state: State, logger: Logger) -> None:
        self._is_evaluating = False
        self._print(f"{_eval_header(state)}:\n{self._eval.take('Eval')}")

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._print_rest(state)

    def predict_start(self, state: State, logger: Logger) -> None:
        self._print_hyperparameters()

    def predict_end(self, state: State, logger: Logger) -> None:
        self._print_rest(state)

    def close(self, state: State, logger: Logger) -> None:
        try:
            self._print_rest(state)
        finally:
            self._reset()

    def _pending(self) -> _Pending:
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
            self._print(f"{self._train_header(state)}:\n{self._train.take('Train')}")

    def _print_hyperparameters(self) -> None:
        news = {
            name: text
            for name, text in self._hyperparameters.items()
            if self._printed_hyperparameters.get(name) != text
        }
        if news:
            self._printed_hyperparameters |= news
            self._print(f"{_RULE}\nHyperparameters:\n{''.join(news.values())}{_RULE}\n")

    def _print(self, text: str) -> None:
        if not self._is_silent:
            write_text(self._stream, text)

    def _train_header(self, state: State) -> str:
        """Returns epoch and batch for a run measured in epochs, otherwise the progress of the run."""
        length = state.max_duration
        if length is None or length.unit is TimeUnit.DURATION:
            return header({"batch": state.timestamp.batch.value})
        if length.unit is not TimeUnit.EPOCH:
            done = state.timestamp.get(length.unit)
            unit = length.unit.name.lower()
            return header({unit: f"{_count(done)}/{_count(length)}"})
        # From the end of its last batch until the end of the next batch, the epoch is already counted.
        is_inside = bool(state.timestamp.batch_in_epoch)
        epoch = int(state.timestamp.epoch) + is_inside
        batches = "" if state.dataloader_len is None else f"/{int(state.dataloader_len)}"
        return header({"epoch": f"{epoch}/{length.value}", "batch": f"{self._batch_in_epoch}{batches}"})


def _tenths(done: int, length: int) -> int:
    return done * _MARKS_PER_EVALUATION // length


def _eval_header(state: State) -> str:
    length = "" if state.dataloader_len is None else f"/{int(state.dataloader_len)}"
    label = state.dataloader_label or "eval"
    return header({"eval": label, "batch": f"{int(state.eval_timestamp.batch)}{length}"})


def _count(time: Time) -> str:
    return short(round(time.value, 1)) if isinstance(time.value, float) else str(time.value)


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
