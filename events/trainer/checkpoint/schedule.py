"""`AutoInterval`: saves as often as the cost of checkpoints allows.

`AutoSchedule` applies it. Rank 0 decides, by its own clock and by the cost of its checkpoints; the other
ranks learn of it with the numbers that all ranks add up after each batch.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from events.state import State

__all__ = ["AutoInterval", "AutoSchedule"]


@attrs.frozen(kw_only=True)
class AutoInterval:
    """A save interval that adapts to the cost of a checkpoint; `save_interval="auto"` is `AutoInterval()`.

    ```python
    saver = CheckpointSaver("runs/mine/checkpoints", save_interval=AutoInterval(save_overhead=0.005), keep=3)
    ```

    The next checkpoint begins once three conditions hold: the previous one is complete, and uploaded if it
    goes to a store; it stalled the training thread of rank 0 for at most `save_overhead` of the time since it
    began; and `min_seconds` have passed since then. After `max_seconds` it begins in any case.

    Args:
        save_overhead: the share of training time that checkpoints may take, between 0 and 1.
        min_seconds: the shortest time between the beginnings of two checkpoints, and before the first.
        max_seconds: the longest time, however much they cost and however slow the store is.
        clock: returns monotonic seconds.

    Raises:
        ValueError: a number is out of its range, or `max_seconds` is less than `min_seconds`.
    """

    save_overhead: float = 0.01
    min_seconds: float = 10.0
    max_seconds: float = 1800.0
    clock: Callable[[], float] = time.monotonic

    def __attrs_post_init__(self) -> None:
        if not 0 < self.save_overhead < 1:
            raise ValueError(
                f"save_overhead must be a share between 0 and 1, got {self.save_overhead!r}. "
                "Write 0.01 for one percent."
            )
        if not 0 <= self.min_seconds <= self.max_seconds:
            raise ValueError(
                "min_seconds must be at least 0 and at most max_seconds, "
                f"got {self.min_seconds!r} and {self.max_seconds!r}."
            )


class AutoSchedule:
    """Determines when the next checkpoint begins; the training thread uses it.

    Attributes:
        is_agreed: whether rank 0 has decided to save at this batch; the same on all ranks.

    Args:
        policy: how often.
    """

    def __init__(self, policy: AutoInterval) -> None:
        self.is_agreed = False
        self._policy = policy
        self._began = 0.0
        self._cost = 0.0

    def start(self, state: State) -> None:
        """Counts from now."""
        self._began, self._cost = self._policy.clock(), 0.0

    def is_due(self, is_complete: Callable[[], bool]) -> bool:
        """Returns whether this rank would begin the next checkpoint now.

        Args:
            is_complete: returns whether the previous checkpoint is complete; called last.
        """
        policy, elapsed = self._policy, self._policy.clock() - self._began
        if elapsed >= policy.max_seconds:
            return True
        is_paid = self._cost <= policy.save_overhead * elapsed
        return is_paid and elapsed >= policy.min_seconds and is_complete()

    def passed(self, state: State) -> bool:
        """Returns whether to begin the next checkpoint; true once per decision of rank 0."""
        is_agreed, self.is_agreed = self.is_agreed, False
        if is_agreed:
            self.start(state)
        return is_agreed

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Adds the time of a `with` block to the cost of the newest checkpoint."""
        started = self._policy.clock()
        try:
            yield
        finally:
            self._cost += self._policy.clock() - started
