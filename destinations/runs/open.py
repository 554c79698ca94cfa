"""`open_runs`: from folders, or a dataset, to the runs in them."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import RootError
from .index import Index, cache_folder
from .root import Root
from .runs import Runs

__all__ = ["open_runs"]


def open_runs(
    *roots: str | os.PathLike[str],
    cache: str | os.PathLike[str] | None = None,
    scan: bool = True,
    clock: Callable[[], float] = time.time,
) -> Runs:
    """Opens the runs below some folders, and looks at what changed since the last time.

    ```python
    with open_runs("runs") as runs:
        for run in runs.query(where="hparams.optim.lr >= 1e-3", sort_by="summary.val/acc", limit=10):
            print(run.path)
    ```

    Args:
        roots: folders that hold runs, at any depth; or are runs. Or one dataset that `compact` has written, by its path
            or URI (`s3://bucket/dataset`), which opens as `Dataset`.
        cache: the folder for the index. Default: `training-destinations/runs` in `$XDG_CACHE_HOME` or `~/.cache`. It may be
            deleted at any time. Where it cannot be written to, the index is in memory, and `report.warnings` says so.
        scan: whether to scan; without, the answers are those of the last scan.
        clock: tells the time by which heartbeats are judged, in seconds since 1970.

    Raises:
        RootError: a root is missing, is no folder, or none is given.
    """
    if len(roots) == 1 and _is_dataset(roots[0]):
        from .dataset import open_dataset

        return open_dataset(roots[0])
    folders, warnings = _folders(roots)
    try:
        place: Path | None = cache_folder() if cache is None else Path(cache).absolute()
    except RuntimeError as error:
        place = None
        warnings.append(f"index has no folder ({error}); using one in memory.")
    opened = Runs([Root(folder, Index(folder, place)) for folder in folders], clock=clock, warnings=warnings)
    if scan:
        opened.scan()
    return opened


def _is_dataset(root: str | os.PathLike[str]) -> bool:
    """Says whether this is a dataset: whatever is not local, and folders with manifests."""
    text = os.fspath(root)
    return "://" in text or any(Path(text, "manifests").glob("[0-9]*.json"))


def _folders(roots: Sequence[str | os.PathLike[str]]) -> tuple[list[str], list[str]]:
    """Returns each root once, as an absolute path without links, and what to say about the others."""
    if not roots:
        raise RootError("roots must be at least one folder, got none.")
    folders: list[str] = []
    warnings: list[str] = []
    for root in roots:
        text = os.fspath(root)
        folder = os.path.realpath(os.path.expanduser(text))  # noqa: PTH111  # Path would lose a trailing "\n"
        if not os.path.exists(folder):  # noqa: PTH110  # as above
            raise RootError(f"root must be a folder, got {text!r}, which does not exist.")
        if not os.path.isdir(folder):  # noqa: PTH112  # as above
            raise RootError(f"root must be a folder, got {text!r}, which is a file.")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise RootError(f"root must be a folder that can be read, got {text!r}.")
        folders.append(folder)
    kept = []
    for folder in dict.fromkeys(folders):
        around = next(
            (one for one in folders if one != folder and folder.startswith(one.rstrip("/") + "/")), None
        )
        if around is None:
            kept.append(folder)
        else:
            warnings.append(f"root {folder} lies in root {around}, and is scanned with it.")
    return kept, warnings
