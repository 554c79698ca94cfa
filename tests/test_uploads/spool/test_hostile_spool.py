"""A hostile spool: nothing outside it is read, written or removed, whatever it contains."""

import json
import shutil

import pytest

from tests.servers.stores import MemoryStore
from uploads.command_line import resume
from uploads.errors import ManifestError
from uploads.names import name_key
from uploads.spool.entry import Entry, folder_name
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


def test_an_entry_that_is_a_link_to_a_folder_outside_is_none(spool, outside):
    """Nothing behind the link is sent or removed."""
    folder = _plant(spool)
    shutil.move(folder, outside.parent / "entry")
    folder.symlink_to(outside.parent / "entry")
    store = MemoryStore()

    resume(spool.path, store=store)

    assert store.objects == {}
    assert sorted(path.name for path in (outside.parent / "entry").iterdir()) == ["data", "entry.json"]


def test_notes_of_parts_cannot_abort_uploads_of_others(tmp_path):
    """A key outside the store's prefix, or one that isn't a text, is ignored."""

    class NothingIsAsked:
        pass

    for key in ("other/run.pt", 7, None):
        notes = tmp_path / "multipart.json"
        notes.write_text(json.dumps({"key": key, "upload_id": "1"}))

        abandon_parts(NothingIsAsked(), notes, "mine/")

        assert not notes.exists()
