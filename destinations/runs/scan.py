"""What a scan reports."""

from pathlib import Path

import attrs

__all__ = ["ScanReport"]


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
    duplicates: dict[str, tuple[Path, ...]] = attrs.field(factory=dict)
    problems: tuple[tuple[Path, str], ...] = ()
    warnings: tuple[str, ...] = ()
    is_full: bool = False
    seconds: float = 0.0
