"""`tail` and `wait`: follow a running run."""

import argparse
from collections.abc import Iterable
from typing import Any

from destinations.history.rows import MetricRow
from destinations.run_directory.layout import column_of
from destinations.runs import MetricNotFoundError, RecordedRun
from destinations.runs.content.follow import last_rows_of_run
from destinations.runs.errors import near_names, suggestion
from destinations.runs.index.filters import Node, fields_of

from .running import EXIT_FAILED, EXIT_OK, EXIT_TIMEOUT, find_runs
from .screen import CommandContext, value_text

__all__ = ["tail", "wait"]


def tail(options: argparse.Namespace, session: CommandContext) -> None:
    """Prints the last rows of a run, then new ones as they are written, until the run ends."""
    (run,) = find_runs([options.run_name], options, session)
    wanted = {column_of(name) for name in options.metric or ()}
    if options.no_follow or not run.is_written:
        rows = last_rows_of_run(run.path, options.lines, wanted=wanted)
        if wanted and not rows and options.lines:
            raise MetricNotFoundError(options.metric[0], run.metric_names())
        _print(rows, options, session)
        return
    followed = run.follow(until_end=True, poll_seconds=options.interval, last=options.lines, only=wanted)
    for row in followed:
        _print([row], options, session)
        session.screen.flush()
    session.note(f"run {run.run_id}: {run.reload().shown_status}")


def _print(rows: Iterable[MetricRow], options: argparse.Namespace, session: CommandContext) -> None:
    wanted = {column_of(name) for name in options.metric or ()}
    for row in rows:
        metrics = {name: value for name, value in row.metrics.items() if not wanted or name in wanted}
        if options.json:
            whose = {"writer": row.writer} if row.writer else {}
            session.screen.json_line(
                {"step": row.step, "epoch": row.epoch, "time": row.time, **whose, "metrics": metrics}
            )
        else:
            whose_text = f" · {row.writer}" if row.writer else ""
            step = session.screen.styled(f"step {value_text(row.step)}{whose_text}", "dim")
            session.screen.line(
                "  ".join([step, *(f"{name} {value_text(value)}" for name, value in metrics.items())])
            )


def wait(options: argparse.Namespace, session: CommandContext) -> int:
    """Waits until a condition is true, the run ends, or the timeout expires."""
    from destinations.runs.index.filters import parse_filter
    from destinations.runs.runs import matches

    condition = parse_filter(options.condition, session.clock())
    (run,) = find_runs([options.run_name], options, session)
    _note_unknown(run, condition, session)
    deadline = None if options.timeout is None else session.clock() + options.timeout
    while True:
        # Read before the reload, so that the last rows of a run that just ended are seen.
        was_alive = run.is_written
        run = run.reload()
        now = session.clock()
        if matches(run.record, options.condition, now):
            return _ended(run, EXIT_OK, "holds", options, session)
        if not was_alive:
            return _ended(run, EXIT_FAILED, "does not hold, and the run is not alive", options, session)
        left = None if deadline is None else deadline - session.clock()
        if left is not None and left <= 0:
            return _ended(run, EXIT_TIMEOUT, "did not hold before the timeout", options, session)
        session.wait(options.interval if left is None else min(options.interval, left))


def _note_unknown(run: RecordedRun, condition: Node, session: CommandContext) -> None:
    """Prints a note for each name of a condition that the run does not have (yet): it may be misspelt."""
    known = {"summary": run.record.summary, "hparams": run.record.hparams}
    for field in fields_of(condition, with_exists=False):
        names = known.get(field.group)
        if names and field.name not in names:
            near = near_names(str(field), [f"{field.group}.{name}" for name in names])
            hint = suggestion(near[:1], "; did you mean")
            session.note(f"run {run.run_id} has no {str(field)!r} yet{hint}")


def _ended(
    run: RecordedRun, code: int, how: str, options: argparse.Namespace, session: CommandContext
) -> int:
    if options.json:
        found: dict[str, Any] = {
            "run_id": run.run_id,
            "status": run.shown_status,
            "alive": run.alive,
            "holds": code == EXIT_OK,
        }
        session.screen.json(found)
    else:
        session.note(f"run {run.run_id} ({run.shown_status}): the condition {how}")
    return code
