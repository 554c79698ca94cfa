"""A hostile spool: nothing outside it is read, written or removed, whatever it contains."""

import json
import os
import shutil

import pytest

from tests.servers.stores import MemoryStore
from uploads.command_line import resume
from uploads.disk import append_line
from uploads.errors import ManifestError
from uploads.handle import Outcome, UploadState
from uploads.names import name_key
from uploads.spool.entry import Entry, folder_name
from uploads.spool.ownership import OwnerLock
from uploads.spool.spool import Spool
from uploads.stores.s3.parts import abandon_parts

IDENTIFIER = "0123456789abcdef"


@pytest.fixture
def spool(tmp_path):
    """An empty spool."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    return spool


@pytest.fixture
def outside(tmp_path):
    """A file that a hostile spool tries to reach."""
    path = tmp_path / "outside/secret"
    path.parent.mkdir()
    path.write_bytes(b"secret")
    return path


def _record(name):
    entry = Entry(
        IDENTIFIER,
        1,
        name,
        overwrite=True,
        size=6,
        crc32=None,
        staging="copied",
        source="/a",
        after={},
        submitted_at="",
    )
    return json.loads(entry.to_text())


def _plant(spool, name="a", **changes):
    """Writes an entry as an editor could; returns its folder."""
    record = _record(name) | changes
    folder = spool.pending / folder_name(1, name_key(record["remote_name"]), IDENTIFIER)
    folder.mkdir()
    (folder / "entry.json").write_text(json.dumps(record))
    (folder / "data").write_bytes(b"secret")
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"remote_name": "../../outside/new"},
        {"remote_name": "/etc/new"},
        {"remote_name": "a\x1b[2Jb"},
        {"identifier": "../../../../x"},
        {"after": ["0123456789abcdef"]},
        {"after": {"zz": "name"}},
        {"after": {"0123456789abcdef": 3}},
        {"after": {"0123456789abcdef": "../name"}},
        {"sequence": "1"},
        {"sequence": -1},
        {"size": 1e300},
        {"size": None},
        {"overwrite": 1},
        {"staging": ["linked"]},
        {"source": 7},
        {"store": {}},
    ],
    ids=lambda change: "-".join(f"{key}" for key in change),
)
def test_a_manifest_is_checked_again_when_it_is_read(change):
    """Values that `submit` refuses, or that no release writes, make it unreadable."""
    record = _record("a")

    with pytest.raises(ManifestError, match="must be a JSON object of an entry"):
        Entry.parse(json.dumps(record | change).encode())


def test_a_name_that_leaves_the_store_is_set_aside(spool, tmp_path):
    """The entry fails as corrupt, and the store never sees the name."""
    _plant(spool, "../escaped")
    store = MemoryStore()

    resume(spool.path, store=store)

    assert store.objects == {}
    assert [len(folders) for folders in spool.list_failed().values()] == [0, 1, 0]
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_bytes_that_are_no_regular_file_are_not_sent(spool, outside, kind):
    """A link to an outside file, a FIFO and a folder fail as corrupt."""
    folder = _plant(spool)
    (folder / "data").unlink()
    if kind == "link":
        (folder / "data").symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(folder / "data")
    else:
        (folder / "data").mkdir()
    store = MemoryStore()

    resume(spool.path, store=store)

    assert store.objects == {}
    assert [len(folders) for folders in spool.list_failed().values()] == [0, 1, 0]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "huge"])
def test_a_manifest_that_is_no_small_regular_file_is_unreadable(spool, outside, kind):
    """A link, a FIFO and a folder aren't read, and neither is a huge file."""
    folder = _plant(spool)
    manifest = folder / "entry.json"
    manifest.rename(outside.with_name("manifest"))
    if kind == "link":
        manifest.symlink_to(outside.with_name("manifest"))
    elif kind == "fifo":
        os.mkfifo(manifest)
    elif kind == "folder":
        manifest.mkdir()
    else:
        with manifest.open("wb") as stream:
            stream.truncate(1 << 40)

    with pytest.raises(ManifestError, match="cannot read the manifest"):
        Entry.read(folder)


def test_an_entry_that_is_a_link_to_a_folder_outside_is_none(spool, outside):
    """Nothing behind the link is sent or removed."""
    folder = _plant(spool)
    shutil.move(folder, outside.parent / "entry")
    folder.symlink_to(outside.parent / "entry")
    store = MemoryStore()

    resume(spool.path, store=store)

    assert store.objects == {}
    assert sorted(path.name for path in (outside.parent / "entry").iterdir()) == ["data", "entry.json"]


@pytest.mark.parametrize("name", ["queue.lock", "drain.lock"])
def test_a_lock_that_is_a_link_is_not_followed(spool, outside, name):
    """The lock's text doesn't replace a foreign file."""
    (spool.path / name).symlink_to(outside)

    with pytest.raises(OSError, match="symbolic link"):
        OwnerLock(spool.path / name, "test").take()

    assert outside.read_bytes() == b"secret"


def test_a_log_that_is_a_link_is_not_appended_to(spool, outside):
    """Deliveries aren't written into a foreign file."""
    log = spool.path / "delivered.jsonl"
    log.symlink_to(outside)

    with pytest.raises(OSError, match="symbolic link"):
        append_line(log, json.dumps(Outcome(IDENTIFIER, "a", UploadState.DONE).to_json()))

    assert outside.read_bytes() == b"secret"


def test_notes_of_parts_cannot_abort_uploads_of_others(tmp_path):
    """A key outside the store's prefix, or one that isn't a text, is ignored."""

    class NothingIsAsked:
        pass

    for key in ("other/run.pt", 7, None):
        notes = tmp_path / "multipart.json"
        notes.write_text(json.dumps({"key": key, "upload_id": "1"}))

        abandon_parts(NothingIsAsked(), notes, "mine/")

        assert not notes.exists()
