"""Runs as flat records, and where they differ."""

from collections.abc import Sequence
from typing import Any

from .record import RunRecord

__all__ = ["FLAT_FIELDS", "differences", "flat_record"]

FLAT_FIELDS = (
    "run_id",
    "name",
    "status",
    "kind",
    "created_at",
    "ended_at",
    "updated_at",
    "heartbeat_at",
    "tags",
    "notes",
    "display_name",
    "archived",
    "checkpoint_path",
    "problem",
    "path",
)


def flat_record(record: RunRecord) -> dict[str, Any]:
    """Returns what is known of a run by `FLAT_FIELDS`, then `hparams.…`, then `summary.…`."""
    flat: dict[str, Any] = {name: getattr(record, name) for name in FLAT_FIELDS}
    flat["tags"], flat["path"] = list(record.tags), str(record.path)
    flat |= {f"hparams.{name}": value for name, value in record.hparams.items()}
    flat |= {f"summary.{name}": value for name, value in record.summary.items()}
    return flat


def differences(records: Sequence[RunRecord]) -> dict[str, dict[str, Any]]:
    """Returns, field by field, the values of those that have it, by run id; by path where two have the same id. Only what differs."""
    ids = [record.run_id for record in records]
    labels = ids if len(set(ids)) == len(ids) else [str(record.path) for record in records]
    flat = [_compared(record) for record in records]
    names = dict.fromkeys(name for one in flat for name in one)
    return {
        name: {label: one[name] for label, one in zip(labels, flat, strict=True) if name in one}
        for name in names
        if len({_identity(one[name]) if name in one else None for one in flat}) > 1
    }


def _compared(record: RunRecord) -> dict[str, Any]:
    """Returns what is worth comparing: not what always differs."""
    always = {
        "run_id",
        "name",
        "path",
        "created_at",
        "ended_at",
        "updated_at",
        "heartbeat_at",
        "checkpoint_path",
    }
    return {name: value for name, value in flat_record(record).items() if name not in always}


def _identity(value: Any) -> tuple[str, Any]:
    """Returns what is equal for values that are the same: 1 and 1.0 are, 1 and true are not, NaN is NaN."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and value != value:  # noqa: PLR0124  # NaN
        return ("nan", None)
    if isinstance(value, int | float):
        return ("number", value)
    return (type(value).__name__, str(value))
