"""Which rows of a rank's CSV and journal will count once the journal is drained."""

from collections.abc import Iterable

import attrs

from destinations.run_directory.frames import Begin, Boundary, Resume, Rewind
from destinations.run_directory.segments import JournalRecord

from .csv_file import CsvSnapshot
from .row_chain import Kept, Limit, RowChain, RowPlace, tighter
from .rows import Call

__all__ = ["End", "JournalOf", "Settled", "settled"]

End = tuple[str, int | None]
"""The id of a session, and the mark of the checkpoint at which its rows end; None for all rows."""

JournalOf = tuple[str, Limit | None, tuple[JournalRecord, ...]]
"""The id of a session, the limit on its rows, and its records in the journal."""


@attrs.frozen(eq=False, repr=False)
class Settled:
    """The rows that count once the journal is drained.

    Attributes:
        chain: the sessions whose rows count, oldest first, and how many of their rows; includes sessions that
            the history doesn't have yet.
        csv: the rows of the CSV.
        has_view: whether the CSV begins with all rows of earlier sessions that count.
        journal: the journal's records that aren't in the files, by session.
    """

    chain: tuple[Kept, ...]
    csv: CsvSnapshot
    has_view: bool
    journal: tuple[JournalOf, ...]


@attrs.define
class _Pending:
    """What the journal has of a session: its records, what it follows, and up to which mark and step."""

    follows: tuple[str, int | None] | None = None
    limit: Limit | None = None
    records: list[JournalRecord] = attrs.field(factory=list)

    def until(self, mark: int | None) -> list[JournalRecord] | None:
        """Returns the records up to a mark; None if the mark is in the history instead."""
        if mark is None:
            return self.records
        is_mark = (isinstance(one, Boundary) and one.mark == mark for one in self.records)
        at = next((at for at, found in enumerate(is_mark) if found), None)
        return None if at is None else self.records[:at]


def _pending(history: RowChain, records: Iterable[JournalRecord]) -> tuple[str, dict[str, _Pending]]:
    """Returns the id of the newest session, and what the journal has of each session."""
    current = history.newest
    pending = {current: _Pending()}
    for record in records:
        if type(record) is Call:
            # Nearly all records are calls, and `match` takes several times as long.
            if current in pending:
                pending[current].records.append(record)
            continue
        match record:
            case Begin() if history.knows(record.session):
                current = record.session  # Until there is a position, the journal begins anew.
            case Begin():
                pending[record.session] = _Pending((current, None))
                current = record.session
            case _ if current not in pending:
                pass  # The session ended without a row.
            case Rewind(to, mark) if to != current and (to in pending or history.knows(to)):
                pending[current].follows, pending[current].limit = (to, mark), None
            case Rewind() | Resume():
                resume = record if isinstance(record, Resume) else record.resume
                pending[current].limit = resume.limit
            case _:
                pending[current].records.append(record)
    return current, pending


def settled(history: RowChain, csv: CsvSnapshot, records: Iterable[JournalRecord], to: End | None) -> Settled:
    """Returns the rows that count once the journal is drained, up to an end."""
    newest, pending = _pending(history, records)
    session, mark = (newest, None) if to is None else to
    limit: Limit | None = None
    chain: list[Kept] = []
    journal: list[JournalOf] = []
    rows, has_view = attrs.evolve(csv, begin=csv.end), False
    before = None
    while one := pending.pop(session, None):
        own, place = one.until(mark), RowPlace(session)
        if session == history.newest:
            if own is None and mark is not None:
                place = history.place(session, mark)
            has_view = history.view is not None and one.follows is None and one.limit is None
            rows = attrs.evolve(_rows_of(place, history, csv, has_view=has_view), limit=limit)
        chain.append((place, limit))
        if own:
            journal.append((session, limit, tuple(own)))
        limit = tighter(limit, one.limit)
        if one.follows is None:
            before = history.before
            break
        session, mark = one.follows
    else:
        before = RowPlace(session) if mark is None else history.place(session, mark)
    return Settled((*history.chain(before, limit), *chain[::-1]), rows, has_view, tuple(journal[::-1]))


def _rows_of(place: RowPlace, history: RowChain, csv: CsvSnapshot, *, has_view: bool) -> CsvSnapshot:
    """Returns the newest session's rows in the CSV, up to a place; they follow the earlier sessions' rows."""
    view, sealed = history.view or 0, history.sealed_rows(place.session)
    begin = csv.begin if has_view or not view else csv.offset_of(view)
    if place.rows is not None:
        csv = attrs.evolve(csv, end=csv.offset_of(view + max(0, place.rows - sealed)))
    return attrs.evolve(csv, begin=begin)
