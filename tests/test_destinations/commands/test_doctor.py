"""`destinations doctor` and `destinations demo`, as run in a shell."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from destinations import cli
from destinations.commands import doctor

ROOT = Path(__file__).parents[3]


@pytest.fixture
def examined(tmp_path, monkeypatch, capsys):
    """Runs the doctor in an empty home; returns the exit code and the checks by name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)

    def examine(*arguments):
        code = cli.main(["doctor", "--json", *arguments])
        found = json.loads(capsys.readouterr().out)
        return code, {one["name"]: one for one in found}

    return examine


def test_a_healthy_machine_has_no_problem(examined):
    """Each check has a text; missing credentials are no warning unless a store needs them."""
    code, found = examined()

    assert code == 0
    assert {"python", "packages", "torch", "ranks", "disk", "spool", "clock", "s3"} <= found.keys()
    assert str(ROOT) in found["packages"]["text"]
    assert found["s3"]["state"] == "ok"
    assert "aws configure" in found["s3"]["text"]


def test_ranks_are_shown_with_their_launcher(examined, monkeypatch):
    """In a task of srun, the doctor shows the rank and the variable it comes from."""
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")

    assert examined()[1]["ranks"]["text"] == "rank 3 of 8, local rank 0: Slurm (SLURM_PROCID)"

    monkeypatch.setenv("SLURM_PROCID", "first")

    assert "SLURM_PROCID must be a whole number" in examined()[1]["ranks"]["text"]


def test_missing_credentials_of_the_given_store_are_a_warning(examined):
    """An S3 URI needs credentials."""
    _, found = examined("--store", "s3://bucket/prefix?endpoint_url=http://127.0.0.1:9")

    assert found["s3"]["state"] == "warning"


def test_the_table_has_one_line_per_check(examined, capsys):
    """A line has state, name and text."""
    assert cli.main(["doctor"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(ok|warning|problem) +[\w ]+  \S", line) for line in lines)


def test_credentials_are_named_and_not_shown(examined, monkeypatch):
    """The doctor shows where they are, but never their values."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAVERYSECRET123456")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")

    _, found = examined()

    assert found["s3"] == {"name": "s3", "state": "ok", "text": "credentials in AWS_ACCESS_KEY_ID"}
    assert "which is no file" in found["gs"]["text"]
    assert "AKIA" not in json.dumps(found)


def test_a_store_is_tested(examined, tmp_path):
    """A folder answers; an unknown scheme is a problem, and the exit code is 1."""
    assert examined("--store", str(tmp_path / "store"))[1]["store"]["state"] == "ok"

    code, found = examined("--store", "s4://bucket")

    assert (code, found["store"]["state"]) == (1, "problem")


@pytest.fixture
def without_packages(monkeypatch):
    """Makes packages appear missing (None) or old."""
    real = doctor.importlib.metadata.version
    changed = {"mlflow": None, "wandb": "0.1", "psutil": None}

    def version(name):
        if changed.get(name, "") is None:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return changed.get(name) or real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)


def test_an_extra_that_nobody_installed_is_no_warning(examined, without_packages):
    """An incomplete or outdated extra was wanted, so it's a warning."""
    _, found = examined()

    assert found["not installed"] == {
        "name": "not installed",
        "state": "ok",
        "text": "mlflow. To add one: pip install mlflow",
    }
    assert "extra mlflow" not in found
    assert found["extra system"] == {
        "name": "extra system",
        "state": "warning",
        "text": "psutil is not installed. Run: pip install --upgrade psutil",
    }
    assert "wandb 0.1 is older than" in found["extra wandb"]["text"]


def test_a_missing_extra_is_a_problem_if_you_ask_for_it(examined, without_packages):
    """The exit code is 1, so that a job can check before training; a misspelt name is reported."""
    code, found = examined("--extra", "mlflow", "--extra", "vewer")

    assert code == 1
    assert found["extra mlflow"] == {
        "name": "extra mlflow",
        "state": "problem",
        "text": "mlflow is not installed. Run: pip install --upgrade mlflow",
    }
    assert found["extra vewer"]["text"] == "no extra has this name. Did you mean 'viewer'?"
    assert "not installed" not in found


def test_a_wrong_clock_is_a_problem(examined, monkeypatch):
    """Stores refuse requests dated in another decade."""
    monkeypatch.setattr(time, "time", lambda: 86400.0)

    assert examined()[1]["clock"]["state"] == "problem"


def test_a_home_that_cannot_hold_uploads_is_a_warning(examined, tmp_path, monkeypatch):
    """It names an argument to use instead, and that one works."""
    monkeypatch.delenv("UPLOADS_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    (tmp_path / ".local").write_text("a file where the folder should be")

    spool = examined()[1]["spool"]
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "elsewhere"))
    helped = examined()[1]["spool"]

    assert spool["state"] == "warning"
    assert f"{tmp_path}/.local is not a writable folder: uploads need Artifacts(..., spool=" in spool["text"]
    assert (helped["state"], helped["text"]) == ("ok", f"uploads wait in {tmp_path}/elsewhere")


def test_a_full_disk_is_a_problem(examined, monkeypatch):
    """The doctor reports it before a run fails."""
    usage = doctor.shutil.disk_usage(".")._replace(free=1 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)

    assert examined()[1]["disk"]["state"] == "problem"


@pytest.mark.parametrize(
    "start", [["-m", "destinations", "doctor"], ["-m", "destinations.cli", "runs", "ls"]]
)
def test_a_conflicting_package_is_one_sentence_on_the_command_line(tmp_path, start):
    """There's no traceback: the line has what was found, and what to do."""
    (tmp_path / "events.py").write_text("class Event: ...\n")

    finished = subprocess.run(
        [sys.executable, *start],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )

    assert finished.returncode == 1
    assert finished.stderr == (
        "package 'events' must be the one that comes with training-destinations, got "
        f"{tmp_path / 'events.py'}. Rename that file, or uninstall that package, then install "
        "training-destinations again.\n"
    )


def test_the_distribution_of_a_conflicting_package_is_named(tmp_path):
    """PyPI's `Events` overwrites `events/__init__.py`; the sentence has a command to copy."""
    (tmp_path / "events").mkdir()
    (tmp_path / "events/__init__.py").write_text("from .events import Events\n")
    (tmp_path / "events/events.py").write_text("class Events: ...\n")
    info = tmp_path / "Events-0.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Events\nVersion: 0.5\n")
    (info / "RECORD").write_text("events/__init__.py,,\nevents/events.py,,\n")

    finished = subprocess.run(
        [sys.executable, "-m", "destinations", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )

    assert (
        "Run: pip uninstall -y Events && pip install --force-reinstall --no-deps training-destinations"
        in finished.stderr
    )


def test_the_demo_trains_and_leaves_a_run(tmp_path, monkeypatch, capsys):
    """It trains one epoch of real digits with masks, checkpoints and an upload; its printed command works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert cli.main(["demo", "--epochs", "1"]) == 0

    shown = capsys.readouterr()
    (command,) = re.findall(r"^Look at it: destinations (.*)$", shown.err, re.MULTILINE)
    assert cli.main(command.split()) == 0
    assert "metrics/test/accuracy" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    assert (tmp_path / "store" / folder.name / "metrics.csv").is_file()


def test_the_demo_without_its_package_names_the_extra(monkeypatch, capsys):
    """The error comes before torch is loaded."""
    monkeypatch.setitem(sys.modules, "sklearn", None)

    assert cli.main(["demo"]) == 1
    assert "pip install scikit-learn" in capsys.readouterr().err
