"""The worker process: drains a spool beside the training process, and for a while after its death.

Started by `_worker_link`, which also says what the lines on the two pipes mean. Has no terminal and ignores Ctrl-C;
SIGTERM makes it end in order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from ._worker_link import WorkerOrder
from .drain import Drain
from .errors import SpoolOwned, SpoolUnusable
from .retry import RetryPolicy
from .spool import Spool
from .stores import open_store
from .stores.uris import identity_of

if TYPE_CHECKING:
    from .outcome import Outcome

__all__ = ["main"]

_LOCK_PATIENCE_SECONDS = 0.2
_PARENT_CHECK_SECONDS = 5.0
_TERMINATE_SECONDS = 10.0


class _Voice(logging.Handler):
    """Speaks to the training process, as long as it listens. The handler's lock keeps lines whole."""

    def say(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self.lock or threading.RLock():
            try:
                while data:
                    data = data[os.write(1, data) :]
            except OSError:
                pass  # It is gone; what matters is on the disk.

    def emit(self, record: logging.LogRecord) -> None:
        self.say({"log": [record.levelno, record.getMessage()]})

    def settled(self, folder: str, outcome: Outcome) -> None:
        self.say({"settled": outcome.to_json(), "folder": folder})

    def idle(self) -> None:
        self.say({"idle": True})


def main() -> None:
    """Reads the order from standard input and works until told to stop, or alone until the grace period is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: commands.put({"stop": _TERMINATE_SECONDS}))
    lines = open(0, "rb", closefd=False)  # noqa: SIM115  # not sys.stdin, which the interpreter wants to lock when it ends
    order = WorkerOrder(**json.loads(lines.readline()))
    voice = _Voice()
    logging.getLogger("uploads").addHandler(voice)
    store = open_store(order.store_uri, **order.store_options)
    if order.store_identity and identity_of(store.uri()) != order.store_identity:
        raise SpoolUnusable(
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
    if _take_over(drain, commands):
        voice.say({"owner": os.getpid()})
        _obey(drain, commands, order.grace_seconds)


def _listen(lines: BinaryIO, commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Passes lines on; the end of the pipe is the end of the training process."""
    for line in lines:
        commands.put(json.loads(line))
    commands.put({"orphaned": True})


def _take_over(drain: Drain, commands: queue.SimpleQueue[dict[str, Any]]) -> bool:
    """Waits while an earlier worker still holds the spool; it uploads new entries meanwhile. False when nobody needs us any more."""
    while True:
        try:
            drain.start()
        except SpoolOwned:
            try:
                command = commands.get(timeout=_LOCK_PATIENCE_SECONDS)
            except queue.Empty:
                continue
            if "stop" in command or "orphaned" in command:
                return False
        else:
            return True


def _obey(drain: Drain, commands: queue.SimpleQueue[dict[str, Any]], grace_seconds: float) -> None:
    parent = os.getppid()
    while True:
        try:
            command = commands.get(timeout=_PARENT_CHECK_SECONDS)
        except queue.Empty:
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
