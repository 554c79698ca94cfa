"""What trainers give: batches, dataloaders, dictionaries of values."""

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["length_of", "plain_values", "samples_in", "several"]


def several(one_or_more: Any) -> tuple[Any, ...]:
    """Returns callbacks as a tuple, one or several as they were given."""
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple | set) else (one_or_more,)


def length_of(dataloader: Any) -> int | None:
    """Returns the number of batches of a dataloader, or None where it has none, or none that is known."""
    try:
        return len(dataloader)
    except TypeError:
        return None


def samples_in(batch: Any) -> int:
    """Returns how many samples a batch has: the length of the first array in it, or 0 where there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None and not callable(shape):
        return int(shape[0]) if len(shape) else 0
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    return next((count for count in map(samples_in, parts) if count), 0)


def plain_values(values: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the scalars of what a trainer logs, and everything else, which is no metric: strings, lists, None.

    Names that are no strings, which trainers let through, become strings.
    """
    metrics: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        (metrics if _is_scalar(value) else others)[str(name)] = value
    return metrics, others


def _is_scalar(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    shape = getattr(value, "shape", None)
    return shape is not None and not isinstance(value, str) and all(size == 1 for size in shape)
