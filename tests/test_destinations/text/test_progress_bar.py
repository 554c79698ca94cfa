"""What ProgressBar shows, as lines, on a terminal and in a notebook."""

import functools
import io
import re
import sys
import types

import pytest

import destinations
from destinations.testing import DryRun

ProgressBar = functools.partial(destinations.ProgressBar, summary=False)


class Clock:
    """A clock that tests advance."""

    now = 0.0

    def __call__(self):
        return self.now


class OnlyWrites:
    """A stream without fileno, isatty, flush or encoding."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def final_lines(*, rank=0, eval_every=None, **options):
    """Plays a run and returns the last line of each bar."""
    bar_options = {key: options.pop(key) for key in ("metrics", "whole_run") if key in options}
    bar = ProgressBar(stream=io.StringIO(), line_seconds=1e9, clock=Clock(), **bar_options)
    run = DryRun(bar, rank=rank, **options)
    run.init()
    run.fit(eval_every)
    run.close()
    return [line.split("[")[0].rstrip() for line in bar._stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_duration": "2ep"}, ["Epoch 1/2: 100% 3/3", "Epoch 2/2: 100% 3/3"]),
        ({"max_duration": "5ba"}, ["Train: 100% 5/5"]),
        ({"max_duration": "20sp"}, ["Train: 100% 20.0/20.0"]),
        ({"max_duration": "18sp"}, ["Train: 100% 20.0/20.0"]),
        ({"max_duration": "4sec"}, ["Train: 100% 4/4"]),
        ({"max_duration": "4sec", "seconds_per_batch": 1.23456}, ["Train: 100% 4.9/4.9"]),
        ({"max_duration": "2ep", "whole_run": True}, ["Train: 100% 6/6"]),
        ({"max_duration": "2ep", "rank": 1}, []),
    ],
)
def test_the_bars_of_a_run(options, expected):
    """A run measured in epochs has a bar for each epoch; another has one in its own unit.

    Rank 1 has none.
    """
    assert final_lines(**options) == expected


def test_totals_are_known_from_the_second_epoch_on():
    """If the dataloader has no length, the batches of the first epoch are counted."""
    lines = final_lines(max_duration="3ep", knows_length=False)

    assert lines == ["Epoch 1/3: 3 batch", "Epoch 2/3: 100% 3/3", "Epoch 3/3: 100% 3/3"]


def test_an_endless_run_counts_batches():
    """Without max_duration the bar has no total, even if the loop fires only batch events."""
    bar = ProgressBar(stream=io.StringIO(), line_seconds=1e9, clock=Clock())
    run = DryRun(bar, max_duration=None, knows_length=False)
    run.init()

    run.train_batch()
    run.train_batch()
    run.close()

    assert bar._stream.getvalue().startswith("Train: 2 batch [")


def test_evaluation_and_prediction_have_bars():
    """Each evaluation, named by its label, and each prediction has its own bar and metrics."""
    bar = ProgressBar(stream=io.StringIO(), line_seconds=1e9, clock=Clock())
    run = DryRun(bar, max_duration="2ba", batches_per_epoch=9)
    run.init()

    run.fit(eval_every=1)
    run.evaluate_standalone(batches=4, label="val")
    run.predict(batches=5)
    run.close()

    zero = "[00:00<?, ? batch/s"
    assert bar._stream.getvalue().splitlines() == [
        f"Eval: 100% 2/2 {zero}, metrics/eval/accuracy=0.5]",
        f"Eval: 100% 2/2 {zero}, metrics/eval/accuracy=0.5]",
        f"Train: 100% 2/2 {zero}, loss/train=0.5]",
        f"Eval val: 100% 4/4 {zero}, metrics/eval/accuracy=0.5]",
        f"Predict: 100% 5/5 {zero}]",
    ]


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        (None, "loss/train=0.6931, metrics/train/f1=1e-05, val_loss=1, top1_accuracy=0.5"),
        (["lr", "loss/*"], "loss/train=0.6931, lr=1e-05"),
        ([], ""),
        (
            ["*"],
            "loss/train=0.6931, metrics/train/f1=1e-05, val_loss=1, top1_accuracy=0.5, lr=1e-05, glossy=2",
        ),
    ],
)
def test_chosen_metrics_are_shown(metrics, shown):
    """Patterns choose metrics; losses, accuracies and metrics are the default."""
    bar = ProgressBar(
        **({} if metrics is None else {"metrics": metrics}),
        stream=io.StringIO(),
        line_seconds=1e9,
        clock=Clock(),
    )
    values = {
        "loss/train": 0.6931471805599453,
        "metrics/train/f1": 1e-5,
        "val_loss": 1,
        "top1_accuracy": 0.5,
        "lr": 1e-5,
        "glossy": 2,
    }
    run = DryRun(bar, max_duration="1ba", train_metrics=lambda _: values)
    run.init()

    run.fit()

    assert bar._stream.getvalue() == f"Train: 100% 1/1 [00:00<?, ? batch/s{', ' if shown else ''}{shown}]\n"


def test_lines_come_at_intervals():
    """Without a terminal, a whole line is printed every line_seconds, and one at the end."""
    clock = Clock()
    bar = ProgressBar(stream=io.StringIO(), line_seconds=10, clock=clock)
    run = DryRun(bar, max_duration="7ba", batches_per_epoch=9)
    run.init()
    run.fire("fit_start")

    for _ in range(7):
        clock.now += 4
        run.train_batch()
    run.fire("fit_end")

    assert [line.split(",")[0] for line in bar._stream.getvalue().splitlines()] == [
        "Train:  43% 3/7 [00:12<00:16",
        "Train:  86% 6/7 [00:24<00:04",
        "Train: 100% 7/7 [00:28<00:00",
    ]
    assert bar._stream.getvalue().endswith("\n")


def test_a_bar_is_drawn_ten_times_a_second_and_not_at_each_step():
    """A second of a thousand steps draws it ten times, and once more at the end."""

    class CountsDraws:
        draws = 0

        def isatty(self):
            return True

        def write(self, text):
            self.draws += text.startswith("\r") and "Train" in text

    clock, stream = Clock(), CountsDraws()
    run = DryRun(ProgressBar(stream=stream, clock=clock), max_duration="1000ba", batches_per_epoch=1000)
    run.init()
    run.fire("fit_start")
    at_start = stream.draws

    for _ in range(1000):
        clock.now += 1 / 1000
        run.train_batch()
    during = stream.draws - at_start
    run.fire("fit_end")

    assert at_start == 1
    assert during in {9, 10}


def test_a_stream_needs_only_write():
    """It needs neither fileno nor isatty, flush or encoding."""
    stream = OnlyWrites()
    run = DryRun(ProgressBar(stream=stream, line_seconds=1e9, clock=Clock()), max_duration="1ba")
    run.init()

    run.fit()

    assert stream.text == "Train: 100% 1/1 [00:00<?, ? batch/s, loss/train=1.0]\n"


def test_a_resumed_run_shows_its_position():
    """A run that continues at batch 4 of epoch 2 starts its bar there.

    Counted lengths are kept too.
    """
    first = ProgressBar(stream=io.StringIO(), line_seconds=1e9, clock=Clock())
    run = DryRun(first, max_duration="1ep", batches_per_epoch=6, knows_length=False)
    run.init()
    run.fit(eval_every=6)
    saved = first.state_dict()
    bar = ProgressBar(stream=io.StringIO(), line_seconds=0, clock=Clock())
    resumed = DryRun(bar, max_duration="2ep", batches_per_epoch=6, knows_length=False)

    resumed.fire("init", "before_load")
    resumed.state.timestamp = resumed.state.timestamp.copy(epoch=1, batch=10, batch_in_epoch=4)
    bar.load_state_dict(saved)
    resumed.fire("after_load")
    resumed.fit()
    resumed.evaluate()
    resumed.close()

    assert saved == {"lengths": {"train": 6, "eval/eval": 2}}
    assert [line.split(" [")[0] for line in bar._stream.getvalue().splitlines()] == [
        "Epoch 2/2:  83% 5/6",
        "Epoch 2/2: 100% 6/6",
        "Eval:  50% 1/2",
        "Eval: 100% 2/2",
        "Eval: 100% 2/2",
    ]


def test_an_interrupted_run_leaves_its_bar():
    """An exception inside an evaluation closes both bars at their positions, and restores the streams."""
    before = sys.stdout, sys.stderr
    bar = ProgressBar(stream=io.StringIO(), line_seconds=1e9, clock=Clock())
    run = DryRun(bar, max_duration="9ba")
    run.init()
    run.fire("fit_start")
    run.train_batch()
    run.state.dataloader_label, run.state.dataloader_len = "val", 4
    run.fire("eval_start")

    run.close(RuntimeError("the user's own"))

    assert [line.split(" [")[0] for line in bar._stream.getvalue().splitlines()] == [
        "Eval val:   0% 0/4",
        "Train:  11% 1/9",
    ]
    assert (sys.stdout, sys.stderr) == before


PRELUDE = """
import functools, logging, os, sys
import destinations
from destinations import Console, TextFile
from destinations.testing import DryRun
from events import Callback
ProgressBar = functools.partial(destinations.ProgressBar, summary=False)
"""


def without_numbers(screen):
    """Returns the screen without speeds and bars."""
    return [re.sub(r"\|.*?\| (\d+/\d+) \[.*", r"\1", line) for line in screen]


def test_printing_on_a_terminal_leaves_whole_lines(terminal):
    """Output of user code is above the bars, on its own lines and in order; the bars stay bars."""
    screen = terminal(
        PRELUDE
        + """
class Prints(Callback):
    def batch_end(self, state, logger):
        print("to stdout", int(state.timestamp.batch))
        print("to stderr", int(state.timestamp.batch), file=sys.stderr)
    def eval_batch_end(self, state, logger):
        print("in", end=" ")
        print("eval")
before = sys.stdout, sys.stderr
run = DryRun(ProgressBar(refresh_seconds=0), max_duration="2ep", batches_per_epoch=2, callbacks=[Prints()])
run.init()
run.fit(eval_every=3)
run.predict()
run.close()
assert (sys.stdout, sys.stderr) == before and sys.stdout is before[0] and sys.stderr is before[1]
print("the end")
"""
    )

    assert without_numbers(screen) == [
        "to stdout 1",
        "to stderr 1",
        "to stdout 2",
        "to stderr 2",
        "Epoch 1/2: 100%2/2",
        "to stdout 3",
        "to stderr 3",
        "in eval",
        "in eval",
        "Eval: 100%2/2",
        "to stdout 4",
        "to stderr 4",
        "Epoch 2/2: 100%2/2",
        "Predict: 100%2/2",
        "the end",
        "",
    ]


def test_a_short_bar_leaves_nothing_of_a_long_one(terminal):
    """An evaluation during an epoch ends on its own line with nothing after it, and so do both bars."""
    screen = terminal(
        PRELUDE
        + """
run = DryRun(ProgressBar(["*"], refresh_seconds=0, clock=lambda: 0.0), max_duration="1ep", batches_per_epoch=4, knows_length=False,
             train_metrics=lambda _: {"a/long/name/of/a/loss": 1.0}, eval_metrics=lambda _: {})
run.init()
run.fit(eval_every=3)
run.close()
"""
    )

    assert [re.sub(r"\[.*?, .*?/s", "[", line) for line in screen] == [
        "Eval: 2 batch []",
        "Epoch 1/1: 4 batch [, a/long/name/of/a/loss=1.0]",
        "",
    ]


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_terminal_without_rows_has_a_bar(terminal, rows):
    """A container may have a terminal without a size."""
    screen = terminal(
        PRELUDE
        + """
run = DryRun(ProgressBar(), max_duration="1ep", batches_per_epoch=3)
run.init()
run.fit()
run.close()
""",
        rows,
    )

    assert screen[-2].startswith("Epoch 1/1: 100%|")


def test_user_logging_and_tqdm_on_a_terminal(terminal):
    """Handlers made before the run, `tqdm.write` and a user's bar coexist with the bars."""
    screen = terminal(
        PRELUDE
        + """
from tqdm import tqdm
logging.basicConfig(format="%(message)s")
handler = logging.getLogger().handlers[0]
class Writes(Callback):
    def batch_end(self, state, logger):
        logging.warning("warning %d", int(state.timestamp.batch))
        tqdm.write("tqdm.write")
        for _ in tqdm(range(2), desc="mine", leave=False, mininterval=0):
            print("inside mine")
run = DryRun(ProgressBar(refresh_seconds=0), max_duration="2ba", callbacks=[Writes()])
run.init()
run.fit()
run.close()
assert handler.stream is sys.stderr
logging.warning("the end")
"""
    )

    once = ["tqdm.write", "inside mine", "inside mine"]
    assert without_numbers(screen) == [
        "warning 1",
        *once,
        "warning 2",
        *once,
        "Train: 100%2/2",
        "the end",
        "",
    ]


def test_all_destinations_on_one_terminal(terminal, tmp_path):
    """Console's blocks and the bar share a terminal.

    A TextFile with capture has the lines and the bar's last state.
    """
    path = tmp_path / "log.txt"
    screen = terminal(
        PRELUDE
        + f"""
class Prints(Callback):
    def batch_end(self, state, logger):
        print("printed")
os.chdir({str(tmp_path)!r})
run = DryRun(TextFile("log.txt", capture_stdout=True, capture_stderr=True), Console("1ba", stream=sys.stderr),
             ProgressBar(refresh_seconds=0), max_duration="2ba", callbacks=[Prints()])
run.init()
run.fit()
run.close()
"""
    )

    assert without_numbers(screen) == [
        "printed",
        "Batch 1/2, 0:01",
        "  loss/train  1.0",
        "printed",
        "Batch 2/2, 0:02",
        "  loss/train  0.5",
        "Train: 100%2/2",
        "dry-run completed: 2 batches, 0:02",
        "  loss/train  best 0.5 at step 1, last 0.5",
        "  TextFile  log.txt",
        "",
    ]
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("[stdout]")] == ["[stdout]: printed"] * 2
    assert [line for line in lines if line.startswith("[stderr]:   loss")] == [
        "[stderr]:   loss/train  1.0",
        "[stderr]:   loss/train  0.5",
    ]
    assert lines[-1].startswith("[stderr]: Train: 100%")


def test_in_a_notebook_the_bar_is_a_widget(monkeypatch, capsys):
    """With a kernel and ipywidgets the bar is tqdm's widget, and prints stay whole."""
    ipython = pytest.importorskip("IPython")
    pytest.importorskip("ipywidgets")
    monkeypatch.setattr(ipython, "get_ipython", lambda: types.SimpleNamespace(config={"IPKernelApp": {}}))
    before = sys.stdout
    bar = ProgressBar(refresh_seconds=0)
    run = DryRun(bar, max_duration="2ba")
    run.init()
    run.fire("fit_start")

    run.train_batch()
    label, widget, text = bar._train._tqdm.container.children
    shown = (label.value, widget.value, widget.max, text.value.split("[")[0].strip())
    is_untouched = sys.stdout is before
    run.close()

    assert shown == ("Train:\u2007\u200750%", 1, 2, "1/2")
    assert is_untouched


def test_bad_arguments():
    """A string in place of a list, and negative times, raise at once."""
    with pytest.raises(TypeError, match=r"metrics must be a list of patterns, got 'loss'. Write \['loss'\]"):
        ProgressBar("loss")
    with pytest.raises(ValueError, match="must not be negative"):
        ProgressBar(refresh_seconds=-1)


def test_a_pipe_has_a_line_for_each_tenth():
    """A bar of known length prints ten lines; one of unknown length prints none without seconds."""
    clock = Clock()
    bar = ProgressBar(stream=io.StringIO(), line_seconds=10, clock=clock)
    run = DryRun(bar, max_duration="200ba", batches_per_epoch=200)
    run.init()
    run.fire("fit_start")

    for _ in range(200):
        clock.now += 3600
        run.train_batch()
    run.fire("fit_end")

    counts = re.findall(r" (\d+)/200 ", bar._stream.getvalue())
    assert counts == ["20", "40", "60", "80", "100", "120", "140", "160", "180", "200", "200"] or counts == [
        str(count) for count in range(20, 201, 20)
    ]


def test_handlers_of_any_logger_and_user_bars_around_the_run(terminal):
    """One handler was made before the run, another belongs to the user's logger, and tqdm draws a bar too."""
    screen = terminal(
        PRELUDE
        + """
from tqdm import tqdm
log = logging.getLogger("mine.below")
log.addHandler(logging.StreamHandler(sys.stderr))
log.propagate = False
run = DryRun(ProgressBar(refresh_seconds=0), max_duration="2ba", batches_per_epoch=9)
run.init()
run.fire("fit_start")
for number in tqdm(range(2), desc="mine", mininterval=0):
    log.warning("warning %d", number)
    run.train_batch()
run.fire("fit_end")
run.close()
assert log.handlers[0].stream is sys.stderr
"""
    )

    shown = without_numbers(screen)
    assert shown[:2] == ["warning 0", "warning 1"]
    assert sorted(shown[2:]) == ["", "Train: 100%2/2", "mine: 100%2/2"]


@pytest.mark.parametrize("make", [ProgressBar, functools.partial(destinations.Console, summary=False)])
def test_text_in_a_notebook_is_not_error_output(make, monkeypatch, capsys):
    """Without widgets, lines go to the cell's standard output: notebooks show stderr in red."""
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    run = DryRun(make(), max_duration="1ep")
    run.init()

    run.fit()
    run.close()

    said = capsys.readouterr()
    assert "Epoch 1/1" in said.out
    assert said.err == ""


def test_metrics_leave_room_for_the_bar(terminal):
    """With many long metric names, the bar is still visible and values are whole."""
    screen = terminal(
        PRELUDE
        + """
values = {f"metrics/of/layer{number}/accuracy": 1 / (3 + number) for number in range(9)}
run = DryRun(ProgressBar(refresh_seconds=0), max_duration="2ba", train_metrics=lambda _: values)
run.init()
run.fit()
run.close()
"""
    )

    bar, values = re.fullmatch(r"Train: 100%\|(.*)\| 2/2 \[.*/s, (.*)\]", screen[-2]).groups()
    assert len(bar) >= 4
    assert values == "metrics/…ccuracy=0.3333"
