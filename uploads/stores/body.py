"""The bytes of one upload, read from one open descriptor: what happens to the name meanwhile does not matter."""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from typing import TYPE_CHECKING, Self

import attrs

from uploads._files import open_regular
from uploads.errors import BytesCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

__all__ = ["Body", "Digest"]

_READ_BYTES = 1 << 20
_HELD_BYTES = 8 << 20


@attrs.frozen
class Digest:
    """What is known of some bytes: how many, their SHA-256 (hexadecimal) and their CRC-32."""

    size: int
    sha256: str
    crc32: int


class Body:
    """An open file to send. Reading from many threads at once is fine; nobody seeks.

    A file of up to 8 MiB is read once, when it is measured, and sent from memory: what was checked is what is sent.

    Attributes:
        identifier: The entry's.
        digest: Of all the bytes; from `measure`, or known from an earlier attempt.
        mode: The permission bits of the file; for a store whose objects have some.
    """

    def __init__(self, path: str | Path, identifier: str, digest: Digest | None = None) -> None:
        self.identifier = identifier
        self._held: bytes | None = None
        self._descriptor = open_regular(path)
        self.mode = stat.S_IMODE(os.fstat(self._descriptor).st_mode) & 0o777
        try:
            self.digest = self.measure() if digest is None else digest
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`; fewer only at the end. Not to be changed."""
        if self._held is not None:
            return (
                self._held
                if offset == 0 and count >= len(self._held)
                else self._held[offset : offset + count]
            )
        chunk = os.pread(self._descriptor, count, offset)
        if len(chunk) == count or not chunk:
            return chunk
        pieces = [chunk]  # One read gives at most 2 GiB, and a signal may shorten it.
        done = len(chunk)
        while done < count and (chunk := os.pread(self._descriptor, count - done, offset + done)):
            pieces.append(chunk)
            done += len(chunk)
        return b"".join(pieces)

    def read_whole(self) -> bytes:
        """All the bytes, as they were measured.

        Raises:
            BytesCorrupt: They are others now.
        """
        data = self.read(0, self.digest.size)
        if self._held is None and zlib.crc32(data) != self.digest.crc32:
            raise BytesCorrupt(f"entry {self.identifier} must be sent as it was checked, got other bytes")
        return data

    def chunks(self, chunk_bytes: int = _READ_BYTES) -> Iterator[bytes]:
        """All the bytes, in order."""
        offset = 0
        while chunk := self.read(offset, chunk_bytes):
            yield chunk
            offset += len(chunk)

    def measure(self) -> Digest:
        """Reads everything once."""
        size = os.fstat(self._descriptor).st_size
        if size <= _HELD_BYTES:
            data = os.pread(self._descriptor, size + 1, 0)
            if len(data) == size:
                self._held = data
                return Digest(size, hashlib.sha256(data).hexdigest(), zlib.crc32(data))
        sha256, crc32, total = hashlib.sha256(), 0, 0
        buffer = memoryview(
            bytearray(_READ_BYTES)
        )  # One for all: new memory for each piece costs as much as its CRC.
        while count := os.preadv(self._descriptor, [buffer], total):
            sha256.update(buffer[:count])
            crc32 = zlib.crc32(buffer[:count], crc32)
            total += count
        return Digest(total, sha256.hexdigest(), crc32)
