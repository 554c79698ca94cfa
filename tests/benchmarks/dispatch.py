"""Measures an event, a metrics call and an import, beside Composer's engine if it is installed."""

import statistics
import subprocess
import sys

from destinations import LoggerDestination
from events import Callback, Engine, Event, Logger, State

from .timing import Row, best_microseconds, print_table

__all__ = ["main"]

IMPORT_SECONDS = 0.3
IMPORT_RUNS = 5


class TakesNothing(LoggerDestination):
    """A destination that does nothing, so that only the fan-out costs."""

    def log_metrics(self, metrics, step=None):
        pass


def _event_microseconds(callbacks):
    state = State("benchmark")
    engine = Engine(state, Logger(state), callbacks)
    taken = best_microseconds("engine.run_event(event)", {"engine": engine, "event": Event.BATCH_END})
    engine.close()
    return taken


class _Listens(Callback):
    def batch_end(self, state, logger):
        pass


def _metrics_microseconds(statement):
    logger = Logger(State("benchmark"), TakesNothing(), raise_errors=True)
    metrics = {f"loss/train/{index}": 0.1 * index for index in range(10)}
    return best_microseconds(statement, {"logger": logger, "metrics": metrics})


def _composer_microseconds(listeners):
    """Returns what Composer's engine takes for an event with so many listeners, or None where it cannot be asked."""
    try:
        import torch
        from composer import Callback as ComposerCallback
        from composer import Engine as ComposerEngine
        from composer import Event as ComposerEvent
        from composer import Logger as ComposerLogger
        from composer import State as ComposerState
        from composer.devices import DeviceCPU
    except ImportError:
        return None

    class Listens(ComposerCallback):
        # An event that Composer runs without a dataloader or a maximum, which its state here does not have.
        def eval_standalone_start(self, state, logger):
            pass

    state = ComposerState(
        model=torch.nn.Linear(1, 1),
        rank_zero_seed=0,
        run_name="benchmark",
        device=DeviceCPU(),
        callbacks=[Listens() for _ in range(listeners)],
    )
    engine = ComposerEngine(state, ComposerLogger(state))
    taken = best_microseconds(
        "engine.run_event(event)",
        {"engine": engine, "event": ComposerEvent.EVAL_STANDALONE_START},
        number=5_000,
    )
    engine.close()
    return taken


def _import_seconds(package):
    """Returns the median of what an import takes in a fresh interpreter, beyond the interpreter itself."""
    program = (
        f"import time; start = time.perf_counter(); import {package}; print(time.perf_counter() - start)"
    )
    return statistics.median(
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(IMPORT_RUNS)
    )


def main():
    """Prints the table; returns whether every budget was kept."""
    rows = [
        Row("run_event, nobody listens", _event_microseconds([Callback()]), 0.4, _composer_microseconds(0)),
        Row(
            "run_event, three hooks",
            _event_microseconds([_Listens() for _ in range(3)]),
            2.0,
            _composer_microseconds(3),
        ),
        Row("Logger.log_metrics, ten floats", _metrics_microseconds("logger.log_metrics(metrics)"), 1.0),
        Row("Logger.log_metrics, with a step", _metrics_microseconds("logger.log_metrics(metrics, 5)")),
        *(
            Row(f"import {package}", _import_seconds(package), IMPORT_SECONDS, unit="s")
            for package in ("events", "uploads", "destinations")
        ),
    ]
    print_table("events", rows, peer="Composer")
    return all(row.is_within_budget for row in rows)


if __name__ == "__main__":
    sys.exit(not main())
