"""What a scan knows of a run: plain values, nothing that is still open."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from destinations.run_directory.layout import TERMINAL_STATUSES

from .files import read_object

__all__ = [
    "HEARTBEAT_SECONDS",
    "Reading",
    "RunKind",
    "RunRecord",
    "Scalar",
    "is_alive",
    "is_terminal",
    "read_sidecar",
    "sound_hparams",
    "sound_summary",
]

Scalar = bool | int | float | str | None

RunKind = Literal["run-directory", "stable-pretraining", "lightning-csv"]


@attrs.frozen
class RunRecord:
    """A run as it stood when its folder was last read; what the user edited is applied already.

    Times are seconds since 1970. A run of which something could not be read has a `problem` that says what, and what could be
    read; its status is "unknown" where that is not known.

    Args:
        path: the folder, absolute.
        run_id: the id that the run gave itself; of a folder without one, its path below the root.
        kind: who wrote it: `RunDirectory`, stable-pretraining's `RegistryLogger`, Lightning's `CSVLogger`.
        status: as written; a run that was killed says "running" for ever, see `liveness.is_alive`.
        created_at: when the run began.
        ended_at: when it ended.
        updated_at: when what is told here was written.
        tags: in the order in which they were given.
        notes: of the user.
        display_name: what the user calls the run.
        archived: whether the user put it away.
        hparams: hyperparameters by dotted name.
        summary: the last value of each metric; not all are finite.
        checkpoint_path: the newest checkpoint, as the run wrote it.
        heartbeat_at: the last sign of life.
        problem: what is wrong with the folder.
    """

    path: Path
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
    heartbeat_at: float | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        """What to call the run: its display name, else the name of its folder."""
        return self.display_name or self.path.name


# The writer of a run directory touches the heartbeat every second, and its lock counts as stale after the same three minutes;
# stable-pretraining's own scanner has this threshold too.
HEARTBEAT_SECONDS = 180.0

# What else the writers of other formats call an end. Lightning's "finished" is stored by stable-pretraining as it comes.
_TERMINAL = TERMINAL_STATUSES | {"finished", "orphaned", "killed"}


def is_terminal(status: str) -> bool:
    """Says whether a run of this status has ended, and says so itself."""
    return status in _TERMINAL


def is_alive(status: str, heartbeat_at: float | None, now: float) -> bool:
    """Says whether a run is being written: it has not ended, and its heartbeat is fresh.

    Args:
        status: of the run.
        heartbeat_at: when the heartbeat was last touched; a clock that goes ahead of ours counts as fresh.
        now: seconds since 1970.
    """
    return not is_terminal(status) and heartbeat_at is not None and heartbeat_at >= now - HEARTBEAT_SECONDS


# As strict JSON has what is no number.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LATEST = 1e12
_SCALARS = frozenset({float, int, str, bool, type(None)})
_NUMBERS = frozenset({float, int})


@attrs.define
class Reading:
    """The content of a run folder, but for what the file system itself says.

    The fields are those of `RunRecord`, and `may_have_nan`: False where certainly no value is NaN.
    """

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
    may_have_nan: bool = True


def read_sidecar(raw: bytes, non_finite: Callable[[], Mapping[str, Any]]) -> Reading:
    """Returns what a sidecar says; `RunDirectory`'s or stable-pretraining's.

    Args:
        raw: the file.
        non_finite: returns the `metrics` of `summary.json`, which says what the null of a summary stands for; asked
            only where there is one.

    Raises:
        ValueError: it is no sidecar; the text says why.
    """
    try:
        return _reading(read_object(raw), raw, non_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _reading(data: dict[str, Any], raw: bytes, non_finite: Callable[[], Mapping[str, Any]]) -> Reading:
    run_id = data.get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise ValueError("it has no run_id")
    notes, name = data.get("notes"), data.get("display_name")
    path, status = data.get("checkpoint_path"), data.get("status")
    hparams, summary = data.get("hparams"), data.get("summary")
    is_finite = not _has_non_finite(raw)
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
        hparams=sound_hparams(hparams, is_finite=is_finite) if isinstance(hparams, dict) else {},
        summary=sound_summary(summary, non_finite) if isinstance(summary, dict) else {},
        checkpoint_path=path if isinstance(path, str) else None,
        may_have_nan=not is_finite or (isinstance(summary, dict) and None in summary.values()),
    )


def _has_non_finite(raw: bytes) -> bool:
    # To look for one byte is ten times faster than for several.
    return (b"N" in raw and b"NaN" in raw) or (b"I" in raw and b"Infinity" in raw)


def sound_hparams(hparams: dict[str, Any], *, is_finite: bool = False) -> Mapping[str, Scalar]:
    """Returns hyperparameters as scalars; texts that stand for NaN as numbers.

    Args:
        hparams: by dotted name.
        is_finite: whether there is certainly no such text.
    """
    if is_finite and _SCALARS.issuperset(map(type, hparams.values())):
        return hparams
    return {name: _scalar(value) for name, value in hparams.items()}


def sound_summary(
    summary: dict[str, Any], non_finite: Callable[[], Mapping[str, Any]]
) -> Mapping[str, float]:
    """Returns last values as numbers; what is none is left out."""
    if _NUMBERS.issuperset(map(type, summary.values())):
        return summary
    known = non_finite() if None in summary.values() else {}
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
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return value
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def _last(statistics: Any) -> Any:
    return statistics.get("last") if isinstance(statistics, dict) else None


def _time(value: Any) -> float | None:
    kind = type(value)
    # Thirty thousand years; and no NaN.
    return float(value) if (kind is float or kind is int) and -_LATEST < value < _LATEST else None


def _tags(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(dict.fromkeys(str(tag) for tag in value))
