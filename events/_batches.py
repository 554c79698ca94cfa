"""What a batch is: a tensor, or tensors in mappings and sequences, all with the samples along their first axis."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["move", "samples_in", "split"]


def samples_in(batch: Any) -> int:
    """Returns how many samples a batch has: the length of the first tensor in it, or 1 where there is none."""
    return next((int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim() > 0), 1)


def move(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on a device, without waiting where memory is pinned."""
    return _map(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split(batch: Any, samples: int | None) -> list[Any]:
    """Returns microbatches of at most that many samples; the batch itself where no number is given.

    Raises:
        ValueError: the tensors of the batch differ in their number of samples, so that there is no way to cut them.
    """
    total = samples_in(batch)
    if samples is None or samples >= total:
        return [batch]
    lengths = {int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim() > 0}
    if len(lengths) > 1:
        raise ValueError(
            f"batch must have the same number of samples in all its tensors to be cut into microbatches, "
            f"got {sorted(lengths)}. Leave device_train_microbatch_size out, or split in the dataloader."
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


def _map(batch: Any, change: Any) -> Any:
    """Applies a change to every tensor and keeps the shape of what holds them."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(_map(value, change) for value in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(_map(value, change) for value in batch)
    return batch
