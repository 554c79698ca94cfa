"""`plot`: a metric of one or more runs as an image file."""

import argparse
from pathlib import Path
from typing import Any

from destinations.runs import MetricNotFoundError, Run
from destinations.runs.notebook import axis_of, draw, label_of, require_matplotlib

from .running import EXIT_OK, UsageError, find_runs
from .screen import Session

__all__ = ["plot"]

_SUFFIXES = (".png", ".svg", ".pdf")
_DOTS_PER_INCH = 144


def plot(options: argparse.Namespace, session: Session) -> int:
    """Plots a metric of runs to a file."""
    output = Path(options.output)
    if output.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"output must end with {', '.join(_SUFFIXES)}, got {str(output)!r}.")
    require_matplotlib()
    series = _series_of(find_runs(options.run_name, options, session), options, session)
    lines = [(label_of(run.record), x, y) for run, x, y in series]
    figure = draw(lines, options.metric, x=options.x, is_logarithmic=options.log)
    figure.savefig(output, dpi=_DOTS_PER_INCH, bbox_inches="tight")
    if options.json:
        points = [{"run_id": run.record.run_id, "points": len(x)} for run, x, _ in series]
        session.screen.json({"output": str(output), "metric": options.metric, "runs": points})
    else:
        session.screen.line(str(output))
    return EXIT_OK


def _series_of(runs: list[Run], options: argparse.Namespace, session: Session) -> list[tuple[Run, Any, Any]]:
    series = []
    for run in runs:
        try:
            found = run.series(options.metric)
        except MetricNotFoundError:
            if len(runs) == 1:
                raise
            session.note(f"run {run.record.run_id} has no metric {options.metric!r}")
            continue
        series.append((run, axis_of(run.record, found, options.x), found.value))
    if not series:
        raise MetricNotFoundError(options.metric, {name for run in runs for name in run.metric_names()})
    return series
