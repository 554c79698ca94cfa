"""The four commands, as a user runs them."""

import argparse
import json
import shutil
import zlib

import pytest

from tests.servers.fault_proxy import Answer
from tests.servers.stores import MemoryStore, StoreThatRejects, StoreThatWaits
from uploads import LocalStore, add_commands, open_store
from uploads.command_line import (
    EXIT_FAILED,
    EXIT_LEFT,
    EXIT_OK,
    EXIT_OWNED,
    exit_code,
    gc,
    main,
    resume,
    retry,
    status,
    verify,
)
from uploads.errors import SpoolOwnedError
from uploads.spool.entry import Entry
from uploads.spool.spool import Spool
from uploads.stores import Body

LIMIT_SECONDS = 120


@pytest.fixture
def spool(make_queue, make_file, gate, tmp_path):
    """A spool for the folder `store`, with a and b waiting and c in conflict."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store/c").write_bytes(b"theirs")
    first = make_queue()
    first.submit(make_file(content=b"mine"), "c").exception(LIMIT_SECONDS)
    first.close(LIMIT_SECONDS)
    waits = StoreThatWaits(gate)
    waits.uri = LocalStore(tmp_path / "store").uri  # The same store, not reachable yet.
    second = make_queue(waits, workers=1)
    for name in ("a", "b"):
        second.submit(make_file(content=name.encode()), name)
    second._store.started.acquire()  # One is in flight, one waits, and nothing moves during the copy.
    second._drainer.stop(0)
    second._drainer._threads[-1].join(LIMIT_SECONDS)  # Housekeeping writes nothing more,
    second._flusher.stop(LIMIT_SECONDS)  # nor does this one.
    second._owner.release()
    shutil.copytree(second.spool.path, tmp_path / "left", ignore=shutil.ignore_patterns("*.lock"))
    (tmp_path / "left/spool.json").write_text(
        json.dumps({"version": 1, "store": {"uri": LocalStore(tmp_path / "store").uri()}})
    )
    return tmp_path / "left"


def test_status_lists_pending_and_failed_files(spool, capsys):
    """It prints names, states and reasons; the exit code shows that something failed."""
    assert main(["status", str(spool), "--json"]) == EXIT_FAILED

    found = json.loads(capsys.readouterr().out)
    assert found["pending"] + found["inflight"] == 2
    assert found["failed"] == {"conflict": 1, "corrupt": 0, "rejected": 0}
    assert sorted(entry["remote_name"] for entry in found["entries"]) == ["a", "b"]
    assert "overwrite=False" in found["failures"][0]["reason"]
    assert found["drained_by"] is None


def test_status_is_readable(spool, capsys):
    """The text for people has the same content."""
    main(["status", str(spool)])

    text = capsys.readouterr().out
    assert "1 conflict" in text
    assert "conflict c: overwrite=False" in text


def test_resume_uploads_pending_files(spool, tmp_path, capsys):
    """Pending files arrive; the conflict stays and sets the exit code."""
    assert main(["resume", str(spool)]) == EXIT_FAILED

    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == {
        "a": b"a",
        "b": b"b",
        "c": b"theirs",
    }
    assert "0 pending" in capsys.readouterr().out


def test_resume_of_a_clean_spool_exits_with_0(spool, capsys):
    """`gc --failed --delete` comes before; without --delete, gc only counts."""
    assert main(["gc", str(spool), "--failed"]) == EXIT_OK
    assert capsys.readouterr().out == ("0 half staged, 1 failed: not deleted; add --delete to delete them\n")
    assert sum(status(spool)["failed"].values()) == 1
    assert main(["gc", str(spool), "--failed", "--delete"]) == EXIT_OK

    assert main(["resume", str(spool)]) == EXIT_OK
    assert main(["status", str(spool)]) == EXIT_OK


def test_resume_stops_at_its_timeout(spool, gate):
    """It returns and reports the remaining files."""
    gc(spool, failed=True)

    assert (
        resume(spool, store=StoreThatWaits(gate), timeout_seconds=0.05, give_back_seconds=0.05) == EXIT_LEFT
    )


def test_a_second_resume_names_the_owner(make_queue, capsys):
    """The exit code is 3."""
    queue = make_queue(MemoryStore())

    with pytest.raises(SpoolOwnedError):
        resume(queue.spool.path, store=MemoryStore())
    assert main(["resume", str(queue.spool.path), "--store", "/nowhere"]) == EXIT_OWNED
    assert "is in use by the queue with pid" in capsys.readouterr().err
    assert status(queue.spool.path)["submitted_by"]["role"] == "queue"


def test_retry_makes_failed_entries_pending_again(spool, tmp_path, capsys):
    """Once the cause is fixed, resume uploads the entry."""
    (tmp_path / "store/c").unlink()

    assert main(["retry", str(spool), "c"]) == EXIT_OK
    assert capsys.readouterr().out == "pending again: c\n"
    assert resume(spool) == EXIT_OK
    assert (tmp_path / "store/c").read_bytes() == b"mine"


def test_retry_of_a_name_that_did_not_fail_raises(spool, capsys):
    """Nothing moves for a misspelt name."""
    assert main(["retry", str(spool), "c", "d"]) == EXIT_FAILED
    assert "no failed entry of that name: d" in capsys.readouterr().err
    assert status(spool)["failed"]["conflict"] == 1


def test_retry_beside_a_live_queue_is_refused(make_queue, make_file, tmp_path, capsys):
    """The queue's handles already have their outcomes."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store/c").write_bytes(b"theirs")
    queue = make_queue()
    queue.submit(make_file(), "c").exception(LIMIT_SECONDS)

    assert main(["retry", str(queue.spool.path)]) == EXIT_OWNED
    assert "is in use by" in capsys.readouterr().err


def test_retry_never_restores_an_older_version(make_queue, make_file, tmp_path):
    """A newer version of the name was delivered since."""
    queue = make_queue(StoreThatRejects({"name"}))
    queue.submit(make_file(content=b"old"), "name", overwrite=True).exception(LIMIT_SECONDS)
    queue._store.disliked = ()
    queue.submit(make_file(content=b"new"), "name", overwrite=True).result(LIMIT_SECONDS)
    queue.close(LIMIT_SECONDS)

    assert retry(queue.spool.path) == []
    assert status(queue.spool.path)["failed"]["rejected"] == 1


def test_verify_compares_delivered_objects(make_queue, make_file, tmp_path, capsys):
    """It finds missing, longer and changed objects, and prints no others."""
    queue = make_queue()
    for name in ("right", "missing", "longer", "changed"):
        queue.submit(make_file(), name)
    queue.close(LIMIT_SECONDS)
    (tmp_path / "store/missing").unlink()
    (tmp_path / "store/longer").write_bytes(b"content and more")
    (tmp_path / "store/changed").write_bytes(b"CONTENT")

    found = verify(queue.spool.path)

    problems = {finding.uri.rpartition("/")[2]: finding.problem for finding in found}
    assert problems["missing"] == "missing"
    assert problems["longer"] == "expected 7 bytes, found 16"
    assert problems["changed"].startswith("expected SHA-256")
    assert set(problems) == {"missing", "longer", "changed"}
    assert main(["verify", str(queue.spool.path)]) == EXIT_FAILED


def test_verify_of_a_large_file_in_a_folder_compares_its_checksum(make_queue, make_file, tmp_path):
    """It has no SHA-256, so its CRC-32 detects one changed byte."""
    queue = make_queue()
    for name in ("right", "changed"):
        queue.submit(make_file(content=bytes(9 << 20)), name)
    queue.close(LIMIT_SECONDS)
    with (tmp_path / "store/changed").open("r+b") as stream:
        stream.write(b"1")

    (found,) = verify(queue.spool.path)

    assert found.uri.endswith("/changed")
    assert found.problem.startswith("expected CRC-32 ")


def test_verify_of_an_object_of_parts_asks_the_store_for_its_checksum(
    proxy, moto, prefix, make_queue, make_file
):
    """It downloads nothing, and detects another object of the same size."""
    content = bytes(range(256)) * (11 << 12)
    uri = moto.at(proxy.url).uri(prefix) + f"&part_bytes={5 << 20}"
    queue = make_queue(uri)
    for name in ("right", "changed"):
        queue.submit(make_file(content=content), name, overwrite=True).result(LIMIT_SECONDS)
    queue.close(LIMIT_SECONDS)
    other = content[::-1]
    with Body(make_file(content=other), "other", crc32=zlib.crc32(other)) as body:
        open_store(uri).put("changed", body, overwrite=True)

    (found,) = verify(queue.spool.path)

    assert found.uri.partition("?")[0].endswith("/changed")
    assert found.problem.startswith("expected CRC-32")
    assert proxy.count("GET") == 0


def test_verify_exits_with_0_if_everything_is_there(make_queue, make_file, capsys):
    """A name that was delivered twice is compared with its last version."""
    queue = make_queue()
    queue.submit(make_file(content=b"1"), "a").result(LIMIT_SECONDS)
    queue.submit(make_file(content=b"2"), "a", overwrite=True).result(LIMIT_SECONDS)
    queue.close(LIMIT_SECONDS)

    assert main(["verify", str(queue.spool.path)]) == EXIT_OK
    assert capsys.readouterr().out == "everything that was delivered is in the store\n"


def test_gc_removes_only_on_request(spool):
    """Failed entries go with their bytes if asked."""
    assert gc(spool) == {"half_staged": 0, "failed": 0}
    assert status(spool)["failed"]["conflict"] == 1

    assert gc(spool, failed=True)["failed"] == 1
    assert status(spool)["failed"]["conflict"] == 0


def test_gc_of_a_half_sent_file_leaves_no_parts_in_the_store(proxy, moto, prefix, make_queue, make_file):
    """They would cost money, and a bucket's listing doesn't show them."""
    refused = Answer(400, "InvalidArgument")
    proxy.plan = lambda one: refused if one.method == "DELETE" or "partNumber=2" in one.path else None
    queue = make_queue(moto.at(proxy.url).uri(prefix) + f"&part_bytes={5 << 20}")
    queue.submit(make_file(content=bytes(11 << 20)), "name").exception(LIMIT_SECONDS)
    queue.close(LIMIT_SECONDS)
    assert moto.open_uploads(prefix) == 1

    proxy.plan = lambda request: None
    assert gc(queue.spool.path, failed=True)["failed"] == 1

    assert moto.open_uploads(prefix) == 0


@pytest.mark.parametrize("folder", ["uploads", "uploads/file-store-0123"])
def test_the_error_for_a_folder_of_spools_names_them(tmp_path, make_queue, capsys, folder):
    """Default spools are two folders below `$UPLOADS_HOME`."""
    queue = make_queue(spool=tmp_path / "uploads/file-store-0123/0")

    assert main(["status", str(tmp_path / folder)]) == EXIT_FAILED

    assert capsys.readouterr().err.endswith(f"no folder pending/. Spools in it: {queue.spool.path}\n")


def test_a_spool_of_an_unknown_store_needs_one(spool, capsys):
    """--store supplies it if spool.json doesn't."""
    (spool / "spool.json").unlink()

    assert main(["resume", str(spool)]) == EXIT_FAILED
    assert "give one with --store URI" in capsys.readouterr().err


def test_mounted_commands_give_the_same_exit_codes(tmp_path, capsys):
    """Another command line that mounts the commands gets an exit code and a message, never an exception."""
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    options = parser.parse_args(["resume", str(tmp_path / "nowhere")])

    code = options.run(options)

    assert code == EXIT_FAILED
    assert "pending/" in capsys.readouterr().err


def test_status_works_while_entries_come_and_go(make_queue, make_file):
    """An entry that moves or ends meanwhile is described or left out.

    It's never called unreadable.
    """
    store = MemoryStore()
    queue = make_queue(store, workers=2)
    source = make_file()
    problems = []
    for number in range(100):
        queue.submit(source, f"n{number}")
        problems += [entry["problem"] for entry in status(queue.spool.path)["entries"] if "problem" in entry]

    assert queue.drain(LIMIT_SECONDS).is_empty
    assert problems == []


class SpoolWhoseUploadFails(Spool):
    """A spool whose entry is put back between the listings of pending and in-flight entries."""

    def list_inflight(self):
        for folder in super().list_inflight():
            self.release(folder)
        return super().list_inflight()


def test_an_entry_put_back_during_a_listing_is_pending(tmp_path):
    """The exit code never reports everything as delivered because an entry moved."""
    spool = SpoolWhoseUploadFails(tmp_path)
    spool.create()
    entry = Entry(f"{1:016x}", 1, "a", True, 1, None, "copied", "/a", (), "now")  # noqa: FBT003  # overwrite
    (spool.inflight / entry.folder).mkdir()

    assert exit_code(spool) == EXIT_LEFT
