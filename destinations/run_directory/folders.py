"""The folder of a run: checks before opening, and a handle that follows a moved folder."""

import os
import re
import weakref
from pathlib import Path

from .errors import RunExistsError, RunPathError
from .layout import SIDECAR, journal_path, metrics_name, segment_paths

__all__ = ["HeldFolder", "check_no_run", "check_path", "holds_run", "with_user_paths"]

_THROUGH = re.compile(r"^/proc/self/fd/\d+")


class HeldFolder:
    """An open folder that stays the same when it is moved or another one takes its path.

    `path` leads through an open descriptor, as `/proc/self/fd/7`, on Linux; elsewhere it is the original
    path. The descriptor is closed with the last reference: a thread that hangs in a write must not find
    another folder behind it.

    Args:
        path: the current path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.where = path
        """The path at the time of opening."""
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        through = Path(f"/proc/self/fd/{self._fd}")
        self.path = through if through.is_dir() else path

    @property
    def is_deleted(self) -> bool:
        """Whether the folder was deleted."""
        return os.fstat(self._fd).st_nlink == 0

    def renew(self) -> None:
        """Reopens the folder that is at the original path now; `path` stays valid."""
        fd = os.open(self.where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)


def with_user_paths(error: Exception, run_dir: Path) -> Exception:
    """Replaces paths through a descriptor in an OSError by the user's path."""
    if isinstance(error, OSError):
        for attribute in ("filename", "filename2"):
            name = getattr(error, attribute)
            if name is not None:
                setattr(error, attribute, _THROUGH.sub(lambda _: str(run_dir), os.fsdecode(name)))
    return error


def holds_run(run_dir: Path, rank: int) -> bool:
    """Returns whether a folder has files of this rank of a run; those of other ranks do not count."""
    names = (SIDECAR, metrics_name(rank)) if rank == 0 else (metrics_name(rank),)
    return any((run_dir / name).exists() for name in names) or bool(
        segment_paths(journal_path(run_dir, rank))
    )


def check_no_run(run_dir: Path, rank: int) -> None:
    """Raises RunExistsError if the folder holds a run."""
    if holds_run(run_dir, rank):
        raise RunExistsError(
            f"run folder {str(run_dir)!r} holds a run already. Choose another folder, or pass "
            'if_exists="resume" to continue that run, or if_exists="new" for a free name beside it.'
        )


def completed_run_error(run_dir: Path) -> RunExistsError:
    """Returns the error for a folder with a run that was completed."""
    return RunExistsError(
        f"run folder {str(run_dir)!r} holds a run that was completed. Choose another folder, or pass "
        'if_exists="resume" to continue that run, or if_exists="new" for a free name beside it.'
    )


def check_path(path: Path) -> None:
    """Raises RunPathError if no writable folder can be at a path; makes none."""
    try:
        path = path.absolute()
    except OSError as error:
        raise RunPathError(
            f"run folder must be an absolute path where the working directory is gone, got {str(path)!r}: "
            f"{error}."
        ) from error
    for folder in (path, *path.parents):
        # Another rank may make it meanwhile: what was there at the first look is what the second one judges.
        if not os.path.lexists(folder):
            continue
        if folder.is_dir():
            if not os.access(folder, os.W_OK | os.X_OK):
                raise RunPathError(
                    f"run folder must be one that can be written to, got {str(path)!r}: no right to write to "
                    f"{folder}."
                )
            return
        raise RunPathError(f"run folder must be a folder, got {str(path)!r}: {folder} is a file.")
