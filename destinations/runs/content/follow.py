"""`Follower`: yields the rows of a run as they are written, each once.

A follower reads the journal, and the CSV only if the writer drained and removed a segment before it was read.
It holds the CSV open as of its last look there, and keeps the rows that it has read from the journal since:
together they are what was yielded, in order. The current CSV begins with these rows, less those removed by a
resume; the rest is new. Times are compared only where a resume has removed parts. Memory is bounded:
following 10,000,000 rows took 62 s of processor time and 50 MB.

A follower never writes, and belongs to one thread.
"""

import contextlib
import itertools
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal, Self

import attrs

from destinations.history.row_chain import RowChain
from destinations.run_directory.frames import MAGIC, Keys, iter_frames
from destinations.run_directory.layout import (
    column_of,
    journal_path,
    metrics_name,
    segment_number,
    segment_path,
    segment_paths,
)
from destinations.run_directory.reader import (
    CsvSnapshot,
    MetricRow,
    MetricsSnapshot,
    Part,
    PartChangedError,
    has_any_metric,
    last_file_rows,
    last_rows,
    open_existing,
    retried,
    retried_items,
    row_of,
)
from destinations.run_directory.segments import FIRST_BYTES, JournalPlace, continues_from
from destinations.runs.streams import Stream, by_time, reported, streams_of

from .rank_reader import Look, RankReader
from .sources import branches_of

__all__ = ["Follower", "Point", "follow_metric", "follow_rows", "last_rows_of_run"]

# The CSV rounds times to microseconds.
_TIME_SECONDS = 2e-6


@attrs.frozen
class Point:
    """A logged value.

    Attributes:
        step: of the row; None if it has none.
        time: of the row, in seconds since 1970; None if unknown.
        value: as logged.
        writer: of a run that several write, the name of its writer; "" for the trainer.
    """

    step: int | None
    time: float | None
    value: float
    writer: str = ""


def follow_rows(
    run_dir: Path,
    rank: int,
    *,
    is_over: Callable[[], bool],
    poll_seconds: float,
    stop: threading.Event | None = None,
    last: int | None = None,
    wanted: Collection[str] = (),
) -> Iterator[MetricRow]:
    """Yields existing rows, then new ones, of all writers; see `Run.follow`.

    Args:
        run_dir: the folder of the run.
        rank: of the rows.
        is_over: returns whether no more rows will be written; called before each look at the files.
        poll_seconds: time between two looks.
        stop: ends the iteration when set.
        last: yield only so many existing rows, the last ones; None for all.
        wanted: columns; rows without any of them are skipped. Empty for all rows.
    """
    stop = threading.Event() if stop is None else stop
    with _Followers(run_dir, rank) as followers:
        while not stop.is_set():
            was_over = is_over()
            yield from (row for row in followers.rows(last, wanted) if has_any_metric(row, wanted))
            if was_over or stop.wait(poll_seconds):
                return


def last_rows_of_run(
    run_dir: Path, count: int, rank: int = 0, wanted: Collection[str] = ()
) -> list[MetricRow]:
    """Returns the last rows of all writers, in the order of logging; see `reader.last_rows`."""
    found: list[Iterable[MetricRow]] = []
    for stream in streams_of(run_dir):
        with reported(stream):
            found.append(_named(last_rows(stream.folder, count, rank, wanted), stream))
    return list(deque(by_time(found, operator.attrgetter("time")), maxlen=count))


def _named(rows: Iterable[MetricRow], stream: Stream) -> Iterable[MetricRow]:
    return (attrs.evolve(row, writer=stream.writer) for row in rows) if stream.writer else rows


class _Followers:
    """The followers of all writers of a run, also of those that begin to write while it is followed.

    Args:
        run_dir: the folder of the run.
        rank: of the rows.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._followers: dict[str, Follower] = {}
        self._left_out: set[str] = set()

    def rows(self, last: int | None, wanted: Collection[str]) -> Iterator[MetricRow]:
        """Yields the rows written since the last call, in the order of logging; iterate it to its end.

        Args:
            last: on the first call, yield only so many, the last ones.
            wanted: as for `Follower.begin`.
        """
        is_first = not self._followers
        streams = [stream for stream in streams_of(self._run_dir) if stream.writer not in self._left_out]
        # There may be very many existing rows: they are not held.
        rows = [self._rows_of(stream, last if is_first else None, wanted) for stream in streams]
        if len(rows) == 1:
            yield from rows[0]
            return
        merged = by_time(rows, operator.attrgetter("time"))
        yield from merged if last is None or not is_first else deque(merged, maxlen=last)

    def _rows_of(self, stream: Stream, last: int | None, wanted: Collection[str]) -> Iterator[MetricRow]:
        follower = self._followers.get(stream.writer)
        # Until it was read to its end.
        self._left_out.add(stream.writer)
        with reported(stream):
            if follower is None:
                follower = self._followers[stream.writer] = Follower(stream.folder, self._rank)
                yield from _named(follower.begin(last, wanted), stream)
            else:
                yield from _named(follower.poll(), stream)
            self._left_out.discard(stream.writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for follower in self._followers.values():
            follower.close()


def follow_metric(rows: Iterator[MetricRow], name: str) -> Iterator[Point]:
    """Yields the values of one metric."""
    wanted = {column_of(name), name}
    for row in rows:
        for column in wanted & row.metrics.keys():
            yield Point(row.step, row.time, row.metrics[column], row.writer)


@attrs.define
class _Segment:
    """A segment of the journal; its file stays readable after the writer removes it."""

    fd: int
    number: int
    offset: int
    names: dict[int, tuple[str, ...]] = attrs.field(factory=dict)

    def rows(self) -> Iterator[tuple[JournalPlace, MetricRow]]:
        """Yields the new rows, each with the place after it."""
        start = self.offset if self.names else len(MAGIC)
        data = os.pread(self.fd, max(0, os.fstat(self.fd).st_size - start), start)
        for end, record in iter_frames(data):
            is_new = start + end > self.offset
            self.offset = max(self.offset, start + end)
            match record:
                case Keys():
                    self.names[record.schema] = record.names
                case (schema, step, epoch, at, values) if is_new:
                    names = self.names.get(schema, ())
                    if len(names) == len(values):
                        yield (self.number, self.offset), row_of(names, step, epoch, at, values)

    def is_at(self, path: Path) -> bool:
        """Returns whether the path is this file."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self.fd))
        except OSError:
            return False


class Follower:
    """Reads the metrics of a rank of one writer, each row once.

    Args:
        run_dir: the folder of the run.
        rank: of the rows.
    """

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._reader = RankReader(run_dir, rank)
        self._journal = journal_path(run_dir, rank)
        self._segment: _Segment | None = None
        self._csv = CsvSnapshot(-1, b"", 0)
        # The parts before it.
        self._parts: tuple[Part, ...] = ()
        # Of its rows and those of the parts, if there are parts.
        self._last_time = 0.0
        self._csv_rows = 0
        self._first: MetricRow | None = None
        self._extent: object = None
        self._is_begun = False
        # Rows from the journal that the CSV did not have at the last look.
        self._recent: deque[tuple[JournalPlace, MetricRow]] = deque()
        # Yielded rows that the CSV did not have, and that may be read from the journal again.
        self._again: list[MetricRow] = []
        # How much of the history there was at the last look.
        self._history = 0

    def poll(self) -> list[MetricRow]:
        """Returns the rows written since the last call; all rows on the first."""
        if not self._is_begun:
            return list(self.begin())
        rows: list[MetricRow] = []
        if self._segment is None:
            self._read_csv(rows)
        else:
            self._follow_journal(rows)
        return rows

    def begin(self, last: int | None = None, wanted: Collection[str] = ()) -> Iterator[MetricRow]:
        """Yields the existing rows without holding those of the CSV; iterate it to its end before `poll`.

        Args:
            last: only so many, the last ones; None for all.
            wanted: columns; only rows with one of them count for `last`. Empty for all rows.
        """
        yield from retried_items(lambda: self._begin(last, wanted))

    def _begin(self, last: int | None, wanted: Collection[str]) -> Iterator[MetricRow]:
        rows: list[MetricRow] = []
        extent = self._reader.extent()
        with self._reader.look(with_records=False) as look:
            csv = look.snapshot.csv
            last_time = _last_time(look.snapshot)
            self._first = next(csv.rows(), None)
            if last is None:
                for file in look.snapshot.files():
                    # In the end the number of rows of the CSV.
                    self._csv_rows = 0
                    for row in file.rows():
                        self._csv_rows += 1
                        yield row
            else:
                rows = last_file_rows(look.snapshot, last, wanted)
                # Detects a file rewritten in place by another writer.
                is_own = self._first is None or self._first.time is not None
                self._csv_rows = len(rows) if is_own else sum(1 for _ in csv.rows())
            self._hold(look, last_time)
        self._continue_from(look.snapshot.place, extent, rows)
        yield from (
            rows if last is None else deque((row for row in rows if has_any_metric(row, wanted)), maxlen=last)
        )

    def close(self) -> None:
        """Closes the files."""
        self._leave_segment()
        self._csv.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The journal.

    def _follow_journal(self, rows: list[MetricRow]) -> None:
        while self._segment is not None:
            number = self._segment.number
            # Checked before reading: a segment that has a successor, or is removed, does not grow any more.
            is_there = self._segment.is_at(segment_path(self._journal, number))
            later = [found for found in map(segment_number, segment_paths(self._journal)) if found > number]
            for place, row in self._segment.rows():
                self._take_journal_row(place, row, rows)
            if is_there:
                entered = self._enter_successor(later)
                if entered:
                    # Later, where a resume replaces parts just now.
                    with contextlib.suppress(PartChangedError):
                        self._forget_drained()
                    continue
                if entered is None:
                    return
            self._leave_segment()
            self._read_csv(rows)

    def _take_journal_row(self, place: JournalPlace, row: MetricRow, rows: list[MetricRow]) -> None:
        self._recent.append((place, row))
        known = next((at for at, one in enumerate(self._again) if _is_same_row(one, row)), None)
        if known is None:
            self._again = []
            rows.append(row)
        else:
            self._again = self._again[known + 1 :]

    def _enter_successor(self, later: list[int]) -> bool | None:
        """Enters the next segment. Returns None if there is none, and False if one was removed."""
        segment = self._segment
        for number in later:
            fd = open_existing(segment_path(self._journal, number))
            if fd < 0:
                return False
            first = os.pread(fd, FIRST_BYTES, 0)
            if segment is not None and continues_from(first, (segment.number, segment.offset)):
                self._leave_segment()
                self._segment = _Segment(fd, number, len(MAGIC))
                return True
            os.close(fd)  # It lacks the rows before it after a power loss, or was just created.
        return None

    def _forget_drained(self) -> None:
        """Holds the current CSV, and drops the rows that it contains, which bounds memory."""
        segment = self._segment
        with self._reader.look(with_records=False) as look:
            place = look.snapshot.place
            if segment is None or place is None or place > (segment.number, segment.offset):
                return  # The CSV also has rows that were not read yet.
            if look.snapshot.csv.fileno() >= 0:
                self._hold(look, _last_time(look.snapshot))
        while self._recent and self._recent[0][0] <= place:
            self._recent.popleft()

    def _enter_segment(self, number: int, offset: int) -> bool:
        fd = open_existing(segment_path(self._journal, number))
        if fd < 0:
            return False
        self._leave_segment()
        self._segment = _Segment(fd, number, offset)
        return True

    def _enter_following(self, place: JournalPlace) -> bool:
        """Enters the first segment that continues from a place in one that is gone, as before the first."""
        for number in map(segment_number, segment_paths(self._journal)):
            fd = open_existing(segment_path(self._journal, number)) if number > place[0] else -1
            if fd >= 0 and continues_from(os.pread(fd, FIRST_BYTES, 0), place):
                self._leave_segment()
                self._segment = _Segment(fd, number, len(MAGIC))
                return True
            if fd >= 0:
                os.close(fd)
        return False

    def _leave_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            os.close(segment.fd)

    # The CSV.

    def _read_csv(self, rows: list[MetricRow]) -> None:
        """Reads new rows of the CSV, then the journal from where the CSV ends."""
        extent = self._reader.extent()
        if extent == self._extent:
            return
        place = retried(lambda: self._take_look(rows))
        if place is not False:
            self._continue_from(place, extent, rows)

    def _take_look(self, rows: list[MetricRow]) -> JournalPlace | Literal[False] | None:
        """Reads new rows of the CSV; returns where it ends, and False while another program rewrites it."""
        with self._reader.look(with_records=False) as look:
            # First, as a part may have been replaced.
            last_time = _last_time(look.snapshot)
            if not self._take_csv(look, rows):
                return False
            self._hold(look, last_time)
        return look.snapshot.place

    def _continue_from(self, place: JournalPlace | None, extent: object, rows: list[MetricRow]) -> None:
        """Reads the journal from the place where the CSV ends."""
        self._is_begun = True
        self._extent = extent
        if place is None:
            numbers = [segment_number(path) for path in segment_paths(self._journal)]
            place = (numbers[0], len(MAGIC)) if numbers else None
        if place is not None and (self._enter_segment(*place) or self._enter_following(place)):
            self._follow_journal(rows)

    def _hold(self, look: Look, last_time: float) -> None:
        """Keeps the file open in its present state, to compare with its next."""
        self._reader.note(look)
        self._parts, self._last_time = look.snapshot.parts, last_time
        csv = look.snapshot.csv
        header, end, fd = csv.header, csv.end, csv.take()
        self._csv.close()
        self._csv = CsvSnapshot(fd, header, end)
        self._history = look.snapshot.history

    def _take_csv(self, look: Look, rows: list[MetricRow]) -> bool:
        """Reads new rows of a CSV; returns False while another program rewrites it in place."""
        if look.is_continued:
            found: list[MetricRow] = []
            for file, start in look.pieces():
                of_file = list(file.rows(start))
                if start <= file.first:
                    self._first, self._csv_rows = next(iter(of_file), None), 0
                self._csv_rows += len(of_file)
                found += of_file
            rows += self._unknown(found, iter(()))
            return True
        return self._take_other(look, rows)

    def _unknown(self, found: Iterable[MetricRow], before: Iterator[MetricRow]) -> list[MetricRow]:
        """Returns the rows of a CSV that were not yielded.

        Args:
            found: rows of the CSV.
            before: rows of the CSV at the last look that may be among these.
        """
        handed = [*self._again, *(row for _, row in self._recent)]
        self._recent.clear()
        self._again = []
        rows = iter(found)
        new: list[MetricRow] = []
        at = 0
        for row in rows:
            # Yielded rows come first and in order, possibly with gaps: each is searched after the previous.
            if any(_is_same_row(row, one) for one in before):
                continue
            known, left = self._find(row, handed, at)
            if known is None:
                return [*new, row, *rows]
            at = known
            new += [] if left is None else [left]
        self._again = handed[at:]
        return new

    def _find(
        self, row: MetricRow, handed: list[MetricRow], start: int
    ) -> tuple[int | None, MetricRow | None]:
        """Searches a line among yielded rows; several rows of one step may have become one line.

        Returns:
            Where to continue the search, None if not found; and the part of the line that was not yielded, if
            any.
        """
        for first in range(start, len(handed)):
            cells: dict[str, float] = {}
            for at in range(first, len(handed)):
                one = handed[at]
                if not _is_part(one, row) or not cells.keys().isdisjoint(one.metrics):
                    break
                cells |= one.metrics
                if len(cells) == len(row.metrics) and _is_same_time(one.time, row.time):
                    return at + 1, None
            else:
                left = {name: value for name, value in row.metrics.items() if name not in cells}
                if left and not self._is_left(handed[-1]):
                    return len(handed), attrs.evolve(row, metrics=left)
        return None, None

    def _is_left(self, row: MetricRow) -> bool:
        """Returns whether a row was left behind since the last look at the CSV."""
        csv = self._run_dir / metrics_name(self._rank)
        before = dict(RowChain.read(csv, self._history).left())
        now = {session for session, parts in RowChain.read(csv).left() if before.get(session) != parts}
        branches = (one for one in branches_of(self._run_dir) if one.rank == self._rank)
        new = (one for one in branches if one.name.partition(".")[2] in now)
        return any(_is_part(row, one) for branch in new for file in branch.files() for one in file.rows())

    def _take_other(self, look: Look, rows: list[MetricRow]) -> bool:
        """Reads the new rows of a CSV that replaced the previous one, without holding the known rows."""
        if look.snapshot.closed or self._parts:
            return self._take_rolled(look, rows)
        csv = look.snapshot.csv
        first = next(csv.rows(), None)
        found = _Counted(csv.rows())
        new: list[MetricRow]
        if not look.is_same_file and any(row.time is not None for row in csv.rows()):
            new = self._unknown(found, self._csv.rows())
        else:
            known = self._csv_rows if first is not None and first == self._first else 0
            new = list(itertools.islice(found, known, None))
            if found.count < known or (first is None and self._csv_rows):
                return False
        rows += new
        self._first, self._csv_rows = first, found.count
        return True

    def _take_rolled(self, look: Look, rows: list[MetricRow]) -> bool:
        """Reads the new rows where the CSV was replaced, and parts may have been closed or removed since."""
        kept = [part.number for part in self._parts if part in look.snapshot.parts]
        files = look.snapshot.files(max(kept, default=0) + 1)
        # Nothing is forgotten yet where a part was replaced meanwhile.
        first = next(files)
        found = (row for file in itertools.chain([first], files) for row in file.rows())
        if len(kept) == len(self._parts):
            rows += self._unknown(found, self._csv.rows())
        else:
            # A resume has cut or removed parts: nothing is new of what it left.
            later = (row for row in found if (row.time or 0.0) > self._last_time)
            rows += self._unknown(later, iter(()))
        self._first = next(look.snapshot.csv.rows(), None)
        self._csv_rows = sum(1 for _ in look.snapshot.csv.rows())
        return True


def _last_time(snapshot: MetricsSnapshot) -> float:
    """Returns the time of the last row of the files, if there are parts."""
    rows = last_file_rows(snapshot, 1) if snapshot.parts else ()
    return max((row.time or 0.0 for row in rows), default=0.0)


class _Counted:
    """An iterator that counts its rows."""

    def __init__(self, rows: Iterator[MetricRow]) -> None:
        self._rows = rows
        self.count = 0

    def __iter__(self) -> Iterator[MetricRow]:
        for row in self._rows:
            self.count += 1
            yield row


def _is_same_row(one: MetricRow, other: MetricRow) -> bool:
    return (
        len(one.metrics) == len(other.metrics)
        and _is_same_time(one.time, other.time)
        and _is_part(one, other)
    )


def _is_part(one: MetricRow, line: MetricRow) -> bool:
    """Returns whether a line of the CSV contains a row."""
    if one.step != line.step or not _is_same(one.epoch, line.epoch):
        return False
    return all(
        name in line.metrics and _is_same(line.metrics[name], one.metrics[name]) for name in one.metrics
    )


def _is_same_time(one: float | None, other: float | None) -> bool:
    """Returns whether two times are equal up to the rounding of the CSV."""
    return one == other if one is None or other is None else abs(one - other) < _TIME_SECONDS


def _is_same(first: float | None, second: float | None) -> bool:
    return first == second or (first != first and second != second)  # noqa: PLR0124  # NaN
