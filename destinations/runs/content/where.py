"""`Where`: a condition on values of a metric, such as `value > 10 and step >= 5000`.

The index of a part tells which of its rows may fulfill it; the others aren't read. Importing this
module imports numpy.
"""

import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.history.snapshot import metric_columns, take_snapshot
from destinations.run_directory.blocks import (
    MISSING_STEP,
    Block,
    Floats,
    block_of_rows,
    blocks_of,
    indexed_files,
)
from destinations.run_directory.layout import column_of, parse_header
from destinations.run_directory.parquet import OF_COLUMN, PartIndex
from destinations.runs.errors import FilterError, MetricNotFoundError
from destinations.runs.streams import Stream, reported, streams_of

from .series import Series, joined, merged_by_step

__all__ = ["Where", "values_where"]

_Bools = np.ndarray[Any, np.dtype[np.bool_]]
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_TEST = re.compile(rf"\s*(value|step)\s*({'|'.join(_OPERATORS)}|=)\s*(\S+)\s*")


@attrs.frozen
class Where:
    """Comparisons that must all hold.

    Attributes:
        tests: "value" or "step", an operator, a number.
    """

    tests: tuple[tuple[str, str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Where":
        """Parses a condition such as "value > 10 and step < 500" or "value == nan".

        Raises:
            FilterError: the text isn't a condition.
        """
        tests = []
        for part in re.split(r"\band\b", text):
            found = _TEST.fullmatch(part)
            try:
                number = float(found[3]) if found else np.nan
            except ValueError:
                found = None
            if not found:
                raise FilterError(
                    f"{part.strip()!r} is no condition. Compare value or step with a number: "
                    "'value > 10 and step < 500', 'value == nan'.",
                    text,
                    text.index(part),
                )
            tests.append((found[1], "==" if found[2] == "=" else found[2], number))
        return cls(tuple(tests))

    def holds(self, step: Floats, value: Floats) -> _Bools:
        """Returns a mask of the values that fulfill it; a missing step is NaN."""
        found = np.ones(len(value), np.bool_)
        for name, sign, number in self.tests:
            of = value if name == "value" else step
            if np.isnan(number):
                found &= np.isnan(of) if sign == "==" else ~np.isnan(of) & (sign == "!=")
            else:
                found &= np.asarray(_OPERATORS[sign](of, number)) & ~(np.isnan(of) & (name == "step"))
        return found

    def may_hold(self, index: PartIndex, column: str) -> _Bools:
        """Returns a mask of the index entries that may have such values."""
        stats = dict(zip(OF_COLUMN, index.of_column(column), strict=True))
        found = stats["count"] > 0
        has_others = stats["count"] > stats["finite"]
        for name, sign, number in self.tests:
            is_value = name == "value"
            low = stats["min"] if is_value else index.of_rows("min_step")
            high = stats["max"] if is_value else index.of_rows("max_step")
            may: Any = True
            if np.isnan(number):
                may = has_others if is_value and sign == "==" else True
            elif sign in {">", ">="}:
                may = _OPERATORS[sign](high, number)
            elif sign in {"<", "<="}:
                may = _OPERATORS[sign](low, number)
            elif sign == "==":
                may = (low <= number) & (number <= high)
            found = found & (may | (has_others if is_value else False))
        return np.asarray(found)


def values_where(
    run_dir: Path, name: str, where: Where, rank: int = 0, end: str | None = None
) -> Iterator[Series]:
    """Yields the values of a metric that fulfill a condition, oldest first, some at a time.

    The values of several writers are merged by step, as in `RecordedRun.series`, and yielded at once.

    Args:
        run_dir: the folder of the run.
        name: the metric's name, as logged or as in the CSV; "epoch" is the epoch of each row.
        where: the condition.
        rank: the rank that logged the rows.
        end: as for `streams_of`.

    Raises:
        MetricNotFoundError: the run has no such metric; the message suggests the closest.
    """
    streams = streams_of(run_dir, end=end)
    found: list[tuple[str, Series]] = []
    known: list[str] = []
    for stream in streams:
        with reported(stream):
            names = _names_of(stream, rank)
            known += names
            column = next((one for one in (column_of(name), name) if one in names or one == "epoch"), None)
            if column is None:
                continue
            values = _values_of(stream, rank, name, column, where)
            if len(streams) == 1:
                yield from values
                return
            found.append((stream.writer, joined(name, list(values))))
    if not found:
        raise MetricNotFoundError(name, known)
    yield merged_by_step(found)


def _names_of(stream: Stream, rank: int) -> list[str]:
    with take_snapshot(stream.folder, rank, end=stream.row_end) as snapshot:
        return metric_columns(snapshot)


def _values_of(stream: Stream, rank: int, name: str, column: str, where: Where) -> Iterator[Series]:
    with take_snapshot(stream.folder, rank, end=stream.row_end) as snapshot:
        for file, index in indexed_files(snapshot, [column]):
            if column in parse_header(file.header):
                spans = [(None, None)] if index is None else index.spans(where.may_hold(index, column))
                for start, end in spans:
                    for block in blocks_of(file, [column], start=start, end=end):
                        yield _chosen(name, block.until(stream.until), column, where)
        if rows := snapshot.journal_rows():
            yield _chosen(name, block_of_rows(rows, [column]).until(stream.until), column, where)


def _chosen(name: str, block: Block, column: str, where: Where) -> Series:
    value, present = block.columns[column]
    step = np.where(block.step == MISSING_STEP, np.nan, block.step.astype(np.float64))
    keep = present & where.holds(step, value)
    return Series(name, block.step[keep], block.time[keep], value[keep])
