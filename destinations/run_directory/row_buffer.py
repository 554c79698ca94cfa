"""Rows on their way from the journal to the CSV: calls of one step share a line, and what was written is counted.

Belongs to the writer thread.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from .statistics import Statistics

if TYPE_CHECKING:
    from .frames import Row
    from .metrics_csv import MetricsCsv
    from .row_blocks import RowBlock

__all__ = ["RowBuffer"]

_Names = tuple[str, ...]
_Values = tuple[float, ...]


class RowBuffer:
    """Lines that are to be written, the row that others of its step may still join, and what statistics are to count.

    Args:
        csv: the file that knows its columns.
    """

    def __init__(self, csv: "MetricsCsv") -> None:
        self._csv = csv
        self._lines: list[bytes] = []
        self.line_count = 0
        """Lines that are complete."""
        self._pending: tuple[int | None, int | None, float, _Names, _Values] | None = None
        self._steps: dict[_Names, list[int | None]] = {}
        self._values: dict[_Names, list[Any]] = {}
        self._last_epoch: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self._lines and self._pending is None

    def take(self, names: _Names, row: "Row") -> None:
        """Takes a row."""
        _, step, epoch, at, values = row
        pending = self._pending
        if pending is not None and self._joins(step, epoch, names):
            self._pending = (step, epoch, at, pending[3] + names, pending[4] + values)
        else:
            self.settle()
            self._pending = (step, epoch, at, names, values)
        self._count(names, [step], values, epoch)

    def take_block(self, names: _Names, block: "RowBlock") -> bool:
        """Takes many rows; False, and nothing taken, where the first one belongs to the line of the row before."""
        if self._joins(block.steps[0], block.epochs[0], names):
            return False
        self.settle()
        self._lines.append(self._csv.plan(names).lines(block, len(block.steps) - 1))
        self.line_count += len(block.steps) - 1
        last = (block.steps[-1], block.epochs[-1], float(block.times[-1]))
        self._pending = (*last, names, tuple(block.values[-1].tolist()))
        self._count(names, block.steps, block.values, block.epochs[-1])
        return True

    def settle(self) -> None:
        """Makes a line of the row that others of its step might have joined."""
        if self._pending is not None:
            step, epoch, at, names, values = self._pending
            self._lines.append(self._csv.plan(names).line(step, epoch, at, values).encode())
            self.line_count += 1
            self._pending = None

    def pop_lines(self) -> list[bytes]:
        """Returns the lines, and forgets them."""
        lines, self._lines, self.line_count = self._lines, [], 0
        return lines

    def count_into(self, statistics: Statistics) -> tuple[int, int | None]:
        """Has the rows counted that were taken since the last time.

        Returns:
            How many rows there were, and the step of the last one.
        """
        all_steps, all_values = self._steps, self._values
        self._steps, self._values = {}, {}
        rows, last_step = 0, None
        for names, steps in all_steps.items():
            rows += len(steps)
            last_step = steps[-1] if steps[-1] is not None else last_step
            start = 0
            for part in _parts(all_values[names]):
                statistics.add(names, steps[start : start + len(part)], part, self._last_epoch)
                start += len(part)
        return rows, last_step

    def clear(self) -> None:
        """Forgets everything."""
        self._lines, self.line_count, self._pending = [], 0, None
        self._steps, self._values = {}, {}

    def _joins(self, step: int | None, epoch: int | None, names: _Names) -> bool:
        pending = self._pending
        return (
            pending is not None
            and pending[0] == step
            and pending[1] == epoch
            and pending[3] is not names
            and set(pending[3]).isdisjoint(names)
        )

    def _count(self, names: _Names, steps: list[Any], values: Any, epoch: int | None) -> None:
        self._steps.setdefault(names, []).extend(steps)
        self._values.setdefault(names, []).append(values)
        self._last_epoch = epoch


def _parts(values: list[Any]) -> list[Any]:
    """Returns rows and blocks of rows, joined with their neighbours of the same kind."""
    parts: list[Any] = []
    for value in values:
        is_block = isinstance(value, np.ndarray)
        if parts and isinstance(parts[-1][0], np.ndarray) == is_block:
            parts[-1].append(value)
        else:
            parts.append([value])
    return [np.concatenate(part) if isinstance(part[0], np.ndarray) else part for part in parts]
