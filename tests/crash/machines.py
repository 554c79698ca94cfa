"""A test's machine is a folder: its processes are the ones that name the folder."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

from tests.waiting import until

__all__ = ["lose", "send_signal"]


def send_signal(machine, number):
    """Sends a signal to all processes of a machine, including its sessions; returns how many."""
    processes = _processes(machine)
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(processes)


def lose(machine):
    """Kills all processes of a machine, waits until none is left, and removes it."""
    until(lambda: not send_signal(machine, signal.SIGKILL))
    shutil.rmtree(machine, ignore_errors=True)
    assert not Path(machine).exists()


def _processes(machine):
    """The live processes with the folder, or a path in it, in their command or environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            try:
                words = (
                    (process / "cmdline").read_bytes() + b"\0" + (process / "environ").read_bytes() + b"\0"
                )
            except OSError:
                continue
            if any(f"{machine}{end}".encode() in words for end in ("/", "\0")):
                found.append(int(process.name))
    return found
