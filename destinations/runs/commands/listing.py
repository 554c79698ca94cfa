"""`ls` and `best`: tables of runs. `scan`: updates their index."""

import argparse
import math
from collections import Counter
from typing import Any

import attrs

from destinations.runs import RunRecord, Runs
from destinations.runs.order import same_values
from destinations.runs.record import value_of
from destinations.text.formatting import metric_direction

from .fields import as_json, cell_of, check_fields, check_filter, column_of, field_of, texts_apart
from .running import open_selected
from .screen import Cell, Column, CommandContext, numbers, value_text

__all__ = ["best", "ls", "scan", "selection_of"]

_COLUMNS = ("run", "status", "age", "duration")
_MAX_HPARAMS = 3
_MAX_METRICS = 3


def selection_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the selection options as arguments of `Runs.query`."""
    return {
        "where": options.where,
        "tag": options.tag,
        "status": options.status,
        "archived": None if options.archived else False,
        "limit": options.limit,
    }


def ls(options: argparse.Namespace, session: CommandContext) -> None:
    """Lists runs, once or repeatedly (`--watch`)."""
    with open_selected(options, session) as runs:
        while True:
            _list_once(runs, options, session)
            if options.watch is None:
                return
            session.screen.flush()
            session.wait(options.watch)
            runs.scan()
            if not options.json:
                session.screen.clear()


def _list_once(runs: Runs, options: argparse.Namespace, session: CommandContext) -> None:
    names = [name.strip() for name in (options.columns or "").split(",") if name.strip()]
    if names:
        names = check_fields(names, runs.hparam_names(), runs.metric_names())
    check_filter(options.where, runs, session)
    records = runs.records(**selection_of(options), sort_by=options.sort, descending=options.descending)
    now = session.clock()
    if options.json:
        found = [
            {"run_id": record.run_id, **{name: field_of(record, name, now) for name in names}}
            if names
            else as_json(record, now)
            for record in records
        ]
        # With --watch, each list is one line, so that a reader can tell lists apart.
        (session.screen.json if options.watch is None else session.screen.json_line)(found)
        return
    if not records:
        session.note("no runs" if len(runs) == 0 else f"none of {len(runs)} runs match")
        return
    names = ["run", *(name for name in names if name != "run")] if names else _columns_of(records)
    columns = [column_of(name, [field_of(record, name, now) for record in records]) for name in names]
    cells = [_cells_of(name, records, now) for name in names]
    session.screen.table(columns, zip(*cells, strict=True))


def _cells_of(name: str, records: list[RunRecord], now: float) -> list[Cell]:
    """Returns the cells of a column; different hyperparameters get different texts."""
    if name.startswith("hparams."):
        return list(map(Cell, texts_apart(value_of(record, name, now) for record in records)))
    return [cell_of(record, name, now) for record in records]


def _columns_of(records: list[RunRecord]) -> list[str]:
    """Returns the columns that tell runs apart: hyperparameters that vary, and the main metrics."""
    columns = list(_COLUMNS)
    if any(record.tags for record in records):
        columns.append("tags")
    counts = Counter(name for record in records for name in record.hparams)
    varying = [
        name
        for name in counts
        if not same_values(value_of(record, f"hparams.{name}", 0.0) for record in records)
    ]
    # Hyperparameters that all runs have come first.
    varying.sort(key=lambda name: -counts[name])
    metrics = Counter(name for record in records for name in record.summary)
    main = sorted(metrics, key=lambda name: (not metric_direction(name), -metrics[name]))
    columns += [f"hparams.{name}" for name in varying[:_MAX_HPARAMS]]
    return columns + [f"summary.{name}" for name in main[:_MAX_METRICS]]


def best(options: argparse.Namespace, session: CommandContext) -> None:
    """Ranks runs by a metric."""
    with open_selected(options, session) as runs:
        ranked = runs.best(options.metric, is_max=options.is_max, **selection_of(options))
    now = session.clock()
    if options.json:
        session.screen.json(
            [
                {"rank": rank, "value": one.value, "step": one.step, **as_json(one.run.record, now)}
                for rank, one in enumerate(ranked, 1)
            ]
        )
        return
    title = f"{'max' if options.is_max else 'min'} {options.metric}"
    columns: list[Column | str] = [*numbers(""), Column("run", is_whole=True)]
    columns += [*numbers(title, "at step", "last"), "status", "tags"]
    rows = [
        (
            *(rank, cell_of(one.run.record, "run", now), Cell(value_text(one.value), "bold"), one.step),
            one.run.record.summary.get(options.metric, math.nan),
            *(cell_of(one.run.record, name, now) for name in ("status", "tags")),
        )
        for rank, one in enumerate(ranked, 1)
    ]
    session.screen.table(columns, rows)


def scan(options: argparse.Namespace, session: CommandContext) -> None:
    """Updates the index and reports what changed."""
    with open_selected(options, session) as runs:
        report = runs.scan(full=True) if options.full else runs.report
    if options.json:
        session.screen.json(
            {
                **attrs.asdict(report, recurse=False),
                "duplicates": {name: list(map(str, paths)) for name, paths in report.duplicates.items()},
                "problems": [[str(path), problem] for path, problem in report.problems],
                "unlisted": [[str(path), reason] for path, reason in report.unlisted],
            }
        )
        return
    screen = session.screen
    screen.line(
        f"{report.runs} runs in {report.seconds:.2f} s: {report.added} new, {report.changed} changed, "
        f"{report.unchanged} unchanged, {report.moved} moved, {report.gone} removed; {report.alive} alive"
    )
    for name, paths in report.duplicates.items():
        screen.line(f"duplicate run id {name} in {len(paths)} folders: {', '.join(map(str, paths))}")
    for path, problem in report.problems:
        screen.line(f"{path}: {problem}")
    if report.damaged > len(report.problems):
        screen.line(f"and {report.damaged - len(report.problems)} more with problems")
    screen.lines(report.warnings)
