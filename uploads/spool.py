"""The durable queue on disk: one folder per entry, a change of state is one rename.

    SPOOL/
      spool.json         format, version, and the store this spool is for (never its secrets)
      queue.lock         held by the process that submits; its text says who
      drain.lock         held by the process that uploads; its text says who
      status.json        what the uploading process last said about itself; replaced atomically
      delivered.jsonl    one line per entry that has left the spool
      tmp/               entries being staged; swept when their process is gone
      pending/SEQUENCE-NAMEKEY-IDENTIFIER/
        entry.json       what was asked for
        data             the bytes
        crc32.json       CRC-32 of a large file, once computed: about a second after it was submitted
        flushed          the disk has the bytes of an entry without a checksum
        digest.json      SHA-256 of large files, once computed
        attempts.json    how often it failed, and the last reason
        multipart.json   what a store needs to continue a half-sent file
      inflight/…         the same folder while it is being uploaded
      done/…             delivered; gone as soon as `delivered.jsonl` has the line
      failed/{conflict,corrupt,rejected}/…   the same folder and `reason.json`; kept until `gc --failed`

Many processes may submit into a spool, one at a time may drain it. Nothing here is pickled; no database is involved,
since neither write-ahead logs nor memory maps can be trusted on the network file systems that clusters keep homes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._disk import MOUNTS, boot_id, network_file_system_of
from ._files import (
    append_line,
    exists,
    fsync_path,
    mkdir,
    open_regular,
    read_bytes,
    read_json,
    rename,
    replace_json,
    rmdir,
    unlink,
    write_text,
)
from ._notes import note_reason
from .entry import (
    DATA_FILE,
    MANIFEST_FILE,
    Entry,
    identifier_of,
    is_entry_folder,
    sequence_of,
)
from .errors import ManifestUnreadable, SpoolUnusable
from .outcome import Outcome, UploadState
from .stores.uris import identity_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FAILED_STATES", "Spool", "is_alive"]

_log = logging.getLogger("uploads")

_VERSION = 1
_LOOKS = 10  # An entry changes its place a few times in its life; one without a manifest is not looked for for ever.
FAILED_STATES = (UploadState.CONFLICT, UploadState.CORRUPT, UploadState.REJECTED)


class Spool:
    """The folder of entries. Every method may be called from any thread; what guards against races is that rename is atomic.

    Args:
        path: Where.
        boot: Which boot of the machine this is; asked of the system by default.
        mounts: Where the system says what is mounted.
    """

    def __init__(self, path: str | Path, *, boot: str | None = None, mounts: Path = MOUNTS) -> None:
        self._mounts = mounts
        self.boot = boot_id() if boot is None else boot
        self.path = Path(path).absolute()
        self.tmp = self.path / "tmp"
        self.pending = self.path / "pending"
        self.inflight = self.path / "inflight"
        self.done = self.path / "done"
        self.failed = self.path / "failed"
        self.queue_lock = self.path / "queue.lock"
        self.drain_lock = self.path / "drain.lock"
        self._delivered = self.path / "delivered.jsonl"
        self._status = self.path / "status.json"
        self._description = self.path / "spool.json"
        self._token = uuid.uuid4().hex
        self._numbers = itertools.count()

    def create(self, store: dict[str, Any] | None = None) -> None:
        """Makes the folders that are missing, for this user alone; one that was there keeps its permissions.

        Args:
            store: For `belong_to`, where nobody else can have the spool yet.

        Raises:
            SpoolUnusable: It cannot be written, is from a newer version, or is not this user's (see `check_owner`).
        """
        folders = self._folders()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, *folders):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.check_owner()
            self.describe()
            if store is not None:
                self.belong_to(store)
        except OSError as error:
            raise SpoolUnusable(
                f"a spool must be a writable folder, got {self.path}: {error.strerror}. Choose another with spool=…"
            ) from error
        kind = network_file_system_of(self.path, self._mounts)
        if kind is not None:
            _log.warning(
                "the spool %s is on a network file system (%s): every file crosses the network twice, and whether two machines can lock "
                "each other out is up to its server. A local disk is safer: choose it with spool=…",
                self.path,
                kind,
            )

    def check_owner(self, *, trust: bool = False) -> None:
        """Makes sure that nobody else decides what the spool holds: its folders are folders, and belong to whom new files belong to.

        Args:
            trust: Whether they may belong to another user.

        Raises:
            SpoolUnusable: One is a symlink or something else, or is another user's.
            OSError: It cannot be looked at or written.
        """
        for folder in self._folders():
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise SpoolUnusable(
                    f"{folder} must be a folder, got a symlink or a file. Choose another spool."
                )
        if trust:
            return
        places = [*self._folders(), *(file for file in (self._description,) if file.exists())]
        theirs = {place.lstat().st_uid for place in places} - {os.geteuid()}
        if not theirs:
            return
        # Asked of a file, not of the system: where root is mapped to nobody, root's own spool is nobody's.
        with tempfile.TemporaryFile(dir=self.tmp) as mine:
            user = os.fstat(mine.fileno()).st_uid
        if theirs - {user}:
            raise SpoolUnusable(
                f"spool {self.path} must belong to user {user}, got user {max(theirs)}, who could have any file written with your rights. "
                "Work on it as that user, choose another, or say --trust where a command takes it."
            )

    def belong_to(self, store: dict[str, Any]) -> None:
        """Notes which store the spool is for. To be called by the owner of `queue.lock`.

        Args:
            store: Its "uri", and what else `resume` needs.

        Raises:
            SpoolUnusable: It holds entries for another store, or cannot be written.
        """
        known = self.describe().get("store") or {}
        theirs, ours = identity_of(str(known.get("uri", ""))), identity_of(store["uri"])
        if known and theirs != ours and any(True for place in self._live() for _ in _entries(place)):
            raise SpoolUnusable(
                f"spool {self.path} must be empty to be used for another store, got entries for {theirs} where {ours} is asked for. "
                f"Choose another spool, or bring them to their store first: python -m uploads resume {self.path}"
            )
        if known != store:
            try:
                replace_json(
                    self._description, {"format": "uploads-spool", "version": _VERSION, "store": store}
                )
            except OSError as error:
                raise SpoolUnusable(
                    f"a spool must be writable, got {self.path}: {error.strerror}. Choose another with spool=…"
                ) from error

    def describe(self) -> dict[str, Any]:
        """What `spool.json` says; empty where there is none.

        Raises:
            SpoolUnusable: It is from a newer version.
        """
        about = read_json(self._description)
        if about.get("version", _VERSION) != _VERSION:
            raise SpoolUnusable(
                f"spool {self.path} must have version {_VERSION}, got {about['version']!r}. Use the release that wrote it."
            )
        return about

    # Staging.

    def new_folder(self) -> Path:
        """A folder under `tmp/` to stage an entry in; its name says whose it is, so that it can be swept when they are gone."""
        folder = self.tmp / f"{socket.gethostname()}-{os.getpid()}-{self._token}{next(self._numbers)}"
        mkdir(str(folder))
        return folder

    def write_manifest(self, staged: Path, entry: Entry) -> None:
        """Says in the staged folder what it is."""
        write_text(f"{staged}/{MANIFEST_FILE}", entry.to_text())

    def publish(self, staged: Path, entry: Entry, *, to_disk: bool) -> None:
        """Makes the staged folder, which holds data and manifest, pending in one rename.

        Args:
            staged: From `new_folder`.
            entry: As in its manifest.
            to_disk: Whether data, manifest and names are on the disk when this returns, not only in the page cache.
        """
        if to_disk:
            fsync_entry(staged)
        rename(str(staged), f"{self.pending}/{entry.folder}")
        if to_disk:
            fsync_path(self.pending)

    def sweep_tmp(self) -> int:
        """Clears what dead processes of this host left half staged; returns how many were removed.

        A file that had been moved here is nowhere else: its entry is complete, and becomes pending.
        """
        swept = 0
        for folder in _children(self.tmp):
            host, _, pid = folder.name.rpartition("-")[0].rpartition("-")
            if host != socket.gethostname() or (pid.isdigit() and is_alive(int(pid))):
                continue
            entry = _moved_entry(folder)
            if entry is not None:
                folder.rename(self.pending / entry.folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)
                swept += 1
        return swept

    def last_sequence(self) -> int:
        """The highest sequence number in the spool; 0 in an empty one."""
        folders = (name for place in self._entry_places() for name in _entries(place))
        return max((sequence_of(name) for name in folders), default=0)

    # What is where.

    def pending_folders(self) -> Iterator[str]:
        """The names of the folders that wait, in no order and one at a time: a hundred thousand of them take no memory."""
        return _entries(self.pending)

    def inflight_folders(self) -> Iterator[str]:
        """The names of the folders that are being uploaded, as above."""
        return _entries(self.inflight)

    def list_pending(self) -> list[str]:
        """The names of the folders that wait, in the order of submission."""
        return sorted(self.pending_folders())

    def list_inflight(self) -> list[str]:
        """The names of the folders that are being uploaded, or were when their process died."""
        return sorted(self.inflight_folders())

    def is_pending(self, folder: str) -> bool:
        """Whether the entry waits."""
        return exists(f"{self.pending}/{folder}")

    def list_done(self) -> list[str]:
        """Delivered entries whose line in `delivered.jsonl` is not written yet."""
        return sorted(_entries(self.done))

    def list_failed(self) -> dict[UploadState, list[str]]:
        """The names of the folders that failed, by the way they did."""
        return {state: sorted(_entries(self.failed / state)) for state in FAILED_STATES}

    def place_of(self, folder: str) -> Path | None:
        """Where the entry is now; None once it has left the spool."""
        for _ in range(2):  # A rename between two looks must not make it invisible.
            for place in self._entry_places():
                if (place / folder).is_dir():
                    return place / folder
        return None

    def entry_of(self, folder: str) -> Entry | None:
        """What was asked for, also while the entry changes its place; None once it has left the spool.

        Raises:
            ManifestUnreadable: Torn, foreign, from a newer version, or another entry's.
        """
        for _ in range(_LOOKS):
            place = self.place_of(folder)
            if place is None:
                return None
            with contextlib.suppress(FileNotFoundError):  # It was renamed after the look; the next finds it.
                return Entry.read(place)
        return None

    def state_of(self, folder: str) -> UploadState | None:
        """The state that the entry's place stands for; None once it has left the spool."""
        place = self.place_of(folder)
        return None if place is None else UploadState(place.parent.name)

    # Changes of state; one rename each.

    def claim(self, folder: str) -> Path:
        """Pending → inflight. Raises FileNotFoundError where someone deleted it."""
        place = self.inflight / folder
        rename(f"{self.pending}/{folder}", str(place))
        return place

    def release(self, folder: str) -> None:
        """Inflight → pending, for another try."""
        (self.inflight / folder).rename(self.pending / folder)

    def settle(self, folder: str, outcome: Outcome) -> None:
        """Inflight → done, or failed/…; pending → done where a newer version took its place.

        The bytes of what was delivered are freed before anything is written, so that this works on a full disk.
        """
        if outcome.state in FAILED_STATES:
            (self.inflight / folder).rename(self.failed / outcome.state / folder)
            note_reason(self.failed / outcome.state / folder, outcome)
            return
        place = self.pending if outcome.state is UploadState.SUPERSEDED else self.inflight
        rename(f"{place}/{folder}", f"{self.done}/{folder}")
        with contextlib.suppress(FileNotFoundError):
            unlink(f"{self.done}/{folder}/{DATA_FILE}")
        self.file_away(folder, outcome)

    def file_away(self, folder: str, outcome: Outcome) -> None:
        """Appends the line to `delivered.jsonl` and removes what is left of the folder; a crash between the two repeats the line."""
        append_line(self._delivered, json.dumps({"folder": folder, **outcome.to_json()}, ensure_ascii=False))
        remove_entry(f"{self.done}/{folder}")

    def recover(self) -> None:
        """What a drain does when it takes the spool over: interrupted uploads wait again, delivered ones are filed away."""
        for folder in self.list_inflight():
            self.release(folder)
        for folder in self.list_done():
            with contextlib.suppress(OSError):
                self.file_away(folder, self._outcome_of_done(folder))

    # What was delivered, and what the draining process says.

    def delivered(self) -> Iterator[Outcome]:
        """Every line of `delivered.jsonl`, oldest first; a torn last line is passed over."""
        with (
            contextlib.suppress(FileNotFoundError),
            os.fdopen(open_regular(self._delivered), encoding="utf-8", errors="replace") as lines,
        ):
            for line in lines:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    yield Outcome.from_json(json.loads(line))

    def forget_delivered(self) -> None:
        """Removes `delivered.jsonl`; `verify` then knows nothing about what was delivered before."""
        self._delivered.unlink(missing_ok=True)

    def write_status(self, status: dict[str, Any]) -> None:
        """Replaces `status.json`; a full disk is no reason to stop."""
        with contextlib.suppress(OSError):
            replace_json(self._status, status)

    def read_status(self) -> dict[str, Any]:
        """What the draining process last said; empty where it never did."""
        return read_json(self._status)

    def _live(self) -> tuple[Path, ...]:
        return (self.pending, self.inflight, self.done)

    def _entry_places(self) -> tuple[Path, ...]:
        return (*self._live(), *(self.failed / state for state in FAILED_STATES))

    def _folders(self) -> tuple[Path, ...]:
        # `tmp` last: whoever finds it, while another thread makes the spool anew, finds the others too.
        return (*self._live(), self.failed, *(self.failed / state for state in FAILED_STATES), self.tmp)

    def _outcome_of_done(self, folder: str) -> Outcome:
        entry = Entry.read(self.done / folder)
        return Outcome(identifier_of(folder), entry.remote_name, UploadState.DONE, size=entry.size)


def fsync_entry(folder: Path) -> None:
    """Has data, manifest and names of an entry's folder written to the disk; where it is renamed meanwhile, of the same folder.

    Raises:
        FileNotFoundError: There is no such folder, or it has left the spool half-way.
    """
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in (DATA_FILE, MANIFEST_FILE):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.fsync(place)
    finally:
        os.close(place)


def remove_entry(folder: str) -> None:
    """Removes what a delivered entry leaves: nearly always the manifest alone, which takes a third of what `rmtree` would."""
    try:
        unlink(f"{folder}/{MANIFEST_FILE}")
        rmdir(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _entries(folder: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as listing:
        for item in listing:
            if is_entry_folder(item.name) and item.is_dir(follow_symlinks=False):
                yield item.name


def _moved_entry(staged: Path) -> Entry | None:
    """The entry in a folder under `tmp/`, where a rename had brought its data before its process died."""
    if (staged / DATA_FILE).is_symlink() or not (staged / DATA_FILE).is_file():
        return None
    try:
        entry = Entry.parse(read_bytes(staged / MANIFEST_FILE))
    except (OSError, ManifestUnreadable):
        return None
    return entry if entry.staging == "moved" else None


def is_alive(pid: int) -> bool:
    """Whether a process of this host has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
