"""What Console prints by default, and at the end of a run."""

import io
import math
import re

import pytest

from destinations import Artifacts, Console, ProgressBar, RunDirectory
from destinations.cli import main
from destinations.testing import DryRun
from events import Callback, Run


def printed(run, console):
    """Plays a run and returns its lines, without the summary."""
    run.init()
    run.fit()
    run.close()
    return console._stream.getvalue().splitlines()


def silent(**options):
    """Returns a console without a summary."""
    return Console(stream=io.StringIO(), summary=False, **options)


def test_an_epoch_is_a_block():
    """A title shows the position; the metrics are below it, aligned, with four digits."""
    console = silent()
    values = {"loss/train": 2.302585, "lr": 1e-5, "time/epoch": 3}
    run = DryRun(console, max_duration="2ep", batches_per_epoch=30, train_metrics=lambda _: values)

    assert printed(run, console) == [
        "Epoch 1/2, 0:30",
        "  loss/train  2.303",
        "  lr          1e-05",
        "Epoch 2/2, 1:00",
        "  loss/train  2.303",
        "  lr          1e-05",
    ]


def test_records_after_an_epoch_belong_to_it():
    """An evaluation after `epoch_end` is below that epoch, and records after `epoch_start` below the next."""
    console = silent()
    with Run(loggers=[console], max_duration="2ep") as run:
        for epoch in range(2):
            run.epoch_start(length=1)
            run.log_metrics({"lr": 0.5 + epoch})
            run.batch_start()
            run.log_metrics({"loss": 1.5 + epoch})
            run.batch_end()
            run.epoch_end()
            run.log_metrics({"val/acc": 0.25 + epoch / 2})

    assert console._stream.getvalue().splitlines() == [
        *("Epoch 1/2", "  lr    0.5", "  loss  1.5", "Epoch 1/2", "  val/acc  0.25"),
        *("Epoch 2/2", "  lr    1.5", "  loss  2.5", "Epoch 2/2", "  val/acc  0.75"),
    ]


def test_an_evaluation_is_a_block():
    """It prints nothing before its end, then its metrics and the batch."""
    console = silent()
    run = DryRun(console, eval_metrics=lambda _: {"accuracy": 0.96875, "loss": 12345.678})
    run.init()
    run.train_batch()

    run.evaluate(batches=25, label="val")
    run.evaluate(batches=25)

    assert console._stream.getvalue().splitlines() == [
        "Eval val, after batch 1",
        "  accuracy  0.9688",
        "  loss       12346",
        "Eval, after batch 1",
        "  accuracy  0.9688",
        "  loss       12346",
    ]


def test_an_evaluation_without_metrics_prints_nothing():
    """A title is never printed without metrics."""
    console = silent()
    run = DryRun(console, eval_metrics=lambda _: {}, train_metrics=lambda _: {})
    run.init()

    run.fit(eval_every=1)

    assert console._stream.getvalue() == ""


@pytest.mark.parametrize(
    ("length", "titles"),
    [
        ("20ba", [f"Batch {n}/20" for n in range(2, 21, 2)]),
        ("40sp", [f"Sample {n}/40" for n in range(4, 41, 4)]),
        (None, ["Batch 60", "Batch 120"]),
    ],
)
def test_a_run_without_epochs_has_tenths_or_minutes(length, titles):
    """A run of known length has ten blocks; another has one per minute."""
    console = silent()
    run = DryRun(console, max_duration=length, batches_per_epoch=10_000)
    run.init()
    run.fire("fit_start")

    for _ in range(20 if length else 150):
        if not run.state.is_done:
            run.train_batch()

    lines = console._stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines if not line.startswith(" ")] == titles


def titles(lines):
    """Returns the first line of each block."""
    return [line for line in lines if not line.startswith(" ")]


@pytest.mark.parametrize(
    ("interval", "length", "batches"),
    [
        ("1ba", "4ba", [1, 2, 3, 4]),
        ("3ba", "10ba", [1, 3, 6, 9, 10]),
        ("100sp", "10ba", [1, 2, 4, 5, 7, 8, 10]),
        ("4sec", "10ba", [1, 2, 4, 6, 8, 10]),
        ("0.5dur", "10ba", [1, 5, 10]),
    ],
)
def test_the_first_each_multiple_and_the_rest_are_printed(interval, length, batches):
    """An interval may be in batches, samples, seconds, or a fraction of the run."""
    console = silent(log_interval=interval)
    run = DryRun(console, max_duration=length, samples_per_batch=64, seconds_per_batch=2.0)

    found = titles(printed(run, console))

    assert [int(title.split("/")[0].removeprefix("Batch ")) for title in found] == batches


def test_an_interval_may_be_in_epochs():
    """The first one is printed too, and the rest at the end."""
    console = silent(log_interval="3ep")
    found = titles(printed(DryRun(console, max_duration="5ep", batches_per_epoch=2), console))

    assert [title.split(",")[0] for title in found] == ["Epoch 1/5", "Epoch 3/5", "Epoch 5/5"]


@pytest.mark.parametrize(("style", "title"), [("blocks", "Batch {}"), ("composer", "[batch={}]:")])
def test_an_interval_may_be_in_iterations(style, title):
    """With "2iter" the console prints the first iteration and every second one."""
    console = silent(log_interval="2iter", style=style)
    run = DryRun(console, max_duration=None)
    run.init()
    run.fire("fit_start")

    for _ in range(5):
        run.train_batch()
        run.state.timestamp = run.state.timestamp.to_next_iteration()
        run.fire("iteration_end")

    found = titles(console._stream.getvalue().splitlines())
    assert [line.split(",")[0] for line in found] == [title.format(batch) for batch in (1, 2, 4)]


def test_a_resumed_run_keeps_its_multiples():
    """A run that continues at batch 7 with "5ba" prints its first batch, then 10 and 15."""
    console = silent(log_interval="5ba")
    run = DryRun(console, max_duration="15ba", batches_per_epoch=100, seconds_per_batch=0.0)
    run.state.timestamp = run.state.timestamp.copy(batch=7, batch_in_epoch=7)

    assert titles(printed(run, console)) == ["Batch 8/15", "Batch 10/15", "Batch 15/15"]


@pytest.mark.parametrize(("style", "title"), [("blocks", "Batch {}"), ("composer", "[batch={}]:")])
def test_a_fraction_of_an_unknown_length_is_an_error_of_the_console(style, title):
    """Without max_duration a tenth of the run is unknown: one error is logged, and close prints the rest."""
    console = silent(log_interval="0.1dur", style=style)
    run = DryRun(console, max_duration=None, raise_errors=False, seconds_per_batch=0.0)
    run.init()

    run.fire("fit_start")
    run.train_batch()
    run.train_batch()
    run.close()

    assert run.logger.faults.counts == {("Console", "fit_start", "TimeStringError"): 1}
    assert titles(console._stream.getvalue().splitlines()) == [title.format(1), title.format(2)]


class LogsAtTheEndOfEpochs(Callback):
    def epoch_end(self, state, logger):
        logger.log_metrics({"epoch/loss": 0.125})


def test_an_interval_keeps_the_last_value_of_each_metric():
    """Metrics survive the end of an epoch and an evaluation; an interval without metrics prints nothing."""
    console = silent(log_interval="3ba")
    run = DryRun(
        console,
        max_duration="4ba",
        seconds_per_batch=0.0,
        batches_per_epoch=2,
        callbacks=[LogsAtTheEndOfEpochs()],
        train_metrics=lambda state: {
            "loss": int(state.timestamp.batch),
            f"at/{state.timestamp.batch.value}": 1,
        },
    )
    run.init()
    run.fit(eval_every=2)
    empty = silent()

    assert console._stream.getvalue().splitlines() == [
        *("Batch 1/4", "  loss  0", "  at/0  1"),
        *("Eval, after batch 2", "  metrics/eval/accuracy  0.5"),
        *(
            "Batch 3/4",
            "  loss            2",
            "  at/1            1",
            "  epoch/loss  0.125",
            "  at/2            1",
        ),
        *("Eval, after batch 4", "  metrics/eval/accuracy  0.5"),
        *("Batch 4/4", "  loss            3", "  at/3            1", "  epoch/loss  0.125"),
    ]
    assert printed(DryRun(empty, max_duration="3ba", train_metrics=lambda _: {}), empty) == []


class LogsOneTable(Callback):
    def after_train_batch(self, state, logger):
        if int(state.timestamp.batch) == 0:
            rows = [[12, "cat|dog"], [1000, None], [0.1 + 0.2, "a\nb"]]
            logger.log_table(["image", "guess"], rows, "wrong")


def test_tables_texts_and_traces_are_printed_once():
    """A table is aligned, and cut after `table_rows`; traces are printed on request."""
    console, plain = silent(table_rows=2, log_traces=True), silent()
    run = DryRun(console, plain, max_duration="2ba", callbacks=[LogsOneTable()])
    run.init()
    run.logger.log_text("one\ntwo\x1b[31m", "note")
    run.logger.log_traces({"grad": 0.5})
    run.fit()
    run.close()

    lines = console._stream.getvalue().splitlines()
    assert [line for line in lines if "loss" not in line and not line.startswith("Batch")] == [
        *("Text note at step 0:", "  one", "  two\\x1b[31m", "Trace grad: 0.5", "Table wrong at step 0"),
        *(
            "  | image | guess    |",
            "  | ----- | -------- |",
            "  | 12    | cat\\|dog |",
            "  | 1000  | None     |",
        ),
        "  (1 more rows)",
    ]
    assert "  | 0.3000 | a\\nb     |\n" in plain._stream.getvalue()
    assert "Trace" not in plain._stream.getvalue()


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
    console = silent(log_interval="100ba")
    run = DryRun(console, max_duration="9ba", seconds_per_batch=0.0)
    run.init()
    run.fire("fit_start")
    run.train_batch()
    run.train_batch()

    run.close(RuntimeError("the user's own"))

    assert titles(console._stream.getvalue().splitlines()) == ["Batch 1/9", "Batch 2/9"]


def test_stderr_is_looked_up_when_printing(capsys):
    """Without a stream argument, the lines go to sys.stderr even if it's redirected after the import."""
    run = DryRun(Console(), max_duration="1ba", seconds_per_batch=0.0)
    run.init()

    run.fit()

    assert capsys.readouterr().err == "Batch 1/1\n  loss/train  1.0\n"


def test_an_ascii_stream_gets_escapes():
    """A Greek name doesn't raise on a machine without UTF-8."""
    raw = io.BytesIO()
    console = Console(stream=io.TextIOWrapper(raw, "ascii"))
    run = DryRun(console, max_duration="1ba", train_metrics=lambda _: {"λ": 1.0}, seconds_per_batch=0.0)
    run.init()

    run.fit()

    assert raw.getvalue() == b"Batch 1/1\n  \\u03bb  1.0\n"


@pytest.mark.parametrize(("count", "lines"), [(3, 3), (4, 4), (5, 3), (12, 6), (40, 7)])
def test_many_metrics_are_in_two_columns(count, lines):
    """Four metrics are in one column, more are in two; beyond a dozen they are counted."""
    console = silent()
    values = {f"layer{number}/norm": number / 7 for number in range(count)}
    run = DryRun(console, max_duration="1ep", batches_per_epoch=1, train_metrics=lambda _: values)

    shown = printed(run, console)[1:]

    assert len(shown) == lines
    assert max(map(len, shown)) <= 80
    assert (shown[-1] == "  and 28 more") == (count == 40)


def test_patterns_choose_metrics():
    """They can also choose metrics that are left out by default."""
    console = silent(metrics=["time/*"])
    values = {"loss": 1.0, "time/epoch": 2}
    run = DryRun(console, max_duration="1ep", batches_per_epoch=1, train_metrics=lambda _: values)

    assert printed(run, console)[1:] == ["  time/epoch  2"]


def test_hyperparameters_are_a_few_lines():
    """The user's come first, without flags that are off: at most a dozen, within 80 columns."""
    console = silent()
    run = DryRun(console, train_metrics=lambda _: {})
    run.init()
    flags = {f"flag{number}": False for number in range(20)}
    options = {f"option{number}": number for number in range(20)}
    run.logger.log_hyperparameters({"trainer": {"AdamW": {"lr": 0.1, **flags, **options}}, "depth": 3})

    run.fit()

    lines = console._stream.getvalue().splitlines()
    assert lines[0] == "Hyperparameters"
    assert lines[1].startswith("  depth=3, trainer.AdamW.lr=0.1,")
    assert lines[-1].endswith("and 10 more")
    assert max(map(len, lines)) <= 80
    assert "flag" not in "".join(lines)


def test_a_terminal_escape_in_a_name_is_shown_escaped():
    """Names, hyperparameters and cells can't move the cursor."""
    console = Console(stream=io.StringIO())
    evil = "a\x1b[2J\r\nb"
    run = DryRun(console, run_name="evil\x1b[2J", max_duration="1ep", train_metrics=lambda _: {evil: 1.0})
    run.init()
    run.logger.log_hyperparameters({evil: evil})
    run.logger.log_table([evil], [[evil]], evil)

    run.fit()
    run.close()

    assert "\x1b" not in console._stream.getvalue()
    assert "\r" not in console._stream.getvalue()


PRELUDE = """
import os, sys
from destinations import Console
from destinations.testing import DryRun
from tqdm import tqdm
"""


def test_titles_are_bold_on_a_terminal_without_no_color(monkeypatch):
    """A terminal has styles unless NO_COLOR is set; a file has none."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def first_line(stream):
        console = Console(stream=stream, summary=False)
        return printed(DryRun(console, max_duration="1ep", seconds_per_batch=0), console)[0]

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert first_line(Terminal()) == "\x1b[1mEpoch 1/1\x1b[0m"
    assert first_line(io.StringIO()) == "Epoch 1/1"
    monkeypatch.setenv("NO_COLOR", "1")
    assert first_line(Terminal()) == "Epoch 1/1"


def test_another_tqdm_bar_stays_below_the_blocks(terminal):
    """With a loop over `tqdm(loader)` and a Console on one terminal, blocks are whole and the bar is last."""
    screen = terminal(
        PRELUDE
        + """
run = DryRun(Console("1ba", summary=False), max_duration="2ba", batches_per_epoch=9)
run.init()
run.fire("fit_start")
for _ in tqdm(range(2), desc="mine", mininterval=0):
    run.train_batch()
run.close()
"""
    )

    assert screen[:4] == ["Batch 1/2, 0:01", "  loss/train  1.0", "Batch 2/2, 0:02", "  loss/train  0.5"]
    assert screen[4].startswith("mine: 100%|")
    assert screen[5:] == [""]


# The summary.


def test_the_summary_shows_how_the_run_went(tmp_path, monkeypatch):
    """It has the status, best and last values, folder, store, and a working command."""
    monkeypatch.chdir(tmp_path)
    console = Console(stream=io.StringIO())
    values = iter([0.5, 0.9, 0.8])
    (tmp_path / "weights.pt").write_bytes(b"1234567")
    run = DryRun(
        Artifacts("store", close_seconds=20),
        console,
        RunDirectory("runs/{run_name}"),
        run_name="digits",
        max_duration="3ep",
        batches_per_epoch=2,
        eval_metrics=lambda _: {"accuracy": next(values)},
    )
    run.init()
    run.fit(eval_every=2)
    run.logger.upload_file("weights.pt", tmp_path / "weights.pt")
    run.close()

    lines = console._stream.getvalue().splitlines()[-6:]
    assert lines == [
        "digits completed: 3 epochs, 6 batches, 0:06",
        "  accuracy  best 0.9 at step 4, last 0.8",
        f"  Artifacts     file://{tmp_path}/store: 1 file",
        "  RunDirectory  runs/digits",
        "Look at it: destinations runs show runs/digits",
        "In a browser: destinations view runs",
    ]
    assert main(lines[-2].split()[4:]) == 0


def test_the_summary_of_a_resumed_run_covers_all_its_sessions(tmp_path):
    """The best value came before the resume, and the smallest loss after it."""
    console = Console(stream=io.StringIO())
    for begin, values in ((0, [0.9, 0.5]), (2, [0.4, 0.6])):
        folder = RunDirectory(tmp_path / "run", if_exists="resume")
        with Run(loggers=[console, folder], run_name="run") as run:
            run.fit_start(batch=begin)
            for value in values:
                run.batch_start()
                run.log_metrics({"acc": value, "loss": value})
                run.batch_end()

    lines = console._stream.getvalue().splitlines()
    assert [line for line in lines if "best" in line] == [
        "  acc   best 0.9 at step 0, last 0.5",
        "  loss  best 0.5 at step 1, last 0.5",
        "  acc   best 0.9 at step 0, last 0.6",
        "  loss  best 0.4 at step 2, last 0.6",
    ]


def test_a_failed_run_shows_why():
    """One line has the status and the exception."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, max_duration="3ep")
    run.init()
    run.train_batch()

    run.close(RuntimeError("CUDA error:\nout of memory"))

    assert "dry-run failed: 1 batch, 0:01; RuntimeError: CUDA error:\\nout of memory" in (
        console._stream.getvalue().splitlines()
    )


def test_a_stopped_run_has_a_stop_reason():
    """The first line has the reason given to `stop_training`."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, max_duration="3ep")
    run.init()
    run.train_batch()
    run.state.stop_training("loss is NaN")

    run.close()

    lines = console._stream.getvalue().splitlines()
    assert any(re.fullmatch(r"dry-run \w+: 1 batch, 0:01; loss is NaN", line) for line in lines)


class Broken(Console):
    def log_metrics(self, metrics, step=None):
        raise OSError("no")


def test_a_failed_destination_is_named():
    """The summary repeats errors that were logged earlier."""
    console = Console(stream=io.StringIO())
    run = DryRun(console, Broken(summary=False), max_duration="2ba", raise_errors=False)

    lines = printed(run, console)

    assert "  Broken.log_metrics raised OSError 2 times" in lines


def test_files_that_did_not_arrive_are_counted(tmp_path):
    """If the store is down at the end, the summary has the number of waiting files and how to finish."""
    console = Console(stream=io.StringIO())
    (tmp_path / "store").write_text("a file where the folder of the store's should be")
    (tmp_path / "a.pt").write_bytes(b"a")
    queue = {"spool": tmp_path / "spool", "isolation": "threads"}
    run = DryRun(
        Artifacts(tmp_path / "store" / "inner", close_seconds=0.1, **queue), console, max_duration="1ba"
    )
    run.init()
    run.fit()
    run.logger.upload_file("a.pt", tmp_path / "a.pt")

    run.close()

    place = next(line for line in console._stream.getvalue().splitlines() if "Artifacts" in line)
    assert re.search(r"1 file, 1 (failed|not uploaded yet; finish with: destinations uploads resume )", place)


def test_only_one_destination_prints_the_summary():
    """A Console prints it, otherwise a ProgressBar; rank 1 and an empty run print none."""

    def count(*destinations, rank=0, fits=True):
        run = DryRun(*destinations, rank=rank, max_duration="1ba")
        run.init()
        if fits:
            run.fit()
        run.close()
        return [one._stream.getvalue().count("dry-run completed") for one in destinations]

    bar, console = ProgressBar(io.StringIO()), Console(stream=io.StringIO())
    assert count(bar, console) == [0, 1]
    assert count(ProgressBar(io.StringIO())) == [1]
    assert count(ProgressBar(io.StringIO()), Console(stream=io.StringIO(), style="composer")) == [1, 0]
    assert count(ProgressBar(io.StringIO()), rank=1) == [0]
    assert count(Console(stream=io.StringIO()), fits=False) == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_metrics": 0}, "max_metrics must be at least 1"),
        ({"style": "fancy"}, "style must be 'blocks' or 'composer', got 'fancy'"),
        ({"log_interval": "0ba"}, "interval must be positive"),
        ({"table_rows": -1}, "table_rows must be at least 0"),
    ],
)
def test_bad_arguments(arguments, message):
    """Each raises at once."""
    with pytest.raises(ValueError, match=message):
        Console(**arguments)


def test_one_pattern_is_not_a_list():
    """A string would be read letter by letter."""
    with pytest.raises(TypeError, match=r"Write \['loss'\]"):
        Console(metrics="loss")


def test_a_destination_whose_place_raises_loses_only_its_line():
    """An exception in `place` doesn't fail the console."""

    class Lost(Console):
        def place(self):
            raise OSError("nowhere")

    console = Console(stream=io.StringIO())
    run = DryRun(console, Lost(stream=io.StringIO(), summary=False), max_duration="1ba")

    lines = printed(run, console)

    assert lines[-1].startswith("  loss/train  best 1.0")


@pytest.mark.parametrize(
    ("losses", "line"),
    [
        ([math.nan, 2.0, math.nan], "  loss  best 2.0 at step 1, last nan"),
        ([math.nan, math.nan, math.nan], "  loss  last nan"),
    ],
)
def test_nan_is_never_the_best(losses, line):
    """A loss with some numbers has the best of them; a loss that is always NaN has none."""
    console = Console(stream=io.StringIO())
    run = DryRun(
        console,
        max_duration="3ba",
        train_metrics=lambda state: {"loss": losses[int(state.timestamp.batch)]},
    )

    run.init()
    run.fit()
    run.close()

    assert line in console._stream.getvalue().splitlines()


def test_a_loss_among_many_metrics_is_in_the_summary():
    """It may come after hundreds of norms, and the number of names kept is bounded."""
    console = Console(stream=io.StringIO())

    def values(state):
        step = int(state.timestamp.batch)
        return {f"norm/{step}/{number}": 1.0 for number in range(2000)} | {"loss": 1 / (1 + step)}

    run = DryRun(console, max_duration="10ba", train_metrics=values)
    run.init()
    run.fit()
    kept = len(console._summary._seen)
    run.close()

    assert "  loss  best 0.1 at step 9, last 0.1" in console._stream.getvalue().splitlines()
    assert kept <= 12_001
