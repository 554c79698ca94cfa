"""`scan`, `compact`, `sql`: maintain the index and the dataset."""

import argparse

import attrs

from destinations.runs import DatasetError

from .running import EXIT_OK, open_selected, roots_of
from .screen import Cell, Column, Session, table_lines
from .text import bytes_text, value_text

__all__ = ["compact", "scan", "sql"]


def scan(options: argparse.Namespace, session: Session) -> int:
    """Updates the index and reports what changed."""
    with open_selected(options, session) as runs:
        report = runs.scan(full=True) if options.full else runs.report
    if options.json:
        session.screen.json(
            {
                **attrs.asdict(report, recurse=False),
                "duplicates": {name: list(map(str, paths)) for name, paths in report.duplicates.items()},
                "problems": [[str(path), problem] for path, problem in report.problems],
            }
        )
        return EXIT_OK
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
    return EXIT_OK


def compact(options: argparse.Namespace, session: Session) -> int:
    """Writes finished runs to a dataset."""
    from destinations.runs.dataset import compact as compact_runs
    from uploads import UploadError

    options.root = [options.source]
    try:
        with open_selected(options, session) as runs:
            report = compact_runs(
                runs.query(archived=None),
                options.target,
                optimize=options.optimize,
                vacuum_days=options.vacuum,
                remove_gone=options.remove_gone,
                single_writer=options.single_writer,
                clock=session.clock,
            )
    except (UploadError, ValueError) as error:
        raise DatasetError(str(error)) from error
    if options.json:
        session.screen.json(
            {
                **attrs.asdict(report, recurse=False),
                "duplicates": list(map(str, report.duplicates)),
                "damaged": [[str(path), problem] for path, problem in report.damaged],
            }
        )
        return EXIT_OK
    session.screen.line(
        f"{report.uri}: {report.runs} runs, {report.points} points, {bytes_text(report.size)}; "
        f"{report.added} new, {report.changed} changed, {report.updated} with updated metadata, "
        f"{report.unchanged} unchanged, {report.removed} removed, {report.alive} still alive"
    )
    for path in report.duplicates:
        session.note(f"skipped {path}: a newer run has the same id")
    for path, problem in report.damaged:
        session.note(f"skipped {path}: {problem}")
    return EXIT_OK


def sql(options: argparse.Namespace, session: Session) -> int:
    """Runs an SQL query over a dataset."""
    from destinations.runs.dataset import sql as query
    from uploads import UploadError

    place = options.dataset or next(iter(roots_of(options, session)))
    try:
        found = query(place, options.query)
    except (UploadError, ValueError) as error:
        raise DatasetError(str(error)) from error
    if options.json:
        session.screen.json(found.to_dicts())
        return EXIT_OK
    columns = [
        Column(name, is_right=all(isinstance(row[index], int | float) for row in found.rows))
        for index, name in enumerate(found.columns)
    ]
    rows = [[Cell(value_text(value)) for value in row] for row in found.rows]
    session.screen.lines(table_lines(columns, rows, session.screen))
    return EXIT_OK
