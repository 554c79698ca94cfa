"""`import destinations` loads few modules, and names packages that conflict with it."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "boto3", "numpy", "pandas", "tqdm", "yaml", "PIL", "pytest", "IPython")


def run_python(code, **options):
    """Runs code in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize("module", ["destinations", "destinations.testing"])
def test_import_loads_nothing_heavy(module):
    """It loads neither torch nor boto3, nor any other slow module."""
    finished = run_python(f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])")

    assert (finished.stdout, finished.stderr) == ("[]\n", "")


def test_creating_destinations_loads_nothing_heavy():
    """Constructors only store their arguments."""
    code = f"""
import sys
from destinations import Console, InMemory, ProgressBar, TextFile
Console(), InMemory(), ProgressBar(), TextFile()
print([name for name in {HEAVY} if name in sys.modules])
"""

    assert run_python(code).stdout == "[]\n"


def test_import_has_no_side_effects():
    """It adds no thread, signal handler, hook or log handler, and leaves the streams unchanged."""
    code = """
import logging, signal, sys, threading
def world():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return handlers, sys.excepthook, sys.stdout, sys.stderr, threading.active_count(), logging.root.handlers[:]
before = world()
import destinations, destinations.testing
assert world() == before
assert logging.getLogger("destinations").handlers == logging.getLogger("events").handlers == []
"""

    assert run_python(code).stderr == ""


@pytest.mark.parametrize("name", ["events", "uploads"])
def test_a_conflicting_file_is_named(tmp_path, name):
    """If your own events.py is first on the path, the error names the file and says what to do."""
    theirs = tmp_path / f"{name}.py"
    theirs.write_text("class Event: ...\n")

    finished = run_python("import destinations", cwd=tmp_path)

    assert finished.stderr.splitlines()[-1] == (
        f"ImportError: package {name!r} must be the one that comes with training-destinations, got {theirs}. "
        "Rename that file, or uninstall that package, then install training-destinations again."
    )


def test_a_conflicting_package_is_named(tmp_path):
    """An installed package, such as PyPI's `Events`, gives the same error."""
    theirs = tmp_path / "events" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("from .events import Events\n")
    (tmp_path / "events" / "events.py").write_text("class Events: ...\n")

    finished = run_python("import destinations", cwd=tmp_path)

    assert f"got {theirs}. Rename that file" in finished.stderr.splitlines()[-1]


def test_a_conflicting_folder_is_named(tmp_path):
    """A folder without __init__.py, found because ours isn't installed, is refused by its path."""
    (tmp_path / "events").mkdir()
    (tmp_path / "destinations").symlink_to(Path(__file__).parents[2] / "destinations")

    # Without site-packages, so that ours can't be found.
    finished = subprocess.run(
        [sys.executable, "-S", "-c", "import destinations"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={},
    )

    assert f"got {tmp_path / 'events'}. Rename that file" in finished.stderr.splitlines()[-1]


def test_every_exported_name_exists():
    """`__all__` is sorted, and each of its names exists."""
    import destinations
    import destinations.testing

    for module in (destinations, destinations.testing):
        assert list(module.__all__) == sorted(module.__all__)
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("module", ["destinations", "events", "uploads"])
def test_completion_lists_public_names(module):
    """`dir`, which `destinations.<TAB>` calls, has each public name before it's imported."""
    finished = run_python(f"import {module} as m; print(set(m.__all__) <= set(dir(m)))")

    assert finished.stdout == "True\n"


@pytest.mark.parametrize("use_jedi", [True, False])
def test_ipython_completes_names(use_jedi):
    """It does so with jedi, which reads the source, and without, which asks the module."""
    pytest.importorskip("IPython")
    code = f"""
from IPython.core.completer import IPCompleter, provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import destinations")
shell.Completer.use_jedi = {use_jedi}
with provisionalcompleter():
    found = [one.text for one in shell.Completer.completions("destinations.", len("destinations."))]
print([name for name in ("Console", "RunDirectory", "WandB") if name not in found and "." + name not in found])
"""

    finished = run_python(code)

    assert finished.stdout.splitlines()[-1] == "[]", finished.stderr


def test_help_lists_the_destinations_in_a_table():
    """Each class has its line."""
    import destinations

    lines = [line for line in destinations.__doc__.splitlines() if line.startswith("| `")]

    assert {line.split("`")[1] for line in lines} == {
        name for name in destinations.__all__ if name[0].isupper() and name != "LoggerDestination"
    }
