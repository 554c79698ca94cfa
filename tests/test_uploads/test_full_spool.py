"""A bounded spool while its store is down: files that nobody needs make room for newer ones."""

import pytest

from tests.servers.stores import MemoryStore, StoreThatWaits
from uploads import UploadState
from uploads.command_line import resume
from uploads.errors import InvalidSourceError

LIMIT_SECONDS = 120


@pytest.fixture
def full(make_queue, make_file, gate):
    """Returns a queue with room for three files of 100 bytes and a blocked store, and a submit function."""
    queue = make_queue(StoreThatWaits(gate), spool_bytes=330, workers=1)

    def submit(name, fill=b"x", **options):
        return queue.submit(make_file(content=fill * 100), name, **options)

    return queue, submit


def test_droppable_uploads_make_room_oldest_first(full, tmp_path, gate, caplog):
    """Needed files stay; close counts the dropped ones, and the next process sends the rest."""
    queue, submit = full
    handles = {name: submit(name) for name in ("1", "needed", "2")}
    queue.may_drop("1")
    queue.may_drop("2")
    queue.may_drop("unknown")

    handles |= {name: submit(name) for name in ("3", "4")}
    refused = submit("5")
    gate.set()
    backlog = queue.close(0)

    states = {name: handle.state for name, handle in handles.items() if name in {"1", "2"}}
    assert states == dict.fromkeys(("1", "2"), UploadState.WITHDRAWN)
    assert refused.state is UploadState.REFUSED
    assert (backlog.dropped, backlog.lost) == (2, 1)
    assert caplog.text.count("1 gives way to 3, which is newer") == 1
    assert "gives way to 4" not in caplog.text
    assert "2 older files gave way to newer ones while the spool was full" in str(backlog)
    assert "1 failed, 1 of which are lost: 5" in str(backlog)
    assert "nothing is lost" not in str(backlog)
    store = MemoryStore()
    resume(tmp_path / "spool", store=store)
    assert not {"1", "2", "5"} & store.objects.keys()


def test_an_upload_in_flight_makes_room_too(full):
    """A hanging store may hold an upload for any time."""
    queue, submit = full
    first = submit("first")
    queue._drainer._store.started.acquire(timeout=LIMIT_SECONDS)
    others = [submit("second"), submit("third")]
    queue.may_drop("first")

    newest = submit("newest")

    assert first.state is UploadState.WITHDRAWN
    assert [one.state for one in (*others, newest)] == [UploadState.PENDING] * 3
    assert queue.spool.list_inflight() == []


def test_dependents_of_a_dropped_file_are_dropped(full):
    """A pointer to it would fail in its turn."""
    queue, submit = full
    target = submit("target")
    pointer = queue.submit_pointer("latest", target)
    submit("second")
    submit("third")
    queue.may_drop("target")

    assert submit("newest").state is UploadState.PENDING

    assert (target.state, pointer.state) == (UploadState.WITHDRAWN, UploadState.WITHDRAWN)
    assert queue.backlog().failures == ()


def test_nothing_is_dropped_while_there_is_room(full):
    """A slow store gets every file."""
    queue, submit = full
    old = submit("old")
    queue.may_drop("old")

    submit("new")

    assert old.state is not UploadState.WITHDRAWN
    assert queue.backlog().dropped == 0


def test_a_newer_version_takes_the_room_of_the_older(full, make_file, gate):
    """The older one is dropped only once the newer one is staged."""
    queue, submit = full
    submit("first")
    queue._drainer._store.started.acquire(timeout=LIMIT_SECONDS)
    kept = submit("created")
    older = submit("version", overwrite=True)

    with pytest.raises(InvalidSourceError):
        queue.submit(make_file().with_name("missing"), "version", overwrite=True)
    assert older.state is UploadState.PENDING
    newer = submit("version", b"y", overwrite=True)

    assert (older.state, newer.state, kept.state) == (
        UploadState.SUPERSEDED,
        UploadState.PENDING,
        UploadState.PENDING,
    )
    gate.set()
    assert queue.drain(LIMIT_SECONDS).is_empty
    assert queue._drainer._store.objects["version"] == b"y" * 100
    assert queue._quota._held_bytes == 0
