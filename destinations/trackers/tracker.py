"""Base classes of trackers: destinations that process records in a background thread.

A tracker consists of two classes: a `Tracker`, whose methods run in the training thread and only copy and
queue records, and a `Sink`, whose methods run in the background thread of a lane and do the work.
"""

import functools
import logging
import math
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from destinations.background import Item, Lane, LaneCounts, RetryLaterError, WhenFull
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
FLUSH_SECONDS = 10.0
# A thousand records, and the rows between them.
_MAX_ITEMS = 2000
_ALWAYS_KEPT = frozenset({"finish", "log_hyperparameters", "resume"})

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
        """Writes buffered records; called whenever the queue is empty, and by `Tracker.flush`."""

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


@attrs.define(eq=False, slots=False, repr=False, kw_only=True)
class Feed(Lane):
    """The queue of a tracker: records, and rows of metrics between them, in the order of logging.

    Rows wait up to `retry_seconds` for others, unless a record is queued behind them. The thread starts with
    `begin`, and flushes the sink whenever the queue is empty.

    Args:
        max_values: max number of queued metric values.
        rows_when_full: policy for a row when there are that many.
    """

    _max_values: int
    _rows_when_full: WhenFull

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.sink: Any = None
        self.row_counts = LaneCounts()
        # All of these are guarded like the queue, in which consecutive rows are one deque.
        self._values = 0
        self._rows_due_at = 0.0
        self._is_flush_due = False
        # Copies of files, deleted with the sink; made by the training thread.
        self._folder: Path | None = None
        self._has_tried_open = threading.Event()
        self.open_error: BaseException | None = None
        """Why the sink could not be opened; None if it could, or has not been tried yet."""

    @property
    def all_counts(self) -> FeedCounts:
        """Current counters."""
        rows, others = self.row_counts, self.counts
        return FeedCounts(
            rows.accepted,
            rows.done,
            rows.dropped,
            rows.failed,
            others.accepted,
            others.done,
            others.dropped,
            others.failed,
            dict(others.errors),
        )

    # In the training thread.

    def begin(self, name: str, sink: Sink) -> None:
        """Starts the thread, which opens the sink first.

        Args:
            name: name of the thread, and of the tracker in messages.
            sink: processes the records.
        """
        with self._changed:
            self._name, self.sink, self._pid = name, sink, os.getpid()
            self._items.appendleft(Item(self._open, 0, "open"))
            self.counts.accepted += 1
            self._ensure_thread()

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
        # The lock itself: entering the condition, which is written in Python, takes 0.15 µs more.
        with self._lock:
            self.row_counts.accepted += 1
            values = self._values + len(row[0]) + 1
            if values > self._max_values:
                if not self._make_room_for_row(values - self._values):
                    self.row_counts.dropped += 1
                    return
                values = self._values + len(row[0]) + 1
            items = self._items
            rows = items[-1] if items else None
            if type(rows) is not deque:
                rows = deque()
                items.append(rows)
                self._rows_due_at = time.monotonic() + self._retry_seconds
                self._changed.notify_all()
            rows.append(row)
            self._values = values
            if len(rows) == ROWS_TO_WAKE:
                self._hurry()

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
            is_queued = self.put(work, kind=f"file {name!r}", is_kept=True)
        finally:
            if not is_queued:
                shutil.rmtree(folder, ignore_errors=True)

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until the sink has processed and flushed everything logged so far; False on timeout."""
        if self.sink is None:
            return not self._items
        with self._changed:
            self._hurry()
            return super().flush(timeout_seconds)

    def _hurry(self) -> None:
        if self._rows_due_at:
            self._rows_due_at = 0.0
            self._changed.notify_all()

    def _make_room_for_row(self, weight: int) -> bool:
        def has_room() -> bool:
            return not self._values or self._values + weight <= self._max_values

        self._hurry()
        if self._rows_when_full == "wait":
            return has_room() or self._wait_for(has_room)
        while self._rows_when_full == "drop_oldest" and not has_room():
            rows = next(one for one in self._items if isinstance(one, deque))
            self._drop([rows.popleft()])
            if not rows:
                self._items.remove(rows)
        return has_room()

    def _drop(self, item: Any) -> None:
        if isinstance(item, Item):
            super()._drop(item)
        else:
            self._values -= _weight(item)
            self.row_counts.dropped += len(item)

    def _wait_for(self, has_room: Callable[[], bool]) -> bool:
        # Nothing makes room before `begin`.
        return self.sink is not None and super()._wait_for(has_room)

    def _ensure_thread(self) -> None:
        if self.sink is not None:
            super()._ensure_thread()

    # In the thread of the lane.

    def _due_at(self) -> float:
        is_alone = len(self._items) == 1 and isinstance(self._items[0], deque)
        return max(self._paused_until, self._rows_due_at) if is_alone else self._paused_until

    def _take(self) -> Any:
        if not self._items and self._is_flush_due:
            self._is_flush_due = False
            self.counts.accepted += 1
            return Item(self.sink.flush, 0, "flush")
        item = super()._take()
        self._is_flush_due |= item is not None
        return item

    def _pop(self) -> Any:
        rows = self._items[0]
        if isinstance(rows, Item):
            return super()._pop()
        taken = [rows.popleft() for _ in range(min(ROWS_AT_ONCE, len(rows)))]
        self._values -= _weight(taken)
        if rows:
            self._rows_due_at = 0.0
        else:
            self._items.popleft()
        return taken

    def _do(self, item: Any) -> None:
        if isinstance(item, Item):
            super()._do(item)
            return
        failed = len(item)
        try:
            self.sink.log_metrics(item)
            failed = 0
        except RetryLaterError as error:
            self.record_error("metrics", error.__cause__ or error, "will be retried after")
            self._put_back(item)
            return
        except RowsRefusedError as error:
            self.record_error("metrics", error.__cause__ or error)
            failed = error.count
        except Exception as error:  # noqa: BLE001  # counted and reported
            self.record_error("metrics", error)
        self._settled += 1
        self.row_counts.failed += failed
        self.row_counts.done += len(item) - failed

    def _put_back(self, item: Any) -> None:
        if isinstance(item, Item):
            super()._put_back(item)
            return
        with self._changed:
            if not self._items or isinstance(self._items[0], Item):
                self._items.appendleft(deque())
            self._items[0].extendleft(reversed(item))
            self._values += _weight(item)
            self._pause()

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

    def _end(self) -> None:
        try:
            self.sink.close()
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _weight(rows: Sequence[Row]) -> int:
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
        flush_seconds: how long a row waits for others before they are written, and the pause before a retry.
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
            type(self).__name__,
            limit=_MAX_ITEMS,
            limit_bytes=max_waiting_bytes,
            wait_seconds=wait_seconds,
            retry_seconds=flush_seconds,
            max_values=max_waiting_values,
            rows_when_full=when_full,
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
        return self._last_counts if self._feed is None else self._feed.all_counts

    # Events.

    def init(self, state: State, logger: Any) -> None:
        """Creates the sink and starts its thread."""
        self._state = state
        self._run_begins()
        # Has the records that were logged before; without a sink, they and further ones are ignored.
        feed, self._feed = self._feed or self._new_feed(), None
        self._is_silent = True
        if state.rank != 0 and not self._all_ranks:
            return
        sink = self.make_sink(state)
        self._is_silent = False
        self._feed = feed
        self._is_resume_due = True
        call_in_forked_children(self._silence_in_child)
        feed.begin(f"{type(self).__name__}-{state.run_name}", sink)
        if self.require:
            feed.wait_for_open(self._close_seconds)

    def before_load(self, state: State, logger: Any) -> None:
        """Resets the time of the checkpoint."""
        self._checkpoint_time = None

    def after_load(self, state: State, logger: Any) -> None:
        """Schedules `Sink.resume`: a loaded checkpoint may be older than the last record."""
        self._is_resume_due = True

    def fit_start(self, state: State, logger: Any) -> None:
        """Queues `Sink.resume`, once per load."""
        if self._sink is not None and self._is_resume_due:
            self._is_resume_due = False
            self._put("resume", "resume", int(state.timestamp.batch), self._checkpoint_time)

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
        if self._sink is None:
            return
        status = "completed" if state.status is RunStatus.RUNNING else str(state.status)
        text = None
        if state.exception is not None:
            text = redact_text(f"{type(state.exception).__name__}: {state.exception}")
        self._put("end", "finish", status, text, self._clock())

    def post_close(self) -> None:
        """Processes the queue and stops the thread, within `close_seconds`."""
        feed = self._feed
        stop_calling_in_forked_children(self._silence_in_child)
        if feed is not None:
            feed.stop(self._close_seconds)
            self._report(feed.all_counts)
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
        feed = self._feed or self._early_feed()
        if feed is not None:
            feed.add((dict(metrics), self._step() if step is None else step, self._clock()))

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
        """Queues a call of a sink method.

        Args:
            kind: the kind of record, for messages.
            method: the method.
            args: its arguments.
            prepare: returns the final arguments, in the background thread.
        """
        feed = self._feed or self._early_feed()
        if feed is None or not hasattr(self.sink_class, method):  # No tracker supports this kind.
            return

        def work() -> None:
            getattr(feed.sink, method)(*(args if prepare is None else prepare(*args)))

        feed.put(work, size=size_in_bytes(args), kind=kind, is_kept=method in _ALWAYS_KEPT)

    def _early_feed(self) -> Feed | None:
        """Makes the queue before `init`, without a thread; None if nothing is logged here."""
        if not self._is_silent:
            self._keeps_early_records()
            self._feed = self._new_feed()
        return self._feed

    def _silence_in_child(self) -> None:
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
