"""The command `import`: writes the runs of another logger as run folders."""

import argparse
from collections.abc import Mapping

from destinations.runs.imports import ColumnsError, MoveReport, SourceError, UnreadableError, import_runs

from .moving import progress_bar, records_text, say_what_is_wrong
from .running import EXIT_INCOMPLETE, UsageError, given_roots
from .screen import CommandContext


def import_(options: argparse.Namespace, session: CommandContext) -> int:
    """Imports runs, and reports the imported and the omitted data."""
    root, *others = given_roots(options, session) or ["runs"]
    if others or "://" in root:
        raise UsageError(
            f"runs are imported into one folder, got {' and '.join((root, *others))}. Give --root."
        )
    columns = dict(_column(text) for text in options.columns)
    try:
        try:
            report = _import(options, root, columns, session)
        except ColumnsError as error:
            if session.ask is None:
                raise
            session.note(f"columns: {', '.join(error.columns)}")
            asked = session.ask("which column is the step? (empty: count the rows) ")
            report = _import(options, root, {**columns, "step": asked.strip()}, session)
    except UnreadableError as error:
        session.note(str(error))
        return EXIT_INCOMPLETE
    except SourceError as error:
        raise UsageError(str(error)) from None
    if options.json:
        session.screen.json({**report.to_json(), "root": str(root)})
    else:
        done = "would import" if options.dry_run else "imported"
        session.screen.line(
            f"{done} {report.runs} runs into {root}: {report.rows} rows, {report.values} values"
            f"{records_text(report)}; {report.unchanged} were there already"
        )
    return say_what_is_wrong(report, session)


def _column(text: str) -> tuple[str, str]:
    role, separator, name = text.partition("=")
    if not separator:
        raise UsageError(f"--column must be ROLE=NAME, got {text!r}.")
    return role, name


def _import(
    options: argparse.Namespace, root: str, columns: Mapping[str, str], session: CommandContext
) -> MoveReport:
    with progress_bar(session) as progress:
        return import_runs(
            options.source,
            root,
            source=options.from_source,
            columns=columns,
            progress=progress,
            dry_run=options.dry_run,
        )
