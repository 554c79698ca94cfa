"""`verify`: reads runs completely, and reports damaged or missing data."""

import argparse

import attrs

from .running import EXIT_FAILED, EXIT_OK, find_runs, open_selected
from .screen import CommandContext, value_text

__all__ = ["verify"]


def verify(options: argparse.Namespace, session: CommandContext) -> int:
    """Prints a line for each problem of the named runs, or of all runs."""
    if options.run_name:
        runs = find_runs(options.run_name, options, session)
    else:
        with open_selected(options, session) as selected:
            runs = selected.query(archived=None)
    answer, code = [], EXIT_OK
    for run in runs:
        found = list(run.verify())
        answer.append({"run_id": run.run_id, "problems": [attrs.asdict(one) for one in found]})
        if any(one.is_damage for one in found):
            code = EXIT_FAILED
        for one in () if options.json else found:
            session.screen.line(
                ": ".join(filter(None, (run.name, value_text(one.file), value_text(one.text))))
            )
        if not found and not options.json:
            session.screen.line(f"{run.name}: no problem")
    if options.json:
        session.screen.json(answer)
    return code
