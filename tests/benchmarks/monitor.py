"""Measures adding a sample: `Stat.add` here, beside `torch.monitor.Stat.add`.

A call is the fastest of many short runs. Most of these fold no samples, as do all but one add in four thousand.
"All in" is the mean over a window of a million samples, with folding and closing.
"""

import sys
import threading
import time
from datetime import timedelta

import torch.monitor

from events import Aggregation, Stat

from .timing import Row, best_microseconds, print_table

__all__ = ["main"]

BUDGET_NANOSECONDS = 100.0
WINDOW_SAMPLES = 1_000_000
WINDOWS = 3
THREADS = 4

TWO = ("MEAN", "COUNT")
FIVE = ("MEAN", "COUNT", "SUM", "MAX", "MIN")
HOUR = timedelta(hours=1)


def _ours(names):
    return Stat("x", [Aggregation[name] for name in names], HOUR, log=lambda event: None)


def _torchs(names):
    return torch.monitor.Stat("x", [getattr(torch.monitor.Aggregation, name) for name in names], HOUR)


def _call_nanoseconds(make, statement="stat.add(1.5)"):
    names = {"stat": make(FIVE), "tensor": torch.tensor(1.5)}
    return 1e3 * best_microseconds(statement, names, number=2000, repeats=400)


def _window_nanoseconds(make, names):
    """Returns the mean of an add over a window, its closing included: the best of several windows."""

    def window():
        began = time.perf_counter()
        stat = make(names)
        for _ in range(WINDOW_SAMPLES):
            stat.add(1.5)
        if isinstance(stat, Stat):
            stat.flush()
        del stat
        return (time.perf_counter() - began) / WINDOW_SAMPLES * 1e9

    return min(window() for _ in range(WINDOWS))


def _threads_nanoseconds(make):
    """Returns the mean of an add where several threads add at once."""
    stat = make(FIVE)

    def work():
        for _ in range(WINDOW_SAMPLES // THREADS):
            stat.add(1.5)

    workers = [threading.Thread(target=work) for _ in range(THREADS)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return (time.perf_counter() - began) / WINDOW_SAMPLES * 1e9


def main():
    """Prints the table; returns whether the budget was kept."""
    tensor = "stat.add(tensor)"
    both = (_ours, _torchs)
    measured = {
        "Stat.add, a float": [_call_nanoseconds(make) for make in both],
        "Stat.add, a 0-d CPU tensor": [_call_nanoseconds(make, tensor) for make in both],
        "all in, two aggregations": [_window_nanoseconds(make, TWO) for make in both],
        "all in, five aggregations": [_window_nanoseconds(make, FIVE) for make in both],
        "all in, all eleven": [_window_nanoseconds(_ours, Aggregation.__members__), None],
        f"all in, five aggregations, {THREADS} threads": [_threads_nanoseconds(make) for make in both],
    }
    budgets = {"Stat.add, a float": BUDGET_NANOSECONDS}
    rows = [
        Row(name, mine, budgets.get(name), theirs, unit="ns") for name, (mine, theirs) in measured.items()
    ]
    print_table("events.monitor", rows, peer="torch.monitor")
    return all(row.is_within_budget for row in rows)


if __name__ == "__main__":
    sys.exit(not main())
