"""A cache of the metrics of runs, as columns in memory; each read adds only new rows.

The cache keeps the rows of a CSV. Rows still in the journal are few and are read on each call. Memory is
bounded: the columns of the least recently read runs are dropped.

**Threading.** Any thread may call any method; calls for the same run take turns.
"""

import contextlib
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.history.csv_file import CsvSnapshot
from destinations.history.cursor import Cursor, Look
from destinations.history.sealed import Part
from destinations.history.snapshot import MetricsSnapshot, metric_columns
from destinations.run_directory.blocks import Block, block_of_rows, blocks_of, read_blocks
from destinations.run_directory.layout import OWN_COLUMNS, column_of, parse_header, writer_path
from destinations.run_directory.parquet import ENTRY_ROWS, PartIndex, indexed_columns
from destinations.runs import BudgetError
from destinations.runs.budget import seconds_left, spend
from destinations.runs.content.rank_reader import RankReader
from destinations.runs.content.sources import Branch

__all__ = ["MAX_HELD_BYTES", "ClosedPart", "ColumnCache", "MetricRows", "joined", "read_branch"]

Array = np.ndarray[Any, np.dtype[Any]]
_Key = tuple[Path, str, int]

MAX_HELD_BYTES = 64 << 20
"""The rows of larger closed parts are neither cached nor read at once; charts use their indexes."""
_CACHE_BYTES = 256 << 20
_FIRST_ROWS = 1024
# All columns of a smaller file are read at once: opening it again takes as long as parsing the other columns.
_WHOLE_BYTES = 1 << 20
# The most index columns of a part that stay cached: 64 bytes each for a thousand rows.
_HELD_COLUMNS = 64
_MAX_BRANCH_BYTES = 256 << 20


@attrs.frozen(eq=False)
class MetricRows:
    """Rows of a rank, with some of its metrics.

    Attributes:
        block: the rows, without the rows of `closed`; `columns` has the wanted metrics that exist, by column.
        known: all metrics of the rank, in the order of first appearance.
        token: changes if earlier rows are gone or may have changed; while it stays the same, rows are only
            added.
        closed: the parts with too many rows for `block`; charts use their indexes.
    """

    block: Block
    known: list[str]
    token: str
    closed: "tuple[ClosedPart, ...]" = ()

    def column(self, name: str) -> str | None:
        """Returns the column of a metric, or None if there is none."""
        return next((one for one in (column_of(name), name) if one in self.block.columns), None)


@attrs.frozen(eq=False)
class ClosedPart:
    """A closed part of a long run, with its index.

    Attributes:
        part: its location.
        header: its first line.
        nbytes: the size of the CSV that it was made from; its rows take about as much memory.
        names: the names of its metrics.
        columns: the columns of its index on the disk.
        index: the index of its rows, and of the columns read so far.
    """

    part: Part
    header: bytes
    nbytes: int
    names: list[str]
    columns: frozenset[str]
    index: PartIndex

    @classmethod
    def of(cls, part: Part, before: "ClosedPart | None") -> "ClosedPart":
        """Opens a part. It shares equal names and columns with `before`, another part, to save memory."""
        with contextlib.closing(part.open()) as file:
            index = file.packed.index(())
            if before is not None and before.header == file.header:
                return cls(part, before.header, file.end, before.names, before.columns, index)
            names = [name for name in parse_header(file.header) if name not in OWN_COLUMNS]
            columns = frozenset(indexed_columns(parse_header(file.header)))
            return cls(part, file.header, file.end, names, columns, index)

    def indexing(self, columns: Sequence[str]) -> "ClosedPart":
        """Returns the part with the index of these columns; the index of a wide part isn't read whole."""
        held = self.index.columns
        missing = [name for name in columns if name in self.columns and name not in held]
        if not missing:
            return self
        with contextlib.closing(self.part.open()) as file:
            wanted = [*missing, *(held if len(held) <= _HELD_COLUMNS else columns)]
            index = file.packed.index(wanted)
        return attrs.evolve(self, index=index)

    def read(self, entries: slice, columns: Sequence[str], *, with_time: bool) -> Iterator[Block]:
        """Yields the rows of some entries of the index.

        Raises:
            OSError: the part cannot be read.
        """
        with contextlib.closing(self.part.open()) as file:
            start, end = entries.start * ENTRY_ROWS, entries.stop * ENTRY_ROWS
            yield from _within_budget(blocks_of(file, columns, start=start, end=end, with_time=with_time))


class ColumnCache:
    """Columns of runs, by folder, writer and rank.

    Args:
        limit_bytes: how much memory the columns may take.
    """

    def __init__(self, limit_bytes: int = _CACHE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # Guards everything below.
        self._ranks: OrderedDict[_Key, _RankColumns] = OrderedDict()
        # The bytes of each rank at its last read, and their sum.
        self._sizes: dict[_Key, int] = {}
        self._total = 0

    @property
    def nbytes(self) -> int:
        """The memory that the columns take."""
        with self._lock:
            return self._total

    def read(
        self, run_dir: Path, rank: int, names: Sequence[str], *, with_time: bool = False, writer: str = ""
    ) -> MetricRows:
        """Returns the rows of a rank as they are now.

        Args:
            run_dir: the folder of the run.
            rank: the rank that wrote the rows.
            names: names of metrics; "epoch" is the epoch. Missing ones are left out.
            with_time: whether the times of the rows are needed; otherwise they may be NaN.
            writer: the writer of the rows; "" for the trainer.

        Raises:
            OSError: a file cannot be read.
        """
        key = run_dir, writer, rank
        frame = self._held(key).read(names, with_time=with_time)
        self._trim(key, frame)
        return frame

    def announce(self, run_dir: Path, rank: int, names: Sequence[str], writer: str = "") -> None:
        """Announces metrics that will be read soon: the next read of the rank loads them in the same pass."""
        self._held((run_dir, writer, rank)).announce(names)

    def _held(self, key: "_Key") -> "_RankColumns":
        with self._lock:
            held = self._ranks.get(key)
            if held is None:
                run_dir, writer, rank = key
                held = self._ranks[key] = _RankColumns(writer_path(run_dir, writer), rank)
            self._ranks.move_to_end(key)
            return held

    def rows(self, run_dir: Path) -> Hashable:
        """Returns a value that changes with the rows of the cached ranks; None if none is cached."""
        with self._lock:
            held = [one for (folder, _, _), one in self._ranks.items() if folder == run_dir]
        return tuple(one.extent() for one in held) or None

    def forget(self, run_dir: Path) -> None:
        """Drops the columns of a run."""
        with self._lock:
            for key in [key for key in self._ranks if key[0] == run_dir]:
                self._drop(key)

    def _drop(self, key: "_Key") -> None:
        del self._ranks[key]
        self._total -= self._sizes.pop(key, 0)

    def _weigh(self, key: "_Key") -> None:
        self._total -= self._sizes.pop(key, 0)
        if key in self._ranks:
            self._sizes[key] = self._ranks[key].nbytes
            self._total += self._sizes[key]

    def _trim(self, newest: "_Key", frame: MetricRows) -> None:
        with self._lock:
            self._weigh(newest)
            for key in list(self._ranks) if self._total > self._limit_bytes else ():
                if self._total <= self._limit_bytes:
                    return
                if key != newest:
                    self._drop(key)
            if self._total > self._limit_bytes and newest in self._ranks:
                # One run alone exceeds the limit: drop all columns except the ones just read.
                self._ranks[newest].keep(frame.block.columns)
                self._weigh(newest)


def read_branch(branch: Branch, names: Sequence[str]) -> MetricRows:
    """Returns the rows of an abandoned branch.

    Args:
        branch: the branch.
        names: as for `ColumnCache.read`.

    Raises:
        OSError: the file cannot be read, or has more than 256 MiB.
    """
    files = list(branch.files(_MAX_BRANCH_BYTES))
    known = list(
        dict.fromkeys(name for csv in files for name in parse_header(csv.header) if name not in OWN_COLUMNS)
    )
    wanted = _columns_of(names, known)
    blocks = [block_of_rows([], wanted)]
    for csv in files:
        blocks += read_blocks(csv.header, csv.chunks(chunk_bytes=csv.size), wanted)
    return MetricRows(functools.reduce(joined, blocks), known, branch.name)


def _columns_of(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Returns the columns of metrics that exist."""
    columns = (column for name in names for column in (column_of(name), name))
    return list(dict.fromkeys(one for one in columns if one in known or one == "epoch"))


_tokens = itertools.count(1)


class _RankColumns:
    """The columns of one rank of a run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._reader = RankReader(run_dir, rank)
        self._lock = threading.Lock()  # Guards everything but `_announced`, a set that is replaced whole.
        self._announced: frozenset[str] = frozenset()
        # After a read that ran out of time: the extent of the rows then, and the seconds spent.
        self._tried: tuple[Hashable, float] | None = None
        self._closed: dict[Part, ClosedPart] = {}
        # From the last read: the stamp of the files, the metrics, and the parts that it did not cache.
        self._stamp: Hashable = None
        self._known: list[str] = []
        self._shown_closed: tuple[ClosedPart, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._token = next(_tokens)
        self._drop_rows()

    def _drop_rows(self) -> None:
        self._reader.cursor = Cursor()
        # The size of a CSV that another program writes.
        self._csv_bytes = 0
        self._step = _Growing(np.int64)
        # None until a chart needs times.
        self._time: _Growing | None = None
        self._columns: dict[str, tuple[_Growing, _Growing]] = {}

    @property
    def nbytes(self) -> int:
        columns = [one for pair in list(self._columns.values()) for one in pair]
        time = self._time
        return sum(one.nbytes for one in [self._step, *columns, *([] if time is None else [time])])

    def keep(self, columns: Mapping[str, Any]) -> None:
        """Drops all columns but these."""
        with self._lock:
            self._columns = {name: pair for name, pair in self._columns.items() if name in columns}

    def extent(self) -> Hashable:
        """Returns a value that changes when the rows change."""
        return self._reader.extent()

    def announce(self, names: Sequence[str]) -> None:
        """See `ColumnCache.announce`."""
        self._announced |= frozenset(names)

    def read(self, names: Sequence[str], *, with_time: bool) -> MetricRows:
        with self._lock:
            if self._tried is not None:
                extent, seconds = self._tried
                if seconds_left() < 2 * seconds and extent == self._reader.extent():
                    raise BudgetError(
                        f"the rows of this run take longer than {seconds:.0f} s to read. "
                        "They are not read again until they change."
                    )
            stamp = self._reader.stamp()
            if stamp is not None and stamp == self._stamp and not self._shown_closed:
                wanted = _columns_of(names, self._known)
                if all(name in self._columns for name in wanted) and (self._time or not with_time):
                    return self._rows(self._block(wanted))
            left = seconds_left()
            try:
                found = self._read(names, with_time=with_time)
            except BudgetError:
                if seconds_left() <= 0:
                    self._tried = self._reader.extent(), left - seconds_left()
                raise
            self._stamp = stamp
            return found

    def _rows(self, block: Block) -> MetricRows:
        return MetricRows(block, self._known, str(self._token), self._shown_closed)

    def _read(self, names: Sequence[str], *, with_time: bool) -> MetricRows:
        with self._reader.look() as look:
            snapshot = look.snapshot
            closed = self._update_closed(snapshot)
            open_part = attrs.evolve(snapshot, parts=(), missing=(), inherited=()) if closed else snapshot
            known = self._known = list(
                dict.fromkeys([*(n for one in closed for n in one.names), *metric_columns(open_part)])
            )
            wanted = _columns_of(names, known)
            # A metric that is announced between these two lines is read when it is needed.
            announced, self._announced = self._announced, frozenset()
            try:
                is_small = not snapshot.parts and snapshot.csv.end <= _WHOLE_BYTES
                every = _columns_of([*names, *(known if is_small else announced)], known)
                self._update(look, every, with_time=with_time, closed=self._index_closed(closed, every))
            except BaseException:
                self._clear()  # Some columns may have more rows than others.
                raise
            block = self._block(wanted)
            if rows := snapshot.journal_rows():
                block = joined(block, block_of_rows(rows, wanted))
            return self._rows(block)

    def _update_closed(self, snapshot: MetricsSnapshot) -> tuple[ClosedPart, ...]:
        """Returns the closed parts if they are too large to cache their rows, else none."""
        held, self._closed, before = self._closed, {}, None
        for part in (*snapshot.inherited, *snapshot.parts):
            self._closed[part] = before = held.get(part) or ClosedPart.of(part, before)
        closed = tuple(self._closed.values())
        return () if sum(one.nbytes for one in closed) <= MAX_HELD_BYTES else closed

    def _index_closed(self, closed: tuple[ClosedPart, ...], columns: Sequence[str]) -> tuple[ClosedPart, ...]:
        """Returns the parts with the indexes of some columns."""
        if not closed:
            return ()
        self._closed = {part: one.indexing(columns) for part, one in self._closed.items()}
        return tuple(self._closed.values())

    def _update(
        self, look: Look, wanted: Sequence[str], *, with_time: bool, closed: tuple[ClosedPart, ...]
    ) -> None:
        """Reads new rows of all cached columns, and all rows of the other columns."""
        csv = look.snapshot.csv
        before, self._shown_closed = self._shown_closed, closed
        is_same = [one.part for one in before] == [one.part for one in closed]
        # Another program may change earlier rows, or rename columns in the middle of the file.
        is_foreign = not csv.is_own and csv.size != self._csv_bytes
        self._csv_bytes = csv.size
        if not (is_same and look.is_continued) or is_foreign:
            wanted = [*dict.fromkeys([*self._columns, *wanted])]
            with_time = with_time or self._time is not None
            if look.is_continued and not is_foreign:
                self._drop_rows()  # The rows have moved to a closed part.
            else:
                self._clear()
            look = Look(look.snapshot, self._reader.cursor)
        elif self._columns:
            _read_into(look.pieces(), self._columns, self._step, self._time)
        look.pass_files()
        missing = [name for name in wanted if name not in self._columns]
        if missing or (with_time and self._time is None and wanted):
            files = [csv] if closed else look.snapshot.files()
            self._add_columns(files, missing, with_time=with_time and self._time is None)

    def _add_columns(self, files: Iterable[CsvSnapshot], names: Sequence[str], *, with_time: bool) -> None:
        """Reads columns of all rows; other columns are up to date."""
        added = {name: (_Growing(np.float64), _Growing(np.bool_)) for name in names}
        step: _Growing | None = None
        if not self._columns:
            # Without columns, steps and times were not updated either.
            with_time = with_time or self._time is not None
            step = self._step = _Growing(np.int64)
        time = _Growing(np.float64) if with_time else None
        _read_into(((file, file.first) for file in files), added, step, time)
        self._time = self._time if time is None else time
        self._columns |= added

    def _block(self, names: Sequence[str]) -> Block:
        columns = {name: self._columns[name] for name in names}
        step = self._step.values()
        return Block(
            step,
            np.full(len(step), np.nan) if self._time is None else self._time.values(),
            {name: (values.values(), present.values()) for name, (values, present) in columns.items()},
        )


def _read_into(
    pieces: Iterable[tuple[CsvSnapshot, int]],
    columns: "Mapping[str, tuple[_Growing, _Growing]]",
    step: "_Growing | None",
    time: "_Growing | None",
) -> None:
    """Appends the rows of files, each from its start position, to columns, and to steps and times if any."""
    blocks = (
        _within_budget(blocks_of(csv, list(columns), start=start, with_time=time is not None))
        for csv, start in pieces
    )
    for block in itertools.chain.from_iterable(blocks):
        spend(block.nbytes)
        if step is not None:
            step.append(block.step)
        if time is not None:
            time.append(block.time)
        for name, pair in columns.items():
            for array, new in zip(pair, block.columns[name], strict=True):
                array.append(new)


def _within_budget(blocks: Iterator[Block]) -> Iterator[Block]:
    spend()
    for block in blocks:
        spend()
        yield block


def joined(first: Block, second: Block) -> Block:
    """Returns the rows of two blocks of the same columns."""
    names = first.columns
    return Block(
        np.concatenate([first.step, second.step]),
        np.concatenate([first.time, second.time]),
        {
            name: (
                np.concatenate([names[name][0], second.columns[name][0]]),
                np.concatenate([names[name][1], second.columns[name][1]]),
            )
            for name in names
        },
    )


class _Growing:
    """An array that grows at its end; views of it stay valid."""

    def __init__(self, kind: Any) -> None:
        self._array: Array = np.empty(0, kind)
        self._size = 0

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def values(self) -> Array:
        return self._array[: self._size]

    def append(self, values: Array) -> None:
        size = self._size + len(values)
        if size > len(self._array):
            # Rows before the end never change, so views of the old array stay valid.
            larger = np.empty(max(size, len(self._array) * 3 // 2, _FIRST_ROWS), self._array.dtype)
            larger[: self._size] = self._array[: self._size]
            self._array = larger
        self._array[self._size : size] = values
        self._size = size
