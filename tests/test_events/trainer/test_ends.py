"""Tests the ends of runs, epochs and iterations, also of a run that resumes there or never gets there."""

import pytest
import torch
from torch.utils.data import DataLoader

from events import Callback, CheckpointSaver, Evaluator, RunStatus
from tests.effort import times

from .conftest import dataset


class Killed(BaseException):
    """Ends the process, as far as the run can tell."""


class Kills(Callback):
    """Kills the run at an event, once as many batches are trained."""

    def __init__(self, event, batches):
        super().__init__()
        self._at = (event, batches)

    def run_event(self, event, state, logger):
        if (event.value, int(state.timestamp.batch)) == self._at:
            raise Killed


class Stops(Callback):
    """Asks to stop at an event."""

    def __init__(self, event):
        super().__init__()
        self._event = event

    def run_event(self, event, state, logger):
        if event.value == self._event:
            state.stop_training("enough")


def final(trainer, event_list, metric_list):
    """Returns what must not depend on an interruption."""
    timestamp = trainer.state.timestamp.to_numbers()
    return (
        [parameter.tolist() for parameter in trainer.state.model.parameters()],
        {name: count for name, count in timestamp.items() if not name.endswith("_wct")},
        [scheduler.state_dict() for scheduler in trainer.state.schedulers],
        event_list.events[event_list.events.index("fit_start") + 1 :],
        [
            (step, {name: value for name, value in row.items() if name.startswith("metrics/train_epoch")})
            for step, row in metric_list.metrics
        ],
        dict(trainer.state.eval_values),
        torch.get_rng_state().tolist(),
    )


@pytest.fixture
def interrupted(make_trainer, make_dataloader, event_list, metric_list, tmp_path):
    """Trains whole, and again killed and resumed; returns how both ended, from the kill on."""

    def run(event, batches, save_interval="1ba", **arguments):
        def train(name, *callbacks, autoresume=False):
            events, metrics = type(event_list)(), type(metric_list)()
            saver = CheckpointSaver(tmp_path / name, save_interval=save_interval)
            trainer = make_trainer(
                samples=40,
                eval_dataloader=make_dataloader(),
                callbacks=[events, *callbacks, saver],
                loggers=metrics,
                autoresume=autoresume,
                run_name=name,
                **arguments,
            )
            try:
                trainer.fit()
            except Killed:
                return None
            return final(trainer, events, metrics)

        whole = train("whole")
        assert train("killed", Kills(event, batches)) is None
        resumed = train("killed", autoresume=True)
        for index in (3, 4):
            count = len(resumed[index])
            assert count > 0
            whole = (*whole[:index], whole[index][-count:], *whole[index + 1 :])
        return whole, resumed

    return run


@pytest.mark.parametrize("schedules_by_batch", times([False], [True, False]))
@pytest.mark.parametrize(
    ("event", "batches", "arguments"),
    [
        ("epoch_end", 3, {"train_subset_num_batches": 3}),
        ("eval_start", 3, {"train_subset_num_batches": 3}),
        ("epoch_end", 10, {}),
        ("eval_start", 10, {"max_duration": "10ba"}),
        ("epoch_end", 20, {"max_duration": "80sp"}),
        ("fit_end", 10, {"max_duration": "10ba"}),
        ("batch_end", 12, {"eval_interval": "2ba"}),
    ],
)
def test_a_run_killed_where_something_ends_resumes_as_if_it_were_not(
    interrupted, event, batches, arguments, schedules_by_batch
):
    """Weights, clock, schedules, events to come, metrics of the epoch and evaluation are the same."""
    whole, resumed = interrupted(event, batches, step_schedulers_every_batch=schedules_by_batch, **arguments)

    assert resumed == whole


@pytest.mark.parametrize("duration", times(["3iter"], ["2iter", "4ep", "3iter"]))
@pytest.mark.parametrize(
    ("event", "batches"), [("iteration_end", 4), ("iteration_checkpoint", 8), ("iteration_start", 4)]
)
def test_a_run_killed_at_the_end_of_an_iteration_ends_it_when_it_resumes(
    interrupted, duration, event, batches
):
    """The checkpoint of the epoch is saved before; the iteration was a whole epoch longer."""
    whole, resumed = interrupted(
        event,
        batches,
        save_interval="1ep",
        train_subset_num_batches=2,
        iteration_length="2ep",
        eval_interval="1iter",
        max_duration=duration,
    )

    assert resumed == whole


def test_a_number_of_batches_that_means_nothing_raises(make_trainer, make_dataloader):
    """None of them trained, or evaluated, on as many batches."""
    for value in (0, -2, 2.5, True, "3"):
        for name in ("train_subset_num_batches", "eval_subset_num_batches"):
            text = f"{name} must be a whole number of batches, at least 1, or -1 or None"
            with pytest.raises(ValueError, match=text):
                make_trainer(**{name: value})
    with pytest.raises(ValueError, match="subset_num_batches must be a whole number of batches"):
        Evaluator(label="near", dataloader=make_dataloader(), subset_num_batches=0)


@pytest.mark.parametrize("event", ["init", "fit_start"])
def test_a_stop_before_the_first_batch_holds(make_trainer, event):
    """No batch is trained, the run is stopped for that reason, and a later `fit` trains."""
    trainer = make_trainer(callbacks=Stops(event), max_duration="1ep")

    trainer.fit()
    stopped = (int(trainer.state.timestamp.batch), trainer.state.status, trainer.state.stop_reason)

    assert stopped == (0, RunStatus.STOPPED, "enough")
    if event != "fit_start":
        trainer.fit("1ep")
        assert int(trainer.state.timestamp.batch) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_duration": "2iter"}, "a time in iterations must have iteration_length, got 2iter"),
        ({"eval_interval": "1iter"}, "a time in iterations must have iteration_length, got 1iter"),
        ({"save_interval": "1iter", "save_folder": "x"}, "a time in iterations must have iteration_length"),
        (
            {"eval_dataloader": Evaluator(label="e", dataloader=[], eval_interval="1iter")},
            "a time in iterations must have iteration_length",
        ),
        ({"iteration_length": "10ba"}, "iteration_length must be at least one epoch, got 10ba"),
    ],
)
def test_a_time_in_iterations_that_would_never_come_raises(make_trainer, arguments, message):
    """The constructor raises."""
    with pytest.raises(ValueError, match=message):
        make_trainer(**arguments)


def test_a_fit_of_iterations_without_their_length_raises(make_trainer):
    """`fit` knows before it trains, and the trainer stays open."""
    trainer = make_trainer(max_duration=None)

    with pytest.raises(ValueError, match="a time in iterations must have iteration_length"):
        trainer.fit("1iter")

    assert not trainer.engine.is_closed
    assert trainer.state.timestamp.batch == "0ba"


def test_a_maximum_in_tokens_without_tokens_ends_with_the_first_batch(make_trainer):
    """It would never be reached."""
    trainer = make_trainer(max_duration="20tok")

    with pytest.raises(ValueError, match="got 20tok, but 1ba of this epoch had no tokens"):
        trainer.fit()

    assert trainer.state.timestamp.batch == "1ba"


def test_an_interval_in_tokens_without_tokens_warns_once(make_trainer, make_dataloader, caplog):
    """It never passes: nothing is evaluated before the end."""
    trainer = make_trainer(eval_dataloader=make_dataloader(), eval_interval="20tok")

    trainer.fit()

    assert caplog.text.count("interval 20tok has not begun") == 1


def test_a_smaller_limit_ends_an_epoch_that_is_further(make_trainer, tmp_path):
    """A run that resumes after batch 4 with a limit of 3 ends the epoch there."""
    make_trainer(max_duration="4ba", save_folder=tmp_path).fit()
    trainer = make_trainer(
        max_duration="1ep", save_folder=tmp_path, autoresume=True, train_subset_num_batches=3
    )

    trainer.fit()

    assert (trainer.state.timestamp.batch, trainer.state.timestamp.epoch) == ("4ba", "1ep")


def test_fit_by_epochs_ends_the_epoch_that_is_begun(make_trainer, event_list):
    """`fit("1ep")` in the middle of an epoch trains to its end; at its end, a whole one."""
    trainer = make_trainer(max_duration=None, callbacks=event_list)
    done = []

    for duration in ("2ba", "1ep", "1ep", "0ep"):
        trainer.fit(duration)
        done.append(int(trainer.state.timestamp.batch))

    assert done == [2, 5, 10, 10]
    assert event_list.events.count("epoch_end") == 2


def test_a_finished_run_is_not_trained_or_evaluated_again(
    make_trainer, make_dataloader, event_list, tmp_path
):
    """What is resumed at its end has been evaluated, and knows the values."""
    first = make_trainer(eval_dataloader=make_dataloader(), save_folder=tmp_path)
    first.fit()
    again = make_trainer(
        eval_dataloader=make_dataloader(), save_folder=tmp_path, autoresume=True, callbacks=event_list
    )

    again.fit()

    assert "eval_start" not in event_list.events
    assert dict(again.state.eval_values) == dict(first.state.eval_values) != {}


def test_data_that_was_read_to_its_end_ends_the_epoch_when_the_run_resumes(interrupted):
    """A loader without a length: only reading tells, also after a resume."""
    whole, resumed = interrupted(
        "epoch_end", 10, train_dataloader=Unsized(DataLoader(dataset(40), batch_size=4))
    )

    assert resumed == whole


class Unsized:
    """A loader that does not know its length."""

    def __init__(self, dataloader):
        self._dataloader = dataloader

    def __iter__(self):
        return iter(self._dataloader)
