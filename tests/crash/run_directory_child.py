"""Logs until it is killed, and prints after each call how many have returned.

`python run_directory_child.py SOCKET` starts a server instead, which forks a process for each job:
everything is imported once. A job is a line of JSON and the descriptor for the output; the answers are the
process id, and how it ended.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from destinations import RunDirectory
from events import Engine, Logger, State, Timestamp

_PR_SET_PTRACER = 0x59616D61  # prctl(2)
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


PAUSES = {"paced": 0.0005, "slow": 0.004}
"""Seconds after each row, by mode."""
WIDTH = 1000
"""How many metrics more a row has in the mode "busy"."""


def _spin() -> None:
    while True:
        pass


def late_step(number: int) -> int:
    """Returns the step of a named writer's row: old and new steps are mixed."""
    return number * 7919 % 5000


class SmallParts(RunDirectory):
    """Closes parts of some kilobytes."""

    _part_bytes = 12_000


def log_rows(
    folder: str,
    mode: str,
    *,
    first: int = 0,
    last: int = 1_000_000_000,
    flush_seconds: float = 0.01,
    writer: str | None = None,
    in_parts: bool = False,
) -> None:
    """Logs rows as fast as it can, or at a pace, with a new metric now and then.

    "left" neither trains nor ends. A named writer gives its rows the steps of `late_step`.

    "busy" runs another thread that takes the interpreter from the others, and logs rows so wide that segments
    change all the time.
    """
    if mode == "busy":
        sys.setswitchinterval(1e-5)
        threading.Thread(target=_spin, daemon=True).start()
    kind = SmallParts if in_parts else RunDirectory
    destination = kind(Path(folder), flush_seconds=flush_seconds, if_exists="resume", writer=writer)
    state = State("crash", timestamp=Timestamp(batch=first))
    logger = Logger(state, [destination], raise_errors=True)
    engine = Engine(state, logger)
    engine.run_event("init")
    if mode != "left" and writer is None:
        engine.run_event("fit_start")
    for step in range(first, last):
        metrics = {"a": step + 0.5, "b": float(step)}
        if mode == "busy":
            metrics |= {f"wide{index}": float(step) for index in range(WIDTH)}
        elif step % 40 == 39:
            metrics[f"extra{step // 40}"] = step
        logger.log_metrics(metrics, step if writer is None else late_step(step))
        os.write(1, b"%d\n" % step)
        if mode in PAUSES:
            time.sleep(PAUSES[mode])
    if mode == "left":
        signal.pause()
    engine.close()


def serve(server: socket.socket) -> None:
    """Forks a process for each job, one after the other, until there are no more."""
    while True:
        data, descriptors, *_ = socket.recv_fds(server, 1 << 16, 3)
        if not data:
            return
        output, gate, said = descriptors
        pid = os.fork()
        if pid == 0:
            server.close()
            os.dup2(output, 1)
            os.close(output)
            os.close(said)
            # If only a parent may trace its children: strace isn't the parent.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
            os.read(gate, 1)
            os.close(gate)
            code = 1
            try:
                log_rows(**json.loads(data))
                code = 0
            finally:
                os._exit(code)
        for descriptor in (output, gate):
            os.close(descriptor)
        os.write(said, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(said, b"%d\n" % status)
        os.close(said)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
