"""`Follower`: yields the rows of a run as they are written, each once.

A `Cursor` remembers which rows were yielded, see `destinations.history.cursor`.
"""

import operator
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from destinations.history.rows import MetricRow, has_any_metric
from destinations.history.snapshot import last_rows, last_rows_of
from destinations.run_directory.layout import column_of
from destinations.runs.streams import Stream, by_time, reported, streams_of

from .rank_reader import RankReader

if TYPE_CHECKING:
    from destinations.history.cursor import Look

__all__ = ["Follower", "Point", "follow_metric", "follow_rows", "last_rows_of_run"]


@attrs.frozen
class Point:
    """A logged value.

    Attributes:
        step: the step of the row; None if it has none.
        time: the time of the row, in seconds since 1970; None if unknown.
        value: the value as logged.
        writer: the name of the writer that logged it; "" for the trainer.
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
    """Yields existing rows, then new ones, of all writers; see `RecordedRun.follow`.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows.
        is_over: returns whether no more rows will be written; called before each look at the files.
        poll_seconds: time between two looks.
        stop: ends the iteration when set.
        last: yield only the last so many existing rows; None for all.
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
    """The followers of all writers of a run, including writers that begin later.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._followers: dict[str, Follower] = {}
        self._left_out: set[str] = set()

    def rows(self, last: int | None, wanted: Collection[str]) -> Iterator[MetricRow]:
        """Yields the rows written since the last call, in the order of logging; iterate it to its end.

        Args:
            last: on the first call, yield only the last so many rows.
            wanted: as for `Follower.rows`.
        """
        is_first = not self._followers
        streams = [stream for stream in streams_of(self._run_dir) if stream.writer not in self._left_out]
        # There may be very many existing rows, so they aren't held in memory.
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
            yield from _named(follower.rows(last, wanted), stream)
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


class Follower:
    """Reads the rows of a rank of one writer, each once. Memory is bounded by the size of the journal.

    A follower never writes, and belongs to one thread.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows.
    """

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self._reader = RankReader(run_dir, rank)
        self._extent: object = None
        # The first look, if only its last rows were read; the others are counted when needed.
        self._first: Look | None = None

    def poll(self) -> list[MetricRow]:
        """Returns the rows written since the last call; on the first call, all rows."""
        return list(self.rows())

    def rows(self, last: int | None = None, wanted: Collection[str] = ()) -> Iterator[MetricRow]:
        """Yields the rows written since the last call without holding them; iterate it to its end.

        Args:
            last: on the first call, yield only the last so many rows; None for all.
            wanted: columns; only rows with one of them count for `last`. Empty for all rows.
        """
        extent = self._reader.extent()
        if extent == self._extent:
            return
        if last is not None and self._extent is None:
            self._first = self._reader.look()
            yield from last_rows_of(self._first.snapshot, last, wanted)
        else:
            self._pass_first()
            with self._reader.look() as look:
                yield from look.new_rows()
        self._extent = extent

    def _pass_first(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            with first:
                first.pass_all()

    def close(self) -> None:
        """Closes the files."""
        if self._first is not None:
            self._first.snapshot.csv.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
