"""`TextFile`: appends logged records to a file, as text or as JSON Lines.

A call in the training thread puts a record into a queue; one background thread formats and appends. The page
"Destinations" describes the format of the lines.
"""

import contextlib
import itertools
import json
import logging
import os
import stat
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import attrs

from destinations.background import PeriodicThread
from destinations.base import RecordDestination
from destinations.kinds import kind_of
from events import Logger, State, WriteRate, check_placeholders, check_run_name, format_name, redact_text
from uploads.disk import end_of_last_line

from .formatting import exact, flattened, header, one_line, plain
from .streams import Redirection, StreamWrapper

__all__ = [
    "LineRecord",
    "LineSplitter",
    "LineWriter",
    "TextFile",
    "json_line",
    "json_or_note",
    "open_appending",
    "open_new",
    "text_lines",
]

_log = logging.getLogger("destinations")

_MAX_LINE_CHARACTERS = 1 << 20
# Small batches, because formatting holds the GIL.
_RECORDS_PER_WRITE = 64
_RECORDS_TO_WAKE = 1024
_TAIL_BYTES = 1 << 16
_CLOSE_SECONDS = 30.0
# Valid in JSON, but line breaks to some readers.
_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
_SINGULAR = {"metrics": "metric", "hyperparameters": "hyperparameter", "traces": "trace"}


class LineRecord(NamedTuple):
    """A record to be written as one or more lines.

    Attributes:
        kind: "metrics", "hyperparameters", "table", "text", "traces", "stdout", "stderr", "exception",
            "note", or one of the media: "images", "audio", "video", "histogram", "point_cloud".
        name: the name, or "".
        step: the step, or None.
        time: when it was logged, in seconds since 1970.
        value: a dict of plain values, or a text.
    """

    kind: str
    name: str
    step: int | None
    time: float
    value: Any


def text_lines(record: LineRecord) -> str:
    """Formats a record as lines such as `[metric][batch=3]: loss/train: 0.25`; numbers round-trip exactly."""
    kind = _SINGULAR.get(record.kind, record.kind)
    start = f"[{kind}]{header({} if record.step is None else {'batch': record.step})}: "
    return "".join(f"{start}{part}\n" for part in _parts(record))


def _parts(record: LineRecord) -> Iterator[str]:
    """Yields the text of each line after the prefix."""
    value = record.value
    if record.kind == "hyperparameters":
        value = flattened(value)
    if record.kind in _SINGULAR:
        yield from (f"{one_line(name)}: {exact(item)}" for name, item in value.items())
    elif isinstance(value, str):
        name = f"{one_line(record.name)}: " if record.kind == "text" else ""
        yield from (f"{name}{one_line(line)}" for line in value.split("\n"))
    else:
        yield f"{one_line(record.name)}: {exact(value)}"


def json_line(record: LineRecord) -> str:
    """Formats a record as one line of strict JSON.

    `kind` and `time` are always present, `step` and `name` if the record has them. The value is under its
    kind (`metrics`, `hyperparameters`, `traces`, `text`, `stdout`, …); a table is under `columns` and
    `rows`, media under the names of their arguments. Floats round-trip exactly.
    """
    fields: dict[str, Any] = {"kind": record.kind, "time": record.time}
    if record.step is not None:
        fields["step"] = record.step
    if record.name or record.kind not in {*_SINGULAR, "stdout", "stderr", "exception", "note"}:
        fields["name"] = record.name
    if record.kind in _SINGULAR or isinstance(record.value, str):
        fields[record.kind] = plain(record.value)
    else:
        fields |= record.value
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text if text.isprintable() else text.translate(_JSON_CONTROLS)}\n"


class LineSplitter:
    """Splits a stream of text chunks into lines.

    A carriage return restarts the line, as on a terminal: only the last state of a progress bar remains.
    Lines of more than 2**20 characters are split.
    """

    def __init__(self) -> None:
        self._partial = ""

    def feed(self, text: str) -> list[str]:
        """Adds a chunk; returns the completed lines without newlines."""
        if "\n" not in text and len(self._partial) + len(text) < _MAX_LINE_CHARACTERS:
            self._partial = _overwritten(self._partial + text)
            return []
        *lines, partial = (self._partial + text).split("\n")
        self._partial = _overwritten(partial)
        while len(self._partial) >= _MAX_LINE_CHARACTERS:
            lines.append(self._partial[:_MAX_LINE_CHARACTERS])
            self._partial = self._partial[_MAX_LINE_CHARACTERS:]
        pieces = (_cut(_overwritten(line).rstrip("\r")) for line in lines)
        return list(itertools.chain.from_iterable(pieces))

    def take_partial(self) -> list[str]:
        """Returns the incomplete last line, if any, and clears it."""
        rest, self._partial = self._partial.rstrip("\r"), ""
        return [rest] if rest else []


def _overwritten(line: str) -> str:
    """Applies the carriage returns of a line; keeps one at its end, since nothing has followed it yet."""
    body = line.rstrip("\r")
    end = "\r" if len(body) < len(line) else ""
    return body[body.rfind("\r") + 1 :] + end


def _cut(line: str) -> list[str]:
    return [
        line[start : start + _MAX_LINE_CHARACTERS]
        for start in range(0, max(len(line), 1), _MAX_LINE_CHARACTERS)
    ]


@attrs.define(eq=False, slots=False, repr=False)
class LineWriter:
    """Background thread that takes records from a queue, formats them, and appends the lines to a file.

    **Threading.** All methods may be called from any thread. One lock guards the file and the unwritten
    bytes.

    **After fork.** Does nothing in the child, which owns neither the thread nor the file position.

    Args:
        descriptor: a file opened for appending; closed with the writer.
        queue: records to write; others append, the writer removes.
        render: formats a record as whole lines.
        flush_seconds: max time that a record waits in memory.
    """

    _descriptor: int
    _queue: deque[Any]
    _render: Callable[[Any], str]
    _flush_seconds: float

    def __attrs_post_init__(self) -> None:
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._holder = 0  # The thread that writes for a caller.
        self._unwritten = b""
        self._reported: set[str] = set()
        self.written_bytes = 0
        self._timer = PeriodicThread(
            self._write, self._flush_seconds, self._report, name="destinations-line-writer"
        )
        self._timer.start()

    def wake(self) -> None:
        """Makes the thread write immediately."""
        self._timer.wake()

    def flush(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Writes all records accepted before the call; blocks.

        Raises:
            OSError: the file cannot be written; the rest is kept and retried.
            TimeoutError: the thread has been blocked in a write for `timeout_seconds`.
        """
        if os.getpid() == self._owner_pid and not self.is_interrupted:
            with self.whole(timeout_seconds):
                pass

    @property
    def is_interrupted(self) -> bool:
        """Whether this is a signal handler in the midst of a write of this thread, which writes the rest."""
        return self._holder == threading.get_ident()

    @contextlib.contextmanager
    def whole(self, timeout_seconds: float = _CLOSE_SECONDS) -> Iterator[None]:
        """Writes everything; no other thread writes within this context.

        Raises:
            OSError: as for `flush`.
            TimeoutError: as for `flush`.
        """
        if not self._lock.acquire(timeout=timeout_seconds):
            raise TimeoutError(f"could not write the text file within {timeout_seconds:.0f} s.")
        try:
            self._holder = threading.get_ident()
            self._drain()
            yield
        finally:
            self._holder = 0
            self._lock.release()

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Writes everything, stops the thread, and closes the file.

        Raises:
            OSError: the file cannot be written; the message counts the lost lines.
            TimeoutError: as for `flush`.
        """
        if os.getpid() != self._owner_pid:
            return
        try:
            self.flush(timeout_seconds)
        except TimeoutError:
            raise
        except OSError as error:
            lost = self._unwritten.count(b"\n") + len(self._queue)
            raise OSError(
                error.errno, f"cannot write the text file, about {lost} lines are lost: {error}"
            ) from error
        finally:
            if self._timer.stop(timeout_seconds):
                os.close(self._descriptor)

    def _write(self, _: bool) -> None:
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        while self._unwritten or self._queue:
            if not self._unwritten:
                count = min(len(self._queue), _RECORDS_PER_WRITE)
                lines = "".join(self._render(self._queue.popleft()) for _ in range(count))
                # UTF-8 cannot encode a lone surrogate; the escape is also valid in JSON.
                self._unwritten = lines.encode("utf-8", "backslashreplace")
            while self._unwritten:
                written = os.write(self._descriptor, self._unwritten)
                self._unwritten = self._unwritten[written:]
                self.written_bytes += written

    def _report(self, error: Exception) -> None:
        """Logs an error of the thread, which tries again; each text once."""
        line = f"cannot write the text file, retrying: {type(error).__name__}: {error}"
        if line not in self._reported:
            self._reported.add(line)
            _log.error("%s.", line)


def open_new(path: Path) -> int:
    """Creates a file and opens it for appending; returns the file descriptor.

    Raises:
        FileExistsError: the file exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)


def open_appending(path: Path, torn_line: Callable[[str], str]) -> int:
    """Opens a file for appending and repairs a torn last line; returns the file descriptor.

    A process killed during a write leaves a last line without a newline, which is completed, or replaced by
    the result of `torn_line`.

    Args:
        path: the file; created if missing.
        torn_line: returns the replacement of a torn line, or the line itself.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        try:
            _complete_last_line(descriptor, torn_line)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def json_or_note(line: str) -> str:
    """Returns valid JSON unchanged, and any other text wrapped in a JSON object."""
    try:
        json.loads(line)
    except ValueError:
        return json.dumps({"kind": "torn", "torn": line})
    return line


def _complete_last_line(descriptor: int, torn_line: Callable[[str], str]) -> None:
    size = os.fstat(descriptor).st_size
    whole = end_of_last_line(descriptor, size)
    torn = os.pread(descriptor, size - whole, whole)
    if not torn:
        return
    line = torn.decode("utf-8", "surrogateescape")
    complete = torn_line(line)
    if complete != line:
        os.ftruncate(descriptor, size - len(torn))
        os.write(descriptor, complete.encode("utf-8", "surrogateescape"))
    os.write(descriptor, b"\n")


class TextFile(RecordDestination):
    """Appends records to a file: metrics, hyperparameters, tables, texts, traces, and descriptions of media.

    ```python
    Trainer(..., loggers=[TextFile("logs/{run_name}.txt")])
    ```

    writes lines such as

    ```
    [hyperparameter]: optimizer.lr: 0.001
    [metric][batch=3]: loss/train: 0.6931471805599453
    ```

    **When.** A record is written at most `flush_interval` seconds after the call; at the end of `fit` and at
    `close`, everything is written. `kill -9` loses the records of the last `flush_interval` seconds.

    **Ranks.** A file name with `{rank}` or `{local_rank}` is written on every rank, one with `{node_rank}` by
    local rank 0, any other by rank 0 only.

    **An existing file** is never destroyed without `overwrite=True`. A run resumed from a checkpoint appends
    to it. For a new run, `FileExistsError` is raised once it is known that no checkpoint is loaded: the run
    reports it, and continues without this file. `append=True` appends in any case, for jobs that are
    restarted under the same name. A torn last line is repaired first.

    **Capture.** From `init` to `close`, `sys.stdout` and `sys.stderr` are also written to the file, line by
    line, each with its own prefix. The output of child processes, C libraries, and `logging` handlers created
    before `init` is not captured. The exception that ended the run is always written, as `[exception]`.

    **Upload.** With `remote_file_name`, the whole file is passed to `logger.upload_file` at the end of each
    epoch, of `fit`, and at `close`, if it has grown.

    **Full queue.** If the disk blocks and the queue is full, records are dropped and counted; a line in the
    file reports the number as soon as there is space.

    Args:
        filename: the file; placeholders as in `events.format_name`.
        remote_file_name: remote name of the uploaded file; None for no upload.
        format: "text", or "jsonl" for one JSON object per line.
        capture_stdout: also write the output to `sys.stdout`.
        capture_stderr: also write the output to `sys.stderr`.
        flush_interval: in seconds.
        log_traces: write traces.
        overwrite: a new run replaces an existing file.
        append: a new run appends to an existing file.
        max_pending_records: max number of records waiting in memory.
        write_rate: rate limit of metrics; None for no limit.
        clock: returns the time of a record, in seconds since 1970.
    """

    def __init__(
        self,
        filename: str = "{run_name}/log-rank{rank}.txt",
        remote_file_name: str | None = None,
        *,
        format: Literal["text", "jsonl"] = "text",  # the usual word
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
            raise ValueError("overwrite and append must not both be True.")
        if max_pending_records < 1:
            raise ValueError(f"max_pending_records must be at least 1, got {max_pending_records!r}.")
        check_placeholders(str(filename))
        self._filename = os.path.expanduser(filename)  # noqa: PTH111  # Path raises without a home
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
        # Shared with the writer thread without a lock: deque.append is atomic.
        self._queue: deque[LineRecord] = deque()
        self._is_accepting = True
        self._dropped_records = 0
        self._unreported_drops = 0
        # Read by the logger when a later hook than `init` raises: the run goes on without this file.
        self.cannot_open = False
        self._state: State | None = None
        self._path: Path | None = None
        self._is_open_deferred = False
        self._writer: LineWriter | None = None
        self._redirection: Redirection | None = None
        self._uploaded_bytes = 0

    @property
    def path(self) -> Path | None:
        """Absolute path of the file; None before `init`, after `close`, and on ranks without a file."""
        return self._path

    @property
    def dropped_records(self) -> int:
        """Number of records of this run dropped: the queue was full, or the file could not be opened."""
        return self._dropped_records

    def place(self) -> str:
        return "" if self._path is None else str(self._path)

    def init(self, state: State, logger: Logger) -> None:
        self._state = state
        self._run_begins()
        if not _writes_here(self._filename, state):
            self._is_accepting = False
            self._queue.clear()
            return
        # Resolved once, so that a later chdir or epoch does not change it.
        check_run_name(self._filename, state)
        self._path = Path(format_name(self._filename, state)).absolute()
        self._is_open_deferred = True
        # Otherwise it matters whether the run is resumed, which is known only after a checkpoint is loaded.
        # A device such as /dev/null is no regular file, and never replaced.
        if self._append or state.timestamp.batch or not self._path.is_file():
            self._open_once(state, logger)

    def _open_once(self, state: State, logger: Logger) -> None:
        """Opens the file once it is known whether the run is resumed; idempotent."""
        if not self._is_open_deferred or self._path is None:
            return
        self._is_open_deferred = False
        is_resumed = bool(state.timestamp.batch)
        try:
            descriptor = self._open(self._path, is_resumed=is_resumed)
        except OSError:
            self._is_accepting = False
            self._dropped_records += len(self._queue)
            self._queue.clear()
            self._path = None
            self.cannot_open = True
            raise
        self._writer = LineWriter(
            descriptor, self._queue, text_lines if self._format == "text" else json_line, self._flush_seconds
        )
        if self._captured:
            self._redirection = Redirection(self._capture, self._captured)

    # Whichever fires first; AFTER_LOAD in a Trainer.
    after_load = fit_start = batch_start = eval_standalone_start = predict_start = _open_once

    def _open(self, path: Path, *, is_resumed: bool) -> int:
        exists = path.exists()
        if exists and (is_resumed or self._append or not path.is_file()):
            return open_appending(path, json_or_note if self._format == "jsonl" else str)
        if exists and self._overwrite:
            # Not truncated in place, so that a process reading the old file is not disturbed.
            path.unlink()
        try:
            return open_new(path)
        except FileExistsError:
            raise FileExistsError(
                f"text file {str(path)!r} already exists, and this run does not resume from a checkpoint. "
                "Rename the run, move the file, or use TextFile(append=True) or TextFile(overwrite=True)."
            ) from None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is None:
            step = self._step()
        self._accept(LineRecord("metrics", "", step, self._clock(), dict(metrics)))

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._accept(LineRecord("hyperparameters", "", None, self._clock(), plain(hyperparameters)))

    def log_record(self, kind: str, arguments: dict[str, Any]) -> None:
        if not self._is_accepting or (kind == "traces" and not self._log_traces):
            return
        name, has_step = arguments.pop("name", ""), "step" in arguments
        step = arguments.pop("step", None)
        if step is None and has_step:
            step = self._step()
        shown = {key: value for key, value in arguments.items() if value is not None or key == "fps"}
        shown.pop("use_table", None)
        value = next(iter(arguments.values())) if kind_of(method=f"log_{kind}").is_single else shown
        self._accept(LineRecord(kind, name, step, self._clock(), plain(value)))

    def flush(self) -> None:
        if self._writer is not None:
            self._report_drops()
            self._writer.flush()

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._upload(logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self.flush()
        self._upload(logger)

    def close(self, state: State, logger: Logger) -> None:
        self._stop_capture()
        if self._writer is not None or self._is_open_deferred:
            self._log_exception(state.exception)
        try:
            if self._is_open_deferred and self._state is not None:
                # No event of a training loop has opened it.
                self._open_once(self._state, logger)
                self._stop_capture()
            if self._writer is not None:
                self._report_drops()
                self._writer.close()
            self._upload(logger)
        finally:
            dropped = self._dropped_records
            self._reset()
            self._dropped_records = dropped

    def _step(self) -> int:
        return 0 if self._state is None else int(self._state.timestamp.batch)

    def _accept(self, record: LineRecord) -> None:
        if not self._is_accepting:
            return
        if self._state is None:
            self._keeps_early_records()
        pending = len(self._queue)
        if pending >= self._max_pending_records:
            self._dropped_records += 1
            self._unreported_drops += 1
            return
        if self._unreported_drops:
            self._report_drops()
        self._queue.append(record)
        if pending == _RECORDS_TO_WAKE and self._writer is not None:
            self._writer.wake()

    def _report_drops(self) -> None:
        """Adds a line that counts dropped records, even if that exceeds the limit by one."""
        count, self._unreported_drops = self._unreported_drops, 0
        if count:
            text = f"{count} records were dropped here: the queue of {self._max_pending_records} was full."
            self._queue.append(LineRecord("note", "", None, self._clock(), text))

    def _capture(self, name: str, stream: Any) -> StreamWrapper:
        return _CapturedStream(
            stream, lambda line: self._accept(LineRecord(name, "", None, self._clock(), redact_text(line)))
        )

    def _stop_capture(self) -> None:
        if self._redirection is not None:
            self._redirection.undo()

    def _log_exception(self, exception: BaseException | None) -> None:
        # An uncaught exception was already printed by the interpreter, and captured.
        if exception is None or (
            "stderr" in self._captured and getattr(sys, "last_value", None) is exception
        ):
            return
        text = redact_text("".join(traceback.format_exception(exception)).rstrip("\n"))
        self._accept(LineRecord("exception", "", None, self._clock(), text))

    def _upload(self, logger: Logger) -> None:
        if self._remote_file_name is None or self._writer is None or self._path is None:
            return
        if self._writer.is_interrupted:
            return
        # No other thread writes meanwhile, so that the copy contains only whole lines.
        with self._writer.whole():
            if self._writer.written_bytes != self._uploaded_bytes:
                logger.upload_file(self._remote_file_name, self._path, overwrite=True)
                self._uploaded_bytes = self._writer.written_bytes


class _CapturedStream(StreamWrapper):
    """Stream wrapper that passes complete lines to a callback."""

    def __init__(self, stream: Any, on_line: Callable[[str], None]) -> None:
        super().__init__(stream)
        self._on_line = on_line
        self._splitter = LineSplitter()
        # Guards the splitter. Reentrant: a signal handler or finalizer may print during a print.
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.is_active:
            with self._lock:
                for line in self._splitter.feed(text):
                    self._on_line(line)
        return written

    def finish(self) -> None:
        if os.getpid() == self._owner_pid:
            with self._lock:
                for line in self._splitter.take_partial():
                    self._on_line(line)


def _writes_here(filename: str, state: State) -> bool:
    """Returns whether this rank writes the file."""
    if "{rank" in filename or "{local_rank" in filename:
        return True
    return state.local_rank == 0 if "{node_rank" in filename else state.rank == 0
