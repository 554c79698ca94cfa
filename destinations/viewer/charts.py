"""Answers with curves: series of metrics, and bands over groups of runs or over ranks."""

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np

from destinations.runs import MetricNotFoundError, Run, RunsError
from destinations.runs.content.ranks import band_of, furthest
from destinations.runs.content.series import MISSING_STEP
from destinations.runs.content.sources import branches_of

from .columns import ColumnCache, MetricRows, read_branch
from .downsampling import Array, Curve, downsample, window

__all__ = ["AXES", "Axis", "ChartReader", "Rows", "rows_of", "series_answer"]

AXES = ("step", "epoch", "time", "relative")
_METRIC_AXIS = "metric:"
_MAX_BRANCHES = 100


@attrs.frozen
class Axis:
    """The x axis of a chart.

    Attributes:
        kind: one of `AXES`, or "metric".
        metric: the name of the metric, for "metric".
        start: of the part that is shown; None for the beginning.
        end: of the part that is shown; None for the end.
    """

    kind: str = "step"
    metric: str = ""
    start: float | None = None
    end: float | None = None

    @classmethod
    def parse(cls, text: str, start: float | None = None, end: float | None = None) -> "Axis":
        """Returns the axis of a parameter.

        Raises:
            ValueError: there is no such axis.
        """
        if text.startswith(_METRIC_AXIS):
            return cls("metric", text.removeprefix(_METRIC_AXIS), start, end)
        if text not in AXES:
            raise ValueError(f"x must be {', '.join(AXES)} or metric:NAME, got {text!r}.")
        return cls(text, "", start, end)

    @property
    def has_time(self) -> bool:
        """Whether the axis needs the times of rows."""
        return self.kind in {"time", "relative"}

    @property
    def columns(self) -> list[str]:
        """The columns that the axis needs."""
        return {"epoch": ["epoch"], "metric": [self.metric]}.get(self.kind, [])


@attrs.frozen(eq=False)
class Rows:
    """The values of a metric with their places on an axis.

    Attributes:
        x: `(n,)`.
        y: float64 `(n,)`.
        token: another one where earlier values are gone or may have changed.
        error: why they cannot be read; there are none then.
    """

    x: Array = attrs.field(factory=lambda: np.empty(0))
    y: Array = attrs.field(factory=lambda: np.empty(0))
    token: str = ""
    error: str | None = None


class ChartReader:
    """Reads curves of runs, several runs at a time.

    **Threading.** Any thread may call any method.

    Attributes:
        cache: the columns that were read.
    """

    def __init__(self) -> None:
        self.cache = ColumnCache()
        # Much of the reading is numpy's, which lets other threads run.
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "viewer-series")

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def series(
        self,
        runs: Sequence[tuple[str, Run | None]],
        metrics: Sequence[str],
        axis: Axis,
        *,
        points: int,
        rank: int = 0,
        cursors: Sequence[str] = (),
        branches: bool = False,
    ) -> list[dict[str, Any]]:
        """Returns the series of `/api/series`, the metrics of one run after another.

        Args:
            runs: id and run; None for one that is not there.
            metrics: their names.
            axis: the x axis.
            points: the largest number of points of a series.
            rank: of the rows.
            cursors: of the series that are no branches, in this order, of an earlier answer; may be fewer.
            branches: whether to return abandoned branches too, each after its series; only without cursors.
        """
        # Charts are asked for one by one: those that wait are read in the same pass over a run.
        for _, run in runs:
            if type(run) is Run:
                self.cache.announce(run.path, rank, [*metrics, *axis.columns])
        after = dict(zip(itertools.product([one for one, _ in runs], metrics), cursors, strict=False))

        def of_run(item: tuple[str, Run | None]) -> list[dict[str, Any]]:
            run_id, run = item
            answers = []
            for metric, rows in zip(metrics, rows_of(self.cache, run, metrics, axis, rank), strict=True):
                named = {"run": run_id, "metric": metric, "rank": rank}
                cursor = after.get((run_id, metric), "")
                answers.append({**named, "branch": None, **series_answer(rows, axis, points, cursor)})
                if branches and run is not None and not cursors:
                    answers += [
                        {**named, "branch": name, **series_answer(left, axis, points)}
                        for name, left in _branch_rows(run, metric, axis, rank)
                    ]
            return answers

        return [one for found in self._pool.map(of_run, runs) for one in found]

    def bands(
        self,
        groups: Sequence[tuple[str, Sequence[tuple[str, Run, int]]]],
        metric: str,
        axis: Axis,
        *,
        points: int,
    ) -> list[dict[str, Any]]:
        """Returns the bands of `/api/band`.

        Args:
            groups: label and members: id, run and rank.
            metric: its name.
            axis: the x axis.
            points: the largest number of points of a band.
        """

        def read(member: tuple[str, Run, int]) -> Rows:
            _, run, rank = member
            return rows_of(self.cache, run, [metric], axis, rank)[0]

        bands = []
        for label, members in groups:
            found = list(self._pool.map(read, members))
            rows = [one for one in found if one.error is None]
            kept = [member for member, one in zip(members, found, strict=True) if one.error is None]
            errors = [one.error for one in found if one.error is not None]
            if rows:
                # Of huge values.
                with np.errstate(over="ignore", invalid="ignore"):
                    band = _band(kept, rows, axis, points)
                bands.append({"label": label, **band, "errors": errors})
        return bands


def rows_of(cache: ColumnCache, run: Run | None, metrics: Sequence[str], axis: Axis, rank: int) -> list[Rows]:
    """Returns the values of metrics of a run, or for each why it cannot be read."""
    if run is None:
        return [Rows(error="this run is not there any more.")] * len(metrics)
    try:
        # A run of a dataset has no files of its own.
        names = [*metrics, *axis.columns]
        frame = cache.read(run.path, rank, names, with_time=axis.has_time) if type(run) is Run else None
    except (OSError, ValueError) as error:
        return [Rows(error=str(error))] * len(metrics)
    found = []
    for metric in metrics:
        try:
            found.append(
                _rows_of_run(run, metric, axis, rank)
                if frame is None
                else _rows_of_frame(frame, metric, axis, run.created_at)
            )
        except (RunsError, OSError, ValueError) as error:
            found.append(Rows(error=str(error)))
    return found


def _branch_rows(run: Run, metric: str, axis: Axis, rank: int) -> Iterator[tuple[str, Rows]]:
    """Yields the abandoned branches that have the metric."""
    for branch in branches_of(run.path)[:_MAX_BRANCHES]:
        if branch.rank == rank:
            try:
                frame = read_branch(branch, [metric, *axis.columns])
                if frame.column(metric) is not None:
                    yield branch.name, _rows_of_frame(frame, metric, axis, run.created_at)
            except (RunsError, OSError, ValueError) as error:
                yield branch.name, Rows(error=str(error))


def _rows_of_frame(frame: MetricRows, metric: str, axis: Axis, began_at: float | None) -> Rows:
    column = frame.column(metric)
    if column is None:
        raise MetricNotFoundError(metric, frame.known)
    block = frame.block
    y, present = block.columns[column]
    x: Array
    match axis.kind:
        case "step":
            x, is_known = _steps(block.step, present)
        case "time" | "relative":
            x, is_known = block.time, ~np.isnan(block.time)
            if axis.kind == "relative" and is_known.any():
                x = x - (x[np.argmax(is_known)] if began_at is None else began_at)
        case _:
            wanted = "epoch" if axis.kind == "epoch" else axis.metric
            name = frame.column(wanted)
            if name is None:
                raise MetricNotFoundError(wanted, frame.known)
            x, is_known = _filled(*block.columns[name])
    keep = present & is_known
    if keep.all():
        return Rows(x, y, frame.token)
    return Rows(x[keep], y[keep], frame.token)


def _steps(step: Array, present: Array) -> tuple[Array, Array]:
    """Returns steps; the number of the value where no value of the metric has a step."""
    is_known = step != MISSING_STEP
    if not (is_known & present).any():
        return np.cumsum(present) - 1, np.ones(len(step), np.bool_)
    return step, is_known


def _filled(values: Array, present: Array) -> tuple[Array, Array]:
    """Returns the last finite value at or before each row, and where there is one."""
    is_known = present & np.isfinite(values)
    places = np.maximum.accumulate(np.where(is_known, np.arange(len(values)), -1)) if len(values) else values
    return values[places.astype(np.intp)], places >= 0


def _rows_of_run(run: Run, metric: str, axis: Axis, rank: int) -> Rows:
    """Returns the values of a metric of a run that has no folder of its own, such as one of a dataset."""
    found = run.series(metric, rank)
    match axis.kind:
        case "step":
            x, is_known = _steps(found.step, np.ones(len(found), np.bool_))
        case "time" | "relative":
            x, is_known = found.time, ~np.isnan(found.time)
            if axis.kind == "relative" and is_known.any():
                x = x - (run.created_at or x[np.argmax(is_known)])
        case _:
            raise ValueError(
                f"x={axis.kind} needs the folder of the run, and a dataset has none. Use x=step."
            )
    return Rows(x[is_known], found.value[is_known], f"{run.run_id}")


def series_answer(rows: Rows, axis: Axis, points: int, cursor: str = "") -> dict[str, Any]:
    """Returns the points of a series of `/api/series`, or why it cannot be read."""
    start = _place_after(cursor, rows, points)
    x, y = rows.x[start or 0 :], rows.y[start or 0 :]
    places, count = window(x, axis.start, axis.end)
    if len(places) < len(x):
        x, y = x[places], y[places]
    return {
        **_points(downsample(x, y, points)),
        "rows": count,
        "cursor": f"{rows.token}:{len(rows.y)}" if rows.error is None else "",
        "append": start is not None,
        "error": rows.error,
    }


def _place_after(cursor: str, rows: Rows, points: int) -> int | None:
    """Returns how many values the reader has; None if it has to read all of them."""
    token, _, count = cursor.rpartition(":")
    if token != rows.token or not count.isdecimal():
        return None
    return int(count) if 0 <= len(rows.y) - int(count) <= points else None


def _points(curve: Curve) -> dict[str, Any]:
    fields = attrs.asdict(curve, recurse=False)
    return {name: fields[name] for name in ("x", "y", "low", "high", "merged", "nan", "inf")}


# Bands.


def _band(
    members: Sequence[tuple[str, Run, int]], rows: Sequence[Rows], axis: Axis, points: int
) -> dict[str, Any]:
    curves = [_between(one, axis) for one in rows]
    grid = _grid([x for x, _ in curves], points)
    # A curve of many values is read at the mean of the values that a point of the grid stands for.
    table = np.array([_resampled(x, y, grid) for x, y in curves]).reshape(len(curves), len(grid))
    is_there = ~np.isnan(table).all(axis=0)
    table, grid = table[:, is_there], grid[is_there]
    band = band_of(table)
    return {
        "members": [{"run": run_id, "rank": rank, "name": run.name} for run_id, run, rank in members],
        "x": grid,
        "low": band.low,
        "median": band.median,
        "high": band.high,
        "count": band.count,
        "straggler": _straggler(members, table, band.median),
    }


def _between(rows: Rows, axis: Axis) -> tuple[Array, Array]:
    keep = np.isfinite(rows.y)
    if axis.start is not None:
        keep &= rows.x >= axis.start
    if axis.end is not None:
        keep &= rows.x <= axis.end
    x, y = rows.x[keep].astype(np.float64), rows.y[keep]
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _grid(axes: Sequence[Array], points: int) -> Array:
    """Returns the places of a band: those of the values if there are few, else evenly spaced ones."""
    places = np.unique(np.concatenate([*axes, np.empty(0)]))
    return places if len(places) <= points else np.linspace(places[0], places[-1], points)


def _resampled(x: Array, y: Array, grid: Array) -> Array:
    """Returns a curve on a grid: the mean of the values nearest to a place, interpolated between places."""
    if not len(x):
        return np.full(len(grid), np.nan)
    if len(grid) > 1 and len(x) > len(grid):
        cells = np.searchsorted((grid[1:] + grid[:-1]) / 2, x)
        counts = np.bincount(cells, minlength=len(grid))
        sums = np.bincount(cells, y, minlength=len(grid))
        filled = counts > 0
        x, y = grid[filled], sums[filled] / counts[filled]
    found: Array = np.interp(grid, x, y, left=np.nan, right=np.nan)
    return found


def _straggler(members: Sequence[tuple[str, Run, int]], table: Array, median: Array) -> dict[str, Any] | None:
    """Returns the member that is furthest from the median."""
    found = furthest(table, median)
    if found is None:
        return None
    place, distance = found
    run_id, _, rank = members[place]
    return {"run": run_id, "rank": rank, "distance": distance}
