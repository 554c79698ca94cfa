"""`plot`: metrics of runs, as charts in the terminal or as an image file."""

import argparse
import contextlib
import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from destinations.runs import MetricNotFoundError, RecordedRun, RunNotFoundError
from destinations.runs.notebook import draw, lines_of, require_matplotlib
from destinations.text.formatting import cut, one_line, pad, short, shortened

from .fields import check_filter
from .listing import selection_of
from .running import UsageError, at_path, find_runs, open_selected
from .screen import CommandContext, Screen

__all__ = ["chart_lines", "plot"]

Series = tuple[str, Any, Any]
"""Label, x of shape (N,), y of shape (N,)."""

_SUFFIXES = (".png", ".svg", ".pdf")
_DOTS_PER_INCH = 144
_MAX_RUNS = 20
_MAX_METRICS = 20
_ROWS = 12
_DEFAULT_WIDTH = 80
_MIN_CELLS, _MAX_CELLS = 20, 100
_LABEL_WIDTH = 30
_STYLES = ("cyan", "yellow", "green", "magenta", "red", "blue")
# The dots of a Braille character by column and row, from the top:
# https://www.unicode.org/charts/PDF/U2800.pdf
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800


def plot(options: argparse.Namespace, session: CommandContext) -> None:
    """Plots metrics of runs."""
    output = None if options.output is None else Path(options.output)
    if output is not None:
        if output.suffix.lower() not in _SUFFIXES:
            raise UsageError(f"output must end with {', '.join(_SUFFIXES)}, got {str(output)!r}.")
        require_matplotlib()
    metrics, names = _sorted_words(options, session)
    runs = find_runs(names, options, session) if names else _selected_runs(options, session)
    charts = {
        metric: _series_of(metric, runs, options, session, is_named=bool(names))
        for metric in _metrics_of(metrics, runs, session)
    }
    if output is not None:
        figure = draw(charts, x=options.x, is_logarithmic=options.log)
        figure.savefig(output, dpi=_DOTS_PER_INCH, bbox_inches="tight")
    if options.json:
        points = {
            metric: [{"run": label, "points": len(x)} for label, x, _ in series]
            for metric, series in charts.items()
        }
        session.screen.json({"output": None if output is None else str(output), "metrics": points})
    elif output is not None:
        session.screen.line(str(output))
    else:
        for metric, series in charts.items():
            session.screen.lines(
                chart_lines(series, metric, session.screen, x=options.x, is_logarithmic=options.log)
            )


def _sorted_words(options: argparse.Namespace, session: CommandContext) -> tuple[list[str], list[str]]:
    """Returns the metrics and the runs among the arguments: the first is a metric, later ones may be runs."""
    metrics, names = options.metrics[:1], list(options.run_name or ())
    rest: list[str] = []
    for word in options.metrics[1:]:
        (names if at_path(word) is not None else rest).append(word)
    if rest:
        with open_selected(options, session) as runs:
            known = runs.metric_names()
            for word in rest:
                is_metric = bool(_matching(word, known))
                with contextlib.suppress(RunNotFoundError):
                    if not is_metric and runs[word] is not None:
                        names.append(word)
                        continue
                metrics.append(word)
    return metrics, names


def _matching(given: str, known: Sequence[str]) -> list[str]:
    """Returns the metric with this name, or the metrics that match the pattern."""
    return [given] if given in known else [name for name in known if fnmatch.fnmatchcase(name, given)]


def _selected_runs(options: argparse.Namespace, session: CommandContext) -> list[RecordedRun]:
    with open_selected(options, session) as opened:
        check_filter(options.where, opened, session)
        runs = opened.query(**selection_of(options))
        if not runs:
            raise UsageError("no run matches. List them with: destinations runs ls")
    if len(runs) > _MAX_RUNS and options.limit is None:
        session.note(f"showing the newest {_MAX_RUNS} of {len(runs)} runs; choose with --limit or --where")
        runs = runs[:_MAX_RUNS]
    return runs


def _metrics_of(given: Sequence[str], runs: Sequence[RecordedRun], session: CommandContext) -> list[str]:
    """Returns the names of the metrics that are given or match a pattern."""
    known = list(dict.fromkeys(name for run in runs for name in run.metric_names()))
    names: list[str] = []
    for word in given:
        found = _matching(word, known)
        if not found:
            raise MetricNotFoundError(word, known)
        names += found
    names = list(dict.fromkeys(names))
    if len(names) > _MAX_METRICS:
        session.note(f"showing {_MAX_METRICS} of {len(names)} metrics")
    return names[:_MAX_METRICS]


def _series_of(
    metric: str,
    runs: list[RecordedRun],
    options: argparse.Namespace,
    session: CommandContext,
    *,
    is_named: bool,
) -> list[Series]:
    series: list[Series] = []
    for run in runs:
        try:
            series += lines_of(run.record, run.series(metric), options.x)
        except MetricNotFoundError:
            if is_named:
                session.note(f"run {run.record.run_id} has no metric {metric!r}")
    return series


def chart_lines(
    series: Sequence[Series], metric: str, screen: Screen, *, x: str = "step", is_logarithmic: bool = False
) -> list[str]:
    """Returns a chart of Braille dots: a title, the y range at the left, the x range below, and a legend."""
    import numpy as np

    curves = []
    for _, steps, values in series:
        xs, ys = np.asarray(steps, float), np.asarray(values, float)
        if is_logarithmic:
            ys = np.log10(np.where(ys > 0, ys, np.nan))
        is_finite = np.isfinite(xs) & np.isfinite(ys)
        curves.append((xs[is_finite], ys[is_finite]))
    title = screen.styled(one_line(metric), "bold")
    filled = [curve for curve in curves if len(curve[0])]
    if not filled:
        return [title, "  no finite values", ""]
    low_x, high_x = min(xs.min() for xs, _ in filled), max(xs.max() for xs, _ in filled)
    low, high = min(ys.min() for _, ys in filled), max(ys.max() for _, ys in filled)
    top, bottom = (_value(value, is_logarithmic=is_logarithmic) for value in (high, low))
    margin = max(len(top), len(bottom))
    cells = min(max((screen.width or _DEFAULT_WIDTH) - margin - 4, _MIN_CELLS), _MAX_CELLS)
    dots = [[0] * cells for _ in range(_ROWS)]
    owners = [[0] * cells for _ in range(_ROWS)]
    for number, curve in enumerate(curves):
        xs, ys = _joined(*curve, 2 * cells)
        columns = np.rint(_share(xs, low_x, high_x) * (2 * cells - 1)).astype(int)
        rows = np.rint((1 - _share(ys, low, high)) * (4 * _ROWS - 1)).astype(int)
        for column, row in set(zip(columns.tolist(), rows.tolist(), strict=True)):
            dots[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
            owners[row // 4][column // 2] = number
    lines = [title]
    for index, (row, owner) in enumerate(zip(dots, owners, strict=True)):
        label = top if index == 0 else bottom if index == _ROWS - 1 else ""
        drawn = "".join(
            screen.styled(chr(_BRAILLE | cell), _STYLES[number % len(_STYLES)]) if cell else " "
            for cell, number in zip(row, owner, strict=True)
        )
        lines.append(f"{pad(label, margin, right=True)} ┤{drawn}".rstrip())
    first, last = _position(low_x, x), _position(high_x, x)
    axis = first + " " * max(1, cells - len(first) - len(last)) + last
    lines.append(f"{' ' * (margin + 2)}{axis}")
    for number, ((label, _, _), (_, ys)) in enumerate(zip(series, curves, strict=True)):
        value = f"last {_value(ys[-1], is_logarithmic=is_logarithmic)}" if len(ys) else "no finite values"
        mark = screen.styled("━━", _STYLES[number % len(_STYLES)])
        name = shortened(one_line(label), _LABEL_WIDTH)
        lines.append(f"{' ' * (margin + 2)}{mark} {cut(f'{name}  {value}', cells - 3)}")
    return [*lines, ""]


def _joined(xs: Any, ys: Any, count: int) -> tuple[Any, Any]:
    """Returns points, with points on the lines between them if there are only a few."""
    import numpy as np

    if not 1 < len(xs) < count or (np.diff(xs) <= 0).any():
        return xs, ys
    every = np.union1d(xs, np.linspace(xs[0], xs[-1], count))
    # Halved: the differences of the largest numbers overflow.
    return every, np.interp(every, xs, ys / 2) * 2


def _share(values: Any, low: float, high: float) -> Any:
    """Returns the positions of values between two bounds, from 0 to 1."""
    # Halved first: the span of the largest numbers overflows.
    span = high / 2 - low / 2
    return (values / 2 - low / 2) / span if span else values * 0.0 + 0.5


def _value(value: float, *, is_logarithmic: bool) -> str:
    return short(float(10**value if is_logarithmic else value))


def _position(value: float, x: str) -> str:
    if x == "step":
        return f"step {value:.0f}"
    return f"{math.floor(value)} s"
