"""Fields of a run as table columns and as JSON."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from destinations.runs import FilterError, MetricNotFoundError, RunRecord, Runs, is_alive
from destinations.runs.errors import near_names, suggestion
from destinations.runs.index.filters import fields_of, parse_field, parse_filter
from destinations.runs.order import MISSING, Key, key_of, label_of
from destinations.runs.record import FIELDS, status_of, value_of
from destinations.text.formatting import one_line

from .running import UsageError
from .screen import NOTHING, Cell, Column, CommandContext, age_text, duration_text, value_text

__all__ = [
    "OWN_FIELDS",
    "as_json",
    "cell_of",
    "check_fields",
    "check_filter",
    "column_of",
    "field_of",
    "local_time",
    "status_style",
    "texts_apart",
]

OWN_FIELDS = tuple(FIELDS)
"""The columns that are not hyperparameters or metrics."""

_STYLES = {
    "running": "green",
    "completed": None,
    "stopped": None,
    "finished": None,
    "failed": "red",
    "failed to write": "red",
    "killed": "red",
}
_WHOLE = 1000
_TEXT_OF = {"age": age_text, "duration": duration_text}


def status_style(status: str) -> str | None:
    """Returns the colour of a status."""
    return _STYLES.get(status, "yellow")


def field_of(record: RunRecord, name: str, now: float) -> Any:
    """Returns the value of a column for a run, or None."""
    value = value_of(record, name, now)
    return None if value is MISSING else list(value) if isinstance(value, tuple) else value


def cell_of(record: RunRecord, name: str, now: float) -> Cell:
    """Returns the formatted value of a column for a run."""
    value = field_of(record, name, now)
    if name == "status":
        return Cell(str(value), status_style(str(value)))
    if name in _TEXT_OF:
        return Cell(_TEXT_OF[name](value))
    if name in FIELDS and FIELDS[name].type == "time" and value is not None:
        return Cell(local_time(float(value)))
    if isinstance(value, list):
        return Cell(value_text(", ".join(map(str, value))) if value else NOTHING)
    return Cell(value_text(value) if value != "" else NOTHING)


def texts_apart(values: Iterable[Any]) -> list[str]:
    """Returns the texts of values side by side: their labels where different ones would read the same.

    Args:
        values: `MISSING` for a run without one.
    """
    found = [(value, NOTHING if value is MISSING or value == "" else value_text(value)) for value in values]
    kinds: dict[str, set[Key]] = {}
    for value, text in found:
        kinds.setdefault(text, set()).add(key_of(value))
    return [one_line(label_of(value)) if len(kinds[text]) > 1 else text for value, text in found]


def column_of(name: str, values: Iterable[Any]) -> Column:
    """Returns the column for a field: numbers are right-aligned, ids are truncated last."""
    is_right = name in _TEXT_OF or (
        name.startswith(("hparams.", "summary."))
        and all(isinstance(value, int | float) or value is None for value in values)
    )
    return Column(
        name.removeprefix("hparams.").removeprefix("summary."),
        is_right,
        is_whole=name in {"run", "name"},
        # A truncated number would be another number. "completed" has nine letters.
        narrowest=_WHOLE if is_right else 9 if name == "status" else 5,
    )


def check_fields(names: Iterable[str], hparams: Collection[str], metrics: Collection[str]) -> list[str]:
    """Returns the columns with their groups: "summary.val/acc" for "val/acc", as filters take it.

    Raises:
        UsageError: unknown column; the message suggests the closest names.
    """
    cells = [*(f"hparams.{name}" for name in hparams), *(f"summary.{name}" for name in metrics)]
    known = {*OWN_FIELDS, *cells}
    groups = {"hparams": hparams, "summary": metrics}
    found = []
    for name in names:
        if name in known:
            found.append(name)
            continue
        try:
            field = str(parse_field(name, groups.__getitem__))
        except FilterError:
            field = ""
        if field not in known:
            offer = suggestion(near_names(name, known))
            raise UsageError(f"unknown column {name!r}.{offer} Use a field, hparams.NAME or summary.NAME.")
        found.append(field)
    return found


def check_filter(text: str | None, runs: Runs, session: CommandContext) -> None:
    """Checks that some run has each hyperparameter and metric that a filter tests.

    A misspelt name would silently select no run. `exists` may name something that no run has yet.

    Raises:
        MetricNotFoundError: no run has the name; the message suggests the closest.
    """
    if text is None or not len(runs):
        return
    known: dict[str, list[str]] = {}

    def names(group: str) -> list[str]:
        return runs.hparam_names() if group == "hparams" else runs.metric_names()

    for field in fields_of(parse_filter(text, session.clock(), names), with_exists=False):
        if field.group == "run":
            continue
        found = known.setdefault(field.group, names(field.group))
        if field.name not in found:
            raise MetricNotFoundError(str(field), [f"{field.group}.{name}" for name in found])


def as_json(record: RunRecord, now: float) -> dict[str, Any]:
    """Returns all indexed fields of a run."""
    fields: Mapping[str, Any] = attrs.asdict(record, recurse=False)
    return {
        **fields,
        "path": str(record.path),
        "status": status_of(record, now),
        "name": record.name,
        "tags": list(record.tags),
        "hparams": dict(record.hparams),
        "summary": dict(record.summary),
        "alive": is_alive(record.status, record.heartbeat_at, now),
    }


def local_time(seconds: float) -> str:
    """Returns a time, in seconds since 1970, as a date and a time of day of this machine's zone."""
    from datetime import datetime

    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OSError, OverflowError, ValueError):  # Out of range for datetime.
        return value_text(seconds)
