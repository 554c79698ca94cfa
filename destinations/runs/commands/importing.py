"""`import`: writes the runs of another logger as run folders."""

import argparse
import functools
from collections.abc import Mapping

from destinations.runs.imports import ColumnsError, ImportReport, SourceError, UnreadableError, import_runs

from .running import EXIT_INCOMPLETE, EXIT_OK, UsageError, given_roots
from .screen import CommandContext

__all__ = ["import_"]


def import_(options: argparse.Namespace, session: CommandContext) -> int:
    """Imports runs, and says what came and what was left out."""
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
            session.note(f"its columns are {', '.join(error.columns)}")
            asked = session.ask("which one is the step? (empty: count the rows) ")
            report = _import(options, root, {**columns, "step": asked.strip()}, session)
    except UnreadableError as error:
        session.note(str(error))
        return EXIT_INCOMPLETE
    except SourceError as error:
        raise UsageError(str(error)) from None
    if options.json:
        session.screen.json(
            {
                "runs": report.runs,
                "unchanged": report.unchanged,
                "busy": report.busy,
                "rows": report.rows,
                "values": report.values,
                "records": dict(report.records),
                "left_out": dict(report.left_out),
                "bytes_there": report.seen.there,
                "bytes_read": report.seen.read,
                "failures": report.failure_count,
                "failed": report.failures,
                "root": str(root),
            }
        )
    else:
        records = "".join(f", {_counted(kind, count)}" for kind, count in sorted(report.records.items()))
        done = "would import" if options.dry_run else "imported"
        session.screen.line(
            f"{done} {report.runs} runs into {root}: {report.rows} rows, {report.values} values{records}; "
            f"{report.unchanged} were there already"
        )
    if report.busy:
        session.note(f"another process was importing {report.busy} runs, which were left to it")
    if left_out := report.left_out:
        what = ", ".join(_counted(kind, count) for kind, count in sorted(left_out.items()))
        session.note(f"left out: {what}")
    for text in report.failures:
        session.note(text)
    return EXIT_INCOMPLETE if report.failure_count else EXIT_OK


def _counted(kind: str, count: int) -> str:
    return f"{count} {kind.replace('_', ' ')}"


def _column(text: str) -> tuple[str, str]:
    role, separator, name = text.partition("=")
    if not separator:
        raise UsageError(f"--column must be ROLE=NAME, got {text!r}.")
    return role, name


def _import(
    options: argparse.Namespace, root: str, columns: Mapping[str, str], session: CommandContext
) -> ImportReport:
    from tqdm import tqdm

    # Shown anew also where no run is done in between.
    bar_of = functools.partial(tqdm, unit=" runs", miniters=0, file=session.errors)
    with bar_of(disable=not session.errors.isatty()) as bar:
        items = 0

        def progress(done: int, runs: int, more: int) -> None:
            nonlocal items
            items += more
            bar.total = runs
            bar.set_postfix_str(f"{items:,} values", refresh=False)
            bar.update(done - bar.n)

        return import_runs(
            options.source,
            root,
            source=options.from_source,
            columns=columns,
            progress=progress,
            dry_run=options.dry_run,
        )
