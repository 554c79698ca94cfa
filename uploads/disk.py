"""File operations that `uploads`, `destinations` and `events` share: read, replace, append, copy, lock, fork.

All functions work in the calling thread, may be called from any thread, and raise `OSError` as the operating
system does. Nothing here knows the layout of a spool or of a run folder.

- A file that others read is replaced in one step (`replacement`, `replace_file`) or gets whole lines
  (`append_line`).
- `open_regular` opens files that others may have put there: it follows no symlink and never waits for a
  FIFO. Documents are read up to a limit (`read_regular`, `read_json`).
- `remove_if` moves a file to a name of its own before it compares and removes it, and puts it back if it is
  another file than the caller meant.
- A lock is flock(2): it ends with the process that holds it (`try_lock`, `is_locked`, and `FileLock`, which
  says who holds it). Without flock, as on Windows, taking one raises `OSError` with `ENOSYS`.

Other systems than Linux use slower replacements for its system calls and for `/proc`.
"""

import contextlib
import ctypes
import errno
import functools
import itertools
import json
import os
import shutil
import socket
import stat
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = [
    "ABSENT",
    "DISK",
    "IRREGULAR",
    "MAX_DOCUMENT_BYTES",
    "MOUNTS",
    "NO_FLOCK",
    "NO_LINKS",
    "PRIVATE_MODE",
    "READ_BYTES",
    "Disk",
    "FileLock",
    "IrregularFileError",
    "UnreadableError",
    "Wakeup",
    "append_line",
    "boot_id",
    "call_in_forked_children",
    "closing",
    "copy_all",
    "crc32_of",
    "crc32_of_both",
    "duplicate_above",
    "end_of_last_line",
    "file_system_of",
    "fsync_path",
    "give_way",
    "has_process_ended",
    "is_locked",
    "is_network_file_system",
    "is_open_file",
    "link_open",
    "lock",
    "look_twice",
    "mark_unreadable",
    "open_regular",
    "open_temporary",
    "read_at",
    "read_json",
    "read_regular",
    "read_with_status",
    "reflink",
    "remove_if",
    "rename_new",
    "rename_without_replacing",
    "replace_file",
    "replace_json",
    "replacement",
    "require_readable",
    "stamp_of",
    "stop_calling_in_forked_children",
    "sync_disk_of",
    "to_utf8",
    "try_lock",
    "unlock",
    "write_all",
    "write_at",
    "write_new",
]

MAX_DOCUMENT_BYTES = 32 << 20
"""Size limit of a document, and of a line of an index, that is read."""

PRIVATE_MODE = 0o600
"""Permissions of a file that only its owner may read."""

READ_BYTES = 1 << 20
"""Size of the buffer that `copy_all` and `crc32_of` read with."""

NO_FLOCK = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL})
"""Error codes of file systems and systems without flock(2)."""

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Error codes of file systems without hard links."""

MOUNTS = Path("/proc/self/mountinfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PUBLIC_MODE = 0o666  # Less the umask.
_CHUNK_BYTES = 1 << 16
_UNREADABLE = ".unreadable/"
_MAX_REASON_BYTES = 1000
_STRIDE_BYTES = 1 << 30
_HANDOVER_SECONDS = 1.0
_HANDOVER_RETRY_SECONDS = 0.01
_MAX_LOCK_TRIES = 10
_MAX_LEAF_CHARACTERS = 50  # At most 200 of the 255 bytes of a name.
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NO_NOREPLACE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
_FICLONE = 0x40049409  # ioctl_ficlone(2)
_NOT_REGULAR = {errno.ENXIO, errno.ENODEV}
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs"),
        *("panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"),
    }
)

Result = TypeVar("Result")

# macOS and Windows have no fdatasync(2).
_fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
_temporary_numbers = itertools.count()
_buffers = threading.local()
# Objects by their id and the name of the method to call.
_fork_handlers: weakref.WeakValueDictionary[tuple[int, str], Any] = weakref.WeakValueDictionary()
_is_fork_registered: list[bool] = []


class IrregularFileError(OSError):
    """A symlink, FIFO or device where a regular file is expected, or a file above the reader's size limit."""


IRREGULAR = (IrregularFileError, IsADirectoryError)
"""What `open_regular` raises for anything but a regular file."""

ABSENT = (FileNotFoundError, NotADirectoryError)
"""What `open_regular` raises if nothing is there. Any other error means that the file can't be read."""


class UnreadableError(OSError):
    """The content of a file or an object that is there cannot be read; `strerror` is the reason."""


# Reading.


def look_twice(path: str | Path, look: Callable[[], Result]) -> Result:
    """Returns the result of a call for a path; repeats the call if it finds nothing although a file is there.

    Network and FUSE file systems may briefly report a file that is being replaced as missing. A caller that
    believed it would start a new file and lose the old content.

    Raises:
        FileNotFoundError: Nothing is there.
        OSError: From the call.
    """
    try:
        return look()
    except FileNotFoundError:
        if not os.path.lexists(path):
            raise
        return look()


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Returns bytes from an offset on; fewer only at the end of the file, where pread(2) may return fewer."""
    data = os.pread(descriptor, length, offset)
    while len(data) < length and (more := os.pread(descriptor, length - len(data), offset + len(data))):
        data += more
    return data


def open_regular(
    path: str | Path, flags: int = os.O_RDONLY, mode: int = PRIVATE_MODE, *, follow_symlink: bool = False
) -> int:
    """Opens a regular file; does not wait for the other end of a FIFO.

    Args:
        path: The file.
        flags: For open(2).
        mode: Permissions of a file that this creates, less the umask.
        follow_symlink: Whether the path may be a symlink.

    Raises:
        IrregularFileError: Something else is there.
        IsADirectoryError: A folder is there.
        UnreadableError: See `mark_unreadable`.
        OSError: The file could not be opened.
    """
    return _opened(path, flags if follow_symlink else flags | os.O_NOFOLLOW, mode)[0]


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Closes the descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(path: str | Path, flags: int, mode: int = PRIVATE_MODE) -> tuple[int, os.stat_result]:
    try:
        descriptor = look_twice(path, lambda: os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode))
    except OSError as error:
        if error.errno == errno.ELOOP:
            require_readable(path)
            raise IrregularFileError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        if error.errno in _NOT_REGULAR:
            raise IrregularFileError(error.errno, "it is not a regular file", str(path)) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise IrregularFileError(errno.EINVAL, "it is not a regular file", str(path))


def mark_unreadable(path: Path, reason: str) -> None:
    """Marks a file of a copy that could not be read; opening it raises the reason.

    The mark is a link that leads nowhere, so that nobody takes the file for a missing or an empty one.

    Raises:
        OSError: The folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = reason.replace("\0", "").encode("utf-8", "backslashreplace")[:_MAX_REASON_BYTES]
    link = path.with_name(f".{os.urandom(8).hex()}.tmp")
    link.symlink_to(f"{_UNREADABLE}{text.decode('utf-8', 'ignore') or 'unknown'}")
    link.replace(path)


def require_readable(path: str | Path) -> None:
    """Raises `UnreadableError` if `mark_unreadable` has left a reason at this path."""
    try:
        target = os.readlink(path)  # a Path would shorten it
    except OSError:
        return
    if target.startswith(_UNREADABLE):
        raise UnreadableError(errno.EIO, target.removeprefix(_UNREADABLE), str(path))


def read_regular(path: str | Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Returns the content of a regular file; see `open_regular`.

    Raises:
        IrregularFileError: It is something else, or is larger than `max_bytes`.
        OSError: The file could not be read.
    """
    return read_with_status(path, max_bytes)[0]


def read_with_status(path: str | Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> tuple[bytes, os.stat_result]:
    """Returns the content of a regular file, which may grow meanwhile, and its status before it was read.

    Raises:
        IrregularFileError: It is something else, or is larger than `max_bytes`.
        OSError: The file could not be read.
    """
    descriptor, status = _opened(path, os.O_RDONLY | os.O_NOFOLLOW)
    size = status.st_size
    # Without `closing`, which takes as long as closing: a scan reads a file of each run.
    try:
        if size <= max_bytes:
            data = os.read(descriptor, size + 1)
            # A read returns less above 2 GiB or on a network disk, and more if the file has grown.
            while size != len(data) <= max_bytes and (more := os.read(descriptor, _CHUNK_BYTES)):
                data += more
            if len(data) <= max_bytes:
                return data, status
    finally:
        os.close(descriptor)
    raise IrregularFileError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", str(path))


def read_json(path: str | Path) -> dict[str, Any]:
    """Returns the JSON object in a regular file; empty if it is missing, unreadable or something else."""
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def end_of_last_line(descriptor: int, size: int) -> int:
    r"""Returns the offset after the last b"\n" before `size`, 0 if there is none; reads backwards."""
    end = size
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        found = read_at(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


# Writing.


class Disk:
    """The system calls of a writer; tests replace them, to fail or to record each change."""

    def open(self, path: Path | str, flags: int, mode: int = _PUBLIC_MODE) -> int:
        """Opens a file; a new one gets `mode`, less the umask."""
        return look_twice(path, lambda: os.open(path, flags, mode))

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Writes all of the data at an offset."""
        write_at(fd, memoryview(data), offset)

    def truncate(self, fd: int, size: int) -> None:
        """Truncates a file."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Waits until the content of a file is on the disk, whether it was written or mapped."""
        _fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Waits until the names in a folder are on the disk, where the file system supports it."""
        with contextlib.suppress(OSError):
            fsync_path(path)

    def replace(self, source: Path | str, target: Path) -> None:
        """Renames a file, replacing an existing target."""
        Path(source).replace(target)

    def unlink(self, path: Path | str) -> None:
        """Removes a file."""
        Path(path).unlink()

    def make_folder(self, path: Path) -> None:
        """Creates a folder unless it exists."""
        path.mkdir(exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()


DISK = Disk()


def open_temporary(path: Path, disk: Disk = DISK, mode: int = _PUBLIC_MODE) -> tuple[int, str]:
    """Creates a file beside `path` and returns its descriptor and name, `.NAME.PID-NUMBER.tmp`.

    Unlike `tempfile.mkstemp`, it respects the umask.
    """
    while True:
        name = f"{path.parent}/.{path.name}.{os.getpid()}-{next(_temporary_numbers)}.tmp"
        # Exclusive: a container that shares the folder may have given the same process id.
        with contextlib.suppress(FileExistsError):
            return disk.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), name


@contextlib.contextmanager
def replacement(
    path: Path, *, durable: bool = False, mode: int = _PUBLIC_MODE, disk: Disk = DISK
) -> Iterator[int]:
    """Yields the descriptor of a new file that replaces `path` in one step when the block ends.

    A reader sees the old content or the new. If the block raises, the new file is removed.

    Args:
        path: The file to replace; its folder is created if missing.
        durable: Whether to wait until content and name are on the disk.
        mode: Permissions, less the umask.
        disk: Makes the system calls.
    """
    try:
        descriptor, name = open_temporary(path, disk, mode)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = open_temporary(path, disk, mode)
    with _replacing(path, descriptor, name, disk):
        yield descriptor
        if durable:
            disk.sync(descriptor)
    if durable:
        disk.sync_folder(path.parent)


@contextlib.contextmanager
def _replacing(path: Path, descriptor: int, name: str, disk: Disk = DISK) -> Iterator[int]:
    """Yields the descriptor of a temporary file, then gives the file its name, or removes it."""
    try:
        with closing(descriptor):
            yield descriptor
        disk.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def replace_file(
    path: Path, content: bytes, *, durable: bool = False, mode: int = _PUBLIC_MODE, disk: Disk = DISK
) -> None:
    """Replaces a file in one step; see `replacement`."""
    with replacement(path, durable=durable, mode=mode, disk=disk) as descriptor:
        disk.write(descriptor, content, 0)


def replace_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file that only its owner may read with a JSON object, in one step; its folder must exist."""
    with _replacing(path, *open_temporary(path, mode=PRIVATE_MODE)) as descriptor:
        write_all(descriptor, to_utf8(json.dumps(value, ensure_ascii=False)))


def write_new(path: str | Path, text: str) -> None:
    """Creates a file that only its owner may read.

    Raises:
        ValueError: The text is larger than `MAX_DOCUMENT_BYTES`.
        FileExistsError: The file exists.
    """
    data = to_utf8(text)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{path} must have at most {MAX_DOCUMENT_BYTES} bytes, got {len(data)}")
    with closing(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_MODE)) as new:
        write_all(new, data)


def append_line(path: str | Path, line: str, *, mode: int = _PUBLIC_MODE) -> None:
    """Appends a whole line or nothing. If a crash left a partial last line, that one is terminated first.

    Only one thread may call it at a time, because a failed write is cut off again.

    Args:
        path: The file; created if missing. Its folder exists.
        line: Without its end.
        mode: Permissions of a new file, less the umask.

    Raises:
        IrregularFileError: Not a regular file.
        OSError: The line could not be written.
    """
    with closing(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)) as descriptor:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        try:
            write_all(descriptor, b"\n" * is_torn + to_utf8(line) + b"\n")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of the data; write(2) may take a part of it, for instance on a nearly full disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def to_utf8(text: str) -> bytes:
    r"""Encodes text as UTF-8. A lone surrogate, as in a name that is not UTF-8, becomes `\udcXX`."""
    return text.encode("utf-8", "backslashreplace")


def fsync_path(path: str | Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    with closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


def sync_disk_of(path: Path) -> None:
    """Calls syncfs(2) for the file system of `path`. Since Linux 5.8 it reports write errors.

    Elsewhere it calls sync(2), which does not.

    Raises:
        OSError: Something could not be written.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "syncfs"):
        os.sync()
        return
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        if library.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Returns values that change when a file is written or replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


# Removing and renaming with a check: a path only says where something was.


def remove_if(path: str | Path, is_meant: Callable[[str], bool]) -> bool:
    """Removes a file, or a folder with its content, if it is the one that the caller means.

    It is moved to a unique name before it is compared, so that a file which takes its name meanwhile is never
    removed. Anything else is put back. A kill in between leaves `.NAME.NUMBER.removed` in the same folder.

    Args:
        path: The file or folder; a symlink is not followed.
        is_meant: Gets first the given path and then the new name, and compares the file with what the caller
            holds: an inode (`is_open_file`), an id in a file, a digest.

    Returns:
        Whether it was removed; False if nothing is there, or something else.

    Raises:
        FileExistsError: The other file could not be put back, because its name was taken meanwhile; the error
            says where it is now.
        OSError: It could not be moved or removed; a file has its name again, a part of a folder may be left
            under the new name.
    """
    name = os.fspath(path)
    if not os.path.lexists(name) or not is_meant(name):
        return False
    folder, leaf = os.path.split(name.rstrip("/"))
    number = os.urandom(6).hex()
    aside = os.path.join(folder, f".{leaf[:_MAX_LEAF_CHARACTERS]}.{number}.removed")
    try:
        os.rename(name, aside)
    except FileNotFoundError:
        return False
    try:
        is_it = is_meant(aside)
    except BaseException:
        rename_new(aside, name)
        raise
    if not is_it:
        rename_new(aside, name)
        return False
    if stat.S_ISDIR(os.lstat(aside).st_mode):
        shutil.rmtree(aside)
        return True
    try:
        os.unlink(aside)
    except OSError:
        rename_new(aside, name)
        raise
    return True


def is_open_file(descriptor: int) -> Callable[[str], bool]:
    """Returns a function that says whether a path names an open file or folder; for `remove_if`.

    An inode number is reused only after the descriptor is closed.
    """
    held = os.fstat(descriptor)

    def is_it(path: str) -> bool:
        try:
            return os.path.samestat(held, os.lstat(path))
        except FileNotFoundError:
            return False

    return is_it


def link_open(descriptor: int, target: str | Path, folder: int | None = None) -> None:
    """Gives an open file another name, even if the path it was opened by has changed.

    Args:
        descriptor: The file.
        target: Its new name.
        folder: The descriptor of the folder that a relative name is in.

    Raises:
        FileExistsError: The target exists.
        FileNotFoundError: The file has no name left; or there is no `/proc`, as on macOS.
        OSError: It could not be linked.
    """
    # Python calls linkat(2), which follows the link in /proc, only with the descriptor of a folder; an
    # absolute path doesn't use it.
    os.link(f"/proc/self/fd/{descriptor}", target, src_dir_fd=descriptor, dst_dir_fd=folder)


def rename_new(source: str, target: str) -> None:
    """Renames in one step, and never replaces what is there.

    Raises:
        FileExistsError: The target exists.
        OSError: It could not be renamed.
    """
    if rename_without_replacing(source, target):
        return
    try:  # NFS, and systems other than Linux.
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    else:
        os.unlink(source)
        return
    # A folder, which can replace only an empty one, or FUSE without links.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)
    os.rename(source, target)


def rename_without_replacing(source: str, target: str, folder: int = _AT_FDCWD) -> bool:
    """Renames by renameat2(2); returns False if the system or the file system can't.

    Args:
        source: The file or folder.
        target: Its new name.
        folder: The descriptor of the folder that contains both.

    Raises:
        FileExistsError: The target exists.
        OSError: It could not be renamed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    if library.renameat2(folder, os.fsencode(source), folder, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_NOREPLACE:
        return False
    raise OSError(code, os.strerror(code), source, None, target)


# Copying.


def reflink(source: int, target: int) -> bool:
    """Makes `target` share the blocks of `source`; returns False if the file system can't (ext4, NFS)."""
    if fcntl is None:
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def crc32_of(descriptor: int) -> int:
    """Returns the CRC-32 of the whole file. Releases the GIL and holds at most 1 MiB."""
    buffer = _buffer()
    crc32 = offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        crc32 = zlib.crc32(buffer[:count], crc32)
        offset += count
    return crc32


def crc32_of_both(first: int, second: int, size: int) -> int:
    """Returns the CRC-32 of two concatenated pieces, as zlib's crc32_combine does.

    Args:
        first: The CRC-32 of the first.
        second: The CRC-32 of the second.
        size: Bytes of the second.
    """
    return _product(first, _shift(size)) ^ second


@functools.lru_cache(maxsize=16)  # All parts of a file have one size, but the last.
def _shift(size: int) -> int:
    """Returns x to the power of the number of bits in the field of the CRC-32: the effect of appending."""
    power, square = 1 << 31, 1 << 23  # 1, and x to the power of 8; the highest bit is x to the power of 0.
    while size:
        if size & 1:
            power = _product(power, square)
        square = _product(square, square)
        size >>= 1
    return power


def _product(left: int, right: int) -> int:
    product = 0
    while right:
        if right & 1 << 31:
            product ^= left
        right = right << 1 & 0xFFFFFFFF
        left = left >> 1 ^ (0xEDB88320 if left & 1 else 0)
    return product


def copy_all(source: int, target: int) -> tuple[int, int | None]:
    """Copies a whole file and returns its size in bytes and its CRC-32.

    A file below 1 MiB is read once and checksummed from memory. The kernel copies a larger one, as `cp` does,
    and its checksum is None: reading it again would take as long as the copy.
    """
    buffer = _buffer()
    count = os.preadv(source, [buffer], 0)
    if count < READ_BYTES:
        write_at(target, buffer[:count], 0)
        return count, zlib.crc32(buffer[:count])
    total = 0
    while copied := _copy_stride(source, target, total):
        total += copied
    return total, None


def _copy_stride(source: int, target: int, offset: int) -> int:
    """Copies up to one stride and returns its size; 0 at the end of the source."""
    try:
        return os.copy_file_range(source, target, _STRIDE_BYTES, offset, offset)
    except AttributeError:  # not Linux
        pass
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    buffer = _buffer()
    count = os.preadv(source, [buffer], offset)
    write_at(target, buffer[:count], offset)
    return count


def write_at(target: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of the data at an offset, whatever the position of the file."""
    view = memoryview(data)
    while view:
        view = view[os.pwrite(target, view, offset + len(data) - len(view)) :]


def _buffer() -> memoryview:
    """Returns this thread's buffer of 1 MiB; allocating one per file takes longer than reading it."""
    kept: memoryview | None = getattr(_buffers, "buffer", None)
    if kept is None:
        kept = _buffers.buffer = memoryview(bytearray(READ_BYTES))
    return kept


# Locks.


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Takes a flock(2) without waiting; returns False if another open file holds it.

    Args:
        descriptor: The lock ends when all of its duplicates are closed, including duplicates in forked
            children.
        shared: Whether others may hold a shared lock at the same time.

    Raises:
        OSError: The file system has no locks.
    """
    calls = _lock_calls()
    try:
        calls.flock(descriptor, (calls.LOCK_SH if shared else calls.LOCK_EX) | calls.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(descriptor: int) -> None:
    """Takes an exclusive flock(2), waiting until it is free.

    Raises:
        OSError: The file system has no locks.
    """
    calls = _lock_calls()
    calls.flock(descriptor, calls.LOCK_EX)


def unlock(descriptor: int) -> None:
    """Releases a flock(2), also for those who share the open file."""
    calls = _lock_calls()
    calls.flock(descriptor, calls.LOCK_UN)


def duplicate_above(descriptor: int, lowest: int) -> int:
    """Returns a duplicate with a number of at least `lowest`, which child programs do not inherit."""
    calls = _lock_calls()
    number: int = calls.fcntl(descriptor, calls.F_DUPFD_CLOEXEC, lowest)
    return number


def _lock_calls() -> Any:
    if fcntl is None:
        raise OSError(
            errno.ENOSYS,
            "this Python has no module fcntl, and therefore no file locks, which uploads need: "
            "they work on Linux and macOS",
        )
    return fcntl


def is_locked(path: str | Path) -> bool:
    """Returns whether an exclusive flock(2) is held on a file; False without a file or without locks."""
    try:
        with closing(open_regular(path)) as descriptor:
            return not try_lock(descriptor, shared=True)
    except OSError:
        return False


class FileLock:
    """An exclusive flock(2) on a file whose text says who holds it: pid, host, since.

    The file exists while the lock is held, and after its owner was killed. A forked child must call
    `forget_in_child`, or it keeps the lock.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self, **about: object) -> None:
        """Takes the lock without waiting for its owner.

        Args:
            about: More about this owner for the text, as JSON.

        Raises:
            Exception: From `refusal`: another process, or another lock of this process, holds it.
            OSError: The file cannot be created, or the file system has no flock (`NO_FLOCK`).
        """
        for _ in range(_MAX_LOCK_TRIES):
            fd = self._open()
            if fd is None:
                continue
            self._fd = fd
            owner = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.time(),
                **about,
            }
            with contextlib.suppress(OSError):  # On a full disk, the lock works without its text.
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(owner).encode(), 0)
            return
        raise self.refusal()

    def release(self) -> None:
        """Removes the file and releases the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Another process may have a folder, and a lock, at this path now.
            if self._is_at(self._path, fd):
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(fd)

    def forget_in_child(self) -> None:
        """Closes the descriptor in a forked child, which would otherwise keep the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def owner(self) -> dict[str, Any]:
        """Returns the content of the lock file: pid, host, since, and the `about` of `acquire`."""
        return read_json(self._path)

    def refusal(self) -> Exception:
        """Returns the error for a lock that somebody else holds."""
        return BlockingIOError(errno.EWOULDBLOCK, f"locked by {self.owner()}", str(self._path))

    def _open(self) -> int | None:
        """Returns the locked file, or None if it was replaced meanwhile."""
        fd = open_regular(self._path, os.O_RDWR | os.O_CREAT, _PUBLIC_MODE)
        try:
            is_free = self._is_free(fd)
            # The last owner may have removed the file between the two calls.
            is_held = is_free and self._is_at(self._path, fd)
        except BaseException:
            os.close(fd)
            raise
        if is_held:
            return fd
        os.close(fd)
        if not is_free:
            raise self.refusal()
        return None

    def _is_free(self, fd: int) -> bool:
        deadline = time.monotonic() + _HANDOVER_SECONDS
        while not try_lock(fd):
            # A reader holds it, shared, for an instant. A process that was killed while it started a program
            # leaves the lock to that program until it has begun.
            is_held = is_locked(self._path) and not self._has_owner_ended()
            if is_held or time.monotonic() > deadline:
                return False
            time.sleep(_HANDOVER_RETRY_SECONDS)
        return True

    def _has_owner_ended(self) -> bool:
        owner = self.owner()
        is_here = owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int)
        return is_here and bool(has_process_ended(owner["pid"]))

    @staticmethod
    def _is_at(path: Path, fd: int) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(fd))
        except OSError:
            return False


# Forks.


class Wakeup(threading.Event):
    """An event that a signal handler may set while the interrupted thread is setting it.

    The lock of `threading.Event` can't be taken twice: the handler, and training with it, would wait forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


def call_in_forked_children(method: Callable[[], None]) -> None:
    """Registers a bound method to be called in every forked child, as long as its object lives."""
    if not _is_fork_registered:
        _is_fork_registered.append(True)
        os.register_at_fork(after_in_child=_call_fork_handlers)
    bound: Any = method  # A bound method, which `Callable` does not say.
    _fork_handlers[id(bound.__self__), bound.__name__] = bound.__self__


def stop_calling_in_forked_children(method: Callable[[], None]) -> None:
    """Undoes `call_in_forked_children`; does nothing if the method isn't registered."""
    bound: Any = method  # As above.
    _fork_handlers.pop((id(bound.__self__), bound.__name__), None)


def _call_fork_handlers() -> None:
    for (_, name), owner in list(_fork_handlers.items()):
        getattr(owner, name)()


# The machine.


def has_process_ended(pid: int) -> bool | None:
    """Returns whether a process of this machine has ended; None if the system doesn't tell."""
    if os.name == "nt":  # There, signal 0 ends a process.
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # It belongs to another user.
        return False
    except OverflowError:
        return None
    return False


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str:
    """Returns the type of the file system of a path, such as "ext4"; "" if the system doesn't tell.

    Args:
        path: Exists.
        mounts: A file in the format of proc_pid_mountinfo(5).
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    real = os.path.realpath(path)
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount = fields.split(" ")[4].replace("\\040", " ")
        if len(mount) >= longest and (real == mount or real.startswith(mount.rstrip("/") + "/")):
            found, longest = rest.split(" ")[0], len(mount)
    return found


def is_network_file_system(kind: str) -> bool:
    """Returns whether a type of file system is a network one, without reliable locks and memory maps.

    FUSE counts as one: nearly all of its file systems are (sshfs, s3fs, gcsfuse, rclone, JuiceFS).
    """
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")


def give_way(nice: int) -> None:
    """Leaves the processors and the disk to other processes; for a process that nobody waits for.

    Where the kernel groups processes by session (autogroup), `nice` alone says nothing to another session.

    Args:
        nice: Added to the nice value of this process, which the disk follows too.
    """
    os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")


def boot_id() -> str:
    """Returns an identifier that changes when the machine boots; empty if the system doesn't tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
