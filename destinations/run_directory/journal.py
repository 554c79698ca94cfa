"""Where a row of metrics goes first: into a mapped file, in about a microsecond, in the training thread.

What is in the mapping belongs to the kernel: it outlives the process, whatever ends it. The writer thread takes it from
there (`drain.py`) and prepares the next segment, so that the training thread hardly ever opens a file itself.

**Threading.** Any thread may call `append`. It takes no lock: one call into the mapping adds the whole row, or refuses where
the segment is full. Everything else (new names, the next segment, rows that wait) is done under one lock. `prepare`,
`request_sample` and the reading side belong to the writer thread.

**Signals.** A handler may log, and may raise, between any two instructions. So the steps to the next segment can be repeated:
what an interrupted call has done is found done by the next one, and one assignment makes the new segment the current one.
"""

import contextlib
import functools
import itertools
import marshal
import mmap
import operator
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, Self

import attrs

from events import RecordError
from uploads.disk import DISK, Disk

from .files import remove_temporaries
from .frames import (
    FLOAT_BYTES,
    FLOAT_TAG,
    HEADER,
    MAGIC,
    VALUES_AT,
    boundary_frame,
    encode_frame,
    follows_frame,
    keys_frame,
    resume_frame,
)
from .layout import POSITION, Position, column_of, segment_number, segment_path, segment_paths
from .segments import AppendedSegment, MapFile, MappedSegment, end_of_journal

if TYPE_CHECKING:
    from events import State

    from .segments import Segment

__all__ = ["Append", "Journal", "SegmentReader", "make_journal", "remove_journal", "sync_journal"]


def make_journal(folder: Path, disk: Disk = DISK) -> None:
    """Makes the folder and those around it, and takes out what a dead process had only prepared.

    That it lasts is for `sync_journal`.
    """
    target, missing = folder, []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        disk.make_folder(path)
    remove_temporaries(target, disk=disk)


def sync_journal(folder: Path, run_dir: Path, disk: Disk = DISK) -> None:
    """Waits until the disk knows the folder by its path, from the folder that holds the run."""
    for path in (run_dir.parent, run_dir, folder.parent, folder):
        disk.sync_folder(path)


def remove_journal(folder: Path, disk: Disk = DISK) -> None:
    """Takes away a journal of which all rows are in the CSV; its folders too, where nothing else is in them."""
    for path in segment_paths(folder):
        disk.unlink(path)
    # Without a position, segments that come back would be taken for new ones.
    disk.sync_folder(folder)
    remove_temporaries(folder, disk=disk)
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(folder / POSITION)
        disk.remove_folder(folder)
        disk.remove_folder(folder.parent)


class SegmentReader:
    """Reads a segment: from the descriptor that the journal has open, else from its path.

    Args:
        path: of the segment.
        journal: the writing end, where it has the segment open.
        number: of the segment.
    """

    def __init__(self, path: Path, journal: "Journal | None", number: int) -> None:
        self._owned = -1
        self._segment = None
        if journal is not None:
            self._segment = next((item for item in list(journal.segments) if item.number == number), None)
        self._fd = -1 if self._segment is None else self._segment.fileno()
        if self._fd >= 0:
            # The journal may close its own descriptor meanwhile. Where there is no other, that one must do.
            with contextlib.suppress(OSError):
                self._fd = self._owned = os.dup(self._fd)
        if self._fd < 0:
            with contextlib.suppress(FileNotFoundError):
                self._fd = self._owned = os.open(path, os.O_RDONLY)

    def read(self, offset: int, length: int) -> bytes:
        """Returns bytes from an offset on, fewer where there are no more."""
        if self._fd < 0:
            return b""
        if self._segment is not None and self._segment.size:
            length = min(length, self._segment.end() - offset)
        return os.pread(self._fd, max(0, length), offset)

    def size(self) -> int:
        """Returns how many bytes the file has."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    def sync(self, disk: "Disk") -> None:
        """Waits until the disk has the segment."""
        if self._fd >= 0:
            disk.sync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned >= 0:
            os.close(self._owned)


class Append(Protocol):
    """The call that logs a row; see `Journal.append`."""

    def __call__(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends a row."""


SEGMENT_BYTES = 1 << 20
WAITING_BYTES = 64 << 20
_RETRY_SECONDS = 0.2
_KEPT_OPEN = 16
_SAMPLES_KEPT = 4096
_NUMBERS = frozenset({float, int, bool})
_MARSHAL_VERSION = 2
_MAX_INTEGER_BITS = 4096
_MAX_NAME_CHARACTERS = 16_384
# Each metric is a cell in every row of the CSV: a name that holds the step makes it grow with the square of the steps.
_MAX_LATE_NAMES = 5000
_WARN_LATE_NAMES = 500
# A payload that has so much more than its floats may hold an integer that is too large; the careful path looks.
_SHORT_BYTES = 512

_spare_numbers = itertools.count()


class _Schema(NamedTuple):
    """What is known of the rows of some names; a tuple, for the fast path takes it apart."""

    number: int
    values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    tags: bytes
    """The types of the values in a frame of floats."""


@attrs.define(eq=False)
class _ActiveSegment:
    """The segment that is being written, with all that depends on it: replaced as one."""

    segment: "Segment"
    numbers: Iterator[int] = attrs.field(factory=itertools.count)
    by_names: dict[tuple[str, ...], _Schema] = attrs.field(factory=dict)
    by_length: dict[int, _Schema] = attrs.field(factory=dict)
    """The schemas of the latest rows, for the fast path."""
    append: Append = attrs.field(init=False)
    is_abandoned: bool = False
    """Whether the next segment counts whatever became of this one."""


@attrs.define
class JournalCounts:
    """What became of the rows of this session."""

    waiting: int = 0
    """Rows that the disk has no room for; they are in memory."""
    dropped: int = 0
    """Rows for which there was no room in memory either."""
    refused: int = 0
    """Values that cannot be written, such as integers of thousands of digits."""


class Journal:
    """The writing end of the journal of one rank.

    While no segment can be made, for the disk is full or the folder gone, rows wait in memory, up to `WAITING_BYTES`; then
    they are dropped and counted. They go to disk, in order, before the first row that comes when there is room again.

    Args:
        folder: where the segments are; it is there already.
        state: the run, for the epoch.
        map_file: maps segments; None where they are written by system calls.
        on_full: called in the thread that logs with what kept a segment from being made.
        on_refused: called in the thread that logs about metrics that are not taken, or are too many: with the kind of refusal,
            and a message.
        on_append: called with `append`, which is another for each segment, whenever it changes.
        clock: the time in seconds since 1970; what it returns is made a float.
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
        on_refused: Callable[[str, str], None] = lambda *_: None,
        on_append: Callable[[Append], None] = lambda _: None,
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
        self._on_refused = on_refused
        self._on_append = on_append
        self._is_abandoned = False
        self._is_closed = False
        self._is_stopped = False
        # A row of integers for times would be unreadable.
        self._clock = clock if clock is time.time else lambda: float(clock())
        # Guards everything that the fast path does not do.
        self._lock = threading.RLock()
        self._spares: deque[Segment] = deque(maxlen=1)
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._waiting_bytes = 0
        self._retry_at = 0.0
        self._late_names = 0
        self._on_first_row: Callable[[int], None] | None = None
        self.counts = JournalCounts()
        self.names: dict[str, None] = {}
        """Every metric of this session, in the order of its first appearance."""
        self.samples_ns: deque[int] = deque(maxlen=_SAMPLES_KEPT)
        """What some calls took, in nanoseconds."""
        self.segments: deque[Segment] = deque()
        """The segments of this session that are not drained yet; the last one is being written."""
        self.append: Append = self._refuse
        """Takes a row of any numbers, numpy's among them; it is another call for each segment."""
        self._first_number = _last_number(folder) + 1
        self._first_follows = end_of_journal(folder)
        self._writing: _ActiveSegment | None = None
        # The segment that follows, from when it was chosen until it is the current one.
        self._next: Segment | None = None
        self._rotate(segment_bytes)

    # --- the training thread ---------------------------------------------------------------------------------------

    def _fast_append(self, writing: _ActiveSegment) -> Append:
        """Returns the call that is made for each row: everything it needs is a local name."""
        by_length, write = writing.by_length, writing.segment.write
        state, slow = self._state, self._append_slow
        now, dumps, adler32, pack = self._clock, marshal.dumps, zlib.adler32, HEADER.pack
        are_numbers = _NUMBERS.issuperset

        def append(metrics: Mapping[str, float], step: int | None = None) -> None:
            # A subclass of dict may make up values for the keys of another row, as defaultdict does.
            if type(metrics) is dict:
                try:
                    schema, values_of, tags = by_length[len(metrics)]
                    values = values_of(metrics)
                    data = dumps((schema, step, state.timestamp.epoch.value, now(), values), _MARSHAL_VERSION)
                    # Each value begins with its type. Where the first is a float, the second begins nine bytes later, and
                    # so on: one look at every ninth byte says that all are floats, in a quarter of the time of `type`.
                    if data[VALUES_AT::FLOAT_BYTES] == tags or (
                        type(step) is int
                        and len(data) <= _SHORT_BYTES + FLOAT_BYTES * len(values)
                        and are_numbers(map(type, values))
                    ):
                        write(pack(len(data), adler32(data)) + data)
                        return
                except (KeyError, ValueError, OSError):
                    # Other names than last time, a full segment, or something that is no plain number.
                    pass
            slow(metrics, step)

        return append

    def _append_slow(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Does what the fast path cannot: other types of numbers, new names, a new segment, a sample of the time.

        Raises:
            RecordError: the journal is closed, or a value is no number.
        """
        if step is not None and type(step) is not int:
            step = operator.index(step)
        row = _plain(metrics)
        if self._is_abandoned:
            return
        if self._is_stopped:
            self.counts.dropped += 1
            return
        if self._is_closed:
            self._refuse(metrics)
        row = self._without_unwritable(row)
        if not row:
            return
        if step is None:
            step = int(self._state.timestamp.batch)
        if step.bit_length() > _MAX_INTEGER_BITS:
            self._refuse_values(
                len(row),
                "step",
                f"step must be a number of at most {_MAX_INTEGER_BITS} bits, got one of {step.bit_length()}. "
                "Its metrics are not written.",
            )
            return
        self._take(("row", row, step, int(self._state.timestamp.epoch), self._clock()))

    def _without_unwritable(self, row: dict[str, float]) -> dict[str, float]:
        """Returns the row without the values that no reader could read back; they are counted and reported."""
        writing = self._writing
        is_known = writing is not None and tuple(row) in writing.by_names
        if not is_known:
            late = [name for name in row if name not in self.names]
            for name in late:
                if len(column_of(name)) > _MAX_NAME_CHARACTERS:
                    del row[name]
                    self._refuse_values(
                        1,
                        "long name",
                        f"the name of a metric must have at most {_MAX_NAME_CHARACTERS} characters, got "
                        f"{len(name)}: {name[:40]!r}…. Its values are not written.",
                    )
                elif self._late_names >= _MAX_LATE_NAMES:
                    del row[name]
                    self._refuse_values(
                        1,
                        "new name",
                        f"metric {name!r:.80} is not written: new metrics came with {_MAX_LATE_NAMES} rows already, and "
                        "each is a column of metrics.csv. Leave the step out of the names; it is an argument.",
                    )
        for name, value in list(row.items()):
            if type(value) is int and value.bit_length() > _MAX_INTEGER_BITS:
                del row[name]
                self._refuse_values(
                    1,
                    "integer",
                    f"metric {name!r:.80} must be a number of at most {_MAX_INTEGER_BITS} bits, got an integer of "
                    f"{value.bit_length()}. It is not written; the other metrics of the call are.",
                )
        return row

    def _refuse_values(self, count: int, kind: str, message: str) -> None:
        self.counts.refused += count
        self._on_refused(kind, message)

    def _take(self, entry: tuple[Any, ...]) -> None:
        """Writes an entry, or has it wait."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # as Condition asks it
            # A signal handler or finalizer has interrupted this very code; that writes the entry when it is done.
            self._wait(entry)
            return
        with self._lock:
            if entry[0] == "row" and self._on_first_row is not None:
                announce = self._on_first_row
                announce(entry[2])
                self._on_first_row = None
            if self._waiting and not self._write_pending():
                self._wait(entry)
            elif not self._is_sampled(entry):
                self._write_or_wait(entry)
            if self._waiting:
                self._write_pending()
            self._publish()

    def _is_sampled(self, entry: tuple[Any, ...]) -> bool:
        """Makes a row fit for the fast path, takes that, and its time; False where there is no room for it."""
        writing = self._writing
        if entry[0] != "row" or writing is None:
            return False
        _, row, step, _, _ = entry
        try:
            schema = self._schema(tuple(row), writing)
            data = encode_frame((schema.number, step, 0, 0.0, tuple(row.values())))
            # Room for the row and to spare, so that the fast path does not come back here.
            if writing.segment.room() < 2 * len(data) + 64:
                return False
        except (ValueError, OSError):
            return False
        if len(data) > _SHORT_BYTES + FLOAT_BYTES * len(row):
            return False
        writing.by_length[len(row)] = schema
        start = time.perf_counter_ns()
        writing.append(row, step)
        self.samples_ns.append(time.perf_counter_ns() - start)
        return True

    def mark_resume(self, step: int, at: float | None) -> None:
        """Says that earlier rows beyond a step no longer count; see `frames.Resume`."""
        self._mark(("resume", step, at))

    def mark_boundary(self) -> None:
        """Keeps rows before and after from sharing a row in the CSV, though they have one step."""
        self._mark(("boundary",))

    def _mark(self, entry: tuple[Any, ...]) -> None:
        with self._lock:
            self._write_or_wait(entry)

    def on_first_row(self, announce: Callable[[int], None]) -> None:
        """Calls once, before the next row is written, with its step."""
        self._on_first_row = announce
        self.request_sample()

    def write_pending(self) -> None:
        """Tries to write what waits in memory; at close, the last chance."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # as in `_take`
            return
        with self._lock:
            self._retry_at = 0.0
            if self._waiting:
                self._write_pending()
                self._publish()

    def _write_or_wait(self, entry: tuple[Any, ...]) -> None:
        try:
            is_written = (not self._waiting or self._write_pending()) and self._write(entry)
        except OSError as error:
            self._wait(entry)
            # Told when the row waits already: the report must not say that all is written.
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
        # The next row takes the careful path, which writes this one first.
        self.request_sample()

    def _write_pending(self) -> bool:
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
        """Writes an entry into this segment, or the next one; False where another write is in the middle of it.

        Raises:
            OSError: no segment can be made, for the disk is full or the folder gone.
        """
        for _ in range(3):
            if self._is_abandoned:
                return True
            writing = self._writing
            try:
                if writing is not None:
                    writing.segment.write(self._frame(entry, writing))
                    return True
            except BlockingIOError:
                return False
            except OSError:
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                raise
            except ValueError:
                pass  # It is full.
            try:
                self._rotate(max(self._segment_bytes, self._needed_bytes(entry)))
            except OSError:
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                raise
        return False

    def _frame(self, entry: tuple[Any, ...], writing: _ActiveSegment) -> bytes:
        kind, *rest = entry
        if kind == "row":
            row, step, epoch, at = rest
            schema = self._schema(tuple(row), writing).number
            return encode_frame((schema, step, epoch, at, tuple(row.values())))
        return boundary_frame() if kind == "boundary" else resume_frame(*rest)

    def _needed_bytes(self, entry: tuple[Any, ...]) -> int:
        """Returns the size of a segment that has room for an entry, whatever it is."""
        if entry[0] != "row":
            return 0
        row = entry[1]
        keys = len(keys_frame(0, tuple(row)))
        return 4 * (256 + keys + len(encode_frame((0, 0, 0, 0.0, tuple(row.values())))))

    def _schema(self, names: tuple[str, ...], writing: _ActiveSegment) -> _Schema:
        """Returns the schema of names in a segment, which is told of those that it does not have yet."""
        schema = writing.by_names.get(names)
        if schema is None:
            # Never twice, whatever interrupts what follows: rows of one number would get the names of another.
            number = next(writing.numbers)
            writing.segment.write(keys_frame(number, names))
            schema = writing.by_names[names] = _Schema(number, _values_of(names), FLOAT_TAG * len(names))
            self._note_names(names)
        return schema

    def _note_names(self, names: tuple[str, ...]) -> None:
        known = len(self.names)
        self.names.update(dict.fromkeys(names))
        if len(self.names) > known:
            self._late_names += 1
            if self._late_names == _WARN_LATE_NAMES:
                self._on_refused(
                    "many names",
                    f"new metrics came with {_WARN_LATE_NAMES} rows, the last is {names[-1]!r:.80}: each is a column of "
                    f"metrics.csv, an empty cell in every row that lacks it. After {_MAX_LATE_NAMES} no new ones are "
                    "taken. Leave the step out of the names; it is an argument.",
                )

    def _rotate(self, needed: int) -> None:
        """Continues in the next segment: the spare one, or, where the writer thread has not made it yet, a new one.

        Each step may be the last one, and is then done or found done by the next call.

        Raises:
            OSError: none can be made.
        """
        before = self._writing
        follows = self._first_follows
        least = self._first_number
        if before is not None:
            # Sealed before anything else: a shorter row must not overtake one that waits for the next segment.
            end = before.segment.seal()
            follows = None if before.is_abandoned else (before.segment.number, end)
            least = before.segment.number + 1
        following = self._next
        if following is None or following.size < needed:
            following = self._next = self._unused(needed)
        number = least
        while os.path.lexists(path := segment_path(self._folder, number)) and not following.is_at(path):
            number += 1
        try:
            # A file that is in the way belongs to no chain that is known here.
            if follows is not None and number == least and following.end() == len(MAGIC):
                following.write(follows_frame(*follows))
            following.move(path, number)
        except OSError:
            self._next = None
            following.discard()
            raise
        if following not in self.segments:
            self.segments.append(following)
        if before is self._writing:
            self._writing = self._first_use(following)
        self._next = None
        self._publish()

    def _unused(self, needed: int) -> "Segment":
        """Returns a segment without a number that has room for so many bytes."""
        with contextlib.suppress(IndexError):
            spare = self._spares.popleft()
            # Of a folder that is gone, or too small.
            if spare.size >= needed and spare.is_at(spare.path):
                return spare
            spare.discard()
        return self._make(self._spare_path(), 0, needed)

    def _spare_path(self) -> Path:
        """Returns a path that no other segment ever had; `remove_temporaries` knows such names."""
        return self._folder / f".segment.{os.getpid()}-{next(_spare_numbers)}.tmp"

    def _first_use(self, segment: "Segment") -> _ActiveSegment:
        writing = _ActiveSegment(segment)
        writing.append = self._fast_append(writing)
        return writing

    def _publish(self) -> None:
        """Has the fast path write to the current segment."""
        writing = self._writing
        if writing is not None and self.append is not writing.append and not self._is_closed:
            self._on_append(writing.append)
            self.append = writing.append

    def _refuse(self, metrics: Mapping[str, float], step: int | None = None) -> NoReturn:
        raise RecordError("metrics must be logged between init and post_close, got some before or after.")

    # --- the writer thread -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the next segment, so that the training thread finds it ready.

        Raises:
            OSError: there is no room.
        """
        if self._spares or self._is_closed or self._is_stopped:
            return
        spare = self._make(self._spare_path(), 0, self._segment_bytes)
        spare.populate()
        self._spares.append(spare)

    def start_new_segment(self) -> None:
        """Has the next row begin a new segment, which counts whatever became of this one; any thread may call."""
        with self._lock:
            writing = self._writing
            if writing is not None:
                writing.is_abandoned = True
                writing.segment.seal()

    def request_sample(self) -> None:
        """Has the next call take the careful path, which takes the time."""
        writing = self._writing
        if writing is not None:
            writing.by_length.clear()

    def retire(self) -> None:
        """Lets go of the mappings of segments that are full, and of the oldest files if there are many."""
        full = list(self.segments)[:-1]
        for index, segment in enumerate(full):
            segment.unmap()
            if len(full) - index > _KEPT_OPEN:
                segment.close()

    def stop_accepting(self) -> None:
        """Ends writing, for the folder is another run's; rows that come are dropped and counted. Any thread may call."""
        with self._lock:
            self._is_stopped = True
            if self._writing is not None:
                self._writing.segment.seal()
            self.request_sample()

    def abandon_in_child(self) -> None:
        """Makes a forked child write nothing: the files are its parent's."""
        self._is_abandoned = True
        # The thread that held it is not in the child.
        self._lock = threading.RLock()
        self.request_sample()
        self._spares.clear()
        for segment in list(self.segments):
            segment.close()

    def close(self) -> None:
        """Ends writing, and removes the spare; the segments stay."""
        with self._lock:
            self._is_closed = True
            self.append = self._refuse
            if self._writing is not None:
                # Another thread may still hold the call that writes to it.
                self._writing.segment.seal()
            self.request_sample()
            unused = [*self._spares, *([self._next] if self._next is not None else [])]
            self._spares.clear()
            self._next = None
        for segment in unused:
            if segment not in self.segments:
                segment.discard()


def _last_number(folder: Path) -> int:
    """Returns the number of the last segment there was: one that is gone may still be in the position, as drained."""
    position = Position.read(folder / POSITION)
    states = () if position is None else position.states
    return max((*map(segment_number, segment_paths(folder)), *(state.segment for state in states)), default=0)


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    row = dict(metrics)
    if not all(isinstance(name, str) for name in row):
        raise RecordError("metrics must have strings as names.")
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
