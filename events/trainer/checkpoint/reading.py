"""Finds and reads checkpoints: from a file, a pointer, or the destinations of a run.

Everything runs in the training thread. A checkpoint is checked whole, by the checksums that are in the file,
before anything is taken from it; no code in it is run.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from events.errors import CheckpointError
from events.logger.logger import Logger
from events.names import format_name
from events.state import State

from .contents import VERSION
from .files import POINTER_SUFFIX, read_pointer

__all__ = ["find_checkpoint", "read_checkpoint"]


def read_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Reads a checkpoint, or the one that a pointer names; executes no code from the file.

    Args:
        path: a checkpoint, or a pointer (`latest.symlink`).
        device: the device to load tensors to.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is corrupt, not a checkpoint of this project, or of a later version of it.
    """
    path = Path(path)
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
    load_path: str | Path | None, resume_folder: str | Path | None, state: State, logger: Logger
) -> Path | None:
    """Returns the local path of the checkpoint to start from, downloading it if necessary, or None.

    Args:
        load_path: a local path, or a name that a destination can download.
        resume_folder: where the run saves; its own newest checkpoint takes precedence over `load_path`.
        state: the run.
        logger: its destinations are asked to download what is not local.

    Raises:
        FileNotFoundError: `load_path` was found neither locally nor remotely.
    """
    if resume_folder is not None:
        folder = Path(format_name(str(resume_folder), state))
        pointer = folder / f"latest{POINTER_SUFFIX}"
        if pointer.exists():
            return pointer
        try:
            return _download(f"{state.run_name}/checkpoints/{pointer.name}", folder, state, logger)
        except FileNotFoundError:
            pass
    if load_path is None:
        return None
    local = Path(format_name(str(load_path), state))
    return local if local.exists() else _download(str(load_path), local.parent, state, logger)


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
