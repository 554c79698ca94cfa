"""Decimal numbers as floats: every bit of each that is said to be certain."""

import random
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from destinations.runs.content.series import read_decimals


def decimals_of(cells):
    """Reads cells; a warning of numpy is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_decimals("".join(f"{cell}," for cell in cells).encode())


def assert_certain_ones_are_exact(cells):
    """Compares with Python's own reading, bit by bit; returns which are certain."""
    values, is_sure = decimals_of(cells)
    wished = np.array([float(cell) for cell in cells])
    assert values[is_sure].tobytes() == wished[is_sure].tobytes()
    return is_sure


SIGNS = st.sampled_from(["", "-"])
DIGITS = st.text("0123456789", min_size=1, max_size=26)
EXPONENTS = (
    st.just("") | st.integers(-90, 20).map("e{}".format) | st.sampled_from(["e-05", "e-999", f"e{10**20}"])
)
NUMBERS = st.builds("{}{}{}".format, SIGNS, DIGITS, EXPONENTS) | st.builds(
    "{}{}.{}{}".format, SIGNS, st.text("0123456789", max_size=20), DIGITS, EXPONENTS
)


@settings(max_examples=300, deadline=None)
@given(st.lists(NUMBERS, max_size=30))
def test_certain_numbers_are_the_nearest_floats(cells):
    """Whatever digits there are, what is said to be certain has every bit that `float` gives."""
    assert_certain_ones_are_exact(cells)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(1e-40, 1e15) | st.floats(-1e15, -1e-40) | st.integers(1, 2**62), max_size=30))
def test_numbers_in_their_shortest_form_are_nearly_all_certain(numbers):
    """Floats as Python writes them, and integers, come back, and few are left to be read one by one."""
    is_sure = assert_certain_ones_are_exact(list(map(repr, numbers)))

    assert np.count_nonzero(~is_sure) <= 1


def test_numbers_next_to_the_middle_of_two_floats_are_exact_or_uncertain():
    """A number in the middle between two floats, or a little beside, is never rounded to the wrong side."""
    source = random.Random(0)
    middles = [(2 * source.getrandbits(53) + 1) << source.randrange(8) for _ in range(5000)]
    halves = [f"{2**52 + source.getrandbits(51)}.5" for _ in range(5000)]
    cells = [str(middle + beside) for middle in middles for beside in (-1, 0, 1)]
    cells += [f"{half[:-1]}{digits}" for half in halves for digits in ("49", "5", "51")]

    is_sure = assert_certain_ones_are_exact(cells)

    assert np.count_nonzero(is_sure) > 0.6 * len(cells)


def test_a_negative_zero_is_uncertain():
    """Whether it is the integer, which has no sign, or the float, which has, is for others to say."""
    values, is_sure = decimals_of(["-0", "-0.0", "-1", "5.25"])

    assert is_sure.tolist() == [False, False, True, True]
    assert values[is_sure].tolist() == [-1.0, 5.25]


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "-",
        ".",
        "-.",
        "1.2.3",
        "1-2",
        "--1",
        "1-",
        ".-1",
        "-1.-5",
        "5.",
        "1e",
        "e5",
        "1e-",
        "1e5e5",
        "1e5.5",
        "1.e5",
        "-e5",
    ],
)
def test_what_is_no_plain_number_is_refused(cell):
    """Cells without digits, with signs inside, or with several points, are for others to read."""
    assert decimals_of(["1.5", cell, "2"]) is None
    assert decimals_of([cell]) is None
    assert decimals_of(["-1", cell]) is None


def test_no_cells_are_no_numbers():
    """Nothing is read of nothing."""
    values, is_sure = decimals_of([])

    assert (len(values), len(is_sure)) == (0, 0)
