"""`gc` deletes files that a run wrote, and nothing else."""

import fcntl
import json
import os
import shutil
import subprocess

import pytest

from destinations import RunDirectory
from destinations.run_directory.folder import RunInUseError
from destinations.runs import open_runs
from destinations.runs.commands import gc as gc_module
from events import Run
from tests.test_destinations.runs.folders import write_lightning, write_run
from tests.test_destinations.runs.foreign_runs import command, write_full_run


def gc(root, *more):
    """Runs `gc` on everything that is old enough; returns its messages by folder."""
    code, output, errors = command("gc", "--older-than", "0s", "--json", "--root", root, *more)
    assert (code, errors) == (0, "")
    return {one["path"].rpartition("/")[2]: one for one in json.loads(output)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A separate index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def files_of(folder):
    """Returns all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


FOREIGN = (
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
)


def test_a_folder_with_anything_else_is_kept(tmp_path):
    """Code, weights, notes, a repository or a run below it keep the whole folder, with a message."""
    for number, name in enumerate(FOREIGN):
        for kind in ("failed", "archived"):
            folder = tmp_path / "runs" / f"{kind}{number}"
            write_run(folder, folder.name, status="failed", archived=kind == "archived")
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f'{{"run_id": "{folder.name}-x"}}')
    before = files_of(tmp_path / "runs")

    found = gc(tmp_path / "runs", "--delete")

    assert files_of(tmp_path / "runs") == before
    assert {one["deleted"] for one in found.values()} == {False}
    # A failed run with weights counts as not empty.
    for number, name in enumerate(FOREIGN):
        assert name.split("/")[0] in found[f"archived{number}"]["kept"]


def test_a_run_below_a_failed_one_is_kept(tmp_path):
    """This also holds for a live run, a successful one, or one of Lightning."""
    root = tmp_path / "runs"
    write_run(root / "sweep", status="failed")
    write_run(root / "sweep/good", summary={"loss": 1.0})
    write_lightning(root / "sweep/lightning")

    assert gc(root, "--delete")["sweep"]["deleted"] is False
    with open_runs(root) as runs:
        assert len(runs) == 3


def test_a_project_that_is_a_failed_run_is_kept(tmp_path):
    """A user who logs into the project's own folder keeps the project."""
    project = write_run(tmp_path / "project", status="failed")
    (project / "train.py").write_text("print()\n")

    code, _, errors = command("gc", "--older-than", "0s", "--delete", "--root", project)

    assert code == 0
    assert (project / "train.py").read_text() == "print()\n"
    assert f"kept {project}: it contains train.py, which was not written by a run\n" in errors


def test_a_run_with_all_its_files_goes(tmp_path):
    """Its indexes name the media, tables and artifacts; the folder is deleted once nothing else is there."""
    root = tmp_path / "runs"
    run = write_full_run(root / "full")
    (run / "edits.json").write_text('{"archived": true}')
    os.utime(run / "heartbeat", (0, 0))

    dry = gc(root)

    assert dry["full"]["deleted"] is False
    assert dry["full"]["kept"] is None
    assert gc(root, "--delete")["full"]["deleted"] is True
    assert list(root.iterdir()) == []


def test_a_locked_run_is_kept(tmp_path):
    """A process is writing to it, whatever its sidecar and heartbeat say."""
    run = write_run(tmp_path / "runs/failed", status="failed")
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = gc(tmp_path / "runs", "--delete")

    assert (found["failed"]["deleted"], found["failed"]["kept"]) == (False, "it is being written")
    assert (run / "sidecar.json").exists()


def test_links_are_removed_and_never_followed(tmp_path):
    """A link in a folder of media isn't a file of the run."""
    run = write_run(tmp_path / "runs/failed", status="failed", archived=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("x")
    (run / "media").symlink_to(tmp_path / "precious")

    assert gc(tmp_path / "runs", "--delete")["failed"]["deleted"] is False
    assert (tmp_path / "precious/file").read_text() == "x"
    shutil.rmtree(tmp_path / "precious")


def test_runs_are_deleted_from_a_dataset_and_not_from_their_folders(tmp_path):
    """The original folder is often the only copy, and you can also give its path."""
    pytest.importorskip("deltalake")
    for name in ("one", "two", "three"):
        write_run(tmp_path / "runs" / name, name)
    dataset = tmp_path / "dataset"
    assert command("compact", tmp_path / "runs", dataset)[0] == 0
    shutil.rmtree(tmp_path / "runs/two")

    by_path = command("rm", tmp_path / "runs/one", "--root", dataset, "--yes")
    code, out, _ = command("rm", "two", "one", "--root", dataset, "--yes")
    refused = command("rm", "three", "--root", dataset, ask=lambda _: "n")
    collected = command("gc", "--older-than", "0s", "--delete", "--root", dataset)

    assert (code, out.splitlines()) == (0, [f"deleted {name} from {dataset}" for name in ("two", "one")])
    assert (by_path[0], refused[0], collected[0]) == (1, 1, 2)
    assert (tmp_path / "runs/one/sidecar.json").exists()
    assert [one["run_id"] for one in json.loads(command("ls", "--root", dataset, "--json")[1])] == ["three"]
    assert "1 deleted from the dataset before" in command("compact", tmp_path / "runs", dataset)[1]


@pytest.mark.parametrize("begins", [True, False])
def test_a_folder_that_appeared_during_the_question_is_kept(tmp_path, begins):
    """Only the folder that was shown is deleted."""
    run = write_run(tmp_path / "runs/one")

    def answer(_question):
        run.rename(tmp_path / "moved")
        if begins:
            write_run(run, "second")
        return "y"

    code, _, errors = command("rm", "one", "--root", tmp_path / "runs", ask=answer)

    assert code == 2
    assert errors.endswith("run one was not deleted: its folder was moved.\n")
    assert (tmp_path / "moved/sidecar.json").exists()
    assert (run / "sidecar.json").exists() == begins


def test_a_run_resumed_during_its_deletion_is_refused_or_kept(tmp_path, monkeypatch):
    """`gc` holds the run's lock until its files are gone, even if the run had no lock."""
    run = write_run(tmp_path / "runs/one")
    refused = []
    unlink = gc_module._unlink

    def resumed(*arguments):
        with pytest.raises(RunInUseError) as error:
            Run(loggers=[RunDirectory(run, if_exists="resume")], run_name="one").__enter__()
        refused.append(error)
        unlink(*arguments)

    monkeypatch.setattr(gc_module, "_unlink", resumed)
    code, _, _ = command("rm", "one", "--yes", "--root", tmp_path / "runs")

    assert (code, len(refused)) == (0, 1)
    assert not run.exists()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    """Its target is neither locked nor changed."""
    run = write_run(tmp_path / "runs/one")
    (tmp_path / "precious").write_text("x")
    (run / ".lock").symlink_to(tmp_path / "precious")

    code, _, errors = command("rm", "one", "--yes", "--root", tmp_path / "runs")

    assert (code, (tmp_path / "precious").read_text()) == (1, "x")
    assert "symbolic link" in errors
    assert (run / "sidecar.json").exists()


def test_folders_nested_too_deeply_are_kept(tmp_path):
    """A folder nested deeper than Python's stack is kept and named; others are deleted."""
    run = write_run(tmp_path / "runs/deep", archived=True)
    write_run(tmp_path / "runs/other", archived=True)
    (run / "media").mkdir()
    fd = os.open(run / "media", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        fd, above = os.open("d", os.O_RDONLY, dir_fd=fd), fd
        os.close(above)
    os.close(fd)

    found = gc(tmp_path / "runs", "--delete")
    code, _, errors = command("rm", "deep", "--yes", "--root", tmp_path / "runs")
    # pytest couldn't remove it either.
    subprocess.run(["rm", "-rf", tmp_path / "runs/deep/media"], check=True)

    assert (found["deep"]["deleted"], found["other"]["deleted"]) == (False, True)
    assert "nested too deeply" in found["deep"]["kept"]
    assert (code, "nested too deeply" in errors) == (1, True)
    assert (run / "sidecar.json").exists()


def shared_run(folder, **fields):
    """A run with an empty trainer, and a writer with rows and records."""
    write_run(folder, status="failed", **fields)
    write_full_run(folder, writer="eval")
    return folder


def test_a_run_goes_with_its_writers(tmp_path):
    """Writers' files belong to the run, and `gc` deletes no others."""
    root = tmp_path / "runs"
    shared_run(root / "archived", archived=True)
    shared_run(root / "named")

    found = gc(root, "--delete")
    code, _, _ = command("rm", "named", "--yes", "--root", root)

    assert found["archived"]["deleted"] is True
    assert code == 0
    assert not any(root.iterdir())


def test_a_run_with_rows_of_a_writer_is_not_empty(tmp_path):
    """It is kept, even if its trainer failed at once."""
    root = tmp_path / "runs"
    shared_run(root / "shared")

    assert gc(root, "--delete") == {}
    assert (root / "shared" / "writers" / "eval" / "metrics.csv").exists()


@pytest.mark.parametrize("name", ["writers/eval/notes.txt", "writers/notes.txt", "writers/a b/sidecar.json"])
def test_other_files_beside_a_writers_are_kept(tmp_path, name):
    """This may be a foreign file, or a folder that isn't a writer's."""
    run = shared_run(tmp_path / "runs" / "shared", archived=True)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("mine")
    before = files_of(run)

    found = gc(tmp_path / "runs", "--delete")

    assert "writers" in found["shared"]["kept"]
    assert files_of(run) == before


@pytest.mark.parametrize("arguments", [("rm", "shared", "--yes"), ("gc", "--older-than", "0s", "--delete")])
def test_a_run_with_a_live_writer_is_kept(tmp_path, arguments):
    """Its trainer has ended."""
    run = shared_run(tmp_path / "runs" / "shared", archived=True)
    with Run(loggers=[RunDirectory(run, writer="probe")], run_name="probe") as probe:
        probe.log_metrics({"loss": 1.0}, step=1)
        before = files_of(run)
        command(*arguments, "--root", tmp_path / "runs")
        assert files_of(run) == before

    assert (run / "writers" / "probe" / "metrics.csv").exists()


def test_a_run_with_a_locked_writer_is_kept(tmp_path):
    """Its heartbeat may be old."""
    run = shared_run(tmp_path / "runs" / "shared", archived=True)
    with (run / "writers" / "eval" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = gc(tmp_path / "runs", "--delete")
        code, _, errors = command("rm", "shared", "--yes", "--root", tmp_path / "runs")

    assert found["shared"]["kept"] == "it is being written"
    assert (code, "is running" in errors) == (2, True)
    assert (run / "writers" / "eval" / "metrics.csv").exists()


def test_a_run_in_a_folder_called_writers_is_another_run(tmp_path):
    """Its sidecar doesn't name it as a writer of the run around it."""
    run = write_run(tmp_path / "runs" / "around")
    write_run(run / "writers" / "inner")

    code, _, errors = command("rm", "around", "--yes", "--root", tmp_path / "runs")

    assert (code, "another run is in 'writers/inner'" in errors) == (2, True)
    assert (run / "writers" / "inner" / "sidecar.json").exists()
