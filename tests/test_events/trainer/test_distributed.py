"""Two ranks as under torchrun, over gloo on the CPU."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler

from events import read_checkpoint

_PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.fixture
def run_ranks(torch_server, tmp_path):
    """Runs the program on two ranks, or more or fewer, and returns what each of them wrote down in each mode."""

    def run(*modes, ranks=2):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        environment.pop("RUN_NAME", None)
        outcome = torch_server.torchrun(ranks, _PROGRAM, tmp_path, *modes, env=environment, timeout_s=400)
        assert outcome.returncode == 0, outcome.stdout
        kinds = [mode.partition(":")[0] for mode in modes]
        return [
            [json.loads((tmp_path / f"{kind}.rank{rank}.json").read_text()) for rank in range(ranks)]
            for kind in kinds
        ]

    return run


def logged(folder, kind):
    """Returns the steps at which a loss was logged, as often as it was."""
    rows = [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]
    return [step for step, metrics in rows if "loss/train/total" in metrics]


def test_two_ranks_train_as_one_log_once_and_resume_to_the_last_bit(run_ranks, tmp_path):
    """Both end with the same name, weights, loss and clock; on resuming, each restores its random state."""
    ((zero, one),) = run_ranks("save")
    name = zero["run_name"]
    (tmp_path / name / "latest.symlink").write_text(f"{name}/checkpoints/ep0-ba3.pt")

    (resumed,) = run_ranks(f"resume:{name}")

    assert zero | {"seen": []} == one | {"seen": []}
    assert (zero["refused"], zero["batch"], zero["sample"]) == ("", 10, 80)
    assert logged(tmp_path, "save") == list(range(10))
    assert [rank["weights"] for rank in resumed] == [zero["weights"]] * 2
    assert logged(tmp_path, "resume") == list(range(3, 10))


def test_ranks_that_the_user_joined_stop_together_and_need_a_sampler(run_ranks, tmp_path):
    """If one rank stops, both stop for its reason; a sampler that ignores ranks is refused."""
    (zero, one), refused = run_ranks("stop", "no-sampler")

    assert zero["batch"] == one["batch"] == 7
    for rank in (zero, one):
        assert (rank["status"], rank["reason"]) == ("stopped", "rank 1 has seen enough")
    assert zero["refused"] == one["refused"] == ""
    assert logged(tmp_path, "stop") == list(range(7))
    for rank in refused:
        assert "must give each of 2 ranks its own samples, got a SequentialSampler" in rank["refused"]
        assert "DistributedSampler" in rank["refused"]


def test_a_signal_on_one_rank_preempts_all_and_their_own_steps_stay_equal(run_ranks, tmp_path):
    """A signal within an evaluation ends both ranks, with a checkpoint; `train_step` averages gradients."""
    preempted, own = run_ranks("signal:run", "own-step")

    for rank in preempted:
        assert (rank["batch"], rank["status"], rank["reason"]) == (5, "preempted", "SIGTERM on rank 1")
        assert rank["exit"] == 143
    assert read_checkpoint(tmp_path / "run" / "ep1-ba5.pt")["random"][0]["evaluating"] == ["eval"]
    assert not any("loss/eval/total" in line for line in (tmp_path / "signal.jsonl").read_text().splitlines())
    assert own[0]["weights"] == own[1]["weights"]
    rows = [json.loads(line)[1] for line in (tmp_path / "own-step.jsonl").read_text().splitlines()]
    assert {row["metrics/train/rank"] for row in rows if "loss/train/total" in row} == {0.5}


def test_one_and_four_ranks_resume_a_checkpoint_of_two(run_ranks, tmp_path):
    """All begin at the sample and with the weights of the file, and end alike; by three it is refused."""
    ((zero, _),) = run_ranks("save")
    name = zero["run_name"]
    saved = read_checkpoint(tmp_path / name / "ep1-ba6.pt")
    weights = [value.flatten().tolist() for value in saved["model"].values()]
    others = [path for path in (tmp_path / name).glob("*.pt") if path.name > "ep1-ba6.pt"]
    sampler = DistributedSampler(range(40), 1, 0, seed=5)
    sampler.set_epoch(1)
    # Two ranks have had a batch of four each.
    rest = list(sampler)[8:]

    for ranks in (1, 4, 3):
        for path in others:
            path.unlink(missing_ok=True)
        (tmp_path / name / "latest.symlink").write_text(f"{name}/checkpoints/ep1-ba6.pt")
        (resumed,) = run_ranks(f"resume:{name}", ranks=ranks)

        if ranks == 3:
            assert {"after 1 batches of 4 on each of 2 ranks" in rank["refused"] for rank in resumed} == {
                True
            }
            continue
        assert [rank["seen"] for rank in resumed] == [rest[rank::ranks] for rank in range(ranks)]
        assert [rank["began_at"] for rank in resumed] == [6] * ranks
        assert [rank["began_with"] for rank in resumed] == [weights] * ranks
        assert [rank["weights"] for rank in resumed] == [resumed[0]["weights"]] * ranks
        assert {rank["batch"] for rank in resumed} == {6 + math.ceil(32 / (4 * ranks))}


def test_a_rank_without_the_file_begins_where_rank_zero_does(run_ranks, tmp_path):
    """On machines without a shared disk, rank 0 alone has what it saved; before, the others began anew."""
    ((zero, _),) = run_ranks("apart")
    name = zero["run_name"]
    (tmp_path / f"{name}-rank0" / "ep2-ba10.pt").unlink()
    (tmp_path / f"{name}-rank0" / "latest.symlink").write_text("ep1-ba6.pt")

    (resumed,) = run_ranks(f"rejoin:{name}")

    assert not (tmp_path / f"{name}-rank1").exists()
    assert [rank["began_at"] for rank in resumed] == [6, 6]
    assert [rank["weights"] for rank in resumed] == [zero["weights"]] * 2
