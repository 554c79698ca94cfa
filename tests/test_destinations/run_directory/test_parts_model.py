"""Random rows, names, resumes, reopenings, kills and full disks: every reader sees a list's rows."""

import errno
import itertools
import math
import random
import shutil
from collections import Counter

import numpy as np
import pytest

from destinations.history.snapshot import last_rows, take_snapshot
from destinations.run_directory import read_rows
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import column_of, journal_path, part_numbers, parts_path
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.runs.content.follow import Follower
from destinations.runs.content.series import read_series, run_blocks
from destinations.runs.content.sources import branches_of
from destinations.runs.move.ledger import ReadPosition
from destinations.runs.move.stored import records_of
from destinations.runs.summary import computed_summary
from destinations.viewer import columns
from destinations.viewer.columns import ColumnCache
from events import State
from tests.effort import times
from tests.test_destinations.run_directory.test_parts import IDS, as_csv, numbers
from uploads.disk import Disk

NAMES = ["loss", "acc", "epoch", "step", "a,b", "x0", "x1", "x2", "x3", "x4"]
NUMBERS = [0.25, 1, -3, True, float("nan"), float("inf"), 2**53, 1 / 3, -0.0]


class Killed(BaseException):
    """The process was killed."""


class RandomDisk(Disk):
    """Never waits; fails or kills at any operation."""

    def __init__(self, source):
        self.source = source
        self.full, self.kill = 0.0, 0.0

    def _may_fail(self):
        chance = self.source.random()
        if chance < self.kill:
            raise Killed
        if chance < self.kill + self.full:
            raise OSError(errno.ENOSPC, "full")

    def open(self, path, flags, mode=0o666):
        self._may_fail()
        return super().open(path, flags, mode)

    def write(self, fd, data, offset):
        if self.source.random() < self.kill:
            super().write(fd, data[: len(data) // 2], offset)
            raise Killed
        self._may_fail()
        super().write(fd, data, offset)

    def truncate(self, fd, size):
        self._may_fail()
        super().truncate(fd, size)

    def sync(self, fd):
        self._may_fail()

    def sync_folder(self, path):
        self._may_fail()

    def replace(self, source, target):
        self._may_fail()
        super().replace(source, target)
        self._may_fail()

    def unlink(self, path):
        self._may_fail()
        super().unlink(path)


class Model:
    """A run, and its expected content.

    Args:
        run_dir: its folder.
        seed: seeds everything that happens.
    """

    def __init__(self, run_dir, seed):
        self.run_dir = run_dir
        self.source = random.Random(seed)
        self.disk = RandomDisk(self.source)
        self.clock = itertools.count(1000)
        self.rows = []
        self.dropped = []
        self.step = 0
        self.cache = ColumnCache()
        self.follower = Follower(run_dir)
        # Rows that the follower hasn't seen, unless a resume came between.
        self.news = []
        # With integers of more than 53 bits among floats, a part stays CSV.
        self.numbers = NUMBERS if seed % 2 else [one for one in NUMBERS if one != 2**53]
        self.is_open = False
        self.open()

    def open(self):
        """Begins a session."""
        self.folder = journal_path(self.run_dir, 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(
            self.folder, State("x"), segment_bytes=4096, clock=lambda: float(next(self.clock))
        )
        self.journal.begin_session(f"{next(IDS):012d}")
        csv = MetricsCsv(self.run_dir / "metrics.csv", self.disk)
        part_bytes = self.source.choice([300, 900, 3000])
        self.drain = JournalDrain(
            self.run_dir, self.folder, csv, self.journal, part_bytes=part_bytes, disk=self.disk
        )

    def end(self, *, is_killed):
        """Ends a session; one that is not killed leaves no journal."""
        if not is_killed:
            self.disk.full = self.disk.kill = 0.0
            self.drain.run()
        self.journal.close()
        for segment in list(self.journal.files.segments):
            segment.close()
        if not is_killed and self.drain.source.is_drained():
            assert self.drain.lost_rows() == 0
            shutil.rmtree(self.run_dir / "journal")
        self.drain._csv.close()

    def log(self):
        """Logs a row, often for the same step."""
        names = self.source.sample(NAMES, self.source.choice([1, 1, 2, 3]))
        if self.source.random() < 0.05:
            names.append(f"new{self.step}")
        if self.source.random() < 0.03:
            names += [f"n{self.source.randrange(30)}.{number}" for number in range(20)]
        row = {name: self.source.choice([*self.numbers, self.source.random()]) for name in names}
        step = self.step
        if self.source.random() < 0.02:
            step += 500
        self.journal.append(row, step)
        self.rows.append((step, row))
        self.news.append((step, row))
        self.step += self.source.random() < 0.8

    def resume(self):
        """Goes back a few steps."""
        self.step = self.source.randint(max(0, self.step - self.source.choice([5, 40, 400])), self.step)
        self.journal.begin_session(f"{next(IDS):012d}")
        self.journal.mark_resume(self.step, None)
        self.dropped += [one for one in self.rows if one[0] >= self.step]
        self.rows = [one for one in self.rows if one[0] < self.step]
        self.news = None

    def run(self):
        """Drains, and reopens after a kill."""
        self.disk.full = self.source.choice([0.0, 0.0, 0.02, 0.2])
        self.disk.kill = self.source.choice([0.0, 0.0, 0.02])
        try:
            self.drain.run()
        except OSError:
            pass
        except Killed:
            self.disk.full = self.disk.kill = 0.0
            self.end(is_killed=True)
            self.open()
        self.disk.full = self.disk.kill = 0.0

    def act(self):
        """Does something, then logs again as if nothing had happened."""
        for _ in range(self.source.choice([1, 5, 40])):
            self.news = [] if self.news is None else self.news
            self.log()
            if self.source.random() < 0.2:
                self.run()
        match self.source.random():
            case chance if chance < 0.2:
                self.resume()
            case chance if chance < 0.3:
                self.end(is_killed=self.source.random() < 0.5)
                self.open()
        if self.source.random() < 0.7:
            self.run()


def values_of(rows):
    """Returns the values of each step, in order; calls of a step may share a row."""
    metrics = [
        (step, {column_of(name): row[name] + 0 for name in row if name != "epoch"}) for step, row in rows
    ]
    found = []
    for step, group in itertools.groupby((one for one in metrics if one[1]), key=lambda row: row[0]):
        by_column = {}
        for _, row in group:
            for column, value in row.items():
                by_column.setdefault(column, []).append(value)
        found.append((step, by_column))
    return found


def same(one, other):
    """Checks for equality; NaN equals itself."""
    np.testing.assert_equal(one, other)


def check_rows(model):
    """Checks the readers of rows."""
    run_dir, expected = model.run_dir, values_of(model.rows)
    rows = read_rows(run_dir)
    same(values_of([(row.step, row.metrics) for row in rows]), expected)
    assert [row.epoch for row in rows if row.epoch is None] == []
    count = model.source.choice([1, 7, 60])
    same([row.metrics for row in last_rows(run_dir, count)], [row.metrics for row in rows[-count:]])
    wanted = model.source.choice(["loss", "x3"])
    having = [row.metrics for row in rows if wanted in row.metrics]
    same([row.metrics for row in last_rows(run_dir, count, wanted=[wanted])], having[-count:])
    same(values_of([(item.step, item.metrics) for item in records_of(run_dir, ReadPosition())]), expected)
    found = [row for block in run_blocks(run_dir) for row in rows_of(block)]
    as_floats = [(step, {k: list(map(float, one)) for k, one in by.items()}) for step, by in expected]
    same(values_of(found), as_floats)
    return rows


def rows_of(block):
    """Returns step and metrics of each row of a block."""
    for at, step in enumerate(block.step.tolist()):
        there = {name: values[at] for name, (values, has) in block.columns.items() if has[at]}
        yield step, {name: float(value) for name, value in there.items()}


def check_columns(model, rows):
    """Checks the readers of one metric, and those that use indexes."""
    run_dir = model.run_dir
    summary = computed_summary(run_dir, 0)
    counted = Counter(name for row in rows for name in row.metrics)
    same({name: one.count for name, one in summary.items() if one.count}, dict(counted))
    frame = model.cache.read(run_dir, 0, ["loss", "x1", "x2"])
    for name in ["loss", "x1"]:
        logged = [(row.step, float(row.metrics[name])) for row in rows if name in row.metrics]
        if not logged:
            continue
        series = read_series(run_dir, name)
        same(list(zip(series.step.tolist(), series.value.tolist(), strict=True)), logged)
        finite = [value for _, value in logged if math.isfinite(value)]
        one = summary[name]
        # An index rounds integers of more than 53 bits.
        found = [None if bound is None else float(bound) for bound in (one.last, one.min, one.max)]
        same(found, [logged[-1][1], *_bounds(finite)])
        column = frame.column(name)
        in_index = sum(
            int(part.index.of_column(name)[0].sum()) for part in frame.closed if name in part.index.columns
        )
        assert in_index + int(frame.block.columns[column][1].sum()) == len(logged)
    if frame.block.columns:
        assert len(frame.block) + sum(int(part.index.of_rows("rows").sum()) for part in frame.closed) == len(
            rows
        )


def _bounds(values):
    return (min(values), max(values)) if values else (None, None)


def check_follower(model):
    """Checks that the follower yields everything since its last look; a resume may hide rows."""
    found = values_of([(row.step, row.metrics) for row in model.follower.poll()])
    if model.news is not None:
        same(found, values_of(model.news))
    model.news = []


def check_parts(model):
    """Checks that nothing is missing, and that no part is much larger than the limit."""
    with take_snapshot(model.run_dir, 0) as snapshot:
        assert snapshot.damage(is_whole=False) == []
        sizes = [part.size for part in snapshot.parts]
    # A turn writes a few kilobytes at most.
    assert max(sizes, default=0) < 40_000


def check_left(model):
    """Checks that every abandoned row of a session is there, and nothing else."""
    left = set()
    for branch in branches_of(model.run_dir):
        for row in itertools.chain.from_iterable(file.rows() for file in branch.files()):
            left |= {(row.step, name, repr(float(value))) for name, value in row.metrics.items()}
    dropped = {
        (step, column_of(name), repr(float(value)))
        for step, row in model.dropped
        for name, value in row.items()
        if name != "epoch"
    }
    assert dropped <= left
    logged = dropped | {
        (step, column_of(name), repr(float(value)))
        for step, row in model.rows
        for name, value in row.items()
        if name != "epoch"
    }
    assert left <= logged


@pytest.mark.parametrize("seed", range(times(3, 600)))
def test_every_reader_sees_the_logged_rows(tmp_path, monkeypatch, seed):
    """This holds whatever happens between two looks, and at the end, with and without the journal."""
    monkeypatch.setattr(columns, "MAX_HELD_BYTES", [0, 2000, 64 << 20][seed % 3])
    model = Model(tmp_path, seed)
    for _ in range(times(6, 12)):
        model.act()
        rows = check_rows(model)
        check_columns(model, rows)
        check_follower(model)
    model.end(is_killed=False)

    assert not (tmp_path / "journal").exists()
    rows = check_rows(model)
    check_columns(model, rows)
    check_parts(model)
    check_left(model)
    as_csv(tmp_path, model.source.sample(numbers(tmp_path), len(numbers(tmp_path)) // 2))
    check_columns(model, check_rows(model))
    check_follower(model)
    check_parts(model)
    model.follower.close()
    assert part_numbers(parts_path(tmp_path / "metrics.csv")) or len(model.rows) < 60
