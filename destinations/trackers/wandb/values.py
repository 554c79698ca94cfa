"""What W&B can hold: names, cells of tables, masks, bins."""

import json
import re
from collections.abc import Mapping
from typing import Any

from destinations.text.formatting import describe, plain
from destinations.trackers.names import short_hash, without_surrogates
from events import RecordError

__all__ = ["artifact_name", "cell_of", "few_bins", "mask_of", "media_key", "metric_key", "path_in_artifact"]

# What W&B writes into each row itself.
_RESERVED = frozenset({"_step", "_timestamp", "_runtime", "_wandb"})
_LONGEST_MEDIA_KEY = 60
_LONGEST_ARTIFACT_NAME = 120
_MOST_BINS = 512
_MOST_CLASSES = 256


# --- names ---------------------------------------------------------------------------------------------------------


def metric_key(name: str, step_metric: str) -> str:
    """Returns the key of a metric: its name, where W&B can hold that.

    A lone surrogate is written out; no name at all is "unnamed"; what W&B writes itself, and the step, get "metric/" before
    them.
    """
    key = without_surrogates(name)
    if not key:
        return "unnamed"
    return f"metric/{key}" if key in _RESERVED or key == step_metric else key


def media_key(name: str) -> str:
    """Returns the key of a medium or table, which is also a path in W&B's folder: relative, of at most 60 characters."""
    parts = [part for part in re.sub(r"[\x00-\x1f\x7f]", "_", without_surrogates(name)).split("/") if part]
    key = "/".join("_" * len(part) if set(part) == {"."} else part for part in parts)
    if not key.strip():
        return "unnamed"
    if len(key.encode()) > _LONGEST_MEDIA_KEY or key in _RESERVED:
        key = f"{key.encode()[: _LONGEST_MEDIA_KEY - 7].decode(errors='ignore')}-{short_hash(name)}"
    return key


def artifact_name(name: str) -> str:
    """Returns a name that an artifact may have: letters, digits, "-", "_" and ".", at most 120 of them."""
    clean = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    return (
        clean
        if len(clean) <= _LONGEST_ARTIFACT_NAME
        else f"{clean[: _LONGEST_ARTIFACT_NAME - 7]}-{short_hash(name)}"
    )


def path_in_artifact(name: str) -> str:
    """Returns a relative path that W&B accepts for a file of an artifact."""
    parts = [part for part in without_surrogates(name).replace("\\", "/").split("/") if part]
    return "/".join("_" if part in {".", ".."} else part for part in parts) or "file"


# --- values --------------------------------------------------------------------------------------------------------


def cell_of(wandb: Any, value: Any) -> Any:
    """Returns a cell of a table: a number, a text, an image, or what something else is as a text."""
    if hasattr(value, "getbands"):
        return wandb.Image(value)
    value = describe(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return without_surrogates(
        value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    )


def mask_of(mask: Any, labels: Mapping[int, str] | None) -> dict[str, Any]:
    """Returns a mask as W&B has it; its classes are bytes there, so that greater ones get the next free number."""
    import numpy as np

    texts = {int(key): without_surrogates(str(text)) for key, text in (labels or {}).items()}
    if mask.size and int(mask.max()) >= _MOST_CLASSES:
        classes, numbers = np.unique(mask, return_inverse=True)
        texts = {
            number: f"{one}: {texts[one]}" if one in texts else str(one)
            for number, one in enumerate(classes.tolist())
        }
        if len(classes) > _MOST_CLASSES:
            raise RecordError(f"mask must have at most {_MOST_CLASSES} classes for W&B, got {len(classes)}.")
        mask = numbers.reshape(mask.shape)
    # Without labels W&B makes some up for the whole range of bytes: only those that are there are meant.
    texts = texts or {one: str(one) for one in np.unique(mask).tolist()}
    return {"mask_data": mask.astype(np.int64), "class_labels": texts}


def few_bins(counts: list[int], edges: list[float]) -> tuple[list[int], list[float]]:
    """Joins neighbouring bins until there are no more than W&B takes."""
    size = -(-len(counts) // _MOST_BINS)
    if size == 1:
        return counts, edges
    joined = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
    return joined, [*edges[:-1:size], edges[-1]]
