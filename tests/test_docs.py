"""The docs say what the code does: what they enumerate is compared, what they show is run."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from events import Callback, Event, callbacks

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))


def blocks(path, language):
    """Returns the fenced blocks of a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_drawing_of_the_loop_is_the_one_of_the_enum():
    """docs/events.md and the docstring of Event show the same loop."""
    drawing = re.search(r"```\n(.*?)\n```", inspect.cleandoc(Event.__doc__), re.DOTALL)[1]

    assert drawing.strip() in (ROOT / "docs/events.md").read_text(encoding="utf-8")


def test_the_table_of_events_has_every_hook_in_order():
    """Each row is a hook, with its docstring."""
    text = (ROOT / "docs/events.md").read_text(encoding="utf-8")
    table = text[text.index("## Every event") : text.index("## Order of calls")]

    rows = re.findall(r"^\| `(\w+)` \| (\w*) ?\| (.+) \|$", table, re.MULTILINE)

    assert rows == [
        (
            event.value,
            "before" if event.is_before_event else "after" if event.is_after_event else "",
            inspect.getdoc(getattr(Callback, event.value)),
        )
        for event in Event
    ]


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path):
    """Each relative link names a file that is there."""
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text(encoding="utf-8"))

    missing = [link for link in links if not (path.parent / link).exists()]

    assert missing == []


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_every_make_command_shown_is_there(path):
    """`make x` in a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    shown = set(re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(encoding="utf-8"), re.MULTILINE))

    assert shown <= targets


@pytest.mark.parametrize(
    "name", ["README.md", "docs/callbacks.md", "docs/events.md", "docs/getting-started.md", "docs/logging.md"]
)
def test_python_that_is_shown_runs(name, tmp_path):
    """Each block without an ellipsis runs by itself, with warnings as errors."""
    for code in blocks(ROOT / name, "python"):
        if "..." in code:
            continue

        outcome = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

        assert outcome.returncode == 0, f"{code}\n{outcome.stderr}"


def test_every_callback_is_in_its_page():
    """docs/callbacks.md names each of `events.callbacks`."""
    text = (ROOT / "docs/callbacks.md").read_text(encoding="utf-8")

    assert [name for name in callbacks.__all__ if f"`{name}(" not in text] == []


def test_every_feature_of_others_is_shown_by_tests_that_are_there():
    """The 52 rows are complete, and each names files of this folder."""
    text = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")

    rows = re.findall(r"^\| (F\d\d) \|.*\| ([^|]+) \|$", text, re.MULTILINE)

    assert [name for name, _ in rows] == [f"F{number:02}" for number in range(1, 53)]
    named = {ROOT / "tests" / path for _, paths in rows for path in paths.split(", ")}
    assert [path for path in named if not path.is_file()] == []


def test_every_test_that_reliability_names_is_there():
    """Each `path::name` is a function of that file."""
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?", text)
    tests = {
        (path, node.name)
        for path in {path for path, _ in named}
        if (ROOT / path).is_file()
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }

    assert [one for one in named if one not in tests] == []
    assert len(named) > 100


def test_the_extras_of_the_readme_are_those_of_the_package():
    """Each extra for users is in the table, and no other."""
    import tomllib

    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| extra | for |")[1].split("\n\n")[0]
    shown = set(re.findall(r"`([a-z]+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:])))

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert shown == set(project["optional-dependencies"]) - {"dev", "docs"}
