"""A destination that checks values while it packs them spares the logger a look at each."""

import signal
import sys

import pytest
import torch

from destinations import LoggerDestination, RunDirectory
from destinations.run_directory import read_rows
from events import Engine, Logger, State, WriteRate


class Listener(LoggerDestination):
    """Keeps what `log_metrics` is called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((dict(metrics), step))


class Packer(Listener):
    """Packs rows of floats."""

    def __init__(self):
        super().__init__()
        self.packed = []
        self.offers = 0
        self.on_offer = lambda: None

    def try_log_metrics(self, metrics, step):
        self.offers += 1
        self.on_offer()
        if {type(value) for value in metrics.values()} != {float} or {type(name) for name in metrics} != {
            str
        }:
            return False
        self.packed.append((dict(metrics), step))
        return True


def test_packed_rows_arrive_once_at_each_destination():
    """The others, before and after the packer, get each call as ever."""
    before, packer, after = Listener(), Packer(), Listener()
    logger = Logger(State("x"), [before, packer, after], raise_errors=True)

    logger.log_metrics({"a": 1.5}, 0)
    logger.log_metrics({"a": 2}, 1)
    logger.log_metrics({"a": 3.5})
    logger.log_metrics({"a": torch.tensor(4.5)}, 4)

    assert packer.packed == [({"a": 1.5}, 0), ({"a": 3.5}, 1), ({"a": 4.5}, 4)]
    assert packer.calls == [({"a": 2}, 1)]
    assert before.calls == after.calls == [({"a": 1.5}, 0), ({"a": 2}, 1), ({"a": 3.5}, 1), ({"a": 4.5}, 4)]


def test_nothing_is_offered_while_other_values_are_logged():
    """After tensors, the values are looked at first: an offer in vain would cost a microsecond each time."""
    packer = Packer()
    logger = Logger(State("x"), packer, raise_errors=True)

    for step in range(4):
        logger.log_metrics({"a": lambda: 1.5}, step)

    assert packer.offers == 1
    assert packer.calls == [({"a": 1.5}, step) for step in range(4)]


def test_a_packer_that_fails_gets_the_metrics_all_the_same():
    """What `try_log_metrics` raises loses nothing; `log_metrics` is called for all."""
    packer, other = Packer(), Listener()
    logger = Logger(State("x"), [packer, other])

    def fail():
        raise RuntimeError("broken")

    packer.on_offer = fail
    logger.log_metrics({"a": 1.5}, 0)

    assert packer.calls == other.calls == [({"a": 1.5}, 0)]
    assert logger.faults.counts == {}


def test_an_exception_of_a_signal_handler_while_packing_propagates():
    """It is no failure of the destination."""

    class Alarm(Exception):
        pass

    def handler(*_):
        raise Alarm

    packer = Packer()
    packer.on_offer = lambda: signal.raise_signal(signal.SIGUSR1)
    logger = Logger(State("x"), packer)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Alarm):
            logger.log_metrics({"a": 1.5}, 0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_packer_with_a_rate_gets_no_offer_and_one_in_a_namespace_full_names():
    """Where metrics wait, the logger looks at them itself."""
    paced, plain = Packer(), Packer()
    paced.write_rate = WriteRate(every_steps=2)
    logger = Logger(State("x"), plain, raise_errors=True)

    Logger(State("x"), paced, raise_errors=True).log_metrics({"a": 1.5}, 0)
    with logger.namespace("eval"):
        logger.log_metrics({"a": 1.5}, 0)

    assert (paced.offers, paced.calls) == (0, [({"a": 1.5}, 0)])
    assert (plain.packed, plain.calls) == ([({"eval/a": 1.5}, 0)], [])


def test_a_row_of_a_run_folder_takes_few_calls(tmp_path):
    """Ten floats take two functions of Python and seven of C, which is what makes a microsecond.

    The two are of the logger and the journal. The others were ten of C while the logger looked at names and
    types before the journal did.
    """
    destination = RunDirectory(tmp_path / "run")
    logger = Logger(State("x"), destination, raise_errors=True)
    engine = Engine(logger.state, logger)
    engine.run_event("init")
    row = {f"m{index}": index + 0.5 for index in range(10)}
    for step in range(3):
        logger.log_metrics(row, step)
    calls = []

    sys.setprofile(lambda frame, event, arg: calls.append(getattr(arg, "__name__", event)))
    logger.log_metrics(row, 3)
    sys.setprofile(None)

    engine.close()
    called = [name for name in calls if name not in {"call", "return"}]
    assert calls.count("call") == 2
    assert len(set(called)) <= 7, called
    assert [found.metrics for found in read_rows(tmp_path / "run")] == [row] * 4
