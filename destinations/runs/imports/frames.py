"""Reads TensorBoard's event files and W&B's logs, whose records have checksums, even if some are damaged.

The readers of both packages stop at the first damaged byte. These readers continue at the next intact record
and count the bytes of the records they yield. They read each file up to the size it has when they open it.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from destinations.runs.move.stream import Bytes

# The length of a TensorBoard record is not 0 and below 4 GiB.
_LENGTH = re.compile(rb"(?=(?!\0{4}).{4}\0{4})", re.DOTALL)
_LENGTH_BYTES, _SUM_BYTES = 8, 4
_WINDOW_BYTES = 1 << 16

# W&B writes LevelDB's log format with CRC-32: https://github.com/google/leveldb/blob/main/doc/log_format.md
_MAGIC = b":W&B\xe1\xbe\0"
_BLOCK_BYTES = 1 << 15
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4
# At most this many bytes are summed to find the next intact chunk of a damaged block: a few milliseconds.
_SEARCH_BYTES = 1 << 22


def event_records(path: Path, seen: Bytes) -> Iterator[bytes]:
    """Yields the records of an event file; each has a length, its checksum, the data, and its checksum."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    def is_summed(data: bytes, checksum: bytes) -> bool:
        return len(checksum) == _SUM_BYTES and masked_crc32c(data) == int.from_bytes(checksum, "little")

    with path.open("rb") as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        seen.there += size
        while at < size:
            file.seek(at)
            header = file.read(_LENGTH_BYTES)
            end = at + _LENGTH_BYTES + _SUM_BYTES + int.from_bytes(header, "little") + _SUM_BYTES
            if not is_summed(header, file.read(_SUM_BYTES)) or end > size:
                at = _next_length(file, at + 1)
                continue
            data = file.read(end - file.tell() - _SUM_BYTES)
            if is_summed(data, file.read(_SUM_BYTES)):
                seen.read += end - at
                yield data
            at = end


def _next_length(file: Any, at: int) -> int:
    """Returns the next position that may hold the length of a record; the end of the file if none does."""
    while True:
        file.seek(at)
        window = file.read(_WINDOW_BYTES)
        if match := _LENGTH.search(window):
            return at + match.start()
        if len(window) < _LENGTH_BYTES:
            return at + len(window)
        at += len(window) - _LENGTH_BYTES + 1


def log_records(path: Path, seen: Bytes) -> Iterator[bytes]:
    """Yields the records of a W&B log, made of chunks with length, kind and checksum in 32 KiB blocks."""
    with path.open("rb") as file:
        size = left = os.fstat(file.fileno()).st_size
        seen.there += size
        # The chunks so far of a record that spans blocks.
        parts: list[bytes] | None = None
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            at = 0
            if left == size:
                at = len(_MAGIC)
                seen.read += at if block.startswith(_MAGIC) else 0
            left -= len(block)
            while at + _CHUNK.size <= len(block):
                kind, data = _chunk_at(block, at)
                if not kind:
                    at, parts = _next_chunk(block, at + 1), None
                    continue
                at += _CHUNK.size + len(data)
                if kind in {_FULL, _FIRST}:
                    parts = []
                if parts is None:
                    continue
                parts.append(data)
                if kind in {_FULL, _LAST}:
                    count, record, parts = len(parts), b"".join(parts), None
                    seen.read += len(record) + _CHUNK.size * count
                    yield record
            if len(block) == _BLOCK_BYTES and not any(block[at:]):
                seen.read += len(block) - at


def _chunk_at(block: bytes, at: int) -> tuple[int, bytes]:
    """Returns the kind of a chunk, or 0 if it is damaged, and its content."""
    checksum, length, kind = _CHUNK.unpack_from(block, at)
    data = block[at + _CHUNK.size : at + _CHUNK.size + length]
    is_whole = len(data) == length and zlib.crc32(data, zlib.crc32(bytes([kind]))) == checksum
    return kind if is_whole else 0, data


def _next_chunk(block: bytes, at: int) -> int:
    """Returns the position of the next intact chunk of a block; the end of the block if there is none."""
    left = _SEARCH_BYTES
    for at in range(at, len(block) - _CHUNK.size + 1):  # noqa: B020, PLR1704  # continues from `at`
        if _FULL <= block[at + 6] <= _LAST and left > 0:
            left -= _CHUNK.unpack_from(block, at)[1]
            if _chunk_at(block, at)[0]:
                return at
    return len(block)
