"""The system calls that metrics reach the disk by, in one object: what a crash may interrupt, and a test may count.

Everything that decides whether a row is in the CSV, in the journal or in both goes through here. Any thread may call.
"""

import contextlib
import os
from pathlib import Path

__all__ = ["DISK", "Disk"]


class Disk:
    """The operating system's own calls; errors are `OSError`s as they come."""

    def open(self, path: Path | str, flags: int) -> int:
        """Opens a file; a new one may be read by whom the umask lets."""
        return os.open(path, flags, 0o666)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Writes all of the data at an offset."""
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], offset + written)

    def truncate(self, fd: int, size: int) -> None:
        """Cuts a file."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Waits until the disk has what is in a file, whether it was written or mapped."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Waits until the disk has the names in a folder, where the file system can do that."""
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def replace(self, source: Path | str, target: Path) -> None:
        """Gives a file another name, in the place of whatever has it."""
        Path(source).replace(target)

    def unlink(self, path: Path | str) -> None:
        """Takes a file away."""
        Path(path).unlink()

    def make_folder(self, path: Path) -> None:
        """Makes a folder, where there is none."""
        path.mkdir(exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Takes an empty folder away."""
        path.rmdir()


DISK = Disk()
