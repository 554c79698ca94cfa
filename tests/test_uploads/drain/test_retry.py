"""How long to wait, and what a failure means."""

import errno
import json

import pytest

from uploads.drain.retry import FailureAction, FailureCounts, RetryPolicy, classify_failure
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


def test_delays_double_up_to_a_cap():
    """Full jitter under a ceiling of 1, 2, 4 … 60 seconds."""
    assert [LONGEST.delay_seconds(failures) for failures in (1, 2, 3, 7, 10_000)] == [1, 2, 4, 60, 60]
    assert RetryPolicy(uniform=lambda low, high: low).delay_seconds(5) == 0


def test_a_server_that_names_a_time_is_obeyed_within_reason():
    """Retry-After counts, but not for hours."""
    assert LONGEST.delay_seconds(1, retry_after_seconds=17) == 17
    assert LONGEST.delay_seconds(1, retry_after_seconds=86_400) == 300


def test_probes_of_a_parked_store_come_at_least_every_five_minutes():
    """1, 2, 4 … 300 seconds."""
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
def test_what_a_first_failure_means(error, action):
    """Passing, parking, or the entry's own."""
    assert classify_failure(error, FailureCounts(), LONGEST, successes=0).action is action


@pytest.mark.parametrize(
    ("error", "tries", "state"),
    [
        (BytesCorruptError("bad digest"), 5, UploadState.CORRUPT),
        (KeyError("a bug"), 10, UploadState.REJECTED),
    ],
)
def test_an_unexplained_failure_is_final_after_a_while(error, tries, state):
    """Corruption on the wire five times, unknown failures ten times, while others get through."""
    attempts = FailureCounts()

    verdicts = [classify_failure(error, attempts, LONGEST, successes=count) for count in range(1, tries + 1)]

    assert [verdict.action for verdict in verdicts] == [FailureAction.RETRY] * (tries - 1) + [
        FailureAction.FAIL
    ]
    assert verdicts[-1].state is state


def test_network_faults_never_end_an_entry():
    """There is no count for what passes by itself."""
    attempts = FailureCounts()

    assert all(
        classify_failure(TransientStoreError("refused"), attempts, LONGEST, successes=0).action
        is FailureAction.RETRY
        for _ in range(10_000)
    )


def test_a_denial_is_about_the_name_only_while_others_get_through():
    """A policy that denies one name fails it; a policy that denies everything parks."""
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
def test_what_the_store_did_not_refuse_never_fails_while_nothing_gets_through(error):
    """However often: it may be the network, a proxy or a bug that a restart mends."""
    attempts = FailureCounts()

    actions = {classify_failure(error, attempts, LONGEST, successes=0).action for _ in range(1000)}

    assert FailureAction.FAIL not in actions


def test_an_answer_that_is_not_the_stores_never_fails_an_entry():
    """Others are not held up for it where they get through; where none does, the store is probed."""
    foreign, attempts = StoreError("a proxy's answer"), FailureCounts()

    assert {
        classify_failure(foreign, attempts, LONGEST, successes=count).action for count in range(1, 1000)
    } == {FailureAction.RETRY}
    assert classify_failure(foreign, attempts, LONGEST, successes=999).action is FailureAction.PARK


def test_a_policy_reaches_another_process_whole():
    """Every number travels; only how to draw does not."""
    policy = RetryPolicy(first_seconds=0.5, unknown_tries=3, denied_tries=7)

    assert RetryPolicy(**json.loads(json.dumps(policy.to_json()))) == policy
