"""Writes checkpoint files and their pointers, and removes the leftovers of killed writers.

A file is written under a temporary name, `.NAME.PID-NUMBER.tmp`, and renamed once it is complete and on the
disk, so nobody sees a partial file or pointer. The writer locks the temporary file; one without a lock is
abandoned. A checkpoint in shards is a folder that counts once its manifest exists. Any thread or process may
call these functions; they know nothing of a run.
"""

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

__all__ = [
    "MANIFEST",
    "METADATA",
    "POINTER_SUFFIX",
    "SHARD_FILE",
    "AbandonedError",
    "Written",
    "files_beside_manifest",
    "has_identifier",
    "new_file",
    "read_pointer",
    "remove_checkpoint",
    "remove_checkpoints",
    "sweep",
    "sweep_file",
    "tensors_of",
    "values_of",
    "write_checkpoint",
]

POINTER_SUFFIX = ".symlink"
"""The suffix of a pointer: a text file with the name of another file, as Composer writes it."""

MANIFEST = "manifest.json"
"""The name of the last file of a checkpoint in shards, which lists the other files."""

METADATA = ".metadata"
"""The name of the file in which `torch.distributed.checkpoint` locates each tensor."""

SHARD_FILE = re.compile(r"__\d{1,6}_0\.distcp|rank-\d{1,6}\.pt|\.metadata")
"""Matches the other files: tensors of a rank, everything else of a rank, and `METADATA`."""

# Only a hostile file has more.
_MAX_RANKS = 100_000
_SMALL_BYTES = 64 << 10
_BUFFER_BYTES = 1 << 20
# No store has longer names.
_MAX_POINTER_BYTES = 1024
# No file system has longer ones.
_MAX_PART_BYTES = 255
# The part of a name that `remove_if` keeps.
_ASIDE_CHARACTERS = 50
_HEAD_BYTES = 4096
_IDENTIFIER = re.compile(r"[0-9a-f]{32}")
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d{1,10})-\d+\.tmp")


def tensors_of(rank: int) -> str:
    """Returns the name of the file with the tensors of a rank."""
    return f"__{rank}_0.distcp"


def values_of(rank: int) -> str:
    """Returns the name of the file with everything else of a rank."""
    return f"rank-{rank}.pt"


def files_beside_manifest(ranks: int) -> list[str]:
    """Returns the possible names of the other files, for a number of ranks; none for 0 ranks."""
    names = [name for rank in range(min(ranks, _MAX_RANKS)) for name in (values_of(rank), tensors_of(rank))]
    return [METADATA, *names] if names else []


class AbandonedError(Exception):
    """The file is not wanted any more."""


@attrs.frozen
class Written:
    """A file that is complete and on the disk: its size in bytes and the CRC-32 of its bytes."""

    size: int
    crc32: int


class _Checksummed:
    """A file to write to, for `torch.save`, that computes the checksum of the bytes it passes on."""

    def __init__(self, descriptor: int, is_wanted: Callable[[], bool]) -> None:
        self._descriptor = descriptor
        self._is_wanted = is_wanted
        # torch writes five times for each tensor, most of it a few bytes.
        self._small = bytearray()
        self.size = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += len(view)
        if len(view) < _SMALL_BYTES:
            self._small += view
        else:
            self.flush()
            self._write(view)
        if len(self._small) >= _BUFFER_BYTES:
            self.flush()
        return len(view)

    def flush(self) -> None:
        """Writes what is in the buffer."""
        small, self._small = self._small, bytearray()
        if small:
            self._write(memoryview(small))

    def _write(self, view: memoryview) -> None:
        from uploads.disk import write_all

        if not self._is_wanted():
            raise AbandonedError
        write_all(self._descriptor, view)  # type: ignore[arg-type]  # any buffer
        self.crc32 = zlib.crc32(view, self.crc32)


@contextmanager
def new_file(path: Path, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[_Checksummed]:
    """Yields a file for `torch.save` to write to; at the end of the block it is synced and renamed.

    Args:
        path: the file; replaced in one step if it exists.
        is_wanted: asked before each write and before the file gets its name.

    Raises:
        OSError: the file could not be written; nothing has changed.
        AbandonedError: it was not wanted any more; nothing has changed.
    """
    from uploads.disk import replacement, try_lock

    with replacement(path, durable=True) as descriptor:
        with contextlib.suppress(OSError):  # Some network file systems have no locks.
            try_lock(descriptor)
        try:
            file = _Checksummed(descriptor, is_wanted)
            yield file
            file.flush()
        except RuntimeError as error:
            # torch's writer reports its own error when it is closed after one of the file.
            if isinstance(error.__context__, OSError | AbandonedError):
                raise error.__context__ from None
            raise
        if not is_wanted():
            raise AbandonedError


def write_checkpoint(
    values: Any,
    path: Path,
    *,
    pointer: tuple[Path, str] | None = None,
    surplus: tuple[tuple[Path, str], ...] = (),
    is_wanted: Callable[[], bool] = lambda: True,
) -> Written:
    """Writes a file, syncs and renames it, moves the pointer, then removes older checkpoints.

    Args:
        values: for `torch.save`.
        path: the file; replaced in one step if it exists.
        pointer: its path, and the text it gets.
        surplus: checkpoints to remove, and their identifiers; see `remove_checkpoint`.
        is_wanted: asked before each write and before the file gets its name.

    Raises:
        OSError: the file could not be written; nothing has changed.
        AbandonedError: it was not wanted any more; nothing has changed.
    """
    from uploads.disk import replace_file

    with new_file(path, is_wanted) as file:
        torch.save(values, file)  # type: ignore[arg-type]  # it needs only these two methods
    if pointer is not None:
        replace_file(pointer[0], pointer[1].encode(), durable=True)
    remove_checkpoints(surplus)
    return Written(file.size, file.crc32)


def has_identifier(path: str | Path, identifier: str) -> bool:
    """Returns whether a file is the checkpoint, or the manifest, with an identifier.

    The identifier is at the beginning of the summary, which is at the beginning of the file.
    """
    from uploads.disk import closing, open_regular

    if not _IDENTIFIER.fullmatch(identifier):
        return False
    try:
        with closing(open_regular(path)) as descriptor:
            return f'"id": "{identifier}"'.encode() in os.pread(descriptor, _HEAD_BYTES, 0)
    except OSError:
        return False


def remove_checkpoint(path: Path, identifier: str) -> None:
    """Removes a checkpoint if it has this identifier; files that can't be removed stay.

    Args:
        path: the file; or the manifest of a checkpoint in shards, whose folder is removed too if it is empty
            then. Without a manifest, the shards are removed; the lock of the folder must be held.
        identifier: see `has_identifier`.
    """
    from uploads.disk import remove_if

    for one in (*_put_aside(path), path):
        with contextlib.suppress(OSError):
            remove_if(one, lambda place: has_identifier(place, identifier))
    if path.name == MANIFEST and not path.is_file():
        with contextlib.suppress(OSError):
            for one in path.parent.iterdir():
                if SHARD_FILE.fullmatch(one.name):
                    one.unlink(missing_ok=True)
            path.parent.rmdir()


def remove_checkpoints(surplus: Iterable[tuple[Path, str]]) -> None:
    """Removes checkpoints, given their paths and identifiers; see `remove_checkpoint`."""
    for path, identifier in surplus:
        remove_checkpoint(path, identifier)


def _put_aside(path: Path) -> list[Path]:
    """Returns files that a killed process had moved aside with `remove_if` but not yet removed."""
    pattern = re.compile(rf"\.{re.escape(path.name[:_ASIDE_CHARACTERS])}\.[0-9a-f]{{12}}\.removed")
    try:
        return [one for one in path.parent.iterdir() if pattern.fullmatch(one.name)]
    except OSError:
        return []


def sweep(folder: Path, is_own: Callable[[str], bool] = lambda _: True) -> list[Path]:
    """Removes the leftovers of killed writers: temporary files, and shards without a manifest.

    A temporary file that is still being written has a lock and stays, with its folder. So do all other kinds
    of files. The temporary file of a pointer has no lock; it stays while the process in its name is alive.

    Args:
        folder: the folder, whose lock is held.
        is_own: whether the lock covers a checkpoint or pointer of this name; others may be in progress.

    Returns:
        The removed paths.
    """
    removed = _sweep_files(folder, is_own)
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if (
                is_own(path.name)
                and path.is_dir()
                and not path.is_symlink()
                and not (path / MANIFEST).exists()
            ):
                removed += _sweep_shards(path)
    return removed


def sweep_file(path: Path) -> None:
    """Removes the temporary files of killed writers of one file, unless someone is writing it."""
    _sweep_files(path.parent, lambda name: name == path.name)


def _sweep_files(folder: Path, is_own: Callable[[str], bool] = lambda _: True) -> list[Path]:
    from uploads.disk import has_process_ended, is_open_file, open_regular, remove_if, try_lock

    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            found = _TEMPORARY.fullmatch(path.name)
            if (
                not found
                or not is_own(found["name"])
                or (f"{POINTER_SUFFIX}." in path.name and not has_process_ended(int(found["pid"])))
            ):
                continue
            with contextlib.suppress(OSError):
                descriptor = open_regular(path)
                try:
                    if try_lock(descriptor) and remove_if(path, is_open_file(descriptor)):
                        removed.append(path)
                finally:
                    os.close(descriptor)
    return removed


def _sweep_shards(folder: Path) -> list[Path]:
    """Removes a folder of shards without a manifest, unless the user's own code wrote it."""
    names = [path.name for path in folder.iterdir()]
    # The first file that is written; torch.distributed.checkpoint has none of that name.
    if not any(name.lstrip(".").startswith("rank-") for name in names):
        return []
    if not all(SHARD_FILE.fullmatch(name) or _TEMPORARY.fullmatch(name) for name in names):
        return []
    removed = _sweep_files(folder)
    if any(_TEMPORARY.fullmatch(path.name) for path in folder.iterdir()):
        return removed
    remove_checkpoint(folder / MANIFEST, "")
    return [folder]


def read_pointer(path: Path) -> str | None:
    """Returns the name in a pointer, or None if the file is no pointer or its name leads elsewhere."""
    with path.open("rb") as file:
        start = file.read(_MAX_POINTER_BYTES + 1)
    try:
        text = start.decode().strip()
    except UnicodeDecodeError:
        return None
    parts = text.split("/")
    is_name = ".." not in parts and all(len(part.encode()) <= _MAX_PART_BYTES for part in parts)
    if len(start) > _MAX_POINTER_BYTES or "\0" in text or "\n" in text or not is_name:
        return None
    return text
