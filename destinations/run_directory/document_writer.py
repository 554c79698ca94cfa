"""`DocumentWriter`: writes the documents of a run when they are due, and its heartbeat.

Its methods run in the writer thread, except `begin`.
"""

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.history.aggregate import Aggregate
from destinations.history.sessions import session_path
from events import State

from .documents import Documents, write_summary
from .environment import rank_layout, write_environment
from .layout import ENVIRONMENT, HEARTBEAT
from .segments import allocate

if TYPE_CHECKING:
    from threading import Thread

__all__ = ["DocumentWriter"]

_DOCUMENT_SECONDS = 5.0
# Reserved, to make room for the final documents on a full disk.
_RESERVE_BYTES = 64 << 10


@attrs.define(eq=False, slots=False, repr=False, kw_only=True)
class DocumentWriter:
    """Writes sidecar, hyperparameters, sessions, and environment on rank 0, and the summary on each rank.

    Args:
        root: the folder of the run.
        state: the state of the run.
        documents: the documents; None on ranks other than 0.
        describe: returns the content of `environment.json`, given the ranks.
        on_error: called with an error that prevents writing the environment.
        report: returns the sidecar's fields about the rows of this session.
        summary: returns the statistics of the rows, and the mark of the CSV that they cover.
    """

    _root: Path
    _state: State
    _documents: Documents | None
    _describe: Callable[[dict[str, int]], dict[str, Any]]
    _on_error: Callable[[Exception], None]
    _report: Callable[[], dict[str, Any]]
    _summary: Callable[[], tuple[Aggregate, dict[str, int]]]

    def __attrs_post_init__(self) -> None:
        self.are_due = True
        """Whether something has changed since the documents were written."""
        self._written_at = -math.inf
        self._heartbeat_at = 0.0
        self.environment: Thread | None = None
        """The thread that writes the environment."""
        self._environment_due = self._documents is not None
        self._reserve = self._root / f".reserve.{os.getpid()}-{self._state.rank}.tmp"

    def begin(self) -> None:
        """Writes the first documents."""
        self.touch()
        if self._documents is not None:
            # A new run has nothing to lose yet; the writer thread's first turn syncs it.
            self._write_documents(durable=not self._documents.is_new)

    def touch(self, after_seconds: float = 0.0) -> bool:
        """Touches the heartbeat; returns False, without touching it, if too little time has passed."""
        if time.monotonic() - self._heartbeat_at <= after_seconds:
            return False
        self._heartbeat_at = time.monotonic()
        if self._documents is not None:
            path = self._root / HEARTBEAT
            try:
                os.utime(path)
            except FileNotFoundError:
                with contextlib.suppress(OSError):
                    path.touch()
            except OSError:
                pass
        return True

    def write(self, *, is_last: bool, is_urgent: bool) -> None:
        """Writes the documents that are due.

        Args:
            is_last: whether the run ends.
            is_urgent: whether to write them without waiting for the interval.
        """
        self._write_environment()
        if self._documents is not None and self._documents.follow(self._state):
            self.are_due, is_urgent = True, True
        if is_last:
            self.are_due = False
            self._write_last()
        elif self.are_due and (is_urgent or time.monotonic() - self._written_at >= _DOCUMENT_SECONDS):
            self._written_at = time.monotonic()
            self._write_summary()
            self._write_documents()
            self.are_due = False

    def wait(self, deadline: float) -> None:
        """Waits for the environment until a `time.monotonic` deadline."""
        if self.environment is not None:
            self.environment.join(max(0.0, deadline - time.monotonic()))

    def keep_reserve(self) -> None:
        """Reserves disk space for the final documents."""
        if self._documents is not None:
            fd = os.open(self._reserve, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                allocate(fd, _RESERVE_BYTES)
            finally:
                os.close(fd)

    def free_reserve(self) -> None:
        """Frees the reserved disk space."""
        with contextlib.suppress(OSError):
            self._reserve.unlink()

    def _write_environment(self) -> None:
        """Starts writing `environment.json`, once."""
        if self._environment_due:
            self._environment_due = False
            paths = [self._root / ENVIRONMENT]
            if self._documents is not None:
                paths.append(session_path(self._root, self._documents.sessions.current, ENVIRONMENT))
            self.environment = write_environment(
                paths, lambda: self._describe(rank_layout(self._state)), self._on_error
            )

    def _write_last(self) -> None:
        """Writes the final documents; on a full disk, frees the reserve for them."""
        try:
            self._write_summary()
            self._write_documents()
        except OSError:
            self.free_reserve()
            self._write_documents()
            self._write_summary()

    def _write_summary(self) -> None:
        run_id = self._documents.run_id if self._documents is not None else ""
        write_summary(self._root, self._state.rank, run_id, *self._summary())

    def _write_documents(self, *, durable: bool = True) -> None:
        if self._documents is None:
            return
        self._documents.write_history(durable=durable)
        more = {
            "session": self._documents.sessions.current["session"],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ranks": rank_layout(self._state),
            **self._report(),
        }
        self._documents.write_sidecar(self._summary()[0], more, durable=durable)
