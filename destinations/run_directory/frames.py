r"""The frames of a journal: encodes rows of metrics as bytes, and decodes them one by one or in blocks.

A frame is the length of its payload and the Adler-32 checksum of its payload (RFC 1950), both as unsigned
32-bit little-endian integers, then the payload. A length of zero marks the end. The payload is one value in
version 2 of the format of Python's `marshal`, restricted to:

```
g  float64, little-endian          T F  True, False
i  int32, little-endian            N    None
l  int32 n, then abs(n) digits of 15 bits, 2 bytes each, least first, with the sign of n
(  int32 n, then n values          u    int32 n, then n bytes of UTF-8
```

Payloads are `(schema, step, epoch or None, time, (value, ...))`, a row;
`("keys", schema, JSON list of names)`, which precedes the first row of a schema in each segment;
`("session", id)`, `("rewind", id, mark, step, time or None)`, `("resume", step, time or None)`,
`("boundary", mark)`, and `("follows", segment, offset)`; see `Begin`, `Rewind`, `Resume`, `Boundary` and
`Follows`. Further values of these tuples are ignored.

**Why marshal, and why it is decoded here.** `marshal.dumps` keeps the type of each value, which rows of
integers and floats need, and takes 0.7 to 0.9 us for ten values; JSON took 6 to 14 us. `marshal.loads` must
not read foreign files, even with a valid checksum: five bytes that announce a long tuple make it allocate
1 GiB.

**Blocks.** The writer thread drains up to 256 rows of floats in a few numpy calls, which hold the interpreter
lock for less time than a loop over rows. Reading single frames doesn't need numpy.
"""

from __future__ import annotations

import functools
import json
import marshal
import math
import struct
import zlib
from typing import TYPE_CHECKING, Any

import attrs

from .layout import number_of_int, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from destinations.history.row_chain import Limit

__all__ = [
    "FLOAT_BYTES",
    "FLOAT_TAG",
    "HEADER",
    "MAGIC",
    "VALUES_AT",
    "Begin",
    "Boundary",
    "Follows",
    "Keys",
    "Record",
    "Resume",
    "Rewind",
    "Row",
    "RowBlock",
    "UnknownFrame",
    "count_rows",
    "encode_frame",
    "iter_frames",
    "keys_frame",
    "read_row_block",
]

HEADER = struct.Struct("<II")
MAGIC = b"run-directory journal 1\n".ljust(32, b" ")
"""The first bytes of a segment."""

_MARSHAL_VERSION = 2
_INT32 = struct.Struct("<i")
_FLOAT64 = struct.Struct("<d")
_DIGIT_BITS = 15
# The time to decode an integer grows with the square of its digits.
_MAX_DIGITS = 10_000
_NUMBERS = frozenset({float, int, bool})

# A row of floats with a 32-bit step: the common case, decoded in one call.
_ROW_HEAD = struct.Struct("<cicicicicdci")
_ROW_TAGS = (b"(", b"i", b"i", b"i", b"g", b"(")

VALUES_AT = _ROW_HEAD.size
"""The offset of the values in the payload of such a row."""
FLOAT_TAG = b"g"
FLOAT_BYTES = 1 + _FLOAT64.size
"""The size of a float with its tag."""


@attrs.frozen
class Keys:
    """The names of the values of a schema, in order."""

    schema: int
    names: tuple[str, ...]


@attrs.frozen
class Begin:
    """A session with this id begins. It follows the session before it, with all of its rows."""

    session: str


@attrs.frozen
class Resume:
    """This session follows only some of the earlier records: a loop has named its batch.

    Rows of earlier sessions with a larger step don't count. Rows of this step don't count if they were logged
    after `time`, the time of the checkpoint; if `time` is None, none of them count.
    """

    step: int
    time: float | None

    @property
    def limit(self) -> Limit:
        """The limit of earlier sessions."""
        # With an infinite time, all rows of the step itself count.
        return (self.step + 1, None) if self.time == math.inf else (self.step, self.time)


@attrs.frozen
class Rewind:
    """This session follows only part of the one before it: a checkpoint was loaded.

    It follows the session with this id, up to the boundary with this mark. If that session has no rows here,
    as on another rank, `resume` says which rows count.
    """

    session: str
    mark: int
    resume: Resume


@attrs.frozen
class Boundary:
    """A checkpoint between rows: rows before and after it don't share a row of the CSV, even at equal steps.

    `mark` numbers the checkpoints of a session from 1; it is 0 for none.
    """

    mark: int = 0


@attrs.frozen
class Follows:
    """Where the journal ended when this segment was started; the first frame of the segment.

    A power loss may destroy the end of a segment but not the next segment. A reader that stopped elsewhere
    skips the segment, because rows before it are missing. A segment without this frame is always read.
    """

    segment: int
    offset: int


@attrs.frozen
class UnknownFrame:
    """A valid frame of a kind that this version doesn't know."""


Row = tuple[int, int | None, int | None, float, tuple[float, ...]]
"""Schema, step, epoch, time in seconds since 1970, values."""

Record = Row | Keys | Begin | Rewind | Resume | Boundary | Follows | UnknownFrame


def encode_frame(payload: tuple[Any, ...]) -> bytes:
    """Returns the frame of a payload.

    Raises:
        ValueError: the payload has a type that marshal doesn't support.
    """
    data = marshal.dumps(payload, _MARSHAL_VERSION)
    return HEADER.pack(len(data), zlib.adler32(data)) + data


def keys_frame(schema: int, names: tuple[str, ...]) -> bytes:
    """Returns the frame that assigns names to a schema."""
    return encode_frame(("keys", schema, json.dumps(names)))


def iter_frames(data: bytes, offset: int = 0) -> Iterator[tuple[int, Record]]:
    """Yields each record with the offset after its frame, until a frame is incomplete or corrupt."""
    unpack, head, end = HEADER.unpack_from, HEADER.size, len(data)
    while offset + head <= end:
        length, checksum = unpack(data, offset)
        start = offset + head
        offset = start + length
        if length == 0 or offset > end:
            return
        payload = data[start:offset]
        if zlib.adler32(payload) != checksum:
            return
        try:
            record = _record(payload)
        except (ValueError, struct.error, IndexError, TypeError, RecursionError):
            record = UnknownFrame()
        yield offset, record


def count_rows(data: bytes, offset: int) -> int:
    """Returns the number of rows from an offset on."""
    return sum(type(record) is tuple for _, record in iter_frames(data, offset))


def _record(payload: bytes) -> Record:  # noqa: C901  # a case for each kind
    if len(payload) > _ROW_HEAD.size:
        (tag, _, schema_tag, schema, step_tag, step, epoch_tag, epoch, time_tag, time, values_tag, count) = (
            _ROW_HEAD.unpack_from(payload)
        )
        tags = (tag, schema_tag, step_tag, epoch_tag, time_tag, values_tag)
        fits = count * FLOAT_BYTES == len(payload) - VALUES_AT
        if tags == _ROW_TAGS and fits and payload[VALUES_AT::FLOAT_BYTES] == FLOAT_TAG * count:
            return schema, step, epoch, time, struct.unpack_from(f"<{'xd' * count}", payload, _ROW_HEAD.size)
    value, end = _value(payload, 0)
    if end != len(payload):
        raise ValueError("a payload must be one value")
    match value:
        case ("keys", int(schema), str(text)):
            return Keys(schema, _names(text))
        case ("boundary", *mark) if [*map(type, mark)] in ([], [int]):
            return Boundary(*mark)
        case ("session", str(session)):
            return Begin(session)
        case ("rewind", str(session), int(mark), int(step), float() | None as time, *_):
            return Rewind(session, mark, Resume(step, time))
        case ("resume", int(step), float() | None as time, *_):
            return Resume(step, time)
        case ("follows", int(segment), int(at)):
            return Follows(segment, at)
        case (int(schema), int() | float() | None as step, int() | None as epoch, float(time), tuple(values)):
            if _NUMBERS.issuperset(map(type, values)):
                # A step beyond 64 bits is none.
                return schema, whole_number(step), epoch, time, values
    raise ValueError("a payload must be a row, keys or a resume")


# Cached, so that the same names in each segment are one tuple: comparing ten thousand names takes long.
@functools.lru_cache(maxsize=16)
def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not set(map(type, names)) <= {str}:
        raise ValueError("names must be a list of texts")
    return tuple(names)


def _value(data: bytes, offset: int) -> tuple[Any, int]:
    tag = data[offset : offset + 1]
    offset += 1
    if tag == b"g":
        return _FLOAT64.unpack_from(data, offset)[0], offset + 8
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], offset
    number = _INT32.unpack_from(data, offset)[0]
    offset += 4
    if tag == b"i":
        return number, offset
    if tag == b"l":
        if abs(number) > _MAX_DIGITS:
            raise ValueError(f"an integer must have {_MAX_DIGITS} digits at most, got {abs(number)}")
        digits = struct.unpack_from(f"<{abs(number)}H", data, offset)
        magnitude = sum(digit << (_DIGIT_BITS * place) for place, digit in enumerate(digits))
        return number_of_int(-magnitude if number < 0 else magnitude), offset + 2 * len(digits)
    if number < 0:
        raise ValueError(f"a length must not be negative, got {number}")
    if tag == b"u":
        return data[offset : offset + number].decode("utf-8", "surrogatepass"), offset + number
    if tag == b"(":
        items = []
        for _ in range(number):
            item, offset = _value(data, offset)
            items.append(item)
        return tuple(items), offset
    raise ValueError(f"a value must have a known tag, got {tag!r}")


_CONSTANTS = {b"T": True, b"F": False, b"N": None}


# Blocks of rows of floats.


_MIN_ROWS = 4
_MAX_VALUES = 8192
# A single row with this many values is worth a block.
_WIDE = 256

# The bytes of a frame with its length, and those with the tag and number of its schema.
_LENGTH, _SCHEMA = slice(0, 4), slice(14, 19)
# Everything else that frames of floats with the same length have in common.
_TAGS = {"tag": "(", "schema_tag": "i", "step_tag": "i", "epoch_tag": "i", "time_tag": "g", "values_tag": "("}


@attrs.frozen(eq=False)
class RowBlock:
    """Rows of floats of one schema, oldest first.

    Attributes:
        schema: the number of the schema.
        steps: the step of each row.
        epochs: the epoch of each row.
        times: the time of each row, float64 `(rows,)`.
        values: float64 `(rows, metrics)`.
        size: the size of all frames in bytes.
    """

    schema: int
    steps: list[int]
    epochs: list[int]
    times: np.ndarray[Any, np.dtype[np.float64]]
    values: np.ndarray[Any, np.dtype[np.float64]]
    size: int


def read_row_block(data: bytes, offset: int, most: int) -> RowBlock | None:
    """Reads consecutive rows of floats with one schema; returns None if there are too few values.

    Args:
        data: the frames.
        offset: the offset of the first frame.
        most: the maximum number of rows; wide rows come in smaller blocks.
    """
    import numpy as np

    if offset + HEADER.size + VALUES_AT > len(data):
        return None
    length, _ = HEADER.unpack_from(data, offset)
    stride = HEADER.size + length
    count, rest = divmod(length - VALUES_AT, FLOAT_BYTES)
    if count < 1 or rest:
        return None
    least = 1 if count >= _WIDE else _MIN_ROWS
    if least > 1:
        first, second = data[offset : offset + stride], data[offset + stride : offset + 2 * stride]
        if first[_LENGTH] != second[_LENGTH] or first[_SCHEMA] != second[_SCHEMA]:
            return None
    rows = min(most, max(_MIN_ROWS, _MAX_VALUES // count), (len(data) - offset) // stride)
    if rows < least:
        return None
    table = np.frombuffer(data, _frame_type(count), rows, offset)
    table = table[: _alike(table, length, count)]
    table = table[: _whole(data, offset, stride, table["checksum"].tolist())]
    if len(table) < max(least, 1):
        return None
    return RowBlock(
        schema=int(table["schema"][0]),
        steps=table["step"].tolist(),
        epochs=table["epoch"].tolist(),
        times=table["time"].astype(np.float64),
        values=table["values"]["value"].astype(np.float64),
        size=len(table) * stride,
    )


@functools.lru_cache(maxsize=64)
def _frame_type(count: int) -> np.dtype[np.void]:
    """Returns the layout of a frame of `count` floats."""
    import numpy as np

    return np.dtype(
        [
            *(("length", "<u4"), ("checksum", "<u4"), ("tag", "u1"), ("items", "<i4")),
            *(("schema_tag", "u1"), ("schema", "<i4"), ("step_tag", "u1"), ("step", "<i4")),
            *(("epoch_tag", "u1"), ("epoch", "<i4"), ("time_tag", "u1"), ("time", "<f8")),
            *(("values_tag", "u1"), ("count", "<i4")),
            ("values", [("tag", "u1"), ("value", "<f8")], (count,)),
        ]
    )


def _alike(table: np.ndarray[Any, Any], length: int, count: int) -> int:
    """Returns how many leading rows are frames of floats with the first row's schema."""
    same = (table["length"] == length) & (table["items"] == 5) & (table["count"] == count)  # noqa: PLR2004
    same &= (table["schema"] == table["schema"][0]) & (table["values"]["tag"] == FLOAT_TAG[0]).all(axis=1)
    for name, tag in _TAGS.items():
        same &= table[name] == ord(tag)
    return len(table) if same.all() else int(same.argmin())


def _whole(data: bytes, offset: int, stride: int, stored: list[int]) -> int:
    """Returns how many leading frames have their stored checksum."""
    view = memoryview(data)
    first, length = offset + HEADER.size, stride - HEADER.size
    starts = range(first, first + len(stored) * stride, stride)
    found = [zlib.adler32(view[start : start + length]) for start in starts]
    if found == stored:
        return len(stored)
    return next(row for row, (one, other) in enumerate(zip(found, stored, strict=True)) if one != other)
