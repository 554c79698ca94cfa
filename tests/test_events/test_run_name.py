"""Which name a run has when there are several ranks: given, from the environment, or agreed on through a store."""

import os
import socket
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from events import Run, agreed_run_name


@pytest.fixture
def two_ranks(monkeypatch):
    """The environment of rank 1 of two, without a launcher."""
    for name in ("RUN_NAME", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return monkeypatch


def test_all_ranks_use_the_name_in_the_environment(two_ranks):
    """No other rank is asked."""
    two_ranks.setenv("RUN_NAME", "mine")

    assert Run().state.run_name == "mine"
    assert Run(run_name="given").state.run_name == "given"


def test_ranks_with_nothing_to_agree_through_need_a_name(two_ranks):
    """The message says what to do."""
    assert agreed_run_name() is None
    with pytest.raises(ValueError, match=r"run_name must be given with several ranks \(2, torchrun"):
        Run()


def test_the_first_proposal_in_the_store_is_the_name_of_all_and_each_run_has_its_own():
    """Two processes; whichever begins first proposes, as does one that is restarted and finds the names."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    program = "from events import Run\nprint(Run().state.run_name, Run().state.run_name)"
    environment = {name: value for name, value in os.environ.items() if name != "RUN_NAME"} | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]

    first, second = (rank.communicate(timeout=120)[0].split() for rank in ranks)

    assert first == second
    assert len(set(first)) == 2


def test_an_unreachable_store_raises_with_advice(two_ranks):
    """The error comes after the time-out."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    two_ranks.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    two_ranks.setenv("MASTER_ADDR", "localhost")
    two_ranks.setenv("MASTER_PORT", str(port))

    with pytest.raises(TimeoutError, match=rf"localhost:{port} within 0.2 s. Pass run_name"):
        agreed_run_name(0.2)
