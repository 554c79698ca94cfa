"""Tests the code that is kept with a run."""

import os
import subprocess
import zipfile

import pytest

from destinations import Functions
from events import CodeSnapshot, Run


@pytest.fixture
def keep(tmp_path):
    """Returns a function that takes a snapshot, and returns name and content of each file in it."""
    kept = {}

    def upload(state, name, path, *, overwrite):
        with zipfile.ZipFile(path) as archive:
            kept[name] = {one: archive.read(one) for one in archive.namelist()}

    def take(snapshot):
        with Run(Functions(upload_file=upload), snapshot, "mine"):
            pass
        return kept.get("mine/code.zip")

    return take


@pytest.fixture
def folder(tmp_path):
    """A folder with code, data, and something hidden."""
    root = tmp_path / "project"
    for name, content in {
        "train.py": b"print(1)",
        "models/net.py": b"x = 2",
        "data.bin": b"0" * 100,
        ".env.py": b"KEY = 1",
        "__pycache__/net.py": b"",
        "config.yaml": b"lr: 1",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def git(folder, *arguments):
    """Runs git there, as an anonymous user."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_code_is_kept_and_nothing_else(keep, folder):
    """Patterns choose the files; hidden files and caches aren't code."""
    assert keep(CodeSnapshot(folder)) == {
        "config.yaml": b"lr: 1",
        "models/net.py": b"x = 2",
        "train.py": b"print(1)",
    }


def test_in_a_repository_git_lists_the_files(keep, folder, caplog):
    """Files are archived as they are now; deleted ones are left out, and new ones are included and named."""
    (folder / ".gitignore").write_text("*.yaml\n__pycache__\n.env.py\n")
    (folder / "old.py").write_bytes(b"")
    git(folder, "init")
    git(folder, "add", "train.py", "old.py")
    git(folder, "commit", "-m", "x")
    (folder / "train.py").write_bytes(b"print(2)")
    (folder / "old.py").unlink()

    assert keep(CodeSnapshot(folder)) == {"train.py": b"print(2)"}
    assert "left out files that git does not track; `git add` them (1): models/net.py" in caplog.text


def test_without_an_answer_from_git_nothing_is_archived(keep, folder, tmp_path, monkeypatch, caplog):
    """The archive could otherwise contain files that git ignores."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    snapshot = CodeSnapshot(folder)
    snapshot._git_seconds = 0.1

    kept = keep(snapshot)

    assert kept is None
    assert "git ls-files timed out after 0.1 s." in caplog.text


def test_large_files_are_left_out_and_named(keep, folder, caplog):
    """One file may be too large, or all together."""
    (folder / "zeros.py").write_bytes(b"0" * 1000)

    kept = keep(CodeSnapshot(folder, max_file_bytes=500, max_bytes=10))

    assert kept == {"config.yaml": b"lr: 1", "models/net.py": b"x = 2"}
    assert "left out files that are too large (2): train.py, zeros.py" in caplog.text


def test_the_same_code_is_the_same_archive(folder):
    """The time does not matter."""
    archives = []
    for _ in range(2):
        with Run(
            Functions(upload_file=lambda state, name, path, *, overwrite: archives.append(path.read_bytes())),
            CodeSnapshot(folder),
            "mine",
        ):
            (folder / "train.py").touch()

    assert archives[0] == archives[1]


def test_without_an_uploading_destination_nothing_is_read(folder):
    """It costs nothing then."""
    with Run(Functions(log_metrics=print), CodeSnapshot(folder / "missing"), "mine") as run:
        run.batch_end()


def test_a_missing_folder_does_not_stop_training(keep, tmp_path):
    """The archive is empty."""
    assert keep(CodeSnapshot(tmp_path / "missing")) == {}


def test_a_name_in_another_encoding_is_kept_escaped(keep, folder):
    """ZIP files have no such names; the run begins anyway."""
    (folder / os.fsdecode(b"caf\xe9.py")).write_bytes(b"x = 3")

    assert keep(CodeSnapshot(folder, patterns=["*.py"])) == {
        "caf\\udce9.py": b"x = 3",
        "models/net.py": b"x = 2",
        "train.py": b"print(1)",
    }
