"""An aggregate equals what a plain loop over the values computes, however the rows are grouped."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from destinations.history.aggregate import Aggregate
from destinations.history.metric_summary import MetricSummary
from destinations.history.rows import MetricRow
from destinations.run_directory.blocks import block_of_rows
from destinations.run_directory.layout import strict_json

NAMES = ("a", "b", "c")
steps = st.one_of(st.none(), st.integers(-3, 3), st.just(2**63 - 1), st.just(-(2**63) + 1))
values = st.one_of(st.integers(-3, 3), st.sampled_from([0.25, math.nan, math.inf, -math.inf, 1e300]))
rows = st.lists(st.tuples(steps, st.dictionaries(st.sampled_from(NAMES), values)), max_size=30)


def expected(rows, name, *, by_step):
    """Returns the statistics of a metric, and the step of its last value."""
    there = [(step, float(row[name])) for step, row in rows if name in row]
    finite = [(value, step) for step, value in there if math.isfinite(value)]
    # If several are equal, the first counts.
    low = min(finite, key=lambda one: one[0], default=(None, None))
    high = max(finite, key=lambda one: one[0], default=(None, None))
    by_place = range(len(there))
    place = (
        max(by_place, key=lambda at: (-math.inf if there[at][0] is None else there[at][0], at))
        if by_step
        else -1
    )
    mean = sum(value for value, _ in finite) / len(finite) if finite else None
    last_step, last = there[place]
    return MetricSummary(
        last, low[0], high[0], low[1], high[1], len(there), len(there) - len(finite), mean
    ), last_step


def added_one_by_one(rows, found):
    """Adds each row as a tuple."""
    for step, row in rows:
        if row:
            found.add(tuple(row), [step], [tuple(row.values())])


def added_as_block(rows, found):
    """Adds all rows as a block, in which most values may be absent."""
    block_of_rows([MetricRow(step, 0, 0.0, row) for step, row in rows], NAMES).add_to(found)


def added_as_aggregate(rows, found):
    """Adds the aggregate of all rows."""
    other = Aggregate(by_step=found.by_step)
    added_as_block(rows, other)
    found.merge(other)


def added_through_json(rows, found):
    """Adds the aggregate of all rows in the form of `summary.json`."""
    other = Aggregate(by_step=found.by_step)
    added_as_block(rows, other)
    found.merge(Aggregate.from_json(json.loads(strict_json({"metrics": other.to_json()}))))


WAYS = [added_one_by_one, added_as_block, added_as_aggregate, added_through_json]


def check(found, rows, *, by_step):
    """Compares an aggregate with the loop."""
    summaries, records = found.summaries(), found.to_json()
    assert set(summaries) == {name for _, row in rows for name in row}
    for name, one in summaries.items():
        wished, last_step = expected(rows, name, by_step=by_step)
        assert one.mean == pytest.approx(wished.mean, rel=1e-12, abs=1e-9)
        fields = ("last", "min", "max", "min_step", "max_step", "count", "non_finite")
        np.testing.assert_equal(*([getattr(each, field) for field in fields] for each in (one, wished)))
        assert records[name]["last_step"] == last_step


@settings(deadline=None)
@given(st.lists(st.tuples(rows, st.sampled_from(WAYS)), max_size=5), st.booleans())
def test_an_aggregate_does_not_depend_on_the_grouping_of_rows(pieces, by_step):
    """Rows come one by one, in blocks with absent values, as other aggregates, and through `summary.json`."""
    found = Aggregate(by_step=by_step)

    for piece, add in pieces:
        add(piece, found)

    check(found, [row for piece, _ in pieces for row in piece], by_step=by_step)


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=5))
def test_entries_of_an_index_have_all_but_the_steps_of_last_values(pieces):
    """Several entries are added at once, some without a value; integers of 64 bits become floats."""
    pieces = [[(None if step and abs(step) > 9 else step, row) for step, row in piece] for piece in pieces]
    fields = []
    for piece in pieces:
        one = Aggregate()
        added_as_block(piece, one)
        fields.append(one.fields(NAMES))
    found = Aggregate()

    found.add_fields(NAMES, np.stack(fields, axis=1), np.full(len(pieces), np.nan))

    every = [row for piece in pieces for row in piece]
    for name, one in found.summaries().items():
        wished, _ = expected(every, name, by_step=False)
        assert one.mean == pytest.approx(wished.mean, rel=1e-12, abs=1e-9)
        np.testing.assert_equal(
            (one.last, one.min, one.min_step, one.max, one.max_step, one.count, one.non_finite),
            (
                *(wished.last, wished.min, wished.min_step, wished.max, wished.max_step),
                *(wished.count, wished.non_finite),
            ),
        )


def test_epoch_is_not_a_metric():
    """Only its last value is kept. A logged epoch replaces the run's own, even if later rows lack it."""
    found = Aggregate()

    found.add(("loss",), [0], [(1.0,)], 2)
    seen = [found.last_epoch]
    found.add(("epoch", "loss"), [1], [(7.5, 1.0)], 2)
    found.add(("loss",), [5], [(1.0,)], 2)
    seen.append(found.last_epoch)

    assert (seen, found.last_step) == ([2, 7.5], 5)
    assert list(found.summaries()) == ["loss"]


@pytest.mark.parametrize(
    "record",
    [{}, {"last": 1.0}, {"last": "x", "count": 1}, {"last": 1.0, "count": 1, "non_finite": 2}, {"count": 3}],
)
def test_damaged_statistics_are_refused(record):
    """They are computed from the rows instead."""
    with pytest.raises(ValueError, match="not statistics of a metric"):
        Aggregate.from_json({"metrics": {"loss": record}})
