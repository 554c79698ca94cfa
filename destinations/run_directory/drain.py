"""Moves rows from the journal to `metrics.csv`, each exactly once, whenever the process may be killed.

The order of writes guarantees it: lines are appended to the CSV, then `position.json` is replaced by one that
covers them. In between, readers ignore the new lines and find their rows in the journal. A replacement of the
CSV (new columns, other rows of earlier sessions, the next one after a part was closed) is announced in the
position first; see `Position`. Nothing is appended to a file before the position is of that file alone.

Runs in the writer thread.
"""

import contextlib
import errno
import itertools
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from destinations.history.aggregate import Aggregate
from destinations.history.row_chain import RowChain, RowPlace, SealedPart
from destinations.history.rows import Call
from uploads.disk import DISK, Disk, replacement

from .frames import (
    MAGIC,
    Begin,
    Boundary,
    Keys,
    Record,
    Resume,
    Rewind,
    Row,
    RowBlock,
    count_rows,
    iter_frames,
    read_row_block,
)
from .journal import SegmentReader
from .layout import (
    ABANDONED_FOLDER,
    OWN_COLUMNS,
    POSITION,
    CsvState,
    Position,
    column_of,
    segment_number,
    segment_paths,
)
from .metrics_csv import ChangedError, MetricsCsv, Replacement
from .segments import FIRST_BYTES, continues_from, names_before

if TYPE_CHECKING:
    from .journal import Journal

__all__ = ["PART_BYTES", "JournalDrain", "RowBuffer"]

# Chunks hold the interpreter lock for less than a millisecond with ten floats a row. Smaller ones would cost
# more in total: each has an overhead of some hundred microseconds.
CHUNK_ROWS = 256
_READ_BYTES = 256 << 10
_POSITION_BYTES = 1 << 20
_MOST_FOREIGN_FILES = 10
_TRIES = 5
PART_BYTES = 64 << 20
"""The size of `metrics.csv` at which it is closed as a part."""
_REWRITE_BYTES_PER_SECOND = 4 << 20
_REWRITE_SHARE_OF_NEW = 4
# A file of so many bytes, or of twice its header, is written again for each new name, whatever else was.
_SMALL_BYTES = 64 << 10
# So many rows may bring new names before a file of mostly empty cells is closed; as many names as are looked
# for in advance.
_MOST_LATE = 64
_EMPTY_SHARE = 3
# A row of so many values stays an array.
_WIDE = 256
_log = logging.getLogger("destinations")

_Names = tuple[str, ...]
_Values = tuple[float, ...]


@attrs.frozen
class _Place:
    """Where the CSV and the journal meet: `csv_bytes` of the one have all rows before it of the other."""

    segment: int
    offset: int
    csv_bytes: int = 0
    csv_rows: int = 0
    drained: int = 0


@attrs.define(eq=False)
class _RowsOf:
    """The rows of certain names: how many the file got since it was opened, and what statistics lack.

    `values` are blocks of rows, float64 `(rows, metrics)`, and lists of tuples.
    """

    names: _Names
    in_file: int = 0
    steps: list[int | None] = attrs.field(factory=list)
    values: list[Any] = attrs.field(factory=list)
    last: int = 0
    """The number of the last one among all rows."""


class RowBuffer:
    """Buffers lines to write, the row that later rows of its step may join, and values for statistics.

    Args:
        csv: the file that the lines are for.
    """

    def __init__(self, csv: "MetricsCsv") -> None:
        self._csv = csv
        self._lines: list[bytes] = []
        self.line_count = 0
        """The number of complete lines."""
        # The last row, which later calls may share, and where its first call begins in the segment.
        self._pending: Call | None = None
        self._start = 0
        self._rows_of: dict[_Names, _RowsOf] = {}
        # Those of the last row, and those with values that statistics lack.
        self._current = _RowsOf(())
        self._fresh: list[_RowsOf] = []
        self._count = 0
        self._last_epoch: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self._lines and self._pending is None

    def end_of_lines(self, end: int) -> int:
        """Returns the offset before which all calls are lines, given the one before which all were read."""
        return end if self._pending is None else self._start

    def columns_of_pending(self) -> list[str]:
        """Returns the columns that the row needs that is not a line yet."""
        return [] if self._pending is None else [column_of(name) for name in self._pending.names]

    def add(self, call: Call, start: int) -> None:
        """Adds a call, which begins at an offset."""
        both = None if self._pending is None else self._pending.joined(call)
        if both is None:
            self.finish_line()
            self._start = start
        self._pending = both or call

    def add_block(self, names: _Names, block: "RowBlock", start: int) -> bool:
        """Adds many calls from an offset on; False, with nothing added, if the first one shares a row."""
        pending = self._pending
        if pending is not None and pending.names_with(names, block.steps[0], block.epochs[0]) is not None:
            return False
        self.finish_line()
        before = len(block.steps) - 1
        if before:
            self._lines.append(self._csv.formatter(names).lines(block, before))
            self.line_count += before
            self._note(names, block.steps[:before], block.values[:before], block.epochs[-1])
        time = float(block.times[-1])
        self._pending = Call(names, block.steps[-1], block.epochs[-1], time, block.values[-1])
        self._start = start + block.size // len(block.steps) * before
        return True

    def finish_line(self) -> None:
        """Formats the pending row as a line."""
        if self._pending is not None:
            names, step, epoch, at, values = self._pending
            formatter = self._csv.formatter(names)
            if isinstance(values, tuple):
                self._lines.append(formatter.line(step, epoch, at, values).encode())
            elif len(names) < _WIDE:
                self._lines.append(formatter.line(step, epoch, at, tuple(values.tolist())).encode())
            else:
                self._lines.append(formatter.wide_line(step, epoch, at, values))
            rows = [values] if isinstance(values, tuple) else values[None]
            self._note(names, [step], rows, epoch)
            self.line_count += 1
            self._pending = None

    def pop_lines(self) -> list[bytes]:
        """Returns and clears the lines."""
        lines, self._lines, self.line_count = self._lines, [], 0
        return lines

    def update_statistics(self, statistics: Aggregate) -> tuple[int, int | None]:
        """Adds the lines since the last call to the statistics.

        Returns:
            The number of rows, and the step of the last one.
        """
        fresh, self._fresh = self._fresh, []
        rows, last_step = 0, None
        # The last value of a metric is that of the last row that has it.
        for one in sorted(fresh, key=lambda one: one.last):
            steps, values = one.steps, one.values
            one.steps, one.values = [], []
            rows += len(steps)
            last_step = steps[-1] if steps[-1] is not None else last_step
            statistics.add(one.names, steps, np.concatenate(values, dtype=np.float64), self._last_epoch)
        return rows, last_step

    def clear(self) -> None:
        """Discards everything."""
        self._lines, self.line_count, self._pending = [], 0, None
        for one in self._fresh:
            one.steps, one.values = [], []
        self._fresh = []

    def begin_file(self) -> None:
        """Notes that the file is another one, which has no rows yet."""
        self._rows_of, self._current = {}, _RowsOf(())

    def columns_in_use(self) -> list[str]:
        """Returns the columns of several rows of the file, in its order; of a single one it is not known."""
        rows: Counter[str] = Counter()
        for one in self._rows_of.values():
            for name in one.names:
                rows[column_of(name)] += one.in_file
        return [column for column in self._csv.columns if rows[column] > 1]

    def empty_cells(self) -> int:
        """Returns how many cells are empty of the rows that were added since the file was begun or opened."""
        width = len(self._csv.columns) - len(OWN_COLUMNS)
        return sum(one.in_file * (width - len(one.names)) for one in self._rows_of.values())

    def _note(self, names: _Names, steps: list[Any], values: Any, epoch: int | None) -> None:
        one = self._current
        if one.names is not names:
            one = self._current = self._rows_of.setdefault(names, _RowsOf(names))
        if not one.steps:
            self._fresh.append(one)
        one.steps.extend(steps)
        if isinstance(values, list) and one.values and isinstance(one.values[-1], list):
            one.values[-1].extend(values)
        else:
            # A list of its own, which grows.
            one.values.append([*values] if isinstance(values, list) else values)
        one.in_file += len(steps)
        self._count += len(steps)
        one.last = self._count
        self._last_epoch = epoch


@attrs.define(eq=False, slots=False, repr=False)
class JournalDrain:
    """Moves the rows of one rank from its journal to its CSV.

    Args:
        run_dir: the folder of the run.
        folder: the journal of the rank.
        csv: the CSV of the rank.
        journal: the writing end of a live journal; None to drain what a dead process left.
        on_rollback: called once a session follows an earlier place, with the number of rows that do not count
            any more. Does not raise; `statistics` are to be computed again.
        on_change: called after rows that another program took out of the CSV were restored from the journal,
            with how many were, and how many could not be. As `on_rollback`.
        between: called after each chunk of rows, also of those that are read or written again.
        clock: monotonic seconds.
        disk: the disk operations.
        part_bytes: the size at which the CSV is closed as a part.
    """

    _run_dir: Path
    _folder: Path
    _csv: MetricsCsv
    _journal: "Journal | None" = None
    _on_rollback: Callable[[int], None] = attrs.field(default=lambda _: None, kw_only=True)
    _on_change: Callable[[int, int], None] = attrs.field(default=lambda *_: None, kw_only=True)
    _between: Callable[[], None] = attrs.field(default=lambda: None, kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    _disk: Disk = attrs.field(default=DISK, kw_only=True)
    _part_bytes: int = attrs.field(default=PART_BYTES, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.statistics = Aggregate()
        self._generation = 0
        self._segment = 0
        self._offset = len(MAGIC)
        self._names: dict[int, tuple[str, ...]] = {}
        self._names_of_segment = 0
        self._skipped_segments: set[int] = set()
        self._is_open = False
        self._opened_at = self._clock()
        self._drained_bytes = 0
        self._rewritten_bytes = 0
        # Those that this object has closed.
        self._closed_parts: list[SealedPart] = []
        # Whether `position.json` is of the present file alone.
        self._has_position = False
        # How many rows have brought new names to the present file.
        self._late = 0
        self.rows = 0
        """Rows drained by this object."""
        self.rewrites = 0
        """The number of replacements of the CSV."""
        self.damaged_bytes = 0
        """The number of unreadable bytes in segments."""
        self.missing = 0
        """Rows that others took out of the CSV or the journal, and that cannot be restored."""
        # What was committed last, and the first place since which the journal has all rows of the CSV.
        self._committed = self._base = _Place(0, len(MAGIC))
        self._foreign_files = 0
        self.durable_step: int | None = None
        """The step of the last synced row."""
        self._buffer = RowBuffer(self._csv)
        # Whether nothing is known to have been changed within the CSV.
        self._is_sound = True

    # Opening.

    def open(self, *, is_new: bool = False) -> bool:
        """Finds where the last writer stopped, and truncates what it did not finish.

        Args:
            is_new: whether there was no CSV when the folder was locked: one that is there now is of another
                program, and is moved out of the way.

        Returns:
            Whether the CSV existed.
        """
        if is_new:
            self._keep_file_in_the_way()
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(self._csv.path)
        position = Position.read(self._folder / POSITION)
        state = self._csv.open(position)
        if position is not None:
            self._generation = position.generation + len(position.states) - 1
            known = state or (position.states[-1] if position.states else None)
            if known is not None:
                self._segment, self._offset = known.segment, known.offset
        self._is_open = True
        self._begin_base()
        if self._csv.exists:
            self._write_position()
            self._mend()
        return self._csv.exists

    def is_fully_drained(self) -> bool:
        """Returns whether the CSV has every row of the journal; for use when writing has ended."""
        segments = [(segment_number(path), path, False) for path in segment_paths(self._folder)]
        current = self._next_segment(segments)
        if current is None:
            return True
        number, path, _ = current
        return self._next_segment(segments, number + 1) is None and not self._rows_left(number, path)

    def lost_rows(self) -> int:
        """Returns how many rows are gone, or only in deleted files; for use when logging has ended."""
        lost = self.missing
        if self._csv.exists and not self._csv.is_in_place():
            lost += self.rows
        else:
            lost += sum(map(self._csv.rows_missing, self._closed_parts))
        for segment in [] if self._journal is None else list(self._journal.segments):
            if segment.number >= self._segment and not segment.is_at(segment.path):
                lost += self._rows_left(segment.number, segment.path)
        return lost

    def verify(self) -> bool:
        """Reads the whole CSV and returns whether it has the rows that were written to it.

        What it lacks is restored by the next `run`.
        """
        csv = self._csv
        if not self._is_open or not csv.exists:
            return True
        self._is_sound = csv.is_as_left() and csv.has_rows(csv.size, csv.rows)
        return self._is_sound and csv.is_in_place()

    def _rows_left(self, number: int, path: Path) -> int:
        """Returns how many rows of a segment are not in the CSV."""
        start = self._offset if number == self._segment else len(MAGIC)
        with SegmentReader(path, self._journal, number) as reader:
            data = reader.read(0, reader.size()) if _is_segment(reader) else b""
        return count_rows(data, start)

    # One pass.

    def run(self) -> int:
        """Drains all rows available.

        Returns:
            The number of rows drained.

        Raises:
            OSError: disk full or folder deleted; the next run repeats what was not committed.
        """
        if not self._is_open:
            self.open()
        before = self.rows
        for _ in range(_TRIES):
            self._restore_if_changed()
            try:
                self._run()
            except ChangedError:
                self._discard_unwritten()
            except BaseException:
                self._discard_unwritten()
                with contextlib.suppress(OSError):
                    self._sync_waiting()
                raise
            else:
                return self.rows - before
        raise OSError(errno.EBUSY, "another program keeps changing the file", str(self._csv.path))

    def _run(self) -> None:
        if self._csv.exists and not self._has_position:
            self._write_position()
        since_position = 0
        while True:
            segments = self._segments()
            current = self._next_segment(segments)
            if current is None:
                break
            number, path, live = current
            if number != self._segment:
                self._segment, self._offset = number, len(MAGIC)
                self._note_committed()
            start = self._offset
            self._drain_segment(path, live)
            since_position += self._offset - start
            following = self._next_segment(segments, number + 1)
            if following is not None:
                self._segment, self._offset = following[0], len(MAGIC)
                since_position += _POSITION_BYTES
            if since_position >= _POSITION_BYTES:
                self._commit()
                since_position = 0
            if following is None:
                break
        if since_position or not self._buffer.is_empty:
            self._commit()

    def _next_segment(
        self, segments: list[tuple[int, Path, bool]], least: int | None = None
    ) -> tuple[int, Path, bool] | None:
        """Returns the segment to continue in: this one, or the first that continues from its end.

        Segments whose predecessor was lost in a power loss are skipped and counted as damage.

        Args:
            segments: the segments present.
            least: the minimum number. Default: that of this segment.
        """
        for item in segments:
            number, path, live = item
            if number < (self._segment if least is None else least):
                continue
            if number == self._segment or live:
                return item
            with SegmentReader(path, None, number) as reader:
                if continues_from(reader.read(0, FIRST_BYTES), (self._segment, self._offset)):
                    return item
                self._count_skipped(number, reader)
        return None

    def _count_skipped(self, number: int, reader: SegmentReader) -> None:
        """Counts a skipped segment as damage."""
        if number not in self._skipped_segments:
            self._skipped_segments.add(number)
            self.damaged_bytes += len(reader.read(0, reader.size()).rstrip(b"\0"))

    def _sync_waiting(self) -> None:
        """Syncs the rows that stay in the journal."""
        for number, path, live in self._segments():
            if number >= self._segment:
                with SegmentReader(path, self._journal if live else None, number) as reader:
                    reader.sync(self._disk)
        self._disk.sync_folder(self._folder)

    def _segments(self) -> list[tuple[int, Path, bool]]:
        """Returns number and path of each segment, and whether it is open in this process."""
        own = self._own_segments()
        found = {segment_number(path): path for path in segment_paths(self._folder)}
        return sorted((number, path, number in own) for number, path in {**found, **own}.items())

    def _own_segments(self) -> dict[int, Path]:
        journal = self._journal
        return {} if journal is None else {item.number: item.path for item in list(journal.segments)}

    def _drain_segment(self, path: Path, live: bool) -> None:
        """Drains one segment."""
        with SegmentReader(path, self._journal if live else None, self._segment) as reader:
            if not _is_segment(reader):
                if live and self._journal is not None:
                    self.missing += self._journal.rows_of_closed(self._segment)
                return
            self._read_names(reader)
            at, length = self._offset, _READ_BYTES
            while True:
                data = reader.read(at, length)
                taken = self._take_frames(data, at)
                if not taken:
                    if len(data) < length or not any(data[:8]):
                        self._count_damage(data)
                        break
                    length *= 2  # The frame is larger.
                at += taken
        self._buffer.finish_line()
        self._offset = at

    def _take_frames(self, data: bytes, base: int) -> int:
        """Applies the frames in data, whose first byte is at `base`, and returns how many bytes they take.

        The offset of the drain is before the row that later calls may share.
        """
        at = 0
        while True:
            block = read_row_block(data, at, CHUNK_ROWS)
            if block is not None and self._add_block(block, base + at):
                at += block.size
            else:
                end, record = next(iter_frames(data, at), (0, None))
                if record is None or self._lacks_names(record):
                    return at
                self._apply(record, base, data, at, end)
                at = end
            self._offset = self._buffer.end_of_lines(base + at)
            if self._buffer.line_count >= CHUNK_ROWS - 1:
                self._write_lines()

    def _apply(self, record: Record, base: int, data: bytes, start: int, at: int) -> None:
        """Applies a record, which is between two places of the data, whose first byte is at `base`."""
        if not isinstance(record, tuple | Keys):
            # The lines before it are written, and read no more.
            self._finish_lines()
            self._offset = base + start
        match record:
            case tuple():
                self._take(record, base + start, data, at)
            case Keys():
                self._names[record.schema] = record.names
            case Begin():
                self._begin_session(record.session)
            case Rewind():
                self._rewind(record)
            case Resume():
                self._resume(record)
            case Boundary():
                self._mark(record)

    def _lacks_names(self, record: Record) -> bool:
        """Returns whether a record is a row whose names were lost in a power loss; the segment ends there."""
        return type(record) is tuple and len(self._names.get(record[0], ())) != len(record[4])

    def _read_names(self, reader: SegmentReader) -> None:
        """Reads the schemas that this segment defines before the offset."""
        if self._names_of_segment == self._segment:
            return
        self._names_of_segment = self._segment
        self._names = names_before(reader.read(0, self._offset), self._offset)

    def _count_damage(self, data: bytes) -> None:
        rest = data.rstrip(b"\0")
        if self._segment not in self._own_segments():
            self.damaged_bytes += len(rest)

    # Rows.

    def _take(self, row: Row, start: int, data: bytes, at: int) -> None:
        """Buffers a row that begins at an offset, and after which others follow in the data."""
        names = self._names[row[0]]
        if self._csv.formatter(names).missing:
            self._add_columns(names, data, at)
        self._buffer.add(Call(names, *row[1:]), start)

    def _add_block(self, block: RowBlock, start: int) -> bool:
        """Buffers many rows; False if the first one must be handled by itself."""
        names = self._names.get(block.schema)
        if names is None or len(names) != block.values.shape[1] or self._csv.formatter(names).missing:
            return False
        return self._buffer.add_block(names, block, start)

    def _write_lines(self) -> None:
        lines = self._buffer.pop_lines()
        if lines:
            before = self._csv.size
            self._csv.append(lines)
            self._drained_bytes += self._csv.size - before
        self._between()

    def _discard_unwritten(self) -> None:
        """Returns to the last position after an error; everything since is read again.

        The CSV stays open: if it was deleted meanwhile, its rows are nowhere else.
        """
        self._buffer.clear()
        place = self._committed
        self._segment, self._offset = place.segment, place.offset
        if self._csv.exists:
            self._csv.rewind(place.csv_bytes, place.csv_rows)

    # Committing.

    def _commit(self) -> None:
        """Commits everything read so far to the disk, then removes drained segments."""
        self._buffer.finish_line()
        self._write_lines()
        if not self._csv.exists:
            return
        self._csv.sync()
        self._csv.write_sums()
        self._write_position()
        self._remove_drained()
        if self._csv.size >= self._part_bytes:
            self._close_part(self._buffer.columns_in_use())

    def _write_position(self, *following: CsvState) -> None:
        self._csv.sync_name()
        states = (self._csv.state(self._segment, self._offset), *following)
        position, path = Position(self._generation, states), self._folder / POSITION
        try:
            with replacement(path, disk=self._disk) as fd:
                self._disk.write(fd, position.to_json().encode(), 0)
                self._disk.sync(fd)
        except OSError:
            # A network file system may say that it has failed when the file has its name.
            if Position.read(path) != position:
                raise
        # These rows are committed, also where the folder cannot be synced: who reads it next finds them.
        self._has_position = not following
        rows, step = self._buffer.update_statistics(self.statistics)
        self.rows += rows
        self._note_committed()
        self._disk.sync_folder(self._folder)
        self.durable_step = step if step is not None else self.durable_step

    def _note_committed(self) -> None:
        """Remembers the place that an error returns to; a new segment is one to restore rows from."""
        self._committed = _Place(self._segment, self._offset, self._csv.size, self._csv.rows, self.rows)
        if self._segment != self._base.segment:
            self._base = self._committed

    def _begin_base(self) -> None:
        """Remembers that rows before this place can be restored from nothing: the CSV is a new file."""
        self._note_committed()
        self._base = self._committed

    def _remove_drained(self) -> None:
        if self._journal is not None:
            while self._journal.segments and self._journal.segments[0].number < self._segment:
                segment = self._journal.segments.popleft()
                segment.close()
                with contextlib.suppress(OSError):
                    self._disk.unlink(segment.path)
        for path in segment_paths(self._folder):
            if segment_number(path) < self._segment:
                with contextlib.suppress(OSError):
                    self._disk.unlink(path)

    # Replacing the file.

    def _add_columns(self, names: tuple[str, ...], data: bytes, at: int) -> None:
        """Adds the columns of a row, and of the next rows with other names, to the file or to a new one."""
        schemas = [names]
        for _, record in iter_frames(data, at):
            if isinstance(record, Keys):
                schemas.append(record.names)
                if len(schemas) == _MOST_LATE:
                    break
        wanted = dict.fromkeys(column_of(name) for schema in schemas for name in schema)
        if not self._csv.exists:
            self._csv.begin(wanted)
            self._begin_base()
            self._write_position()
            return
        # The pending row stays pending: this one may share it.
        self._write_lines()
        if self._is_better_closed():
            pending = self._buffer.columns_of_pending()
            self._close_part([*self._buffer.columns_in_use(), *pending, *wanted])
            self._late = len(schemas)
            return
        self._late += sum(bool(self._csv.formatter(schema).missing) for schema in schemas)
        self._rewritten_bytes += self._csv.size
        self._replace(self._csv.prepare_columns([*wanted]))

    def _is_better_closed(self) -> bool:
        """Returns whether the file is closed as a part instead of being written again with new columns.

        It is where most of its cells would be empty, and where it is large and so much was written again
        lately: that is rationed to a multiple of the bytes of rows plus `_REWRITE_BYTES_PER_SECOND`.
        """
        size = self._csv.size
        if self._late >= _MOST_LATE and self._buffer.empty_cells() > size // _EMPTY_SHARE:
            return True
        earned = (self._clock() - self._opened_at) * _REWRITE_BYTES_PER_SECOND
        earned += self._drained_bytes * _REWRITE_SHARE_OF_NEW
        is_small = size <= max(_SMALL_BYTES, 2 * len(self._csv.header))
        return not is_small and self._rewritten_bytes + size > earned

    def _close_part(self, columns: list[str]) -> None:
        """Closes the rows of this session in the file as a part, and begins the next file."""
        csv = self._csv
        lines = [] if csv.chain.size else csv.count_format2()
        sealed = csv.seal(self._between)
        self._note_sealed(sealed)
        if not sealed:
            # The file has rows of earlier sessions alone, which are in parts.
            lines.append(csv.chain.session(csv.chain.newest, csv.chain.before, None))
        self._replace(csv.prepare_history(columns, (), with_own=False), *lines, *sealed)
        self._buffer.begin_file()
        self._late = 0

    # Sessions.

    def _begin_session(self, session: str) -> None:
        """Begins a session that follows all before it, whose rows are closed as a part."""
        csv = self._csv
        self._finish_lines()
        if csv.chain.knows(session):
            return  # It is read again after an error.
        if not csv.exists:
            before = RowPlace(csv.chain.newest) if csv.chain.newest or csv.chain.parts else None
            self._add_history(csv.chain.session(session, before, None if csv.chain.parts else 0))
            return
        lines = [] if csv.chain.size else csv.count_format2()
        is_whole, sealed = csv.chain.view is not None, csv.seal(self._between)
        before = RowPlace(csv.chain.newest)
        self._note_sealed(sealed)
        lines += [*sealed, csv.chain.session(session, before, csv.rows if is_whole else None)]
        if is_whole:
            self._add_history(*lines)
            self._begin_base()
            self._write_position()
        else:
            self._replace(csv.prepare_history(self._buffer.columns_in_use(), (), with_own=False), *lines)
            self._buffer.begin_file()

    def _rewind(self, rewind: Rewind) -> None:
        """Makes this session follow a checkpoint."""
        chain = self._csv.chain
        if chain.knows(rewind.session) and rewind.session != chain.newest:
            self._finish_lines()
            self._follow(chain.place(rewind.session, rewind.mark))
        else:
            self._resume(rewind.resume)

    def _resume(self, resume: Resume) -> None:
        """Makes this session follow what a loop that has named its batch leaves of the rows before."""
        csv = self._csv
        if csv.exists and not csv.chain.newest:
            self._begin_session(uuid.uuid4().hex[:12])
        before = csv.chain.before
        if not csv.exists or before is None:
            return
        self._follow(attrs.evolve(before, limit=resume.limit))

    def _follow(self, place: RowPlace) -> None:
        """Makes this session follow a place of an earlier one, and writes the CSV anew."""
        csv, chain = self._csv, self._csv.chain
        if chain.before == place:
            return
        kept = list(chain.kept(place))
        columns, rows = csv.look_at(kept)
        left = csv.look_at(chain.kept(chain.before))[1] - rows
        if not left and (chain.before is None or chain.before.session == place.session):
            return
        size = sum(part.csv_bytes for part, _ in kept)
        is_whole = size < self._part_bytes and not chain.parts.get(chain.newest)
        new = csv.prepare_history(columns if is_whole else (), kept if is_whole else (), with_own=True)
        self._replace(new, chain.session(chain.newest, place, rows if is_whole else None))
        self._on_rollback(max(0, left))

    def _finish_lines(self) -> None:
        self._buffer.finish_line()
        self._write_lines()

    def _note_sealed(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            sealed = RowChain()
            sealed.add(line)
            self._closed_parts += itertools.chain.from_iterable(sealed.parts.values())

    def _mark(self, boundary: Boundary) -> None:
        """Notes how many rows this session has at a checkpoint."""
        self._buffer.finish_line()
        chain = self._csv.chain
        if boundary.mark and chain.newest:
            self._write_lines()
            rows = chain.sealed_rows(chain.newest) + (self._csv.own_rows if self._csv.exists else 0)
            self._add_history(chain.mark(boundary.mark, rows))

    def _add_history(self, *lines: bytes) -> None:
        self._csv.write_history(*lines)
        for line in lines:
            self._csv.chain.add(line)

    def _replace(
        self, new: Replacement, *history: bytes, place: _Place | None = None, then: Callable[[], object] = int
    ) -> None:
        """Announces the new version in the position, renames it into place, then drops the old state.

        Args:
            new: the new version.
            history: lines that count with it.
            place: where the journal continues. Default: where it is.
            then: called as soon as the new version is in place; does not raise.
        """
        csv = self._csv
        segment, offset = (self._segment, self._offset) if place is None else (place.segment, place.offset)
        size = csv.chain.size + sum(map(len, history))
        try:
            csv.sync()
            if history:
                csv.write_history(*history)
            self._write_position(new.state(segment, offset, size, csv.format2_parts))
        except BaseException:
            new.discard()
            raise
        csv.accept(new)
        for line in history:
            csv.chain.add(line)
        self._segment, self._offset = segment, offset
        self._generation += 1
        self.rewrites += 1
        then()
        self._begin_base()
        self._write_position()
        csv.write_sums()

    # What other programs do to the files.

    def _restore_if_changed(self) -> None:
        """Recreates a deleted folder, with the CSV from its descriptor; restores rows that were cut off."""
        is_in_place = self._csv.is_in_place() and self._folder.is_dir()
        if not is_in_place:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._has_position &= os.path.lexists(self._folder / POSITION)
        self._csv.restore_history()
        if self._csv.exists:
            if not (self._is_sound and self._csv.is_as_left()):
                self._restore_rows()
            elif not self._csv.is_in_place():
                self._keep_file_in_the_way()
                self._csv.restore()
                self._write_position()
        if self._journal is not None and not (is_in_place and self._journal.is_in_place()):
            self._journal.start_new_segment()

    def _restore_rows(self) -> None:
        """Replaces the CSV by its sound rows, and continues in the journal where these end."""
        base, rows_before = self._base, self.rows
        self._keep_aside(self._csv.foreign_bytes())
        end, rows = base.csv_bytes, base.csv_rows
        if not self._csv.has_rows(end, rows):
            end, rows = self._csv.sound_rows(end)
        if not self._csv.is_in_place():
            self._keep_file_in_the_way()
        view = self._csv.chain.view or 0
        if rows < view:
            # What the file begins with is in closed parts.
            shorter, rows = self._csv.prepare_view(), view
        else:
            shorter = self._csv.prepare_until(end)
        lost = max(0, base.csv_rows - rows)

        def restored() -> None:
            self._is_sound = True
            self.rows = base.drained
            self.missing += lost
            self._on_change(rows_before - self.rows, lost)

        self._replace(shorter, place=base, then=restored)

    def _mend(self) -> None:
        """Makes the rows of damaged blocks blank, where no closed part has them; what they were is kept."""
        csv, checks = self._csv, self._csv.checks
        if checks is None or (damage := checks.damage()) is None:
            return
        lines = [] if csv.chain.size else csv.count_format2()
        if checks.damaged:
            self._keep_aside(csv.read(one.start, one.end - one.start) for one in checks.damaged.values())
            mended, lost = csv.prepare_mended()
            lines += [csv.chain.loss(lost)] if lost else []
            self._replace(mended, *lines)
        else:
            lost = checks.lost
            self._add_history(*lines, *([csv.chain.loss(lost)] if lost else []))
            self._write_position()
        _log.error(
            "run folder %s: %s. Closed parts have all but %d of them; what they were is in %s/.",
            *(self._run_dir, damage, lost, ABANDONED_FOLDER),
        )

    def _keep_file_in_the_way(self) -> None:
        """Keeps a file that another program has put in the place of the CSV."""
        try:
            with self._csv.path.open("rb") as file:
                self._keep_aside(iter(lambda: file.read(_READ_BYTES), b""))
        except FileNotFoundError:
            return

    def _keep_aside(self, chunks: Iterator[bytes]) -> None:
        """Writes what another program wrote to a file in `abandoned/`."""
        first = next(chunks, b"").strip(b"\0")
        if not first or self._foreign_files >= _MOST_FOREIGN_FILES:
            return
        folder = self._run_dir / ABANDONED_FOLDER
        self._disk.make_folder(folder)
        names = (folder / f"{self._csv.path.stem}.foreign{number}.csv" for number in itertools.count())
        path = next(path for path in names if not os.path.lexists(path))
        with replacement(path, disk=self._disk) as fd:
            size = 0
            for chunk in itertools.chain([first], chunks):
                self._disk.write(fd, chunk, size)
                size += len(chunk)
        self._foreign_files += 1


def _is_segment(reader: SegmentReader) -> bool:
    """Returns whether a file begins with the magic bytes; after a power loss it may not, and is ignored."""
    return reader.read(0, len(MAGIC)) == MAGIC
