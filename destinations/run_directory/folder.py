"""The folder of a run: errors, checks before opening, the lock, and a handle that follows a moved folder.

```
RunDirectoryError
├── RunInUseError      (RecordError)         another process writes to this folder
├── RunExistsError     (FileExistsError)     the folder holds a run, which if_exists refuses
├── RunPathError       (NotADirectoryError)  the path can't be a writable folder
└── RunNotOpenError    (RuntimeError)        something was logged before `init` or after `post_close`
```

All are also `events.RecordError`: they report a mistake in the program, so they are raised and not just
counted.

**The lock.** One process writes per rank. The lock is flock(2), which ends with the process that holds it.
On a file system without flock, nothing keeps two processes apart, and a warning says so.
"""

import contextlib
import itertools
import logging
import os
import re
import socket
import weakref
from pathlib import Path

from destinations.base import check_folder
from events import RecordError
from uploads.disk import DISK, NO_FLOCK, Disk, FileLock, rename_new

from .layout import (
    SIDECAR,
    WRITERS_FOLDER,
    NewerFormatError,
    check_format,
    journal_path,
    metrics_name,
    segment_paths,
)

__all__ = [
    "HeldFolder",
    "RunDirectoryError",
    "RunExistsError",
    "RunInUseError",
    "RunNotOpenError",
    "RunPathError",
    "WriterLock",
    "check_known",
    "check_path",
    "holds_run",
    "remove_temporaries",
    "run_exists_error",
    "set_aside",
    "with_user_paths",
]

_log = logging.getLogger("destinations")

_THROUGH = re.compile(r"^/proc/self/fd/\d+")
# A command writes this file without a lock.
_OF_EDITS = ".edits.json."
_OF_RANK = re.compile(r"\.\w+\.rank(\d+)\.")


class RunDirectoryError(RecordError):
    """The base class of the errors of this package."""


class RunInUseError(RunDirectoryError):
    """Another process writes to this folder, or another run of this process.

    Attributes:
        is_same_process: whether it is another run of this process.
    """

    is_same_process = False


class RunExistsError(RunDirectoryError, FileExistsError):
    """The folder holds a run, and `if_exists` refuses it."""


class RunPathError(RunDirectoryError, NotADirectoryError):
    """The path is a file or isn't writable, or the run name leads out of its folder."""


class RunNotOpenError(RunDirectoryError, RuntimeError):
    """Something was logged before `init` or after `post_close`."""


# Checks.


def with_user_paths(error: Exception, run_dir: Path) -> Exception:
    """Replaces paths through a descriptor in an OSError by the user's path."""
    if isinstance(error, OSError):
        for attribute in ("filename", "filename2"):
            name = getattr(error, attribute)
            if name is not None:
                setattr(error, attribute, _THROUGH.sub(lambda _: str(run_dir), os.fsdecode(name)))
    return error


def holds_run(run_dir: Path, rank: int) -> bool:
    """Returns whether a folder has files of this rank of a run."""
    names = (SIDECAR, metrics_name(rank)) if rank == 0 else (metrics_name(rank),)
    return any((run_dir / name).exists() for name in names) or bool(
        segment_paths(journal_path(run_dir, rank))
    )


def check_known(run_dir: Path) -> None:
    """Raises RunPathError if a newer release wrote the run, or the run that a writer's folder is in."""
    try:
        check_format(run_dir)
        if run_dir.parent.name == WRITERS_FOLDER:
            check_format(run_dir.parent.parent)
    except NewerFormatError as error:
        raise RunPathError(str(error)) from error


def run_exists_error(run_dir: Path, what: str) -> RunExistsError:
    """Returns the error for a folder that holds a run, described by `what`."""
    return RunExistsError(
        f"run folder {str(run_dir)!r} holds {what}. Choose another folder, or pass "
        'if_exists="resume" to continue that run, or if_exists="new" for a free name beside it.'
    )


def check_path(path: Path) -> None:
    """Raises RunPathError if the path can't be a writable folder; creates nothing."""
    try:
        path = path.absolute()
    except OSError as error:
        raise RunPathError(
            f"run folder must be an absolute path where the working directory is gone, got {str(path)!r}: "
            f"{error}."
        ) from error
    try:
        check_folder(path)
    except OSError as error:
        raise RunPathError(f"run folder must be a writable folder, got {str(path)!r}: {error}.") from error


def remove_temporaries(folder: Path, rank: int | None = None, *, disk: Disk = DISK) -> None:
    """Removes temporary files (`uploads.disk.open_temporary`) that a killed process has left.

    Args:
        folder: the folder that contains them.
        rank: removes only the files of this rank, whose lock the caller holds; other ranks, and `edit`, may
        be
            writing theirs. Default: all.
        disk: the disk operations.
    """
    for path in folder.glob(".*.tmp"):
        of_rank = _OF_RANK.match(path.name)
        if rank is not None and (
            rank != (int(of_rank[1]) if of_rank else 0) or path.name.startswith(_OF_EDITS)
        ):
            continue
        with contextlib.suppress(OSError):
            disk.unlink(path)


# The open folder.


class HeldFolder:
    """An open folder that stays the same if it is moved, or if another folder takes its path.

    On Linux, `path` leads through an open descriptor, such as `/proc/self/fd/7`; elsewhere it is the original
    path. The descriptor is closed with the last reference, so that a thread that hangs in a write never finds
    another folder behind it.

    Args:
        path: the current path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.where = path
        """The path at the time of opening."""
        self._is_moved = False
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        through = Path(f"/proc/self/fd/{self._fd}")
        self.path = through if through.is_dir() else path

    def hold(self, lock: "WriterLock") -> None:
        """Reports a moved folder, and takes a lock again whose file was deleted.

        Raises:
            RunPathError: the folder was deleted.
            RunInUseError: another process has taken the lock.
        """
        if os.fstat(self._fd).st_nlink == 0 or not self.path.is_dir():
            raise RunPathError(f"run folder {str(self.where)!r} was deleted.")
        self._report_move()
        lock.renew()

    def _report_move(self) -> None:
        if self._is_moved:
            return
        try:
            self._is_moved = not self.where.samefile(self.path)
        except OSError:
            self._is_moved = True
        if self._is_moved:
            _log.warning(
                "run folder %s was moved to %s; continuing there.", self.where, os.path.realpath(self.path)
            )


class WriterLock(FileLock):
    """The exclusive lock of the writer of a run folder.

    Args:
        path: the lock file.
        writer: the name of the writer that the folder belongs to; "" for the trainer.
    """

    def __init__(self, path: Path, *, writer: str = "") -> None:
        super().__init__(path)
        self._run_dir = path.parent
        self._writer = writer

    def follow(self, folder: Path) -> None:
        """Sets the folder of the lock file, a path that stays valid if the folder is moved."""
        self._path = folder / self._path.name

    def renew(self, run_dir: Path | None = None) -> None:
        """Takes the lock again, then releases the previous lock file.

        Args:
            run_dir: the folder. Default: the current one.

        Raises:
            RunInUseError: another process has taken the lock.
        """
        path = self._path if run_dir is None else run_dir / self._path.name
        if self._fd >= 0 and self._is_at(path, self._fd):
            return
        renewed = WriterLock(path, writer=self._writer)
        renewed.acquire()
        before, self._fd = self._fd, renewed._fd
        if before >= 0:
            os.close(before)

    def _open(self) -> int | None:
        try:
            return super()._open()
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
        _log.warning(
            "run folder %s is on a file system without locks: let only one process write to it.",
            self._run_dir,
        )
        return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)

    def refusal(self) -> RunInUseError:
        """Returns the error for a run folder that another process is writing to."""
        owner = self.owner()
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
        if self._writer:
            run_dir = str(self._run_dir.parent.parent)
            error = RunInUseError(
                f"writer {self._writer!r} of run folder {run_dir!r} is in use: {who} writes as it. "
                "Wait until it ends, or choose another name."
            )
        else:
            error = RunInUseError(
                f"run folder {str(self._run_dir)!r} is in use: {who} writes to it. "
                "Wait until it ends, or choose another folder."
            )
        error.is_same_process = (owner.get("pid"), owner.get("host")) == (os.getpid(), socket.gethostname())
        return error


def set_aside(run_dir: Path, lock: WriterLock) -> Path:
    """Renames the folder of a run to a free name beside it, and creates an empty one in its place.

    Args:
        run_dir: the folder.
        lock: the lock of the folder, which is held; afterwards it locks the new folder.

    Returns:
        Where the run is now.
    """
    for number in itertools.count(1):
        aside = run_dir.with_name(f"{run_dir.name}.aside-{number}")
        try:
            rename_new(os.fspath(run_dir), os.fspath(aside))
        except FileExistsError:
            continue
        run_dir.mkdir()
        lock.renew(run_dir)
        return aside
    raise AssertionError("there are numbers without end")
