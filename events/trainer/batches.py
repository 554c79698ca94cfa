"""Batches of a dataloader: their size, moving and splitting them."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["move", "samples_in", "split"]


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


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch, in their order."""
    tensors: list[torch.Tensor] = []
    _map(batch, tensors.append)
    return tensors


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
