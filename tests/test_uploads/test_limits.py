"""Many files, large files and a jumping clock: memory is bounded, and order is kept."""

import ast
import gc
import os
import pathlib
import time
import tracemalloc

import pytest

import uploads
from tests.servers.stores import MemoryStore, StoreThatFails, StoreThatWaits
from uploads import RetryPolicy, UploadState
from uploads.errors import TransientStoreError
from uploads.spool.spool import Spool
from uploads.stores import Body
from uploads.stores.s3.parts import PartsUpload
from uploads.stores.s3.requests import Part

LIMIT_SECONDS = 240
MEBIBYTE = 1 << 20
SUMMARIES = """25 30 0:23 / {path} rw,relatime shared:1 - ext4 /dev/vda rw
31 30 {device} / {path} rw,relatime shared:2 master:1 - {kind} server:/home rw,vers=4.2
"""


class CountingStore(MemoryStore):
    """Reads everything and keeps nothing."""

    def put(self, name, body, *, overwrite, notes=None):
        self.objects[name] = sum(len(chunk) for chunk in body.chunks())


def test_a_file_larger_than_memory_is_streamed(make_queue, tmp_path):
    """A sparse file of 192 MiB is read, hashed and sent with a few MiB; the benchmark `scale` does 20 GiB."""
    source = tmp_path / "sparse"
    with source.open("wb") as stream:
        stream.truncate(192 * MEBIBYTE)
    store = CountingStore()
    queue = make_queue(store)
    tracemalloc.start()
    try:
        queue.submit(source, "sparse", link=True).result(LIMIT_SECONDS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert store.objects == {"sparse": 192 * MEBIBYTE}
    assert peak < 16 * MEBIBYTE


def test_waiting_files_take_little_memory_and_no_descriptors(make_queue, make_file, gate):
    """Each waiting entry takes about a kilobyte of memory at most."""
    source = make_file(content=b"x" * 1024)
    queue = make_queue(StoreThatWaits(gate), workers=1)
    for number in range(100):
        queue.submit(source, f"before{number}")
    descriptors = len([*pathlib.Path("/proc/self/fd").iterdir()])
    tracemalloc.start()
    try:
        for number in range(200):
            queue.submit(source, f"waiting{number}")
        gc.collect()
        waiting = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert waiting / 200 < 1500  # 750, and room for tables that grow.
    # The entry in flight, the flusher and housekeeping have some.
    assert len([*pathlib.Path("/proc/self/fd").iterdir()]) < descriptors + 50


class PartsThatAreCounted:
    """A server that takes every part, reads it and keeps its length."""

    checksum = "md5"

    def __init__(self):
        self.lengths = {}
        self.completed = None

    def create_upload(self, key, body):
        return "id", False

    def put_part(self, key, upload_id, number, data, _crc32, **_):
        self.lengths[number] = sum(map(len, iter(data.read, b"")))
        return Part(number, len(data), str(number))

    def complete(self, key, upload_id, parts, *_, **__):
        self.completed = [part.number for part in parts]


def test_a_file_in_parts_is_in_memory_a_few_pieces_at_a_time(tmp_path):
    """128 MiB in parts of 8 MiB, two at a time, take less than one of them."""
    import threading

    source = tmp_path / "sparse"
    with source.open("wb") as stream:
        stream.truncate(128 * MEBIBYTE)
    requests = PartsThatAreCounted()
    tracemalloc.start()
    try:
        with Body(source, "id") as body:
            slots = threading.BoundedSemaphore(2)
            PartsUpload(requests, "key", body, part_bytes=8 * MEBIBYTE, slots=slots, notes=None).run(
                {}, overwrite=True
            )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert requests.lengths == dict.fromkeys(range(1, 17), 8 * MEBIBYTE)
    assert requests.completed == list(range(1, 17))
    assert peak < 8 * MEBIBYTE


class ClockThatJumps:
    """A wall clock that is a day late, a day early, and right, in turn."""

    def __init__(self):
        self.right = time.time
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.right() + (-86_400, 86_400, 0)[self.calls % 3]


def test_a_clock_that_jumps_orders_and_delays_nothing(make_queue, make_file, gate, monkeypatch):
    """While the wall clock steps by days, back and forth, versions and pointers keep their order and retries their pace."""
    clock = ClockThatJumps()
    real = time.gmtime
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "gmtime", lambda seconds=None: real(clock() if seconds is None else seconds))
    store = StoreThatFails(*[TransientStoreError("503")] * 6)
    queue = make_queue(store, policy=RetryPolicy(first_seconds=0.01, cap_seconds=0.02), workers=2)

    handles = [
        queue.submit(make_file(content=b"%d" % number), "same", overwrite=True) for number in range(30)
    ]
    queue.submit_pointer("latest", handles[-1])

    assert queue.drain(LIMIT_SECONDS).is_empty
    assert store.objects == {"same": b"29", "latest.symlink": b"same"}
    assert store.order[-1] == "latest.symlink"
    assert {handle.state for handle in handles} <= {UploadState.DONE, UploadState.SUPERSEDED}
    assert clock.calls > 30


def test_the_wall_clock_is_read_for_people_only():
    """It only tells the age of a file, the offset of a wrong clock for S3, and since when a lock is held."""
    package = pathlib.Path(uploads.__file__).parent
    readers = sorted(
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in {"time.time", "time.time_ns", "datetime.now", "dt.datetime.now"}
    )

    assert sorted(set(readers)) == ["command_line.py", "disk.py", "stores/local.py", "stores/s3/errors.py"]


@pytest.mark.parametrize(
    ("kind", "warns"),
    [("nfs4", True), ("fuse.sshfs", True), ("ext4", False)],
)
def test_a_spool_on_a_network_file_system_is_warned_of(tmp_path, caplog, kind, warns):
    """The kind of file system decides, whatever the path looks like; the spool works all the same."""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        SUMMARIES.format(path=tmp_path, device=f"{os.major(device)}:{os.minor(device)}", kind=kind)
    )

    spool = Spool(tmp_path / "spool", mounts=mounts)
    spool.create()

    assert (f"network file system ({kind})" in caplog.text) == warns
    assert spool.pending.is_dir()


def test_a_system_that_does_not_say_what_is_mounted_is_believed(tmp_path, caplog):
    """Without a list of mounts there is no warning."""
    Spool(tmp_path / "spool", mounts=tmp_path / "missing").create()

    assert [record for record in caplog.records if record.name == "uploads"] == []
