"""`Aggregate`: the statistics of each metric of some rows. Only this module computes them.

An aggregate takes rows in the order of logging: as rows, as blocks, as entries of the index of a part, or as
another aggregate. However they are grouped, the result is the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from destinations.kinds.line import whole_of

from .metric_summary import MetricSummary

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


__all__ = ["MISSING_STEP", "Aggregate", "Floats"]

MISSING_STEP = int(np.iinfo(np.int64).min)
"""The step of a row without one, or with one beyond 64 bits."""

_Array = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
# One record per metric; min, max and total cover only finite values.
_FIELDS = np.dtype(
    [
        *(("count", np.int64), ("finite", np.int64), ("total", np.float64)),
        *(("min", np.float64), ("min_step", np.int64), ("max", np.float64), ("max_step", np.int64)),
        *(("last", np.float64), ("last_step", np.int64)),
    ]
)
_NOTHING = np.array(
    [(0, 0, 0.0, math.inf, MISSING_STEP, -math.inf, MISSING_STEP, math.nan, MISSING_STEP)], _FIELDS
)


class Aggregate:
    """The count, extremes with their steps, mean and last value of each metric, as float64.

    The column `epoch` is no metric: only its last value is kept.

    Args:
        by_step: whether the last value of a metric is the one at its greatest step, as for a named writer,
            whose steps may come in any order; otherwise it is the one that was logged last.

    Attributes:
        last_step: the step of the last row that has one.
        last_epoch: the epoch of the last row.
    """

    def __init__(self, *, by_step: bool = False) -> None:
        self.by_step = by_step
        self.last_step: int | None = None
        self.last_epoch: float | None = None
        self._logs_epoch = False
        self._places: dict[str, int] = {}
        self._table = _NOTHING[:0]
        # The names added last, and their places.
        self._names: Sequence[str] = ()
        self._names_at = np.empty(0, np.intp)

    # Adding.

    def add(
        self,
        names: Sequence[str],
        steps: Sequence[int | None],
        rows: Sequence[tuple[float, ...]] | Floats,
        epoch: float | None = None,
    ) -> None:
        """Adds rows that have the same metrics.

        Args:
            names: the names of the metrics.
            steps: the steps of the rows.
            rows: `(rows, metrics)`.
            epoch: the epoch of the last row, unless it is a metric.
        """
        values = np.asarray(rows, np.float64)
        epochs = values[-1, self._at(names) == self._places.get("epoch", -1)]
        if len(epochs):
            # As in the column, the metric replaces the run's own epoch, even if later rows lack it.
            self.last_epoch, self._logs_epoch = float(epochs[0]), True
        elif epoch is not None and not self._logs_epoch:
            self.last_epoch = epoch
        known = [MISSING_STEP if step is None else step for step in steps] if None in steps else steps
        self._add_rows(names, np.array(known, np.int64), values)

    def add_columns(
        self, names: Sequence[str], steps: _Array, columns: Collection[tuple[_Array, _Array]]
    ) -> None:
        """Adds rows by column.

        Args:
            names: the names of the columns.
            steps: the steps of the rows, int64 with `MISSING_STEP`, or float64 with NaN.
            columns: the values of each column, float64 `(rows,)`, and which are present, bool `(rows,)`.
        """
        shape = len(columns), len(steps)
        values = np.array([one for one, _ in columns], np.float64).reshape(shape).T
        present = np.array([there for _, there in columns], np.bool_).reshape(shape).T
        self._add_rows(names, steps if steps.dtype == np.int64 else _steps_of(steps), values, present)
        if "epoch" in names:
            epochs = values[:, names.index("epoch")][present[:, names.index("epoch")]]
            self.last_epoch = float(epochs[-1]) if len(epochs) else self.last_epoch

    def add_fields(self, columns: Sequence[str], fields: Floats, steps: Floats) -> None:
        """Adds entries of an index, which lacks the steps of last values.

        Args:
            columns: the names of the columns.
            fields: the values of `parquet.OF_COLUMN`, `(8, entries, columns)`.
            steps: the last step of each entry; NaN if there is none.
        """
        count, finite, low, low_step, high, high_step, mean, last = fields
        low, high = np.where(finite > 0, low, math.inf), np.where(finite > 0, high, -math.inf)
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.where(finite > 0, mean * finite, 0.0)
        places = _steps_of(low_step), _steps_of(high_step), np.full(last.shape, MISSING_STEP)
        self._take(columns, count, finite, total, low, places[0], high, places[1], last, places[2])
        self._note_step(_steps_of(steps))
        if "epoch" in columns:
            epochs, counts = last[:, columns.index("epoch")], count[:, columns.index("epoch")]
            self.last_epoch = float(epochs[counts > 0][-1]) if counts.any() else self.last_epoch

    def merge(self, later: Aggregate) -> None:
        """Adds the rows of another aggregate, which were logged after these."""
        table = later._table[: len(later._places)]
        self._take(list(later._places), *(table[name][None] for name in _FIELDS.names or ()))
        self.last_step = self.last_step if later.last_step is None else later.last_step
        self.last_epoch = self.last_epoch if later.last_epoch is None else later.last_epoch
        self._logs_epoch |= later._logs_epoch

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, by_step: bool = False) -> Aggregate:
        """Restores the statistics from the content of `summary.json`, including stable-pretraining's.

        Raises:
            ValueError: it has none; AttributeError and TypeError mean the same.
        """
        found = cls(by_step=by_step)
        found.last_step, found.last_epoch = whole_of(document.get("step")), whole_of(document.get("epoch"))
        metrics, records = document.get("metrics", {}), []
        for record in metrics.values():
            one = MetricSummary.from_json(record)
            finite = one.count - one.non_finite
            if one.last is None or one.count < 1 or finite < 0:
                raise ValueError(f"not statistics of a metric: {record!r:.100}")
            total = 0.0 if not finite else math.nan if one.mean is None else one.mean * finite
            low, high = math.inf if one.min is None else one.min, -math.inf if one.max is None else one.max
            steps = (one.min_step, one.max_step, whole_of(record.get("last_step")))
            low_step, high_step, last_step = (MISSING_STEP if one is None else one for one in steps)
            records.append((one.count, finite, total, low, low_step, high, high_step, one.last, last_step))
        found._places = {name: place for place, name in enumerate(metrics)}
        found._table = np.array(records, _FIELDS)
        return found

    # Results.

    def summaries(self) -> dict[str, MetricSummary]:
        """Returns the statistics of each metric."""
        return {
            name: MetricSummary(
                last=last,
                min=_finite(low),
                max=_finite(high),
                min_step=_step_of(low_step),
                max_step=_step_of(high_step),
                count=count,
                non_finite=count - finite,
                mean=total / finite if finite and not math.isnan(total) else None,
            )
            for name, (count, finite, total, low, low_step, high, high_step, last, _) in self._records()
        }

    def finite_lasts(self) -> dict[str, float | None]:
        """Returns the last value of each metric; None replaces NaN and infinities."""
        return {name: _finite(last) for name, (*_, last, _) in self._records()}

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Returns the content of `metrics` in `summary.json`."""
        steps = {name: _step_of(last_step) for name, (*_, last_step) in self._records()}
        return {
            name: {**attrs.asdict(one), "last_step": steps[name]} for name, one in self.summaries().items()
        }

    def fields(self, columns: Sequence[str]) -> Floats:
        """Returns the values of `parquet.OF_COLUMN` for columns, `(8, columns)`; see `add_fields`."""
        at = self._at(columns)
        table = self._table[at]
        finite = table["finite"]
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = table["total"] / finite
        extremes = [table[name].astype(np.float64) for name in ("min", "min_step", "max", "max_step")]
        of_finite = np.array([*extremes, mean])
        of_finite[:, finite == 0] = np.nan
        of_finite[of_finite == MISSING_STEP] = np.nan
        return np.concatenate([[table["count"], finite], of_finite, [table["last"]]])

    # Inside.

    def _records(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yields the record of each metric that has values."""
        records = self._table[: len(self._places)].tolist()
        return (
            (name, record)
            for name, record in zip(self._places, records, strict=True)
            if record[0] and name != "epoch"
        )

    def _at(self, names: Sequence[str]) -> _Array:
        """Returns the places of metrics in the table, adding those that it lacks."""
        # Looking up ten thousand names takes a noticeable time.
        if names is not self._names:
            places = self._places
            at = np.fromiter((places.setdefault(name, len(places)) for name in names), np.intp, len(names))
            if (missing := len(places) - len(self._table)) > 0:
                more = np.repeat(_NOTHING, max(missing, len(self._table)))
                self._table = np.concatenate([self._table, more])
            self._names, self._names_at = names, at
        return self._names_at

    def _add_rows(
        self, names: Sequence[str], steps: _Array, values: Floats, present: _Array | None = None
    ) -> None:
        """Adds rows: steps `(rows,)`, values and which of them are present `(rows, metrics)`."""
        # numpy reduces many rows five times as fast along contiguous memory.
        values = values if len(steps) < len(names) else np.asfortranarray(values)
        is_finite = np.isfinite(values) if present is None else present & np.isfinite(values)
        low = high = total = values
        count = np.full((1, len(names)), len(steps)) if present is None else present
        finite = count
        if not is_finite.all():
            low, high = np.where(is_finite, values, math.inf), np.where(is_finite, values, -math.inf)
            finite, total = is_finite, np.where(is_finite, values, 0.0)
        step = np.broadcast_to(steps[:, None], values.shape)
        self._take(names, count, finite, total, low, step, high, step, values, step)
        self._note_step(steps)

    def _note_step(self, steps: _Array) -> None:
        known = steps[steps != MISSING_STEP]
        self.last_step = int(known[-1]) if len(known) else self.last_step

    def _take(
        self,
        names: Sequence[str],
        count: _Array,
        finite: _Array,
        total: _Array,
        low: _Array,
        low_step: _Array,
        high: _Array,
        high_step: _Array,
        last: _Array,
        last_step: _Array,
    ) -> None:
        """Adds the fields of several aggregates in order, each `(aggregates, metrics)`; a row is one too.

        Counts may be `(1, metrics)`, shared by all, if every row has every metric.
        """
        if not last.size:
            return
        at, every, table = self._at(names), np.arange(len(names)), self._table
        with np.errstate(over="ignore", invalid="ignore"):
            for name, field in (("count", count), ("finite", finite), ("total", total)):
                table[name][at] += field.sum(axis=0, dtype=_FIELDS[name])
        extremes = (
            ("min", low, low_step, np.min, np.argmin, np.less),
            ("max", high, high_step, np.max, np.argmax, np.greater),
        )
        for name, values, steps, best_of, first, is_better in extremes:
            best = best_of(values, axis=0)
            # Among equal values, the earlier one is kept. The number of records shrinks.
            taken = np.flatnonzero(is_better(best, table[name][at]))
            table[name][at[taken]] = best[taken]
            table[f"{name}_step"][at[taken]] = steps[first(values[:, taken], axis=0), taken]
        place, taken = self._last_of(count, last_step)
        if self.by_step:
            taken &= last_step[place, every] >= table["last_step"][at]
        table["last"][at[taken]] = last[place, every][taken]
        table["last_step"][at[taken]] = last_step[place, every][taken]

    def _last_of(self, count: _Array, steps: _Array) -> tuple[_Array, _Array]:
        """Returns which of several aggregates has the last value of each metric, and whether one has."""
        rows, metrics = steps.shape
        if not self.by_step and count[-1].all():
            return np.full(metrics, rows - 1), np.ones(metrics, np.bool_)
        has = np.broadcast_to(count > 0, steps.shape)
        place = rows - 1 - has[::-1].argmax(axis=0)
        if self.by_step:
            # A value without a step comes before values with one.
            order = np.where(has, steps, MISSING_STEP)
            place = np.where(order.max(axis=0) > MISSING_STEP, rows - 1 - order[::-1].argmax(axis=0), place)
        return place, np.asarray(has.any(axis=0))


def _steps_of(steps: Floats) -> _Array:
    # Neither NaN nor beyond 64 bits.
    known = np.abs(steps) < -MISSING_STEP
    return np.where(known, np.where(known, steps, 0.0).astype(np.int64), MISSING_STEP)


def _step_of(step: int) -> int | None:
    return None if step == MISSING_STEP else step


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
