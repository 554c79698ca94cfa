"""A spool, drain or worker of one store never mixes in files for another store."""

import json
import subprocess
import sys
import time

import attrs
import pytest

from tests.servers.stores import MemoryStore
from uploads import open_store
from uploads.command_line import main, resume, verify
from uploads.drain.drain import Drain
from uploads.drain.supervisor import WorkerConfig
from uploads.errors import SpoolError, SpoolUnusableError
from uploads.handle import UploadState
from uploads.spool.ownership import owner_of
from uploads.spool.spool import Spool
from uploads.spool.staging import DiskQuota, Stager, Submission
from uploads.stores.uri import identity_of
from uploads.upload_queue import default_spools

LIMIT_SECONDS = 120


class NamedStore(MemoryStore):
    """A store with its own name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def uri(self, name=""):
        return f"memory://{self.name}/{name}"


@pytest.fixture
def waiting(tmp_path, make_file):
    """A spool with a waiting entry for `memory://store`; no process owns it."""
    spool = Spool(tmp_path / "spool")
    spool.create({"uri": "memory://store/"})
    quota = DiskQuota(spool.path, spool_bytes=None, free_bytes=0, wait_seconds=0.0, clock=time.monotonic)
    file = Submission(make_file("first", b"first"), "checkpoint", overwrite=True)
    Stager(spool, quota, "memory://store").stage("0" * 16, file, 5, register=lambda entry: None)
    return spool


def test_a_spool_with_files_for_another_store_is_refused(waiting, make_queue):
    """The message names both stores, the files stay, and nothing is locked."""
    other = NamedStore("other")

    with pytest.raises(
        SpoolUnusableError, match=r"entries for another store, memory://store; asked for memory://other"
    ):
        make_queue(other)

    assert len(waiting.list_pending()) == 1
    assert other.objects == {}
    assert owner_of(waiting.queue_lock) is None
    assert make_queue(store := MemoryStore()).drain(LIMIT_SECONDS).is_empty
    assert store.objects == {"checkpoint": b"first"}


def test_an_empty_spool_may_be_given_another_store(make_queue, make_file):
    """Files delivered to the first store aren't looked for in the second."""
    first, second = MemoryStore(), NamedStore("second")
    for store, name in ((first, "a"), (second, "b")):
        queue = make_queue(store)
        queue.submit(make_file(), name).result(LIMIT_SECONDS)
        queue.close(LIMIT_SECONDS)

    assert queue.spool.describe()["store"]["uri"] == second.uri()
    assert [outcome.remote_name for outcome in queue.spool.delivered()] == ["a", "b"]
    assert verify(
        queue.spool.path, store=NamedStore("second")
    )  # Where one is given everything is looked for.


def test_a_live_drain_ignores_entries_for_another_store(waiting):
    """The worker of a killed trainer also ignores them, and then ends."""
    other, right = NamedStore("other"), MemoryStore()
    drain = Drain(waiting, other)
    drain.start()
    assert drain.wait_idle(LIMIT_SECONDS)
    drain.rescan()
    assert drain.wait_idle(LIMIT_SECONDS)
    drain.stop(LIMIT_SECONDS)
    assert other.objects == {}
    assert len(waiting.list_pending()) == 1

    drain = Drain(waiting, right)
    drain.start()
    assert drain.wait_idle(LIMIT_SECONDS)
    drain.stop(LIMIT_SECONDS)

    assert right.objects == {"checkpoint": b"first"}


def test_a_newer_file_for_another_store_supersedes_nothing(waiting):
    """Each store gets its own version."""
    (folder,) = waiting.list_pending()
    entry = waiting.entry_of(folder)
    newer = attrs.evolve(entry, identifier="f" * 16, sequence=entry.sequence + 1, store="memory://other")
    staged = waiting.new_folder()
    (staged / "data").write_bytes(b"newer")
    waiting.write_manifest(staged, attrs.evolve(newer, size=5, crc32=None))
    waiting.publish(staged, newer, to_disk=False)
    store = MemoryStore()

    drain = Drain(waiting, store)
    drain.start()
    assert drain.wait_idle(LIMIT_SECONDS)
    drain.stop(LIMIT_SECONDS)

    assert store.objects == {"checkpoint": b"first"}
    assert waiting.list_pending() == [newer.folder]
    assert [outcome.state for outcome in waiting.delivered()] == [UploadState.DONE]


def test_resume_uploads_to_another_store_only_with_that_option(waiting, tmp_path):
    """`--store` asks for it, because the first store may have moved."""
    (waiting.path / "spool.json").write_text(
        json.dumps({"version": 1, "store": {"uri": (tmp_path / "wrong").as_uri()}})
    )

    assert main(["resume", str(waiting.path)]) == 1
    assert not (tmp_path / "wrong").exists()
    assert main(["resume", str(waiting.path), "--store", str(tmp_path / "right")]) == 0

    assert (tmp_path / "right/checkpoint").read_bytes() == b"first"


@pytest.mark.parametrize("name", ["S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_an_endpoint_of_the_environment_is_the_stores(name, monkeypatch):
    """Another endpoint has another default spool, and `resume` finds the first endpoint from another shell."""
    plain = open_store("s3://bucket/run").uri()
    monkeypatch.setenv(name, "http://user:hush@127.0.0.1:9000/")
    first = open_store("s3://bucket/run").uri()
    monkeypatch.setenv(name, "http://127.0.0.1:9001")
    second = open_store("s3://bucket/run").uri()

    identities = [identity_of(uri) for uri in (plain, first, second)]
    assert identities == [
        "s3://bucket/run",
        "s3://bucket/run?endpoint_url=http://127.0.0.1:9000",
        "s3://bucket/run?endpoint_url=http://127.0.0.1:9001",
    ]
    assert len({next(default_spools(identity)) for identity in identities}) == 3
    monkeypatch.delenv(name)
    assert identity_of(open_store(first).uri()) == identities[1]


def test_settings_that_may_change_between_runs_are_no_other_store():
    """Only options that identify the server count."""
    uris = [
        "s3://bucket/run?endpoint_url=http://127.0.0.1:9000",
        "s3://bucket/run/?endpoint_url=http://127.0.0.1:9000/&region=eu&checksum=md5&part_bytes=5",
        "s3://bucket/run?endpoint_url=http://127.0.0.1:9000&profile=mine&create_only=require",
    ]

    assert len({identity_of(open_store(uri).uri()) for uri in uris}) == 1


def test_a_worker_that_would_open_another_store_ends(waiting, tmp_path):
    """The environment has changed, so the worker's URI would lead to another store than the queue's."""
    order = WorkerConfig(str(waiting.path), str(tmp_path / "store"), {}, 1, store_identity="s3://bucket/run")

    answers = tmp_path / "answers"
    with answers.open("wb") as stream:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "uploads.drain.worker", str(stream.fileno())],
            input=json.dumps(attrs.asdict(order)) + "\n",
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
            pass_fds=(stream.fileno(),),
        )

    assert done.returncode != 0
    assert "instead of s3://bucket/run: its environment differs" in answers.read_text()
    assert len(waiting.list_pending()) == 1


def test_resume_asks_for_missing_options(make_queue, moto, prefix):
    """An object that must be encrypted with your key isn't sent without it."""
    queue = make_queue(open_store(moto.uri(prefix)), spool=None)
    queue.close(0)
    about = {"uri": moto.uri(prefix), "options": {}, "left_out": ["SSECustomerKey", "aws_secret_access_key"]}
    queue.spool.assign_store(about)

    with pytest.raises(SpoolError, match="needs the options SSECustomerKey, which are not kept on disk"):
        resume(queue.spool.path)
