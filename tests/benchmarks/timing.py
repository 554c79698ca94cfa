"""Times a statement, times calls one by one, and prints the tables of all benchmarks.

Figures belong to the machine that runs them. The best of several repeats is the cost of the code; percentiles are what
a training loop meets.
"""

import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

__all__ = ["PRINTED", "Row", "Sample", "Table", "best_microseconds", "print_table", "sample_microseconds"]

_PERCENT = 100


@attrs.frozen
class Sample:
    """Durations of single calls, in microseconds."""

    p50: float
    p99: float
    mean: float
    maximum: float


@attrs.frozen
class Row:
    """A line of the table.

    Attributes:
        name: what was measured.
        value: how much it took, in the unit; None where it could not be measured.
        budget: how much it may take, or None where nothing was promised.
        peer: how much another library takes for the same, or None.
        unit: the unit of all three.
    """

    name: str
    value: float | None
    budget: float | None = None
    peer: float | None = None
    unit: str = "µs"

    @property
    def is_within_budget(self) -> bool:
        """Whether the promise, if there is one, is kept."""
        return self.budget is None or (self.value is not None and self.value <= self.budget)


@attrs.frozen
class Table:
    """What `print_table` printed.

    Attributes:
        title: the title.
        peer: the library in the last column.
        rows: its lines.
    """

    title: str
    peer: str
    rows: tuple[Row, ...]


PRINTED: list[Table] = []
"""The tables that this process has printed."""


def best_microseconds(
    statement: str,
    names: Mapping[str, Any],
    *,
    number: int = 50_000,
    repeats: int = 9,
    timer: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the best time of one execution of a statement.

    A statement and not a function, so that a user's line is timed without a call around it.

    Args:
        statement: Python source.
        names: the names that it uses.
        number: executions in one repeat.
        repeats: the number of repeats; the best counts.
        timer: seconds.
    """
    timings = timeit.Timer(statement, globals=dict(names), timer=timer).repeat(repeats, number)
    return min(timings) / number * 1e6


def sample_microseconds(
    call: Callable[[], object], *, count: int = 10_000, timer: Callable[[], int] = time.perf_counter_ns
) -> Sample:
    """Returns the percentiles of single calls; the clock itself is in them, with some 0.05 µs.

    Args:
        call: what is timed.
        count: how often.
        timer: nanoseconds.
    """
    timings = []
    for _ in range(count):
        start = timer()
        call()
        timings.append((timer() - start) / 1e3)
    percentiles = statistics.quantiles(timings, n=_PERCENT, method="inclusive")
    return Sample(percentiles[49], percentiles[98], statistics.fmean(timings), max(timings))


def print_table(title: str, rows: Iterable[Row], peer: str = "peer") -> None:
    """Prints name, value, budget and peer in columns, and keeps them; a value over its budget is marked.

    Args:
        title: the title of the table.
        rows: its lines.
        peer: the library in the last column.
    """
    rows = list(rows)
    PRINTED.append(Table(title, peer, tuple(rows)))
    width = max(len(row.name) for row in rows)
    print(f"\n{title}\n{'':{width}}  {'measured':>12}  {'budget':>12}  {peer:>12}")
    for row in rows:
        cells = "  ".join(f"{_cell(value, row.unit):>12}" for value in (row.value, row.budget, row.peer))
        print(f"{row.name:{width}}  {cells}{'' if row.is_within_budget else '  OVER'}")


def _cell(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.3g} {unit}"
