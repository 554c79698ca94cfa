"""`Budget`: limits the cost of one answer, for code that reads on behalf of a client.

The page makes one for each request, where the request comes in. What reads for long, a filter, a CSV or an
index of records, asks the budget of its context with `spend` as it goes on. Without a budget nothing is
limited.
"""

import contextvars
import time
from collections.abc import Callable
from typing import Self

import attrs

from .errors import BudgetError

__all__ = ["Budget", "Limits", "points_each", "seconds_left", "spend"]


@attrs.frozen
class Limits:
    """What one answer may cost.

    Attributes:
        seconds: the longest time that reading may take.
        nbytes: the bytes of memory that the reading takes.
        points: the points in all curves of an answer together.
    """

    seconds: float = 20.0
    nbytes: int = 1 << 30
    points: int = 1_000_000


class Budget:
    """The budget of one answer; a context manager, within which it is the budget of the context.

    ```python
    with Budget(Limits(seconds=5)), open_runs("runs") as runs:
        runs.query(where="name ~ '(a+)+$'")
    ```

    **Threading.** `end` may be called from any thread. Other threads that read for the same answer need a
    copy of the context.

    Args:
        limits: the limits of its cost.
        clock: returns monotonic seconds.
    """

    def __init__(self, limits: Limits | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or Limits()
        self._clock = clock
        self._deadline = float("inf")
        self._nbytes = 0
        self._is_ended = False

    def end(self) -> None:
        """Cancels the answer, because nobody waits for it any more; its reads stop."""
        self._is_ended = True

    @property
    def seconds_left(self) -> float:
        """How long reading may still take."""
        return self._deadline - self._clock()

    def spend(self, nbytes: int = 0) -> None:
        """Takes memory from the budget.

        Raises:
            BudgetError: it is used up, the time is over, or nobody waits any more.
        """
        self._nbytes += nbytes
        if self._is_ended:
            raise BudgetError("nobody waits for this answer any more.")
        if self._nbytes > self.limits.nbytes:
            raise BudgetError(
                f"this answer needs more than {self.limits.nbytes >> 20} MiB of memory. Ask for less of it."
            )
        if self.seconds_left < 0:
            raise BudgetError(f"this answer takes longer than {self.limits.seconds:g} s. Ask for less of it.")

    def __enter__(self) -> Self:
        self._deadline = self._clock() + self.limits.seconds
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        _current.reset(self._token)


_current: contextvars.ContextVar[Budget | None] = contextvars.ContextVar("budget", default=None)


def spend(nbytes: int = 0) -> None:
    """Takes memory from the budget of the context, if there is one; see `Budget.spend`.

    Raises:
        BudgetError: it is used up, the time is over, or nobody waits any more.
    """
    budget = _current.get()
    if budget is not None:
        budget.spend(nbytes)


def seconds_left() -> float:
    """Returns how long reading may still take; infinite without a budget."""
    budget = _current.get()
    return float("inf") if budget is None else budget.seconds_left


def points_each(curves: int, wanted: int) -> int:
    """Returns how many points each curve of an answer may have."""
    budget = _current.get()
    return wanted if budget is None else max(1, min(wanted, budget.limits.points // max(1, curves)))
