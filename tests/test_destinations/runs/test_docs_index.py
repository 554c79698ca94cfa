"""docs/runs.md agrees with the code."""

import re
from pathlib import Path

import attrs
import pytest

from destinations.runs import HEARTBEAT_SECONDS, FilterError, RunRecord
from destinations.runs.index.filters import parse_filter
from destinations.runs.record import FIELDS, is_terminal

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "runs.md").read_text(encoding="utf-8")


def section(title):
    """Returns the text below a heading."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text):
    """Returns the first column of the tables."""
    return [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| `")]


def codes(text):
    """Returns the texts in code font."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def test_each_filter_in_the_table_is_one():
    """Every example in the table is a valid filter."""
    filters = [cell.strip("`") for cell in first_cells(section("Filters"))]

    assert len(filters) > 10
    for text in filters:
        parse_filter(text, 0.0)


def test_the_page_lists_all_fields():
    """The page names each field, and no others."""
    line = next(line for line in section("Filters").splitlines() if line.startswith("Fields are"))

    assert codes(line) == [*FIELDS, "hparams.NAME", "summary.NAME"]


def test_the_page_shows_the_error_verbatim():
    """The page has its text and its place."""
    shown = section("Filters").split("```\n")[1]

    with pytest.raises(FilterError) as caught:
        parse_filter('status = "failed"', 0.0)

    assert f"{caught.value}\n" == shown


def test_the_fields_of_a_record_are_listed():
    """The page has them in the order of the class."""
    record = next(
        line for line in section("Asking").splitlines() if line.startswith("Each run has a `record`")
    )

    assert codes(record)[1:] == [field.name for field in attrs.fields(RunRecord)]


def test_the_page_has_the_threshold_and_statuses_of_the_code():
    """The page has one threshold and one list of statuses."""
    text = section("Alive or not")
    ends = codes(next(line for line in text.splitlines() if line.startswith("A run has ended if")))

    assert f"the last {HEARTBEAT_SECONDS:.0f} seconds" in text
    assert len(ends) == 9
    assert all(is_terminal(status) for status in ends)
