"""Placeholders in names and paths."""

from datetime import timedelta

import pytest

from events import State, Timestamp, check_run_name, format_name, format_run_name


def _state(run_name="mine"):
    timestamp = Timestamp(
        iteration=1,
        epoch=2,
        batch=30,
        sample=400,
        token=5000,
        epoch_in_iteration=6,
        token_in_iteration=7,
        batch_in_epoch=8,
        sample_in_epoch=9,
        token_in_epoch=10,
        total_wct=timedelta(seconds=90.5),
        iteration_wct=timedelta(seconds=60),
        epoch_wct=timedelta(seconds=30),
        batch_wct=timedelta(seconds=0.25),
    )
    return State(
        run_name,
        timestamp=timestamp,
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        node_rank=3,
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{run_name}", "mine"),
        ("{rank}/{local_rank}/{world_size}/{local_world_size}/{node_rank}", "5/1/8/4/3"),
        ("{run_name}/rank{rank:03d}.txt", "mine/rank005.txt"),
        ("plain", "plain"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("fill", [format_run_name, format_name])
def test_the_constants_of_a_run_are_filled_in(fill, template, expected):
    """Names, ranks and sizes, with a format where one is given."""
    assert fill(template, _state()) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("ep{epoch}-ba{batch}.pt", "ep2-ba30.pt"),
        ("{iteration} {sample} {token}", "1 400 5000"),
        ("{epoch_in_iteration} {token_in_iteration}", "6 7"),
        ("{batch_in_epoch} {sample_in_epoch} {token_in_epoch}", "8 9 10"),
        ("{total_wct} {iteration_wct} {epoch_wct} {batch_wct}", "90.5 60.0 30.0 0.25"),
        ("{epoch:04d}", "0002"),
        ("{run_name}/ep{epoch}-rank{rank}", "mine/ep2-rank5"),
    ],
)
def test_the_progress_of_training_is_filled_in(template, expected):
    """Counts are whole numbers, durations are seconds."""
    assert format_name(template, _state()) == expected


def test_format_run_name_keeps_changing_placeholders():
    """A file that is opened once is named once."""
    assert format_run_name("{run_name}/ep{epoch}", _state()) == "mine/ep{epoch}"


@pytest.mark.parametrize(
    "template", ["{date}", "{epoch", "epoch}", "{}", "{0}", "{run name}", "{date:%Y}", '{"a": 1}']
)
def test_other_braces_stay_as_they_are(template):
    """Unknown placeholders aren't an error."""
    assert format_name(template, _state()) == template


def test_a_run_name_with_braces_is_not_filled_in_again():
    """The name of a run isn't a template."""
    assert format_name("{run_name}/{epoch}", _state("lr{batch}")) == "lr{batch}/2"


def test_an_unknown_placeholder_of_a_folder_is_reported(caplog):
    """The warning has the nearest that is known; the folder is made as it is written."""
    check_run_name("runs/{runname}/{rank}", State("mine"))
    check_run_name("runs/{run_name}", State("mine"))

    assert caplog.messages == [
        "'runs/{runname}/{rank}' has {runname}, which is left as it is; did you mean {run_name}?"
    ]
