"""`RankMetric`: a metric on all ranks of a run; `band_of`: the band of any curves.

Ranks write files of their own, which are merged here. Importing this module imports numpy.
"""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import numpy as np

from destinations.run_directory.blocks import MISSING_STEP
from destinations.runs.errors import MetricNotFoundError

from .series import Series

__all__ = ["Band", "RankMetric", "band_of", "furthest", "read_ranks"]

_Array = np.ndarray[Any, np.dtype[Any]]
_LEAST_MEMBERS = 3


@attrs.frozen(eq=False)
class Band:
    """The minimum, median and maximum of several curves at each place.

    Attributes:
        low: the least value, float64 `(places,)`.
        median: the median.
        high: the greatest value.
        count: how many curves have a value there, int `(places,)`, at least 1.
        lowest: the index of the curve with the least value.
        highest: the index of the curve with the greatest value.
    """

    low: _Array
    median: _Array
    high: _Array
    count: _Array
    lowest: _Array
    highest: _Array


def band_of(table: _Array) -> Band:
    """Returns the band of a table.

    Args:
        table: a row for each curve, float64 `(curves, places)`; NaN where a curve has no value. At each place
            there is at least one value.
    """
    is_missing = np.isnan(table)
    if not table.size:
        nothing = np.empty(0)
        places = np.empty(0, np.int64)
        return Band(nothing, nothing, nothing, places, places, places)
    return Band(
        low=np.fmin.reduce(table, axis=0),
        median=np.nanmedian(table, axis=0),
        high=np.fmax.reduce(table, axis=0),
        count=np.count_nonzero(~is_missing, axis=0),
        lowest=np.where(is_missing, np.inf, table).argmin(axis=0),
        highest=np.where(is_missing, -np.inf, table).argmax(axis=0),
    )


def furthest(table: _Array, median: _Array) -> tuple[int, float] | None:
    """Returns the curve with the greatest mean distance from the median, and that distance.

    With fewer than three curves, no curve stands out.
    """
    if len(table) < _LEAST_MEMBERS or not len(median):
        return None
    distances = [
        float(np.mean(found)) if len(found := np.abs(row - median)[~np.isnan(row)]) else 0.0 for row in table
    ]
    place = int(np.argmax(distances))
    return (place, distances[place]) if distances[place] > 0 else None


@attrs.frozen(eq=False)
class RankMetric:
    """A metric on all ranks that have it, step by step.

    ```python
    loss = run.ranks("loss")
    loss.band.high, loss.highest_rank, loss.first_nan
    ```

    Attributes:
        name: the name of the metric.
        ranks: the ranks that have it, ascending.
        step: the steps at which a rank has a finite value, int64 `(steps,)`, ascending.
        table: the last value of each rank at each step, float64 `(ranks, steps)`; NaN where it has none.
        band: min, median and max over ranks at each step.
        first_nan: the rank whose value was NaN at the earliest step, and that step. If several ranks have NaN
            at this step, the one that logged it first. None if no value was NaN.
        seconds_per_step: by rank, the median time from one step to the next; None for a rank with fewer than
            two steps. If ranks wait for each other in every step, all have the same value. Compare a metric
            that measures time before the collective then.
    """

    name: str
    ranks: list[int]
    step: _Array
    table: _Array
    band: Band
    first_nan: tuple[int, int] | None
    seconds_per_step: dict[int, float | None]

    @property
    def lowest_rank(self) -> _Array:
        """The rank with the least value at each step, int64 `(steps,)`."""
        return np.array(self.ranks, np.int64)[self.band.lowest]

    @property
    def highest_rank(self) -> _Array:
        """The rank with the greatest value at each step, int64 `(steps,)`."""
        return np.array(self.ranks, np.int64)[self.band.highest]

    @property
    def outlier(self) -> int | None:
        """The rank with the greatest mean distance from the median; None for fewer than three ranks."""
        found = furthest(self.table, self.band.median)
        return None if found is None else self.ranks[found[0]]

    @property
    def slowest_rank(self) -> int | None:
        """The rank with the most seconds per step; None if unknown."""
        known = {rank: seconds for rank, seconds in self.seconds_per_step.items() if seconds is not None}
        return max(known, key=known.__getitem__) if known else None


def read_ranks(name: str, ranks: Iterable[int], read: Callable[[str, int], Series]) -> RankMetric:
    """Reads a metric of all ranks; takes 8 bytes of memory for each rank and step.

    Args:
        name: the name of the metric.
        ranks: the ranks that have metrics.
        read: returns the series of a rank.

    Raises:
        MetricNotFoundError: no rank has it; the message suggests the closest.
    """
    found: dict[int, Series] = {}
    error: MetricNotFoundError | None = None
    for rank in list(ranks) or [0]:
        try:
            found[rank] = read(name, rank)
        except MetricNotFoundError as missing:
            error = error or missing
    if not found:
        assert error is not None  # noqa: S101  # there is at least one rank
        raise error
    curves = [_last_of_steps(series) for series in found.values()]
    step = np.unique(np.concatenate([steps for steps, _, _ in curves]))
    table = np.full((len(found), len(step)), np.nan)
    for row, (steps, values, _) in zip(table, curves, strict=True):
        row[np.searchsorted(step, steps)] = values
    return RankMetric(
        name=name,
        ranks=list(found),
        step=step,
        table=table,
        band=band_of(table),
        first_nan=_first_nan(found),
        seconds_per_step={
            rank: _seconds_per_step(steps, times)
            for rank, (steps, _, times) in zip(found, curves, strict=True)
        },
    )


def _last_of_steps(series: Series) -> tuple[_Array, _Array, _Array]:
    """Returns the steps with a finite value, ascending, with each step's last value and its time."""
    keep = np.isfinite(series.value) & (series.step != MISSING_STEP)
    steps, values, times = series.step[keep], series.value[keep], series.time[keep]
    # Of the reversed rows, `unique` returns the first of each step.
    unique, first = np.unique(steps[::-1], return_index=True)
    places = len(steps) - 1 - first
    return unique, values[places], times[places]


def _first_nan(found: dict[int, Series]) -> tuple[int, int] | None:
    firsts = []
    for rank, series in found.items():
        is_nan = np.isnan(series.value) & (series.step != MISSING_STEP)
        if is_nan.any():
            steps, times = series.step[is_nan], series.time[is_nan]
            place = int(np.lexsort((times, steps))[0])
            firsts.append((int(steps[place]), float(times[place]), rank))
    if not firsts:
        return None
    step, _, rank = min(firsts)
    return rank, step


def _seconds_per_step(steps: _Array, times: _Array) -> float | None:
    if len(steps) < 2:  # noqa: PLR2004  # a difference needs two
        return None
    seconds = np.diff(times) / np.diff(steps)
    seconds = seconds[np.isfinite(seconds)]
    return float(np.median(seconds)) if len(seconds) else None
