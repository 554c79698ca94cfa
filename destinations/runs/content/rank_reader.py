"""`RankReader`: looks at the metrics of a rank again and again, and finds new rows.

`follow`, the page and `send` use one each. Only its `Cursor` remembers which rows were read.
"""

import contextlib
import os
from collections.abc import Hashable
from pathlib import Path

from destinations.history.cursor import Cursor, Look
from destinations.history.row_chain import history_path
from destinations.history.snapshot import take_snapshot
from destinations.run_directory.layout import POSITION, journal_path, metrics_name
from destinations.run_directory.segments import journal_extent
from uploads.disk import ABSENT

__all__ = ["RankReader"]


class RankReader:
    """Looks at the metrics of a rank, and finds new rows.

    **Threading.** Any thread may call `extent`; `look` belongs to one thread at a time.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows.
        cursor: the rows that were read before. Default: none.
    """

    def __init__(self, run_dir: Path, rank: int, cursor: Cursor | None = None) -> None:
        self.cursor = Cursor() if cursor is None else cursor
        self._run_dir = run_dir
        self._rank = rank
        self._journal = journal_path(run_dir, rank)
        self._csv = run_dir / metrics_name(rank)
        # Where the journal began at the last look.
        self._place: tuple[int, int] | None = None

    def look(self, *, with_records: bool = True) -> Look:
        """Returns a look at the current rows, a context manager.

        Args:
            with_records: whether to read the journal as well.

        Raises:
            OSError: as for `take_snapshot`.
        """
        snapshot = take_snapshot(self._run_dir, self._rank, with_records=with_records)
        self._place = snapshot.place
        try:
            return Look(snapshot, self.cursor)
        except BaseException:
            snapshot.csv.close()
            raise

    def stamp(self) -> Hashable:
        """Returns a value that identifies the CSV of an ended run; None if there is a journal."""
        return None if os.path.lexists(self._journal) else _stamp(self._csv)

    def extent(self) -> Hashable:
        """Returns a value that changes with the rows, without reading any.

        Raises:
            OSError: the journal cannot be read.
        """
        if (stamp := self.stamp()) is not None:
            return stamp
        files = self._csv, self._journal / POSITION, history_path(self._csv)
        return *map(_stamp, files), journal_extent(self._journal, self._place)


def _stamp(path: Path) -> Hashable:
    with contextlib.suppress(*ABSENT):
        state = os.stat(path)  # noqa: PTH116  # called for each run of each chart
        return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
    return None
