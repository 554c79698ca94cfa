"""Moves bytes between descriptors: by reference where the file system can, else by one copy that is checksummed meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import threading
import zlib

__all__ = ["copy_with_crc32", "crc32_of", "reflink"]

_FICLONE = 0x40049409  # ioctl_ficlone(2)
_STRIDE_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}


def reflink(source: int, target: int) -> bool:
    """Whether `target` now shares the blocks of `source`; False where the file system cannot (ext4, most network ones)."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def crc32_of(descriptor: int) -> int:
    """The CRC-32 of everything that the descriptor can read."""
    return _crc32_of_range(descriptor, 0, None, 0)


def copy_with_crc32(source: int, target: int) -> tuple[int, int]:
    """Copies everything and returns (bytes, CRC-32).

    The kernel copies; a second thread reads what has arrived and checksums it, so that a large file takes about as long as `cp`.
    SHA-256 is slower than copying and is left to the upload.
    """
    first = _copy_stride(source, target, 0)
    if first < _STRIDE_BYTES:
        total = first + _copy_rest(source, target, first)
        return total, crc32_of(target)
    strides: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    follower = _Follower(target, strides)
    follower.start()
    total = first
    try:
        strides.put(first)
        while copied := _copy_stride(source, target, total):
            total += copied
            strides.put(copied)
    finally:
        strides.put(None)
        follower.join()
    return total, follower.result()


class _Follower(threading.Thread):
    """Checksums the target stride by stride, behind the copy."""

    def __init__(self, target: int, strides: queue.SimpleQueue[int | None]) -> None:
        super().__init__(name="uploads-checksum", daemon=True)
        self._target = target
        self._strides = strides
        self._crc32 = 0
        self._error: OSError | None = None

    def run(self) -> None:
        offset = 0
        try:
            while (length := self._strides.get()) is not None:
                self._crc32 = _crc32_of_range(self._target, offset, length, self._crc32)
                offset += length
        except OSError as error:
            self._error = error

    def result(self) -> int:
        if self._error is not None:
            raise self._error
        return self._crc32


def _copy_rest(source: int, target: int, offset: int) -> int:
    total = 0
    while copied := _copy_stride(source, target, offset + total):
        total += copied
    return total


def _copy_stride(source: int, target: int, offset: int) -> int:
    """Copies up to one stride and returns how much; 0 at the end of the source."""
    try:
        return os.copy_file_range(source, target, _STRIDE_BYTES, offset, offset)
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    chunk = os.pread(source, _READ_BYTES, offset)
    view = memoryview(chunk)
    while view:
        view = view[os.pwrite(target, view, offset + len(chunk) - len(view)) :]
    return len(chunk)


def _crc32_of_range(descriptor: int, offset: int, length: int | None, crc32: int) -> int:
    remaining = length
    while remaining is None or remaining > 0:
        chunk = os.pread(
            descriptor, _READ_BYTES if remaining is None else min(_READ_BYTES, remaining), offset
        )
        if not chunk:
            break
        crc32 = zlib.crc32(chunk, crc32)
        offset += len(chunk)
        if remaining is not None:
            remaining -= len(chunk)
    return crc32
