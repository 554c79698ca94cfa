"""Converts closed parts of earlier versions of this package, CSV or Parquet, to the current version."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from destinations.history.sealed import Part
from destinations.history.snapshot import take_snapshot
from uploads.disk import DISK, replacement

from .folder import WriterLock
from .layout import lock_name, part_path

__all__ = ["convert_parts"]


def convert_parts(run_dir: Path, rank: int) -> Iterator[tuple[Part, str]]:
    """Converts the parts of a rank that an earlier version has closed.

    Args:
        run_dir: the folder of the run, which no process may be writing.
        rank: the rank that logged the rows.

    Yields:
        Each part that needs conversion, with the reason if it can't be converted, else "".

    Raises:
        RunInUseError: a process writes to the run.
        OSError: a part can't be read, or the disk is full.
    """
    lock = WriterLock(run_dir / lock_name(rank))
    lock.acquire()
    try:
        with take_snapshot(run_dir, rank, with_records=False, with_parents=False) as snapshot:
            parts = snapshot.parts
        for part in parts:
            with contextlib.closing(part.open()) as file:
                content, damage = file.packed.content, part.damage(file)
            if damage is None and content is not None:
                with replacement(part_path(part.folder, part.number), durable=True) as fd:
                    DISK.write(fd, content, 0)
                for suffix in (".csv", ".npy"):
                    part_path(part.folder, part.number, suffix).unlink(missing_ok=True)
            if damage is not None or content is not None:
                yield part, damage or ""
    finally:
        lock.release()
