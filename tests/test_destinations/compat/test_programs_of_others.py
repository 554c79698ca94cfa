"""A published cleanrl program, with only the imports of `SummaryWriter` and `wandb` changed."""

import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from destinations.compat import wandb
from destinations.runs import Run
from tests.peers import folder_of

PROGRAMS = folder_of("cleanrl")

pytestmark = [
    pytest.mark.skipif(PROGRAMS is None, reason="cleanrl is not there (.ci/peers.txt)"),
    pytest.mark.filterwarnings("ignore:The distutils package is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
CHANGED = {
    "from torch.utils.tensorboard import SummaryWriter": "from destinations.compat import SummaryWriter",
    "import wandb\n": "from destinations.compat import wandb\n",
}
LENGTH = 20


class Environments:
    """Vectors of random numbers that end every twenty steps, behind the gym calls that the programs use."""

    def __init__(self, thunks):
        self.count, self.steps = len([thunk() for thunk in thunks]), 0
        self.numbers = np.random.default_rng(1)
        self.single_observation_space = types.SimpleNamespace(shape=(4,))

    def _observed(self):
        return self.numbers.random((self.count, 4))

    def close(self):
        """Does nothing."""


class Box:
    shape = (2,)


class NewerEnvironments(Environments):
    """With the calls of gymnasium 0.28."""

    single_action_space = Box()

    def reset(self, seed):
        return self._observed(), {}

    def step(self, actions):
        self.steps += 1
        is_end = self.steps % LENGTH == 0
        infos = [{"episode": {"r": rewards[:1], "l": np.array([LENGTH])}} for rewards in actions]
        ends = np.full(self.count, is_end)
        return self._observed(), actions[:, 0], ends, ~ends & ends, {"final_info": infos} if is_end else {}


def gym_with(environments):
    """Returns a substitute for gym, whose wrappers wrap nothing."""
    space = types.SimpleNamespace(seed=lambda seed: None)
    module = types.ModuleType("gym")
    module.make = lambda name, **options: types.SimpleNamespace(
        seed=lambda seed: None, action_space=space, observation_space=space
    )
    names = "RecordEpisodeStatistics FlattenObservation ClipAction NormalizeObservation TransformObservation"
    names += " NormalizeReward TransformReward"
    unwrapped = {name: lambda env, *_, **__: env for name in names.split()}
    module.wrappers = types.SimpleNamespace(**unwrapped)
    module.vector = types.SimpleNamespace(SyncVectorEnv=environments)
    module.spaces = types.SimpleNamespace(Box=Box)
    return module


def run_program(name, folder, monkeypatch, *, is_changed):
    """Runs a program in a folder, with its imports changed or unchanged."""
    path = Path(PROGRAMS) / name
    text = path.read_text()
    options = ["--total-timesteps", "400", "--num-steps", "50", "--num-envs", "2"]
    options += ["--update-epochs", "1", "--num-minibatches", "4"]
    if is_changed:
        for theirs, ours in CHANGED.items():
            assert text.count(theirs) == 1
            text = text.replace(theirs, ours)
        options += ["--track", "--wandb-project-name", "balance"]
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "argv", [name, *options])
        patched.setitem(sys.modules, "gymnasium", gym_with(NewerEnvironments))
        # Python 3.12 removed it; the programs are from 2023.
        distutils = types.ModuleType("distutils.util")
        distutils.strtobool = lambda text: text == "True"
        patched.setitem(sys.modules, "distutils.util", distutils)
        exec(compile(text, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})  # noqa: S102
    return next((folder / "runs").glob("*__1__*"))


@pytest.fixture
def _random_state():
    """Restores the random state and the settings of torch for other tests."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  # theirs
    deterministic = torch.backends.cudnn.deterministic
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    torch.backends.cudnn.deterministic = deterministic


@pytest.mark.usefixtures("_random_state")
def test_a_program_of_cleanrl_runs_with_its_imports_changed(tmp_path, monkeypatch):
    """All numbers but the speed are equal at each step, and `wandb` has the settings and the code."""
    name = "ppo_continuous_action.py"
    theirs = run_program(name, tmp_path / "theirs", monkeypatch, is_changed=False)
    ours = run_program(name, tmp_path / "ours", monkeypatch, is_changed=True)
    wandb.finish()

    events, run = EventAccumulator(str(theirs)).Reload(), Run.open(ours)
    names = set(events.Tags()["scalars"])
    assert names == set(run.metric_names())
    assert len(names) == 11
    for metric in names - {"charts/SPS"}:
        series = run.series(metric)
        points = list(zip(series.step.tolist(), np.float32(series.value).tolist(), strict=True))
        assert points == [(event.step, event.value) for event in events.Scalars(metric)], metric
    want = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    changed = {
        "|track|True|": "|track|False|",
        "|wandb_project_name|balance|": "|wandb_project_name|cleanRL|",
    }
    text = run.records("texts")[0].text
    for given, default in changed.items():
        text = text.replace(given, default)
    assert (text, run.status) == (want, "completed")
    (tracked,) = (tmp_path / "ours" / "runs" / "balance").iterdir()
    followed = Run.open(tracked)
    assert (followed.hyperparameters["num_steps"], followed.status) == (50, "completed")
    assert [path.suffix for path in (tracked / "artifacts").rglob("*.*") if path.is_file()] == [".zip"]
