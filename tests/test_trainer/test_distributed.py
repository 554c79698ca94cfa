"""Two ranks under torchrun, over gloo on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).with_name("two_ranks.py")


def run_two_ranks(mode, folder):
    """Runs the program on two ranks and returns its outcome."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RUN_NAME", None)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, str(_PROGRAM), mode, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def seen_by_ranks(folder):
    """Returns what each rank wrote down."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def rows(tmp_path):
    """Gives the metrics that were logged, once there are any."""
    return lambda: [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_two_ranks_train_as_one_and_log_once(tmp_path, rows):
    """Both end with the same name, weights, loss and clock; each batch is logged once; samples count both."""
    outcome = run_two_ranks("fit", tmp_path)

    assert outcome.returncode == 0, outcome.stderr
    zero, one = seen_by_ranks(tmp_path)
    assert zero == one
    assert (zero["batch"], zero["sample"]) == (10, 80)
    assert [step for step, metrics in rows() if "loss/train/total" in metrics] == list(range(10))


def test_one_rank_that_stops_stops_both(tmp_path, rows):
    """A rank that went on alone would wait for the other for ever."""
    outcome = run_two_ranks("stop", tmp_path)

    assert outcome.returncode == 0, outcome.stderr
    zero, one = seen_by_ranks(tmp_path)
    assert zero["batch"] == one["batch"] == 7
    assert [step for step, metrics in rows() if "loss/train/total" in metrics] == list(range(7))


def test_two_ranks_resume_to_the_last_bit(tmp_path):
    """Each rank finds its own random numbers again: weights equal those of the uninterrupted run."""
    run_two_ranks("save", tmp_path)
    whole = seen_by_ranks(tmp_path)[0]["weights"]
    (tmp_path / "ranks" / "latest.symlink").write_text("ranks/checkpoints/ep0-ba3.pt")

    outcome = run_two_ranks("resume", tmp_path)

    assert outcome.returncode == 0, outcome.stderr
    assert seen_by_ranks(tmp_path)[0]["weights"] == whole


def test_a_dataloader_that_gives_all_ranks_the_same_is_refused(tmp_path):
    """The message names the sampler to use."""
    outcome = run_two_ranks("no-sampler", tmp_path)

    assert outcome.returncode != 0
    assert "must give each of 2 ranks its own samples, got a SequentialSampler" in outcome.stderr
    assert "DistributedSampler" in outcome.stderr
