"""Reads metrics of a run as numpy arrays."""

import contextlib
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destinations.history.rows import parse_rows
from destinations.run_directory import blocks as blocks_module
from destinations.run_directory import read_rows, read_series
from destinations.run_directory.blocks import MISSING_STEP, block_of_rows, read_blocks
from destinations.run_directory.layout import header_line, parse_header
from destinations.runs import MetricNotFoundError, Run
from tests.test_destinations.runs.written import Written, write_csv

# A slow or busy machine doesn't invalidate a property.
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PLAIN = st.one_of(
    st.just(""),
    st.floats().map(repr),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map("{:e}".format),
)
ODD = st.sampled_from(
    [
        *(
            "nan",
            "inf",
            "-inf",
            "-0",
            "-0.0",
            "+1",
            "1e+16",
            "1_0",
            " 1",
            "1 ",
            "null",
            "true",
            "false",
            "[1]",
        ),
        *(
            "{}",
            "0x1",
            "--",
            "é",
            "1" * 70,
            "1" * 400,
            "01",
            ".5",
            "5.",
            "1e400",
            "Infinity",
            "\u0661",
            "a\0",
            "1\0",
        ),
        *("step", '"1,5"', '"1\n5"', "1\r"),
    ]
)
COLUMNS = ["step", "epoch", "time", "loss", "a,b", "acc"]


@st.composite
def csv_texts(draw, cells, ragged):
    """Generates a header and lines under it."""
    columns = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=7, unique=not ragged))
    widths = st.integers(0, len(columns) + 1) if ragged else st.just(len(columns))
    lines = draw(
        st.lists(widths.flatmap(lambda width: st.lists(cells, min_size=width, max_size=width)), max_size=12)
    )
    return columns, "".join(",".join(line) + "\n" for line in lines).encode()


@contextlib.contextmanager
def arrow_from(size):
    """Makes pyarrow read chunks from this size on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "_ARROW_BYTES", size)
        yield


def assert_blocks_are_rows(columns, body, chunk_bytes, wanted):
    """Reads with every reader, and compares every bit."""
    header = header_line(columns)
    rows = list(parse_rows(parse_header(header), [body]))
    chunks = [line + b"\n" for line in body.split(b"\n")[:-1]]
    size = max(1, chunk_bytes)
    pieces = [b"".join(chunks[start : start + size]) for start in range(0, len(chunks), size)]

    for size in (0, len(body) + 1):
        with arrow_from(size):
            blocks = list(read_blocks(header, pieces, wanted))
        assert_blocks_have(blocks, rows, wanted)


def assert_blocks_have(blocks, rows, wanted):
    """Compares blocks with rows."""
    names = {name for row in rows for name in row.metrics} if wanted is None else set(wanted)
    expected = block_of_rows(rows, sorted(names))
    assert sum(map(len, blocks)) == len(rows)
    start = 0
    for block in blocks:
        part = slice(start, start + len(block))
        start += len(block)
        assert block.step.tolist() == expected.step[part].tolist()
        assert block.time.tobytes() == expected.time[part].tobytes() or np.array_equal(
            block.time, expected.time[part], equal_nan=True
        )
        for name in names:
            values, present = block.columns.get(name, (None, np.zeros(len(block), bool)))
            assert present.tolist() == expected.columns[name][1][part].tolist()
            if values is not None:
                found, wished = values[present], expected.columns[name][0][part][present]
                assert np.array_equal(found, wished, equal_nan=True)
                # An integer "-0" is the integer 0.
                assert np.signbit(found[found == 0]).tolist() == np.signbit(wished[wished == 0]).tolist()


@settings(SLOW, max_examples=150)
@given(csv_texts(PLAIN, ragged=False), st.integers(1, 5), st.booleans())
def test_columns_of_numbers_equal_the_rows(text, chunk, everything):
    """Arrays have exactly the values of the reader of rows, for any numbers in a file."""
    columns, body = text

    assert_blocks_are_rows(columns, body, chunk, None if everything else ["loss"])


@settings(SLOW, max_examples=150)
@given(
    csv_texts(st.one_of(PLAIN, ODD), ragged=True),
    st.integers(1, 5),
    st.booleans(),
)
def test_columns_of_any_cells_equal_the_rows(text, chunk, everything):
    """This covers texts, quotes, NULs, short and long lines, and headers in the middle."""
    columns, body = text

    assert_blocks_are_rows(columns, body, chunk, None if everything else ["loss", "epoch"])


def test_a_series_has_the_rows_of_csv_and_journal(tmp_path):
    """A series has exactly the logged values if some rows are in the CSV and others only in the journal."""
    run_dir = tmp_path / "run"
    values = [0.1, 5e-324, -1.7976931348623157e308, math.inf, math.nan, 2.0**53, 1 / 3]
    with Written(run_dir, flush_seconds=1000) as written:
        for step, value in enumerate(values[:4]):
            written.log({"loss": value}, step)
        written.flush()
        for step, value in enumerate(values[4:], 4):
            written.log({"loss": value, "late": step}, step)

        series = Run.open(run_dir).series("loss")
        late = Run.open(run_dir).series("late")
        rows = read_series(run_dir, "loss")

    assert series.step.dtype == np.int64
    assert series.value.dtype == series.time.dtype == np.float64
    assert series.step.tolist() == list(range(7))
    assert np.array_equal(series.value, values, equal_nan=True)
    assert [step for step, _ in rows] == series.step.tolist()
    assert np.array_equal([value for _, value in rows], series.value, equal_nan=True)
    assert (late.step.tolist(), late.value.tolist()) == ([4, 5, 6], [4.0, 5.0, 6.0])
    closed = Run.open(run_dir).series("loss")
    assert np.array_equal(closed.value, values, equal_nan=True)
    assert [round(row.time, 6) for row in read_rows(run_dir)] == closed.time.tolist()


def test_abandoned_rows_are_not_in_a_series(tmp_path):
    """After a resume at an earlier step, later rows are gone at once, although the CSV still has them."""
    run_dir = tmp_path / "run"
    with Written(run_dir) as written:
        for step in range(10):
            written.log({"loss": step}, step)

    with Written(run_dir, batch=4, flush_seconds=1000) as written:
        written.log({"loss": 40}, 4)
        series = Run.open(run_dir).series("loss")

    assert series.step.tolist() == [0, 1, 2, 3, 4]
    assert series.value.tolist() == [0, 1, 2, 3, 40]


def test_a_missing_or_too_large_step_is_marked(tmp_path):
    """A row without a step, or with one beyond 64 bits, has `MISSING_STEP`; steps below 2**63 are exact."""
    write_csv(
        tmp_path / "run", ["step,loss", ",1.0", "-1,2.0", f"{2**63},3.0", f"{2**53 + 1},4.0", "nan,5.0"]
    )

    series = Run.open(tmp_path / "run").series("loss")

    assert series.step.tolist() == [MISSING_STEP, -1, MISSING_STEP, 2**53 + 1, MISSING_STEP]
    assert series.has_step.tolist() == [False, True, False, True, False]
    assert np.isnan(series.time).all()


def test_an_unknown_metric_raises_with_similar_names(tmp_path):
    """The error about an unknown name lists the nearest names."""
    write_csv(tmp_path / "run", ["step,val/acc,loss", "0,1.0,2.0"])

    with pytest.raises(MetricNotFoundError, match=r"'los'.*'loss'"):
        Run.open(tmp_path / "run").series("los")


def test_sparse_rows_and_headers_in_the_middle(tmp_path):
    """The file has Lightning's sparse rows, a second header with more columns, and a torn last line."""
    lines = ["epoch,step,train/loss,val/acc", "0,49,0.5,", "0,49,,0.9", "epoch,step,train/loss,val/acc,lr"]
    write_csv(tmp_path / "run", [*lines, "1,99,0.25,,0.1"])
    with (tmp_path / "run" / "metrics.csv").open("a") as file:
        file.write("1,149,0.12")

    run = Run.open(tmp_path / "run")

    assert run.series("train/loss").step.tolist() == [49, 99]
    assert run.series("val/acc").value.tolist() == [0.9]
    assert run.series("epoch").value.tolist() == [0, 0, 1]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    """Excel writes one at the beginning; a program that continues a file may write one in the middle."""
    mark = "\ufeff"
    write_csv(tmp_path / "run", [f"{mark}step,loss", "4,0.5", f"{mark}step,loss", "5,1.0"])

    run = Run.open(tmp_path / "run")

    assert run.series("loss").step.tolist() == [4, 5]
    assert read_series(tmp_path / "run", "loss") == [(4, 0.5), (5, 1.0)]
    assert list(run.record.summary) == ["loss"]


def test_a_run_is_opened_without_numpy(tmp_path):
    """Reading the summary, records and checkpoints of a run loads neither numpy, torch nor DuckDB."""
    with Written(tmp_path / "run") as written:
        written.log({"loss": 1.0}, 0)
    program = f"""
import sys
from destinations.runs import Run
from destinations.runs.content.checkpoints import list_checkpoints
import destinations.runs.dataset, destinations.runs.export
run = Run.open({str(tmp_path / "run")!r})
list_checkpoints(run, print)
run.summary, run.environment, run.images(), run.metric_names(), run.sessions, run.receipt, list(run.follow(until_end=True, poll_seconds=0))
print([name for name in ("numpy", "torch", "duckdb", "pandas", "PIL", "boto3") if name in sys.modules])
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
