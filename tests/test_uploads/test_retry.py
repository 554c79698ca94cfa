"""How long to wait, and what a failure means."""

import errno
import json

import pytest

from uploads.drain.retry import Action, Attempts, RetryPolicy, judge
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
    """Fault 24: full jitter under a ceiling of 1, 2, 4 … 60 seconds."""
    assert [LONGEST.delay_seconds(failures) for failures in (1, 2, 3, 7, 10_000)] == [1, 2, 4, 60, 60]
    assert RetryPolicy(uniform=lambda low, high: low).delay_seconds(5) == 0


def test_a_server_that_names_a_time_is_obeyed_within_reason():
    """Retry-After counts, but not for hours."""
    assert LONGEST.delay_seconds(1, retry_after_seconds=17) == 17
    assert LONGEST.delay_seconds(1, retry_after_seconds=86_400) == 300


def test_probes_of_a_parked_store_come_at_least_every_five_minutes():
    """Fault 30: 1, 2, 4 … 300 seconds."""
    assert [LONGEST.probe_seconds(probes) for probes in (0, 1, 2, 8, 9, 10_000)] == [1, 2, 4, 256, 300, 300]


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (TransientStoreError("503"), Action.RETRY),
        (OSError(errno.EMFILE, "too many open files"), Action.RETRY),
        (StoreParkedError("expired"), Action.PARK),
        (RejectedByStoreError("name too long"), Action.FAIL),
        (ManifestError("torn"), Action.FAIL),
        (BytesCorruptError("bad digest"), Action.RETRY),
        (KeyError("a bug"), Action.RETRY),
    ],
)
def test_what_a_first_failure_means(error, action):
    """Faults 12, 21, 29, 30, 38: passing, parking, or the entry's own."""
    assert judge(error, Attempts(), LONGEST, successes=0).action is action


@pytest.mark.parametrize(
    ("error", "tries", "state"),
    [
        (BytesCorruptError("bad digest"), 5, UploadState.CORRUPT),
        (KeyError("a bug"), 10, UploadState.REJECTED),
    ],
)
def test_what_nobody_can_explain_ends_after_a_while(error, tries, state):
    """Corruption on the wire five times, unknown failures ten times, while others get through."""
    attempts = Attempts()

    verdicts = [judge(error, attempts, LONGEST, successes=count) for count in range(1, tries + 1)]

    assert [verdict.action for verdict in verdicts] == [Action.RETRY] * (tries - 1) + [Action.FAIL]
    assert verdicts[-1].state is state


def test_network_faults_never_end_an_entry():
    """Fault 21: there is no count for what passes by itself."""
    attempts = Attempts()

    assert all(
        judge(TransientStoreError("refused"), attempts, LONGEST, successes=0).action is Action.RETRY
        for _ in range(10_000)
    )


def test_a_denial_is_about_the_name_only_while_others_get_through():
    """A policy that denies one name fails it; a policy that denies everything parks."""
    denied = StoreParkedError("AccessDenied", may_be_the_entry=True)
    lonely, surrounded = Attempts(), Attempts()

    assert {judge(denied, lonely, LONGEST, successes=0).action for _ in range(100)} == {Action.PARK}
    assert [judge(denied, surrounded, LONGEST, successes=count).action for count in (1, 2, 3)] == [
        Action.RETRY,
        Action.RETRY,
        Action.FAIL,
    ]


@pytest.mark.parametrize(
    "error", [StoreError("a proxy's answer"), RemoteNotFoundError("404"), KeyError("a bug")], ids=repr
)
def test_what_the_store_did_not_refuse_never_fails_while_nothing_gets_through(error):
    """However often: it may be the network, a proxy or a bug that a restart mends."""
    attempts = Attempts()

    actions = {judge(error, attempts, LONGEST, successes=0).action for _ in range(1000)}

    assert Action.FAIL not in actions


def test_an_answer_that_is_not_the_stores_never_fails_an_entry():
    """Others are not held up for it where they get through; where none does, the store is probed."""
    foreign, attempts = StoreError("a proxy's answer"), Attempts()

    assert {judge(foreign, attempts, LONGEST, successes=count).action for count in range(1, 1000)} == {
        Action.RETRY
    }
    assert judge(foreign, attempts, LONGEST, successes=999).action is Action.PARK


def test_a_policy_reaches_another_process_whole():
    """Every number travels; only how to draw does not."""
    policy = RetryPolicy(first_seconds=0.5, unknown_tries=3, denied_tries=7)

    assert RetryPolicy(**json.loads(json.dumps(policy.to_json()))) == policy
