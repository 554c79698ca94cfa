"""`time`: how the time of a run was spent. `trace`: its spans, for Perfetto."""

import argparse
import operator
import os
from pathlib import Path

from destinations.run_directory.layout import TIME_FOLDER
from destinations.runs.content.ledger import TimeReport, is_profile, write_trace
from destinations.runs.files import written_beside

from .fields import local_time
from .running import find_runs
from .screen import CommandContext, duration_text, numbers, value_text

__all__ = ["goodput_text", "time", "trace"]

_A_MINUTE = 60


def time(options: argparse.Namespace, session: CommandContext) -> None:
    """Shows how the time of a run was spent."""
    (run,) = find_runs([options.run_name], options, session)
    report, screen = run.time_report(), session.screen
    if options.json:
        screen.json(None if report is None else report.to_json())
        return
    if report is None:
        session.note(
            f"no time was recorded in {run.path / TIME_FOLDER}: Trainer does it, other loops with "
            "callbacks=[TimeLedger()]"
        )
        return
    screen.line(goodput_text(report))
    screen.line()
    rows = [
        (name, _seconds_text(seconds), f"{seconds / report.wall:.1%}" if report.wall else "")
        for name, seconds in report.seconds.items()
        if seconds
    ]
    screen.table(["bucket", *numbers("time", "share")], rows)
    if report.faults:
        screen.line()
        names = ("at step", "lost", "gone", "start", "restore", "repeated")
        times = operator.attrgetter("cost", "gone", "start", "restore", "repeated")
        faults = [
            (one.status or "?", local_time(one.at), f"{one.step:,}", *map(_seconds_text, times(one)))
            for one in report.faults
        ]
        screen.table(["ended", "when", *numbers(*names)], faults)
    texts = [text for text in (report.slow_text, report.slow_steps_text) if text]
    if texts:
        screen.line()
    for text in texts:
        screen.line(value_text(text))


def trace(options: argparse.Namespace, session: CommandContext) -> None:
    """Writes the spans of a run."""
    (run,) = find_runs([options.run_name], options, session)
    path = Path(options.output)
    with (
        written_beside(path, overwrite=options.overwrite) as beside,
        beside.open("w", encoding="utf-8") as file,
    ):
        artifacts = run.artifacts()
        uploads = {one.name: one.time for one in artifacts if one.time is not None}
        profiles = [one.path for one in artifacts if is_profile(one.name)] if options.profiles else []
        count = write_trace(run.path / TIME_FOLDER, file, name=run.name, uploads=uploads, profiles=profiles)
    session.note(f"{count:,} events in {os.fspath(path)}: open it at https://ui.perfetto.dev")


def goodput_text(report: TimeReport) -> str:
    """Returns the share of the time in which the model was trained: "goodput 87.1 % of 3h20m, 2 faults"."""
    share = "?" if report.goodput is None else f"{report.goodput:.1%}"
    count = len(report.faults)
    faults = f", {count} fault{'s' if count > 1 else ''}" if count else ""
    return f"goodput {share} of {_seconds_text(report.wall)}{faults}"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f}s" if seconds < _A_MINUTE else duration_text(seconds)
