"""Runs with very many rows and records: readers read only the requested part."""

import itertools
import json
import threading
import tracemalloc
from pathlib import Path

import pytest

from destinations.runs import Run
from destinations.runs.files import json_lines
from destinations.runs.move.ledger import ReadPosition
from destinations.runs.move.stored import records_of
from tests.test_destinations.runs.folders import write_run
from tests.test_destinations.runs.foreign_runs import command
from tests.test_destinations.runs.written import Written

ROWS = 200_000
MIB = 1 << 20


def bytes_read():
    """Returns how many bytes this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A finished run of many rows."""
    return write_rows(tmp_path_factory.mktemp("large") / "run", ROWS)


def write_rows(folder, count):
    """Writes a finished run of this many rows; the eighth has a metric of its own."""
    run = write_run(folder)
    with (run / "metrics.csv").open("w") as file:
        file.write("step,epoch,time,loss,rare\n")
        file.writelines(f"{row},0,{row}.5,0.{row},{row if row == 7 else ''}\n" for row in range(count))
    return run


def test_the_last_rows_are_read_from_the_end(large):
    """Ten rows cost less than a mebibyte, for any length of the file."""
    before = bytes_read()
    code, output, _ = command("tail", large, "-n", "10", "--no-follow")
    read = bytes_read() - before

    assert code == 0
    assert [line.split()[1] for line in output.splitlines()] == [str(row) for row in range(ROWS - 10, ROWS)]
    assert read < MIB < (large / "metrics.csv").stat().st_size / 4


def test_following_holds_only_new_rows_in_memory(large):
    """Memory grows neither with the existing rows nor with the rows handed out."""
    tracemalloc.start()
    try:
        count = sum(1 for _ in itertools.islice(Run.open(large).follow(), ROWS // 4))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == ROWS // 4
    assert most < 12 * MIB


def test_a_run_is_sent_without_holding_it(large):
    """`send` reads row by row: it hands on the first rows before it reads the last."""
    before = bytes_read()
    tracemalloc.start()
    try:
        items = list(itertools.islice(records_of(large, ReadPosition()), 1000))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert [item.step for item in items] == list(range(1000))
    assert most < 12 * MIB
    assert bytes_read() - before < (large / "metrics.csv").stat().st_size // 2


def test_rows_after_the_last_ones_arrive_once(tmp_path):
    """Rows from the CSV, the journal and later calls arrive once each, even after new columns."""
    stop = threading.Event()
    with Written(tmp_path / "run", flush_seconds=600.0) as run:
        for step in range(10):
            run.log({"loss": float(step)}, step)
        run.flush()
        run.log({"loss": 10.0}, 10)
        rows = Run.open(tmp_path / "run").follow(stop=stop, poll_seconds=0, last=3)
        found = [next(rows).step for _ in range(3)]
        run.log({"loss": 11.0, "new": 1.0}, 11)
        run.flush()
        found += [next(rows).step]
        run.log({"loss": 12.0}, 12)
        found += [next(rows).step]
        stop.set()

    assert found == [8, 9, 10, 11, 12]


def test_records_are_counted_without_holding_them(tmp_path):
    """The index has many lines, and a line of 40 MiB, which is left out and counted."""
    run = write_run(tmp_path / "run")
    line = json.dumps({"step": 1, "name": "note", "text": "x" * 50})
    with (run / "texts.jsonl").open("w") as file:
        file.writelines(f"{line}\n" for _ in range(10_000))
        file.write('{"text": "')
        file.writelines("y" * MIB for _ in range(40))
        file.write(f'"}}\n{line}\n')
    read = Run.open(run)
    tracemalloc.start()
    try:
        counts = read.record_counts()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert counts["texts"].count == 10_001
    assert read.damaged_lines() == {"texts.jsonl": 1}
    assert sum(one is None for one in json_lines(run / "texts.jsonl")) == 1
    assert most < 150 * MIB
