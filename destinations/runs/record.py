"""The record of a run, and the table of its fields.

A field is declared once, as an attribute of `RunRecord`. The parser of the sidecar, the columns of the index,
the filter language, the columns of the command line, `compare`, `to_dicts`, DataFrames and exports are
derived from `FIELDS`. To add a field, add an attribute, increase `index.VERSION`, and name the field in the
page "Reading runs back".

Some fields are computed from stored ones and the time. SQLite calls the same functions, so filters and
sorting use the values that are shown.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from destinations.history.metric_summary import metric_of
from destinations.run_directory.layout import FORMAT_VERSION, HEARTBEAT_SECONDS, TERMINAL_STATUSES

from .files import number_of
from .order import MISSING

__all__ = [
    "FIELDS",
    "HEARTBEAT_SECONDS",
    "UNREADABLE",
    "Extremes",
    "FieldType",
    "RecordField",
    "RunKind",
    "RunRecord",
    "Scalar",
    "flat_record",
    "is_alive",
    "is_terminal",
    "read_sidecar",
    "shown_status",
    "sound_hparams",
    "sound_summary",
    "status_of",
    "stored_fields",
    "value_of",
]

Scalar = bool | int | float | str | None
RunKind = Literal["run-directory", "stable-pretraining", "lightning-csv"]
Extremes = tuple[float | None, int | None, float | None, int | None]
"""Smallest value of a metric, its step, largest value, its step; None where a run has none."""
FieldType = Literal["text", "texts", "time", "duration", "bool"]

# Statuses of other writers that end a run. Lightning's "finished" is stored as it is by stable-pretraining.
_TERMINAL = TERMINAL_STATUSES | {"finished", "orphaned", "killed"}
UNREADABLE = "unreadable"
"""The status of a run that a newer release wrote; its `problem` says which release to use."""
_MAX_TIME = 1e12
_SCALARS = frozenset({float, int, str, bool, type(None)})
_NUMBERS = frozenset({float, int})
_NON_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})


@attrs.frozen
class RecordField:
    """A field of a run, other than its hyperparameters and metrics.

    Attributes:
        name: the attribute of `RunRecord`.
        type: the type of its values.
        is_stored: whether the index has a column for it; other fields are computed when they are queried.
        is_in_sidecar: whether `sidecar.json` has it, by the same name.
        is_compared: whether `Runs.compare` reports it; False if it differs between any two runs.
        default: its value for a run without it.
        compute: returns the value that is shown; None if the stored value is shown. Its arguments are stored
            fields, followed by the time in seconds since 1970.
    """

    name: str
    type: FieldType
    is_stored: bool = True
    is_in_sidecar: bool = True
    is_compared: bool = True
    default: Any = None
    compute: Callable[..., Any] | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """The stored fields that `compute` takes."""
        return () if self.compute is None else tuple(inspect.signature(self.compute).parameters)[:-1]

    @property
    def is_recorded(self) -> bool:
        """Whether `RunRecord` has it; other fields depend on the time, or on how runs are shown."""
        return self.compute is None or self.is_stored


def is_terminal(status: str) -> bool:
    """Returns whether a run with this status has ended."""
    return status in _TERMINAL


def is_alive(status: str, heartbeat_at: float | None, now: float) -> bool:
    """Returns whether a run is being written: it has not ended, and its heartbeat is fresh.

    ```python
    print(is_alive("running", heartbeat_at=1000.0, now=1060.0))  # True
    ```

    Args:
        status: the stored status.
        heartbeat_at: the last heartbeat, see `run_directory.layout.trusted_heartbeat`.
        now: seconds since 1970.
    """
    return not is_terminal(status) and heartbeat_at is not None and heartbeat_at >= now - HEARTBEAT_SECONDS


def shown_status(status: str, heartbeat_at: float | None, now: float) -> str:
    """Returns the status to show for a stored one.

    "running" without a fresh heartbeat becomes "killed". "unknown", as for Lightning's runs, becomes
    "running" with a fresh heartbeat. Every other status is shown unchanged.
    """
    if status == "running":
        return status if is_alive(status, heartbeat_at, now) else "killed"
    if status == "unknown":
        return "running" if is_alive(status, heartbeat_at, now) else status
    return status


def _run(kind: str, run_id: str, name: str, now: float) -> str:  # noqa: ARG001  # all take the time
    # Lightning names all its folders version_N.
    return run_id if kind == "lightning-csv" else name


def _age(created_at: float | None, now: float) -> float | None:
    return None if created_at is None else now - created_at


def _duration(
    status: str,
    created_at: float | None,
    ended_at: float | None,
    updated_at: float | None,
    heartbeat_at: float | None,
    now: float,
) -> float | None:
    if created_at is None:
        return None
    if is_alive(status, heartbeat_at, now):
        return now - created_at
    end = ended_at or heartbeat_at or updated_at
    return None if end is None else end - created_at


def _field(kind: FieldType, *, default: Any = attrs.NOTHING, **properties: Any) -> Any:
    return attrs.field(default=default, metadata={"type": kind, **properties})


@attrs.frozen(kw_only=True)
class RunRecord:
    """A run as of the last scan of its folder, with the edits of the user applied.

    ```python
    with open_runs("runs") as runs:
        record = runs["digits"].record
    print(record.status, record.hparams["lr"], record.summary["loss"])  # completed 0.1 0.25
    ```

    Times are in seconds since 1970. If something could not be read, `problem` says what, and the record
    has everything else. An unreadable status is "unknown".

    Args:
        run_id: the id that the run gave itself; for a folder without one, its path below the root.
        status: as stored; a killed run keeps "running", see `shown_status`.
        kind: the logger: `RunDirectory`, stable-pretraining's `RegistryLogger`, or Lightning's `CSVLogger`.
        created_at: when the run began.
        ended_at: when the run ended.
        updated_at: when its metadata was last written.
        heartbeat_at: the last heartbeat.
        tags: in the order they were given.
        notes: free text of the user.
        display_name: the name the user gave the run.
        archived: whether the user archived the run.
        checkpoint_path: the newest checkpoint, as written by the run.
        problem: the problem of the folder.
        path: the folder, absolute.
        hparams: hyperparameters by dotted name.
        summary: the last value of each metric; may be NaN or infinite.
    """

    run_id: str = _field("text", is_compared=False)
    status: str = _field("text", default="unknown", compute=shown_status)
    kind: RunKind = _field("text", is_in_sidecar=False)
    created_at: float | None = _field("time", default=None, is_compared=False)
    ended_at: float | None = _field("time", default=None, is_compared=False)
    updated_at: float | None = _field("time", default=None, is_compared=False)
    heartbeat_at: float | None = _field("time", default=None, is_in_sidecar=False, is_compared=False)
    tags: tuple[str, ...] = _field("texts", default=())
    notes: str = _field("text", default="")
    # The viewer of stable-pretraining writes these two into the sidecar.
    display_name: str | None = _field("text", default=None)
    archived: bool = _field("bool", default=False)
    checkpoint_path: str | None = _field("text", default=None, is_compared=False)
    problem: str | None = _field("text", default=None, is_in_sidecar=False)
    path: Path = _field("text", is_stored=False, is_in_sidecar=False, is_compared=False)
    hparams: Mapping[str, Scalar] = attrs.field(factory=dict)
    summary: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """The display name, or the name of the folder."""
        return self.display_name or self.path.name


def _declared_fields() -> dict[str, RecordField]:
    def computed(name: str, kind: FieldType, compute: Callable[..., Any]) -> None:
        fields[name] = RecordField(
            name, kind, is_stored=False, is_in_sidecar=False, is_compared=False, compute=compute
        )

    fields: dict[str, RecordField] = {}
    computed("run", "text", _run)
    computed("age", "duration", _age)
    computed("duration", "duration", _duration)
    for attribute in attrs.fields(RunRecord):
        if attribute.metadata:
            default = None if attribute.default is attrs.NOTHING else attribute.default
            fields[attribute.name] = RecordField(attribute.name, **attribute.metadata, default=default)
        if attribute.name == "run_id":
            fields["name"] = RecordField("name", "text", is_in_sidecar=False, is_compared=False)
        if attribute.name == "kind":
            computed("alive", "bool", is_alive)
    return fields


FIELDS: Mapping[str, RecordField] = _declared_fields()
"""The fields of a run by name, in the order of columns."""


def stored_fields() -> list[RecordField]:
    """Returns the fields that the index has a column for."""
    return [field for field in FIELDS.values() if field.is_stored]


def flat_record(record: RunRecord, now: float) -> dict[str, Any]:
    """Returns the fields of a run as they are shown, then `hparams.…`, then `summary.…`.

    Args:
        record: the run's record.
        now: seconds since 1970.
    """
    values = {name: value_of(record, name, now) for name, field in FIELDS.items() if field.is_recorded}
    flat: dict[str, Any] = {name: None if value is MISSING else value for name, value in values.items()}
    flat["tags"], flat["path"] = list(record.tags), str(record.path)
    flat |= {f"hparams.{name}": value for name, value in record.hparams.items()}
    flat |= {f"summary.{name}": value for name, value in record.summary.items()}
    return flat


def value_of(record: RunRecord, name: str, now: float) -> Any:
    """Returns the value to show for a field, hyperparameter or metric; `MISSING` if the run has none.

    Args:
        record: the run's record.
        name: such as `status`, `hparams.optim.lr` or `summary.loss`.
        now: seconds since 1970.
    """
    group, _, rest = name.partition(".")
    if rest:
        values: Mapping[str, Any] = record.hparams if group == "hparams" else record.summary
        return values.get(rest, MISSING)
    field = FIELDS[name]
    if field.compute is None:
        value = getattr(record, name)
    else:
        value = field.compute(*(getattr(record, need) for need in field.needs), now)
    return MISSING if value is None else value


def status_of(record: RunRecord, now: float) -> str:
    """Returns the status to show for a run; see `shown_status`."""
    return shown_status(record.status, record.heartbeat_at, now)


# The sidecar.


def read_sidecar(data: dict[str, Any], read_summary: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Reads a sidecar of `RunDirectory` or stable-pretraining; returns arguments of `RunRecord`.

    It returns no record, because a first scan needs none and making them takes a tenth of its time.

    Args:
        data: the content of the file, from `read_object`.
        read_summary: returns the `metrics` of `summary.json`, which has the value behind a null in the
            summary; called only if there is a null.

    Raises:
        ValueError: the content is no sidecar; the message says why.
    """
    try:
        return _parsed(data, read_summary)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parsed(data: dict[str, Any], read_summary: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    run_id = data.get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise ValueError("it has no run_id")
    values = {name: read(data[name], default) for name, read, default in _READERS if name in data}
    hparams, summary = data.get("hparams"), data.get("summary")
    if isinstance(hparams, dict):
        values["hparams"] = sound_hparams(hparams)
    if isinstance(summary, dict):
        values["summary"] = sound_summary(summary, read_summary)
    values["kind"] = "run-directory" if "format_version" in data else "stable-pretraining"
    if type(version := data.get("format_version")) is int and version > FORMAT_VERSION:
        values["status"] = UNREADABLE
    return values


def _read_text(value: Any, default: str | None) -> str | None:
    return value if isinstance(value, str) and value else default


def _read_texts(value: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(str, value))) if isinstance(value, list) else default


def _read_time(value: Any, default: float | None) -> float | None:
    kind = type(value)
    # NaN fails the comparison.
    return float(value) if (kind is float or kind is int) and -_MAX_TIME < value < _MAX_TIME else default


def _read_bool(value: Any, default: bool) -> bool:  # called like the other readers
    return value if isinstance(value, bool) else default


_READER_OF: Mapping[FieldType, Callable[[Any, Any], Any]] = {
    "text": _read_text,
    "texts": _read_texts,
    "time": _read_time,
    "bool": _read_bool,
}


def sound_value(name: str, value: Any) -> Any:
    """Returns the value, or the field's default if the value has another type."""
    field = FIELDS[name]
    return _READER_OF[field.type](value, field.default)


_READERS = [
    (field.name, _READER_OF[field.type], field.default) for field in FIELDS.values() if field.is_in_sidecar
]


def sound_hparams(hparams: dict[str, Any]) -> Mapping[str, Scalar]:
    """Returns hyperparameters, by dotted name, as scalars; "NaN" and "Infinity" become numbers."""
    values = hparams.values()
    if _SCALARS.issuperset(map(type, values)) and _NON_FINITE.isdisjoint(values):
        return hparams
    return {name: _scalar(value) for name, value in hparams.items()}


def sound_summary(
    summary: dict[str, Any], read_summary: Callable[[], Mapping[str, Any]]
) -> Mapping[str, float]:
    """Returns last values as numbers; entries that are not numbers are left out."""
    if _NUMBERS.issuperset(map(type, summary.values())):
        return summary
    known = read_summary() if None in summary.values() else {}
    sound: dict[str, float] = {}
    for name, value in summary.items():
        number = metric_of(_last(known.get(name)) if value is None else value)
        if number is None and value is None:
            number = math.nan
        if number is not None:
            sound[name] = number
    return sound


def _scalar(value: Any) -> Scalar:
    if isinstance(value, str):
        # Strict JSON writes NaN and infinities as texts.
        number = number_of(value)
        return value if number is None else number
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _last(statistics: Any) -> Any:
    return statistics.get("last") if isinstance(statistics, dict) else None
