"""The contract of adapters: the trainer, not only the folder, decides whether a run is new or continues."""

import os
import signal
from pathlib import Path

import pytest
import yaml

from destinations.run_directory import read_rows
from tests.servers.fork_server import ForkServer

pytestmark = pytest.mark.xdist_group("who_a_run_is")

PROGRAM = """
import sys
from tests.test_destinations.adapters.trainers import train
name, folder, how, *rates = sys.argv[1:]
for lr in map(float, rates):
    train(name, folder, lr, kills=how == "kills", resumes=how == "resumes")
"""
LOSSES = {"hugging_face": "train/loss", "keras": "train/loss", "ours": "loss/train/total"}
EVALUATIONS = {"hugging_face": "eval/loss", "keras": "eval/loss"}


@pytest.fixture(scope="module")
def server():
    """Runs programs of all trainers in processes that already imported them."""
    modules = ("lightning.pytorch", "transformers", "accelerate", "torchrl.record.loggers", "keras")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with ForkServer("torch", "torch._dynamo", "transformers.trainer", *modules) as server:
            yield server


@pytest.mark.parametrize(
    "trainer",
    ["lightning", "lightning_alone", "hugging_face", "accelerate", "torchrl", "keras", "ours", "own_loop"],
)
class TestWhoARunIs:
    """Programs run in their own processes; learning rates identify their runs."""

    @pytest.fixture
    def train(self, server, tmp_path, trainer):
        """Returns a function that runs a program and returns its stderr."""

        def run(how, *rates):
            environment = {**os.environ, "KERAS_BACKEND": "torch", "HF_HUB_OFFLINE": "1"}
            folder = tmp_path / "runs" / "mine"
            done = server.run(PROGRAM, trainer, folder, how, *rates, env=environment, cwd=tmp_path)
            assert done.returncode == (-signal.SIGKILL if how == "kills" else 0), done.stderr
            return done.stderr

        return run

    @pytest.fixture
    def runs(self, tmp_path, trainer):
        """Returns a function that gives each run's learning rates, and the steps of its losses."""

        def read():
            name, found = LOSSES.get(trainer, "loss"), {}
            for sidecar in sorted(Path(tmp_path, "runs").glob("*/sidecar.json")):
                text = (sidecar.parent / "hparams.yaml").read_text()
                steps = [row.step for row in read_rows(sidecar.parent) if name in row.metrics]
                # Hugging Face logs a batch after counting it.
                steps = [step - (trainer == "hugging_face") for step in steps]
                found[sidecar.parent.name] = (
                    [lr for lr in (0.125, 0.25, 0.5) if str(lr) in _scalars(text)],
                    steps,
                )
            return found

        return read

    def test_a_start_is_a_run_beside_the_others_unless_its_checkpoint_is_loaded(
        self, train, runs, tmp_path, trainer
    ):
        """A killed run continues with each step once; other starts, also of one process, have their own runs.

        An evaluation from before the checkpoint was loaded belongs to the run that continues.
        """
        train("kills", 0.125)
        said = train("starts", 0.25)
        train("resumes", 0.125)
        # Logger and trainer are made anew each time, and none is closed: a sweep, or a cell that is repeated.
        train("starts", 0.5, 0.25)

        steps = [0, 1, 2, 3]
        assert runs() == {
            "mine": ([0.125], steps),
            "mine-2": ([0.25], steps),
            "mine-3": ([0.5], steps),
            "mine-4": ([0.25], steps),
        }
        assert "mine holds a run that did not end: this run is written to" in said
        assert 'To continue the earlier run, pass if_exists="resume"' in said
        values = [name for row in read_rows(tmp_path / "runs" / "mine") for name in row.metrics]
        if trainer != "ours":
            assert EVALUATIONS.get(trainer, "val") in values


def _scalars(text):
    """Returns all scalars of a YAML document, as text."""
    found, waiting = set(), [yaml.safe_load(text)]
    while waiting:
        match waiting.pop():
            case dict() as one:
                waiting += [*one.keys(), *one.values()]
            case list() as one:
                waiting += one
            case one:
                found.add(str(one))
    return found
