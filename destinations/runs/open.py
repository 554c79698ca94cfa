"""`open_runs`: opens the runs below folders, or of a dataset."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import RootError
from .index.index import Index, cache_folder
from .index.root import Root
from .runs import Runs

if TYPE_CHECKING:
    from uploads import Store

__all__ = ["open_runs"]


def open_runs(
    *roots: str | os.PathLike[str],
    cache: str | os.PathLike[str] | None = None,
    scan: bool = True,
    version: int | None = None,
    clock: Callable[[], float] = time.time,
) -> Runs:
    """Opens the runs below some folders, and scans for changes since the last time.

    ```python
    with open_runs("runs") as runs:
        for run in runs.query(where="hparams.lr >= 1e-3", sort_by="summary.loss", limit=10):
            print(run.path)
    ```

    Args:
        roots: folders that are runs, or contain runs at any depth; or URIs of such folders in a store
            (`s3://bucket/runs`). The cache folder keeps a copy of a store: documents at once, rows and media
            when they are read. Or one dataset written by `compact`, as a path or URI; it opens as `Dataset`.
        cache: the folder of the index. Default: `training-destinations/runs` in `$XDG_CACHE_HOME` or
            `~/.cache`. It may be deleted at any time. If it is not writable, the index is in memory, and
            `report.warnings` says so.
        scan: whether to scan; otherwise queries answer from the last scan.
        version: of a dataset, an earlier one.
        clock: returns the time in seconds since 1970, which heartbeats are compared with.

    Raises:
        DatasetError: the dataset cannot be read, or has no such version.
        RootError: a root is missing or not a folder, or no root is given; a store cannot be read.
    """
    stores = {os.fspath(root): _store_of(root) for root in roots if "://" in os.fspath(root)}
    if len(roots) == 1 and _is_dataset(roots[0], stores):
        from .dataset import open_dataset

        return open_dataset(roots[0], version=version)
    if version is not None:
        raise RootError(
            f"only a dataset has versions, got version={version} for {', '.join(map(str, roots))}."
        )
    local = [root for root in roots if os.fspath(root) not in stores]
    folders, warnings = _folders(local) if local or not stores else ([], [])
    try:
        place: Path | None = cache_folder() if cache is None else Path(cache).absolute()
    except RuntimeError as error:
        place = None
        warnings.append(f"index has no folder ({error}); using one in memory.")
    found = [Root(folder, Index(folder, place)) for folder in folders]
    found += [_root_of(store, place) for store in stores.values()]
    opened = Runs(found, clock=clock, warnings=warnings)
    if scan:
        opened.scan()
    return opened


def _root_of(store: "Store", place: Path | None) -> Root:
    """Returns the root of a copy of a store."""
    # Who reads folders needs no store.
    from .index.bucket import BucketCopy, bucket_folder

    given = bucket_folder(store.uri())
    given.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = os.path.realpath(given)
    return Root(folder, Index(folder, place), copy=BucketCopy(store, Path(folder)))


def _store_of(root: str | os.PathLike[str]) -> "Store":
    from uploads import open_store

    try:
        return open_store(os.fspath(root))
    except ValueError as error:
        raise RootError(str(error)) from error


def _is_dataset(root: str | os.PathLike[str], stores: "Mapping[str, Store]") -> bool:
    """Returns whether this is a dataset: a folder or a store with its tables."""
    text = os.fspath(root)
    if text not in stores:
        return Path(text, "runs", "_delta_log").is_dir()
    from uploads import UploadError

    from .index.bucket import has_dataset

    try:
        return has_dataset(stores[text])
    except UploadError as error:
        raise RootError(f"{stores[text].uri()} cannot be read: {error}") from error


def _folders(roots: Sequence[str | os.PathLike[str]]) -> tuple[list[str], list[str]]:
    """Returns each root once, as an absolute path without links, and warnings about nested roots."""
    if not roots:
        raise RootError("no root given. Pass at least one folder.")
    folders: list[str] = []
    warnings: list[str] = []
    for root in roots:
        text = os.fspath(root)
        folder = os.path.realpath(os.path.expanduser(text))  # noqa: PTH111  # Path would lose a trailing "\n"
        if not os.path.exists(folder):  # noqa: PTH110  # as above
            raise RootError(f"root {text!r} does not exist.")
        if not os.path.isdir(folder):  # noqa: PTH112  # as above
            raise RootError(f"root {text!r} is not a folder.")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise RootError(f"root {text!r} is not readable.")
        folders.append(folder)
    kept = []
    for folder in dict.fromkeys(folders):
        outer = next(
            (one for one in folders if one != folder and folder.startswith(one.rstrip("/") + "/")), None
        )
        if outer is None:
            kept.append(folder)
        else:
            warnings.append(f"root {folder} is inside root {outer}, and is scanned with it.")
    return kept, warnings
