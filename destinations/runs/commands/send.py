"""The command `send`: sends runs to a tracker or to another folder."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from destinations.runs import RecordedRun
from destinations.runs.move.stream import MoveReport, move
from destinations.runs.send import TargetError
from destinations.runs.send import send as send_run

from .fields import check_filter
from .listing import selection_of
from .moving import progress_bar, records_text, say_what_is_wrong
from .running import EXIT_FAILED, EXIT_OK, UsageError, find_runs, open_selected
from .screen import CommandContext

EXIT_INTERRUPTED = 130


def send(options: argparse.Namespace, session: CommandContext) -> int:
    """Sends the new records of runs, one after another, with one bar for all of them."""
    runs = _chosen(options, session)
    if options.follow and len(runs) > 1:
        raise UsageError(f"--follow takes one run, got {len(runs)}. Send the others without it.")
    given = dict(map(_option, options.tracker_options))
    answers: list[dict[str, Any]] = []
    all_runs, codes = MoveReport(), [EXIT_OK]

    def take(run: RecordedRun) -> None:
        report = send_run(
            run,
            options.to,
            follow=options.follow,
            again=options.again,
            options=given,
            wait=session.wait,
            now=session.clock,
        )
        about = {"run_id": run.run_id, "target": options.to}
        answers.append({**about, **report.to_json(), "is_over": report.is_over})
        if not options.json:
            what = f"{report.rows} rows{records_text(report)}"
            session.screen.line(f"sent {what} of {run.run_id} to {options.to}")
        codes.append(say_what_is_wrong(report, session))
        if not report.is_over and not report.was_interrupted and not options.follow:
            session.note("the run is still running; send it again later, or use --follow")
        codes.append(EXIT_INTERRUPTED if report.was_interrupted else EXIT_OK)

    try:
        with progress_bar(session) as progress:
            move(runs, take, all_runs, progress)
    except TargetError as error:
        raise UsageError(str(error)) from None
    if options.json:
        is_one = len(options.run_name) == 1
        session.screen.json(answers[0] if is_one and answers else answers)
    codes.append(say_what_is_wrong(all_runs, session))
    return max(*codes, EXIT_FAILED if all_runs.busy else EXIT_OK)


def _chosen(options: argparse.Namespace, session: CommandContext) -> Sequence[RecordedRun]:
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


def _option(text: str) -> tuple[str, Any]:
    """Returns the name and the value of an option."""
    name, separator, value = text.partition("=")
    if not name.isidentifier() or not separator:
        raise UsageError(f"--option must be NAME=VALUE, got {text!r}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
