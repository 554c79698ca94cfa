"""Our callback in a real Keras fit with the torch backend, in its own process with that backend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("keras")
EVALUATION = [
    "eval_start",
    *["eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"] * 2,
    "eval_end",
]
PREDICTION = [
    "predict_start",
    *["predict_batch_start", "predict_before_forward", "predict_after_forward", "predict_batch_end"] * 2,
    "predict_end",
]


def batches(start, epoch):
    """Returns the events of an epoch of two batches that ends with an evaluation."""
    return [
        ["epoch_start", start, epoch],
        ["batch_start", start, epoch],
        ["before_train_batch", start, epoch],
        ["batch_end", start + 1, epoch],
        ["batch_checkpoint", start + 1, epoch],
        ["batch_start", start + 1, epoch],
        ["before_train_batch", start + 1, epoch],
        *[
            [name, start + 2, epoch]
            for name in ("batch_end", "eval_before_all", *EVALUATION, "eval_after_all", "batch_checkpoint")
        ],
        ["epoch_end", start + 2, epoch + 1],
        ["epoch_checkpoint", start + 2, epoch + 1],
    ]


def test_fit_evaluate_predict_and_an_exception(tmp_path, environment, sidecar, documented):
    """All events come in order, and records have steps over all epochs.

    The block tells a failed run from a completed one.
    """
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("keras_child.py")), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout.splitlines()[-1])
    assert seen["fit"] == [
        *[[name, 0, 0] for name in ("init", "before_load", "after_load", "fit_start")],
        *batches(0, 0),
        *batches(2, 1),
        ["fit_end", 4, 2],
    ]
    after = [name for name, *_ in seen["after"]]
    assert after == ["eval_standalone_start", *EVALUATION, "eval_standalone_end", *PREDICTION]
    assert {name for name, *_ in seen["fit"]} | set(after) == documented("Keras")
    epoch = [["train/loss"], ["train/loss"], ["eval/loss"], ["train_epoch/loss"]]
    assert seen["rows"] == [
        *[[step, names] for step, names in zip((0, 1, 1, 1), epoch, strict=True)],
        *[[step, names] for step, names in zip((2, 3, 3, 3), epoch, strict=True)],
        [4, ["eval/loss"]],
    ]
    assert seen["hyperparameters"]["fit"] == {"epochs": 2, "steps": 2}
    assert seen["hyperparameters"]["optimizer"]["name"].lower() == "sgd"
    assert seen["error"] == "diverged"
    assert sidecar(tmp_path / "run")["status"] == "completed"
    assert sidecar(tmp_path / "failed")["exception"] == "ValueError: diverged"
