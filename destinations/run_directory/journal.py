"""The journal: appends rows of metrics to memory-mapped files, in about a microsecond each.

Mapped pages belong to the kernel and survive the process. The writer thread drains them to the CSV (`drain`)
and prepares the next segment in advance, so the training thread rarely opens a file.

**Why mapped.** A row written by a system call gives up the interpreter lock. With one busy Python thread
beside it, an appended row took a mean of 10 to 194 µs with stalls of 5 ms, a mapped one 1.3 µs.

**Threading.** Any thread may call `append`. `try_append` takes no lock: one call into the mapping writes the
whole row, or fails if the segment is full. Everything else (new names, the next segment, pending rows)
happens under one lock. `prepare` and `request_sample` belong to the writer thread.

**Signals.** A handler may log or raise between any two instructions. Therefore each step of switching to the
next segment is idempotent: a later call finds what an interrupted one has done, and a single assignment
activates the segment.
"""

import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from marshal import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import adler32

import attrs

from events import RecordError

from .frames import FLOAT_BYTES, FLOAT_TAG, HEADER, VALUES_AT, encode_frame, keys_frame
from .journal_files import JournalFiles, MakeSegment
from .layout import column_of, number_of_int, whole_number
from .segments import MappedSegment, Segment

if TYPE_CHECKING:
    from destinations.history.rows import MetricRow
    from events import State

__all__ = ["Journal"]

SEGMENT_BYTES = 1 << 20
PENDING_BYTES = 64 << 20
_RETRY_SECONDS = 0.2
_SAMPLES_KEPT = 4096
_are_numbers = frozenset({float, int, bool}).issuperset
_are_floats = frozenset({float}).issuperset
_are_texts = frozenset({str}).issuperset
_MARSHAL_VERSION = 2
_MAX_NAME_CHARACTERS = 16_384
_WARN_LATE_NAMES = 500
# If a payload exceeds the size of its floats by more than this, it may contain an integer beyond 64 bits. The
# slow path converts it to a float and reports it; readers convert smaller ones that the fast path has
# written.
_SHORT_BYTES = 512


class _Schema(NamedTuple):
    """The schema of rows with certain names; a tuple, which the fast path can unpack."""

    number: int
    values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    tags: bytes
    """The type tags of the values in a frame of floats."""


@attrs.define(eq=False)
class _ActiveSegment:
    """The current segment with its schemas; replaced as a whole."""

    segment: Segment
    write: Callable[[bytes], object] = attrs.field(init=False)
    numbers: Iterator[int] = attrs.field(factory=itertools.count)
    by_names: dict[tuple[str, ...], _Schema] = attrs.field(factory=dict)
    by_length: dict[int, _Schema] = attrs.field(factory=dict)
    """The schema of the last row of each length, the only rows that `Journal.try_append` takes."""

    def __attrs_post_init__(self) -> None:
        self.write = self.segment.write


def _fast_append(
    active: list[_ActiveSegment], state: "State", clock: Callable[[], float]
) -> Callable[[Mapping[str, Any], int | None], bool]:
    """Returns `Journal.try_append`.

    When the work between two calls empties the caches, the cost of a call depends on how much memory it
    touches. So everything it needs is in argument defaults, which are one tuple, instead of attributes,
    globals, and methods in different places. A call took 28 µs that way and 36 µs as a method; in a hot loop
    2.3 and 2.4.

    Args:
        active: the current segment, as the only item.
        state: the state of the run, which has the epoch.
        clock: returns the time of a row.
    """

    def try_append(
        metrics: Mapping[str, Any],
        step: int | None,
        active: list[_ActiveSegment] = active,
        state: "State" = state,
        clock: Callable[[], float] = clock,
        dumps: Callable[[Any, int], bytes] = dumps,
        adler32: Callable[[bytes], int] = adler32,
        pack_header: Callable[[int, int], bytes] = HEADER.pack,
        floats: slice = slice(VALUES_AT, None, FLOAT_BYTES),
    ) -> bool:
        # Exactly dict: a defaultdict would make up values for the keys of another row.
        if type(metrics) is dict:
            # Read once: another thread may switch to the next segment, which has other schemas.
            writing = active[0]
            try:
                schema, values_of, tags = writing.by_length[len(metrics)]
                values = values_of(metrics)
                data = dumps((schema, step, state.timestamp.epoch.value, clock(), values), _MARSHAL_VERSION)
                # Each value starts with its type tag, and a float takes nine bytes. So comparing every ninth
                # byte checks that all values are floats, in a quarter of the time of `type`.
                if data[floats] == tags or (
                    type(step) is int
                    and len(data) <= _SHORT_BYTES + FLOAT_BYTES * len(values)
                    and _are_numbers(map(type, values))
                ):
                    writing.write(pack_header(len(data), adler32(data)) + data)
                    return True
            except (KeyError, ValueError, OSError):
                # New names, a full segment, or a value that is not a plain number.
                pass
        return False

    return try_append


@attrs.define
class JournalCounts:
    """Counts of this session."""

    pending: int = 0
    """Rows held in memory because the disk can't take them."""
    dropped: int = 0
    """Rows dropped because the memory buffer was full."""
    refused: int = 0
    """Values that can't be stored, such as those with too long a name."""


@attrs.define(eq=False, slots=False, repr=False)
class Journal:
    """The writing end of the journal of one rank.

    If no segment can be made (disk full, folder deleted), rows are held in memory, up to `PENDING_BYTES`;
    further rows are dropped and counted. Pending rows are written, in order, before the next row once the
    disk works again.

    Args:
        folder: the folder of the segments; must exist.
        state: the state of the run, which has the epoch.
        segment_bytes: the size of a segment.
        on_full: called in the logging thread with the error that prevented a new segment.
        on_refused: called in the logging thread with the kind of refusal and a message, for values that
            aren't accepted and for too many names.
        clock: the current time in seconds since 1970.
        make_segment: makes a segment from path, number, and size. Default: a mapped one.
    """

    _folder: Path
    _state: "State"
    _segment_bytes: int = SEGMENT_BYTES
    _on_full: Callable[[OSError], None] = lambda _: None
    _on_refused: Callable[[str, str], None] = lambda *_: None
    _clock: Callable[[], float] = time.time
    _make_segment: MakeSegment = MappedSegment

    def __attrs_post_init__(self) -> None:
        self._is_abandoned = False
        self._is_closed = False
        self._is_stopped = False
        if (clock := self._clock) is not time.time:
            # Readers expect a float.
            self._clock = lambda: float(clock())
        # Guards everything outside the fast path.
        self._lock = threading.RLock()
        self._pending: deque[tuple[Any, ...]] = deque()
        self._pending_bytes = 0
        self._retry_at = 0.0
        self._late_names = 0
        self._marks = 0
        self.counts = JournalCounts()
        self.names: dict[str, None] = {}
        """The metrics of this session, in order of first appearance."""
        self.samples_ns: deque[int] = deque(maxlen=_SAMPLES_KEPT)
        """Durations of sampled calls, in nanoseconds."""
        self.files = JournalFiles(self._folder, self._segment_bytes, self._make_segment)
        """The segments of this session."""
        self._active = [_ActiveSegment(self.files.following(None))]
        self.files.is_current()
        self.try_append = _fast_append(self._active, self._state, self._clock)
        """Writes a row of Python numbers that has the names of an earlier row; returns whether it did.

        For anything else (other values, new names, a full segment), it writes nothing and returns False.
        """

    @property
    def _writing(self) -> _ActiveSegment:
        return self._active[0]

    # The training thread.

    def append(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes a row of numbers of any type, including numpy's.

        Raises:
            RecordError: the journal is closed, or a value isn't a number.
        """
        if not self.try_append(metrics, step):
            self._append_slow(metrics, step)

    def _append_slow(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Handles what the fast path can't: other numbers, new names, a new segment, a timing sample."""
        if step is not None and type(step) is not int:
            step = operator.index(step)
        row = _plain(metrics)
        if self._is_abandoned:
            return
        if self._is_stopped:
            self.counts.dropped += 1
            return
        if self._is_closed:
            raise RecordError("cannot log metrics: the run is closed. Log between init and post_close.")
        row = self._without_unwritable(row)
        if not row:
            return
        if step is None:
            step = int(self._state.timestamp.batch)
        whole = whole_number(step)
        if whole is None:
            self._on_refused(
                "step", "step is an integer beyond 64 bits. Its metrics are written without a step."
            )
        self._write_or_hold_row(("row", row, whole, int(self._state.timestamp.epoch), self._clock()))

    def _without_unwritable(self, row: dict[str, float]) -> dict[str, float]:
        """Removes values that readers couldn't read back, and counts and reports them."""
        if tuple(row) not in self._writing.by_names:
            late = [name for name in row if name not in self.names]
            for name in late:
                if len(column_of(name)) > _MAX_NAME_CHARACTERS:
                    del row[name]
                    self._refuse_values(
                        1,
                        "long name",
                        f"metric name {name[:40]!r}… has {len(column_of(name))} characters as written, at "
                        f"most {_MAX_NAME_CHARACTERS} are allowed. Its values are not written.",
                    )
            text = "".join(row)
            is_plain = text.isascii() and "\0" not in text and row.keys().isdisjoint({"step", "time"})
            by_column: dict[str, str] = {}
            for name in [] if is_plain else list(row):
                if (first := by_column.setdefault(column_of(name), name)) is not name:
                    del row[name]
                    self._refuse_values(
                        1,
                        "same column",
                        f"metrics {first!r:.80} and {name!r:.80} of one call have the same column. "
                        "The value of the second is not written; give it another name.",
                    )
        # With ten thousand floats, a loop would take as long as everything else.
        integers = [] if _are_floats(map(type, row.values())) else [*row.items()]
        for name, value in integers:
            if type(value) is int and type(number := number_of_int(value)) is float:
                row[name] = number
                self._on_refused(
                    "integer",
                    f"metric {name!r:.80} is an integer beyond 64 bits. It is written as the nearest float.",
                )
        return row

    def _refuse_values(self, count: int, kind: str, message: str) -> None:
        self.counts.refused += count
        self._on_refused(kind, message)

    def _write_or_hold_row(self, entry: tuple[Any, ...]) -> None:
        """Writes a row, or holds it in memory."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # as Condition asks it
            # A signal handler or finalizer has interrupted this code, which writes the entry when it resumes.
            self._hold(entry)
            return
        with self._lock:
            if self._pending and not self._write_pending():
                self._hold(entry)
            elif not self._write_sampled(entry):
                self._write_or_hold(entry)
            if self._pending:
                self._write_pending()

    def _write_sampled(self, entry: tuple[Any, ...]) -> bool:
        """Prepares the fast path for a row, then takes and times it; returns False if the segment is full."""
        writing = self._writing
        _, row, step, _, _ = entry
        try:
            schema = self._schema(tuple(row), writing)
            data = encode_frame((schema.number, step, 0, 0.0, tuple(row.values())))
        except (ValueError, OSError):
            return False
        if len(data) > _SHORT_BYTES + FLOAT_BYTES * len(row):
            return False
        writing.by_length[len(row)] = schema
        start = time.perf_counter_ns()
        is_written = self.try_append(row, step)
        self.samples_ns.append(time.perf_counter_ns() - start)
        return is_written

    def append_again(self, row: "MetricRow") -> None:
        """Writes an earlier row again, with its original epoch and time."""
        epoch = None if row.epoch is None else int(row.epoch)
        at = self._clock() if row.time is None else float(row.time)
        self._mark(("row", row.metrics, row.step, epoch, at))

    def mark_resume(self, step: int, at: float | None) -> None:
        """Records which rows of earlier sessions no longer count; see `frames.Resume`."""
        self._mark(("resume", step, at))

    def begin_session(self, session: str) -> None:
        """Begins a session, which owns all later rows."""
        self._marks = 0
        self._mark(("session", session))

    def rewind(self, session: str, mark: int, step: int, at: float | None) -> None:
        """Records which checkpoint this session continues from; see `frames.Rewind`."""
        self._mark(("rewind", session, mark, step, at))

    def mark_boundary(self) -> int:
        """Returns the mark of a checkpoint; rows before and after it never share a row of the CSV."""
        self._marks += 1
        self._mark(("boundary", self._marks))
        return self._marks

    def _mark(self, entry: tuple[Any, ...]) -> None:
        with self._lock:
            self._write_or_hold(entry)

    def write_pending(self) -> None:
        """Tries to write the pending rows now."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # as in `_write_or_hold_row`
            return
        with self._lock:
            self._retry_at = 0.0
            if self._pending:
                self._write_pending()

    def _write_or_hold(self, entry: tuple[Any, ...]) -> None:
        try:
            is_written = self._write_pending() and self._write(entry)
        except OSError as error:
            self._hold(entry)
            # Called after the row is queued, so that the callback sees it as pending.
            self._on_full(error)
        else:
            if not is_written:
                self._hold(entry)

    def _hold(self, entry: tuple[Any, ...]) -> None:
        size = 100 + (32 * len(entry[1]) if entry[0] == "row" else 0)
        if self._pending_bytes + size > PENDING_BYTES:
            self.counts.dropped += 1
            return
        self._pending.append(entry)
        self._pending_bytes += size
        self.counts.pending = len(self._pending)
        # The next row takes the slow path, which writes this one first.
        self.request_sample()

    def _write_pending(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        while self._pending:
            try:
                is_written = self._write(self._pending[0])
            except OSError as error:
                self._on_full(error)
                return False
            if not is_written:
                return False
            self._pending.popleft()
            self.counts.pending = len(self._pending)
        self._pending_bytes = 0
        return True

    def _write(self, entry: tuple[Any, ...]) -> bool:
        """Writes an entry to this segment or the next; returns False if it interrupted another write.

        Raises:
            OSError: no segment can be made: disk full, or folder deleted.
        """
        try:
            for _ in range(3):
                if self._is_abandoned:
                    return True
                writing = self._writing
                try:
                    writing.segment.write(self._frame(entry, writing))
                except ValueError:
                    # The segment is full.
                    self._rotate(self._needed_bytes(entry))
                else:
                    return True
        except BlockingIOError:
            return False
        except OSError:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            raise
        return False

    def _frame(self, entry: tuple[Any, ...], writing: _ActiveSegment) -> bytes:
        if entry[0] != "row":
            return encode_frame(entry)
        _, row, step, epoch, at = entry
        schema = self._schema(tuple(row), writing).number
        return encode_frame((schema, step, epoch, at, tuple(row.values())))

    def _needed_bytes(self, entry: tuple[Any, ...]) -> int:
        """Returns a segment size that is large enough for an entry."""
        if entry[0] != "row":
            return 0
        row = entry[1]
        keys = len(keys_frame(0, tuple(row)))
        return 4 * (256 + keys + len(encode_frame((0, 0, 0, 0.0, tuple(row.values())))))

    def _schema(self, names: tuple[str, ...], writing: _ActiveSegment) -> _Schema:
        """Returns the schema of names; writes it to the segment if it is new there."""
        schema = writing.by_names.get(names)
        if schema is None:
            # Each number is used once, even if interrupted: a row must never get the names of another schema.
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
                    f"{_WARN_LATE_NAMES} rows have added new metrics, the last is {names[-1]!r:.80}. Each is "
                    "a metric of its own in every list and chart, and a column of a file. "
                    "Do not put the step into the name; pass it as `step`.",
                )

    def _rotate(self, needed: int) -> None:
        """Switches to the next segment. If it is interrupted, the next call continues from there.

        Raises:
            OSError: no segment can be made.
        """
        before = self._writing
        following = _ActiveSegment(self.files.following(before.segment, needed))
        if before is self._writing:
            self._active[0] = following
        self.files.is_current()

    # The writer thread.

    def start_new_segment(self) -> None:
        """Starts a new segment with the next row, independent of this one. Thread-safe."""
        with self._lock:
            self._writing.segment.is_abandoned = True
            self._writing.segment.seal()

    def request_sample(self) -> None:
        """Sends the next row through the slow path, which times it."""
        self._writing.by_length.clear()

    def stop_accepting(self) -> None:
        """Ends writing: another run has the folder. Later rows are dropped and counted. Thread-safe."""
        with self._lock:
            self._is_stopped = True
            self._writing.segment.seal()
            self.request_sample()

    def abandon_in_child(self) -> None:
        """Ends writing in a forked child, because the files belong to its parent."""
        self._is_abandoned = True
        # A thread that held the lock doesn't exist in the child.
        self._lock = threading.RLock()
        self.request_sample()
        self.files.close(in_child=True)

    def close(self) -> None:
        """Ends writing and removes the spare; the segments stay."""
        with self._lock:
            self._is_closed = True
            self._writing.segment.seal()
            self.request_sample()
        self.files.close()


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    row = dict(metrics)
    if not (_are_texts(map(type, row)) or all(isinstance(name, str) for name in row)):
        raise RecordError("metrics must have strings as names.")
    if _are_numbers(map(type, row.values())):
        return row
    return {name: _number(name, value) for name, value in row.items()}


def _number(name: str, value: Any) -> float:
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise RecordError(
        f"metric {name!r} must be a number, got {value!r:.40}. Log it through a Logger, which converts "
        "values."
    )


def _values_of(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Returns a function that picks the values of a row by name, as a tuple."""
    if len(names) == 1:
        (name,) = names
        return lambda row: (row[name],)
    return operator.itemgetter(*names)
