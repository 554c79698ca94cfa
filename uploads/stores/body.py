"""The bytes of one upload, read from one open descriptor: what happens to the name meanwhile does not matter."""

from __future__ import annotations

import hashlib
import os
import zlib
from typing import TYPE_CHECKING, Self

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

__all__ = ["Body", "Digest"]

_READ_BYTES = 1 << 20


@attrs.frozen
class Digest:
    """What is known of some bytes: how many, their SHA-256 (hexadecimal) and their CRC-32."""

    size: int
    sha256: str
    crc32: int


class Body:
    """An open file to send. Reading from many threads at once is fine; nobody seeks.

    Attributes:
        identifier: The entry's.
        digest: Of all the bytes; from `measure`, or known from an earlier attempt.
    """

    def __init__(self, path: Path, identifier: str, digest: Digest | None = None) -> None:
        self.identifier = identifier
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.digest = self.measure() if digest is None else digest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`; fewer only at the end."""
        chunk = os.pread(self._descriptor, count, offset)
        if len(chunk) == count or not chunk:
            return chunk
        pieces = [chunk]  # One read gives at most 2 GiB, and a signal may shorten it.
        done = len(chunk)
        while done < count and (chunk := os.pread(self._descriptor, count - done, offset + done)):
            pieces.append(chunk)
            done += len(chunk)
        return b"".join(pieces)

    def chunks(self, chunk_bytes: int = _READ_BYTES) -> Iterator[bytes]:
        """All the bytes, in order."""
        offset = 0
        while chunk := self.read(offset, chunk_bytes):
            yield chunk
            offset += len(chunk)

    def measure(self) -> Digest:
        """Reads everything once."""
        sha256, crc32, size = hashlib.sha256(), 0, 0
        for chunk in self.chunks():
            sha256.update(chunk)
            crc32 = zlib.crc32(chunk, crc32)
            size += len(chunk)
        return Digest(size, sha256.hexdigest(), crc32)
