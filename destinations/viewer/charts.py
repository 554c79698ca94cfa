"""Answers with curves: series of metrics, and bands over groups of runs or over ranks."""

import contextvars
import functools
import itertools
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import attrs
import numpy as np

from destinations.run_directory.blocks import MISSING_STEP, Block
from destinations.run_directory.layout import writer_path
from destinations.run_directory.parquet import OF_COLUMN
from destinations.runs import BudgetError, MetricNotFoundError, RecordedRun, RunsError
from destinations.runs.budget import spend
from destinations.runs.content.ranks import band_of, furthest
from destinations.runs.content.series import Series
from destinations.runs.content.sources import branches_of
from destinations.runs.streams import TRAINER, Stream, streams_of

from .columns import MAX_HELD_BYTES, ClosedPart, ColumnCache, MetricRows, joined, read_branch
from .downsampling import Array, Curve, Spans, downsample, window

__all__ = ["AXES", "Axis", "ChartReader", "Rows", "rows_of", "rows_of_writers", "series_answer"]

AXES = ("step", "epoch", "time", "relative")
_METRIC_AXIS = "metric:"
_MAX_BRANCHES = 100
# The most runs of one answer in the pool; the rest waits outside, so that a large answer doesn't delay a
# small one.
_SUBMITTED = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


@attrs.frozen
class Axis:
    """The x axis of a chart.

    Attributes:
        kind: one of `AXES`, or "metric".
        metric: the name of the metric, for "metric".
        start: where the shown part starts; None for the beginning.
        end: where the shown part ends; None for the end.
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
    """The values of a metric with their positions on an axis.

    Attributes:
        x: `(n,)`.
        y: float64 `(n,)`.
        token: changes if earlier values are gone or may have changed.
        error: why the values cannot be read; then there are none.
        is_missing: whether the metric does not exist.
        late: the number of values of a named writer that came after a greater x; all are sorted by x.
        spans: the span of each value in a long run, where a value may be the mean of a thousand; else None.
        entries: the index entries of closed parts that the leading values come from.
        within: returns the single values of some entries; call it for few of them.
    """

    x: Array = attrs.field(factory=lambda: np.empty(0))
    y: Array = attrs.field(factory=lambda: np.empty(0))
    token: str = ""
    error: str | None = None
    is_missing: bool = False
    late: int = 0
    spans: Spans | None = None
    entries: "Sequence[Entry]" = ()
    within: "Callable[[Sequence[Entry]], Rows]" = attrs.field(default=lambda _: Rows(), repr=False)

    @property
    def count(self) -> int:
        """The number of values."""
        return len(self.y) if self.spans is None else int(self.spans.count.sum())


class Entry(NamedTuple):
    """An index entry of a closed part: the number of the part, its place in the index, and its bytes."""

    part: int
    place: int
    nbytes: int


class ChartReader:
    """Reads curves of runs, several runs at a time.

    **Threading.** Any thread may call any method.

    Args:
        threads: the number of reading threads. Much of the reading is in numpy, which lets other threads run.

    Attributes:
        cache: the cached columns.
    """

    def __init__(self, threads: int = min(4, os.cpu_count() or 1)) -> None:
        self.cache = ColumnCache()
        self._pool = ThreadPoolExecutor(threads, "viewer-series")

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def series(
        self,
        runs: Sequence[tuple[str, RecordedRun | None]],
        metrics: Sequence[str],
        axis: Axis,
        *,
        points: int,
        rank: int = 0,
        cursors: Sequence[str] = (),
        branches: bool = False,
    ) -> list[dict[str, Any]]:
        """Returns the series of `/api/series`: run by run and metric by metric, one series per writer.

        Args:
            runs: ids and runs; None for a missing run.
            metrics: names of the metrics.
            axis: the x axis.
            points: the maximum number of points of a series.
            rank: the rank that wrote the rows.
            cursors: the cursors of earlier answers; a series with one of them gets its new values only.
            branches: whether to return abandoned branches too, each after its series; only without cursors.

        Raises:
            BudgetError: none of the runs could be read in time. If some could, the others have an error.
        """
        # The page requests charts one by one; announced metrics are read in the same pass over a run.
        streams = {run_id: _streams_of(run) for run_id, run in runs}
        for stream in itertools.chain.from_iterable(streams.values()):
            self.cache.announce(stream.run_dir, rank, [*metrics, *axis.columns], stream.writer)
        after = {one.rpartition(":")[0]: one for one in cursors}

        def of_run(item: tuple[str, RecordedRun | None]) -> list[dict[str, Any]]:
            run_id, run = item
            answers: list[dict[str, Any]] = []
            try:
                every = rows_of_writers(self.cache, run, metrics, axis, rank, streams[run_id])
                for metric, of_metric in zip(metrics, every, strict=True):
                    for writer, found in of_metric:
                        spend()
                        named = {"run": run_id, "metric": metric, "rank": rank, "writer": writer}
                        # A cursor belongs to one series, so that cursors can be given in any order.
                        series = zlib.crc32(repr(list(named.values())).encode("utf-8", "backslashreplace"))
                        rows = attrs.evolve(found, token=f"{series:x}-{found.token}")
                        answer = series_answer(rows, axis, points, after.get(rows.token, ""))
                        answers.append({**named, "branch": None, **answer})
                        if branches and run is not None and not cursors:
                            answers += [
                                {**named, "branch": name, **series_answer(left, axis, points)}
                                for name, left in _branch_rows(run, writer, metric, axis, rank)
                            ]
            except BudgetError as error:
                unread.append(error)
                nothing = series_answer(Rows(error=str(error)), axis, points)
                about = {"run": run_id, "rank": rank, "writer": TRAINER, "branch": None}
                return [{**about, "metric": metric, **nothing, "unread": True} for metric in metrics]
            return answers

        unread: list[BudgetError] = []
        answers = [one for found in self._map(of_run, runs) for one in found]
        if len(unread) == len(runs):
            raise unread[0]
        return answers

    def _map(self, read: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Reads items in the pool, within the caller's budget; queues only a few, so others get a turn."""
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(self._pool.submit(contextvars.copy_context().run, read, item))
            if len(waiting) >= _SUBMITTED:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def bands(
        self,
        groups: Sequence[tuple[str, Sequence[tuple[str, RecordedRun, int]]]],
        metric: str,
        axis: Axis,
        *,
        points: int,
    ) -> list[dict[str, Any]]:
        """Returns the bands of `/api/band`, each with the number of its group, the same for all metrics.

        Args:
            groups: labels and members; a member is id, run and rank.
            metric: the name of the metric.
            axis: the x axis.
            points: the maximum number of points of a band.
        """

        def read(member: tuple[str, RecordedRun, int]) -> Rows:
            _, run, rank = member
            (rows,) = rows_of(self.cache, run, [metric], axis, rank)
            return rows if rows.spans is None else _closer(rows, axis)

        bands = []
        for number, (label, members) in enumerate(groups):
            found = list(self._map(read, members))
            rows = [one for one in found if one.error is None]
            kept = [member for member, one in zip(members, found, strict=True) if one.error is None]
            errors = [one.error for one in found if one.error is not None]
            if rows:
                # Huge values overflow.
                with np.errstate(over="ignore", invalid="ignore"):
                    band = _band(kept, rows, axis, points)
                bands.append({"label": label, "number": number, **band, "errors": errors})
        return bands


def rows_of(
    cache: ColumnCache, run: RecordedRun | None, metrics: Sequence[str], axis: Axis, rank: int
) -> list[Rows]:
    """Returns the values of each metric of a run, or the reason why it cannot be read.

    If several writers have a metric, the trainer's values are returned, or else the first writer's.
    """
    return [rows for (_, rows), *_ in rows_of_writers(cache, run, metrics, axis, rank)]


def rows_of_writers(
    cache: ColumnCache,
    run: RecordedRun | None,
    metrics: Sequence[str],
    axis: Axis,
    rank: int,
    streams: Sequence[Stream] | None = None,
) -> list[list[tuple[str, Rows]]]:
    """Returns (writer, values) pairs for each metric, one pair for each writer that has it.

    If no writer has a metric, a single entry has the error. A named writer that cannot be read is left out;
    the record of the run reports it.

    Args:
        cache: the cache of columns.
        run: the run; None if it is gone.
        metrics: names of the metrics.
        axis: the x axis.
        rank: the rank that wrote the rows.
        streams: the streams of the run, if known.
    """
    if run is None:
        return [[(TRAINER, Rows(error="this run is not there any more."))]] * len(metrics)
    if type(run) is not RecordedRun:
        return [_rows_of_run(run, metric, axis, rank) for metric in metrics]
    streams = _streams_of(run) if streams is None else streams
    every = [(one.writer, _rows_of_stream(cache, run, one, metrics, axis, rank)) for one in streams]
    found = []
    for place in range(len(metrics)):
        of_metric = [(writer, rows[place]) for writer, rows in every]
        there = [
            (writer, rows)
            for writer, rows in of_metric
            if rows.error is None or (writer == TRAINER and not rows.is_missing)
        ]
        found.append(there or of_metric[:1])
    return found


def _streams_of(run: RecordedRun | None) -> list[Stream]:
    """Returns the streams of a run; none for a run in a dataset, which has no files of its own."""
    return streams_of(run.path) if type(run) is RecordedRun else []


def _rows_of_stream(
    cache: ColumnCache, run: RecordedRun, stream: Stream, metrics: Sequence[str], axis: Axis, rank: int
) -> list[Rows]:
    """Returns the values of each metric of one writer, or the reason why it cannot be read."""
    names = [*metrics, *axis.columns]
    try:
        frame = cache.read(run.path, rank, names, with_time=axis.has_time, writer=stream.writer)
    except (OSError, ValueError) as error:
        return [Rows(error=str(error))] * len(metrics)
    found = []
    for metric in metrics:
        try:
            rows = _rows_of_frame(frame, metric, axis, run.created_at)
            found.append(_in_order(rows, axis) if stream.writer else rows)
        except (RunsError, OSError, ValueError) as error:
            found.append(Rows(error=str(error), is_missing=frame.column(metric) is None))
    return found


def _in_order(rows: Rows, axis: Axis) -> Rows:
    """Returns the values of a named writer sorted by x; it may log steps in any order."""
    if rows.spans is not None or axis.kind not in {"step", "epoch"} or not len(rows.x):
        return rows
    late = int(np.count_nonzero(rows.x < np.maximum.accumulate(rows.x)))
    if not late:
        return rows
    order = np.argsort(rows.x, kind="stable")
    # Values in order are appended at the end. A late value moves others, so it changes the token.
    return attrs.evolve(rows, x=rows.x[order], y=rows.y[order], token=f"{rows.token}+{late}", late=late)


def _branch_rows(
    run: RecordedRun, writer: str, metric: str, axis: Axis, rank: int
) -> Iterator[tuple[str, Rows]]:
    """Yields the abandoned branches of a writer that have the metric."""
    for branch in branches_of(writer_path(run.path, writer))[:_MAX_BRANCHES]:
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
    if not frame.closed:
        return _rows_of_block(frame, column, axis, began_at)
    if axis.kind == "relative" and began_at is None:
        began_at = float(frame.closed[0].index.of_rows("first_time")[0])
    live = _rows_of_block(frame, column, axis, began_at)
    return _with_closed(frame, column, axis, began_at, live)


def _with_closed(frame: MetricRows, column: str, axis: Axis, began_at: float | None, live: Rows) -> Rows:
    """Returns one value for each index entry of the closed parts, followed by the live rows."""
    fields, firsts, lasts, entries = [], [], [], []
    x_column = frame.column(axis.columns[0]) if axis.columns else None
    for number, one in enumerate(frame.closed):
        if column not in one.index.columns:
            continue
        of_column = np.asarray(one.index.of_column(column))
        first, last = _extent_of(one, axis, began_at, x_column)
        if axis.kind == "step":
            first, last = _own_steps(of_column, first, last)
        rows = np.asarray(one.index.of_rows("rows"))
        sizes = one.nbytes * rows / rows.sum()
        there = np.flatnonzero((of_column[0] > 0) & ~np.isnan(first))
        fields.append(of_column[:, there])
        firsts.append(first[there])
        lasts.append(last[there])
        entries += [Entry(number, int(place), int(sizes[place])) for place in there]
    if not entries:
        return live
    count, finite, low, _, high, _, mean, _ = np.concatenate(fields, axis=1)
    ones, is_finite = np.ones(len(live.y), np.int64), np.isfinite(live.y)
    own = np.where(is_finite, live.y, np.nan)
    spans = Spans(
        np.concatenate([count.astype(np.int64), ones]),
        np.concatenate([finite.astype(np.int64), is_finite.astype(np.int64)]),
        np.concatenate([low, own]),
        np.concatenate([high, own]),
        np.concatenate([*lasts, live.x]),
    )

    def within(chosen: Sequence[Entry]) -> Rows:
        blocks = []
        columns = [name for name in (column, x_column) if name is not None]
        for number, of_part in itertools.groupby(chosen, lambda entry: entry.part):
            places = [entry.place for entry in of_part]
            part, entry_slice = frame.closed[number], slice(places[0], places[-1] + 1)
            blocks += part.read(entry_slice, columns, with_time=axis.has_time)
        found = functools.reduce(joined, blocks)
        return _rows_of_block(attrs.evolve(frame, block=found, closed=()), column, axis, began_at)

    return Rows(
        np.concatenate([*firsts, live.x]),
        np.concatenate([mean, live.y]),
        live.token,
        spans=spans,
        entries=entries,
        within=within,
    )


def _own_steps(of_column: Array, first: Array, last: Array) -> tuple[Array, Array]:
    """Returns the first and last step of a metric in each entry; `first` and `last` belong to its rows.

    The steps differ if the metric has one value in the entry, or has its own steps, such as the epoch.
    """
    steps = of_column[[OF_COLUMN.index("min_step"), OF_COLUMN.index("max_step")]]
    low, high = np.fmin(*steps), np.fmax(*steps)
    are_own = (of_column[OF_COLUMN.index("count")] == 1) | (low < first) | (high > last)
    are_own &= ~np.isnan(low)
    return np.where(are_own, low, first), np.where(are_own, high, last)


def _extent_of(
    one: ClosedPart, axis: Axis, began_at: float | None, x_column: str | None
) -> tuple[Array, Array]:
    """Returns the first and last x of each entry of a closed part; NaN if an entry has none."""
    match axis.kind:
        case "step":
            return np.asarray(one.index.of_rows("first_step")), np.asarray(one.index.of_rows("last_step"))
        case "time" | "relative":
            start = (began_at or 0.0) if axis.kind == "relative" else 0.0
            first, last = one.index.of_rows("first_time"), one.index.of_rows("last_time")
            return np.asarray(first) - start, np.asarray(last) - start
    if x_column not in one.index.columns:
        return np.full(len(one.index), np.nan), np.full(len(one.index), np.nan)
    of_column = np.asarray(one.index.of_column(x_column))
    return of_column[OF_COLUMN.index("min")], of_column[OF_COLUMN.index("max")]


def _rows_of_block(frame: MetricRows, column: str, axis: Axis, began_at: float | None) -> Rows:
    """Returns the rows that are in memory."""
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
    """Returns the steps and which are known; counts the values if no value of the metric has a step."""
    is_known = step != MISSING_STEP
    if not (is_known & present).any():
        return np.cumsum(present) - 1, np.ones(len(step), np.bool_)
    return step, is_known


def _filled(values: Array, present: Array) -> tuple[Array, Array]:
    """Returns the last finite value at or before each row, and which rows have one."""
    is_known = present & np.isfinite(values)
    places = np.maximum.accumulate(np.where(is_known, np.arange(len(values)), -1)) if len(values) else values
    return values[places.astype(np.intp)], places >= 0


def _rows_of_run(run: RecordedRun, metric: str, axis: Axis, rank: int) -> list[tuple[str, Rows]]:
    """Returns the values of a metric of a run without a folder, such as a run in a dataset."""
    try:
        every = run.series(metric, rank).by_writer()
        return [(writer, _rows_of_series(run, one, axis)) for writer, one in every.items()]
    except (RunsError, OSError, ValueError) as error:
        return [(TRAINER, Rows(error=str(error)))]


def _rows_of_series(run: RecordedRun, found: Series, axis: Axis) -> Rows:
    if axis.columns:
        raise ValueError(f"x={axis.kind} needs the folder of the run, and a dataset has none. Use x=step.")
    values = {"": (found.value, np.ones(len(found), np.bool_))}
    frame = MetricRows(Block(found.step, found.time, values), [], run.run_id)
    return _rows_of_block(frame, "", axis, run.created_at or None)


def series_answer(rows: Rows, axis: Axis, points: int, cursor: str = "") -> dict[str, Any]:
    """Returns the points of a series of `/api/series`, or the reason why it cannot be read."""
    start = _place_after(cursor, rows, points)
    if start is not None:
        shown = Rows(rows.x[start:], rows.y[start:])
        places, count = window(shown.x, axis.start, axis.end)
    else:
        shown = rows if rows.spans is None else _closer(rows, axis)
        until = None if shown.spans is None else shown.spans.until
        places, count = window(shown.x, axis.start, axis.end, until)
    x, y, spans = shown.x, shown.y, shown.spans
    if len(places) < len(x):
        x, y, spans = x[places], y[places], None if spans is None else spans.at(places)
    return {
        **_points(downsample(x, y, points, spans)),
        "rows": count if spans is None else int(spans.count.sum()),
        "cursor": f"{rows.token}:{rows.count}" if rows.error is None else "",
        "append": start is not None,
        "error": rows.error,
    }


def _closer(rows: Rows, axis: Axis) -> Rows:
    """Returns the single values if few enough are shown, else the rows unchanged."""
    assert rows.spans is not None  # noqa: S101  # the caller has looked
    places, _ = window(rows.x, axis.start, axis.end, rows.spans.until)
    closed = places[places < len(rows.entries)]
    chosen = [rows.entries[place] for place in closed]
    if sum(entry.nbytes for entry in chosen) > MAX_HELD_BYTES:
        return rows
    live = places[len(closed) :]
    if not chosen:
        return Rows(rows.x[live], rows.y[live], rows.token)
    found = rows.within(chosen)
    x, y = np.concatenate([found.x, rows.x[live]]), np.concatenate([found.y, rows.y[live]])
    return Rows(x, y, rows.token)


def _place_after(cursor: str, rows: Rows, points: int) -> int | None:
    """Returns the index of the first value that the client lacks; None if it needs all of them."""
    token, _, count = cursor.rpartition(":")
    if token != rows.token or not count.isdecimal():
        return None
    new = rows.count - int(count)
    # Only the values of the live file, at the end, are single values.
    return len(rows.y) - new if 0 <= new <= min(points, len(rows.y) - len(rows.entries)) else None


def _points(curve: Curve) -> dict[str, Any]:
    fields = attrs.asdict(curve, recurse=False)
    return {name: fields[name] for name in ("x", "y", "low", "high", "merged", "nan", "inf")}


# Bands.


def _band(
    members: Sequence[tuple[str, RecordedRun, int]], rows: Sequence[Rows], axis: Axis, points: int
) -> dict[str, Any]:
    curves = [_between(one, axis) for one in rows]
    grid = _grid([x for x, _ in curves], points)
    spend(3 * 8 * len(curves) * len(grid))
    # The mean, min and max of the values that each point of the grid stands for.
    tables = np.array([_resampled(x, found, grid) for x, found in curves]).reshape(len(curves), 3, len(grid))
    is_there = ~np.isnan(tables[:, 0]).all(axis=0)
    grid, (table, low, high) = grid[is_there], tables[:, :, is_there].swapaxes(0, 1)
    band = band_of(table)
    count = np.count_nonzero(~np.isnan(table), axis=0)
    mean = np.nansum(table, axis=0) / count
    std = np.sqrt(np.nansum((table - mean) ** 2, axis=0) / np.maximum(count - 1, 1))
    return {
        "members": [{"run": run_id, "rank": rank, "name": run.name} for run_id, run, rank in members],
        "x": grid,
        "low": np.fmin.reduce(low, axis=0),
        "median": band.median,
        "mean": mean,
        "std": std,
        "high": np.fmax.reduce(high, axis=0),
        "count": band.count,
        "straggler": _straggler(members, table, band.median),
    }


def _between(rows: Rows, axis: Axis) -> tuple[Array, Array]:
    """Returns the shown part of the axis, ascending: x, and mean, min, max and count `(4, n)`."""
    keep = np.isfinite(rows.y)
    spans, one = rows.spans, np.ones(len(rows.y))
    low, high, count = (rows.y, rows.y, one) if spans is None else (spans.low, spans.high, spans.finite)
    if axis.start is not None:
        keep &= (rows.x if spans is None else spans.until) >= axis.start
    if axis.end is not None:
        keep &= rows.x <= axis.end
    x, values = rows.x[keep].astype(np.float64), np.stack([rows.y, low, high, count])[:, keep]
    order = np.argsort(x, kind="stable")
    return x[order], values[:, order]


def _grid(axes: Sequence[Array], points: int) -> Array:
    """Returns the x values of a band: all x of the runs if they are few, else evenly spaced ones."""
    places = np.unique(np.concatenate([*axes, np.empty(0)]))
    return places if len(places) <= points else np.linspace(places[0], places[-1], points)


def _resampled(x: Array, found: Array, grid: Array) -> Array:
    """Returns mean, min and max `(3, n)` of the values nearest to each grid point, interpolated between."""
    if not len(x):
        return np.full((3, len(grid)), np.nan)
    # x is ascending, so the values of a grid point are adjacent.
    cells = np.searchsorted((grid[1:] + grid[:-1]) / 2, x)
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    mean, low, high, count = found
    mean = np.add.reduceat(mean * count, starts) / np.add.reduceat(count, starts)
    found = np.stack([mean, np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)])
    x = grid[cells[starts]]
    return np.stack([np.interp(grid, x, one, left=np.nan, right=np.nan) for one in found])


def _straggler(
    members: Sequence[tuple[str, RecordedRun, int]], table: Array, median: Array
) -> dict[str, Any] | None:
    """Returns the member that is furthest from the median."""
    found = furthest(table, median)
    if found is None:
        return None
    place, distance = found
    run_id, _, rank = members[place]
    return {"run": run_id, "rank": rank, "distance": distance}
