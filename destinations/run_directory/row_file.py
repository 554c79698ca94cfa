"""`RowFile`: `metrics.csv` with its position, closed parts, and history, which change together.

A change of more than the end of the CSV is announced in `position.json` first, so that readers and the next
session know which version is there. Runs in the writer thread.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from destinations.history.row_chain import RowPlace
from uploads.disk import DISK, Disk, replacement

from .frames import Begin, Boundary, Resume, Rewind
from .journal_source import JournalSource
from .layout import CsvState, Position
from .metrics_csv import MetricsCsv, Replacement

__all__ = ["RowFile"]


@attrs.define(eq=False, slots=False, repr=False)
class RowFile:
    """The rows of one rank on disk, up to the place that a position names.

    Args:
        csv: the open end of the rows.
        source: the journal that the rows come from.
        path: the path of `position.json`.
        on_commit: called once a position covers the CSV; returns the step of the last row since the last
        call.
        on_rollback: called when a session follows an earlier place, with the number of rows that no longer
            count.
        disk: the disk operations.
        part_bytes: the size at which the CSV is closed as a part.

    Attributes:
        has_position: whether `position.json` describes only the current file.
        rewrites: how often the CSV was replaced.
        durable_step: the step of the last synced row.
    """

    csv: MetricsCsv
    source: JournalSource
    path: Path
    on_commit: Callable[[], int | None]
    on_rollback: Callable[[int], None]
    disk: Disk = DISK
    part_bytes: int = 0
    has_position: bool = attrs.field(default=False, init=False)
    rewrites: int = attrs.field(default=0, init=False)
    durable_step: int | None = attrs.field(default=None, init=False)
    _generation: int = attrs.field(default=0, init=False)
    # The last commit: segment and offset of the journal, bytes and rows of the CSV.
    _place: tuple[int, int, int, int] = attrs.field(default=(0, 0, 0, 0), init=False)

    def __attrs_post_init__(self) -> None:
        self._place = self._here()

    def _here(self) -> tuple[int, int, int, int]:
        return self.source.segment, self.source.offset, self.csv.size, self.csv.rows

    @property
    def is_committed(self) -> bool:
        """Whether nothing was read or written since the last position."""
        return self._here() == self._place

    def rewind(self) -> None:
        """Returns to the last position after an error, so that everything since is read again.

        The CSV stays open: if it was deleted meanwhile, its rows exist nowhere else.
        """
        self.source.segment, self.source.offset, size, rows = self._place
        if self.csv.exists:
            self.csv.rewind(size, rows)

    def open(self) -> None:
        """Opens the files of the last writer, without unfinished writes."""
        position = Position.read(self.path)
        state = self.csv.open(position)
        if position is not None:
            self._generation = position.generation + len(position.states) - 1
            known = state or position.states[-1]
            self.source.segment, self.source.offset = known.segment, known.offset
        self._place = self._here()
        if self.csv.exists:
            self.write_position()

    def begin(self, columns: Iterable[str]) -> None:
        """Creates the CSV with its first columns."""
        self.csv.begin(columns)
        self._place = self._here()
        self.write_position()

    def write_position(self, *following: CsvState) -> None:
        """Writes how much of the journal is in the CSV, and in the version that will follow it."""
        self.csv.sync_name()
        states = (self.csv.state(self.source.segment, self.source.offset), *following)
        position = Position(self._generation, states)
        try:
            with replacement(self.path, disk=self.disk) as fd:
                self.disk.write(fd, position.to_json().encode(), 0)
                self.disk.sync(fd)
        except OSError:
            # A network file system may report a failure although the rename succeeded.
            if Position.read(self.path) != position:
                raise
        # These rows are committed even if the folder can't be synced, because the next reader finds them.
        self.has_position, self._place = not following, self._here()
        step = self.on_commit()
        self.disk.sync_folder(self.path.parent)
        self.durable_step = self.durable_step if step is None else step

    def replace(self, new: Replacement, *history: bytes) -> None:
        """Announces a new version of the CSV, renames it into place, then drops the old state.

        Args:
            new: the new version.
            history: lines of the history that count with the new version.
        """
        csv, source = self.csv, self.source
        size = csv.parts.chain.size + sum(map(len, history))
        try:
            csv.sync()
            if history:
                csv.parts.write_history(*history)
            self.write_position(new.state(source.segment, source.offset, size))
        except BaseException:
            new.discard()
            raise
        csv.accept(new)
        for line in history:
            csv.parts.chain.add(line)
        self._place = self._here()
        self._generation += 1
        self.rewrites += 1
        self.write_position()
        csv.write_sums()

    def add_history(self, *lines: bytes) -> None:
        """Adds lines to the history; they count with the next position."""
        self.csv.parts.write_history(*lines)
        for line in lines:
            self.csv.parts.chain.add(line)

    def close_part(self, columns: Iterable[str]) -> None:
        """Closes this session's rows in the file as a part, and begins the next file."""
        chain, lines = self.csv.parts.chain, self._seal()
        # Without such rows, the file has only rows of earlier sessions, which are in parts.
        lines = lines or [chain.session(chain.newest, chain.before, None)]
        self.replace(self.csv.prepare_history(columns, (), with_own=False), *lines)

    def _seal(self) -> list[bytes]:
        sealed = self.csv.seal()
        return [] if sealed is None else [self.csv.parts.chain.part(sealed)]

    def mend(self) -> int:
        """Blanks damaged and missing rows; returns how many of them aren't in a closed part."""
        new, lost = self.csv.prepare_mended()
        lines = [self.csv.parts.chain.loss(lost)] if lost else []
        self.replace(new, *lines)
        return lost

    # Sessions.

    def apply(self, record: Begin | Rewind | Resume | Boundary) -> None:
        """Applies a mark of the journal, after the calls before it are in the CSV."""
        chain = self.csv.parts.chain
        match record:
            case Begin():
                self._begin_session(record.session)
            case Rewind(session, mark) if chain.knows(session) and session != chain.newest:
                self._follow(chain.place(session, mark))
            case Rewind():
                self._resume(record.resume)
            case Resume():
                self._resume(record)
            case Boundary(mark) if mark and chain.newest:
                rows = chain.sealed_rows(chain.newest) + (self.csv.own_rows if self.csv.exists else 0)
                self.add_history(chain.mark(mark, rows))

    def _begin_session(self, session: str) -> None:
        """Begins a session that follows everything before it, and closes those rows as a part."""
        csv, chain = self.csv, self.csv.parts.chain
        if chain.knows(session):
            return  # The mark is read again after an error.
        if not csv.exists:
            before = RowPlace(chain.newest) if chain.newest or chain.parts else None
            self.add_history(chain.session(session, before, None if chain.parts else 0))
            return
        is_whole, lines = chain.view is not None, self._seal()
        lines.append(chain.session(session, RowPlace(chain.newest), csv.rows if is_whole else None))
        if is_whole:
            self.add_history(*lines)
            self.write_position()
        else:
            self.replace(csv.prepare_history((), (), with_own=False), *lines)

    def _resume(self, resume: Resume) -> None:
        """Makes this session follow the earlier rows that remain after a loop has named its batch."""
        before = self.csv.parts.chain.before
        if self.csv.exists and before is not None:
            self._follow(attrs.evolve(before, limit=resume.limit))

    def _follow(self, place: RowPlace) -> None:
        """Makes this session follow a place in an earlier one, and rewrites the CSV."""
        csv, chain = self.csv, self.csv.parts.chain
        if chain.before == place:
            return
        kept = list(chain.kept(place))
        columns, rows = csv.parts.look_at(kept)
        left = csv.parts.look_at(chain.kept(chain.before))[1] - rows
        if not left and (chain.before is None or chain.before.session == place.session):
            return
        size = sum(part.csv_bytes for part, _ in kept)
        is_whole = size < self.part_bytes and not chain.parts.get(chain.newest)
        new = csv.prepare_history(columns if is_whole else (), kept if is_whole else (), with_own=True)
        self.replace(new, chain.session(chain.newest, place, rows if is_whole else None))
        self.on_rollback(max(0, left))
