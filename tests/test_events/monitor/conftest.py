"""Fixtures: handlers of monitor events, and a child process that may crash or hang."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from destinations import LoggerDestination
from events import monitor

ROOT = Path(__file__).parents[3]


class Heard(list):
    """A handler that keeps events, and can be waited for from another thread."""

    def __init__(self):
        super().__init__()
        self._has_come = threading.Condition()

    def __call__(self, event):
        with self._has_come:
            self.append(event)
            self._has_come.notify_all()

    def wait_for(self, count, timeout_seconds=60.0):
        """Returns the events once there are so many, and whether there were in time."""
        with self._has_come:
            return self._has_come.wait_for(lambda: len(self) >= count, timeout_seconds)

    @property
    def data(self):
        return [dict(event.data) for event in self]


class MetricList(LoggerDestination):
    """Writes down metrics and texts."""

    def __init__(self):
        self.metrics = []
        self.texts = []
        self.threads = set()

    def log_metrics(self, metrics, step=None):
        self.threads.add(threading.get_ident())
        self.metrics.append((step, dict(metrics)))

    def log_text(self, text, name="Text", step=None):
        self.texts.append((step, name, text))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Logs the open windows of earlier tests before a handler is registered."""
    monitor.flush()


@pytest.fixture
def heard():
    """Gives a registered handler that keeps the events it receives."""
    handler = Heard()
    handle = monitor.register_event_handler(handler)
    yield handler
    monitor.unregister_event_handler(handle)


@pytest.fixture
def metric_list():
    """Gives a destination that writes down metrics."""
    return MetricList()


@pytest.fixture
def in_child():
    """Runs code in a child process with a time limit; returns its output, or fails with its errors."""

    def run(code, timeout_seconds=300):
        outcome = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        return _output_of(outcome)

    return run


def _output_of(outcome):
    """Returns what a child printed; fails with its errors."""
    assert outcome.returncode == 0, f"{outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
    return outcome.stdout.strip()


@pytest.fixture
def in_torch_child(torch_server):
    """Does what `in_child` does, in a process that has torch imported."""

    def run(code):
        environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
        return _output_of(torch_server.run(textwrap.dedent(code), env=environment, warning_filter="error"))

    return run
