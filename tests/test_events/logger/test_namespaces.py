"""Names before names."""

import asyncio
import contextlib
import pickle
import threading

import pytest
import torch

from destinations import InMemory
from events import Logger, RecordError, Run, State, WriteRate


def _names(memory):
    return [record.name or list(record.value) for record in memory.records]


def test_namespaces_are_nested_and_end():
    """Names are joined with a slash, and later names have no prefix; also after a block that raised."""
    memory = InMemory()
    logger = Logger(State("r"), memory, raise_errors=True)

    with logger.namespace("eval"):
        logger.log_metrics({"loss": 1})
        with contextlib.suppress(KeyError), logger.namespace("clean"):
            logger.log_scalar("loss", torch.tensor(1))
            raise KeyError
        logger.log_metrics({"a": {"b": 1}})
    logger.log_metrics({"loss": 1})

    assert _names(memory) == [["eval/loss"], ["eval/clean/loss"], ["eval/a/b"], ["loss"]]


def test_a_logger_has_a_name_of_its_own():
    """It precedes the namespaces."""
    memory = InMemory()
    logger = Logger(State("r"), memory, raise_errors=True, namespace="agent0")

    logger.log_metrics({"loss": lambda: 1.0})
    with logger.namespace("train"):
        logger.log_metrics({"loss": 1})

    assert _names(memory) == [["agent0/loss"], ["agent0/train/loss"]]


def test_every_record_with_a_name_is_in_the_namespace():
    """Hyperparameters keep theirs."""
    memory = InMemory()
    logger = Logger(State("r"), memory, raise_errors=True)

    with logger.namespace("x"):
        logger.log_table(["a"], [[1]])
        logger.log_images(torch.zeros(3, 2, 2))
        logger.log_text("t")
        logger.log_audio(torch.zeros(5), 8000)
        logger.log_video(torch.zeros(2, 3, 4, 5), 30)
        logger.log_histogram(torch.zeros(5))
        logger.log_point_cloud(torch.zeros(5, 3))
        logger.log_traces({"t": 1})
        logger.log_hyperparameters({"lr": 1})

    names = ["Table", "Images", "Text", "Audio", "Video", "Histogram", "Points"]
    assert _names(memory) == [*(f"x/{name}" for name in names), ["x/t"], ["lr"]]


def test_a_rate_sees_full_names():
    """The same name in two namespaces is two metrics."""
    memory = InMemory(write_rate=WriteRate(every_steps=100))
    logger = Logger(State("r"), memory, raise_errors=True)
    logger.log_metrics({"first": 1}, -1)

    for name in ("a", "b"):
        with logger.namespace(name):
            logger.log_metrics({"loss": 1})
    logger.flush()

    assert _names(memory)[1:] == [["a/loss"], ["b/loss"]]


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_namespace_without_a_name_is_refused(name):
    """Nothing is renamed."""
    logger = Logger(State("r"))

    with pytest.raises(RecordError, match="namespace must be a name, got"), logger.namespace(name):
        pass


def test_a_namespace_is_of_its_task_and_its_thread():
    """Tasks and threads that take turns log under their own names, and the code around them under none."""
    memory = InMemory()
    logger = Logger(State("r"), memory, raise_errors=True, namespace="run")

    async def evaluate(index):
        with logger.namespace(f"task{index}"):
            await asyncio.sleep(0)
            logger.log_metrics({"accuracy": index})
            await asyncio.create_task(inner())
        logger.log_metrics({"after": index})

    async def inner():
        with logger.namespace("inner"):
            logger.log_table(["a"], [[1]])

    async def main():
        await asyncio.gather(evaluate(0), evaluate(1))

    asyncio.run(main())
    with logger.namespace("outer"):
        thread = threading.Thread(target=logger.log_metrics, args=({"loss": 1},))
        thread.start()
        thread.join()
    logger.log_metrics({"loss": 1})

    names = [
        ["run/task0/accuracy"],
        ["run/task1/accuracy"],
        "run/task0/inner/Table",
        "run/task1/inner/Table",
        ["run/after"],
        ["run/after"],
        ["run/loss"],
        ["run/loss"],
    ]
    assert sorted(map(str, _names(memory))) == sorted(map(str, names))


@pytest.mark.parametrize("what", ["a Run", "its logger"])
def test_pickling_a_run_raises_with_advice(what):
    """A dataset that holds one is pickled where workers are spawned."""
    run = Run(loggers=InMemory(), run_name="mine")
    with run, pytest.raises(TypeError, match="Run 'mine' cannot") as raised:
        pickle.dumps(run if what == "a Run" else run.logger)

    assert "cannot be sent to another process" in str(raised.value)
    assert "Return values from the worker, and log them here" in str(raised.value)
