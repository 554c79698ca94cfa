"""Tests how `make bench` keeps and compares figures."""

import json
from datetime import UTC, datetime

import pytest

from tests.benchmarks import __main__ as program
from tests.benchmarks import report
from tests.benchmarks.timing import Row, Table, print_table

TODAY = datetime(2026, 3, 14, tzinfo=UTC)


def figures(*ratios, name="a call"):
    """Returns a result with a round per figure; the peer took 10 µs in each."""
    rounds = [[Table("calls", "theirs", (Row(name, 10 * ratio, None, 10.0),))] for ratio in ratios]
    return report.collect(rounds, TODAY)


@pytest.mark.parametrize(
    ("last", "new", "is_worse"),
    [
        ((1.0, 1.0, 1.0), (1.2, 1.3, 1.25), True),
        ((1.0, 1.0, 1.0), (1.05, 1.3, 1.4), False),
        ((1.0, 1.5, 1.0), (1.2, 1.6, 1.3), False),
        ((1.0, 1.0, 1.0), (0.5, 0.5, 0.5), False),
        ((1.0,), (1.11,), True),
    ],
)
def test_a_ratio_is_worse_when_its_best_round_is_a_tenth_above_the_worst_before(last, new, is_worse):
    """Rounds that spread widely allow more; without a peer nothing is compared."""
    assert bool(report.worse(figures(*last), figures(*new))) is is_worse


def test_a_worse_ratio_is_reported_with_the_last_one():
    """The line also says when the last one was measured."""
    assert report.worse(figures(0.5), figures(0.8)) == [
        "calls: a call: 0.80 times the peer, 0.50 on 2026-03-14"
    ]


def test_figures_of_another_machine_or_row_are_not_compared():
    """Figures without a last time aren't compared either."""
    assert report.worse(None, figures(2.0)) == []
    assert report.worse(figures(1.0, name="another"), figures(2.0)) == []
    assert report.worse(figures(1.0) | {"machine": "a faster one"}, figures(2.0)) == []


def test_rows_with_the_same_name_raise():
    """Their figures would count as rounds of one row."""
    table = Table("calls", None, (Row("a call", 1.0), Row("a call", 2.0)))

    with pytest.raises(ValueError, match="different names"):
        report.collect([[table]], TODAY)


def test_the_table_has_medians_and_the_range_of_the_ratio():
    """Empty columns are left out."""
    text = report.markdown(figures(0.5, 0.25, 1.0))

    assert text.splitlines()[2:] == [
        "**calls**",
        "",
        "|  | here | theirs | ratio |",
        "|---|---|---|---|",
        "| a call | 5 µs | 10 µs | 0.5 (0.25 to 1) |",
    ]


def test_the_machine_is_described_in_plain_words(tmp_path):
    """It names processor, cores, Python and torch, or the architecture if the processor is unknown."""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Processor @ 2 GHz\nflags\t: fpu\n")

    assert report.machine(tmp_path / "cpuinfo").startswith("A Processor @ 2 GHz, ")
    assert ", Python 3." in report.machine(tmp_path / "missing")


def test_a_worse_run_fails_and_its_figures_are_kept(tmp_path, monkeypatch, capsys):
    """The second `make bench` takes three times as long as the first, beside the same peer."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(report, "share_of_others", lambda: 0.1)
    taken = iter([1.0, 1.0, 3.0, 3.0, 3.0, 3.0])
    run = lambda: print_table("calls", [Row("a call", next(taken), None, 2.0)])  # noqa: E731
    monkeypatch.setattr(program, "_benchmarks", lambda: {"slow": run})

    assert [program.main(["--keep", "--rounds", "2", "slow"]) for _ in range(3)] == [0, 1, 0]

    assert "WORSE THAN THE LAST TIME: calls: a call: 1.50 times the peer" in capsys.readouterr().out
    kept = json.loads((tmp_path / "results.json").read_text())["slow"]["tables"]["calls"]["rows"]["a call"]
    assert kept["here"] == [3.0, 3.0]


def test_a_busy_machine_stores_and_compares_nothing(tmp_path, monkeypatch, capsys):
    """Its figures would measure the other programs."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(report, "share_of_others", lambda: 0.9)
    run = lambda: print_table("calls", [Row("a call", 1.0, None, 2.0)])  # noqa: E731
    monkeypatch.setattr(program, "_benchmarks", lambda: {"slow": run})

    assert program.main(["--keep", "--rounds", "1", "slow"]) == 0

    assert "others took 90% of the processors" in capsys.readouterr().out
    assert not (tmp_path / "results.json").exists()
