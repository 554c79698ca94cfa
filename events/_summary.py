"""What many samples amount to: count, sum, mean, extremes, standard deviation, percentiles, in bounded memory.

Pure computation; one thread at a time.
"""

import math
import random
from collections.abc import Iterable
from enum import StrEnum

__all__ = ["Aggregation", "Summary"]

# Up to here percentiles are exact.
RESERVOIR_SAMPLES = 10_000


class Aggregation(StrEnum):
    """What is to be known of the samples of a window; the value is the suffix of its name, as in "loss.mean".

    One NaN among the samples makes all of it NaN but `VALUE` and `COUNT`, wherever it stood.
    """

    VALUE = "value"
    """The last sample."""
    MEAN = "mean"
    COUNT = "count"
    """How many samples; an integer."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """The standard deviation of the samples themselves: divided by their number, 0.0 for a single one."""
    P50 = "p50"
    """The median. Percentiles interpolate linearly between samples, as numpy's do by default."""
    P90 = "p90"
    P95 = "p95"
    P99 = "p99"


_RANKS = {Aggregation.P50: 0.5, Aggregation.P90: 0.9, Aggregation.P95: 0.95, Aggregation.P99: 0.99}


class Summary:
    """Samples, folded in chunk by chunk.

    Percentiles are exact up to 10,000 samples. Beyond, they are those of 10,000 drawn uniformly from all: algorithm L,
    Li, "Reservoir-sampling algorithms of time complexity O(n(1+log(N/n)))", ACM TOMS 20(4), 1994. The draw has a
    generator of its own with a fixed seed: training draws the same random numbers with and without it.

    Args:
        aggregations: what will be asked for; nothing else is kept.
    """

    def __init__(self, aggregations: Iterable[Aggregation]) -> None:
        wanted = frozenset(aggregations)
        self._needs_deviation = Aggregation.STD in wanted
        self._needs_samples = not wanted.isdisjoint(_RANKS)
        self._needs_extremes = not wanted.isdisjoint({Aggregation.MIN, Aggregation.MAX})
        self.count = 0
        self._last = 0.0
        self._sum = 0.0
        self._lowest = math.inf
        self._highest = -math.inf
        self._has_nan = False
        self._mean = 0.0
        self._squares = 0.0
        self._reservoir: list[float] = []
        self._random = random.Random(0)  # noqa: S311  # a sample of measurements, not a secret
        self._weight = 1.0
        self._next_draw = 0

    def fold(self, samples: list[float]) -> None:
        """Adds samples, in their order.

        Args:
            samples: at least one.
        """
        if self._needs_deviation:
            self._fold_deviation(samples)
        if self._needs_samples:
            self._fold_reservoir(samples)
        total = sum(samples)
        # A NaN among the samples makes the sum NaN; so do opposite infinities, whose extremes are known all the same.
        self._has_nan = self._has_nan or (math.isnan(total) and any(map(math.isnan, samples)))
        self._sum += total
        self.count += len(samples)
        self._last = samples[-1]
        if self._needs_extremes:
            lowest, highest = min(samples), max(samples)
            self._lowest = min(self._lowest, lowest)
            self._highest = max(self._highest, highest)

    def _fold_deviation(self, samples: list[float]) -> None:
        """Merges means and squared deviations: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm", 1979."""
        added = len(samples)
        mean = sum(samples) / added
        squares = sum([(sample - mean) * (sample - mean) for sample in samples])
        count = self.count + added
        delta = mean - self._mean
        self._squares += squares + delta * delta * (self.count * added / count)
        self._mean += delta * (added / count)

    def _fold_reservoir(self, samples: list[float]) -> None:
        room = RESERVOIR_SAMPLES - len(self._reservoir)
        self._reservoir += samples[:room]
        if len(self._reservoir) < RESERVOIR_SAMPLES:
            return
        if self._next_draw == 0:
            self._next_draw = RESERVOIR_SAMPLES - 1
            self._skip()
        while self._next_draw < self.count + len(samples):
            self._reservoir[self._random.randrange(RESERVOIR_SAMPLES)] = samples[self._next_draw - self.count]
            self._skip()

    def _skip(self) -> None:
        """Draws which sample is the next to enter the reservoir."""
        self._weight *= math.exp(math.log(1.0 - self._random.random()) / RESERVOIR_SAMPLES)
        self._next_draw += int(math.log(1.0 - self._random.random()) / math.log1p(-self._weight)) + 1

    def values(self, aggregations: Iterable[Aggregation]) -> dict[Aggregation, float]:
        """Returns what was asked for; zeros where there are no samples."""
        if self.count == 0:
            return {
                aggregation: 0 if aggregation is Aggregation.COUNT else 0.0 for aggregation in aggregations
            }
        ordered = sorted(self._reservoir) if not self._has_nan else []
        return {aggregation: self._value(aggregation, ordered) for aggregation in aggregations}

    def _value(self, aggregation: Aggregation, ordered: list[float]) -> float:
        if aggregation is Aggregation.COUNT:
            return self.count
        if aggregation is Aggregation.VALUE:
            return self._last
        if self._has_nan:
            return math.nan
        if aggregation in _RANKS:
            return _percentile(ordered, _RANKS[aggregation])
        if aggregation is Aggregation.STD:
            return math.sqrt(self._squares / self.count)
        return {
            Aggregation.SUM: self._sum,
            Aggregation.MEAN: self._sum / self.count,
            Aggregation.MAX: self._highest,
            Aggregation.MIN: self._lowest,
        }[aggregation]


def _percentile(ordered: list[float], share: float) -> float:
    """Interpolates linearly: the seventh definition of Hyndman and Fan, The American Statistician 50(4), 1996."""
    position = share * (len(ordered) - 1)
    below = ordered[math.floor(position)]
    above = ordered[math.ceil(position)]
    # Equal neighbours are returned as they are: infinity minus infinity is no number.
    return below if below == above else below + (above - below) * (position - math.floor(position))
