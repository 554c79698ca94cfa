"""Moves each row from the journal to `metrics.csv` exactly once, whenever the process is killed.

The order of writes guarantees it. Lines are appended to the CSV, then `position.json` is replaced by one that
covers them; in between, readers ignore the new lines and find their rows in the journal. Replacing the CSV,
for new columns, other rows of earlier sessions, or after closing a part, is announced in the position first;
see `Position`. Nothing is appended to a file until the position describes only that file.

Runs in the writer thread.
"""

import contextlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from destinations.history.aggregate import Aggregate
from destinations.history.rows import Call
from uploads.disk import DISK, Disk

from .frames import RowBlock
from .journal_source import CHUNK_ROWS, JournalSource
from .layout import ABANDONED_FOLDER, POSITION, column_of
from .metrics_csv import MetricsCsv
from .row_file import RowFile

if TYPE_CHECKING:
    from .journal import Journal

__all__ = ["PART_BYTES", "JournalDrain", "RowBuffer"]

_MOST_FOREIGN_FILES = 10
PART_BYTES = 64 << 20
"""The size of `metrics.csv` at which it is closed as a part."""
_REWRITE_BYTES_PER_SECOND = 4 << 20
_REWRITE_SHARE_OF_NEW = 4
# A file of up to this size, or twice its header, is always rewritten for a new name.
_SMALL_BYTES = 64 << 10
_log = logging.getLogger("destinations")

_Names = tuple[str, ...]


@attrs.define(eq=False)
class _RowsOf:
    """Rows with certain names that aren't in the statistics yet.

    `values` contains blocks of rows, float64 `(rows, metrics)`, and lists of tuples.
    """

    names: _Names
    steps: list[int | None] = attrs.field(factory=list)
    values: list[Any] = attrs.field(factory=list)
    last: int = 0
    """The number of the last such row among these rows."""


class RowBuffer:
    """Buffers lines to write, the row that later calls may share, and values for statistics.

    Args:
        csv: the file that the lines are for.
    """

    def __init__(self, csv: "MetricsCsv") -> None:
        self._csv = csv
        self._lines: list[bytes] = []
        self.line_count = 0
        """The number of complete lines."""
        # The last row, which later calls may share, and the offset of its first call.
        self._pending: Call | None = None
        self._start = 0
        # The rows that aren't in the statistics yet, how many they are, and the entry of the last one.
        self._fresh: dict[_Names, _RowsOf] = {}
        self._count = 0
        self._current = _RowsOf(())
        self._last_epoch: int | None = None

    def end_of_lines(self, end: int) -> int:
        """Returns the offset before which all calls are lines, given the offset that was read up to."""
        return end if self._pending is None else self._start

    def add(self, call: Call, start: int) -> None:
        """Adds a call that begins at an offset."""
        both = None if self._pending is None else self._pending.joined(call)
        if both is None:
            self.finish_line()
            self._start = start
        self._pending = both or call

    def add_block(self, names: _Names, block: RowBlock, start: int) -> None:
        """Adds a block of calls that begins at an offset; only its first call may share the pending row."""
        steps, epochs, times, values = block.steps, block.epochs, block.times, block.values
        size, first = block.size // len(steps), 0
        if self._pending is not None and self._pending.step == steps[0]:
            self.add(Call(names, steps[0], epochs[0], float(times[0]), tuple(values[0].tolist())), start)
            first = 1
        if first == len(steps):
            return
        self.finish_line()
        rows = slice(first, len(steps) - 1)
        if steps[rows]:
            lines = self._csv.formatter(names).lines(steps[rows], epochs[rows], times[rows], values[rows])
            self._lines.append(lines)
            self.line_count += len(steps[rows])
            self._note(names, steps[rows], values[rows], epochs[-1])
        self.add(Call(names, steps[-1], epochs[-1], float(times[-1]), values[-1]), start + size * rows.stop)

    def finish_line(self) -> None:
        """Formats the pending row as a line."""
        if self._pending is not None:
            names, step, epoch, at, values = self._pending
            formatter = self._csv.formatter(names)
            if isinstance(values, tuple):
                self._lines.append(formatter.line(step, epoch, at, values).encode())
                self._note(names, [step], [values], epoch)
            else:
                # A row of a block always has a step and an epoch.
                rows, own = values[None], ([step or 0], [epoch or 0], np.array([at]))
                self._lines.append(formatter.lines(*own, rows))
                self._note(names, [step], rows, epoch)
            self.line_count += 1
            self._pending = None

    def pop_lines(self) -> list[bytes]:
        """Returns and clears the lines."""
        lines, self._lines, self.line_count = self._lines, [], 0
        return lines

    def update_statistics(self, statistics: Aggregate) -> tuple[int, int | None]:
        """Adds the rows since the last call to the statistics.

        Returns:
            The number of rows, and the step of the last one.
        """
        last_step = None
        # In order, so that the last value of a metric comes from the last row that has it.
        for one in sorted(self._fresh.values(), key=lambda one: one.last):
            last_step = one.steps[-1] if one.steps[-1] is not None else last_step
            values = np.concatenate(one.values, dtype=np.float64)
            statistics.add(one.names, one.steps, values, self._last_epoch)
        rows = self._count
        self._fresh, self._count, self._current = {}, 0, _RowsOf(())
        return rows, last_step

    def clear(self) -> None:
        """Discards everything."""
        self._lines, self.line_count, self._pending = [], 0, None
        self._fresh, self._count, self._current = {}, 0, _RowsOf(())

    @property
    def pending_names(self) -> _Names:
        """The names of the row that isn't a line yet."""
        return () if self._pending is None else self._pending.names

    def _note(self, names: _Names, steps: list[Any], values: Any, epoch: int | None) -> None:
        one = self._current
        if one.names is not names:
            one = self._current = self._fresh.setdefault(names, _RowsOf(names))
        one.steps.extend(steps)
        if isinstance(values, list) and one.values and isinstance(one.values[-1], list):
            one.values[-1].extend(values)
        else:
            one.values.append(values)
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
        journal: the writing end of a live journal; None to drain the journal of a dead process.
        on_rollback: called when a session follows an earlier place, with the number of rows that no longer
            count. Must not raise. Afterwards, the caller has to compute `statistics` again.
        on_change: called after another program has changed the CSV; like `on_rollback`.
        between: called after each chunk of rows that is read or written.
        clock: returns monotonic seconds.
        disk: the disk operations.
        part_bytes: the size at which the CSV is closed as a part.
    """

    _run_dir: Path
    _folder: Path
    _csv: MetricsCsv
    _journal: "Journal | None" = None
    _on_rollback: Callable[[int], None] = attrs.field(default=lambda _: None, kw_only=True)
    _on_change: Callable[[], None] = attrs.field(default=lambda: None, kw_only=True)
    _between: Callable[[], None] = attrs.field(default=lambda: None, kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    _disk: Disk = attrs.field(default=DISK, kw_only=True)
    _part_bytes: int = attrs.field(default=PART_BYTES, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.statistics = Aggregate()
        self.rows = 0
        """Rows drained by this object."""
        self.missing = 0
        """Rows that other programs removed from the CSV or the journal, and that can't be restored."""
        files = None if self._journal is None else self._journal.files
        self.source = JournalSource(self._folder, files, self._disk)
        """The rows that aren't drained yet."""
        self._buffer = RowBuffer(self._csv)
        self.file = RowFile(
            self._csv,
            self.source,
            self._folder / POSITION,
            self._committed,
            self._on_rollback,
            self._disk,
            self._part_bytes,
        )
        """The CSV, its parts, and its history."""
        self._opened_at = self._clock()
        self._drained_bytes = self._rewritten_bytes = 0
        self._foreign_files = 0
        self._is_open = False

    # Opening.

    def open(self) -> bool:
        """Finds where the last writer stopped, and truncates unfinished writes.

        Returns:
            Whether the CSV existed.
        """
        self.file.open()
        self._is_open = True
        checks = self._csv.checks
        if self._csv.exists and checks is not None and (damage := checks.damage()) is not None:
            self._mend(damage)
        return self._csv.exists

    def lost_rows(self) -> int:
        """Returns how many rows are gone or exist only in deleted files; for use after logging has ended."""
        lost = self.rows if self._csv.exists and not self._csv.is_in_place() else 0
        return self.missing + lost + self.source.rows_of_deleted()

    # One pass.

    def run(self) -> int:
        """Drains all rows available.

        Returns:
            The number of rows drained.

        Raises:
            OSError: the disk is full or the folder was deleted; the next run repeats what wasn't committed.
        """
        if not self._is_open:
            self.open()
        before = self.rows
        try:
            self._restore_if_changed()
            if self._csv.exists and not self.file.has_position:
                self.file.write_position()
            for _ in self.source.segments():
                self._commit()
                self._drain_segment()
            self._commit()
        except BaseException:
            self._buffer.clear()
            self.file.rewind()
            with contextlib.suppress(OSError):
                self.source.sync()
            raise
        return self.rows - before

    def _drain_segment(self) -> None:
        """Drains one segment, except the row that later calls may share."""
        source, buffer = self.source, self._buffer
        with contextlib.closing(source.frames()) as frames:
            for start, end, found in frames:
                match found:
                    case Call():
                        self._have_columns(found.names)
                        buffer.add(found, start)
                    case (names, block):
                        self._have_columns(names)
                        buffer.add_block(names, block, start)
                    case _:
                        # Write the lines before it, so that they aren't read again.
                        self._finish_lines()
                        source.offset = start
                        self.file.apply(found)
                source.offset = buffer.end_of_lines(end)
                if buffer.line_count >= CHUNK_ROWS - 1:
                    self._write_lines()
        buffer.finish_line()
        source.offset = source.end

    # Rows.

    def _finish_lines(self) -> None:
        self._buffer.finish_line()
        self._write_lines()

    def _write_lines(self) -> None:
        lines = self._buffer.pop_lines()
        if lines:
            before = self._csv.size
            self._csv.append(lines)
            self._drained_bytes += self._csv.size - before
        self._between()

    def _have_columns(self, names: _Names) -> None:
        """Adds the columns of a row, and of upcoming rows, to the file or to a new one."""
        csv = self._csv
        if not csv.formatter(names).missing:
            return
        # The pending row stays pending, because this one may share it.
        schemas = [self._buffer.pending_names, names, *self.source.coming_names()]
        wanted = dict.fromkeys(column_of(name) for schema in schemas for name in schema)
        if not csv.exists:
            self.file.begin(wanted)
            return
        self._write_lines()
        if self._is_better_closed():
            self.file.close_part(wanted)
        else:
            self._rewritten_bytes += csv.size
            self.file.replace(csv.prepare_columns([*wanted]))

    def _is_better_closed(self) -> bool:
        """Returns whether to close the file as a part instead of rewriting it with new columns.

        True if the file is large and the budget for rewriting is spent, a multiple of the bytes of rows plus
        `_REWRITE_BYTES_PER_SECOND`.
        """
        size = self._csv.size
        earned = (self._clock() - self._opened_at) * _REWRITE_BYTES_PER_SECOND
        earned += self._drained_bytes * _REWRITE_SHARE_OF_NEW
        is_small = size <= max(_SMALL_BYTES, 2 * len(self._csv.header))
        return not is_small and self._rewritten_bytes + size > earned

    # Committing.

    def _commit(self) -> None:
        """Commits everything read so far to disk, then removes drained segments."""
        self._finish_lines()
        csv = self._csv
        if csv.exists and not self.file.is_committed:
            csv.sync()
            csv.write_sums()
            self.file.write_position()
            self.source.remove_drained()
        if csv.exists and csv.size >= self.file.part_bytes:
            # The next rows bring their columns.
            self.file.close_part(())

    def _committed(self) -> int | None:
        """Counts the rows that a position covers, and returns the step of the last one."""
        rows, step = self._buffer.update_statistics(self.statistics)
        self.rows += rows
        return step

    # Changes by other programs.

    def _restore_if_changed(self) -> None:
        """Restores a deleted CSV and history, and repairs a changed CSV."""
        csv = self._csv
        csv.parts.restore_history()
        if csv.exists and not csv.is_as_left():
            csv.look_again()
            self.missing += self._mend(f"another program has changed {csv.path.name}")
            self._on_change()
        elif csv.exists and not csv.is_in_place():
            self._keep_aside()
            csv.restore()
            self.file.write_position()

    def _mend(self, damage: str) -> int:
        """Rewrites the CSV without damaged rows, and returns how many are lost."""
        self._keep_aside()
        lost = self.file.mend()
        _log.error(
            "run folder %s: %s. %d rows are lost. The file as it was is in %s/.",
            *(os.path.realpath(self._run_dir), damage, lost, ABANDONED_FOLDER),
        )
        return lost

    def _keep_aside(self) -> None:
        """Copies the file at the path of the CSV to `abandoned/`."""
        path = self._csv.path
        if self._foreign_files >= _MOST_FOREIGN_FILES or not path.is_file() or not path.stat().st_size:
            return
        folder = self._run_dir / ABANDONED_FOLDER
        self._disk.make_folder(folder)
        names = (folder / f"{path.stem}.foreign{number}.csv" for number in itertools.count())
        shutil.copyfile(path, next(name for name in names if not os.path.lexists(name)))
        self._foreign_files += 1
