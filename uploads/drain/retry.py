"""How long to wait, and how often to try."""

from __future__ import annotations

import enum
import errno
import logging
import random
import threading
from typing import TYPE_CHECKING

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
from uploads.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Action",
    "Attempts",
    "Health",
    "RetryPolicy",
    "Verdict",
    "judge",
]


@attrs.frozen
class RetryPolicy:
    """Full jitter: a delay is uniform between nothing and a ceiling that doubles, so that eight ranks do not return together.

    Failures that will pass by themselves are tried again for as long as the queue lives; there is no count for them.

    Attributes:
        first_seconds: Ceiling after the first failure.
        cap_seconds: Ceiling that is never passed.
        retry_after_cap_seconds: The longest that a server's Retry-After is obeyed.
        probe_first_seconds: How soon a parked store is probed; doubles up to `probe_cap_seconds`.
        probe_cap_seconds: The longest between two probes of a parked store.
        unknown_tries: After how many failures that nobody classified an entry is rejected, once the store has taken others.
        corrupt_tries: After how many corruptions on the wire an entry counts as corrupt.
        denied_tries: After how many denials an entry is rejected while the store takes others.
        uniform: Draws between two bounds; injected by tests.
    """

    first_seconds: float = 1.0
    cap_seconds: float = 60.0
    retry_after_cap_seconds: float = 300.0
    probe_first_seconds: float = 1.0
    probe_cap_seconds: float = 300.0
    unknown_tries: int = 10
    corrupt_tries: int = 5
    denied_tries: int = 3
    uniform: Callable[[float, float], float] = random.uniform

    def to_json(self) -> dict[str, float]:
        """Everything but `uniform`, for another process."""
        return attrs.asdict(self, filter=attrs.filters.exclude("uniform"))

    def delay_seconds(self, failures: int, retry_after_seconds: float | None = None) -> float:
        """How long to wait after this many failures in a row (1 is the first)."""
        if retry_after_seconds is not None:
            return min(retry_after_seconds, self.retry_after_cap_seconds)
        return self.uniform(0.0, min(self.cap_seconds, self.first_seconds * 2.0 ** min(failures - 1, 32)))

    def probe_seconds(self, probes: int) -> float:
        """How long a parked store is left alone after this many probes that failed."""
        return min(self.probe_cap_seconds, self.probe_first_seconds * 2.0 ** min(probes, 32))


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
        case ManifestError():
            return Verdict(Action.FAIL, reason, UploadState.CORRUPT)
        case RejectedByStoreError():
            return Verdict(Action.FAIL, reason)
        case BytesCorruptError():
            attempts.corrupt += 1
            return Verdict(_fail_if(attempts.corrupt >= policy.corrupt_tries), reason, UploadState.CORRUPT)
        case StoreParkedError():
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


_log = logging.getLogger("uploads")


class Health:
    """Successes, failures in a row, and why the store is parked. The lock guards everything.

    Attributes:
        successes: How many entries the store has taken.
        parked_because: Why nothing gets through until something outside changes; empty where that is not so.
        last_error: The last reason of all.
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float]) -> None:
        self.successes = 0
        self.parked_because = ""
        self.last_error = ""
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._failures_in_a_row = 0
        self._probes = 0
        self._renewed_for = 0
        self._resting_until = float("-inf")

    def worked(self) -> None:
        """An entry got through."""
        with self._lock:
            self.successes += 1
            self._failures_in_a_row = self._probes = self._renewed_for = 0
            if self.parked_because:
                _log.warning("uploads go on")
            self.parked_because = ""

    def failed(self, reason: str) -> int:
        """An attempt failed; returns how many did in a row."""
        with self._lock:
            self.last_error = reason
            self._failures_in_a_row += 1
            return self._failures_in_a_row

    def parked(self, reason: str) -> float:
        """The store denied; returns how many seconds to leave it alone."""
        with self._lock:
            self.last_error = self.parked_because = reason
            now = self._clock()
            if now >= self._resting_until:  # Else it is another thread's answer to the same trouble.
                self._probes += 1
                self._resting_until = now + self._policy.probe_seconds(self._probes - 1)
            return self._resting_until - now

    def wants_renewal(self) -> bool:
        """Whether the store was not renewed since its last denial; asking counts as renewing."""
        with self._lock:
            wants = self._renewed_for != self._probes
            self._renewed_for = self._probes
            return wants
