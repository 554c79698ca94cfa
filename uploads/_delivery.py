"""One attempt to bring one entry to its store: check the bytes, look before putting, put, and recognise one's own earlier success."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs

from ._files import read_bytes, replace_json
from .entry import CHECKSUM_FILE, DATA_FILE, Entry
from .errors import BytesCorrupt, RemoteExists, StoreParked
from .outcome import Outcome, UploadState
from .stores.body import Body, Digest

if TYPE_CHECKING:
    from pathlib import Path

    from .stores.store import RemoteObject, Store

__all__ = ["deliver"]

_REMEMBER_DIGEST_BYTES = 64 << 20


def deliver(folder: Path, entry: Entry, store: Store, *, retried: bool, suspect: bool = False) -> Outcome:
    """Tries once; returns how it ended, or raises what may pass.

    Args:
        folder: The entry's folder.
        entry: Its manifest.
        store: Where to.
        retried: Whether an earlier attempt may have succeeded without our knowing.
        suspect: Whether a loss of power may have taken bytes; then nothing is sent that no checksum vouches for.

    Raises:
        StoreError: From the store; the caller decides whether to try again.
        OSError: The spool could not be read.
    """
    try:
        known = _remembered_digest(folder) if entry.size >= _REMEMBER_DIGEST_BYTES else None
        opened = Body(f"{folder}/{DATA_FILE}", entry.identifier, known)
    except (FileNotFoundError, BytesCorrupt) as error:
        if not folder.is_dir():
            raise
        found = "no file" if isinstance(error, FileNotFoundError) else "something that is no regular file"
        return Outcome(
            entry.identifier,
            entry.remote_name,
            UploadState.CORRUPT,
            store.uri(entry.remote_name),
            entry.size,
            reason=f"staged bytes must be in the entry's folder, got {found}. Submit the file again.",
        )
    with opened as body:
        crc32 = _noted_crc32(folder) if entry.crc32 is None else entry.crc32
        damage = _damage(entry, body.digest, crc32)
        if not damage and crc32 is None and suspect:
            damage = "staged bytes must be on the disk, got a loss of power before it was known to have them. Submit the file again."
        if damage:
            return _outcome(entry, store, body, UploadState.CORRUPT, damage)
        _remember_digest(folder, body.digest)
        if retried or not entry.overwrite:
            existing = _look(store, entry.remote_name)
            if existing is not None and _is_ours(store, existing, body, entry):
                return _outcome(entry, store, body, UploadState.DONE)
            if existing is not None and not entry.overwrite:
                return _conflict(entry, store, body, existing)
        try:
            store.put(entry.remote_name, body, overwrite=entry.overwrite, notes=folder / "multipart.json")
        except RemoteExists:
            existing = _look(store, entry.remote_name)
            if existing is None or not _is_ours(store, existing, body, entry):
                return _conflict(entry, store, body, existing)
        return _outcome(entry, store, body, UploadState.DONE)


def _damage(entry: Entry, digest: Digest, crc32: int | None) -> str:
    """What is wrong with the staged bytes; empty where nothing is."""
    if digest.size != entry.size:
        return f"staged bytes must be {entry.size}, got {digest.size}. The spool's copy was changed; submit the file again."
    if crc32 is not None and digest.crc32 != crc32:
        return f"staged bytes must have CRC-32 {crc32:08x}, got {digest.crc32:08x}. The spool's copy was changed; submit the file again."
    return ""


def _noted_crc32(folder: Path) -> int | None:
    """Of a large file, computed behind the training loop's back; None where that did not come to pass."""
    try:
        return int(json.loads(read_bytes(folder / CHECKSUM_FILE))["crc32"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _look(store: Store, name: str) -> RemoteObject | None:
    """HEAD; a user who may put but not look is told by the put what is the matter, if anything."""
    try:
        return store.head(name)
    except StoreParked as error:
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
    try:
        return Digest(**json.loads(read_bytes(folder / "digest.json")))
    except (OSError, ValueError, TypeError):
        return None


def _remember_digest(folder: Path, digest: Digest) -> None:
    if digest.size >= _REMEMBER_DIGEST_BYTES and not (folder / "digest.json").exists():
        replace_json(folder / "digest.json", attrs.asdict(digest))
