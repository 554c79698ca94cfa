"""What `UploadQueue.submit` returns: one upload, to look at and to wait for."""

from __future__ import annotations

import enum
import math
import re
import threading
from typing import TYPE_CHECKING, Any

import attrs

from .errors import (
    BytesCorruptError,
    RejectedByStoreError,
    RemoteConflictError,
    SpoolError,
    SpoolFullError,
    UploadError,
    UploadTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Backlog", "FolderHandle", "Outcome", "UploadHandle", "UploadState"]


def check_seconds(name: str, seconds: float) -> float:
    """The time, which may be infinite, as what a wait of Python's takes.

    Raises:
        ValueError: Negative, or not a number.
    """
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{name} must be a number of seconds from 0 to inf, got {seconds}")
    return min(float(seconds), threading.TIMEOUT_MAX / 2)


def check_workers(workers: int) -> None:
    """Raises ValueError where there would be nobody to upload."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")


_IDENTIFIER = re.compile(r"[0-9a-f]{1,16}")


class UploadState(enum.StrEnum):
    """The states of an entry.

    pending → inflight → done is the way of a file; inflight → pending is a retry.
    Final: done, superseded (a newer version of the same name took its place), conflict (`overwrite=False` and the
    name was taken), corrupt (the bytes were not those staged), rejected (the store will never take it), refused
    (never staged: no room), lost (its folder was deleted by someone else).
    """

    PENDING = "pending"
    INFLIGHT = "inflight"
    DONE = "done"
    SUPERSEDED = "superseded"
    CONFLICT = "conflict"
    CORRUPT = "corrupt"
    REJECTED = "rejected"
    REFUSED = "refused"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self not in {UploadState.PENDING, UploadState.INFLIGHT}

    @property
    def is_failure(self) -> bool:
        """Whether the file is not, and will not be, in the store under its name."""
        return self.is_final and self not in {UploadState.DONE, UploadState.SUPERSEDED}


@attrs.frozen
class Outcome:
    """The end of one entry.

    Attributes:
        identifier: The entry's.
        remote_name: The name that was asked for.
        state: One of the final states.
        uri: Where the bytes are, or would have been.
        size: Bytes.
        sha256: Hexadecimal digest of the bytes, where they were read.
        reason: Why it failed; empty where it did not.
        superseded_by: The identifier of the entry that took its place.
    """

    identifier: str
    remote_name: str
    state: UploadState
    uri: str = ""
    size: int = 0
    sha256: str | None = None
    reason: str = ""
    superseded_by: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Outcome:
        """The inverse of `to_json`; keys it does not know are ignored.

        Raises:
            ValueError: Damaged; or one of KeyError and TypeError.
        """
        known = {field.name: record[field.name] for field in attrs.fields(cls) if field.name in record}
        outcome = cls(**{**known, "state": UploadState(known["state"])})
        texts: list[object] = [outcome.remote_name, outcome.uri, outcome.reason, outcome.sha256 or ""]
        identifiers = [outcome.identifier, outcome.superseded_by or "0"]
        if (
            not all(isinstance(text, str) for text in texts)
            or not all(_IDENTIFIER.fullmatch(identifier) for identifier in identifiers)
            or type(outcome.size) is not int
        ):
            raise ValueError(f"an outcome must have texts, a size and identifiers, got {record}")
        return outcome


_NAMES_SHOWN = 20


@attrs.frozen
class Backlog:
    """What was not delivered when it was asked for.

    Attributes:
        spool: The folder that holds it.
        remaining: Names that are still on their way; `python -m uploads resume SPOOL` finishes them.
        failures: How the others ended that did not end well: in `failed/` of the spool, or never staged.
        left_behind: What earlier processes left in other default spools for the same store.
    """

    spool: Path
    remaining: tuple[str, ...]
    failures: tuple[Outcome, ...]
    left_behind: tuple[Backlog, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether everything was delivered."""
        return not (self.remaining or self.failures or self.left_behind)

    @property
    def resume_command(self) -> str:
        """What finishes the rest."""
        return f"python -m uploads resume {self.spool}"

    def __str__(self) -> str:
        lines = []
        if self.remaining:
            lines.append(
                f"{len(self.remaining)} of the submitted files are not uploaded yet: {_shorten(self.remaining)}"
            )
            lines.append(f"nothing is lost; finish with: {self.resume_command}")
        if self.failures:
            lines.append(
                f"{len(self.failures)} failed: {_shorten(tuple(f'{failure.remote_name} ({failure.state}: {failure.reason})' for failure in self.failures))}"
            )
            lines.append(f"look at them with: python -m uploads status {self.spool}")
        lines += [f"left by an earlier process: {backlog}" for backlog in self.left_behind]
        return "\n".join(lines) or "everything was uploaded"


def _shorten(names: tuple[str, ...]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


_ERRORS: dict[UploadState, type[UploadError]] = {
    UploadState.CONFLICT: RemoteConflictError,
    UploadState.CORRUPT: BytesCorruptError,
    UploadState.REJECTED: RejectedByStoreError,
    UploadState.REFUSED: SpoolFullError,
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
            UploadTimeoutError: It took longer; the upload goes on.
            RemoteConflictError: `overwrite=False` and other bytes are there.
            BytesCorruptError: The staged bytes were damaged.
            RejectedByStoreError: The store will never take it.
            SpoolFullError: It was refused when it was submitted.
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
            UploadTimeoutError: It took longer; the upload goes on.
        """
        seconds = None if timeout_seconds is None else check_seconds("timeout_seconds", timeout_seconds)
        if self._outcome is None and not self._event().wait(seconds):
            raise UploadTimeoutError(
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
