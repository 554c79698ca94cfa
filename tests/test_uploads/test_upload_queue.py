"""The queue with threads, as a user sees it, whatever the store does."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from tests.servers.stores import (
    MemoryStore,
    StoreThatFails,
    StoreThatRejects,
    StoreThatWaits,
)
from uploads import Timeouts, UploadQueue, UploadState
from uploads.drain.drain import Drain
from uploads.errors import (
    BytesCorruptError,
    InvalidRemoteNameError,
    InvalidSourceError,
    QueueClosedError,
    RejectedByStoreError,
    RemoteConflictError,
    RemoteNameTakenError,
    SpoolFullError,
    SpoolOwnedError,
    StoreParkedError,
    TransientStoreError,
    UploadsIncompleteError,
    UploadTimeoutError,
)
from uploads.handle import Outcome
from uploads.ledger import Ledger
from uploads.names import name_key
from uploads.spool.entry import Entry
from uploads.spool.ownership import owner_of
from uploads.spool.spool import Spool

LIMIT_SECONDS = 120


def _staged_files(queue):
    places = (queue.spool.tmp, queue.spool.pending, queue.spool.inflight, queue.spool.done)
    found = (path for place in places for path in place.rglob("*") if path.suffix != ".lock")
    return sorted(str(path.relative_to(queue.spool.path)) for path in found)


def test_a_submitted_file_arrives_and_leaves_the_spool_empty(make_queue, make_file, tmp_path):
    """The object has the file's bytes, and no entry is left."""
    queue = make_queue()

    outcome = queue.submit(make_file(content=b"bytes"), "folder/name").result(LIMIT_SECONDS)

    assert outcome.state is UploadState.DONE
    assert outcome.uri == f"file://{tmp_path}/store/folder/name"
    assert (tmp_path / "store/folder/name").read_bytes() == b"bytes"
    assert _staged_files(queue) == []
    queue.close(LIMIT_SECONDS)
    assert list((queue.spool.path / "spare").iterdir()) == []


def test_submit_opens_its_source_once(make_queue, make_file, monkeypatch):
    """Staging reads the file once in the training thread."""
    queue, source, opened, open_file = make_queue(), make_file(), [], os.open

    def recording(path, *arguments, **options):
        opened.append(str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", recording)
    queue.submit(source, "name").result(LIMIT_SECONDS)

    assert opened.count(str(source)) == 1


def test_a_handle_calls_back_when_its_upload_has_ended(make_queue, make_file, gate):
    """Each function is called once, even if it's added later."""
    called = []
    queue = make_queue(StoreThatWaits(gate))
    handle = queue.submit(make_file(), "name")
    handle.add_done_callback(lambda: called.append("first"))
    assert called == []
    gate.set()
    handle.result(LIMIT_SECONDS)
    queue.drain(LIMIT_SECONDS)
    handle.add_done_callback(lambda: called.append("later"))

    assert called == ["first", "later"]


def test_a_handle_shows_the_state_of_its_upload(make_queue, make_file, gate):
    """States go pending or inflight, then done; waiting has a limit."""
    queue = make_queue(StoreThatWaits(gate))
    handle = queue.submit(make_file(), "a")

    assert handle.state in {UploadState.PENDING, UploadState.INFLIGHT}
    assert not handle.done()
    with pytest.raises(UploadTimeoutError, match=r"'a' is \w+ after 0\.01 s"):
        handle.result(timeout_seconds=0.01)

    gate.set()
    assert handle.exception(LIMIT_SECONDS) is None
    assert (handle.state, handle.done()) == (UploadState.DONE, True)


@pytest.mark.parametrize("change", ["rewrite", "replace", "delete"])
def test_the_bytes_are_taken_at_the_call(make_queue, make_file, gate, change):
    """The source may be rewritten, replaced or deleted as soon as submit returns."""
    store = StoreThatWaits(gate)
    source = make_file(content=b"old bytes")
    handle = make_queue(store).submit(source, "a")

    if change == "rewrite":
        source.write_bytes(b"new")
    elif change == "replace":
        make_file("other", b"new").replace(source)
    else:
        source.unlink()
    gate.set()

    handle.result(LIMIT_SECONDS)
    assert store.objects == {"a": b"old bytes"}


def test_an_in_place_rewrite_of_a_linked_file_is_detected(make_queue, make_file, gate):
    """With link=True the change reaches the spool, and the upload fails as corrupt instead of sending it."""
    store = StoreThatWaits(gate)
    queue = make_queue(store, workers=1)
    queue.submit(make_file("blocker"), "blocker")
    queue._store.started.acquire()
    source = make_file(content=b"old")
    handle = queue.submit(source, "a", link=True)

    with source.open("r+b") as stream:
        stream.write(b"NEW")
    gate.set()

    assert isinstance(handle.exception(LIMIT_SECONDS), BytesCorruptError)
    assert "a" not in store.objects


def test_a_large_file_is_written_once_to_a_folder_beside_the_spool(make_queue, make_file, tmp_path):
    """A linked or moved file becomes the object; a copied file's copy in the spool does, never the source."""
    content = bytes(range(256)) * (36 << 10)
    queue = make_queue(tmp_path / "store")
    sources = {how: make_file(how, content) for how in ("copy", "link", "move", "move-shared")}
    inodes = {how: path.stat().st_ino for how, path in sources.items()}
    (tmp_path / "another name").hardlink_to(sources["move-shared"])

    for how, path in sources.items():
        queue.submit(path, how, link=how == "link", move="move" in how).result(LIMIT_SECONDS)

    taken = {how for how in sources if (tmp_path / "store" / how).stat().st_ino == inodes[how]}
    assert taken == {"link", "move"}
    assert all((tmp_path / "store" / how).read_bytes() == content for how in sources)


def test_a_folder_is_submitted_whole(make_queue, make_file, tmp_path):
    """Every file of a folder arrives under the folder's remote name."""
    store = MemoryStore()
    make_file("run/a", b"1")
    make_file("run/deep/b", b"2")

    handle = make_queue(store).submit(tmp_path / "run", "runs/7")

    assert [outcome.remote_name for outcome in handle.result(LIMIT_SECONDS)] == ["runs/7/a", "runs/7/deep/b"]
    assert store.objects == {"runs/7/a": b"1", "runs/7/deep/b": b"2"}
    assert (handle.state, handle.uri) == (UploadState.DONE, "memory://store/runs/7")


def test_bad_arguments_raise_at_the_call(make_queue, make_file, tmp_path):
    """Nothing is staged for a bad name or source."""
    queue = make_queue(MemoryStore())
    os.mkfifo(tmp_path / "fifo")

    for name in ("../x", "/x", "", "a//b", "a\0"):
        with pytest.raises(InvalidRemoteNameError):
            queue.submit(make_file(), name)
    for source in ("missing", "fifo"):
        with pytest.raises(InvalidSourceError):
            queue.submit(tmp_path / source, "a")
    with pytest.raises(ValueError, match="exclude each other"):
        queue.submit(make_file(), "a", move=True, link=True)
    with pytest.raises(InvalidRemoteNameError, match=r"must be a string, got PosixPath.*Write 'sub/a'"):
        queue.submit(make_file(), pathlib.Path("sub/a"))
    with pytest.raises(ValueError, match="durability must be 'process' or 'power', got 'disk'"):
        queue.submit(make_file(), "a", durability="disk")
    for after in ("a", ["a"]):
        with pytest.raises(TypeError, match="can wait for handles that submit returned, got"):
            queue.submit(make_file(), "a", after=after)
    with pytest.raises(TypeError, match="can wait for handles that submit returned, got"):
        queue.submit_pointer("latest", "a")
    assert _staged_files(queue) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"store": None}, "store must be a URI, a folder or a Store, got None"),
        ({"workers": "4"}, "workers must be a whole number, got '4'"),
        ({"isolation": "thread"}, "isolation must be 'threads' or 'process', got 'thread'"),
        ({"durability": "disk"}, "durability must be 'process' or 'power', got 'disk'"),
        ({"spool_bytes": "10GB"}, "spool_bytes must be a number of bytes, got '10GB'. Write 10 *"),
        ({"free_bytes": None}, "free_bytes must be a number of bytes, got None"),
        ({"timeouts": 30}, "timeouts must be uploads.Timeouts.*, got 30"),
        ({"store": "file.txt"}, "a store must be a folder, got the file .*file.txt"),
        ({"store": "same", "spool": "same"}, "the store .*same is in the folder of the spool"),
        ({"store": "same/store", "spool": "same"}, "the store .*same/store is in the folder of the spool"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_queue_with_a_bad_argument_raises(tmp_path, monkeypatch, options, expected):
    """The constructor raises, before the first file, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("a file")

    with pytest.raises((TypeError, ValueError), match=expected):
        UploadQueue(**{"store": "store", "spool": "spool"} | options)

    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_the_default_remote_name_is_the_files(make_queue, make_file):
    """Without a remote name a file keeps its own."""
    assert make_queue(MemoryStore()).submit(make_file("a b.pt")).remote_name == "a b.pt"


def test_an_existing_object_is_overwritten_only_on_request(make_queue, make_file, tmp_path):
    """With overwrite=False, `submit` keeps the existing object and reports its owner."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store/a").write_bytes(b"theirs")
    queue = make_queue()

    refused = queue.submit(make_file(content=b"mine"), "a")

    with pytest.raises(RemoteConflictError, match="overwrite=False"):
        refused.result(LIMIT_SECONDS)
    assert (tmp_path / "store/a").read_bytes() == b"theirs"
    queue.submit(make_file(content=b"mine"), "a", overwrite=True).result(LIMIT_SECONDS)
    assert (tmp_path / "store/a").read_bytes() == b"mine"


def test_the_same_bytes_under_the_same_name_are_no_conflict(make_queue, make_file, tmp_path):
    """The existing object isn't put again."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store/a").write_bytes(b"same")

    assert (
        make_queue().submit(make_file(content=b"same"), "a").result(LIMIT_SECONDS).state is UploadState.DONE
    )


def test_a_pending_name_is_refused_without_overwrite(make_queue, make_file, gate):
    """`submit` refuses the second upload."""
    queue = make_queue(StoreThatWaits(gate))
    queue.submit(make_file(), "a")

    with pytest.raises(RemoteNameTakenError, match="pending already"):
        queue.submit(make_file(), "a")


def test_a_repaired_transient_failure_leaves_no_error(make_queue, make_file):
    """After two failures and a success nothing is raised and nothing is left."""
    store = StoreThatFails(TransientStoreError("503"), TransientStoreError("503"))
    queue = make_queue(store, raise_errors=True)

    handle = queue.submit(make_file(), "a")

    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert queue.close(LIMIT_SECONDS).is_empty


def test_one_poisoned_entry_among_a_hundred_fails_alone(make_queue, make_file):
    """The other ninety-nine arrive."""
    store = StoreThatRejects({"n42"})
    queue = make_queue(store)

    handles = [queue.submit(make_file(), f"n{number}") for number in range(100)]

    backlog = queue.drain(LIMIT_SECONDS)
    assert len(store.objects) == 99
    assert [failure.remote_name for failure in backlog.failures] == ["n42"]
    assert isinstance(handles[42].exception(0), RejectedByStoreError)


def test_a_store_that_denies_everything_is_parked_and_recovers(make_queue, make_file, caplog):
    """Nothing is lost or failed while the store denies; one message gives the reason."""
    store = StoreThatFails(*[StoreParkedError("NoSuchBucket")] * 10)
    queue = make_queue(store)

    handles = [queue.submit(make_file(), f"n{number}") for number in range(10)]

    assert [handle.result(LIMIT_SECONDS).state for handle in handles] == [UploadState.DONE] * 10
    assert sum(" are paused: " in record.message for record in caplog.records) == 1


def test_an_exit_ends_no_upload_thread(make_queue, make_file):
    """A store that raises SystemExit in the only thread stops nothing."""
    store = StoreThatFails(SystemExit())
    queue = make_queue(store, workers=1)
    queue.submit(make_file(), "first")

    assert queue.submit(make_file(), "second").result(LIMIT_SECONDS).state is UploadState.DONE
    assert queue.drain(LIMIT_SECONDS).is_empty


def test_an_upload_that_depends_on_a_failed_one_fails_too(make_queue, make_file):
    """A pointer to an object that never arrived isn't published."""
    store = StoreThatRejects({"target"})
    queue = make_queue(store)

    pointer = queue.submit_pointer("latest", queue.submit(make_file(), "target"))

    assert "an upload it depends on (after=) failed" in str(pointer.exception(LIMIT_SECONDS))
    assert store.objects == {}


def test_a_full_spool_refuses_and_counts(make_queue, make_file, gate):
    """Beyond the limit in bytes a handle is refused, nothing is raised, and the backlog names it."""
    queue = make_queue(StoreThatWaits(gate), spool_bytes=150)
    queue.submit(make_file(content=b"x" * 100), "a")

    handle = queue.submit(make_file(content=b"x" * 100), "b")

    assert isinstance(handle.exception(0), SpoolFullError)
    assert [failure.remote_name for failure in queue.backlog().failures] == ["b"]
    gate.set()
    queue.drain(LIMIT_SECONDS)
    assert queue.submit(make_file(content=b"x" * 100), "c").result(LIMIT_SECONDS).state is UploadState.DONE


def test_submit_may_wait_for_a_full_spool(make_queue, make_file, gate):
    """With full_wait_seconds submit waits until an upload has made room."""
    store = StoreThatWaits(gate)
    queue = make_queue(store, spool_bytes=150, timeouts=Timeouts(full_wait_seconds=LIMIT_SECONDS))
    queue.submit(make_file(content=b"x" * 100), "a")
    store.started.acquire()
    threading.Timer(0.05, gate.set).start()

    handle = queue.submit(make_file(content=b"x" * 100), "b")

    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE


def test_refusals_raise_on_request(make_queue, make_file):
    """With raise_errors a refused file raises."""
    with pytest.raises(SpoolFullError):
        make_queue(MemoryStore(), raise_errors=True, spool_bytes=1).submit(make_file(), "a")


def test_close_names_undelivered_files(make_queue, make_file, gate, caplog):
    """It has a deadline, and names every file and the command that uploads the rest."""
    queue = make_queue(StoreThatWaits(gate), workers=1, timeouts=Timeouts(give_back_seconds=0.05))
    for name in ("a", "b", "c"):
        queue.submit(make_file(), name)

    backlog = queue.close(timeout_seconds=0.05)

    assert backlog.remaining == ("a", "b", "c")
    assert backlog.resume_command == f"destinations uploads resume {queue.spool.path}"
    assert all(text in caplog.text for text in ("a, b, c", backlog.resume_command))


def test_close_raises_on_request(make_queue, make_file, gate):
    """With raise_errors an incomplete close raises."""
    queue = make_queue(StoreThatWaits(gate), raise_errors=True, timeouts=Timeouts(give_back_seconds=0.05))
    queue.submit(make_file(), "a")

    with pytest.raises(UploadsIncompleteError, match="a"):
        queue.close(timeout_seconds=0.05)


def test_a_second_close_does_nothing(make_queue, make_file):
    """A closed queue accepts no file."""
    queue = make_queue(MemoryStore())

    assert queue.close(1) is queue.close(1)
    with pytest.raises(QueueClosedError, match="the queue is closed"):
        queue.submit(make_file(), "a")


def test_two_queues_cannot_share_a_spool(make_queue):
    """The second one's error names the owner."""
    make_queue(MemoryStore())

    with pytest.raises(SpoolOwnedError, match=f"queue with pid {os.getpid()}"):
        make_queue(MemoryStore())


def test_a_spool_deleted_under_the_queue_is_noticed_and_recreated(make_queue, make_file, gate, tmp_path):
    """Deleted files are reported lost, and later ones are uploaded."""
    import shutil

    queue = make_queue(StoreThatWaits(gate), workers=1)
    queue.submit(make_file(), "flying")
    lost = queue.submit(make_file(), "lost")
    queue._store.started.acquire()
    queue.spool.path.rename(
        tmp_path / "deleted"
    )  # At once: another process might write into it while it is deleted.
    shutil.rmtree(tmp_path / "deleted")
    gate.set()

    after = queue.submit(make_file(), "after")

    assert after.result(LIMIT_SECONDS).state is UploadState.DONE
    assert "was deleted" in str(lost.exception(LIMIT_SECONDS))


def test_a_burst_that_is_in_the_store_already_is_not_synced(tmp_path):
    """The disk is not written out for entries that have left.

    Waiting, inflight and failed entries still reach it.
    """
    from uploads.spool.flush import Flusher

    passes = []
    spool = Spool(tmp_path / "spool")
    spool.create()
    flusher = Flusher(
        spool,
        delay_seconds=60.0,
        fsync=lambda place: passes.append(place.name),
        sync_disk=lambda place: passes.append("all"),
    )
    folders = [f"{number:012d}-0000000000000000-0000000000000000" for number in range(100)]
    (spool.pending / folders[3]).mkdir()
    (spool.inflight / folders[5]).mkdir()
    (spool.failed / UploadState.CORRUPT / folders[7]).mkdir()

    for folder in folders:
        flusher.add(folder)
    flusher.stop(LIMIT_SECONDS)

    assert set(passes) == {folders[3], folders[5], folders[7]}


def test_an_fsync_that_failed_is_counted_and_never_repeated(tmp_path, caplog):
    """A second fsync would report success although the bytes are lost, so the entry is marked and logged."""
    from uploads.spool.flush import Flusher

    calls = []

    def failing(place):
        calls.append(place)
        raise OSError(5, "Input/output error")

    spool = Spool(tmp_path / "spool")
    spool.create()
    flusher = Flusher(spool, delay_seconds=0.0, fsync=failing)
    flusher.add("000000000001-0000000000000000-0000000000000000")
    flusher.stop(LIMIT_SECONDS)

    assert (len(calls), flusher.suspect) == (1, 1)
    assert "Input/output error" in caplog.text


# Python 3.12 and later warn of what this test is about.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_the_queue_is_closed_for_a_forked_child(make_queue, make_file, gate):
    """A child forked while threads hold locks neither hangs nor submits; the parent's queue is intact."""
    store = StoreThatWaits(gate)
    queue = make_queue(store, workers=1)
    handle = queue.submit(make_file("parent"), "parent")
    store.started.acquire()
    source = make_file("child")

    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(LIMIT_SECONDS)  # Else this test would wait for ever where the child does.
        try:
            for call in (queue.submit, queue.delete):
                with pytest.raises(QueueClosedError):
                    call(source) if call == queue.submit else call("parent")
            code = 0 if queue.withdraw("parent") == 0 and queue.close(5).is_empty else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    gate.set()

    assert os.waitstatus_to_exitcode(status) == 0
    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert store.puts == {"parent": 1}


def test_importing_loads_no_client_and_starts_nothing():
    """The package is cheap to import, and silent."""
    import subprocess
    import sys

    program = (
        "import sys, threading, signal; before = signal.getsignal(signal.SIGTERM); import uploads;"
        "assert not {'torch', 'boto3', 'botocore', 'obstore', 'paramiko', 'tqdm'} & set(sys.modules);"
        "assert threading.active_count() == 1 and signal.getsignal(signal.SIGTERM) is before"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_thread_that_outlives_stop_gives_the_spool_back(make_queue, make_file, gate):
    """The spool stays locked until the upload in flight ends, even if the process goes on."""
    store = StoreThatWaits(gate)
    queue = make_queue(store, workers=1)
    queue.submit(make_file(), "a")
    store.started.acquire()
    queue._drainer.stop(0)
    taken = owner_of(queue.spool.drain_lock)

    gate.set()
    for thread in queue._drainer._threads:
        thread.join(LIMIT_SECONDS)

    assert taken is not None
    assert owner_of(queue.spool.drain_lock) is None


def test_two_processes_that_start_together_get_a_default_spool_each(tmp_path):
    """Taking a number is atomic: if two processes start at once, the second takes the next."""
    program = (
        "import sys; from uploads import UploadQueue\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "queue = UploadQueue(sys.argv[1], close_at_exit=False)\n"
        "print(queue.spool.path.name, flush=True); sys.stdin.readline(); queue.close(0)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UPLOADS_HOME": str(tmp_path / "home")},
        )
        for _ in range(4)
    ]
    for process in processes:
        process.stdout.readline()

    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    numbers = sorted(process.stdout.readline().strip() for process in processes)

    for process in processes:
        process.communicate("end\n", timeout=LIMIT_SECONDS)
    assert numbers == ["0", "1", "2", "3"]


def test_a_large_copy_is_checksummed_behind_the_training_loop(make_queue, make_file, gate):
    """Submit does not read a large file twice.

    The flusher computes its checksum, and a flipped bit is still noticed.
    """
    store = StoreThatWaits(gate)
    queue = make_queue(store, workers=1)
    queue.submit(make_file("blocker"), "blocker")
    store.started.acquire()
    handle = queue.submit(make_file(content=bytes(3 << 20)), "a")
    [folder] = queue.spool.list_pending()
    if Entry.read(queue.spool.pending / folder).staging == "reflinked":
        pytest.skip("this file system shares the blocks and copies nothing")
    assert Entry.read(queue.spool.pending / folder).crc32 is None
    queue._flusher.stop(LIMIT_SECONDS)

    with (queue.spool.pending / folder / "data").open("r+b") as stream:
        stream.write(b"rot")
    gate.set()

    assert isinstance(handle.exception(LIMIT_SECONDS), BytesCorruptError)
    assert "a" not in store.objects


def test_a_large_copy_that_is_on_the_disk_has_its_checksum(make_queue, make_file, gate):
    """With durability="power" submit itself reads the file, and a flipped bit is noticed."""
    store = StoreThatWaits(gate)
    queue = make_queue(store, workers=1, durability="power")
    queue.submit(make_file("blocker"), "blocker")
    store.started.acquire()
    handle = queue.submit(make_file(content=bytes(3 << 20)), "a")
    [folder] = queue.spool.list_pending()
    with (queue.spool.pending / folder / "data").open("r+b") as stream:
        stream.write(b"rot")

    gate.set()

    assert isinstance(handle.exception(LIMIT_SECONDS), BytesCorruptError)
    assert "a" not in store.objects


def test_an_entry_that_is_announced_after_it_was_delivered_is_not_called_lost(make_queue, make_file, caplog):
    """A listing may find an entry before it is announced; uploads that depend on it are not refused."""
    queue = make_queue(MemoryStore())
    handle = queue.submit(make_file(), "a")
    handle.result(LIMIT_SECONDS)
    assert queue._drainer.wait_idle(LIMIT_SECONDS)

    queue._drainer.add([f"{1:012d}-{name_key('a')}-{handle.identifier}"])

    assert queue._drainer.wait_idle(LIMIT_SECONDS)
    assert queue.submit_pointer("latest", handle).result(LIMIT_SECONDS).state is UploadState.DONE
    assert "deleted" not in caplog.text


class HandleThatTriesTheLock:
    """When its upload ends, another thread asks whether the ledger can be read."""

    remote_name = "a"

    def __init__(self, ledger):
        self.ledger = ledger
        self.could_read = []

    def _settle(self, outcome):
        thread = threading.Thread(
            target=lambda: self.could_read.append(self.ledger._changed.acquire(blocking=False))
        )
        thread.start()
        thread.join()


def test_every_handle_is_settled_once_the_queue_is_drained(tmp_path):
    """The queue counts as drained only once the handle of the last upload is settled."""
    ledger = Ledger(Spool(tmp_path), lambda size: None)
    handle = HandleThatTriesTheLock(ledger)
    folder = f"{1:012d}-{name_key('a')}-{1:016x}"
    ledger.add(folder, handle)

    ledger.settle(folder, Outcome(f"{1:016x}", "a", UploadState.DONE))

    assert handle.could_read == [False]
    assert ledger.wait_empty(0)


class CauseThatLooks(str):
    """Notes whether the drain's lock was held when it was looked up."""

    __slots__ = ("drain", "was_locked")

    def __hash__(self):
        self.was_locked.append(self.drain._counting.locked())
        return super().__hash__()


def test_a_failure_that_several_threads_see_at_once_is_logged_once(tmp_path, caplog):
    """Checking whether it was logged before, and noting it, is one step."""
    drain = Drain(Spool(tmp_path), MemoryStore())
    cause = CauseThatLooks("denied")
    cause.drain, cause.was_locked = drain, []

    drain._log_once(cause, "wait: denied")
    drain._log_once(cause, "wait: denied")

    assert caplog.messages == ["wait: denied"]
    assert set(cause.was_locked) == {True}


class QueueThatIsInterruptedBeforeItEnds(UploadQueue):
    """It gets Ctrl-C while it counts the remaining files, before it stops anything."""

    was_interrupted = False

    def backlog(self):
        if not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        return super().backlog()


def test_ctrl_c_at_any_moment_of_the_exit_ends_the_queue_in_order(tmp_path, make_file, gate, caplog):
    """The remaining files are named and the spool is released, even if Ctrl-C comes before anything was stopped."""
    store = StoreThatWaits(gate)
    queue = QueueThatIsInterruptedBeforeItEnds(
        store, spool=tmp_path / "spool", workers=1, free_bytes=0, close_at_exit=False
    )
    queue.submit(make_file(), "a")
    store.started.acquire()

    queue._close_at_exit()

    assert f"destinations uploads resume {queue.spool.path}" in caplog.text
    assert owner_of(queue.spool.queue_lock) is None
    gate.set()
    for thread in queue._drainer._threads:
        thread.join(LIMIT_SECONDS)
    assert owner_of(queue.spool.drain_lock) is None
