"""When an interval says that it has passed."""

from datetime import timedelta

import pytest

from events import Interval, State, Time, TimeStringError


def batches_of_passing(interval, state, batches, *, samples=1, seconds=1.0, batches_per_epoch=None):
    """Trains a number of batches, and returns "batch" or "batch/ep" for each look at which the interval had passed."""
    passed = []
    for _ in range(batches):
        state.timestamp = state.timestamp.to_next_batch(samples, 0, timedelta(seconds=seconds))
        if interval.passed(state):
            passed.append(int(state.timestamp.batch))
        if batches_per_epoch and int(state.timestamp.batch_in_epoch) == batches_per_epoch:
            state.timestamp = state.timestamp.to_next_epoch()
            if interval.passed(state):
                passed.append(f"{int(state.timestamp.batch)}/ep")
    return passed


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ("1ba", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("3ba", [3, 6, 9]),
        ("10ba", [10]),
        ("11ba", []),
        ("100sp", [2, 4, 5, 7, 8, 10]),
        ("640sp", [10]),
        ("1sp", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("5sec", [3, 5, 8, 10]),
        ("0.5sec", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("1ep", ["4/ep", "8/ep"]),
        ("2ep", ["8/ep"]),
    ],
)
def test_passes_where_a_multiple_is_crossed(interval, expected):
    """An interval of any unit passes at the look after each of its multiples, once."""
    state = State("run")
    every = Interval(interval)
    every.start(state)

    passed = batches_of_passing(every, state, 10, samples=64, seconds=2.0, batches_per_epoch=4)

    assert passed == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("0.1dur", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("0.7dur", [7]),
        ("0.25dur", [3, 5, 8, 10]),
        ("1dur", [10]),
    ],
)
def test_a_duration_is_a_share_of_the_run(share, expected):
    """A duration passes at its share of max_duration, rounding of floats notwithstanding."""
    state = State("run", max_duration="10ba")
    every = Interval(share)
    every.start(state)

    assert batches_of_passing(every, state, 10) == expected


def test_a_duration_of_epochs_passes_where_epochs_end():
    """Half of four epochs is due when the second has ended, not before."""
    state = State("run", max_duration="4ep")
    every = Interval("0.5dur")
    every.start(state)

    assert batches_of_passing(every, state, 12, batches_per_epoch=3) == ["6/ep", "12/ep"]


def test_a_run_that_is_made_longer_counts_in_its_new_length():
    """After fit to 10ba and then to 20ba, a tenth is two batches."""
    state = State("run", max_duration="10ba")
    every = Interval("0.1dur")
    every.start(state)
    batches_of_passing(every, state, 10)

    state.max_duration = Time(20, "ba")

    assert batches_of_passing(every, state, 10) == [12, 14, 16, 18, 20]


def test_a_resumed_run_keeps_the_multiples_of_the_whole_run():
    """Started at batch 7, "5ba" passes at 10 and 15: at neither 8 nor 12."""
    state = State("run")
    state.timestamp = state.timestamp.copy(batch=7)
    every = Interval("5ba")

    every.start(state)

    assert batches_of_passing(every, state, 10) == [10, 15]


def test_without_start_it_counts_from_the_beginning_of_training():
    """An interval that was not started passes at its first multiple."""
    assert batches_of_passing(Interval("2ba"), State("run"), 5) == [2, 4]


def test_several_multiples_at_once_are_one_yes():
    """A batch of 100 samples crosses "10sp" ten times and passes once.

    A second look without progress does not.
    """
    state = State("run")
    every = Interval("10sp")
    state.timestamp = state.timestamp.to_next_batch(100)

    assert [every.passed(state), every.passed(state)] == [True, False]


def test_going_back_does_not_pass():
    """A timestamp set back, as by loading a checkpoint, is a new place to count from."""
    state = State("run")
    state.timestamp = state.timestamp.copy(batch=50)
    every = Interval("10ba")
    every.start(state)

    state.timestamp = state.timestamp.copy(batch=19)

    assert every.passed(state) is False
    assert batches_of_passing(every, state, 3) == [20]


def test_a_bare_number_takes_the_default_unit():
    """`Interval(3, "ba")` is "3ba"."""
    assert Interval(3, "ba").time == Time(3, "ba")
    assert repr(Interval(3, "ba")) == "Interval('3ba')"


@pytest.mark.parametrize("bad", ["0ba", "-1ep", "1.5dur", "10", "soon", 5])
def test_invalid_intervals_raise(bad):
    """Nothing, less than nothing, more than the run, and numbers without a unit are errors at once."""
    with pytest.raises(TimeStringError, match="must"):
        Interval(bad)


@pytest.mark.parametrize("length", [None, "1dur", "0ep"])
def test_a_share_of_an_unknown_length_is_refused_at_start(length):
    """Without max_duration a tenth of the run is unknown: start says so, and it never passes."""
    state = State("run", max_duration=length)
    every = Interval("0.1dur")

    with pytest.raises(TimeStringError, match="must have a run of known length"):
        every.start(state)

    assert batches_of_passing(every, state, 3) == []
