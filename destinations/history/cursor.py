"""`Cursor`: how far a reader has read the rows of a rank; readers of new rows keep only this.

A row has a fixed place, wherever it is stored: the session that wrote it, and its number among that session's
rows. A cursor counts the rows read of each session. Values read from the journal aren't rows of a file yet,
and the writer may join the calls of a step differently than a reader. So they are counted by step and name,
and the count is reduced when the files have them later. Each value is yielded once, and values are never
compared.

A CSV without a history, as other programs write it, counts as one session. If another program rewrites its
file, it is the same session as long as its first row is the same.
"""

import functools
import itertools
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from destinations.run_directory.layout import parse_header
from destinations.run_directory.segments import JournalRecord

from .csv_file import CsvSnapshot
from .row_chain import Limit, RowPlace
from .rows import Call, MetricRow, is_sound, keeps, parse_rows
from .snapshot import MetricsSnapshot

__all__ = ["Cursor", "Look"]

_COMPARED_BYTES = 256
_FIRST_BYTES = 4 << 10
Values = Counter[tuple[int | None, str]]


@attrs.frozen
class CsvPlace:
    """Where reading ended in a CSV, and how to recognize the file.

    A row can be found by its number alone; this saves counting the rows before it.
    """

    session: str
    row: int
    offset: int
    device: int
    inode: int
    header_crc32: int
    tail_crc32: int

    @classmethod
    def of(cls, csv: CsvSnapshot, offset: int, session: str = "", row: int = 0) -> Self:
        """Returns a place in a CSV; `row` is the number of the row that begins there."""
        state = os.fstat(csv.fileno())
        tail = zlib.crc32(csv.before(offset, _COMPARED_BYTES))
        return cls(session, row, offset, state.st_dev, state.st_ino, zlib.crc32(csv.header), tail)

    def is_in(self, csv: CsvSnapshot) -> bool:
        """Returns whether a file has the same bytes before this place."""
        return (
            csv.fileno() >= 0
            and self.offset <= csv.end
            and self.of(csv, self.offset, self.session, self.row) == self
        )

    def is_of(self, csv: CsvSnapshot) -> bool:
        """Returns whether a file is the one that was read, whatever its content now."""
        state = None if csv.fileno() < 0 else os.fstat(csv.fileno())
        return state is not None and (state.st_dev, state.st_ino) == (self.device, self.inode)


@attrs.define
class Cursor:
    """How far the rows of a rank were read.

    Attributes:
        rows: how many rows of each session were read from files.
        tail: what was read beyond these, by session: how many values of each step and metric.
        limits: the limit of each session that has one, see `row_chain.Keep`.
        first: a checksum of the first row of a CSV without a history.
        place: where reading of the CSV ended.
        passed: for each session read, its limit and how many rows it had in closed parts.
        has_parents: whether a fork's rows from its parents were read; these never change.
    """

    rows: dict[str, int] = attrs.field(factory=dict)
    tail: dict[str, Values] = attrs.field(factory=dict)
    limits: dict[str, Limit] = attrs.field(factory=dict)
    first: int | None = None
    place: CsvPlace | None = None
    passed: dict[str, tuple[Limit | None, int]] = attrs.field(factory=dict)
    has_parents: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the cursor as JSON."""
        tail = {
            session: [[step, name, count] for (step, name), count in values.items()]
            for session, values in self.tail.items()
            if values
        }
        limits = {session: [*limit] for session, limit in self.limits.items()}
        place = None if self.place is None else attrs.asdict(self.place)
        more = {"has_parents": True} if self.has_parents else {}
        return {
            "rows": {**self.rows},
            "tail": tail,
            "limits": limits,
            "first": self.first,
            "place": place,
            **more,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Restores a cursor.

        Raises:
            ValueError: it is damaged; TypeError, KeyError and AttributeError mean the same.
        """
        tail = {
            str(session): Counter({(step, name): int(count) for step, name, count in values})
            for session, values in found["tail"].items()
        }
        limits = {str(session): (int(step), at) for session, (step, at) in found["limits"].items()}
        rows = {str(session): int(count) for session, count in found["rows"].items()}
        place = None if found["place"] is None else CsvPlace(**found["place"])
        return cls(rows, tail, limits, found["first"], place, has_parents=found.get("has_parents") is True)


class Look:
    """The rows at one moment, and those that a cursor hasn't read yet; a context manager.

    Args:
        snapshot: the metrics at this moment; closed at the end.
        cursor: how far they were read. It advances at the end of `new_rows`, or by `pass_files`.

    Attributes:
        is_continued: whether all rows that were read are still in place, with no new rows before them.
    """

    def __init__(self, snapshot: MetricsSnapshot, cursor: Cursor) -> None:
        self.snapshot = snapshot
        self._cursor = cursor
        # The session that wrote the rows of the CSV, after the rows of earlier sessions.
        self._newest = snapshot.history.newest
        csv, place = snapshot.csv, cursor.place
        self._place = place if place is not None and place.is_in(csv) else None
        is_rewritten = place is not None and self._place is None and (place.is_of(csv) or not self._newest)
        self._first = None if self._newest or snapshot.parts else _checksum(csv)
        self._is_other = None not in {self._first, cursor.first} and self._first != cursor.first
        if self._is_other:
            cursor.rows.pop("", None)
        # For each session: the values read from the journal that the files don't have yet, and the number of
        # the first row that doesn't count.
        self._left: dict[str, Values] = {}
        self._ends: dict[str, int] = {}
        kept = {place.session: limit for place, limit in snapshot.chain}
        self._changed = [
            session
            for session, rows in cursor.rows.items()
            if rows and kept.get(session) != cursor.limits.get(session)
        ]
        self.is_continued = not (is_rewritten or self._changed or self.taken_back)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.snapshot.csv.close()

    @property
    def taken_back(self) -> bool:
        """Whether rows that were read no longer belong to the run; covers the journal after `new_rows`."""
        cursor, places = self._cursor, {place.session: place for place, _ in self.snapshot.chain}
        if self._is_other or any(self._left.values()):
            return True
        if any(values and session not in places for session, values in cursor.tail.items()):
            return True
        for session, read in cursor.rows.items():
            place = places.get(session)
            rows = None if place is None else place.rows
            if not session and not self._newest and place is not None and not self.snapshot.parts:
                rows = self._rows_of_csv
            if read and (place is None or (rows is not None and read > rows)):
                return True
        return any(self._drops_any(places[session]) for session in self._changed)

    # All files.

    def pieces(self) -> Iterator[tuple[CsvSnapshot, int]]:
        """Yields each file with unread rows, and where these begin, see `CsvSnapshot`."""
        yield from self._inherited()
        if self.snapshot.has_view and not self._cursor.rows:
            yield self.snapshot.csv, self.snapshot.csv.first
            return
        for place, limit in self.snapshot.chain:
            read = self._cursor.rows.get(place.session, 0)
            for part, first in self.snapshot.sealed(place, read):
                keep = attrs.evolve(part.keep, limit=limit)
                with attrs.evolve(part, keep=keep).opened() as file:
                    yield file, file.packed.place_of(max(0, read - first))
            if place.session == self._newest:
                yield self.snapshot.csv, self._offset_of(read)

    def _inherited(self) -> Iterator[tuple[CsvSnapshot, int]]:
        for part in () if self._cursor.has_parents else self.snapshot.inherited:
            with part.opened() as file:
                yield file, file.first

    def pass_files(self) -> None:
        """Notes that all rows of the files were read."""
        cursor, csv = self._cursor, self.snapshot.csv
        cursor.has_parents = cursor.has_parents or bool(self.snapshot.inherited)
        for place, limit in self.snapshot.chain:
            rows = self._sealed_rows(place)
            if place.session == self._newest:
                rows = self._rows_of_csv
                if csv.fileno() >= 0:
                    cursor.place = CsvPlace.of(csv, csv.end, self._newest, rows)
            # A file that another program rewrites may have fewer rows for a while.
            cursor.rows[place.session] = max(rows, cursor.rows.get(place.session, 0))
            cursor.limits.pop(place.session, None)
            if limit is not None:
                cursor.limits[place.session] = limit
        cursor.first = cursor.first if self._first is None else self._first

    # Row by row.

    def new_rows(self) -> Iterator[MetricRow]:
        """Yields the unread rows of the files and the journal; iterate it to its end."""
        snapshot, cursor = self.snapshot, self._cursor
        for file, _ in self._inherited():
            yield from file.rows()
        if snapshot.has_view and not cursor.rows and not any(limit for _, limit in snapshot.chain):
            yield from filter(is_sound, snapshot.csv.rows())
        else:
            for place, limit in snapshot.chain:
                yield from self._new_rows_of(place, limit)
        self.pass_files()
        cursor.rows |= self._ends
        for session, limit, records in snapshot.journal:
            left = self._left.setdefault(session, Counter())
            tail = cursor.tail.setdefault(session, Counter())
            for row in snapshot.rows_of(limit, records[0 if limit else _known(records, left) :]):
                new = _less(row, left)
                if new is not None:
                    tail.update(_values_of(new))
                    yield new

    def pass_all(self) -> None:
        """Notes that all rows were read."""
        self.pass_files()
        for session, rows in self.snapshot.journal_by_session():
            self._cursor.tail[session] = Counter(value for row in rows for value in _values_of(row))

    def _new_rows_of(self, place: RowPlace, limit: Limit | None) -> Iterator[MetricRow]:
        """Yields the new rows of a session in the files.

        Rows beyond a limit may count again later. So the cursor stays at the first of them, and rows read
        after it are remembered by their values.
        """
        cursor, session = self._cursor, place.session
        passed = limit, self._sealed_rows(place)
        if (
            self.snapshot.history.knows(session)
            and session != self._newest
            and cursor.passed.get(session) == passed
        ):
            self._ends[session] = cursor.rows[session]
            return
        left, beyond = Counter(cursor.tail.get(session)), Counter[tuple[int | None, str]]()
        end: int | None = None
        for first, rows in self._rows_of(place):
            if limit is None and not left:
                yield from filter(is_sound, rows)
                continue
            for number, row in enumerate(rows, first):
                if not is_sound(row):
                    continue
                if not keeps(limit, row):
                    end = number if end is None else end
                    continue
                if end is not None:
                    beyond.update(_values_of(row))
                new = _less(row, left)
                if new is not None:
                    yield new
        if end is not None:
            self._ends[session] = end
        self._left[session] = left
        # `left + beyond` would loop in Python.
        cursor.tail[session] = Counter(left)
        cursor.tail[session].update(beyond)
        cursor.passed[session] = passed

    def _rows_of(self, place: RowPlace) -> Iterator[tuple[int, Iterator[MetricRow]]]:
        """Yields the unread rows of a session with their numbers, including rows beyond a limit."""
        read = self._cursor.rows.get(place.session, 0)
        for part, first in self.snapshot.sealed(place, read):
            with part.opened() as file:
                yield max(read, first), file.rows(max(0, read - first))
        if place.session == self._newest:
            csv = self.snapshot.csv
            yield (
                max(read, self._sealed_rows(place)),
                attrs.evolve(csv, limit=None).rows(self._offset_of(read)),
            )

    # Places.

    def _sealed_rows(self, place: RowPlace) -> int:
        sealed = self.snapshot.history.sealed_rows(place.session)
        return sealed if place.rows is None else min(sealed, place.rows)

    @functools.cached_property
    def _rows_of_csv(self) -> int:
        """The number of the newest session's rows in the files."""
        csv, place = self.snapshot.csv, self._place
        if place is not None and place.session == self._newest:
            return place.row + csv.count(place.offset)
        return self.snapshot.history.sealed_rows(self._newest) + csv.count(csv.first) - self._view

    @property
    def _view(self) -> int:
        return (self.snapshot.history.view or 0) if self.snapshot.has_view else 0

    def _offset_of(self, row: int) -> int:
        """Returns where a row of the newest session is in the CSV."""
        csv, place = self.snapshot.csv, self._place
        if place is not None and place.session == self._newest and place.row <= row:
            return csv.offset_of(row - place.row, place.offset)
        return csv.offset_of(self._view + max(0, row - self.snapshot.history.sealed_rows(self._newest)))

    def _drops_any(self, place: RowPlace) -> bool:
        """Returns whether rows of a session that were read now lie beyond a limit."""
        limit = next(limit for one, limit in self.snapshot.chain if one == place)
        read = self._cursor.rows[place.session]
        for first, rows in Look(self.snapshot, Cursor())._rows_of(place):  # noqa: SLF001  # of this class
            if not all(keeps(limit, row) for row in itertools.islice(rows, max(0, read - first))):
                return True
        return False


def _known(records: Sequence[JournalRecord], left: Values) -> int:
    """Returns how many of the first records have exactly the values that are left, and clears these.

    Comparing rows instead takes several times as long.
    """
    count = left.total()
    for place, record in enumerate(records if count else ()):
        if isinstance(record, Call):
            count -= max(1, len(record.names) - ("epoch" in record.names))
        if count <= 0:
            if count == 0:
                left.clear()
            return 0 if count else place + 1
    return 0


def _values_of(row: MetricRow) -> Iterable[tuple[int | None, str]]:
    # A row may have only an epoch, which isn't a metric.
    return [(row.step, name) for name in row.metrics or ("epoch",)]


def _less(row: MetricRow, left: Values) -> MetricRow | None:
    """Returns a row without the values that are left, and subtracts them; None if nothing is new."""
    if not left:
        return row
    new = []
    for value in _values_of(row):
        count = left.pop(value, 0)
        if count > 1:
            left[value] = count - 1
        elif not count:
            new.append(value[1])
    if len(new) == max(1, len(row.metrics)):
        return row
    return attrs.evolve(row, metrics={name: row.metrics[name] for name in new}) if new else None


def _checksum(csv: CsvSnapshot) -> int | None:
    """Returns a checksum of the first row of a CSV, independent of its columns; None without rows."""
    first = next(parse_rows(parse_header(csv.header), csv.chunks(chunk_bytes=_FIRST_BYTES)), None)
    if first is None:
        return None
    return zlib.crc32(repr((first.step, first.time, sorted(first.metrics.items()))).encode())
