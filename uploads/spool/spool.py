"""The durable queue on disk: one folder per entry, one rename per change of state.

    SPOOL/
      spool.json         format, version, and the store this spool is for (never its secrets)
      queue.lock         held by the process that submits; its text says which
      drain.lock         held by the process that uploads; its text says which
      sequence           the sequence number given last
      status.json        the last status of the uploading process
      delivered.jsonl    one line per entry that has left the spool
      delivered.old.jsonl  the lines before those: `delivered.jsonl` is renamed to this at 16 MiB
      tmp/               entries being staged; removed when no process holds `queue.lock`
      spare/             empty folders of delivered entries, for the next ones; removed when the drain ends
      pending/SEQUENCE-NAMEKEY-IDENTIFIER/
        entry.json       the manifest
        data             the bytes
        crc32.json       CRC-32 of a large file, computed about a second after it was submitted
        flushed          the data of an entry without a checksum is on the disk
        attempts.json    number of failed attempts, and the last reason
        multipart.json   what a store needs to resume a multipart upload
      inflight/…         the same folder while it is being uploaded
      done/…             delivered; removed as soon as `delivered.jsonl` has the line
      failed/{conflict,corrupt,rejected}/…
                         the same folder and `reason.json`; kept until `gc --failed`
      quarantine/        damaged files that were in the way; never read again, and never deleted

A damaged file affects itself alone: it is quarantined or skipped, which is logged, and the rest is delivered.

Methods may be called from any thread. One process at a time may submit to a spool, and one may drain it.
Nothing is pickled, and there is no database: neither write-ahead logs nor memory maps are reliable on network
file systems.
"""

import collections
import contextlib
import errno
import functools
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import uuid
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from uploads.disk import (
    IRREGULAR,
    MOUNTS,
    PRIVATE_MODE,
    append_line,
    boot_id,
    closing,
    file_system_of,
    fsync_path,
    is_locked,
    is_network_file_system,
    open_regular,
    read_json,
    read_regular,
    replace_json,
    write_new,
)
from uploads.errors import ManifestError, SpoolUnusableError, UploadError
from uploads.handle import Outcome, UploadState
from uploads.messages import log_error, log_warning
from uploads.stores.uri import identity_of

from .entry import (
    DATA_FILE,
    MANIFEST_FILE,
    Entry,
    identifier_of,
    is_entry_folder,
    key_of,
    note_interruption,
    note_reason,
    read_reason,
    remove_reason,
    sequence_of,
)

__all__ = ["FAILED_STATES", "Spool"]


_FORMAT = "uploads-spool"
_VERSION = 1
_LOG_BYTES = 16 << 20  # About 40,000 entries have room in it.
_LINE_BYTES = 1 << 20
_FOLDER = re.compile(rb'"folder": "(\d{12}-[0-9a-f]{16}-[0-9a-f]{16})"')
_IDENTIFIER = re.compile(rb'"identifier": "([0-9a-f]{16})"')
_STAGED = re.compile(r"[0-9a-f]{32}")
_FLUSHED_BY_CLOSE = {"nfs", "nfs4"}
_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_MAX_SPARES = 128
_MAX_LOOKS = 10  # An entry moves a few times in its life; one without a manifest is not looked for forever.
FAILED_STATES = (UploadState.CONFLICT, UploadState.CORRUPT, UploadState.REJECTED)


class Spool:
    """The folder of entries. Safe from any thread and process: a change of state is one atomic rename.

    Args:
        path: The folder.
        boot: The present boot of the machine; default: asked of the system.
        mounts: The system's table of mounts.
        log_bytes: Size limit of each of the two files of `delivered.jsonl`.
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
        self._log_lock = threading.Lock()  # Guards delivered.jsonl: one line at a time.
        self._boot = boot
        self._spares: collections.deque[str] = collections.deque()  # Spares that this object left or found.
        self.path = Path(path).absolute()
        self.tmp = self.path / "tmp"
        self.pending = self.path / "pending"
        self.inflight = self.path / "inflight"
        self.done = self.path / "done"
        self.failed = self.path / "failed"
        self._spare = self.path / "spare"
        self._active_places = (self.pending, self.inflight, self.done)
        self._entry_places = (*self._active_places, *(self.failed / state for state in FAILED_STATES))
        # `tmp` last: a thread that finds it, while another creates the spool, finds the others too.
        self._folders = (*self._active_places, self.failed, *self._entry_places[3:], self._spare, self.tmp)
        self.queue_lock = self.path / "queue.lock"
        self.drain_lock = self.path / "drain.lock"
        self.sequence_file = self.path / "sequence"
        self._delivered = self.path / "delivered.jsonl"
        self._delivered_before = self.path / "delivered.old.jsonl"
        self._quarantine_folder = self.path / "quarantine"
        self._status = self.path / "status.json"
        self._description = self.path / "spool.json"

    @functools.cached_property
    def boot(self) -> str:
        """The present boot of the machine; when it ends, bytes only in the page cache may be lost.

        Empty on NFS: a closed file is on the server, and several machines share the spool.
        """
        if file_system_of(self.path, self._mounts) in _FLUSHED_BY_CLOSE:
            return ""
        return boot_id() if self._boot is None else self._boot

    def create(self, store: dict[str, Any] | None = None, *, trust: bool = False) -> None:
        """Creates missing folders with access for this user only; existing ones keep their permissions.

        Args:
            store: For `assign_store`, if no other process can have the spool yet.
            trust: For `check_owner`.

        Raises:
            SpoolUnusableError: It cannot be written, is from a newer version, or is not this user's (see
                `check_owner`).
        """
        with self.writing():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not trust:  # Before anything is created in another user's spool.
                self._check_user()
            for folder in self._folders:
                self._make_folder(folder)
            self.check_owner(trust=trust)
            self._quarantine_damaged_files()
            self.describe()
            if store is not None:
                self.assign_store(store)
        kind = file_system_of(self.path, self._mounts)
        if is_network_file_system(kind):
            log_warning(
                "the spool %s is on a network file system (%s): every file crosses the network twice, "
                "and locks between machines depend on its server. "
                "A local disk is safer: choose it with spool=…",
                self.path,
                kind,
            )

    def can_stage(self) -> bool:
        """Returns whether the folders for `staging` and `publish` exist."""
        return os.path.exists(self.pending) and os.path.exists(self.tmp)

    def exists(self) -> bool:
        """Returns whether this is a spool, perhaps an incomplete one; a folder `tmp/` could be anything."""
        return self.pending.is_dir() or read_json(self._description).get("format") == _FORMAT

    def check_owner(self, *, trust: bool = False) -> None:
        """Checks that no other user controls the spool: its folders are no symlinks and belong to this user.

        Args:
            trust: Whether the folders may belong to another user.

        Raises:
            SpoolUnusableError: One is a symlink or a file, or belongs to another user.
            OSError: The spool cannot be read or written.
        """
        for folder in self._folders:
            if os.path.lexists(folder):
                _check_folder(folder)
        if not trust:
            self._check_user()

    def _check_user(self) -> None:
        places = (place for place in (*self._folders, self._description) if os.path.lexists(place))
        theirs = {place.lstat().st_uid for place in places} - {os.geteuid()}
        if not theirs:
            return
        # A new file shows the user; geteuid() doesn't if root is mapped to the user `nobody`.
        with tempfile.TemporaryFile(dir=self.tmp if self.tmp.exists() else self.path) as mine:
            user = os.fstat(mine.fileno()).st_uid
        if theirs - {user}:
            raise SpoolUnusableError(
                f"spool {self.path} must belong to user {user}, got user {max(theirs)}, "
                "who could upload any file with your permissions. "
                "Work on it as that user, choose another, or pass --trust where a command takes it."
            )

    def assign_store(self, store: dict[str, Any]) -> None:
        """Saves the spool's store. Only the owner of `queue.lock` may call this.

        Args:
            store: Its "uri", and more that `resume` needs.

        Raises:
            SpoolUnusableError: It holds entries for another store, or cannot be written.
        """
        known = self.describe().get("store") or {}
        theirs, ours = identity_of(str(known.get("uri", ""))), identity_of(store["uri"])
        if known and theirs != ours and any(True for place in self._active_places for _ in _entries(place)):
            raise SpoolUnusableError(
                f"spool {self.path} has entries for another store, {theirs}; asked for {ours}. "
                f"Choose another spool, or upload them first: destinations uploads resume {self.path}"
            )
        if known != store:
            with self.writing():
                replace_json(self._description, {"format": _FORMAT, "version": _VERSION, "store": store})

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an OSError in the block into SpoolUnusableError, unless it is an UploadError."""
        try:
            yield
        except UploadError:
            raise
        except OSError as error:
            raise SpoolUnusableError(
                f"a spool must be a writable folder, got {self.path}: {error.strerror}. "
                "Choose another with spool=…"
            ) from error

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            if not (folder.is_dir() or folder.is_symlink()):
                self.quarantine(folder, "it is not a folder")
                folder.mkdir(mode=0o700, exist_ok=True)
            _check_folder(folder)

    def _quarantine_damaged_files(self) -> None:
        """Quarantines files of the wrong type, which their users could not open."""
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
                    self.quarantine(path, "it is not a regular file")
        try:
            is_description = _is_object(read_regular(self._description))
        except FileNotFoundError:
            return
        except IRREGULAR:
            is_description = False
        if not is_description:
            self.quarantine(self._description, "it does not describe a spool")

    def _quarantine_damaged_entries(self) -> None:
        for place in self._entry_places:
            with os.scandir(place) as listing:
                damaged = [
                    item.name
                    for item in listing
                    if is_entry_folder(item.name) and not item.is_dir(follow_symlinks=False)
                ]
            for name in damaged:
                self.quarantine(place / name, "it is not the folder of an entry")

    def quarantine(self, path: Path, problem: str) -> None:
        """Moves something damaged into `quarantine/` and logs it, even if it can't be moved."""
        target = self._quarantine_folder / f"{path.name}.{uuid.uuid4().hex[:8]}"
        try:
            self._quarantine_folder.mkdir(mode=0o700, exist_ok=True)
            if self._quarantine_folder.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "it is a symlink", str(self._quarantine_folder))
            path.rename(target)
        except FileNotFoundError:
            pass  # Another process moved it.
        except OSError as error:
            log_error("%s is damaged: %s. Cannot move it to %s: %s", path, problem, target, error.strerror)
        else:
            log_error("%s is damaged: %s. Moved to %s; the rest is not affected", path, problem, target)

    def list_quarantined(self) -> list[str]:
        """Returns the names in `quarantine/`."""
        return sorted(path.name for path in _children(self._quarantine_folder))

    def describe(self) -> dict[str, Any]:
        """Returns the content of `spool.json`; empty if there is none.

        Raises:
            SpoolUnusableError: It is from a newer version.
        """
        about = read_json(self._description)
        if not isinstance(about.get("store", {}), dict):
            del about["store"]
        if about.get("version", _VERSION) != _VERSION:
            raise SpoolUnusableError(
                f"spool {self.path} must have version {_VERSION}, got {about['version']!r}. "
                "Use the release that wrote it."
            )
        return about

    # Staging.

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yields a new folder to stage an entry in; removes it at the end unless it was published."""
        folder = self.new_folder()
        try:
            yield folder
        finally:
            if os.path.exists(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def new_folder(self) -> Path:
        """Creates a folder under `tmp/`; see `staging`."""
        folder = self.tmp / uuid.uuid4().hex
        if not self._spares:  # A worker process leaves them.
            self._spares.extend(self._list_spares())
        # There may be none, or another thread or process may have taken it.
        with contextlib.suppress(IndexError, OSError):
            os.rename(self._spares.pop(), folder)
            return folder
        os.mkdir(folder, 0o700)
        return folder

    def _list_spares(self) -> list[str]:
        return [f"{self._spare}/{name}" for name in _entries(self._spare)]

    def remove_spares(self) -> None:
        """Removes the empty folders of delivered entries that were not reused."""
        for spare in self._list_spares():
            with contextlib.suppress(OSError):  # Somebody took it meanwhile.
                os.rmdir(spare)

    def write_manifest(self, staged: Path, entry: Entry) -> None:
        """Writes the manifest into a staged folder."""
        write_new(f"{staged}/{MANIFEST_FILE}", entry.to_text())

    def publish(self, staged: Path, entry: Entry, *, to_disk: bool) -> None:
        """Makes a staged folder, with data and manifest, pending by one rename.

        Args:
            staged: From `new_folder`.
            entry: As in its manifest.
            to_disk: Whether to wait until data, manifest and names are on the disk.
        """
        if to_disk:
            fsync_entry(staged)
        place = f"{self.pending}/{entry.folder}"
        os.rename(staged, place)
        if to_disk:
            try:
                fsync_path(self.pending)
            except OSError as error:
                try:
                    os.rename(place, staged)
                except FileNotFoundError:  # It is being uploaded and can no longer be refused.
                    log_error("cannot sync the name of %s: %s", place, error.strerror)
                else:
                    raise

    def list_half_staged(self, *, is_owner: bool = False) -> list[Path]:
        """Returns folders that dead processes left in `tmp/`; nothing while a live process may be staging.

        Args:
            is_owner: Whether the caller holds `queue.lock`, and nothing is being staged.
        """
        # Listed before the lock is looked at, so that no newly staged folder is among them. Anything else in
        # a folder of this name may be the user's.
        found = [path for path in _children(self.tmp) if _is_staged_folder(path)]
        return found if is_owner or not is_locked(self.queue_lock) else []

    def sweep_tmp(self, *, is_owner: bool = False) -> int:
        """Removes half-staged files of dead processes; returns their number. See `list_half_staged`."""
        self.remove_spares()
        found = self.list_half_staged(is_owner=is_owner)
        for folder in found:
            shutil.rmtree(folder, ignore_errors=True)
        return len(found)

    def last_sequence(self) -> int:
        """Returns the highest sequence number in the spool; 0 in an empty one."""
        folders = (name for place in self._entry_places for name in _entries(place))
        return max((sequence_of(name) for name in folders), default=0)

    def _move_entry(self, source: Path, target: Path) -> None:
        """Moves an entry of an earlier process, or logs why not; quarantines it if its target exists."""
        try:
            source.rename(target)
        except FileNotFoundError:
            pass  # It was deleted.
        except OSError as error:
            if error.errno in _IN_THE_WAY:
                self.quarantine(source, f"there is a second entry of this name at {target}")
            else:
                log_error("cannot move %s to %s: %s", source, target, error.strerror)

    # Listing.

    def pending_folders(self) -> Iterator[str]:
        """Yields the pending folders in no order."""
        return _entries(self.pending)

    def inflight_folders(self) -> Iterator[str]:
        """Yields the folders that are being uploaded, in no order."""
        return _entries(self.inflight)

    def list_pending(self) -> list[str]:
        """Returns the pending folders in the order of submission."""
        return sorted(self.pending_folders())

    def list_inflight(self) -> list[str]:
        """Returns the folders that are being uploaded, or were when their process died."""
        return sorted(self.inflight_folders())

    def list_unfinished(self) -> tuple[list[str], list[str]]:
        """Returns the pending folders and those being uploaded, each in the order of submission.

        An entry that moves meanwhile is in one of the two, because `inflight/` is listed again until nothing
        new appears.
        """
        pending: set[str] = set()
        inflight = set(self.inflight_folders())
        for _ in range(_MAX_LOOKS):
            pending.update(self.pending_folders())
            taken = set(self.inflight_folders())
            if taken <= inflight:
                break
            inflight |= taken
        return sorted(pending - inflight), sorted(inflight)

    def staged_bytes(self) -> int:
        """Returns the number of bytes of all files in the spool."""
        total = 0
        for place in self._entry_places:
            for folder in _entries(place):
                with contextlib.suppress(FileNotFoundError):
                    total += (place / folder / DATA_FILE).lstat().st_size
        return total

    def is_pending(self, folder: str) -> bool:
        """Returns whether the entry is pending."""
        return os.path.exists(f"{self.pending}/{folder}")

    def list_done(self) -> list[str]:
        """Returns delivered entries whose line in `delivered.jsonl` is not written yet."""
        return sorted(_entries(self.done))

    def list_failed(self) -> dict[UploadState, list[str]]:
        """Returns the failed folders by state."""
        return {state: sorted(_entries(self.failed / state)) for state in FAILED_STATES}

    def place_of(self, folder: str) -> Path | None:
        """Returns where the entry is now; None once it has left the spool."""
        for place in self._entry_places * 2:  # A rename between two looks must not hide it.
            if os.path.isdir(f"{place}/{folder}"):
                return place / folder
        return None

    def entry_of(self, folder: str) -> Entry | None:
        """Reads the manifest, also while the entry moves; None once it has left the spool.

        Raises:
            ManifestError: Truncated, foreign, from a newer version, or another entry's.
        """
        for _ in range(_MAX_LOOKS):
            place = self.place_of(folder)
            if place is None:
                return None
            with contextlib.suppress(FileNotFoundError):  # It moved meanwhile; the next look finds it.
                return Entry.read(place)
        return None

    def name_of(self, folder: str) -> str:
        """Returns the remote name of an entry, or its folder's name if the manifest can't be read."""
        with contextlib.suppress(ManifestError, OSError):
            entry = self.entry_of(folder)
            if entry is not None:
                return entry.remote_name
        return folder

    def state_of(self, folder: str) -> UploadState | None:
        """Returns the state of the entry, from its place; None once it has left the spool."""
        place = self.place_of(folder)
        return None if place is None else UploadState(place.parent.name)

    # Changes of state.

    def claim(self, folder: str) -> Path:
        """Pending → inflight. Raises FileNotFoundError if the entry was deleted."""
        place = self.inflight / folder
        os.rename(f"{self.pending}/{folder}", place)
        return place

    def release(self, folder: str) -> None:
        """Inflight → pending, for a retry."""
        (self.inflight / folder).rename(self.pending / folder)

    def settle(self, folder: str, outcome: Outcome) -> None:
        """Inflight → done, or failed/…; pending → done if a newer version superseded it.

        The data of a delivered entry is deleted before anything is written, so that this works on a full
        disk. May be called again after an error.
        """
        if outcome.state in FAILED_STATES:
            (self.inflight / folder).rename(self.failed / outcome.state / folder)
            note_reason(self.failed / outcome.state / folder, outcome)
            return
        place = self.inflight
        if outcome.state is UploadState.SUPERSEDED:
            # Noted first, so that it doesn't count as delivered after a crash.
            place = self.pending if os.path.exists(f"{self.pending}/{folder}") else self.inflight
            note_reason(place / folder, outcome)
        try:
            os.rename(f"{place}/{folder}", f"{self.done}/{folder}")
        except FileNotFoundError:  # An earlier call may have moved it, and not written the log.
            if not os.path.exists(f"{self.done}/{folder}"):
                raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.done}/{folder}/{DATA_FILE}")
        self.log_delivered(folder, outcome)

    def withdraw(self, folder: str, outcome: Outcome, *, from_drain: bool = False) -> bool:
        """Pending → done without delivery; returns False if it is not pending any more.

        This claims the entry as a drain does; whichever rename comes first wins. A drain that begins in
        between takes it back.

        Args:
            folder: The entry.
            outcome: How it ends.
            from_drain: Whether to take it even from a drain that is sending it. The object may still arrive.
        """
        for _ in range(_MAX_LOOKS if from_drain else 1):
            try:
                self.claim(folder)
            except FileNotFoundError:
                if not (from_drain and os.path.exists(f"{self.inflight}/{folder}")):
                    return False
            # Noted first, so that it doesn't count as delivered after a crash.
            note_reason(self.inflight / folder, outcome)
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self.inflight}/{folder}", f"{self.done}/{folder}")
                break
        else:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.done}/{folder}/{DATA_FILE}")
        with contextlib.suppress(OSError):  # The disk may be full; the next drain logs it.
            self.log_delivered(folder, outcome)
        return True

    def log_delivered(self, folder: str, outcome: Outcome) -> None:
        """Appends to `delivered.jsonl`, then removes the folder; a crash between the two repeats the line."""
        line = json.dumps({"folder": folder, **outcome.to_json()}, ensure_ascii=False)
        with self._log_lock:
            is_success = outcome.state is UploadState.DONE
            last_success = None if is_success else self.delivered_at()
            self._append_delivered(line)
            if not is_success:
                with contextlib.suppress(OSError):  # Somebody else's file; monitors then see a wrong time.
                    os.utime(self._delivered, (last_success or 0.0, last_success or 0.0))
        self._empty(folder)

    def _empty(self, folder: str) -> None:
        """Removes a delivered entry, but leaves its folder for `new_folder`.

        A new inode is the largest cost of staging on ext4, which skips inodes that were freed within minutes:
        a file of 256 KiB took 1.5 ms of processor time, and takes 1.1 in a reused folder.
        """
        place, spare = f"{self.done}/{folder}", f"{self._spare}/{folder}"
        with contextlib.suppress(OSError):
            os.unlink(f"{place}/{MANIFEST_FILE}")
        try:
            is_empty = not os.listdir(place)  # Notes on the entry may be left.
            if is_empty:
                os.rename(place, spare)
        except OSError:
            is_empty = False
        if not is_empty:
            shutil.rmtree(place, ignore_errors=True)
            return
        self._spares.append(spare)
        if len(self._spares) > _MAX_SPARES:
            with contextlib.suppress(IndexError, OSError):  # Another process has the oldest.
                os.rmdir(self._spares.popleft())

    def _append_delivered(self, line: str) -> None:
        try:
            if self._delivered.lstat().st_size + len(line) > self._log_bytes:
                self._delivered.replace(self._delivered_before)
        except FileNotFoundError:
            pass
        append_line(self._delivered, line, mode=PRIVATE_MODE)

    def recover(self) -> None:
        """Prepares the spool for a drain: interrupted uploads become pending, delivered ones are logged."""
        self._quarantine_damaged_entries()
        for folder in self.list_inflight():
            with contextlib.suppress(OSError):  # Left if it was about to be withdrawn.
                remove_reason(self.inflight / folder)
            self._move_entry(self.inflight / folder, self.pending / folder)
        for folder in self.list_done():
            try:
                self.log_delivered(folder, self._outcome_of_done(folder))
            except FileNotFoundError:  # Killed while it was being removed, after its line.
                self._empty(folder)
            except ManifestError as error:
                self.quarantine(self.done / folder, f"it was delivered, but {error}")
            except OSError as error:
                log_error("cannot log the delivery of %s: %s", folder, error)

    # The log of deliveries, and the status.

    def delivered(self, among: Container[str] | None = None) -> Iterator[Outcome]:
        """Yields the outcomes in the log of deliveries, oldest first; corrupt lines are skipped and counted.

        Args:
            among: Identifiers to look for; None for all.
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
            log_warning("%d lines of %s are corrupt; skipped", unreadable, self._delivered)

    def superseded(self) -> Iterator[Outcome]:
        """Yields the superseded entries of `delivered`, which a new schedule needs; far faster than all."""
        for line in self._delivered_lines():
            if b'"superseded"' in line and (outcome := _outcome_in(line)) is not None:
                yield outcome

    def newest_delivered(self) -> dict[str, str]:
        """Returns the newest delivered folder by key of the remote name, as far as the log goes back."""
        newest: dict[str, str] = {}
        for line in self._delivered_lines():
            found = _FOLDER.search(line)
            if found is not None and b'"state": "withdrawn"' not in line:
                folder = found[1].decode()
                newest[key_of(folder)] = max(folder, newest.get(key_of(folder), ""))
        return newest

    def take_over(self, other: "Spool") -> None:
        """Moves the unfinished entries of another spool, whose locks the caller owns, into this one.

        Raises:
            SpoolUnusableError: See `create`.
            OSError: The other spool cannot be read.
        """
        other.create()
        other.sweep_tmp(is_owner=True)
        for folder in other.list_inflight():
            note_interruption(other.inflight / folder)
        other.recover()
        for folder in other.list_pending():
            self._move_entry(other.pending / folder, self.pending / folder)

    def requeue(self, state: UploadState, folder: str) -> None:
        """Failed → pending, as if new. The caller holds the drain lock."""
        place = self.failed / state / folder
        remove_reason(place)  # First, so that a delivery after a crash isn't logged with it.
        place.rename(self.pending / folder)

    def _delivered_lines(self) -> Iterator[bytes]:
        """Yields at most the last `log_bytes` of both files, as lines."""
        with contextlib.ExitStack() as opened:
            files: list[BinaryIO] = []
            # Opens the newer first: if it is renamed meanwhile, its lines come twice and are not missed.
            for path in (self._delivered, self._delivered_before):
                with contextlib.suppress(OSError):
                    files.insert(0, opened.enter_context(os.fdopen(open_regular(path), "rb")))
            for file in files:
                size = os.fstat(file.fileno()).st_size
                if size > self._log_bytes + _LINE_BYTES:
                    file.seek(size - self._log_bytes)
                    file.readline(_LINE_BYTES)
                while file.tell() < size and (line := file.readline(_LINE_BYTES)):
                    yield line

    def write_status(self, status: dict[str, Any]) -> None:
        """Replaces `status.json`; errors are ignored."""
        with contextlib.suppress(OSError):
            replace_json(self._status, status)

    def read_status(self) -> dict[str, Any]:
        """Returns the last status of the draining process; empty if there is none."""
        return read_json(self._status)

    def delivered_at(self) -> float | None:
        """Returns when a file was delivered last, in seconds since 1970; None if unknown."""
        try:
            return self._delivered.stat().st_mtime or None
        except OSError:
            return None

    def _outcome_of_done(self, folder: str) -> Outcome:
        entry = Entry.read(self.done / folder)
        noted = read_reason(self.done / folder)
        if noted is not None and noted.identifier == entry.identifier:
            return noted
        return Outcome(identifier_of(folder), entry.remote_name, UploadState.DONE, size=entry.size)


def fsync_entry(folder: Path) -> None:
    """Syncs data, manifest and names of an entry's folder, also if it is renamed meanwhile.

    Raises:
        FileNotFoundError: There is no such folder, or it left the spool meanwhile.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(os.open(folder, flags | os.O_DIRECTORY)) as place:
        for name in (DATA_FILE, MANIFEST_FILE):
            with closing(os.open(name, flags, dir_fd=place)) as descriptor:
                os.fsync(descriptor)
        os.fsync(place)


def _check_folder(folder: Path) -> None:
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise SpoolUnusableError(
            f"{folder} must be a folder, got a symlink or a file. "
            "Replace it by a folder, or choose another spool with spool=…"
        )


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_staged_folder(path: Path) -> bool:
    """Returns whether this is a folder that `Spool.new_folder` made."""
    return _STAGED.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def _entries(folder: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as listing:
        for item in listing:
            if is_entry_folder(item.name) and item.is_dir(follow_symlinks=False):
                yield item.name


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
