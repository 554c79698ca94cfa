"""Tests the arithmetic of the benchmarks, without reading a clock."""

import pytest

from tests.benchmarks.timing import Row, Sample, best_microseconds, print_table, sample_microseconds


class Clock:
    """Returns the next of these times at each call."""

    def __init__(self, times):
        self.times = iter(times)

    def __call__(self):
        return next(self.times)


def test_the_best_repeat_counts():
    """Of three repeats of ten executions that took 4, 1 and 3 seconds, one execution took 0.1 s."""
    executed = []

    best = best_microseconds(
        "executed.append(1)",
        {"executed": executed},
        number=10,
        repeats=3,
        timer=Clock([0, 4, 10, 11, 20, 23]),
    )

    assert best == pytest.approx(100_000)
    assert len(executed) == 30


def test_single_calls_give_percentiles():
    """A hundred calls take 1 to 100 µs, by a clock in nanoseconds."""
    times = [time for call in range(1, 101) for time in (call * 1_000_000, call * 1_000_000 + call * 1000)]

    sample = sample_microseconds(lambda: None, count=100, timer=Clock(times))

    assert sample == Sample(p50=50.5, p99=pytest.approx(99.01), mean=50.5, maximum=100)


@pytest.mark.parametrize(
    ("value", "budget", "kept"), [(1.0, 1.0, True), (1.1, 1.0, False), (9.0, None, True), (None, 1.0, False)]
)
def test_a_budget_is_kept_up_to_its_figure(value, budget, kept):
    """A row without a budget keeps it; a row without a figure doesn't."""
    assert Row("x", value, budget).is_within_budget is kept


def test_the_table_marks_figures_over_budget(capsys):
    """Columns are aligned."""
    print_table(
        "events", [Row("short", 0.1234, 0.4, 12.0), Row("a longer name", 2.0, 1.0, unit="s")], peer="Composer"
    )

    assert capsys.readouterr().out.splitlines() == [
        "",
        "events",
        "                   measured        budget      Composer",
        "short              0.123 µs        0.4 µs         12 µs",
        "a longer name           2 s           1 s             -  OVER",
    ]
