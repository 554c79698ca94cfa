"""What was sent where: a small file for each run and target, which makes sending again safe.

A sending first says that it is under way; what an earlier one left in that state was killed half-way, and is sent anew. Once all is
delivered, the file says up to where. One process at a time has the ledger, by a lock that goes with the process.
"""

import contextlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from destinations.runs.errors import RunsError
from destinations.runs.sources import Position
from uploads.disk import read_regular, replace_file, try_lock

__all__ = ["Ledger", "SendingError"]

_VERSION = 1


class SendingError(RunsError):
    """A run cannot be sent to a target."""


class Ledger:
    """The file about one run and one target; a context manager that holds its lock.

    Args:
        path: the file; its folder is made.
        run_id: the run.
        target: the target.

    Raises:
        SendingError: another process is sending, or the file is about another run or target.
    """

    def __init__(self, path: Path, run_id: str, target: str) -> None:
        self._path = path
        self._about = {"version": _VERSION, "run_id": run_id, "target": target}
        self._lock = -1
        self.state = "none"
        """"none" where nothing was sent, "open" where a sending was not finished, "done"."""
        self.position = Position()
        """Up to where the run was sent, when that was done."""
        self.facts: dict[str, Any] = {}
        """What else was sent, as the sender wrote it down."""

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._path.with_name(f"{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._take_lock()
            self._read()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        is_mine = False
        with contextlib.suppress(OSError):
            is_mine = try_lock(self._lock)
        if not is_mine:
            raise SendingError(
                f"run {self._about['run_id']!r} must be sent to {self._about['target']} by one process at a time, got a second."
            )

    def begin(self) -> None:
        """Says that something is being sent."""
        self._write("open")

    def finish(self, position: Position, facts: dict[str, Any]) -> None:
        """Says up to where everything was sent."""
        self.position, self.facts = position, facts
        self._write("done", position=attrs.asdict(position), facts=facts)

    def _write(self, state: str, **more: Any) -> None:
        self.state = state
        replace_file(self._path, json.dumps({**self._about, "state": state, **more}).encode(), durable=True)

    def _read(self) -> None:
        found = read_ledger(self._path)
        if not found:
            return
        if found.get("run_id") != self._about["run_id"]:
            raise SendingError(
                f"target must be new, or hold run {self._about['run_id']!r}, got {str(self._path.parent)!r}, which holds "
                f"run {found.get('run_id')!r}."
            )
        try:
            self.position = Position(**found["position"]) if found["state"] == "done" else Position()
            self.facts = dict(found.get("facts") or {})
            self.state = "done" if found["state"] == "done" else "open"
        except (KeyError, TypeError):
            self.state = "open"


def read_ledger(path: Path) -> dict[str, Any]:
    """Returns what a ledger says; nothing where there is none."""
    try:
        found = json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError):
        return {"state": "open"}
    return found if isinstance(found, dict) else {"state": "open"}
