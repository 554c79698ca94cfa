"""Converts names, table cells, masks and bins to what W&B accepts."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from destinations.text.formatting import describe
from destinations.trackers.names import as_text, short_hash, without_surrogates
from events import RecordError

__all__ = ["artifact_name", "cell_of", "few_bins", "mask_of", "media_key", "metric_key", "path_in_artifact"]

# Keys that W&B adds to each row.
_RESERVED = frozenset({"_step", "_timestamp", "_runtime", "_wandb"})
_MAX_MEDIA_KEY = 60
_MAX_ARTIFACT_NAME = 120
_MAX_BINS = 512
_MAX_CLASSES = 256


# Names.


def metric_key(name: str, step_metric: str) -> str:
    """Returns the key of a metric: its name, if valid in W&B.

    Lone surrogates are escaped; an empty name becomes "unnamed"; reserved names and the step metric get the
    prefix "metric/".
    """
    key = without_surrogates(name)
    if not key:
        return "unnamed"
    return f"metric/{key}" if key in _RESERVED or key == step_metric else key


def media_key(name: str) -> str:
    """Returns the key of media or a table, a relative path of at most 60 bytes in W&B's folder."""
    parts = [part for part in re.sub(r"[\x00-\x1f\x7f]", "_", without_surrogates(name)).split("/") if part]
    key = "/".join("_" * len(part) if set(part) == {"."} else part for part in parts)
    if not key.strip():
        return "unnamed"
    if len(key.encode()) > _MAX_MEDIA_KEY or key in _RESERVED:
        key = f"{key.encode()[: _MAX_MEDIA_KEY - 7].decode(errors='ignore')}-{short_hash(name)}"
    return key


def artifact_name(name: str) -> str:
    """Returns a valid artifact name: at most 120 letters, digits, "-", "_" and "."."""
    clean = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    return (
        clean if len(clean) <= _MAX_ARTIFACT_NAME else f"{clean[: _MAX_ARTIFACT_NAME - 7]}-{short_hash(name)}"
    )


def path_in_artifact(name: str) -> str:
    """Returns a valid relative path of a file in an artifact."""
    parts = [part for part in without_surrogates(name).replace("\\", "/").split("/") if part]
    return "/".join("_" if part in {".", ".."} else part for part in parts) or "file"


# Values.


def cell_of(wandb: Any, value: Any) -> Any:
    """Returns a table cell: a number, a text, an image, or a description of anything else."""
    if hasattr(value, "getbands"):
        return wandb.Image(value)
    value = describe(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return without_surrogates(as_text(value))


def mask_of(mask: Any, labels: Mapping[int, str] | None) -> dict[str, Any]:
    """Returns a mask in W&B's form; with classes above 255, which W&B lacks, all classes are renumbered."""
    texts = {int(key): without_surrogates(str(text)) for key, text in (labels or {}).items()}
    if mask.size and int(mask.max()) >= _MAX_CLASSES:
        classes, numbers = np.unique(mask, return_inverse=True)
        texts = {
            number: f"{one}: {texts[one]}" if one in texts else str(one)
            for number, one in enumerate(classes.tolist())
        }
        if len(classes) > _MAX_CLASSES:
            raise RecordError(f"W&B supports at most {_MAX_CLASSES} classes in a mask, got {len(classes)}.")
        mask = numbers.reshape(mask.shape)
    # Without labels, W&B generates one for each possible byte; only the classes in the mask are wanted.
    texts = texts or {one: str(one) for one in np.unique(mask).tolist()}
    return {"mask_data": mask.astype(np.int64), "class_labels": texts}


def few_bins(counts: list[int], edges: list[float]) -> tuple[list[int], list[float]]:
    """Merges neighbouring bins down to the maximum of W&B."""
    size = -(-len(counts) // _MAX_BINS)
    if size == 1:
        return counts, edges
    joined = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
    return joined, [*edges[:-1:size], edges[-1]]
