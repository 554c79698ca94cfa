"""The entry of one upload: the name of its folder, its manifest `entry.json`, and the notes beside it.

The folder is called `SEQUENCE-NAMEKEY-IDENTIFIER`. A listing alone, without opening a hundred thousand
manifests, gives the order (a counter, never the clock), entries of the same remote name, and the identity.

A note is a small JSON file in the folder of an entry: how often the upload failed (`attempts.json`), why it
was given up (`reason.json`), the checksum of a large file (`crc32.json`). A note that can't be written is
skipped, because no file needs one to be delivered.
"""

import contextlib
import functools
import json
import re
import time
from pathlib import Path

import attrs

from uploads.disk import (
    IRREGULAR,
    closing,
    crc32_of,
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

__all__ = [
    "CHECKSUM_FILE",
    "DATA_FILE",
    "FLUSHED_FILE",
    "MANIFEST_FILE",
    "MAX_SEQUENCE",
    "Attempts",
    "Entry",
    "folder_name",
    "identifier_of",
    "is_entry_folder",
    "key_of",
    "may_have_lost_bytes",
    "note_attempts",
    "note_crc32",
    "note_flushed",
    "note_interruption",
    "note_reason",
    "read_attempts",
    "read_reason",
    "remove_reason",
    "sequence_of",
    "utc_now",
]

MANIFEST_FILE = "entry.json"
DATA_FILE = "data"
CHECKSUM_FILE = "crc32.json"
FLUSHED_FILE = "flushed"
MAX_SEQUENCE = 10**12 - 1
_ATTEMPTS_FILE = "attempts.json"
_REASON_FILE = "reason.json"
_VERSION = 1
_IDENTIFIER = re.compile(r"[0-9a-f]{16}")
_FOLDER = re.compile(r"(\d{12})-([0-9a-f]{16})-([0-9a-f]{16})")


# The name of an entry's folder.


def is_entry_folder(name: str) -> bool:
    """Returns whether a name is the folder name of an entry."""
    return _FOLDER.fullmatch(name) is not None


def folder_name(sequence: int, key: str, identifier: str) -> str:
    """Returns the folder name of an entry."""
    return f"{sequence:012d}-{key}-{identifier}"


def sequence_of(folder: str) -> int:
    """Returns the entry's position in the order of submission."""
    return int(folder[:12])


def key_of(folder: str) -> str:
    """Returns the hash of the remote name, 16 hexadecimal digits."""
    return folder[13:29]


def identifier_of(folder: str) -> str:
    """Returns the entry's identifier, which is also in the remote object's metadata."""
    return folder[30:]


@attrs.frozen
class Entry:
    """The manifest of one upload, written once when the file is staged and never changed.

    Attributes:
        identifier: 16 random hexadecimal digits.
        sequence: Position in the order of submission.
        remote_name: Name of the object.
        overwrite: Whether an existing object may be replaced.
        size: Bytes.
        crc32: The CRC-32 of the bytes as they were copied; None if they were not read (a large copy, a
            reflink, a move).
        staging: "copied", "reflinked", "moved" or "linked".
        source: Path of the source, for people.
        after: Entries that must be in the store before this one: remote names by identifier.
        submitted_at: ISO 8601, UTC; for people, never for order.
        boot: The boot of the machine in which bytes without a checksum were left in the page cache; empty
            with a checksum, and for bytes that were synced at once.
        store: The identity of the entry's store (`stores.uri.identity_of`); empty for the spool's.
        unless: The name of an object that supersedes this entry once it exists; empty for none.
        instead: The name under which the file is sent then; empty if it isn't sent.
    """

    identifier: str
    sequence: int
    remote_name: str
    overwrite: bool
    size: int
    crc32: int | None
    staging: str
    source: str
    after: dict[str, str]
    submitted_at: str
    boot: str = ""
    store: str = ""
    unless: str = ""
    instead: str = ""

    @functools.cached_property
    def folder(self) -> str:
        """The name of the entry's folder in the spool."""
        return folder_name(self.sequence, name_key(self.remote_name), self.identifier)

    def to_text(self) -> str:
        """Returns the manifest as JSON."""
        return json.dumps({"version": _VERSION, **attrs.asdict(self, recurse=False)}, ensure_ascii=False)

    @classmethod
    def read(cls, folder: Path) -> "Entry":
        """Reads the manifest of an entry's folder.

        Raises:
            ManifestError: Truncated, foreign, from a newer version, or another entry's.
            OSError: The file could not be read; says nothing about its content.
        """
        try:
            text = read_regular(f"{folder}/{MANIFEST_FILE}")
        except IRREGULAR as error:
            raise ManifestError(f"cannot read the manifest: {error}") from error
        entry = cls.parse(text)
        if entry.folder != folder.name:
            raise ManifestError(f"the manifest in {folder} belongs to another entry, {entry.folder}")
        return entry

    @classmethod
    def parse(cls, text: bytes) -> "Entry":
        """Parses a manifest, the inverse of `to_text`.

        Raises:
            ManifestError: Truncated, foreign, or from a newer version.
        """
        try:
            record = json.loads(text)
            version = record.pop("version")
            if version != _VERSION:
                raise ManifestError(
                    f"a manifest must have version {_VERSION}, got {version!r}. "
                    "Use the release that wrote it."
                )
            entry = cls(**record)
            _check(entry)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ManifestError(
                f"a manifest must be a JSON object of an entry, got {text[:40]!r} ({error})"
            ) from error
        return entry


def _check(entry: Entry) -> None:
    """Checks a manifest as strictly as the arguments of `submit`: it names files and objects.

    Raises:
        ValueError: A field has the wrong type, or `submit` would refuse the remote name.
        TypeError: As above.
    """
    for name in (entry.remote_name, *entry.after.values(), *filter(None, [entry.unless, entry.instead])):
        check_remote_name(name)
    if not all(_IDENTIFIER.fullmatch(identifier) for identifier in (entry.identifier, *entry.after)):
        raise ValueError("an identifier must have sixteen hexadecimal digits")
    numbers = (entry.sequence, entry.size, entry.crc32 or 0)
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("sequence, size and CRC-32 must be non-negative integers")
    texts = (entry.staging, entry.source, entry.submitted_at, entry.boot, entry.store)
    if not all(isinstance(text, str) for text in texts) or not isinstance(entry.overwrite, bool):
        raise ValueError("a field has the wrong type")


# Notes.


@attrs.frozen
class Attempts:
    """How often an upload failed, why it did last, and whether an attempt may have succeeded after all."""

    count: int = 0
    reason: str = ""
    is_answer_lost: bool = False


def note_attempts(folder: Path, attempts: Attempts) -> None:
    """Saves how often an upload failed."""
    with contextlib.suppress(OSError):
        replace_json(folder / _ATTEMPTS_FILE, attrs.asdict(attempts))


def note_interruption(folder: Path) -> int:
    """Counts an attempt that ended with its process; returns the number of attempts."""
    count = read_attempts(folder).count + 1
    note_attempts(folder, Attempts(count, "the process that was uploading it ended", is_answer_lost=True))
    return count


def read_attempts(folder: Path) -> Attempts:
    """Returns what `note_attempts` saved; zero attempts without a note, and one if it is damaged."""
    noted = read_json(folder / _ATTEMPTS_FILE)
    match noted:
        case {"count": int(count), "reason": str(reason), "is_answer_lost": bool(lost)} if count > 0:
            return Attempts(count, reason, lost)
    return Attempts(int(bool(noted)), is_answer_lost=bool(noted.get("is_answer_lost")))


def note_crc32(folder: Path) -> int | None:
    """Computes the CRC-32 of the data and saves it for comparison before the upload.

    Returns None if it can't be saved.
    """
    try:
        with closing(open_regular(folder / DATA_FILE)) as descriptor:
            crc32 = crc32_of(descriptor)
        replace_json(folder / CHECKSUM_FILE, {"crc32": crc32})
    except OSError:
        return None
    return crc32


def note_flushed(folder: Path) -> None:
    """Marks the data of an entry without a checksum as synced.

    Raises:
        FileNotFoundError: The entry was moved meanwhile.
    """
    try:
        write_new(folder / FLUSHED_FILE, "")
        fsync_path(folder)
    except FileNotFoundError:
        raise
    except OSError:
        pass


def may_have_lost_bytes(folder: Path, entry: Entry, boot: str) -> bool:
    """Returns whether the machine was rebooted before the data was synced, with no checksum to detect a loss.

    Args:
        folder: The entry's.
        entry: Its manifest.
        boot: The present boot of the machine.
    """
    return bool(entry.boot) and entry.boot != boot and not (folder / FLUSHED_FILE).exists()


def note_reason(folder: Path, outcome: Outcome) -> None:
    """Saves why an entry failed, for people; the folder's place already says that it failed."""
    with contextlib.suppress(OSError):
        replace_json(folder / _REASON_FILE, outcome.to_json())


def read_reason(folder: Path) -> Outcome | None:
    """Returns why an entry failed, if the note could be written."""
    try:
        return Outcome.from_json(read_json(folder / _REASON_FILE))
    except (ValueError, TypeError, KeyError):
        return None


def remove_reason(folder: Path) -> None:
    """Removes the note on why an entry ended or failed, before the entry is sent after all."""
    (folder / _REASON_FILE).unlink(missing_ok=True)


def utc_now() -> str:
    """Returns the wall-clock time for people; it never orders or times anything."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
