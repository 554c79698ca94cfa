"""Programs written for `ml.loggers` keep their names, argument order and clocks."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from destinations import InMemory, RunDirectory
from destinations.adapters.ml_logger import BaseLogger, BaseLoggerConfig, FromMl, MlLogger
from events import Run


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def of_kind(memory, kind):
    """Returns the names, steps and values of records of one kind."""
    return [(one.name, one.step, one.value) for one in memory.records if one.kind == kind]


def test_every_kind_of_record_has_the_names_of_ml():
    """Images may have any layout; a function may return a sound with its rate; floats beyond 1 are scaled."""
    memory = InMemory()
    with MlLogger(memory, raise_errors=True) as logger:
        logger.log_scalar("loss", torch.tensor(0.5))
        logger.log_scalar("lr", lambda: 0.1, namespace="optimizer")
        logger.log_string("note", lambda: "fine")
        logger.log_image("view", torch.full((4, 6, 3), 255.0))
        logger.log_images("views", np.zeros((4, 5, 5), np.uint8), max_images=3, sep=1)
        logger.log_labeled_image("cat", (np.zeros((3, 20, 40), np.uint8), "a cat"))
        logger.log_labeled_images("pets", (np.zeros((2, 20, 40), np.uint8), ["a", "b"]))
        logger.log_audio("tone", lambda: (np.zeros(100), 8000))
        logger.log_video("clip", torch.zeros(4, 8, 8, 3))
        logger.log_video("grey", torch.zeros(4, 8, 8), fps=5)
        logger.log_histogram("weights", torch.arange(5.0))
        logger.log_point_cloud("points", torch.zeros(2, 5000, 3))
        logger.log_config({"lr": 0.1}, {"accuracy": 0.9})
        logger.write(7)

    metrics = [(step, value) for _, step, value in of_kind(memory, "metrics")]
    assert metrics == [(0, {"accuracy": 0.9}), (7, {"value/loss": 0.5, "optimizer/lr": 0.1})]
    assert memory.hyperparameters == {"lr": 0.1}
    assert of_kind(memory, "text") == [("value/note", 7, "fine")]
    images = {name: value["images"] for name, _, value in of_kind(memory, "images")}
    assert list(images) == ["value/view", "value/views", "value/cat", "value/pets"]
    assert tuple(images["value/view"].shape) == (3, 4, 6)
    assert float(images["value/view"].max()) == 1.0
    assert images["value/cat"].shape[0] > 20
    ((name, _, sound),) = of_kind(memory, "audio")
    assert (name, sound["sample_rate"]) == ("value/tone", 8000)
    videos = {
        name: (value["fps"], tuple(value["video"].shape)) for name, _, value in of_kind(memory, "video")
    }
    assert videos == {"value/clip": (30, (4, 3, 8, 8)), "value/grey": (5, (4, 1, 8, 8))}
    ((_, _, cloud),) = of_kind(memory, "point_cloud")
    assert tuple(cloud["points"].shape) == (2, 1000, 3)


def test_each_label_has_its_own_clock_and_its_last_value_waits():
    """This includes `valid` and `test`; a function is called once, on write; `close` writes the rest."""
    memory, clock, calls = InMemory(), Clock(), []
    logger = MlLogger(memory, clock=clock, write_every_n_seconds=10, raise_errors=True)

    def log(step, phase):
        logger.log_scalar("x", lambda: calls.append(step) or float(step))
        logger.log_string("note", f"{phase} {step}")
        logger.write(SimpleNamespace(num_steps=step, phase=phase))

    for step in range(3):
        log(step, "train")
        log(step, "valid")
    log(3, "test")
    clock.now = 10.0
    log(4, "train")
    logger.close()

    rows = [(step, value["value/x"]) for _, step, value in of_kind(memory, "metrics")]
    assert rows == [(0, 0.0), (0, 0.0), (3, 3.0), (4, 4.0), (4, 2.0)]
    assert calls == [0, 0, 3, 4, 2]
    assert [value for _, _, value in of_kind(memory, "text")] == [
        "train 0",
        "valid 0",
        "test 3",
        "train 4",
        "valid 2",
    ]


class Collecting:
    """Behaves like a subclass of ml's BaseLogger: it keeps functions by phase and key until it writes."""

    def __init__(self, every=1):
        self.every = every
        self.asked = 0
        self.config = None
        self.values = {}
        self.lines = []

    def _keep(self, key, value, state, namespace):
        self.values.setdefault(state.phase, {})[f"{namespace}/{key}"] = value

    log_scalar = log_string = log_image = log_audio = log_video = log_histogram = log_point_cloud = _keep

    def log_config(self, config):
        self.config = config

    def should_write(self, state):
        self.asked += 1
        return self.asked % self.every == 0

    def write(self, state):
        kept = {name: value() for name, value in self.values.pop(state.phase, {}).items()}
        self.lines.append((state.phase, state.num_steps, kept))


def test_a_logger_of_ml_is_a_destination():
    """It gets each step once, in ml's shapes, writes when due, and writes the rest at the end."""
    logger = Collecting(every=2)
    with Run(loggers=[FromMl(logger)], raise_errors=True) as run:
        run.log_hyperparameters({"lr": 0.1})
        for loss in (3.0, 2.0, 1.0):
            run.batch_start()
            run.log_metrics({"loss/total": loss})
            run.log_metrics({"speed": 2 * loss})
            run.batch_end()
        run.eval_start("test")
        run.log_metrics({"accuracy": 0.5})
        run.eval_end()
        run.log_images(np.full((4, 6, 3), 255, np.uint8), "a/view", channels_last=True)
        run.log_audio(np.zeros((1, 8)), 8000, "sound")
        run.log_point_cloud(np.zeros((5, 3)), "points")

    assert logger.config == {"lr": 0.1}
    scalars = [
        (phase, step, {name: one for name, one in kept.items() if isinstance(one, float)})
        for phase, step, kept in logger.lines
    ]
    assert scalars == [
        ("train", 1, {"loss/total": 2.0, "value/speed": 4.0}),
        ("test", 3, {"value/accuracy": 0.5}),
        ("train", 3, {"loss/total": 1.0, "value/speed": 2.0}),
    ]
    media = logger.lines[-1][2]
    assert (tuple(media["a/view"].shape), float(media["a/view"].min())) == ((3, 4, 6), 1.0)
    assert (tuple(media["value/sound"][0].shape), media["value/sound"][1]) == ((1, 8), 8000)
    assert tuple(media["value/points"].shape) == (1, 5, 3)


def test_loggers_on_the_same_destinations_share_a_run():
    """Records of model and task are written together, also to a logger of ml; close ends the run once."""
    memory, theirs = InMemory(), Collecting()
    model, task = (
        MlLogger(memory, theirs, default_namespace=name, write_every_n_seconds=0, raise_errors=True)
        for name in ("model", "task")
    )
    for step in range(2):
        model.log_scalar("loss", float(step))
        task.log_scalar("loss", 10.0 + step)
        for logger in (model, task):
            logger.write(step)
    task.close()
    model.close()
    again = MlLogger(memory, theirs, raise_errors=True)
    again.close()

    expected = [{"model/loss": float(step), "task/loss": 10.0 + step} for step in range(2)]
    assert [(step, value) for _, step, value in of_kind(memory, "metrics")] == list(enumerate(expected))
    assert theirs.lines == [("train", step, values) for step, values in enumerate(expected)]


def test_it_has_the_calls_of_a_logger_of_ml():
    """A state determines the phase of a record, and whether it's due."""
    memory, clock = InMemory(), Clock()
    logger = MlLogger(memory, clock=clock, write_every_n_seconds=10, raise_errors=True)
    train, valid = (SimpleNamespace(num_steps=7, phase=phase) for phase in ("train", "valid"))

    logger.initialize("somewhere")
    for state in (train, valid):
        logger.log_scalar("loss", lambda: 0.5, state, "model")
        logger.log_string("note", lambda: "fine", state, "model")
    seen = [logger.should_write(train)]
    logger.write(train)
    seen += [logger.should_write(train), logger.should_write(valid)]
    logger.write(valid)
    logger.close()

    assert seen == [True, False, True]
    assert [(step, value) for _, step, value in of_kind(memory, "metrics")] == [(7, {"model/loss": 0.5})] * 2
    assert of_kind(memory, "text") == [("model/note", 7, "fine")] * 2


def test_the_interval_depends_on_the_length_of_the_run():
    """It's ten seconds for a long run and one second for a short one; other phases may have their own."""
    due = []
    for options in ({"num_steps": 5001}, {"num_steps": 5000}, {"write_val_every_n_seconds": 0}):
        clock = Clock()
        logger = MlLogger(InMemory(), clock=clock, **options)
        for phase in ("train", "valid"):
            logger.log_scalar("x", 1.0)
            logger.write(0, phase)
        clock.now = 1.0
        due.append((logger.should_write("train"), logger.should_write("valid")))
        logger.close()

    assert due == [(False, False), (True, True), (True, True)]


def test_namespaces_are_joined_as_in_ml():
    """An underscore joins them; None drops the outer ones inside its block."""
    memory = InMemory()
    with MlLogger(memory, default_namespace="model", raise_errors=True) as logger:
        with logger.namespace_context("a"):
            logger.log_scalar("x", 1)
            with logger.namespace("b"):
                logger.log_scalar("x", 2)
                logger.log_scalar("x", 3, namespace="task")
            with logger.namespace(None):
                logger.log_scalar("x", 4)
        logger.write(0)

    assert memory.records[-1].value == {"model_a/x": 1, "model_a_b/x": 2, "task_a_b/x": 3, "model/x": 4}


def test_a_program_without_close_is_completed(tmp_path, environment, sidecar):
    """Pending values are written when the interpreter exits."""
    program = """
import sys
from destinations import RunDirectory
from destinations.adapters.ml_logger import MlLogger
logger = MlLogger(RunDirectory(sys.argv[1]))
logger.log_scalar("loss", 1.0)
logger.write(0)
logger.log_scalar("loss", 2.0)
logger.write(1)
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], env=environment, timeout=300, check=True
    )

    assert sidecar(tmp_path / "run")["status"] == "completed"
    header, *rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert header == "step,epoch,time,value/loss"
    assert [line.split(",")[::3] for line in rows] == [["0", "1.0"], ["1", "2.0"]]


@dataclasses.dataclass
class LinesConfig(BaseLoggerConfig):
    """A dataclass with a field of its own, as in a program for ml."""

    precision: int = 4


class Lines(BaseLogger[LinesConfig]):
    """Written for ml: it keeps functions, and appends their results to a file in its folder."""

    def __init__(self, config):
        super().__init__(config)
        self.values = {}

    def log_scalar(self, key, value, state, namespace):
        self.values[f"{namespace}/{key}"] = value

    def write(self, state):
        with (self.log_directory / "lines.txt").open("a") as file:
            for name, value in self.values.items():
                file.write(f"{state.phase} {state.num_steps} {name} {value():.{self.config.precision}f}\n")

    def clear(self, state):
        self.values.clear()


def test_a_logger_written_for_ml_needs_only_another_import(tmp_path):
    """It has a configuration with ml's intervals, and a folder inside the run's."""
    logger = Lines(LinesConfig(name="lines", write_every_n_seconds=3600, precision=1))
    run_directory = RunDirectory(tmp_path / "run")
    with Run(loggers=[run_directory, FromMl(logger)], run_name="mine", raise_errors=True) as run:
        for loss in (3.0, 2.0):
            run.batch_start()
            run.log_metrics({"loss/total": loss})
            run.log_text("ignored, as it has no method for it")
            run.batch_end()

    assert (tmp_path / "run/logs/lines.txt").read_text() == (
        "train 0 loss/total 3.0\ntrain 1 loss/total 2.0\n"
    )
    assert logger.config.name == "lines"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"train": 1.0, "valid": 1.0}),
        ({"write_every_n_seconds": 5.0}, {"train": 5.0, "valid": 5.0}),
        ({"write_every_n_seconds": 5.0, "write_train_every_n_seconds": 2.0}, {"train": 2.0, "valid": 5.0}),
        ({"write_val_every_n_seconds": 0.0}, {"train": 1.0, "valid": 0.0, "test": 0.0}),
    ],
)
def test_the_most_specific_interval_applies(options, expected):
    """The phase's interval applies, then the one of all phases, then the default."""
    logger = Lines(LinesConfig(**options))

    found = {
        phase: logger.write_every_n_seconds(SimpleNamespace(phase=phase, num_steps=0)) for phase in expected
    }

    assert found == expected
