"""The program of test_time_ledger.py: `time_child.py FAULT FOLDER`.

A loop of 60 batches of some 10 ms, without torch, in which one thing takes 0.6 s longer than it should. It
prints when its loop began and ended, by the system's clock.
"""

import ctypes
import gc
import os
import signal
import sys
import time
from pathlib import Path

from destinations import InMemory, RunDirectory
from events import Callback, Event, Run, TimeLedger

FAULT, FOLDER = sys.argv[1], sys.argv[2]
BATCHES, MORE = 60, 0.01


class Slow(Callback):
    """Takes long after each batch."""

    def batch_end(self, state, logger):
        time.sleep(MORE)


class SlowSaver(Slow):
    """A saver that stalls."""

    time_bucket = "checkpoint"


class Blocked(InMemory):
    """A destination that blocks."""

    def log_metrics(self, metrics, step=None):
        time.sleep(MORE)


class Garbage:
    """Takes a millisecond to be collected."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(MORE / 10)


def slow(name):
    """Takes long if this is the fault."""
    if name == FAULT:
        time.sleep(MORE)


def ahead():
    """A clock that jumps an hour ahead once the run has begun, like an old session's clock."""
    return time.perf_counter_ns() + hour[0]


def busy(seconds):
    """Works for that long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def train(run):
    """Trains the remaining batches."""
    for batch in range(int(run.state.timestamp.batch), BATCHES):
        slow("data")
        if FAULT == "held":
            # Like a page fault in a mapped file, this holds the interpreter's lock.
            ctypes.PyDLL(None).usleep(600_000 if batch == BATCHES // 2 else 1)
        run.batch_start()
        time.sleep(0.002)
        slow("batch")
        run.run_event(Event.BEFORE_FORWARD)
        busy(0.004) if FAULT == "stopped-late" else time.sleep(0.004)
        slow("forward")
        run.run_event(Event.AFTER_FORWARD)
        run.run_event(Event.BEFORE_BACKWARD)
        slow("backward")
        run.run_event(Event.AFTER_BACKWARD)
        run.run_event(Event.AFTER_TRAIN_BATCH)
        slow("optimizer")
        run.log_metrics({"loss": 1.0})
        run.batch_end()
        if FAULT == "garbage":
            [Garbage() for _ in range(10)]
            gc.collect()
        if batch == BATCHES // 2:
            if FAULT == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if FAULT.startswith("stopped"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if FAULT == "killed-in-span":
                with run.span("tokenize"):
                    time.sleep(1.3)
                    os.kill(os.getpid(), signal.SIGKILL)
            run.eval_start()
            time.sleep(0.65 if FAULT == "evaluation" else 0.05)
            run.eval_end()


loggers = [RunDirectory(FOLDER, if_exists="resume"), *([Blocked()] if FAULT == "logging" else [])]
hour = [0]
callbacks = [TimeLedger(clock=ahead), *([Slow()] if FAULT == "callbacks" else [])]
callbacks += [SlowSaver()] if FAULT == "checkpoint" else []
while FAULT == "stands-by" and not Path(FOLDER, "go").exists():
    time.sleep(0.01)
with Run(loggers, callbacks, "mine") as run:
    hour[0] = 3600 * 10**9 if FAULT == "stopped-late" else 0
    if FAULT == "start":
        time.sleep(0.6)
    train(run)
print(time.time())
