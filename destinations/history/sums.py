"""`metrics.sums.jsonl`: checksums of `metrics.csv`, block by block, so that damage costs only one block.

The writer adds a line for each 64 KiB of whole rows once they are on disk. `position.json` has the checksum
of the rows after the last block; when the run ends, they become a block too. A reader compares the blocks
that it reads. The rows of a damaged block become blank lines, so all other rows keep their numbers and
places.

A file without checksums is read unchecked. So is a file whose size differs from what was written: another
program changed it, which readers report as a problem.
"""

import bisect
import functools
import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import attrs

from uploads.disk import read_regular

__all__ = [
    "Block",
    "BlockSums",
    "CheckedBlocks",
    "Section",
    "Sums",
    "is_of_sums",
    "parse_line",
    "read_sums",
    "summed_line",
    "sums_path",
]

BLOCK_BYTES = 64 << 10
_MAX_BYTES = 64 << 20
_SUM = b', "sum": '
_log = logging.getLogger("destinations")

Read = Callable[[int, int], bytes]
"""Returns a number of bytes of the file from an offset on; fewer at its end."""


def sums_path(csv: Path) -> Path:
    """Returns the path of the checksums of a CSV: `metrics.sums.jsonl` for `metrics.csv`."""
    return csv.with_suffix(".sums.jsonl")


def is_of_sums(path: str) -> bool:
    """Returns whether a path is a file with the checksums of a CSV."""
    return path.endswith(".sums.jsonl")


# Lines with a checksum.


def summed_line(text: str) -> bytes:
    """Returns a JSON object as a line whose last field, `sum`, is the CRC-32 of the bytes before it."""
    data = text.encode().removesuffix(b"}")
    return b"%b%b%d}\n" % (data, _SUM, zlib.crc32(data))


def parse_line(line: bytes) -> Any:
    """Returns the value of a line without its `sum`; a line without a sum isn't checked.

    Raises:
        ValueError: the line isn't JSON, or its sum differs.
    """
    data, mark, rest = line.rpartition(_SUM)
    digits = rest.strip().removesuffix(b"}")
    if mark and digits.isdigit():
        if int(digits) != zlib.crc32(data):
            raise ValueError("its checksum is another one")
        line = data + b"}"
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# Writing.


@attrs.frozen
class Block:
    """A range of whole rows of a CSV, and their CRC-32."""

    start: int
    end: int
    rows: int
    crc32: int


@attrs.define
class BlockSums:
    """The checksums of a CSV while it is written.

    Attributes:
        header: the CRC-32 of its first line.
        end: the offset up to which it is summed.
        blocks: the complete blocks.
    """

    header: int
    end: int
    blocks: list[Block] = attrs.field(factory=list)
    _start: int = attrs.field(init=False, default=attrs.Factory(lambda self: self.end, takes_self=True))
    _rows: int = attrs.field(init=False, default=0)
    _crc32: int = attrs.field(init=False, default=0)

    @classmethod
    def begin(cls, header: bytes) -> Self:
        """Returns the sums of a file with only a header."""
        return cls(zlib.crc32(header), len(header))

    @property
    def tail(self) -> Block:
        """The rows after the last block."""
        return Block(self._start, self.end, self._rows, self._crc32)

    def add(self, data: bytes) -> int:
        """Adds bytes at the end, and returns the number of rows that end in them."""
        at = rows = 0
        while at < len(data):
            room = max(1, BLOCK_BYTES - (self.end - self._start))
            until = data.find(b"\n", at + room - 1) + 1 or len(data)
            piece = data[at:until]
            count = piece.count(b"\n")
            self._crc32 = zlib.crc32(piece, self._crc32)
            self.end, at = self.end + len(piece), until
            self._rows, rows = self._rows + count, rows + count
            if self.end - self._start >= BLOCK_BYTES and piece.endswith(b"\n"):
                self.close_block()
        return rows

    def close_block(self) -> None:
        """Makes a block of the rows after the last one."""
        if self.end > self._start:
            self.blocks.append(self.tail)
        self._start, self._rows, self._crc32 = self.end, 0, 0

    def rewind(self, size: int, read: Read) -> None:
        """Goes back to a smaller size of the file."""
        while self.blocks and self.blocks[-1].end > size:
            self._start = self.blocks.pop().start
        self.end, self._rows, self._crc32 = self._start, 0, 0
        self.add(read(self._start, size - self._start))

    def content(self) -> bytes:
        """Returns the lines of the file and of all blocks."""
        return summed_line(json.dumps({"header_crc32": self.header})) + self.lines(0)

    def lines(self, first: int) -> bytes:
        """Returns a line for each block from this one on."""
        return b"".join(summed_line(json.dumps(attrs.asdict(block))) for block in self.blocks[first:])


# Reading.


@attrs.frozen
class Section:
    """The checksums of one version of a CSV.

    Attributes:
        header: the CRC-32 of its first line.
        blocks: the blocks in order; rows between them have no checksum.
    """

    header: int
    blocks: tuple[Block, ...] = ()


@attrs.frozen
class Sums:
    """The content of a file of checksums: for one version of a CSV, or two while it is replaced.

    Attributes:
        sections: one for each version; none without a file.
        damaged_lines: how many lines are damaged; their blocks aren't compared.
    """

    sections: tuple[Section, ...] = ()
    damaged_lines: int = 0


def read_sums(csv: Path) -> Sums:
    """Returns the checksums of a CSV; none, with a warning, if their file can't be read."""
    try:
        return _parsed(read_regular(sums_path(csv), _MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return Sums()
    except OSError as error:
        _log.warning("the checksums of %s cannot be read (%s): damage is not found", csv, error)
        return Sums()


# A follower reads the same checksums again and again.
@functools.lru_cache(maxsize=8)
def _parsed(data: bytes) -> Sums:
    sections: list[tuple[int, list[Block]]] = []
    damaged = 0
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            match parse_line(line):
                case {"header_crc32": int(header)}:
                    sections.append((header, []))
                case {"start": int(start), "end": int(end), "rows": int(rows), "crc32": int(crc32)}:
                    blocks = sections[-1][1]
                    if (blocks[-1].end if blocks else 0) <= start < start + rows <= end:
                        blocks.append(Block(start, end, rows, crc32))
        except (ValueError, IndexError):
            damaged += 1
    return Sums(tuple(Section(header, tuple(blocks)) for header, blocks in sections), damaged)


class CheckedBlocks:
    """Compares an open CSV with its checksums as it is read.

    Args:
        csv: the path of the CSV, for messages.
        sums: its checksums, read before `size` was determined.
        header: the first line of the CSV.
        size: its size in bytes.
        end: where its rows end.
        read: reads from it.
        tail: the rows after the last block, from `position.json`; None without a position.

    Attributes:
        blocks: the blocks to compare.
        damaged: the blocks found damaged so far, by their start.
        problem: a problem of the whole file; None if none is known.
        lost: how many rows are missing at its end.
    """

    def __init__(
        self,
        csv: Path,
        sums: Sums,
        header: bytes,
        size: int,
        end: int,
        read: Read,
        tail: Block | None = None,
    ) -> None:
        self._csv = csv
        self._commas = header.count(b",")
        self.blocks: list[Block] = []
        self.damaged: dict[int, Block] = {}
        self.problem: str | None = None
        self.lost = 0
        self._sound: set[int] = set()
        fitting = [one.blocks for one in sums.sections if one.header == zlib.crc32(header)]
        if not fitting:
            if sums.sections and tail is None:
                self.problem = f"{csv.name} has another header than its checksums are of"
            return
        # Of two sections, the one whose blocks match.
        found = (
            [*max(fitting, key=lambda blocks: sum(_is_sound(one, read) for one in blocks))]
            if fitting[1:]
            else [*fitting[0]]
        )
        if tail is not None and tail.rows and tail.start >= (found[-1].end if found else 0):
            found.append(tail)
        if not found:
            return
        last = found[-1]
        if size < last.end:
            rows, at, there = sum(block.rows for block in found), found[0].start, 0
            while at < size and (piece := read(at, BLOCK_BYTES)):
                at, there = at + len(piece), there + piece.count(b"\n")
            self.lost = max(0, rows - there)
            self.problem = f"{csv.name} is cut: {self.lost:,} of {rows:,} rows are lost"
        elif tail is None and size > last.end and not _is_sound(last, read):
            self.problem = f"{csv.name} was changed by another program: its checksums are of another file"
        else:
            self.blocks = [block for block in found if block.end <= end]

    def last_end(self, start: int, end: int) -> int:
        """Returns where the last block that ends between two places ends; the second place if none does."""
        place = bisect.bisect_right(self.blocks, end, key=lambda block: block.end) - 1
        return self.blocks[place].end if place >= 0 and self.blocks[place].end > start else end

    def damage(self) -> str | None:
        """Returns the damage found so far; None if there is none."""
        if not self.damaged:
            return self.problem
        lost, rows = (sum(one.rows for one in blocks) for blocks in (self.damaged.values(), self.blocks))
        first = self.damaged[min(self.damaged)]
        return (
            f"{self._csv.name} is damaged: {lost:,} of {rows:,} rows cannot be read (the first are in bytes "
            f"{first.start:,} to {first.end:,})"
        )

    def verify(self, read: Read) -> None:
        """Compares all blocks."""
        for block in self.blocks:
            self._check(block, read)

    def checked(self, piece: bytes, at: int, read: Read) -> bytes:
        """Returns bytes of the file, with blank lines where a block is damaged.

        Args:
            piece: the bytes.
            at: where they begin.
            read: reads the rest of its first and last block.
        """
        end = at + len(piece)
        first = bisect.bisect_right(self.blocks, at, key=lambda block: block.end)
        last = bisect.bisect_left(self.blocks, end, key=lambda block: block.start)
        for block in self.blocks[first:last]:
            if not self._check(block, read, piece, at):
                start, until = max(at, block.start), min(end, block.end)
                blank = self._blank(block)[start - block.start : until - block.start]
                piece = piece[: start - at] + blank + piece[until - at :]
        return piece

    def _check(self, block: Block, read: Read, piece: bytes = b"", at: int = 0) -> bool:
        """Returns whether a block is undamaged; logs damage once."""
        if block.start in self.damaged:
            return False
        if block.start in self._sound:
            return True
        if at <= block.start and block.end <= at + len(piece):
            is_sound = zlib.crc32(memoryview(piece)[block.start - at : block.end - at]) == block.crc32
        else:
            is_sound = _is_sound(block, read)
        if is_sound:
            self._sound.add(block.start)
            return True
        self.damaged[block.start] = block
        _log.warning(
            "%s is damaged: the checksum of %d rows, in bytes %d to %d, is another one, and they are left "
            "out. If you have changed them, delete %s.",
            *(self._csv, block.rows, block.start, block.end, sums_path(self._csv).name),
        )
        return False

    def _blank(self, block: Block) -> bytes:
        """Returns the same number of bytes and lines as a block has, with empty cells."""
        length, longer = divmod(block.end - block.start, block.rows)
        line = b"," * min(self._commas, length - 1) + b"\n"
        return line.rjust(length + 1) * longer + line.rjust(length) * (block.rows - longer)


def _is_sound(block: Block, read: Read) -> bool:
    data = read(block.start, block.end - block.start)
    # Fewer bytes mean that the file was cut meanwhile, which is found elsewhere.
    return len(data) < block.end - block.start or zlib.crc32(data) == block.crc32
