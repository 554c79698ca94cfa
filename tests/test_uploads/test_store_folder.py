"""A folder in a store whose files are known by their names."""

import threading

import pytest

from uploads import LocalStore, StoreFolder, open_store


@pytest.fixture
def folder(tmp_path):
    """A folder that calls files otherwise than the store does."""
    folder = StoreFolder(
        tmp_path / "store", name_of="there/{}".format, spool=tmp_path / "spool", free_bytes=0
    )
    yield folder
    folder.close(30.0)


@pytest.fixture
def put(folder, tmp_path):
    """Uploads a file with a text."""

    def put(name, text="text", **options):
        path = tmp_path / name.replace("/", "-")
        path.write_text(text)
        folder.upload_file(name, path, **{"overwrite": True, **options})

    return put


def names(tmp_path):
    """Returns the names of all objects in the store."""
    return sorted(one.name for one in open_store(tmp_path / "store").list(""))


def test_a_pointer_names_the_upload_that_it_leads_to_as_the_store_does(folder, put, tmp_path):
    """The text of the file has the name by which the upload is known here."""
    put("new.pt")
    put("latest.symlink", "new.pt")

    assert folder.queue.drain(30.0).is_empty
    assert (tmp_path / "store/there/latest.symlink").read_text() == "there/new.pt"
    assert folder.has_uploaded("new.pt")
    assert folder.file_uris("new.pt") == (open_store(tmp_path / "store").uri("there/new.pt"),)
    assert folder.list_files("") == ["there/latest.symlink", "there/new.pt"]


def test_a_file_is_deleted_after_what_replaces_it_and_not_where_that_is_unknown(folder, put, tmp_path):
    """An upload of which nothing is known may have failed."""
    for name in ("old.pt", "old/part", "older.pt", "new.pt"):
        put(name)

    folder.delete_file("old.pt", after=["new.pt"], then=["old/part"])
    folder.delete_file("older.pt", after=["unknown.pt"])

    assert folder.queue.drain(30.0).is_empty
    assert names(tmp_path) == ["there/new.pt", "there/older.pt"]


def test_an_object_of_somebody_else_is_not_deleted(folder, put, tmp_path):
    """The upload of its name was refused; it will never be there."""
    (tmp_path / "store/there").mkdir(parents=True)
    (tmp_path / "store/there/taken.pt").write_text("of another run")
    put("taken.pt", overwrite=False)
    put("new.pt")

    folder.delete_file("taken.pt", after=["new.pt"])

    folder.queue.drain(30.0)
    assert names(tmp_path) == ["there/new.pt", "there/taken.pt"]
    with pytest.raises(OSError, match=r"taken\.pt"):
        folder.has_uploaded("taken.pt")


class Held(LocalStore):
    """A store whose first put waits until it may."""

    def __init__(self, root):
        super().__init__(root)
        self.has_begun, self.may_put = threading.Event(), threading.Event()

    def put(self, name, body, **options):
        self.has_begun.set()
        assert self.may_put.wait(60.0)
        return super().put(name, body, **options)


def test_withdrawn_files_never_arrive_and_count_once(tmp_path):
    """The files of a group are one; what is being uploaded continues."""
    store = Held(tmp_path / "store")
    folder = StoreFolder(store, spool=tmp_path / "spool", workers=1, free_bytes=0)
    (tmp_path / "file").write_text("text")
    for name in ("first", "a/1", "a/2", "b"):
        folder.upload_file(name, tmp_path / "file", overwrite=True)
    assert store.has_begun.wait(60.0)

    kept = folder.withdraw([["b"]], only_while_failing=True)
    counts = [folder.withdraw([["a/1", "a/2"]], only_while_failing=False) for _ in range(2)]
    store.may_put.set()

    assert (kept, counts) == (0, [2, 0])
    assert folder.has_withdrawn("a/1")
    with pytest.raises(OSError, match="withdrawn"):
        folder.has_uploaded("a/2")
    folder.close(30.0)
    assert names(tmp_path) == ["first"]
