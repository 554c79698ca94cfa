"""`StatsMonitor`: what something that counts by itself has to say: a replay buffer, a collector, a data loader, a cache."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any

from ._sampler import Sampler

__all__ = ["StatsMonitor"]


class StatsMonitor(Sampler):
    """Asks something for its numbers from time to time, and logs them.

    ```python
    Trainer(..., callbacks=[StatsMonitor(replay_buffer, name="buffer", rates=["written"])])
    ```

    What is asked has a method `stats()`, or is a function, that returns numbers by name, nested or not; names are joined
    with "/", and what is no number is left out. It is called in another thread than the one that trains: it must be safe
    there.

    **Rates.** Of a counter named in `rates`, "name_per_sec" is logged too: by how much it grew since it was logged last, for
    each second between. A counter that fell was reset; it has no rate until the next time.

    **When.** Every `every_seconds`; with `every_count=("frames", 10_000)`, it is asked as often, and logged where the counter
    crossed a multiple of 10,000 since. Several crossed at once are one. A counter that fell is counted from there.
    One more sample is logged at close.

    **Threading, ranks, errors.** A thread asks, on the process of local rank 0; the training thread logs at the end of
    batches, epochs, evaluations and `fit`, with the step at which it was asked. An error of what is asked is counted in
    `failures`, and the first is reported.

    Args:
        source: has `stats()`, or is a function, that returns a mapping.
        name: stands before the name of each metric, with "/" between them.
        every_seconds: how long between two questions.
        every_count: the counter that decides what is logged, and its multiple.
        rates: the counters of which a rate is logged.
        clock: seconds that never go back.

    Raises:
        TypeError: the source has no `stats()`, and is no function.
        ValueError: the time between two questions, or the multiple, is nothing.
    """

    def __init__(
        self,
        source: Any,
        *,
        name: str = "",
        every_seconds: float = 10.0,
        every_count: tuple[str, float] | None = None,
        rates: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ask = getattr(source, "stats", source)
        if not callable(ask):
            raise TypeError(
                f"source must have stats(), or be a function, got {source!r:.80} ({type(source).__name__})."
            )
        if every_count is not None and not every_count[1] > 0:
            raise ValueError(f"every_count must have a positive multiple, got {every_count!r}.")
        super().__init__(
            self._next,
            every_seconds,
            f"{name}/" if name else "",
            thread_name="events-stats-monitor",
            samples_at_end=True,
        )
        self._ask: Callable[[], Mapping[str, Any]] = ask
        self._every_count = every_count
        self._rates = frozenset(rates)
        self._clock = clock
        self._counted: float | None = None
        self._logged_at = 0.0
        self._logged: dict[str, float] = {}

    def _next(self) -> Mapping[str, float]:
        numbers = dict(_numbers(self._ask()))
        if not self._is_due(numbers):
            return {}
        now = self._clock()
        seconds = now - self._logged_at
        grown = {
            f"{name}_per_sec": (numbers[name] - self._logged[name]) / seconds
            for name in numbers
            if name in self._rates
            and name in self._logged
            and seconds > 0
            and numbers[name] >= self._logged[name]
        }
        self._logged_at, self._logged = now, numbers
        return numbers | grown

    def _is_due(self, numbers: Mapping[str, float]) -> bool:
        if self._every_count is None or self._is_stopping.is_set():
            return True
        name, multiple = self._every_count
        if name not in numbers:
            return False
        before, self._counted = self._counted, numbers[name]
        return (
            before is not None
            and numbers[name] >= before
            and math.floor(numbers[name] / multiple) > math.floor(before / multiple)
        )


def _numbers(stats: Mapping[str, Any], prefix: str = "") -> "list[tuple[str, float]]":
    found: list[tuple[str, float]] = []
    for name, value in stats.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int):
            found.append((f"{prefix}{name}", value))
        elif isinstance(value, Real):
            found.append((f"{prefix}{name}", float(value)))
        elif getattr(value, "ndim", None) == 0:
            found.append((f"{prefix}{name}", value.item()))
    return found
