"""Mistakes of newcomers: each error says what is wrong, where, and what to do."""

import contextlib
import io
import logging
import re

import numpy as np
import pytest
import torch

import destinations
from destinations import (
    Artifacts,
    Console,
    InMemory,
    ProgressBar,
    RunDirectory,
    TensorBoard,
    TextFile,
    cli,
    create_destination,
)
from destinations import runs as reading
from destinations.runs import open_runs
from events import Run, Timer, Trainer, WriteRate


@pytest.fixture
def said(tmp_path, monkeypatch, caplog, capsys):
    """Makes a mistake in an empty folder; returns the exceptions, logs and output that it causes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING)

    def make(mistake):
        text = ""
        try:
            mistake()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever it is
            text = f"{type(error).__name__}: {error}\n"
        return text + caplog.text + capsys.readouterr().err

    return make


def in_run(act, *loggers):
    """Returns a mistake inside a run."""

    def mistake():
        with Run(loggers=list(loggers) or [InMemory()], run_name="mine") as run:
            act(run)

    return mistake


def stored(act):
    """Returns a mistake with a run that has a loss of rank 0."""

    def mistake():
        with Run(loggers=RunDirectory("runs/first"), run_name="first") as run:
            run.log_metrics({"loss": 1.0, "val/acc": 0.5})
        act()

    return mistake


def queried(**options):
    """Returns a mistake in a query."""

    def act():
        with open_runs("runs") as runs:
            runs.query(**options)

    return stored(act)


def from_import(name):
    """Returns a mistake in an import."""
    module, _, wanted = name.partition(":")
    return lambda: exec(f"from {module} import {wanted}", {})  # noqa: S102  # what users write


def two_writers():
    """Opens a folder twice."""
    with Run(loggers=RunDirectory("runs/one"), run_name="one"), contextlib.suppress(ZeroDivisionError):
        Run(loggers=RunDirectory("runs/one"), run_name="two").__enter__()


def closed_runs():
    """Queries a closed reader."""
    with open_runs("runs") as runs:
        pass
    runs.query()


def commanded(*arguments):
    """Returns a mistake on the command line."""
    return stored(lambda: cli.main(["runs", *arguments]))


def closed_run():
    """Logs to a closed run."""
    with Run(loggers=[InMemory()], run_name="mine") as run:
        pass
    run.log_metrics({"loss": 1.0})


MASK = np.linspace(0, 1, 64).reshape(8, 8)
IMAGE = np.zeros((3, 8, 8), "uint8")

MISTAKES = {
    "folder is a number": (lambda: RunDirectory(123), "run_dir must be a path, got 123.*Write RunDirectory"),
    "name and value": (
        in_run(lambda run: run.log_metrics("loss", 0.5)),
        r"metrics must be a dict.*got 'loss'.*Write log_metrics\(\{\"loss\": 0.5\}\)",
    ),
    "value before name": (
        in_run(lambda run: run.log_text("a text", 7)),
        r"name must be a string, got 7 \(int\). It is logged under that text; training continues",
    ),
    "vector": (
        in_run(lambda run: run.log_metrics({"loss": torch.zeros(3)})),
        r"metric 'loss' must be a scalar, got shape \(3,\).*Log a mean",
    ),
    "text as metric": (
        in_run(lambda run: run.log_metrics({"loss": "high"})),
        "metric 'loss' must be a scalar, got the string 'high'.*Use log_text",
    ),
    "fraction of a step": (
        in_run(lambda run: run.log_metrics({"loss": 1.0}, step=1.5)),
        r"step must be a whole number, got 1.5 \(float\). It is logged at the default step; training continues",
    ),
    "number as a run's name": (lambda: Run(InMemory(), run_name=7), "must be a string, got 7.*run_name='7'"),
    "folder given as logger": (lambda: Run("runs/first"), r"for a folder, RunDirectory\('runs/first'\)"),
    "a list in a list": (lambda: Run([[Console()]]), "without the inner list"),
    "misspelt argument of the queue": (lambda: Artifacts("store", worker=4), "unexpected keyword.*'worker'"),
    "size in words": (
        lambda: Artifacts("store", spool_bytes="10GB"),
        "spool_bytes must be a number of bytes, got '10GB'",
    ),
    "number as notes": (lambda: RunDirectory("runs/x", notes=3), "notes must be a string, got 3.*notes='3'"),
    "name given as logger": (lambda: Run("mine"), "got 'mine'.*write run_name='mine'"),
    "class instead of object": (lambda: Run(loggers=[Console]), r"Write Console\(\.\.\.\)"),
    "callback class": (lambda: Run(callbacks=[Timer]), r"Write Timer\(\.\.\.\)"),
    "import Tensorboard": (from_import("destinations:Tensorboard"), "did you mean 'TensorBoard'"),
    "import Trainr": (from_import("events:Trainr"), "did you mean 'Trainer'"),
    "import UploadQueu": (from_import("uploads:UploadQueu"), "did you mean 'UploadQueue'"),
    "attribute Wandb": (lambda: destinations.Wandb, "AttributeError.*did you mean 'WandB'"),
    "name in a configuration": (
        lambda: create_destination("Tensorboard"),
        "unknown destination 'Tensorboard'; did you mean 'TensorBoard'",
    ),
    "number as rate": (
        lambda: Console(write_rate=10),
        "write_rate must be a WriteRate, got 10.*Write WriteRate",
    ),
    "text as rate": (lambda: WriteRate("10s"), "got '10s'"),
    "interval without unit": (lambda: Console("10"), "must be a number with a unit, got '10'.*Write"),
    "interval in words": (lambda: Console("10 batches"), "got '10 batches'.*\"500ba\""),
    "one pattern": (lambda: ProgressBar("loss"), r"got 'loss'.*Write \['loss'\]"),
    "one tag": (lambda: RunDirectory("runs/x", tags="a"), r"Write tags=\['a'\]"),
    "placeholder of a folder": (lambda: RunDirectory("runs/{runname}"), r"did you mean \{run_name\}"),
    "placeholder of a file": (lambda: TextFile("{run-name}/{epoc}.txt"), r"did you mean \{epoch\}"),
    "placeholder of a store": (lambda: Artifacts("s3://bucket/{runname}"), r"did you mean \{run_name\}"),
    "placeholder of TensorBoard": (lambda: TensorBoard("tb/{mine}/{ranks}"), r"did you mean \{rank\}"),
    "URI without a colon": (lambda: Artifacts("s3//bucket"), "did you mean 's3://bucket'"),
    "URI of nobody": (lambda: Artifacts("s4://bucket"), "did you mean 's3'"),
    "URI without a bucket": (lambda: Artifacts("s3://"), "needs a bucket: s3://bucket/prefix"),
    "float mask": (
        in_run(lambda run: run.log_images(IMAGE, masks={"ink": MASK}), RunDirectory("runs/first")),
        "mask 'ink' of 'Images' must hold class indices, got fractions.*mask > 0.5",
    ),
    "channels last": (
        in_run(lambda run: run.log_images(np.zeros((8, 8, 3)))),
        r"in shape \(8, 8, 3\).*channels_last=True",
    ),
    "short row": (
        in_run(lambda run: run.log_table(["a", "b"], [[1]])),
        "must have 2 values in each row, got 1 in row 0",
    ),
    "file that is not there": (
        in_run(lambda run: run.upload_file("a.pt", "a.pt"), RunDirectory("runs/first")),
        "file to upload as 'a.pt' must exist",
    ),
    "file that nothing takes": (
        in_run(lambda run: run.upload_file("a.pt", __file__)),
        r"test_messages.py:\d+: file 'a.pt' is not kept: no destination of this run takes files.*Artifacts",
    ),
    "two writers": (two_writers, "runs/one is taken: this run is written to .*one-2"),
    "after the run": (closed_run, "log_metrics was called after the run was closed.*Make a new"),
    "runs after with": (stored(closed_runs), "these runs are closed. Open them again"),
    "root that is not there": (lambda: open_runs("nowhere"), "root 'nowhere' does not exist"),
    "run that is not there": (
        stored(lambda: open_runs("runs")["fist"]),
        "no run has the id, name or path 'fist'.*Did you mean 'first'",
    ),
    "metric that is not there": (
        stored(lambda: reading.Run.open("runs/first").series("los")),
        "unknown metric 'los'; did you mean 'loss'",
    ),
    "rank that is not there": (
        stored(lambda: reading.Run.open("runs/first").series("loss", rank=3)),
        "Rank 3 has no rows here.*all_ranks=True",
    ),
    "sort by a metric": (queried(sort_by="summary.los"), "did you mean 'summary.loss'"),
    "filter by a metric": (
        queried(where="los < 1"),
        "unknown field 'los'. For a metric write summary.los",
    ),
    "one equals sign": (queried(where="summary.loss = 1"), "got =. Write =="),
    "--sort": (commanded("ls", "--sort", "summary.los"), "unknown metric.*did you mean 'summary.loss'"),
    "--where": (commanded("ls", "--where", "summary.los < 1"), "unknown metric.*did you mean 'summary.loss'"),
    "no dataloader": (
        lambda: Trainer(torch.nn.Linear(1, 1)).fit(),
        "train_dataloader must be given to train. Pass a DataLoader",
    ),
    "metric that was not kept": (
        lambda: InMemory().get_timeseries("loss"),
        "unknown metric 'loss'. Kept: none",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered(said, name):
    """The message names the value, and says what to do."""
    mistake, expected = MISTAKES[name]

    text = said(mistake)

    assert re.search(expected, text, re.DOTALL), text


def test_hasattr_and_getattr_of_modules_are_unchanged():
    """Unknown names raise AttributeError, near misses included."""
    assert not hasattr(destinations, "Tensorboard")
    assert getattr(destinations, "Consol", None) is None


def test_other_braces_in_a_folder_are_kept():
    """Only a near miss of our placeholders is an error."""
    assert RunDirectory("runs/{lr}/{run_name}").template == "runs/{lr}/{run_name}"
    assert ProgressBar(stream=io.StringIO())
