"""A power loss at every moment of a spool's life, and the next drain."""

import os

import pytest

from tests.servers.recorded_disk import RecordedDisk
from tests.servers.stores import MemoryStore
from uploads import RetryPolicy, Timeouts, UploadQueue
from uploads.drain.drain import Drain
from uploads.spool.spool import Spool

LIMIT_SECONDS = 120
LARGE = bytes(range(256)) * 4097  # Above 1 MiB: copied without a checksum.
CONTENTS = {"small": b"small bytes", "moved": b"moved bytes", "large": LARGE, "again": b"the newest"}


class MarkingStore(MemoryStore):
    """Marks in the disk's record what it has accepted."""

    def __init__(self, disk):
        super().__init__()
        self.disk = disk

    def put(self, name, body, *, overwrite, notes=None):
        done = super().put(name, body, overwrite=overwrite, notes=notes)
        self.disk.mark(("stored", name, self.objects[name]))
        return done


def _write(path, content):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, content)
    os.close(descriptor)
    return path


def _submit_all(queue, disk, folder):
    for name in ("small", "moved", "large"):
        queue.submit(_write(folder / f"source-{name}", CONTENTS[name]), name, move=name == "moved")
        disk.mark(("accepted", name))
    for content in (b"old", CONTENTS["again"]):
        queue.submit(_write(folder / "source-again", content), "again", overwrite=True)
        (folder / "source-again").unlink()
    disk.mark(("accepted", "again"))


def _recorded_life(tmp_path, monkeypatch, durability):
    """Submits, flushes and delivers four files, in this order."""
    disk = RecordedDisk(tmp_path / "disk")
    disk.root.mkdir()
    (tmp_path / "user").mkdir()
    store = MarkingStore(disk)
    with disk.recording(monkeypatch):
        folder = disk.root / "user"
        folder.mkdir()
        queue = UploadQueue(
            store,
            spool=disk.root / "spool",
            workers=1,
            durability=durability,
            free_bytes=0,
            close_at_exit=False,
            timeouts=Timeouts(give_back_seconds=LIMIT_SECONDS),
        )
        queue._flusher._sync_disk = disk.sync_disk
        queue._flusher._delay_seconds = 2 * LIMIT_SECONDS  # Until it's stopped, however slow this thread is.
        queue._drainer._schedule.pause(3600)
        _submit_all(queue, disk, folder)
        queue._flusher.stop(LIMIT_SECONDS)
        disk.mark(("flushed", tuple(CONTENTS)))
        queue._drainer._schedule.resume()
        assert queue.drain(LIMIT_SECONDS).is_empty
        queue.close(LIMIT_SECONDS)
    return disk


def _marks(disk, crash, kind):
    return [one.mark[1:] for one in disk.operations[:crash] if one.kind == "mark" and one.mark[0] == kind]


def _drained(disk, folder, crash, last_name, turn):
    """The store after the power came back and the spool was resumed, and the names in failed/."""
    disk.rebuild(folder, crash, last_name=last_name, turn=turn)
    store = MemoryStore()
    store.objects.update(dict(_marks(disk, crash, "stored")))
    spool = Spool(folder / "spool", boot="after the loss of power")
    spool.create()
    spool.sweep_tmp()
    drain = Drain(spool, store, workers=1, policy=RetryPolicy(first_seconds=0.001, cap_seconds=0.001))
    drain.start()
    assert drain.wait_idle(LIMIT_SECONDS)
    drain.stop(LIMIT_SECONDS)
    return store.objects, spool.list_failed()


def _moments(disk):
    """Yields every moment of the spool, with the most and fewest names missing and all fates of its bytes."""
    for crash in range(16, len(disk.operations) + 1):
        yield crash, (0 if crash // 4 % 2 else crash), crash


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_power_loss_at_any_moment_keeps_what_was_promised(tmp_path, monkeypatch, durability):
    """With "power" every accepted file arrives; with "process" every file older than a second."""
    disk = _recorded_life(tmp_path, monkeypatch, durability)
    moments = list(_moments(disk))

    lost = 0
    for number, (crash, last_name, turn) in enumerate(moments):
        objects, failed = _drained(disk, tmp_path / f"after-{number}", crash, last_name, turn)
        accepted = [name for (name,) in _marks(disk, crash, "accepted")]
        flushed = [name for (names,) in _marks(disk, crash, "flushed") for name in names]
        safe = accepted if durability == "power" else flushed
        about = (crash, last_name, turn, disk.operations[crash - 1], failed)
        assert {name: objects.get(name) for name in safe} == {name: CONTENTS[name] for name in safe}, about
        for name, content in objects.items():
            assert content == CONTENTS[name] or (
                name == "again" and content == b"old" and name not in safe
            ), about
        lost += len(set(accepted) - set(objects))

    assert len(moments) > 100
    assert (lost > 0) == (durability == "process")  # Otherwise the model loses nothing, and proves nothing.
