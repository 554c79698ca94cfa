"""Batches of a dataloader: their size, moving and splitting them, and reading them in a resumable order."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from events.engine import Engine
from events.event import Event
from events.state import State

from .random_state import random_state_of, restore_random_state

__all__ = ["move", "samples_in", "split", "train_batches"]


def samples_in(batch: Any) -> int:
    """Returns the number of samples of a batch: the length of its first tensor, or 1 if it has none."""
    return next((int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim() > 0), 1)


def move(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on a device; does not block for pinned memory."""
    return _map(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split(batch: Any, samples: int | None) -> list[Any]:
    """Returns microbatches of at most `samples` samples; the whole batch for None.

    Raises:
        ValueError: the tensors of the batch differ in their number of samples.
    """
    total = samples_in(batch)
    if samples is None or samples >= total:
        return [batch]
    lengths = {int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim() > 0}
    if len(lengths) > 1:
        raise ValueError(
            f"batch must have the same number of samples in all its tensors to be split into microbatches, "
            f"got {sorted(lengths)}. Omit device_train_microbatch_size out, or split in the dataloader."
        )
    return [
        _map(
            batch, lambda tensor, start=start: tensor[start : start + samples] if tensor.dim() > 0 else tensor
        )
        for start in range(0, total, samples)
    ]


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _map(batch: Any, function: Any) -> Any:
    """Applies a function to every tensor of nested mappings, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(_map(value, function) for value in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(_map(value, function) for value in batch)
    return batch


def train_batches(state: State, engine: Engine) -> Iterator[Any]:
    """Yields the remaining batches of an epoch, and runs the events around reading them.

    In the middle of an epoch, the epoch is restarted with its initial random state, batches already trained
    on are read and skipped, and the current random state is restored. Shuffling, and other draws of the
    dataset, are therefore the same as without the interruption.
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
