"""What the core destinations add to a training step of the demo: the same loop with them and without, in turns."""

import contextlib
import importlib.util
import io
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from destinations import Console, InMemory, ProgressBar, TextFile

_ROUNDS = 8
_EPOCHS = 2


def _load_demo() -> Any:
    path = Path(__file__).parents[2] / "docs" / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _milliseconds_per_step(demo: Any, loggers: list[Any]) -> float:
    """Trains, and returns the mean time of a step; the first epoch warms up and is not counted."""
    with demo.trainer(loggers, [], epochs=_EPOCHS + 1, save_folder=None) as trainer:
        trainer.fit("1ep")
        before = trainer.state.timestamp
        trainer.fit(f"{_EPOCHS}ep")
        after = trainer.state.timestamp
        seconds = (after.total_wct - before.total_wct).total_seconds()
        return seconds / int(after.batch - before.batch) * 1000


def main() -> None:
    """Prints the time of a step with no destination and with all four, and the ratio of their medians."""
    demo = _load_demo()
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        os.chdir(folder)
        try:
            without, with_all = [], []
            for _ in range(_ROUNDS):
                without.append(_milliseconds_per_step(demo, []))
                loggers = [
                    ProgressBar(),
                    Console(log_interval="1ep"),
                    InMemory(),
                    TextFile("runs/{run_name}/log.txt"),
                ]
                with_all.append(_milliseconds_per_step(demo, loggers))
        finally:
            os.chdir(home)
    bare, full = statistics.median(without), statistics.median(with_all)
    print("A training step of the demo, median of", _ROUNDS, "runs in turns")
    print(f"  no destination     {bare:8.3f} ms")
    print(f"  four destinations  {full:8.3f} ms   {full / bare:.3f} x   budget 1.03 x")


if __name__ == "__main__":
    main()
