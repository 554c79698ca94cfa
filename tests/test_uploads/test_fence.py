"""A queue with a fence: what it still does once its successor is there."""

import subprocess
import sys

import pytest

from tests.test_uploads.conftest import LIMIT_SECONDS
from uploads import Fence, LocalStore, StoreFolder, UploadQueue, UploadState
from uploads.stores.s3 import S3Store
from uploads.testing import put

FENCE = Fence(unless="live/1/successor.json", prefix="live/1/")


class Taken(LocalStore):
    """A store whose successor comes while a file is being written: after the look, before it has its name."""

    has_successor = True

    def _write(self, folder, leaf, body):
        super()._write(folder, leaf, body)
        if self.has_successor and body.identifier != "successor":
            self.has_successor = False
            (self.root / "live" / "1").mkdir(parents=True)
            (self.root / FENCE.unless).write_text("successor")
            (self.root / "last.pt").write_text("theirs")


def contents(store):
    """Returns the objects of a store in a folder, by name."""
    return {one.name: b"".join(store.get(one.name)) for one in store.list()}


def take_over(store, tmp_path, **objects):
    """Puts what a successor puts."""
    for name, content in {FENCE.unless: b"", **objects}.items():
        put(store, tmp_path, name, content, identifier="successor")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_goes_below_the_prefix_once_the_successor_is_there(
    make_queue, make_file, tmp_path, overwrite, caplog
):
    """Its bytes aren't lost and the successor's stay; outcome and log say where they are."""
    store = LocalStore(tmp_path / "store")
    take_over(store, tmp_path, **{"ep/last.pt": b"theirs"})
    queue = make_queue(store, fence=FENCE)

    outcome = queue.submit(make_file("last.pt", b"ours"), "ep/last.pt", overwrite=overwrite).result(
        LIMIT_SECONDS
    )

    assert outcome.state is UploadState.SUPERSEDED
    assert f"last.pt was not uploaded under its name: {outcome.reason}" in caplog.text
    assert outcome.reason.endswith(f"The file is in {store.uri('live/1/ep%2Flast.pt')}")
    assert contents(store) == {
        FENCE.unless: b"",
        "ep/last.pt": b"theirs",
        "live/1/ep%2Flast.pt": b"ours",
    }


def test_each_file_of_a_folder_goes_below_the_prefix(make_queue, make_file, tmp_path):
    """Each file of a folder has its own fence."""
    store = LocalStore(tmp_path / "store")
    make_file("shards/0.pt", b"0")
    make_file("shards/1.pt", b"1")
    take_over(store, tmp_path)

    make_queue(store, fence=FENCE).submit(tmp_path / "shards").result(LIMIT_SECONDS)

    assert contents(store) == {
        FENCE.unless: b"",
        "live/1/shards%2F0.pt": b"0",
        "live/1/shards%2F1.pt": b"1",
    }


def test_nothing_changes_without_a_successor(make_queue, make_file, tmp_path):
    """Files, pointers and deletions behave as without a fence."""
    store = LocalStore(tmp_path / "store")
    queue = make_queue(store, fence=FENCE)
    queue.submit_pointer("latest", queue.submit(make_file("a", b"a"), "a"))
    queue.delete("b", after=[queue.submit(make_file("b", b"b"), "b")])
    queue.drain(LIMIT_SECONDS)

    assert contents(store) == {"a": b"a", "latest.symlink": b"a"}


def test_a_successor_that_comes_while_a_file_is_written_keeps_its_own(make_queue, make_file, tmp_path):
    """The queue looks again right before the file gets its name, because writing a checkpoint takes minutes."""
    store = Taken(tmp_path / "store")

    outcome = (
        make_queue(store, fence=FENCE)
        .submit(make_file(content=b"ours"), "last.pt", overwrite=True)
        .result(LIMIT_SECONDS)
    )

    assert outcome.state is UploadState.SUPERSEDED
    assert contents(store) == {
        FENCE.unless: b"successor",
        "last.pt": b"theirs",
        "live/1/last.pt": b"ours",
    }


def test_a_pointer_is_not_sent_and_nothing_is_deleted_once_the_successor_is_there(
    make_queue, make_file, tmp_path, caplog
):
    """Not even objects below the prefix are deleted, because their replacement may not have been sent."""
    store = LocalStore(tmp_path / "store")
    theirs = {"latest.symlink": b"new", "ep1": b"1", "live/1/piece": b"ours", "ep2": b"2"}
    queue = make_queue(store, fence=FENCE)
    done = queue.submit(make_file(content=b"old"), "old")
    done.result(LIMIT_SECONDS)
    take_over(store, tmp_path, **theirs)

    pointer = queue.submit_pointer("latest", done)
    queue.delete("ep1", then=["ep2"])
    queue.delete("live/1/piece")
    queue.drain(LIMIT_SECONDS)

    assert pointer.state is UploadState.SUPERSEDED
    assert contents(store) == {
        FENCE.unless: b"",
        "old": b"old",
        **theirs,
    }
    assert "ep1 is not deleted: a successor put" in caplog.text


def test_files_left_in_a_spool_are_fenced_whoever_sends_them(make_file, tmp_path):
    """`uploads resume` knows nothing about runs; the entry carries the fence."""
    code = (
        "import sys, os\n"
        "from uploads import Fence, UploadQueue\n"
        "fence = Fence('live/1/successor.json', 'live/1/')\n"
        "queue = UploadQueue(sys.argv[1], spool=sys.argv[2], fence=fence)\n"
        "queue._drainer.stop(0.0)\n"
        "queue.submit(sys.argv[3], 'last.pt', overwrite=True)\n"
        "os._exit(0)\n"
    )
    store = LocalStore(tmp_path / "store")
    command = [sys.executable, "-c", code, tmp_path / "store", tmp_path / "spool", make_file(content=b"ours")]
    subprocess.run([*map(str, command)], check=True, timeout=LIMIT_SECONDS)
    take_over(store, tmp_path, **{"last.pt": b"theirs"})

    with UploadQueue(tmp_path / "store", spool=tmp_path / "spool") as queue:
        queue.drain(LIMIT_SECONDS)

    assert contents(store) == {FENCE.unless: b"", "last.pt": b"theirs", "live/1/last.pt": b"ours"}


def test_a_call_may_name_another_object_or_none(make_queue, make_file, tmp_path):
    """`unless` of a call overrides the fence of the queue."""
    store = LocalStore(tmp_path / "store")
    take_over(store, tmp_path, other=b"")
    queue = make_queue(store, fence=FENCE)

    free = queue.submit(make_file("free"), "free", unless="").result(LIMIT_SECONDS)
    other = queue.submit(make_file("held"), "held", unless="other").result(LIMIT_SECONDS)

    assert [free.state, other.state] == [UploadState.DONE, UploadState.SUPERSEDED]
    assert contents(store).keys() == {FENCE.unless, "other", "free"}


def test_the_files_of_a_store_folder_are_fenced(make_file, tmp_path):
    """The fence covers uploads, pointers and deletions by their names in the folder."""
    store = LocalStore(tmp_path / "store")
    folder = StoreFolder(
        tmp_path / "store",
        name_of="artifacts/{}".format,
        spool=tmp_path / "spool",
        free_bytes=0,
        fence=FENCE,
    )
    take_over(store, tmp_path, **{"artifacts/ep1.pt": b"theirs"})

    folder.upload_file("ep2.pt", make_file(content=b"ours"), overwrite=True)
    folder.upload_file("latest.symlink", make_file("pointer", b"ep2.pt"), overwrite=True)
    folder.delete_file("ep1.pt", after=["ep2.pt"])
    folder.close(LIMIT_SECONDS)

    assert contents(store) == {
        FENCE.unless: b"",
        "artifacts/ep1.pt": b"theirs",
        "live/1/artifacts%2Fep2.pt": b"ours",
    }


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_successor_that_comes_while_parts_are_sent_keeps_its_own(
    moto, prefix, make_queue, make_file, tmp_path, overwrite
):
    """The queue looks before the parts become an object, and aborts them."""
    content = bytes(range(256)) * (25 << 10)

    class ComesLate(S3Store):
        looks = 0

        def head(self, name):
            self.looks += name == FENCE.unless
            return None if name == FENCE.unless and self.looks < 2 else super().head(name)

    store = ComesLate("bucket", prefix, endpoint_url=moto.endpoint_url, part_bytes=5 << 20)
    put(store, tmp_path, FENCE.unless, b"")

    outcome = (
        make_queue(store, fence=FENCE)
        .submit(make_file(content=content), "last.pt", overwrite=overwrite)
        .result(LIMIT_SECONDS)
    )

    assert outcome.state is UploadState.SUPERSEDED
    assert moto.objects(prefix) == {FENCE.unless: b"", "live/1/last.pt": content}
    assert moto.open_uploads(prefix) == 0
