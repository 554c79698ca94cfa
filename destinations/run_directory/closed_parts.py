"""`ClosedParts`: closed rows as Parquet, and the history that says which of them belong to the run.

A closed part never changes. Runs in the writer thread.
"""

import contextlib
import errno
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from destinations.history.csv_file import CsvSnapshot
from destinations.history.row_chain import Keep, RowChain, SealedPart, history_path
from destinations.history.sealed import Part
from uploads.disk import DISK, Disk, replacement

from .layout import CsvState, parse_header, part_numbers, part_path, parts_path

__all__ = ["ClosedParts", "rearranged"]


class ClosedParts:
    """The closed parts of one rank.

    Args:
        csv: the path of the CSV, which the parts are named after.
        disk: the disk operations.
        first: the lowest number that a new part may have.

    Attributes:
        folder: the folder of the parts.
        chain: which sessions wrote the rows of the CSV and of the parts.
    """

    def __init__(self, csv: Path, disk: Disk = DISK, *, first: int = 1) -> None:
        self.folder = parts_path(csv)
        self.chain = RowChain()
        self._csv = csv
        self._disk = disk
        self._first = first

    def open(self, known: CsvState | None) -> None:
        """Reads the history, and removes parts that no session has closed.

        Args:
            known: which parts and how much of the history count; None without a position.
        """
        self.chain = RowChain.read(self._csv, None if known is None else known.history)
        there = part_numbers(self.folder)
        if not self.chain.size:
            self._begin_history([number for number in there if known is None or number <= known.parts])
        last = max((part.number for parts in self.chain.parts.values() for part in parts), default=0)
        # Later parts were being closed when their writer was killed; their rows are in the CSV or the
        # journal. This needs a position, because a truncated history would look the same.
        for number in [] if known is None else there:
            if number > last and (part := Part.find(self.folder, number)) is not None:
                self._disk.unlink(part.path)

    @property
    def last(self) -> int:
        """The number of the last closed part before the CSV; 0 for none."""
        return max((part.number for part, _ in self.chain.preceding()), default=0)

    @property
    def size(self) -> int:
        """The size of all existing closed parts, in bytes."""
        return sum(part.size for part in self.present())

    def present(self) -> list[Part]:
        """Returns the existing closed parts before the CSV."""
        found = (Part.find(self.folder, part.number, keep, part) for part, keep in self.chain.preceding())
        return [part for part in found if part is not None]

    def close(self, rows: CsvSnapshot, count: int) -> SealedPart:
        """Writes rows of the newest session as a part, which counts once the history lists it.

        Args:
            rows: the rows.
            count: how many there are.

        Raises:
            OSError: the disk is full.
        """
        for folder in (self.folder.parent, self.folder):
            self._disk.make_folder(folder)
            self._disk.sync_folder(folder.parent)
        content = rows.to_parquet()
        number = max(*part_numbers(self.folder), self._first - 1, 0) + 1
        with replacement(part_path(self.folder, number), durable=True, disk=self._disk) as fd:
            self._disk.write(fd, content, 0)
        return SealedPart(number, self.chain.newest, count, len(content), zlib.crc32(content), rows.size)

    # Rows of earlier sessions, for the CSV.

    def lines_of(self, kept: Iterable[tuple[SealedPart, Keep]], columns: Sequence[str]) -> Iterator[bytes]:
        """Yields rows as chunks of lines with these columns."""
        for sealed, keep in kept:
            part = Part.find(self.folder, sealed.number, keep)
            if part is None:
                raise FileNotFoundError(errno.ENOENT, "a closed part is missing", str(self.folder))
            with contextlib.closing(part.open()) as file:
                own = parse_header(file.header)
                for chunk in file.chunks():
                    yield rearranged(chunk, own, columns)

    def look_at(self, kept: Iterable[tuple[SealedPart, Keep]]) -> tuple[dict[str, None], int]:
        """Returns the columns and the number of the rows in closed parts."""
        found: dict[str, None] = {}
        rows = 0
        for sealed, keep in kept:
            if (part := Part.find(self.folder, sealed.number, keep)) is not None:
                with contextlib.closing(part.open()) as file:
                    found |= dict.fromkeys(parse_header(file.header))
                    rows += file.packed.count
        return found, rows

    # The history.

    def _begin_history(self, numbers: list[int]) -> None:
        """Writes a history for the parts of a folder of format 2, which has none."""
        self.chain.add_format2(self._csv, numbers)
        lines = []
        for part in self.present():
            with contextlib.closing(part.open()) as file:
                sealed = SealedPart(part.number, "", file.packed.count, part.size, 0, file.end)
                lines.append(self.chain.part(sealed))
        self.chain = RowChain()
        for line in lines:
            self.chain.add(line)
        if lines:
            self._save_history()

    def write_history(self, *lines: bytes) -> None:
        """Appends lines to the file of the history; they count once a position covers them."""
        path = history_path(self._csv)
        fd = self._disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size > self.chain.size:
                self._disk.truncate(fd, self.chain.size)
            self._disk.write(fd, b"".join(lines), self.chain.size)
            self._disk.sync(fd)
        finally:
            os.close(fd)
        if not self.chain.size:
            self._disk.sync_folder(path.parent)

    def restore_history(self) -> None:
        """Writes the file of the history again if another program has deleted it."""
        if self.chain.size and not os.path.lexists(history_path(self._csv)):
            self._save_history()

    def _save_history(self) -> None:
        with replacement(history_path(self._csv), durable=True, disk=self._disk) as fd:
            self._disk.write(fd, bytes(self.chain.content), 0)


def rearranged(chunk: bytes, own: Sequence[str], wanted: Sequence[str]) -> bytes:
    """Returns lines of numbers, rearranged to other columns."""
    if list(own) == list(wanted):
        return chunk
    places = {name: at for at, name in enumerate(own)}
    order = [places.get(name, -1) for name in wanted]
    lines = []
    for line in chunk.split(b"\n")[:-1]:
        cells = [*line.split(b","), b""]
        lines.append(b",".join([cells[at] for at in order]))
    return b"\n".join([*lines, b""])
