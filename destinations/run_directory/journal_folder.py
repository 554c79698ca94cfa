"""The folder of a journal: made so that a power loss does not take it away, and taken away when nothing is left in it."""

import contextlib
from pathlib import Path

from .disk import DISK, Disk
from .files import remove_temporaries
from .layout import POSITION, segment_paths

__all__ = ["make_journal", "remove_journal", "sync_journal"]


def make_journal(folder: Path, disk: Disk = DISK) -> None:
    """Makes the folder and those around it, and takes out what a dead process had only prepared.

    That it lasts is for `sync_journal`.
    """
    target, missing = folder, []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        disk.make_folder(path)
    remove_temporaries(target, disk=disk)


def sync_journal(folder: Path, run_dir: Path, disk: Disk = DISK) -> None:
    """Waits until the disk knows the folder by its path, from the folder that holds the run."""
    for path in (run_dir.parent, run_dir, folder.parent, folder):
        disk.sync_folder(path)


def remove_journal(folder: Path, disk: Disk = DISK) -> None:
    """Takes away a journal of which all rows are in the CSV; its folders too, where nothing else is in them."""
    for path in segment_paths(folder):
        disk.unlink(path)
    # Without a position, segments that come back would be taken for new ones.
    disk.sync_folder(folder)
    remove_temporaries(folder, disk=disk)
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(folder / POSITION)
        disk.remove_folder(folder)
        disk.remove_folder(folder.parent)
