"""Running statistics of each metric: last, min, max, mean and counts.

Updated in the writer thread, some dozens of rows at a time.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .part_index import PartIndex

__all__ = ["MetricStatistics", "Statistics"]

_EXACT_FLOAT = float(1 << 53)


@attrs.define
class MetricStatistics:
    """One metric; `min`, `max` and `total` cover its finite values only."""

    last: float = 0.0
    min: float | None = None
    max: float | None = None
    min_step: int | None = None
    max_step: int | None = None
    count: int = 0
    non_finite: int = 0
    total: float = 0.0

    @property
    def finite_last(self) -> float | None:
        """The last value, or None if that is NaN or infinite."""
        return self.last if _is_finite(self.last) else None

    @property
    def mean(self) -> float | None:
        """The mean of the finite values."""
        finite = self.count - self.non_finite
        return self.total / finite if finite else None

    def to_json(self) -> dict[str, Any]:
        """Returns the metric's record in `summary.json`."""
        record = attrs.asdict(self, filter=lambda field, _: field.name != "total")
        return {**record, "mean": self.mean}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> MetricStatistics:
        """Restores a record of `to_json`, or of stable-pretraining, which has no steps.

        Raises:
            ValueError: it is none; so do AttributeError, TypeError and OverflowError.
        """
        known = {field.name: record.get(field.name, field.default) for field in attrs.fields(cls)}
        known["last"] = float(known["last"]) if isinstance(known["last"], str) else known["last"]
        steps = (known[name] or 0 for name in known if name.endswith("_step"))
        whole = (known["count"], known["non_finite"], *steps)
        if not isinstance(known["last"], int | float) or not all(isinstance(one, int) for one in whole):
            raise ValueError(f"not statistics of a metric: {record!r:.100}")
        for name in ("min", "max"):
            bound = known[name]
            known[name] = bound if isinstance(bound, int | float) and math.isfinite(bound) else None
        finite = known["count"] - known["non_finite"]
        known["total"] = float(record.get("mean") or 0.0) * finite
        return cls(**known)

    def set_last(self, value: float, step: int | None) -> None:
        """Sets the last value of several."""
        self.last = value

    def add(self, value: float, step: int | None) -> None:
        """Adds one value."""
        self.last = value
        self.count += 1
        if not _is_finite(value):
            self.non_finite += 1
            return
        self.add_extremes(value, step, value, step)
        try:
            self.total += value
        except OverflowError:
            self.total = math.inf if value > 0 else -math.inf

    def add_extremes(self, low: float, low_step: int | None, high: float, high_step: int | None) -> None:
        """Adds the min and max of several finite values."""
        if self.min is None or low < self.min:
            self.min, self.min_step = low, low_step
        if self.max is None or high > self.max:
            self.max, self.max_step = high, high_step


@attrs.define
class _StatisticsByStep(MetricStatistics):
    """One metric of a named writer, whose last value is that of the greatest step."""

    last_step: int | None = None

    def set_last(self, value: float, step: int | None) -> None:
        if self.last_step is None or (step is not None and step >= self.last_step):
            self.last, self.last_step = value, step

    def add(self, value: float, step: int | None) -> None:
        last = self.last
        # By name: the class is made anew for its slots.
        MetricStatistics.add(self, value, step)
        self.last = last
        self.set_last(value, step)


class _Block:
    """The statistics of rows of floats of certain names, oldest first, as arrays: one value of each metric.

    To add to the objects of ten thousand metrics takes fifty times as long.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.rows = 0
        self._finite = np.zeros(len(names), np.int64)
        self._total = np.zeros(len(names))
        self._low, self._low_step = np.full(len(names), np.inf), np.zeros(len(names), np.int64)
        self._high, self._high_step = np.full(len(names), -np.inf), np.zeros(len(names), np.int64)
        self._last = np.zeros(len(names))

    def add(self, steps: Any, rows: Any) -> None:
        """Adds rows: steps int64 `(rows,)`, values float64 `(rows, metrics)`."""
        is_finite = np.isfinite(rows)
        all_finite = bool(is_finite.all())
        self.rows += len(rows)
        self._finite += len(rows) if all_finite else is_finite.sum(axis=0)
        with np.errstate(over="ignore", invalid="ignore"):
            self._total += (rows if all_finite else np.where(is_finite, rows, 0.0)).sum(axis=0)
        low = rows if all_finite else np.where(is_finite, rows, np.inf)
        # There are fewer and fewer records.
        at = np.flatnonzero(low.min(axis=0) < self._low)
        if len(at):
            first = low[:, at].argmin(axis=0)
            self._low[at], self._low_step[at] = low[first, at], steps[first]
        high = rows if all_finite else np.where(is_finite, rows, -np.inf)
        at = np.flatnonzero(high.max(axis=0) > self._high)
        if len(at):
            first = high[:, at].argmax(axis=0)
            self._high[at], self._high_step[at] = high[first, at], steps[first]
        self._last = rows[-1].copy()

    def add_to(self, found: Iterable[MetricStatistics]) -> None:
        """Adds what there is to the statistics of the metrics."""
        columns = (
            *(self._last, self._finite, self._total),
            *(self._low, self._low_step, self._high, self._high_step),
        )
        lists = (column.tolist() for column in columns)
        for metric, last, finite, total, *extremes in zip(found, *lists, strict=True):
            metric.last = last
            metric.count += self.rows
            metric.non_finite += self.rows - finite
            if finite:
                metric.total += total
                metric.add_extremes(*extremes)


class Statistics:
    """The statistics of all metrics of a run.

    Args:
        by_step: whether rows may come in any order of their steps: the last value of a metric is that of the
            greatest step, and not the one that was logged last. Then an index cannot be added, as it does not
            tell the steps of last values.
    """

    def __init__(self, *, by_step: bool = False) -> None:
        self.by_step = by_step
        self._kind = _StatisticsByStep if by_step else MetricStatistics
        self._metrics: dict[str, MetricStatistics] = {}
        # What is not yet in them, in the order of the last rows.
        self._blocks: dict[tuple[str, ...], _Block] = {}
        self.last_step: int | None = None
        self.last_epoch: float | None = None
        self._logs_epoch = False

    @property
    def metrics(self) -> dict[str, MetricStatistics]:
        """The statistics of each metric."""
        blocks, self._blocks = self._blocks, {}
        for block in blocks.values():
            block.add_to([self._metrics.get(name) or self._new(name) for name in block.names])
        return self._metrics

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any], *, by_step: bool = False) -> Statistics:
        """Restores the statistics from the content of `summary.json`."""
        statistics = cls(by_step=by_step)
        for name, record in summary.get("metrics", {}).items():
            statistics.metrics[name] = statistics._kind.from_json(record)
        step, epoch = summary.get("step"), summary.get("epoch")
        statistics.last_step = step if isinstance(step, int) else None
        statistics.last_epoch = epoch if isinstance(epoch, int | float) else None
        return statistics

    def add(
        self,
        names: tuple[str, ...],
        steps: list[int | None],
        rows: list[tuple[float, ...]] | np.ndarray[Any, np.dtype[np.float64]],
        epoch: float | None = None,
    ) -> None:
        """Adds rows of the same names, oldest first, as tuples or as one float64 array `(rows, metrics)`.

        Those of an array have steps of 64 bits.
        """
        self.last_step = steps[-1] if steps[-1] is not None else self.last_step
        if "epoch" in names:
            # As in the column, the metric of that name stands for the run's own.
            self.last_epoch, self._logs_epoch = float(rows[-1][names.index("epoch")]), True
        elif epoch is not None and not self._logs_epoch:
            self.last_epoch = epoch
        if isinstance(rows, np.ndarray) and self.by_step:
            rows = list(map(tuple, rows.tolist()))
        if isinstance(rows, np.ndarray):
            # Behind those of earlier rows.
            block = self._blocks.pop(names, None) or _Block(names)
            self._blocks[names] = block
            block.add(np.array(steps, np.int64), rows)
            return
        metrics = self.metrics
        found = [metrics.get(name) or self._new(name) for name in names]
        # An array costs more than three rows.
        array = _block(rows) if len(rows) > 3 else None  # noqa: PLR2004
        if array is not None:
            self._add_array(found, steps, array, rows)
            return
        for step, row in zip(steps, rows, strict=True):
            for metric, value in zip(found, row, strict=True):
                metric.add(value, step)

    def _add_array(
        self,
        found: list[MetricStatistics],
        steps: list[int | None],
        block: np.ndarray[Any, np.dtype[np.float64]],
        rows: list[tuple[float, ...]],
    ) -> None:
        """Adds rows as an array, and as tuples: they may have integers, which stay such."""
        finite = np.isfinite(block)
        all_finite = bool(finite.all())
        lows = (block if all_finite else np.where(finite, block, np.inf)).argmin(axis=0).tolist()
        highs = (block if all_finite else np.where(finite, block, -np.inf)).argmax(axis=0).tolist()
        with np.errstate(over="ignore"):
            totals = (block if all_finite else np.where(finite, block, 0.0)).sum(axis=0).tolist()
        count = len(block)
        counts = [count] * len(found) if all_finite else finite.sum(axis=0).tolist()

        newest = _place_of_greatest(steps) if self.by_step else -1
        for index, metric in enumerate(found):
            metric.set_last(rows[newest][index], steps[newest])
            metric.count += count
            metric.non_finite += count - counts[index]
            if counts[index]:
                metric.total += totals[index]
                low, high = lows[index], highs[index]
                metric.add_extremes(rows[low][index], steps[low], rows[high][index], steps[high])

    def add_mixed(self, rows: Iterable[tuple[int | None, float | None, dict[str, float]]]) -> None:
        """Adds rows of any names, each as step, epoch and values by name."""
        for names, group in itertools.groupby(rows, lambda row: tuple(row[2])):
            found = list(group)
            values = [tuple(by_name.values()) for _, _, by_name in found]
            self.add(names, [step for step, _, _ in found], values, found[-1][1])

    def add_index(self, index: PartIndex) -> None:
        """Adds the rows that an index is of; not with `by_step`."""
        steps = index.of_rows("last_step")
        known = steps[~np.isnan(steps)]
        self.last_step = int(known[-1]) if len(known) else self.last_step
        metrics = self.metrics
        for name in index.columns:
            count, finite, low, low_step, high, high_step, mean, last = index.of_column(name)
            there = np.flatnonzero(count)
            if not len(there):
                continue
            if name == "epoch":
                self.last_epoch = float(last[there[-1]])
                continue
            metric = metrics.get(name) or self._new(name)
            metric.last = float(last[there[-1]])
            metric.count += int(count.sum())
            metric.non_finite += int(count.sum() - finite.sum())
            places = np.flatnonzero(finite)
            if len(places):
                with np.errstate(over="ignore", invalid="ignore"):
                    metric.total += float((mean[places] * finite[places]).sum())
                least, most = places[low[places].argmin()], places[high[places].argmax()]
                metric.add_extremes(
                    float(low[least]), _step(low_step[least]), float(high[most]), _step(high_step[most])
                )

    def _new(self, name: str) -> MetricStatistics:
        metric = self._metrics[name] = self._kind()
        return metric


def _place_of_greatest(steps: list[int | None]) -> int:
    """Returns the place of the greatest step, the last one of equal ones; -1 if there is none."""
    known = [place for place, step in enumerate(steps) if step is not None]
    return max(known, key=lambda place: (steps[place], place), default=-1)


def _step(step: float) -> int | None:
    return None if math.isnan(step) else int(step)


def _is_finite(value: float) -> bool:
    """Returns whether a value is finite; `math.isfinite` fails on very large integers."""
    return type(value) is int or math.isfinite(value)


def _block(rows: list[tuple[float, ...]]) -> np.ndarray[Any, Any] | None:
    """Returns the rows as float64 `(rows, metrics)`, or None if that would round an integer."""
    try:
        block = np.array(rows, dtype=np.float64)
    except (OverflowError, ValueError):
        return None
    with np.errstate(invalid="ignore"):
        too_large = (np.abs(block) >= _EXACT_FLOAT) & np.isfinite(block)
    return None if too_large.any() else block
