"""Metrics that no CSV can hold, odd clocks, and names that contain the step: nothing else is lost."""

import logging
import math
import time

import pytest

from destinations.run_directory import read_rows, read_series

UNWRITABLE = {
    "a long name": ({"n" * 200_000: 1.0}, "at most 16384 are allowed"),
    "a name that is long as it is written": ({"\ud800" * 10_000: 1.0}, "at most 16384 are allowed"),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_an_unwritable_metric_is_dropped_alone(drive, tmp_path, caplog, kind):
    """Other metrics of the call, and all later rows, are in the CSV.

    One warning names the dropped metric, and it is counted.
    """
    caplog.set_level(logging.WARNING)
    bad, said = UNWRITABLE[kind]
    run = drive(flush_seconds=1000).fit()

    for step in range(50):
        run.log({"a": float(step), **(bad if step % 10 == 5 else {})}, step)
    refused = run.destination._writer.journal.counts.refused
    run.close()

    assert refused == 5
    assert read_series(tmp_path / "run", "a") == [(step, float(step)) for step in range(50)]
    assert [said in one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == [True]
    assert not (tmp_path / "run" / "journal").exists()


BEYOND = {"2**63": 2**63, "10**30": 10**30, "10**5000": 10**5000, "a megabyte": -(1 << (8 << 20))}


@pytest.mark.parametrize("kind", BEYOND)
@pytest.mark.parametrize("first", [0, 5])
def test_an_integer_beyond_64_bits_is_a_float(drive, tmp_path, caplog, kind, first):
    """Readers see the same number before and after draining; one warning reports it."""
    value = BEYOND[kind]
    expected = float(value) if abs(value) < 10**300 else math.inf if value > 0 else -math.inf
    run = drive(flush_seconds=1000).fit()

    for step in range(50):
        run.log({"a": float(step), "large": value if step % 10 == first else 1}, step)
    before = read_series(tmp_path / "run", "large")
    run.close()

    assert before == read_series(tmp_path / "run", "large")
    assert [value for step, value in before if step % 10 == first] == [expected] * 5
    assert all(type(value) is (float if step % 10 == first else int) for step, value in before)
    if first == 0:
        assert caplog.text.count("beyond 64 bits") == 1


def test_a_step_beyond_64_bits_is_left_out(drive, tmp_path, caplog):
    """If someone calls the destination with it, its row has no step; the rows around it are unchanged."""
    run = drive(flush_seconds=1000).fit()

    run.log({"a": 1.0}, 0)
    run.destination.log_metrics({"a": 2.0}, 10**5000)
    run.log({"a": 3.0}, 1)
    before = read_series(tmp_path / "run", "a")
    run.close()

    assert before == read_series(tmp_path / "run", "a") == [(0, 1.0), (None, 2.0), (1, 3.0)]
    assert "step is an integer beyond 64 bits" in caplog.text


def test_a_clock_of_whole_seconds_loses_no_row(drive, tmp_path):
    """The clock's value is converted to a float, which a journal row needs."""
    run = drive(flush_seconds=1000, clock=lambda: int(time.time())).fit()

    for step in range(3000):
        run.log({"a": float(step), "b": step}, step)
    seen = read_series(tmp_path / "run", "a")
    run.close()

    expected = [(step, float(step)) for step in range(3000)]
    assert seen == read_series(tmp_path / "run", "a") == expected
    assert all(type(one.time) is float for one in read_rows(tmp_path / "run"))


def test_a_new_name_at_each_step_is_kept_and_warned_of(drive, tmp_path, caplog, monkeypatch):
    """All 1,200 rows that each add a name are kept, and the files don't grow quadratically."""
    caplog.set_level(logging.WARNING)
    # Time allows more rewrites: a slow machine may write the file more often.
    monkeypatch.setattr("destinations.run_directory.drain._REWRITE_BYTES_PER_SECOND", 0)
    run = drive(flush_seconds=1000).fit()

    for step in range(1200):
        run.log({"a": 1 / (step + 1), f"loss/{step}": 1 / 3}, step)
    run.close()

    paths = [tmp_path / "run" / "metrics.csv", *(tmp_path / "run" / "parts").rglob("*.csv")]
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    # A row has about 75 bytes.
    assert sum(path.stat().st_size for path in paths) < 1200 * 2 * 75
    assert "500 rows have added new metrics" in warnings[0]
    assert len(warnings) == 1
    assert [row.metrics for row in read_rows(tmp_path / "run")] == [
        {"a": 1 / (step + 1), f"loss/{step}": 1 / 3} for step in range(1200)
    ]
