"""What `UploadQueue.submit` returns: one upload, to look at and to wait for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .errors import (
    BytesCorrupt,
    RejectedByStore,
    RemoteConflict,
    SpoolError,
    SpoolFull,
    UploadError,
    UploadTimeout,
)
from .outcome import Outcome, UploadState
from .retry import check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FolderHandle", "UploadHandle"]

_ERRORS: dict[UploadState, type[UploadError]] = {
    UploadState.CONFLICT: RemoteConflict,
    UploadState.CORRUPT: BytesCorrupt,
    UploadState.REJECTED: RejectedByStore,
    UploadState.REFUSED: SpoolFull,
    UploadState.LOST: SpoolError,
}


class UploadHandle:
    """One file on its way. Every method may be called from any thread; only `result` and `exception` wait.

    Attributes:
        identifier: The entry's identity; also in the remote object's metadata.
        remote_name: The name that was asked for.
        folder: The name of the entry's folder in the spool; empty where it never had one.

    The queue knows a handle by a weak reference: who does not ask need not keep it, and a hundred thousand of them are small.
    """

    _settled: threading.Event | None = None  # Made by the first who waits.

    def __init__(
        self,
        identifier: str,
        remote_name: str,
        uri_of: Callable[[str], str],
        look: Callable[[str], UploadState | None],
    ) -> None:
        self.identifier = identifier
        self.remote_name = remote_name
        self.folder = ""
        self._uri_of = uri_of
        self._look = look
        self._outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"UploadHandle({self.remote_name!r}, {self.state})"

    @property
    def uri(self) -> str:
        """Where the bytes are, or will be; `download_file` takes it."""
        return self._uri_of(self.remote_name)

    @property
    def state(self) -> UploadState:
        """How the upload stands now; looked up in the spool until it has ended."""
        seen = None if self.done() else self._look(self.folder)
        outcome = self._outcome  # Maybe it ended while we looked.
        if outcome is not None:
            return outcome.state
        return UploadState.INFLIGHT if seen is None else seen

    def done(self) -> bool:
        """Whether the upload has ended, well or not."""
        return self._outcome is not None

    def result(self, timeout_seconds: float | None = None) -> Outcome:
        """Waits for the end and returns it. An entry that a newer version of its name replaced has ended well, as `superseded`.

        Raises:
            UploadTimeout: It took longer; the upload goes on.
            RemoteConflict: `overwrite=False` and other bytes are there.
            BytesCorrupt: The staged bytes were damaged.
            RejectedByStore: The store will never take it.
            SpoolFull: It was refused when it was submitted.
            SpoolError: Its folder was deleted from the spool.
        """
        error = self.exception(timeout_seconds)
        if error is not None:
            raise error
        assert self._outcome is not None  # noqa: S101  # exception() returned
        return self._outcome

    def exception(self, timeout_seconds: float | None = None) -> UploadError | None:
        """Waits for the end and returns what went wrong, or None.

        Raises:
            UploadTimeout: It took longer; the upload goes on.
        """
        seconds = None if timeout_seconds is None else check_seconds("timeout_seconds", timeout_seconds)
        if self._outcome is None and not self._event().wait(seconds):
            raise UploadTimeout(
                f"{self.remote_name!r} must end within {timeout_seconds} s, got state {self.state}. It goes on; ask again later."
            )
        assert self._outcome is not None  # noqa: S101  # set before the event
        error = _ERRORS.get(self._outcome.state)
        return None if error is None else error(self._outcome.reason)

    def _settle(self, outcome: Outcome) -> None:
        self._outcome = outcome
        if self._settled is not None:
            self._settled.set()

    def _event(self) -> threading.Event:
        """What `_settle` sets. One step for all threads that wait, so that no lock is needed that a fork could leave locked."""
        event: threading.Event = vars(self).setdefault("_settled", threading.Event())
        if self._outcome is not None:
            event.set()
        return event


class FolderHandle:
    """A submitted folder: one handle per file in it.

    Attributes:
        handles: In the order of their names.
        remote_name: The name of the folder.
        uri: Where the folder is, or will be.
    """

    def __init__(self, remote_name: str, uri: str, handles: tuple[UploadHandle, ...]) -> None:
        self.handles = handles
        self.remote_name = remote_name
        self.uri = uri

    @property
    def state(self) -> UploadState:
        """The first failure, else the first state that is not final, else done."""
        states = [handle.state for handle in self.handles]
        unfinished = [state for state in states if not state.is_final]
        return next(iter([state for state in states if state.is_failure] + unfinished), UploadState.DONE)

    def done(self) -> bool:
        """Whether every file has ended."""
        return all(handle.done() for handle in self.handles)

    def result(self, timeout_seconds: float | None = None) -> tuple[Outcome, ...]:
        """Waits for every file, each up to the limit; raises the first failure, as `UploadHandle.result` does."""
        return tuple(handle.result(timeout_seconds) for handle in self.handles)

    def exception(self, timeout_seconds: float | None = None) -> UploadError | None:
        """Waits for every file, each up to the limit; returns the first failure or None."""
        return next(
            (error for handle in self.handles if (error := handle.exception(timeout_seconds)) is not None),
            None,
        )
