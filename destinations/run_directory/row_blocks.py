"""Reads many rows of floats from a journal at once, as arrays.

The writer thread drains up to 256 rows in a few numpy calls, which keeps the interpreter lock for less time
than a loop over rows would. `frames` reads every other kind of frame.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import attrs
import numpy as np

from .frames import HEADER

__all__ = ["RowBlock", "read_row_block"]

_MIN_ROWS = 4
_MAX_VALUES = 8192

# Offsets in a frame of floats, see `frames`: header, "(5", schema, step, epoch, time, "(n".
_CHECKSUM = 4
_SCHEMA = 14
_STEP = 19
_EPOCH = 24
_TIME = 29
_VALUES = 42
_VALUE_BYTES = 9
_COUNT = 29  # in the payload
_ANY = ord(".")


@attrs.frozen(eq=False)
class RowBlock:
    """Rows of floats of one schema, oldest first.

    Attributes:
        schema: the number of the schema.
        steps: of each row.
        epochs: of each row.
        times: of each row, float64 `(rows,)`.
        values: float64 `(rows, metrics)`.
        size: bytes of all frames.
    """

    schema: int
    steps: list[int]
    epochs: list[int]
    times: np.ndarray[Any, np.dtype[np.float64]]
    values: np.ndarray[Any, np.dtype[np.float64]]
    size: int


def read_row_block(data: bytes, offset: int, most: int) -> RowBlock | None:
    """Reads consecutive rows of floats of one schema; None if there are too few to be worth it.

    Args:
        data: frames.
        offset: the offset of the first one.
        most: the maximum number of rows; fewer are read if rows are very wide.
    """
    if offset + _VALUES > len(data):
        return None
    length, _ = HEADER.unpack_from(data, offset)
    stride = HEADER.size + length
    count, rest = divmod(stride - _VALUES, _VALUE_BYTES)
    following = offset + stride
    if count < 1 or rest or data[offset : offset + 4] != data[following : following + 4]:
        return None
    if data[offset + _SCHEMA : offset + _STEP] != data[following + _SCHEMA : following + _STEP]:
        return None
    rows = min(most, max(_MIN_ROWS, _MAX_VALUES // count), (len(data) - offset) // stride)
    if rows < _MIN_ROWS:
        return None
    table = np.frombuffer(data, np.uint8, rows * stride, offset).reshape(rows, stride)
    rows = _alike(table, count)
    if rows:
        rows = _whole(data, offset, stride, table[:rows, _CHECKSUM : HEADER.size])
    if rows < _MIN_ROWS:
        return None
    table = table[:rows]
    values = table[:, _VALUES:].reshape(rows, count, _VALUE_BYTES)[:, :, 1:]
    return RowBlock(
        schema=int(_column(table, _SCHEMA, "<i4")[0]),
        steps=_column(table, _STEP, "<i4").tolist(),
        epochs=_column(table, _EPOCH, "<i4").tolist(),
        times=_column(table, _TIME, "<f8").astype(np.float64),
        values=np.ascontiguousarray(values).view("<f8").reshape(rows, count).astype(np.float64, copy=False),
        size=rows * stride,
    )


@functools.lru_cache(maxsize=64)
def _fixed_bytes(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns the indices and values of the constant bytes in a frame of `count` floats."""
    head = b"(\x05\0\0\0i....i....i....g........(" + count.to_bytes(4, "little")
    frame = bytes(HEADER.size) + head + b"g........" * count
    places = [
        *range(4),
        *(HEADER.size + place for place, byte in enumerate(head) if byte != _ANY or place > _COUNT),
        *range(_VALUES, len(frame), _VALUE_BYTES),
    ]
    fixed = bytearray(frame)
    fixed[:4] = (len(frame) - HEADER.size).to_bytes(4, "little")
    index = np.array(places)
    return index, np.frombuffer(bytes(fixed), np.uint8)[index]


def _alike(table: np.ndarray[Any, Any], count: int) -> int:
    """Returns how many leading rows are frames of floats with the schema of the first."""
    places, expected = _fixed_bytes(count)
    same = (table[:, places] == expected).all(axis=1)
    same &= (table[:, _SCHEMA : _STEP - 1] == table[0, _SCHEMA : _STEP - 1]).all(axis=1)
    return len(table) if same.all() else int(same.argmin())


def _whole(data: bytes, offset: int, stride: int, checksums: np.ndarray[Any, Any]) -> int:
    """Returns how many leading frames have a valid checksum."""
    view = memoryview(data)
    said = np.ascontiguousarray(checksums).view("<u4")[:, 0].tolist()
    first, length = offset + HEADER.size, stride - HEADER.size
    starts = range(first, first + len(said) * stride, stride)
    found = [zlib.adler32(view[start : start + length]) for start in starts]
    if found == said:
        return len(said)
    return next(row for row, (one, other) in enumerate(zip(found, said, strict=True)) if one != other)


def _column(table: np.ndarray[Any, Any], offset: int, kind: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(kind)
    return np.ascontiguousarray(table[:, offset : offset + dtype.itemsize]).view(dtype)[:, 0]
