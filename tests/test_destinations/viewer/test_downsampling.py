"""Downsampling keeps the shape of a curve: no spike is lost, and no value is made up."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from destinations.viewer.downsampling import downsample, window


@given(
    arrays(np.float64, st.integers(0, 300), elements=st.floats(allow_nan=True, allow_infinity=True)),
    st.integers(1, 60),
)
def test_each_finite_value_is_between_low_and_high_of_its_point(values, points):
    """Both are values of that point, and the mean is between them."""
    curve = downsample(np.arange(len(values)), values, points)

    assert len(curve.x) <= points or curve.merged == 1
    if curve.low is None:
        np.testing.assert_array_equal(curve.y, np.where(np.isinf(values), np.nan, values))
        return
    for place, start in enumerate(curve.x):
        part = values[start : start + curve.merged]
        finite = part[np.isfinite(part)]
        if len(finite):
            assert (curve.low[place], curve.high[place]) == (finite.min(), finite.max())
            assert curve.low[place] <= curve.y[place] <= curve.high[place]
        else:
            assert np.isnan([curve.low[place], curve.y[place], curve.high[place]]).all()


@given(arrays(np.float64, st.integers(0, 3000), elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_non_finite_values_are_listed(values):
    """The first thousand of each kind are listed."""
    curve = downsample(np.arange(len(values)), values, 50)

    assert curve.nan.tolist() == np.flatnonzero(np.isnan(values))[:1000].tolist()
    assert curve.inf.tolist() == np.flatnonzero(np.isinf(values))[:1000].tolist()


def test_the_mean_is_exact():
    """It covers the finite values."""
    curve = downsample(np.arange(6), np.array([1.0, 2.0, 3.0, np.nan, 5.0, np.inf]), 2)

    assert (curve.merged, curve.x.tolist(), curve.y.tolist()) == (3, [0, 3], [2.0, 5.0])


def test_a_part_has_a_neighbour_on_each_side():
    """Lines therefore reach the edge, even if no value is inside."""
    x = np.arange(10)

    assert (window(x, 3, 5)[0].tolist(), window(x, 3, 5)[1]) == ([2, 3, 4, 5, 6], 3)
    assert window(x, None, 1)[0].tolist() == [0, 1, 2]
    assert window(x, 8.5, None)[0].tolist() == [8, 9]
    assert (window(x, 3.2, 3.8)[0].tolist(), window(x, 3.2, 3.8)[1]) == ([3, 4], 0)
    assert window(x, 20, 30)[0].tolist() == [9]
    assert window(x, None, -5)[0].tolist() == [0]
    assert window(np.arange(0), 1, 2)[0].tolist() == []
