"""`send`: sends runs to a tracker or to another folder."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from destinations.runs import Run, RunsError
from destinations.runs.send import TargetError
from destinations.runs.send import send as send_run

from .fields import check_filter
from .listing import selection_of
from .running import EXIT_FAILED, EXIT_OK, UsageError, find_runs, open_selected
from .screen import CommandContext

__all__ = ["send"]

EXIT_INTERRUPTED = 130


def send(options: argparse.Namespace, session: CommandContext) -> int:
    """Sends the new records of runs, one after another, with one bar for all of them."""
    from tqdm import tqdm

    runs = _chosen(options, session)
    if options.follow and len(runs) > 1:
        raise UsageError(f"--follow takes one run, got {len(runs)}. Send the others without it.")
    answers: list[dict[str, Any]] = []
    code = EXIT_OK
    is_hidden = len(runs) == 1 or not session.errors.isatty()
    with tqdm(runs, unit=" run", file=session.errors, disable=is_hidden) as bar:
        for run in bar:
            try:
                code = max(code, _send_one(run, options, session, answers))
            except TargetError as error:
                raise UsageError(str(error)) from None
            except (RunsError, OSError, ValueError) as error:
                if len(runs) == 1:
                    raise
                session.note(f"{run.name}: {error}")
                code = max(code, EXIT_FAILED)
            if code == EXIT_INTERRUPTED:
                break
    if options.json:
        is_one = len(options.run_name) == 1
        session.screen.json(answers[0] if is_one and answers else answers)
    return code


def _chosen(options: argparse.Namespace, session: CommandContext) -> Sequence[Run]:
    selection = [one for one in (options.where, options.tag, options.status) if one]
    if bool(options.run_name) + bool(selection) + options.all != 1:
        raise UsageError("give run names, or --where, --tag and --status, or --all.")
    if options.run_name:
        return find_runs(options.run_name, options, session)
    with open_selected(options, session) as runs:
        check_filter(options.where, runs, session)
        found = runs.query(**selection_of(options))
    if not found:
        session.note("no runs match")
    return found


def _send_one(
    run: Run, options: argparse.Namespace, session: CommandContext, answers: list[dict[str, Any]]
) -> int:
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
    if options.json:
        answers.append(
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
