"""A disk that is full, broken, or has no descriptors left: what cannot be taken is refused, what was taken arrives."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.servers.failing_disk import FailingDisk
from tests.servers.stores import MemoryStore, StoreThatWaits
from uploads import UploadState
from uploads.errors import SpoolFullError

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
    """One call after the other fails: submit returns a handle.

    Refused means that nothing changed, anything else arrives.
    """
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


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_each_call_of_submit_pointer_may_fail(make_queue, make_file, gate, monkeypatch, code):
    """A pointer that cannot be staged is a refused handle as well."""
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


def test_a_refusal_is_raised_where_that_is_asked_for(make_queue, make_file, monkeypatch):
    """With raise_errors the caller gets SpoolFullError, which says what the disk did."""
    queue = make_queue(MemoryStore(), raise_errors=True)
    target = queue.submit(make_file(), "target")
    disk = FailingDisk(queue.spool.path, errno.EMFILE, is_ours=_of_main_thread)

    with disk.failing(monkeypatch, 1), pytest.raises(SpoolFullError):
        queue.submit_pointer("latest", target)
    with disk.failing(monkeypatch, 1), pytest.raises(SpoolFullError):
        queue.submit(make_file(), "a")


@pytest.mark.parametrize("short", [False, True], ids=["whole", "short"])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_each_call_of_an_upload_may_fail(make_queue, make_file, gate, monkeypatch, code, short):
    """One call of the uploading threads after the other fails: the file arrives, its handle ends well, and its line is in the log in the end."""
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


def test_a_spool_that_was_deleted_is_recreated_for_a_pointer(make_queue, make_file, tmp_path):
    """`submit_pointer` finds no spool, and makes one as `submit` does."""
    store = MemoryStore()
    queue = make_queue(store)
    target = queue.submit(make_file(), "target")
    target.result(LIMIT_SECONDS)
    shutil.rmtree(queue.spool.path)

    queue.submit_pointer("latest", target).result(LIMIT_SECONDS)

    assert store.objects["latest.symlink"] == b"target"


def test_a_move_that_cannot_remove_its_source_is_not_refused(make_queue, monkeypatch):
    """What is pending can no longer be refused: a move from another disk is a copy, and its source may be in a folder that cannot be written."""
    store = MemoryStore()
    queue = make_queue(store)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as other:  # noqa: PTH112, S108
        source = Path(other) / "a"
        source.write_bytes(b"copied")
        if source.stat().st_dev == queue.spool.path.stat().st_dev:
            pytest.skip("there is one disk only")
        with FailingDisk(Path(other), errno.EACCES, only=("unlink",)).failing(monkeypatch, 1) as disk:
            handle = queue.submit(source, "a", move=True)

        assert disk.failed == "unlink"
        assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
        assert source.exists()
    assert store.objects == {"a": b"copied"}


def test_a_move_from_another_disk_needs_room_on_this_one(make_queue, make_file):
    """It is a copy, which the floor of free space refuses; its source stays. A rename takes no room."""
    store = MemoryStore()
    queue = make_queue(store, free_bytes=1 << 60)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as other:  # noqa: PTH112, S108
        source = Path(other) / "a"
        source.write_bytes(b"copied")
        if source.stat().st_dev == queue.spool.path.stat().st_dev:
            pytest.skip("there is one disk only")

        copied = queue.submit(source, "copied", move=True)

        assert copied.state is UploadState.REFUSED
        assert "bytes free" in str(copied.exception(0))
        assert source.read_bytes() == b"copied"

    assert queue.submit(make_file(content=b"renamed"), "renamed", move=True).result(LIMIT_SECONDS)
    assert store.objects == {"renamed": b"renamed"}


@pytest.mark.parametrize("move", [True, False])
def test_a_file_that_is_given_up_is_not_waited_for(make_queue, monkeypatch, move):
    """A writer of a file that is moved is gone; that of one that is copied could still write in this tick."""
    queue = make_queue(MemoryStore())
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as other:  # noqa: PTH112, S108
        source = Path(other) / "a"
        source.write_bytes(b"just written")
        if source.stat().st_dev == queue.spool.path.stat().st_dev:
            pytest.skip("there is one disk only")
        waits = []
        with monkeypatch.context() as patch:
            patch.setattr("time.clock_gettime_ns", lambda _: source.stat().st_ctime_ns)
            patch.setattr("time.sleep", lambda seconds: waits.append(threading.get_ident()))
            handle = queue.submit(source, "a", move=move)

    assert (threading.get_ident() in waits) is not move
    assert handle.result(LIMIT_SECONDS)


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
    """On a file system of two megabytes that is full: refused handles, no exception.

    Afterwards the same queue delivers, and reopens.
    """
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
