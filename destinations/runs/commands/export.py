"""`export`: the table of runs, or all metrics in long format, as CSV, Parquet or JSON Lines."""

import argparse
from collections.abc import Sequence

from destinations.runs import Run
from destinations.runs.export import ExportFormat, export_metrics, export_runs

from .listing import selection_of
from .running import EXIT_OK, UsageError, find_runs, open_selected
from .screen import Session

__all__ = ["export"]

_SUFFIXES = (".csv", ".parquet", ".jsonl")


def export(options: argparse.Namespace, session: Session) -> int:
    """Writes a table to a file or to stdout."""
    output = None if options.output in {None, "-"} else str(options.output)
    if output is not None and not output.lower().endswith(_SUFFIXES):
        raise UsageError(f"output must end with {', '.join(_SUFFIXES)}, got {output!r}.")
    runs = _selected(options, session)
    on_screen: ExportFormat = "jsonl" if options.json else "csv"
    chosen = None if output is not None else on_screen
    target = session.screen.data_stream() if output is None else output
    if options.metrics:
        count = export_metrics(runs, target, format=chosen, overwrite=options.overwrite)
    else:
        count = export_runs(runs, target, format=chosen, overwrite=options.overwrite)
    if output is None:
        return EXIT_OK
    if options.json:
        session.screen.json({"output": output, "runs": len(runs), "rows": count})
    else:
        session.screen.line(f"wrote {count} rows of {len(runs)} runs to {output}")
    return EXIT_OK


def _selected(options: argparse.Namespace, session: Session) -> Sequence[Run]:
    if options.run_name:
        if options.where or options.tag or options.status:
            raise UsageError("give either run names or --where, --tag and --status, not both.")
        return find_runs(options.run_name, options, session)
    with open_selected(options, session) as runs:
        return runs.query(**selection_of(options))
