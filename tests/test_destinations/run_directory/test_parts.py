"""A large metrics.csv is closed as a part, and every reader sees the same rows as in a single file.

A part may be Parquet, or CSV from an earlier version.
"""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from destinations import RunDirectory
from destinations.history.aggregate import MISSING_STEP, Aggregate
from destinations.history.sealed import Part
from destinations.history.snapshot import last_rows, metric_columns, take_snapshot
from destinations.run_directory import read_rows
from destinations.run_directory.blocks import block_of_rows, indexed_files
from destinations.run_directory.conversion import convert_parts
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import journal_path, part_numbers, part_path, parts_path
from destinations.run_directory.metrics_csv import MetricsCsv, RowFormatter
from destinations.run_directory.parquet import ENTRY_ROWS, ParquetRows, rows_entry
from destinations.runs import open_runs
from destinations.runs.content.follow import Follower
from destinations.runs.content.series import read_series, run_blocks
from destinations.runs.move.ledger import ReadPosition
from destinations.runs.move.stored import records_of
from destinations.viewer.columns import ColumnCache
from events import Run, State
from tests.crash.disk_model import HastyDisk
from tests.test_destinations.run_directory.conftest import steps_left
from tests.test_destinations.runs.written import Written, change_sidecar


class Rolling(RunDirectory):
    """Closes parts after a few kilobytes."""

    _part_bytes = 4000


class WrittenInParts(Written):
    """A run with small parts."""

    kind = Rolling


IDS = itertools.count(1)


class Writer:
    """A journal and its drain without the thread."""

    def __init__(self, run_dir, part_bytes=600, disk=None):
        self.folder = journal_path(run_dir, 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        times = itertools.count(1000)
        self.journal = Journal(self.folder, State("x"), segment_bytes=4096, clock=lambda: float(next(times)))
        disk = disk or HastyDisk()
        csv = MetricsCsv(run_dir / "metrics.csv", disk)
        self.journal.begin_session(f"{next(IDS):012d}")
        self.drain = JournalDrain(run_dir, self.folder, csv, self.journal, part_bytes=part_bytes, disk=disk)

    def log(self, steps, **more):
        for step in steps:
            self.journal.append({"loss": step / 8, **more}, step)

    def log_and_drain(self, steps):
        """Drains after every ten rows, and may close a part then."""
        for step in steps:
            self.log([step])
            if step % 10 == 9:
                self.drain.run()
        self.drain.run()

    def go_back(self, step):
        """Begins a session that continues at a step."""
        self.journal.begin_session(f"{next(IDS):012d}")
        self.journal.mark_resume(step, None)

    def die(self):
        self.journal.close()
        for segment in list(self.journal.files.segments):
            segment.close()
        self.drain._csv.close()


def rows_now(run_dir):
    """Returns the rows that a reader sees."""
    return [(row.step, row.epoch, row.metrics) for row in read_rows(run_dir)]


def numbers(run_dir):
    """Returns the numbers of the closed parts."""
    return part_numbers(parts_path(run_dir / "metrics.csv"))


def as_csv(run_dir, chosen=None):
    """Converts some parts, or all, into CSV as an earlier version wrote it."""
    folder = parts_path(run_dir / "metrics.csv")
    for number in chosen or numbers(run_dir):
        part = Part.find(folder, number)
        if part.path.suffix != ".csv":
            with contextlib.closing(part.open()) as file:
                part_path(folder, number, ".csv").write_bytes(b"".join([file.header, *file.chunks()]))
            part_path(folder, number).unlink()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The same rows in parts, in one file, in parts of an earlier version, and in parts of both.

    The metric `acc` is rare, and `late` appears late. Sums of these values are exact in any order.
    """
    folder = tmp_path_factory.mktemp("runs")
    for name, written in (("parts", WrittenInParts), ("whole", Written)):
        with written(folder / name, run_id=name, flush_seconds=1000) as run:
            for step in range(400):
                more = {"acc": step / 4} if step % 7 == 0 else {}
                late = {"late": float("nan") if step == 333 else -step / 64} if step >= 300 else {}
                run.log({"loss": (400 - step) / 2**20, **more, **late}, step)
                if step % 20 == 19:
                    run.flush()
    assert len(numbers(folder / "parts")) > 3
    assert numbers(folder / "whole") == []
    for name in ("csv", "mixed"):
        shutil.copytree(folder / "parts", folder / name)
        as_csv(folder / name, [2] if name == "mixed" else None)
        change_sidecar(folder / name, run_id=name)
    assert not list((folder / "parts" / "parts" / "metrics").glob("*.csv"))
    return folder


def rows_of_items(run_dir):
    """Returns the rows that `send` passes on."""
    return [(item.step, item.metrics) for item in records_of(run_dir, ReadPosition())]


def rows_of_blocks(run_dir):
    """Returns the rows that a compaction writes."""
    return [
        (int(step), {name: float(value[at]) for name, (value, there) in block.columns.items() if there[at]})
        for block in run_blocks(run_dir)
        for at, step in enumerate(block.step)
    ]


def rows_followed(run_dir):
    """Returns the rows that `follow` yields."""
    with Follower(run_dir) as follower:
        return [(row.step, row.metrics) for row in follower.poll()]


def chart(run_dir):
    """Returns the columns that the page draws."""
    found = ColumnCache().read(run_dir, 0, ["acc", "late"])
    return found.known, found.block.step.tolist(), [found.block.columns[name] for name in ("acc", "late")]


def summaries(run_dir):
    """Returns the summaries of a run in the index."""
    with open_runs(run_dir.parent, scan=True) as runs:
        run = next(one for one in runs.query() if one.path == run_dir)
        return run.summary, run.metric_names(), run.series("late").value.tolist()


READERS = [
    lambda run_dir: [(row.step, row.metrics) for row in read_rows(run_dir)],
    lambda run_dir: [(row.step, row.metrics) for row in last_rows(run_dir, 150)],
    lambda run_dir: [(row.step, row.metrics) for row in last_rows(run_dir, 50, wanted=["acc"])],
    rows_of_items,
    rows_of_blocks,
    rows_followed,
    chart,
    summaries,
]


@pytest.mark.parametrize("read", READERS)
def test_every_reader_sees_the_rows_of_all_parts(written, read):
    """Rows, columns, last rows, summaries and charts equal the same run's in a single file."""
    for name in ("parts", "csv", "mixed"):
        np.testing.assert_equal(read(written / name), read(written / "whole"))


NUMBERS = [1.5, float("nan"), float("inf"), True, -0.0, 7, 2**53 + 1, 1 / 3, 10**400, 5e-324]


@pytest.mark.parametrize("seed", range(3))
def test_an_index_matches_the_rows_of_its_part(tmp_path, seed):
    """Each entry matches its rows, even if rows are merged, late, or have no step."""
    source = random.Random(seed)
    writer = Writer(tmp_path, part_bytes=120_000)
    for step in range(6000):
        row = {"loss": source.random()}
        if step % 5 == 0:
            row["acc"] = source.choice(NUMBERS[:-2]) if step > 2500 else 0.25
        if step > 3000:
            row[f"new{step // 1000}"] = float(step)
        if step % 50 == 0:
            row["epoch"] = step / 7
        writer.journal.append(row, step)
        if step % 11 == 0:
            writer.journal.append({"other": source.random(), "time": 1.0}, step)
        if source.random() < 0.002 or step % 1000 == 999:
            writer.drain.run()
    if seed == 2:
        writer.journal.append({"huge": 10**400}, 6000)
    writer.drain.run()
    writer.die()

    with take_snapshot(tmp_path, 0) as snapshot:
        checked = [check_index(file, index) for file, index in indexed_files(snapshot) if index is not None]
    assert len(checked) == len(numbers(tmp_path)) > 1


def check_index(file, index):
    """Checks each entry with its rows."""
    rows = list(file.rows())
    assert int(index.of_rows("rows").sum()) == len(rows)
    for entry, start in enumerate(range(0, len(rows), ENTRY_ROWS)):
        block = block_of_rows(rows[start : start + ENTRY_ROWS], index.columns)
        step = np.where(block.step == MISSING_STEP, np.nan, block.step.astype(np.float64))
        statistics = Aggregate()
        block.add_to(statistics)
        expected = [rows_entry(step, block.time), statistics.fields(index.columns).T.ravel()]
        np.testing.assert_equal(index.array[:, entry], np.concatenate(expected))


@pytest.mark.parametrize("batch", [400, 350, 5])
def test_folder_of_format_2_is_read_and_continued(tmp_path, batch):
    """Without a history, all parts count in order, followed by the continuing session's parts."""
    run_dir = tmp_path / "run"
    with WrittenInParts(run_dir) as run:
        for step in range(400):
            run.log({"loss": float(step)}, step)
            if step % 50 == 49:
                run.flush()
    (run_dir / "metrics.history.jsonl").unlink()
    sessions = (run_dir / "sessions.jsonl").read_text()
    sessions = re.sub(r', "sum": \d+}', "}", sessions).replace('"follows": null, ', "")
    (run_dir / "sessions.jsonl").write_text(sessions)
    as_csv(run_dir, numbers(run_dir)[:2])
    before = [row.step for row in read_rows(run_dir)]

    with WrittenInParts(run_dir, batch=batch) as run:
        for step in range(batch, batch + 10):
            run.log({"loss": -float(step)}, step)
    with WrittenInParts(run_dir, batch=batch + 10) as run:
        run.log({"loss": 0.5}, batch + 10)

    assert before == list(range(400))
    assert [row.step for row in read_rows(run_dir)] == [*range(batch + 11)]
    assert rows_left(run_dir) == [*range(batch, 400)]


def rows_left(run_dir):
    """Returns the steps of the abandoned rows, in order."""
    return sorted(itertools.chain.from_iterable(steps_left(run_dir)))


def test_a_part_in_both_formats_counts_once(tmp_path):
    """If an earlier version was killed between two steps, the CSV counts, whatever the Parquet contains."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(100))
    writer.die()
    as_csv(tmp_path, [1])
    part_path(parts_path(tmp_path / "metrics.csv"), 1).write_bytes(b"no Parquet")

    assert [row.step for row in read_rows(tmp_path)] == list(range(100))


def test_parts_of_earlier_versions_are_converted(tmp_path, written):
    """`pack` replaces CSV and old Parquet, keeps the rows, and leaves damaged parts alone."""
    run_dir = shutil.copytree(written / "csv", tmp_path / "run")
    folder = parts_path(run_dir / "metrics.csv")
    (folder / "00000001.npy").touch()
    expected = rows_now(run_dir)
    first, second, *_ = numbers(run_dir)

    found = [(part.number, reason) for part, reason in convert_parts(run_dir, 0)]

    assert found == [(number, "") for number in numbers(run_dir)]
    assert {path.suffix for path in folder.iterdir()} == {".parquet"}
    np.testing.assert_equal(rows_now(run_dir), expected)
    assert list(convert_parts(run_dir, 0)) == []
    # An earlier version's Parquet has no checksum of its footer.
    path = part_path(folder, first)
    data = path.read_bytes().replace(b'{"version": 2', b'{"version": 1')
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[: at - 8] + data[at:])
    part_path(folder, second).write_bytes(b"")
    ((_, why_first), (_, why_second)) = convert_parts(run_dir, 0)
    assert (why_first, "is damaged" in why_second) == ("", True)
    with contextlib.closing(ParquetRows(os.open(path, os.O_RDONLY))) as rows:
        assert rows.version == 2


def test_unused_names_are_not_columns_of_the_next_part(tmp_path):
    """The next file has the columns of its own rows."""
    writer = Writer(tmp_path, part_bytes=1500)
    writer.log([0], once=1.0)
    writer.log(range(1, 100))
    writer.drain.run()
    writer.log([100])
    writer.drain.run()
    writer.die()

    assert numbers(tmp_path) == [1]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,epoch,time,loss"
    assert read_rows(tmp_path)[0].metrics == {"loss": 0.0, "once": 1.0}


def test_a_row_without_columns_for_its_values_is_not_written():
    """A line with fewer cells than values would lose values silently."""
    formatter = RowFormatter(("loss", "acc"), {"step": 0, "epoch": 1, "time": 2, "loss": 3})

    assert formatter.missing == ["acc"]
    with pytest.raises(RuntimeError, match="acc"):
        formatter.line(1, 0, 1.0, (0.5, 0.25))


def test_two_names_with_one_column_keep_their_values(tmp_path):
    """A second call at the step gets its own line; a second name in the same call is refused."""
    with WrittenInParts(tmp_path / "run") as run:
        run.log({"step": 1.0}, 1)
        run.log({"metrics/step": 2.0}, 1)
        run.log({"step": 3.0, "metrics/step": 4.0}, 2)

    assert [row.metrics["metrics/step"] for row in read_rows(tmp_path / "run")] == [1.0, 2.0, 3.0]
    assert json.loads((tmp_path / "run" / "sidecar.json").read_bytes())["overhead"]["refused"] == 1


class OfNoSize(RunDirectory):
    """Fails in the writer thread with an error other than OSError."""

    _part_bytes = None


def test_our_own_error_in_the_writer_thread_is_reported_at_the_end(tmp_path):
    """The sidecar has the status and the error, and the journal has the rows."""
    run = Run([OfNoSize(tmp_path / "run")], run_name="x")
    run.log_metrics({"loss": 0.5}, 0)
    run.close()

    sidecar = json.loads((tmp_path / "run" / "sidecar.json").read_bytes())
    assert sidecar["status"] == "completed"
    assert "TypeError" in sidecar["overhead"]["last_error"]
    assert [row.metrics for row in read_rows(tmp_path / "run")] == [{"loss": 0.5}]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_a_regular_file_is_a_part(tmp_path, make):
    """A folder, a FIFO, or a link with the name of a later part is left alone."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(100))
    writer.die()
    make(part_path(parts_path(tmp_path / "metrics.csv"), 99))

    assert [row.step for row in read_rows(tmp_path)] == list(range(100))
    again = Writer(tmp_path)
    again.log([100])
    again.drain.run()
    again.die()
    shutil.rmtree(tmp_path / "journal")
    assert [row.step for row in read_rows(tmp_path)] == list(range(101))


def test_the_header_of_a_part_is_read_once(tmp_path, monkeypatch):
    """A run of a month has 440 parts; asking for names or one metric doesn't open all of them each time."""
    writer = Writer(tmp_path, part_bytes=1000)
    writer.log_and_drain(range(400))
    writer.journal.append({"late": 1.0}, 400)
    writer.drain.run()
    writer.die()
    known, opened, original = len(numbers(tmp_path)), [], ParquetRows.__init__
    monkeypatch.setattr(
        ParquetRows, "__init__", lambda rows, *given: opened.append(given) or original(rows, *given)
    )

    def names():
        with take_snapshot(tmp_path, 0) as snapshot:
            return metric_columns(snapshot)

    def opened_by(read):
        opened.clear()
        found = read()
        return found, len(opened)

    first, again = opened_by(names), opened_by(names)
    late = opened_by(functools.partial(read_series, tmp_path, "late"))
    shutil.copy(part_path(tmp_path / "parts/metrics", 1), tmp_path / "other")
    (tmp_path / "other").replace(part_path(tmp_path / "parts/metrics", 1))

    assert known > 2
    assert first[0] == again[0]
    assert first[1] == known
    assert again[1] == 0
    assert late[0].value.tolist() == [1.0]
    assert late[1] < known
    assert opened_by(names)[1] == 1
