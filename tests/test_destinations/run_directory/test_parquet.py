"""A closed part has exactly the rows of its CSV, and reports which of them are lost."""

import contextlib
import json
import marshal
import os
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from destinations.history.csv_file import CsvSnapshot
from destinations.history.rows import MetricRow, parse_rows
from destinations.history.sealed import ParquetSnapshot
from destinations.run_directory import blocks, parquet
from destinations.run_directory.blocks import block_of_rows, blocks_of
from destinations.run_directory.layout import header_line, number_of_int, parse_header
from destinations.run_directory.parquet import ParquetRows
from tests.effort import times
from tests.hostile.fuzzing import fuzz

FLOATS = st.floats().map(repr) | st.sampled_from(["nan", "inf", "-inf", "-0.0", "5e-324", "1e-07", "1e16"])
INTEGERS = st.integers(1 - 2**63, 2**63 - 1) | st.sampled_from([0, -1, 2**53, 2**53 + 1, -(2**53) - 1])
SMALL = st.integers(-(2**53), 2**53)
COLUMNS = [
    FLOATS,
    INTEGERS.map(str),
    FLOATS | SMALL.map(str),
    FLOATS | INTEGERS.map(str) | st.integers().map(str),
]
NAMES = [
    "loss",
    "Loss",
    "train.loss",
    "train",
    "a,b",
    'say "x"',
    "",
    "ü",
    "metrics/step",
    "loss is an integer",
]


@st.composite
def csv_files(draw):
    """Returns a header and the lines of a part: one type per column, missing cells, duplicate names."""
    names = ["step", "epoch", "time", *draw(st.lists(st.sampled_from(NAMES), max_size=6))]
    if draw(st.booleans()):
        names = draw(st.permutations(names))
    kinds = [draw(st.sampled_from(COLUMNS)) | st.just("") for _ in names]
    kinds = [
        draw(st.sampled_from([INTEGERS.map(str), INTEGERS.map(str) | st.just(""), SMALL.map("{}.0".format)]))
        if name == "step"
        else kind
        for name, kind in zip(names, kinds, strict=True)
    ]
    rows = draw(st.lists(st.tuples(*kinds), min_size=1, max_size=25))
    return header_line(names), "".join(",".join(row) + "\n" for row in rows).encode()


def converted(header, lines, path):
    """Returns the CSV, and the Parquet file beside it that it becomes."""
    path.write_bytes(header + lines)
    csv = CsvSnapshot.of(os.open(path, os.O_RDONLY))
    path.with_suffix(".parquet").write_bytes(csv.to_parquet())
    return csv, ParquetSnapshot(ParquetRows(os.open(path.with_suffix(".parquet"), os.O_RDONLY)))


def bits_of_rows(rows):
    """Returns rows with each number as its type and bits."""
    return [marshal.dumps((row.step, row.epoch, row.time, sorted(row.metrics.items())), 2) for row in rows]


def bits_of_blocks(blocks):
    """Returns steps, times and values of all rows; a value is its bits, or 0 if missing."""
    found = list(blocks)
    columns = {}
    for name in found[0].columns:
        values, present = (np.concatenate([one.columns[name][at] for one in found]) for at in (0, 1))
        columns[name] = np.where(present, values.view(np.int64), 0).tolist(), present.tolist()
    steps, times = (np.concatenate([getattr(one, name) for one in found]) for name in ("step", "time"))
    return steps.tolist(), times.view(np.int64).tolist(), columns


@pytest.fixture(params=[3, 1 << 15])
def rows_of_a_group(request, monkeypatch):
    """Files of one row group, and of several, which are read in one block or in several."""
    monkeypatch.setattr(parquet, "_GROUP_ROWS", request.param)
    monkeypatch.setattr(blocks, "_BLOCK_VALUES", request.param)
    return request.param


@pytest.mark.usefixtures("rows_of_a_group")
def test_every_number_equals_the_number_in_the_csv(tmp_path_factory):
    """Rows, columns and lines match the CSV bit by bit; integers among floats become floats."""
    folder = tmp_path_factory.mktemp("parts")

    @settings(max_examples=times(50, 400), deadline=None)
    @given(csv_files())
    def check(file):
        header, lines = file
        csv, found = converted(header, lines, folder / "part.csv")
        with contextlib.closing(csv), contextlib.closing(found):
            columns = parse_header(header)
            rows = rounded(csv.rows())
            expected = bits_of_rows(rows)
            assert found.end == csv.end
            assert found.header == header or len(set(columns)) < len(columns)
            assert bits_of_rows(found.rows()) == expected
            assert bits_of_rows(found.rows(2)) == expected[2:]
            again = b"".join(found.chunks())
            assert bits_of_rows(parse_rows(parse_header(found.header), [again])) == expected
            for wanted in ([one for one in columns if one not in {"step", "time"}], ["loss", "missing"], []):
                of_rows = bits_of_blocks([block_of_rows(rows, wanted)])
                assert bits_of_blocks(blocks_of(found, wanted)) == of_rows

    check()


def rounded(rows):
    """Returns rows as a part has them: a column with any float has only floats."""
    rows = list(rows)
    found = []
    mixed = {
        name
        for row in rows
        for name, value in cells_of(row).items()
        if isinstance(value, float) or isinstance(number_of_int(value), float)
    }
    for row in rows:
        cells = {name: float(value) if name in mixed else value for name, value in cells_of(row).items()}
        step, epoch, time = (cells.pop(name, None) for name in ("step", "epoch", "time"))
        found.append(MetricRow(None if step is None else int(step), epoch, time, cells))
    return found


def cells_of(row):
    """Returns the cells of a row by column."""
    own = {"step": row.step, "epoch": row.epoch, "time": row.time}
    return {name: cell for name, cell in {**own, **row.metrics}.items() if cell is not None}


ODD = {
    "a text": "1,0,2.0,abc\n",
    "a quoted cell": '1,0,2.0,"1.5"\n',
    "a header in the middle": "step,epoch,time,acc\n1,0,2.0,2.5\n",
    "a cell less": "1,0,2.0\n",
    "a cell more": "1,0,2.0,1.5,2.5\n",
    "an integer of more than 64 bits": f"1,0,2.0,{2**63}\n",
    "an integer of 400 digits": f"1,0,2.0,{10**400}\n",
    "a large integer among floats": f"1,0,2.0,1.5\n2,0,3.0,{2**53 + 1}\n",
    "an integer with a zero before it": "1,0,2.0,007\n",
    "a date": "1,0,2.0,2026-01-01\n",
    "an underscore": "1,0,2.0,1_0\n",
    "a space": "1,0,2.0, 1\n",
    "no number": "1,0,2.0,1e\n",
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD)
def test_odd_lines_are_read_like_rows(tmp_path, line):
    """Texts, lines of another length and large integers look the same as to readers of the CSV."""
    csv, found = converted(b"step,epoch,time,loss\n", b"0,0,1.0,0.5\n" + line.encode(), tmp_path / "part.csv")
    with contextlib.closing(csv), contextlib.closing(found):
        assert bits_of_rows(found.rows()) == bits_of_rows(rounded(csv.rows()))


def test_other_programs_read_the_columns(tmp_path):
    """Steps, times and metrics have their names; integers among floats are floats."""
    header, lines = b"step,epoch,time,loss,mixed\n", b"0,0,1.5,0.25,\n1,0,2.5,nan,3\n,,,,0.5\n"
    csv, found = converted(header, lines, tmp_path / "part.csv")
    csv.close()
    found.close()

    table = pq.read_table(tmp_path / "part.parquet")

    assert table.column_names == ["step", "epoch", "time", "loss", "mixed"]
    assert [str(kind) for kind in table.schema.types] == ["int64", "int64", "double", "double", "double"]
    assert table["step"].to_pylist() == [0, 1, None]
    assert table["mixed"].to_pylist() == [None, 3.0, 0.5]


def test_a_part_of_an_earlier_version_is_read_without_its_flags(tmp_path):
    """Its last column, of bools, flags the cells of a float column that were integers."""
    header = b"step,epoch,time,mixed\n"
    columns = {"step": [0, 1], "epoch": [0, 0], "time": [1.0, 2.0], "mixed": [3.0, 0.5]}
    table = pa.table({**columns, "mixed is an integer": [True, False]})
    index = parquet._index(["step", "epoch", "time", "mixed"], table)
    about = {"version": 1, "header": header.decode(), "csv_bytes": 100, "integers": [3]}
    with pq.ParquetWriter(tmp_path / "part.parquet", table.schema, use_dictionary=False) as writer:
        writer.add_key_value_metadata({"destinations": json.dumps(about), **index})
        writer.write_table(table)

    with contextlib.closing(ParquetRows(os.open(tmp_path / "part.parquet", os.O_RDONLY))) as found:
        assert list(found.cells()) == [(0, 0, 1.0, 3.0), (1, 0, 2.0, 0.5)]
        assert b"".join(found.lines()) == b"0,0,1.0,3.0\n1,0,2.0,0.5\n"
        assert found.verify() == 0


def test_statistics_of_parquet_match_the_values(tmp_path):
    """Other programs use them to skip row groups."""
    lines = "".join(f"{step},0,{step / 8},{step / 4}\n" for step in range(10_000)).encode()
    for one in converted(b"step,epoch,time,loss\n", lines, tmp_path / "part.csv"):
        one.close()

    metadata = pq.ParquetFile(tmp_path / "part.parquet").metadata

    found = [metadata.row_group(group).column(3).statistics for group in range(metadata.num_row_groups)]
    assert [(one.min, one.max) for one in found] == [(0.0, 8191 / 4), (8192 / 4, 9999 / 4)]


def test_damage_loses_one_row_group(tmp_path, caplog):
    """Rows of the other groups are read; the lost ones are counted and reported once."""
    lines = "".join(f"{step},0,{step / 8},{step / 3}\n" for step in range(20_000)).encode()
    for one in converted(b"step,epoch,time,loss\n", lines, tmp_path / "part.csv"):
        one.close()
    path = tmp_path / "part.parquet"
    about = pq.ParquetFile(path).metadata.row_group(1).column(3)
    content = bytearray(path.read_bytes())
    content[about.data_page_offset + about.total_compressed_size // 2] ^= 4
    path.write_bytes(content)

    with contextlib.closing(ParquetSnapshot(ParquetRows(os.open(path, os.O_RDONLY), "the part"))) as found:
        steps = [row.step for row in found.rows()]
        blocks = [step for block in blocks_of(found, ["loss"]) for step in block.step.tolist()]
        epochs = sum(map(len, blocks_of(found, ["epoch"])))
        assert (found.packed.lost, found.packed.count, found.packed.verify()) == (8192, 20_000, 8192)

    assert steps == blocks == [*range(8192), *range(16_384, 20_000)]
    assert epochs == 20_000
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "the part: 8192 of 20000 rows cannot be read"
    ]


# Hostile files.


@pytest.fixture
def good(tmp_path):
    """Returns the bytes of a file of 5,000 rows."""
    lines = "".join(f"{step},0,{step / 8},{step / 3}\n" for step in range(5000)).encode()
    csv, found = converted(b"step,epoch,time,loss\n", lines, tmp_path / "part.csv")
    csv.close()
    found.close()
    return (tmp_path / "part.parquet").read_bytes()


def read_all(path):
    """Reads a file's content in every way."""
    with contextlib.closing(ParquetSnapshot(ParquetRows(os.open(path, os.O_RDONLY)))) as found:
        return sum(1 for _ in found.rows()), sum(map(len, blocks_of(found))), b"".join(found.chunks())


def test_a_damaged_file_is_an_error_and_shows_no_other_numbers(tmp_path, good):
    """If any bytes are changed or missing, a reader returns rows that were written, or raises OSError."""
    path = tmp_path / "damaged.parquet"
    path.write_bytes(good)
    expected = set(read_all(path)[2].splitlines())

    @fuzz(400)
    @given(st.data())
    def check(data):
        changed = bytearray(good)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(good) - 1) | st.integers(len(good) - 1500, len(good) - 1))
            changed[at] = data.draw(st.integers(0, 255))
        cut = data.draw(st.sampled_from([0, 0, 0, 1, 100]))
        path.write_bytes(changed[: len(changed) - cut])
        with contextlib.suppress(OSError):
            assert set(read_all(path)[2].splitlines()) <= expected

    check()


def test_a_changed_footer_is_an_error(tmp_path, good):
    """A checksum precedes the footer, so a changed one is not used at all."""
    path = tmp_path / "damaged.parquet"
    length = int.from_bytes(good[-8:-4], "little")
    for at in (len(good) - 8 - length, len(good) - length // 2, len(good) - 20):
        changed = bytearray(good)
        changed[at] ^= 16
        path.write_bytes(changed)
        with pytest.raises(OSError, match="the checksum of its footer"):
            read_all(path)


def about(columns, integers=(), rows=10, **changes):
    """Returns the metadata of a file."""
    header = header_line(columns).decode()
    return {"version": 1, "header": header, "csv_bytes": 1000, "integers": list(integers), **changes}


def write_foreign(path, table, metadata, **options):
    """Writes a file with metadata like ours."""
    with pq.ParquetWriter(path, table.schema, store_schema=False, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"destinations": json.dumps(metadata)})


ONE = pa.table({"step": pa.array([1], pa.int64())})
FOREIGN = {
    "texts": (pa.table({"step": ["x" * 1000]}), about(["step"])),
    "lists": (pa.table({"step": pa.array([[1, 2]])}), about(["step"])),
    "another number of columns": (ONE, about(["step", "time"])),
    "an integer column that is not there": (ONE, about([], [5])),
    "a header without an end": (ONE, about(["step"], header="step")),
    "a version to come": (ONE, about(["step"], version=3)),
    "this version without a checksum": (ONE, about(["step"], version=2)),
    "no size": (ONE, about(["step"], csv_bytes=None)),
    "a size that is none": (ONE, about(["step"], csv_bytes=float("inf"))),
    "other metadata": (ONE, ["no", "object"]),
    "too many rows in a group": (
        pa.table({"step": pa.array(np.zeros(100_000, np.int64))}),
        about(["step"]),
    ),
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused(tmp_path, foreign):
    """Other types, other metadata and larger groups than ours raise a clear error."""
    table, metadata, *options = foreign
    path = tmp_path / "foreign.parquet"
    write_foreign(path, table, metadata, **({"use_dictionary": False} | dict(*options)))

    with pytest.raises(OSError, match=r"damaged, or none of ours|of a later version"):
        read_all(path)


def test_a_page_with_a_huge_decompressed_size_is_refused(tmp_path):
    """A page of zeros that decompresses to 400 MB is refused before decompression."""
    path = tmp_path / "bomb.parquet"
    # A row has 8 bytes of values, but 20,000 bytes as text: nobody trusts the footer.
    table = pa.table({"step": pa.array(["0" * 20_000] * 20_000)})
    write_foreign(path, table, about(["step"]), use_dictionary=False, compression="zstd")
    assert path.stat().st_size < 1 << 20
    data = path.read_bytes()

    footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
    # The footer calls it a column of doubles: type 6 is BYTE_ARRAY, 5 DOUBLE; 0x25 0x00 is "UTF-8".
    footer = footer.replace(b"\x15\x0c", b"\x15\x0a").replace(b"\x25\x00\x4c\x1c\x00\x00", b"")
    start = data[: -8 - int.from_bytes(data[-8:-4], "little")]
    path.write_bytes(start + footer + struct.pack("<I", len(footer)) + b"PAR1")

    with pytest.raises(OSError, match="damaged, or none of ours"):
        read_all(path)


def test_a_footer_with_a_huge_length_is_refused(tmp_path, good):
    """The reader checks the footer's length before it reads it."""
    path = tmp_path / "footer.parquet"
    for length in (1 << 31, len(good), 17 << 20):
        path.write_bytes(good[:-8] + struct.pack("<I", length) + b"PAR1")
        with pytest.raises(OSError, match="damaged, or none of ours"):
            read_all(path)
    for content in (b"", b"PAR1", b"PAR1PAR1", b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(OSError, match="damaged, or none of ours"):
            read_all(path)
