"""The least and the greatest value of a metric, from the summary of a run or, where that has none, from its rows."""

import json
import math
from typing import Any

from destinations.run_directory.layout import SUMMARY
from destinations.runs import MetricNotFoundError, Run

__all__ = ["best_of", "statistics_of"]


def statistics_of(run: Run) -> dict[str, dict[str, Any]]:
    """Returns what `summary.json` says of each metric; nothing where there is none, or none that can be read."""
    try:
        metrics = json.loads((run.record.path / SUMMARY).read_bytes())["metrics"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {name: record for name, record in metrics.items() if isinstance(record, dict)} if isinstance(metrics, dict) else {}


def best_of(run: Run, metric: str, *, is_max: bool) -> tuple[float, int | None] | None:
    """Returns the best finite value of a metric and its step; None where the run has none."""
    name = "max" if is_max else "min"
    known = statistics_of(run).get(metric, {})
    value, step = known.get(name), known.get(f"{name}_step")
    if isinstance(value, int | float) and math.isfinite(value) and isinstance(step, int):
        return float(value), step
    if metric not in run.record.summary and not known:
        return None
    return _best_of_rows(run, metric, is_max=is_max)


def _best_of_rows(run: Run, metric: str, *, is_max: bool) -> tuple[float, int | None] | None:
    import numpy as np

    try:
        series = run.series(metric)
    except MetricNotFoundError:
        return None
    finite = np.flatnonzero(np.isfinite(series.value))
    if not finite.size:
        return None
    values = series.value[finite]
    index = finite[int(values.argmax() if is_max else values.argmin())]
    return float(series.value[index]), int(series.step[index])
