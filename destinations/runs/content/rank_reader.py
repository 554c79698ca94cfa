"""`RankReader`: what is new in the metrics of a rank since the last look.

This is the one place that tells whether a CSV is still the file that was read: the same inode, with the same
first line and the same bytes before the place where reading ended. Otherwise the file was cut, replaced, or
rewritten in place, and none of its rows counts as known.

Series and compaction look once. The page, `follow` and `tail` look again and again. A process cannot hold a
file beyond its own end, so `send` counts the values that it passed on; see `sources.ReadPosition`.
"""

import contextlib
import os
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Self

import attrs

from destinations.run_directory.layout import journal_path, metrics_name
from destinations.run_directory.reader import CsvSnapshot, MetricsSnapshot, Part, take_snapshot
from destinations.run_directory.segments import journal_extent
from uploads.disk import ABSENT

__all__ = ["Look", "RankReader"]

_TAIL_BYTES = 256


@attrs.frozen
class _SeenCsv:
    """A CSV up to where it was read: `tail` are the bytes before that, `closed` is the part before it."""

    closed: int
    device: int
    inode: int
    header: bytes
    end: int
    tail: bytes

    @classmethod
    def of(cls, csv: CsvSnapshot, end: int, closed: int) -> Self:
        """Returns what tells a CSV from others up to an offset."""
        state = os.fstat(csv.fileno())
        return cls(closed, state.st_dev, state.st_ino, csv.header, end, csv.before(end, _TAIL_BYTES))


@attrs.frozen(eq=False)
class Look:
    """What one look found; a context manager that closes the CSV.

    Attributes:
        snapshot: the metrics at this moment.
        is_same_file: whether the CSV is the file of the last look.
        is_continued: whether all that the last look saw is still there; also where it saw nothing.
        first: the number of the part, or of the one that the CSV will become, where the rows begin that the
            last look did not see.
        start: the place there, see `CsvSnapshot`; 0 for all rows.
    """

    snapshot: MetricsSnapshot
    is_same_file: bool
    is_continued: bool
    first: int = 1
    start: int = 0

    def pieces(self) -> Iterator[tuple[CsvSnapshot, int]]:
        """Yields each file with rows that the last look did not see, and the place where these begin."""
        start = self.start
        for file in self.snapshot.files(self.first):
            yield file, start or file.first
            start = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.snapshot.csv.close()


class RankReader:
    """Looks at the metrics of a rank, and tells what is new.

    **Threading.** Any thread may call `extent`; `look` and `note` belong to one thread at a time.

    Args:
        run_dir: the folder of the run.
        rank: of the rows.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._journal = journal_path(run_dir, rank)
        self._csv = run_dir / metrics_name(rank)
        self._seen: _SeenCsv | None = None
        self._seen_parts: tuple[Part, ...] = ()
        # Step and time of the last row that was seen of the CSV, as texts; None where it had none.
        self._seen_row: tuple[bytes, bytes] | None = None

    def look(self, *, with_records: bool = True) -> Look:
        """Returns what there is, and since where it is new.

        Args:
            with_records: whether to read the journal as well.

        Raises:
            OSError: as of `take_snapshot`.
        """
        snapshot = take_snapshot(self._run_dir, self._rank, with_records=with_records)
        csv, seen = snapshot.csv, self._seen
        try:
            if seen is None:
                return Look(snapshot, is_same_file=False, is_continued=True)
            now, start = None, seen.end
            is_in_place = snapshot.closed == seen.closed
            # The CSV of the last look, or the part that it has become.
            number = seen.closed + 1
            part = next((part for part in snapshot.parts if part.number == number), None)
            if part is not None:
                with contextlib.closing(part.open()) as piece:
                    is_it = (piece.packed.inode, piece.header) == (seen.inode, seen.header)
                    found = 0 if seen.end <= len(seen.header) else piece.packed.row_after(self._seen_row)
                    if is_it and seen.end <= piece.end and found is not None:
                        now, start = seen, found
            elif csv.fileno() >= 0 and is_in_place:
                now = _SeenCsv.of(csv, min(seen.end, csv.end), seen.closed)
        except BaseException:
            csv.close()
            raise
        is_same = now is not None and (now.device, now.inode) == (seen.device, seen.inode)
        # A resume may have cut one of them, and left those after it.
        are_same = tuple(one for one in snapshot.parts if one.number < number) == self._seen_parts
        if now != seen or not are_same:
            return Look(snapshot, is_same and is_in_place, is_continued=False)
        return Look(snapshot, is_in_place, is_continued=True, first=seen.closed + 1, start=start)

    def note(self, look: Look) -> None:
        """Remembers that all rows of a look were read; before its end, as the CSV must be open."""
        csv = look.snapshot.csv
        self._seen_row = csv.last_row()
        self._seen = None if csv.fileno() < 0 else _SeenCsv.of(csv, csv.end, look.snapshot.closed)
        self._seen_parts = look.snapshot.parts

    def stamp(self) -> Hashable:
        """Returns what tells the CSV of a run that nobody writes from another; None if there is a journal."""
        if not os.path.lexists(self._journal):
            with contextlib.suppress(*ABSENT):
                state = os.stat(self._csv)  # noqa: PTH116  # called for each run of each chart
                return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
        return None

    def extent(self) -> Hashable:
        """Returns a value that changes with the rows; reads none of them.

        Raises:
            OSError: as of `take_snapshot`.
        """
        if (stamp := self.stamp()) is not None:
            return stamp
        with take_snapshot(self._run_dir, self._rank, with_records=False) as snapshot:
            csv = snapshot.csv
            seen = None if csv.fileno() < 0 else _SeenCsv.of(csv, csv.end, snapshot.closed)
            return seen, journal_extent(self._journal, snapshot.place)
