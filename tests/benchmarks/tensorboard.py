"""Measures TensorBoard files: `python -m tests.benchmarks tensorboard`.

Ten floats a row go through our Logger and `TensorBoard`, and through torch's `SummaryWriter`, each in processes of its
own, several times; the smallest figure counts. "A call" is wall time, CPU is processor time of the calling thread or of
the whole process until everything is in the file, in microseconds a row.
"""

import functools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from .timing import Row, print_table, sample_microseconds

__all__ = ["main"]

ROWS = 5_000
WARM_UP_ROWS = 200
ROUNDS = 3
NAMES = [f"train/metric{index}" for index in range(10)]
# Stands for a training step between two rows: about 0.3 ms of work in C, which frees the interpreter.
STEP_SIZE = 256

CALL_MICROSECONDS = 5.0
TOTAL_RATIO = 5.0
THREAD_RATIO = 50.0


def _ours(folder):
    from destinations import TensorBoard
    from events import Engine, Logger, State

    state = State("bench")
    destination = TensorBoard(folder)
    logger = Logger(state, [destination], raise_errors=True)
    engine = Engine(state, logger)
    engine.run_event("init")

    def close():
        engine.close()
        counts = destination.counts
        assert counts.written_rows == counts.rows == ROWS + WARM_UP_ROWS, counts

    return logger.log_metrics, close, logger.flush


def _summary_writer(folder):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(metrics, step):
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close, writer.flush


SYSTEMS = {"TensorBoard": _ours, "SummaryWriter": _summary_writer}


def _hanging_microseconds():
    """Returns what a call takes at p50 while the tracker hangs, and its queue has been full for long."""
    from destinations.trackers.tracker import Sink, Tracker
    from events import Engine, Logger, State

    may_go_on = threading.Event()

    class Hanging(Sink):
        def log_metrics(self, rows):
            may_go_on.wait()

    class Hangs(Tracker):
        sink_class = Hanging

    state = State("bench")
    tracker = Hangs(max_waiting_values=10_000)
    logger = Logger(state, [tracker], raise_errors=True)
    engine = Engine(state, logger)
    engine.run_event("init")
    for step in range(ROWS):
        logger.log_metrics(_row(step), step)
    taken = sample_microseconds(functools.partial(logger.log_metrics, _row(0), ROWS), count=ROWS)
    assert tracker.counts.dropped_rows > ROWS
    may_go_on.set()
    # It says how much was dropped, as it should.
    logging.getLogger("destinations").setLevel(logging.CRITICAL)
    engine.close()
    return taken.p50


def child(system, is_training):
    """Logs the rows, and prints what they took, in microseconds a row."""
    matrix = np.random.default_rng(0).random((STEP_SIZE, STEP_SIZE), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        log, close, flush = SYSTEMS[system](folder)
        for step in range(WARM_UP_ROWS):
            log(_row(step), step)
        flush()
        calls, thread, total = [], 0.0, time.process_time()
        for step in range(ROWS):
            row = _row(step)
            first, second, began = time.thread_time(), time.thread_time(), time.perf_counter()
            log(row, step)
            calls.append(time.perf_counter() - began)
            # Without the cost of the clock.
            thread += time.thread_time() - second - (second - first)
            if is_training:
                matrix @ matrix
        flush()
        total = time.process_time() - total
        close()
    figures = {"total": total / ROWS, "thread": thread / ROWS, "p50": statistics.median(calls)}
    print(json.dumps({name: seconds * 1e6 for name, seconds in figures.items()}))


def _row(step):
    return {name: index * 0.37 + step for index, name in enumerate(NAMES)}


def _run(system, *options):
    found = []
    for _ in range(ROUNDS):
        output = subprocess.run(
            [sys.executable, "-m", __name__, system, *options],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        ).stdout
        found.append(json.loads(output.splitlines()[-1]))
    return {name: min(one[name] for one in found) for name in found[0]}


def main():
    """Prints the table; returns whether the budgets were kept."""
    rows = []
    for label, options in (("in a loop of its own", ()), ("between training steps", ("training",))):
        ours, theirs = _run("TensorBoard", *options), _run("SummaryWriter", *options)
        # Between steps, what both take is mostly fetching code and data back into the caches: no ratio is
        # promised there.
        budget = None if options else theirs["thread"] / THREAD_RATIO
        rows += [
            Row(f"{label}: a call, p50", ours["p50"], CALL_MICROSECONDS, theirs["p50"]),
            Row(f"{label}: CPU of its thread", ours["thread"], budget, theirs["thread"]),
        ]
        if not options:
            budget = theirs["total"] / TOTAL_RATIO
            rows.append(Row(f"{label}: CPU in total", ours["total"], budget, theirs["total"]))
    rows.append(Row("while the tracker hangs: a call, p50", _hanging_microseconds(), CALL_MICROSECONDS))
    print_table("TensorBoard, ten floats a row", rows, peer="SummaryWriter")
    return all(row.is_within_budget for row in rows)


if __name__ == "__main__":
    child(sys.argv[1], len(sys.argv) > 2)
