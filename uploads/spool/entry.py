"""One file on its way: its folder's name, and its manifest `entry.json`.

The folder is called `SEQUENCE-NAMEKEY-IDENTIFIER`, so that a listing alone, without opening a hundred thousand
manifests, gives the order (a counter, never the clock), what belongs to the same remote name, and the identity.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

import attrs

from uploads.disk import (
    IRREGULAR,
    crc32_of,
    exists,
    fsync_path,
    open_regular,
    read_json,
    read_regular,
    replace_json,
    write_new,
)
from uploads.errors import ManifestError
from uploads.handle import Outcome
from uploads.names import check_remote_name, name_key

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "CHECKSUM_FILE",
    "DATA_FILE",
    "FLUSHED_FILE",
    "MANIFEST_FILE",
    "MAXIMUM_SEQUENCE",
    "Entry",
    "attempts_of",
    "folder_of",
    "has_attempts",
    "identifier_of",
    "is_entry_folder",
    "key_of",
    "may_have_lost_bytes",
    "note_attempt",
    "note_crc32",
    "note_flushed",
    "note_interruption",
    "note_reason",
    "reason_of",
    "sequence_of",
    "utc_now",
]

MANIFEST_FILE = "entry.json"
DATA_FILE = "data"
CHECKSUM_FILE = "crc32.json"
FLUSHED_FILE = "flushed"
_VERSION = 1
_IDENTIFIER = re.compile(r"[0-9a-f]{16}")
MAXIMUM_SEQUENCE = 10**12 - 1
_FOLDER = re.compile(r"(\d{12})-([0-9a-f]{16})-([0-9a-f]{16})")


def is_entry_folder(name: str) -> bool:
    """Whether a folder of this name is an entry of ours."""
    return _FOLDER.fullmatch(name) is not None


def folder_of(sequence: int, key: str, identifier: str) -> str:
    """The name of the folder of an entry with these parts."""
    return f"{sequence:012d}-{key}-{identifier}"


def sequence_of(folder: str) -> int:
    """The entry's place in the order of submission."""
    return int(folder[:12])


def key_of(folder: str) -> str:
    """What entries of the same remote name have in common."""
    return folder[13:29]


def identifier_of(folder: str) -> str:
    """The entry's identity, which also travels in the remote object's metadata."""
    return folder[30:]


@attrs.frozen
class Entry:
    """What was asked for, written once when the file is staged and never changed.

    Attributes:
        identifier: Sixteen random hexadecimal digits.
        sequence: Place in the order of submission.
        remote_name: Under which the bytes are wanted.
        overwrite: Whether an object that is already there may be replaced.
        size: Bytes.
        crc32: Of the bytes as they were copied; None where they were not read (a large copy, a reflink, a rename).
        staging: "copied", "reflinked", "moved" or "linked".
        source: Where the bytes came from, for people.
        after: Identifiers of entries that must be in the store before this one is.
        after_names: Their remote names, in the same order.
        submitted_at: ISO 8601, UTC; for people, never for order.
        boot: During which boot of the machine bytes without a checksum were left to the page cache; empty where the disk had them,
            or a checksum tells.
        store: The identity of the store that the entry is for (`stores.uri.identity_of`); empty for that of its spool.
    """

    identifier: str
    sequence: int
    remote_name: str
    overwrite: bool
    size: int
    crc32: int | None
    staging: str
    source: str
    after: tuple[str, ...]
    submitted_at: str
    boot: str = ""
    store: str = ""
    after_names: tuple[str, ...] = ()

    @functools.cached_property
    def folder(self) -> str:
        """The name of the entry's folder in the spool."""
        return folder_of(self.sequence, name_key(self.remote_name), self.identifier)

    def to_text(self) -> str:
        """The manifest."""
        return json.dumps({"version": _VERSION, **attrs.asdict(self, recurse=False)}, ensure_ascii=False)

    @classmethod
    def read(cls, folder: Path) -> Entry:
        """The entry in this folder.

        Raises:
            ManifestError: Torn, foreign, from a newer version, or another entry's.
            OSError: The file could not be read; says nothing about what is in it.
        """
        try:
            text = read_regular(f"{folder}/{MANIFEST_FILE}")
        except IRREGULAR as error:
            raise ManifestError(f"a manifest cannot be read: {error}") from error
        entry = cls.parse(text)
        if entry.folder != folder.name:
            raise ManifestError(f"manifest in {folder} must describe its own folder, got {entry.folder}")
        return entry

    @classmethod
    def parse(cls, text: bytes) -> Entry:
        """The inverse of `to_text`.

        Raises:
            ManifestError: Torn, foreign, or from a newer version.
        """
        try:
            record = json.loads(text)
            version = record.pop("version")
            if version != _VERSION:
                raise ManifestError(
                    f"a manifest must have version {_VERSION}, got {version!r}. Use the release that wrote it."
                )
            after_names = tuple(record.get("after_names", ()))
            entry = cls(**{**record, "after": tuple(record["after"]), "after_names": after_names})
            _check(entry)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ManifestError(
                f"a manifest must be a JSON object of an entry, got {text[:40]!r} ({error})"
            ) from error
        return entry


def _check(entry: Entry) -> None:
    """A manifest is believed no more than a caller is: what it says becomes names of files and of objects.

    Raises:
        ValueError: A field is not of its kind, or the remote name is one that `submit` refuses.
        TypeError: As above.
    """
    for name in (entry.remote_name, *entry.after_names):
        check_remote_name(name)
    if not all(_IDENTIFIER.fullmatch(identifier) for identifier in (entry.identifier, *entry.after)):
        raise ValueError("an identifier must have sixteen hexadecimal digits")
    numbers = (entry.sequence, entry.size, entry.crc32 or 0)
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("sequence, size and CRC-32 must be whole numbers")
    texts = (entry.staging, entry.source, entry.submitted_at, entry.boot, entry.store)
    if not all(isinstance(text, str) for text in texts) or not isinstance(entry.overwrite, bool):
        raise ValueError("a field has another type than an entry's")


_ATTEMPTS_FILE = "attempts.json"
_REASON_FILE = "reason.json"


def note_attempt(folder: Path, count: int, reason: str, *, is_answer_lost: bool = False) -> None:
    """Keeps how often an entry failed and why, for `status`, and whether an attempt may have succeeded all the same."""
    noted = {"count": count, "reason": reason, "at": utc_now(), "is_answer_lost": is_answer_lost}
    with contextlib.suppress(OSError):
        replace_json(folder / _ATTEMPTS_FILE, noted)


def note_interruption(folder: Path) -> int:
    """Keeps that the process ended which was uploading the entry; returns how many attempts were noted."""
    count = attempts_of(folder).get("count")
    count = count + 1 if isinstance(count, int) and count > 0 else 1
    note_attempt(folder, count, "the process that was uploading it ended", is_answer_lost=True)
    return count


def attempts_of(folder: Path) -> dict[str, Any]:
    """What `note_attempt` kept: count, reason, at, is_answer_lost."""
    return read_json(folder / _ATTEMPTS_FILE)


def has_attempts(folder: Path) -> bool:
    """Whether `note_attempt` kept anything."""
    return exists(f"{folder}/{_ATTEMPTS_FILE}")


def note_crc32(folder: Path) -> None:
    """Reads the bytes and keeps their CRC-32, to be compared before they are uploaded.

    Blocks for as long as reading takes.
    """
    with contextlib.suppress(OSError):
        descriptor = open_regular(folder / DATA_FILE)
        try:
            crc32 = crc32_of(descriptor)
        finally:
            os.close(descriptor)
        replace_json(folder / CHECKSUM_FILE, {"crc32": crc32})


def note_flushed(folder: Path) -> None:
    """Keeps that the disk has the bytes of an entry that has no checksum.

    Raises:
        FileNotFoundError: The entry has changed its place.
    """
    try:
        write_new(folder / FLUSHED_FILE, "")
        fsync_path(folder)
    except FileNotFoundError:
        raise
    except OSError:
        pass


def may_have_lost_bytes(folder: Path, entry: Entry, boot: str) -> bool:
    """Whether the machine started anew before the disk was known to have the bytes, and no checksum can tell whether it had.

    Args:
        folder: The entry's.
        entry: Its manifest.
        boot: Which boot of the machine this is.
    """
    return bool(entry.boot) and entry.boot != boot and not (folder / FLUSHED_FILE).exists()


def note_reason(folder: Path, outcome: Outcome) -> None:
    """Keeps why an entry failed, for people; the folder's place says that it did."""
    with contextlib.suppress(OSError):
        replace_json(folder / _REASON_FILE, outcome.to_json())


def reason_of(folder: Path) -> Outcome | None:
    """Why a failed entry failed, where the note could be written."""
    try:
        return Outcome.from_json(read_json(folder / _REASON_FILE))
    except (ValueError, TypeError, KeyError):
        return None


def utc_now() -> str:
    """The wall clock, for people: nothing is ordered or timed by it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
