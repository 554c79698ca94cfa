"""A value may be a function: called once for all destinations, and only where its result is written."""

import logging

import numpy as np
import pytest
import torch

from destinations import InMemory, LoggerDestination
from events import Logger, RecordError, State, WriteRate
from events.logger.faults import Faults
from tests.clock import Clock


class Counted:
    """A function that counts its calls."""

    def __init__(self, *values):
        self.values = values
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.values[min(self.calls, len(self.values)) - 1]


def _metrics(memory):
    return [(record.step, record.value) for record in memory.records if record.kind == "metrics"]


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), np.float64(0.5)])
def test_a_function_is_called_and_its_value_logged(value):
    """It may return any scalar, which keeps its place among the others."""
    memory = InMemory()

    Logger(State("r"), memory, raise_errors=True, strict=True).log_metrics(
        {"a": 1, "b": lambda: value, "c": 2}, 7
    )

    assert list(_metrics(memory)[0][1].items()) == [("a", 1), ("b", 0.5), ("c", 2)]


def test_a_function_that_returns_a_dict_is_flattened():
    """The names stand below its own."""
    memory = InMemory()

    Logger(State("r"), memory, raise_errors=True, strict=True).log_metrics(
        {"norm": lambda: {"w": torch.tensor(1.0), "b": 2}}
    )

    assert _metrics(memory) == [(0, {"norm/w": 1.0, "norm/b": 2})]


def test_a_function_that_raises_costs_its_own_value(caplog):
    """The others arrive; it is counted, and reported once."""
    memory = InMemory()
    logger = Logger(State("r"), memory, raise_errors=True)

    for step in range(3):
        logger.log_metrics({"a": 1, "bad": lambda: 1 / 0, "c": lambda: 2}, step)
    logger.report_faults()

    assert _metrics(memory) == [(step, {"a": 1, "c": 2}) for step in range(3)]
    assert logger.faults.value_counts == {("bad", "ZeroDivisionError"): 3}
    assert sum("Traceback" in message for message in caplog.messages) == 1
    assert caplog.messages[-1] == "'bad' could not be logged 3 times: ZeroDivisionError."


@pytest.mark.parametrize("returned", [torch.zeros(3), "x", None, lambda: 1.0])
def test_a_function_that_returns_no_scalar_costs_its_own_value(returned):
    """It is the same as if it had raised."""
    memory = InMemory()
    logger = Logger(State("r"), memory, raise_errors=True)

    logger.log_metrics({"a": 1, "bad": lambda: returned})

    assert _metrics(memory) == [(0, {"a": 1})]
    assert logger.faults.value_counts == {("bad", "RecordError"): 1}


def test_while_no_destination_is_due_nothing_is_called():
    """Twenty functions are logged a thousand times."""
    functions = {str(index): Counted(1.0) for index in range(20)}
    memory = InMemory(write_rate=WriteRate(every_seconds=10, clock=Clock(0.0)))
    logger = Logger(State("r"), memory, raise_errors=True, strict=True)
    logger.log_metrics({"first": 1}, 0)

    for step in range(1, 1000):
        logger.log_metrics(functions, step)

    assert [function.calls for function in functions.values()] == [0] * 20


def test_one_destination_that_is_due_is_enough_and_the_others_get_the_same_value():
    """The function was called for the fast destination; the slow one gets the same value later."""
    clock = Clock(0.0)
    function = Counted(1.0, 2.0)
    fast = InMemory()
    slow = InMemory(write_rate=WriteRate(every_seconds=10, clock=clock))
    logger = Logger(State("r"), [slow, fast], raise_errors=True, strict=True)
    logger.log_metrics({"first": 1}, 0)

    logger.log_metrics({"a": function}, 1)
    clock.now = 10
    logger.log_metrics({"b": 5}, 2)

    assert function.calls == 1
    assert _metrics(slow) == [(0, {"first": 1}), (1, {"a": 1.0}), (2, {"b": 5})]


def test_a_function_that_waited_is_called_when_it_is_written():
    """Logged once between two writes it is not lost; the last of its name is called, and has its own step."""
    clock = Clock(0.0)
    early, late = Counted(1.0), Counted(2.0)
    memory = InMemory(write_rate=WriteRate(every_seconds=10, clock=clock))
    logger = Logger(State("r"), memory, raise_errors=True, strict=True)
    logger.log_metrics({"first": 1}, 0)

    logger.log_metrics({"a": early}, 1)
    logger.log_metrics({"a": late}, 2)
    logger.flush()

    assert (early.calls, late.calls) == (0, 1)
    assert _metrics(memory)[1:] == [(2, {"a": 2.0})]


def test_a_parked_destination_calls_nothing():
    """It wouldn't write the value."""

    class Broken(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            raise OSError("disk full")

    logger = Logger(State("r"), Broken())
    logger.faults = Faults(raise_errors=False, clock=Clock(0.0))
    for _ in range(10):
        logger.log_metrics({"a": 1})
    function = Counted(1.0)

    logger.log_metrics({"a": function})

    assert function.calls == 0


IMAGE = torch.zeros(3, 2, 2)
MEDIA = [
    ("log_table", (lambda: ["a"], lambda: [[1]])),
    ("log_images", (lambda: IMAGE,)),
    ("log_text", (lambda: "x",)),
    ("log_audio", (lambda: torch.zeros(5), 8000)),
    ("log_video", (lambda: torch.zeros(2, 3, 4, 5), 30)),
    ("log_histogram", (lambda: torch.zeros(5),)),
    ("log_point_cloud", (lambda: torch.zeros(5, 3),)),
    ("log_traces", (lambda: {"a": 1},)),
    ("log_hyperparameters", (lambda: {"a": 1},)),
]


@pytest.mark.parametrize(("method", "arguments"), MEDIA)
def test_the_value_of_any_record_may_be_a_function(method, arguments):
    """It arrives as if it had been given itself."""
    lazy, plain = InMemory(), InMemory()
    logger = Logger(State("r"), lazy, raise_errors=True, strict=True)
    values = [one() if callable(one) else one for one in arguments]

    getattr(logger, method)(*arguments)
    getattr(Logger(State("r"), plain, raise_errors=True, strict=True), method)(*values)

    assert repr(lazy.records) == repr(plain.records)
    assert len(lazy.records) == 1


def test_a_function_is_not_called_where_no_destination_takes_that_kind():
    """A destination for metrics draws no picture."""

    class TakesMetrics(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            pass

    function = Counted(IMAGE)

    Logger(State("r"), TakesMetrics()).log_images(function)

    assert function.calls == 0


def test_a_bad_function_of_a_record_costs_only_that_record(caplog):
    """The run continues; it is counted, and reported once per kind."""
    memory = InMemory()
    logger = Logger(State("r"), memory, raise_errors=True)

    for _ in range(2):
        logger.log_images(lambda: 1 / 0, "picture")
        logger.log_images(lambda: torch.zeros(2, 9, 9), "picture")

    assert memory.records == []
    assert logger.faults.value_counts == {("picture", "ZeroDivisionError"): 2, ("picture", "RecordError"): 2}
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 2


@pytest.mark.parametrize("value", [torch.nn.Linear(1, 1), float, int])
def test_other_callables_are_refused(value):
    """A model or a class given by mistake is an error at the call."""
    with pytest.raises(RecordError, match="metric 'a' must be a scalar"):
        Logger(State("r"), InMemory(), strict=True).log_metrics({"a": value})


def test_a_metric_object_is_not_computed():
    """Its result may need all ranks: the message says what to log."""

    class Accuracy:
        def __call__(self):
            raise AssertionError

        def compute(self):
            raise AssertionError

    with pytest.raises(RecordError, match=r"got a Accuracy\. Log what its compute\(\) returns\."):
        Logger(State("r"), InMemory(), strict=True).log_metrics({"a": Accuracy()})


def test_ctrl_c_in_a_function_propagates():
    """It is no failure of the value."""

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Logger(State("r"), InMemory()).log_metrics({"a": interrupted})


def test_strict_raises_a_functions_error_after_logging_the_others():
    """The call raises the original error."""
    memory = InMemory()

    with pytest.raises(ZeroDivisionError):
        Logger(State("r"), memory, strict=True).log_metrics({"bad": lambda: 1 / 0, "good": 1.0})

    assert _metrics(memory) == [(0, {"good": 1.0})]
