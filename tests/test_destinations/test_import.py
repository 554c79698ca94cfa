"""What `import destinations` loads, and whose packages it accepts."""

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
    """Neither torch nor boto3, nor anything else that takes long, comes with the import."""
    finished = run_python(f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])")

    assert (finished.stdout, finished.stderr) == ("[]\n", "")


def test_making_destinations_loads_nothing_heavy():
    """Constructors store what they are given."""
    code = f"""
import sys
from destinations import Console, InMemory, ProgressBar, TextFile
Console(), InMemory(), ProgressBar(), TextFile()
print([name for name in {HEAVY} if name in sys.modules])
"""

    assert run_python(code).stdout == "[]\n"


def test_import_does_nothing():
    """No thread, no signal handler, no hook, no handler of logging, and the streams stay what they are."""
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
def test_a_file_of_the_users_with_our_name_is_named(tmp_path, name):
    """With an events.py of the user's own first on the path, the error says which file, and what to do."""
    theirs = tmp_path / f"{name}.py"
    theirs.write_text("class Event: ...\n")

    finished = run_python("import destinations", cwd=tmp_path)

    assert finished.stderr.splitlines()[-1] == (
        f"ImportError: package {name!r} must be the one that comes with training-destinations, got {theirs}. "
        "Rename that file, or uninstall that package, then install training-destinations again."
    )


def test_a_package_with_our_name_is_named(tmp_path):
    """The same for an installed package, such as the one that PyPI has under `Events`."""
    theirs = tmp_path / "events" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("from .events import Events\n")
    (tmp_path / "events" / "events.py").write_text("class Events: ...\n")

    finished = run_python("import destinations", cwd=tmp_path)

    assert f"got {theirs}. Rename that file" in finished.stderr.splitlines()[-1]


def test_a_folder_with_our_name_is_named(tmp_path):
    """A folder without __init__.py, found because ours is not installed, is refused with its place."""
    (tmp_path / "events").mkdir()
    (tmp_path / "destinations").symlink_to(Path(__file__).parents[2] / "destinations")

    # Without site-packages, so that ours is nowhere.
    finished = subprocess.run(
        [sys.executable, "-S", "-c", "import destinations"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={},
    )

    assert f"got {tmp_path / 'events'}. Rename that file" in finished.stderr.splitlines()[-1]


def test_everything_that_is_exported_is_there():
    """`__all__` is sorted, and each name in it exists."""
    import destinations
    import destinations.testing

    for module in (destinations, destinations.testing):
        assert list(module.__all__) == sorted(module.__all__)
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("module", ["destinations", "events", "uploads"])
def test_completion_lists_what_there_is(module):
    """`dir`, which `destinations.<TAB>` asks, has each public name before it is imported."""
    finished = run_python(f"import {module} as m; print(set(m.__all__) <= set(dir(m)))")

    assert finished.stdout == "True\n"


@pytest.mark.parametrize("use_jedi", [True, False])
def test_ipython_completes_names(use_jedi):
    """With jedi, which reads the source, and without, which asks the module."""
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
