"""`StoreFolder` uploads, looks up, withdraws and deletes files by their names.

It is an upload queue that remembers the handles of its newest uploads. `Artifacts` and the checkpoints of a
run have one each. Only one thread may use it at a time.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .download import POINTER_SUFFIX
from .handle import UploadHandle, UploadState
from .stores import Store
from .upload_queue import UploadQueue

__all__ = ["StoreFolder"]

_HANDLES_KEPT = 256
# A single failure may be a lost answer.
_FAILURES_WHILE_AWAY = 3


class StoreFolder:
    """A folder in a store whose files are known by name.

    ```python
    folder = StoreFolder("store")
    folder.upload_file("notes.txt", Path("notes.txt"), overwrite=True)
    folder.delete_file("older.txt", after=["notes.txt"])
    folder.queue.close(timeout_seconds=30)
    print(folder.has_uploaded("notes.txt"))  # True
    ```

    Attributes:
        queue: The queue; not closed when the process exits.

    Args:
        store: As for `UploadQueue`.
        name_of: Returns a file's name in the store, given its name here.
        queue_options: For `UploadQueue`.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        name_of: Callable[[str], str] = str,
        **queue_options: Any,
    ) -> None:
        self.queue = UploadQueue(store, close_at_exit=False, **queue_options)
        self._name_of = name_of
        # The newest uploads by name, oldest first.
        self._handles: dict[str, UploadHandle] = {}
        # Groups of unwanted files, by their first name, as long as one of them waits.
        self._unwanted: dict[str, Sequence[str]] = {}
        self._withdrawn: set[str] = set()
        self._only_while_failing = False
        # Names that had been uploaded when an upload failed; None if none has failed since the last success.
        self._done_before: set[str] | None = None

    def upload_file(
        self, name: str, path: Path, *, overwrite: bool, link: bool = False, crc32: int | None = None
    ) -> UploadHandle:
        """Submits a file; a `*.symlink` that names a remembered upload becomes a pointer to it.

        Args:
            name: Name of the file.
            path: The file.
            overwrite: Whether it may replace an object of that name.
            link: Whether to take it by a hard link, see `UploadQueue.submit`.
            crc32: CRC-32 of a file to link, if you know it.
        """
        there = self._name_of(name)
        target = None
        if name.endswith(POINTER_SUFFIX):
            target = self._handles.get(path.read_text(encoding="utf-8", errors="replace").strip())
        if target is None:
            handle: UploadHandle = self.queue.submit(  # type: ignore[assignment]  # no folder
                path, there, overwrite=overwrite, link=link, crc32=crc32 if link else None
            )
        else:
            handle = self.queue.submit_pointer(there.removesuffix(POINTER_SUFFIX), target)
        self._unwanted = {first: group for first, group in self._unwanted.items() if name not in group}
        self._handles.pop(name, None)
        self._handles[name] = handle
        while len(self._handles) > _HANDLES_KEPT:
            del self._handles[next(iter(self._handles))]
        return handle

    def has_uploaded(self, name: str) -> bool:
        """Returns whether a file is in the store; one that wasn't submitted lately counts as uploaded.

        Raises:
            OSError: It will never be uploaded.
        """
        handle = self._handles.get(name)
        if handle is None or not handle.done():
            return handle is None
        error = handle.exception(0.0)
        if error is not None or self.has_withdrawn(name):
            raise OSError(f"{name}: {error or 'withdrawn'}")
        return True

    def has_withdrawn(self, name: str) -> bool:
        """Returns whether a file was withdrawn before it was uploaded."""
        handle = self._handles.get(name)
        return handle is not None and handle.state is UploadState.WITHDRAWN

    def may_drop_files(self, *names: str) -> None:
        """Lets files give way to newer ones in a full spool, see `UploadQueue.may_drop`."""
        self.queue.may_drop(*map(self._name_of, names))

    def delete_file(self, name: str, *, after: Sequence[str] = (), then: Sequence[str] = ()) -> None:
        """Deletes a file in the background, see `UploadQueue.delete`.

        Nothing is deleted if one of `after` is unknown. An upload of the name itself must succeed too:
        if it was refused, the object belongs to somebody else.

        Args:
            name: Name of the file.
            after: Names of files that must be in the store before.
            then: Names of files to delete next.
        """
        handles = {one: self._handles.get(one) for one in (*after, name)}
        known = {one: handle for one, handle in handles.items() if handle is not None}
        if known.keys() >= set(after):
            others = [self._name_of(one) for one in then]
            self.queue.delete(self._name_of(name), after=list(known.values()), then=others)

    def withdraw(self, groups: Iterable[Sequence[str]], *, only_while_failing: bool) -> int:
        """Withdraws unwanted files that aren't uploaded yet.

        The next call tries again with files that are being uploaded.

        Args:
            groups: Names of files that belong together.
            only_while_failing: Whether to withdraw files only while uploads fail; the same at each call.

        Returns:
            The number of groups from which a file was withdrawn for the first time.
        """
        self._only_while_failing = only_while_failing
        self._unwanted |= {group[0]: group for group in groups}
        if not self._unwanted or (only_while_failing and not self._is_failing()):
            return 0
        before = len(self._withdrawn)
        for first, group in self._unwanted.items():
            with contextlib.suppress(ValueError):  # An invalid name.
                if sum(self.queue.withdraw(self._name_of(name)) for name in group):
                    self._withdrawn.add(first)
        count = len(self._withdrawn) - before
        pending = set(self.queue.backlog().remaining)
        self._unwanted = {
            first: group
            for first, group in self._unwanted.items()
            if not pending.isdisjoint(map(self._name_of, group))
        }
        self._withdrawn.intersection_update(self._unwanted)
        return count

    def _is_failing(self) -> bool:
        """Returns whether an upload has failed again and again, and none has succeeded since."""
        done = {name for name, handle in self._handles.items() if handle.state is UploadState.DONE}
        if self.queue.is_retrying(_FAILURES_WHILE_AWAY):
            self._done_before = done
        elif self._done_before is not None and not done <= self._done_before:
            self._done_before = None
        return self._done_before is not None

    def list_files(self, prefix: str) -> list[str]:
        """Returns the names in the store of objects that begin with a prefix; waits for it.

        Raises:
            UploadError: It cannot be listed.
        """
        return self.queue.names(self._name_of(prefix), sys.maxsize)

    def file_uris(self, name: str) -> tuple[str, ...]:
        """Returns the URI of a file."""
        return (self.queue.uri(self._name_of(name)),)

    def close(self, seconds: float) -> None:
        """Uploads for up to `seconds`; the rest stays in the spool, and the log names it."""
        self.withdraw((), only_while_failing=self._only_while_failing)
        with contextlib.suppress(Exception):  # `close` names the rest.
            self.queue.drain(seconds)
        self.queue.close(0.0)
