"""A small file for each pair of run and target that makes sending repeatable.

`begin` marks the ledger as open before anything is sent. If a later attempt finds it open, the earlier one
was interrupted, and everything is sent again. `finish` records the position reached. A file lock admits one
process at a time; it is released when the process exits.
"""

import contextlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from destinations.history.cursor import Cursor
from destinations.runs.errors import RunsError
from uploads.disk import is_open_file, open_regular, read_regular, replace_file, try_lock

_VERSION = 1


class SendingError(RunsError):
    """The run cannot be sent to this target."""


class TargetError(SendingError):
    """Invalid target."""


class BusyError(SendingError):
    """Another process is sending the run."""


@attrs.define
class ReadPosition:
    """The position up to which a run folder was read.

    Attributes:
        rows: the `Cursor` of each rank, as JSON.
        lines: number of lines read, by index file.
        writers: the same for named writers, by name.
    """

    rows: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    lines: dict[str, int] = attrs.field(factory=dict)
    writers: dict[str, dict[str, Any]] = attrs.field(factory=dict)


class SentLedger:
    """The ledger of one run and one target; a context manager that holds its lock.

    Args:
        path: the file; its folder is created.
        run_id: the run.
        target: the target.

    Raises:
        BusyError: on entering: another process holds the lock.
        SendingError: on entering: the ledger belongs to another run.
    """

    def __init__(self, path: Path, run_id: str, target: str) -> None:
        self._path = path
        self._about = {"version": _VERSION, "run_id": run_id, "target": target}
        self._lock_path = path.with_name(f"{path.name}.lock")
        self._lock = -1
        self.state = "none"
        """"none": nothing was sent; "open": an attempt was interrupted; or "done"."""
        self.position = ReadPosition()
        """The position up to which the run was sent."""
        self.facts: dict[str, Any] = {}
        """Fingerprint of everything else that was sent, defined by the sender."""
        self.copy_id = ""
        """Id of the copy; it changes whenever everything is sent again."""

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = open_regular(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
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
            raise BusyError(
                f"another process is sending run {self._about['run_id']!r} to {self._about['target']}."
            )

    def begin(self, copy_id: str) -> None:
        """Marks the ledger as open, before anything is sent.

        Args:
            copy_id: id of the copy that is made or continued.

        Raises:
            SendingError: the folder with the lock was moved or replaced.
        """
        if not is_open_file(self._lock)(str(self._lock_path)):
            raise SendingError(f"folder {str(self._path.parent)!r} was moved or replaced. Send again.")
        self.copy_id = copy_id
        self._write("open")

    def finish(self, position: ReadPosition, facts: dict[str, Any]) -> None:
        """Records that everything up to a position was sent."""
        self.position, self.facts = position, facts
        self._write("done", position=attrs.asdict(position), facts=facts)

    def _write(self, state: str, **more: Any) -> None:
        self.state = state
        text = json.dumps({**self._about, "state": state, "copy_id": self.copy_id, **more})
        replace_file(self._path, text.encode(), durable=True)

    def _read(self) -> None:
        found = read_ledger(self._path)
        if not found:
            return
        if found.get("run_id") != self._about["run_id"]:
            raise SendingError(
                f"target {str(self._path.parent)!r} contains run {found.get('run_id')!r}, "
                f"not {self._about['run_id']!r}. Choose another folder."
            )
        self.copy_id = str(found.get("copy_id", ""))
        try:
            position = ReadPosition(**found["position"]) if found["state"] == "done" else ReadPosition()
            self.facts = dict(found.get("facts") or {})
            # Raises for a position with other types, or from an earlier version.
            for rows in (position.rows, *(one["rows"] for one in position.writers.values())):
                for cursor in rows.values():
                    Cursor.from_json(cursor)
            dict(position.lines).values()
            self.position = position
            self.state = "done" if found["state"] == "done" else "open"
        except (AttributeError, KeyError, TypeError, ValueError):
            self.state = "open"


def read_ledger(path: Path) -> dict[str, Any]:
    """Returns the content of a ledger; empty if there is none, state "open" if it is corrupt."""
    try:
        found = json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError):
        return {"state": "open"}
    return found if isinstance(found, dict) else {"state": "open"}
