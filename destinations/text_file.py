"""Writes what training says to a file, in lines for people or as JSON lines.

A call in the training thread puts a record into a queue; one thread renders and appends. See `docs/destinations.md` for
the lines.
"""

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from events import Logger, State, WriteRate, format_name, redact_text

from ._formatting import plain
from ._line_writer import LineWriter, json_or_note, open_appending, open_new
from ._lines import LineRecord, LineSplitter, json_line, text_lines
from ._streams import Redirection, StandIn
from .base import LoggerDestination

__all__ = ["TextFile"]

_RECORDS_TO_WAKE = 1024


class TextFile(LoggerDestination):
    """Appends every record to a file: metrics, hyperparameters, tables, texts, traces; of media, what they are.

    ```
    [hyperparameter]: optimizer.lr: 0.001
    [metric][batch=3]: loss/train: 0.6931471805599453
    ```

    **When.** A record is on its way to the disk `flush_interval` seconds after its call at the latest, and at the end of
    `fit` and at `close` all are there. `kill -9` loses what is younger than that.

    **Ranks.** A file name with `{rank}` or `{local_rank}` is written on every rank, one with `{node_rank}` by local rank 0,
    any other by rank 0 alone.

    **An existing file** is never destroyed, unless `overwrite=True` asks for it. A run that goes on from a checkpoint
    appends to it. A run that starts anew raises `FileExistsError` as soon as it is known to be one, which is when there
    was nothing to load: the run reports that, and goes on without this file. `append=True` takes every run as one that
    goes on: for jobs that are started again under the same name. A last line that was cut short is completed first.

    **Capture.** From `init` to `close`, `sys.stdout` and `sys.stderr` also go into the file, line by line, each with its
    own prefix. What writes past them (child processes, C libraries, and a `logging` handler that was made before `init`)
    does not. What ended the run is written as `[exception]`, captured or not.

    **Upload.** With `remote_file_name`, the whole file is handed to `logger.upload_file` at the end of each epoch, at
    the end of `fit` and at `close`, where it has grown since.

    **When the queue is full**, which takes a disk that stands still, records are not accepted but counted, and a line
    says how many once there is room.

    Args:
        filename: the file; placeholders as in `events.format_name`.
        remote_file_name: what it is called where it is uploaded to; None for no upload.
        format: "text" for people, "jsonl" for one JSON object per line.
        capture_stdout: whether what is printed goes into the file as well.
        capture_stderr: the same for `sys.stderr`.
        flush_interval: in seconds.
        log_traces: whether traces are written.
        overwrite: whether an existing file is replaced by a run that starts anew.
        append: whether an existing file is continued by a run that starts anew.
        max_pending_records: how many records may wait in memory.
        write_rate: how often metrics are taken; None for every time.
        clock: returns the time of a record, in seconds since the epoch.
    """

    def __init__(
        self,
        filename: str = "{run_name}/log-rank{rank}.txt",
        remote_file_name: str | None = None,
        *,
        format: Literal["text", "jsonl"] = "text",  # noqa: A002  # the word that everybody uses
        capture_stdout: bool = False,
        capture_stderr: bool = False,
        flush_interval: float = 1.0,
        log_traces: bool = True,
        overwrite: bool = False,
        append: bool = False,
        max_pending_records: int = 100_000,
        write_rate: WriteRate | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(write_rate=write_rate)
        if format not in {"text", "jsonl"}:
            raise ValueError(f'format must be "text" or "jsonl", got {format!r}.')
        if not flush_interval > 0:
            raise ValueError(f"flush_interval must be a positive number of seconds, got {flush_interval!r}.")
        if overwrite and append:
            raise ValueError("overwrite and append must not both be True: an existing file has one fate.")
        if max_pending_records < 1:
            raise ValueError(f"max_pending_records must be at least 1, got {max_pending_records!r}.")
        self._filename = str(filename)
        self._remote_file_name = remote_file_name
        self._format = format
        self._captured = tuple(
            name for name, is_on in (("stdout", capture_stdout), ("stderr", capture_stderr)) if is_on
        )
        self._flush_seconds = flush_interval
        self._log_traces = log_traces
        self._overwrite = overwrite
        self._append = append
        self._max_pending_records = max_pending_records
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        # Shared with the writer. Whoever logs appends, which is one step for the interpreter, and needs no lock.
        self._queue: deque[LineRecord] = deque()
        self._is_accepting = True
        self._dropped_records = 0
        self._untold_drops = 0
        self._state: State | None = None
        self._path: Path | None = None
        self._is_undecided = False
        self._writer: LineWriter | None = None
        self._redirection: Redirection | None = None
        self._listeners: list[_Listener] = []
        self._uploaded_bytes = 0

    @property
    def path(self) -> Path | None:
        """The file, absolute; None before `init`, after `close`, and where this rank writes none."""
        return self._path

    @property
    def dropped_records(self) -> int:
        """How many records of this run were not accepted because the queue was full."""
        return self._dropped_records

    def init(self, state: State, logger: Logger) -> None:
        self._state = state
        if not _writes_here(self._filename, state):
            self._is_accepting = False
            self._queue.clear()
            return
        # Resolved for good: neither a later chdir nor a later epoch moves it.
        self._path = Path(format_name(self._filename, state)).absolute()
        self._is_undecided = True
        # Where it matters whether the run goes on from a checkpoint, that is known once the checkpoint is loaded.
        if self._append or state.timestamp.batch or not _is_regular(self._path):
            self._decide(state, logger)

    def _decide(self, state: State, logger: Logger) -> None:
        """Opens the file, once it is known whether the run starts anew; afterwards does nothing."""
        if not self._is_undecided or self._path is None:
            return
        self._is_undecided = False
        is_resumed = bool(state.timestamp.batch)
        try:
            descriptor = self._open(self._path, is_resumed=is_resumed)
        except OSError:
            self._is_accepting = False
            self._queue.clear()
            self._path = None
            raise
        self._writer = LineWriter(
            descriptor, self._queue, text_lines if self._format == "text" else json_line, self._flush_seconds
        )
        if self._captured:
            self._redirection = Redirection(self._listen, self._captured)

    # Whichever comes first; AFTER_LOAD in a Trainer.
    after_load = fit_start = batch_start = eval_standalone_start = predict_start = _decide

    def _open(self, path: Path, *, is_resumed: bool) -> int:
        exists = path.exists()
        if exists and (is_resumed or self._append or not _is_regular(path)):
            return open_appending(path, json_or_note if self._format == "jsonl" else str)
        if exists and self._overwrite:
            # Not emptied in place: whoever reads the old file goes on reading it.
            path.unlink()
        try:
            return open_new(path)
        except FileExistsError:
            raise FileExistsError(
                f"text file must not exist when a run starts anew, got {str(path)!r}. Give the run another name, move "
                "the file away, or make TextFile(append=True) to continue it or TextFile(overwrite=True) to replace it."
            ) from None

    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
        if step is None:
            step = self._step()
        self._accept(LineRecord("metrics", "", step, self._clock(), dict(metrics)))

    def log_hyperparameters(self, hyperparameters: "dict[str, Any]") -> None:
        self._accept(LineRecord("hyperparameters", "", None, self._clock(), plain(hyperparameters)))

    def log_table(
        self, columns: "list[str]", rows: "list[list[Any]]", name: str = "Table", step: int | None = None
    ) -> None:
        self._take("table", name, step, {"columns": columns, "rows": rows})

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: "dict[str, Any] | None" = None,
        mask_class_labels: "dict[int, str] | None" = None,
        use_table: bool = True,
    ) -> None:
        value = {"images": images, "channels_last": channels_last}
        if masks is not None:
            value |= {"masks": masks, "mask_class_labels": mask_class_labels}
        self._take("images", name, step, value)

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        step = self._step() if step is None else step
        self._accept(LineRecord("text", name, step, self._clock(), text))

    def log_audio(self, audio: Any, sample_rate: int, name: str = "Audio", step: int | None = None) -> None:
        self._take("audio", name, step, {"audio": audio, "sample_rate": sample_rate})

    def log_video(
        self, video: Any, fps: float | None = None, name: str = "Video", step: int | None = None
    ) -> None:
        self._take("video", name, step, {"video": video, "fps": fps})

    def log_histogram(
        self,
        values: Any,
        name: str = "Histogram",
        step: int | None = None,
        bins: "int | Sequence[float]" = 64,
    ) -> None:
        self._take("histogram", name, step, {"values": values, "bins": bins})

    def log_point_cloud(
        self, points: Any, name: str = "Points", step: int | None = None, colors: Any = None
    ) -> None:
        value = {"points": points} if colors is None else {"points": points, "colors": colors}
        self._take("point_cloud", name, step, value)

    def log_traces(self, traces: "dict[str, Any]") -> None:
        if self._log_traces:
            self._accept(LineRecord("traces", "", None, self._clock(), plain(traces)))

    def flush(self) -> None:
        if self._writer is not None:
            self._tell_drops()
            self._writer.flush()

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._upload(logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self.flush()
        self._upload(logger)

    def close(self, state: State, logger: Logger) -> None:
        self._stop_listening()
        if self._writer is not None or self._is_undecided:
            self._log_exception(state.exception)
        try:
            if self._is_undecided and self._state is not None:
                # Nothing has been trained that anybody told us of.
                self._decide(self._state, logger)
                self._stop_listening()
            if self._writer is not None:
                self._tell_drops()
                self._writer.close()
            self._upload(logger)
        finally:
            dropped = self._dropped_records
            self._reset()
            self._dropped_records = dropped

    def _step(self) -> int:
        return 0 if self._state is None else int(self._state.timestamp.batch)

    def _take(self, kind: str, name: str, step: int | None, value: "dict[str, Any]") -> None:
        if self._is_accepting:
            step = self._step() if step is None else step
            self._accept(LineRecord(kind, name, step, self._clock(), plain(value)))

    def _accept(self, record: LineRecord) -> None:
        if not self._is_accepting:
            return
        pending = len(self._queue)
        if pending >= self._max_pending_records:
            self._dropped_records += 1
            self._untold_drops += 1
            return
        if self._untold_drops:
            self._tell_drops()
        self._queue.append(record)
        if pending == _RECORDS_TO_WAKE and self._writer is not None:
            self._writer.wake()

    def _tell_drops(self) -> None:
        """Puts a line where records are missing; it is one more than the bound."""
        count, self._untold_drops = self._untold_drops, 0
        if count:
            text = f"{count} records were not accepted here: {self._max_pending_records} were waiting for the disk."
            self._queue.append(LineRecord("note", "", None, self._clock(), text))

    def _listen(self, name: str, stream: Any) -> StandIn:
        listener = _Listener(
            stream, lambda line: self._accept(LineRecord(name, "", None, self._clock(), redact_text(line)))
        )
        self._listeners.append(listener)
        return listener

    def _stop_listening(self) -> None:
        if self._redirection is None:
            return
        self._redirection.undo()
        self._redirection = None
        for listener in self._listeners:
            listener.finish()

    def _log_exception(self, exception: BaseException | None) -> None:
        # Where nobody caught it, the interpreter has printed it already, and it was captured.
        if exception is None or (
            "stderr" in self._captured and getattr(sys, "last_value", None) is exception
        ):
            return
        text = redact_text("".join(traceback.format_exception(exception)).rstrip("\n"))
        self._accept(LineRecord("exception", "", None, self._clock(), text))

    def _upload(self, logger: Logger) -> None:
        if self._remote_file_name is None or self._writer is None or self._path is None:
            return
        remote_file_name, path, writer = self._remote_file_name, self._path, self._writer

        def upload() -> None:
            if writer.written_bytes != self._uploaded_bytes:
                logger.upload_file(remote_file_name, path, overwrite=True)
                self._uploaded_bytes = writer.written_bytes

        # The copy that is taken there holds whole lines only.
        writer.while_paused(upload)


class _Listener(StandIn):
    """Passes on what is written to a stream, and hands over its lines."""

    def __init__(self, stream: Any, take_line: Callable[[str], None]) -> None:
        super().__init__(stream)
        self._take_line = take_line
        self._splitter = LineSplitter()
        # Guards the splitter. Reentrant: a signal handler, or a finalizer, may print in the middle of a print.
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.is_listening:
            with self._lock:
                for line in self._splitter.feed(text):
                    self._take_line(line)
        return written

    def finish(self) -> None:
        """Hands over a last line that has no end."""
        if os.getpid() == self._owner_pid:
            with self._lock:
                for line in self._splitter.rest():
                    self._take_line(line)


def _writes_here(filename: str, state: State) -> bool:
    """Whether this rank has a file of its own, or is the one that writes what is shared."""
    if "{rank" in filename or "{local_rank" in filename:
        return True
    return state.local_rank == 0 if "{node_rank" in filename else state.rank == 0


def _is_regular(path: Path) -> bool:
    """Whether there is a file that could be destroyed; /dev/null could not, and must not be replaced."""
    return path.is_file()
