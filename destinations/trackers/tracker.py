"""Base classes of trackers: destinations that process records in a background thread.

A tracker consists of two classes: a `Tracker`, whose methods run in the training thread and only copy and
queue records, and a `Sink`, whose methods run in the background thread of a lane and do the work.
"""

import functools
import logging
import math
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from destinations.background import Lane, RetryLaterError, WhenFull
from destinations.base import LoggerDestination, RecordDestination, closed_state
from destinations.copies import own_copy, size_in_bytes
from destinations.kinds import kind_of
from events import (
    RunStatus,
    State,
    WriteRate,
    format_run_name,
    redact_text,
    safe_text,
)
from uploads.disk import call_in_forked_children, stop_calling_in_forked_children

from .target import Target

__all__ = [
    "Feed",
    "FeedCounts",
    "Images",
    "Row",
    "RowsRefusedError",
    "Sink",
    "Stamp",
    "Tracker",
    "colored_clouds",
    "log_each_row",
    "number",
    "require_package",
]

_log = logging.getLogger("destinations")

ROWS_AT_ONCE = 64
ROWS_TO_WAKE = 1024
MAX_MEDIA = 1000
FLUSH_SECONDS = 10.0
_MAX_EARLY_RECORDS = 1000

Row = tuple[dict[str, float], int, float]
"""The metrics of one call, their step, and the time in seconds since 1970."""


@attrs.frozen
class Stamp:
    """Name, step, and time of a record, in seconds since 1970, and its captions.

    ```python
    from destinations.trackers.tracker import Stamp

    stamp = Stamp("cat", step=3, time=1.8e9, captions=("asleep",))
    print(stamp.caption())  # asleep
    ```

    Attributes:
        captions: a text for each image, or one for another record; empty without captions.
    """

    name: str
    step: int
    time: float
    captions: tuple[str, ...] = ()

    def caption(self, index: int = 0) -> str | None:
        """Returns the caption of an image, or of another record; None without one."""
        return (self.captions[index] or None) if index < len(self.captions) else None


@attrs.frozen(eq=False)
class Images:
    """The arguments of `log_images`, which the background thread decodes.

    ```python
    from destinations.trackers.tracker import Sink

    class Sizes(Sink):
        def log_images(self, stamp, images):
            print(stamp.name, [pixels.shape for pixels in images.pixels()])
    ```

    Attributes:
        images: numpy arrays, PIL images, file contents, or lists of these; see `media.iter_images`.
        channels_last: whether the channels are the last axis.
        masks: class indices by name, or None.
        mask_class_labels: labels of the class indices, or None.
        use_table: show the images in a table, if the tracker can.
    """

    images: Any
    channels_last: bool
    masks: Mapping[str, Any] | None
    mask_class_labels: Mapping[int, str] | None
    use_table: bool

    @property
    def nbytes(self) -> int:
        """The memory of the images and masks, in bytes."""
        return size_in_bytes([self.images, self.masks])

    def pixels(self) -> list[Any]:
        """Returns each image as uint8 `(H, W)`, `(H, W, 3)` or `(H, W, 4)`."""
        from destinations.media import iter_images

        return [one.array for one in iter_images(self.images, self.channels_last)]

    def class_masks(self) -> dict[str, list[Any]]:
        """Returns the masks of the images by name, uint16 `(H, W)`."""
        from destinations.media import iter_masks

        return {name: list(iter_masks(mask)) for name, mask in (self.masks or {}).items()}

    def overlays(self, pixels: Sequence[Any]) -> dict[str, list[bytes]]:
        """Returns the images with the masks as overlays, as PNG, by name of the masks.

        Args:
            pixels: the result of `pixels`.
        """
        from destinations.media import overlay_png

        return {
            name: [overlay_png(one, mask) for one, mask in zip(pixels, masks, strict=False)]
            for name, masks in self.class_masks().items()
        }


def colored_clouds(points: Any, colors: Any) -> list[Any]:
    """Returns one array per point cloud: `(N, 3)`, or `(N, 6)` with red, green and blue."""
    import numpy as np

    from destinations.media import iter_point_clouds

    return [
        np.asarray(cloud if shades is None else np.concatenate([cloud, shades[:, :3]], axis=1), np.float64)
        for cloud, shades in iter_point_clouds(points, colors)
    ]


class RowsRefusedError(Exception):
    """Raised by `Sink.log_metrics`, from the cause, if it rejected some of the rows and wrote the rest.

    Args:
        count: number of rejected rows.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def log_each_row(rows: Sequence[Row], log: Callable[[Row], object]) -> None:
    """Calls `log` for each row, so that one rejected row doesn't affect the others.

    Raises:
        RowsRefusedError: some rows were rejected.
        RetryLaterError: all rows must be logged again.
    """
    failed: list[Exception] = []
    for row in rows:
        try:
            log(row)
        except RetryLaterError:
            raise
        except Exception as error:  # noqa: BLE001  # counted below
            failed.append(error)
    if failed:
        raise RowsRefusedError(len(failed)) from failed[-1]


def number(value: float) -> float:
    """Converts a number to float; integers out of range become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class Sink:
    """Processes the records of one run in a background thread; subclasses override the methods they support.

    ```python
    from destinations.trackers.tracker import Sink

    class Lines(Sink):
        def log_text(self, stamp, text):
            print(stamp.step, stamp.name, text)
    ```

    **Threading.** Constructed in the training thread at `init`, so the constructor must not block. All
    methods are called in the background thread, one at a time, `open` first and `close` last, in the order of
    logging.

    **Ownership.** Arguments belong to the sink; no other code holds them.

    **Errors.** An exception is counted, and reported once per kind; the record is lost. Raise
    `destinations.background.RetryLaterError` from the cause for a transient failure: the call is retried a
    little later, and everything behind it waits in memory, within the bounds of the lane.

    **Time.** Methods do not delay training, except that Python code holds the GIL: work in C or in chunks.

    **Captions.** A method in `captioned` writes the captions of its stamp. Captions of other records are
    logged as a text `<name>/caption`.

    Attributes:
        run_id: the tracker's id of the run, once it is known; kept in checkpoints for `continue_run`.
    """

    captioned: ClassVar[frozenset[str]] = frozenset()
    run_id: str | None = None

    def continue_run(self, run_id: str) -> None:
        """Selects the run of a loaded checkpoint; called in the training thread, before or after `open`."""

    def open(self) -> None:
        """Opens the sink; called first, and again after RetryLaterError."""

    def resume(self, step: int, time: float | None) -> None:
        """Prepares for training that resumes at a step before the last one logged by an earlier session.

        Args:
            step: the step from which training is repeated.
            time: time of the checkpoint; earlier records belong to it whatever their step; None if unknown.
        """

    def log_metrics(self, rows: Sequence[Row]) -> None:
        """Writes the metrics of up to 64 calls; all of them count as failed if it raises.

        Raises:
            RowsRefusedError: only some rows failed.
        """

    def log_hyperparameters(self, hyperparameters: dict[str, Any], time: float) -> None:
        """Writes hyperparameters; each call adds to earlier ones."""

    def log_table(self, stamp: Stamp, columns: list[str], rows: list[list[Any]]) -> None:
        """Writes a table."""

    def log_images(self, stamp: Stamp, images: Images) -> None:
        """Writes images."""

    def log_text(self, stamp: Stamp, text: str) -> None:
        """Writes a text."""

    def log_audio(self, stamp: Stamp, audio: Any, sample_rate: int) -> None:
        """Writes audio: a numpy array, or the bytes of a file."""

    def log_video(self, stamp: Stamp, video: Any, fps: float | None) -> None:
        """Writes a video: a numpy array, or the bytes of a file."""

    def log_histogram(self, stamp: Stamp, values: Any, bins: int | Sequence[float]) -> None:
        """Writes a histogram of values: a numpy array, or `BinnedValues`."""

    def log_point_cloud(self, stamp: Stamp, points: Any, colors: Any) -> None:
        """Writes points: numpy arrays."""

    def log_traces(self, stamp: Stamp, traces: dict[str, Any]) -> None:
        """Writes traces; the stamp has no name."""

    def log_file(self, name: str, copy: Path, *, overwrite: bool) -> None:
        """Uploads a copy of a file, which is deleted afterwards."""

    def flush(self) -> None:
        """Writes buffered records; called every `flush_seconds`, and by `Tracker.flush`."""

    def finish(self, status: str, exception: str | None, time: float) -> None:
        """Records the end of the run; further records may follow.

        Args:
            status: "completed", "failed", "interrupted" or "preempted".
            exception: the exception that ended it, with secrets redacted.
            time: time of the end.
        """

    def close(self) -> None:
        """Releases all resources; called when the thread ends, also if `open` failed or on timeout."""


@attrs.frozen
class FeedCounts:
    """Counters of one run.

    ```python
    tracker = TensorBoard("tensorboard")
    with Run(loggers=[tracker]) as run:
        run.log_metrics({"loss": 0.5})
    print(tracker.counts.written_rows)  # 1
    ```

    Attributes:
        rows: calls of `log_metrics`.
        written_rows: rows written.
        dropped_rows: rows dropped because the queue was full or the deadline passed.
        failed_rows: rows rejected by the tracker.
        records: all other records, including internal ones: opening, flushing, the end.
        written_records: records written.
        dropped_records: records dropped because the queue was full or the deadline passed.
        failed_records: records rejected by the tracker.
        errors: number of errors, by kind of record and exception.
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


@attrs.define(eq=False, slots=False, repr=False)
class Feed:
    """The queues and the background thread of one run.

    Records are processed in order, rows of metrics and others alike.

    Args:
        name: name of the thread, and of the tracker in messages.
        sink: processes the records.
        flush_seconds: interval for writing rows and flushing the sink.
        max_values: max number of queued metric values.
        max_bytes: max size of all other queued records.
        when_full: policy for a row when the queue is full.
        wait_seconds: max time that a call waits for space in the queue.
    """

    _name: str
    sink: Sink
    _flush_seconds: float
    _max_values: int
    _max_bytes: int
    _when_full: WhenFull
    _wait_seconds: float

    def __attrs_post_init__(self) -> None:
        self._lane = Lane(
            self._name,
            limit=MAX_MEDIA,
            limit_bytes=self._max_bytes,
            wait_seconds=self._wait_seconds,
            tick=self._on_tick,
            tick_seconds=self._flush_seconds,
            on_exit=self._close_sink,
        )
        # Copies of files, deleted with the sink; made by the training thread.
        self._folder: Path | None = None
        self.rows: deque[Row] = deque()
        # Counters written only by the training thread.
        self._added_rows = 0
        self._added_values = 0
        self._refused_rows = 0
        self._notice_at = ROWS_TO_WAKE
        self._is_woken = False
        # Guards the removal of rows and its counters.
        self._taking = threading.Condition()
        self._taken_rows = 0
        self._taken_values = 0
        self._written_rows = 0
        self._dropped_rows = 0
        self._failed_rows = 0
        self._is_stuck = False
        self._is_stopped = False
        self._has_tried_open = threading.Event()
        self.open_error: BaseException | None = None
        """Why the sink could not be opened; None if it could, or has not been tried yet."""

    @property
    def counts(self) -> FeedCounts:
        """Current counters."""
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

    # In the training thread.

    def open(self) -> None:
        """Starts the thread, which first opens the sink."""
        self._lane.put(self._open, kind="open", is_kept=True)

    def wait_for_open(self, timeout_seconds: float) -> None:
        """Waits until the sink is open.

        Raises:
            BaseException: `Sink.open` raised it.
            TimeoutError: the sink isn't open in time.
        """
        if not self._has_tried_open.wait(timeout_seconds):
            raise TimeoutError(f"it did not open within {timeout_seconds:g} seconds.")
        if self.open_error is not None:
            raise self.open_error

    def add(self, row: Row) -> None:
        """Queues the metrics of one call."""
        rows = self.rows
        rows.append(row)
        self._added_rows += 1
        self._added_values += 1 + len(row[0])
        if self._added_values - self._taken_values > self._max_values:
            self._make_room()
        elif len(rows) >= self._notice_at:
            # Once is enough while the lane is busy, so not for each further row.
            self._notice_at = 2 * len(rows)
            self._lane.wake()

    def put(
        self, kind: str, size: int, work: Callable[..., object], *args: Any, is_kept: bool = False
    ) -> bool:
        """Queues work behind the rows added so far; returns whether it was accepted."""
        mark = self._added_rows

        def work_in_order() -> None:
            self._write_until(mark)
            work(*args)

        return self._lane.put(work_in_order, size=size, kind=kind, is_kept=is_kept)

    def put_file(self, name: str, source: Path, *, overwrite: bool) -> None:
        """Copies a file, as fast as `cp`, and queues the copy for `Sink.log_file`."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="destinations-"))
        folder = Path(tempfile.mkdtemp(dir=self._folder))

        def work() -> None:
            is_done = True
            try:
                self.sink.log_file(name, folder / "file", overwrite=overwrite)
            except RetryLaterError:
                is_done = False
                raise
            finally:
                if is_done:
                    shutil.rmtree(folder, ignore_errors=True)

        is_queued = False
        try:
            shutil.copyfile(source, folder / "file")
            is_queued = self.put(f"file {name!r}", 0, work, is_kept=True)
        finally:
            if not is_queued:
                shutil.rmtree(folder, ignore_errors=True)

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until the sink has processed everything logged so far; returns False on timeout."""
        self.put("flush", 0, self.sink.flush, is_kept=True)
        return self._lane.flush(timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """Processes the queue and stops the thread; on timeout drops the rest and returns False."""
        self.put("flush", 0, self.sink.flush, is_kept=True)
        is_done = self._lane.stop(timeout_seconds)
        with self._taking:
            self._is_stopped = True
            self._drop(len(self.rows))
        return is_done

    def _make_room(self) -> None:
        """Applies the `when_full` policy after a row beyond the limit was added."""
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
        return self._added_values - self._taken_values > self._max_values

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._dropped_rows += 1
            self._taken_rows += 1
            self._taken_values += _weight([self.rows.popleft()])

    # In the thread of the lane.

    def _close_sink(self) -> None:
        try:
            self.sink.close()
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self) -> None:
        try:
            self.sink.open()
        except RetryLaterError:
            raise
        except BaseException as error:
            # Later records are rejected by the sink.
            self.open_error = error
            self._has_tried_open.set()
            raise
        self._has_tried_open.set()

    def _on_tick(self) -> None:
        if not self._has_tried_open.is_set():
            return
        mark = self._added_rows
        # A queued record writes the rows before it; rows after it must wait.
        if self._lane.is_idle:
            self._write_until(mark)
        self.sink.flush()

    def _write_until(self, mark: int) -> None:
        """Writes the rows before a mark in chunks, releasing the GIL in between."""
        while rows := self._take(mark):
            try:
                self.sink.log_metrics(rows)
            except RetryLaterError:
                self._put_back(rows)
                raise
            except RowsRefusedError as error:
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
    """Returns the weight of rows against the limit: their values, plus one per row."""
    return len(rows) + sum(len(row[0]) for row in rows)


_METHODS = tuple(name for name in vars(Sink) if name.startswith("log_") and hasattr(LoggerDestination, name))


class Tracker(RecordDestination):
    """Base class of trackers: queues records in about a microsecond; a thread passes them to a `Sink`.

    Subclass it, set `sink_class`, and override `make_sink`:

    ```python
    from destinations.trackers.tracker import Sink, Tracker

    class Lines(Sink):
        def log_text(self, stamp, text):
            print(stamp.step, stamp.name, text)  # 0 greeting hello

    class Printed(Tracker):
        sink_class = Lines

        def make_sink(self, state):
            return Lines()

    with Run(loggers=[Printed()]) as run:
        run.log_text("hello", "greeting")
    ```

    **Threading.** The calling thread copies mutable arguments, adds step and time, and queues the record.
    Kinds of records that the sink class doesn't support are ignored and not copied.

    **Bounds.** Up to `max_waiting_values` metric values are queued (about 60 bytes each); then `when_full`
    applies. Other records are queued up to `max_waiting_bytes`; then a call waits up to `wait_seconds` for
    space. If nothing is processed in that time, this record and later ones are dropped, counted and reported,
    until there is progress again. Hyperparameters are always accepted.

    **Failures** of the sink are counted, and reported once per kind; they never reach training.

    **Close** takes at most `close_seconds`; the rest is dropped, counted and reported. The thread ends,
    unless it hangs.

    **Fork.** A forked child logs nothing.

    **Ranks.** Rank 0, or with `all_ranks` each rank with a sink of its own.

    **Files** are copied at the call and passed to `Sink.log_file`, if `can_upload_files` returns True.

    Args:
        flush_seconds: interval for writing rows and flushing the sink.
        all_ranks: log on all ranks, not only on rank 0.
        close_seconds: max time of `close` and `post_close` for the remaining records.
        max_waiting_values: max number of queued metric values.
        max_waiting_bytes: max size of queued media and other records.
        when_full: policy for a row when the queue is full: "drop_oldest", "drop_newest", or "wait" up to
            `wait_seconds`, then drop it.
        wait_seconds: max time that a call waits for space in the queue.
        clock: returns the time in seconds since 1970; called in the logging thread.
        write_rate: rate limit of metrics; None for no limit.
        require: whether the run stops if the sink cannot be opened within `close_seconds`.

    Raises:
        ValueError: an argument is out of its range.
    """

    sink_class: ClassVar[type[Sink]] = Sink
    target: ClassVar[type[Target]] = Target
    """Connects the tracker to `destinations runs send`."""
    _log_artifacts = False

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
        require: bool = False,
    ) -> None:
        super().__init__(write_rate=write_rate, require=require)
        if not flush_seconds > 0:
            raise ValueError(f"flush_seconds must be more than 0, got {flush_seconds!r}.")
        if max_waiting_values < 1 or max_waiting_bytes < 1:
            raise ValueError(
                f"bounds must be at least 1, got max_waiting_values={max_waiting_values!r}, "
                f"max_waiting_bytes={max_waiting_bytes!r}."
            )
        if when_full not in {"wait", "drop_newest", "drop_oldest"}:
            raise ValueError(f'when_full must be "wait", "drop_newest" or "drop_oldest", got {when_full!r}.')
        self._new_feed = functools.partial(
            Feed,
            flush_seconds=flush_seconds,
            max_values=max_waiting_values,
            max_bytes=max_waiting_bytes,
            when_full=when_full,
            wait_seconds=wait_seconds,
        )
        self._all_ranks = all_ranks
        self._close_seconds = close_seconds
        self._clock = clock
        self._forget()

    def _forget(self) -> None:
        """Resets to the closed state; subclasses extend it."""
        self._state: State | None = None
        self._feed: Feed | None = None
        self._is_silent = False
        self._is_resume_due = False
        self._checkpoint_time: float | None = None
        self._early: list[Callable[[], object]] = []
        self._early_lost = 0
        self._last_counts = FeedCounts()

    def make_sink(self, state: State) -> Sink:
        """Returns the sink of a run; called at `init` in the training thread, must not block.

        Args:
            state: the state of the run. Copy the values that you need: they change while the sink works.
        """
        return self.sink_class()

    def _name_of(self, template: str | None, state: State) -> str:
        """Returns a run's name in the tracker; adds the rank if all ranks log and the template lacks it."""
        template = template or "{run_name}"
        name = format_run_name(template, state)
        is_shared = self._all_ranks and state.world_size > 1 and "{rank" not in template
        return f"{name}-rank{state.rank}" if is_shared else name

    @property
    def _sink(self) -> Any:
        """The sink while a run is open; else None."""
        return None if self._feed is None else self._feed.sink

    @property
    def counts(self) -> FeedCounts:
        """Counters of the current run, or of the last one."""
        return self._last_counts if self._feed is None else self._feed.counts

    # Events.

    def init(self, state: State, logger: Any) -> None:
        """Creates the sink and starts its thread."""
        self._state = state
        self._run_begins()
        early, self._early = self._early, []
        if state.rank != 0 and not self._all_ranks:
            self._is_silent = True
            return
        try:
            sink = self.make_sink(state)
        except BaseException:
            # Without a sink, further records are ignored.
            self._is_silent = True
            raise
        self._feed = self._new_feed(f"{type(self).__name__}-{state.run_name}", sink)
        self._is_resume_due = True
        call_in_forked_children(self._forget_in_child)
        self._feed.open()
        if self.require:
            self._feed.wait_for_open(self._close_seconds)
        for call in early:
            call()

    def before_load(self, state: State, logger: Any) -> None:
        """Resets the time of the checkpoint."""
        self._checkpoint_time = None

    def after_load(self, state: State, logger: Any) -> None:
        """Schedules `Sink.resume`: a loaded checkpoint may be older than the last record."""
        self._is_resume_due = True

    def fit_start(self, state: State, logger: Any) -> None:
        """Queues `Sink.resume`, once per load."""
        feed = self._feed
        if feed is not None and self._is_resume_due:
            self._is_resume_due = False
            self._resume(feed, int(state.timestamp.batch), self._checkpoint_time)

    def _resume(self, feed: Feed, step: int, at: float | None) -> None:
        """Queues `Sink.resume`; the step is 0 without a checkpoint."""
        feed.put("resume", 0, feed.sink.resume, step, at, is_kept=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the time of the checkpoint, which earlier records belong to, and the id of the run."""
        saved: dict[str, Any] = {"time": self._clock()}
        if self._sink is not None and self._sink.run_id is not None and self._state is not None:
            # The rank is saved too: all ranks may load a checkpoint written by rank 0.
            saved |= {"run_id": self._sink.run_id, "rank": self._state.rank}
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the time of the checkpoint, and continues its run."""
        self._checkpoint_time = state.get("time")
        is_ours = self._state is not None and state.get("rank") == self._state.rank
        if self._sink is not None and is_ours and "run_id" in state:
            self._sink.continue_run(state["run_id"])

    def close(self, state: State, logger: Any) -> None:
        """Queues `Sink.finish`; records logged until `post_close` are still written."""
        feed = self._feed
        if feed is None:
            return
        status = "completed" if state.status is RunStatus.RUNNING else str(state.status)
        text = None
        if state.exception is not None:
            text = redact_text(f"{type(state.exception).__name__}: {state.exception}")
        feed.put("end", 0, feed.sink.finish, status, text, self._clock(), is_kept=True)

    def post_close(self) -> None:
        """Processes the queue and stops the thread, within `close_seconds`."""
        feed = self._feed
        stop_calling_in_forked_children(self._forget_in_child)
        if lost := self._early_lost + len(self._early):
            _log.warning("%s: lost %d records logged before init.", type(self).__name__, lost)
        if feed is not None:
            feed.stop(self._close_seconds)
            self._report(feed.counts)
            if feed.open_error is not None:
                _log.error(
                    "%s was never open (%s: %s): nothing was logged to it.",
                    type(self).__name__,
                    type(feed.open_error).__name__,
                    redact_text(safe_text(feed.open_error)),
                )
        counts = self.counts
        self._forget()
        self._last_counts = counts

    def _report(self, counts: FeedCounts) -> None:
        if counts.dropped_rows or counts.failed_rows or counts.dropped_records or counts.failed_records:
            _log.warning(
                "%s: of %d rows of metrics %d were dropped and %d failed; "
                "of %d other records %d were dropped and %d failed.",
                type(self).__name__,
                counts.rows,
                counts.dropped_rows,
                counts.failed_rows,
                counts.records,
                counts.dropped_records,
                counts.failed_records,
            )

    def flush(self) -> None:
        """Waits until everything logged so far has been processed, for at most ten seconds."""
        if self._feed is not None:
            self._feed.flush(FLUSH_SECONDS)

    # Files.

    def can_upload_files(self) -> bool:
        return self._log_artifacts

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Copies the file, as fast as `cp`; the background thread uploads the copy."""
        if self._feed is not None and self.can_upload_files():
            self._feed.put_file(remote_file_name, file_path, overwrite=overwrite)

    # Records.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Queues a row, in about a microsecond."""
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

    def log_record(self, kind: str, arguments: dict[str, Any]) -> None:
        """Copies the arguments, and queues them."""
        name, step = arguments.pop("name", ""), arguments.pop("step", None)
        captions = arguments.pop("captions", None) or (arguments.pop("caption", None),)
        is_gif = arguments.pop("format", "mp4") == "gif"
        method = f"log_{kind}"
        about = kind_of(method=method)
        given: dict[str, Any] = {
            key: None if value is None else about.copies.get(key, own_copy)(value)
            for key, value in arguments.items()
        }
        what = f"{about.noun} {name!r}" if name else about.noun
        stamp = self._stamp(name, step, *captions)
        values = [Images(**given)] if kind == "images" else given.values()
        self._put(what, method, stamp, *values, prepare=_as_gif if is_gif else None)
        if stamp.captions and method not in self.sink_class.captioned:
            # Captions have their own call, so that a retry doesn't repeat the record.
            beside = attrs.evolve(stamp, name=f"{name}/caption", captions=())
            self._put(f"caption of {what}", "log_text", beside, "\n".join(stamp.captions))

    # Inside.

    def _stamp(self, name: str, step: int | None, *captions: str | None) -> Stamp:
        texts = tuple(one or "" for one in captions) if any(captions) else ()
        return Stamp(name, self._step() if step is None else step, self._clock(), texts)

    def _step(self) -> int:
        return 0 if self._state is None else int(self._state.timestamp.batch)

    def _put(
        self, kind: str, method: str, *args: Any, prepare: Callable[..., Sequence[Any]] | None = None
    ) -> None:
        """Queues a call of a sink method; calls before `init` are deferred.

        Args:
            kind: the kind of record, for messages.
            method: the method.
            args: its arguments.
            prepare: returns the final arguments, in the background thread.
        """
        if self._is_silent:
            return
        feed = self._feed
        if feed is None:
            self._later(lambda: self._put(kind, method, *args, prepare=prepare))
            return
        call = getattr(feed.sink, method, None)
        if call is None:  # No tracker supports this kind.
            return
        is_kept = method == "log_hyperparameters"
        if prepare is None:
            feed.put(kind, size_in_bytes(args), call, *args, is_kept=is_kept)
        else:
            feed.put(kind, size_in_bytes(args), lambda: call(*prepare(*args)), is_kept=is_kept)

    def _later(self, call: Callable[[], object]) -> None:
        """Defers a call until `init`."""
        self._keeps_early_records()
        if len(self._early) < _MAX_EARLY_RECORDS:
            self._early.append(call)
            return
        if not self._early_lost:
            _log.warning(
                "%s: %d records were logged before init; further ones are dropped.",
                type(self).__name__,
                _MAX_EARLY_RECORDS,
            )
        self._early_lost += 1

    def _forget_in_child(self) -> None:
        """Silences the tracker in a forked child: the thread and its output belong to the parent."""
        self._feed = None
        self._is_silent = True

    __getstate__ = closed_state


def require_package(package: str, what: str) -> None:
    """Checks that an optional package is installed, without importing it.

    Raises:
        ImportError: it is not installed.
    """
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{what} needs the package {package!r}, which is not installed. Run: pip install {package}.",
            name=package,
        )


def _as_gif(stamp: Stamp, video: Any, fps: float | None) -> tuple[Any, ...]:
    """Returns the arguments of `log_video` with frames encoded as GIF; encoded video stays as it is."""
    from destinations.media import gif_bytes

    return stamp, video if isinstance(video, bytes) else gif_bytes(video, fps), fps
