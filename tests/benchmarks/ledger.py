"""Measures `TimeLedger`: an event, a batch of a loop, the files of a month, and a trace of four ranks."""

import io
import statistics
import tempfile
import time
from pathlib import Path

from destinations import RunDirectory
from destinations.runs.content.ledger import write_trace
from events import Event, Run, TimeLedger
from events.callbacks.time_files import TimeFiles

from .timing import Row, best_microseconds, print_table

__all__ = ["main"]

STEP_SECONDS = 0.001
BATCHES = 5000
TRACED, RANKS = 10_000, 4
MONTH_SECONDS = 30 * 86_400
EVENTS = (
    Event.BEFORE_DATALOADER,
    Event.AFTER_DATALOADER,
    Event.BEFORE_TRAIN_BATCH,
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.BEFORE_LOSS,
    Event.AFTER_LOSS,
    Event.BEFORE_BACKWARD,
    Event.AFTER_BACKWARD,
    Event.AFTER_TRAIN_BATCH,
)


def _event_microseconds(callbacks):
    with Run(None, callbacks, "benchmark") as run:
        return best_microseconds(
            "engine.run_event(event)", {"engine": run.engine, "event": Event.BEFORE_FORWARD}
        )


def _batch(run):
    for event in EVENTS:
        run.engine.run_event(event)
    run.log_metrics({"loss": 1.0})
    run.batch_end()


def _batch_microseconds(folder):
    """Returns what the events of a batch and a row of metrics take, without and with a ledger, in turns.

    Takes the best twentieth of the batches that are divided, and of the others, to leave out other load.
    """
    taken = {"plain": [], "whole": [], "divided": []}
    ledger = TimeLedger()
    with (
        Run(RunDirectory(folder / "plain"), [], "plain") as plain,
        Run(RunDirectory(folder / "charged"), [ledger], "charged") as charged,
    ):
        for number in range(2 * BATCHES):
            run = (plain, charged)[number % 2]
            begin = time.perf_counter()
            run.engine.run_event(Event.BATCH_START)
            kind = "plain" if run is plain else "divided" if ledger._is_divided else "whole"
            spent = time.perf_counter() - begin
            # The rest of a step.
            end = begin + STEP_SECONDS
            while time.perf_counter() < end:
                pass
            begin = time.perf_counter()
            _batch(run)
            taken[kind].append(spent + time.perf_counter() - begin)
    plain, whole, divided = (statistics.quantiles(found, n=20)[0] * 1e6 for found in taken.values())
    share = len(taken["divided"]) / BATCHES
    return plain, whole + (divided - whole) * share


def _tick_microseconds(folder):
    """Returns what a look of the ledger's thread takes, and one that writes a row, in processor time."""
    ledger = TimeLedger()
    with Run(None, ledger, "benchmark") as run:
        files = TimeFiles(ledger, folder, run.state)
        names = {"files": files, "ledger": ledger}
        options = {"number": 2000, "repeats": 5, "timer": time.thread_time}
        look = best_microseconds("ledger.snapshot(); files._look()", names, **options)
        return look, best_microseconds("files._write(*ledger.snapshot())", names, **options)


def _month_bytes(folder):
    """Returns the size of the rows of a month, computed from one day."""
    now = [0]
    ledger = TimeLedger(clock=lambda: now[0])
    with Run(None, ledger, "benchmark") as run:
        writer = TimeFiles(ledger, folder, run.state)
        sizes = []
        for day in (1, 2):
            while now[0] < day * 86_400 * 10**9:
                for bucket in range(1, 12):
                    now[0] += 5 * 10**9 + 123_457
                    ledger.switch(bucket)
                writer._write(*ledger.snapshot())
            sizes.append((folder / "rank-0.csv").stat().st_size)
    return sizes[0] + (sizes[1] - sizes[0]) * (MONTH_SECONDS // 86_400 - 1)


def _trace(folder):
    """Returns the size of a trace of four ranks in bytes, and of the spans of one."""
    now = [0]

    def clock():
        # Batches of 20 ms, which are all divided.
        now[0] += 20_000_000 // len(EVENTS)
        return now[0]

    with Run(RunDirectory(folder), TimeLedger(clock=clock), "benchmark") as run:
        for _ in range(TRACED):
            run.engine.run_event(Event.BATCH_START)
            _batch(run)
    spans = (folder / "time/spans-0.csv").read_bytes()
    for rank in range(1, RANKS):
        (folder / f"time/spans-{rank}.csv").write_bytes(spans)
    file = io.StringIO()
    count = write_trace(folder / "time", file, name="benchmark", uploads={})
    return len(file.getvalue()), len(spans), count


def main():
    """Prints the table; returns whether every budget was kept."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain, charged = _batch_microseconds(folder)
        alone, listens = _event_microseconds([]), _event_microseconds([TimeLedger()])
        (folder / "month").mkdir()
        look, write = _tick_microseconds(folder)
        trace, spans, count = _trace(folder / "trace")
        rows = [
            Row("an event, more than without", listens - alone, 1.0),
            Row("a batch of 12 events, more than without", charged - plain),
            Row("of a loop of 1 ms steps", (charged - plain) / 1e6 / STEP_SECONDS * 100, 0.1, unit="%"),
            Row("a look of its thread", look),
            Row("a row that it writes", write),
            # It looks four times a second, and writes once.
            Row("its thread, after some minutes", (4 * look + write) / 1e6 * 100, 0.1, unit="%"),
            Row("its thread, in the first seconds", (50 * write) / 1e6 * 100, unit="%"),
            Row("rows of a month", _month_bytes(folder / "month") / 2**20, 10.0, unit="MiB"),
            Row("spans of a rank, 10,000 batches", spans / 2**20, unit="MiB"),
            Row("a trace of 10,000 batches, 4 ranks", trace / 2**20, 50.0, unit="MiB"),
            Row("its events", count / TRACED / RANKS, unit="a batch"),
        ]
    print_table("ledger", rows, peer="none")
    return all(row.is_within_budget for row in rows)
