"""Every core destination keeps the contract of destinations, so its own tests don't repeat it."""

import io
import json
import math

import pytest

from destinations import Console, InMemory, LoggerDestination, ProgressBar, TextFile
from destinations.testing import DestinationContract, RecordingDestination


class TestLoggerDestination(DestinationContract):
    @pytest.fixture
    def destination(self):
        """Returns the base class, which ignores everything."""
        return LoggerDestination()


class TestRecordingDestination(DestinationContract):
    @pytest.fixture
    def destination(self):
        """Returns a destination that records."""
        return RecordingDestination()

    def read_metrics(self, destination):
        return (
            destination.metrics
            if not destination.of("log_metrics")
            else [(step, values) for step, values in destination.metrics if step is not None or values]
        )

    # It records the calls of each rank, and each close.
    test_is_silent_on_other_ranks = None
    test_closes_twice = None


class TestInMemory(DestinationContract):
    @pytest.fixture
    def destination(self):
        """Returns a destination without a bound."""
        return InMemory()

    def read_metrics(self, destination):
        return [(record.step, record.value) for record in destination.records if record.kind == "metrics"]


class TestConsole(DestinationContract):
    @pytest.fixture
    def destination(self):
        """Returns a destination that prints into memory."""
        return Console(stream=io.StringIO(), log_traces=True)

    def read_output(self, destination):
        return destination._stream.getvalue()


class TestProgressBar(DestinationContract):
    @pytest.fixture
    def destination(self):
        """Returns a destination that prints lines into memory, each time."""
        return ProgressBar(["*"], stream=io.StringIO(), line_seconds=0)

    def read_output(self, destination):
        return destination._stream.getvalue()


class TestTextFile(DestinationContract):
    @pytest.fixture(autouse=True)
    def in_its_own_folder(self, tmp_path, monkeypatch):
        """Gives a test its own files."""
        self.folder = tmp_path / "logs"
        self.folder.mkdir()
        monkeypatch.chdir(self.folder)

    @pytest.fixture
    def destination(self):
        """Returns a destination with every option on, for rank 0."""
        return TextFile(
            "{run_name}/log.jsonl",
            "log.jsonl",
            format="jsonl",
            capture_stdout=True,
            capture_stderr=True,
        )

    def read_metrics(self, destination):
        records = [json.loads(line) for line in self.read_output(destination).splitlines()]
        return [
            (record["step"], {name: number(value) for name, value in record["metrics"].items()})
            for record in records
            if record["kind"] == "metrics"
        ]

    def read_output(self, destination):
        # Sorted by run name: "second" comes after "first", and two files may have the same tick of the clock.
        return "".join(path.read_text() for path in sorted(self.folder.glob("*/log.jsonl")))


class TestTextFileForPeople(DestinationContract):
    @pytest.fixture(autouse=True)
    def in_its_own_folder(self, tmp_path, monkeypatch):
        """Gives a test its own files."""
        monkeypatch.chdir(tmp_path)

    @pytest.fixture
    def destination(self):
        """Returns a destination with its defaults, except for the ranks."""
        return TextFile("{run_name}.txt")

    def read_output(self, destination):
        from pathlib import Path

        return {path.name: path.read_text() for path in Path.cwd().glob("*.txt")}


def number(value):
    """Parses a number in its documented form."""
    return math.nan if value == "NaN" else float(value) if isinstance(value, str) else value
