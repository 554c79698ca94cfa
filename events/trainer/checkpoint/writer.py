"""Writes snapshots in the background: small ones in a thread, large ones in a separate process.

The process is a fresh interpreter, because a fork of a training process would inherit its locks and its GPU.
It takes a second or two to import torch, but nothing waits for it, because the data lies in shared memory.
One process is kept for the whole run and replaced when it dies.

The two talk over a pair of sockets, using `multiprocessing.connection`. To the process: `("buffer",
identifier, bytes)` followed by the descriptor of the memory, once for each buffer, and `("write", Request,
StateSnapshot)`.
From the process, for each request: a `Written`, or an `OSError`, or another exception as text. The process
ends with the socket, and writes nothing more once the training process has ended. It runs at a lower priority
(`nice`).
"""

import concurrent.futures
import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch

from events.errors import CheckpointError

from .files import AbandonedError, Written, sweep_file, write_checkpoint
from .snapshot import SnapshotBuffer, StateSnapshot, rebuild

__all__ = ["BackgroundWriter", "Request", "in_thread"]

_log = logging.getLogger("events")

_PARENT_CHECK_SECONDS = 5.0
_END_SECONDS = 5.0
_KILL_SECONDS = 5.0
_LOOK_SECONDS = 0.5
# Leaves nine tenths of a contended processor to training.
_NICE = 10


def in_thread(name: str, call: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
    """Calls a function in a thread that the end of the interpreter doesn't wait for.

    If no thread can be started, for lack of memory, this thread calls it.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised by `Future.result`
            future.set_exception(error)

    try:
        # Not a pool: at exit Python would wait for its threads, even on a dead file system.
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return future


@attrs.frozen
class Request:
    """A file to write.

    Attributes:
        path: the file.
        pointer: the path and the text of the pointer, or None.
        surplus: older files to remove once it is complete, with their identifiers.
    """

    path: Path
    pointer: tuple[Path, str] | None = None
    surplus: tuple[tuple[Path, str], ...] = ()

    def sweep(self) -> None:
        """Removes the half-written files of a killed process."""
        sweep_file(self.path)
        if self.pointer is not None:
            sweep_file(self.pointer[0])

    def write(self, values: Any, is_wanted: Callable[[], bool] = lambda: True) -> Written:
        """Writes the file; see `write_checkpoint`."""
        return write_checkpoint(
            values, self.path, pointer=self.pointer, surplus=self.surplus, is_wanted=is_wanted
        )


class BackgroundWriter:
    """Writes one snapshot at a time; the lock guards the process and the connection to it.

    No call waits for the process for longer than a few seconds, because it may be stopped or wait for a dead
    disk. Callers limit their wait for a file, and then call `give_up`.

    Args:
        process_bytes: the effort from which a process writes a snapshot, and not a thread.
    """

    def __init__(self, process_bytes: int) -> None:
        from uploads.disk import call_in_forked_children

        self._process_bytes = process_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._sent_buffer = 0
        self._is_given_up = False
        call_in_forked_children(self._forget_after_fork)

    @property
    def pid(self) -> int | None:
        """The id of the process, or None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self, effort: int) -> None:
        """Starts the process if snapshots of this effort need it; does not wait for it. Any thread.

        If it can't be started, a thread writes instead.
        """
        if effort >= self._process_bytes:
            with self._lock, contextlib.suppress(OSError):
                self._connect()

    def write(
        self,
        request: Request,
        snapshot: StateSnapshot,
        buffer: SnapshotBuffer,
        wait: Callable[[], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> "concurrent.futures.Future[Written]":
        """Writes a file in the background; the buffer must not change before the future is done.

        Args:
            request: the file to write.
            snapshot: its content.
            buffer: the memory of the snapshot.
            wait: called in the background before the memory is read.
            is_wanted: whether the file is still wanted; asked again and again.

        Returns:
            The future; its exception is an `OSError` if the file could not be written.
        """

        def write() -> Written:
            wait()
            written = None
            # After a process was given up, another is started, and the next file doesn't wait for it.
            is_late, self._is_given_up = self._is_given_up, False
            if is_late:
                self.start(snapshot.effort)
            elif snapshot.effort >= self._process_bytes:
                written = self._write_in_process(request, snapshot, buffer, is_wanted)
            return request.write(rebuild(snapshot, buffer.memory), is_wanted) if written is None else written

        return in_thread("checkpoint-writer", write)

    def give_up(self) -> None:
        """Kills the process, if any, after `is_wanted` has become false; does not wait. Any thread.

        The future is done soon after, unless a thread writes and waits for the disk.
        """
        process = self._process
        if process is not None:
            self._is_given_up = True
            process.kill()

    def close(self) -> None:
        """Ends the process; blocks for a few seconds at most."""
        if not self._lock.acquire(timeout=_END_SECONDS):  # A request is being sent to a hanging process.
            self.give_up()
            if not self._lock.acquire(timeout=_KILL_SECONDS):
                _log.warning(
                    "the process that writes checkpoints (pid %s) hangs and is left behind", self.pid
                )
                return
        try:
            self._disconnect()
        finally:
            self._lock.release()

    def _write_in_process(
        self, request: Request, snapshot: StateSnapshot, buffer: SnapshotBuffer, is_wanted: Callable[[], bool]
    ) -> Written | None:
        """Returns None if the process died, can't be started, or can't have the memory.

        Raises:
            AbandonedError: the file is no longer wanted.
        """
        if buffer.descriptor is None:
            return None
        with self._lock:
            try:
                connection = self._connect()
                # Checked once the process is known, which `give_up` kills after `is_wanted` turned false.
                if not is_wanted():
                    raise AbandonedError
                if self._sent_buffer != buffer.identifier:
                    connection.send(("buffer", buffer.identifier, len(buffer.memory)))
                    reduction.send_handle(connection, buffer.descriptor, os.getpid())
                    self._sent_buffer = buffer.identifier
                connection.send(("write", request, snapshot))
            except OSError as error:
                _log.debug("the process that writes checkpoints: %s", error)
                self._disconnect()
                return None
        try:
            answer = self._answer(connection)
        except (EOFError, OSError):
            with self._lock:
                pid, code = self.pid, self._disconnect()
            request.sweep()
            if not is_wanted():
                raise AbandonedError from None
            _log.warning(
                "the process that writes checkpoints (pid %s) ended with exit code %s; "
                "a thread writes the checkpoint again.",
                pid,
                code,
            )
            return None
        if isinstance(answer, Written):
            return answer
        raise answer if isinstance(answer, OSError) else CheckpointError(str(answer))

    def _answer(self, connection: Connection) -> object:
        """Returns the answer of the process.

        Raises:
            EOFError: it has ended. The socket alone doesn't show that, because a child that was forked during
                its start has the other end too.
        """
        process = self._process
        while not connection.poll(_LOOK_SECONDS):
            if process is None or process.poll() is not None:
                raise EOFError
        return connection.recv()

    def _connect(self) -> Connection:
        """Returns the connection to the process, and starts one if necessary."""
        if self._connection is not None:
            return self._connection
        home = str(Path(__file__).resolve().parents[3])
        ours, theirs = socket.socketpair()
        try:
            # -P: a folder called `events` in the working directory must not stand in for this package.
            # A new session: Ctrl-C in the terminal is meant for the training process.
            # No streams: `python train.py 2>&1 | tee log` must end with the training process.
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")])),
                    # Otherwise it would take memory on the GPU.
                    "CUDA_VISIBLE_DEVICES": "",
                },
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())
        self._sent_buffer = 0
        return self._connection

    def _disconnect(self) -> int | None:
        """Ends the process, if there is one; returns its exit code."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process, self._process = self._process, None
        if process is None:
            return None
        if not self._sent_buffer:  # It has no work, and may still be importing torch.
            process.kill()
        for seconds in (_END_SECONDS, _KILL_SECONDS):
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        # It waits for a disk, and ends when the disk responds.
        _log.warning("the process that writes checkpoints (pid %s) hangs and is left behind", process.pid)
        return None

    def _forget_after_fork(self) -> None:
        """Closes the socket in a forked child, so that the process notices the end of the parent."""
        self._lock = threading.Lock()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.returncode = 0  # Not a child of this process: no wait, no ResourceWarning.
            self._process = None


def main(arguments: list[str]) -> None:
    """Serves write requests until the training process ends.

    Args:
        arguments: the descriptor of the socket, and the id of the training process.
    """
    from uploads.disk import give_way

    # Schedulers signal all processes of a job, but the training process still has a checkpoint to save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    give_way(_NICE)
    connection, parent = Connection(int(arguments[0])), int(arguments[1])
    memory = torch.empty(0, dtype=torch.uint8)
    # A forked sibling may keep the socket open after the death of the parent.
    while os.getppid() == parent:
        if not connection.poll(_PARENT_CHECK_SECONDS):
            continue
        message = connection.recv()
        if message[0] == "buffer":
            descriptor = reduction.recv_handle(connection)
            memory = torch.frombuffer(mmap.mmap(descriptor, message[2]), dtype=torch.uint8)
            os.close(descriptor)
        else:
            _, request, snapshot = message
            connection.send(_answer_to(request, snapshot, memory, lambda: os.getppid() == parent))


def _answer_to(
    request: Request, snapshot: StateSnapshot, memory: torch.Tensor, is_wanted: Callable[[], bool]
) -> object:
    try:
        return request.write(rebuild(snapshot, memory), is_wanted)
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error), str(request.path))
    except AbandonedError:
        raise SystemExit(0) from None
    except Exception:  # noqa: BLE001  # told to the training process
        return traceback.format_exc()


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):  # The training process has ended.
        main(sys.argv[1:])
