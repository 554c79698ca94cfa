"""`sessions.jsonl`: one line per process that opened the run."""

import contextlib
import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any

from .disk import DISK, Disk
from .files import read_regular, replace_file, strict_json
from .layout import HEARTBEAT, SESSIONS

__all__ = ["SessionLog"]


class SessionLog:
    """The lines of the run; the last one is this process's.

    The file is small and is replaced as a whole, so that a line can be completed when its process ends. The line of a process
    that ended without a word gets the status "killed" from the next one.

    Args:
        run_dir: the folder of the run.
        now: when this session begins, in seconds since 1970.
        disk: what is written by.
    """

    def __init__(self, run_dir: Path, now: float, disk: Disk = DISK) -> None:
        self._run_dir = run_dir
        self._disk = disk
        self._lines = self.read(run_dir)
        for line in self._lines:
            if line.get("status") == "running":
                line["status"] = "killed"
                line["end"] = self._last_heartbeat()
        self.own: dict[str, Any] = {
            "session": uuid.uuid4().hex[:12],
            "start": now,
            "end": None,
            "resume_step": None,
            "status": "running",
            "exception": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._lines.append(self.own)

    @property
    def is_first(self) -> bool:
        """Whether nobody opened the run before."""
        return len(self._lines) == 1

    def write(self, standing: tuple[str, float | None] = ("running", None), *, durable: bool = True) -> None:
        """Replaces the file.

        Args:
            standing: status and end of this session as long as it is not closed.
            durable: whether to wait until the disk has it.
        """
        own = self.own
        if own["end"] is None:
            own = {**own, "status": standing[0], "end": standing[1]}
        text = "".join(f"{strict_json(line)}\n" for line in [*self._lines[:-1], own])
        replace_file(self._run_dir / SESSIONS, text.encode(), durable=durable, disk=self._disk)

    @staticmethod
    def read(run_dir: Path) -> list[dict[str, Any]]:
        """Returns the lines of a run, oldest first; a damaged one is left out."""
        try:
            text = read_regular(run_dir / SESSIONS).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return []
        lines = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    lines.append(record)
        return lines

    def _last_heartbeat(self) -> float | None:
        try:
            return (self._run_dir / HEARTBEAT).stat().st_mtime
        except OSError:
            return None
