"""The folder of a run's checkpoints, local or in a store: its names, newest first, and its lock.

With a folder in a store, `save_folder="s3://bucket/x"`, checkpoints are written to a local folder next to
the spools of the upload queue that uploads them. The newest stays on this machine. A checkpoint in shards
goes by the name of its manifest.
"""

import contextlib
import errno
import itertools
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from events.errors import CheckpointError
from events.logger.logger import Logger
from events.names import check_run_name, format_name, format_run_name, format_store
from events.state import State
from events.timestamp import Timestamp

from .files import MANIFEST, POINTER_SUFFIX, read_pointer, sweep
from .writer import in_thread

if TYPE_CHECKING:
    from uploads import Store
    from uploads.disk import FileLock

__all__ = [
    "CheckpointFolder",
    "RemoteFolder",
    "asked",
    "is_uri",
    "local_names",
    "newest_names",
    "resolve_pointer",
    "stored_names",
]

_log = logging.getLogger("events")

_BROKEN_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_COUNTED = "|".join(Timestamp().to_numbers())
_PLACEHOLDER = re.compile(rf"(\{{(?:{_COUNTED})(?::[^{{}}]*)?\}})")
_POINTER_BYTES = 1024
_ASK_SECONDS = 20.0
_FIRST_NAMES = 1000
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_uri(folder: str) -> bool:
    """Returns whether a folder is in a store.

    Raises:
        ValueError: it was a URI before it became a `Path`.
    """
    if _BROKEN_URI.match(folder):
        raise ValueError(f"a URI must be given as a text, not as a Path, which makes it {folder!r}.")
    return "://" in folder


class RemoteFolder:
    """A folder in a store, and its copy on this machine.

    Attributes:
        uri: its URI.
        store: the store.
        local: the folder on this machine.

    Args:
        template: the URI of the folder; placeholders such as `{run_name}` are filled in.
        state: the run.

    Raises:
        ValueError: the URI is invalid, or the name of the run leads out of it.
        ImportError: the client of the store is not installed.
    """

    def __init__(self, template: str, state: State) -> None:
        from uploads import default_spools, open_store

        check_run_name(template, state)
        self.uri = format_store(template, state)
        self.store = open_store(self.uri)
        spools = next(default_spools(self.store.uri())).parent
        self.local = spools.with_name(f"{spools.name}.checkpoints")

    def download(self, name: str) -> Path:
        """Downloads a checkpoint to the folder on this machine, verified by size and checksum.

        Raises:
            CheckpointError: it could not be downloaded.
        """
        from uploads import UploadError, download_file

        try:
            return download_file(
                name, self.local / name, store=self.store, overwrite=True, progress_bar=False
            )
        except (UploadError, OSError) as error:
            raise CheckpointError(f"cannot download {self.store.uri(name)}: {error}") from error


@attrs.define(eq=False)
class CheckpointFolder:
    """The folder where a run saves its checkpoints, locked from `lock` until `release`.

    Attributes:
        template: a local folder, or the URI of one in a store; like the names below, with placeholders.
        filename: the name of a checkpoint in it.
        pointer: the name of the pointer to the newest, or None.
        remote_folder: the folder of the files that destinations upload.
        is_sharded: whether each rank writes its part; ranks then agree on the checkpoint that they load.
    """

    template: str
    filename: str
    pointer: str | None
    remote_folder: str
    is_sharded: bool = False
    _remote: RemoteFolder | None = attrs.field(default=None, init=False)
    _held: "FileLock | None" = attrs.field(default=None, init=False)
    _made: list[Path] = attrs.field(factory=list, init=False)

    @property
    def is_in_store(self) -> bool:
        """Whether the folder is in a store."""
        return is_uri(self.template)

    def name(self, state: State) -> str:
        """Returns the file name of a checkpoint saved now, or of its manifest."""
        name = format_name(self.filename, state)
        return f"{name.removesuffix('.pt')}/{MANIFEST}" if self.is_sharded else name

    def pointer_name(self, state: State) -> str | None:
        """Returns the current name of the pointer, or None."""
        return None if self.pointer is None else format_name(self.pointer, state)

    def destination_folder(self, state: State) -> str:
        """Returns the current folder of the files that destinations upload."""
        return format_name(self.remote_folder, state).rstrip("/")

    def pattern(self, state: State) -> re.Pattern[str]:
        """Returns a pattern for the names of this run's checkpoints and of their files."""
        parts = _PLACEHOLDER.split(format_run_name(self.filename.removesuffix(".pt"), state))
        # Every other part is a placeholder: a number, or any text if it has a format.
        texts = [
            re.escape(part) if number % 2 == 0 else "[^/]+" if ":" in part else "[-+.0-9e]+"
            for number, part in enumerate(parts)
        ]
        return re.compile("".join(texts) + r"(\.pt|/.+)?", re.DOTALL)

    def is_own(self, name: str, state: State) -> bool:
        """Returns whether a checkpoint of this run, one of its files, or the pointer could have this name."""
        return name == self.pointer_name(state) or self.pattern(state).fullmatch(name) is not None

    def remote(self, state: State) -> RemoteFolder | None:
        """Returns the folder in a store and its copy on this machine, or None for a local folder."""
        if self._remote is None and self.is_in_store:
            self._remote = RemoteFolder(self.template, state)
        return self._remote

    def path(self, state: State) -> Path:
        """Returns the local folder."""
        remote = self.remote(state)
        return Path(format_name(self.template, state)) if remote is None else remote.local

    def lock(self, state: State) -> str:
        """Locks the folder for checkpoints of these names; returns an error message if another saver has it.

        `open` reports a folder that can't be made or written.
        """
        from uploads.disk import NO_FLOCK, FileLock, call_in_forked_children

        if self._held is not None:
            return ""
        folder = self.path(state)
        lock = FileLock(folder / f".{format_run_name(self.filename, state)}.lock")
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
                "checkpoint folder %s cannot be locked (%s): make sure that no other run saves there.",
                folder,
                error.strerror,
            )
        self._held, self._made = lock, missing
        call_in_forked_children(lock.forget_in_child)
        return ""

    def open(self, state: State) -> Exception | None:
        """Makes the folder and removes half-written files; returns an error, if any."""
        folder = self.path(state)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            if error.errno in _NO_ROOM:  # There may be space by the first checkpoint.
                problem = self.lock(state)
                return CheckpointError(problem) if problem else None
            reason = f"checkpoint folder {str(folder)!r} must be one that can be written: {error.strerror}"
            return type(error)(error.errno, reason)
        if problem := self.lock(state):
            return CheckpointError(problem)
        for path in sweep(folder, lambda name: self.is_own(name, state)):
            _log.info("removed %s, which a killed process left half written", path)
        return None

    def taken(self, state: State) -> str:
        """Returns an error message if the folder, or the store, holds checkpoints of another run, else ""."""
        remote, path = self.remote(state), self.path(state)
        names = local_names(path, self.pointer_name(state), self.pattern(state))
        if remote is None:
            return _problem(str(path), names)
        if not names:
            # S3 lists a thousand by one request.
            names = asked(lambda: [one.name for one in itertools.islice(remote.store.list(""), _FIRST_NAMES)])
        return _problem(remote.store.uri(), [name for name in names if self.is_own(name, state)])

    def taken_at_destinations(self, state: State, logger: Logger) -> str:
        """Returns the same for destinations that have checkpoints of another run under these names."""
        start = f"{self.destination_folder(state)}/"
        names = asked(lambda: logger.list_files(start))
        own = [name for name in names if self.is_own(name.removeprefix(start), state)]
        return _problem("a destination", own)

    def release(self) -> None:
        """Unlocks the folder, and removes it if it was made for this run and is empty."""
        held, self._held = self._held, None
        if held is not None:
            held.release()
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def local_names(folder: Path, pointer: str | None, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Returns the names of the checkpoints in a folder, the newest first.

    Args:
        folder: the folder.
        pointer: the name of the pointer to the newest; the others follow by the numbers in their names.
        pattern: matches the names of a run's checkpoints; None for all that end in ".pt".
    """
    pointed = None
    if pointer is not None and (folder / pointer).is_file():
        try:
            pointed = resolve_pointer(folder / pointer).relative_to(folder).as_posix()
        except CheckpointError as error:
            _log.warning("%s The newest one by the numbers in the names is used.", error)
    paths = [*folder.glob("[!.]*"), *folder.glob(f"[!.]*/{MANIFEST}")] if folder.is_dir() else []
    found = [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
    return newest_names([name for name in found if _is_checkpoint(name, pattern)], pointed)


def stored_names(store: "Store", pointer: str | None, pattern: re.Pattern[str] | None = None) -> list[str]:
    """Returns the names of the checkpoints in a store, the newest first.

    Args:
        store: the store.
        pointer: the name of the pointer to the newest, or None.
        pattern: as for `local_names`.

    Raises:
        CheckpointError: the store cannot be asked.
    """
    from uploads import UploadError

    try:
        found = [one.name for one in store.list("") if _is_at_top(one.name)]
        target = None
        if pointer is not None and store.head(pointer) is not None:
            content = b""
            for chunk in store.get(pointer):
                content += chunk
                if len(content) > _POINTER_BYTES:
                    break
            target = content.decode(errors="replace").strip()
    except UploadError as error:
        raise CheckpointError(f"cannot look for checkpoints in {store.uri()}: {error}") from error
    return newest_names(
        [name for name in found if _is_checkpoint(name, pattern)], target if target in found else None
    )


def _is_at_top(name: str) -> bool:
    """Returns whether an object may be a checkpoint directly in the folder, not in a subfolder."""
    folder, _, file = name.rpartition("/")
    is_hidden = name.startswith(".") or name.endswith(POINTER_SUFFIX)
    return not is_hidden and (not folder or (file == MANIFEST and "/" not in folder))


def _is_checkpoint(name: str, pattern: re.Pattern[str] | None) -> bool:
    if name.endswith(POINTER_SUFFIX):
        return False
    if pattern is None:
        return name.endswith((".pt", f"/{MANIFEST}"))
    return pattern.fullmatch(name) is not None


def newest_names(names: list[str], pointed: str | None) -> list[str]:
    """Returns names in the order in which they are tried: the pointed-to one, then by their numbers.

    Args:
        names: such as "ep1-ba5.pt" and "ep2-ba10.pt"; the latter is newer.
        pointed: the name in the pointer, which comes first; or None.
    """

    def numbers(name: str) -> list[int]:
        return [int(digits) for digits in re.findall(r"\d{1,18}", name)]

    ordered = sorted(names, key=lambda name: (numbers(name), name), reverse=True)
    return list(dict.fromkeys([*filter(None, [pointed]), *ordered]))


def resolve_pointer(pointer: Path) -> Path:
    """Returns the local checkpoint that a pointer names: the longest suffix of the name that exists.

    Raises:
        CheckpointError: it names none.
    """
    name = read_pointer(pointer)
    if not name:
        raise CheckpointError(f"pointer {str(pointer)!r} must hold the name of a checkpoint.")
    parts = name.split("/")
    candidates = [pointer.parent.joinpath(*parts[start:]) for start in range(len(parts))]
    return next((path for path in candidates if path.is_file()), candidates[-1])


def asked(ask: Callable[[], Iterable[str]]) -> list[str]:
    """Returns names from a store; none, with a warning, if it doesn't answer in time."""
    try:
        names: list[str] = in_thread("checkpoint-names", lambda: list(ask())).result(_ASK_SECONDS)
    except Exception as error:  # noqa: BLE001  # an unreachable store must not keep a run from starting
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
