"""Going on where a run was: which checkpoint, which batch of the epoch, which random numbers."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _rng
from .checkpoint import POINTER_SUFFIX
from .engine import Engine
from .event import Event
from .logger import Logger
from .names import format_name
from .state import State

__all__ = ["find_checkpoint", "train_batches"]


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
    folder.mkdir(parents=True, exist_ok=True)
    name = format_name(name, state)
    target = folder / name.rpartition("/")[2]
    logger.download_file(name, target, overwrite=True, progress_bar=state.rank == 0)
    if name.endswith(POINTER_SUFFIX):
        pointed = target.read_text(encoding="utf-8").strip()
        logger.download_file(
            pointed, folder / pointed.rpartition("/")[2], overwrite=True, progress_bar=state.rank == 0
        )
    return target


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
        state.random_at_epoch_start = _rng.random_state_of(dataloader)
        return iter(dataloader)
    now = _rng.random_state_of(dataloader)
    if state.random_at_epoch_start is not None:
        _rng.restore_random_state(state.random_at_epoch_start, dataloader)
    iterator: Iterator[Any] = iter(dataloader)
    for _ in itertools.islice(iterator, done):
        pass
    _rng.restore_random_state(now, dataloader)
    return iterator
