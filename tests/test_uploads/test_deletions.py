"""`UploadQueue.delete` and `withdraw`: existing objects, those with a replacement, and unsent uploads."""

import threading

import pytest

from uploads import LocalStore, RetryPolicy, Timeouts, UploadQueue, UploadState
from uploads.errors import InvalidRemoteNameError, QueueClosedError, RejectedByStoreError, TransientStoreError

WAIT_SECONDS = 60.0


class Slow(LocalStore):
    """A store whose puts of "slow" wait for an event, and whose puts of "bad" are rejected."""

    def __init__(self, root):
        super().__init__(root)
        self.may_put = threading.Event()
        self.has_begun = threading.Event()
        self.deleted = []
        self.failures = 0
        self.failures_to_put = 0
        self.failures_of = {}

    def put(self, name, body, **options):
        if name == "slow":
            self.has_begun.set()
            assert self.may_put.wait(WAIT_SECONDS)
        if self.failures_to_put:
            self.failures_to_put -= 1
            raise TransientStoreError("away")
        if name == "bad":
            raise RejectedByStoreError("no")
        return super().put(name, body, **options)

    def delete(self, name):
        self.deleted.append(name)
        self.failures += self.failures_of.get(name, 0) > 0
        if self.failures:
            self.failures -= 1
            self.failures_of[name] = self.failures_of.get(name, 0) - 1
            raise TransientStoreError("busy")
        super().delete(name)


@pytest.fixture
def store(tmp_path):
    """A store with one object."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "old").write_bytes(b"old")
    return Slow(tmp_path / "store")


@pytest.fixture
def queue(store, tmp_path):
    """A queue to it that retries at once."""
    policy = RetryPolicy(first_seconds=0.001, cap_seconds=0.001)
    with UploadQueue(store, spool=tmp_path / "spool", free_bytes=0, policy=policy) as queue:
        yield queue


@pytest.fixture
def file(tmp_path):
    """A file to upload."""
    (tmp_path / "file").write_bytes(b"new")
    return tmp_path / "file"


def names(store):
    """Returns the names of all objects."""
    return [one.name for one in store.list("")]


def test_an_object_is_deleted_after_its_replacement_arrives(queue, store, file):
    """It stays during the upload."""
    queue.delete("old", after=[queue.submit(file, "slow")])
    first = queue.submit(file, "first")
    first.result(WAIT_SECONDS)

    assert names(store) == ["first", "old"]
    store.may_put.set()
    assert queue.drain(WAIT_SECONDS).is_empty
    assert names(store) == ["first", "slow"]


def test_an_object_stays_if_the_upload_fails(queue, store, file, caplog):
    """The log says so."""
    queue.delete("old", after=[queue.submit(file, "bad")])
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["old"]
    assert "old is not deleted: bad is not in the store" in caplog.text


def test_the_target_of_a_pointer_beside_it_stays(queue, store, file, caplog):
    """The pointer's text may include folders; a pointer in another folder doesn't count."""
    for name, text in {"a/one.symlink": "x/old", "b/two.symlink": "gone"}.items():
        path = store.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        (path.parent / "old").write_bytes(b"")
    queue.delete("a/old")
    queue.delete("b/old")
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["a/old", "a/one.symlink", "b/two.symlink", "old"]
    assert "a/old is not deleted: a/one.symlink leads to it" in caplog.text


def test_a_failed_deletion_is_retried_and_finally_given_up(queue, store, caplog):
    """Five failures are retried, six aren't; the next object is still deleted."""
    store.failures = 5
    queue.delete("old")
    queue.drain(WAIT_SECONDS)
    store.failures = 6
    queue.delete("older")
    queue.drain(WAIT_SECONDS)
    queue.delete("oldest")
    queue.drain(WAIT_SECONDS)

    assert names(store) == []
    assert [store.deleted.count(name) for name in ("old", "older", "oldest")] == [6, 6, 1]
    assert "cannot delete" in caplog.text


def test_remaining_objects_stay_at_the_end(queue, store, file, caplog):
    """Close doesn't exceed its timeout, and reports them."""
    queue.delete("old", after=[queue.submit(file, "slow")])
    queue._timeouts = Timeouts(give_back_seconds=0.0)  # "slow" does not end before.

    queue.close(0.0)
    store.may_put.set()

    assert "old" in names(store)
    assert "1 objects that were to be deleted stay in file://" in caplog.text
    with pytest.raises(QueueClosedError, match="cannot delete 'old'"):
        queue.delete("old")


def shards(store, *folders):
    """Puts objects called `one`, `two` and `last` into folders, and returns the arguments to delete each."""
    for folder in folders:
        (store.root / folder).mkdir(parents=True)
        for name in ("one", "two", "last"):
            (store.root / folder / name).write_bytes(b"")
    return [(f"{one}/last", {"then": [f"{one}/one", f"{one}/none", f"{one}/two"]}) for one in folders]


def test_other_objects_stay_if_the_manifest_cannot_be_deleted(queue, store, caplog):
    """It would look complete without them; if one of them can't be deleted, only that one is retried."""
    first, second = shards(store, "a", "b")
    store.failures = 6
    queue.delete(first[0], **first[1])
    queue.drain(WAIT_SECONDS)
    assert names(store) == ["a/last", "a/one", "a/two", "b/last", "b/one", "b/two", "old"]

    store.failures_of = {"b/one": 2}
    queue.delete(second[0], **second[1])
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["a/last", "a/one", "a/two", "old"]
    assert store.deleted[6:] == ["b/last", "b/one", "b/one", "b/one", "b/none", "b/two"]
    assert "cannot delete" in caplog.text


@pytest.mark.parametrize("text", ["b/last", "x/b/last"])
def test_a_manifest_stays_if_a_pointer_beside_its_folder_leads_to_it(queue, store, caplog, text):
    """Manifests of the same name in other folders don't."""
    (store.root / "latest.symlink").write_text(text)

    for name, options in shards(store, "a", "b", "xb"):
        queue.delete(name, **options)
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["b/last", "b/one", "b/two", "latest.symlink", "old"]
    assert "b/last is not deleted: latest.symlink leads to it" in caplog.text


def test_a_name_that_leaves_the_store_raises(queue):
    """The caller's thread gets the error."""
    with pytest.raises(InvalidRemoteNameError):
        queue.delete("../x")
    with pytest.raises(InvalidRemoteNameError):
        queue.delete("old", then=["../x"])


def waiting(queue):
    """Returns the entries of a spool that have not ended."""
    return [*queue.spool.list_pending(), *queue.spool.list_inflight()]


@pytest.fixture
def busy(queue, store, file):
    """A queue that is sending "slow", and a second version of it that waits."""
    handles = [queue.submit(file, "slow")]
    assert store.has_begun.wait(WAIT_SECONDS)
    handles.append(queue.submit(file, "slow", overwrite=True))
    yield handles
    store.may_put.set()


def test_a_waiting_upload_is_withdrawn(queue, store, busy):
    """It leaves the spool at once, and its handle says so; the one in flight arrives."""
    count = queue.withdraw("slow")

    assert (count, len(waiting(queue))) == (1, 1)
    assert busy[1].result(0.0).state is UploadState.WITHDRAWN
    store.may_put.set()
    assert queue.drain(WAIT_SECONDS).is_empty
    assert [one.state for one in queue.spool.delivered()] == [UploadState.WITHDRAWN, UploadState.DONE]
    assert queue.withdraw("slow") == 0


def test_deleting_withdraws_uploads(queue, store, busy):
    """An upload in flight is deleted once it's there."""
    queue.delete("slow")
    busy[1].result(WAIT_SECONDS)
    store.may_put.set()

    assert queue.drain(WAIT_SECONDS).is_empty
    assert names(store) == ["old"]
    assert busy[0].state is UploadState.DONE


def test_a_deletion_waits_for_the_replacement_of_its_dependency(queue, store, file, busy, caplog):
    """If one is kept, the first goes when the third is there; the second was withdrawn."""
    queue.delete("old", after=[busy[1]])
    newest = queue.submit(file, "newest")
    queue.delete("slow", after=[newest])
    store.may_put.set()

    assert queue.drain(WAIT_SECONDS).is_empty
    assert names(store) == ["newest"]
    assert "is not deleted" not in caplog.text


def test_an_object_stays_if_its_only_dependency_was_withdrawn(queue, store, busy, caplog):
    """Nothing replaces it."""
    queue.delete("old", after=[busy[1]])
    queue.withdraw("slow")
    store.may_put.set()
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["old", "slow"]
    assert "old is not deleted: slow is not in the store" in caplog.text


def test_an_object_that_waits_for_its_own_upload_is_deleted_only_if_that_put_it(
    queue, store, file, busy, caplog
):
    """An earlier object of the same name stays; nothing is logged, because nothing is left to do."""
    old = queue.submit(file, "old", overwrite=False)
    old.exception(WAIT_SECONDS)
    queue.delete("old", after=[old])
    new = queue.submit(file, "new")
    queue.delete("new", after=[new])
    store.may_put.set()

    assert queue.drain(WAIT_SECONDS).remaining == ()
    assert names(store) == ["old", "slow"]
    assert "is not deleted" not in caplog.text


def test_a_pointer_replaces_waiting_ones(queue, store, busy):
    """During an outage one waits, rather than one per checkpoint."""
    pointers = [queue.submit_pointer("latest", busy[0]) for _ in range(5)]

    assert len(waiting(queue)) == 3
    # The drain may have been about to end one itself.
    ended = [one.result(WAIT_SECONDS).state for one in pointers[:4]]
    assert ended == [UploadState.SUPERSEDED] * 4
    assert pointers[4].state is UploadState.PENDING
    store.may_put.set()
    assert queue.drain(WAIT_SECONDS).is_empty
    assert (store.root / "latest.symlink").read_text() == "slow"


def test_the_next_queue_does_not_upload_withdrawn_files(queue, store, file, tmp_path):
    """Nor does it count as delivered, against an older version that is retried."""
    store.failures_to_put = 1 << 30
    queue.submit(file, "away")
    while not queue.withdraw("away"):  # It may be being tried.
        pass
    queue.close(0.0)

    with UploadQueue(LocalStore(store.root), spool=tmp_path / "spool", free_bytes=0) as resumed:
        left = resumed.drain(WAIT_SECONDS)

    assert left.is_empty
    assert names(store) == ["old"]
    assert resumed.spool.newest_delivered() == {}


def test_a_claim_by_a_drain_wins(queue, busy):
    """Both rename it, and one succeeds; the note made then isn't taken for its end."""
    folder = busy[1].folder
    queue.spool.claim(folder)

    assert queue.withdraw("slow") == 0

    queue.spool.release(folder)
    assert queue.withdraw("slow") == 1
