"""Finds and reads checkpoints: a file, a folder, an object in a store, or the files of a destination.

Everything runs in the training thread. The checksums in the file are checked before anything is read, and no
code from it is run. A checkpoint in shards goes by the name of its manifest.
"""

import logging
import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import attrs
import torch

from events.errors import CheckpointError
from events.logger.logger import Logger
from events.names import LiteralName, format_name
from events.state import State
from events.trainer import distributed

from .contents import VERSION
from .files import MANIFEST, POINTER_SUFFIX, read_pointer
from .folder import (
    CheckpointFolder,
    RemoteFolder,
    is_uri,
    local_names,
    newest_names,
    resolve_pointer,
    stored_names,
)
from .sharded import Fetch, ShardedCheckpoint

__all__ = ["find_checkpoint", "newest_checkpoint", "read_checkpoint"]

_log = logging.getLogger("events")

_NONE_THERE = "none"


def read_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Reads a checkpoint, or the one that a pointer names; executes no code from the file.

    ```python
    checkpoint = read_checkpoint("checkpoints/latest.symlink")
    model.load_state_dict(checkpoint["model"])
    ```

    A checkpoint in shards is assembled into whole tensors.

    Args:
        path: a checkpoint, a pointer (`latest.symlink`), a folder, whose newest is read, or the URI of a
            checkpoint or pointer in a store, which is downloaded to a temporary file.
        device: the device to load tensors to.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is corrupt, not a checkpoint of this project, or of a later version of it.
    """
    return _read(path, device)


def _read(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    state: State | None = None,
    fetch: Fetch | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint; see `read_checkpoint`.

    Args:
        path: see `read_checkpoint`.
        device: see `read_checkpoint`.
        state: the run to load it into; only the shards that this rank needs are read.
        fetch: downloads files of a checkpoint in shards.
    """
    if is_uri(str(path)):
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            local, fetch = _download_uri(str(path), Path(folder))
            return _read(local, device, state=state, fetch=fetch)
    path = _checkpoint_at(Path(path))
    try:
        if path.name == MANIFEST:
            checkpoint: Any = ShardedCheckpoint(path, fetch).read(device, state)
        else:
            # Opened once, so that the checked file is the loaded one.
            with path.open("rb") as file:
                _check_sums(file)
                file.seek(0)
                checkpoint = torch.load(file, map_location=device, weights_only=True)
    except (FileNotFoundError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} must be readable by torch.load(weights_only=True), "
            f"got {type(error).__name__}: {error}"
        ) from error
    version = checkpoint.get("version") if isinstance(checkpoint, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"checkpoint {str(path)!r} must be of version {VERSION}, got {version!r}. "
            "To use weights from elsewhere, load them into the model before passing it to the Trainer."
        )
    return dict(checkpoint)


def _checkpoint_at(path: Path) -> Path:
    """Returns the checkpoint at a path: the newest in a folder, or the target of a pointer."""
    if path.is_dir():
        names = [MANIFEST] if (path / MANIFEST).is_file() else local_names(path, f"latest{POINTER_SUFFIX}")
        if not names:
            raise FileNotFoundError(f"folder {str(path)!r} must hold a checkpoint.")
        path = path / names[0]
    return resolve_pointer(path) if path.name.endswith(POINTER_SUFFIX) else path


def _called(path: str) -> str:
    """Returns the name that a save uses: for a checkpoint in shards the folder, not the manifest."""
    place, question_mark, options = path.partition("?") if is_uri(path) else (path, "", "")
    return f"{place.removesuffix(f'/{MANIFEST}')}{question_mark}{options}"


def _check_sums(file: IO[bytes]) -> None:
    """Reads the whole file and checks the CRC-32 of each part, which torch writes but does not check.

    Raises:
        zipfile.BadZipFile: the file is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"bad CRC-32 of {damaged!r}")


def find_checkpoint(
    load_path: str | Path | None, state: State, logger: Logger
) -> tuple[dict[str, Any], str] | None:
    """Reads the checkpoint at a path; returns it and its path as a save would give it.

    Args:
        load_path: a local path, a URI, or a name that a destination can download; None for no checkpoint.
        state: the run.
        logger: its destinations may download the checkpoint.

    Raises:
        FileNotFoundError: it was found neither locally nor remotely.
        CheckpointError: it is damaged.
    """
    if load_path is None:
        return None
    text = os.path.expanduser(load_path)  # noqa: PTH111  # Path raises without a home
    text = text if Path(text).exists() else format_name(text, state)
    if is_uri(text):
        return _read(text, state=state), _called(text)
    if Path(text).exists():
        return _read(text, state=state), _called(str(_checkpoint_at(Path(text))))
    path, fetch = _download_from_destination(text, Path(text).parent, state, logger)
    return _read(path, state=state, fetch=fetch), _called(str(path))


def newest_checkpoint(
    run_folder: CheckpointFolder, state: State, logger: Logger
) -> tuple[dict[str, Any], str] | None:
    """Reads the newest intact checkpoint of a run, as `find_checkpoint`; rank 0 chooses it for all ranks.

    A checkpoint in shards must be intact on every rank. Ranks without a single-file checkpoint get the
    content that rank 0 has read.

    Raises:
        CheckpointError: there are checkpoints, but none is intact; or rank 0 cannot list them.
    """
    pointer, remote = run_folder.pointer_name(state), run_folder.remote(state)
    candidates = (
        _in_folder(run_folder, pointer, state, logger)
        if remote is None
        else _in_store(remote, pointer, run_folder.pattern(state))
    )
    names, problem = distributed.from_rank_zero(_named(candidates) if state.rank == 0 else ([], ""))
    for name in names:
        found, failure = _attempt(candidates, name, state)
        failures = distributed.gather(failure)
        if failures[0] == _NONE_THERE:
            return None
        if not any(failures):
            return found
        if not run_folder.is_sharded and not failures[0]:
            return distributed.from_rank_zero(found)  # type: ignore[no-any-return]
        failure = next(filter(None, failures))
        _log.warning("%s The previous checkpoint is tried.", failure)
        problem = problem or failure
    if problem:
        raise CheckpointError(problem)
    return None


def _named(candidates: "_Candidates") -> tuple[list[str], str]:
    """Returns the names of the candidates, or an error message."""
    try:
        return candidates.names(), ""
    except (CheckpointError, OSError) as error:
        return [], str(error)


def _attempt(
    candidates: "_Candidates", name: str, state: State
) -> tuple[tuple[dict[str, Any], str] | None, str]:
    """Returns a checkpoint and its path, or an error message."""
    try:
        path, fetch = candidates.obtain(name)
        uri = candidates.uri(name)
        try:
            checkpoint = _read(path, state=state, fetch=fetch)
        except CheckpointError as error:
            if uri is None or fetch is None or path.name == MANIFEST:
                raise
            _log.warning("%s It is downloaded again.", error)
            fetch("", name)
            checkpoint = _read(path, state=state)
        return (checkpoint, _called(str(path) if uri is None else uri)), ""
    except _NoneThereError:
        return None, _NONE_THERE
    except (CheckpointError, OSError) as error:
        return None, str(error)


class _NoneThereError(Exception):
    """No destination has a checkpoint of the run."""


@attrs.frozen
class _Candidates:
    """The checkpoints of a run.

    Attributes:
        names: returns their names, newest first.
        obtain: returns the path of one, downloaded if necessary, and a function that downloads its other
            files.
        uri: returns the URI of one in a store, or None.
    """

    names: Callable[[], list[str]]
    obtain: Callable[[str], tuple[Path, Fetch | None]]
    uri: Callable[[str], str | None] = lambda _: None


def _in_folder(
    run_folder: CheckpointFolder, pointer: str | None, state: State, logger: Logger
) -> _Candidates:
    """Returns the candidates in a local folder; if there are none, the newest of a destination."""
    folder = run_folder.path(state)

    def names() -> list[str]:
        return local_names(folder, pointer, run_folder.pattern(state)) or ([] if pointer is None else [""])

    def obtain(name: str) -> tuple[Path, Fetch | None]:
        if name:
            return folder / name, None
        try:
            name = f"{run_folder.destination_folder(state)}/{pointer}"
            return _download_from_destination(name, folder, state, logger)
        except FileNotFoundError as error:
            raise _NoneThereError from error

    return _Candidates(names, obtain)


def _in_store(remote: RemoteFolder, pointer: str | None, pattern: re.Pattern[str]) -> _Candidates:
    """Returns local and stored candidates, ordered by their numbers; local ones may not be uploaded yet."""

    def names() -> list[str]:
        here = local_names(remote.local, pointer, pattern)
        there = stored_names(remote.store, pointer, pattern)
        first = newest_names([*here[:1], *there[:1]], None)
        return list(dict.fromkeys([*first, *here, *there]))

    def obtain(name: str) -> tuple[Path, Fetch | None]:
        path = remote.local / name
        if not path.exists():
            remote.download(name)
        folder = name.rpartition("/")[0]
        return path, lambda _, file: remote.download(f"{folder}/{file}" if folder else file)

    return _Candidates(names, obtain, remote.store.uri)


def _download_uri(uri: str, folder: Path) -> tuple[Path, Fetch | None]:
    """Downloads an object, the target of a pointer, or the newest checkpoint in a folder of a store.

    Returns:
        See `_download`.
    """
    from uploads import UploadError, download_file, open_store

    # `download_file` follows pointers itself, where there is no object of the name.
    place, question_mark, options = uri.replace(POINTER_SUFFIX, "").partition("?")
    place = place.rstrip("/")

    def get(name: str, path: Path) -> None:
        try:
            download_file(f"{name}{question_mark}{options}", path, progress_bar=False)
        except UploadError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise CheckpointError(f"cannot download {name}: {error}") from error

    try:
        return _download(place, folder, get)
    except FileNotFoundError:
        store = open_store(f"{place}{question_mark}{options}")
        try:
            is_in_shards = store.head(MANIFEST) is not None
        except UploadError as problem:
            raise CheckpointError(f"cannot look for checkpoints in {place}: {problem}") from problem
        names = [MANIFEST] if is_in_shards else stored_names(store, f"latest{POINTER_SUFFIX}")
        if not names:
            raise
    return _download(f"{place}/{names[0]}", folder, get)


def _download_from_destination(
    name: str, folder: Path, state: State, logger: Logger
) -> tuple[Path, Fetch | None]:
    """Downloads a checkpoint, or the target of a pointer, from a destination into a folder.

    Returns:
        See `_download`.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def get(name: str, path: Path) -> None:
        logger.download_file(LiteralName(name), path, overwrite=True, progress_bar=state.rank == 0)

    return _download(name, folder, get, state.rank)


def _download(
    name: str, folder: Path, get: Callable[[str, Path], None], rank: int = 0
) -> tuple[Path, Fetch | None]:
    """Downloads a checkpoint, or the target of a pointer, into a folder.

    Args:
        name: the name of the checkpoint, or of a pointer to it.
        folder: an existing folder.
        get: downloads a file of this name to a path.
        rank: this rank; several ranks of one machine may download the same file.

    Returns:
        The path of the checkpoint; and, if it is a manifest, a function that downloads the other files.
    """
    target = folder / f".rank-{rank}-{name.rpartition('/')[2]}"
    get(name, target)
    if name.endswith(POINTER_SUFFIX):
        # Some destinations follow the pointer themselves and download its target under this name.
        pointed = read_pointer(target)
        name = f"{name.removesuffix(POINTER_SUFFIX)}.pt" if pointed is None else pointed
        if pointed is not None:
            get(pointed, target)
    parent, _, file = name.rpartition("/")
    if not _is_manifest(target):
        return target.replace(folder / file), None
    shards = folder / ShardedCheckpoint(target).name
    shards.mkdir(exist_ok=True)

    def fetch(checkpoint: str, shard: str) -> None:
        part = shards / f".rank-{rank}-{shard}"
        get(f"{parent}/{shard}" if file == MANIFEST else f"{parent}/{checkpoint}/{shard}", part)
        part.replace(shards / shard)

    return target.replace(shards / MANIFEST), fetch


def _is_manifest(path: Path) -> bool:
    """Returns whether a file is a manifest; a checkpoint in one file is a ZIP archive."""
    with path.open("rb") as file:
        return file.read(1) == b"{"
