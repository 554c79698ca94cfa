"""A disk that is full, broken, or out of descriptors: refused files are reported, accepted files arrive."""

import errno
import os
import shutil
import subprocess
import sys
import threading

import pytest

from tests.servers.failing_disk import FailingDisk
from tests.servers.stores import MemoryStore, StoreThatFails, StoreThatWaits
from uploads import UploadState
from uploads.command_line import gc
from uploads.errors import (
    RemoteConflictError,
    SpoolError,
    SpoolOwnedError,
    SpoolUnusableError,
    TransientStoreError,
)

LIMIT_SECONDS = 60
CODES = {"full": errno.ENOSPC, "broken": errno.EIO, "no descriptors": errno.EMFILE}


def _of_main_thread():
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("short", [False, True], ids=["whole", "short"])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize(
    ("move", "durability"), [(False, "process"), (True, "process"), (False, "power"), (True, "power")]
)
def test_each_call_of_submit_may_fail(
    make_queue, make_file, gate, tmp_path, monkeypatch, code, short, move, durability
):
    """Whichever system call fails, `submit` returns a handle."""
    store = StoreThatWaits(gate)
    queue = make_queue(store)
    disk = FailingDisk(queue.spool.path, code, is_ours=_of_main_thread)
    taken, refused = [], []
    for number in range(1, 100):
        source = make_file(f"source-{number}", b"%d" % number)
        with disk.failing(monkeypatch, number, short=short):
            handle = queue.submit(source, f"n{number}", move=move, durability=durability)
        about = (number, disk.failed, handle.state)
        if handle.state is UploadState.REFUSED:
            refused.append(number)
            assert source.read_bytes() == b"%d" % number, about
            assert handle.folder not in (*queue.spool.list_pending(), *queue.spool.list_inflight()), about
        else:
            taken.append(number)
            assert source.exists() != move, about
        if not disk.failed:
            break
    gate.set()

    assert refused
    assert not disk.failed
    assert queue.drain(LIMIT_SECONDS).remaining == ()
    assert store.objects == {f"n{number}": b"%d" % number for number in taken}
    assert [path for path in queue.spool.tmp.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("code", [*CODES.values(), errno.EDQUOT], ids=[*CODES, "over quota"])
def test_each_call_of_submit_pointer_may_fail(make_queue, make_file, gate, monkeypatch, code):
    """A pointer that can't be staged is a refused handle too."""
    queue = make_queue(StoreThatWaits(gate))
    target = queue.submit(make_file(), "target")
    disk = FailingDisk(queue.spool.path, code, is_ours=_of_main_thread)
    states = []
    for number in range(1, 100):
        with disk.failing(monkeypatch, number):
            states.append(queue.submit_pointer(f"latest-{number}", target).state)
        if not disk.failed:
            break
    gate.set()

    assert UploadState.REFUSED in states
    assert not states[-1].is_failure
    assert queue.drain(LIMIT_SECONDS).remaining == ()


@pytest.mark.parametrize("short", [False, True], ids=["whole", "short"])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_each_call_of_an_upload_may_fail(make_queue, make_file, gate, monkeypatch, code, short):
    """Whichever call of an uploading thread fails, the file arrives, its handle settles, and its line is logged."""
    # The queue looks this often for what couldn't be logged.
    monkeypatch.setattr("uploads.drain.drain._RESCAN_SECONDS", 0.1)
    monkeypatch.setattr("uploads.drain.drain._TICK_SECONDS", 0.1)
    store = MemoryStore()
    queue = make_queue(store, workers=1)
    disk = FailingDisk(queue.spool.path, code, is_ours=lambda: not _of_main_thread())
    names = []
    for number in range(1, 60):
        source = make_file(f"source-{number}", b"%d" % number)
        names.append(f"n{number}")
        with disk.failing(monkeypatch, number, short=short):
            assert queue.submit(source, names[-1]).result(LIMIT_SECONDS).state is UploadState.DONE
        if not disk.failed:
            break

    queue.close(LIMIT_SECONDS)

    assert store.objects == {name: name[1:].encode() for name in names}
    assert {outcome.remote_name for outcome in queue.spool.delivered()} == set(names)
    assert queue.spool.list_done() == []


@pytest.mark.parametrize(
    ("code", "is_new"),
    [
        (errno.ENOSPC, True),
        (errno.EMFILE, True),
        (errno.EDQUOT, True),
        (errno.ENOSPC, False),
        (errno.EIO, False),
    ],
    ids=["full", "no descriptors", "over quota", "full with leftovers", "broken with leftovers"],
)
def test_each_call_of_a_new_queue_may_fail(make_queue, make_file, tmp_path, monkeypatch, code, is_new):
    """The queue opens and delivers leftovers, or raises SpoolUnusableError and holds no lock."""
    names, opened, refused = set(), 0, 0
    store = MemoryStore()
    for number in range(1, 100):
        spool = tmp_path / f"spool-{number}"
        if not is_new:
            left = make_queue(StoreThatFails(*[TransientStoreError("down")] * 1000), spool=spool)
            left.submit(make_file(), f"n{number}")
            left.close(0)
            names.add(f"n{number}")
        disk = FailingDisk(spool, code, is_ours=_of_main_thread)
        with disk.failing(monkeypatch, number):
            try:
                make_queue(store, spool=spool).close(0)
            except SpoolUnusableError:
                refused += 1
            else:
                opened += 1
        assert make_queue(store, spool=spool).drain(LIMIT_SECONDS).is_empty
        if not disk.failed:
            break

    assert not disk.failed
    assert opened
    assert refused
    assert set(store.objects) == names


def test_a_queue_that_is_opened_on_a_full_disk_delivers_what_is_left(
    make_queue, make_file, tmp_path, monkeypatch
):
    """Otherwise the disk would stay full."""
    left = make_queue(StoreThatFails(*[TransientStoreError("down")] * 1000))
    left.submit(make_file(), "a")
    left.close(0)
    store = MemoryStore()
    disk = FailingDisk(tmp_path / "spool", errno.ENOSPC, only=("write", "pwrite"))

    with disk.failing(monkeypatch, 1, for_good=True):
        queue = make_queue(store)
        waiting = queue.drain(LIMIT_SECONDS).remaining

    assert disk.failed
    assert waiting == ()
    assert store.objects == {"a": b"content"}


@pytest.mark.parametrize(
    "left", [(), ("tmp",), ("pending", "tmp"), ("inflight", "pending", "tmp", "done", "quarantine")]
)
def test_a_partly_deleted_spool_is_repaired(make_queue, make_file, tmp_path, left):
    """If a program removes empty folders, later files are still delivered, and failed ones are kept."""
    store = MemoryStore()
    queue = make_queue(store)
    queue.submit(make_file(), "a").result(LIMIT_SECONDS)
    for path in queue.spool.path.iterdir():
        if path.is_dir() and path.name not in left:
            shutil.rmtree(path)

    delivered = queue.submit(make_file(), "b").result(LIMIT_SECONDS)
    failed = queue.submit(make_file(content=b"other"), "a").exception(LIMIT_SECONDS)
    queue.close(LIMIT_SECONDS)

    assert delivered.state is UploadState.DONE
    assert isinstance(failed, RemoteConflictError)
    assert len(queue.spool.list_failed()[UploadState.CONFLICT]) == 1
    assert [outcome.remote_name for outcome in queue.spool.delivered()] == ["a", "b"]
    assert queue.spool.list_unfinished() == ([], [])


def test_a_deleted_spool_stays_the_queues_own(make_queue, make_file):
    """A deleted lock protects nothing, so the queue takes a new one with the new spool."""
    queue = make_queue(MemoryStore())
    shutil.rmtree(queue.spool.path)

    queue.submit(make_file(), "a").result(LIMIT_SECONDS)

    with pytest.raises(SpoolOwnedError):
        make_queue(MemoryStore())


def test_user_files_in_the_folder_are_kept(make_queue, tmp_path):
    """A user names a project folder as the spool, with a `tmp/` of its own."""
    for name in ("tmp/notes.txt", "tmp/cache/array.npy", f"tmp/{'0' * 32}"):
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_bytes(b"mine")

    make_queue(MemoryStore(), spool=tmp_path / "project").close(LIMIT_SECONDS)
    removed = gc(tmp_path / "project", failed=True)

    assert removed == {"half_staged": 0, "failed": 0}
    assert sorted(path.name for path in (tmp_path / "project/tmp").rglob("*")) == [
        "0" * 32,
        "array.npy",
        "cache",
        "notes.txt",
    ]


def test_a_folder_that_is_no_spool_is_not_made_one(tmp_path):
    """`gc` and `resume` refuse the wrong folder, even if it has a `tmp/`."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/notes.txt").write_bytes(b"mine")

    with pytest.raises(SpoolError, match="is not a spool"):
        gc(tmp_path)

    assert [path.name for path in tmp_path.rglob("*")] == ["tmp", "notes.txt"]


def test_a_move_that_cannot_remove_its_source_is_not_refused(make_queue, other_disk, monkeypatch):
    """A move from another disk is a copy, and its source may be in a read-only folder; a pending entry can't be refused."""
    store = MemoryStore()
    queue = make_queue(store)
    source = other_disk / "a"
    source.write_bytes(b"copied")
    with FailingDisk(other_disk, errno.EACCES, only=("unlink",)).failing(monkeypatch, 1) as disk:
        handle = queue.submit(source, "a", move=True)

    assert disk.failed == "unlink"
    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert source.exists()
    assert store.objects == {"a": b"copied"}


def test_a_move_from_another_disk_needs_room_on_this_one(make_queue, other_disk, make_file):
    """Such a move is a copy, so the limit of free space refuses it and keeps the source; a link takes no room."""
    store = MemoryStore()
    queue = make_queue(store, free_bytes=1 << 60)
    source = other_disk / "a"
    source.write_bytes(b"copied")

    copied = queue.submit(source, "copied", move=True)

    assert copied.state is UploadState.REFUSED
    assert "bytes free" in str(copied.exception(0))
    assert source.read_bytes() == b"copied"

    assert queue.submit(make_file(content=b"linked"), "linked", move=True).result(LIMIT_SECONDS)
    assert store.objects == {"linked": b"linked"}


FULL = """
import logging, os, pathlib, sys
logging.basicConfig()
from uploads import UploadQueue
disk, store = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
queue = UploadQueue(store, spool=disk / "spool", free_bytes=0, isolation="threads")
(store.parent / "source").write_bytes(b"x" * 300_000)
states, accepted = [], 0
filler = open(disk / "filler", "wb", buffering=0)
try:
    while True:
        filler.write(b"f" * 65536)
except OSError:
    pass
for number in range(20):
    states.append(str(queue.submit(store.parent / "source", f"é{number}").state))
    states.append(str(queue.submit_pointer(f"p{number}", queue.submit(store.parent / "source", f"q{number}")).state))
filler.truncate(0)
last = queue.submit(store.parent / "source", "last").result(60)
queue.close(60)
print(set(states), last.state, flush=True)
UploadQueue(store, spool=disk / "spool", free_bytes=0, isolation="threads").close(60)
print("reopened", flush=True)
"""


def test_a_real_disk_fills_up_and_is_emptied(tmp_path):
    """On a full file system of two megabytes, handles are refused and nothing raises."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=2m none {disk}"
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-Urm", "sh", "-c", mount], check=False).returncode
    ):
        pytest.skip("no file system can be mounted here")

    done = subprocess.run(
        [
            "unshare",
            "-Urm",
            "sh",
            "-c",
            f'{mount} && exec "$@"',
            "-",
            sys.executable,
            "-c",
            FULL,
            disk,
            tmp_path / "store",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert done.stdout == "{'refused'} done\nreopened\n", done.stderr
    assert "Traceback" not in done.stderr
