"""Checkpoints: what a run needs to go on as if it had never stopped.

A checkpoint is one file that `torch.load(weights_only=True)` reads: tensors and plain values, no code. Beside the newest
stands a pointer, a text file that holds the name under which the checkpoint is uploaded, as Composer writes it; here, the
checkpoint stands beside it. Both are written aside and renamed, so that neither
is ever seen in part.
"""

import contextlib
import itertools
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from events.callback import Callback
from events.engine import Engine
from events.errors import CheckpointError
from events.event import Event
from events.interval import Interval
from events.logger.logger import Logger
from events.names import format_name
from events.state import State
from events.timestamp import Time, Timestamp

from . import distributed

__all__ = [
    "CheckpointSaver",
    "find_checkpoint",
    "load_checkpoint",
    "random_state_of",
    "read_checkpoint",
    "restore_random_state",
    "seed_all",
    "train_batches",
]


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # datasets of users draw from the legacy generator
    torch.manual_seed(seed)


def random_state_of(dataloader: Any) -> dict[str, Any]:
    """Returns all that decides which random numbers come next: the global generators, and a dataloader's own."""
    return {
        "global": _global_state(),
        "dataloader": [generator.get_state() for generator in _generators_of(dataloader)],
    }


def restore_random_state(state: Mapping[str, Any], dataloader: Any) -> None:
    """Puts back what `random_state_of` returned."""
    _restore_global_state(state["global"])
    for generator, saved in zip(_generators_of(dataloader), state["dataloader"], strict=False):
        generator.set_state(saved)


def _global_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "cached_gaussian": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_global_state(state: dict[str, Any]) -> None:
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    np.random.set_state(  # noqa: NPY002
        (
            "MT19937",
            legacy["keys"].numpy().astype(np.uint32),
            legacy["position"],
            legacy["has_gauss"],
            legacy["cached_gaussian"],
        )
    )
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def _generators_of(dataloader: Any) -> list[torch.Generator]:
    """Returns the generators that a dataloader draws from besides the default one, each once."""
    samplers = [getattr(dataloader, name, None) for name in ("sampler", "batch_sampler")]
    found: list[torch.Generator] = []
    for owner in (dataloader, *samplers, getattr(samplers[1], "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is one for one in found):
            found.append(generator)
    return found


_log = logging.getLogger("events")

_VERSION = 1
POINTER_SUFFIX = ".symlink"


class CheckpointSaver(Callback):
    """Saves a checkpoint at an interval and when training ends, and hands it to whoever uploads files.

    Rank 0 writes; all ranks take part, for each has random number generators of its own. Training waits while the file is
    written to the local disk; its upload goes on behind. A disk that is full costs this one checkpoint, not the run: it is
    reported, the older ones stay, and the next interval tries again.

    Args:
        folder: where to save; may hold placeholders such as `{run_name}`.
        filename: the name of a checkpoint in it; must tell one from another, by `{batch}` say.
        save_interval: how often, such as "1ep", "500ba" or "30m".
        latest_filename: the name of the pointer to the newest; None for no pointer.
        keep: how many of the newest to keep locally; None for all. Uploaded files are never deleted.
        remote_folder: the folder that uploaded names begin with.
        overwrite: whether a fresh run may save into a folder where another run has saved.

    Raises:
        ValueError: `keep` is less than one.
        TimeStringError: the interval has no unit.
        FileExistsError: at `FIT_START`, another run has saved here.
    """

    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str = "ep{epoch}-ba{batch}.pt",
        *,
        save_interval: str | int | Time = "1ep",
        latest_filename: str | None = f"latest{POINTER_SUFFIX}",
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

    def fit_start(self, state: State, logger: "Logger") -> None:
        """Refuses a folder that holds the checkpoints of another run."""
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
                f"checkpoint folder must be new for a new run, got {folder} where a run has saved "
                f"{pointer.read_text(encoding='utf-8').strip()!r}. Pass autoresume=True or load_path to go on with that "
                "run, another run_name to begin beside it, or CheckpointSaver(overwrite=True) to take its place."
            )

    def batch_checkpoint(self, state: State, logger: "Logger") -> None:
        """Saves where the interval says so."""
        if self._interval.passed(state):
            self._save(state, logger)

    def epoch_checkpoint(self, state: State, logger: "Logger") -> None:
        """Saves where the interval says so."""
        if self._interval.passed(state):
            self._save(state, logger)

    def fit_end(self, state: State, logger: "Logger") -> None:
        """Saves where training ended; here a failure is an error, for no later checkpoint makes up for it."""
        self._save(state, logger, is_last=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns which checkpoints there are, so that `keep` holds across sessions."""
        return {"saved": list(self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned."""
        self._saved = list(state["saved"])

    def after_load(self, state: State, logger: "Logger") -> None:
        """Takes note of what the run comes from: a checkpoint just loaded need not be saved again."""
        self._is_resumed = state.last_checkpoint is not None
        if self._is_resumed:
            self._saved_at = state.timestamp

    def _save(self, state: State, logger: "Logger", *, is_last: bool = False) -> None:
        # Rank 0 alone knows whether the last attempt reached the disk, and all ranks must do the same thing here.
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
            _write_atomically(folder / name, lambda file: torch.save(checkpoint, file))
            if self._latest_filename is not None:
                _write_atomically(
                    folder / self._latest_filename, lambda file: file.write(remote_name.encode())
                )
        except OSError as error:
            if is_last:
                raise
            _log.exception(
                "Checkpoint %s could not be saved (%s); training goes on.", folder / name, error.strerror
            )
            return
        self._saved_at = state.timestamp
        state.last_checkpoint = str(folder / name)
        # The checkpoint, then the pointer: a pointer never comes before what it points to.
        logger.upload_file(remote_name, folder / name, overwrite=self._overwrite or self._is_resumed)
        if self._latest_filename is not None:
            remote_pointer = f"{remote_name.removesuffix(name)}{self._latest_filename}"
            logger.upload_file(remote_pointer, folder / self._latest_filename, overwrite=True)
        self._drop_old_ones()

    def _drop_old_ones(self) -> None:
        if self._keep is None:
            return
        while len(self._saved) > self._keep:
            Path(self._saved.pop(0)).unlink(missing_ok=True)


def read_checkpoint(path: str | Path, device: "torch.device | str" = "cpu") -> dict[str, Any]:
    """Reads a checkpoint, or the one that a pointer names; no code in the file is run.

    Args:
        path: a checkpoint, or a pointer (`latest.symlink`).
        device: where its tensors are to be.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, no checkpoint of this project, or of a later version of it.
    """
    path = Path(path)
    if path.name.endswith(POINTER_SUFFIX):
        path = _pointed_to(path)
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} must be readable by torch.load(weights_only=True), got {type(error).__name__}: {error}"
        ) from error
    version = checkpoint.get("version") if isinstance(checkpoint, Mapping) else None
    if version != _VERSION:
        raise CheckpointError(
            f"checkpoint {str(path)!r} must be of version {_VERSION}, got {version!r}. "
            "Load foreign weights into the model before it is given to the Trainer."
        )
    return dict(checkpoint)


def _pointed_to(pointer: Path) -> Path:
    """Returns the checkpoint beside a pointer: of the name that it holds, the longest end that is there."""
    parts = pointer.read_text(encoding="utf-8").strip().split("/")
    candidates = [pointer.parent.joinpath(*parts[start:]) for start in range(len(parts))]
    return next((path for path in candidates if path.is_file()), candidates[-1])


def load_checkpoint(checkpoint: Mapping[str, Any], state: State, logger: "Logger") -> None:
    """Puts a run where a checkpoint was taken, its random number generators excepted: these follow as training goes on.

    Raises:
        CheckpointError: model, optimizers or schedulers are not those that were saved.
    """
    parts: list[tuple[str, Any, Any]] = [("model", state.model, checkpoint["model"])]
    for kind in ("optimizers", "schedulers"):
        mine, saved = getattr(state, kind), checkpoint[kind]
        if len(mine) != len(saved):
            raise CheckpointError(f"checkpoint must fit the trainer's {len(mine)} {kind}, got {len(saved)}.")
        parts += [(kind, one, dictionary) for one, dictionary in zip(mine, saved, strict=True)]
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


def _checkpoint_of(state: State, logger: "Logger") -> dict[str, Any]:
    """Returns everything that `load_checkpoint` and the trainer take up; every rank must call it."""
    model: Any = state.model
    return {
        "version": _VERSION,
        "run_name": state.run_name,
        "timestamp": state.timestamp.state_dict(),
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
        # One for each rank: each draws its own random numbers.
        "random": distributed.gather(random_state_of(state.train_dataloader)),
        "random_at_epoch_start": distributed.gather(state.random_at_epoch_start),
    }


def _by_name(callbacks: tuple[Any, ...]) -> dict[str, Any]:
    """Returns callbacks by class name; a second of the same class gets a number."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        base = type(callback).__name__
        count = sum(name == base or name.startswith(f"{base}#") for name in named)
        named[f"{base}#{count + 1}" if count else base] = callback
    return named


def _callback_states(state: State, logger: "Logger") -> dict[str, Any]:
    """Returns what callbacks want to find again; a destination that fails to say so costs its own part alone."""
    states: dict[str, Any] = {}

    def keep(name: str, callback: Callback) -> None:
        if saved := callback.state_dict():
            states[name] = saved

    for name, callback in _by_name(state.callbacks).items():
        take = (
            logger.faults.guard(callback, "state_dict", keep) if _is_destination(callback, logger) else keep
        )
        take(name, callback)
    return states


def _is_destination(callback: object, logger: "Logger") -> bool:
    return any(callback is destination for destination in logger.destinations)


def _write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    """Writes a file so that it is there in whole or not at all, also after a loss of power."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# No store has longer names.
_LONGEST_POINTER_BYTES = 1024


def find_checkpoint(
    load_path: str | Path | None, resume_folder: str | Path | None, state: State, logger: Logger
) -> Path | None:
    """Returns the local path of what to go on from, or None where a run begins.

    Args:
        load_path: a local path, or a name that a destination can download.
        resume_folder: where the run saves; its own newest checkpoint comes before `load_path`.
        state: the run.
        logger: whose destinations are asked for what is not here.

    Raises:
        FileNotFoundError: `load_path` is nowhere.
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
    """Brings a checkpoint, or the one that a pointer names, into a folder; returns where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    name = format_name(name, state)
    target = folder / name.rpartition("/")[2]
    logger.download_file(name, target, overwrite=True, progress_bar=state.rank == 0)
    if not name.endswith(POINTER_SUFFIX):
        return target
    pointed = _text_of_pointer(target)
    if pointed is None:
        # Some destinations follow a pointer by themselves, and bring what it points to under its name.
        return target.replace(target.with_name(f"{name.rpartition('/')[2].removesuffix(POINTER_SUFFIX)}.pt"))
    logger.download_file(
        pointed, folder / pointed.rpartition("/")[2], overwrite=True, progress_bar=state.rank == 0
    )
    return target


def _text_of_pointer(path: Path) -> str | None:
    """Returns the name that a pointer holds, or None where the file is no pointer."""
    with path.open("rb") as file:
        start = file.read(_LONGEST_POINTER_BYTES + 1)
    try:
        text = start.decode().strip()
    except UnicodeDecodeError:
        return None
    return None if len(start) > _LONGEST_POINTER_BYTES or "\0" in text else text


def train_batches(state: State, engine: Engine) -> Iterator[Any]:
    """Yields the batches of an epoch that are still to come, with the events around reading them.

    In the middle of an epoch, the epoch is begun again with the random numbers it began with, and the batches that were
    trained already are read and dropped; then the generators are put where they were. A shuffle, and whatever else the
    dataset draws, is therefore the same as if training had not stopped.
    """
    dataloader: Any = state.train_dataloader
    sampler: Any = getattr(dataloader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(state.timestamp.epoch.value)
    iterator = _iterator(state, dataloader)
    while True:
        engine.run_event(Event.BEFORE_DATALOADER)
        try:
            state.batch = next(iterator)
        except StopIteration:
            return
        engine.run_event(Event.AFTER_DATALOADER)
        yield state.batch


def _iterator(state: State, dataloader: Any) -> Iterator[Any]:
    done = int(state.timestamp.batch_in_epoch)
    if done == 0:
        state.random_at_epoch_start = random_state_of(dataloader)
        return iter(dataloader)
    now = random_state_of(dataloader)
    if state.random_at_epoch_start is not None:
        restore_random_state(state.random_at_epoch_start, dataloader)
    iterator: Iterator[Any] = iter(dataloader)
    for _ in itertools.islice(iterator, done):
        pass
    restore_random_state(now, dataloader)
    return iterator
