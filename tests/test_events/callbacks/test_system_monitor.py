"""Tests machine metrics: sampled in a thread, logged in the training thread."""

import threading
from types import SimpleNamespace

import pytest

from events import Run, SystemMonitor
from events.callbacks.system_monitor import Gpus


class Sensor:
    """Returns numbered samples, and signals when a number of them was taken."""

    def __init__(self, error_at=()):
        self.threads = set()
        self._taken = 0
        self._error_at = error_at
        self._has_come = threading.Condition()

    def __call__(self):
        with self._has_come:
            self.threads.add(threading.current_thread().name)
            self._taken += 1
            self._has_come.notify_all()
            if self._taken in self._error_at:
                raise OSError(f"sensor {self._taken} is gone")
            return {"number": self._taken}

    def wait_for(self, count):
        with self._has_come:
            assert self._has_come.wait_for(lambda: self._taken >= count, 60)


def numbers(metric_list):
    """Returns the samples that were logged."""
    return [metrics["system/number"] for _, metrics in metric_list.metrics]


@pytest.fixture
def sampling_threads():
    """Returns a function that lists the sampling threads, without those of earlier tests."""

    def now():
        return [thread for thread in threading.enumerate() if thread.name == "events-system-monitor"]

    before = now()
    return lambda: [thread for thread in now() if thread not in before]


def test_a_sample_has_the_step_of_its_time(metric_list):
    """It doesn't have the step at the end of the batch."""
    sensor = Sensor()
    with Run(metric_list, SystemMonitor(3600, sample=sensor), "mine") as run:
        sensor.wait_for(1)
        run.batch_end()

    assert metric_list.metrics == [(0, {"system/number": 1})]


def test_a_sensor_that_fails_does_not_end_it(metric_list, caplog):
    """It is counted and reported once."""
    sensor = Sensor(error_at=(1, 3))
    system = SystemMonitor(0.001, sample=sensor)
    with Run(metric_list, system, "mine"):
        sensor.wait_for(5)

    assert numbers(metric_list)[:2] == [2, 4]
    assert system.failures == 2
    assert caplog.text.count("SystemMonitor could not sample") == 1
    assert "OSError: sensor 1 is gone" in caplog.text


def test_only_local_rank_zero_samples(metric_list, monkeypatch, sampling_threads):
    """Other ranks on the machine would log the same."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    sensor = Sensor()

    with Run(metric_list, SystemMonitor(0.001, sample=sensor), "mine"):
        assert sampling_threads() == []

    assert metric_list.metrics == []


def test_a_monitor_can_be_reused_for_another_run(metric_list, sampling_threads):
    """Each time it starts a new thread."""
    sensor = Sensor()
    system = SystemMonitor(3600, sample=sensor)
    for run_number in (1, 2):
        with Run(metric_list, system, "mine"):
            sensor.wait_for(run_number)

    assert numbers(metric_list) == [1, 2]
    assert sampling_threads() == []


def test_the_documented_metrics_of_the_machine_are_logged(metric_list):
    """Each of psutil's numbers is within the possible range."""
    system = SystemMonitor(3600)
    sample = system._sample()

    system_names = {name for name in sample if not name.startswith("gpu")}
    assert system_names == {
        "cpu_percent",
        "memory_percent",
        "memory_bytes",
        "process/cpu_percent",
        "process/memory_bytes",
        "process/threads",
    }
    assert all(f"system/{name}`" in SystemMonitor.__doc__ for name in system_names)
    assert 0 < sample["process/memory_bytes"] < sample["memory_bytes"] * 10
    assert 0 <= sample["cpu_percent"] <= 100
    assert 0 < sample["memory_percent"] <= 100
    assert sample["process/threads"] >= 1


def test_without_psutil_the_error_names_the_package(in_child):
    """The constructor raises."""
    printed = in_child(
        """
        import sys
        sys.modules["psutil"] = None
        from events import SystemMonitor
        try:
            SystemMonitor()
        except ImportError as error:
            print(error, "|", type(error.__cause__).__name__)
        """
    )

    assert printed == (
        "SystemMonitor needs psutil, which is not installed. Run: pip install psutil | ModuleNotFoundError"
    )


def test_a_forked_child_neither_samples_nor_waits(in_child):
    """Close in the child does not wait for the parent's thread; the parent continues."""
    in_child(
        """
        import os, threading, warnings
        from events import Run, SystemMonitor
        warnings.simplefilter("ignore", DeprecationWarning)
        has_come = threading.Event()

        def sample():
            has_come.set()
            return {"number": 1}

        system = SystemMonitor(3600, sample=sample)
        with Run(callbacks=system, run_name="mine") as run:
            assert has_come.wait(60)
            child = os.fork()
            if child == 0:
                assert threading.active_count() == 1
                system.stop()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert threading.active_count() == 2
        assert threading.active_count() == 1
        """
    )


def test_the_process_ends_well_with_an_open_monitor(in_child):
    """The run was not closed."""
    in_child(
        """
        from events import Run, SystemMonitor
        run = Run(callbacks=SystemMonitor(0.01), run_name="mine").__enter__()
        """
    )


class Nvml:
    """Two GPUs; the second supports few readings."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """As NVML's own."""

    UUIDS = ("GPU-aaaa", "GPU-bbbb")

    def nvmlDeviceGetCount(self):  # noqa: N802  # NVML's name
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802  # NVML's name
        if index >= 2:
            raise self.NVMLError("invalid argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802  # NVML's name
        if uuid not in self.UUIDS:
            raise self.NVMLError("not found")
        return self.UUIDS.index(uuid)

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802  # NVML's name
        self._only_first(handle)
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802  # NVML's name
        return SimpleNamespace(used=(handle + 1) * 1000, total=4000)

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802  # NVML's name
        self._only_first(handle)
        return 61

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802  # NVML's name
        self._only_first(handle)
        return 301_500

    def _only_first(self, handle):
        if handle != 0:
            raise self.NVMLError("not supported")


def test_unsupported_gpu_readings_are_left_out():
    """Each GPU has the readings that it supports."""
    sample = Gpus(Nvml()).sample()

    assert sample == {
        "gpu0/utilization_percent": 87,
        "gpu0/memory_bytes": 1000,
        "gpu0/memory_percent": 25.0,
        "gpu0/temperature_celsius": 61,
        "gpu0/power_watts": 301.5,
        "gpu1/memory_bytes": 2000,
        "gpu1/memory_percent": 50.0,
    }


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [1000, 2000]),
        ("0,1", [1000, 2000]),
        ("1,0", [2000, 1000]),
        (" 1 ", [2000]),
        ("GPU-bbbb,GPU-aaaa", [2000, 1000]),
        ("1,7,0", [2000]),
        ("-1,0", []),
        ("", []),
    ],
)
def test_gpus_are_listed_in_torchs_order(visible, expected):
    """`CUDA_VISIBLE_DEVICES` selects them as CUDA does: up to the first invalid entry."""
    sample = Gpus(Nvml(), visible).sample()

    assert [value for name, value in sample.items() if name.endswith("memory_bytes")] == expected
