"""`diff`: the differences between runs."""

import argparse
from collections.abc import Mapping
from typing import Any

from destinations.runs import Run

from .running import EXIT_OK, find_runs
from .screen import Session
from .table import Cell, Column, table_lines
from .text import value_text

__all__ = ["diff", "differences", "differing_fields"]

# Differ between any two runs and are of no interest.
_VOLATILE = frozenset({"pid", "ppid", "session", "start", "started_at", "time", "run_dir", "format_version"})
_ABSENT = object()


def diff(options: argparse.Namespace, session: Session) -> int:
    """Shows the hyperparameters, environment, git state and metrics that differ between runs."""
    found = find_runs(options.run_name, options, session)
    rows = differences(found)
    ids = [run.record.run_id for run in found]
    if options.json:
        session.screen.json(
            {
                "runs": ids,
                "differences": {
                    name: [None if value is _ABSENT else value for value in values]
                    for name, values in rows.items()
                },
            }
        )
        return EXIT_OK
    if not rows:
        session.note("no differences")
        return EXIT_OK
    columns = [Column("", is_whole=True), *(Column(one) for one in ids)]
    lines = [
        [Cell(name), *(Cell(value_text(None if value is _ABSENT else value)) for value in values)]
        for name, values in rows.items()
    ]
    session.screen.lines(table_lines(columns, lines, session.screen))
    return EXIT_OK


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Returns the differing fields by name, each with its value in every run, or `_ABSENT`."""
    flats = [_fields(run) for run in runs]
    names = dict.fromkeys(name for flat in flats for name in flat)
    table = {name: [flat.get(name, _ABSENT) for flat in flats] for name in names}
    return {
        name: values
        for name, values in table.items()
        if any(not _is_same(value, values[0]) for value in values[1:])
    }


def differing_fields(runs: list[Run]) -> dict[str, dict[int, Any]]:
    """Returns the differing fields by name, each with its values by the place of the run in the list."""
    return {
        name: {place: value for place, value in enumerate(values) if value is not _ABSENT}
        for name, values in differences(runs).items()
    }


def _fields(run: Run) -> dict[str, Any]:
    record = run.record
    fields: dict[str, Any] = {"status": record.status, "tags": sorted(record.tags)}
    fields |= {f"hparams.{name}": value for name, value in record.hparams.items()}
    fields |= _flat("environment", run.environment)
    fields |= {f"summary.{name}": value for name, value in record.summary.items()}
    return fields


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if name not in _VOLATILE:
            flat |= _flat(f"{prefix}.{name}", item)
    return flat


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # NaN equals NaN here.
    return type(one) is type(other) and (one == other or (one != one and other != other))  # noqa: PLR0124
