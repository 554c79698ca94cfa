"""Tests the state of a run: complete from its name alone, placed by the environment, stopped on request."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from events import Callback, Engine, Logger, Phase, RunStatus, State, Time, Timestamp

RANK_VARIABLES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _ranks(state):
    return (state.rank, state.local_rank, state.world_size, state.local_world_size, state.node_rank)


def test_a_name_is_enough():
    """Every other field has a value that means nothing has happened yet."""
    state = State("mine")

    assert state.run_name == "mine"
    assert state.timestamp == state.eval_timestamp == state.predict_timestamp == Timestamp()
    assert state.max_duration is None
    assert state.phase is Phase.TRAIN
    assert state.status is RunStatus.RUNNING
    assert _ranks(state) == (0, 0, 1, 1, 0)
    assert (state.model, state.optimizers, state.schedulers) == (None, (), ())
    assert (state.batch, state.outputs, state.loss, state.exception) == (None, None, None, None)
    assert (state.train_metrics, state.eval_metrics, state.callbacks) == ({}, {}, [])


def test_an_argument_overrides_the_environment(monkeypatch):
    """An explicit rank overrides the environment."""
    monkeypatch.setenv("RANK", "5")

    assert State("r", rank=2).rank == 2


def test_an_empty_variable_counts_as_unset(monkeypatch):
    """A job script may contain `RANK=`."""
    monkeypatch.setenv("RANK", "")

    assert State("r").rank == 0


def test_a_bad_environment_is_named(monkeypatch):
    """The message says which variable and what it holds."""
    monkeypatch.setenv("LOCAL_RANK", "first")

    with pytest.raises(
        ValueError, match="environment variable LOCAL_RANK must be a whole number, got 'first'"
    ):
        State("r")


@pytest.mark.parametrize("duration", ["2ep", Time(2, "ep")])
def test_a_maximum_is_a_time_also_when_it_is_set_later(duration):
    """A string is parsed at once, in the constructor and on assignment."""
    state = State("r", duration)
    state.max_duration = duration

    assert state.max_duration == Time(2, "ep")


def test_a_run_is_done_when_its_maximum_is_reached():
    """The timestamp is compared in the unit of the maximum."""
    state = State("r", "2ba")

    done = []
    for _ in range(3):
        done.append(state.is_done)
        state.timestamp = state.timestamp.to_next_batch()

    assert done == [False, False, True]


def test_stop_training_ends_a_run_until_training_begins_again():
    """The request holds, also one before the first `fit`, until a later `fit` takes it back."""
    state = State("r", "10ep")
    before = (state.is_done, state.is_stopping)

    state.stop_training()
    state.begin_training()
    stopped = (state.is_done, state.is_stopping)
    state.begin_training()

    assert (before, stopped) == ((False, False), (True, True))
    assert (state.is_done, state.is_stopping) == (False, False)


@pytest.mark.parametrize(
    ("maximum", "timestamp", "share"),
    [
        ("10ba", Timestamp(), 0.0),
        ("10ba", Timestamp(batch=4), 0.4),
        ("2ep", Timestamp(epoch=1, batch=77), 0.5),
        ("100sec", Timestamp(total_wct=timedelta(seconds=25)), 0.25),
        ("10ba", Timestamp(batch=12), 1.0),
    ],
)
def test_the_elapsed_duration_is_the_share_of_the_maximum(maximum, timestamp, share):
    """It runs from 0 to 1 in the unit of the maximum."""
    assert State("r", maximum, timestamp=timestamp).get_elapsed_duration() == Time(share, "dur")


@pytest.mark.parametrize("maximum", [None, "0ep"])
def test_there_is_no_share_of_nothing(maximum):
    """Without a maximum, or with a maximum of zero, no share is known."""
    assert State("r", maximum).get_elapsed_duration() is None


def test_the_text_of_a_state_leaves_the_model_out():
    """A model, a batch and outputs would fill the screen."""
    state = State(
        "r", timestamp=Timestamp(batch=3, epoch=1), model=torch.nn.Linear(2, 2), batch=torch.ones(99)
    )

    assert repr(state) == "State('r', batch=3ba, epoch=1ep, phase=train, status=running, rank=0)"


def test_two_states_share_nothing():
    """Containers are each state's own, and states with equal fields are two states."""
    one, other = State("r"), State("r")

    one.train_metrics["a"] = 1

    assert other.train_metrics == {}
    assert one != other
    assert len({one, other}) == 2


def test_a_reason_to_stop_makes_the_run_stopped():
    """The first reason counts; without one the run is completed; `begin_training` resets both."""
    state = State("mine")
    state.begin_training()

    state.stop_training("loss is below 0.1")
    state.stop_training("another reason")
    state.end_training()

    assert (state.is_stopping, state.status, state.stop_reason) == (
        True,
        RunStatus.STOPPED,
        "loss is below 0.1",
    )
    state.begin_training()
    state.stop_training()
    state.end_training()
    assert (state.status, state.stop_reason) == (RunStatus.COMPLETED, None)


def test_parts_of_a_batch_are_read_and_replaced_as_in_composer():
    """A part is named by index, name, attribute, function, or a pair of functions."""
    state = State("mine")
    state.batch = (1, 2)
    state.batch_set_item(1, 5)

    assert (state.batch, state.batch_get_item(1)) == ((1, 5), 5)
    assert state.batch_get_item(lambda batch: batch[0]) == 1
    state.batch_set_item((lambda batch: batch[0], lambda _, value: [value]), "new")
    assert state.batch == ["new"]
    state.batch = {"x": 1}
    state.batch_set_item("x", 3)
    assert state.batch_get_item("x") == 3
    state.batch = SimpleNamespace(x=1)
    state.batch_set_item("x", 3)
    assert state.batch_get_item("x") == 3
    with pytest.raises(KeyError, match=r"batch \(SimpleNamespace\) has no part 'y'"):
        state.batch_get_item("y")


def test_the_device_is_torchs_and_has_composers_methods():
    """Torch takes it as a device, it equals the device, and it moves tensors."""
    state = State("mine", device=torch.device("cpu"))

    assert state.device == torch.device("cpu") == state.device
    assert state.device != torch.device("meta")
    assert (state.device.type, state.device.index, state.device.name) == ("cpu", None, "cpu")
    assert torch.zeros(2, device=state.device).to(state.device).device == state.device
    state.device = "meta"
    assert state.device.tensor_to_device(torch.zeros(2)).is_meta
    assert state.device.module_to_device(torch.nn.Linear(1, 1)).weight.is_meta
    state.device = torch.device("cuda", 1)
    assert (state.device.type, state.device.index, state.device.name) == ("cuda", 1, "gpu")


def test_precision_and_length_have_values_as_in_composer():
    """Both compare with plain values too; an unknown precision is an error."""
    state = State("mine", precision="AMP_BF16", dataloader_len=5)

    assert (state.precision.value, state.precision) == ("amp_bf16", "amp_bf16")
    assert (state.dataloader_len.value, state.dataloader_len, int(state.dataloader_len)) == (5, 5, 5)
    with pytest.raises(ValueError, match=r"precision must be one of fp32, .*, got 'int4'"):
        state.precision = "int4"


def test_one_optimizer_and_one_scheduler_need_no_list():
    """Composer takes them so, also where they are assigned later."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    state = State("mine", optimizers=optimizer)

    state.schedulers = scheduler

    assert (state.optimizers, state.schedulers) == ((optimizer,), (scheduler,))
    state.schedulers = [scheduler]
    assert state.schedulers == (scheduler,)


def test_callbacks_may_be_appended_before_there_is_an_engine():
    """Code for Composer's engine does so."""
    heard = []

    class Listener(Callback):
        def init(self, state, logger):
            heard.append(state.run_name)

    state = State("mine")

    state.callbacks.append(Listener())
    engine = Engine(state, Logger(state))
    engine.run_event("init")
    engine.close()

    assert heard == ["mine"]


def test_the_seed_of_rank_0_and_whether_the_model_is_divided_are_known():
    """Composer's OptimizerMonitor asks for the latter."""
    state = State("mine", model=torch.nn.Linear(2, 1))
    assert (state.rank_zero_seed, state.fsdp_enabled, State("mine").fsdp_enabled) == (None, False, False)

    state.rank, state.seed = 3, 20

    assert state.rank_zero_seed == 17
