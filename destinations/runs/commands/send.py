"""`send`: sends a run to a tracker or to another folder; `migrate`: copies runs of others into ours."""

import argparse
import json
from pathlib import Path
from typing import Any

from destinations.runs import open_runs
from destinations.runs.send import TargetError
from destinations.runs.send import send as send_run

from .running import EXIT_FAILED, EXIT_OK, UsageError, find_runs
from .screen import CommandContext

__all__ = ["migrate", "send"]

EXIT_INTERRUPTED = 130


def send(options: argparse.Namespace, session: CommandContext) -> int:
    """Sends the new records of a run."""
    (run,) = find_runs([options.run_name], options, session)
    try:
        report = send_run(
            run,
            options.to,
            follow=options.follow,
            again=options.again,
            abandoned=options.abandoned,
            options=dict(map(_option, options.tracker_options)),
            wait=session.wait,
            now=session.clock,
        )
    except TargetError as error:
        raise UsageError(str(error)) from None
    if options.json:
        session.screen.json(
            {
                "run_id": run.run_id,
                "target": options.to,
                "rows": report.rows,
                "values": report.values,
                "records": dict(report.records),
                "unsupported": dict(report.unsupported),
                "missing": report.missing,
                "failures": report.failures,
                "failed": report.failed,
                "is_over": report.is_over,
            }
        )
    else:
        records = "".join(
            f", {count} {kind.replace('_', ' ')}" for kind, count in sorted(report.records.items())
        )
        session.screen.line(f"sent {report.rows} rows{records} of {run.run_id} to {options.to}")
    if report.unsupported:
        kinds = ", ".join(
            f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(report.unsupported.items())
        )
        session.note(f"not sent, unsupported by this target: {kinds}")
    for text in report.missing:
        session.note(text)
    for text in report.failed:
        session.note(text)
    if not report.is_over and not report.was_interrupted and not options.follow:
        session.note("the run is still running; send it again later, or use --follow")
    if report.was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if report.failures else EXIT_OK


def _option(text: str) -> tuple[str, Any]:
    """Returns the name and the value of an option."""
    name, separator, value = text.partition("=")
    if not name.isidentifier() or not separator:
        raise UsageError(f"--option must be NAME=VALUE, got {text!r}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def migrate(options: argparse.Namespace, session: CommandContext) -> int:
    """Copies runs that other loggers wrote to run folders; the originals stay as they are.

    Repeated, it copies what is new.
    """
    if not Path(options.source).is_dir():
        raise UsageError(f"no folder {options.source!r} to migrate runs from.")
    if Path(options.target).resolve().is_relative_to(Path(options.source).resolve()):
        raise UsageError(f"{options.target!r} is in {options.source!r}. Choose a folder beside it.")
    copied, failed, rows = 0, 0, 0
    with open_runs(options.source, clock=session.clock) as runs:
        for path, problem in runs.report.problems:
            session.note(f"{path}: {problem}")
        found = [run for run in runs.query(archived=None) if run.record.kind != "run-directory"]
    for run in found:
        try:
            report = send_run(
                run, f"run:{options.target}", abandoned=True, wait=session.wait, now=session.clock
            )
        except Exception as error:  # noqa: BLE001  # whatever is wrong with this run, the others are wanted
            session.note(f"skipped run {run.run_id} in {run.path}: {error}")
            failed += 1
            continue
        for text in (*report.missing, *report.failed):
            session.note(f"{run.run_id}: {text}")
        failed += bool(report.failures)
        copied += 1
        rows += report.rows
    if options.json:
        session.screen.json({"runs": copied, "rows": rows, "failures": failed, "target": options.target})
    else:
        session.screen.line(f"copied {rows} new rows of {copied} runs to {options.target}")
    return EXIT_FAILED if failed else EXIT_OK
