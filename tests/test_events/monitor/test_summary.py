"""What samples amount to."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from events import Aggregation
from events.monitor.stat import RESERVOIR_SAMPLES, Summary

EVERYTHING = tuple(Aggregation)
PERCENTILES = {Aggregation.P50: 50, Aggregation.P90: 90, Aggregation.P95: 95, Aggregation.P99: 99}


def summary_of(*chunks, aggregations=EVERYTHING):
    """Returns what samples, folded in chunk by chunk, amount to."""
    summary = Summary(aggregations)
    for chunk in chunks:
        summary.fold(list(chunk))
    return summary.values(aggregations)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), min_size=1, max_size=8))
def test_percentiles_equal_numpys(chunks):
    """The chunks do not matter."""
    samples = np.concatenate([np.array(chunk) for chunk in chunks])

    values = summary_of(*chunks)

    assert values[Aggregation.VALUE] == samples[-1]
    assert values[Aggregation.COUNT] == len(samples)
    assert (values[Aggregation.MIN], values[Aggregation.MAX]) == (samples.min(), samples.max())
    scale = max(abs(samples).max(), 1e-300)
    assert values[Aggregation.SUM] == pytest.approx(samples.sum(), rel=1e-9, abs=1e-9 * scale)
    assert values[Aggregation.MEAN] == pytest.approx(samples.mean(), rel=1e-9, abs=1e-9 * scale)
    # Squares of less than 1e-153 are below the least float that has all its digits.
    assert values[Aggregation.STD] == pytest.approx(samples.std(), rel=1e-6, abs=1e-7 * scale + 1e-153)
    for aggregation, percent in PERCENTILES.items():
        # Negative and positive samples may cancel, which leaves no exact digit.
        expected = np.percentile(samples, percent)
        assert values[aggregation] == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale)


def test_the_deviation_of_large_numbers_does_not_cancel():
    """A spread of one around a billion is one."""
    values = summary_of([1e9, 1e9 + 2], [1e9, 1e9 + 2], aggregations=[Aggregation.STD])

    assert values == {Aggregation.STD: 1.0}


def test_a_single_sample_is_all_of_them():
    """Its deviation is zero."""
    values = summary_of([3.5])

    assert values == {
        **dict.fromkeys(EVERYTHING, 3.5),
        Aggregation.COUNT: 1,
        Aggregation.STD: 0.0,
    }


def test_nothing_is_zero():
    """The first sample has not come yet."""
    assert summary_of() == dict.fromkeys(EVERYTHING, 0)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("is_in_chunks", [False, True])
def test_a_nan_shows_wherever_it_stood(place, is_in_chunks):
    """Wherever it is, all aggregates are NaN but the count, and the value unless it is the last sample."""
    samples = [1.0, 2.0, 4.0]
    samples[place] = math.nan

    values = summary_of(*([sample] for sample in samples)) if is_in_chunks else summary_of(samples)

    assert values[Aggregation.COUNT] == 3
    assert math.isnan(values[Aggregation.VALUE]) == (place == 2)
    others = set(EVERYTHING) - {Aggregation.COUNT, Aggregation.VALUE}
    assert {aggregation for aggregation in others if not math.isnan(values[aggregation])} == set()


def test_infinities_have_extremes_and_percentiles():
    """Opposite ones have no sum, but they are no NaN among the samples."""
    values = summary_of([math.inf, -math.inf, 1.0])

    assert (values[Aggregation.MIN], values[Aggregation.MAX], values[Aggregation.P50]) == (
        -math.inf,
        math.inf,
        1.0,
    )
    assert math.isnan(values[Aggregation.SUM])


def test_sums_beyond_the_largest_float_are_infinite():
    """They raise no error."""
    assert summary_of([1.7e308, 1.7e308], aggregations=[Aggregation.SUM]) == {Aggregation.SUM: math.inf}


def test_memory_is_bounded_and_percentiles_stay_close():
    """Of a million samples ten thousand are kept; ranks are off by less than two percent."""
    summary = Summary(EVERYTHING)
    generator = np.random.default_rng(3)
    for _ in range(250):
        summary.fold(generator.random(4000).tolist())

    values = summary.values(EVERYTHING)

    assert values[Aggregation.COUNT] == 1_000_000
    assert len(summary._reservoir) == RESERVOIR_SAMPLES
    for aggregation, percent in PERCENTILES.items():
        assert values[aggregation] == pytest.approx(percent / 100, abs=0.02)


def test_the_reservoir_draws_from_all_parts_alike():
    """The early and the late tenth of a rising series have their share of the sample."""
    summary = Summary([Aggregation.P50])
    for start in range(0, 200_000, 4000):
        summary.fold([float(sample) for sample in range(start, start + 4000)])

    tenths = np.histogram(summary._reservoir, bins=10, range=(0, 200_000))[0] / RESERVOIR_SAMPLES

    assert tenths == pytest.approx(np.full(10, 0.1), abs=0.02)


def test_the_random_numbers_of_training_do_not_change():
    """Python's generator gives the same numbers with and without percentiles."""
    import random

    random.seed(5)
    expected = random.random()
    random.seed(5)

    summary_of([1.0] * 50_000, aggregations=[Aggregation.P99])

    assert random.random() == expected
