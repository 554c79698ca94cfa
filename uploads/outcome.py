"""How an upload stands, and how it ended: plain values that cross threads, processes and the disk."""

from __future__ import annotations

import enum
import re
from typing import Any

import attrs

__all__ = ["Outcome", "UploadState"]

_IDENTIFIER = re.compile(r"[0-9a-f]{1,16}")


class UploadState(enum.StrEnum):
    """The states of an entry.

    pending → inflight → done is the way of a file; inflight → pending is a retry.
    Final: done, superseded (a newer version of the same name took its place), conflict (`overwrite=False` and the
    name was taken), corrupt (the bytes were not those staged), rejected (the store will never take it), refused
    (never staged: no room), lost (its folder was deleted by someone else).
    """

    PENDING = "pending"
    INFLIGHT = "inflight"
    DONE = "done"
    SUPERSEDED = "superseded"
    CONFLICT = "conflict"
    CORRUPT = "corrupt"
    REJECTED = "rejected"
    REFUSED = "refused"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self not in {UploadState.PENDING, UploadState.INFLIGHT}

    @property
    def is_failure(self) -> bool:
        """Whether the file is not, and will not be, in the store under its name."""
        return self.is_final and self not in {UploadState.DONE, UploadState.SUPERSEDED}


@attrs.frozen
class Outcome:
    """The end of one entry.

    Attributes:
        identifier: The entry's.
        remote_name: The name that was asked for.
        state: One of the final states.
        uri: Where the bytes are, or would have been.
        size: Bytes.
        sha256: Hexadecimal digest of the bytes, where they were read.
        reason: Why it failed; empty where it did not.
        superseded_by: The identifier of the entry that took its place.
    """

    identifier: str
    remote_name: str
    state: UploadState
    uri: str = ""
    size: int = 0
    sha256: str | None = None
    reason: str = ""
    superseded_by: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Outcome:
        """The inverse of `to_json`; keys it does not know are ignored.

        Raises:
            ValueError: Damaged; or one of KeyError and TypeError.
        """
        known = {field.name: record[field.name] for field in attrs.fields(cls) if field.name in record}
        outcome = cls(**{**known, "state": UploadState(known["state"])})
        texts: list[object] = [outcome.remote_name, outcome.uri, outcome.reason, outcome.sha256 or ""]
        identifiers = [outcome.identifier, outcome.superseded_by or "0"]
        if (
            not all(isinstance(text, str) for text in texts)
            or not all(_IDENTIFIER.fullmatch(identifier) for identifier in identifiers)
            or type(outcome.size) is not int
        ):
            raise ValueError(f"an outcome must have texts, a size and identifiers, got {record}")
        return outcome
