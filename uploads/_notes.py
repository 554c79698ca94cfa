"""What is noted in an entry's folder, beside its manifest, while it waits and when it failed.

None of it is essential, so a full disk is no reason to stop: a note that cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from ._copying import crc32_of
from ._files import exists, fsync_path, open_regular, read_json, replace_json, write_text
from .entry import CHECKSUM_FILE, DATA_FILE, FLUSHED_FILE
from .outcome import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from .entry import Entry

__all__ = [
    "attempts_of",
    "has_attempts",
    "may_have_lost_bytes",
    "note_attempt",
    "note_crc32",
    "note_flushed",
    "note_interruption",
    "note_reason",
    "reason_of",
    "utc_now",
]


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
        write_text(folder / FLUSHED_FILE, "")
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
