"""Appends whole lines to one file from one background thread, so that whoever logs never waits for a disk.

The queue between is bounded: what does not fit is not accepted, and counted. What was accepted is written, at the latest
by `close`.
"""

import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import deque

__all__ = ["LineWriter", "json_or_note", "open_appending", "open_new"]

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
    tail = b""
    while len(tail) < size and b"\n" not in tail:
        start = max(size - len(tail) - _TAIL_BYTES, 0)
        tail = os.pread(descriptor, size - len(tail) - start, start) + tail
    torn = tail.rpartition(b"\n")[2]
    if not torn:
        return
    line = torn.decode("utf-8", "surrogateescape")
    complete = torn_line(line)
    if complete != line:
        os.ftruncate(descriptor, size - len(torn))
        os.write(descriptor, complete.encode("utf-8", "surrogateescape"))
    os.write(descriptor, b"\n")
