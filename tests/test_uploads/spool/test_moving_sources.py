"""Sources that change or aren't regular files: they are refused whole, or copied at one moment."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.effort import times
from tests.servers.failing_disk import FailingDisk
from tests.servers.stores import MemoryStore, StoreThatWaits
from uploads import UploadState
from uploads.errors import InvalidSourceError, RemoteNameTakenError, UnstableSourceError
from uploads.spool.staging import opened
from uploads.spool.staging import stage_copy as stage_open_copy

LIMIT_SECONDS = 60
WRITER = """
import os, random, sys, time
file, size, pause = os.open(sys.argv[1], os.O_RDWR), int(sys.argv[2]), float(sys.argv[3])
print("ready", flush=True)
number = 0
while True:
    number = (number + 1) % 256
    os.pwrite(file, bytes([number]) * size, 0)
    if pause:
        time.sleep(random.random() * pause)
"""


def stage_copy(source, target):
    """Copies a file as `submit` does."""
    with opened(source) as descriptor:
        return stage_open_copy(source, descriptor, target)


def _pending(queue):
    return sorted({*queue.spool.list_pending(), *queue.spool.list_inflight()})


@pytest.mark.parametrize("size", times([3_000_000], [65_536, 1_200_000, 3_000_000]))
@pytest.mark.parametrize("pause", [0, 0.02], ids=["always", "often"])
def test_a_copy_is_of_one_state_of_a_file_that_is_rewritten(make_file, tmp_path, size, pause):
    """Another process rewrites the file all the time; the copy shows one of its states, or is refused."""
    source = make_file(content=bytes(size))
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(source), str(size), str(pause)], stdout=subprocess.PIPE
    )
    taken, mixed = 0, 0
    try:
        writer.stdout.readline()
        for _ in range(60):
            try:
                stage_copy(source, tmp_path / "copy")
            except UnstableSourceError:
                continue
            taken += 1
            copied = (tmp_path / "copy").read_bytes()
            mixed += copied.count(copied[:1]) < size
    finally:
        writer.kill()
        writer.communicate()

    assert mixed == 0, f"{mixed} of {taken}"
    stage_copy(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_a_file_of_a_clock_that_is_ahead_is_taken(make_file, tmp_path, monkeypatch):
    """A file whose time is always in the future, as on a file server, is accepted once it stops changing."""
    monkeypatch.setattr("time.clock_gettime_ns", lambda _: 0)
    source = make_file(content=b"still")

    staged = stage_copy(source, tmp_path / "copy")

    assert (staged.size, (tmp_path / "copy").read_bytes()) == (5, b"still")


@pytest.mark.parametrize("bad", ["fifo", "broken link", "link", "taken name"])
def test_a_folder_is_refused_whole(make_queue, make_file, gate, tmp_path, bad):
    """Nothing of a folder is staged if one item can't be."""
    queue = make_queue(StoreThatWaits(gate), workers=1)
    for name in "abz":
        make_file(f"folder/{name}")
    if bad == "fifo":
        os.mkfifo(tmp_path / "folder/m")
    elif bad == "broken link":
        (tmp_path / "folder/m").symlink_to("nowhere")
    elif bad == "link":
        (tmp_path / "folder/m").symlink_to("z")
    else:
        queue.submit(make_file("folder/m"), "x/m")
    before = _pending(queue)

    with pytest.raises((InvalidSourceError, RemoteNameTakenError)):
        queue.submit(tmp_path / "folder", "x", move=True)

    assert _pending(queue) == before
    assert {path.name for path in (tmp_path / "folder").iterdir()} >= {"a", "b", "z"}


def test_a_folder_that_holds_the_spool_is_refused(make_queue, make_file, tmp_path):
    """The spool's own files would be submitted with it."""
    queue = make_queue(MemoryStore(), spool=tmp_path / "run/spool")
    make_file("run/a")

    with pytest.raises(InvalidSourceError, match="must not hold the queue's spool"):
        queue.submit(tmp_path / "run")

    assert queue.drain(0).is_empty


@pytest.mark.parametrize("call", ["scandir", "open"])
def test_a_folder_without_a_free_descriptor_is_refused_as_a_file_is(
    make_queue, make_file, tmp_path, monkeypatch, call
):
    """Training continues with a refused handle, whether listing or opening failed."""
    make_file("run/a")
    queue = make_queue(MemoryStore())
    disk = FailingDisk(tmp_path / "run", errno.EMFILE, only=(call,))

    with disk.failing(monkeypatch, 1):
        handle = queue.submit(tmp_path / "run")

    assert disk.failed == call
    assert handle.state is UploadState.REFUSED
    assert "Too many open files" in str(handle.exception(0))
    assert queue.submit(tmp_path / "run").result(LIMIT_SECONDS)


@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/cpuinfo"])
def test_a_file_without_a_size_is_refused(tmp_path, path):
    """Files that the kernel generates while they are read have no size to check."""
    with pytest.raises(
        (InvalidSourceError, UnstableSourceError), match=r"its file system reports|changed while"
    ):
        stage_copy(Path(path), tmp_path / "copy")


def test_one_inode_under_two_names_is_taken_twice(make_queue, make_file, tmp_path):
    """Each hard link is copied as a file of its own, and moving one leaves the other."""
    store = MemoryStore()
    first = make_file("first", b"shared")
    (tmp_path / "second").hardlink_to(first)
    queue = make_queue(store)

    handles = [
        queue.submit(first, "a"),
        queue.submit(first, "b", move=True),
        queue.submit(tmp_path / "second", "c"),
    ]

    assert [handle.result(LIMIT_SECONDS).state for handle in handles] == [UploadState.DONE] * 3
    assert store.objects == dict.fromkeys("abc", b"shared")
    assert (tmp_path / "second").read_bytes() == b"shared"


def test_names_at_the_limit_arrive(make_queue, make_file, tmp_path):
    """A source name of the file system's maximum and a remote name of 1,024 bytes work."""
    store = MemoryStore()
    source = make_file("n" * 255, b"long")
    name = "/".join(["p" * 127] * 8)

    make_queue(store).submit(source, name).result(LIMIT_SECONDS)

    assert store.objects == {name: b"long"}


def test_a_hole_of_a_terabyte_is_refused_for_want_of_room(make_queue, tmp_path):
    """A sparse file counts with its full size before it is copied."""
    source = tmp_path / "sparse"
    source.touch()
    os.truncate(source, 1 << 42)

    handle = make_queue(MemoryStore()).submit(source, "a")

    assert handle.state is UploadState.REFUSED


class DrainerThatRemembers:
    """An uploader that records the order of its entries."""

    def __init__(self):
        self.heard = []

    def add(self, folders):
        self.heard += folders


def test_versions_of_one_name_are_announced_in_the_order_of_their_numbers(make_queue, make_file):
    """Threads submit one name at once, and the uploader never gets a newer version first."""
    queue = make_queue(MemoryStore())
    real, queue._drainer = queue._drainer, DrainerThatRemembers()
    source = make_file()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [queue.submit(source, "a", overwrite=True) for _ in range(50)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
    finally:
        sys.setswitchinterval(before)
        heard, queue._drainer = queue._drainer.heard, real

    assert len(heard) == 200
    assert heard == sorted(heard)


@pytest.fixture
def replaced_while_read(monkeypatch):
    """Has another file renamed onto a path at its first reads, the given number of times."""

    def start(path, *contents):
        left, real = list(contents), os.preadv

        def preadv(descriptor, buffers, offset):
            if left and path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                newer = path.with_name("newer")
                newer.write_bytes(left.pop(0))
                newer.replace(path)
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(fcntl, "ioctl", _no_reflink)

    return start


def _no_reflink(*arguments):
    raise OSError(errno.EOPNOTSUPP, "not here")


def test_a_linked_file_that_is_replaced_by_rename_arrives_as_one_of_its_versions(
    make_queue, make_file, tmp_path, replaced_while_read
):
    """With `link=True`, a writer may rename a newer version onto the source during `submit`."""
    store = MemoryStore()
    queue = make_queue(store)
    source = make_file("model", b"older")
    replaced_while_read(source, b"newer version")

    handle = queue.submit(source, "model", link=True)

    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert store.objects == {"model": b"older"}
    assert source.read_bytes() == b"newer version"


@pytest.mark.parametrize("change", ["replaced", "appended"])
def test_a_file_that_changes_after_it_was_copied_is_not_removed(
    make_queue, other_disk, replaced_while_read, monkeypatch, change
):
    """A move from another disk removes only the file that it copied, not one with its name or newer bytes."""
    store = MemoryStore()
    queue = make_queue(store)
    source = other_disk / "model"
    source.write_bytes(b"older")
    if source.stat().st_dev == queue.spool.path.stat().st_dev:
        pytest.skip("there is one disk only")
    real = queue.spool.publish

    def publish(*arguments, **options):
        real(*arguments, **options)
        if change == "replaced":
            (other_disk / "newer").write_bytes(b"newer")
            (other_disk / "newer").replace(source)
        else:
            with source.open("ab") as stream:
                stream.write(b" and newer")

    monkeypatch.setattr(queue.spool, "publish", publish)

    handle = queue.submit(source, "model", move=True)

    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert store.objects == {"model": b"older"}
    assert source.read_bytes() == (b"newer" if change == "replaced" else b"older and newer")
    assert [path.name for path in other_disk.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("code", "how"),
    [(errno.EXDEV, "move"), (errno.EPERM, "move"), (errno.ENOENT, "link")],
    ids=["two mounts", "no links", "no proc"],
)
def test_a_file_that_cannot_be_linked_is_copied(make_queue, make_file, monkeypatch, code, how):
    """The kernel refuses links between bind mounts of one device, FAT has none, and macOS has no /proc."""
    store = MemoryStore()
    queue = make_queue(store)
    source = make_file("elsewhere/model", b"bytes")

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        handle = queue.submit(source, "model", **{how: True})

    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert store.objects == {"model": b"bytes"}
    assert source.exists() == (how == "link")


def test_a_ctrl_c_during_a_move_loses_no_file(make_queue, make_file, monkeypatch):
    """The file keeps its name until the spool has it."""
    queue = make_queue(MemoryStore())
    source = make_file("model", b"bytes")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(queue.spool, "publish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        queue.submit(source, "model", move=True)

    assert source.read_bytes() == b"bytes"
    assert list(queue.spool.tmp.iterdir()) == []


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_file_that_takes_the_name_of_a_moved_one_stays(make_queue, make_file, monkeypatch, size):
    """The file that was opened is moved; another one, or a symlink, keeps its name."""
    store = MemoryStore()
    queue = make_queue(store)
    source = make_file("model", b"older" * size)
    real = queue.spool.publish

    def publish(*arguments, **options):
        source.with_name("newer").write_bytes(b"newer")
        source.with_name("newer").replace(source)
        real(*arguments, **options)

    monkeypatch.setattr(queue.spool, "publish", publish)
    handle = queue.submit(source, "model", move=True)

    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert store.objects == {"model": b"older" * size}
    assert source.read_bytes() == b"newer"
