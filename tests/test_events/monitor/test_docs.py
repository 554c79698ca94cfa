"""docs/monitor.md says what the code does."""

import re
from pathlib import Path

from events import Aggregation, SystemMonitor, monitor

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/monitor.md").read_text(encoding="utf-8")


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
