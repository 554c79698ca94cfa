"""Moves bytes between descriptors: by reference where the file system can, else by one copy."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import zlib

__all__ = ["READ_BYTES", "copy_all", "crc32_of", "reflink"]

_FICLONE = 0x40049409  # ioctl_ficlone(2)
_STRIDE_BYTES = 1 << 30
READ_BYTES = 1 << 20
_kept = threading.local()
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}


def reflink(source: int, target: int) -> bool:
    """Whether `target` now shares the blocks of `source`; False where the file system cannot (ext4, most network ones)."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def crc32_of(descriptor: int) -> int:
    """The CRC-32 of everything that the descriptor can read. Holds neither the interpreter's lock nor more than 1 MiB."""
    buffer = _buffer()
    crc32 = offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        crc32 = zlib.crc32(buffer[:count], crc32)
        offset += count
    return crc32


def copy_all(source: int, target: int) -> tuple[int, int | None]:
    """Copies everything and returns (bytes, CRC-32).

    A file below 1 MiB is read once and checksummed from memory. A larger one is copied by the kernel, as `cp` does, and has
    no checksum yet: to read it again would take as long as to copy it.
    """
    buffer = _buffer()
    count = os.preadv(source, [buffer], 0)
    if count < READ_BYTES:
        _write(target, buffer[:count], 0)
        return count, zlib.crc32(buffer[:count])
    total = 0
    while copied := _copy_stride(source, target, total):
        total += copied
    return total, None


def _copy_stride(source: int, target: int, offset: int) -> int:
    """Copies up to one stride and returns how much; 0 at the end of the source."""
    try:
        return os.copy_file_range(source, target, _STRIDE_BYTES, offset, offset)
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    buffer = _buffer()
    count = os.preadv(source, [buffer], offset)
    _write(target, buffer[:count], offset)
    return count


def _write(target: int, data: memoryview, offset: int) -> None:
    view = data
    while view:
        view = view[os.pwrite(target, view, offset + len(data) - len(view)) :]


def _buffer() -> memoryview:
    """1 MiB of this thread's own, kept: new memory for each file takes longer than to read it."""
    kept: memoryview | None = getattr(_kept, "buffer", None)
    if kept is None:
        kept = _kept.buffer = memoryview(bytearray(READ_BYTES))
    return kept
