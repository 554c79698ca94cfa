"""Runs in a notebook: HTML tables with sparklines, and matplotlib figures.

Names and texts of runs are escaped. The HTML loads nothing and has no scripts.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from destinations.run_directory.layout import metrics_name, part_numbers, parts_path
from destinations.text.formatting import one_line
from uploads import needs_package

from .commands.screen import age_text, duration_text, value_text
from .order import MISSING
from .record import RunRecord, status_of, value_of

__all__ = [
    "axis_of",
    "draw",
    "label_of",
    "lines_of",
    "plot_run",
    "require_matplotlib",
    "run_html",
    "runs_html",
    "series_html",
    "sparkline_svg",
    "sparks_of",
]

_MAX_ROWS = 20
_MAX_METRICS = 40
_MAX_HPARAMS = 100
_MAX_CELL = 200
# Larger runs have no sparklines, because these need all rows.
_MAX_SPARK_BYTES = 64 << 20
_WIDTH, _HEIGHT = 160, 24
_SIZE_INCHES = (8.0, 4.5)


def runs_html(records: Sequence[RunRecord], total: int, roots: Iterable[str], now: float) -> str:
    """Returns the newest runs as a table.

    Args:
        records: the records of the runs to show.
        total: the number of all runs.
        roots: their folders.
        now: seconds since 1970.
    """
    metrics = list(dict.fromkeys(name for record in records for name in record.summary))[:4]
    head = ["run", "status", "started", "took", "tags", *metrics]
    rows = []
    for record in records[:_MAX_ROWS]:
        age, duration = (value_of(record, name, now) for name in ("age", "duration"))
        rows.append(
            [
                record.name,
                status_of(record, now),
                "" if age is MISSING else f"{age_text(age)} ago",
                "" if duration is MISSING else duration_text(duration),
                ", ".join(record.tags),
                *(value_text(record.summary[name]) if name in record.summary else "" for name in metrics),
            ]
        )
    left = total - len(rows)
    more = f"<p>and {left} more. </p>" if left > 0 else ""
    command = f"destinations view {' '.join(map(str, roots))}"
    return f"{_table(head, [[_text(cell) for cell in row] for row in rows])}{more}{_command(command)}"


def run_html(record: RunRecord, status: str, summary: Mapping[str, Any], sparks: Mapping[str, str]) -> str:
    """Returns a run as tables of hyperparameters and metrics.

    Args:
        record: the run's record.
        status: `RecordedRun.shown_status`.
        summary: statistics by metric, as `RecordedRun.summary`.
        sparks: SVG by metric.
    """
    title = f"<b>{_text(record.name)}</b> {_text(status)} <small>{_text(str(record.path))}</small>"
    hparams = [[_text(name), _text(value_text(value))] for name, value in record.hparams.items()]
    numbers = [
        [
            _text(name),
            *(_text(value_text(value)) for value in (one.last, one.min, one.max, one.count)),
            sparks.get(name, ""),
        ]
        for name, one in list(summary.items())[:_MAX_METRICS]
    ]
    return "".join(
        (
            f"<p>{title}</p>",
            _table(["hyperparameter", "value"], hparams[:_MAX_HPARAMS]) if hparams else "",
            _table(["metric", "last", "min", "max", "values", ""], numbers) if numbers else "",
            _command(f"destinations view {record.path}"),
        )
    )


def series_html(name: str, values: Any) -> str:
    """Returns a series as a sparkline.

    Args:
        name: the metric.
        values: float64 `(n,)`.
    """
    last = value_text(float(values[-1])) if len(values) else ""
    count = f"<small>{len(values)} values</small>"
    return f"<p><b>{_text(name)}</b> {sparkline_svg(values)} {_text(last)} {count}</p>"


def sparks_of(folders: Iterable[Path], blocks: Iterable[Any], names: Iterable[str]) -> dict[str, str]:
    """Returns a sparkline of each metric as SVG; none for a run above 64 MiB.

    Args:
        folders: the folders of the run and its writers.
        blocks: its rows, as `RecordedRun.blocks`.
        names: the metrics.
    """
    import numpy as np

    try:
        files = [path for folder in folders if (path := folder / metrics_name(0)).exists()]
        size = sum(path.stat().st_size for path in files)
        if not files or size > _MAX_SPARK_BYTES or any(part_numbers(parts_path(path)) for path in files):
            return {}
        parts: dict[str, list[Any]] = {name: [] for name in list(names)[:_MAX_METRICS]}
        for block in blocks:
            for name, (values, present) in block.columns.items():
                if name in parts:
                    parts[name].append(values[present])
    except OSError:
        return {}
    return {name: sparkline_svg(np.concatenate(found)) for name, found in parts.items() if found}


def sparkline_svg(values: Any) -> str:
    """Returns values as a line of SVG that keeps each spike; "" if none is finite.

    Args:
        values: float64 `(n,)`.
    """
    import numpy as np

    values = np.asarray(values, np.float64)
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    starts = np.arange(0, len(finite), math.ceil(len(finite) / _WIDTH))
    low, high = np.minimum.reduceat(finite, starts), np.maximum.reduceat(finite, starts)
    x = np.linspace(1, _WIDTH - 1, len(starts))
    # The difference of two values may overflow a float.
    scale = max(abs(float(low.min())), abs(float(high.max()))) or 1.0
    low, high = low / scale, high / scale
    least, span = float(low.min()), float(high.max()) - float(low.min())
    if span <= 0:
        least, span = least - 0.5, 1.0
    points = " ".join(
        f"{place:.1f},{_HEIGHT - 2 - (value - least) / span * (_HEIGHT - 4):.1f}"
        for place, pair in zip(x, zip(low, high, strict=True), strict=True)
        for value in dict.fromkeys(pair)
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="trend">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1"/></svg>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; cells are HTML."""
    left = ' style="text-align:left"'
    titles = "".join(f"<th{left}>{_text(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td{left}>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _command(command: str) -> str:
    return f"<p><small>In a browser: <code>{_text(command)}</code>, or <code>.view()</code></small></p>"


def _text(text: str) -> str:
    shown = one_line(text)
    return html.escape(shown if len(shown) <= _MAX_CELL else f"{shown[:_MAX_CELL]}…")


# Figures.


def require_matplotlib() -> None:
    """Checks that matplotlib is installed, before any file is read.

    Raises:
        ImportError: matplotlib is missing.
    """
    with needs_package("plot", "matplotlib"):
        import matplotlib.figure  # noqa: F401  # checked only


def draw(
    charts: Mapping[str, Sequence[tuple[str, Any, Any]]], *, x: str = "step", is_logarithmic: bool = False
) -> Any:
    """Returns a matplotlib figure with charts below each other, which a notebook displays.

    Args:
        charts: the series of each chart, by the label of its y axis: (label, x, y) with x and y of shape
            `(N,)`.
        x: "step", or "time" for seconds since the start of the run.
        is_logarithmic: use a logarithmic y axis.
    """
    import io

    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook displays even if pyplot was never imported."""

        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    width, height = _SIZE_INCHES
    # Without pyplot, which would select a GUI backend and keep the figure alive.
    figure = Shown(figsize=(width, height * len(charts)))
    rows = figure.subplots(len(charts), squeeze=False)[:, 0]
    for axes, (label, series) in zip(rows, charts.items(), strict=True):
        for name, points, values in series:
            # matplotlib omits labels that begin with "_" from the legend.
            shown = f" {name}" if name.startswith("_") else name
            axes.plot(points, values, label=_plain(shown), linewidth=1.2)
        axes.set_xlabel("step" if x == "step" else "seconds since start")
        axes.set_ylabel(_plain(label))
        if is_logarithmic:
            axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    return figure


def axis_of(record: RunRecord, series: Any, x: str) -> Any:
    """Returns the x axis of a `Series`: its steps, or for "time" seconds since the start of the run.

    Raises:
        ValueError: `x` is no such axis.
    """
    if x == "step":
        return series.step
    if x != "time":
        raise ValueError(f"x must be 'step' or 'time', got {x!r}.")
    return series.time - (record.created_at or (series.time[0] if len(series.time) else 0.0))


def lines_of(record: RunRecord, series: Any, x: str, label: str = "") -> list[tuple[str, Any, Any]]:
    """Returns the lines of a `Series` for `draw`: one, or one per writer with the writer's name.

    Args:
        record: the run's record.
        series: the values.
        x: as for `axis_of`.
        label: the label of the line; "" for the run's own.
    """
    label = label or label_of(record)
    return [
        (f"{label} · {writer}" if writer else label, axis_of(record, one, x), one.value)
        for writer, one in series.by_writer().items()
    ]


def plot_run(
    record: RunRecord,
    read: Callable[[str], Any],
    names: Sequence[str],
    *,
    x: str = "step",
    is_logarithmic: bool = False,
) -> Any:
    """Returns a figure of a run's metrics, see `RecordedRun.plot`; `read` returns the `Series` of a name."""
    require_matplotlib()
    label = label_of(record)
    lines: list[tuple[str, Any, Any]] = []
    for name in names:
        lines += lines_of(record, read(name), x, "" if len(names) == 1 else name)
    return draw({names[0] if len(names) == 1 else label: lines}, x=x, is_logarithmic=is_logarithmic)


def label_of(record: RunRecord) -> str:
    """Returns the name of a run, followed by its id if that differs."""
    return record.run_id if record.name == record.run_id else f"{record.name} ({record.run_id})"


def _plain(text: str) -> str:
    """Returns the text escaped for matplotlib, without formulas and control characters."""
    return one_line(text).replace("$", r"\$")
