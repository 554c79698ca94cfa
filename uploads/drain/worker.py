"""The worker process: drains a spool beside the training process, and for a while after its death.

Started by `supervisor`, which documents the protocol. Has no terminal and ignores Ctrl-C; SIGTERM makes it
stop in order. Holds none of the pipes that the training process writes to: `python train.py | tee log` ends
with the training process.
"""

import contextlib
import itertools
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

from uploads.errors import SpoolOwnedError, SpoolUnusableError
from uploads.handle import Outcome
from uploads.redaction import redact
from uploads.spool.spool import Spool
from uploads.stores import open_store
from uploads.stores.uri import identity_of

from .drain import Drain
from .retry import RetryPolicy
from .supervisor import WorkerConfig

__all__ = ["main"]

_LOCK_WAIT_SECONDS = 0.2
_PARENT_CHECK_SECONDS = 5.0
_HEARTBEAT_SECONDS = 5.0
_TERMINATE_SECONDS = 10.0
_TRIES_PER_IDLE = 10  # While another process has the spool.
_BUFFER_BYTES = 1 << 16
_STANDARD_STREAMS = 1, 2  # Standard output and standard error.


class _Messenger(logging.Handler):
    """Sends messages and log records to the training process without ever waiting for it.

    If the training process is stopped or slow, messages that don't fit are dropped. Once it reads again, a
    message asks it to look into the spool. The handler's lock guards the buffer.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.WARNING)
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._buffer = b""
        self._has_dropped = False

    def send(self, *messages: dict[str, Any]) -> None:
        """Writes the messages after those that could not be written yet."""
        with self.lock or threading.RLock():
            self._write()
            if self._has_dropped and not self._buffer:
                messages = ({"idle": True}, *messages)
                self._has_dropped = False
            for message in messages:
                if len(self._buffer) < _BUFFER_BYTES:
                    self._buffer += json.dumps(message).encode() + b"\n"
                else:
                    self._has_dropped = True
            self._write()

    def emit(self, record: logging.LogRecord) -> None:
        self.send({"log": [record.levelno, record.getMessage()]})

    def settled(self, folder: str, outcome: Outcome) -> None:
        self.send({"settled": outcome.to_json(), "folder": folder})

    def idle(self) -> None:
        self.send({"idle": True})

    def _write(self) -> None:
        try:
            while self._buffer:
                self._buffer = self._buffer[os.write(self._descriptor, self._buffer) :]
        except BlockingIOError:
            pass  # The training process is stopped, or slow.
        except OSError:
            self._buffer = b""  # It has ended; the outcomes are on disk.


def main() -> None:
    """Reads the configuration from standard input, then uploads until told to stop or orphaned too long.

    The first argument is the descriptor for messages, because imported modules may print to standard output.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: commands.put({"stop": _TERMINATE_SECONDS}))
    messenger = _Messenger(int(sys.argv[1]))
    logging.getLogger().addHandler(messenger)
    _close_inherited_pipes()
    threading.Thread(
        target=_send_heartbeats, args=(messenger,), name="uploads-heartbeat", daemon=True
    ).start()
    try:
        _work(commands, messenger)
    except Exception:  # noqa: BLE001  # sent to the training process: there is no standard error
        messenger.send(
            {"log": [logging.ERROR, f"the upload worker failed: {redact(traceback.format_exc())}"]}
        )
        sys.exit(1)


def _send_heartbeats(messenger: _Messenger) -> None:
    while True:
        messenger.send({})
        time.sleep(_HEARTBEAT_SECONDS)


def _close_inherited_pipes() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _STANDARD_STREAMS:
        os.dup2(null, descriptor)
    os.close(null)


def _work(commands: queue.SimpleQueue[dict[str, Any]], messenger: _Messenger) -> None:
    lines = open(0, "rb", closefd=False)  # noqa: SIM115  # not sys.stdin, which the interpreter locks at exit
    text = lines.readline()
    if not text.endswith(b"\n"):
        return  # The training process died before it sent the configuration.
    config = WorkerConfig.from_json(json.loads(text))
    store = open_store(config.store_uri, **config.store_options)
    if config.store_identity and identity_of(store.uri()) != config.store_identity:
        raise SpoolUnusableError(
            f"the worker opened the store {identity_of(store.uri())} instead of {config.store_identity}: "
            "its environment differs"
        )
    drain = Drain(
        Spool(config.spool),
        store,
        workers=config.workers,
        policy=RetryPolicy(**config.policy),  # type: ignore[arg-type]  # counts are whole numbers in JSON too
        on_settled=messenger.settled,
        on_idle=messenger.idle,
        role="worker",
    )
    threading.Thread(target=_listen, args=(lines, commands), name="uploads-commands", daemon=True).start()
    if _take_over(drain, commands, messenger):
        messenger.send({"owner": os.getpid()})
        _run_commands(drain, commands, messenger, config.timeouts.grace_seconds)


def _listen(lines: BinaryIO, commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queues the commands; end of file means that the training process has ended."""
    for line in lines:
        commands.put(json.loads(line))
    commands.put({"orphaned": True})


def _take_over(drain: Drain, commands: queue.SimpleQueue[dict[str, Any]], messenger: _Messenger) -> bool:
    """Starts the drain as soon as no earlier worker and no `uploads resume` has the spool.

    The other process sends no messages to the training process, so this one asks it to look into the spool
    meanwhile. Returns False if it received the command to stop.
    """
    for attempt in itertools.count(1):
        try:
            drain.start()
        except SpoolOwnedError:
            if attempt % _TRIES_PER_IDLE == 0:
                messenger.idle()
            try:
                command = commands.get(timeout=_LOCK_WAIT_SECONDS)
            except queue.Empty:
                continue
            if "stop" in command or "orphaned" in command:
                return False
        else:
            return True
    return False


def _run_commands(
    drain: Drain, commands: queue.SimpleQueue[dict[str, Any]], messenger: _Messenger, grace_seconds: float
) -> None:
    parent = os.getppid()
    while True:
        try:
            command = commands.get(timeout=_PARENT_CHECK_SECONDS)
        except queue.Empty:
            messenger.send()  # Messages that did not fit before.
            # A forked sibling may keep the pipe open after the death of the parent.
            command = {} if os.getppid() == parent else {"orphaned": True}
        folders = []
        while "add" in command:  # Together, because each call waits for the uploading threads.
            folders.append(command["add"])
            try:
                command = commands.get_nowait()
            except queue.Empty:
                command = {}
        if folders:
            drain.add(folders)
        if "rescan" in command:
            drain.rescan()
        elif "stop" in command:
            drain.stop(command["stop"])
            return
        elif "orphaned" in command:
            _finish(drain, commands, grace_seconds)
            return


def _finish(drain: Drain, commands: queue.SimpleQueue[dict[str, Any]], grace_seconds: float) -> None:
    """Uploads the rest after the end of the training process, within the grace period."""
    drain.rescan()
    deadline = time.monotonic() + grace_seconds
    while not drain.wait_idle(_LOCK_WAIT_SECONDS) and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            if "stop" in commands.get_nowait():
                break
    drain.stop()


if __name__ == "__main__":
    main()
