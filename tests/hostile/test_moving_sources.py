"""Sources that are not quiet regular files: they are refused whole, or taken as they were at one moment."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.servers.stores import MemoryStore, StoreThatWaits
from uploads import UploadState
from uploads.errors import InvalidSourceError, RemoteNameTakenError, UnstableSourceError
from uploads.spool.staging import stage_copy

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


def _pending(queue):
    return [*queue.spool.list_pending(), *queue.spool.list_inflight()]


@pytest.mark.parametrize("size", [65_536, 1_200_000, 3_000_000])
@pytest.mark.parametrize("pause", [0, 0.02], ids=["always", "often"])
def test_a_copy_is_of_one_state_of_a_file_that_is_rewritten(make_file, tmp_path, size, pause):
    """Another process rewrites the file in place all the time: what is taken is one of its states, anything else is refused."""
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
            mixed += len(set((tmp_path / "copy").read_bytes())) > 1
    finally:
        writer.kill()
        writer.communicate()

    assert mixed == 0, f"{mixed} of {taken}"
    stage_copy(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_a_file_of_a_clock_that_is_ahead_is_taken(make_file, tmp_path, monkeypatch):
    """Where the time of a file is always later than now, as on a file server, it is taken when it stands still."""
    monkeypatch.setattr("time.clock_gettime_ns", lambda _: 0)
    source = make_file(content=b"still")

    staged = stage_copy(source, tmp_path / "copy")

    assert (staged.size, (tmp_path / "copy").read_bytes()) == (5, b"still")


@pytest.mark.parametrize("bad", ["fifo", "broken link", "taken name"])
def test_a_folder_is_refused_whole(make_queue, make_file, gate, tmp_path, bad):
    """Nothing of a folder is staged where one thing in it cannot be."""
    queue = make_queue(StoreThatWaits(gate), workers=1)
    for name in "abz":
        make_file(f"folder/{name}")
    if bad == "fifo":
        os.mkfifo(tmp_path / "folder/m")
    elif bad == "broken link":
        (tmp_path / "folder/m").symlink_to("nowhere")
    else:
        queue.submit(make_file("folder/m"), "x/m")
    before = _pending(queue)

    with pytest.raises((InvalidSourceError, RemoteNameTakenError)):
        queue.submit(tmp_path / "folder", "x", move=True)

    assert _pending(queue) == before
    assert {path.name for path in (tmp_path / "folder").iterdir()} >= {"a", "b", "z"}


@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/cpuinfo"])
def test_a_file_without_a_size_is_refused(tmp_path, path):
    """What the kernel makes up while it is read has no size to check by."""
    with pytest.raises(
        (InvalidSourceError, UnstableSourceError), match=r"its file system reports|changed while"
    ):
        stage_copy(Path(path), tmp_path / "copy")


def test_a_file_that_grows_is_refused_until_it_rests(make_file, tmp_path):
    """A log that is appended to all the time is not cut in the middle of a line.

    When its writer is done it is taken.
    """
    source = make_file(content=b"")
    program = "import sys\nwith open(sys.argv[1], 'ab', 0) as log:\n print(flush=True)\n while True: log.write(b'a line\\n')"
    writer = subprocess.Popen([sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE)
    try:
        writer.stdout.readline()
        for _ in range(10):
            try:
                size = stage_copy(source, tmp_path / "copy").size
            except UnstableSourceError:
                continue
            assert (tmp_path / "copy").stat().st_size == size
            assert size % 7 == 0
    finally:
        writer.kill()
        writer.communicate()

    assert stage_copy(source, tmp_path / "copy").size == source.stat().st_size


def test_one_inode_under_two_names_is_taken_twice(make_queue, make_file, tmp_path):
    """Hard links of one file are files of their own: each is copied, and moving one leaves the other."""
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
    """A source whose name is as long as the file system takes, and a remote name of 1,024 bytes, are no trouble to the spool."""
    store = MemoryStore()
    source = make_file("n" * 255, b"long")
    name = "/".join(["p" * 127] * 8)

    make_queue(store).submit(source, name).result(LIMIT_SECONDS)

    assert store.objects == {name: b"long"}


def test_a_hole_of_a_terabyte_is_refused_for_want_of_room(make_queue, tmp_path):
    """A sparse file counts with its whole size before a byte of it is copied."""
    source = tmp_path / "sparse"
    source.touch()
    os.truncate(source, 1 << 42)

    handle = make_queue(MemoryStore()).submit(source, "a")

    assert handle.state is UploadState.REFUSED


class DrainerThatRemembers:
    """Stands for what uploads; notes in which order it gets entries."""

    def __init__(self):
        self.heard = []

    def add(self, folders):
        self.heard += folders


def test_versions_of_one_name_are_announced_in_the_order_of_their_numbers(make_queue, make_file):
    """Threads submit one name at once: the uploader never gets a newer version before an older one."""
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
