"""Measures, moves and splits batches of a dataloader.

A batch has **parts**: the entries of a list, tuple, mapping, dataclass or attrs class. A part is a tensor or
array whose first dimension is the sample; or a list with one entry per sample, such as images of different
sizes, dicts or texts; or a container of parts; or any other value, which all samples share.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

__all__ = ["has_parts", "move", "samples_in", "split"]

# Attributes with the number of samples in a batch object: PyG, DGL, and `PackedSequence`.
_COUNTS = ("num_graphs", "batch_size", "batch_sizes")
_CHANNELS = {1, 3}
_IMAGE = 3
_OTHER = object()


def has_parts(batch: Any) -> bool:
    """Returns whether a batch is a list or tuple of parts, and not a list with one dict per sample."""
    return isinstance(batch, list | tuple) and not _moves_itself(batch) and not _is_list_of_samples(batch)


def samples_in(batch: Any) -> int:
    """Returns the number of samples of a batch.

    It is the length of its first tensor or array, or an object's `num_graphs` or `batch_size`. Without these,
    it is the length of the first list with one entry per sample. A list of tensors is such a list, unless all
    tensors in such lists have the same length and are not images. Otherwise it is 1.
    """
    # The usual batch. This is called several times per step, and takes 1 µs instead of 6.
    first = batch[0] if type(batch) in {list, tuple} and batch else batch
    if isinstance(first, torch.Tensor) and first.ndim:
        return int(first.shape[0])
    if _is_list_of_samples(batch):
        return len(batch)
    lists: list[Any] = []
    for part in _parts(batch):
        if not isinstance(part, list | tuple) or _moves_itself(part):
            return _length(part)
        lists.append(part)
    if told := next((one for one in lists if not all(map(_length, _flat(one)))), None):
        return len(told)
    arrays = [one for several in lists for one in _flat(several)]
    lengths = set(map(_length, arrays))
    are_images = lengths <= _CHANNELS and all(one.ndim == _IMAGE for one in arrays)
    return lengths.pop() if len(lengths) == 1 and not are_images else len(lists[0]) if lists else 1


def move(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on a device; does not block for pinned memory.

    An object with a method `to` is moved as a whole.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        if not _moves_itself(value):
            return _OTHER
        # Some move in place.
        returned = value.to(device)
        return value if returned is None else returned

    return _map(batch, moved)


def split(batch: Any, samples: int | None, total: int | None = None) -> list[Any]:
    """Returns microbatches of at most `samples` samples; the whole batch for None.

    Args:
        batch: the batch.
        samples: how many a microbatch has at most.
        total: how many the batch has. Default: `samples_in`.

    Raises:
        ValueError: the parts of the batch differ in their number of samples, or one is an object with `to`.
    """
    total = samples_in(batch) if total is None else total
    if samples is None or samples >= total:
        return [batch]
    lengths: set[int | str] = set()

    def cut(start: int, value: Any) -> Any:
        is_list = isinstance(value, list | tuple) and not hasattr(value, "_make")
        if is_list and len(value) == total and (value is not batch or _is_list_of_samples(batch)):
            # Tensors that are as long as the batch are parts of it.
            return _OTHER if {*map(_length, _flat(value))} == {total} else value[start : start + samples]
        if _is_array(value) and value.ndim:
            lengths.add(len(value))
            return value[start : start + samples]
        if _moves_itself(value):
            lengths.add(type(value).__name__)
        return _OTHER

    cuts = [_map(batch, functools.partial(cut, start)) for start in range(0, total, samples)]
    if lengths - {total}:
        raise ValueError(
            f"batch must have the same number of samples in all its tensors to be split into microbatches, "
            f"got {sorted(lengths, key=str)}. Omit device_train_microbatch_size, or split in the dataloader."
        )
    return cuts


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _length(value: Any) -> int:
    """Returns the number of samples that an array has, or an object says; 0 for others."""
    if _is_array(value):
        return int(value.shape[0]) if value.ndim else 0
    if not _moves_itself(value):
        return 0
    found: Any = next((one for name in _COUNTS if (one := getattr(value, name, None)) is not None), 0)
    return found if isinstance(found, int) else int(found[0]) if len(found) else 0


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, torch.Tensor | type)


def _is_list_of_samples(batch: Any) -> bool:
    """Returns whether a batch is a list with one dict per sample, as in detectron2.

    torch's collate function also makes lists of dicts, from samples that are tuples of dicts; in these, all
    values have the same length.
    """
    if not isinstance(batch, list) or not all(isinstance(one, Mapping) for one in batch):
        return False
    values = [value for one in batch for value in one.values()]
    lengths = {len(one) if isinstance(one, list) else _length(one) for one in values}
    return all(one.keys() == batch[0].keys() for one in batch) and (len(lengths) > 1 or 0 in lengths)


def _flat(several: Any) -> Iterator[Any]:
    for one in several:
        yield from _flat(one) if isinstance(one, list | tuple) else (one,)


def _parts(batch: Any) -> Iterator[Any]:
    """Yields the parts that have a length, in their order."""
    for value in _children(batch).values() or (batch,):
        is_list = isinstance(value, list | tuple) and value is not batch and not hasattr(value, "_make")
        if _length(value) or (is_list and value):
            yield value
        elif value is not batch and not _is_array(value):
            yield from _parts(value)


def _children(batch: Any) -> dict[Any, Any]:
    """Returns the values in a container by key, index or attribute; nothing of another value."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if _moves_itself(batch):
        return {}
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    attributes = [one.name for one in getattr(type(batch), "__attrs_attrs__", ())]
    return {name: getattr(batch, name) for name in getattr(type(batch), "__dataclass_fields__", attributes)}


def _map(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to a value, and where it returns `_OTHER`, to the values in it."""
    if (found := function(batch)) is not _OTHER:
        return found
    children = {key: _map(value, function) for key, value in _children(batch).items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(children.values())
    if isinstance(batch, list | tuple):
        return type(batch)(children.values())
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return children
    if not children:
        return batch
    copied: Any = copy.copy(batch)
    for name, value in children.items():
        if isinstance(copied, MutableMapping):
            copied[name] = value
        else:
            object.__setattr__(copied, name, value)
    return copied
