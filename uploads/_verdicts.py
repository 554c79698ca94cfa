"""What a failed attempt means: for the entry alone, for the whole store, or nothing but time. Decides; does nothing."""

from __future__ import annotations

import enum
import errno
from typing import TYPE_CHECKING

import attrs

from ._redact import redact
from .errors import (
    BytesCorrupt,
    ManifestUnreadable,
    RejectedByStore,
    StoreError,
    StoreParked,
    TransientStoreError,
)
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
    """How one entry failed so far, in this process: altogether, and by the kinds that have a limit.

    Attributes:
        count: All failures.
        corrupt: Checksums that the server refused.
        denied: Refusals of the store that may be about the entry, since others got through.
        unknown: Failures that nobody classified, once others have got through.
        successes_seen: How many entries the store had taken at the last failure.
        is_answer_lost: Whether an attempt may have succeeded without our knowing.
    """

    count: int = 0
    corrupt: int = 0
    denied: int = 0
    unknown: int = 0
    successes_seen: int = 0
    is_answer_lost: bool = False


def judge(error: BaseException, attempts: Attempts, policy: RetryPolicy, successes: int) -> Verdict:
    """Counts the failure into `attempts` and decides.

    Args:
        error: What the attempt raised.
        attempts: Of this entry.
        policy: How often is enough.
        successes: How many entries the store has taken so far: a failure that comes while others get through may be about the entry. One that
            comes while none do is not, however often: only what the store clearly refused fails then.
    """
    reason = redact(f"{type(error).__name__}: {error}")
    attempts.count += 1
    others_get_through = successes > attempts.successes_seen
    attempts.successes_seen = successes
    aside = (
        Action.RETRY if others_get_through else Action.PARK
    )  # Others need not wait for what is this entry's.
    match error:
        case ManifestUnreadable():
            return Verdict(Action.FAIL, reason, UploadState.CORRUPT)
        case RejectedByStore():
            return Verdict(Action.FAIL, reason)
        case BytesCorrupt():
            attempts.corrupt += 1
            return Verdict(_fail_if(attempts.corrupt >= policy.corrupt_tries), reason, UploadState.CORRUPT)
        case StoreParked():
            if not error.may_be_the_entry:
                return Verdict(Action.PARK, reason)
            attempts.denied += others_get_through
            return Verdict(Action.FAIL if attempts.denied >= policy.denied_tries else aside, reason)
        case TransientStoreError():
            attempts.is_answer_lost = attempts.is_answer_lost or error.is_answer_lost
            return Verdict(Action.RETRY, reason, retry_after_seconds=error.retry_after_seconds)
        case StoreError():  # Not known to be the store's answer: no reason to fail anything, ever.
            return Verdict(aside, reason)
        case OSError() if error.errno in _LOCAL_TROUBLE:
            return Verdict(Action.RETRY, reason)
    attempts.unknown += (
        successes > 0
    )  # Neither an answer nor the network: what the client or we cannot do with this entry.
    return Verdict(_fail_if(attempts.unknown >= policy.unknown_tries), reason)


def _fail_if(enough: bool) -> Action:  # read as it is called: fail if enough
    return Action.FAIL if enough else Action.RETRY
