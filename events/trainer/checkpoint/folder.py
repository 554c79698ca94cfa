"""`OwnFolder`: the folder on this machine into which one saver writes its checkpoints, and nobody else.

Everything runs in the training thread of rank 0.
"""

import contextlib
import errno
import hashlib
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from events.errors import CheckpointError
from events.logger.logger import Logger
from events.names import format_name, format_run_name
from events.state import State

from .files import sweep
from .place import RemoteFolder, SavePlace, local_names
from .writer import in_thread

if TYPE_CHECKING:
    from uploads.disk import FileLock

_log = logging.getLogger("events")

_ASK_SECONDS = 20.0
_FIRST_NAMES = 1000
_MAX_LOCKED_BYTES = 200
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class OwnFolder:
    """The folder of the checkpoints, locked from `lock` until `release`.

    Args:
        place: where the run saves.
    """

    def __init__(self, place: SavePlace) -> None:
        self._place = place
        self._remote: RemoteFolder | None = None
        self._held: FileLock | None = None
        self._made: list[Path] = []

    def remote(self, state: State) -> RemoteFolder | None:
        """Returns the folder in a store of which it is the copy, or None."""
        if self._remote is None and self._place.is_in_store:
            self._remote = RemoteFolder(self._place.folder, state)
        return self._remote

    def path(self, state: State) -> Path:
        """Returns where it is now."""
        remote = self.remote(state)
        return Path(format_name(self._place.folder, state)) if remote is None else remote.local

    def lock(self, state: State) -> str:
        """Locks the folder for checkpoints of these names; returns what is wrong where another has it, or "".

        A folder that cannot be made or written is left to `open`, which says so.
        """
        from uploads.disk import NO_FLOCK, FileLock, call_in_forked_children

        if self._held is not None:
            return ""
        folder = self.path(state)
        name = format_run_name(self._place.filename, state)
        if len(name.encode()) > _MAX_LOCKED_BYTES:
            name = hashlib.sha256(name.encode()).hexdigest()
        lock = FileLock(folder / f".{name}.lock")
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(run_name=state.run_name)
        except BlockingIOError:
            return _in_use(str(folder), lock.owner())
        except OSError as error:
            if error.errno not in NO_FLOCK:
                return ""
            _log.warning(
                "checkpoint folder %s cannot be locked (%s): take care that no other run saves there.",
                folder,
                error.strerror,
            )
        self._held, self._made = lock, missing
        call_in_forked_children(lock.forget_in_child)
        return ""

    def open(self, state: State) -> Exception | None:
        """Makes the folder, and removes half-written files from it; returns what is wrong."""
        folder = self.path(state)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            if error.errno in _NO_ROOM:  # There may be some by the first checkpoint.
                problem = self.lock(state)
                return CheckpointError(problem) if problem else None
            reason = f"checkpoint folder {str(folder)!r} must be one that can be written: {error.strerror}"
            return type(error)(error.errno, reason)
        if problem := self.lock(state):
            return CheckpointError(problem)
        for path in sweep(folder, lambda name: self._place.is_own(name, state)):
            _log.info("removed %s, which a process that was killed left half written", path)
        return None

    def taken(self, state: State) -> str:
        """Returns what is wrong where the folder, or the store, holds checkpoints of another run, else ""."""
        place, remote, path = self._place, self.remote(state), self.path(state)
        names = local_names(path, place.pointer_name(state), place.pattern(state))
        if remote is None:
            return _problem(str(path), names)
        if not names:
            # S3 lists a thousand by one request.
            names = asked(lambda: [one.name for one in itertools.islice(remote.store.list(""), _FIRST_NAMES)])
        return _problem(remote.store.uri(), [name for name in names if place.is_own(name, state)])

    def taken_at_destinations(self, state: State, logger: Logger) -> str:
        """Returns the same where destinations have checkpoints of another run under these names."""
        start = f"{self._place.destination_folder(state)}/"
        names = asked(lambda: logger.list_files(start))
        own = [name for name in names if self._place.is_own(name.removeprefix(start), state)]
        return _problem("a destination", own)

    def release(self) -> None:
        """Unlocks the folder, and removes it if it was made for a run that has saved nothing."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def asked(ask: Callable[[], Iterable[str]]) -> list[str]:
    """Returns the names that a store has; none, with a warning, where it does not answer in time."""
    try:
        names: list[str] = in_thread("checkpoint-names", lambda: list(ask())).result(_ASK_SECONDS)
    except Exception as error:  # noqa: BLE001  # a store that is away does not keep a run from starting
        reason = str(error) or f"no answer in {_ASK_SECONDS:.0f} s"
        _log.warning("cannot look for checkpoints in the store: %s", reason)
        return []
    return names


def _problem(place: str, names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"checkpoint folder must be new for a new run, but {place} holds {names[0]!r} of another run. "
        "Pass autoresume=True or load_path to resume that run, another run_name, or "
        "save_overwrite=True (CheckpointSaver: overwrite=True)."
    )


def _in_use(folder: str, owner: Mapping[str, Any]) -> str:
    since = owner.get("since")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if isinstance(since, float) else "?"
    return (
        f"checkpoint folder {folder!r} is in use: process {owner.get('pid', '?')} on "
        f"{owner.get('host', '?')} saves checkpoints of run {owner.get('run_name', '?')!r} there, "
        f"since {began}. Wait until it ends, close its Trainer, or choose another save_folder or run_name."
    )
