"""Histograms that are given as counts and edges."""

import math

import numpy as np
import pytest

from destinations import InMemory
from destinations.media import histogram_record
from events import BinnedValues, RecordError, Run


def test_counts_and_edges_are_the_histogram():
    """They are passed on as they are; the argument `bins` is ignored."""
    memory = InMemory()

    with Run(memory, run_name="mine") as run:
        run.log_histogram(BinnedValues([3, 0, 5], [0.0, 0.5, 1.0, 2.0]), "scores")

    [logged] = memory.records
    record = histogram_record(logged.value["values"], logged.value["bins"])
    assert record == {
        "count": 8,
        "non_finite": 0,
        "counts": [3, 0, 5],
        "edges": [0.0, 0.5, 1.0, 2.0],
        "min": 0.0,
        "max": 2.0,
        "mean": pytest.approx((3 * 0.25 + 5 * 1.5) / 8),
        "std": pytest.approx(math.sqrt((3 * (0.25 - 1.03125) ** 2 + 5 * (1.5 - 1.03125) ** 2) / 8)),
        "sum": pytest.approx(8.25),
    }


def test_a_record_of_values_makes_the_same_record_again():
    """Values read back from a run can be logged again, with their moments."""
    values = np.array([0.1, 0.2, 0.9, np.nan])
    record = histogram_record(values, bins=4)

    again = BinnedValues(
        **{
            key: record[key]
            for key in ("counts", "edges", "count", "non_finite", "min", "max", "mean", "std")
        }
    ).record()

    assert again == {**record, "sum": pytest.approx(record["sum"])}


def test_other_destinations_see_an_array():
    """Its values are the middles of the bins, in proportion, at most ten thousand."""
    few = np.asarray(BinnedValues([1, 2], [0.0, 1.0, 3.0]))
    many = np.asarray(BinnedValues([1e9, 3e9], [0.0, 1.0, 3.0]))

    assert few.tolist() == [0.5, 2.0, 2.0]
    assert (many.size, float(many.mean())) == (10_000, 0.25 * 0.5 + 0.75 * 2.0)


@pytest.mark.parametrize("std", [2.0, 0.0])
def test_a_normal_distribution_has_its_moments(std):
    """Mean and standard deviation are those given; the bins are symmetric around the mean."""
    record = BinnedValues.normal(1.0, std).record()

    assert (record["mean"], record["std"]) == (1.0, std)
    assert record["counts"] == pytest.approx(record["counts"][::-1])
    assert record["edges"][32] == 1.0
    assert sum(record["counts"]) == pytest.approx(1000, rel=1e-3)


@pytest.mark.parametrize(
    ("mean", "std", "reach"),
    [(1.0, 2.0, 8.0), (0.0, 0.0, 4e-6), (1.0, 0.0, 4e-6), (-1e12, 0.0, 4e6), (1e-12, 0.0, 4e-6)],
)
def test_a_normal_distribution_reaches_four_standard_deviations_to_both_sides(mean, std, reach):
    """One without a width is drawn as narrow as its mean can be resolved."""
    record = BinnedValues.normal(mean, std).record()

    assert (record["min"], record["max"]) == (record["edges"][0], record["edges"][-1])
    assert record["min"] == pytest.approx(mean - reach, rel=1e-12)
    assert record["max"] == pytest.approx(mean + reach, rel=1e-12)
    assert len(record["counts"]) == 64
    assert sum(record["counts"][24:40]) == pytest.approx(682.689, abs=1e-3)  # Within one.


def test_empty_bins_at_the_ends_are_outside_of_the_values():
    """Minimum and maximum default to the edges of the bins with values."""
    counts, edges = [0, 2, 1, 1, 0, 0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]

    guessed = BinnedValues(counts, edges).record()
    known = BinnedValues(counts, edges, min=1.5, max=3.5).record()

    assert (guessed["min"], guessed["max"]) == (1.0, 4.0)
    assert (known["min"], known["max"]) == (1.5, 3.5)
    assert repr(BinnedValues(counts, edges)) == "BinnedValues(6 bins from 0 to 6)"


def test_no_values_at_all_make_an_empty_record():
    """The same holds if no value is finite."""
    record = BinnedValues([0, 0], [0.0, 1.0, 2.0], non_finite=3).record()

    assert record == histogram_record(np.full(3, np.nan))


@pytest.mark.parametrize(
    ("counts", "edges", "complaint"),
    [
        ([1], [0.0], "1 counts and 1 edges"),
        ([], [0.0], "0 counts and 1 edges"),
        ([1, 1], [0.0, 1.0, 1.0], "increasing edges"),
        ([1], [0.0, math.inf], "increasing edges"),
        ([1], [math.nan, 1.0], "increasing edges"),
        ([-1], [0.0, 1.0], "counts of 0 or more"),
        ([math.nan], [0.0, 1.0], "counts of 0 or more"),
        ([math.inf], [0.0, 1.0], "counts of 0 or more"),
    ],
)
def test_invalid_histograms_are_refused(counts, edges, complaint):
    """The call raises and says what is wrong."""
    with pytest.raises(RecordError, match=complaint):
        BinnedValues(counts, edges)


@pytest.mark.parametrize(("mean", "std"), [(math.nan, 1.0), (0.0, -1.0), (0.0, math.inf)])
def test_invalid_distributions_are_refused(mean, std):
    """A standard deviation is 0 or more."""
    with pytest.raises(RecordError, match="finite mean and std"):
        BinnedValues.normal(mean, std)
