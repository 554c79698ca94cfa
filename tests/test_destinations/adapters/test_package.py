"""The adapters' package loads nothing, changes no trainer, and names missing packages."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "destinations" / "adapters"
# Shared by adapters; users import none of it.
SHARED = {"media", "session", "watch"}
ADAPTERS = [path for path in FOLDER.glob("[!_]*.py") if path.stem not in SHARED]
MODULES = sorted(path.stem for path in ADAPTERS)


def run_python(code, environment):
    """Runs code in a new interpreter, and returns the last lines of its output and its errors."""
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return finished.stdout.strip(), (finished.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("module", "package", "hint"),
    [
        ("lightning_logger", "lightning", "pip install lightning"),
        ("hugging_face", "transformers", "pip install transformers"),
        ("accelerate_tracker", "accelerate", "pip install accelerate"),
        ("torchrl_logger", "torchrl", "pip install torchrl"),
        ("keras_callback", "keras", "pip install keras"),
        ("composer_logger", "mosaicml", "pip install mosaicml, in an environment of its own"),
    ],
)
def test_a_missing_package_is_named_with_its_install_command(environment, module, package, hint):
    """Importing the module raises the error."""
    roots = (
        "lightning",
        "pytorch_lightning",
        "transformers",
        "accelerate",
        "torchrl",
        "tensordict",
        "keras",
        "composer",
    )
    code = f"""
import sys
for name in {roots}:
    sys.modules[name] = None
import destinations.adapters.{module}
"""

    _, error = run_python(code, environment)

    assert error.startswith(f"ImportError: this adapter needs the package {package!r}: ")
    assert error.endswith(hint)


def test_the_package_and_the_handler_load_nothing_heavy(environment):
    """Only a framework's own adapter loads it."""
    code = """
import sys
import destinations.adapters, destinations.adapters.logging_handler
heavy = {"torch", "lightning", "pytorch_lightning", "transformers", "accelerate", "torchrl", "keras", "composer"}
print(sorted(heavy & set(sys.modules)))
"""

    assert run_python(code, environment) == ("[]", "")


def test_no_adapter_is_registered_by_an_entry_point():
    """Installing this project changes no trainer; its only entry point is the command."""
    points = importlib.metadata.distribution("training-destinations").entry_points
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert [(point.group, point.name) for point in points] == [("console_scripts", "destinations")]
    assert "entry-points" not in project


def test_no_module_has_the_name_of_its_framework():
    """A file run by path has its folder first on `sys.path`; `lightning.py` would shadow the real package."""
    third_party = {
        "accelerate",
        "composer",
        "keras",
        "lightning",
        "logging",
        "pytorch_lightning",
        "torchrl",
        "transformers",
    }

    assert third_party & set(MODULES) == set()
    assert not set(sys.stdlib_module_names) & set(MODULES)


def test_every_adapter_is_on_the_page():
    """The page has each module with all its public names."""
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    names = {
        name.strip(' "\n')
        for path in ADAPTERS
        for name in path.read_text().split("__all__ = [")[1].split("]")[0].split(",")
        if name.strip()
    }

    assert [name for name in (*MODULES, *names) if name not in page] == []
