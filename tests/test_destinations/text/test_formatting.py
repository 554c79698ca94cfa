"""Numbers as text."""

from destinations.text.formatting import plain, short


def test_an_integer_of_too_many_digits_is_shown_as_infinity():
    """Python refuses to print more than 4,300 digits."""
    assert short(10**5000) == "inf"
    assert plain({"a": [-(10**5000), 2**2000]}) == {"a": ["-Infinity", 2**2000]}
