"""Paths that are not UTF-8, URIs that lead somewhere else than they say, permissions that are not ours to change."""

import os
import stat
from pathlib import Path

import pytest

from tests.servers.stores import MemoryStore
from uploads import LocalStore, UploadQueue, open_store
from uploads.command_line import status
from uploads.download import download_file
from uploads.errors import InvalidRemoteNameError

LIMIT_SECONDS = 120
LATIN_1 = os.fsdecode("café".encode("latin-1"))


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("how", "mode"),
    [({}, 0o600), ({"move": True}, 0o640), ({"link": True}, 0o444)],
    ids=["copy", "move", "link"],
)
def test_a_file_that_its_owner_kept_to_themselves_stays_so(make_queue, make_file, tmp_path, how, mode):
    """A store of files gives an object the permissions of its source, less the umask."""
    source = make_file(content=b"x" * 100)
    source.chmod(mode)

    make_queue().submit(source, "a", **how).result(LIMIT_SECONDS)

    assert _mode(tmp_path / "store/a") == mode


def test_the_umask_takes_away_from_the_permissions(make_queue, make_file, tmp_path):
    """`cp` does it so."""
    source = make_file()
    source.chmod(0o666)
    umask = os.umask(0o027)
    try:
        make_queue().submit(source, "a").result(LIMIT_SECONDS)
    finally:
        os.umask(umask)

    assert _mode(tmp_path / "store/a") == 0o640


def test_paths_that_are_not_utf_8_work(make_queue, make_file, tmp_path):
    """Source, spool and store may have them; the manifest shows the bytes that are none."""
    store = LocalStore(tmp_path / LATIN_1 / "store")
    queue = make_queue(store, spool=tmp_path / LATIN_1 / "spool")
    source = make_file(f"{LATIN_1}.bin")
    handle = queue.submit(source, "a")

    handle.result(LIMIT_SECONDS)

    assert (store.root / "a").read_bytes() == b"content"
    assert open_store(store.uri()).root == store.root
    assert handle.uri.isascii()
    back = download_file(handle.uri, tmp_path / LATIN_1 / "back", progress_bar=False)
    assert back.read_bytes() == b"content"


def test_a_source_that_is_not_utf_8_is_named_in_its_manifest(make_queue, make_file, gate):
    """`status` prints it, whatever the terminal's encoding."""
    from tests.servers.stores import StoreThatWaits
    from uploads.spool.entry import Entry

    queue = make_queue(StoreThatWaits(gate))
    queue.submit(make_file(f"{LATIN_1}.bin"), "a")

    # It may move from one to the other between the two looks.
    (folder,) = {*queue.spool.list_pending(), *queue.spool.list_inflight()}
    assert queue.spool.entry_of(folder).source.endswith(r"caf\xe9.bin")
    assert status(queue.spool.path)["entries"][0]["remote_name"] == "a"
    assert Entry.parse(queue.spool.entry_of(folder).to_text().encode())


def test_a_name_that_is_not_utf_8_must_be_given(make_queue, make_file, tmp_path):
    """No store could keep it; the error comes at the call, and of a folder nothing is taken."""
    queue = make_queue(MemoryStore())
    make_file("folder/good.bin")
    make_file(f"folder/{LATIN_1}.bin")

    for source in (make_file(f"{LATIN_1}.bin"), tmp_path / "folder"):
        with pytest.raises(InvalidRemoteNameError, match="encodable as UTF-8"):
            queue.submit(source)

    assert queue.unsettled() == 0
    assert queue._store.objects == {}


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("file://relative/x", "is absolute, as in file:///folder"),
        ("file:relative", "'://' is missing after the scheme"),
        ("file:/x", "'://' is missing after the scheme"),
        ("s3:/bucket/x", "'://' is missing after the scheme"),
        ("s3//bucket/x", "did you mean 's3://bucket/x'"),
        ("s3:///x", "needs a bucket"),
        ("gs://", "needs a bucket"),
        ("sftp:///x", "needs a host"),
        ("", "got an empty string"),
        (Path("s3://bucket/x"), "a Path drops a slash"),
        (Path("sftp://host/x"), "a Path drops a slash"),
    ],
    ids=str,
)
def test_a_uri_that_would_lead_elsewhere_is_refused(uri, reason, tmp_path, monkeypatch):
    """A host that is dropped, and a slash that is missing, would make a folder of another name."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match=reason):
        UploadQueue(uri, spool=tmp_path / "spool")

    assert list(tmp_path.iterdir()) == []


def test_a_local_uri_may_name_this_host_and_hold_any_character(tmp_path):
    """`#` and `?` belong to the path: a folder has no options."""
    assert open_store(f"file://localhost{tmp_path}/x").root == tmp_path / "x"
    assert open_store(f"file://{tmp_path}/sweep#1/a?b").root == tmp_path / "sweep#1/a?b"
    assert open_store(LocalStore(tmp_path / "sweep#1/a?b%2F").uri()).root == tmp_path / "sweep#1/a?b%2F"


def test_a_relative_folder_is_made_absolute_once(tmp_path, make_file, monkeypatch):
    """A worker that is started later, in another folder, uses the same store."""
    monkeypatch.chdir(tmp_path)
    with UploadQueue("store", spool="spool", isolation="process", free_bytes=0) as queue:
        monkeypatch.chdir("/")
        queue._drainer._worker.process.kill()
        queue.submit(make_file(), "a").result(LIMIT_SECONDS)

    assert (tmp_path / "store/a").read_bytes() == b"content"


def test_an_existing_folder_given_as_spool_keeps_its_permissions(tmp_path, make_queue):
    """What is made in it is for this user alone; a folder that is made has no other user either."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given").chmod(0o755)

    given, made = make_queue(spool=tmp_path / "given"), make_queue(spool=tmp_path / "made/deep")

    assert _mode(given.spool.path) == 0o755
    assert {_mode(path) for path in given.spool.path.iterdir() if path.is_dir()} == {0o700}
    assert _mode(made.spool.path) == 0o700
