"""`BinnedValues`: a histogram of which only counts and edges are known, as something that `log_histogram` takes."""

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from .errors import RecordError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["BinnedValues"]

_MOST_SAMPLES = 10_000
_NORMAL_BINS = 64
_NORMAL_REACH = 4.0
_NORMAL_COUNT = 1000.0


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@attrs.frozen(repr=False)
class BinnedValues:
    """How many values lie between which edges, where the values themselves are not at hand.

    ```python
    logger.log_histogram(BinnedValues(counts=[3, 5], edges=[0.0, 0.5, 1.0]), "scores")
    logger.log_histogram(BinnedValues.normal(mean=0.1, std=2.0), "weights")
    ```

    Destinations that know it write counts and edges as they are; to others it is an array of at most 10,000 values that are
    distributed so, all in the middle of their bins.

    Args:
        counts: one for each bin, 0 or more; whole or not.
        edges: rising, one more than counts.
        count: how many values there are, non-finite ones among them; the sum of the counts where it is not given.
        non_finite: how many of them were NaN or infinite, and are in no bin.
        min: the least value; without it, the lower edge of the first bin that is not empty.
        max: the greatest value; without it, the upper edge of the last bin that is not empty.
        mean: their mean; without it, that of the middles of the bins.
        std: their standard deviation, divided by their number; without it, that of the middles of the bins.

    Raises:
        RecordError: the edges do not rise, their number does not fit, or a count is negative.
    """

    counts: tuple[float, ...] = attrs.field(converter=_floats)
    edges: tuple[float, ...] = attrs.field(converter=_floats)
    count: float | None = None
    non_finite: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None

    def __attrs_post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise RecordError(
                f"binned values must have one edge more than counts, got {len(self.counts)} counts and "
                f"{len(self.edges)} edges."
            )
        if not all(math.isfinite(low) and low < high < math.inf for low, high in self._bins()):
            raise RecordError(f"binned values must have rising edges, got {self.edges[:4]}…")
        if not all(0 <= count < math.inf for count in self.counts):
            raise RecordError("binned values must have counts of 0 or more, got others among them.")

    @classmethod
    def normal(cls, mean: float, std: float) -> "BinnedValues":
        """Returns a normal distribution, in 64 bins that reach four standard deviations to both sides.

        Raises:
            RecordError: mean or standard deviation is not finite, or the latter is negative.
        """
        if not (math.isfinite(mean) and 0 <= std < math.inf):
            raise RecordError(
                f"distribution must have a finite mean and std of 0 or more, got {mean} and {std}."
            )
        # A width that a float at this place can show.
        width = std or max(abs(mean) * 1e-6, 1e-6)
        edges = [
            mean + width * _NORMAL_REACH * (2 * index / _NORMAL_BINS - 1) for index in range(_NORMAL_BINS + 1)
        ]
        below = [math.erf((edge - mean) / (width * math.sqrt(2))) / 2 for edge in edges]
        counts = [_NORMAL_COUNT * (above - under) for under, above in itertools.pairwise(below)]
        return cls(counts, edges, min=edges[0], max=edges[-1], mean=mean, std=std)

    def record(self) -> dict[str, Any]:
        """Returns counts, edges and moments, as destinations write them."""
        total = math.fsum(self.counts)
        filled = [edges for edges, count in zip(self._bins(), self.counts, strict=True) if count]
        mean, std = self._moments(total)
        mean = mean if self.mean is None else self.mean
        return {
            "count": _whole(total + self.non_finite if self.count is None else self.count),
            "non_finite": self.non_finite,
            "counts": [_whole(count) for count in self.counts] if filled else [],
            "edges": list(self.edges) if filled else [],
            "min": self.min if self.min is not None or not filled else filled[0][0],
            "max": self.max if self.max is not None or not filled else filled[-1][1],
            "mean": mean,
            "std": std if self.std is None else self.std,
            "sum": None if mean is None else mean * total,
        }

    def _moments(self, total: float) -> tuple[float | None, float | None]:
        if not total:
            return None, None
        weighed = [
            ((low + high) / 2, count) for (low, high), count in zip(self._bins(), self.counts, strict=True)
        ]
        mean = math.fsum(middle * count for middle, count in weighed) / total
        return mean, math.sqrt(math.fsum((middle - mean) ** 2 * count for middle, count in weighed) / total)

    def _bins(self) -> list[tuple[float, float]]:
        return list(itertools.pairwise(self.edges))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        import numpy as np

        total = math.fsum(self.counts)
        scale = min(1.0, _MOST_SAMPLES / total) if total else 0.0
        middles = np.array([(low + high) / 2 for low, high in self._bins()], dtype or np.float64)
        return np.repeat(middles, [round(count * scale) for count in self.counts])

    def __repr__(self) -> str:
        return f"BinnedValues({len(self.counts)} bins from {self.edges[0]:g} to {self.edges[-1]:g})"


def _whole(count: float) -> float:
    return int(count) if count == int(count) else count
