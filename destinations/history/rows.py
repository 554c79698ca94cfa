"""Which calls share a row: the writer joins them when it drains the journal, readers when they read it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from destinations.run_directory.layout import column_of

__all__ = ["Call"]


class Call(NamedTuple):
    """A call of `log_metrics`, or several consecutive ones that share a row.

    They share it if step and epoch are the same, no metric is in two of them, none is named `epoch`, and
    nothing is between them in the journal: no checkpoint, and no end of a segment.
    """

    names: tuple[str, ...]
    step: int | None
    epoch: int | None
    time: float
    values: Any
    """A tuple of numbers, or float64 `(metrics,)`."""

    def names_with(
        self, names: tuple[str, ...], step: int | None, epoch: int | None
    ) -> tuple[str, ...] | None:
        """Returns the names of a row that a later call shares; None if it has one of its own."""
        if self.step != step or self.epoch != epoch or self.names is names:
            return None
        return _joined(self.names, names)

    def joined(self, later: Call) -> Call | None:
        """Returns the row of both calls, with the time of the later one; None if they share none."""
        names = self.names_with(later.names, later.step, later.epoch)
        if names is None:
            return None
        # An array has numbers of numpy, which are formatted otherwise.
        values = self.values if isinstance(self.values, tuple) else self.values.tolist()
        return later._replace(names=names, values=(*values, *later.values))


# Always the same tuple: the formatter of a row is found by it.
@functools.lru_cache(maxsize=256)
def _joined(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...] | None:
    columns = [column_of(name) for name in first + second]
    is_shared = "epoch" not in columns and len(set(columns)) == len(columns)
    return first + second if is_shared else None
