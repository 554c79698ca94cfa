"""Tests that throttled GPUs are reported once."""

import threading

import pytest

from destinations import InMemory
from events import HealthChecker, Run
from events.callbacks.system_monitor import Gpus


class Readings:
    """Gives one reading after another, and tells when all were read."""

    def __init__(self, *readings):
        self._readings = list(readings)
        self.are_read = threading.Event()

    def __call__(self):
        if not self._readings:
            self.are_read.set()
            return {}
        return self._readings.pop(0)


def reading(loads, reasons=0):
    """Returns a sample of GPUs with these loads; the first is throttled."""
    sample = {f"gpu{index}/utilization_percent": load for index, load in enumerate(loads)}
    return {**sample, "gpu0/throttle_reasons": reasons}


def test_a_throttled_gpu_is_reported_once_with_its_reasons(caplog):
    """A begin and an end are one line each; every sample is logged."""
    readings = Readings(reading([90.0]), reading([90.0], 0x48), reading([90.0], 0x48), reading([90.0], 0x1))
    memory = InMemory()
    with Run(memory, HealthChecker(sample_freq=0.001, sample=readings), "r"):
        assert readings.are_read.wait(10)

    assert [value for _, value in memory.data["health/gpu0/throttled"]] == [0, 1, 1, 0]
    assert [record.getMessage() for record in caplog.records] == [
        "gpu0 is throttled: hardware slowdown (temperature or power), hardware thermal slowdown.",
        "gpu0 is no longer throttled.",
    ]


def test_a_gpu_that_works_less_than_the_others_is_reported_once(caplog):
    """It is reported once per episode; small differences are not."""
    readings = Readings(
        *(reading(loads) for loads in ([90.0, 85.0], [90.0, 60.0], [90.0, 50.0], [90.0, 88.0]))
    )
    with Run(None, HealthChecker(10, 0.001, sample=readings), "r"):
        assert readings.are_read.wait(10)

    assert [record.getMessage() for record in caplog.records] == [
        "utilization of GPUs differs by 30 %; the lowest is gpu1 with 60 %."
    ]


@pytest.mark.parametrize("name", ["ClocksEventReasons", "ClocksThrottleReasons"])
def test_reasons_are_asked_of_nvml_by_either_name(name):
    """CUDA 12 renamed the function; unsupported readings are left out."""

    class Nvml:
        class NVMLError(Exception):
            pass

        def nvmlDeviceGetCount(self):  # noqa: N802
            return 1

        def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
            return index

        def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
            raise self.NVMLError

    setattr(Nvml, f"nvmlDeviceGetCurrent{name}", lambda self, handle: 0x20)

    assert Gpus(Nvml()).health() == {"gpu0/throttle_reasons": 0x20}
