"""`plot`: a metric of some runs, as a picture."""

import argparse
from pathlib import Path
from typing import Any

from destinations.runs import MetricNotFoundError, Run
from destinations.text.formatting import one_line

from .running import EXIT_OK, UsageError, find_runs
from .screen import Session

__all__ = ["draw", "plot"]

_SUFFIXES = (".png", ".svg", ".pdf")
_SIZE_INCHES = (8.0, 4.5)
_DOTS_PER_INCH = 144


def plot(options: argparse.Namespace, session: Session) -> int:
    """Draws a metric of runs into a file."""
    output = Path(options.output)
    if output.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"output must end with {', '.join(_SUFFIXES)}, got {str(output)!r}.")
    _require_matplotlib()
    series = _series_of(find_runs(options.run_name, options, session), options, session)
    figure = draw(series, options.metric, x=options.x, is_logarithmic=options.log)
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
        start = run.record.created_at or (found.time[0] if len(found.time) else 0.0)
        series.append((run, found.step if options.x == "step" else found.time - start, found.value))
    if not series:
        raise MetricNotFoundError(options.metric, {name for run in runs for name in run.metric_names()})
    return series


def draw(
    series: list[tuple[Run, Any, Any]], metric: str, *, x: str = "step", is_logarithmic: bool = False
) -> Any:
    """Returns a matplotlib figure.

    Args:
        series: runs, each with two arrays of one length: where its points are, and their values.
        metric: the name of what is shown.
        x: "step" or "time", the seconds since a run began.
        is_logarithmic: how the vertical axis is divided.
    """
    from matplotlib.figure import Figure

    # Not by pyplot: it would choose a window system, and keep the figure.
    figure = Figure(figsize=_SIZE_INCHES)
    axes = figure.subplots()
    for run, points, values in series:
        axes.plot(points, values, label=_label(run), linewidth=1.2)
    axes.set_xlabel("step" if x == "step" else "seconds since the run began")
    axes.set_ylabel(_plain(metric))
    if is_logarithmic:
        axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    return figure


def _label(run: Run) -> str:
    record = run.record
    name = record.run_id if record.name == record.run_id else f"{record.name} ({record.run_id})"
    # A label that begins with "_" is left out of the legend.
    return _plain(f" {name}" if name.startswith("_") else name)


def _plain(text: str) -> str:
    """Returns a text in which matplotlib finds no formula, and nothing that a font has no shape for."""
    return one_line(text).replace("$", r"\$")


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401  # asked for before anything is read
    except ImportError as error:
        raise ImportError(
            f"package 'matplotlib' must be installed for plot, got: {error}. "
            'Run: pip install "training-destinations[plot]"',
            name="matplotlib",
        ) from error
