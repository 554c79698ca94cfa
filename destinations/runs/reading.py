"""What a sidecar says, as plain values of known types, whatever is in the file.

One reading is made for each run that changed, tens of thousands in a scan: what most runs have takes the short way.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ._json import read_object
from .record import RunKind, Scalar

__all__ = ["Reading", "read_sidecar", "sound_hparams", "sound_summary"]

_LARGEST_INT = (1 << 63) - 1
# As strict JSON has what is no number.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NON_FINITE_TEXTS = frozenset(_NON_FINITE)
_EASY_HPARAMS = frozenset({float, str, bool})
_EASY_SUMMARY = frozenset({float})


@attrs.define
class Reading:
    """The content of a run folder, but for what the file system itself says. The fields are those of `RunRecord`."""

    run_id: str
    kind: RunKind
    status: str
    created_at: float | None = None
    ended_at: float | None = None
    updated_at: float | None = None
    tags: tuple[str, ...] = ()
    notes: str = ""
    display_name: str | None = None
    archived: bool = False
    hparams: Mapping[str, Scalar] = attrs.field(factory=dict)
    summary: Mapping[str, float] = attrs.field(factory=dict)
    checkpoint_path: str | None = None
    problem: str | None = None


def read_sidecar(raw: bytes, non_finite: Callable[[], Mapping[str, Any]]) -> Reading:
    """Returns what a sidecar says; `RunDirectory`'s or stable-pretraining's.

    Args:
        raw: the file.
        non_finite: returns the `metrics` of `summary.json`, which says what the null of a summary stands for; asked
            only where there is one.

    Raises:
        ValueError: it is no sidecar; the text says why.
    """
    data = read_object(raw)
    run_id = data.get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise ValueError("it has no run_id")
    notes, name = data.get("notes"), data.get("display_name")
    path, status = data.get("checkpoint_path"), data.get("status")
    hparams, summary = data.get("hparams"), data.get("summary")
    return Reading(
        run_id=run_id,
        kind="run-directory" if "format_version" in data else "stable-pretraining",
        status=status if isinstance(status, str) and status else "unknown",
        created_at=_time(data.get("created_at")),
        ended_at=_time(data.get("ended_at")),
        updated_at=_time(data.get("updated_at")),
        tags=_tags(data.get("tags")),
        notes=notes if isinstance(notes, str) else "",
        # The viewer of stable-pretraining writes these two into the sidecar.
        display_name=name if isinstance(name, str) and name else None,
        archived=data.get("archived") is True,
        hparams=sound_hparams(hparams) if isinstance(hparams, dict) else {},
        summary=sound_summary(summary, non_finite) if isinstance(summary, dict) else {},
        checkpoint_path=path if isinstance(path, str) else None,
    )


def sound_hparams(hparams: dict[str, Any]) -> Mapping[str, Scalar]:
    """Returns hyperparameters as scalars: texts that stand for NaN as numbers, integers beyond 64 bits as floats."""
    types = set(map(type, hparams.values()))
    if types <= _EASY_HPARAMS and (str not in types or _NON_FINITE_TEXTS.isdisjoint(hparams.values())):
        return hparams
    return {name: _scalar(value) for name, value in hparams.items()}


def sound_summary(
    summary: dict[str, Any], non_finite: Callable[[], Mapping[str, Any]]
) -> Mapping[str, float]:
    """Returns last values as numbers; what is none is left out."""
    types = set(map(type, summary.values()))
    if types <= _EASY_SUMMARY:
        return summary
    known = non_finite() if type(None) in types else {}
    sound: dict[str, float] = {}
    for name, value in summary.items():
        number = _number(_last(known.get(name)) if value is None else value)
        if number is None and value is None:
            number = math.nan
        if number is not None:
            sound[name] = number
    return sound


def _scalar(value: Any) -> Scalar:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -_LARGEST_INT <= value <= _LARGEST_INT else _float(value)
    return str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int):
        return value if -_LARGEST_INT <= value <= _LARGEST_INT else _float(value)
    if isinstance(value, float):
        return value
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _last(statistics: Any) -> Any:
    return statistics.get("last") if isinstance(statistics, dict) else None


def _time(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -1e12 < value < 1e12 else None  # noqa: PLR2004  # years, not nonsense


def _tags(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(dict.fromkeys(str(tag) for tag in value))
