"""What Python's `os` has no call for: writing a whole file system out, what kind it is, and which boot of the machine this is."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import stat
import threading
import uuid
import weakref
import zlib
from pathlib import Path
from typing import Any, Protocol

from .errors import SpoolDamaged

__all__ = [
    "MOUNTS",
    "READ_BYTES",
    "append_line",
    "boot_id",
    "copy_all",
    "crc32_of",
    "exists",
    "forget_in_child",
    "fsync_path",
    "mkdir",
    "network_file_system_of",
    "open_regular",
    "read_bytes",
    "read_json",
    "reflink",
    "rename",
    "replace_json",
    "rmdir",
    "sync_disk_of",
    "unlink",
    "write_all",
    "write_text",
]

MOUNTS = Path("/proc/self/mountinfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.glusterfs",
    "fuse.s3fs",
    "fuse.sshfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "panfs",
    "smb3",
    "smbfs",
    "virtiofs",
    "wekafs",
}


def sync_disk_of(path: Path) -> None:
    """syncfs(2) for the file system that the path is on. Since Linux 5.8 it reports what could not be written.

    Raises:
        OSError: Something could not be written.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if library.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)


def network_file_system_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The kind of the network file system that the path is on, such as "nfs4"; None on a local disk, and where the system does not say.

    Args:
        path: Exists.
        mounts: In the format of proc_pid_mountinfo(5).
    """
    try:
        device = path.stat().st_dev
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [wanted]:
            kind = after.partition(" ")[0]
            return kind if kind in _NETWORK else None
    return None


def boot_id() -> str:
    """What changes when the machine starts anew; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


_READ_BYTES = 1 << 16
_MOST_BYTES = 16 << 20  # A manifest names what it comes after, with twenty bytes for each.
_NOT_A_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV}

# Paths as text: to make a Path takes longer than the system takes for these five, and each is done for every upload.


def exists(path: str) -> bool:
    """Whether there is such a file or folder."""
    return os.path.exists(path)  # noqa: PTH110  # as said above


def mkdir(path: str) -> None:
    """Makes a folder for this user alone."""
    os.mkdir(path, 0o700)  # noqa: PTH102


def rename(source: str, target: str) -> None:
    """Changes a name in one step."""
    os.rename(source, target)  # noqa: PTH104


def unlink(path: str) -> None:
    """Removes a file."""
    os.unlink(path)  # noqa: PTH108


def rmdir(path: str) -> None:
    """Removes an empty folder."""
    os.rmdir(path)  # noqa: PTH106


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Does not follow a link, and does not wait for the other end of a FIFO.

    Raises:
        SpoolDamaged: Something else is there.
        OSError: It could not be opened; says nothing about what is there.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise SpoolDamaged(f"{path} must be a regular file, got {error.strerror}") from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise SpoolDamaged(f"{path} must be a regular file, got {stat.filemode(mode)}")
    return descriptor


def read_bytes(path: str | Path) -> bytes:
    """A small file, whole.

    Raises:
        SpoolDamaged: Not a regular file, or larger than any that the spool writes.
        OSError: It could not be read.
    """
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size > _MOST_BYTES:
            raise SpoolDamaged(f"{path} must have at most {_MOST_BYTES} bytes, got more")
        data = piece = os.read(descriptor, _READ_BYTES)
        while len(piece) == _READ_BYTES and len(data) <= _MOST_BYTES:
            piece = os.read(descriptor, _READ_BYTES)
            data += piece
    finally:
        os.close(descriptor)
    return data


def write_all(descriptor: int, data: bytes) -> None:
    """Writes everything: one call may take a part, on a disk that is nearly full for instance."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_text(path: str | Path, text: str) -> None:
    """Writes a new file for this user alone.

    Raises:
        ValueError: It is larger than what can be read again.
    """
    data = _encoded(text)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} must have at most {_MOST_BYTES} bytes, got {len(data)}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)


def replace_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file in one step; a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_text(temporary, json.dumps(value, ensure_ascii=False))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Appends one whole line or nothing; begins a line of its own where a crash tore the last one. One thread at a time.

    Raises:
        SpoolDamaged: Not a regular file.
        OSError: The line could not be written.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        try:
            write_all(descriptor, b"\n" * torn + _encoded(line) + b"\n")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def fsync_path(path: Path) -> None:
    """Has the kernel write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is none, or something else."""
    try:
        value = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _encoded(text: str) -> bytes:
    r"""As UTF-8. Half a surrogate pair, as names of files that are not UTF-8 have, becomes `\udcXX`, which JSON reads back."""
    return text.encode("utf-8", "backslashreplace")


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


class _Forkable(Protocol):
    def _forget_after_fork(self) -> None: ...


_queues: weakref.WeakSet[_Forkable] = weakref.WeakSet()
_registered: list[bool] = []


def forget_in_child(queue: _Forkable) -> None:
    """Has `queue._forget_after_fork()` called in every child that is forked from here on, as long as the queue lives."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_forget_all)
    _queues.add(queue)


def _forget_all() -> None:
    for queue in list(_queues):
        queue._forget_after_fork()  # noqa: SLF001  # the protocol above
