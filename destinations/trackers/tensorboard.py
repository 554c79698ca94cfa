"""`TensorBoard`: writes a run as event files for `tensorboard --logdir`.

Its methods run in the training thread and queue records; a background thread encodes and writes.
"""

import functools
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from destinations.background import RetryLaterError
from destinations.base import check_folder
from destinations.copies import merged
from destinations.trackers.names import without_surrogates
from destinations.trackers.target import Target
from destinations.trackers.tracker import Row, Sink, Stamp, Tracker, log_each_row, require_package
from events import State, check_placeholders, check_run_name, format_run_name
from uploads.disk import is_locked

from .event_file import EventFile, event_files, new_event_file, records

__all__ = ["TensorBoard"]

_MAX_WAITING_BYTES = 8 << 20
_MAX_TEMPLATES = 256
_ADDED_LATER = "hyperparameters"


def _writes(kind: str, values_of: str) -> Callable[..., None]:
    """Returns a method that writes a record with a function of `_summaries`, under a tag for its kind."""

    def log(self: "TensorBoardSink", stamp: Stamp, *args: Any) -> None:
        self._begin(stamp.step)
        values = getattr(self._summaries, values_of)(self._tag(stamp.name, kind), *args)
        self._add_values(values, stamp.step, stamp.time)

    return log


class TensorBoardSink(Sink):
    """Writes the event file of one run.

    While the disk is full, records wait in memory and in the queue.

    Args:
        folder: folder of the file.
        started_at: start of the run, in seconds since 1970.
        write: `os.write`.
    """

    def __init__(self, folder: Path, started_at: float, write: Callable[[int, Any], int] = os.write) -> None:
        self.folder = folder
        self._started_at = started_at
        self._write = write
        self._earlier: list[Path] = []
        self._file: EventFile | None = None
        self._append: Any = None
        self._event_pb2: Any = None
        self._summary_pb2: Any = None
        self._summaries: Any = None
        # A reusable event for each set of names.
        self._template = functools.lru_cache(_MAX_TEMPLATES)(self._new_template)
        # TensorBoard derives the kind of a tag from its first value, so each kind of record needs its own
        # tag.
        self._kinds: dict[str, str] = {}
        self._hyperparameters: dict[str, Any] = {}
        self._is_start_written = False
        self._is_purge_due = False
        self._has_resumed = False
        self.path: Path | None = None

    # The file.

    def open(self) -> None:
        """Creates the file."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        from . import tensorboard_summaries

        self._summaries = tensorboard_summaries
        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        if self._file is None:
            try:
                self._earlier = [path for path in event_files(self.folder) if not is_locked(path)]
                self.path, descriptor = new_event_file(self.folder, time.time())
            except OSError as error:
                raise RetryLaterError from error
            self._file = EventFile(descriptor, self._write)
            self._append = self._file.write
            origin = event_pb2.SourceMetadata(writer="destinations.trackers.tensorboard")
            self._add(wall_time=self._started_at, file_version="brain.Event:2", source_metadata=origin)
        self.flush()

    def flush(self) -> None:
        """Writes buffered records.

        Raises:
            RetryLaterError: the disk is full.
        """
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                raise RetryLaterError from error

    def close(self) -> None:
        """Writes buffered records, and closes the file."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            raise OSError(
                error.errno, f"{file.waiting_bytes} bytes were not written to {self.path}: {error.strerror}"
            ) from error

    def _begin(self, step: int | None) -> None:
        """Prepares for a record; the step is None for records that do not belong to a step.

        Raises:
            RetryLaterError: too many unwritten bytes.
            RuntimeError: the file could not be opened.
        """
        if self._file is None:
            raise RuntimeError("the event file could not be opened.")
        if self._file.waiting_bytes > _MAX_WAITING_BYTES:
            self.flush()
        if self._is_purge_due and step is not None:
            self._is_purge_due = False
            self._purge(step)
        if self._hyperparameters and not self._is_start_written:
            self._write_start()

    def _add(self, **fields: Any) -> None:
        self._append(self._event_pb2.Event(**fields).SerializeToString())

    def _add_values(self, values: Sequence[Any], step: int, seconds: float) -> None:
        if values:
            self._add(wall_time=seconds, step=step, summary=self._summary_pb2.Summary(value=values))

    def _tag(self, name: str, kind: str) -> str:
        """Returns the tag of a record: its name, with a suffix if another kind of record uses it."""
        name = without_surrogates(name)
        for count in itertools.count():
            tag = name if not count else f"{name}/{kind}" if count == 1 else f"{name}/{kind}{count}"
            if self._kinds.setdefault(tag, kind) == kind:
                return tag
        raise AssertionError

    # Resume.

    def resume(self, step: int, time: float | None) -> None:
        """Hides the records that training will repeat.

        Nothing is deleted. The mark makes TensorBoard hide earlier events from its step on, and events that
        belong to the checkpoint are written again.
        """
        if not self._earlier:
            return
        # Training doesn't repeat the records that this session logged before it began.
        own = [] if self._has_resumed else self._own_events()
        self._has_resumed = True
        if step == 0:
            if own:
                self._purge_but(own, min(event_step for event_step, _ in own))
            else:
                # A new run, or a loop with its own step count: the first record has the step.
                self._is_purge_due = True
            return
        kept, abandoned = self._split(step, time)
        if abandoned:
            self._purge_but([*self._read_again(kept), *own], min(abandoned))

    def _purge_but(self, kept: Sequence[tuple[int, bytes]], first: int) -> None:
        """Hides earlier events from a step on, and writes the remaining ones again."""
        self._purge(first)
        for event_step, data in kept:
            if event_step >= first:
                self._append(data)

    def _own_events(self) -> list[tuple[int, bytes]]:
        """Returns the events of this session, with their steps."""
        self.flush()
        if self.path is None:
            return []
        events = list(self._events(self.path))
        return [(event.step, data) for _, event, data in events if event.HasField("summary")]

    def _purge(self, step: int) -> None:
        log = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
        self._add(wall_time=self._started_at, step=step, session_log=log)

    def _split(self, step: int, time: float | None) -> tuple[set[tuple[int, int]], list[int]]:
        """Returns the events of the checkpoint from a step on, as (file, index), and the steps of others."""
        seen: list[tuple[int, float, tuple[int, int]]] = []
        for number, path in enumerate(self._earlier):
            for place, event, _ in self._events(path):
                if event.step < step:
                    continue
                if event.HasField("session_log"):
                    # Events hidden by an earlier session stay hidden.
                    seen = [one for one in seen if one[0] < event.step]
                elif event.HasField("summary"):
                    seen.append((event.step, event.wall_time, (number, place)))
        kept = {key for _, at, key in seen if time is not None and at <= time}
        return kept, [event_step for event_step, _, key in seen if key not in kept]

    def _read_again(self, keys: set[tuple[int, int]]) -> list[tuple[int, bytes]]:
        return [
            (event.step, data)
            for number in sorted({number for number, _ in keys})
            for place, event, data in self._events(self._earlier[number])
            if (number, place) in keys
        ]

    def _events(self, path: Path) -> Iterator[tuple[int, Any, bytes]]:
        """Yields the index, event and bytes of each record; skips records that aren't events."""
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # it has no stubs

        for place, data in enumerate(records(path)):
            try:
                event = self._event_pb2.Event.FromString(data)
            except DecodeError:
                continue
            yield place, event, data

    # Metrics.

    def log_metrics(self, rows: Sequence[Row]) -> None:
        """Writes one event for each row."""
        self._begin(rows[0][1])
        log_each_row(rows, lambda row: self._append(self._row(*row)) if row[0] else None)

    def _row(self, metrics: dict[str, float], step: int, seconds: float) -> bytes:
        event, values = self._template(tuple(metrics))
        event.wall_time = seconds
        event.step = step
        try:
            for value, number in zip(values, metrics.values(), strict=True):
                value.simple_value = number
        except OverflowError:
            for value, number in zip(values, metrics.values(), strict=True):
                value.simple_value = self._summaries.number(number)
        data: bytes = event.SerializeToString()
        return data

    def _new_template(self, names: tuple[str, ...]) -> tuple[Any, list[Any]]:
        """Returns an event with the tags of these names, and its values, ready for the numbers."""
        event = self._event_pb2.Event()
        for name in names:
            event.summary.value.add(tag=self._tag(name, "metric"))
        return event, list(event.summary.value)

    # Everything else.

    def log_hyperparameters(self, hyperparameters: dict[str, Any], time: float) -> None:
        """Keeps hyperparameters until the first record, because TensorBoard reads them only once per run."""
        self._hyperparameters = merged(self._hyperparameters, hyperparameters)
        if self._is_start_written:
            self._begin(None)
            values = self._summaries.hyperparameter_value(
                self._tag(_ADDED_LATER, "text"), self._hyperparameters
            )
            self._add_values(values, 0, time)

    def _write_start(self) -> None:
        self._is_start_written = True
        value = self._summaries.session_start_value(self._hyperparameters, self._started_at)
        self._add_values([value], 0, self._started_at)

    def finish(self, status: str, exception: str | None, time: float) -> None:
        """Writes the end of the session, unless preempted: TensorBoard uses the first end it finds."""
        self._begin(None)
        if status != "preempted":
            self._add_values([self._summaries.session_end_value(status, time)], 0, time)

    log_images = _writes("image", "image_values")
    log_text = _writes("text", "text_value")
    log_table = _writes("text", "table_value")
    log_audio = _writes("audio", "audio_values")
    log_video = _writes("image", "video_value")
    log_histogram = _writes("histogram", "histogram_values")
    log_point_cloud = _writes("mesh", "point_cloud_values")

    def log_traces(self, stamp: Stamp, traces: dict[str, Any]) -> None:
        self._begin(stamp.step)
        values = []
        for name, value in traces.items():
            values += self._summaries.trace_value(self._tag(f"traces/{name}", "text"), value)
        self._add_values(values, stamp.step, stamp.time)


_log = logging.getLogger("destinations")

_UPLOAD_SECONDS = 30.0


class _Folder(Target):
    """A folder with a subfolder of event files for each run."""

    places = ("FOLDER",)
    own_files = re.compile(r"events\.out\.tfevents\..*")


class TensorBoard(Tracker):
    """Writes event files for TensorBoard, with neither TensorFlow nor `torch.utils.tensorboard`.

    ```python
    trainer = Trainer(model, train_dataloader, max_duration="5ep", loggers=[TensorBoard("runs/{run_name}")])
    ```

    **Records.** Metrics become float32 scalars, one event per call. Images become PNG; "name/mask" shows them
    again with each mask as an overlay and the labels in the description. Audio becomes WAV, video GIF;
    histograms and point clouds are supported. Texts, tables and traces become Markdown. The HPARAMS tab shows
    hyperparameters logged before the first record; later ones become a text. Each record has the step and
    time of its call.

    **Names** are the tags. If a name is already used for another kind of record, the kind is appended:
    "loss/text".

    **Resume.** In a folder with event files, a new file is added, and no file is changed. Records that
    training repeats are marked as replaced, and TensorBoard hides them. Records from before the checkpoint
    stay, even at its step.

    **Files** have unique names, and TensorBoard reads the newest last. Files that another writer has open are
    not continued. TensorBoard expects one writer per folder: it follows only the newest file.

    Threading, bounds, failures, close and fork: see `Tracker`. While the disk is full, records wait.

    Args:
        log_dir: folder of the run; placeholders as in `events.format_run_name`. With `all_ranks` and no
            `{rank}`, other ranks use the subfolders "rank1" and so on.
        remote_folder: remote folder for uploads by `logger.upload_file`, at the end of `fit` and at `close`;
            None for no upload.
        options: arguments of `Tracker`.

    Raises:
        ImportError: the package `tensorboard` is not installed.
        NotADirectoryError: at `init`, the path or a parent is a file.
        PermissionError: at `init`, the folder is not writable.
        ValueError: an argument is out of its range.
    """

    sink_class = TensorBoardSink
    target = _Folder

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "runs/{run_name}/tensorboard",
        *,
        remote_folder: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_package("tensorboard", "TensorBoard")
        self._template = os.path.expanduser(log_dir)  # noqa: PTH111  # Path raises without a home
        check_placeholders(self._template)
        self._remote_folder = remote_folder

    def place(self) -> str:
        return "" if self.log_dir is None else str(self.log_dir)

    @property
    def log_dir(self) -> Path | None:
        """Absolute path of the folder while a run is open on this rank; else None."""
        return None if self._sink is None else self._sink.folder

    @property
    def path(self) -> Path | None:
        """Absolute path of the event file, once the background thread has created it; else None."""
        return None if self._sink is None else self._sink.path

    def make_sink(self, state: State) -> Sink:
        """Returns the sink; checks the folder first, so that errors are raised at once."""
        check_run_name(self._template, state)
        folder = Path(format_run_name(self._template, state)).absolute()
        if state.rank != 0 and "{rank" not in self._template:
            folder /= f"rank{state.rank}"
        check_folder(folder)
        return TensorBoardSink(folder, self._clock())

    def fit_end(self, state: State, logger: Any) -> None:
        """Uploads the current file."""
        self._upload(logger)

    def close(self, state: State, logger: Any) -> None:
        """Queues the end of the run, and uploads the file."""
        super().close(state, logger)
        self._upload(logger)

    def _upload(self, logger: Any) -> None:
        feed, sink = self._feed, self._sink
        if self._remote_folder is None or feed is None or sink is None:
            return
        # Nothing waits afterwards, so the copy has only whole records.
        if not feed.flush(min(_UPLOAD_SECONDS, self._close_seconds)) or sink.path is None:
            _log.warning("TensorBoard: %s was not uploaded: it could not be flushed in time.", sink.path)
            return
        logger.upload_file(f"{self._remote_folder}/{sink.path.name}", sink.path, overwrite=True)

    def __repr__(self) -> str:
        return f"TensorBoard({self._template!r})"
