"""The files that a journal is made of: fixed-size, memory-mapped where the file system allows, appended to where not.

A segment is written by the training thread; it is made, prepared and taken away by the writer thread.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from .disk import DISK, Disk
from .frames import MAGIC

__all__ = [
    "AppendedSegment",
    "MapFile",
    "MappedSegment",
    "Segment",
    "file_system_of",
    "is_network_file_system",
]

_POPULATE_STEP_BYTES = 64 << 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it.
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"),
        *("wekafs", "glusterfs", "pvfs2", "orangefs", "virtiofs"),
    }
)


MapFile = Callable[[int, int], mmap.mmap]
"""Maps a file, from its descriptor and size; raises OSError where its file system does not let it."""


class Segment(Protocol):
    """A file of frames that grows up to a limit."""

    path: Path
    number: int
    size: int

    def write(self, data: bytes, /) -> object:
        """Adds bytes, all or none.

        Raises:
            ValueError: the segment is full.
            OSError: the disk is.
        """

    def populate(self) -> None:
        """Prepares for being written to."""

    def end(self) -> int:
        """Returns up to where there may be frames."""

    def seal(self) -> None:
        """Makes the segment full: whatever still holds its `write` is refused."""

    def fileno(self) -> int:
        """Returns the descriptor to read and to sync."""

    def move(self, path: Path, number: int) -> None:
        """Gives the file its name."""

    def unmap(self) -> None:
        """Ends writing; reading goes on."""

    def close(self) -> None:
        """Lets go of the file."""


class _File:
    """What both kinds of segments share: a file that begins with `MAGIC`, and its name."""

    def __init__(self, path: Path, number: int, size: int, disk: Disk) -> None:
        self.path = path
        self.number = number
        self.size = size
        self._disk = disk
        self._fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def fileno(self) -> int:
        return self._fd

    def move(self, path: Path, number: int) -> None:
        self._disk.replace(self.path, path)
        self.path, self.number = path, number

    def close(self) -> None:
        self.unmap()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def unmap(self) -> None:
        """Nothing is mapped."""

    def _discard(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            self._disk.unlink(self.path)


class MappedSegment(_File):
    """A segment in memory that the kernel keeps: what is written is safe from the end of this process at once.

    Its blocks are allocated beforehand, for a mapped write to a full disk would be a signal (SIGBUS) and not an error.
    """

    def __init__(
        self, path: Path, number: int, size: int, map_file: MapFile = mmap.mmap, disk: Disk = DISK
    ) -> None:
        super().__init__(path, number, size, disk)
        try:
            _allocate(self._fd, size)
            self._map = map_file(self._fd, size)
        except BaseException:
            self._discard()
            raise
        self.write = self._map.write
        self.write(MAGIC)

    def populate(self) -> None:
        """Brings the pages in, so that the training thread does not have to; in steps, for the interpreter is held."""
        for start in range(0, self.size, _POPULATE_STEP_BYTES):
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_STEP_BYTES, self.size - start))
            except (OSError, ValueError, AttributeError):
                return

    def end(self) -> int:
        """Returns up to where there may be frames."""
        return self.size if self._map.closed else self._map.tell()

    def seal(self) -> None:
        """Makes the segment full."""
        if not self._map.closed:
            self._map.seek(self.size)

    def unmap(self) -> None:
        """Ends writing; reading goes on."""
        if hasattr(self, "_map"):
            self._map.close()


class AppendedSegment(_File):
    """A segment that is written by system calls, for file systems on which mappings cannot be relied on."""

    def __init__(self, path: Path, number: int, size: int, disk: Disk = DISK) -> None:
        super().__init__(path, number, size, disk)
        self._end = 0
        try:
            self.write(MAGIC)
        except BaseException:
            self._discard()
            raise

    def populate(self) -> None:
        """Nothing to prepare."""

    def write(self, data: bytes) -> None:
        """Adds bytes, all or none."""
        if self._fd < 0 or self._end + len(data) > self.size:
            raise ValueError("segment is full")
        self._disk.write(self._fd, data, self._end)
        self._end += len(data)

    def end(self) -> int:
        """Returns up to where there may be frames."""
        return self._end

    def seal(self) -> None:
        """Makes the segment full."""
        self.size = 0


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in {
            errno.EOPNOTSUPP,
            errno.EINVAL,
            errno.ENOSYS,
        }:
            raise
        zeros = bytes(_POPULATE_STEP_BYTES)
        for start in range(0, size, len(zeros)):
            os.pwrite(fd, zeros[: size - start], start)
        os.ftruncate(fd, size)


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """Returns the type of the file system that holds a path, such as "ext4"; "" where the system does not say.

    Args:
        path: an existing path.
        mounts: the content of `/proc/self/mountinfo` (see proc_pid_mountinfo(5)).
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    found, longest = "", -1
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        mount = fields.split(" ")[4].replace("\\040", " ")
        if len(mount) >= longest and (real == mount or real.startswith(mount.rstrip("/") + "/")):
            found, longest = rest.split(" ")[0], len(mount)
    return found


def is_network_file_system(kind: str) -> bool:
    """Says whether mappings of files there are not to be relied on."""
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")
