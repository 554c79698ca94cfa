"""`MetricSummary`: the statistics of one metric, as `summary.json` has them. Does not import numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

from destinations.kinds.line import number_of, whole_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MetricSummary", "metric_of"]


def metric_of(value: Any) -> float | None:
    """Returns a value of a metric as a number, of which true is 1 and false 0; None if it is not one."""
    return float(value) if isinstance(value, bool) else number_of(value)


@attrs.frozen
class MetricSummary:
    """The statistics of a metric. Min, max and mean are those of the finite values.

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
        """Returns a record of `summary.json`; those of stable-pretraining lack steps and mean."""
        # stable-pretraining keeps a NaN that was logged first as min and max.
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
