"""What a scan begins with, what it finds, and what it reports."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from .reading import Reading

__all__ = ["DAMAGED", "RUNNING", "Found", "Known", "KnownRun", "ScanReport"]

_MOST_PROBLEMS = 100


@attrs.frozen
class ScanReport:
    """What a scan found; nothing of it is raised.

    Args:
        runs: how many runs there are now.
        added: runs that were not known before.
        changed: known runs of which something was read again.
        unchanged: known runs that cost a look, and no more.
        moved: runs of `added` whose id had been at another path, which is gone.
        gone: known runs whose folder is gone, those that moved among them.
        alive: runs that are being written.
        damaged: runs of which something could not be read; each has a `problem`.
        orphans: of these, run folders without a sidecar.
        duplicates: the paths of each run id that occurs more than once.
        problems: where something was wrong, and what; the first hundred.
        warnings: about the index and the roots.
        is_full: whether everything was read, whatever was known.
        seconds: how long it took.
    """

    runs: int = 0
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    moved: int = 0
    gone: int = 0
    alive: int = 0
    damaged: int = 0
    orphans: int = 0
    duplicates: Mapping[str, tuple[Path, ...]] = attrs.field(factory=dict)
    problems: tuple[tuple[Path, str], ...] = ()
    warnings: tuple[str, ...] = ()
    is_full: bool = False
    seconds: float = 0.0

    @classmethod
    def total(cls, reports: "Iterable[ScanReport]", **changes: Any) -> "ScanReport":
        """Returns the sum of the reports of several roots."""
        total: dict[str, Any] = {"duplicates": {}, "problems": (), "warnings": ()}
        for report in reports:
            for name, value in attrs.asdict(report, recurse=False).items():
                if name == "is_full":
                    total[name] = value
                elif name == "duplicates":
                    total[name] |= value
                else:
                    total[name] = total.get(name, 0) + value if name in total else value
        total["problems"] = total["problems"][:_MOST_PROBLEMS]
        return cls(**total | changes)


# Id, modification time (ns) and inode of the folder, why to look further all the same (`RUNNING`, `DAMAGED`, or 0), the state
# of the files, the last sign of life. A tuple, for there may be a hundred thousand of them.
KnownRun = tuple[int, int, int, int, str, float | None]
RUNNING, DAMAGED = 1, 2


@attrs.frozen
class Known:
    """What an index knows of a root.

    Args:
        runs: by path, see `KnownRun`.
        folders: by path: modification time (ns) and inode of folders that are no runs.
        children: paths of runs and folders, by the path of the folder around them.
    """

    runs: dict[str, KnownRun] = attrs.field(factory=dict)
    folders: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    children: dict[str, list[str]] = attrs.field(factory=dict)


@attrs.define
class Found:
    """A run that is not as the index knows it.

    Args:
        path: below the root; "" is the root itself.
        reading: what its files say; None where they are as they were, or cannot be read.
        problem: what is wrong with it.
        heartbeat_at: the last sign of life.
        folder_mtime_ns: of the folder; 0 where it is not to be relied on.
        folder_inode: of the folder.
        files: the state of its files.
        open: why the next scan has to look further, even if the folder is as it was: `RUNNING`, `DAMAGED`, both, or 0.
        is_orphan: whether it is a run folder without a sidecar.
    """

    path: str
    reading: Reading | None
    problem: str | None
    heartbeat_at: float | None
    folder_mtime_ns: int
    folder_inode: int
    files: str
    open: int
    is_orphan: bool = False
