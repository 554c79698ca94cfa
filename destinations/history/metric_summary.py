"""`MetricSummary`: the statistics of one metric in `summary.json`. Doesn't import numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

from destinations.kinds.line import number_of, whole_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MetricSummary", "metric_of"]


def metric_of(value: Any) -> float | None:
    """Returns a metric's value as a number, 1 for true and 0 for false; None if it isn't one."""
    return float(value) if isinstance(value, bool) else number_of(value)


@attrs.frozen
class MetricSummary:
    """The statistics of a metric. Min, max and mean cover only finite values.

    Attributes:
        last: the last value.
        min: None if no value is finite.
        max: None if no value is finite.
        min_step: the step of the first minimum; None if unknown.
        max_step: the step of the first maximum; None if unknown.
        count: number of values.
        non_finite: number of values that are NaN or infinite.
        mean: None if unknown.
    """

    last: float | None
    min: float | None
    max: float | None
    min_step: int | None
    max_step: int | None
    count: int
    non_finite: int
    mean: float | None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> MetricSummary:
        """Returns the statistics in a record of `summary.json`; stable-pretraining's lack steps and mean."""
        # If a NaN is logged first, stable-pretraining keeps it as min and max.
        low, high = (
            bound if (bound := metric_of(record.get(name))) is not None and math.isfinite(bound) else None
            for name in ("min", "max")
        )
        return cls(
            last=metric_of(record.get("last")),
            min=low,
            max=high,
            min_step=whole_of(record.get("min_step")),
            max_step=whole_of(record.get("max_step")),
            count=whole_of(record.get("count")) or 0,
            non_finite=whole_of(record.get("non_finite")) or 0,
            mean=metric_of(record.get("mean")),
        )
