"""How far the clock of rank 0 is ahead is asked through a store, once for each machine."""

import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from events import State
from events.callbacks.clock_offset import ClockOffset


@pytest.fixture
def store():
    """A store as that of torchrun's agent; returns what connects to it."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=10)
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)


def test_clocks_of_two_machines_are_compared(store):
    """Both ranks of the second one know by how much that of the first is ahead; its own ranks are not off."""
    asked = [0]

    def late():
        asked[0] += 1
        return time.time() - 100.0

    ranks = [
        ClockOffset(store, 0, 4, "mine/0", machine="first"),
        ClockOffset(store, 1, 4, "mine/0", machine="first"),
        ClockOffset(store, 2, 4, "mine/0", machine="second", clock=late),
        ClockOffset(store, 3, 4, "mine/0", machine="second", clock=late),
    ]
    for one in ranks:
        one.start()
    for one in ranks[1:]:
        one.join()
    ranks[0].stop()
    ranks[0].join()

    assert [one.seconds for one in ranks[:2]] == [0.0, 0.0]
    assert ranks[2].seconds == ranks[3].seconds
    assert abs(ranks[2].seconds - 100.0) <= ranks[2].error_seconds <= 1.0
    assert asked[0] == 10


def test_a_store_that_is_gone_tells_nothing():
    """Training goes on without it."""

    def gone():
        raise RuntimeError("connection refused")

    one = ClockOffset(gone, 1, 2, "mine/0")
    one.start()
    one.join()

    assert one.seconds is None


def test_a_rank_that_is_not_answered_can_end(store):
    """Rank 0 may be gone."""
    one = ClockOffset(store, 1, 2, "mine/0")
    one.start()
    one.stop()
    one.join()

    assert one.seconds is None


@pytest.mark.parametrize(
    "variables", [{}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"MASTER_PORT": "29500"}]
)
def test_without_several_machines_or_a_store_nothing_is_asked(monkeypatch, variables):
    """Ranks of one machine have one clock."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert ClockOffset.of(State("mine")) is None
