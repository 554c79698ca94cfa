"""Pyarrow reads numbers of a CSV as exactly as `float` does."""

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from destinations.run_directory import blocks
from destinations.run_directory.blocks import read_blocks
from destinations.run_directory.parquet import filled_column, read_lines

SIGNS = st.sampled_from(["", "-"])
DIGITS = st.text("0123456789", min_size=1, max_size=26)
EXPONENTS = (
    st.just("") | st.integers(-330, 310).map("e{}".format) | st.sampled_from(["e-05", "e+16", "e-999"])
)
NUMBERS = st.builds("{}{}{}".format, SIGNS, DIGITS, EXPONENTS) | st.builds(
    "{}{}.{}{}".format, SIGNS, st.text("0123456789", max_size=20), DIGITS, EXPONENTS
)
FLOATS = st.floats(allow_nan=False).map(repr) | st.integers(-(2**63), 2**64).map(str)


def column_of(cells):
    """Returns a reader's values of cells, as the only column of lines and as the second of three."""
    found = []
    for columns, line, index in ((1, "{}\n", 0), (3, "1,{},2\n", 1)):
        table = read_lines("".join(map(line.format, cells)).encode(), columns, as_floats=True)
        found.append(None if table is None else filled_column(table.column(index)))
    return found


def assert_exact(cells):
    """Compares with Python's own values bit by bit; a reader may also give up on all of them."""
    for found in column_of(cells):
        if found is not None:
            values, present = found
            assert present.tolist() == [cell != "" for cell in cells]
            wished = np.array([float(cell or "nan") for cell in cells])
            np.testing.assert_array_equal(values, wished)
            assert np.signbit(values[values == 0]).tolist() == np.signbit(wished[wished == 0]).tolist()


@settings(max_examples=150, deadline=None)
@given(cells=st.lists(NUMBERS | st.just(""), min_size=1, max_size=20))
def test_numbers_are_the_nearest_floats(cells):
    """For any digits, a reader returns exactly the value of `float`, or leaves the lines to others."""
    assert_exact(cells)


@settings(max_examples=150, deadline=None)
@given(cells=st.lists(FLOATS | st.sampled_from(["", "nan", "inf", "-inf", "1e+16"]), min_size=1, max_size=20))
def test_numbers_as_python_writes_them_are_read_at_once(cells):
    """Shortest floats, integers, missing cells and NaN need no slow reader of rows."""
    assert None not in column_of(cells)
    assert_exact(cells)


def test_numbers_next_to_the_middle_of_two_floats_are_exact():
    """Numbers in the middle between two floats, or close to it, are rounded to the right side."""
    source = random.Random(0)
    middles = [(2 * source.getrandbits(53) + 1) << source.randrange(8) for _ in range(5000)]
    halves = [f"{2**52 + source.getrandbits(51)}.5" for _ in range(5000)]
    cells = [str(middle + beside) for middle in middles for beside in (-1, 0, 1)]
    cells += [f"{half[:-1]}{digits}" for half in halves for digits in ("49", "5", "51")]

    assert None not in column_of(cells)
    assert_exact(cells)


@pytest.mark.parametrize(
    "cell", ["-", ".", "1.2.3", "1-2", "--1", "1-", "1e", "e5", "1e-", "1e5e5", "1e5.5", "fan"]
)
def test_other_texts_are_left_to_the_reader_of_rows(cell):
    """A reader gives up on cells without digits, with signs inside, or with several points."""
    assert column_of(["1.5", cell, "2"]) == [None, None]


def test_a_short_line_is_left_to_the_reader_of_rows():
    """No reader invents cells."""
    assert read_lines(b"1,2\n3\n", 2) is None


@pytest.mark.parametrize("limit", [0, 1 << 30])
@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["-0", "-0.0", "-00", "0"], ["0.0", "-0.0", "0.0", "0.0"]),
        (["9" * 400, "-" + "9" * 400, "1e400"], ["inf", "-inf", "inf"]),
        ([str(2**53 + 1), str(2**64 + 1), "1.5"], ["9007199254740992.0", "1.8446744073709552e+19", "1.5"]),
        (["True", "False", "0x10"], ["None", "None", "None"]),
        (["1.5\n", "2"], ["1.5", "None", "2.0"]),
        (["+1", " 1", "1_0", "Infinity"], ["1.0", "1.0", "10.0", "inf"]),
        (['"1,5"', '"2\n"', "3"], ["None", "2.0", "3.0"]),
    ],
)
def test_a_cell_has_the_value_of_the_reader_of_rows(monkeypatch, limit, cells, values):
    """Signs of integers, numbers beyond floats, words and quotes mean the same to every reader."""
    monkeypatch.setattr(blocks, "_ARROW_BYTES", limit)
    chunk = "".join(f"{step},{cell}\n" for step, cell in enumerate(cells)).encode()

    (block,) = read_blocks(b"step,loss\n", [chunk], ["loss"])

    found, present = block.columns["loss"]
    is_there = zip(found.tolist(), present.tolist(), strict=True)
    assert [repr(value) if there else "None" for value, there in is_there] == values


def test_short_files_are_read_without_pyarrow(tmp_path):
    """Importing pyarrow takes longer than reading a small run; a large one doesn't import pandas."""
    lines = [f"{step},{step}.5" for step in range(40_000)]
    for name, count in (("short", 100), ("long", len(lines))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("\n".join(["step,loss", *lines[:count], ""]))
    program = (
        "import sys; from pathlib import Path; from destinations.runs.content.series import read_series\n"
        "for name in sys.argv[2:]:\n"
        "    print(len(read_series(Path(sys.argv[1]) / name, 'loss')), 'pyarrow' in sys.modules, 'pandas' in sys.modules)"
    )

    command = [sys.executable, "-c", program, tmp_path, "short", "long"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["100 False False", "40000 True False"]
