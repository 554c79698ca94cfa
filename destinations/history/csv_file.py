"""`CsvSnapshot`: the valid rows of a CSV at one moment, from its beginning or from its end."""

import errno
import itertools
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Self

import attrs

from destinations.run_directory.layout import (
    MARKED_TAIL_BYTES,
    MAX_LINE_BYTES,
    OWN_COLUMNS,
    csv_mark,
    header_end,
    header_line,
    parse_header,
    read_header,
)
from uploads.disk import end_of_last_line, open_regular, read_at, read_regular

from .row_chain import Limit
from .rows import MetricRow, has_any_metric, keeps, parse_rows
from .sums import CheckedBlocks

__all__ = ["CsvSnapshot", "last_rows_of_file", "open_existing", "read_whole"]

_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 16 << 10
_PACKED_BYTES = 8 << 20
_OWN_HEADERS = tuple(header_line(OWN_COLUMNS).rstrip() + end for end in (b",", b"\n", b"\r"))


@attrs.define(eq=False, repr=False)
class CsvSnapshot:
    """The valid rows of a CSV, up to a complete line.

    The place of a row is its offset in a CSV, or its number in a `ParquetSnapshot`.

    Args:
        fd: the open file, owned by this object; -1 if there is none.
        header: the first line, with its line end.
        end: the end of the valid rows.
        held: the content of the file up to `end`, if it was read already.
        begin: the offset of the first row. Default: after the header.
        limit: which rows don't count, until the writer rewrites the file; see `Keep`.
        checks: the checksums of its rows; rows of damaged blocks are blank.
    """

    _fd: int
    header: bytes
    end: int
    _held: bytes | None = None
    begin: int | None = None
    limit: Limit | None = None
    checks: CheckedBlocks | None = None

    @classmethod
    def of(cls, fd: int) -> Self:
        """Returns the complete lines of an open file; the result owns the file.

        Raises:
            OSError: the file can't be read; it is closed.
        """
        try:
            size = os.fstat(fd).st_size
            return cls(fd, read_header(fd, size), end_of_last_line(fd, size))
        except BaseException:
            os.close(fd)
            raise

    @property
    def size(self) -> int:
        """The size of the rows in bytes."""
        return max(0, self.end - self.first)

    @property
    def is_own(self) -> bool:
        """Whether our writer made the file: it only appends rows or replaces the whole file."""
        return self.header.startswith(_OWN_HEADERS)

    @property
    def first(self) -> int:
        """The place of the first row."""
        return len(self.header) if self.begin is None else self.begin

    def offset_of(self, row: int, start: int | None = None) -> int:
        """Returns the offset of a row, counted from 0 at an offset; the end if there are fewer."""
        at = self.first if start is None else start
        for chunk in self.chunks(at):
            if (count := chunk.count(b"\n")) >= row:
                return at + sum(map(len, chunk.splitlines(keepends=True)[:row]))
            row, at = row - count, at + len(chunk)
        return at

    def count(self, start: int) -> int:
        """Returns the number of rows from an offset on; reads no block that has a checksum."""
        rows, at = 0, start
        for block in self.checks.blocks if self.checks is not None else ():
            if at <= block.start and block.end <= self.end:
                rows += self._count(at, block.start) + block.rows
                at = block.end
        return rows + self._count(at, self.end)

    def _count(self, start: int, end: int) -> int:
        return sum(chunk.count(b"\n") for chunk in self.chunks(start, end=end))

    def fileno(self) -> int:
        """Returns the descriptor; -1 if there is no CSV."""
        return self._fd

    def chunks(
        self, start: int | None = None, chunk_bytes: int = _CHUNK_BYTES, *, end: int | None = None
    ) -> Iterator[bytes]:
        """Yields the rows in chunks of complete lines.

        Args:
            start: the place of a row. Default: the first row.
            chunk_bytes: the size of a read; a longer line is one chunk.
            end: the place after the last row to yield. Default: the end of the rows.
        """
        at = self.first if start is None else start
        end = self.end if end is None else end
        length = chunk_bytes
        while at < end:
            until = min(at + length, end)
            if self.checks is not None:
                # A block in two pieces would be read again to compare it.
                until = self.checks.last_end(at, until)
            piece = self._piece(at, until - at)
            if not piece:
                return
            whole = len(piece) if at + len(piece) >= end else piece.rfind(b"\n") + 1
            if whole == 0:
                if length >= MAX_LINE_BYTES:
                    raise OSError(errno.EFBIG, f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
                length *= 2
                continue
            yield piece[:whole]
            at += whole
            length = chunk_bytes

    def chunks_from_end(self, chunk_bytes: int = _TAIL_BYTES) -> Iterator[bytes]:
        """Yields the rows in growing chunks of complete lines, last chunk first; see `chunks`."""
        first, end, length = self.first, self.end, chunk_bytes
        while end > first:
            start = max(first, end - length)
            piece = self._piece(start, end - start)
            if len(piece) < end - start:
                return  # The file was truncated meanwhile.
            # Unless it is the first, the chunk starts within a line.
            skipped = 0 if start == first else piece.find(b"\n") + 1
            if start > first and skipped in {0, len(piece)}:
                if length >= MAX_LINE_BYTES:
                    raise OSError(errno.EFBIG, f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
                length *= 2
                continue
            yield piece[skipped:]
            end, chunk_bytes = start + skipped, min(chunk_bytes * 2, _CHUNK_BYTES)
            length = chunk_bytes

    def _piece(self, at: int, length: int) -> bytes:
        piece = self.raw(at, length)
        return piece if self.checks is None else self.checks.checked(piece, at, self.raw)

    def raw(self, at: int, length: int) -> bytes:
        """Returns unchecked bytes of the file; fewer at its end."""
        if self._held is not None:
            return self._held[at : at + length]
        return read_at(self._fd, length, at) if length > 0 else b""

    def rows(self, start: int | None = None) -> "Iterator[MetricRow]":
        """Yields the rows one chunk at a time; see `chunks` and `parse_rows`."""
        columns = parse_header(self.header)
        for chunk in self.chunks(start):
            rows = parse_rows(columns, [chunk])
            yield from (row for row in rows if keeps(self.limit, row)) if self.limit else rows

    def before(self, end: int, length: int) -> bytes:
        """Returns up to `length` bytes before an offset, without the first line."""
        start = max(len(self.header), end - length)
        return self.raw(start, end - start)

    def mark(self, size: int, closed: int = 0) -> dict[str, int] | None:
        """Returns the `csv_mark` of the first `size` bytes and `closed` parts; None if there are fewer."""
        if not len(self.header) <= size <= self.end:
            return None
        start = max(0, size - MARKED_TAIL_BYTES)
        return csv_mark(self.header, self.raw(start, size - start), size, closed)

    def to_parquet(self) -> bytes:
        """Returns the rows as the bytes of a closed part."""
        from destinations.run_directory.parquet import pack  # imports numpy, and pyarrow

        def cells() -> Iterator[dict[str, float]]:
            for row in self.rows():
                own = zip(OWN_COLUMNS, (row.step, row.epoch, row.time), strict=True)
                cells = itertools.chain(own, row.metrics.items())
                yield {name: cell for name, cell in cells if cell is not None}

        return pack(self.header, self.chunks(chunk_bytes=_PACKED_BYTES), cells, csv_bytes=self.end)

    def close(self) -> None:
        """Closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def open_existing(path: Path) -> int:
    """Opens a regular file to read it; returns -1 if there is none."""
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return -1


def read_whole(path: Path, max_bytes: int = 1 << 30) -> CsvSnapshot:
    """Reads a CSV that never changes.

    Raises:
        OSError: it can't be read, or is too large.
    """
    content = read_regular(path, max_bytes)
    return CsvSnapshot(-1, content[: header_end(content)], len(content), content)


def last_rows_of_file(csv_part: CsvSnapshot, count: int, wanted: Collection[str]) -> list[MetricRow]:
    """Returns the last rows of a file that have one of the wanted columns, oldest first."""
    if count <= 0:
        return []
    columns = parse_header(csv_part.header)
    pieces: list[list[MetricRow]] = []
    if csv_part.is_own:
        for chunk in csv_part.chunks_from_end():
            if b'"' in chunk:
                break  # A quoted cell may contain a line end.
            pieces.append(list(_wanted(parse_rows(list(columns), [chunk]), wanted, csv_part.limit)))
            if sum(map(len, pieces)) >= count:
                return [row for piece in reversed(pieces) for row in piece][-count:]
        else:
            return [row for piece in reversed(pieces) for row in piece]
    return list(deque(_wanted(csv_part.rows(), wanted), maxlen=count))


def _wanted(
    rows: Iterable[MetricRow], wanted: Collection[str], limit: Limit | None = None
) -> Iterator[MetricRow]:
    for row in rows:
        if has_any_metric(row, wanted) and keeps(limit, row):
            yield row
