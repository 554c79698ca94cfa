"""New rows of a run as they come.

A follower reads the journal, as the writer's own thread does, and turns to the CSV only where the writer has drained and removed a
segment before it was read. It holds the CSV open as it was when it last looked there: while the run still has that very file, what
lies beyond the place reached then is new. Where the writer has replaced the file (more columns, or a resume) rows are
told by the times at which they were logged.

Reads and never writes. A follower belongs to one thread.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import attrs

from destinations.run_directory.csv_text import parse_header
from destinations.run_directory.frames import MAGIC, Keys, frames
from destinations.run_directory.layout import (
    column_of,
    journal_path,
    metrics_name,
    segment_number,
    segment_path,
    segment_paths,
)
from destinations.run_directory.rows import MetricRow, rows_of
from destinations.run_directory.snapshot import CsvPart, take_snapshot

__all__ = ["Follower", "Point", "follow_metric", "follow_rows"]


@attrs.frozen
class Point:
    """A value that was logged.

    Attributes:
        step: of the row; None where it has none.
        time: of the row, in seconds since 1970; None where the file does not say.
        value: as it was logged.
    """

    step: int | None
    time: float | None
    value: float


def follow_rows(
    run_dir: Path,
    rank: int,
    *,
    is_over: Callable[[], bool],
    poll_seconds: float,
    stop: threading.Event | None = None,
) -> Iterator[MetricRow]:
    """Returns rows as they come, the ones that there are first; see `Run.follow`.

    Args:
        run_dir: the folder of the run.
        rank: whose rows.
        is_over: whether no more rows will come; asked before each look at the files.
        poll_seconds: how long to wait after each look.
        stop: ends the following.
    """
    stop = threading.Event() if stop is None else stop
    with Follower(run_dir, rank) as follower:
        while not stop.is_set():
            was_over = is_over()
            yield from follower.poll()
            if was_over or stop.wait(poll_seconds):
                return


def follow_metric(rows: Iterator[MetricRow], name: str) -> Iterator[Point]:
    """Returns the values of one metric of rows as they come."""
    wanted = {column_of(name), name}
    for row in rows:
        for column in wanted & row.metrics.keys():
            yield Point(row.step, row.time, row.metrics[column])


@attrs.define
class _Segment:
    """A segment that is read while it is written; its file stays readable when the writer has removed it."""

    fd: int
    number: int
    offset: int
    names: dict[int, tuple[str, ...]] = attrs.field(factory=dict)

    def rows(self) -> Iterator[MetricRow]:
        """Returns the rows that are new."""
        start = self.offset if self.names else len(MAGIC)
        data = os.pread(self.fd, max(0, os.fstat(self.fd).st_size - start), start)
        for end, record in frames(data):
            is_new = start + end > self.offset
            if isinstance(record, Keys):
                self.names[record.schema] = record.names
            elif is_new and isinstance(record, tuple):
                schema, step, epoch, at, values = record
                names = self.names.get(schema, ())
                if len(names) == len(values):
                    numbers = [int(one) if isinstance(one, bool) else one for one in values]
                    metrics = dict(zip(map(column_of, names), numbers, strict=True))
                    yield MetricRow(step, metrics.pop("epoch", epoch), at, metrics)
            self.offset = max(self.offset, start + end)

    def is_at(self, path: Path) -> bool:
        """Says whether this is the file that the path names."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self.fd))
        except OSError:
            return False


class _Latest:
    """What was handed out last, by which rows are known again that come from another file."""

    def __init__(self) -> None:
        self._time = -math.inf
        self._step: int | None = None
        self._cells: dict[str, float] = {}

    def take(self, row: MetricRow) -> None:
        """Remembers a row that is handed out."""
        at = _rounded(row.time)
        if row.step != self._step:
            self._step, self._cells = row.step, {}
        self._cells.update(row.metrics)
        self._time = max(self._time, at)

    def unknown(self, row: MetricRow) -> MetricRow | None:
        """Returns the row without what was handed out; None where nothing is left."""
        at = _rounded(row.time)
        if at < self._time:
            return None
        if row.step != self._step:
            return row
        # Calls of one step may have become one row since, with the time of the last.
        left = {
            name: value
            for name, value in row.metrics.items()
            if name not in self._cells or not _is_same(value, self._cells[name])
        }
        return attrs.evolve(row, metrics=left) if left else None


class Follower:
    """Reads what is new in the metrics of a rank, each row once.

    Args:
        run_dir: the folder of the run.
        rank: whose rows.
    """

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._journal = journal_path(run_dir, rank)
        self._segment: _Segment | None = None
        self._csv = CsvPart(-1, b"", 0)
        self._csv_rows = 0
        self._first: MetricRow | None = None
        self._stamp: object = None
        self._is_begun = False
        # Values read from the journal since the CSV was read last, up to its end; and how many of those to come were read already.
        self._cells = 0
        self._skip = 0
        self._latest = _Latest()
        self._is_matching = False

    def poll(self) -> list[MetricRow]:
        """Returns the rows that came since the last call, at the first all that there are."""
        rows: list[MetricRow] = []
        if self._segment is None:
            self._look_at_csv(rows)
        else:
            self._follow_journal(rows)
        for row in rows:
            self._latest.take(row)
        return rows

    def close(self) -> None:
        """Lets go of the files."""
        self._leave_segment()
        self._csv.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the journal -----------------------------------------------------------------------------------------------

    def _follow_journal(self, rows: list[MetricRow]) -> None:
        while self._segment is not None:
            number = self._segment.number
            # Looked at before it is read: what has a successor, or is gone, cannot grow while it is read.
            is_there = self._segment.is_at(segment_path(self._journal, number))
            later = [found for found in map(segment_number, segment_paths(self._journal)) if found > number]
            for row in self._segment.rows():
                self._take_journal_row(row, rows)
            self._is_matching = False
            if is_there and not later:
                return
            if is_there and later[0] == number + 1 and self._enter_segment(number + 1, len(MAGIC)):
                continue
            self._leave_segment()
            self._look_at_csv(rows)

    def _take_journal_row(self, row: MetricRow, rows: list[MetricRow]) -> None:
        count = len(row.metrics)
        self._cells += count
        if self._skip:
            self._skip = max(0, self._skip - count)
            return
        found = self._latest.unknown(row) if self._is_matching else row
        if found is not None:
            rows.append(found)

    def _enter_segment(self, number: int, offset: int) -> bool:
        try:
            fd = os.open(segment_path(self._journal, number), os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        self._leave_segment()
        self._segment = _Segment(fd, number, offset)
        return True

    def _leave_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            os.close(segment.fd)

    # --- the CSV ---------------------------------------------------------------------------------------------------

    def _look_at_csv(self, rows: list[MetricRow]) -> None:
        """Takes what is new in the CSV, and goes on in the journal from where it ends."""
        stamp = self._stamp_of_files()
        if stamp is not None and stamp == self._stamp:
            return
        with take_snapshot(self._run_dir, self._rank) as snapshot:
            place = snapshot.place
            taken = self._take_csv(snapshot.csv, rows)
            if not taken:
                return
            fd = snapshot.csv.take()
            self._csv.close()
            self._csv = CsvPart(fd, snapshot.csv.header, snapshot.csv.end)
        self._is_begun = True
        self._stamp = stamp
        self._cells = 0
        if place is None:
            numbers = [segment_number(path) for path in segment_paths(self._journal)]
            place = (numbers[0], len(MAGIC)) if numbers else None
        if place is not None and self._enter_segment(*place):
            for row in rows:
                self._latest.take(row)
            self._follow_journal(rows)

    def _take_csv(self, csv: CsvPart, rows: list[MetricRow]) -> bool:
        """Takes the rows of a CSV that are new; False where it is being rewritten by a program that does so in place."""
        if not self._is_begun:
            found = list(_rows(csv))
            self._count(found, 0)
            rows += found
            return True
        if self._is_continued(csv):
            found = list(_rows(csv, None if self._csv.fileno() < 0 else self._csv.end))
            self._count(found, self._csv_rows)
            skip = self._cells
            for row in found:
                if skip:
                    skip = max(0, skip - len(row.metrics))
                else:
                    rows.append(row)
            self._skip = skip
            return True
        return self._take_other(list(_rows(csv)), rows)

    def _take_other(self, found: list[MetricRow], rows: list[MetricRow]) -> bool:
        """Takes the new rows of a file that has replaced the one before."""
        if any(row.time is not None for row in found):
            for row in rows:
                self._latest.take(row)
            rows += [left for row in found if (left := self._latest.unknown(row)) is not None]
            self._skip, self._is_matching = 0, True
        elif self._first is not None and found[:1] == [self._first]:
            if len(found) < self._csv_rows:
                return False
            rows += found[self._csv_rows :]
        elif found:
            rows += found
        elif self._csv_rows:
            return False
        self._count(found, 0)
        return True

    def _is_continued(self, csv: CsvPart) -> bool:
        """Says whether a CSV is the one that was read before, with rows added, if any."""
        if self._csv.fileno() < 0:
            return self._cells == 0
        if csv.fileno() < 0:
            return False
        is_same = os.path.samestat(os.fstat(csv.fileno()), os.fstat(self._csv.fileno()))
        return is_same and csv.header == self._csv.header and csv.end >= self._csv.end

    def _count(self, found: list[MetricRow], before: int) -> None:
        self._csv_rows = before + len(found)
        if before == 0 and found:
            self._first = found[0]

    def _stamp_of_files(self) -> object:
        """Returns what changes when there is something to read; None where that cannot be told."""
        if self._journal.exists():
            return None
        try:
            found = (self._run_dir / metrics_name(self._rank)).stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def _rows(csv: CsvPart, start: int | None = None) -> Iterator[MetricRow]:
    columns = parse_header(csv.header)
    for chunk in csv.chunks(start):
        yield from rows_of(columns, chunk)


def _rounded(at: float | None) -> float:
    """Returns a time as the CSV has it."""
    return -math.inf if at is None else round(at, 6)


def _is_same(first: float, second: float) -> bool:
    return first == second or (first != first and second != second)  # noqa: PLR0124  # NaN
