"""Docs of destinations match the code: examples print the output shown, and tables are complete."""

import inspect
import re
from pathlib import Path

import pytest

import destinations
from destinations import Console, InMemory, LoggerDestination, ProgressBar, TextFile
from destinations.trackers.tracker import Tracker

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "destinations.md", DOCS / "writing-a-destination.md"]


def test_the_capability_table_matches_the_code():
    """A field is filled if the class overrides the method, and empty otherwise.

    Trackers share `upload_file`; those with an option for it accept files. No method is left out.
    """
    table = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in PAGES[0].read_text().split("## Which takes what")[1].split("\n\n")[1].splitlines()
    ]
    (_, *names), _, *rows = table

    documented = {
        row[0].strip("`"): dict(zip(names, (bool(cell) for cell in row[1:]), strict=True)) for row in rows
    }

    classes = {name: getattr(destinations, name) for name in names}
    methods = [name for name in vars(LoggerDestination) if name.startswith("log_")]
    assert documented == {
        method: {name: _overrides(classes[name], method) for name in classes}
        for method in [*methods, "upload_file"]
    }


def _overrides(destination, method):
    if method == "upload_file" and issubclass(destination, Tracker):
        return "log_artifacts" in inspect.signature(destination).parameters
    return getattr(destination, method) is not getattr(LoggerDestination, method)


@pytest.mark.parametrize("destination", [Console, InMemory, ProgressBar, TextFile])
def test_every_option_is_documented(destination):
    """The signature on the page names each option with its default."""
    page = PAGES[0].read_text()
    documented = re.search(rf"^`{destination.__name__}\((.*)\)`$", page, re.MULTILINE)[1]

    options = [one for one in inspect.signature(destination).parameters.values() if one.name != "clock"]

    names = [re.split("[=:]", part.strip())[0] for part in documented.split(", ") if part != "*"]
    assert names == [one.name for one in options]
    for option in options:
        default = f"{option.default!r}".replace("'", '"').replace("100000", "100_000")
        default = "[...]" if isinstance(option.default, tuple) else default
        assert f"{option.name}={default}" in documented
        assert f"\n        {option.name}: " in inspect.getdoc(destination).replace("\n    ", "\n        ")


def test_every_destination_is_on_the_page():
    """The page names every exported class."""
    page = PAGES[0].read_text()

    assert [name for name in destinations.__all__ if name not in page and name != "LoggerDestination"] == []
