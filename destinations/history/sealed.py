"""Closed parts: Parquet files that never change, read like the CSV that they were made from."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from destinations.run_directory.layout import OWN_COLUMNS, header_line, parse_header, part_path
from uploads.disk import closing, crc32_of, open_regular

from .csv_file import CsvSnapshot, open_existing
from .row_chain import ALL, Keep, SealedPart
from .rows import MetricRow, row_of_cells

if TYPE_CHECKING:
    from destinations.run_directory.parquet import ParquetRows

__all__ = ["HeldPart", "ParquetSnapshot", "Part"]

_TAIL_ROWS = 1000
_log = logging.getLogger("destinations")


class ParquetSnapshot(CsvSnapshot):
    """The rows of a part, read like the CSV that it was made from; it has the CSV's header and size.

    Args:
        rows: the file, owned by this object.
        is_damaged: whether the part has no rows because its file is damaged.
    """

    def __init__(self, rows: "ParquetRows", *, is_damaged: bool = False) -> None:
        super().__init__(-1, rows.header, rows.csv_bytes)
        self.packed = rows
        self.is_damaged = is_damaged

    @property
    def first(self) -> int:
        return 0

    def chunks(
        self, start: int | None = None, chunk_bytes: int = 0, *, end: int | None = None
    ) -> Iterator[bytes]:
        del chunk_bytes
        return self.packed.lines(start or 0, end)

    def chunks_from_end(self, chunk_bytes: int = 0) -> Iterator[bytes]:
        del chunk_bytes
        for end in range(self.packed.count, 0, -_TAIL_ROWS):
            yield b"".join(self.packed.lines(max(0, end - _TAIL_ROWS), end))

    def rows(self, start: int | None = None, end: int | None = None) -> "Iterator[MetricRow]":
        columns = parse_header(self.header)
        for cells in self.packed.cells(start or 0, end):
            yield row_of_cells(
                {name: cell for name, cell in zip(columns, cells, strict=True) if cell is not None}
            )

    def close(self) -> None:
        self.packed.close()


@attrs.frozen
class Part:
    """A closed part of a rank's rows: Parquet, or the CSV of an earlier version of this package.

    Its rows never change. If a part exists as both CSV and Parquet, the CSV is used.

    Attributes:
        folder: the folder of the rank's parts.
        number: the number of the part, from 1 on.
        keep: which of its rows count.
        sealed: its line in the history, with size and checksum; None in format 2.
    """

    folder: Path
    number: int
    keep: Keep = ALL
    sealed: SealedPart | None = None

    @classmethod
    def find(
        cls, folder: Path, number: int, keep: Keep = ALL, sealed: SealedPart | None = None
    ) -> Self | None:
        """Returns the part if it exists, else None."""
        found = cls(folder, number, keep, sealed)
        return found if os.path.lexists(found.path) else None

    def open(self) -> "ParquetSnapshot":
        """Opens the part, which the caller closes. If its footer is damaged, it has no rows, see `damage`.

        Raises:
            OSError: the file is missing or can't be read.
        """
        from destinations.run_directory.parquet import (
            DamagedParquetError,
            ParquetRows,
        )  # imports numpy, and pyarrow

        path = self.path
        if (fd := open_existing(path)) < 0:
            # `runs pack` may have converted it meanwhile.
            path = self.path
            fd = open_regular(path)
        try:
            if path.suffix == ".csv":
                found: CsvSnapshot = CsvSnapshot.of(fd)
            else:
                found = ParquetSnapshot(ParquetRows(fd, str(path)))
        except DamagedParquetError:
            header = header_line(OWN_COLUMNS)
            nothing = CsvSnapshot(-1, header, len(header))
            return ParquetSnapshot(ParquetRows(nothing.to_parquet()), is_damaged=True)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        if not isinstance(found, ParquetSnapshot) or found.packed.version == 1:
            # Parts of earlier versions are converted in memory.
            with contextlib.closing(found):
                found = ParquetSnapshot(ParquetRows(found.to_parquet(), str(path)))
        if self.keep != ALL:
            found.packed.keep(self.keep)
        return found

    @contextlib.contextmanager
    def opened(self) -> "Iterator[ParquetSnapshot]":
        """Opens the part for the duration of a `with` block, and logs its damage."""
        with contextlib.closing(self.open()) as file:
            if (damage := self.damage(file)) is not None:
                self.warn(damage)
            yield file

    def about(self) -> tuple[bytes, int]:
        """Returns the header and the number of rows of the part; reads each part once in this process.

        Reading the footers of a month, 440 parts, takes 0.2 s.

        Raises:
            OSError: see `open`.
        """
        state = self.path.lstat()
        version = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
        return _about(attrs.evolve(self, keep=ALL), version)

    @property
    def size(self) -> int:
        """The size of its file."""
        return self.path.stat().st_size

    @property
    def path(self) -> Path:
        """The path of the file: a CSV until `runs pack` makes it Parquet."""
        csv = part_path(self.folder, self.number, ".csv")
        return csv if os.path.lexists(csv) else part_path(self.folder, self.number)

    @property
    def absence(self) -> str:
        """The message for a missing part."""
        return f"{_shown(self.path)} is missing: its rows are lost"

    def warn(self, damage: str) -> None:
        """Logs damage of the part."""
        _log.warning("run folder %s: %s.", self.path.parents[2], damage)

    def damage(self, file: "ParquetSnapshot") -> str | None:
        """Returns the damage found so far in the open part; None if there is none."""
        if file.is_damaged:
            return f"{_shown(self.path)} is damaged: its rows cannot be read"
        lost = file.packed.lost
        return (
            f"{_shown(self.path)} is damaged: {lost:,} of {file.packed.count:,} rows cannot be read"
            if lost
            else None
        )

    def check(self, *, is_whole: bool = True) -> str | None:
        """Returns what can't be read of the part, see `damage`.

        If its recorded checksum matches, the part isn't parsed.

        Args:
            is_whole: whether to read the whole file; otherwise only its size is compared.

        Raises:
            OSError: see `open`.
        """
        if self.sealed is not None and self.sealed.crc32 and self.path.suffix != ".csv":
            with closing(open_regular(self.path)) as fd:
                size = os.fstat(fd).st_size
                if size == self.sealed.size and (not is_whole or crc32_of(fd) == self.sealed.crc32):
                    return None
        with contextlib.closing(self.open()) as file:
            if is_whole:
                file.packed.verify()
            return self.damage(file)


@functools.lru_cache(maxsize=4096)
def _about(part: Part, _: tuple[int, ...]) -> tuple[bytes, int]:
    with contextlib.closing(part.open()) as file:
        return _shared(file.header), file.packed.count


@functools.lru_cache(maxsize=64)
def _shared(header: bytes) -> bytes:
    """Shares one object between the headers of most parts, which may have thousands of columns."""
    return header


def _shown(path: Path) -> str:
    return "/".join(path.parts[-3:])


@attrs.frozen
class HeldPart(Part):
    """A parent's rows outside closed parts, presented as a part."""

    content: bytes = attrs.field(default=b"", eq=False, repr=False)

    def about(self) -> tuple[bytes, int]:
        with contextlib.closing(self.open()) as file:
            return file.header, file.packed.count

    def open(self) -> ParquetSnapshot:
        from destinations.run_directory.parquet import ParquetRows  # imports numpy, and pyarrow

        found = ParquetSnapshot(ParquetRows(self.content, str(self.path)))
        if self.keep != ALL:
            found.packed.keep(self.keep)
        return found
