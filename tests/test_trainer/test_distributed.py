"""Two ranks under torchrun, over gloo on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# To start two ranks takes a minute of a machine with other work: what they have done is shared by the tests.
pytestmark = pytest.mark.xdist_group("two-ranks")

_PROGRAM = Path(__file__).with_name("two_ranks.py")


def run_two_ranks(folder, *modes):
    """Runs the program on two ranks, and returns what each of them wrote down in each mode."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RUN_NAME", None)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outcome = subprocess.run(
        [*launcher, str(_PROGRAM), str(folder), *modes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    kinds = [mode.partition(":")[0] for mode in modes]
    return [
        [json.loads((folder / f"{kind}.rank{rank}.json").read_text()) for rank in range(2)] for kind in kinds
    ]


def logged(folder, kind):
    """Returns the steps at which a loss was logged, as often as it was."""
    rows = [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]
    return [step for step, metrics in rows if "loss/train/total" in metrics]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks write."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def saved(folder):
    """What both ranks saw of a run that saves checkpoints."""
    (ranks,) = run_two_ranks(folder, "save")
    return ranks


@pytest.fixture(scope="module")
def joined_by_the_user(folder):
    """What both ranks saw of a run that one of them stops, and then of one without a sampler, in a group that was there already."""
    return run_two_ranks(folder, "stop", "no-sampler")


def test_two_ranks_train_as_one_and_log_once(folder, saved):
    """Both end with the same name, weights, loss and clock; each batch is logged once; samples count both."""
    zero, one = saved

    assert zero == one
    assert (zero["refused"], zero["batch"], zero["sample"]) == ("", 10, 80)
    assert logged(folder, "save") == list(range(10))


def test_one_rank_that_stops_stops_both(folder, joined_by_the_user):
    """A rank that went on alone would wait for the other for ever."""
    (zero, one), _ = joined_by_the_user

    assert zero["batch"] == one["batch"] == 7
    assert zero["refused"] == one["refused"] == ""
    assert logged(folder, "stop") == list(range(7))


def test_two_ranks_resume_to_the_last_bit(folder, saved):
    """Each rank finds its own random numbers again: weights equal those of the uninterrupted run."""
    name = saved[0]["run_name"]
    (folder / name / "latest.symlink").write_text(f"{name}/checkpoints/ep0-ba3.pt")

    ((zero, one),) = run_two_ranks(folder, f"resume:{name}")

    assert zero["weights"] == one["weights"] == saved[0]["weights"]
    assert logged(folder, "resume") == list(range(3, 10))


def test_a_dataloader_that_gives_all_ranks_the_same_is_refused(joined_by_the_user):
    """The message names the sampler to use."""
    _, ranks = joined_by_the_user

    for rank in ranks:
        assert "must give each of 2 ranks its own samples, got a SequentialSampler" in rank["refused"]
        assert "DistributedSampler" in rank["refused"]
