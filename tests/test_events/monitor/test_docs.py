"""docs/monitor.md says what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from events import Aggregation, SystemMonitor, monitor

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/monitor.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def first_column(after):
    """Returns the names in the first column of the table that follows a line."""
    lines = TEXT[TEXT.index(after) :].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|---"))
    names = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        names += re.findall(r"`([^`]+)`", line.split("|")[1])
    return names


@pytest.mark.parametrize("code", CODE)
def test_the_examples_run(code, tmp_path):
    """Each block runs by itself, with warnings as errors."""
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert outcome.returncode == 0, f"{code}\n{outcome.stderr}"


def test_every_public_name_is_listed():
    """The table at the top is `monitor.__all__`."""
    names = set(first_column("It does not need torch")) - {"events.MonitorEvent"}

    assert names == set(monitor.__all__)


def test_every_aggregation_is_listed_in_order():
    """Each row has the suffix that its metric has."""
    assert first_column("| aggregation | value |") == [aggregation.value for aggregation in Aggregation]


def test_the_metrics_of_the_machine_are_those_of_the_class():
    """Page and docstring have one list."""
    assert first_column("`SystemMonitor(every_seconds=10)`") == re.findall(
        r"`(system/[^`]+)`", SystemMonitor.__doc__
    )
