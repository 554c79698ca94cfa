"""A host that only reads runs needs no torch: tests an environment with the packages that the docs list."""

import importlib.metadata
import json
import os
import re
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

from destinations import RunDirectory
from events import Run
from uploads import UploadQueue

ROOT = Path(__file__).parents[1]


def listed():
    """Returns the packages that docs/runs.md lists: the core's without torch, and the viewer's."""
    text = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    core, page = re.findall(r"^pip install (?!--no-deps)(.+?)(?: +#.*)?$", text, re.MULTILINE)
    return core.split(), page.split()


def names(requirements):
    """Returns the names of packages in requirements."""
    return sorted(re.match(r"[\w-]+", one)[0] for one in requirements)


def test_the_list_has_every_dependency_except_torch():
    """A new dependency must be added to the page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    core, page = listed()

    assert core == sorted(set(names(project["dependencies"])) - {"torch"}, key=str.lower)
    assert page == names(project["optional-dependencies"]["viewer"])


def with_requirements(packages):
    """Yields the distributions of these packages and of their requirements."""
    known = set()
    while packages:
        name = re.match(r"[\w.-]+", packages.pop())[0].lower()
        if name in known:
            continue
        known.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # Of another platform.
            continue
        yield found
        packages += [one for one in found.requires or [] if "extra ==" not in one]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Returns the interpreter of an environment with these packages, and this project without its requirements."""
    place = tmp_path_factory.mktemp("reader")
    venv.create(place, with_pip=False, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    core, page = listed()
    for distribution in with_requirements([*core, *page]):
        for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(distribution.locate_file(name))
    (packages / "project.pth").write_text(f"{ROOT}\n")
    return place / "bin/python"


@pytest.fixture
def command(python, tmp_path):
    """Runs a command of `destinations` in that environment, and returns its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments):
        done = subprocess.run(
            [python, "-m", "destinations.cli", *map(str, arguments)],
            cwd=tmp_path,
            env={**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in {0, 1}, done.stderr
        return done.stdout

    run.python = python
    return run


def test_runs_are_read_shown_and_uploaded(command, tmp_path):
    """The commands `runs`, `view` and `uploads` work without torch."""
    (tmp_path / "notes.txt").write_text("notes")
    with Run(loggers=[RunDirectory(tmp_path / "runs/digits")], run_name="digits") as run:
        for step in range(3):
            run.log_metrics({"loss": 1 / (step + 1)}, step=step)
    with UploadQueue(tmp_path / "store", spool=tmp_path / "spool") as queue:
        queue.submit(tmp_path / "notes.txt").result(60)

    missing = subprocess.run([command.python, "-c", "import torch"], capture_output=True, check=False)
    assert b"No module named 'torch'" in missing.stderr
    assert "digits" in command("runs", "list", "runs")
    assert "loss" in command("runs", "show", "runs/digits")
    command("runs", "export", "runs/digits", "-o", "digits.csv")
    assert (tmp_path / "digits.csv").exists()
    status = json.loads(command("uploads", "status", "spool", "--json"))
    assert (status["waiting_files"], status["uploader_up"]) == (0, False)
    assert "everything that was delivered is in the store" in command("uploads", "verify", "spool")
    command("view", "runs", "--export", "site")
    assert (tmp_path / "site/index.html").exists()


def test_the_viewer_is_served(command, tmp_path):
    """A server starts in that environment."""
    (tmp_path / "runs").mkdir()
    program = (
        "from destinations.viewer import Viewer; from destinations.runs import open_runs\n"
        "import urllib.request\n"
        "with open_runs('runs') as runs, Viewer(runs, port=0) as viewer:\n"
        "    print(urllib.request.urlopen(f'{viewer.address}/healthz').read())\n"
    )

    done = subprocess.run(
        [command.python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.stdout == "b'ok\\n'\n", done.stderr
