"""The docs of destinations say what the code does: examples print what stands below them, tables name what there is."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import destinations
from destinations import Console, InMemory, LoggerDestination, ProgressBar, TextFile

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "destinations.md", DOCS / "writing-a-destination.md"]
_EXAMPLE = re.compile(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", re.DOTALL)
# Where a batch took more than a second, seconds a batch.
_SPEED = re.compile(r"\[\d\d:\d\d<[\d:?]+, +[\d.?]+ ?(batch/s|s/batch)")


def examples():
    """Returns each example of the pages with what it prints."""
    return [
        pytest.param(code, printed, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (code, printed) in enumerate(_EXAMPLE.findall(page.read_text()))
    ]


@pytest.mark.parametrize(("code", "printed"), examples())
def test_examples_print_what_the_docs_say(tmp_path, code, printed):
    """An example runs as it stands; speeds are the machine's."""
    finished = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert _SPEED.sub("[", finished.stdout) == _SPEED.sub("[", printed)


def test_every_python_example_is_run():
    """No block of Python is left out of the test above."""
    blocks = sum(page.read_text().count("```python") for page in PAGES)

    assert len(examples()) == blocks == 8


def test_the_capability_table_is_the_codes():
    """A field is filled where the class overrides the method, and empty where it does not.

    No method is left out.
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
    """Whatever the package exports is named there."""
    page = PAGES[0].read_text()

    assert [name for name in destinations.__all__ if name not in page and name != "LoggerDestination"] == []
