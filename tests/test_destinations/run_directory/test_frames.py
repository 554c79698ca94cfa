"""The frames of the journal."""

import math
import struct
import zlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destinations.run_directory.frames import (
    Boundary,
    Follows,
    Keys,
    Resume,
    UnknownFrame,
    encode_frame,
    iter_frames,
    keys_frame,
)

# A busy machine takes its time for any example.
at_any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

numbers = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans())


def payloads(data: bytes) -> list[object]:
    """Returns the records in some bytes."""
    return [record for _, record in iter_frames(data)]


@given(
    st.integers(0, 1000),
    st.integers(1 - 2**63, 2**63 - 1),
    st.one_of(st.none(), st.integers(0, 10**6)),
    st.lists(numbers, min_size=1).map(tuple),
)
@at_any_speed
def test_a_row_comes_back_as_it_was(schema, step, epoch, values):
    """Floats, 64-bit integers and bools keep their type and all digits."""
    data = encode_frame((schema, step, epoch, 1.5, values))

    (row,) = payloads(data)

    assert repr(row) == repr((schema, step, epoch, 1.5, values))


def test_the_bytes_of_a_row_match_the_documentation():
    """The format on disk is the same for every version of Python."""
    data = encode_frame((1, 2, 0, 0.5, (1.0, True, 2**40)))

    payload = (
        b"(\x05\0\0\0i\x01\0\0\0i\x02\0\0\0i\0\0\0\0g"
        + struct.pack("<d", 0.5)
        + b"(\x03\0\0\0g"
        + struct.pack("<d", 1.0)
        + b"Tl\x03\0\0\0\0\0\0\0\0\x04"
    )
    assert data == struct.pack("<II", len(payload), zlib.adler32(payload)) + payload


def test_names_marks_and_boundaries_come_back():
    """Other frames than rows come back unchanged."""
    data = (
        keys_frame(3, ("a", 'b"\n', "\udc80", "ü"))
        + encode_frame(("resume", 7, 1.5))
        + encode_frame(("resume", 8, None, 2.5))
        + encode_frame(("boundary",))
        + encode_frame(("follows", 4, 1000))
    )

    records = payloads(data)

    keys = Keys(3, ("a", 'b"\n', "\udc80", "ü"))
    assert records == [keys, Resume(7, 1.5), Resume(8, None), Boundary(), Follows(4, 1000)]


def test_a_frame_cut_anywhere_is_not_shown():
    """The second of two rows appears only with its last byte."""
    first, second = encode_frame((0, 1, 0, 0.0, (1.0,))), encode_frame((0, 2, 0, 0.0, (2.0, -2)))

    shown = [payloads(first + second[:length]) for length in range(len(second))]
    zeroed = [
        payloads(first + second[:length] + bytes(len(second) - length)) for length in range(len(second))
    ]

    assert all(rows == [(0, 1, 0, 0.0, (1.0,))] for rows in shown)
    assert all(rows == [(0, 1, 0, 0.0, (1.0,))] for rows in zeroed)


@given(st.integers(0, 10_000), st.integers(1, 255))
@at_any_speed
def test_a_changed_byte_ends_the_reading(position, change):
    """A damaged row is never shown, and nothing is raised."""
    data = bytearray(encode_frame((0, 1, 0, 0.25, (1.0, 2.0, math.pi))))
    data[position % len(data)] ^= change

    assert payloads(bytes(data)) == []


@given(st.binary(max_size=300))
@at_any_speed
def test_garbage_reads_as_nothing_or_ends(garbage):
    """Random bytes are never rows, and raise nothing."""
    good = encode_frame((0, 1, 0, 0.0, (1.0,)))

    assert payloads(good + garbage)[:1] == [(0, 1, 0, 0.0, (1.0,))]


def test_a_frame_of_an_unknown_kind_is_skipped():
    """A later version may add kinds of frames."""
    data = encode_frame(("news", 1)) + encode_frame((0, 1, 0, 0.0, (1.0,)))

    assert payloads(data) == [UnknownFrame(), (0, 1, 0, 0.0, (1.0,))]


def _framed(payload: bytes) -> bytes:
    return struct.pack("<II", len(payload), zlib.adler32(payload)) + payload


def test_integers_beyond_64_bits_are_floats():
    """A value becomes the nearest float or infinity; a step is left out."""
    beyond = (2**63, -(2**63) - 1, 10**30, 10**400, -(10**400))

    (row,) = payloads(encode_frame((0, 2**63, 0, 0.0, beyond)))

    assert row == (0, None, 0, 0.0, (2.0**63, -(2.0**63), 1e30, math.inf, -math.inf))
    assert set(map(type, row[4])) == {float}


def test_an_integer_has_ten_thousand_digits_at_most():
    """Each digit has fifteen bits; decoding a longer integer would take as long as its writer likes."""
    most = 1 << (15 * 10_000 - 1)

    assert payloads(encode_frame((0, 1, 0, 0.0, (most, -most)))) == [(0, 1, 0, 0.0, (math.inf, -math.inf))]
    assert payloads(encode_frame((0, 1, 0, 0.0, (most * 2,)))) == [UnknownFrame()]


def test_a_negative_length_is_refused():
    """A row with a negative number of values is rejected, even if the rest of the frame is valid."""
    row = encode_frame((0, 1, None, 0.0, ()))[8:]
    assert row.endswith(b"(\0\0\0\0")

    assert payloads(_framed(row)) == [(0, 1, None, 0.0, ())]
    assert payloads(_framed(row[:-4] + b"\xff\xff\xff\xff")) == [UnknownFrame()]
