"""The worker process: drains a spool beside the training process, and for a while after its death.

Started by `_worker_link`, which also says what the lines on the two pipes mean. Has no terminal and ignores Ctrl-C;
SIGTERM makes it end in order. Holds none of the pipes that the training process writes to: `python train.py | tee log`
ends with the training process, not with this one.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any, BinaryIO

from uploads.errors import SpoolOwnedError, SpoolUnusableError
from uploads.redaction import redact
from uploads.spool.spool import Spool
from uploads.stores import open_store
from uploads.stores.uri import identity_of

from .drain import Drain
from .retry import RetryPolicy
from .worker_link import WorkerOrder

if TYPE_CHECKING:
    from uploads.handle import Outcome

__all__ = ["main"]

_LOCK_PATIENCE_SECONDS = 0.2
_PARENT_CHECK_SECONDS = 5.0
_TERMINATE_SECONDS = 10.0
_LOOKS_PER_IDLE = 10  # While another process has the spool.
_UNREAD_BYTES = 1 << 16
_NULL = 1, 2  # Standard output and standard error.


class _Voice(logging.Handler):
    """Speaks to the training process, and never waits for it: what it does not read, since it is stopped, is left out.

    It is then told to look into the spool when it reads again. The handler's lock guards what is not written yet.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.WARNING)
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._unwritten = b""
        self._has_left_out = False

    def say(self, *messages: dict[str, Any]) -> None:
        """Writes the messages, and before them what could not be written yet."""
        with self.lock or threading.RLock():
            self._write()
            if self._has_left_out and not self._unwritten:
                messages = ({"idle": True}, *messages)
                self._has_left_out = False
            for message in messages:
                if len(self._unwritten) < _UNREAD_BYTES:
                    self._unwritten += json.dumps(message).encode() + b"\n"
                else:
                    self._has_left_out = True
            self._write()

    def emit(self, record: logging.LogRecord) -> None:
        self.say({"log": [record.levelno, record.getMessage()]})

    def settled(self, folder: str, outcome: Outcome) -> None:
        self.say({"settled": outcome.to_json(), "folder": folder})

    def idle(self) -> None:
        self.say({"idle": True})

    def _write(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        except BlockingIOError:
            pass  # It is stopped, or slow.
        except OSError:
            self._unwritten = b""  # It is gone; what matters is on the disk.


def main() -> None:
    """Reads the order from standard input and works until told to stop, or alone until the grace period is over.

    The descriptor for the answers is the first argument: anything that is imported may print to standard output.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: commands.put({"stop": _TERMINATE_SECONDS}))
    voice = _Voice(int(sys.argv[1]))
    logging.getLogger().addHandler(voice)
    _leave_inherited_pipes()
    try:
        _work(commands, voice)
    except Exception:  # noqa: BLE001  # told to the training process, since standard error is no longer ours
        voice.say({"log": [logging.ERROR, f"the upload worker failed: {redact(traceback.format_exc())}"]})
        sys.exit(1)


def _leave_inherited_pipes() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _NULL:
        os.dup2(null, descriptor)
    os.close(null)


def _work(commands: queue.SimpleQueue[dict[str, Any]], voice: _Voice) -> None:
    lines = open(0, "rb", closefd=False)  # noqa: SIM115  # not sys.stdin, which the interpreter wants to lock when it ends
    text = lines.readline()
    if not text.endswith(b"\n"):
        return  # The training process died before it said what to do.
    order = WorkerOrder(**json.loads(text))
    store = open_store(order.store_uri, **order.store_options)
    if order.store_identity and identity_of(store.uri()) != order.store_identity:
        raise SpoolUnusableError(
            f"a worker must open the store {order.store_identity}, got {identity_of(store.uri())}. Its environment has changed."
        )
    drain = Drain(
        Spool(order.spool),
        store,
        workers=order.workers,
        policy=RetryPolicy(**order.policy),  # type: ignore[arg-type]  # counts are whole numbers in JSON too
        on_settled=voice.settled,
        on_idle=voice.idle,
        role="worker",
    )
    threading.Thread(target=_listen, args=(lines, commands), name="uploads-commands", daemon=True).start()
    if _take_over(drain, commands, voice):
        voice.say({"owner": os.getpid()})
        _obey(drain, commands, voice, order.grace_seconds)


def _listen(lines: BinaryIO, commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Passes lines on; the end of the pipe is the end of the training process."""
    for line in lines:
        commands.put(json.loads(line))
    commands.put({"orphaned": True})


def _take_over(drain: Drain, commands: queue.SimpleQueue[dict[str, Any]], voice: _Voice) -> bool:
    """Waits while an earlier worker, or `uploads resume`, has the spool; it uploads new entries meanwhile.

    The training process, to which the other one does not speak, looks into the spool now and then. Returns whether the
    spool is ours; False when nobody needs us any more.
    """
    for look in itertools.count(1):
        try:
            drain.start()
        except SpoolOwnedError:
            if look % _LOOKS_PER_IDLE == 0:
                voice.idle()
            try:
                command = commands.get(timeout=_LOCK_PATIENCE_SECONDS)
            except queue.Empty:
                continue
            if "stop" in command or "orphaned" in command:
                return False
        else:
            return True
    return False


def _obey(
    drain: Drain, commands: queue.SimpleQueue[dict[str, Any]], voice: _Voice, grace_seconds: float
) -> None:
    parent = os.getppid()
    while True:
        try:
            command = commands.get(timeout=_PARENT_CHECK_SECONDS)
        except queue.Empty:
            voice.say()  # What the training process had no room for, before it was stopped or busy.
            # A forked sibling may keep the pipe open after our parent's death.
            command = {} if os.getppid() == parent else {"orphaned": True}
        if "add" in command:
            drain.add([command["add"]])
        elif "rescan" in command:
            drain.rescan()
        elif "stop" in command:
            drain.stop(command["stop"])
            return
        elif "orphaned" in command:
            _finish(drain, commands, grace_seconds)
            return


def _finish(drain: Drain, commands: queue.SimpleQueue[dict[str, Any]], grace_seconds: float) -> None:
    """What a worker does alone: everything that is left, within the grace period, unless it is told to end."""
    drain.rescan()
    deadline = time.monotonic() + grace_seconds
    while not drain.wait_idle(_LOCK_PATIENCE_SECONDS) and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            if "stop" in commands.get_nowait():
                break
    drain.stop()


if __name__ == "__main__":
    main()
