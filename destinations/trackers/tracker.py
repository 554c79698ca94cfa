"""The shared base of trackers: a destination that hands everything to a thread of its own.

A tracker is two classes: a `Tracker`, which lives in the training thread and only copies and queues, and a `Sink`, which
lives in the thread of a lane and does the work.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from destinations.background import Lane, RetryLaterError, WhenFull
from destinations.base import LoggerDestination
from destinations.copies import own_copy
from events import BinnedValues, RecordError, RunStatus, State, WriteRate, redact_text
from uploads.disk import call_in_forked_children, stop_calling_in_forked_children

__all__ = [
    "Feed",
    "FeedCounts",
    "Row",
    "RowsRefused",
    "Sink",
    "Stamp",
    "Tracker",
    "number",
    "require_package",
]

Row = tuple[dict[str, float], int, float]
"""The metrics of one call, their step, and when that was, in seconds since the epoch."""


@attrs.frozen
class Stamp:
    """What every record has: its name, its step, and when it was logged, in seconds since the epoch."""

    name: str
    step: int
    time: float


class RowsRefused(Exception):
    """Raised by `Sink.log_metrics` from the cause, where it took all rows but some.

    Args:
        count: how many it did not take.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def number(value: float) -> float:
    """Returns a number as a float; an integer that is too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class Sink:
    """Where the records of one run go; subclass it, and override what it can take.

    **Threading.** Made in the training thread, at `init`, where the constructor must not block; every method is called in the
    thread of the lane, `open` first and `close` last, one at a time, in the order in which things were logged.

    **Ownership.** What is given is the sink's own: nobody else has it.

    **Errors.** What a method raises is counted, and reported once per kind; the record is lost. Raise
    `destinations.background.RetryLaterError` from the cause where it cannot be taken *now*: the same call comes again a little later,
    and everything behind it waits in memory, within the bounds of the lane.

    **Time.** Nothing that a method takes is felt by training, but while Python code runs here, training code waits for
    the interpreter: work in C or in chunks.
    """

    def open(self) -> None:
        """Begins; comes before anything else, and again where it raised RetryLaterError."""

    def resume(self, step: int, time: float | None) -> None:
        """Training goes on from before what an earlier session logged.

        Args:
            step: the step from which on it is gone through again.
            time: when the checkpoint was made: what was logged before belongs to it whatever its step; None where unknown.
        """

    def log_metrics(self, rows: Sequence[Row]) -> None:
        """Takes metrics, of up to 64 calls; where it raises anything but `RowsRefused`, none of them counts as written."""

    def log_hyperparameters(self, hyperparameters: dict[str, Any], time: float) -> None:
        """Takes hyperparameters; each call adds to the ones before."""

    def log_table(self, stamp: Stamp, columns: list[str], rows: list[list[Any]]) -> None:
        """Takes a table."""

    def log_images(
        self,
        stamp: Stamp,
        images: Any,
        *,
        channels_last: bool,
        masks: Mapping[str, Any] | None,
        mask_class_labels: Mapping[int, str] | None,
        use_table: bool,
    ) -> None:
        """Takes images: numpy arrays, PIL images, the bytes of files, or lists of these; `media.iter_images` reads them."""

    def log_text(self, stamp: Stamp, text: str) -> None:
        """Takes a text."""

    def log_audio(self, stamp: Stamp, audio: Any, sample_rate: int) -> None:
        """Takes a sound: a numpy array, or the bytes of a file."""

    def log_video(self, stamp: Stamp, video: Any, fps: float | None) -> None:
        """Takes a video: a numpy array, or the bytes of a file."""

    def log_histogram(self, stamp: Stamp, values: Any, bins: int | Sequence[float]) -> None:
        """Takes values of which the distribution is wanted: a numpy array, or `BinnedValues`."""

    def log_point_cloud(self, stamp: Stamp, points: Any, colors: Any) -> None:
        """Takes points: numpy arrays."""

    def log_traces(self, stamp: Stamp, traces: dict[str, Any]) -> None:
        """Takes traces; the stamp has no name."""

    def flush(self) -> None:
        """Hands on what is held back; comes every `flush_seconds`, and where somebody asks for it."""

    def finish(self, status: str, exception: str | None, time: float) -> None:
        """The run has ended; records may still come.

        Args:
            status: "completed", "failed", "interrupted" or "preempted".
            exception: what ended it, without secrets.
            time: when.
        """

    def close(self) -> None:
        """Lets go of everything; comes at the end of the thread, also where `open` failed or the deadline passed."""


ROWS_AT_ONCE = 64
ROWS_TO_WAKE = 1024
MOST_MEDIA = 1000


@attrs.frozen
class FeedCounts:
    """What became of what was logged to one run.

    Attributes:
        rows: calls of `log_metrics`.
        written_rows: those that were written.
        dropped_rows: those that were dropped, for the queue was full or the deadline passed.
        failed_rows: those that the tracker refused.
        records: everything else that was taken, what the tracker itself needs included: opening, flushing, the end.
        written_records: that was written.
        dropped_records: for which there was no room, or no time at the end.
        failed_records: that the tracker refused.
        errors: how often what was raised, by kind of record and exception.
    """

    rows: int = 0
    written_rows: int = 0
    dropped_rows: int = 0
    failed_rows: int = 0
    records: int = 0
    written_records: int = 0
    dropped_records: int = 0
    failed_records: int = 0
    errors: dict[str, int] = attrs.field(factory=dict)


class Feed:
    """The queues and the thread of one run.

    Order is kept: a record that is no metric waits for the rows before it, and the rows after it wait for it.

    Args:
        name: of the thread, and of the tracker in messages.
        sink: where to.
        flush_seconds: how often rows are written, and the sink flushed.
        most_values: how many values of metrics may wait.
        most_bytes: how large all else may be that waits.
        when_full: what to do with a row for which there is no room.
        wait_seconds: how long a call may wait for room, for what waits.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        flush_seconds: float,
        most_values: int,
        most_bytes: int,
        when_full: WhenFull,
        wait_seconds: float,
    ) -> None:
        self.sink = sink
        self._when_full = when_full
        self._most_values = most_values
        self._wait_seconds = wait_seconds
        self._lane = Lane(
            name,
            limit=MOST_MEDIA,
            limit_bytes=most_bytes,
            when_full="wait",
            wait_seconds=wait_seconds,
            tick=self._on_tick,
            tick_seconds=flush_seconds,
            on_exit=sink.close,
        )
        self.rows: deque[Row] = deque()
        # Counted by the training thread alone.
        self._added_rows = 0
        self._added_values = 0
        self._refused_rows = 0
        self._notice_at = ROWS_TO_WAKE
        self._is_woken = False
        # Guards taking rows away, and the counts of it.
        self._taking = threading.Condition()
        self._taken_rows = 0
        self._taken_values = 0
        self._written_rows = 0
        self._dropped_rows = 0
        self._failed_rows = 0
        self._is_stuck = False
        self._is_stopped = False
        self._is_opened = False

    @property
    def counts(self) -> FeedCounts:
        """What became of what was logged until now."""
        lane = self._lane.counts
        return FeedCounts(
            self._added_rows + self._refused_rows,
            self._written_rows,
            self._dropped_rows + self._refused_rows,
            self._failed_rows,
            lane.accepted,
            lane.done,
            lane.dropped,
            lane.failed,
            dict(lane.errors),
        )

    # --- in the training thread ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts the thread, which opens the sink before all else."""
        self._lane.put(self._open, kind="open", is_kept=True)

    def add(self, row: Row) -> None:
        """Queues the metrics of one call."""
        rows = self.rows
        rows.append(row)
        self._added_rows += 1
        self._added_values += 1 + len(row[0])
        if self._added_values - self._taken_values > self._most_values:
            self._make_room()
        elif len(rows) >= self._notice_at:
            # Not again for each row, while the lane is busy.
            self._notice_at = 2 * len(rows)
            self._lane.wake()

    def put(
        self, kind: str, size: int, work: Callable[..., object], *args: Any, is_kept: bool = False
    ) -> bool:
        """Queues something else; says whether it will be done."""
        mark = self._added_rows

        def work_in_order() -> None:
            self._write_until(mark)
            work(*args)

        return self._lane.put(work_in_order, size=size, kind=kind, is_kept=is_kept)

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until what was logged has gone through the sink; False where that takes longer than the timeout."""
        self.put("flush", 0, self.sink.flush, is_kept=True)
        return self._lane.flush(timeout_seconds)

    def while_paused(self, call: Callable[[], object], timeout_seconds: float) -> bool:
        """Calls something in this thread while the sink rests, with all that was logged before written and flushed.

        Returns:
            Whether it was called: the sink did not come to rest in time otherwise.
        """
        rests, goes_on = threading.Event(), threading.Event()

        def rest() -> None:
            self.sink.flush()
            rests.set()
            goes_on.wait(timeout_seconds)

        self.put("pause", 0, rest, is_kept=True)
        try:
            if not rests.wait(timeout_seconds):
                return False
            call()
        finally:
            goes_on.set()
        return True

    def stop(self, timeout_seconds: float) -> bool:
        """Writes what is there, and ends the thread; False where that takes longer: what is left then is dropped."""
        self.put("flush", 0, self.sink.flush, is_kept=True)
        is_done = self._lane.stop(timeout_seconds)
        with self._taking:
            self._is_stopped = True
            self._drop(len(self.rows))
        return is_done

    def wait_for_end(self, timeout_seconds: float) -> None:
        """Waits for the thread that `stop` gave up, where what it hung on has been taken away since."""
        self._lane.stop(timeout_seconds)

    def _make_room(self) -> None:
        """Does what the policy says: called with one row too many."""
        if not self._is_woken:
            self._is_woken = True
            self._lane.wake()
        with self._taking:
            if self._when_full == "wait" and not self._is_stuck:
                has_room = self._taking.wait_for(lambda: not self._is_over(), self._wait_seconds)
                self._is_stuck = not has_room
            if self._when_full == "drop_oldest":
                while self._is_over() and len(self.rows) > 1:
                    self._drop(1)
            elif self._is_over() and len(self.rows) > 1:
                self._added_rows -= 1
                self._added_values -= _weight([self.rows.pop()])
                self._refused_rows += 1

    def _is_over(self) -> bool:
        return self._added_values - self._taken_values > self._most_values

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._dropped_rows += 1
            self._taken_rows += 1
            self._taken_values += _weight([self.rows.popleft()])

    # --- in the thread of the lane ---------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.sink.open()
        except RetryLaterError:
            raise
        except BaseException:
            # What comes is for the sink to refuse.
            self._is_opened = True
            raise
        self._is_opened = True

    def _on_tick(self) -> None:
        if not self._is_opened:
            return
        mark = self._added_rows
        # What is queued writes the rows before it; those after it must wait.
        if self._lane.is_idle:
            self._write_until(mark)
        self.sink.flush()

    def _write_until(self, mark: int) -> None:
        """Writes the rows before a mark, in chunks: between two of them, training has the interpreter."""
        while rows := self._take(mark):
            try:
                self.sink.log_metrics(rows)
            except RetryLaterError:
                self._put_back(rows)
                raise
            except RowsRefused as error:
                self._lane.record_error("metrics", error.__cause__ or error)
                self._failed_rows += error.count
                self._written_rows += len(rows) - error.count
            except Exception as error:  # noqa: BLE001  # counted and reported
                self._lane.record_error("metrics", error)
                self._failed_rows += len(rows)
            else:
                self._written_rows += len(rows)
            time.sleep(0)

    def _take(self, mark: int) -> list[Row]:
        with self._taking:
            count = min(ROWS_AT_ONCE, mark - self._taken_rows, len(self.rows))
            rows = [self.rows.popleft() for _ in range(count)]
            self._taken_rows += len(rows)
            self._taken_values += _weight(rows)
            self._notice_at = ROWS_TO_WAKE
            self._is_woken = False
            self._is_stuck = False
            self._taking.notify_all()
        return rows

    def _put_back(self, rows: list[Row]) -> None:
        with self._taking:
            self.rows.extendleft(reversed(rows))
            self._taken_rows -= len(rows)
            self._taken_values -= _weight(rows)
            if self._is_stopped:
                self._drop(len(self.rows))


def _weight(rows: list[Row]) -> int:
    """Returns how many values rows count for; a row without any takes room too."""
    return len(rows) + sum(len(row[0]) for row in rows)


_log = logging.getLogger("destinations")

FLUSH_SECONDS = 10.0
_MOST_EARLY_RECORDS = 1000
_METHODS = tuple(name for name in vars(Sink) if name.startswith("log_"))


class Tracker(LoggerDestination):
    """A destination that takes records in about a microsecond, and has a `Sink` do the work in a thread.

    Subclass it, set `sink_class`, and override `make_sink`:

    ```python
    class Mine(Tracker):
        sink_class = MySink

        def make_sink(self, state):
            return MySink(state.run_name)
    ```

    **Threading.** The calling thread copies what may change, takes the step and the time, and queues. Methods that the sink
    class does not override are those of `LoggerDestination`: what nobody takes is not copied.

    **Bounds.** Rows wait up to `max_waiting_values` values (60 bytes each, or so); what then happens to a row is `when_full`.
    Everything else waits up to `max_waiting_bytes`; for what does not fit, a call waits up to `wait_seconds`, and where
    nothing moves in that time, it and what follows is lost, counted and reported, until something moves. Hyperparameters are
    always taken.

    **Failures** of the sink are counted and reported once per kind; training does not hear of them.

    **Close** takes `close_seconds` at most; what is left then is dropped, counted and reported. The thread ends, unless it
    hangs.

    **Fork.** A forked child logs nothing.

    **Ranks.** Rank 0 alone, or with `all_ranks` each rank, with a sink of its own.

    Args:
        flush_seconds: how often rows are written, and the sink flushed.
        all_ranks: whether ranks other than 0 have a sink too.
        close_seconds: how long `close` and `post_close` may take for what is left.
        max_waiting_values: how many values of metrics may wait.
        max_waiting_bytes: how large media and all else may be that waits.
        when_full: what to do with a row for which there is no room: "drop_oldest" or "drop_newest" row, or "wait" as for
            media, then drop it.
        wait_seconds: how long a call may wait for room.
        clock: the time in seconds since the epoch; called in the thread that logs.
        write_rate: how often metrics are taken; None for every time.

    Raises:
        ValueError: an argument is out of its range.
    """

    sink_class: ClassVar[type[Sink]] = Sink

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _METHODS:
            if getattr(cls.sink_class, name) is getattr(Sink, name) and name not in vars(cls):
                setattr(cls, name, getattr(LoggerDestination, name))

    def __init__(
        self,
        *,
        flush_seconds: float = 2.0,
        all_ranks: bool = False,
        close_seconds: float = 30.0,
        max_waiting_values: int = 1_000_000,
        max_waiting_bytes: int = 256 << 20,
        when_full: WhenFull = "drop_oldest",
        wait_seconds: float = 5.0,
        clock: Callable[[], float] = time.time,
        write_rate: WriteRate | None = None,
    ) -> None:
        super().__init__(write_rate=write_rate)
        if not flush_seconds > 0:
            raise ValueError(f"flush_seconds must be more than 0, got {flush_seconds!r}.")
        if max_waiting_values < 1 or max_waiting_bytes < 1:
            raise ValueError(
                f"bounds must be at least 1, got max_waiting_values={max_waiting_values!r}, "
                f"max_waiting_bytes={max_waiting_bytes!r}."
            )
        if when_full not in {"wait", "drop_newest", "drop_oldest"}:
            raise ValueError(f'when_full must be "wait", "drop_newest" or "drop_oldest", got {when_full!r}.')
        self._flush_seconds = flush_seconds
        self._all_ranks = all_ranks
        self._close_seconds = close_seconds
        self._max_waiting_values = max_waiting_values
        self._max_waiting_bytes = max_waiting_bytes
        self._when_full = when_full
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._forget()

    def _forget(self) -> None:
        """Sets what an open tracker has, to what a closed one has; a subclass adds its own, and calls this."""
        self._state: State | None = None
        self._feed: Feed | None = None
        self._is_silent = False
        self._is_resume_due = False
        self._checkpoint_time: float | None = None
        self._early: list[Callable[[], object]] = []
        self._last_counts = FeedCounts()

    def make_sink(self, state: State) -> Sink:
        """Returns the sink of a run; called at `init`, in the training thread: must not block.

        Args:
            state: the run. Take what is needed of it: it changes while the sink works.
        """
        return self.sink_class()

    @property
    def counts(self) -> FeedCounts:
        """What became of what was logged to the run that is open, or was last."""
        return self._last_counts if self._feed is None else self._feed.counts

    # --- events ----------------------------------------------------------------------------------------------------

    def init(self, state: State, logger: Any) -> None:
        """Makes the sink, and starts its thread."""
        self._state = state
        early, self._early = self._early, []
        if state.rank != 0 and not self._all_ranks:
            self._is_silent = True
            return
        try:
            sink = self.make_sink(state)
        except BaseException:
            # Nothing will take what comes.
            self._is_silent = True
            raise
        self._feed = Feed(
            f"{type(self).__name__}-{state.run_name}",
            sink,
            flush_seconds=self._flush_seconds,
            most_values=self._max_waiting_values,
            most_bytes=self._max_waiting_bytes,
            when_full=self._when_full,
            wait_seconds=self._wait_seconds,
        )
        self._is_resume_due = True
        call_in_forked_children(self._forget_in_child)
        self._feed.open()
        for call in early:
            call()

    def before_load(self, state: State, logger: Any) -> None:
        """Expects the time of the checkpoint."""
        self._checkpoint_time = None

    def after_load(self, state: State, logger: Any) -> None:
        """A loaded checkpoint may lie before what was logged already."""
        self._is_resume_due = True

    def fit_start(self, state: State, logger: Any) -> None:
        """Tells the sink where training goes on, once for each load."""
        feed = self._feed
        if feed is not None and self._is_resume_due:
            self._is_resume_due = False
            self._resume(feed, int(state.timestamp.batch), self._checkpoint_time)

    def _resume(self, feed: Feed, step: int, at: float | None) -> None:
        """Queues `Sink.resume`; the step is 0 where nothing was loaded."""
        feed.put("resume", 0, feed.sink.resume, step, at, is_kept=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns when the checkpoint is made: what was logged before belongs to it."""
        return {"time": self._clock()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up when the checkpoint was made."""
        at = state.get("time")
        self._checkpoint_time = float(at) if isinstance(at, int | float) else None

    def close(self, state: State, logger: Any) -> None:
        """Tells the sink how the run ended; what is logged until `post_close` is still written."""
        feed = self._feed
        if feed is None:
            return
        status = "completed" if state.status is RunStatus.RUNNING else state.status.value
        text = None
        if state.exception is not None:
            text = redact_text(f"{type(state.exception).__name__}: {state.exception}")
        feed.put("end", 0, feed.sink.finish, status, text, self._clock(), is_kept=True)

    def post_close(self) -> None:
        """Writes what is left, and ends the thread, in `close_seconds` at most."""
        feed = self._feed
        stop_calling_in_forked_children(self._forget_in_child)
        if feed is not None:
            feed.stop(self._close_seconds)
            self._report(feed.counts)
        counts = self.counts
        self._forget()
        self._last_counts = counts

    def _report(self, counts: FeedCounts) -> None:
        if counts.dropped_rows or counts.failed_rows or counts.dropped_records or counts.failed_records:
            _log.warning(
                "%s: of %d rows of metrics %d were dropped and %d failed; of %d other records %d were dropped and %d failed.",
                type(self).__name__,
                counts.rows,
                counts.dropped_rows,
                counts.failed_rows,
                counts.records,
                counts.dropped_records,
                counts.failed_records,
            )

    def flush(self) -> None:
        """Waits until what was logged has gone through the sink, ten seconds at most."""
        if self._feed is not None:
            self._feed.flush(FLUSH_SECONDS)

    # --- records ---------------------------------------------------------------------------------------------------

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Queues one row, in about a microsecond."""
        if step is None:
            step = self._step()
        feed = self._feed
        if feed is not None:
            feed.add((dict(metrics), step, self._clock()))
        elif not self._is_silent:
            kept, at = dict(metrics), self._clock()
            self._later(lambda: self._add_row(kept, step, at))

    def _add_row(self, metrics: dict[str, float], step: int, at: float) -> None:
        if self._feed is not None:
            self._feed.add((metrics, step, at))

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._put("hyperparameters", "log_hyperparameters", own_copy(hyperparameters), self._clock())

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self._put(f"table {name!r}", "log_table", self._stamp(name, step), list(columns), own_copy(rows))

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: dict[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        self._put(
            f"image {name!r}",
            "log_images",
            self._stamp(name, step),
            _copied(images),
            channels_last=channels_last,
            masks=None if masks is None else {key: _copied(mask) for key, mask in masks.items()},
            mask_class_labels=None if mask_class_labels is None else dict(mask_class_labels),
            use_table=use_table,
        )

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        self._put(f"text {name!r}", "log_text", self._stamp(name, step), text)

    def log_audio(self, audio: Any, sample_rate: int, name: str = "Audio", step: int | None = None) -> None:
        self._put(f"sound {name!r}", "log_audio", self._stamp(name, step), _copied(audio), sample_rate)

    def log_video(
        self, video: Any, fps: float | None = None, name: str = "Video", step: int | None = None
    ) -> None:
        self._put(f"video {name!r}", "log_video", self._stamp(name, step), _copied(video), fps)

    def log_histogram(
        self,
        values: Any,
        name: str = "Histogram",
        step: int | None = None,
        bins: int | Sequence[float] = 64,
    ) -> None:
        self._put(
            f"histogram {name!r}",
            "log_histogram",
            self._stamp(name, step),
            values if isinstance(values, BinnedValues) else _array(values),
            own_copy(bins),
        )

    def log_point_cloud(
        self, points: Any, name: str = "Points", step: int | None = None, colors: Any = None
    ) -> None:
        colors = None if colors is None else _array(colors)
        self._put(f"point cloud {name!r}", "log_point_cloud", self._stamp(name, step), _array(points), colors)

    def log_traces(self, traces: dict[str, Any]) -> None:
        self._put("trace", "log_traces", self._stamp("", None), own_copy(traces))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _stamp(self, name: str, step: int | None) -> Stamp:
        return Stamp(name, self._step() if step is None else step, self._clock())

    def _step(self) -> int:
        return 0 if self._state is None else int(self._state.timestamp.batch)

    def _put(self, kind: str, method: str, *args: Any, **options: Any) -> None:
        """Queues a call of a method of the sink; before `init`, keeps it for then."""
        if self._is_silent:
            return
        feed = self._feed
        if feed is None:
            self._later(lambda: self._put(kind, method, *args, **options))
            return
        call = getattr(feed.sink, method)
        size = _size_of([args, options])
        feed.put(kind, size, lambda: call(*args, **options), is_kept=method == "log_hyperparameters")

    def _later(self, call: Callable[[], object]) -> None:
        """Keeps a call for `init`; those of a run that is never opened, or was closed, come to nothing."""
        if len(self._early) < _MOST_EARLY_RECORDS:
            self._early.append(call)
            if len(self._early) == _MOST_EARLY_RECORDS:
                _log.warning(
                    "%s: %d records came before init; those that come now are lost.",
                    type(self).__name__,
                    _MOST_EARLY_RECORDS,
                )

    def _forget_in_child(self) -> None:
        """Makes a forked child silent: the thread, and what it writes to, are its parent's."""
        self._feed = None
        self._is_silent = True

    def __getstate__(self) -> dict[str, Any]:
        """Takes what the constructor was given: a copy is closed, and may be opened by another process."""
        closed = object.__new__(type(self))
        closed.__dict__.update(self.__dict__)
        closed._forget()
        return closed.__dict__


def require_package(package: str, extra: str, what: str) -> None:
    """Refuses to go on where an optional package is missing; looks for it without importing it.

    Raises:
        ImportError: it is not installed; the text names the extra.
    """
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{what} must have the package {package!r}, got none. "
            f'Install it: pip install "training-destinations[{extra}]".',
            name=package,
        )


def _copied(value: Any) -> Any:
    """Returns a copy for the lane: numpy for arrays and tensors, bytes for files.

    Raises:
        RecordError: it is none of these, or there is no such file.
    """
    from destinations.media import copy_value

    try:
        return copy_value(value)
    except FileNotFoundError as error:
        raise RecordError(f"media file must exist, got {error.filename!r}.") from error
    except (TypeError, ValueError) as error:
        raise RecordError(f"media must be an array, got something else: {error}.") from error


def _array(value: Any) -> Any:
    from destinations.media import to_numpy

    return to_numpy(value).copy()


def _size_of(value: Any) -> int:
    """Returns how many bytes the arrays, images, texts and bytes in a value hold."""
    if isinstance(value, Mapping):
        return sum(_size_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_size_of(item) for item in value) + 8 * len(value)
    if isinstance(value, bytes | str):
        return len(value)
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if hasattr(value, "getbands"):
        return int(value.width * value.height * len(value.getbands()))
    return 0
