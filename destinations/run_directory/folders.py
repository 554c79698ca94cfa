"""The folder of a run: whether it can hold one, and holding it, wherever it is moved."""

import os
import re
import weakref
from pathlib import Path

from .errors import RunExistsError, RunPathError
from .layout import SIDECAR, journal_path, metrics_name, segment_paths

__all__ = ["HeldFolder", "check_no_run", "check_path", "holds_run", "with_user_paths"]

_THROUGH = re.compile(r"^/proc/self/fd/\d+")


class HeldFolder:
    """A folder that stays the same one when it is moved, and when another one gets its path.

    `path` leads to what is in it through an open descriptor, as `/proc/self/fd/7`, where the system has that (Linux);
    elsewhere it is the path that the folder had. The descriptor is closed when nothing refers to this object any more: a
    thread that hangs in a write must not find another folder behind it.

    Args:
        path: where it is now.
    """

    def __init__(self, path: Path) -> None:
        self.where = path
        """The path it had when it was held."""
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        through = Path(f"/proc/self/fd/{self._fd}")
        self.path = through if through.is_dir() else path

    @property
    def is_deleted(self) -> bool:
        """Whether nothing can be written into it any more."""
        return os.fstat(self._fd).st_nlink == 0

    def renew(self) -> None:
        """Holds the folder that is at the path now; `path` stays as it is."""
        fd = os.open(self.where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)


def with_user_paths(error: Exception, run_dir: Path) -> Exception:
    """Returns an error whose file names are those that a user knows, and not those of a `HeldFolder`."""
    if isinstance(error, OSError):
        for attribute in ("filename", "filename2"):
            name = getattr(error, attribute)
            if name is not None:
                setattr(error, attribute, _THROUGH.sub(lambda _: str(run_dir), os.fsdecode(name)))
    return error


def holds_run(run_dir: Path, rank: int) -> bool:
    """Says whether a folder holds what this rank of a run writes; that other ranks have begun already does not count."""
    names = (SIDECAR, metrics_name(rank)) if rank == 0 else (metrics_name(rank),)
    return any((run_dir / name).exists() for name in names) or bool(
        segment_paths(journal_path(run_dir, rank))
    )


def check_no_run(run_dir: Path, rank: int) -> None:
    """Refuses a folder that holds a run."""
    if holds_run(run_dir, rank):
        raise RunExistsError(
            f'run folder {str(run_dir)!r} must be new with resume="never", got one that holds a run. '
            "Choose another folder, or leave resume out to continue the run."
        )


def check_path(path: Path) -> None:
    """Refuses a path that no folder can be at, without making one."""
    try:
        path = path.absolute()
    except OSError as error:
        raise RunPathError(
            f"run folder must be an absolute path where the working directory is gone, got {str(path)!r}: {error}."
        ) from error
    for folder in (path, *path.parents):
        if folder.is_dir():
            if not os.access(folder, os.W_OK | os.X_OK):
                raise RunPathError(
                    f"run folder must be one that can be written to, got {str(path)!r}: no right to write to {folder}."
                )
            return
        if os.path.lexists(folder):
            raise RunPathError(f"run folder must be a folder, got {str(path)!r}: {folder} is a file.")
