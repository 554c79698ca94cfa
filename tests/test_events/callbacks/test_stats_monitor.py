"""Tests polling counters of other code."""

import itertools
import threading

import numpy as np
import pytest
import torch

from events import Run, StatsMonitor


class Buffer:
    """Returns the counts of a list in order, then the last one repeatedly; counts its calls."""

    def __init__(self, *written):
        self._written = [*written]
        self._asked = 0
        self._has_come = threading.Condition()

    def stats(self):
        with self._has_come:
            self._asked += 1
            self._has_come.notify_all()
            return {"written": self._written.pop(0) if len(self._written) > 1 else self._written[0]}

    def wait_for(self, count):
        with self._has_come:
            assert self._has_come.wait_for(lambda: self._asked >= count, 60)


def every_two_seconds():
    """A clock that advances by two seconds at each call."""
    return itertools.count(100.0, 2.0).__next__


def test_it_is_asked_in_a_thread_and_logged_by_the_training_thread(metric_list):
    """It is logged at the end of a batch and at close; the name of the monitor is the prefix of its metrics."""
    buffer = Buffer(10, 20, 30)
    threads_before = threading.enumerate()
    with Run(metric_list, StatsMonitor(buffer, name="buffer", every_seconds=0.001), "mine") as run:
        buffer.wait_for(3)
        run.batch_end()

    logged = [metrics["buffer/written"] for _, metrics in metric_list.metrics]
    assert logged[:3] == [10, 20, 30]
    assert len(logged) > 3
    assert metric_list.threads == {threading.get_ident()}
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name == "events-stats-monitor" and thread not in threads_before
    ]


def test_the_last_sample_is_logged_at_close(metric_list):
    """A run that is shorter than the interval has its first and last sample."""
    with Run(metric_list, StatsMonitor(Buffer(1, 2), every_seconds=3600), "mine"):
        pass

    assert [metrics for _, metrics in metric_list.metrics][-1] == {"written": 2}


def test_a_rate_is_the_increase_of_a_counter_per_second():
    """There is no rate at first, and none after the counter was reset."""
    monitor = StatsMonitor(Buffer(10, 30, 4, 8), rates=["written"], clock=every_two_seconds())

    samples = [monitor._next_sample() for _ in range(4)]

    assert samples == [
        {"written": 10},
        {"written": 30, "written_per_sec": 10.0},
        {"written": 4},
        {"written": 8, "written_per_sec": 2.0},
    ]


def test_values_that_are_not_numbers_are_left_out_and_names_are_joined():
    """Numbers of numpy and torch are numbers; integers stay integers."""
    stats = {
        "size": 3,
        "full": True,
        "note": "x",
        "shape": [1, 2],
        "none": None,
        "time": {"mean": np.float32(0.5), "last": torch.tensor(2)},
    }

    sample = StatsMonitor(lambda: stats)._next_sample()

    assert sample == {"size": 3, "full": True, "time/mean": 0.5, "time/last": 2}
    assert type(sample["time/last"]) is int


def test_a_failing_source_is_counted_and_training_continues(metric_list, caplog):
    """Only the first failure is reported."""

    def broken():
        raise OSError("buffer is gone")

    monitor = StatsMonitor(broken, every_seconds=3600)
    with Run(metric_list, monitor, "mine") as run:
        run.batch_end()

    assert monitor.failures == 2
    assert caplog.text.count("buffer is gone") == 1
    assert metric_list.metrics == []


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({"source": 3}, TypeError, "must have stats"),
        ({"source": dict, "every_seconds": 0}, ValueError, "every_seconds must be positive"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, complaint):
    """The constructor raises."""
    with pytest.raises(error, match=complaint):
        StatsMonitor(**arguments)
