"""Tests that a folder of checkpoints belongs to one saver, and that only saved files are removed."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from events import (
    Callback,
    CheckpointError,
    CheckpointSaver,
    CheckpointWriting,
    EngineClosedError,
    Trainer,
    read_checkpoint,
)
from events.trainer.checkpoint.files import has_identifier, remove_checkpoint
from tests.test_events.trainer.conftest import network

LOCK = ".ep{epoch}-ba{batch}.pt.lock"
HOLDS = """
import sys
from pathlib import Path
from uploads.disk import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire(run_name="theirs")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the folder like another trainer."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()


def names(folder):
    """Returns the names of all files in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("autoresume", "sharded"), [(False, False), (True, True)])
def test_a_folder_of_another_process_is_refused(make_trainer, holder, tmp_path, autoresume, sharded):
    """The error comes before anything is loaded, and names the owner."""
    who = rf"process {holder.pid} on {os.uname().nodename} saves checkpoints of run 'theirs' there, since 20"

    with pytest.raises(CheckpointError, match=who):
        make_trainer(save_folder=tmp_path, autoresume=autoresume, save_sharded=sharded)

    assert names(tmp_path) == [LOCK]


def test_the_folder_of_a_killed_process_is_free(make_trainer, holder, tmp_path):
    """It is free at once; its lock file is taken over, and finally removed."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()

    with make_trainer(save_folder=tmp_path) as trainer:
        trainer.fit()

    assert names(tmp_path) == ["ep1-ba5.pt", "ep2-ba10.pt", "latest.symlink"]


@pytest.mark.parametrize("is_uri", [False, True], ids=["folder", "store"])
def test_two_trainers_of_a_process_have_it_one_after_the_other(make_trainer, tmp_path, monkeypatch, is_uri):
    """The lock of a folder in a store is the one on this machine."""
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))
    folder = f"file://{tmp_path}/store" if is_uri else tmp_path / "saved"
    first = make_trainer(save_folder=folder)

    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* close its Trainer"):
        Trainer(network(), save_folder=folder, run_name="test")
    # It continues the run, so it takes over.
    make_trainer(save_folder=folder, autoresume=True).close()

    with pytest.raises(EngineClosedError):
        first.fit()
    assert not list(tmp_path.rglob(LOCK))


def test_savers_of_other_names_share_a_folder(make_trainer, tmp_path):
    """They belong to one run, or to several."""
    savers = [CheckpointSaver(tmp_path, f"{part}-{{batch}}.pt", latest_filename=None) for part in "ab"]

    with make_trainer(callbacks=savers, max_duration="1ep") as trainer:
        trainer.fit()

    assert names(tmp_path) == ["a-5.pt", "b-5.pt"]


def test_a_forked_child_does_not_keep_it(make_trainer, tmp_path):
    """Such as a worker of a dataloader that outlives the trainer."""
    trainer = make_trainer(save_folder=tmp_path)
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    trainer.close()

    make_trainer(save_folder=tmp_path).close()

    os.close(theirs)
    os.close(ours)
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_system_without_locks_is_reported(make_trainer, tmp_path, monkeypatch, caplog):
    """One warning is logged, and training continues."""
    monkeypatch.setattr("uploads.disk.fcntl", None)

    with make_trainer(save_folder=tmp_path, save_interval="2ba") as trainer:
        trainer.fit()

    assert caplog.text.count("cannot be locked") == 1
    assert len(list(tmp_path.glob("*.pt"))) == 6


class Swaps(Callback):
    """Puts something else where the first checkpoint is."""

    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.batch:
            self.path.unlink()
            self.path.write_bytes(b"of somebody else")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_that_somebody_else_put_there_is_not_removed(make_trainer, tmp_path, sharded):
    """The name alone does not make it the checkpoint that was saved; the others go."""
    path = tmp_path / ("ep0-ba2/manifest.json" if sharded else "ep0-ba2.pt")
    # Each is there when its batch has ended.
    writing = CheckpointWriting(asynchronous=False)
    saver = CheckpointSaver(tmp_path, save_interval="2ba", sharded=sharded, keep=1, writing=writing)

    with make_trainer(callbacks=[Swaps(path, 3), saver], max_duration="6ba") as trainer:
        trainer.fit()

    assert path.read_bytes() == b"of somebody else"
    assert [one for one in names(tmp_path) if "ba4" in one] == []


def test_files_that_a_killed_process_moved_aside_are_removed(make_trainer, tmp_path):
    """A process moves a file aside before it compares what it removes."""
    saver = CheckpointSaver(tmp_path)
    with make_trainer(callbacks=saver, max_duration="1ep") as trainer:
        trainer.fit()
    identifier = saver.state_dict()["saved"][0]["identifier"]
    path = tmp_path / "ep1-ba5.pt"
    assert has_identifier(path, identifier)
    path.rename(tmp_path / ".ep1-ba5.pt.0123456789ab.removed")
    (tmp_path / ".ep1-ba5.pt.0123456789ac.removed").write_bytes(b"mine")

    remove_checkpoint(path, identifier)

    assert names(tmp_path) == [".ep1-ba5.pt.0123456789ac.removed", "latest.symlink"]


@pytest.mark.parametrize("identifier", ["", "PK", "0" * 31])
def test_an_invalid_identifier_matches_no_file(tmp_path, identifier):
    """It comes from a file."""
    (tmp_path / "a.pt").write_bytes(f'PK"id": "{identifier}"'.encode())

    remove_checkpoint(tmp_path / "a.pt", identifier)

    assert names(tmp_path) == ["a.pt"]


def test_the_file_that_is_checked_is_the_one_that_is_loaded(make_trainer, tmp_path, monkeypatch):
    """This holds even if its name is given to another file in between."""
    for name, duration in (("a", "5ba"), ("b", "10ba")):
        with make_trainer(save_folder=tmp_path / name, max_duration=duration) as trainer:
            trainer.fit()
    wanted, other = tmp_path / "a" / "ep1-ba5.pt", tmp_path / "b" / "ep2-ba10.pt"
    load = torch.load

    def swapped(*arguments, **options):
        other.replace(wanted)
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", swapped)

    assert read_checkpoint(wanted)["timestamp"]["batch"] == 5
