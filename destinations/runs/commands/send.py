"""`send`: sends a run to a tracker or to another folder."""

import argparse

from destinations.runs.send import TargetError
from destinations.runs.send import send as send_run

from .running import EXIT_FAILED, EXIT_OK, UsageError, find_runs
from .screen import Session

__all__ = ["send"]

EXIT_INTERRUPTED = 130


def send(options: argparse.Namespace, session: Session) -> int:
    """Sends the new records of a run."""
    (run,) = find_runs([options.run_name], options, session)
    try:
        report = send_run(
            run,
            options.to,
            follow=options.follow,
            again=options.again,
            abandoned=options.abandoned,
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
