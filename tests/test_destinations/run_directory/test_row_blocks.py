"""Reading many frames at once returns the same rows as reading them one by one, or nothing."""

import math
import random
import struct

import numpy as np
import pytest

from destinations.run_directory.frames import (
    encode_frame,
    iter_frames,
    keys_frame,
    read_row_block,
)
from destinations.run_directory.layout import format_cell_rows, format_cells


def row(step, values, schema=0, epoch=1, time=1.5):
    """Returns the frame of a row."""
    return encode_frame((schema, step, epoch, time, tuple(values)))


def parse_rows(data, offset=0, most=64):
    """Returns a block with the rows of `frames`, and its end."""
    block = read_row_block(data, offset, most)
    if block is None:
        return [], offset
    columns = zip(block.steps, block.epochs, block.times.tolist(), block.values.tolist(), strict=True)
    return [(block.schema, *rest, tuple(values)) for *rest, values in columns], offset + block.size


def test_a_block_has_the_same_rows_as_single_frames():
    """Rows of floats with one schema come out as `frames` reads them, from any offset, up to a limit."""
    source = random.Random(3)
    written = [row(step, [source.random() for _ in range(7)], time=source.random()) for step in range(-5, 50)]
    data = keys_frame(0, tuple("abcdefg")) + b"".join(written)
    begin = len(keys_frame(0, tuple("abcdefg")))

    found, end = parse_rows(data, begin, most=40)

    expected = [(offset, record) for offset, record in iter_frames(data, begin)][:40]
    assert found == [record for _, record in expected]
    assert end == expected[-1][0]


@pytest.mark.parametrize(
    "other",
    [
        row(9, [1.0, 2], 0),
        row(9, [1.0, True], 0),
        row(9, [1.0, 2.0], 1),
        row(9, [1.0, 2.0], 0, epoch=None),
        row(1 << 40, [1.0, 2.0]),
        row(9, [1.0, 2.0, 3.0]),
        # The text is as long as a number.
        encode_frame((0, 9, 1, "text", (1.0, 2.0))),
        encode_frame((0, 9, 1, 1.5, (1.0, "text"))),
        keys_frame(1, ("a",)),
        encode_frame(("boundary",)),
        bytes(64),
    ],
    ids=[
        "integer",
        "bool",
        "schema",
        "no epoch",
        "large step",
        "wider",
        "text as time",
        "text as value",
        "keys",
        "boundary",
        "end",
    ],
)
def test_a_block_ends_before_another_kind_of_frame(other):
    """Anything but a float row with the same schema ends the block, and is read by itself."""
    alike = b"".join(row(step, [1.0, 2.0]) for step in range(6))

    found, end = parse_rows(alike + other + alike)

    assert [step for _, step, *_ in found] == [0, 1, 2, 3, 4, 5]
    assert end == len(alike)


def test_a_damaged_frame_ends_the_block():
    """If a byte of a frame is wrong, the block has the rows before it, and none after."""
    data = b"".join(row(step, [1.0, 2.0]) for step in range(8))
    stride = len(data) // 8

    for place in range(5 * stride, 6 * stride):
        damaged = bytearray(data)
        damaged[place] ^= 0x11
        found, end = parse_rows(bytes(damaged))
        assert [step for _, step, *_ in found] == [0, 1, 2, 3, 4]
        assert end == 5 * stride


def test_floats_of_any_bits_come_back():
    """A float's text reads as exactly the same float, including the sign of zero."""
    source = random.Random(1)
    values = [struct.unpack("<d", source.randbytes(8))[0] for _ in range(20_000)]
    values += [0.0, -0.0, 5e-324, 1e16, 1e22, 1e-5, math.inf, -math.inf]

    for value in values:
        found = float(format_cells((value,)))
        assert struct.pack("<d", found) == struct.pack("<d", value) or (
            math.isnan(found) and math.isnan(value)
        )


def test_integers_and_booleans_are_whole_numbers():
    """Integers of any size are written in full, booleans as 1 and 0."""
    values = (True, False, 7, 2**70, -(2**63), math.nan)

    assert format_cells(values) == ("1,0,7,1180591620717411303424,-9223372036854775808,nan")


def test_a_block_of_floats_comes_back():
    """The cells of a row in a block equal the cells of its single values."""
    values = np.array([[1.5, -0.0, 1e22], [math.nan, math.inf, -math.inf], [5e-324, 0.1, 3.0]])

    rows = format_cell_rows(values[[0, 2]]), format_cell_rows(values)

    assert [[float(cell) for cell in row.split(b",")] for row in rows[0]] == values[[0, 2]].tolist()
    assert rows[1] == [repr(row)[1:-1].replace(" ", "").encode() for row in values.tolist()]
