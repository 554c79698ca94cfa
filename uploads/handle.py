"""Handles and outcomes of uploads, as returned by `UploadQueue`."""

import enum
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs

from .arguments import check_seconds
from .errors import (
    BytesCorruptError,
    RejectedByStoreError,
    RemoteConflictError,
    SpoolError,
    SpoolFullError,
    UploadError,
    UploadTimeoutError,
)

__all__ = ["Backlog", "FolderHandle", "Outcome", "UploadHandle", "UploadState"]


_IDENTIFIER = re.compile(r"[0-9a-f]{1,16}")


class UploadState(enum.StrEnum):
    """The states of an upload.

    ```python
    print([state.value for state in UploadState])
    ```

    pending → inflight → done; inflight → pending is a retry.
    Final states: done, superseded (by a newer version of the name), conflict (`overwrite=False` and the name
    was taken), corrupt (the staged bytes were changed), rejected (by the store, for good), refused (not
    staged: no room), lost (its folder was deleted), withdrawn (by `UploadQueue.withdraw` or `delete`, before
    it was uploaded).
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
    WITHDRAWN = "withdrawn"

    @property
    def is_final(self) -> bool:
        """Whether the state is final."""
        return self not in {UploadState.PENDING, UploadState.INFLIGHT}

    @property
    def is_failure(self) -> bool:
        """Whether the upload failed for good."""
        return self.is_final and self not in {
            UploadState.DONE,
            UploadState.SUPERSEDED,
            UploadState.WITHDRAWN,
        }


@attrs.frozen
class Outcome:
    """The result of one upload.

    ```python
    with UploadQueue("store") as queue:
        outcome = queue.submit("notes.txt", "notes.txt").result(timeout_seconds=60)
    print(outcome.state, outcome.size)
    ```

    Attributes:
        identifier: The entry's identifier.
        remote_name: Its name in the store.
        state: One of the final states.
        uri: The URI of the object.
        size: Bytes.
        sha256: Hexadecimal digest of the bytes, if it was computed: not for files above 8 MiB in a folder, or
            above `part_bytes` in S3.
        reason: Why it failed; empty if it did not.
        superseded_by: The identifier of the entry that replaced it.
        crc32: The CRC-32 of the bytes, if they were read.
    """

    identifier: str
    remote_name: str
    state: UploadState
    uri: str = ""
    size: int = 0
    sha256: str | None = None
    reason: str = ""
    superseded_by: str | None = None
    crc32: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary for `json.dumps`."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Outcome":
        """Returns the outcome of `to_json`; unknown keys are ignored.

        Raises:
            ValueError: The record is corrupt; or KeyError or TypeError.
        """
        known = {field.name: record[field.name] for field in attrs.fields(cls) if field.name in record}
        outcome = cls(**{**known, "state": UploadState(known["state"])})
        texts: list[object] = [outcome.remote_name, outcome.uri, outcome.reason, outcome.sha256 or ""]
        identifiers = [outcome.identifier, outcome.superseded_by or "0"]
        if (
            not all(isinstance(text, str) for text in texts)
            or not all(_IDENTIFIER.fullmatch(identifier) for identifier in identifiers)
            or not all(type(number) is int for number in (outcome.size, outcome.crc32 or 0))
        ):
            raise ValueError(f"not an outcome: {record}")
        return outcome


_NAMES_SHOWN = 20


@attrs.frozen
class Backlog:
    """Counts of the uploads that aren't delivered yet.

    ```python
    queue = UploadQueue("store")
    queue.submit("notes.txt", "notes.txt")
    backlog = queue.close(timeout_seconds=30)
    print(backlog.remaining, backlog.failures)  # () ()
    ```

    Attributes:
        spool: The folder of the spool.
        remaining: Names of pending uploads; `destinations uploads resume SPOOL` finishes them.
        failures: Outcomes of failed uploads, which are in `failed/` of the spool or were never staged.
        left_behind: Backlogs of earlier processes in other default spools for the same store.
        dropped: How many uploads gave way to newer ones, see `UploadQueue.may_drop`.
    """

    spool: Path
    remaining: tuple[str, ...]
    failures: tuple[Outcome, ...]
    left_behind: "tuple[Backlog, ...]" = ()
    dropped: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything was delivered."""
        return not (self.remaining or self.failures or self.left_behind)

    @property
    def lost(self) -> int:
        """The number of failed files without an intact copy: refused, corrupt, or deleted in the spool."""
        gone = {UploadState.REFUSED, UploadState.CORRUPT, UploadState.LOST}
        return sum(one.state in gone for one in self.failures)

    @property
    def resume_command(self) -> str:
        """The shell command that finishes the rest."""
        return f"destinations uploads resume {self.spool}"

    def __str__(self) -> str:
        lines = []
        if self.remaining:
            lines.append(
                f"{len(self.remaining)} submitted files are not uploaded yet: {_shorten(self.remaining)}"
            )
            lines.append(f"{'' if self.lost else 'nothing is lost; '}finish with: {self.resume_command}")
        if self.dropped:
            lines.append(f"{self.dropped} older files gave way to newer ones while the spool was full")
        if self.failures:
            failures = tuple(f"{one.remote_name} ({one.state}: {one.reason})" for one in self.failures)
            lost = f", {self.lost} of which are lost" if self.lost else ""
            lines.append(f"{len(failures)} failed{lost}: {_shorten(failures)}")
            lines.append(f"for details: destinations uploads status {self.spool}")
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
    """One upload. Every method may be called from any thread; only `result` and `exception` block.

    ```python
    with UploadQueue("store") as queue:
        handle = queue.submit("notes.txt", "notes.txt")
        print(handle.result(timeout_seconds=60).uri)
    ```

    Attributes:
        identifier: The entry's identity; also in the remote object's metadata.
        remote_name: Its name in the store.
        folder: The name of the entry's folder in the spool; empty for a refused file.

    The queue holds only a weak reference, so you need not keep handles.
    """

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
        self._outcome: Future[Outcome] = Future()

    def __repr__(self) -> str:
        return f"UploadHandle({self.remote_name!r}, {self.state})"

    @property
    def handles(self) -> "tuple[UploadHandle]":
        """A tuple of this handle; `FolderHandle.handles` has one for each file."""
        return (self,)

    @property
    def uri(self) -> str:
        """The URI of the object, also before it exists; `download_file` accepts it."""
        return self._uri_of(self.remote_name)

    @property
    def state(self) -> UploadState:
        """The current state, which is looked up in the spool until the upload has ended."""
        seen = None if self.done() else self._look(self.folder)
        if self.done():  # It may have ended meanwhile.
            return self._outcome.result().state
        return UploadState.INFLIGHT if seen is None else seen

    def done(self) -> bool:
        """Returns whether the upload has ended, with success or failure."""
        return self._outcome.done()

    def result(self, timeout_seconds: float | None = None) -> Outcome:
        """Waits for the outcome and returns it; `superseded` and `withdrawn` are not errors.

        Raises:
            UploadTimeoutError: It took longer; the upload continues.
            RemoteConflictError: `overwrite=False`, and the name has other bytes.
            BytesCorruptError: The staged bytes were damaged.
            RejectedByStoreError: The store refused it for good.
            SpoolFullError: It was refused by `submit`.
            SpoolError: Its folder was deleted from the spool.
        """
        error = self.exception(timeout_seconds)
        if error is not None:
            raise error
        return self._outcome.result()

    def exception(self, timeout_seconds: float | None = None) -> UploadError | None:
        """Waits for the outcome and returns the error, or None after success.

        Raises:
            UploadTimeoutError: It took longer; the upload continues.
        """
        seconds = None if timeout_seconds is None else check_seconds("timeout_seconds", timeout_seconds)
        try:
            outcome = self._outcome.result(seconds)
        except TimeoutError as error:
            raise UploadTimeoutError(
                f"{self.remote_name!r} is {self.state} after {timeout_seconds} s; the upload continues"
            ) from error
        kind = _ERRORS.get(outcome.state)
        return None if kind is None else kind(outcome.reason)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Calls a function once when the upload ends, or at once if it has ended.

        It runs in the thread that settles the upload; it must return at once and not raise.
        """
        self._outcome.add_done_callback(lambda _: callback())

    def _settle(self, outcome: Outcome) -> None:
        self._outcome.set_result(outcome)


@attrs.define(eq=False, slots=False, repr=False)
class FolderHandle:
    """A submitted folder: one handle per file in it.

    ```python
    with UploadQueue("store") as queue:
        folder = queue.submit("runs/digits", "digits")
        for handle in folder.handles:
            handle.result(timeout_seconds=60)
    ```

    Attributes:
        handles: The handles of the files, sorted by name.
        remote_name: The name of the folder.
        uri: The URI of the folder.
    """

    remote_name: str
    uri: str
    handles: tuple[UploadHandle, ...]

    @property
    def state(self) -> UploadState:
        """The first failure, else the first state that is not final, else done."""
        states = [handle.state for handle in self.handles]
        unfinished = [state for state in states if not state.is_final]
        return next(iter([state for state in states if state.is_failure] + unfinished), UploadState.DONE)

    def done(self) -> bool:
        """Returns whether every file has ended."""
        return all(handle.done() for handle in self.handles)

    def result(self, timeout_seconds: float | None = None) -> tuple[Outcome, ...]:
        """Waits for each file up to the timeout; raises the first failure, as `UploadHandle.result` does."""
        return tuple(handle.result(timeout_seconds) for handle in self.handles)

    def exception(self, timeout_seconds: float | None = None) -> UploadError | None:
        """Waits for each file up to the timeout; returns the first failure, or None."""
        return next(
            (error for handle in self.handles if (error := handle.exception(timeout_seconds)) is not None),
            None,
        )
