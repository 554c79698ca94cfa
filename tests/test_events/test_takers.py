"""A destination that looks at each value by itself is asked first, and spares the logger the look."""

import math

import pytest
import torch

from destinations import LoggerDestination
from events import Logger, RecordError, State, WriteRate


class Listener(LoggerDestination):
    """Keeps what `log_metrics` is called with."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((dict(metrics), step))


class Taker(Listener):
    """Takes rows of floats under names, read as it is told to."""

    def __init__(self):
        super().__init__()
        self.taken = []
        self.asked = 0
        self.error = None

    def try_log_metrics(self, metrics, step, read=None):
        self.asked += 1
        if self.error is not None:
            raise self.error
        values = [value if read is None else read(value) for value in metrics.values()]
        if {type(value) for value in values} != {float} or {type(name) for name in metrics} != {str}:
            return False
        self.taken.append((dict(zip(metrics, values, strict=True)), step))
        return True


def test_what_is_taken_comes_no_second_time():
    """Each call arrives once at the taker and once at the others, which stand before and behind it."""
    before, taker, behind = Listener(), Taker(), Listener()
    logger = Logger(State("x"), [before, taker, behind], raise_errors=True)

    logger.log_metrics({"a": 1.5}, 0)
    logger.log_metrics({"a": 2}, 1)
    logger.log_metrics({"a": 3.5})

    assert taker.taken == [({"a": 1.5}, 0), ({"a": 3.5}, 0)]
    assert taker.calls == [({"a": 2}, 1)]
    assert before.calls == behind.calls == [({"a": 1.5}, 0), ({"a": 2}, 1), ({"a": 3.5}, 0)]


def test_tensors_are_read_once_by_a_taker_that_is_alone():
    """From the second call on, a taker reads tensors itself, until something else comes."""
    taker = Taker()
    logger = Logger(State("x"), taker, raise_errors=True)

    for step in range(4):
        logger.log_metrics({"a": torch.tensor(step + 0.5)}, step)
    logger.log_metrics({"a": 9.5}, 4)
    logger.log_metrics({"a": torch.tensor(1.5), "b": 1.5}, 5)

    assert taker.calls == [({"a": 0.5}, 0), ({"a": 1.5, "b": 1.5}, 5)]
    assert taker.taken == [({"a": step + 0.5}, step) for step in (1, 2, 3)] + [({"a": 9.5}, 4)]


def test_the_others_get_numbers_where_tensors_are_logged():
    """With others beside it, tensors are read once for all."""
    taker, other = Taker(), Listener()
    logger = Logger(State("x"), [taker, other], raise_errors=True)

    for step in range(3):
        logger.log_metrics({"a": torch.tensor(step + 0.5)}, step)

    assert taker.calls == other.calls == [({"a": step + 0.5}, step) for step in range(3)]
    assert taker.taken == []
    assert taker.asked == 1


@pytest.mark.parametrize(
    "metrics",
    [
        {"a": torch.tensor([1.0, 2.0])},
        {"a": torch.tensor(1j)},
        {"a": "text"},
        {1: 1.0},
        [1.0],
        None,
        {"a": math.nan, "b": None},
    ],
)
def test_what_a_taker_cannot_take_is_refused_as_ever(metrics):
    """Whatever is no metric raises, whether or not tensors were logged before."""
    for first in ({"a": 0.5}, {"a": torch.tensor(0.5)}):
        logger = Logger(State("x"), Taker(), raise_errors=True)
        logger.log_metrics(first, 0)
        logger.log_metrics(first, 1)

        with pytest.raises(RecordError):
            logger.log_metrics(metrics, 2)


def test_a_taker_that_fails_gets_the_metrics_the_long_way():
    """What `try_log_metrics` raises reaches nobody; `log_metrics` is called, and what that raises is counted."""
    taker, other = Taker(), Listener()
    logger = Logger(State("x"), [taker, other])
    taker.error = RuntimeError("broken")

    logger.log_metrics({"a": 1.5}, 0)

    assert taker.calls == other.calls == [({"a": 1.5}, 0)]
    assert logger.faults.counts == {}


def test_a_taker_with_a_rate_or_in_a_namespace_is_not_asked():
    """Where metrics wait, or have another name, the logger looks at them itself."""
    paced, plain = Taker(), Taker()
    paced.write_rate = WriteRate(every_steps=2)
    logger = Logger(State("x"), plain, raise_errors=True)

    Logger(State("x"), paced, raise_errors=True).log_metrics({"a": 1.5}, 0)
    with logger.namespace("eval"):
        logger.log_metrics({"a": 1.5}, 0)

    assert (paced.asked, plain.asked) == (0, 0)
    assert paced.calls == [({"a": 1.5}, 0)]
    assert plain.calls == [({"eval/a": 1.5}, 0)]
