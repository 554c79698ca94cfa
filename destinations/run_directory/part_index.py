"""The index of a closed part: what each thousand of its rows have, from the metadata of its Parquet."""

from collections.abc import Collection, Iterator
from typing import Any

import attrs
import numpy as np

from destinations.history.aggregate import Aggregate
from destinations.history.csv_file import CsvSnapshot
from destinations.history.sealed import ParquetSnapshot
from destinations.history.snapshot import MetricsSnapshot

from .blocks import Floats
from .parquet import ENTRY_ROWS, OF_COLUMN, OF_ROWS

__all__ = ["PartIndex", "indexed_files"]


@attrs.frozen(eq=False)
class PartIndex:
    """What is in a part, entry by entry; `parquet.ENTRY_ROWS` rows each.

    Attributes:
        columns: of the part, see `parquet.indexed_columns`.
        array: float64 `(len(OF_ROWS) + len(OF_COLUMN) * len(columns), entries)`.
    """

    columns: list[str]
    array: Floats

    def __len__(self) -> int:
        return int(self.array.shape[1])

    def of_rows(self, name: str) -> Floats:
        """Returns a field of `OF_ROWS`, float64 `(entries,)`; NaN where no row has a step, or a time."""
        found: Floats = self.array[OF_ROWS.index(name)]
        return found

    def of_column(self, column: str) -> Floats:
        """Returns the fields of `OF_COLUMN`, float64 `(8, entries)`; NaN where there is no such value."""
        start = len(OF_ROWS) + len(OF_COLUMN) * self.columns.index(column)
        found: Floats = self.array[start : start + len(OF_COLUMN)]
        return found

    def spans(self, may: "np.ndarray[Any, np.dtype[np.bool_]]") -> Iterator[tuple[int, int]]:
        """Yields from which row to which entries are that may have something, those side by side together."""
        may = np.concatenate([[False], may, [False]])
        begins, ends = np.flatnonzero(may[1:] & ~may[:-1]), np.flatnonzero(~may[1:] & may[:-1])
        for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
            yield first * ENTRY_ROWS, last * ENTRY_ROWS

    @classmethod
    def read(cls, part: ParquetSnapshot, wanted: Collection[str] | None = None) -> "PartIndex":
        """Returns the index of a part.

        Args:
            part: the part.
            wanted: columns; others are left out. None for all.

        Raises:
            OSError: it has none that can be read.
        """
        return cls(*part.packed.index(wanted))

    def add_to(self, statistics: Aggregate) -> None:
        """Adds the rows to statistics, which do not learn the steps of last values."""
        fields = self.array[len(OF_ROWS) :].reshape(len(self.columns), len(OF_COLUMN), len(self))
        statistics.add_fields(self.columns, fields.transpose(1, 2, 0), self.of_rows("last_step"))


def indexed_files(
    snapshot: MetricsSnapshot, wanted: Collection[str] | None = None
) -> Iterator[tuple[CsvSnapshot, PartIndex | None]]:
    """Yields the files of a snapshot, each with its index; None for the CSV.

    Args:
        snapshot: the metrics.
        wanted: as of `PartIndex.read`.
    """
    for file in snapshot.files():
        yield file, PartIndex.read(file, wanted) if isinstance(file, ParquetSnapshot) else None
