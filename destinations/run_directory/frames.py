r"""The frames of a journal: encodes rows of metrics as bytes and decodes them.

A frame is the length of its payload and the Adler-32 checksum of its payload (RFC 1950), both as unsigned
32-bit little-endian integers, then the payload. A length of zero marks the end. The payload is one value in
version 2 of the format of Python's `marshal`, restricted to:

```
g  float64, little-endian          T F  True, False
i  int32, little-endian            N    None
l  int32 n, then abs(n) digits of 15 bits, 2 bytes each, least first; the sign is that of n
(  int32 n, then n values          u    int32 n, then n bytes of UTF-8
```

Payloads are `(schema, step, epoch or None, time, (value, ...))`, a row;
`("keys", schema, JSON list of names)`, which comes before the first row of a schema in each segment;
`("resume", step, time or None)`, `("boundary",)` and `("follows", segment, offset)`; see `Resume`,
`Boundary` and `Follows`.

**Why marshal, and why decoded here.** `marshal.dumps` keeps the type of each value, which rows of integers
and floats need, at 0.7 to 0.9 us for ten values; JSON took 6 to 14 us. `marshal.loads` must not read foreign
files, whatever their checksum: five bytes that announce a long tuple make it allocate 1 GiB.
"""

import json
import marshal
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import attrs

__all__ = [
    "FLOAT_BYTES",
    "FLOAT_TAG",
    "HEADER",
    "MAGIC",
    "VALUES_AT",
    "Boundary",
    "Follows",
    "Keys",
    "Record",
    "Resume",
    "Row",
    "UnknownFrame",
    "boundary_frame",
    "encode_frame",
    "follows_frame",
    "iter_frames",
    "keys_frame",
    "resume_frame",
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
class Resume:
    """Training resumed from an earlier step: rows logged before that lie beyond it are abandoned.

    These are the rows of larger steps, and the rows of this step logged after `time`, the time of the
    checkpoint; all rows of this step if `time` is None.
    """

    step: int
    time: float | None

    def drops(self, step: int | None, time: float) -> bool:
        """Returns whether an earlier row is abandoned."""
        if step is None:
            return False
        return step > self.step or (step == self.step and (self.time is None or not time <= self.time))


@attrs.frozen
class Boundary:
    """A checkpoint between rows: those before and after are not merged in the CSV, even with equal steps."""


@attrs.frozen
class Follows:
    """The end of the journal when this segment was started; its first frame.

    A power loss may lose the end of a segment but not the next segment. A reader that stopped elsewhere skips
    the segment, because rows before it are missing. A segment without this frame is always read.
    """

    segment: int
    offset: int


@attrs.frozen
class UnknownFrame:
    """A valid frame of a kind unknown to this version."""


Row = tuple[int, int | None, int | None, float, tuple[float, ...]]
"""Schema, step, epoch, time in seconds since 1970, values."""

Record = Row | Keys | Resume | Boundary | Follows | UnknownFrame


def encode_frame(payload: tuple[Any, ...]) -> bytes:
    """Returns the frame of a payload.

    Raises:
        ValueError: the payload has a type that marshal does not support.
    """
    data = marshal.dumps(payload, _MARSHAL_VERSION)
    return HEADER.pack(len(data), zlib.adler32(data)) + data


def keys_frame(schema: int, names: tuple[str, ...]) -> bytes:
    """Returns the frame that assigns names to a schema."""
    return encode_frame(("keys", schema, json.dumps(names)))


def resume_frame(step: int, time: float | None) -> bytes:
    """Returns the frame of a `Resume`."""
    return encode_frame(("resume", step, time))


def boundary_frame() -> bytes:
    """Returns the frame of a `Boundary`."""
    return encode_frame(("boundary",))


def follows_frame(segment: int, offset: int) -> bytes:
    """Returns the frame of a `Follows`."""
    return encode_frame(("follows", segment, offset))


def iter_frames(data: bytes, offset: int = 0) -> Iterator[tuple[int, Record]]:
    """Yields each record with the offset after its frame, up to the first incomplete or corrupt frame."""
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


def _record(payload: bytes) -> Record:
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
        case ("boundary",):
            return Boundary()
        case ("resume", int(step), float() | None as time):
            return Resume(step, time)
        case ("follows", int(segment), int(at)):
            return Follows(segment, at)
        case (int(schema), int() | None as step, int() | None as epoch, float(time), tuple(values)):
            if _NUMBERS.issuperset(map(type, values)):
                return schema, step, epoch, time, values
    raise ValueError("a payload must be a row, keys or a resume")


def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
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
        return (-magnitude if number < 0 else magnitude), offset + 2 * len(digits)
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
