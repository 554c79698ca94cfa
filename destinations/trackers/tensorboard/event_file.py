"""TensorBoard's event files: one that grows, and what is in those that are there.

A file is a row of records (length, checksum, bytes, checksum; `tensorboard.summary.writer.record_writer` writes them), each the
bytes of an `Event`.
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

__all__ = ["GrowingFile", "event_files", "new_event_file", "record_writer", "records"]

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")
_HEADER = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
# Of the masking of checksums in the format: https://www.tensorflow.org/tutorials/load_data/tfrecord
_MASK_DELTA = 0xA282EAD8
_MOST_LENGTHS = 4096

# Files of one process differ by their number, also where they were made within one second.
_numbers = itertools.count()


class GrowingFile:
    """A file to which bytes are appended, for a `RecordWriter`; what the disk does not take waits in memory.

    Nothing is buffered by the interpreter: a forked child has nothing to write a second time.

    Args:
        descriptor: of the file; owned from now on.
        write: `os.write`.
    """

    def __init__(self, descriptor: int, write: Callable[[int, Any], int] = os.write) -> None:
        self._descriptor = descriptor
        self._write = write
        self._waiting = bytearray()

    def write(self, data: bytes) -> None:
        """Takes bytes; nothing is written."""
        self._waiting += data

    @property
    def waiting_bytes(self) -> int:
        """How many bytes are not in the file yet."""
        return len(self._waiting)

    def flush(self) -> None:
        """Writes what waits; what could be written before an error does not wait any more.

        Raises:
            OSError: the disk did not take it all.
        """
        while self._waiting:
            with memoryview(self._waiting) as view:
                count = self._write(self._descriptor, view)
            del self._waiting[:count]

    def close(self) -> None:
        """Writes what waits, and closes the file in any case.

        Raises:
            OSError: as `flush`.
        """
        try:
            self.flush()
        finally:
            os.close(self._descriptor)


def event_files(folder: Path) -> list[Path]:
    """Returns the event files in a folder, in the order in which TensorBoard reads them."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in folder.iterdir() if _NAME.match(path.name))
    return []


def new_event_file(folder: Path, seconds: float) -> tuple[Path, int]:
    """Creates an event file whose name nobody has, and which is read after those that are there.

    Args:
        folder: where; it is made where it is missing.
        seconds: the time, since the epoch.

    Returns:
        Its path, and a descriptor to append to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads by name: also with a clock that was put back, or two sessions in a second, the newest comes last.
    before = [int(found[1]) for path in event_files(folder) if (found := _NAME.match(path.name))]
    second = max([int(seconds), *(number + 1 for number in before)])
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    while True:
        path = folder / f"events.out.tfevents.{second:010d}.{host}.{os.getpid()}.{next(_numbers)}"
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
            # Where the file system has no locks, nobody can tell who is at work: see `disk.is_locked`.
            with contextlib.suppress(OSError):
                try_lock(descriptor)
            return path, descriptor


def record_writer(file: GrowingFile) -> Any:
    """Returns TensorBoard's own writer of records; with `google_crc32c`, where it is installed, for the checksums.

    TensorBoard computes them in Python, which takes ten times as long as all else.
    """
    from tensorboard.summary.writer.record_writer import RecordWriter

    try:
        import google_crc32c
    except ImportError:
        return RecordWriter(file)
    if google_crc32c.implementation == "python":
        return RecordWriter(file)
    checksum = google_crc32c.value
    headers: dict[int, bytes] = {}

    class QuickRecordWriter(RecordWriter):  # type: ignore[misc]  # Any to the checker
        """The same bytes, sooner."""

        def write(self, data: bytes) -> None:
            """Writes one record."""
            size = len(data)
            header = headers.get(size)
            if header is None:
                length = _LENGTH.pack(size)
                header = length + _CHECKSUM.pack(_masked(checksum(length)))
                if len(headers) < _MOST_LENGTHS:
                    headers[size] = header
            file.write(header + data + _CHECKSUM.pack(_masked(checksum(data))))

    return QuickRecordWriter(file)


def _masked(checksum: int) -> int:
    return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def records(path: Path) -> Iterator[bytes]:
    """Yields the bytes of each whole record of a file; a torn tail is left out. Checksums are not looked at."""
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, _ = _HEADER.unpack(header)
            data = file.read(length + _CHECKSUM.size)
            if len(data) < length + _CHECKSUM.size:
                return
            yield data[:length]
