"""The events: their names, values, order, and the drawing of the loop in their docstring."""

import re

import pytest

from events import Event, EventsError, UnknownEventError

# Composer's events in Composer's order, with the side of the loop each is on.
NEITHER, BEFORE, AFTER = "neither", "before", "after"
EVENTS = [
    ("INIT", NEITHER, "init"),
    ("BEFORE_LOAD", BEFORE, "load"),
    ("AFTER_LOAD", AFTER, "load"),
    ("FIT_START", BEFORE, "fit"),
    ("ITERATION_START", BEFORE, "iteration"),
    ("EPOCH_START", BEFORE, "epoch"),
    ("BEFORE_DATALOADER", BEFORE, "dataloader"),
    ("AFTER_DATALOADER", AFTER, "dataloader"),
    ("BATCH_START", BEFORE, "batch"),
    ("BEFORE_TRAIN_BATCH", BEFORE, "train_batch"),
    ("BEFORE_FORWARD", BEFORE, "forward"),
    ("AFTER_FORWARD", AFTER, "forward"),
    ("BEFORE_LOSS", BEFORE, "loss"),
    ("AFTER_LOSS", AFTER, "loss"),
    ("BEFORE_BACKWARD", BEFORE, "backward"),
    ("AFTER_BACKWARD", AFTER, "backward"),
    ("AFTER_TRAIN_BATCH", AFTER, "train_batch"),
    ("BATCH_END", AFTER, "batch"),
    ("BATCH_CHECKPOINT", NEITHER, "batch_checkpoint"),
    ("EPOCH_END", AFTER, "epoch"),
    ("EPOCH_CHECKPOINT", NEITHER, "epoch_checkpoint"),
    ("ITERATION_END", AFTER, "iteration"),
    ("ITERATION_CHECKPOINT", NEITHER, "iteration_checkpoint"),
    ("FIT_END", AFTER, "fit"),
    ("EVAL_BEFORE_ALL", BEFORE, "eval_all"),
    ("EVAL_START", BEFORE, "eval"),
    ("EVAL_BATCH_START", BEFORE, "eval_batch"),
    ("EVAL_BEFORE_FORWARD", BEFORE, "eval_forward"),
    ("EVAL_AFTER_FORWARD", AFTER, "eval_forward"),
    ("EVAL_BATCH_END", AFTER, "eval_batch"),
    ("EVAL_END", AFTER, "eval"),
    ("EVAL_AFTER_ALL", AFTER, "eval_all"),
    ("EVAL_STANDALONE_START", BEFORE, "eval_standalone"),
    ("EVAL_STANDALONE_END", AFTER, "eval_standalone"),
    ("PREDICT_START", BEFORE, "predict"),
    ("PREDICT_BATCH_START", BEFORE, "predict_batch"),
    ("PREDICT_BEFORE_FORWARD", BEFORE, "predict_forward"),
    ("PREDICT_AFTER_FORWARD", AFTER, "predict_forward"),
    ("PREDICT_BATCH_END", AFTER, "predict_batch"),
    ("PREDICT_END", AFTER, "predict"),
]


def test_the_events_are_the_forty_of_composer_in_their_order():
    """Names, values and order are Composer's; a value is its name in lower case."""
    assert [(event.name, event.value) for event in Event] == [(name, name.lower()) for name, *_ in EVENTS]
    assert len(EVENTS) == 40


def test_an_event_is_found_by_its_name_in_any_case():
    """Upper, lower and mixed case all give the one member."""
    for event in Event:
        found = [Event(event.name), Event(event.name.lower()), Event(event.name.title()), Event(event)]

        assert all(one is event for one in found)


def test_an_event_knows_its_side_its_subject_and_whose_loop_it_belongs_to():
    """`is_eval` holds for evaluation, standalone too, and `is_predict` for prediction."""
    for name, side, canonical in EVENTS:
        event = Event[name]

        assert (event.is_before_event, event.is_after_event) == (side == BEFORE, side == AFTER)
        assert event.canonical_name == canonical
        assert event.is_eval is name.startswith("EVAL_")
        assert event.is_predict is name.startswith("PREDICT_")


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    """A slip of the pen is answered with what was meant."""
    with pytest.raises(
        UnknownEventError, match=r"must be one of the 40 events, got 'batch_ends'\. .*'batch_end'"
    ):
        Event("batch_ends")


@pytest.mark.parametrize("value", ["", "before_eval_all", None, 3, ["batch_end"], object()])
def test_an_unknown_event_raises_our_error_and_a_value_error(value):
    """The error is an `EventsError`, and `except ValueError` catches it too."""
    with pytest.raises(EventsError) as caught:
        Event(value)

    assert isinstance(caught.value, ValueError)


def test_an_event_is_a_string_of_its_value():
    """It formats, compares, hashes and looks up as its value."""
    assert f"{Event.BATCH_END}" == "batch_end"
    assert Event.BATCH_END == "batch_end"
    assert {"batch_end": 1}[Event.BATCH_END] == 1


def test_the_loop_drawn_in_the_docstring_has_every_event_once_and_no_other():
    """The drawing and the enum name the same events."""
    drawn = re.findall(r"<(\w+)>", Event.__doc__)

    assert sorted(drawn) == sorted(event.name for event in Event)


def test_the_loop_is_drawn_in_the_order_of_the_enum():
    """The drawing runs in the order of the members."""
    assert re.findall(r"<(\w+)>", Event.__doc__) == [event.name for event in Event]
