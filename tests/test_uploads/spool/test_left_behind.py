"""Leftovers of dead processes: half-staged files, abandoned spools, and bytes that count."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers.stores import MemoryStore
from uploads.drain.drain import Drain
from uploads.errors import SpoolOwnedError, TransientStoreError
from uploads.handle import UploadState
from uploads.spool.entry import read_attempts
from uploads.spool.ownership import OwnerLock, owner_of
from uploads.spool.spool import Spool
from uploads.spool.staging import DiskQuota, Stager, Submission

LIMIT_SECONDS = 120

MOVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from uploads import UploadQueue

queue = UploadQueue(sys.argv[1], spool=sys.argv[2], free_bytes=0)

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

queue.spool.publish = die
queue.submit(sys.argv[3], "moved", move=True)
"""


def _run(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_process_that_dies_while_it_moves_a_file_leaves_it(tmp_path, make_file, make_queue, monkeypatch):
    """The next queue removes the rest, though a container has another host name at every start."""
    source = make_file("moved", b"x" * 100)
    _run(MOVE_AND_DIE, tmp_path / "store", tmp_path / "spool", source)
    monkeypatch.setattr("socket.gethostname", lambda: "renamed")

    queue = make_queue(tmp_path / "store", spool=tmp_path / "spool")

    assert source.read_bytes() == b"x" * 100
    assert [path for path in queue.spool.tmp.iterdir() if path.is_dir()] == []


def test_staged_files_of_a_living_process_are_kept(tmp_path):
    """The queue that owns the spool may be staging; leftovers are removed once it has ended."""
    spool = Spool(tmp_path)
    spool.create()
    left = spool.new_folder()

    with OwnerLock(spool.queue_lock, "queue"), spool.staging() as staged:
        assert Spool(tmp_path).sweep_tmp() == 0
        assert staged.is_dir()

    assert not staged.exists()
    assert left.is_dir()
    assert Spool(tmp_path).sweep_tmp() == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_spool_opens_despite_files_that_cannot_be_removed(tmp_path, make_queue, monkeypatch):
    """NFS keeps files in a folder that another machine has open; they are removed later."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    left = spool.new_folder()
    (left / "data").write_bytes(b"half")

    def busy(*_, **__):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        make_queue(MemoryStore()).close(LIMIT_SECONDS)
    assert left.is_dir()

    assert spool.sweep_tmp() == 1
    assert not left.exists()


class Down(MemoryStore):
    """An unreachable store."""

    def put(self, name, body, *, overwrite, notes=None):
        raise TransientStoreError("no route to host")


def test_the_limit_of_a_spool_is_held_over_restarts(make_queue, make_file):
    """Leftovers of earlier processes count until they are delivered."""
    taken = []
    for number in range(5):
        queue = make_queue(Down(), spool_bytes=250)
        taken += [queue.submit(make_file(content=b"x" * 100), f"{number}-{turn}").state for turn in (0, 1)]
        queue.close(0)
    assert [state is UploadState.REFUSED for state in taken] == [False] * 2 + [True] * 8

    queue = make_queue(MemoryStore(), spool_bytes=250)
    assert queue.drain(LIMIT_SECONDS).is_empty

    assert queue.submit(make_file(content=b"x" * 250), "last").result(LIMIT_SECONDS)


class Folder(MemoryStore):
    """A store in memory that is found again by its name; it may be down."""

    def __init__(self, name, *, is_down=False):
        super().__init__()
        self.name, self.is_down = name, is_down

    def uri(self, name=""):
        return f"memory://{self.name}/{name}"

    def put(self, name, body, *, overwrite, notes=None):
        if self.is_down:
            raise TransientStoreError("no route to host")
        return super().put(name, body, overwrite=overwrite)


@pytest.fixture
def three_ranks(make_queue, make_file, prefix):
    """The default spools of three ranks that ended while their store was down, each with a file in it."""
    ranks = [make_queue(Folder(prefix, is_down=True), spool=None) for _ in range(3)]
    for number, rank in enumerate(ranks):
        rank.submit(make_file(content=b"x"), f"rank{number}")
    for rank in ranks:
        rank.close(0)
    return [rank.spool for rank in ranks]


def test_a_single_rank_finds_the_leftovers_of_others(three_ranks, make_queue, prefix):
    """A training that restarts with fewer processes leaves nothing behind."""
    store = Folder(prefix)
    queue = make_queue(store, spool=None)

    backlog = queue.drain(LIMIT_SECONDS)

    assert sorted(store.objects) == ["rank0", "rank1", "rank2"]
    assert (backlog.is_empty, str(backlog), queue.unsettled()) == (True, "everything was uploaded", 0)
    assert [spool.list_pending() for spool in three_ranks] == [[], [], []]
    assert [owner_of(spool.queue_lock) is None for spool in three_ranks] == [False, True, True]


def test_an_upload_of_a_killed_rank_is_uploaded_once(make_queue, make_file, prefix):
    """The rank was killed during one upload, and after another whose delivery it hadn't noted."""
    rank, killed = (make_queue(Folder(prefix, is_down=True), spool=None) for _ in range(2))
    for name in ("during", "after"):
        killed.submit(make_file(content=b"x"), name)
    rank.close(0)
    killed.close(0)
    during, after = killed.spool.list_pending()
    killed.spool.claim(during)
    killed.spool.claim(after).rename(killed.spool.done / after)
    store = Folder(prefix)
    store.objects["after"] = b"x"

    backlog = make_queue(store, spool=None).drain(LIMIT_SECONDS)

    assert backlog.is_empty
    assert store.objects == {"during": b"x", "after": b"x"}
    assert dict(store.puts) == {"during": 1}
    assert [outcome.remote_name for outcome in killed.spool.delivered()] == ["after"]
    assert killed.spool.list_unfinished() == ([], [])


def test_an_answer_that_a_killed_rank_waited_for_counts_as_lost(make_queue, make_file, prefix):
    """It still counts after the next process fails, so that our own object isn't taken for a conflict."""
    rank, killed = (make_queue(Folder(prefix, is_down=True), spool=None) for _ in range(2))
    killed.submit(make_file(), "during")
    rank.close(0)
    killed.close(0)
    [folder] = killed.spool.list_pending()
    (killed.spool.claim(folder) / "attempts.json").unlink(missing_ok=True)
    queue = make_queue(Folder(prefix, is_down=True), spool=None)

    queue.close(0)

    assert read_attempts(queue.spool.place_of(folder)).is_answer_lost is True


def test_leftovers_of_other_ranks_are_named_until_they_are_uploaded(three_ranks, make_queue, prefix):
    """One spool holds all of them, so one command finishes them."""
    queue = make_queue(Folder(prefix, is_down=True), spool=None)
    assert queue.unsettled() == 3

    backlog = queue.close(0)

    assert sorted(backlog.remaining) == ["rank0", "rank1", "rank2"]
    assert f"resume {queue.spool.path}" in str(backlog)
    assert [len(spool.list_pending()) for spool in three_ranks] == [3, 0, 0]


def test_an_earlier_worker_keeps_its_uploads(three_ranks, make_queue, prefix):
    """They are named and stay with the worker; the next queue takes the rest."""
    store = Folder(prefix)
    with OwnerLock(three_ranks[1].drain_lock, "worker"):
        queue = make_queue(store, spool=None)
        [left] = queue.drain(LIMIT_SECONDS).left_behind
        assert (left.spool, left.remaining, queue.unsettled()) == (three_ranks[1].path, ("rank1",), 1)
        assert sorted(store.objects) == ["rank0", "rank2"]
    assert f"resume {three_ranks[1].path}" in str(queue.close(LIMIT_SECONDS))

    assert make_queue(store, spool=None).drain(LIMIT_SECONDS).is_empty

    assert sorted(store.objects) == ["rank0", "rank1", "rank2"]


def test_a_newer_version_replaces_one_that_another_rank_left(make_queue, make_file, prefix):
    """The older one's number in its own spool doesn't matter."""
    first, second = (make_queue(Folder(prefix, is_down=True), spool=None) for _ in range(2))
    for version in range(5):
        second.submit(make_file(content=b"old %d" % version), "name", overwrite=True)
    first.close(0)
    second.close(0)
    store = Folder(prefix)
    queue = make_queue(store, spool=None)

    queue.submit(make_file(content=b"new"), "name", overwrite=True)

    assert queue.drain(LIMIT_SECONDS).is_empty
    assert store.objects == {"name": b"new"}


def test_the_spool_of_a_living_rank_is_its_own(make_queue, make_file, prefix):
    """Another rank neither takes nor names its files."""
    living = make_queue(Folder(prefix, is_down=True), spool=None)
    living.submit(make_file(), "living")

    other = make_queue(Folder(prefix), spool=None)

    assert other.drain(LIMIT_SECONDS).is_empty
    assert other.unsettled() == 0
    assert living.unsettled() == 1


def test_a_left_spool_that_is_damaged_keeps_no_other_waiting(three_ranks, make_queue, prefix):
    """It is named, and the others are emptied."""
    damaged = three_ranks[1]
    (damaged.path / "tmp").rename(damaged.path / "was")
    (damaged.path / "tmp").symlink_to("/")
    store = Folder(prefix)

    backlog = make_queue(store, spool=None).drain(LIMIT_SECONDS)

    assert sorted(store.objects) == ["rank0", "rank2"]
    assert [(one.spool, one.remaining) for one in backlog.left_behind] == [(damaged.path, ("rank1",))]


def test_a_spool_on_nfs_is_finished_by_another_machine(tmp_path, make_file):
    """On NFS the bytes are on the server, so a file with zeros and no checksum isn't suspect after the first host died."""
    (tmp_path / "mounts").write_text("22 1 0:20 / / rw shared:1 - nfs4 server:/home rw\n")
    spools = [
        Spool(tmp_path / "spool", boot=boot, mounts=tmp_path / "mounts") for boot in ("one host", "another")
    ]
    spools[0].create()
    content = b"x" + bytes(2 << 20)
    quota = DiskQuota(tmp_path, spool_bytes=None, free_bytes=0, wait_seconds=0.0, clock=time.monotonic)
    submission = Submission(make_file(content=content), "a", "move")
    Stager(spools[0], quota).stage("1" * 16, submission, len(content), register=lambda _: None)
    store = MemoryStore()

    drain = Drain(spools[1], store)
    drain.start()
    drain.wait_idle(LIMIT_SECONDS)
    drain.stop(LIMIT_SECONDS)

    assert store.objects == {"a": content}


def test_a_lock_file_that_is_deleted_before_it_is_locked_locks_nothing(tmp_path, monkeypatch):
    """Another process locks the new file, so the one that locked the deleted file looks again."""
    path = tmp_path / "queue.lock"
    other = OwnerLock(path, "queue")
    real = fcntl.flock

    def flock(*arguments):
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()
        other.take()
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(SpoolOwnedError):
        OwnerLock(path, "drain").take()
    other.release()
