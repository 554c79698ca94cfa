"""One attempt to bring one entry to its store: check the bytes, look before putting, put, and recognise one's own earlier success."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import TYPE_CHECKING

import attrs

from uploads.disk import IRREGULAR, read_json, replace_json
from uploads.errors import RemoteExistsError, StoreParkedError, TransientStoreError
from uploads.handle import Outcome, UploadState
from uploads.spool.entry import CHECKSUM_FILE, DATA_FILE, Entry
from uploads.stores.store import Body, Digest, Renewable, Replacing

if TYPE_CHECKING:
    from pathlib import Path

    from uploads.stores.store import RemoteObject, Store

__all__ = ["CredentialWatch", "deliver"]


class CredentialWatch:
    """Compares the credential files of a store with how they were when the watch was made, or last asked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = self._look()

    def renew(self, *, anyway: bool) -> bool:
        """Has the store start over where its files changed, or else where it is to be done anyway; returns whether they changed."""
        seen, self._seen = self._seen, self._look()
        changed = seen != self._seen
        if isinstance(self._store, Renewable) and (changed or anyway):
            self._store.renew()
        return changed

    def _look(self) -> tuple[object, ...]:
        if not isinstance(self._store, Renewable):
            return ()
        return tuple(_stamp(path) for path in self._store.credential_files())


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


_log = logging.getLogger("uploads")

_REMEMBER_DIGEST_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}")


def deliver(
    folder: Path,
    entry: Entry,
    store: Store,
    *,
    retried: bool,
    is_answer_lost: bool = False,
    suspect: bool = False,
) -> Outcome:
    """Tries once; returns how it ended, or raises what may pass.

    Args:
        folder: The entry's folder.
        entry: Its manifest.
        store: Where to.
        retried: Whether an earlier attempt may have succeeded without our knowing.
        is_answer_lost: Whether one was sent and not answered. Where the name is taken and the store does not let us look by whom, it was
            that one.
        suspect: Whether a loss of power may have taken bytes; then those without a checksum are sent only if no block is all zeros.

    Raises:
        StoreError: From the store; the caller decides whether to try again.
        OSError: The spool could not be read.
    """
    opened = _opened(folder, entry)
    if isinstance(opened, str):
        uri = store.uri(entry.remote_name)
        return Outcome(
            entry.identifier, entry.remote_name, UploadState.CORRUPT, uri, entry.size, reason=opened
        )
    with opened as body:
        crc32 = _noted_crc32(folder) if entry.crc32 is None else entry.crc32
        damage = _damage(entry, body.digest, crc32)
        if not damage and crc32 is None and suspect and _has_blank_block(body):
            damage = "staged bytes must be on the disk, got a loss of power before it was known to have them, and zeros where it may not. Submit the file again."
        if damage:
            return _outcome(entry, store, body, UploadState.CORRUPT, damage)
        _remember_digest(folder, body.digest, is_noted=crc32 is not None)
        if retried or not entry.overwrite:
            existing = _look(store, entry.remote_name)
            if existing is not None and _is_ours(store, existing, body, entry):
                return _outcome(entry, store, body, UploadState.DONE)
            if existing is not None and not entry.overwrite:
                return _conflict(entry, store, body, existing)
        if entry.overwrite and isinstance(store, Replacing):
            store.replace(entry.remote_name, body, notes=folder / "multipart.json")
            return _outcome(entry, store, body, UploadState.DONE)
        try:
            store.put(entry.remote_name, body, overwrite=entry.overwrite, notes=folder / "multipart.json")
        except RemoteExistsError:
            return _taken(entry, store, body, is_answer_lost=is_answer_lost)
        return _outcome(entry, store, body, UploadState.DONE)


def _opened(folder: Path, entry: Entry) -> Body | str:
    """The staged bytes, or what is wrong with them."""
    try:
        size = (folder / DATA_FILE).lstat().st_size
        if size != entry.size:  # Not read: what is damaged may be of any size.
            return _wrong_size(entry, size)
        known = _remembered_digest(folder) if entry.size >= _REMEMBER_DIGEST_BYTES else None
        return Body(f"{folder}/{DATA_FILE}", entry.identifier, known)
    except FileNotFoundError:
        if not folder.is_dir():
            raise
        return "staged bytes must be in the entry's folder, got no file. Submit the file again."
    except IRREGULAR as error:
        return f"staged bytes must be in the entry's folder: {error}. Submit the file again."


def _taken(entry: Entry, store: Store, body: Body, *, is_answer_lost: bool) -> Outcome:
    """What it means that a create-only put found the name taken."""
    try:
        existing = store.head(entry.remote_name)
    except StoreParkedError as error:
        if not error.may_be_the_entry:
            raise
        if not is_answer_lost:
            return _conflict(entry, store, body, None)
        _log.warning(
            "%s exists, and these credentials may not read it: taken for the upload of entry %s whose answer was lost",
            store.uri(entry.remote_name),
            entry.identifier,
        )
        return _outcome(entry, store, body, UploadState.DONE)
    if existing is None:
        raise TransientStoreError(f"{store.uri(entry.remote_name)} was taken a moment ago and is free now")
    if not _is_ours(store, existing, body, entry):
        return _conflict(entry, store, body, existing)
    return _outcome(entry, store, body, UploadState.DONE)


def _damage(entry: Entry, digest: Digest, crc32: int | None) -> str:
    """What is wrong with the staged bytes; empty where nothing is."""
    if digest.size != entry.size:
        return _wrong_size(entry, digest.size)
    if crc32 is not None and digest.crc32 != crc32:
        return f"staged bytes must have CRC-32 {crc32:08x}, got {digest.crc32:08x}. The spool's copy was changed; submit the file again."
    return ""


def _has_blank_block(body: Body) -> bool:
    """Whether a block is all zeros, as file systems leave those that a loss of power kept from the disk."""
    return any(
        not any(chunk[offset : offset + _BLOCK_BYTES])
        for chunk in body.chunks()
        for offset in range(0, len(chunk), _BLOCK_BYTES)
    )


def _wrong_size(entry: Entry, size: int) -> str:
    return (
        f"staged bytes must be {entry.size}, got {size}. The spool's copy was changed; submit the file again."
    )


def _noted_crc32(folder: Path) -> int | None:
    """Of a large file, computed behind the training loop's back or by an earlier attempt; None where neither came to pass."""
    crc32 = read_json(folder / CHECKSUM_FILE).get("crc32")
    return crc32 if isinstance(crc32, int) else None


def _look(store: Store, name: str) -> RemoteObject | None:
    """HEAD; a user who may put but not look is told by the put what is the matter, if anything."""
    try:
        return store.head(name)
    except StoreParkedError as error:
        if error.may_be_the_entry:
            return None
        raise


def _is_ours(store: Store, existing: RemoteObject, body: Body, entry: Entry) -> bool:
    """Whether the object is this entry's, by our mark on it or, where there is none, by its bytes."""
    if existing.size != body.digest.size:
        return False
    if existing.entry_id == entry.identifier:
        return True
    if entry.overwrite:
        return False  # Putting it again is right, and as cheap as reading it.
    if existing.sha256 is not None:
        return existing.sha256 == body.digest.sha256
    offset = 0
    for chunk in store.get(existing.name, version=existing.version):
        if body.read(offset, len(chunk)) != chunk:
            return False
        offset += len(chunk)
    return offset == body.digest.size


def _conflict(entry: Entry, store: Store, body: Body, existing: RemoteObject | None) -> Outcome:
    whose = existing.entry_id if existing is not None and existing.entry_id else "unknown"
    reason = f"overwrite=False, and {store.uri(entry.remote_name)} must be new, got an object of entry {whose} where this is {entry.identifier}. Submit under another name, or with overwrite=True."
    return _outcome(entry, store, body, UploadState.CONFLICT, reason)


def _outcome(entry: Entry, store: Store, body: Body, state: UploadState, reason: str = "") -> Outcome:
    return Outcome(
        entry.identifier,
        entry.remote_name,
        state,
        store.uri(entry.remote_name),
        body.digest.size,
        body.digest.sha256,
        reason,
    )


def _remembered_digest(folder: Path) -> Digest | None:
    """A large file is read in whole once, not at every attempt; its parts are checked as they are sent."""
    match read_json(folder / "digest.json"):
        case {"size": int(size), "sha256": str(sha256), "crc32": int(crc32)} if _SHA256.fullmatch(sha256):
            return Digest(size, sha256, crc32)
    return None


def _remember_digest(folder: Path, digest: Digest, *, is_noted: bool) -> None:
    """Keeps what was read for later attempts, by which time the bytes may have rotted; a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        if not is_noted:
            replace_json(folder / CHECKSUM_FILE, {"crc32": digest.crc32})
        if digest.size >= _REMEMBER_DIGEST_BYTES and not (folder / "digest.json").exists():
            replace_json(folder / "digest.json", attrs.asdict(digest))
