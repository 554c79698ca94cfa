"""A folder for checkpoints that is in a store: `save_folder="s3://bucket/runs/{run_name}"`.

Checkpoints are written to a folder of this machine beside the spools, linked into the spool of an upload
queue, and uploaded from there. The newest stays on this machine.
"""

import contextlib
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from events.errors import CheckpointError
from events.names import check_run_name, format_run_name
from events.state import State

from .files import MANIFEST, POINTER_SUFFIX, Written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from uploads import UploadHandle, UploadQueue

__all__ = ["RemoteFolder", "are_uploaded", "is_uri", "newest_names"]

_BROKEN_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
_POINTER_BYTES = 1024
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

    def open(self) -> None:
        """Opens the upload queue, which also uploads what an earlier process left behind."""
        from uploads import UploadQueue

        if self._queue is None:
            self._queue = UploadQueue(self._given, close_at_exit=False, free_bytes=0)

    def hand_on(self, path: Path, pointer: str | None, written: Written, *, overwrite: bool) -> str:
        """Submits a checkpoint and its pointer; returns the URI it will have.

        Args:
            path: the file; not written to any more.
            pointer: the name of the pointer, or None for none.
            written: of the file.
            overwrite: whether it may replace an older one of the same name.
        """
        self.move_pointer(pointer, self.submit(path, path.name, written.crc32, overwrite=overwrite))
        return self.store.uri(path.name)

    def submit(self, path: Path, name: str, crc32: int | None, *, overwrite: bool) -> "UploadHandle":
        """Submits a file; returns its handle.

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
        self._handles.pop(name, None)
        self._handles[name] = handle
        while len(self._handles) > _HANDLES_KEPT:
            del self._handles[next(iter(self._handles))]
        return handle

    def move_pointer(self, pointer: str | None, target: "UploadHandle") -> None:
        """Submits a pointer, visible once its target is in the store; None for none."""
        self.open()
        assert self._queue is not None  # noqa: S101  # opened above
        self._last = [target]
        if pointer is not None:
            self._last.append(self._queue.submit_pointer(pointer.removesuffix(POINTER_SUFFIX), target))

    def delete(self, uri: str, beside: "Sequence[str]" = ()) -> None:
        """Deletes a checkpoint of this folder in the background, after what the pointer was moved to.

        Args:
            uri: of the checkpoint, or of the manifest of one in shards; others are not deleted.
            beside: the names of the files in the folder of that manifest, which follow it.
        """
        *_, folder, name = unquote(uri.partition("?")[0]).split("/")
        start = f"{folder}/" if beside else ""
        name = f"{start}{name}"
        if self._queue is not None and uri == self.store.uri(name):
            own = [self._handles[name]] if name in self._handles else []
            self._queue.delete(name, after=[*self._last, *own], then=[f"{start}{one}" for one in beside])

    def names(self, pointer: str | None, pattern: re.Pattern[str]) -> list[str]:
        """Returns the names of the checkpoints in the store, the newest first.

        Args:
            pointer: the name of the pointer to the newest, or None.
            pattern: of the names of the others.

        Raises:
            CheckpointError: the store cannot be asked.
        """
        from uploads import UploadError

        try:
            found = [one.name for one in self.store.list("") if _is_checkpoint(one.name)]
            target = None
            if pointer is not None and self.store.head(pointer) is not None:
                content = b""
                for chunk in self.store.get(pointer):
                    content += chunk
                    if len(content) > _POINTER_BYTES:
                        break
                target = content.decode(errors="replace").strip()
        except UploadError as error:
            raise CheckpointError(f"cannot look for checkpoints in {self.store.uri()}: {error}") from error
        return newest_names([one for one in found if one == target or pattern.fullmatch(one)], target)

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
        queue, self._queue = self._queue, None
        if queue is not None:
            with contextlib.suppress(Exception):  # `close` says what is left.
                queue.drain(seconds)
            queue.close(0.0)


def are_uploaded(handles: "Sequence[UploadHandle]") -> bool:
    """Returns whether all of them are in the store.

    Raises:
        OSError: one never will be.
    """
    for handle in handles:
        if handle.done() and (error := handle.exception(0.0)) is not None:
            raise OSError(f"{handle.remote_name}: {error}")
    return all(handle.done() for handle in handles)


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
