"""Where checkpoints are uploaded: by destinations, or to a folder in a store, `save_folder="s3://bucket/x"`.

For the latter, checkpoints are written to a folder of this machine beside the spools, linked into the spool
of an upload queue, and uploaded from there. The newest stays on this machine.
"""

import contextlib
import itertools
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from events.errors import CheckpointError
from events.logger.logger import Logger
from events.names import check_run_name, format_run_name
from events.state import State

from .files import MANIFEST, POINTER_SUFFIX, files_beside_manifest
from .retention import SavedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from uploads import Store, UploadHandle, UploadQueue

__all__ = ["RemoteFolder", "UploadedFolder", "is_uri", "newest_names", "stored_names"]

_BROKEN_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
_POINTER_BYTES = 1024
# Once may be an answer that was lost.
_FAILURES_WHILE_AWAY = 3
_HANDLES_KEPT = 256
_FIRST_NAMES = 1000


def is_uri(folder: str) -> bool:
    """Returns whether a folder is in a store.

    Raises:
        ValueError: it was, before it became a path.
    """
    if _BROKEN_URI.match(folder):
        raise ValueError(f"a URI must be given as a text, not as a Path, which makes it {folder!r}.")
    return "://" in folder


class RemoteFolder:
    """A folder in a store, and its copy on this machine.

    Args:
        template: the URI of the folder; placeholders such as `{run_name}` are filled in.
        state: the run.

    Raises:
        ValueError: the URI is none, or the name of the run leads out of it.
        ImportError: the client of the store is not installed.
    """

    def __init__(self, template: str, state: State) -> None:
        from uploads import default_spools, open_store

        check_run_name(template, state)
        # A "#" or "?" of a name is one of the path, and begins no options.
        uri = _PLACEHOLDER.sub(lambda match: quote(format_run_name(match[0], state)), template)
        self._given = uri
        self.store = open_store(uri)
        spools = next(default_spools(self.store.uri())).parent
        self.local = spools.with_name(f"{spools.name}.checkpoints")
        self._queue: UploadQueue | None = None
        # The newest uploads by name, and those of the checkpoint to which the pointer was moved last.
        self._handles: dict[str, UploadHandle] = {}
        self._last: list[UploadHandle] = []
        # The files of checkpoints that are not kept, by name, as long as one may still be uploaded.
        self._unwanted: dict[str, list[str]] = {}
        # What had been uploaded when an upload failed; None where none has since the last success.
        self._done_before: set[str] | None = None
        # Whether they are withdrawn only while uploads fail.
        self._is_away = False
        # Those of which something was withdrawn.
        self._withdrawn: set[str] = set()

    def open(self) -> None:
        """Opens the upload queue, which also uploads what an earlier process left behind."""
        from uploads import UploadQueue

        if self._queue is None:
            self._queue = UploadQueue(self._given, close_at_exit=False, free_bytes=0)

    def submit(self, path: Path, name: str, crc32: int | None, *, overwrite: bool) -> None:
        """Submits a file.

        Args:
            path: the file; not written to any more.
            name: its name in the store.
            crc32: of the file, where it is known.
            overwrite: whether it may replace an older one of the same name.
        """
        self.open()
        assert self._queue is not None  # noqa: S101  # opened above
        handle: UploadHandle = self._queue.submit(  # type: ignore[assignment]  # no folder
            path, name, overwrite=overwrite, link=True, crc32=crc32
        )
        self._unwanted = {one: names for one, names in self._unwanted.items() if name not in names}
        self._handles.pop(name, None)
        self._handles[name] = handle
        while len(self._handles) > _HANDLES_KEPT:
            del self._handles[next(iter(self._handles))]

    def has_uploaded(self, names: "Sequence[str]") -> bool:
        """Returns whether all of these files are in the store.

        Raises:
            OSError: one never will be.
        """
        handles = [self._handles[name] for name in names if name in self._handles]
        for handle in handles:
            if handle.done() and (error := handle.exception(0.0)) is not None:
                raise OSError(f"{handle.remote_name}: {error}")
        return not self.has_withdrawn(names) and all(handle.done() for handle in handles)

    def has_withdrawn(self, names: "Sequence[str]") -> bool:
        """Returns whether one of these files was withdrawn: its checkpoint is not kept."""
        return any(name in self._handles and self._handles[name].state == "withdrawn" for name in names)

    def move_pointer(self, pointer: str | None, name: str) -> None:
        """Submits a pointer to a file, visible once that is in the store; None for none."""
        self.open()
        assert self._queue is not None  # noqa: S101  # opened above
        target = self._handles[name]
        self._last = [target]
        if pointer is not None:
            self._last.append(self._queue.submit_pointer(pointer.removesuffix(POINTER_SUFFIX), target))

    def delete(self, one: SavedCheckpoint) -> None:
        """Deletes a checkpoint of this folder in the background, after what the pointer was moved to.

        Of one in shards the manifest first: what is left of it then is not whole.
        """
        name = one.name
        # The checkpoint that was resumed may be somebody else's, with names that no store has.
        with contextlib.suppress(ValueError):
            if self._queue is not None and one.remote_name == self.store.uri(name):
                start = name.removesuffix(MANIFEST)
                own = [self._handles[name]] if name in self._handles else []
                then = [f"{start}{file}" for file in files_beside_manifest(one.shards)]
                self._queue.delete(name, after=[*self._last, *own], then=then)

    def delete_uploaded(self, names: "Sequence[str]") -> None:
        """Deletes those of these files that this rank uploads, once they are there."""
        for name in names:
            with contextlib.suppress(ValueError):  # A name that no store has, as above.
                if self._queue is not None and name in self._handles:
                    self._queue.delete(name, after=[self._handles[name]])

    def delete_here(self, removed: "Sequence[SavedCheckpoint]") -> None:
        """Does nothing: what is on this machine is the saver's."""

    def withdraw(self, checkpoints: "Iterable[SavedCheckpoint]", *, is_away: bool = False) -> int:
        """Withdraws what is not uploaded yet of checkpoints that are not kept; returns of how many.

        One that is being uploaded is tried again at the next call: the store may be away.

        Args:
            checkpoints: that are not kept any more.
            is_away: whether nothing is withdrawn unless uploads fail; one for all calls of a run.
        """
        self._is_away = is_away
        for one in checkpoints:
            with contextlib.suppress(ValueError):
                if one.remote_name == self.store.uri(one.name):
                    start = one.name.removesuffix(MANIFEST)
                    beside = [start + file for file in files_beside_manifest(one.shards)]
                    self._unwanted[one.name] = [one.name, *beside]
        if self._queue is None or not self._unwanted or (is_away and not self._is_failing(self._queue)):
            return 0
        before = len(self._withdrawn)
        for name, names in self._unwanted.items():
            with contextlib.suppress(ValueError):  # It may be somebody else's, likewise.
                if sum(map(self._queue.withdraw, names)):
                    self._withdrawn.add(name)
        count = len(self._withdrawn) - before
        pending = set(self._queue.backlog().remaining)
        self._unwanted = {
            name: names for name, names in self._unwanted.items() if not pending.isdisjoint(names)
        }
        self._withdrawn.intersection_update(self._unwanted)
        return count

    def _is_failing(self, queue: "UploadQueue") -> bool:
        """Returns whether an upload has failed again and again, and none has succeeded since."""
        done = {name for name, handle in self._handles.items() if handle.state == "done"}
        if queue.is_retrying(_FAILURES_WHILE_AWAY):
            self._done_before = done
        elif self._done_before is not None and not done <= self._done_before:
            self._done_before = None
        return self._done_before is not None

    def names_of(self, checkpoints: "Iterable[SavedCheckpoint]") -> list[str]:
        """Returns the names of the files that these checkpoints have in the store; waits for it.

        Raises:
            UploadError: the store cannot be asked.
        """
        return [found.name for one in checkpoints for found in self.store.list(_beginning(one))]

    def uris(self, name: str) -> tuple[str, ...]:
        """Returns the URI of a checkpoint."""
        return (self.store.uri(name),)

    def download(self, name: str) -> Path:
        """Downloads a checkpoint to the folder on this machine, verified by size and checksum.

        Raises:
            CheckpointError: it could not be downloaded.
        """
        from uploads import UploadError, download_file

        try:
            return download_file(
                name, self.local / name, store=self.store, overwrite=True, progress_bar=False
            )
        except (UploadError, OSError) as error:
            raise CheckpointError(f"cannot download {self.store.uri(name)}: {error}") from error

    def first_names(self) -> list[str]:
        """Returns the names of the first thousand objects in the store, which S3 lists by one request.

        Raises:
            UploadError: the store cannot be asked.
        """
        return [one.name for one in itertools.islice(self.store.list(""), _FIRST_NAMES)]

    def close(self, seconds: float) -> None:
        """Uploads for up to so many seconds; what is left stays in the spool, and the log names it."""
        self.withdraw((), is_away=self._is_away)
        queue, self._queue = self._queue, None
        if queue is not None:
            with contextlib.suppress(Exception):  # `close` says what is left.
                queue.drain(seconds)
            queue.close(0.0)


class UploadedFolder:
    """The folder of checkpoints that destinations upload.

    Args:
        logger: their destinations.
        folder: its name there.
    """

    def __init__(self, logger: Logger, folder: str) -> None:
        self._logger = logger
        self._folder = folder
        self._last: list[str] = []

    def submit(self, path: Path, name: str, crc32: int | None, *, overwrite: bool) -> None:
        """Hands on a file; see `RemoteFolder`."""
        self._logger.upload_file(f"{self._folder}/{name}", path, overwrite=overwrite, link=True, crc32=crc32)

    def has_uploaded(self, names: "Sequence[str]") -> bool:
        """Returns whether destinations have uploaded all of these files.

        Raises:
            OSError: one never will be there.
        """
        return all(self._logger.has_uploaded(f"{self._folder}/{name}") for name in names)

    def has_withdrawn(self, names: "Sequence[str]") -> bool:
        """Returns False: what was handed on stays there."""
        return False

    def delete_uploaded(self, names: "Sequence[str]") -> None:
        """Does nothing: nothing was withdrawn."""

    def move_pointer(self, pointer: str | None, name: str) -> None:
        """Hands on a pointer to a file, None for none."""
        self._last = [f"{self._folder}/{name}"]
        if pointer is not None:
            self._last.append(f"{self._folder}/{pointer}")
            # Not the one on the disk, which may lead to a newer checkpoint by now.
            with tempfile.TemporaryDirectory(prefix="pointer-") as folder:
                (Path(folder) / pointer).write_text(self._last[0])
                self._logger.upload_file(self._last[1], Path(folder) / pointer, overwrite=True)

    def delete(self, one: SavedCheckpoint) -> None:
        """Has destinations that send files delete a checkpoint, after what the pointer was moved to."""
        self._delete(one, one.shards, local=False, after=self._last)

    def delete_here(self, removed: "Sequence[SavedCheckpoint]") -> None:
        """Has destinations that keep files on this machine, those of rank 0, delete checkpoints."""
        for one in removed:
            self._delete(one, min(1, one.shards), local=True, after=())

    def _delete(self, one: SavedCheckpoint, ranks: int, *, local: bool, after: "Sequence[str]") -> None:
        """Has a checkpoint deleted, if it is in this folder; of one in shards the manifest first."""
        name = f"{self._folder}/{one.name}"
        if one.remote_name == name:
            start = name.removesuffix(MANIFEST)
            then = [start + file for file in files_beside_manifest(ranks)]
            self._logger.delete_file(name, local=local, after=after, then=then)

    def names_of(self, checkpoints: "Iterable[SavedCheckpoint]") -> list[str]:
        """Returns the names in this folder of the files of these checkpoints in stores; waits for them.

        Raises:
            OSError: a store cannot be asked.
        """
        start = f"{self._folder}/"
        found = [name for one in checkpoints for name in self._logger.list_files(start + _beginning(one))]
        return [name.removeprefix(start) for name in found]

    def uris(self, name: str) -> tuple[str, ...]:
        """Returns the URIs of a checkpoint."""
        return self._logger.file_uris(f"{self._folder}/{name}")


def _beginning(one: SavedCheckpoint) -> str:
    """Returns how the names of all files of a checkpoint begin."""
    return one.name.removesuffix(MANIFEST) if one.shards else one.name


def stored_names(store: "Store", pointer: str | None, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Returns the names of the checkpoints in a store, the newest first.

    Args:
        store: the store.
        pointer: the name of the pointer to the newest, or None.
        pattern: of the names of a run's checkpoints; None for all that end in ".pt". One in shards has the
            name of its manifest.

    Raises:
        CheckpointError: the store cannot be asked.
    """
    from uploads import UploadError

    try:
        found = [one.name for one in store.list("") if _is_checkpoint(one.name)]
        target = None
        if pointer is not None and store.head(pointer) is not None:
            content = b""
            for chunk in store.get(pointer):
                content += chunk
                if len(content) > _POINTER_BYTES:
                    break
            target = content.decode(errors="replace").strip()
    except UploadError as error:
        raise CheckpointError(f"cannot look for checkpoints in {store.uri()}: {error}") from error
    names = [
        name
        for name in found
        if name == target
        or (name.endswith((".pt", f"/{MANIFEST}")) if pattern is None else pattern.fullmatch(name))
    ]
    return newest_names(names, target)


def _is_checkpoint(name: str) -> bool:
    if name.startswith(".") or name.endswith(POINTER_SUFFIX):
        return False
    folder, _, file = name.rpartition("/")
    return not folder or (file == MANIFEST and "/" not in folder)


def newest_names(names: list[str], pointed: str | None) -> list[str]:
    """Returns names in the order in which they are tried: the one that is pointed to, then by their numbers.

    Args:
        names: such as "ep1-ba5.pt" and "ep2-ba10.pt"; the latter is newer.
        pointed: the one that a pointer names, or None.
    """

    def numbers(name: str) -> list[int]:
        return [int(digits) for digits in re.findall(r"\d{1,18}", name)]

    ordered = sorted(names, key=lambda name: (numbers(name), name), reverse=True)
    return [*([pointed] if pointed in names else []), *(name for name in ordered if name != pointed)]
