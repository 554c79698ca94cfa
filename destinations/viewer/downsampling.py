"""Downsampling of curves: consecutive values become one point with their mean, min and max.

Pure functions of numpy arrays.
"""

import math
from typing import Any

import attrs
import numpy as np

__all__ = ["Curve", "Spans", "downsample", "window"]

Array = np.ndarray[Any, np.dtype[Any]]

_MAX_MARKS = 1000


@attrs.frozen(eq=False)
class Curve:
    """The points of a curve.

    Attributes:
        x: `(points,)`.
        y: float64 `(points,)`; the mean of the finite values that a point represents; NaN if there is none.
        low: their min, float64 `(points,)`; None where no values are merged.
        high: their max.
        merged: the maximum number of consecutive values per point.
        nan: x of values that are NaN, the first thousand.
        inf: x of infinite values, the first thousand.
    """

    x: Array
    y: Array
    low: Array | None
    high: Array | None
    merged: int
    nan: Array
    inf: Array


@attrs.frozen(eq=False)
class Spans:
    """Spans of consecutive values; each y is the mean of its span.

    Attributes:
        count: the number of values in each span, int64 `(n,)`, at least 1.
        finite: the number of finite values.
        low: their min, float64 `(n,)`; NaN if none is finite.
        high: their max.
        until: the x of the last value `(n,)`; for a span of a single value, its x.
    """

    count: Array
    finite: Array
    low: Array
    high: Array
    until: Array

    def at(self, places: Any) -> "Spans":
        """Returns the spans at some indices."""
        return Spans(*(one[places] for one in attrs.astuple(self, recurse=False)))


def downsample(x: Array, y: Array, points: int, spans: Spans | None = None) -> Curve:
    """Returns a curve of at most so many points.

    Args:
        x: `(n,)`; its order is kept.
        y: float64 `(n,)`.
        points: at least 1.
        spans: the span of each value; None if each is a single value.
    """
    if spans is not None:
        return _downsampled_spans(x, y, points, spans)
    are_nan, are_inf = np.isnan(y), np.isinf(y)
    nan, inf = x[are_nan][:_MAX_MARKS], x[are_inf][:_MAX_MARKS]
    finite = np.where(are_inf, np.nan, y) if len(inf) else y
    if len(x) <= points:
        return Curve(x, finite, None, None, 1, nan, inf)
    merged = math.ceil(len(x) / points)
    starts = np.arange(0, len(x), merged)
    # `fmin` and `fmax` ignore NaN unless all are.
    low, high = np.fmin.reduceat(finite, starts), np.fmax.reduceat(finite, starts)
    present = np.isfinite(finite)
    mean = _mean(finite, present, starts, low, high)
    return Curve(x[starts], mean, low, high, merged, nan, inf)


def _mean(y: Array, counts: Array, starts: Array, low: Array, high: Array) -> Array:
    """Returns the means of `y`, each the mean of so many values, from each start to the next."""
    # The sum of huge values overflows: their mean is then taken as the middle between the extremes.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.reduceat(np.where(counts > 0, y * counts, 0.0), starts)
        total = np.add.reduceat(counts, starts, dtype=np.int64)
        mean = np.divide(sums, total, out=np.full(len(starts), np.nan), where=total > 0)
    return np.clip(np.where(np.isfinite(mean) | np.isnan(low), mean, low / 2 + high / 2), low, high)


def _downsampled_spans(x: Array, y: Array, points: int, spans: Spans) -> Curve:
    """Returns a curve whose points stand for about the same number of values; spans are never split."""
    nan = x[spans.finite < spans.count][:_MAX_MARKS]
    before = np.cumsum(spans.count) - spans.count
    merged = math.ceil((before[-1] + spans.count[-1]) / points) if len(x) else 1
    starts = np.flatnonzero(np.diff(before // merged, prepend=-1))
    if not len(x):
        return Curve(x, y, None, None, 1, nan, nan)
    low, high = np.fmin.reduceat(spans.low, starts), np.fmax.reduceat(spans.high, starts)
    mean = _mean(y, spans.finite, starts, low, high)
    return Curve(x[starts], mean, low, high, merged, nan, nan[:0])


def window(x: Array, start: float | None, end: float | None, until: Array | None = None) -> tuple[Array, int]:
    """Returns the places of a part of the x axis with one neighbour on each side, and the size of the part.

    Args:
        x: `(n,)`, in any order.
        start: where the part starts; None for the beginning.
        end: where the part ends; None for the end.
        until: the x of the last value in each span; None without spans.
    """
    last = x if until is None else until
    if start is None and end is None:
        return np.arange(len(x)), len(x)
    inside = np.ones(len(x), np.bool_)
    if start is not None:
        inside &= last >= start
    if end is not None:
        inside &= x <= end
    places = np.flatnonzero(inside)
    if len(places):
        before, after = places[0] - 1, places[-1] + 1
    else:
        earlier = np.flatnonzero(last < start) if start is not None else places
        before = int(earlier[-1]) if len(earlier) else -1
        after = before + 1
    ends = [[before] if before >= 0 else [], [after] if after < len(x) else []]
    return np.concatenate([ends[0], places, ends[1]]).astype(np.intp), len(places)
