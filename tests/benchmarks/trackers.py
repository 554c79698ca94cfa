"""Measures WandB and MLflow in the training thread, beside their own packages: `python -m tests.benchmarks trackers`.

Each system logs ten floats in a process of its own: call upon call, while the tracker's thread works all the time; and
with some milliseconds of numpy between two calls, as in a training loop, after which the caches hold other things. A
Logger without a destination is in the table for comparison. Each runs three times, and the best median counts.
Percentiles are of single calls, the clock included.
"""

import contextlib
import functools
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .timing import Row, print_table

NAMES = [f"train/m{index}" for index in range(10)]
BUDGET_MICROSECONDS = 5.0
ROUNDS = 3
MOST_CALLS_WITH_WORK = 200
UPON = "call upon call"
BETWEEN = "numpy in between"
TIMEOUT_SECONDS = 300
# Numbers of calls: ours return at once; one of theirs may take 30 ms.
CALLS = {"Logger alone": 1000, "WandB": 1000, "wandb.log": 1000, "MLflow": 1000, "mlflow.log_metrics": 100}

Log = Callable[[dict[str, float], int], object]


def main() -> bool:
    """Measures and prints; returns whether the budgets were kept."""
    rows = []
    for ours, theirs in (("WandB", "wandb.log"), ("MLflow", "mlflow.log_metrics")):
        own, peer = best_of(ours, UPON), best_of(theirs, UPON)
        rows.append(Row(f"{ours}, {UPON}, p50", own["p50"], BUDGET_MICROSECONDS, peer["p50"]))
        rows.append(Row(f"{ours}, {UPON}, p99", own["p99"], None, peer["p99"]))
        rows.append(Row(f"{ours}, {UPON}, mean", own["mean"], None, peer["mean"]))
        rows.append(Row(f"{ours}, CPU of the process per call", own["cpu"], None, peer["cpu"]))
        own, peer = best_of(ours, BETWEEN), best_of(theirs, BETWEEN)
        rows.append(Row(f"{ours}, {BETWEEN}, p50", own["p50"], None, peer["p50"]))
    rows.append(Row(f"Logger alone, {UPON}, p50", best_of("Logger alone", UPON)["p50"]))
    rows.append(Row(f"Logger alone, {BETWEEN}, p50", best_of("Logger alone", BETWEEN)["p50"]))
    print_table("Ten floats, on the calling thread; the peer is the package's own call", rows, "direct")
    return all(row.is_within_budget for row in rows)


def through(destination: Any) -> tuple[Log, Callable[[], None]]:
    """Returns a destination behind a Logger as two calls."""
    from events import Engine, Logger, State

    state = State("bench")
    logger = Logger(state, [destination], raise_errors=True)
    engine = Engine(state, logger)
    engine.run_event("init")
    engine.run_event("fit_start")
    # Waits until the package is imported and the run is made, which isn't part of a call.
    if not destination._feed.flush(TIMEOUT_SECONDS):
        raise RuntimeError("run must be open, got none in time.")

    def close() -> None:
        engine.close()
        counts = destination.counts
        if counts.written_rows != counts.rows or counts.errors:
            raise RuntimeError(f"every row must be written, got {counts}.")

    return logger.log_metrics, close


def our_wandb(folder: str) -> tuple[Log, Callable[[], None]]:
    """Logger and WandB, offline."""
    from destinations import WandB

    settings = {"x_disable_stats": True}
    return through(
        WandB(
            "bench",
            mode="offline",
            dir=folder,
            close_seconds=TIMEOUT_SECONDS,
            init_kwargs={"settings": settings},
        )
    )


def their_wandb(folder: str) -> tuple[Log, Callable[[], None]]:
    """`wandb.log`, offline."""
    import wandb

    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    run = wandb.init(mode="offline", dir=folder, project="bench", settings=settings)
    return lambda metrics, step: wandb.log(metrics, step=step), run.finish


def our_mlflow(folder: str) -> tuple[Log, Callable[[], None]]:
    """Logger and MLflow, with a SQLite store."""
    from destinations import MLflow

    uri, artifacts = f"sqlite:///{folder}/mlflow.db", f"{folder}/artifacts"
    return through(MLflow(uri, "bench", artifact_location=artifacts, close_seconds=TIMEOUT_SECONDS))


def their_mlflow(folder: str) -> tuple[Log, Callable[[], None]]:
    """`mlflow.log_metrics`, with a SQLite store."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("bench", f"{folder}/artifacts"))
    mlflow.start_run()
    return lambda metrics, step: mlflow.log_metrics(metrics, step=step), mlflow.end_run


def logger_alone(folder: str) -> tuple[Log, Callable[[], None]]:
    """Logger and a destination that does nothing."""
    from destinations import LoggerDestination
    from events import Logger, State

    class Nothing(LoggerDestination):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            """Takes nothing."""

    return Logger(State("bench"), [Nothing()]).log_metrics, lambda: None


SYSTEMS: dict[str, Callable[[str], tuple[Log, Callable[[], None]]]] = {
    "Logger alone": logger_alone,
    "WandB": our_wandb,
    "wandb.log": their_wandb,
    "MLflow": our_mlflow,
    "mlflow.log_metrics": their_mlflow,
}


def measure(name: str, pace: str) -> dict[str, float]:
    """Measures one system in this process; microseconds."""
    count = min(CALLS[name], MOST_CALLS_WITH_WORK) if pace == BETWEEN else CALLS[name]
    rows = [{key: 0.1 * step + place for place, key in enumerate(NAMES)} for step in range(count)]
    taken = []
    matrix = np.ones((300, 300))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update({f"WANDB_{kind}_DIR": folder for kind in ("DATA", "CACHE", "CONFIG")})
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        log, close = SYSTEMS[name](folder)
        log(rows[0], 0)
        before = time.process_time()
        for step, row in enumerate(rows[1:], 1):
            if pace == BETWEEN:
                matrix @ matrix
            start = time.perf_counter_ns()
            log(row, step)
            taken.append((time.perf_counter_ns() - start) / 1e3)
        close()
        cpu = (time.process_time() - before) / len(taken) * 1e6
    percentiles = statistics.quantiles(taken, n=100, method="inclusive")
    return {"p50": percentiles[49], "p99": percentiles[98], "mean": statistics.fmean(taken), "cpu": cpu}


@functools.cache
def best_of(name: str, pace: str) -> dict[str, float]:
    """Returns the round with the least median."""
    return min((in_child(name, pace) for _ in range(ROUNDS)), key=lambda result: result["p50"])


def in_child(name: str, pace: str) -> dict[str, float]:
    """Measures one system in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.trackers", name, pace]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=TIMEOUT_SECONDS,
        # One thread for numpy, so that the other core is free for the measured system.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        measured = measure(*sys.argv[1:])
    print(json.dumps(measured))
