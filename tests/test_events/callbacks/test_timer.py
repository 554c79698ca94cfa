"""How long batches take, and how many there are in a second, by a clock that is set."""

import time

import pytest
import torch

from events import Aggregation, Run, Timer, Trainer
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    """Gives a clock that is set, and makes it the clock of runs."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def train_batch(run, clock, *, read=0.0, step=1.0, samples=0, tokens=0):
    """Reads a batch and trains it, in so many seconds."""
    clock.now += read
    run.batch_start()
    clock.now += step
    run.batch_end(samples=samples, tokens=tokens)


def test_timer_tells_reading_from_training(metric_list, clock):
    """In a custom loop, the time between two batches counts as reading."""
    timer = Timer("2ba", [Aggregation.MEAN, Aggregation.P95, Aggregation.COUNT], clock=clock)
    with Run(metric_list, timer, "mine") as run:
        run.epoch_start()
        for read, step in ((0.25, 1.0), (0.75, 3.0)):
            train_batch(run, clock, read=read, step=step)

    assert metric_list.metrics == [
        (
            2,
            {
                "timer/data_seconds.mean": 0.5,
                "timer/data_seconds.p95": pytest.approx(0.725),
                "timer/data_seconds.count": 2,
                "timer/step_seconds.mean": 2.0,
                "timer/step_seconds.p95": pytest.approx(2.9),
                "timer/step_seconds.count": 2,
            },
        )
    ]


def test_timer_resets_at_each_interval_and_logs_the_unfinished_one(metric_list, clock):
    """Three batches at "2ba" are two rows, the last at the end."""
    with Run(metric_list, Timer("2ba", [Aggregation.SUM], clock=clock), "mine") as run:
        for step in (1.0, 2.0, 4.0):
            train_batch(run, clock, step=step)

    assert [(step, metrics["timer/step_seconds.sum"]) for step, metrics in metric_list.metrics] == [
        (2, 3.0),
        (3, 4.0),
    ]


def test_timer_leaves_evaluation_out(metric_list, clock):
    """It counts neither as reading nor as training."""
    with Run(metric_list, Timer("2ba", [Aggregation.SUM, Aggregation.COUNT], clock=clock), "mine") as run:
        train_batch(run, clock)
        clock.now += 0.5
        run.eval_start()
        clock.now += 60.0
        run.eval_end()
        train_batch(run, clock, read=0.25)

    ((step, metrics),) = metric_list.metrics
    assert (step, metrics["timer/step_seconds.sum"]) == (2, 2.0)
    assert (metrics["timer/data_seconds.sum"], metrics["timer/data_seconds.count"]) == (0.25, 1)


def test_timer_logs_the_unfinished_interval_when_a_run_fails(metric_list, clock):
    """It does so at close."""

    def body():
        with Run(metric_list, Timer(clock=clock), "mine") as run:
            train_batch(run, clock)
            raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        body()

    assert [(step, metrics["timer/step_seconds.mean"]) for step, metrics in metric_list.metrics] == [(1, 1.0)]


class SlowData:
    """Batches that each take a while to read."""

    def __init__(self, clock, seconds, batches):
        self._clock = clock
        self._seconds = seconds
        self._batches = batches

    def __len__(self):
        return self._batches

    def __iter__(self):
        for _ in range(self._batches):
            self._clock.now += self._seconds
            yield torch.ones(4, 3), torch.zeros(4, dtype=torch.long)


def test_a_trainer_measures_the_time_of_the_dataloader(metric_list, clock):
    """A step is what follows; neither is of the evaluation."""
    model = torch.nn.Linear(3, 2)

    def slow_loss(outputs, targets):
        clock.now += 2.0
        return torch.nn.functional.cross_entropy(outputs, targets)

    trainer = Trainer(
        model,
        SlowData(clock, 0.5, 4),
        SlowData(clock, 100.0, 2),
        max_duration="2ep",
        loss_fn=slow_loss,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=Timer("4ba", [Aggregation.MEAN, Aggregation.COUNT], clock=clock),
        loggers=metric_list,
        device="cpu",
    )

    trainer.fit()
    trainer.close()

    timer = [row for row in metric_list.metrics if "timer/step_seconds.mean" in row[1]]
    assert timer == [
        (
            step,
            {
                "timer/data_seconds.mean": 0.5,
                "timer/data_seconds.count": 4,
                "timer/step_seconds.mean": 2.0,
                "timer/step_seconds.count": 4,
            },
        )
        for step in (4, 8)
    ]


def test_a_flush_of_all_stats_in_between_changes_nothing(metric_list, clock):
    """Records from before and after the flush are combined."""
    from events import monitor

    with Run(metric_list, Timer("3ba", [Aggregation.MAX], clock=clock), "mine") as run:
        for _ in range(3):
            train_batch(run, clock, step=2.0)
            monitor.flush()

    assert {name: value for _, metrics in metric_list.metrics for name, value in metrics.items()} == {
        "timer/data_seconds.max": 0.0,
        "timer/step_seconds.max": 2.0,
    }
