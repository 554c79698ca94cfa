"""`UploadQueue.delete`: in the background, after what replaces the object, and never what a pointer leads to."""

import threading

import pytest

from uploads import LocalStore, RetryPolicy, UploadQueue
from uploads.errors import InvalidRemoteNameError, QueueClosedError, RejectedByStoreError, TransientStoreError

WAIT_SECONDS = 60.0


class Slow(LocalStore):
    """A store whose puts of "slow" wait until they may, and whose puts of "bad" are rejected."""

    def __init__(self, root):
        super().__init__(root)
        self.may_put = threading.Event()
        self.deleted = []
        self.failures = 0
        self.failures_of = {}

    def put(self, name, body, **options):
        if name == "slow":
            assert self.may_put.wait(WAIT_SECONDS)
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
    """A queue to it that tries again at once."""
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


def test_an_object_is_deleted_after_the_upload_that_replaces_it(queue, store, file):
    """Not while that is under way."""
    queue.delete("old", after=[queue.submit(file, "slow")])
    first = queue.submit(file, "first")
    first.result(WAIT_SECONDS)

    assert names(store) == ["first", "old"]
    store.may_put.set()
    assert queue.drain(WAIT_SECONDS).is_empty
    assert names(store) == ["first", "slow"]


def test_it_stays_where_that_upload_fails(queue, store, file, caplog):
    """And the log says so."""
    queue.delete("old", after=[queue.submit(file, "bad")])
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["old"]
    assert "old is not deleted: bad is not in the store" in caplog.text


def test_it_waits_for_pending_uploads_of_its_name(queue, store, file):
    """They would come after the deletion, and stay."""
    queue.submit(file, "slow")
    queue.delete("slow")
    store.may_put.set()
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["old"]
    assert store.deleted == ["slow"]


def test_a_target_of_a_pointer_beside_it_stays(queue, store, file, caplog):
    """With its folders in the name or without; a pointer in another folder says nothing."""
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


def test_it_is_tried_again_and_given_up_in_the_end(queue, store, caplog):
    """Five failures are passed over, six are not; one object less does not stop the next."""
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


def test_what_is_left_at_the_end_stays(queue, store, file, caplog):
    """Closing does not wait longer than it is told to, and says so."""
    queue.delete("old", after=[queue.submit(file, "slow")])

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


def test_what_stands_for_others_goes_first(queue, store):
    """Nothing that is left looks whole; an object that is not there is no error."""
    [(name, options)] = shards(store, "a")

    queue.delete(name, **options)
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["old"]
    assert store.deleted == ["a/last", "a/one", "a/none", "a/two"]


def test_the_others_stay_where_it_cannot_be_deleted(queue, store, caplog):
    """It would look whole without them; where one of them cannot be deleted, that one is tried again alone."""
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
def test_what_stands_for_others_stays_where_a_pointer_beside_its_folder_leads_to_it(
    queue, store, caplog, text
):
    """Others of the same name, in other folders, do not."""
    (store.root / "latest.symlink").write_text(text)

    for name, options in shards(store, "a", "b", "xb"):
        queue.delete(name, **options)
    queue.drain(WAIT_SECONDS)

    assert names(store) == ["b/last", "b/one", "b/two", "latest.symlink", "old"]
    assert "b/last is not deleted: latest.symlink leads to it" in caplog.text


def test_a_name_that_leaves_the_store_is_refused(queue):
    """In the caller's thread."""
    with pytest.raises(InvalidRemoteNameError):
        queue.delete("../x")
    with pytest.raises(InvalidRemoteNameError):
        queue.delete("old", then=["../x"])
