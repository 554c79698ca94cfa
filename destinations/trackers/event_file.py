"""Reads and writes TensorBoard's event files.

A file is a sequence of records (length, checksum, bytes, checksum; see
`tensorboard.summary.writer.record_writer`), each the bytes of an `Event`.
"""

import contextlib
import itertools
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from uploads.disk import try_lock

__all__ = ["EventFile", "event_files", "new_event_file", "records"]

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")
_HEADER = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
# Checksums are masked: https://www.tensorflow.org/tutorials/load_data/tfrecord
_MASK_DELTA = 0xA282EAD8

# Distinguishes files that one process creates within a second.
_numbers = itertools.count()


class EventFile:
    """Append-only file of records; records that cannot be written yet stay in memory.

    It doesn't use the interpreter's buffer, which a forked child would write a second time.

    Args:
        descriptor: the file descriptor; owned from now on.
        write: `os.write`.
    """

    def __init__(self, descriptor: int, write: Callable[[int, Any], int] = os.write) -> None:
        self._descriptor = descriptor
        self._write = write
        self._waiting = bytearray()
        self._checksum = _checksum()

    def write(self, data: bytes) -> None:
        """Appends a record to the memory buffer."""
        length = _LENGTH.pack(len(data))
        self._waiting += length + _masked(self._checksum(length)) + data + _masked(self._checksum(data))

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes not written yet."""
        return len(self._waiting)

    def flush(self) -> None:
        """Writes the buffered bytes; after an error, the unwritten bytes stay buffered.

        Raises:
            OSError: not all bytes could be written.
        """
        while self._waiting:
            with memoryview(self._waiting) as view:
                count = self._write(self._descriptor, view)
            del self._waiting[:count]

    def close(self) -> None:
        """Flushes, and closes the file in any case.

        Raises:
            OSError: as for `flush`.
        """
        try:
            self.flush()
        finally:
            os.close(self._descriptor)


def event_files(folder: Path) -> list[Path]:
    """Returns the event files in a folder, in TensorBoard's order of reading."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in folder.iterdir() if _NAME.match(path.name) and path.is_file())
    return []


def new_event_file(folder: Path, seconds: float) -> tuple[Path, int]:
    """Creates an event file with a unique name that sorts after all existing ones.

    Args:
        folder: the folder; created if missing.
        seconds: the time in seconds since 1970.

    Returns:
        Its path, and a file descriptor for appending.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads by name: the newest must come last, even after the clock was set back or within one
    # second.
    before = [int(found[1]) for path in event_files(folder) if (found := _NAME.match(path.name))]
    second = max([int(seconds), *(number + 1 for number in before)])
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    while True:
        path = folder / f"events.out.tfevents.{second:010d}.{host}.{os.getpid()}.{next(_numbers)}"
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
            # Without locks in the file system, an open file cannot be detected: see `disk.is_locked`.
            with contextlib.suppress(OSError):
                try_lock(descriptor)
            return path, descriptor


def _masked(checksum: int) -> bytes:
    mixed = ((checksum >> 15) | (checksum << 17)) + _MASK_DELTA
    return _CHECKSUM.pack(mixed & 0xFFFFFFFF)


def _checksum() -> Callable[[bytes], int]:
    """Returns a CRC-32C function; TensorBoard's, in Python, takes ten times as long as everything else."""
    try:
        import google_crc32c
    except ImportError:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c

        return crc32c  # type: ignore[no-any-return]  # it has no annotations
    return google_crc32c.value  # type: ignore[no-any-return]  # as above


def records(path: Path) -> Iterator[bytes]:
    """Yields the bytes of each record; skips a torn tail, and does not verify checksums."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, _ = _HEADER.unpack(header)
            # A damaged length would make `read` ask for that much memory, so it is checked first.
            if length + _CHECKSUM.size > end - file.tell():
                return
            data = file.read(length + _CHECKSUM.size)
            if len(data) < length + _CHECKSUM.size:
                return
            yield data[:length]
