"""What a measurement costs the code that is measured: `Stat.add` here, `torch.monitor.Stat.add` beside it.

`python -m tests.benchmarks.monitor`, or `python tests/benchmarks/monitor.py`. Nanoseconds of one call, the loop around it
taken off; "call" is the fastest of many short runs, "all in" the mean over windows of a million samples, folding and
closing included. Ratios within one run mean more than the figures.
"""

import statistics
import threading
import time
import timeit
from datetime import timedelta

import torch.monitor

from events import Aggregation, Stat

CALLS = 2000
REPEATS = 400
WINDOW_SAMPLES = 1_000_000
BUDGET_NANOSECONDS = 100.0

FIVE = ("MEAN", "COUNT", "SUM", "MAX", "MIN")
HOUR = timedelta(hours=1)


def ours(names):
    """Returns a Stat of ours."""
    return Stat("x", [Aggregation[name] for name in names], HOUR, log=lambda event: None)


def torchs(names):
    """Returns a Stat of torch."""
    return torch.monitor.Stat("x", [getattr(torch.monitor.Aggregation, name) for name in names], HOUR)


def nanoseconds_of_a_call(stat, statement="stat.add(1.5)"):
    """Returns the fastest and the median of short runs, the empty loop taken off."""
    names = {"stat": stat, "tensor": torch.tensor(1.5)}
    empty = min(timeit.repeat("pass", number=CALLS, repeat=REPEATS))
    runs = timeit.repeat(statement, globals=names, number=CALLS, repeat=REPEATS)
    return tuple((run - empty) / CALLS * 1e9 for run in (min(runs), statistics.median(runs)))


def nanoseconds_all_in(make, names):
    """Returns the mean of an add over a window of a million, its closing included."""
    began = time.perf_counter()
    stat = make(names)
    for _ in range(WINDOW_SAMPLES):
        stat.add(1.5)
    if hasattr(stat, "flush"):
        stat.flush()
    del stat
    return (time.perf_counter() - began) / WINDOW_SAMPLES * 1e9


def nanoseconds_in_threads(make, threads=4, samples=200_000):
    """Returns the mean of an add where several threads add at once."""
    stat = make(FIVE)

    def work():
        for _ in range(samples):
            stat.add(1.5)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return (time.perf_counter() - began) / (threads * samples) * 1e9


def main():
    """Prints the table."""
    everything = tuple(Aggregation.__members__)
    print(f"{'nanoseconds per add':<42}{'events':>10}{'torch':>10}{'ratio':>8}")

    def row(label, mine, theirs):
        print(f"{label:<42}{mine:>10.0f}{theirs:>10.0f}{mine / theirs:>8.2f}")

    fastest, median = nanoseconds_of_a_call(ours(FIVE))
    torch_fastest, torch_median = nanoseconds_of_a_call(torchs(FIVE))
    row("call, float, fastest", fastest, torch_fastest)
    row("call, float, median of runs", median, torch_median)
    row(
        "call, 0-d CPU tensor, fastest",
        nanoseconds_of_a_call(ours(FIVE), "stat.add(tensor)")[0],
        nanoseconds_of_a_call(torchs(FIVE), "stat.add(tensor)")[0],
    )
    row("all in, mean and count", *(nanoseconds_all_in(make, FIVE[:2]) for make in (ours, torchs)))
    row("all in, five aggregations", *(nanoseconds_all_in(make, FIVE) for make in (ours, torchs)))
    row("all in, four threads", *(nanoseconds_in_threads(make) for make in (ours, torchs)))
    print(
        f"{'all in, all eleven aggregations':<42}{nanoseconds_all_in(ours, everything):>10.0f}{'-':>10}{'-':>8}"
    )
    verdict = "met" if fastest <= BUDGET_NANOSECONDS else "MISSED"
    print(f"budget: a call in {BUDGET_NANOSECONDS:.0f} ns, {verdict} with {fastest:.0f} ns")


if __name__ == "__main__":
    main()
