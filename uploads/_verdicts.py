"""What a failed attempt means: for the entry alone, for the whole store, or nothing but time. Decides; does nothing."""

from __future__ import annotations

import enum
import errno
from typing import TYPE_CHECKING

import attrs

from ._redact import redact
from .errors import BytesCorrupt, ManifestUnreadable, RejectedByStore, StoreParked, TransientStoreError
from .outcome import UploadState

if TYPE_CHECKING:
    from .retry import RetryPolicy

__all__ = ["Action", "Attempts", "Verdict", "judge"]

_LOCAL_TROUBLE = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EINTR,
    errno.EIO,
}


class Action(enum.Enum):
    """What to do with the entry: fail it, try it again, or leave the whole store alone until a probe gets through."""

    FAIL = enum.auto()
    RETRY = enum.auto()
    PARK = enum.auto()


@attrs.frozen
class Verdict:
    """The decision.

    Attributes:
        action: What to do.
        reason: What happened, without secrets.
        state: The entry's, where it fails.
        retry_after_seconds: How long the server asked us to wait, where it did.
    """

    action: Action
    reason: str
    state: UploadState = UploadState.REJECTED
    retry_after_seconds: float | None = None


@attrs.define
class Attempts:
    """How one entry failed so far, in this process: altogether, and by the kinds that have a limit."""

    count: int = 0
    corrupt: int = 0
    denied: int = 0
    unknown: int = 0
    successes_at_denial: int = 0


def judge(error: BaseException, attempts: Attempts, policy: RetryPolicy, successes: int) -> Verdict:
    """Counts the failure into `attempts` and decides.

    Args:
        error: What the attempt raised.
        attempts: Of this entry.
        policy: How often is enough.
        successes: How many entries the store has taken so far: a denial that comes while others get through is about the name.
    """
    reason = redact(f"{type(error).__name__}: {error}")
    attempts.count += 1
    match error:
        case ManifestUnreadable():
            return Verdict(Action.FAIL, reason, UploadState.CORRUPT)
        case RejectedByStore():
            return Verdict(Action.FAIL, reason)
        case BytesCorrupt():
            attempts.corrupt += 1
            return Verdict(_fail_if(attempts.corrupt >= policy.corrupt_tries), reason, UploadState.CORRUPT)
        case StoreParked():
            if error.may_be_the_entry and successes > attempts.successes_at_denial:
                attempts.denied += 1
            attempts.successes_at_denial = successes
            return Verdict(Action.FAIL if attempts.denied >= policy.denied_tries else Action.PARK, reason)
        case TransientStoreError():
            return Verdict(Action.RETRY, reason, retry_after_seconds=error.retry_after_seconds)
        case OSError() if error.errno in _LOCAL_TROUBLE:
            return Verdict(Action.RETRY, reason)
    attempts.unknown += 1
    return Verdict(_fail_if(attempts.unknown >= policy.unknown_tries), reason)


def _fail_if(enough: bool) -> Action:  # read as it is called: fail if enough
    return Action.FAIL if enough else Action.RETRY
