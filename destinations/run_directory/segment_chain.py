"""Which segments of a journal count: those before which no row is missing.

Segments are synced together, once a second. After a power loss the end of one may be missing while the beginning of the next is
there; each says in its first frame which place of the journal it follows (`frames.Follows`), and whoever did not come
to that place leaves it out. Where a later one does follow, as that of the next session, reading goes on there.
"""

from pathlib import Path

from .files import read_regular
from .frames import MAGIC, Follows, Keys, Other, frames
from .layout import POSITION, Position, segment_number, segment_paths

__all__ = ["FIRST_BYTES", "Place", "end_of_journal", "follows", "journal_records"]

Place = tuple[int, int]
"""Number of a segment, and an offset in it."""

FIRST_BYTES = 128
"""What the first bytes of a segment and a `Follows` fit into."""

# A segment holds a row at least, however long: its writer makes it as large as that needs.
_MOST_SEGMENT_BYTES = 1 << 30


def follows(data: bytes, place: Place) -> bool:
    """Says whether a segment goes on from a place.

    Args:
        data: the segment, or its first `FIRST_BYTES`.
        place: up to where the journal was read.
    """
    if not data.startswith(MAGIC):
        return False
    _, first = next(frames(data, len(MAGIC)), (0, None))
    return not isinstance(first, Follows) or (first.segment, first.offset) == place


def end_of_journal(folder: Path) -> Place | None:
    """Returns the place that reading of a journal comes to that nobody writes; None where that depends on the CSV."""
    position = Position.read(folder / POSITION)
    starts = [(0, len(MAGIC))] if position is None else [(one.segment, one.offset) for one in position.states]
    try:
        ends = {journal_records(folder, start, are_kept=False)[1] for start in starts}
    except OSError:
        return None
    return ends.pop() if len(ends) == 1 else None


def journal_records(folder: Path, place: Place, *, are_kept: bool = True) -> tuple[list[object], Place, bool]:
    """Returns what the segments hold from a place on, up to which place that is, and whether no segment between was gone.

    Rows come as a tuple of names, step, epoch, time and values; the other records as they are.
    """
    records: list[object] = []
    least, _ = place
    is_whole = True
    while True:
        paths = [path for path in segment_paths(folder) if segment_number(path) >= least]
        if not paths:
            return records, place, False
        # Listed before it is read: what is complete now cannot grow while it is read.
        has_successor = len(paths) > 1
        number = segment_number(paths[0])
        data = _segment_data(paths[0])
        is_whole = is_whole and number == least and data is not None
        # Where it does not follow, rows before it are missing: of a power loss, or drained meanwhile, which the caller finds out.
        if data and (number == place[0] or follows(data, place)):
            found, end = _segment_records(data, place[1] if number == place[0] else len(MAGIC))
            records += found if are_kept else []
            place = number, end
        if not has_successor:
            return records, place, is_whole
        least = number + 1


def _segment_data(path: Path) -> bytes | None:
    """Returns the content of a segment, empty where it is none; None where it was taken away."""
    try:
        data = read_regular(path, _MOST_SEGMENT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return data if data.startswith(MAGIC) else b""


def _segment_records(data: bytes, start: int) -> tuple[list[object], int]:
    """Returns the records of a segment from an offset on, rows as names, step, epoch, time and values; and where they end."""
    records: list[object] = []
    names = {
        record.schema: record.names
        for _, record in frames(data[:start], len(MAGIC))
        if isinstance(record, Keys)
    }
    for end, record in frames(data, start):
        if isinstance(record, Keys):
            names[record.schema] = record.names
        elif isinstance(record, tuple):
            schema, *rest, values = record
            if len(names.get(schema, ())) != len(values):
                return records, start  # Its names were lost.
            records.append((names[schema], *rest, values))
        elif not isinstance(record, Follows | Other):
            records.append(record)
        start = end
    return records, start
