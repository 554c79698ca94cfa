"""Checkpoints: saving, finding and loading everything that a run needs to resume exactly.

A checkpoint is one file that `torch.load(weights_only=True)` reads: tensors and plain values, no code. A
pointer in the same folder names the newest: a text file with the name under which the checkpoint is uploaded,
as Composer writes it. Both are written to a temporary file and renamed, so that neither is ever seen in part.
Everything runs in the training thread.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from events.callback import Callback
from events.errors import CheckpointError
from events.interval import Interval
from events.logger.logger import Logger
from events.names import format_name
from events.state import State
from events.timestamp import Time, Timestamp

from . import distributed
from .random_state import random_state_of

__all__ = ["CheckpointSaver", "find_checkpoint", "load_checkpoint", "read_checkpoint"]


_log = logging.getLogger("events")

_VERSION = 1
_POINTER_SUFFIX = ".symlink"
# No store has longer names.
_MAX_POINTER_BYTES = 1024


class CheckpointSaver(Callback):
    """Saves a checkpoint at an interval and when training ends, and uploads it through the destinations.

    Rank 0 writes; all ranks contribute the states of their random number generators. Training blocks while
    the file is written to the local disk, but not for its upload. A full disk costs this one checkpoint, not
    the run: the error is reported, older checkpoints stay, and the next interval tries again.

    Args:
        folder: where to save; may contain placeholders such as `{run_name}`.
        filename: the name of a checkpoint in it; must be unique, for example by `{batch}`.
        save_interval: how often, such as "1ep", "500ba" or "30m".
        latest_filename: the name of the pointer to the newest; None for no pointer.
        keep: how many of the newest to keep locally; None for all. Uploaded files are never deleted.
        remote_folder: the folder of the uploaded files.
        overwrite: whether a new run may save into a folder where another run has saved.

    Raises:
        ValueError: `keep` is less than one.
        TimeStringError: the interval has no unit.
        FileExistsError: at `FIT_START`, the folder holds checkpoints of another run.
    """

    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str = "ep{epoch}-ba{batch}.pt",
        *,
        save_interval: str | int | Time = "1ep",
        latest_filename: str | None = f"latest{_POINTER_SUFFIX}",
        keep: int | None = None,
        remote_folder: str = "{run_name}/checkpoints",
        overwrite: bool = False,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}. Write None to keep all.")
        self._folder = str(folder)
        self._filename = filename
        self._interval = Interval(save_interval, default_unit="ep")
        self._latest_filename = latest_filename
        self._keep = keep
        self._remote_folder = remote_folder
        self._overwrite = overwrite
        self._saved: list[str] = []
        self._saved_at: Timestamp | None = None
        self._is_resumed = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Raises FileExistsError if the folder holds checkpoints of another run."""
        self._interval.start(state)
        folder = Path(format_name(self._folder, state))
        if (
            self._latest_filename is None
            or self._overwrite
            or self._is_resumed
            or self._saved
            or state.rank != 0
        ):
            return
        pointer = folder / self._latest_filename
        if pointer.exists():
            raise FileExistsError(
                f"checkpoint folder must be new for a new run, but {folder} holds "
                f"{pointer.read_text(encoding='utf-8').strip()!r} of another run. Pass autoresume=True or "
                "load_path to resume that run, another run_name, or CheckpointSaver(overwrite=True)."
            )

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if the interval has passed."""
        if self._interval.passed(state):
            self._save(state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if the interval has passed."""
        if self._interval.passed(state):
            self._save(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Saves the final state; an error is raised here, as no later checkpoint replaces this one."""
        self._save(state, logger, is_last=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the paths of the saved checkpoints, so that `keep` works across sessions."""
        return {"saved": list(self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._saved = list(state["saved"])

    def after_load(self, state: State, logger: Logger) -> None:
        """Notes a loaded checkpoint: it need not be saved again."""
        self._is_resumed = state.last_checkpoint is not None
        if self._is_resumed:
            self._saved_at = state.timestamp

    def _save(self, state: State, logger: Logger, *, is_last: bool = False) -> None:
        from uploads.disk import replace_file, replacement

        # Only rank 0 knows whether the last save succeeded, and all ranks must decide alike.
        if distributed.from_rank_zero(self._saved_at == state.timestamp):
            return
        folder = Path(format_name(self._folder, state))
        name = format_name(self._filename, state)
        if str(folder / name) not in self._saved:
            self._saved.append(str(folder / name))
        checkpoint = _checkpoint_of(state, logger)
        if state.rank != 0:
            return
        remote_name = f"{format_name(self._remote_folder, state).rstrip('/')}/{name}"
        try:
            with (
                replacement(folder / name, durable=True) as descriptor,
                os.fdopen(descriptor, "wb", closefd=False) as file,
            ):
                torch.save(checkpoint, file)
            if self._latest_filename is not None:
                replace_file(folder / self._latest_filename, remote_name.encode(), durable=True)
        except OSError as error:
            if is_last:
                raise
            _log.exception(
                "Checkpoint %s could not be saved (%s); training continues.", folder / name, error.strerror
            )
            return
        self._saved_at = state.timestamp
        state.last_checkpoint = str(folder / name)
        # The checkpoint before the pointer, so that a pointer never names a missing file.
        logger.upload_file(remote_name, folder / name, overwrite=self._overwrite or self._is_resumed)
        if self._latest_filename is not None:
            remote_pointer = f"{remote_name.removesuffix(name)}{self._latest_filename}"
            logger.upload_file(remote_pointer, folder / self._latest_filename, overwrite=True)
        self._delete_old()

    def _delete_old(self) -> None:
        if self._keep is None:
            return
        while len(self._saved) > self._keep:
            Path(self._saved.pop(0)).unlink(missing_ok=True)


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
    if path.name.endswith(_POINTER_SUFFIX):
        path = _resolve_pointer(path)
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} must be readable by torch.load(weights_only=True), "
            f"got {type(error).__name__}: {error}"
        ) from error
    version = checkpoint.get("version") if isinstance(checkpoint, Mapping) else None
    if version != _VERSION:
        raise CheckpointError(
            f"checkpoint {str(path)!r} must be of version {_VERSION}, got {version!r}. "
            "To use weights of other origin, load them into the model before passing it to the Trainer."
        )
    return dict(checkpoint)


def _resolve_pointer(pointer: Path) -> Path:
    """Returns the local checkpoint that a pointer names: the longest suffix of the name that exists."""
    parts = pointer.read_text(encoding="utf-8").strip().split("/")
    candidates = [pointer.parent.joinpath(*parts[start:]) for start in range(len(parts))]
    return next((path for path in candidates if path.is_file()), candidates[-1])


def load_checkpoint(checkpoint: Mapping[str, Any], state: State, logger: Logger) -> None:
    """Restores a run from a checkpoint, except the random state, which is restored when training starts.

    Raises:
        CheckpointError: the model, optimizers or schedulers do not match the saved ones.
    """
    parts: list[tuple[str, Any, Any]] = [("model", state.model, checkpoint["model"])]
    for kind in ("optimizers", "schedulers"):
        current, saved = getattr(state, kind), checkpoint[kind]
        if len(current) != len(saved):
            raise CheckpointError(
                f"checkpoint must fit the trainer's {len(current)} {kind}, got {len(saved)}."
            )
        parts += [(kind, one, dictionary) for one, dictionary in zip(current, saved, strict=True)]
    if state.scaler is not None and checkpoint["scaler"] is not None:
        parts.append(("scaler", state.scaler, checkpoint["scaler"]))
    parts += [
        (f"metric {name!r}", metric, checkpoint["train_metrics"][name])
        for name, metric in state.train_metrics.items()
        if name in checkpoint["train_metrics"]
    ]
    for name, callback in _by_name(state.callbacks).items():
        if name not in checkpoint["callbacks"]:
            continue
        if _is_destination(callback, logger):
            logger.faults.guard(callback, "load_state_dict", callback.load_state_dict)(
                checkpoint["callbacks"][name]
            )
        else:
            parts.append((f"callback {name!r}", callback, checkpoint["callbacks"][name]))
    for what, part, dictionary in parts:
        try:
            part.load_state_dict(dictionary)
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(f"checkpoint must fit the trainer's {what}, got: {error}") from error
    state.timestamp = Timestamp.from_state_dict(checkpoint["timestamp"])
    at_epoch_start = checkpoint["random_at_epoch_start"]
    state.random_at_epoch_start = at_epoch_start[state.rank] if state.rank < len(at_epoch_start) else None


def _checkpoint_of(state: State, logger: Logger) -> dict[str, Any]:
    """Returns everything that `load_checkpoint` and the trainer restore; every rank must call it."""
    model: Any = state.model
    return {
        "version": _VERSION,
        "run_name": state.run_name,
        "timestamp": state.timestamp.to_numbers(),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in state.schedulers],
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "train_metrics": {
            name: metric.state_dict()
            for name, metric in state.train_metrics.items()
            if hasattr(metric, "state_dict")
        },
        "callbacks": _callback_states(state, logger),
        # One per rank.
        "random": distributed.gather(random_state_of(state.train_dataloader)),
        "random_at_epoch_start": distributed.gather(state.random_at_epoch_start),
    }


def _by_name(callbacks: tuple[Any, ...]) -> dict[str, Any]:
    """Returns callbacks by class name; further ones of a class are numbered."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        base = type(callback).__name__
        count = sum(name == base or name.startswith(f"{base}#") for name in named)
        named[f"{base}#{count + 1}" if count else base] = callback
    return named


def _callback_states(state: State, logger: Logger) -> dict[str, Any]:
    """Returns the states of the callbacks; one of a destination that raises is left out."""
    states: dict[str, Any] = {}

    def save(name: str, callback: Callback) -> None:
        if saved := callback.state_dict():
            states[name] = saved

    for name, callback in _by_name(state.callbacks).items():
        take = (
            logger.faults.guard(callback, "state_dict", save) if _is_destination(callback, logger) else save
        )
        take(name, callback)
    return states


def _is_destination(callback: object, logger: Logger) -> bool:
    return any(callback is destination for destination in logger.destinations)


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
        pointer = folder / f"latest{_POINTER_SUFFIX}"
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
    if not name.endswith(_POINTER_SUFFIX):
        return target
    pointed = _read_pointer(target)
    if pointed is None:
        # Some destinations follow a pointer themselves, and download its target under its name.
        return target.replace(target.with_name(f"{name.rpartition('/')[2].removesuffix(_POINTER_SUFFIX)}.pt"))
    logger.download_file(
        pointed, folder / pointed.rpartition("/")[2], overwrite=True, progress_bar=state.rank == 0
    )
    return target


def _read_pointer(path: Path) -> str | None:
    """Returns the name in a pointer, or None if the file is not a pointer."""
    with path.open("rb") as file:
        start = file.read(_MAX_POINTER_BYTES + 1)
    try:
        text = start.decode().strip()
    except UnicodeDecodeError:
        return None
    return None if len(start) > _MAX_POINTER_BYTES or "\0" in text else text
