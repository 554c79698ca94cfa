"""`plot`: a metric of one or more runs as an image file."""

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
    """Plots a metric of runs to a file."""
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
        series: (run, x, y) with x and y of shape (N,).
        metric: label of the y axis.
        x: "step", or "time" for seconds since the start of the run.
        is_logarithmic: use a logarithmic y axis.
    """
    from matplotlib.figure import Figure

    # Without pyplot, which would select a GUI backend and keep the figure alive.
    figure = Figure(figsize=_SIZE_INCHES)
    axes = figure.subplots()
    for run, points, values in series:
        axes.plot(points, values, label=_label(run), linewidth=1.2)
    axes.set_xlabel("step" if x == "step" else "seconds since start")
    axes.set_ylabel(_plain(metric))
    if is_logarithmic:
        axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    return figure


def _label(run: Run) -> str:
    record = run.record
    name = record.run_id if record.name == record.run_id else f"{record.name} ({record.run_id})"
    # matplotlib omits labels that begin with "_" from the legend.
    return _plain(f" {name}" if name.startswith("_") else name)


def _plain(text: str) -> str:
    """Returns the text escaped for matplotlib: no formulas, no control characters."""
    return one_line(text).replace("$", r"\$")


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401  # checked before anything is read
    except ImportError as error:
        raise ImportError(
            f"package 'matplotlib' must be installed for plot, got: {error}. "
            'Run: pip install "training-destinations[plot]"',
            name="matplotlib",
        ) from error
