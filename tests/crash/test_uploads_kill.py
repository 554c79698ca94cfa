"""kill -9 of the trainer and of the worker: every accepted file arrives, once, as it was."""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.effort import times
from uploads.spool.ownership import owner_of
from uploads.spool.spool import Spool

LIMIT_SECONDS = 240
TRAINER = """
import os, pathlib, sys
from uploads import Timeouts, UploadQueue
uri, folder, count, isolation = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
queue = UploadQueue(uri, spool=folder / "spool", isolation=isolation, free_bytes=0, timeouts=Timeouts(grace_seconds=0.0 if isolation == "threads" else float(sys.argv[5])))
if isolation == "threads":  # So that the kill finds uploads, not imports.
    (folder / "warm").write_bytes(b"warm")
    queue.submit(folder / "warm", "warm").result(240)
for number in range(count):
    source = folder / f"source-{number}"
    source.write_bytes(b"%d " % number * 2000)
    queue.submit(source, f"n{number:03d}", move=True)
    print(number, flush=True)
print("all", flush=True)
queue.drain(240)
print("drained", flush=True)
os._exit(0)
"""


def _content(number):
    return b"%d " % number * 2000


def _contents(numbers):
    return {f"n{number:03d}": _content(number) for number in numbers}


def _uri(server, prefix, turn):
    """Every other turn through obstore: another client, and a child that starts in a third of the time."""
    return server.uri(prefix) + ("&client=obstore" if turn % 2 else "")


def _assert_put_once(server, prefix, objects):
    """Each object is put once, however often it was tried: a retry finds its own, or is refused."""
    assert {name: server.puts[f"{prefix}/{name}"] for name in objects} == dict.fromkeys(objects, 1)
    assert sum(server.refused[f"{prefix}/{name}"] for name in objects) <= 4  # In flight during the kill.


@pytest.mark.parametrize("turn", range(times(2, 10)))
def test_a_killed_trainer_loses_nothing(start, resume_here, counting_s3, prefix, tmp_path, turn):
    """SIGKILL at a random moment among 100 files, then resume: accepted ones are there, equal, put once."""
    trainer = start(TRAINER, _uri(counting_s3, prefix, turn), tmp_path, 100, "threads", 0)
    chance = random.Random(turn)
    read = chance.randrange(1, 100)
    for _ in range(read):
        trainer.stdout.readline()
    time.sleep(chance.random() * 0.2)

    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    last = max((int(word) for word in trainer.stdout.read().split() if word.isdigit()), default=read - 1)
    code = resume_here(tmp_path / "spool")

    objects = counting_s3.under(prefix)
    accepted, perhaps = (
        _contents(range(last + 1)),
        _contents([last + 1]),
    )  # It may have died between the submit and the print.
    assert code == 0
    assert objects in ({"warm": b"warm", **accepted}, {"warm": b"warm", **accepted, **perhaps})
    _assert_put_once(counting_s3, prefix, objects)
    assert Spool(tmp_path / "spool").list_pending() == []


@pytest.mark.parametrize("turn", range(times(2, 10)))
def test_a_killed_worker_loses_nothing(start, counting_s3, prefix, tmp_path, turn):
    """A SIGKILL hits the worker after a random number of 100 files.

    Its successor uploads them all, each once.
    """
    trainer = start(TRAINER, _uri(counting_s3, prefix, turn), tmp_path, 100, "process", 0)
    lock = tmp_path / "spool/drain.lock"
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (owner := owner_of(lock)):  # Held before it says by whom.
        assert time.monotonic() < deadline
        time.sleep(0.005)
    chance = random.Random(turn)
    arrived = chance.randrange(96)  # Leaves it some work, on a fast machine too.
    while len(counting_s3.under(prefix)) < arrived:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(chance.random() * 0.005)

    with contextlib.suppress(
        ProcessLookupError
    ):  # It ended within the last few milliseconds, with everything uploaded.
        os.kill(owner["pid"], signal.SIGKILL)

    output, errors = trainer.communicate(timeout=LIMIT_SECONDS)
    assert "drained" in output, errors
    assert counting_s3.under(prefix) == _contents(range(100))
    assert errors.count("upload worker ended") <= 1
    _assert_put_once(counting_s3, prefix, _contents(range(100)))


def test_a_worker_finishes_alone_when_the_trainer_is_killed(start, counting_s3, prefix, tmp_path):
    """The worker outlives its trainer for the grace period, empties the spool, and ends."""
    trainer = start(TRAINER, counting_s3.uri(prefix), tmp_path, 100, "process", 60)
    while trainer.stdout.readline().strip() != "all":
        pass

    trainer.send_signal(signal.SIGKILL)
    trainer.wait()

    spool = Spool(tmp_path / "spool")
    deadline = time.monotonic() + LIMIT_SECONDS
    while spool.list_pending() or spool.list_inflight() or owner_of(spool.drain_lock):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert counting_s3.under(prefix) == _contents(range(100))


LARGE = """
import pathlib, sys
from uploads import UploadQueue
queue = UploadQueue(sys.argv[1], spool=sys.argv[2], isolation="threads", free_bytes=0)
queue.submit(sys.argv[3], "large")
queue.drain(240)
"""


def test_a_file_in_parts_continues_after_a_kill(start, resume, moto, proxy, prefix, tmp_path):
    """SIGKILL while part 3 of 5 is on its way.

    Resume sends only the missing parts and leaves no upload open.
    """
    source = tmp_path / "large"
    source.write_bytes(os.urandom(1 << 20) * 25)
    from tests.servers.fault_proxy import Hang

    proxy.plan = lambda request: Hang() if "partNumber=3" in request.path else None
    uri = moto.at(proxy.url).uri(prefix) + "&part_bytes=5242880&part_threads=1"
    trainer = start(LARGE, uri, tmp_path / "spool", source)
    with proxy.arrived:
        proxy.arrived.wait_for(
            lambda: any("partNumber=3" in request.path for request in proxy.seen), LIMIT_SECONDS
        )

    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    proxy.plan = lambda request: None
    done = resume(tmp_path / "spool")

    assert done.returncode == 0
    assert [proxy.count("PUT", f"partNumber={number}") for number in range(1, 6)] == [1, 1, 2, 1, 1]
    assert (
        hashlib.sha256(moto.objects(prefix)["large"]).digest() == hashlib.sha256(source.read_bytes()).digest()
    )
    assert moto.open_uploads(prefix) == 0


def test_a_kill_after_the_server_stored_is_no_conflict(start, resume, moto, proxy, prefix, tmp_path):
    """The server has the object, but the process died before the answer.

    Resume recognises its own object, with overwrite=False.
    """
    from tests.servers.fault_proxy import Answer

    source = tmp_path / "file"
    source.write_bytes(b"content")
    killed = threading.Event()

    class KillsTheClient(Answer):
        def body(self):
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            killed.set()
            return b""

    def plan(request):
        return (
            KillsTheClient(200, after_forwarding=True)
            if request.method == "PUT" and request.path.endswith("/large") and not killed.is_set()
            else None
        )

    proxy.plan = plan
    trainer = start(LARGE, moto.at(proxy.url).uri(prefix), tmp_path / "spool", source)
    assert killed.wait(LIMIT_SECONDS)

    done = resume(tmp_path / "spool")

    assert done.returncode == 0, done.stdout.read()
    assert moto.objects(prefix) == {"large": b"content"}
    assert proxy.count("PUT", "/large") == 1


STAGE = """
import sys
from uploads import UploadQueue
from tests.servers.stores import MemoryStore
class Never(MemoryStore):
    def put(self, *args, **kwargs):
        import threading
        threading.Event().wait()
queue = UploadQueue(Never(), spool=sys.argv[1], free_bytes=0)
queue.submit(sys.argv[2], "name", durability="power")
import os
os._exit(0)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("syscall", ["mkdir", "openat", "copy_file_range", "write", "fsync", "rename"])
def test_a_kill_at_any_system_call_of_staging_leaves_all_or_nothing(start, tmp_path, syscall):
    """A SIGKILL hits the n-th call of each kind.

    An entry is whole or absent, and the next queue sweeps the rest.
    """
    source = tmp_path / "source"
    source.write_bytes(b"content")
    seen = set()

    for number in (1, 2, 3):
        spool_path = tmp_path / f"spool-{number}"
        strace = [
            "strace",
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-P",
            str(source),
            "-P",
            str(spool_path),
            "-e",
            f"inject={syscall}:signal=SIGKILL:when={number}",
        ]
        if syscall != "openat":
            strace = [
                "strace",
                "-f",
                "-qq",
                "-o",
                "/dev/null",
                "-e",
                f"trace={syscall}",
                "-e",
                f"inject={syscall}:signal=SIGKILL:when={number}",
            ]
        program = start(STAGE, spool_path, source, before=strace, cwd=Path.cwd())
        program.wait(LIMIT_SECONDS)
        spool = Spool(spool_path)
        for folder in (*spool.list_pending(), *spool.list_inflight()):
            place = spool.place_of(folder)
            seen.add("there")
            assert (place / "data").read_bytes() == b"content"
            assert (place / "entry.json").read_text().endswith("}")
        spool.create()
        spool.sweep_tmp()
        assert list(spool.tmp.iterdir()) == []
        seen.add(program.returncode)

    assert seen & {-signal.SIGKILL, 128 + signal.SIGKILL, "there"}


FAULTY_DISK = """
import sys, threading
from tests.servers.stores import StoreThatWaits
from uploads import UploadQueue
gate = threading.Event()
store = StoreThatWaits(gate)
queue = UploadQueue(store, spool=sys.argv[1], free_bytes=0, close_at_exit=False)
handle = queue.submit(sys.argv[2], "name", durability=sys.argv[3])
queue._flusher.stop(240)
gate.set()
handle.exception(240)
print(handle.state, queue._flusher.suspect, sorted(store.objects), flush=True)
queue.close(5)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("durability", "injected", "said"),
    [
        ("process", "fsync:error=EIO:when=1", "done 1 ['name']"),
        ("power", "fsync:error=EIO:when=1", "refused 0 []"),
        ("process", "rename:error=EROFS:when=2+", "refused 0 []"),
        ("process", "rename:error=EACCES:when=2+", "refused 0 []"),
    ],
)
def test_a_failing_disk_never_raises_into_training(start, tmp_path, durability, injected, said):
    """A second fsync after a failed one is not trusted.

    A spool that becomes unwritable refuses files. Both are reported.
    """
    source = tmp_path / "source"
    source.write_bytes(b"content")
    syscall = injected.partition(":")[0]
    strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={syscall}", "-e", f"inject={injected}"]

    program = start(FAULTY_DISK, tmp_path / "spool", source, durability, before=strace, cwd=Path.cwd())
    output, errors = program.communicate(timeout=LIMIT_SECONDS)

    assert output.strip() == said, errors
    assert ("cannot sync" if said.startswith("done") else "was refused") in errors
    assert source.read_bytes() == b"content"
