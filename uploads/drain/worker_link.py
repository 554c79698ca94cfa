"""The training process's end of a worker process: starts it, tells it what is new, hears what became of it, replaces it when it dies.

Lines of JSON over two pipes. To the worker, over its standard input: first what to do (`WorkerOrder`), then
`{"add": folder}`, `{"rescan": true}` and `{"stop": seconds}`; the end of the pipe tells it that we are gone. From it, over a
pipe of which nothing but the worker's own code knows: `{"owner": pid}` once it has the spool,
`{"settled": outcome, "folder": name}`, `{"idle": true}` and `{"log": [level, text]}`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

from uploads.handle import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["WorkerLink", "WorkerOrder"]

_log = logging.getLogger("uploads")

_RESTART_CAP_SECONDS = 60.0
_READ_BYTES = 1 << 16
_GATHER_SECONDS = 0.01
_LONG_SECONDS = 60.0
_END_SECONDS = 10.0
_FIRST_FREE = 3  # Below are the standard streams, which a child has for itself.


@attrs.frozen
class WorkerOrder:
    """What a worker process is to do. Secrets among the options travel through the pipe, never through a file or argv.

    Attributes:
        spool: The folder.
        store_uri: For `open_store`.
        store_options: For `open_store`.
        workers: Uploads at the same time.
        grace_seconds: How long to go on after the training process died.
        policy: What `RetryPolicy` takes; its defaults where it is empty.
        store_identity: What `identity_of` must say of the store that is opened; empty for anything.
    """

    spool: str
    store_uri: str = attrs.field(repr=False)
    store_options: dict[str, Any] = attrs.field(repr=False)
    workers: int
    grace_seconds: float
    policy: dict[str, float] = attrs.field(factory=dict)
    store_identity: str = ""


class WorkerLink:
    """Supervises one worker. The lock guards the process and its input; one daemon thread reads its output.

    Args:
        order: For the worker.
        on_settled: Called with the folder and the outcome of each entry, from the reading thread.
        look_up: Called when a worker has taken the spool, and when it finds nothing there: what was not told must be looked up.
        popen: Starts a process; injected by tests.
    """

    def __init__(
        self,
        order: WorkerOrder,
        *,
        on_settled: Callable[[str, Outcome], None],
        look_up: Callable[[], None],
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self._order = order
        self._popen = popen
        self._on_settled = on_settled
        self._look_up = look_up
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: BinaryIO | None = None
        self._missed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="uploads-worker-link", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the worker that lives now."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the worker and returns; it takes about a second to import its client.

        Raises:
            OSError: No process can be started.
            RuntimeError: No thread can be started.
        """
        self._spawn()
        try:
            self._thread.start()
        except BaseException:
            self.stop(0.0)
            raise

    def add(self, folders: Iterable[str]) -> None:
        """Tells the worker of new entries. Never waits: what does not fit into the pipe the worker finds by itself."""
        for folder in folders:
            self._tell({"add": folder})

    def rescan(self) -> None:
        """Has the worker look for entries that nobody announced."""
        self._tell({"rescan": True})

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Has the worker give the spool back and end; kills it when that takes longer."""
        self._stopping.set()
        self._tell({"stop": timeout_seconds})
        with self._lock:
            process = self._process
        if process is None:
            return
        _end(process, timeout_seconds + 1.0)
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds + 1.0)
        with self._lock:
            last = self._process or process  # A successor, where one was being started meanwhile.
        _end(last, 0.0)
        if last.stdin is not None:
            last.stdin.close()
        if self._answers is not None and not self._thread.is_alive():
            self._answers.close()

    def forget_after_fork(self) -> None:
        """In a forked child: closes the pipe, so that the worker sees our parent's death and not ours."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._answers):
                if pipe is not None:
                    pipe.close()
            self._process.returncode = 0  # Not our child: nothing to wait for, nothing to warn of.
            self._process = None

    def _spawn(self) -> None:
        package_home = str(Path(__file__).resolve().parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH")])),
        }
        # -P: a folder called `uploads` in the working directory must not stand in for this package.
        # A session of its own: Ctrl-C in the terminal is for the training process.
        # A pipe of its own for the answers: a `sitecustomize` may print to standard output.
        with contextlib.ExitStack() as afterwards:
            ours, low = os.pipe()
            afterwards.callback(os.close, low)
            answers = open(ours, "rb", buffering=0)  # noqa: PTH123, SIM115  # a descriptor; the reading thread closes it
            theirs = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
            afterwards.callback(os.close, theirs)
            try:
                process = self._popen(  # our own interpreter and module
                    [sys.executable, "-P", "-m", "uploads.drain.worker", str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                    bufsize=0,
                    pass_fds=(theirs,),
                )
            except BaseException:
                answers.close()
                raise
        assert process.stdin is not None  # noqa: S101  # asked for above
        with contextlib.suppress(BrokenPipeError):  # It died already, which `_listen` notices.
            process.stdin.write(json.dumps(attrs.asdict(self._order)).encode() + b"\n")
        os.set_blocking(process.stdin.fileno(), False)
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
            self._process, self._answers = process, answers
            self._missed = False
        # Since we looked whether to go on `stop` may have spoken to the one before; it waits for this thread.
        if self._stopping.is_set():
            self._tell({"stop": 0.0})

    def _tell(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._process is None or self._process.stdin is None or self._process.stdin.closed:
                return
            try:
                if self._missed:
                    self._write({"rescan": True})
                    self._missed = False
                self._write(message)
            except BlockingIOError:
                self._missed = True
            except OSError:
                pass  # It died; the next one lists the spool.

    def _write(self, message: dict[str, Any]) -> None:
        """One line, which a pipe takes whole or not at all, being shorter than PIPE_BUF."""
        assert self._process is not None  # noqa: S101  # _tell looked
        assert self._process.stdin is not None  # noqa: S101  # as above
        os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def _supervise(self) -> None:
        deaths = 0
        while True:
            lived = self._listen()
            if self._stopping.is_set():
                return
            deaths = 1 if lived else deaths + 1
            pause_seconds = self._pause_seconds(deaths)
            _log.warning(
                "the upload worker ended with exit code %s and is started again in %.0f s; nothing is lost",
                self._process.returncode if self._process is not None else None,
                pause_seconds,
            )
            while not self._stopping.wait(pause_seconds):
                try:
                    self._spawn()
                except OSError as error:
                    deaths += 1
                    pause_seconds = self._pause_seconds(deaths)
                    _log.error(
                        "the upload worker could not be started: %s", error
                    )  # the traceback says nothing more
                else:
                    break
            else:
                return

    @staticmethod
    def _pause_seconds(deaths: int) -> float:
        """None after the first death, then 1, 3, 7 … 60 seconds."""
        return float(min(_RESTART_CAP_SECONDS, 2.0 ** min(deaths - 1, 32) - 1.0))

    def _listen(self) -> bool:
        """Hears the worker until it ends; whether it settled anything, or lived long."""
        with self._lock:
            process, answers = self._process, self._answers
        if process is None or answers is None:
            return False
        started = time.monotonic()
        lived = False
        rest = b""  # A kill tears a line that is longer than the pipe takes at once.
        with answers:
            while chunk := answers.read(_READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    lived = self._hear(line) or lived
                # Each waking takes the interpreter from training: those of a burst are heard together.
                self._stopping.wait(_GATHER_SECONDS)
        if not self._stopping.is_set():  # Else `stop` says how long it may take.
            _end(process, _END_SECONDS)
        return lived or time.monotonic() - started > _LONG_SECONDS

    def _hear(self, line: bytes) -> bool:
        """Does what a line asks for; whether it told of an entry that has settled. The next line is heard whatever this one causes."""
        try:
            message = json.loads(line)
            if "settled" in message:
                self._on_settled(message["folder"], Outcome.from_json(message["settled"]))
                return True
            if "log" in message:
                level, text = message["log"]
                _log.log(level, "%s", text)
            elif "owner" in message or "idle" in message:
                self._look_up()
        except Exception:  # noqa: BLE001  # a user's handler of log records, a spool that cannot be listed now
            _complain("a message of the upload worker could not be dealt with")
        return False


def _complain(text: str) -> None:
    """Logs with the traceback, whatever the user's handlers do."""
    with contextlib.suppress(Exception):
        _log.exception("%s", text)


def _end(process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
