"""The durable queue on disk: one folder per entry, a change of state is one rename.

    SPOOL/
      spool.json         format, version, and the store this spool is for (never its secrets)
      queue.lock         held by the process that submits; its text says who
      drain.lock         held by the process that uploads; its text says who
      sequence           the number that was given to an entry last
      status.json        what the uploading process last said about itself; replaced atomically
      delivered.jsonl    one line per entry that has left the spool
      delivered.old.jsonl  the lines before those: at 16 MiB the log gets this name, and the one that had it goes
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
      half-sent/FOLDER.json  `multipart.json` of an entry that has ended, until the store has forgotten the parts
      failed/{conflict,corrupt,rejected}/…   the same folder and `reason.json`; kept until `gc --failed`
      quarantine/        what was damaged and stood in the way; never read again, and never deleted

One damaged file costs itself: it is put into quarantine or passed over, which the log says, and the rest is delivered.

Many processes may submit into a spool, one at a time may drain it. Nothing here is pickled; no database is involved,
since neither write-ahead logs nor memory maps can be trusted on the network file systems that clusters keep homes on.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from uploads.disk import (
    IRREGULAR,
    MOUNTS,
    PRIVATE_MODE,
    append_line,
    boot_id,
    exists,
    file_system_of,
    fsync_path,
    is_network_file_system,
    mkdir,
    open_regular,
    read_json,
    read_regular,
    rename,
    replace_json,
    rmdir,
    try_lock,
    unlink,
    write_new,
)
from uploads.errors import ManifestError, SpoolUnusableError
from uploads.handle import Outcome, UploadState
from uploads.stores.uri import identity_of

from .entry import (
    DATA_FILE,
    MANIFEST_FILE,
    Entry,
    identifier_of,
    is_entry_folder,
    key_of,
    note_reason,
    reason_of,
    sequence_of,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

__all__ = ["FAILED_STATES", "Spool"]

_log = logging.getLogger("uploads")

_VERSION = 1
_LOG_BYTES = 16 << 20  # Of about 40,000 entries.
_LINE_BYTES = 1 << 20
_FOLDER = re.compile(rb'"folder": "(\d{12}-[0-9a-f]{16}-[0-9a-f]{16})"')
_IDENTIFIER = re.compile(rb'"identifier": "([0-9a-f]{16})"')
_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_LOCK = ".lock"
_LOOKS = 10  # An entry changes its place a few times in its life; one without a manifest is not looked for for ever.
FAILED_STATES = (UploadState.CONFLICT, UploadState.CORRUPT, UploadState.REJECTED)


class Spool:
    """The folder of entries. Every method may be called from any thread; what guards against races is that rename is atomic.

    Args:
        path: Where.
        boot: Which boot of the machine this is; asked of the system by default.
        mounts: Where the system says what is mounted.
        log_bytes: The most that one of the two files of `delivered.jsonl` may have.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        boot: str | None = None,
        mounts: Path = MOUNTS,
        log_bytes: int = _LOG_BYTES,
    ) -> None:
        self._mounts = mounts
        self._log_bytes = log_bytes
        self._logging = threading.Lock()  # Guards the log of what was delivered: one line at a time.
        self.boot = boot_id() if boot is None else boot
        self.path = Path(path).absolute()
        self.tmp = self.path / "tmp"
        self.pending = self.path / "pending"
        self.inflight = self.path / "inflight"
        self.done = self.path / "done"
        self.failed = self.path / "failed"
        self._to_abort = self.path / "half-sent"
        self.queue_lock = self.path / "queue.lock"
        self.drain_lock = self.path / "drain.lock"
        self.numbers = self.path / "sequence"
        self._delivered = self.path / "delivered.jsonl"
        self._delivered_before = self.path / "delivered.old.jsonl"
        self._quarantine = self.path / "quarantine"
        self._status = self.path / "status.json"
        self._description = self.path / "spool.json"
        self._staging = (0, "")  # The process that stages, and under which lock.
        self._numbers = itertools.count()

    def create(self, store: dict[str, Any] | None = None, *, trust: bool = False) -> None:
        """Makes the folders that are missing, for this user alone; one that was there keeps its permissions.

        Args:
            store: For `belong_to`, where nobody else can have the spool yet.
            trust: For `check_owner`.

        Raises:
            SpoolUnusableError: It cannot be written, is from a newer version, or is not this user's (see `check_owner`).
        """
        folders = self._folders()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in folders:
                self._make_place(folder)
            self.check_owner(trust=trust)
            self._set_aside_damaged_files()
            self.describe()
            if store is not None:
                self.belong_to(store)
        except OSError as error:
            raise SpoolUnusableError(
                f"a spool must be a writable folder, got {self.path}: {error.strerror}. Choose another with spool=…"
            ) from error
        kind = file_system_of(self.path, self._mounts)
        if is_network_file_system(kind):
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
            SpoolUnusableError: One is a symlink or something else, or is another user's.
            OSError: It cannot be looked at or written.
        """
        folders = [folder for folder in self._folders() if os.path.lexists(folder)]
        for folder in folders:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise SpoolUnusableError(
                    f"{folder} must be a folder, got a symlink or a file. Choose another spool."
                )
        if trust:
            return
        places = [*folders, *(file for file in (self._description,) if file.exists())]
        theirs = {place.lstat().st_uid for place in places} - {os.geteuid()}
        if not theirs:
            return
        # Asked of a file, not of the system: where root is mapped to nobody, root's own spool is nobody's.
        with tempfile.TemporaryFile(dir=self.tmp) as mine:
            user = os.fstat(mine.fileno()).st_uid
        if theirs - {user}:
            raise SpoolUnusableError(
                f"spool {self.path} must belong to user {user}, got user {max(theirs)}, who could have any file written with your rights. "
                "Work on it as that user, choose another, or say --trust where a command takes it."
            )

    def belong_to(self, store: dict[str, Any]) -> None:
        """Notes which store the spool is for. To be called by the owner of `queue.lock`.

        Args:
            store: Its "uri", and what else `resume` needs.

        Raises:
            SpoolUnusableError: It holds entries for another store, or cannot be written.
        """
        known = self.describe().get("store") or {}
        theirs, ours = identity_of(str(known.get("uri", ""))), identity_of(store["uri"])
        if known and theirs != ours and any(True for place in self._live() for _ in _entries(place)):
            raise SpoolUnusableError(
                f"spool {self.path} must be empty to be used for another store, got entries for {theirs} where {ours} is asked for. "
                f"Choose another spool, or bring them to their store first: python -m uploads resume {self.path}"
            )
        if known != store:
            try:
                replace_json(
                    self._description, {"format": "uploads-spool", "version": _VERSION, "store": store}
                )
            except OSError as error:
                raise SpoolUnusableError(
                    f"a spool must be writable, got {self.path}: {error.strerror}. Choose another with spool=…"
                ) from error

    def _make_place(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            mode = folder.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise SpoolUnusableError(
                    f"{folder} must be a folder of the spool itself, got a symlink to {folder.readlink()}. "
                    "Move what is behind it into its place, or choose another spool with spool=…"
                ) from None
            if not stat.S_ISDIR(mode):
                self.set_aside(folder, "it is not a folder")
                folder.mkdir(mode=0o700, exist_ok=True)

    def _set_aside_damaged_files(self) -> None:
        """Puts files that are not what their name says into quarantine, since they would stop whoever uses them."""
        for path in (
            self.queue_lock,
            self.drain_lock,
            self._status,
            self._description,
            self._delivered,
            self._delivered_before,
        ):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(path.lstat().st_mode):
                    self.set_aside(path, "it is not a regular file")
        try:
            is_description = _is_object(read_regular(self._description))
        except FileNotFoundError:
            return
        except IRREGULAR:
            is_description = False
        if not is_description:
            self.set_aside(self._description, "it does not describe a spool")

    def _set_aside_damaged_entries(self) -> None:
        for place in self._entry_places():
            with os.scandir(place) as listing:
                damaged = [
                    item.name
                    for item in listing
                    if is_entry_folder(item.name) and not item.is_dir(follow_symlinks=False)
                ]
            for name in damaged:
                self.set_aside(place / name, "it is not the folder of an entry")

    def set_aside(self, path: Path, problem: str) -> None:
        """Moves something damaged out of the way, into `quarantine/`, and says so; also where it cannot be moved."""
        target = self._quarantine / f"{path.name}.{uuid.uuid4().hex[:8]}"
        try:
            self._quarantine.mkdir(mode=0o700, exist_ok=True)
            if self._quarantine.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "it is a symlink", str(self._quarantine))
            path.rename(target)
        except FileNotFoundError:
            pass  # Another process did so.
        except OSError as error:
            _log.error(
                "%s is damaged: %s. It could not be moved to %s: %s", path, problem, target, error.strerror
            )
        else:
            _log.error(
                "%s is damaged: %s. It was moved to %s; the rest is not affected", path, problem, target
            )

    def quarantined(self) -> list[str]:
        """The names of what was moved into `quarantine/`."""
        return sorted(path.name for path in _children(self._quarantine))

    def describe(self) -> dict[str, Any]:
        """What `spool.json` says; empty where there is none.

        Raises:
            SpoolUnusableError: It is from a newer version.
        """
        about = read_json(self._description)
        if not isinstance(about.get("store", {}), dict):
            del about["store"]
        if about.get("version", _VERSION) != _VERSION:
            raise SpoolUnusableError(
                f"spool {self.path} must have version {_VERSION}, got {about['version']!r}. Use the release that wrote it."
            )
        return about

    # Staging.

    def new_folder(self) -> Path:
        """A folder under `tmp/` to stage an entry in; its name says under which lock, so that it can be swept when that is free."""
        pid, token = self._staging
        # A forked child stages under a lock of its own, and so does whoever finds the spool deleted and made again.
        if pid != os.getpid() or not exists(f"{self.tmp}/{token}{_LOCK}"):
            token = self._lock_staging()
            self._staging = os.getpid(), token
        folder = self.tmp / f"{token}-{next(self._numbers)}"
        mkdir(str(folder))
        return folder

    def _lock_staging(self) -> str:
        """Takes a lock of a new name, which this process holds until it ends or the spool is collected.

        The kernel's lock says who lives; a process id or the name of a host would not, since both are given again.
        """
        while True:
            token = uuid.uuid4().hex
            path = f"{self.tmp}/{token}{_LOCK}"
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
            try:
                is_mine = try_lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if not is_mine:  # A sweep in another process looks at it.
                os.close(descriptor)
                continue
            weakref.finalize(self, _end_staging, descriptor, path, os.getpid())
            if exists(path):  # Else they have removed it.
                return token

    def _is_staging(self, token: str) -> bool:
        """Whether the process that stages under this token lives; the lock of a dead one is removed."""
        path = f"{self.tmp}/{token}{_LOCK}"
        try:
            descriptor = open_regular(path, os.O_RDWR)
        except (FileNotFoundError, *IRREGULAR):
            return False
        except OSError:
            return True
        try:
            if not try_lock(descriptor):
                return True
            with contextlib.suppress(FileNotFoundError):
                unlink(path)
        finally:
            os.close(descriptor)
        return False

    def write_manifest(self, staged: Path, entry: Entry) -> None:
        """Says in the staged folder what it is."""
        write_new(f"{staged}/{MANIFEST_FILE}", entry.to_text())

    def publish(self, staged: Path, entry: Entry, *, to_disk: bool) -> None:
        """Makes the staged folder, which holds data and manifest, pending in one rename.

        Args:
            staged: From `new_folder`.
            entry: As in its manifest.
            to_disk: Whether data, manifest and names are on the disk when this returns, not only in the page cache.
        """
        if to_disk:
            fsync_entry(staged)
        place = f"{self.pending}/{entry.folder}"
        rename(str(staged), place)
        if to_disk:
            try:
                fsync_path(self.pending)
            except OSError as error:
                try:
                    rename(place, str(staged))
                except FileNotFoundError:  # It is being uploaded already, and can no longer be refused.
                    _log.error("the disk must keep the name of %s, got %s", place, error.strerror)
                else:
                    raise

    def sweep_tmp(self) -> int:
        """Clears what dead processes left half staged; returns how many were removed.

        A file that had been moved here is nowhere else: its entry is complete, and becomes pending.
        """
        swept = 0
        found = _children(self.tmp)
        tokens = {path.name.removesuffix(_LOCK).partition("-")[0] for path in found}
        dead = {token for token in tokens if not self._is_staging(token)}
        for folder in found:
            if folder.name.partition("-")[0] not in dead:
                continue
            try:
                entry = _moved_entry(folder)
            except ManifestError as error:  # What it holds may be a file that was moved, and is nowhere else.
                self.set_aside(folder, str(error))
                continue
            if entry is not None:
                self._rename_entry(folder, self.pending / entry.folder)
                continue
            if folder.is_symlink() or not folder.is_dir():  # `rmtree` waits for the other end of a FIFO.
                folder.unlink(missing_ok=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            swept += 1
        return swept

    def last_sequence(self) -> int:
        """The highest sequence number in the spool; 0 in an empty one."""
        folders = (name for place in self._entry_places() for name in _entries(place))
        return max((sequence_of(name) for name in folders), default=0)

    def _rename_entry(self, source: Path, target: Path) -> None:
        """Moves an entry of an earlier process; what cannot be moved is said and left, what has no place is put into quarantine."""
        try:
            source.rename(target)
        except FileNotFoundError:
            pass  # Somebody deleted it.
        except OSError as error:
            if error.errno in _IN_THE_WAY:
                self.set_aside(source, f"there is a second entry of this name at {target}")
            else:
                _log.error("%s could not be moved to %s: %s", source, target, error.strerror)

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

    def list_unfinished(self) -> tuple[list[str], list[str]]:
        """The names of the folders that wait and of those that are being uploaded, in the order of submission.

        An entry that changes its place meanwhile is in one of the two: what is in flight is listed again until that brings nothing new.
        """
        pending: set[str] = set()
        inflight = set(self.inflight_folders())
        for _ in range(_LOOKS):
            pending.update(self.pending_folders())
            taken = set(self.inflight_folders())
            if taken <= inflight:
                break
            inflight |= taken
        return sorted(pending - inflight), sorted(inflight)

    def staged_bytes(self) -> int:
        """How many bytes of files wait, are in flight, or failed."""
        total = 0
        for place in self._entry_places():
            for folder in _entries(place):
                with contextlib.suppress(FileNotFoundError):
                    total += (place / folder / DATA_FILE).lstat().st_size
        return total

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
            ManifestError: Torn, foreign, from a newer version, or another entry's.
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
        place = self.inflight
        if (
            outcome.state is UploadState.SUPERSEDED
        ):  # Noted first: after a crash it must not be taken for delivered.
            place = self.pending
            note_reason(place / folder, outcome)
        rename(f"{place}/{folder}", f"{self.done}/{folder}")
        with contextlib.suppress(FileNotFoundError):
            unlink(f"{self.done}/{folder}/{DATA_FILE}")
        self.file_away(folder, outcome)

    def file_away(self, folder: str, outcome: Outcome) -> None:
        """Appends the line to `delivered.jsonl` and removes what is left of the folder; a crash between the two repeats the line."""
        line = json.dumps({"folder": folder, **outcome.to_json()}, ensure_ascii=False)
        with self._logging:
            self._log_delivered(line)
        remove_entry(f"{self.done}/{folder}")

    def _log_delivered(self, line: str) -> None:
        try:
            if self._delivered.lstat().st_size + len(line) > self._log_bytes:
                self._delivered.replace(self._delivered_before)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            self.set_aside(self._delivered_before, "it is not a regular file")
        try:
            append_line(self._delivered, line, mode=PRIVATE_MODE)
        except IRREGULAR as error:
            self.set_aside(self._delivered, str(error))
            append_line(self._delivered, line, mode=PRIVATE_MODE)

    def recover(self) -> None:
        """What a drain does when it takes the spool over: interrupted uploads wait again, delivered ones are filed away."""
        self._set_aside_damaged_entries()
        for folder in self.list_inflight():
            self._rename_entry(self.inflight / folder, self.pending / folder)
        for folder in self.list_done():
            try:
                self.file_away(folder, self._outcome_of_done(folder))
            except FileNotFoundError:  # Killed while it was removed, which comes after its line.
                remove_entry(f"{self.done}/{folder}")
            except ManifestError as error:
                self.set_aside(self.done / folder, f"it was delivered, but {error}")
            except OSError as error:
                _log.error("what was delivered of %s could not be noted: %s", folder, error)

    def keep_for_abort(self, notes: Path, folder: str) -> None:
        """Keeps what a store needs to forget a half-sent file, whatever becomes of its entry."""
        self._to_abort.mkdir(mode=0o700, exist_ok=True)
        notes.rename(self._to_abort / f"{folder}.json")

    def list_to_abort(self) -> list[Path]:
        """What `keep_for_abort` kept."""
        return sorted(_children(self._to_abort))

    # What was delivered, and what the draining process says.

    def delivered(self, among: Container[str] | None = None) -> Iterator[Outcome]:
        """The lines of `delivered.jsonl` and of the file before it, oldest first; lines that cannot be read are passed over, which is said.

        Args:
            among: The identifiers to look for; None for all.
        """
        unreadable = 0
        for line in self._delivered_lines():
            if among is not None:
                found = _IDENTIFIER.search(line)
                if found is not None and found[1].decode() not in among:
                    continue
            outcome = _outcome_in(line)
            if outcome is not None:
                yield outcome
            elif line.strip():
                unreadable += 1
        if unreadable:
            _log.warning("%d lines of %s cannot be read and are passed over", unreadable, self._delivered)

    def superseded(self) -> Iterator[Outcome]:
        """Those of `delivered` that a newer version replaced: all that a new schedule needs, and far faster."""
        for line in self._delivered_lines():
            if b'"superseded"' in line and (outcome := _outcome_in(line)) is not None:
                yield outcome

    def newest_delivered(self) -> dict[str, str]:
        """Of each remote name's key, the newest entry's folder that was delivered, as far as `delivered.jsonl` knows."""
        newest: dict[str, str] = {}
        for line in self._delivered_lines():
            found = _FOLDER.search(line)
            if found is not None:
                folder = found[1].decode()
                newest[key_of(folder)] = max(folder, newest.get(key_of(folder), ""))
        return newest

    def wait_again(self, state: UploadState, folder: str) -> None:
        """Failed → pending, to be looked at from the start. The caller drains the spool, or keeps others from it."""
        (self.failed / state / folder).rename(self.pending / folder)
        for name in ("reason.json", "digest.json"):
            (self.pending / folder / name).unlink(missing_ok=True)

    def forget_delivered(self) -> None:
        """Removes `delivered.jsonl`; `verify` then knows nothing about what was delivered before."""
        self._delivered.unlink(missing_ok=True)
        self._delivered_before.unlink(missing_ok=True)

    def _delivered_lines(self) -> Iterator[bytes]:
        """Lines of both files, of each at most the last `log_bytes`."""
        with contextlib.ExitStack() as opened:
            files: list[BinaryIO] = []
            # The newer first: where it changes its name between the two, it is found twice and not missed.
            for path in (self._delivered, self._delivered_before):
                with contextlib.suppress(OSError):
                    files.insert(0, opened.enter_context(open(open_regular(path), "rb")))  # noqa: PTH123  # a descriptor
            if len(files) > 1 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
                files.pop()
            for file in files:
                size = os.fstat(file.fileno()).st_size
                if size > self._log_bytes + _LINE_BYTES:
                    file.seek(size - self._log_bytes)
                    file.readline(_LINE_BYTES)
                while file.tell() < size and (line := file.readline(_LINE_BYTES)):
                    yield line

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
        noted = reason_of(self.done / folder)
        if noted is not None and noted.identifier == entry.identifier:
            return noted
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


def _end_staging(descriptor: int, path: str, pid: int) -> None:
    if os.getpid() == pid:  # Else it is a forked child's copy of the parent's.
        with contextlib.suppress(OSError):
            unlink(path)
    os.close(descriptor)


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _entries(folder: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as listing:
        for item in listing:
            if is_entry_folder(item.name) and item.is_dir(follow_symlinks=False):
                yield item.name


def _moved_entry(staged: Path) -> Entry | None:
    """The entry in a folder under `tmp/`, where a rename had brought its data before its process died.

    Raises:
        ManifestError: It has data and a manifest, which is damaged.
    """
    try:
        os.close(open_regular(staged / DATA_FILE))
        text = read_regular(staged / MANIFEST_FILE)
    except IRREGULAR as error:
        raise ManifestError(str(error)) from error
    except OSError:
        return None
    entry = Entry.parse(text)
    return entry if entry.staging == "moved" else None


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _outcome_in(line: bytes) -> Outcome | None:
    try:
        return Outcome.from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
