"""What Console prints in the style of Composer, line by line; when it prints is tested in `test_console.py`."""

import functools
import io

import pytest

import destinations
from destinations.testing import DryRun
from events import Time

Console = functools.partial(destinations.Console, style="composer")


def printed(run, console):
    """Plays a run and returns its lines."""
    run.init()
    run.fit()
    run.close()
    return console._stream.getvalue().splitlines()


def headers(lines):
    """Returns the first line of each block."""
    return [line for line in lines if line.startswith("[")]


def test_each_batch_is_printed_under_its_header():
    """With the default interval every batch has a block: the position, then the metrics."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, max_duration="2ep", batches_per_epoch=2)

    assert printed(run, console) == [
        "[epoch=1/2][batch=1/2]:",
        "  Train loss/train: 1.0",
        "[epoch=1/2][batch=2/2]:",
        "  Train loss/train: 0.5",
        "[epoch=2/2][batch=1/2]:",
        "  Train loss/train: 0.3333",
        "[epoch=2/2][batch=2/2]:",
        "  Train loss/train: 0.25",
    ]


@pytest.mark.parametrize(
    ("length", "header"),
    [
        ("8sp", "[sample=4/8]:"),
        ("2ba", "[batch=1/2]:"),
        ("2ep", "[epoch=1/2][batch=1/3]:"),
        ("3sec", "[second=1.5/3]:"),
    ],
)
def test_the_header_shows_progress_in_the_runs_unit(length, header):
    """A run measured in samples shows the samples seen."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, max_duration=length, seconds_per_batch=1.5)

    assert headers(printed(run, console))[0] == header


def test_the_header_of_an_unknown_length_has_no_total():
    """The number of batches may be unknown for an epoch, or for an endless run."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, max_duration="1ep", batches_per_epoch=1, knows_length=False)
    endless = DryRun(Console(stream=console._stream), max_duration=None, knows_length=False)
    endless.init()
    endless.train_batch()

    assert headers(printed(run, console)) == ["[batch=1]:", "[epoch=1/1][batch=1]:"]


def test_an_evaluation_prints_its_progress_in_tenths_then_all_its_metrics():
    """For 25 batches it prints the first and nine marks, then the final block."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, eval_metrics=lambda _: {"metrics/val/accuracy": 0.96875, "metrics/val/loss": 1e-7})
    run.init()

    run.evaluate(batches=25, label="val")
    run.close()

    assert console._stream.getvalue().splitlines() == [
        *(f"[Eval batch={batch}/25] Eval on val data" for batch in (1, 3, 5, 8, 10, 13, 15, 18, 20, 23)),
        "[Eval batch=25/25] Eval on val data:",
        "  Eval metrics/val/accuracy: 0.9688",
        "  Eval metrics/val/loss: 1e-07",
    ]


def test_an_evaluation_of_unknown_length_prints_only_its_end():
    """If the length is unknown there are no tenths."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, knows_length=False)
    run.init()

    run.evaluate(batches=30)

    assert (
        console._stream.getvalue()
        == "[Eval batch=30] Eval on eval data:\n  Eval metrics/eval/accuracy: 0.5\n"
    )


def test_hyperparameters_are_printed_once_as_yaml():
    """They come before the first block and aren't repeated; later ones are printed on arrival."""
    console = Console("1ep", io.StringIO())
    run = DryRun(console, max_duration="1ep", batches_per_epoch=1)
    run.init()
    run.logger.log_hyperparameters(
        {"lr": 1e-5, "model": {"depth": 3, "name": "größe: x"}, "betas": [0.9, 0.99]}
    )

    run.fit()
    run.logger.log_hyperparameters({"lr": 1e-5, "late": None})
    run.state.max_duration = Time(2, "ep")
    run.fit()
    run.close()

    assert console._stream.getvalue().splitlines() == [
        "******************************",
        "Hyperparameters:",
        "lr: 1.0e-05",
        "model:",
        "  depth: 3",
        "  name: 'größe: x'",
        "betas:",
        "- 0.9",
        "- 0.99",
        "******************************",
        "[epoch=1/1][batch=1/1]:",
        "  Train loss/train: 1.0",
        "******************************",
        "Hyperparameters:",
        "late: null",
        "******************************",
        "[epoch=2/2][batch=1/1]:",
        "  Train loss/train: 0.5",
    ]


def test_texts_and_traces():
    """A text is printed with its lines; traces are printed only on request."""
    streams = io.StringIO(), io.StringIO()
    run = DryRun(Console(stream=streams[0]), Console(stream=streams[1], log_traces=True), max_duration="1ba")
    run.init()

    run.logger.log_text("one\ntwo\x1b[31m", "note")
    run.logger.log_traces({"grad": 0.5})
    run.close()

    text = "[batch=0/1]:\nText note at step 0:\n  one\n  two\\x1b[31m\n"
    assert [stream.getvalue() for stream in streams] == [text, text + "Trace grad: 0.5\n"]
