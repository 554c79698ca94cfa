r"""Decimal numbers as floats, exactly, in a third of the time that numpy or a call of `float` for each would take.

Numpy reads whole numbers fast, and floats slowly: strtod(3) works with integers of any length where a number has more than 15
digits, as most floats in their shortest form have. So the point is taken out, "0.125" becomes 125 / 10**3, and the quotient is
worked out for all cells at once in twice the precision of a float. Where that does not settle how the last bit is to be rounded,
or a cell is no such number at all, the cell is left to whoever asks.
"""

from typing import Any

import numpy as np

__all__ = ["PLAIN_LETTERS", "read_decimals"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]
_Integers = np.ndarray[Any, np.dtype[np.int64]]

PLAIN_LETTERS = b"0123456789-.e"
_COMMA, _MINUS, _POINT, _E, _ZERO = b",-.e0"
# Numpy gives the greatest integer for one that 64 bits do not hold.
_LIMIT = 9_000_000_000_000_000_000
_MOST_PLACES = 60
# T. J. Dekker, A floating-point technique for extending the available precision (1971): this factor cuts 53 bits into halves
# whose products are exact.
_CUT = float((1 << 27) + 1)


def _halves(values: Floats) -> tuple[Floats, Floats]:
    scaled = values * _CUT
    high = scaled - (scaled - values)
    return high, values - high


# A power of ten, and what is missing to it: nothing up to 10**22, a float thereafter.
_POWERS = np.array([float(10**places) for places in range(_MOST_PLACES + 1)])
_POWERS_REST = np.array([float(10**places - int(power)) for places, power in enumerate(_POWERS)])
_POWERS_HIGH, _POWERS_LOW = _halves(_POWERS)


def read_decimals(text: bytes) -> tuple[Floats, _Bools] | None:
    """Returns the numbers of cells, and which of them are certain; None where not all cells look like decimal numbers.

    Args:
        text: the cells, each with a comma behind it; of no other letters than `PLAIN_LETTERS`.
    """
    found = _integers_and_places(text)
    if found is None:
        return None
    integers, places = found
    is_sure = (integers < _LIMIT) & (integers > -_LIMIT)
    if b"-" in text:  # "-0.0" is another number than "0.0", but no other integer.
        is_sure &= integers != 0
    if not places.any():
        return integers.astype(np.float64), is_sure
    is_sure &= (places >= 0) & (places <= _MOST_PLACES)
    if not is_sure.all():
        integers, places = np.where(is_sure, integers, 0), np.where(is_sure, places, 0)
    values, is_rounded = _quotients(integers, places)
    return values, is_sure & is_rounded


def _integers_and_places(text: bytes) -> tuple[_Integers, _Integers] | None:
    """Returns the digits of each cell as an integer, and by which power of ten it is to be divided."""
    digits = text.replace(b".", b"").replace(b"e", b",")
    is_signed = b"-" in text
    # Numpy goes no further than to a cell without digits, and takes "1-2" for two numbers.
    if is_signed and (
        b"-," in digits or text.count(b"-") != text.count(b",-") + text.count(b"e-") + text.startswith(b"-")
    ):
        return None
    letters = np.frombuffer(text, np.uint8)
    marks = np.flatnonzero(letters - np.uint8(_ZERO) > 9)  # noqa: PLR2004  # what sorts before "0" is a large one now
    if is_signed:
        marks = marks[letters[marks] != _MINUS]
    # As if a cell had ended before the first.
    kinds = np.concatenate([[_COMMA], letters[marks]])
    marks = np.concatenate([[-1], marks])
    ends = np.flatnonzero(kinds != _POINT)
    if (np.diff(ends) > 2).any():  # noqa: PLR2004  # two points
        return None
    ends = ends[1:]
    places = marks[ends] - marks[ends - 1] - 1
    if not places.all():  # A number without digits, or none behind its point.
        return None
    places *= kinds[ends - 1] == _POINT
    integers: _Integers = np.fromstring(digits, np.int64, sep=",")
    return _without_exponents(integers, places, kinds[ends]) if b"e" in text else (integers, places)


def _without_exponents(
    integers: _Integers, places: _Integers, ends: Any
) -> tuple[_Integers, _Integers] | None:
    """Takes out of the integers those that are exponents, and counts them among the places of the integer before."""
    is_before_exponent = ends == _E
    are_exponents = np.concatenate([[False], is_before_exponent[:-1]])
    if (are_exponents & (is_before_exponent | (places != 0))).any():
        return None
    are_numbers = ~are_exponents
    places = places[are_numbers]
    places[is_before_exponent[are_numbers]] -= integers[are_exponents]
    return integers[are_numbers], places


def _quotients(integers: _Integers, places: _Integers) -> tuple[Floats, _Bools]:
    """Returns integers divided by 10**places, and which of these are certainly the nearest floats."""
    high = integers.astype(np.float64)
    low = (integers - high.astype(np.int64)).astype(np.float64)
    powers, powers_high, powers_low = _POWERS[places], _POWERS_HIGH[places], _POWERS_LOW[places]
    quotients = high / powers
    first, second = _halves(quotients)
    products = quotients * powers
    errors = (
        (first * powers_high - products) + first * powers_low + second * powers_high
    ) + second * powers_low
    # The first two differences are exact: what the product of quotient and power, as a float, leaves over.
    corrections = ((high - products) - errors + (low - quotients * _POWERS_REST[places])) / powers
    values = quotients + corrections
    rests = (quotients - values) + corrections
    # A. Ziv, Fast evaluation of elementary mathematical functions with correctly rounded last bit (1991): where a rest that is
    # larger by more than its error does not change the last bit, the true one does not either.
    return values, values + rests * (1 + 2.0**-20) == values
