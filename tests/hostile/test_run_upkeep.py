"""`gc` deletes files that a run wrote, and nothing else."""

import fcntl
import json
import os
import shutil

import pytest

from destinations.runs import open_runs
from tests.hostile.foreign_runs import command, write_full_run
from tests.test_destinations.runs.folders import write_lightning, write_run


def gc(root, *more):
    """Runs `gc` on everything that is old enough; returns what it says of each run, by folder."""
    code, output, errors = command("gc", "--older-than", "0s", "--json", "--root", root, *more)
    assert (code, errors) == (0, "")
    return {one["path"].rpartition("/")[2]: one for one in json.loads(output)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An index of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def files_of(folder):
    """Returns all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize(
    "name",
    [
        "train.py",
        "model.pt",
        "MODEL.SAFETENSORS",
        "artifacts/last.pth",
        "checkpoints/step=1.ckpt",
        "weights/shard.distcp",
        "notes.txt",
        "media/holiday.jpg",
        "metrics.csv.bak",
        ".git/HEAD",
        "events.out.tfevents.1.host",
        "child/sidecar.json",
        "journal/notes.txt",
    ],
)
@pytest.mark.parametrize("archived", [True, False])
def test_a_folder_with_anything_else_is_kept(tmp_path, name, archived):
    """Code, weights, notes, a repository, a run below it: the folder is kept whole, and the reason is said."""
    run = write_run(tmp_path / "runs/failed", status="failed", archived=archived)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text('{"run_id": "x"}')
    before = files_of(tmp_path / "runs")

    found = gc(tmp_path / "runs", "--delete")

    assert files_of(tmp_path / "runs") == before
    assert [one["deleted"] for one in found.values()] in ([], [False])
    # Of weights, an empty run says that it is not empty.
    if archived:
        assert name.split("/")[0] in found["failed"]["kept"]


def test_a_run_below_a_failed_one_is_kept(tmp_path):
    """Also where it is alive, good, or of Lightning."""
    root = tmp_path / "runs"
    write_run(root / "sweep", status="failed")
    write_run(root / "sweep/good", summary={"loss": 1.0})
    write_lightning(root / "sweep/lightning")

    assert gc(root, "--delete")["sweep"]["deleted"] is False
    assert len(open_runs(root)) == 3


def test_a_project_that_is_a_failed_run_is_kept(tmp_path):
    """Who logs into the folder of the project has it still."""
    project = write_run(tmp_path / "project", status="failed")
    (project / "train.py").write_text("print()\n")

    code, _, errors = command("gc", "--older-than", "0s", "--delete", "--root", project)

    assert code == 0
    assert (project / "train.py").read_text() == "print()\n"
    assert f"kept {project}: it contains train.py, which was not written by a run\n" in errors


def test_a_run_with_all_its_files_goes(tmp_path):
    """Media, tables and artifacts that its indexes name are its own; only then is the folder deleted."""
    root = tmp_path / "runs"
    run = write_full_run(root / "full")
    (run / "edits.json").write_text('{"archived": true}')
    os.utime(run / "heartbeat", (0, 0))

    dry = gc(root)

    assert dry["full"]["deleted"] is False
    assert dry["full"]["kept"] is None
    assert gc(root, "--delete")["full"]["deleted"] is True
    assert list(root.iterdir()) == []


def test_a_run_whose_lock_is_held_is_kept(tmp_path):
    """Whatever its sidecar and heartbeat say: a process writes to it."""
    run = write_run(tmp_path / "runs/failed", status="failed")
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = gc(tmp_path / "runs", "--delete")

    assert (found["failed"]["deleted"], found["failed"]["kept"]) == (False, "it is being written")
    assert (run / "sidecar.json").exists()


def test_links_are_removed_and_never_followed(tmp_path):
    """A link in a folder of media is no file of the run."""
    run = write_run(tmp_path / "runs/failed", status="failed", archived=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("x")
    (run / "media").symlink_to(tmp_path / "precious")

    assert gc(tmp_path / "runs", "--delete")["failed"]["deleted"] is False
    assert (tmp_path / "precious/file").read_text() == "x"
    shutil.rmtree(tmp_path / "precious")
