"""Two ranks with different data: they end together, and shared values cover both."""

import json
import os
import sys
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).with_name("unequal_ranks.py")
_MODES = (
    "tokens",
    "samples",
    "evaluation",
    "longer-evaluation",
    "shorter",
    "unsized",
    "ending",
    "none",
    "unsized-none",
    "stop-init",
    "stop-epoch",
    "losses",
    "lbfgs",
    "whole",
    "half",
    "resumed",
)


@pytest.fixture(scope="module")
def seen(torch_server, tmp_path_factory):
    """Trains in every mode, and returns what all ranks saw alike."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RUN_NAME", None)
    outcome = torch_server.torchrun(2, _PROGRAM, folder, *_MODES, env=environment, timeout_s=400)
    assert outcome.returncode == 0, outcome.stdout
    # As texts, for NaN equals nothing.
    texts = {mode: [(folder / f"{mode}.rank{rank}.json").read_text() for rank in (0, 1)] for mode in _MODES}
    assert [mode for mode, (zero, one) in texts.items() if zero != one] == []
    return {mode: json.loads(zero) for mode, (zero, _) in texts.items()}


def position(seen):
    """Returns epochs, batches, samples and tokens."""
    return tuple(seen["timestamp"][name] for name in ("epoch", "batch", "sample", "token"))


def names(seen):
    """Returns the names that were logged, without learning rate and time."""
    return {name for _, row in seen["rows"] for name in row if not name.startswith(("lr/", "time/"))}


def test_an_end_in_tokens_or_samples_counts_all_ranks(seen):
    """Batches of two and five samples, or of four and three, are seven; both ranks end alike."""
    assert position(seen["tokens"]) == (0, 5, 35, 105)
    assert position(seen["samples"]) == (0, 3, 21, 0)


def test_a_rank_without_evaluation_data_has_the_values_of_those_that_have(seen):
    """Losses, functions, vectors and lists of torchmetrics come from rank 0; counts are per rank."""
    values = seen["evaluation"]["values"]

    assert set(values) == {
        "loss/eval/total",
        "metrics/eval/accuracy",
        "metrics/eval/vector/0",
        "metrics/eval/vector/1",
        "metrics/eval/correct/0",
        "metrics/eval/correct/1",
    }
    assert values["metrics/eval/correct/0"] + values["metrics/eval/correct/1"] == pytest.approx(
        values["metrics/eval/accuracy"]
    )
    assert seen["evaluation"]["evaluated"] == {"batch": 2, "sample": 7}


def test_ranks_may_evaluate_different_numbers_of_batches(seen):
    """Three and one: samples are summed; a loss that one rank alone has is a mean of those."""
    values = seen["longer-evaluation"]["values"]

    assert seen["longer-evaluation"]["evaluated"] == {"batch": 3, "sample": 13}
    assert {"loss/eval/total", "loss/eval/entropy", "loss/eval/size", "loss/eval/odd"} < set(values)


@pytest.mark.parametrize("mode", ["shorter", "unsized"])
def test_the_first_rank_without_a_batch_ends_the_epoch_of_all(seen, mode):
    """They have six and five batches; both train on five, with and without a known length."""
    assert position(seen[mode]) == (2, 10, 70, 0)


def test_an_end_at_the_last_batch_of_the_shorter_rank_ends_the_epoch(seen):
    """The smallest length counts for all ranks."""
    assert position(seen["ending"]) == (1, 5, 35, 0)


@pytest.mark.parametrize("mode", ["none", "unsized-none"])
def test_a_rank_without_training_data_ends_all_with_an_error(seen, mode):
    """None of them waits for it."""
    assert "train_dataloader must yield at least one batch in each epoch, got none" in seen[mode]["error"]


def test_a_stop_on_one_rank_stops_all_at_the_same_batch(seen):
    """Before the first batch, or after the one that follows."""
    assert position(seen["stop-init"])[:2] == (0, 0)
    assert position(seen["stop-epoch"])[:2] == (0, 1)


def test_losses_that_one_rank_alone_has_are_logged_on_all(seen):
    """Rank 1 has a loss more, as its batches are odd."""
    assert names(seen["losses"]) == {
        "loss/train/total",
        "loss/train/entropy",
        "loss/train/size",
        "loss/train/odd",
        "metrics/train/accuracy",
        "metrics/train_epoch/accuracy",
    }


def test_lbfgs_takes_the_same_steps_on_all_ranks(seen):
    """Its line search decides by the loss of all; the loss falls."""
    losses = [row["loss/train/total"] for _, row in seen["lbfgs"]["rows"] if "loss/train/total" in row]

    assert position(seen["lbfgs"])[:2] == (0, 4)
    assert losses[-1] < losses[0]


def test_metrics_within_an_epoch_are_resumed_on_each_rank(seen):
    """Each has the batches of its own, of the sums of rank 0 before."""
    whole, resumed = seen["whole"], seen["resumed"]

    def of_epoch(one):
        return [row for _, row in one["rows"] if "metrics/train_epoch/accuracy" in row]

    assert position(seen["half"])[:2] == (0, 3)
    assert resumed["weights"] == whole["weights"]
    assert of_epoch(resumed) == of_epoch(whole) != []
