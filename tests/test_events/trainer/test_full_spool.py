"""Tests checkpoints that wait in a bounded spool while the store is unreachable."""

import json
import logging

import pytest

from destinations import Artifacts, Console, RunDirectory
from events import CheckpointSaver, Retention
from tests.servers.stores import StoreThatFails
from uploads.errors import TransientStoreError


class Away(StoreThatFails):
    """A store that cannot be reached."""

    def put(self, name, body, *, overwrite, notes=None):
        raise TransientStoreError("away")


@pytest.fixture
def trained(make_trainer, tmp_path, capsys):
    """Trains ten batches with a checkpoint after each; returns what waits, the sidecar and the last lines."""

    def train(room, *, sharded=False, **rules):
        size = 0
        for folder, spool_bytes in (("measured", None), ("trained", room)):
            artifacts = Artifacts(
                Away(),
                spool=tmp_path / folder / "spool",
                spool_bytes=spool_bytes and int(spool_bytes * size),
                close_seconds=0,
                free_bytes=0,
            )
            saver = CheckpointSaver(
                tmp_path / folder / "saved",
                "{batch}.pt",
                save_interval="1ba",
                sharded=sharded,
                close_seconds=0,
                **rules,
            )
            with make_trainer(
                callbacks=[saver],
                loggers=[RunDirectory(tmp_path / folder / "run"), artifacts, Console()],
                max_duration="10ba" if size else "1ba",
            ) as trainer:
                trainer.fit()
                names = set(artifacts.queue.backlog().remaining)
            files = [path for path in (tmp_path / "measured/saved").rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
        sidecar = json.loads((tmp_path / "trained/run/sidecar.json").read_text())
        return {name.split("checkpoints/")[1] for name in names}, sidecar, capsys.readouterr().err

    return train


@pytest.mark.parametrize(
    ("room", "rules", "waiting"),
    [
        (2.5, {"keep": 2}, {"9.pt", "10.pt", "latest.symlink"}),
        (1.5, {"keep": 2}, {"10.pt", "latest.symlink"}),
        (2.5, {"keep": 3, "keep_in_store": Retention(2, every=7)}, {"7.pt", "10.pt", "latest.symlink"}),
    ],
)
def test_the_newest_checkpoints_wait(trained, caplog, room, rules, waiting):
    """Older ones give way, except those that a rule keeps for ever; nothing is lost."""
    names, sidecar, out = trained(room, **rules)

    assert names == waiting
    assert (sidecar["status"], sidecar["lost"]) == ("completed", {})
    assert "nothing is lost; finish with" in caplog.text
    assert "refused" not in caplog.text
    assert "completed: 1 epoch, 10 batches" in out.replace("2 epochs", "1 epoch")


def test_a_checkpoint_in_shards_waits_whole(trained):
    """No file of an older one is left."""
    names, sidecar, _ = trained(1.5, sharded=True, keep=2)

    assert {name.split("/")[0] for name in names} == {"10"}
    assert len(names) == 4
    assert sidecar["lost"] == {}


def test_a_run_whose_files_found_no_room_is_not_completed(trained, caplog):
    """The status, the last line and the log say so."""
    caplog.set_level(logging.INFO)

    names, sidecar, out = trained(0.5, keep=2)

    assert names == set()
    assert sidecar["status"] == "failed to write"
    assert sidecar["lost"] == {"uploads": 22}
    assert "lost 22 uploads" in sidecar["exception"]
    assert "failed to write: " in out
    assert ", 22 failed, 22 lost" in out
    assert "nothing is lost" not in caplog.text.split("1.pt was refused")[-1]


@pytest.mark.parametrize(
    ("room", "sharded", "checkpoints", "files"),
    [(None, False, 11, 12), (3.5, False, 3, 4), (None, True, 11, 44)],
)
def test_every_checkpoint_and_one_pointer_wait(trained, tmp_path, room, sharded, checkpoints, files):
    """A checkpoint in shards has four files on one rank."""
    trained(room, sharded=sharded, keep=None)

    saved = [path for path in (tmp_path / "measured/saved").rglob("*") if path.is_file()]
    staged = [path.stat().st_size for path in (tmp_path / "trained/spool").rglob("data")]
    # The last is saved at its batch, and again at the end of the epoch.
    assert len(staged) == files
    one = sum(path.stat().st_size for path in saved)
    assert sum(staged) == pytest.approx(checkpoints * one, rel=0.1)
