"""Retries: the back-off, the classification of failures, and the health of the store.

No thread of its own, no I/O.
"""

import enum
import errno
import random
import threading
from collections.abc import Callable

import attrs

from uploads.errors import (
    BytesCorruptError,
    ManifestError,
    RejectedByStoreError,
    StoreError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.handle import UploadState
from uploads.messages import log_warning
from uploads.redaction import redact

__all__ = [
    "FailureAction",
    "FailureCounts",
    "FailureDecision",
    "RetryPolicy",
    "StoreHealth",
    "backoff_seconds",
    "classify_failure",
]

_RETRY_AFTER_CAP_SECONDS = 300.0
# Transient errors of the local machine.
_TRANSIENT_ERRNOS = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EINTR,
    errno.EIO,
}


def backoff_seconds(failures: int, first_seconds: float, cap_seconds: float) -> float:
    """Returns `first_seconds` after one failure, doubled by each further one up to `cap_seconds`."""
    return min(cap_seconds, first_seconds * 2.0 ** min(failures - 1, 32))


@attrs.frozen
class RetryPolicy:
    """Exponential back-off with full jitter.

    ```python
    queue = UploadQueue("store", policy=RetryPolicy(first_seconds=0.5, cap_seconds=30, unknown_tries=3))
    ```

    A delay is uniform between 0 and a ceiling that doubles, so that ranks do not retry together.
    Transient failures are retried without limit, for as long as the queue lives. A parked store is probed
    after `first_seconds`, then after delays that double up to five times `cap_seconds`.

    Attributes:
        first_seconds: Ceiling after the first failure.
        cap_seconds: The maximum of the ceiling.
        unknown_tries: The number of unknown failures after which an entry is rejected, once the store has
            accepted others.
        corrupt_tries: The number of checksum mismatches in transit after which an entry counts as corrupt.
        denied_tries: The number of denials after which an entry is rejected while the store accepts others.
        uniform: Returns a random number between two bounds.
    """

    first_seconds: float = 1.0
    cap_seconds: float = 60.0
    unknown_tries: int = 10
    corrupt_tries: int = 5
    denied_tries: int = 3
    uniform: Callable[[float, float], float] = random.uniform

    def to_json(self) -> dict[str, float]:
        """Returns everything but `uniform`, for the worker process."""
        return attrs.asdict(self, filter=attrs.filters.exclude("uniform"))

    def delay_seconds(self, failures: int, retry_after_seconds: float | None = None) -> float:
        """Returns the delay after this many consecutive failures (1 is the first)."""
        if retry_after_seconds is not None:
            return min(retry_after_seconds, _RETRY_AFTER_CAP_SECONDS)
        return self.uniform(0.0, backoff_seconds(failures, self.first_seconds, self.cap_seconds))

    def probe_seconds(self, probes: int) -> float:
        """Returns the delay before the next probe of a parked store, after this many that failed."""
        return backoff_seconds(probes + 1, self.first_seconds, 5 * self.cap_seconds)


class FailureAction(enum.Enum):
    """What to do after a failure: fail the entry, retry it, or park the store until a probe succeeds."""

    FAIL = enum.auto()
    RETRY = enum.auto()
    PARK = enum.auto()


@attrs.frozen
class FailureDecision:
    """What to do after a failed attempt.

    Attributes:
        action: The next step.
        reason: What happened, without secrets.
        state: The final state of the entry, if the action is FAIL.
        retry_after_seconds: The Retry-After of the server, if any.
    """

    action: FailureAction
    reason: str
    state: UploadState = UploadState.REJECTED
    retry_after_seconds: float | None = None


@attrs.define
class FailureCounts:
    """Counts the failures of one entry in this process: in total, and of the kinds that have a limit.

    Attributes:
        count: All failures.
        corrupt: Checksum mismatches that the server reported.
        denied: Denials that may concern this entry alone, since others succeeded.
        unknown: Unclassified failures, once others have succeeded.
        successes_seen: The number of successes of the store at the last failure.
        is_answer_lost: Whether an attempt may have succeeded although its answer was lost.
    """

    count: int = 0
    corrupt: int = 0
    denied: int = 0
    unknown: int = 0
    successes_seen: int = 0
    is_answer_lost: bool = False


def classify_failure(
    error: BaseException, counts: FailureCounts, policy: RetryPolicy, successes: int
) -> FailureDecision:
    """Counts a failure in `counts` and returns the decision.

    Args:
        error: What the attempt raised.
        counts: Of this entry; changed.
        policy: The limits.
        successes: The number of entries that the store has accepted so far. A failure may concern this entry
            alone only if others succeed meanwhile; otherwise only an entry that the store clearly refused
            fails.
    """
    reason = redact(f"{type(error).__name__}: {error}")
    counts.count += 1
    others_succeed = successes > counts.successes_seen
    counts.successes_seen = successes
    # If others succeed, they need not wait for this entry.
    unless_limit = FailureAction.RETRY if others_succeed else FailureAction.PARK
    match error:
        case ManifestError():
            return FailureDecision(FailureAction.FAIL, reason, UploadState.CORRUPT)
        case RejectedByStoreError():
            return FailureDecision(FailureAction.FAIL, reason)
        case BytesCorruptError():
            counts.corrupt += 1
            return FailureDecision(
                _fail_if(counts.corrupt >= policy.corrupt_tries), reason, UploadState.CORRUPT
            )
        case StoreParkedError():
            if not error.may_be_the_entry:
                return FailureDecision(FailureAction.PARK, reason)
            counts.denied += others_succeed
            return FailureDecision(
                FailureAction.FAIL if counts.denied >= policy.denied_tries else unless_limit, reason
            )
        case TransientStoreError():
            counts.is_answer_lost = counts.is_answer_lost or error.is_answer_lost
            return FailureDecision(FailureAction.RETRY, reason, retry_after_seconds=error.retry_after_seconds)
        case StoreError():  # Maybe not the store's answer: never a reason to fail an entry.
            return FailureDecision(unless_limit, reason)
        case OSError() if error.errno in _TRANSIENT_ERRNOS:
            return FailureDecision(FailureAction.RETRY, reason)
    # Neither an answer nor the network: an error of the client, or of ours, with this entry.
    counts.unknown += successes > 0
    return FailureDecision(_fail_if(counts.unknown >= policy.unknown_tries), reason)


def _fail_if(is_limit_reached: bool) -> FailureAction:
    return FailureAction.FAIL if is_limit_reached else FailureAction.RETRY


@attrs.define(eq=False, slots=False, repr=False)
class StoreHealth:
    """Counts successes and consecutive failures, and knows whether the store is parked.

    Thread-safe; one lock guards all state.

    Attributes:
        successes: The number of entries that the store has accepted.
        parked_because: Why the store is parked; empty if it is not.
        last_error: The reason of the last failure.
    """

    _policy: RetryPolicy
    _clock: Callable[[], float]

    def __attrs_post_init__(self) -> None:
        self.successes = 0
        self.parked_because = ""
        self.last_error = ""
        self._lock = threading.Lock()
        self._consecutive_failures = 0
        self._probes = 0
        self._paused_until = float("-inf")

    def record_success(self) -> None:
        """Counts a success; the store is no longer parked."""
        with self._lock:
            self.successes += 1
            self._consecutive_failures = self._probes = 0
            if self.parked_because:
                log_warning("uploads resumed")
            self.parked_because = ""

    def record_failure(self, reason: str) -> int:
        """Counts a failure; returns the number of consecutive ones."""
        with self._lock:
            self.last_error = reason
            self._consecutive_failures += 1
            return self._consecutive_failures

    def park(self, reason: str) -> tuple[float, bool]:
        """Parks the store; returns the seconds until the next probe, and whether this denial began the pause.

        It doesn't if another thread has met the same denial.
        """
        with self._lock:
            self.last_error = self.parked_because = reason
            now = self._clock()
            is_new = now >= self._paused_until
            if is_new:
                self._probes += 1
                self._paused_until = now + self._policy.probe_seconds(self._probes - 1)
            return self._paused_until - now, is_new
