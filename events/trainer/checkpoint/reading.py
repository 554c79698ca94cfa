"""Finds and reads checkpoints: a file, a folder, an object in a store, or what destinations have of a run.

Everything runs in the training thread. A checkpoint is checked whole, by the checksums that are in the file,
before anything is taken from it; no code in it is run.
"""

import logging
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from events.errors import CheckpointError
from events.logger.logger import Logger
from events.names import format_name
from events.state import State

from .contents import VERSION
from .files import POINTER_SUFFIX, read_pointer
from .remote import RemoteFolder, is_uri, newest_names

__all__ = ["SavePlace", "find_checkpoint", "read_checkpoint"]

_log = logging.getLogger("events")


@attrs.frozen
class SavePlace:
    """Where a run saves its checkpoints; each may contain placeholders.

    Attributes:
        folder: a local folder, or the URI of one in a store.
        pointer: the name of the pointer to the newest, or None.
        remote_folder: the folder of the files that destinations upload.
    """

    folder: str
    pointer: str | None
    remote_folder: str


def read_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Reads a checkpoint, or the one that a pointer names; executes no code from the file.

    ```python
    checkpoint = read_checkpoint("checkpoints/latest.symlink")
    model.load_state_dict(checkpoint["model"])
    ```

    Args:
        path: a checkpoint, a pointer (`latest.symlink`), a folder, whose newest is read, or the URI of a
            checkpoint or pointer in a store, which is downloaded to a temporary file.
        device: the device to load tensors to.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is corrupt, not a checkpoint of this project, or of a later version of it.
    """
    if is_uri(str(path)):
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            return read_checkpoint(_download_uri(str(path), Path(folder)), device)
    path = Path(path)
    if path.is_dir():
        path = next(_local_checkpoints(path, f"latest{POINTER_SUFFIX}"), path)
    if path.name.endswith(POINTER_SUFFIX):
        path = _resolve_pointer(path)
    try:
        _check_sums(path)
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} must be readable by torch.load(weights_only=True), "
            f"got {type(error).__name__}: {error}"
        ) from error
    version = checkpoint.get("version") if isinstance(checkpoint, Mapping) else None
    if version != VERSION:
        raise CheckpointError(
            f"checkpoint {str(path)!r} must be of version {VERSION}, got {version!r}. "
            "To use weights of other origin, load them into the model before passing it to the Trainer."
        )
    return dict(checkpoint)


def _check_sums(path: Path) -> None:
    """Reads the whole file and compares the CRC-32 of each part, which torch writes and does not check.

    Raises:
        zipfile.BadZipFile: the file is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"bad CRC-32 of {damaged!r}")


def _resolve_pointer(pointer: Path) -> Path:
    """Returns the local checkpoint that a pointer names: the longest suffix of the name that exists."""
    name = read_pointer(pointer)
    if not name:
        raise CheckpointError(f"pointer {str(pointer)!r} must hold the name of a checkpoint.")
    parts = name.split("/")
    candidates = [pointer.parent.joinpath(*parts[start:]) for start in range(len(parts))]
    return next((path for path in candidates if path.is_file()), candidates[-1])


def find_checkpoint(
    load_path: str | Path | None, place: SavePlace | None, state: State, logger: Logger
) -> tuple[dict[str, Any], str] | None:
    """Reads the checkpoint to start from; returns it and where it is, or None.

    Args:
        load_path: a local path, a URI, "latest" for the newest of the run, or a name that a destination can
            download.
        place: where the run saves, if it is to be resumed; its newest checkpoint that is whole takes
            precedence over `load_path`.
        state: the run.
        logger: its destinations are asked to download what is not local.

    Raises:
        FileNotFoundError: `load_path` was found neither locally nor remotely.
        CheckpointError: none of those that were found is whole.
    """
    if place is not None:
        damaged: CheckpointError | None = None
        for path in _checkpoints_at(place, state, logger):
            try:
                return read_checkpoint(path), str(path)
            except (CheckpointError, FileNotFoundError) as error:
                _log.warning("%s The checkpoint before it is tried.", error)
                damaged = damaged or CheckpointError(str(error))
        if damaged is not None:
            raise damaged
    if load_path is None:
        return None
    text = format_name(str(load_path), state)
    if is_uri(text) or Path(text).exists():
        return read_checkpoint(text), text
    path = _download(text, Path(text).parent, state, logger)
    return read_checkpoint(path), str(path)


def _checkpoints_at(place: SavePlace, state: State, logger: Logger) -> Iterator[Path]:
    """Yields the checkpoints of a run, the newest first; downloads those that are not here."""
    pointer = None if place.pointer is None else format_name(place.pointer, state)
    if is_uri(place.folder):
        yield from _checkpoints_in_store(RemoteFolder(place.folder, state), pointer)
        return
    folder = Path(format_name(place.folder, state))
    found = False
    for path in _local_checkpoints(folder, pointer):
        found = True
        yield path
    if found or pointer is None:
        return
    try:
        name = f"{format_name(place.remote_folder, state).rstrip('/')}/{pointer}"
        yield _download(name, folder, state, logger)
    except FileNotFoundError:
        return


def _local_checkpoints(folder: Path, pointer: str | None) -> Iterator[Path]:
    """Yields the checkpoints in a folder, the newest first; none where a pointer is expected and missing."""
    target = None
    if pointer is not None:
        if not (folder / pointer).is_file():
            return
        target = _resolve_pointer(folder / pointer)
        yield target
    names = [path.name for path in folder.glob("[!.]*.pt") if path.is_file()] if folder.is_dir() else []
    yield from (folder / name for name in newest_names(names, None) if folder / name != target)


def _checkpoints_in_store(remote: RemoteFolder, pointer: str | None) -> Iterator[Path]:
    """Yields those here and in the store by their numbers: what is here may not be uploaded yet."""
    here = [path.name for path in _local_checkpoints(remote.local, pointer)]
    there = remote.names(pointer)
    first = newest_names([*here[:1], *there[:1]], None)
    for name in dict.fromkeys([*first, *here, *there]):
        if name in here:
            yield remote.local / name
        else:
            try:
                yield remote.download(name)
            except CheckpointError as error:
                _log.warning("%s The checkpoint before it is tried.", error)


def _download_uri(uri: str, folder: Path) -> Path:
    """Downloads an object of a store, or what a pointer names, verified by size and checksum."""
    from uploads import UploadError, download_file

    try:
        return download_file(uri.replace(POINTER_SUFFIX, ""), folder / "checkpoint.pt", progress_bar=False)
    except UploadError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(f"cannot download {uri}: {error}") from error


def _download(name: str, folder: Path, state: State, logger: Logger) -> Path:
    """Downloads a checkpoint, or the one that a pointer names, into a folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    name = format_name(name, state)
    target = folder / name.rpartition("/")[2]
    logger.download_file(name, target, overwrite=True, progress_bar=state.rank == 0)
    if not name.endswith(POINTER_SUFFIX):
        return target
    pointed = read_pointer(target)
    if pointed is None:
        # Some destinations follow a pointer themselves, and download its target under its name.
        return target.replace(target.with_name(f"{name.rpartition('/')[2].removesuffix(POINTER_SUFFIX)}.pt"))
    logger.download_file(
        pointed, folder / pointed.rpartition("/")[2], overwrite=True, progress_bar=state.rank == 0
    )
    return target
