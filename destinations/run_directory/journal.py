"""Where a row of metrics goes first: into a mapped file, in about a microsecond, in the training thread.

What is in the mapping belongs to the kernel: it outlives the process, whatever ends it. The writer thread takes it from
there (`drain.py`) and prepares the next segment, so that the training thread hardly ever opens a file itself.

**Threading.** `try_append` belongs to one thread. `prepare`, `sample` and the reading side belong to the writer thread. They
meet in deques and single attributes, whose operations are atomic; no lock is taken.
"""

import contextlib
import functools
import marshal
import mmap
import operator
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs

from events import RecordError

from .frames import (
    FLOAT_BYTES,
    FLOAT_TAG,
    HEADER,
    VALUES_AT,
    boundary_frame,
    encode,
    follows_frame,
    keys_frame,
    resume_frame,
)
from .journal_folder import SPARE
from .layout import POSITION, Position, segment_number, segment_path, segment_paths
from .segment_chain import end_of_journal
from .segments import AppendedSegment, MapFile, MappedSegment

if TYPE_CHECKING:
    from events import State

    from .segments import Segment

__all__ = ["Journal", "TryAppend"]


class TryAppend(Protocol):
    """The call that logs a row."""

    def __call__(
        self, metrics: Any, step: int | None = None, read: Callable[[Any], Any] | None = None
    ) -> bool:
        """Takes a row, or says that it is not one of plain numbers; see `LoggerDestination.try_log_metrics`."""


SEGMENT_BYTES = 1 << 20
WAITING_BYTES = 64 << 20
_KEPT_OPEN = 16
_SAMPLES_KEPT = 4096
_NUMBERS = frozenset({float, int, bool})
_MARSHAL_VERSION = 2


class _Schema(NamedTuple):
    """What is known of the rows of some names; a tuple, for the fast path takes it apart."""

    number: int
    values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    tags: bytes
    """The types of the values in a frame of floats."""


@attrs.define
class JournalCounts:
    """What became of the rows of this session."""

    waiting: int = 0
    """Rows that the disk has no room for; they are in memory."""
    dropped: int = 0
    """Rows for which there was no room in memory either."""


class Journal:
    """The writing end of the journal of one rank.

    While no segment can be made, for the disk is full or the folder gone, rows wait in memory, up to `WAITING_BYTES`; then
    they are dropped and counted. They go to disk, in order, before the first row that comes when there is room again.

    Args:
        folder: where the segments are; it is there already.
        state: the run, for the epoch.
        map_file: maps segments; None where they are written by system calls.
        on_full: called in the training thread with what kept a segment from being made.
        on_append: called with `try_append`, which is another for each segment, whenever it changes.
        clock: the time in seconds since 1970.
        make_segment: makes a segment from path, number and size, in the place of those two ways.
    """

    def __init__(
        self,
        folder: Path,
        state: "State",
        *,
        map_file: MapFile | None = mmap.mmap,
        segment_bytes: int = SEGMENT_BYTES,
        on_full: Callable[[OSError], None] = lambda _: None,
        on_append: Callable[[TryAppend], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        make_segment: "Callable[[Path, int, int], Segment] | None" = None,
    ) -> None:
        self._folder = folder
        self._state = state
        self._make: Callable[[Path, int, int], Segment] = make_segment or (
            AppendedSegment if map_file is None else functools.partial(MappedSegment, map_file=map_file)
        )
        self._segment_bytes = segment_bytes
        self._on_full = on_full
        self._on_append = on_append
        self._is_abandoned = False
        self._clock = clock
        self._spares: deque[Any] = deque(maxlen=1)
        self._by_length: dict[int, _Schema] = {}
        self._by_names: dict[tuple[str, ...], _Schema] = {}
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._waiting_bytes = 0
        self._retry_at = 0.0
        self._on_first_row: Callable[[int], None] | None = None
        self.counts = JournalCounts()
        self.names: dict[str, None] = {}
        """Every metric of this session, in the order of its first appearance."""
        self.samples_ns: deque[int] = deque(maxlen=_SAMPLES_KEPT)
        """What some calls took, in nanoseconds."""
        self.segments: deque[Segment] = deque()
        """The segments of this session that are not drained yet; the last one is being written."""
        self.try_append: TryAppend = self._refuse
        """Takes a row; it is another for each segment."""
        self._last_number = _last_number(folder)
        self._segment: Segment | None = None
        # What ended the writing to a segment: the training thread, or somebody else.
        self._ended: Segment | None = None
        self._left: Segment | None = None
        self._follows = end_of_journal(folder)
        self._use(self._new_segment(segment_bytes))

    # --- the training thread ---------------------------------------------------------------------------------------

    def append(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Takes a row of any numbers, numpy's among them.

        Raises:
            RecordError: a value is no number.
        """
        if not self.try_append(metrics, step):
            self.try_append(_plain(metrics), step)

    def _fast_append(self, write: Callable[[bytes], object]) -> TryAppend:
        """Returns the call that is made for each row: everything it needs is a local name."""
        by_length, state, slow = self._by_length, self._state, self._append_carefully
        now, dumps, adler32, pack = self._clock, marshal.dumps, zlib.adler32, HEADER.pack
        are_numbers = _NUMBERS.issuperset

        def try_append(
            metrics: Any, step: int | None = None, read: Callable[[Any], Any] | None = None
        ) -> bool:
            # A subclass of dict may make up values for the keys of another row, as defaultdict does.
            if type(metrics) is dict:
                try:
                    schema, values_of, tags = by_length[len(metrics)]
                    values = values_of(metrics)
                    if read is not None:
                        values = tuple(map(read, values))
                    data = dumps((schema, step, state.timestamp.epoch.value, now(), values), _MARSHAL_VERSION)
                    # Each value begins with its type. Where the first is a float, the second begins nine bytes later, and
                    # so on: one look at every ninth byte says that all are floats, in a quarter of the time of `type`.
                    if data[VALUES_AT::FLOAT_BYTES] == tags or are_numbers(map(type, values)):
                        write(pack(len(data), adler32(data)) + data)
                        return True
                except (KeyError, ValueError, OSError):
                    # Other names than last time, a full segment, or something that is no plain number.
                    pass
            return slow(metrics, step, read)

        return try_append

    def _append_carefully(self, metrics: Any, step: int | None, read: Callable[[Any], Any] | None) -> bool:
        """Does what the fast path cannot: new names, a new segment, a sample of the time.

        Returns:
            Whether the row was taken; False where it is not one of plain numbers.
        """
        if type(metrics) is not dict:
            return False
        row = metrics.copy() if read is None else {name: read(value) for name, value in metrics.items()}
        if not (_NUMBERS.issuperset(map(type, row.values())) and all(isinstance(name, str) for name in row)):
            return False
        if not row or self._is_abandoned:
            return True
        if step is None:
            step = int(self._state.timestamp.batch)
        if self._on_first_row is not None:
            announce, self._on_first_row = self._on_first_row, None
            announce(step)
        epoch = int(self._state.timestamp.epoch)
        if self._waiting and not self._write_waiting():
            self._wait(("row", row, step, epoch, self._clock()))
        elif not self._is_sampled(row, step):
            self._write_or_wait(("row", row, step, epoch, self._clock()))
        return True

    def _is_sampled(self, row: dict[str, float], step: int) -> bool:
        """Makes the row fit for the fast path, takes that, and its time; False where there is no room for it."""
        segment = self._segment
        room = 0 if segment is None else self._room(segment)
        if segment is None or room < 64 + 16 * len(row) + 64 * len(self._by_names):
            return False
        try:
            schema = self._schema(tuple(row), segment)
            data = encode((schema, step, 0, 0.0, tuple(row.values())))
        except (ValueError, OSError):
            return False
        if self._room(segment) < 2 * len(data) + 64:
            return False
        start = time.perf_counter_ns()
        self.try_append(row, step)
        self.samples_ns.append(time.perf_counter_ns() - start)
        return True

    def mark_resume(self, step: int, at: float | None) -> None:
        """Says that earlier rows beyond a step no longer count; see `frames.Resume`."""
        self._write_or_wait(("resume", step, at))

    def mark_boundary(self) -> None:
        """Keeps rows before and after from sharing a row in the CSV, though they have one step."""
        self._write_or_wait(("boundary",))

    def on_first_row(self, announce: Callable[[int], None]) -> None:
        """Calls once, before the next row is written, with its step."""
        self._on_first_row = announce
        self._by_length.clear()

    def write_waiting(self) -> None:
        """Tries to write what waits in memory; at close, the last chance."""
        self._retry_at = 0.0
        if self._waiting:
            self._write_waiting()

    def _write_or_wait(self, entry: tuple[Any, ...]) -> None:
        try:
            is_written = (not self._waiting or self._write_waiting()) and self._write(entry)
        except OSError as error:
            self._wait(entry)
            # Told when the row waits already: whoever hears of it finds that not all is written.
            self._on_full(error)
        else:
            if not is_written:
                self._wait(entry)

    def _wait(self, entry: tuple[Any, ...]) -> None:
        size = 100 + (32 * len(entry[1]) if entry[0] == "row" else 0)
        if self._waiting_bytes + size > WAITING_BYTES:
            self.counts.dropped += 1
            return
        self._waiting.append(entry)
        self._waiting_bytes += size
        self.counts.waiting = len(self._waiting)

    def _write_waiting(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        while self._waiting:
            try:
                is_written = self._write(self._waiting[0])
            except OSError as error:
                self._on_full(error)
                return False
            if not is_written:
                return False
            self._waiting.popleft()
            self.counts.waiting = len(self._waiting)
        self._waiting_bytes = 0
        return True

    def _write(self, entry: tuple[Any, ...]) -> bool:
        """Writes an entry into this segment, or a new one; False where it fits into neither.

        Raises:
            OSError: no new one can be made, for the disk is full or the folder gone.
        """
        for _ in range(2):
            segment = self._segment
            if segment is not None:
                try:
                    segment.write(self._frame(entry, segment))
                except (ValueError, OSError):
                    pass
                else:
                    return True
            try:
                self._roll(entry)
            except OSError:
                self._retry_at = time.monotonic() + 0.2
                raise
        return False

    def _frame(self, entry: tuple[Any, ...], segment: "Segment") -> bytes:
        kind, *rest = entry
        if kind == "row":
            row, step, epoch, at = rest
            schema = self._schema_entry(tuple(row), segment).number
            return encode((schema, step, epoch, at, tuple(row.values())))
        return boundary_frame() if kind == "boundary" else resume_frame(*rest)

    def _schema(self, names: tuple[str, ...], segment: "Segment") -> int:
        """Returns the number of a schema in this segment, and makes it the one for rows of this length."""
        schema = self._by_length[len(names)] = self._schema_entry(names, segment)
        return schema.number

    def _schema_entry(self, names: tuple[str, ...], segment: "Segment") -> "_Schema":
        schema = self._by_names.get(names)
        if schema is None:
            number = len(self._by_names)
            segment.write(keys_frame(number, names))
            schema = self._by_names[names] = _Schema(number, _values_of(names), FLOAT_TAG * len(names))
            self.names.update(dict.fromkeys(names))
        return schema

    def _room(self, segment: "Segment") -> int:
        return segment.size - segment.end()

    def _roll(self, entry: tuple[Any, ...]) -> None:
        """Goes on in the next segment: the spare one, or, where the writer thread has not made it yet, a new one."""
        self._end_segment()
        needed = self._segment_bytes
        if entry[0] == "row":
            needed = max(needed, 4 * (256 + sum(64 + 8 * len(name) for name in entry[1])))
        spare = None
        with contextlib.suppress(IndexError):
            spare = self._spares.popleft()
        if spare is not None:
            number = self._last_number + 1
            try:
                if spare.size >= needed:
                    self._link(spare)
                    spare.move(segment_path(self._folder, number), number)
                    self._use(spare)
                    return
            except OSError:
                pass  # The folder is gone; a new segment says what is the matter.
            spare.close()
        self._use(self._new_segment(needed))

    def _new_segment(self, size: int) -> "Segment":
        number = self._last_number + 1
        segment = self._make(segment_path(self._folder, number), number, size)
        try:
            self._link(segment)
        except BaseException:
            segment.close()
            with contextlib.suppress(OSError):
                segment.path.unlink()
            raise
        return segment

    def _end_segment(self) -> None:
        """Makes this segment full, for a shorter row must not overtake one that waits; notes where it ends."""
        segment = self._segment
        if segment is None or segment is self._ended:
            return
        end = segment.end()
        # Asked afterwards: what another thread has made full says another end.
        self._follows = None if segment is self._left else (segment.number, end)
        self._ended = segment
        segment.seal()

    def _link(self, segment: "Segment") -> None:
        """Says in a new segment which place of the journal it follows, where that is known."""
        if self._follows is not None:
            segment.write(follows_frame(*self._follows))

    def _use(self, segment: "Segment") -> None:
        self._last_number = segment.number
        self._by_names.clear()
        self._by_length.clear()
        self.segments.append(segment)
        self._segment = segment
        self.try_append = self._fast_append(segment.write)
        self._on_append(self.try_append)

    def _refuse(
        self, metrics: Any, step: int | None = None, read: Callable[[Any], Any] | None = None
    ) -> bool:
        raise RecordError("metrics must be logged between init and post_close, got some before or after.")

    # --- the writer thread -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the next segment, so that the training thread finds it ready.

        Raises:
            OSError: there is no room.
        """
        if self._spares or self._segment is None:
            return
        path = self._folder / SPARE
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        spare = self._make(path, 0, self._segment_bytes)
        spare.populate()
        self._spares.append(spare)

    def leave_segment(self) -> None:
        """Has the next row begin a new segment, which counts whatever became of this one; any thread may call."""
        segment = self._segment
        if segment is not None:
            self._left = segment
            segment.seal()

    def sample(self) -> None:
        """Has the next call take the careful path, which takes the time."""
        self._by_length.clear()

    def retire(self) -> None:
        """Lets go of the mappings of segments that are full, and of the oldest files if there are many."""
        full = list(self.segments)[:-1]
        for index, segment in enumerate(full):
            segment.unmap()
            if len(full) - index > _KEPT_OPEN:
                segment.close()

    def abandon_in_child(self) -> None:
        """Makes a forked child write nothing: the files are its parent's."""
        self._is_abandoned = True
        self._segment = None
        self._spares.clear()
        self._by_length.clear()

    def close(self) -> None:
        """Ends writing, and removes the spare; the segments stay."""
        self.try_append = self._refuse
        self._segment = None
        self._by_length.clear()
        with contextlib.suppress(IndexError):
            spare = self._spares.popleft()
            spare.close()
            with contextlib.suppress(OSError):
                spare.path.unlink()


def _last_number(folder: Path) -> int:
    """Returns the number of the last segment there was: one that is gone may still be in the position, as drained."""
    position = Position.read(folder / POSITION)
    states = () if position is None else position.states
    return max((*map(segment_number, segment_paths(folder)), *(state.segment for state in states)), default=0)


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    row = dict(metrics)
    if _NUMBERS.issuperset(map(type, row.values())):
        return row
    return {name: _number(name, value) for name, value in row.items()}


def _number(name: str, value: Any) -> float:
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise RecordError(f"metric {name!r} must be a number, got {value!r:.40}. Log it through a Logger.")


def _values_of(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Returns what picks the values of a row by name, as a tuple."""
    if len(names) == 1:
        (name,) = names
        return lambda row: (row[name],)
    return operator.itemgetter(*names)
