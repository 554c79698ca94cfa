"""How long a retry waits, and what each failure means."""

import errno
import json

import pytest

from uploads import parse_retry_after
from uploads.drain.retry import FailureAction, FailureCounts, RetryPolicy, StoreHealth, classify_failure
from uploads.errors import (
    BytesCorruptError,
    ManifestError,
    RejectedByStoreError,
    RemoteNotFoundError,
    StoreError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.handle import UploadState

LONGEST = RetryPolicy(uniform=lambda low, high: high)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        (" 7 ", 7.0),
        ("Thu, 01 Jan 1970 00:16:47 GMT", 0.0),
        ("Thu, 01 Jan 99999999999999999999 00:00:00 GMT", None),
        *((nothing, None) for nothing in (None, "-1", "9" * 5000)),
    ],
)
def test_retry_after_is_parsed(header, seconds):
    """It is a number of seconds or a date; for any other value, the back-off decides."""
    assert parse_retry_after(header) == seconds


def test_delays_double_up_to_a_cap():
    """Full jitter is drawn under a ceiling of 1, 2, 4 … 60 seconds."""
    assert [LONGEST.delay_seconds(failures) for failures in (1, 2, 3, 7, 10_000)] == [1, 2, 4, 60, 60]
    assert RetryPolicy(uniform=lambda low, high: low).delay_seconds(5) == 0


def test_retry_after_is_bounded():
    """Retry-After applies, but not for hours."""
    assert LONGEST.delay_seconds(1, retry_after_seconds=17) == 17
    assert LONGEST.delay_seconds(1, retry_after_seconds=86_400) == 300


def test_probes_of_a_parked_store_come_at_least_every_five_minutes():
    """They wait 1, 2, 4 … 300 seconds."""
    assert [LONGEST.probe_seconds(probes) for probes in (0, 1, 2, 8, 9, 10_000)] == [1, 2, 4, 256, 300, 300]


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (TransientStoreError("503"), FailureAction.RETRY),
        (OSError(errno.EMFILE, "too many open files"), FailureAction.RETRY),
        (StoreParkedError("expired"), FailureAction.PARK),
        (RejectedByStoreError("name too long"), FailureAction.FAIL),
        (ManifestError("torn"), FailureAction.FAIL),
        (BytesCorruptError("bad digest"), FailureAction.RETRY),
        (KeyError("a bug"), FailureAction.RETRY),
    ],
)
def test_a_first_failure_has_a_meaning(error, action):
    """It's transient, parks the store, or concerns only the entry."""
    assert classify_failure(error, FailureCounts(), LONGEST, successes=0).action is action


@pytest.mark.parametrize(
    ("error", "tries", "state"),
    [
        (BytesCorruptError("bad digest"), 5, UploadState.CORRUPT),
        (KeyError("a bug"), 10, UploadState.REJECTED),
    ],
)
def test_an_unexplained_failure_becomes_final(error, tries, state):
    """Five corruptions on the wire or ten unknown failures are final, while other entries succeed."""
    attempts = FailureCounts()

    verdicts = [classify_failure(error, attempts, LONGEST, successes=count) for count in range(1, tries + 1)]

    assert [verdict.action for verdict in verdicts] == [FailureAction.RETRY] * (tries - 1) + [
        FailureAction.FAIL
    ]
    assert verdicts[-1].state is state


def test_a_denial_concerns_the_name_only_while_others_succeed():
    """A policy that denies one name fails it; a policy that denies everything parks the store."""
    denied = StoreParkedError("AccessDenied", may_be_the_entry=True)
    lonely, surrounded = FailureCounts(), FailureCounts()

    assert {classify_failure(denied, lonely, LONGEST, successes=0).action for _ in range(100)} == {
        FailureAction.PARK
    }
    assert [classify_failure(denied, surrounded, LONGEST, successes=count).action for count in (1, 2, 3)] == [
        FailureAction.RETRY,
        FailureAction.RETRY,
        FailureAction.FAIL,
    ]


@pytest.mark.parametrize(
    "error", [StoreError("a proxy's answer"), RemoteNotFoundError("404"), KeyError("a bug")], ids=repr
)
def test_nothing_fails_while_nothing_succeeds(error):
    """The number of failures doesn't matter: the network, a proxy or a bug may cause them."""
    attempts = FailureCounts()

    actions = {classify_failure(error, attempts, LONGEST, successes=0).action for _ in range(1000)}

    assert FailureAction.FAIL not in actions


def test_a_response_from_elsewhere_never_fails_an_entry():
    """If others succeed they aren't delayed; if none does, the store is probed."""
    foreign, attempts = StoreError("a proxy's answer"), FailureCounts()

    assert {
        classify_failure(foreign, attempts, LONGEST, successes=count).action for count in range(1, 1000)
    } == {FailureAction.RETRY}
    assert classify_failure(foreign, attempts, LONGEST, successes=999).action is FailureAction.PARK


def test_a_policy_is_sent_whole_to_another_process():
    """Every number is sent; only the random source isn't."""
    policy = RetryPolicy(first_seconds=0.5, unknown_tries=3, denied_tries=7)

    assert RetryPolicy(**json.loads(json.dumps(policy.to_json()))) == policy


def test_errors_of_this_machine_never_fail_an_entry():
    """A full disk or too many open files are transient; other system errors are counted."""
    codes = ["EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "EDQUOT", "EINTR", "EIO"]
    errors = [OSError(getattr(errno, code), "of this machine") for code in codes] * 20
    counts = FailureCounts()

    actions = {classify_failure(error, counts, LONGEST, successes=9).action for error in errors}

    assert actions == {FailureAction.RETRY}
    assert (counts.count, counts.unknown) == (140, 0)
    classify_failure(OSError(errno.ENOENT, "gone"), counts, LONGEST, successes=9)
    assert counts.unknown == 1


def test_a_lost_answer_stays_lost():
    """One attempt may have succeeded, whatever the next ones return."""
    counts = FailureCounts()
    classify_failure(TransientStoreError("refused"), counts, LONGEST, successes=0)
    assert not counts.is_answer_lost

    classify_failure(TransientStoreError("reset", is_answer_lost=True), counts, LONGEST, successes=0)
    decision = classify_failure(
        TransientStoreError("503", retry_after_seconds=7.0), counts, LONGEST, successes=0
    )

    assert counts.is_answer_lost
    assert decision.retry_after_seconds == 7.0


def test_one_outage_is_one_probe_for_all_threads():
    """Threads that are denied at the same moment count once; each failed probe doubles the pause."""
    now = [100.0]
    health = StoreHealth(RetryPolicy(first_seconds=2.0), lambda: now[0])

    assert [health.park("denied"), health.park("denied")] == [(2.0, True), (2.0, False)]
    now[0] += 0.5
    assert health.park("denied") == (1.5, False)
    now[0] += 1.5
    assert health.park("still denied") == (4.0, True)
    assert (health.parked_because, health.last_error) == ("still denied", "still denied")

    health.record_success()
    now[0] += 4.0
    assert (health.parked_because, health.successes) == ("", 1)
    assert health.park("denied again") == (2.0, True)


def test_resumed_uploads_are_logged_once(caplog):
    """The log has one line if uploads were parked, and none per success."""
    health = StoreHealth(LONGEST, lambda: 0.0)
    health.record_success()
    assert not caplog.messages
    health.park("denied")
    health.record_success()
    health.record_success()

    assert caplog.messages == ["uploads resumed"]


def test_failures_count_from_the_last_success():
    """Back-off restarts once the store has answered."""
    health = StoreHealth(LONGEST, lambda: 0.0)

    assert [health.record_failure("a"), health.record_failure("b")] == [1, 2]
    health.record_success()
    assert (health.record_failure("c"), health.last_error) == (1, "c")
