"""`scan`, `compact`, `sql`: the index and the dataset."""

import argparse

import attrs

from .running import EXIT_OK, open_selected
from .screen import Session

__all__ = ["compact", "scan", "sql"]


def scan(options: argparse.Namespace, session: Session) -> int:
    """Looks at what changed, and says what was found."""
    with open_selected(options, session) as runs:
        report = runs.scan(full=True) if options.full else runs.report
    if options.json:
        session.screen.json(
            {
                **attrs.asdict(report, recurse=False),
                "duplicates": {name: list(map(str, paths)) for name, paths in report.duplicates.items()},
                "problems": [[str(path), problem] for path, problem in report.problems],
            }
        )
        return EXIT_OK
    screen = session.screen
    screen.line(
        f"{report.runs} runs in {report.seconds:.2f} s: {report.added} new, {report.changed} changed, "
        f"{report.unchanged} as before, {report.moved} moved, {report.gone} gone; {report.alive} alive"
    )
    for name, paths in report.duplicates.items():
        screen.line(f"run id {name} occurs {len(paths)} times: {', '.join(map(str, paths))}")
    for path, problem in report.problems:
        screen.line(f"{path}: {problem}")
    if report.damaged > len(report.problems):
        screen.line(f"and {report.damaged - len(report.problems)} more that could not be read well")
    screen.lines(report.warnings)
    return EXIT_OK
