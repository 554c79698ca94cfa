"""Tests speed and remaining time, by a clock that the test sets."""

from datetime import timedelta

import pytest

from destinations import InMemory
from events import LRMonitor, Run, RuntimeEstimator, SpeedMonitor, Timestamp
from events.callbacks.speed import _peak_flops


def train(run, seconds, *, batches=1, samples=4, tokens=0):
    """Trains batches that take so many seconds by the clock of the run."""
    for _ in range(batches):
        run.batch_start([0])
        run.state.timestamp = run.state.timestamp.to_next_batch(samples, tokens, timedelta(seconds=seconds))
        run.run_event("batch_end")


def evaluate(run, seconds):
    """Evaluates one batch."""
    run.eval_start()
    run.state.eval_timestamp = Timestamp().to_next_batch(1, 0, timedelta(seconds=seconds))
    run.eval_end()


def test_speed_is_a_rolling_mean_over_the_window():
    """Rates begin once the window is full, and forget what has left it."""
    memory = InMemory()
    with Run(memory, SpeedMonitor(window_size=2, time_unit="seconds"), "r") as run:
        train(run, 8.0)
        train(run, 2.0, tokens=30)
        evaluate(run, 5.0)
        train(run, 2.0, tokens=10)
        train(run, 6.0)

    data = {name: [value for _, value in series] for name, series in memory.data.items()}
    assert data["throughput/batches_per_sec"] == [2 / 4, 2 / 8]
    assert data["throughput/samples_per_sec"] == data["throughput/device/samples_per_sec"] == [8 / 4, 8 / 8]
    assert data["throughput/tokens_per_sec"] == [40 / 4, 10 / 8]
    assert data["time/train"] == [8.0, 10.0, 12.0, 18.0]
    assert data["time/val"] == [0.0, 0.0, 5.0, 5.0]
    assert data["time/total"] == [8.0, 10.0, 17.0, 23.0]
    assert "throughput/flops_per_sec" not in data


def test_operations_come_from_the_model_and_the_gpus_from_a_table():
    """MFU is per device; all ranks are assumed to do the same work."""

    class Model:
        def flops_per_batch(self, batch):
            return 100.0

    memory = InMemory()
    monitor = SpeedMonitor(window_size=1, gpu_flops_available=1000.0)
    with Run(memory, monitor, "r", model=Model()) as run:
        run.state.world_size = 2
        train(run, 2.0, batches=2)

    assert memory.most_recent_values["throughput/flops_per_sec"] == 100.0
    assert memory.most_recent_values["throughput/device/flops_per_sec"] == 50.0
    assert memory.most_recent_values["throughput/device/mfu"] == 0.05
    assert _peak_flops("NVIDIA A100-SXM4-80GB", "amp_bf16") == 312e12
    assert _peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert _peak_flops("NVIDIA H100 PCIe", "fp32") == 51e12
    assert _peak_flops("Tesla T4", "bf16") is None
    assert _peak_flops("NVIDIA L4", "fp16") == 121e12


def test_the_time_of_evaluations_survives_a_checkpoint():
    """It is not part of the clock of the run."""
    monitor = SpeedMonitor()
    with Run(callbacks=monitor, run_name="r") as run:
        evaluate(run, 5.0)
    again = SpeedMonitor()

    again.load_state_dict(monitor.state_dict())

    assert again.total_eval_wct == 5.0


@pytest.mark.parametrize("duration", ["10ba", "2ep"])
def test_the_estimate_uses_the_rate_so_far_and_future_evaluations(duration):
    """In epochs, batches count too; skipped batches do not, and the time of evaluations is apart."""
    memory = InMemory()
    estimator = RuntimeEstimator(skip_batches=1, time_unit="seconds")

    with Run(memory, estimator, "r", max_duration=duration, train_dataloader=[0] * 5) as run:
        run.epoch_start()
        train(run, 100.0)
        train(run, 2.0, batches=2)
        evaluate(run, 30.0)
        train(run, 2.0)

    estimates = [value for _, value in memory.data["time/remaining_estimate"]]
    # 8 and 7 batches of 2 s; then 6, and evaluations after every 2 of 9 batches: 3.5 more of 30 s.
    assert estimates == pytest.approx([16.0, 14.0, 12.0 + 3.5 * 30.0])
    assert memory.hyperparameters == {"time/remaining_estimate_unit": "seconds"}


def test_without_a_duration_there_is_no_estimate():
    """It isn't an error either."""
    memory = InMemory()
    with Run(memory, RuntimeEstimator(), "r") as run:
        train(run, 1.0, batches=3)

    assert "time/remaining_estimate" not in memory.data


def test_an_epoch_without_batches_gives_no_estimate():
    """The length of the run is unknown until an epoch has had a batch."""
    memory = InMemory()
    estimator = RuntimeEstimator(skip_batches=0)
    with Run(memory, estimator, "r", max_duration="4ep") as run:
        run.epoch_start()
        run.epoch_end()
        train(run, 1.0)

    assert "time/remaining_estimate" not in memory.data
    assert run.state.status == "completed"


def test_unknown_units_are_refused():
    """The units are named."""
    for kind in (SpeedMonitor, RuntimeEstimator):
        with pytest.raises(
            ValueError, match="time_unit must be one of seconds, minutes, hours, days, got 'weeks'"
        ):
            kind(time_unit="weeks")


def test_learning_rates_have_composers_names(make_trainer):
    """The logged rate is the one after the scheduler's step."""
    memory = InMemory()
    make_trainer(callbacks=LRMonitor(), loggers=memory, max_duration="3ba").fit()

    assert [value for _, value in memory.data["lr-Adam/group0"]] == pytest.approx([0.05, 0.05, 0.045])
