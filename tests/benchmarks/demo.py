"""Measures what the core destinations add to a training step of the demo: the same loop with and without, in turns."""

import contextlib
import io
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from destinations import Console, InMemory, ProgressBar, TextFile
from events import Callback, Logger, State

_ROUNDS = 10
_EPOCHS = 3
_WARM_UP_STEPS = 10
_BUDGET = 1.03


class _Steps(Callback):
    """Collects the duration of each batch, from end to end, with events and logging."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch > _WARM_UP_STEPS:
            self.milliseconds.append(state.timestamp.batch_wct.total_seconds() * 1000)


def _steps(demo: Any, loggers: list[Any]) -> list[float]:
    steps = _Steps()
    with demo.trainer(loggers, [steps], epochs=_EPOCHS, save_folder=None) as trainer:
        trainer.fit()
    return steps.milliseconds


def main() -> bool:
    """Prints the median step with no destination and with all four, and their ratio.

    Says whether it is in the budget.
    """
    from destinations.commands import demo

    # One thread: several would measure how they wait for each other.
    torch.set_num_threads(1)
    home = Path.cwd()
    without: list[float] = []
    with_all: list[float] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        os.chdir(folder)
        try:
            for _ in range(_ROUNDS):
                without += _steps(demo, [])
                loggers = [ProgressBar(), Console("1ep"), InMemory(), TextFile("runs/{run_name}/log.txt")]
                with_all += _steps(demo, loggers)
        finally:
            os.chdir(home)
    bare, full = statistics.median(without), statistics.median(with_all)
    print(f"\na training step of the demo, median of {len(without)} in turns")
    print(f"no destination      {bare:8.3f} ms")
    print(f"four destinations   {full:8.3f} ms  {full / bare:.3f} x  budget {_BUDGET} x")
    return full / bare <= _BUDGET


if __name__ == "__main__":
    main()
