"""One attempt to upload one entry: verify the bytes, HEAD, PUT, and recognise an earlier success of our own.

Runs in the uploading threads of a drain. Raises transient errors, and returns final outcomes.
"""

import contextlib
import os
from functools import partial
from pathlib import Path

from uploads.disk import IRREGULAR, read_json, replace_json, stamp_of
from uploads.errors import RemoteExistsError, StoreParkedError, TransientStoreError
from uploads.handle import Outcome, UploadState
from uploads.messages import log_warning
from uploads.spool.entry import CHECKSUM_FILE, DATA_FILE, Entry
from uploads.stores.store import (
    Body,
    Checksumming,
    RemoteObject,
    Renewable,
    Replacing,
    Store,
    checks_whole,
    has_md5,
    md5_of,
)

__all__ = ["CredentialWatch", "deliver", "outcome_of"]


class CredentialWatch:
    """Renews the session of a store when its credential files change."""

    def __init__(self, store: Store) -> None:
        self._store = store if isinstance(store, Renewable) else None
        self._seen = self._look()

    def renew(self) -> bool:
        """Renews the session if the files have changed since the last call; returns whether they have."""
        seen, self._seen = self._seen, self._look()
        if self._store is None or seen == self._seen:
            return False
        self._store.renew()
        return True

    def _look(self) -> tuple[object, ...]:
        return tuple(map(stamp_of, self._store.credential_files())) if self._store is not None else ()


_LOOK_FIRST_BYTES = 1 << 20
_COMPARED_BYTES = 16 << 20
_BLOCK_BYTES = 4096


class _FencedError(Exception):
    """A successor put the object that supersedes this entry."""


def deliver(
    folder: Path,
    entry: Entry,
    store: Store,
    *,
    retried: bool,
    is_answer_lost: bool = False,
    suspect: bool = False,
) -> Outcome:
    """Tries to upload an entry; returns its outcome, or raises an error that may be transient.

    Args:
        folder: The entry's folder.
        entry: Its manifest.
        store: The target.
        retried: Whether an earlier attempt may have succeeded unnoticed.
        is_answer_lost: Whether an attempt was sent and not answered. If the name is taken and HEAD is denied,
            the object counts as the result of that attempt.
        suspect: Whether a power loss may have destroyed bytes; without a checksum, a block of zeros counts as
            corrupt.

    Raises:
        StoreError: From the store; the caller decides whether to try again.
        OSError: The spool could not be read.
    """
    crc32 = _noted_crc32(folder) if entry.crc32 is None else entry.crc32
    # A first attempt need not read a file before its first part: the sent bytes are compared with the noted
    # CRC-32, if any, before the object appears. Later attempts may find sent parts, so they read it first.
    is_large = entry.size > _LOOK_FIRST_BYTES  # A small one is sent from memory in any case.
    is_read_once = is_large and not (retried or suspect) and checks_whole(store, entry.size)
    # A first attempt with a small file sends the bytes at once, and looks only if the name is taken. Others
    # look before they read the file, which an unreachable store would make them read again and again.
    existing = _look(store, entry) if retried or (is_large and not entry.overwrite) else None
    opened = _opened(folder, entry, crc32 if is_read_once else None, is_read_once=is_read_once)
    if isinstance(opened, str):
        return outcome_of(entry, store, UploadState.CORRUPT, opened)
    with opened as body:
        if body.is_measured:
            if damage := _damage(entry, body, crc32, suspect=suspect):
                return outcome_of(entry, store, UploadState.CORRUPT, damage, body=body)
            if crc32 is None:  # For later attempts, which detect bit rot with it.
                with contextlib.suppress(OSError):
                    replace_json(folder / CHECKSUM_FILE, {"crc32": body.digest.crc32})
        overwrite = entry.overwrite
        if existing is not None:
            if _is_ours(store, existing, body, entry):
                return outcome_of(entry, store, UploadState.DONE, body=body)
            # An object of this entry with other bytes arrived damaged, and is put again.
            overwrite = overwrite or existing.entry_id == entry.identifier
            if not overwrite:
                return _conflict(entry, store, body, existing)
        notes = folder / "multipart.json"
        body.check = partial(_check_fence, entry, store)
        return _put(entry, store, body, notes, overwrite=overwrite, is_answer_lost=is_answer_lost)


def _put(
    entry: Entry, store: Store, body: Body, notes: Path, *, overwrite: bool, is_answer_lost: bool
) -> Outcome:
    """Sends the bytes and returns the outcome."""
    replaces = overwrite and isinstance(store, Replacing)
    try:
        if replaces:
            store.replace(entry.remote_name, body, notes=notes)  # type: ignore[attr-defined]  # as asked
        else:
            body.check()
            store.put(entry.remote_name, body, overwrite=overwrite, notes=notes)
    except _FencedError:
        return _superseded(entry, store, body)
    except RemoteExistsError:
        if replaces:
            raise
        return _taken(entry, store, body, is_answer_lost=is_answer_lost)
    return outcome_of(entry, store, UploadState.DONE, body=body)


def _check_fence(entry: Entry, store: Store) -> None:
    if entry.unless and store.head(entry.unless) is not None:
        raise _FencedError


def _superseded(entry: Entry, store: Store, body: Body) -> Outcome:
    """Sends an entry whose sender has a successor to its other name, if any; returns the outcome."""
    reason = f"{store.uri(entry.unless)} is there: a successor put it"
    if not entry.instead:
        return outcome_of(entry, store, UploadState.SUPERSEDED, reason)
    body.check = lambda: None
    store.put(entry.instead, body, overwrite=True)
    reason += f". The file is in {store.uri(entry.instead)}"
    return outcome_of(entry, store, UploadState.SUPERSEDED, reason, body=body)


def _opened(folder: Path, entry: Entry, crc32: int | None, *, is_read_once: bool) -> Body | str:
    """Returns the staged bytes, which are read now unless they are read once, or a description of damage."""
    try:
        about = os.lstat(f"{folder}/{DATA_FILE}")  # a Path costs more than the call
        if about.st_size != entry.size:  # Not read, because it may be of any size.
            return _wrong_size(entry, about.st_size)
        # Callers promise not to write to a linked file; a file with one name belongs to the spool alone.
        is_final = entry.staging == "linked" or about.st_nlink == 1
        path = f"{folder}/{DATA_FILE}"
        return Body(path, entry.identifier, crc32=crc32, is_final=is_final, is_read_once=is_read_once)
    except FileNotFoundError:
        if not folder.is_dir():
            raise
        return "the staged bytes are missing; submit the file again"
    except IRREGULAR as error:
        return f"staged bytes must be in the entry's folder: {error}. Submit the file again."


def _taken(entry: Entry, store: Store, body: Body, *, is_answer_lost: bool) -> Outcome:
    """Returns the outcome of a create-only PUT that found the name taken."""
    try:
        existing = _head(store, entry)
    except StoreParkedError as error:
        if not error.may_be_the_entry:
            raise
        if not is_answer_lost:
            return _conflict(entry, store, body, None)
        log_warning(
            "%s exists, and HEAD is denied; assuming that it is entry %s, of which an answer was lost",
            store.uri(entry.remote_name),
            entry.identifier,
        )
        return outcome_of(entry, store, UploadState.DONE, body=body)
    if existing is None:
        raise TransientStoreError(f"{store.uri(entry.remote_name)} existed a moment ago and is gone now")
    if _is_ours(store, existing, body, entry):
        return outcome_of(entry, store, UploadState.DONE, body=body)
    if existing.entry_id == entry.identifier:
        raise TransientStoreError(f"{store.uri(entry.remote_name)} arrived damaged in an earlier attempt")
    return _conflict(entry, store, body, existing)


def _damage(entry: Entry, body: Body, crc32: int | None, *, suspect: bool) -> str:
    """Returns a description of the damage to the staged bytes; empty if there is none."""
    if body.size != entry.size:
        return _wrong_size(entry, body.size)
    if crc32 is not None and body.digest.crc32 != crc32:
        return (
            f"staged bytes have CRC-32 {body.digest.crc32:08x}, expected {crc32:08x}: "
            "the copy in the spool was changed; submit the file again"
        )
    if crc32 is None and suspect and _has_blank_block(body):
        return (
            "staged bytes were not on disk when the power was lost, and a block of them is all zeros; "
            "submit the file again"
        )
    return ""


def _has_blank_block(body: Body) -> bool:
    """Returns whether a block is all zeros, like blocks that were not written before a power loss."""
    return any(
        not any(chunk[offset : offset + _BLOCK_BYTES])
        for chunk in body.chunks()
        for offset in range(0, len(chunk), _BLOCK_BYTES)
    )


def _wrong_size(entry: Entry, size: int) -> str:
    return (
        f"{size} bytes are staged, expected {entry.size}: the copy in the spool was changed; "
        "submit the file again"
    )


def _noted_crc32(folder: Path) -> int | None:
    """Returns the CRC-32 of a large file from the background or an earlier attempt; None without one."""
    match read_json(folder / CHECKSUM_FILE):
        case {"crc32": int(crc32)}:
            return crc32
    return None


def _head(store: Store, entry: Entry) -> RemoteObject | None:
    """Returns the object of that name, if any; a large one with the CRC-32 from the store."""
    if isinstance(store, Checksumming) and store.checks_whole(entry.size):
        return store.head_with_checksum(entry.remote_name)
    return store.head(entry.remote_name)


def _look(store: Store, entry: Entry) -> RemoteObject | None:
    """Returns the object, if any. If HEAD is denied, returns None: the PUT reports the error."""
    try:
        return _head(store, entry)
    except StoreParkedError as error:
        if error.may_be_the_entry:
            return None
        raise


def _is_ours(store: Store, existing: RemoteObject, body: Body, entry: Entry) -> bool:
    """Returns whether the object is this entry's, by its `entry-id` or, without one, by its bytes.

    The id says who put it, but not what arrived. So unless the store kept a checksum, a file of one request
    is compared too; the parts of a larger one were compared when they were sent.
    """
    if existing.size != body.size or existing.crc32 not in {None, body.digest.crc32}:
        return False
    if existing.entry_id == entry.identifier:
        if existing.crc32 is not None or body.size > _COMPARED_BYTES:
            return True
        if has_md5(existing.version or "", md5_of(body.read_whole())):
            return True
    elif entry.overwrite:
        return False  # Another PUT costs as much as reading the object.
    elif existing.sha256 is not None:
        return existing.sha256 == body.digest.sha256
    offset = 0
    # Without a version, because a proxy may have changed it; every byte is compared anyway.
    for chunk in store.get(existing.name):
        if body.read(offset, len(chunk)) != chunk:
            return False
        offset += len(chunk)
    return offset == body.digest.size


def _conflict(entry: Entry, store: Store, body: Body, existing: RemoteObject | None) -> Outcome:
    try:
        _check_fence(entry, store)
    except _FencedError:
        return _superseded(entry, store, body)
    whose = existing.entry_id if existing is not None and existing.entry_id else "unknown"
    reason = (
        f"overwrite=False: {store.uri(entry.remote_name)} exists (entry {whose}, not {entry.identifier}). "
        "Submit under another name, or with overwrite=True."
    )
    return outcome_of(entry, store, UploadState.CONFLICT, reason, body=body)


def outcome_of(
    entry: Entry,
    store: Store,
    state: UploadState,
    reason: str = "",
    *,
    body: Body | None = None,
    superseded_by: str | None = None,
) -> Outcome:
    """Returns the outcome of an entry, with the digest of its bytes if they were read."""
    return Outcome(
        entry.identifier,
        entry.remote_name,
        state,
        store.uri(entry.remote_name),
        entry.size if body is None else body.size,
        None if body is None else body.digest.sha256,
        reason,
        superseded_by,
        None if body is None else body.digest.crc32,
    )
