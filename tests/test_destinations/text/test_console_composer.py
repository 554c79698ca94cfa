"""What Console prints in the style of Composer, line by line."""

import functools
import io
import math

import pytest

import destinations
from destinations.testing import DryRun
from events import Callback, Time

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
    ("interval", "interval_unit", "length", "length_unit"),
    [(1, "ba", 9, "ba"), (3, "ba", 10, "ep"), (3, "ep", 10, "ba"), (3, "ep", 10, "ep")],
)
def test_the_first_every_nth_and_the_rest_are_printed(interval, interval_unit, length, length_unit):
    """Blocks come after the first batch or epoch, after each multiple, and at the end of fit for the rest."""
    batches_per_epoch = 3
    console = Console(f"{interval}{interval_unit}", io.StringIO())
    run = DryRun(console, max_duration=f"{length}{length_unit}", batches_per_epoch=batches_per_epoch)
    batches = length * batches_per_epoch if length_unit == "ep" else length
    per_look = batches_per_epoch if interval_unit == "ep" else 1
    looks = [batch for batch in range(1, batches + 1) if batch % per_look == 0]
    expected = {batch for batch in looks if (batch // per_look) % interval == 0} | {looks[0], batches}

    lines = headers(printed(run, console))

    assert len(lines) == len(expected)


def test_the_interval_may_be_in_iterations():
    """With "2iter" the console prints the first iteration and every second one."""
    console = Console("2iter", io.StringIO())
    run = DryRun(console, max_duration=None)
    run.init()
    run.fire("fit_start")

    for _ in range(5):
        run.train_batch()
        run.state.timestamp = run.state.timestamp.to_next_iteration()
        run.fire("iteration_end")

    assert headers(console._stream.getvalue().splitlines()) == [f"[batch={batch}]:" for batch in (1, 2, 4)]


def test_a_fraction_of_an_unknown_length_is_an_error_of_the_console():
    """Without max_duration a tenth of the run is unknown: one error is logged, and close prints the rest."""
    console = Console("0.1dur", io.StringIO())
    run = DryRun(console, max_duration=None, raise_errors=False)
    run.init()

    run.fire("fit_start")
    run.train_batch()
    run.train_batch()
    run.close()

    assert run.logger.faults.counts == {("Console", "fit_start", "TimeStringError"): 1}
    assert headers(console._stream.getvalue().splitlines()) == ["[batch=1]:", "[batch=2]:"]


def test_the_last_value_of_an_interval_is_printed():
    """The block has the last value of each name, and names logged only once."""
    console = Console("3ba", io.StringIO())
    run = DryRun(
        console,
        max_duration="4ba",
        train_metrics=lambda state: {
            "loss": int(state.timestamp.batch),
            f"only/{int(state.timestamp.batch)}": 1,
        },
    )

    assert printed(run, console) == [
        "[batch=1/4]:",
        "  Train loss: 0",
        "  Train only/0: 1",
        "[batch=3/4]:",
        "  Train loss: 2",
        "  Train only/1: 1",
        "  Train only/2: 1",
        "[batch=4/4]:",
        "  Train loss: 3",
        "  Train only/3: 1",
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-5, "1e-05"),
        (0.00012345678, "0.00012345678"),
        (0.0012345678, "0.001235"),
        (0.6931471805599453, "0.6931"),
        (123456.789, "123456.789"),
        (3.0, "3.0"),
        (3, "3"),
        (True, "True"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_small_numbers_are_printed_in_full(value, text):
    """A learning rate of 1e-5 is not 0.0000."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, max_duration="1ba", train_metrics=lambda _: {"x": value})

    assert printed(run, console) == ["[batch=1/1]:", f"  Train x: {text}"]


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


def test_metrics_of_training_survive_an_evaluation():
    """Metrics that wait when an evaluation begins are printed at their interval."""
    console = Console("3ba", io.StringIO())
    run = DryRun(
        console, max_duration="4ba", train_metrics=lambda state: {f"at/{int(state.timestamp.batch)}": 1.0}
    )
    run.init()

    run.fit(eval_every=2)

    assert console._stream.getvalue().splitlines() == [
        "[batch=1/4]:",
        "  Train at/0: 1.0",
        "[Eval batch=1/2] Eval on eval data",
        "[Eval batch=2/2] Eval on eval data:",
        "  Eval metrics/eval/accuracy: 0.5",
        "[batch=3/4]:",
        "  Train at/1: 1.0",
        "  Train at/2: 1.0",
        "[Eval batch=1/2] Eval on eval data",
        "[Eval batch=2/2] Eval on eval data:",
        "  Eval metrics/eval/accuracy: 0.5",
        "[batch=4/4]:",
        "  Train at/3: 1.0",
    ]


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


class LogsOneTable(Callback):
    def after_train_batch(self, state, logger):
        if int(state.timestamp.batch) == 0:
            logger.log_table(
                ["image", "guess"], [[12, "cat|dog"], [1000, None], [0.1 + 0.2, "a\nb"]], "wrong"
            )


def test_a_table_is_printed_once():
    """It's aligned in one block, and in no later one."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, max_duration="2ba", callbacks=[LogsOneTable()])

    assert printed(run, console) == [
        "[batch=1/2]:",
        "  Train loss/train: 1.0",
        "Table wrong at step 0:",
        "| image  | guess    |",
        "| ------ | -------- |",
        "| 12     | cat\\|dog |",
        "| 1000   | None     |",
        "| 0.3000 | a\\nb     |",
        "[batch=2/2]:",
        "  Train loss/train: 0.5",
    ]


def test_a_long_table_is_cut():
    """Rows beyond the bound are counted, not printed."""
    console = Console(stream=io.StringIO(), table_rows=2)
    run = DryRun(console, max_duration="1ba")
    run.init()

    run.logger.log_table(["n"], [[n] for n in range(5)])
    run.close()

    assert console._stream.getvalue().splitlines() == [
        "[batch=0/1]:",
        "Table Table at step 0:",
        "| n |",
        "| - |",
        "| 0 |",
        "| 1 |",
        "(3 more rows)",
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


def test_rank_1_prints_nothing_at_all():
    """Only rank 0 prints hyperparameters, metrics, tables and evaluations, also from before INIT."""
    console = Console(stream=io.StringIO(), log_traces=True)
    run = DryRun(console, rank=1, callbacks=[LogsOneTable()])
    run.logger.log_metrics({"early": 1.0})
    run.logger.log_hyperparameters({"lr": 0.1})
    run.init()

    run.logger.log_traces({"trace": 1})
    run.fit(eval_every=1)
    run.predict()
    run.close()

    assert console._stream.getvalue() == ""


def test_pending_metrics_are_printed_at_close():
    """An interrupted run, and a custom loop without FIT_END, lose nothing."""
    console = Console("100ba", io.StringIO())
    run = DryRun(console, max_duration="9ba")
    run.init()
    run.fire("fit_start")
    run.train_batch()
    run.train_batch()

    run.close(RuntimeError("the user's own"))

    assert console._stream.getvalue().splitlines() == [
        "[batch=1/9]:",
        "  Train loss/train: 1.0",
        "[batch=2/9]:",
        "  Train loss/train: 0.5",
    ]


def test_an_ascii_stream_gets_escapes():
    """A Greek name doesn't raise on a machine without UTF-8."""
    raw = io.BytesIO()
    run = DryRun(
        Console(stream=io.TextIOWrapper(raw, "ascii")), max_duration="1ba", train_metrics=lambda _: {"λ": 1.0}
    )
    run.init()

    run.fit()

    assert raw.getvalue() == b"[batch=1/1]:\n  Train \\u03bb: 1.0\n"


def test_a_name_with_a_newline_stays_in_its_line():
    """Names cannot forge lines or move the cursor."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, max_duration="1ba", train_metrics=lambda _: {"a\n[batch=9/9]:\r": 1.0})

    assert printed(run, console) == ["[batch=1/1]:", "  Train a\\n[batch=9/9]:\\r: 1.0"]


def test_bad_arguments():
    """An invalid interval and a negative number of rows raise at once."""
    with pytest.raises(ValueError, match="interval must be positive"):
        Console("0ba")
    with pytest.raises(ValueError, match="table_rows must be at least 0"):
        Console(table_rows=-1)
