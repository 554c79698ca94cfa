"""The commands `export` (to one file), `pack` (parts to Parquet), and `compact` and `sql` (datasets)."""

import argparse
from collections.abc import Sequence

import attrs

from destinations.runs import DatasetError, RecordedRun
from destinations.runs.export import ExportFormat, export_metrics, export_rows, export_runs

from .listing import selection_of
from .running import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_OK, UsageError, find_runs, open_selected, roots_of
from .screen import Column, CommandContext, bytes_text, value_text

__all__ = ["compact", "export", "pack", "sql"]

_SUFFIXES = (".csv", ".parquet", ".jsonl")


def export(options: argparse.Namespace, session: CommandContext) -> int:
    """Writes a table to a file or to stdout."""
    output = None if options.output in {None, "-"} else str(options.output)
    if output is not None and not output.lower().endswith(_SUFFIXES):
        raise UsageError(f"output must end with {', '.join(_SUFFIXES)}, got {output!r}.")
    runs = _selected(options, session)
    on_screen: ExportFormat = "jsonl" if options.json else "csv"
    chosen = None if output is not None else on_screen
    target = session.screen.data_stream() if output is None else output
    damaged: list[str] = []

    def on_damaged(run: RecordedRun, error: Exception) -> None:
        damaged.append(f"metrics of run {run.run_id} in {run.place} cannot be read completely: {error}")

    if options.rows and len(runs) != 1:
        raise UsageError(f"--rows exports one run, got {len(runs)}. Give its name.")
    if options.rows:
        count = export_rows(runs[0], target, format=chosen, rank=options.rank, overwrite=options.overwrite)
    elif options.metrics:
        count = export_metrics(
            runs, target, format=chosen, overwrite=options.overwrite, on_damaged=on_damaged
        )
    else:
        count = export_runs(runs, target, format=chosen, overwrite=options.overwrite, clock=session.clock)
    for text in damaged:
        session.note(text)
    if output is not None and options.json:
        session.screen.json({"output": output, "runs": len(runs), "rows": count})
    elif output is not None:
        session.screen.line(f"wrote {count} rows of {len(runs)} runs to {output}")
    return EXIT_INCOMPLETE if damaged else EXIT_OK


def _selected(options: argparse.Namespace, session: CommandContext) -> Sequence[RecordedRun]:
    if options.run_name:
        if options.where or options.tag or options.status:
            raise UsageError("give either run names or --where, --tag and --status, not both.")
        return find_runs(options.run_name, options, session)
    with open_selected(options, session) as runs:
        return runs.query(**selection_of(options))


def pack(options: argparse.Namespace, session: CommandContext) -> int:
    """Converts the closed parts of earlier versions to the format of this version."""
    from destinations.run_directory import RunInUseError
    from destinations.run_directory.conversion import convert_parts

    packed, code = [], EXIT_OK
    for run in find_runs(options.run_name, options, session):
        try:
            found = [(rank, *one) for rank in run.ranks() for one in convert_parts(run.path, rank)]
        except RunInUseError as error:
            session.note(str(error))
            code = EXIT_FAILED
            continue
        left = [{"rank": rank, "part": part.number, "reason": why} for rank, part, why in found if why]
        packed.append({"run_id": run.run_id, "parts": len(found) - len(left), "left": left})
        if not options.json:
            session.screen.line(f"{run.name}: {len(found) - len(left)} parts were converted")
        for one in left:
            session.note(
                f"{run.name}: part {one['part']} of rank {one['rank']} stays as it is: {one['reason']}"
            )
    if options.json:
        session.screen.json(packed)
    return code


def compact(options: argparse.Namespace, session: CommandContext) -> int:
    """Writes finished runs to a dataset."""
    from destinations.runs.dataset import compact as compact_runs
    from uploads import UploadError

    options.root = [options.source]
    try:
        with open_selected(options, session) as runs:
            told = {path for path, _ in runs.report.problems}
            report = compact_runs(
                runs.query(archived=None),
                options.target,
                optimize=options.optimize,
                vacuum_days=options.vacuum,
                remove_gone=options.remove_gone,
                include_deleted=options.include_deleted,
                single_writer=options.single_writer,
            )
    except (UploadError, ValueError) as error:
        raise DatasetError(str(error)) from error
    code = EXIT_INCOMPLETE if report.duplicates or report.damaged else EXIT_OK
    if options.json:
        session.screen.json(
            {
                **attrs.asdict(report, recurse=False),
                "duplicates": list(map(str, report.duplicates)),
                "damaged": [[str(path), problem] for path, problem in report.damaged],
            }
        )
        return code
    session.screen.line(
        f"{report.uri}: {report.runs} runs, {report.points} points, {bytes_text(report.size)}; "
        f"{report.added} new, {report.changed} changed, {report.updated} with updated metadata, "
        f"{report.unchanged} unchanged, {report.removed} removed, {report.alive} still alive"
        + (f", {report.deleted} deleted from the dataset before" if report.deleted else "")
    )
    if report.without_column:
        session.note(
            f"{len(report.without_column)} hyperparameters or metrics have no column in the table runs, "
            f"such as {report.without_column[0]}. The tables hparams and summary have them."
        )
    for path in report.duplicates:
        session.note(f"left out {path}: a newer run has the same id")
    for path, problem in report.damaged:
        if path not in told:
            session.note(f"skipped {path}: {problem}")
    return code


def sql(options: argparse.Namespace, session: CommandContext) -> None:
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
        return
    columns = [
        Column(name, is_right=all(isinstance(row[index], int | float) for row in found.rows))
        for index, name in enumerate(found.columns)
    ]
    session.screen.table(columns, [list(map(value_text, row)) for row in found.rows])
