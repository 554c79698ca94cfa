"""Supervises the worker process: announces entries, receives outcomes, restarts it when it dies or hangs.

Runs in the training process, with one daemon thread that reads. Only `stop` waits for the worker.

The protocol is lines of JSON over two pipes. To the worker, over its standard input: first a `WorkerConfig`,
then `{"add": folder}`, `{"rescan": true}` and `{"stop": seconds}`; end of file means that the training
process has ended. From the worker, over a pipe of its own: `{"owner": pid}` once it has the spool,
`{"settled": outcome, "folder": name}`, `{"idle": true}`, `{"log": [level, text]}`, and `{}` every five
seconds as a heartbeat.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Self

import attrs

from uploads.arguments import Timeouts
from uploads.disk import duplicate_above
from uploads.handle import Outcome
from uploads.messages import log_error, log_safely, log_warning

from .retry import backoff_seconds

__all__ = ["WorkerConfig", "WorkerSupervisor"]

_RESTART_SECONDS = 1.0
_RESTART_CAP_SECONDS = 60.0
_READ_BYTES = 1 << 16
_BURST_SECONDS = 0.01
_LONG_LIFE_SECONDS = 60.0
_END_SECONDS = 10.0
_FIRST_FREE = 3  # A child has its own standard streams below.


@attrs.frozen
class WorkerConfig:
    """The configuration of a worker process.

    Secrets among the options go through the pipe, never to a file or argv.

    Attributes:
        spool: The folder.
        store_uri: For `open_store`.
        store_options: For `open_store`.
        workers: The number of concurrent uploads.
        timeouts: Timeouts of the queue, with the grace period of a worker whose training process died.
        policy: Arguments of `RetryPolicy`.
        store_identity: The expected `identity_of` the opened store; empty for any.
    """

    spool: str
    store_uri: str = attrs.field(repr=False)
    store_options: dict[str, Any] = attrs.field(repr=False)
    workers: int
    timeouts: Timeouts = Timeouts()
    policy: dict[str, float] = attrs.field(factory=dict)
    store_identity: str = ""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Returns the configuration of `attrs.asdict`."""
        return cls(**{**record, "timeouts": Timeouts(**record["timeouts"])})


@attrs.frozen
class _Worker:
    """A worker process, the pipe to it, and the pipe from it."""

    process: subprocess.Popen[bytes]
    commands: IO[bytes]
    answers: IO[bytes]


@attrs.define(eq=False, slots=False, repr=False)
class WorkerSupervisor:
    """Supervises one worker. The lock guards the process and its input; one daemon thread reads its output.

    Args:
        config: For the worker.
        on_settled: Called with the folder and the outcome of each entry, from the reading thread.
        look_up: Looks up outcomes that were not sent; called when a worker has locked the spool and when it
            is idle.
        silence_seconds: After this long without a message the worker counts as hung and is killed.
        popen: Starts a process; injected by tests.
    """

    _config: WorkerConfig
    _on_settled: Callable[[str, Outcome], None] = attrs.field(kw_only=True)
    _look_up: Callable[[], None] = attrs.field(kw_only=True)
    _silence_seconds: float = attrs.field(default=120.0, kw_only=True)
    _popen: Callable[..., subprocess.Popen[bytes]] = attrs.field(default=subprocess.Popen, kw_only=True)

    def __attrs_post_init__(self) -> None:
        # A signal handler may submit a file while this thread holds it.
        self._lock = threading.RLock()
        self._worker: _Worker | None = None
        self._has_missed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="uploads-worker-link", daemon=True)

    def start(self) -> None:
        """Starts the worker; does not wait for the second or so that it takes to import its client.

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
        """Announces new entries to the worker.

        Never blocks: if the pipe is full, a later message asks the worker to rescan.
        """
        for folder in folders:
            self._send({"add": folder})

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Tells the worker to stop; kills it after the timeout."""
        self._stopping.set()
        self._send({"stop": timeout_seconds})
        worker = self._worker
        if worker is None:
            return
        _end(worker.process, timeout_seconds + 1.0)
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds + 1.0)
        worker = self._worker or worker  # A replacement may have been started meanwhile.
        _end(worker.process, 0.0)
        worker.commands.close()
        if not self._thread.is_alive():
            worker.answers.close()

    def forget_after_fork(self) -> None:
        """Closes the pipes in a forked child, so that the worker notices the end of the parent."""
        if self._worker is not None:
            self._worker.commands.close()
            self._worker.answers.close()
            self._worker.process.returncode = 0  # Not a child of this process: no wait, no ResourceWarning.
            self._worker = None

    def _spawn(self) -> None:
        package_home = str(Path(__file__).resolve().parents[2])
        # Each thread has an arena of its own in glibc, and each arena keeps the size of the largest files
        # that it held: a worker took 76 MiB for files of 6 MiB, and takes 51 with one arena; 185 and 130 for
        # files in parts, with no more processor time.
        environment = {
            "MALLOC_ARENA_MAX": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH")])),
        }
        # -P: a folder called `uploads` in the working directory must not stand in for this package.
        # A session of its own: Ctrl-C in the terminal is for the training process.
        # A pipe of its own for the answers: a `sitecustomize` may print to standard output.
        with contextlib.ExitStack() as afterwards:
            ours, low = os.pipe()
            afterwards.callback(os.close, low)
            answers = open(ours, "rb", buffering=0)  # noqa: PTH123, SIM115  # `_listen` closes it
            theirs = duplicate_above(low, _FIRST_FREE)
            afterwards.callback(os.close, theirs)
            try:
                process = self._popen(
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
        with contextlib.suppress(BrokenPipeError):  # It died already; `_listen` notices.
            process.stdin.write(_line(attrs.asdict(self._config)))
        os.set_blocking(process.stdin.fileno(), False)
        with self._lock:
            if self._worker is not None:
                self._worker.commands.close()
            self._worker = _Worker(process, process.stdin, answers)
            self._has_missed = False
        # `stop` may have been called meanwhile, for the worker before; it waits for this thread.
        if self._stopping.is_set():
            self._send({"stop": 0.0})

    def _send(self, message: dict[str, Any]) -> None:
        """Writes one line; shorter than PIPE_BUF, it is written whole or not at all."""
        with self._lock:
            if self._worker is None or self._worker.commands.closed:
                return
            descriptor = self._worker.commands.fileno()
            try:
                if self._has_missed:
                    os.write(descriptor, _line({"rescan": True}))
                    self._has_missed = False
                os.write(descriptor, _line(message))
            except BlockingIOError:
                self._has_missed = True
            except OSError:
                pass  # It died; its replacement lists the spool.

    def _supervise(self) -> None:
        consecutive_deaths = 0
        while True:
            lived = self._listen()
            if self._stopping.is_set():
                return
            consecutive_deaths = 1 if lived else consecutive_deaths + 1
            pause_seconds = self._pause_seconds(consecutive_deaths)
            log_warning(
                "the upload worker ended with exit code %s; restarting in %.0f s; nothing is lost",
                self._worker and self._worker.process.returncode,
                pause_seconds,
            )
            while not self._stopping.wait(pause_seconds):
                try:
                    self._spawn()
                except OSError as error:
                    consecutive_deaths += 1
                    pause_seconds = self._pause_seconds(consecutive_deaths)
                    log_error("cannot start the upload worker: %s", error)
                else:
                    break
            else:
                return

    @staticmethod
    def _pause_seconds(consecutive_deaths: int) -> float:
        """Returns 0 after the first death, then 1, 2, 4 … 60."""
        if consecutive_deaths <= 1:
            return 0.0
        return backoff_seconds(consecutive_deaths - 1, _RESTART_SECONDS, _RESTART_CAP_SECONDS)

    def _listen(self) -> bool:
        """Reads from the worker until it ends; returns whether it settled anything, or lived long."""
        worker = self._worker
        if worker is None:
            return False
        started = time.monotonic()
        lived = False
        rest = b""  # A kill may cut a long line.
        poller = select.poll()
        poller.register(worker.answers, select.POLLIN)
        with worker.answers:
            while True:
                # The kernel looks once more at the timeout, so messages that arrived during a SIGSTOP of this
                # process are read.
                if not poller.poll(self._silence_seconds * 1000):
                    self._kill_hung(worker.process)
                    continue
                chunk = worker.answers.read(_READ_BYTES)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    lived = self._handle(line) or lived
                # Each wake-up takes the interpreter from training, so a burst is read at once.
                self._stopping.wait(_BURST_SECONDS)
        if not self._stopping.is_set():  # `stop` has a timeout of its own.
            _end(worker.process, _END_SECONDS)
        return lived or time.monotonic() - started > _LONG_LIFE_SECONDS

    def _kill_hung(self, process: subprocess.Popen[bytes]) -> None:
        if self._stopping.is_set() or process.poll() is not None:
            return
        log_warning(
            "the upload worker with pid %d has not responded for %.0f s; killing it; nothing is lost",
            process.pid,
            self._silence_seconds,
        )
        process.kill()  # SIGKILL also ends a process that SIGSTOP has stopped.

    def _handle(self, line: bytes) -> bool:
        """Handles one message; returns whether an entry has settled.

        Exceptions are logged, so that the next message is read.
        """
        try:
            message = json.loads(line)
            if "settled" in message:
                self._on_settled(message["folder"], Outcome.from_json(message["settled"]))
                return True
            if "log" in message:
                level, text = message["log"]
                log_safely(level, "%s", text)
            elif "owner" in message or "idle" in message:
                self._look_up()
        except Exception as error:  # noqa: BLE001  # such as a spool that cannot be listed
            log_error("cannot handle a message of the upload worker", error=error)
        return False


def _end(process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
