"""Writes what training says to a file, in lines for people or as JSON lines.

A call in the training thread puts a record into a queue; one thread renders and appends. See `docs/destinations.md` for
the lines.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from destinations.base import LoggerDestination
from events import Logger, State, WriteRate, check_run_name, format_name, redact_text
from uploads.disk import end_of_last_line

from .formatting import exact, header, one_line, plain
from .streams import Redirection, StandIn

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

_LONGEST_LINE = 1 << 20
# What JSON may hold as it is, though some readers end a line there.
_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
_SINGULAR = {"metrics": "metric", "hyperparameters": "hyperparameter", "traces": "trace"}


class LineRecord(NamedTuple):
    """What becomes one line, or several.

    Attributes:
        kind: "metrics", "hyperparameters", "table", "text", "traces", "stdout", "stderr", "exception", "note", or one of
            the media: "images", "audio", "video", "histogram", "point_cloud".
        name: the name given, or "".
        step: the step, or None for what has none.
        time: when it was logged, in seconds since the epoch (Unix time).
        value: a dict of plain values, or a text.
    """

    kind: str
    name: str
    step: int | None
    time: float
    value: Any


def text_lines(record: LineRecord) -> str:
    """Returns lines such as `[metric][batch=3]: loss/train: 0.25`; each number reads back as the same number."""
    kind = _SINGULAR.get(record.kind, record.kind)
    start = f"[{kind}]{header({} if record.step is None else {'batch': record.step})}: "
    return "".join(f"{start}{part}\n" for part in _parts(record))


def _parts(record: LineRecord) -> Iterator[str]:
    """Returns what stands on each line after its prefix."""
    value = record.value
    if record.kind == "hyperparameters":
        value = dict(_flat(value))
    if record.kind in _SINGULAR:
        yield from (f"{one_line(name)}: {exact(item)}" for name, item in value.items())
    elif isinstance(value, str):
        name = f"{one_line(record.name)}: " if record.kind == "text" else ""
        yield from (f"{name}{one_line(line)}" for line in value.split("\n"))
    else:
        yield f"{one_line(record.name)}: {exact(value)}"


def _flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in parameters.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def json_line(record: LineRecord) -> str:
    """Returns one line of strict JSON.

    `kind` and `time` are always there, `step` and `name` where the record has them. What was logged is under the kind
    (`metrics`, `hyperparameters`, `traces`, `text`, `stdout`, …); a table is under `columns` and `rows`, media under the
    names of their arguments. Floats are written so that they read back as the same float.
    """
    fields: dict[str, Any] = {"kind": record.kind, "time": record.time}
    if record.step is not None:
        fields["step"] = record.step
    if record.name or record.kind not in {*_SINGULAR, "stdout", "stderr", "exception", "note"}:
        fields["name"] = record.name
    fields |= record.value if record.kind not in _SINGULAR and isinstance(record.value, dict) else {}
    if record.kind == "metrics" or not isinstance(record.value, dict):
        fields[record.kind] = plain(record.value)
    elif record.kind in _SINGULAR:
        fields[record.kind] = record.value
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text if text.isprintable() else text.translate(_JSON_CONTROLS)}\n"


class LineSplitter:
    """Makes lines of pieces of text as they come out of one stream.

    A carriage return begins the line again, as on a terminal: of a progress bar, its last state is left. A line of more
    than a million characters is cut into several.
    """

    def __init__(self) -> None:
        self._partial = ""

    def feed(self, text: str) -> list[str]:
        """Returns the lines that the text completes, without their ends."""
        if "\n" not in text and len(self._partial) + len(text) < _LONGEST_LINE:
            self._partial = _overwritten(self._partial + text)
            return []
        *lines, partial = (self._partial + text).split("\n")
        self._partial = _overwritten(partial)
        while len(self._partial) >= _LONGEST_LINE:
            lines.append(self._partial[:_LONGEST_LINE])
            self._partial = self._partial[_LONGEST_LINE:]
        pieces = (_cut(_overwritten(line).rstrip("\r")) for line in lines)
        return list(itertools.chain.from_iterable(pieces))

    def rest(self) -> list[str]:
        """Returns what has no end yet, and forgets it."""
        rest, self._partial = self._partial.rstrip("\r"), ""
        return [rest] if rest else []


def _overwritten(line: str) -> str:
    """Returns what a line is after its carriage returns; one at its end has overwritten nothing yet, and stays."""
    body = line.rstrip("\r")
    end = "\r" if len(body) < len(line) else ""
    return body[body.rfind("\r") + 1 :] + end


def _cut(line: str) -> list[str]:
    return [line[start : start + _LONGEST_LINE] for start in range(0, max(len(line), 1), _LONGEST_LINE)]


_log = logging.getLogger("destinations")

# A thread that renders holds the interpreter: in small pieces, training hardly notices.
_RECORDS_PER_WRITE = 64
_TAIL_BYTES = 1 << 16
_CLOSE_SECONDS = 30.0


class LineWriter:
    """Takes records from a queue, renders them, and appends the lines to a file.

    **Threading.** `wake`, `flush` and `close` may be called from any thread. One lock guards the file and the bytes that
    are not written yet; who holds it writes.

    **After fork.** The child does nothing: neither the thread nor the file position are its own.

    Args:
        descriptor: a file that was opened to append; it is closed with the writer.
        queue: where records come from; appended to by others, emptied here.
        render: returns a record as whole lines.
        flush_seconds: the longest that a record waits in memory.
    """

    def __init__(
        self, descriptor: int, queue: "deque[Any]", render: Callable[[Any], str], flush_seconds: float
    ) -> None:
        self._descriptor = descriptor
        self._queue = queue
        self._render = render
        self._flush_seconds = flush_seconds
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._unwritten = b""
        self._reported: set[str] = set()
        self._wake = threading.Event()
        self._is_stopping = False
        self.written_bytes = 0
        # A daemon: the interpreter would wait for any other before the run is closed at its exit, which ends this one.
        self._thread = threading.Thread(target=self._run, name="destinations-line-writer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread write now."""
        self._wake.set()

    def flush(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Writes everything that was accepted before the call.

        Raises:
            OSError: the file cannot be written; what is left is kept, and tried again.
            TimeoutError: the thread has been in one write for that long.
        """
        if os.getpid() == self._owner_pid:
            self.while_paused(lambda: None, timeout_seconds)

    def while_paused(self, act: Callable[[], None], timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Writes everything, and does something while the file stands still.

        Raises:
            OSError: as for `flush`.
            TimeoutError: as for `flush`.
        """
        if not self._lock.acquire(timeout=timeout_seconds):
            raise TimeoutError(f"text file must be written within {timeout_seconds:.0f} s, and was not.")
        try:
            self._drain()
            act()
        finally:
            self._lock.release()

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Writes everything, ends the thread, and closes the file.

        Raises:
            OSError: the file cannot be written; what is left is lost, and counted in the message.
            TimeoutError: as for `flush`.
        """
        if os.getpid() != self._owner_pid:
            return
        self._is_stopping = True
        self._wake.set()
        try:
            self.flush(timeout_seconds)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            lost = self._unwritten.count(b"\n") + len(self._queue)
            raise OSError(
                error.errno, f"text file must be writable, lost about {lost} lines: {error}"
            ) from error
        finally:
            self._thread.join(timeout_seconds)
            if not self._thread.is_alive():
                os.close(self._descriptor)

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(self._flush_seconds)
            self._wake.clear()
            with self._lock:
                try:
                    self._drain()
                except OSError as error:
                    self._report("text file cannot be written for now", error)

    def _drain(self) -> None:
        while self._unwritten or self._queue:
            if not self._unwritten:
                count = min(len(self._queue), _RECORDS_PER_WRITE)
                lines = "".join(self._rendered(self._queue.popleft()) for _ in range(count))
                # A lone surrogate has no form in UTF-8; its escape is that of JSON too.
                self._unwritten = lines.encode("utf-8", "backslashreplace")
            while self._unwritten:
                written = os.write(self._descriptor, self._unwritten)
                self._unwritten = self._unwritten[written:]
                self.written_bytes += written

    def _rendered(self, record: Any) -> str:
        try:
            return self._render(record)
        except Exception as error:  # noqa: BLE001  # one odd record must not take the others with it
            self._report("a record has no form as a line of text, and was left out", error)
            return ""

    def _report(self, what: str, error: Exception) -> None:
        line = f"{what}: {type(error).__name__}: {error}"
        if line not in self._reported:
            self._reported.add(line)
            _log.error("%s.", line)


def open_new(path: Path) -> int:
    """Returns a new file, opened to append.

    Raises:
        FileExistsError: there is one already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)


def open_appending(path: Path, torn_line: Callable[[str], str]) -> int:
    """Returns an existing file, opened to append, with its last line complete.

    A process that was killed in the middle of a write leaves a line without an end. It gets one, or gives way to what
    `torn_line` makes of it; no byte of it is thrown away unasked.

    Args:
        path: the file.
        torn_line: returns what a last line without its end is to be; the line itself where it is to stay.
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
    """Returns a line of JSON as it is, and anything else wrapped in one that holds it."""
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
        check_run_name(self._filename, state)
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
