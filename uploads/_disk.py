"""What Python's `os` has no call for: writing a whole file system out, what kind it is, and which boot of the machine this is."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["MOUNTS", "boot_id", "network_file_system_of", "sync_disk_of"]

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
