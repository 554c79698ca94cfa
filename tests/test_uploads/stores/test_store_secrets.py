"""Credentials of stores stay out of disks, URIs, handles, logs, messages and folder names."""

import contextlib
import json
import logging

import attrs
import pytest

from tests.servers.stores import MemoryStore
from uploads import UploadQueue, download_file, open_store
from uploads.command_line import resume
from uploads.drain.supervisor import WorkerConfig
from uploads.errors import RemoteNotFoundError, SpoolError
from uploads.spool.spool import Spool
from uploads.stores.uri import identity_of
from uploads.upload_queue import default_spools

HUSH = "hu5h-hu5h-hu5h"


def _files(folder):
    return b"".join(
        str(path).encode() + (path.read_bytes() if path.is_file() else b"") for path in folder.rglob("*")
    )


@pytest.mark.parametrize("isolation", ["threads", "process"])
def test_no_secret_of_a_store_reaches_disk_uri_or_log(
    isolation, tmp_path, make_file, monkeypatch, caplog, moto, prefix
):
    """This holds for secrets in the URI, in options and in an endpoint, and for failed attempts."""
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "home"))
    caplog.set_level(logging.DEBUG)
    endpoint = moto.endpoint_url.replace("http://", f"http://user:{HUSH}@") + f"?sig={HUSH}"
    options = {"endpoint_url": endpoint, "SSECustomerAlgorithm": "AES256", "SSECustomerKey": HUSH}
    uri = f"s3://bucket/{prefix}?aws_access_key_id=AKIA0123456789ABCDEF&aws_secret_access_key={HUSH}"

    queue = UploadQueue(uri, store_options=options, isolation=isolation, free_bytes=0)
    handle = queue.submit(make_file(), "a")
    with contextlib.suppress(TimeoutError):
        handle.exception(2)
    backlog = queue.close(0)

    said = [handle.uri, queue.uri("b"), str(backlog), repr(queue.spool.describe()), caplog.text]
    assert not [text for text in said if HUSH in text or "AKIA0123456789ABCDEF" in text]
    assert HUSH.encode() not in _files(tmp_path / "home")
    assert b"AKIA0123456789ABCDEF" not in _files(tmp_path / "home")
    assert queue.spool.describe()["store"]["left_out"] == [
        "SSECustomerAlgorithm",
        "SSECustomerKey",
        "aws_access_key_id",
        "aws_secret_access_key",
    ]


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://AKIAKEY:{HUSH}@bucket/run",
        f"sftp://me:{HUSH}@host/run",
        f"az://{HUSH}@container",
        f"gs://a:{HUSH}@b/c",
    ],
)
def test_a_uri_with_credentials_is_refused_without_showing_them(uri, tmp_path, monkeypatch):
    """They would become part of the store's and the spool's name, or be dropped silently."""
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "home"))

    with pytest.raises(ValueError, match="cannot contain credentials") as raised:
        UploadQueue(uri)

    assert HUSH not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_uri_of_no_store_is_refused_without_its_secrets():
    """The error names only the scheme."""
    with pytest.raises(ValueError, match="no store for") as raised:
        open_store(f"fpt://host/bucket?aws_secret_access_key={HUSH}")

    assert HUSH not in str(raised.value)


def test_a_signed_query_stays_out_of_a_stores_uri():
    """This covers Azure's SAS, whole or in parts, and keys of later releases of a client."""
    pytest.importorskip("obstore")
    store = open_store(
        "az://container/run?account_name=me",
        azure_storage_sas_token=f"sv=1&sig={HUSH}",
        endpoint=f"https://me.example/?sig={HUSH}",
    )

    assert store.uri() == "az://container/run?account_name=me"
    assert identity_of(store.uri()) == store.uri()
    assert HUSH not in str(next(default_spools(store.uri())))


def test_the_workers_configuration_shows_no_secret():
    """It may appear in a traceback."""
    order = WorkerConfig("/spool", f"s3://bucket?aws_secret_access_key={HUSH}", {"password": HUSH}, 1)

    assert HUSH not in repr(order)
    assert HUSH in json.dumps(attrs.asdict(order))


@pytest.mark.parametrize(
    "store",
    [
        7,
        [],
        {},
        {"uri": 7},
        {"uri": "file:///x", "options": 7, "left_out": 7},
        {"uri": "s3://b", "options": {"backend": 1}},
    ],
    ids=str,
)
def test_an_invalid_description_raises_or_is_read_as_written(tmp_path, store):
    """Options that no release writes aren't passed on."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    (spool.path / "spool.json").write_text(json.dumps({"version": 1, "store": store}))

    expected = (
        contextlib.nullcontext()
        if isinstance(store, dict) and isinstance(store.get("uri"), str)
        else pytest.raises(SpoolError, match="does not name its store")
    )

    with expected:
        assert resume(spool.path) == 0


@pytest.mark.parametrize("target", ["../outside", "/etc/passwd", "a\x1b[2Jb", "", "a//b"])
def test_a_pointer_cannot_lead_to_a_name_that_submit_refuses(target, tmp_path):
    """A user who may write to the store may write a pointer."""
    store = MemoryStore()
    store.objects["latest.symlink"] = target.encode()
    store.objects[target] = b"secret"

    with pytest.raises(RemoteNotFoundError, match="does not contain a valid name"):
        download_file("latest", tmp_path / "file", store=store, progress_bar=False)

    assert list(tmp_path.iterdir()) == []
