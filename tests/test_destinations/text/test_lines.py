"""Lines of numbers, names and captured output, for any input."""

import json
import math

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from destinations.text.formatting import describe, exact, one_line, plain, short
from destinations.text.text_file import LineRecord, LineSplitter, json_line, text_lines

# A busy machine may be slow, for any example.
at_any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TEXTS = st.text(st.characters(codec=None), max_size=30)


def feed(pieces):
    """Returns the lines that a splitter makes of pieces, including the unfinished one."""
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return lines + splitter.take_partial()


@given(st.lists(st.text(st.sampled_from("ab \r\n"), max_size=6), max_size=10))
@example(["a\r", "\n"])
@example(["a\r", "b\n"])
@at_any_speed
def test_lines_do_not_depend_on_the_pieces(pieces):
    """The lines are the same for any division of the text into writes."""
    assert feed(pieces) == feed(["".join(pieces)])


@given(st.text(st.sampled_from("ab \n"), max_size=30))
@at_any_speed
def test_without_carriage_returns_no_character_is_lost(text):
    """The lines joined are the text."""
    lines = feed([text])

    assert "\n".join(lines) == text.removesuffix("\n")


def test_a_line_without_an_end_is_bounded():
    """A million characters without a newline are one line, and the rest is another."""
    lines = feed(["x" * 600_000, "x" * 600_000, "\n"])

    assert [len(line) for line in lines] == [1 << 20, 1_200_000 - (1 << 20)]


@given(TEXTS)
@at_any_speed
def test_a_name_stays_on_its_line(text):
    """No text begins a new line."""
    assert len(one_line(text).splitlines()) <= 1


@given(st.dictionaries(TEXTS, st.floats() | st.integers() | st.booleans(), max_size=4))
@at_any_speed
def test_json_reads_back(metrics):
    """Metrics are unchanged, with NaN and infinities as the documented strings."""
    line = json_line(LineRecord("metrics", "", 1, 2.5, metrics)).encode("utf-8", "backslashreplace").decode()

    read = json.loads(line)["metrics"]
    assert len(line.splitlines()) == 1
    assert repr({name: plain(value) for name, value in metrics.items()}) == repr(read)


@given(st.floats(allow_nan=False))
@at_any_speed
def test_text_lines_have_every_digit(value):
    """A number in a line for people reads back unchanged."""
    line = text_lines(LineRecord("metrics", "", 3, 0.0, {"loss": value}))

    assert line.startswith("[metric][batch=3]: loss: ")
    assert float(line.rsplit(" ", 1)[1]) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(0.00099999999)
@example(999999.99999)
@example(1e-5)
@at_any_speed
def test_a_shown_number_is_near_the_number(value):
    """Rounding for people changes a number of any size by less than a thousandth."""
    assert math.isclose(float(short(value)), value, rel_tol=1e-3)


def test_values_are_described_by_type():
    """Arrays are shown by type and shape, scalars by value, bytes by size."""
    import numpy as np
    import torch

    assert describe(np.zeros((2, 3), "uint8")) == "uint8 (2, 3)"
    assert describe(torch.zeros(2, dtype=torch.bfloat16)) == "bfloat16 (2,)"
    assert describe(torch.tensor(1.5)) == 1.5
    assert describe(np.float32(0.5)) == 0.5
    assert describe(b"abc") == "3 bytes"
    assert describe({"a": [np.zeros(1), None]}) == {"a": ["float64 (1,)", None]}
    assert exact({"a": (1, math.nan)}) == '{"a": [1, "NaN"]}'
