"""A run that is interrupted anywhere and resumed equals an uninterrupted one to the last bit, rows included.

A draw is a kind of training and a point of interruption, chosen by its number. To repeat draw 17, run
`python -m tests.crash.resume_child /tmp/x 17 1`, with torchrun for several ranks.
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.crash import resume_child
from tests.effort import times

FIRST = int(os.environ.get("RESUME_FIRST", "0"))
AT_ONCE = times(10, 100)
STARTS = range(FIRST, FIRST + times(10, 1800), AT_ONCE)
OF_RANKS = times(((2, 2), (3, 1)), ((2, 120), (3, 80)))
PROGRAM = """
import sys
from pathlib import Path
from tests.crash.resume_child import main

main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.fixture
def folder():
    """A folder in memory if there is one, because the test doesn't depend on the disk."""
    memory = "/dev/shm"  # noqa: S108  # the system's
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


@pytest.fixture
def environment():
    """What a program sees: this checkout, and one thread."""
    found = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found.pop("RUN_NAME", None)
    return found


def differing(text):
    """Returns the lines that name a differing draw."""
    return [line for line in text.splitlines() if line.startswith("DIFFERS")]


@pytest.mark.parametrize("first", STARTS)
def test_an_interrupted_run_equals_an_uninterrupted_one(torch_server, folder, environment, first):
    """Weights, optimizer, scheduler, random numbers, timestamp and rows are the same, whatever is drawn."""
    outcome = torch_server.run(PROGRAM, folder, first, AT_ONCE, env=environment, timeout_s=3000)

    assert differing(outcome.stdout) == [], outcome.stdout
    assert f"{AT_ONCE} draws from {first} on 1 ranks, 0 differ" in outcome.stdout, outcome.stderr


@pytest.mark.parametrize(("ranks", "count"), OF_RANKS)
def test_interrupted_ranks_equal_uninterrupted_ones(torch_server, folder, environment, ranks, count):
    """Two and three interrupted ranks end with the weights and records of uninterrupted ones."""
    outcome = torch_server.torchrun(
        ranks, resume_child.__file__, folder, FIRST, count, env=environment, timeout_s=3000
    )

    assert differing(outcome.stdout) == [], outcome.stdout
    assert f"{count} draws from {FIRST} on {ranks} ranks, 0 differ" in outcome.stdout
