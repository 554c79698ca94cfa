"""Answers that are not the store's, that come late or never, and credentials that may do little: nothing fails that was not clearly refused."""

import errno
import fcntl
import logging
import os
import socket
import threading
from pathlib import Path

import pytest

from tests.effort import times
from tests.servers.counting_s3 import CountingS3
from tests.servers.fault_proxy import Answer, FaultProxy, Late, captive_portal, front
from tests.servers.sshd import over_ssh
from uploads import LocalStore, UploadState, open_store
from uploads.errors import StoreError, StoreParkedError, TransientStoreError
from uploads.stores import Body

LIMIT_SECONDS = 120
MANY_REQUESTS = 25  # More than would fail two entries if an unknown answer counted: ten for each.
PART_BYTES = 5 << 20
LARGE = os.urandom(1 << 20) * 12
SMALL_PARTS = f"&part_bytes={PART_BYTES}"


@pytest.fixture
def s3_behind():
    """A small S3 server and a proxy before it."""
    server = CountingS3()
    proxy = FaultProxy(server.endpoint_url)
    yield server, proxy
    proxy.close()
    server.close()


def uri_at(proxy, prefix):
    """The URI of a store behind the proxy."""
    return f"s3://bucket/{prefix}?endpoint_url={proxy.url}"


def until(proxy, count, fault_of):
    """A plan: the fault for the first `count` requests, then none."""
    return lambda request: fault_of(request) if len(proxy.seen) <= count else None


def submit_all(queue, make_file, count, **options):
    """Submits that many small files, and returns their handles."""
    return [
        queue.submit(make_file(f"{number}", b"content %d" % number), f"n{number}", **options)
        for number in range(count)
    ]


STATUSES = [302, 400, 401, 403, 404, 407, 418]


@pytest.mark.parametrize(
    ("status", "overwrite"),
    [
        *((status, False) for status in times([302, 403], STATUSES)),
        *((status, True) for status in times([404], STATUSES)),
    ],
)
def test_a_proxys_refusals_fail_nothing(s3_behind, make_queue, make_file, status, overwrite):
    """A proxy may answer instead of the store for long; afterwards everything is delivered."""
    server, proxy = s3_behind
    proxy.plan = until(proxy, MANY_REQUESTS, lambda _: front(status))

    handles = submit_all(make_queue(uri_at(proxy, "p")), make_file, 2, overwrite=overwrite)

    assert {handle.result(LIMIT_SECONDS).state for handle in handles} == {UploadState.DONE}
    assert sorted(server.under("p")) == ["n0", "n1"]


def test_a_pause_is_reported_once_whatever_file_is_probed(s3_behind, make_queue, make_file, caplog):
    """An outage of hours is one line in the log, and the next outage another."""
    _server, proxy = s3_behind
    queue = make_queue(uri_at(proxy, "p"))

    for pause in (1, 2):
        proxy.plan = until(proxy, len(proxy.seen) + MANY_REQUESTS, lambda _: front(403))
        handles = submit_all(queue, make_file, 2, overwrite=True)
        assert {handle.result(LIMIT_SECONDS).state for handle in handles} == {UploadState.DONE}

        said = [record.message for record in caplog.records]
        assert sum("are paused: " in text for text in said) == pause
        assert sum("uploads resumed" in text for text in said) == pause


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_captive_portal_is_not_a_store(s3_behind, make_queue, make_file, overwrite):
    """It answers 200 to everything, which means neither conflict, nor corrupt, nor done."""
    server, proxy = s3_behind
    proxy.plan = until(proxy, MANY_REQUESTS, captive_portal)

    handles = submit_all(make_queue(uri_at(proxy, "p")), make_file, 2, overwrite=overwrite)

    assert {handle.result(LIMIT_SECONDS).state for handle in handles} == {UploadState.DONE}
    assert len(server.under("p")) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [(captive_portal, "500"), (lambda _: Answer(200), "entry-2")],
    ids=["page", "empty"],
)
def test_a_put_that_a_portal_swallowed_is_not_taken_for_done(s3_behind, make_file, answer, message):
    """An older object of the same name and size proves nothing; botocore itself refuses a page."""
    _server, proxy = s3_behind
    store = open_store(uri_at(proxy, "p"))
    with Body(make_file("old", b"old bytes"), "entry-1") as body:
        store.put("name", body, overwrite=True)
    proxy.plan = lambda request: answer(request) if request.method == "PUT" else None

    with Body(make_file("new", b"new bytes"), "entry-2") as body, pytest.raises(StoreError, match=message):
        store.put("name", body, overwrite=True)


@pytest.mark.parametrize("part_bytes", ["", SMALL_PARTS], ids=["one request", "parts"])
def test_a_portals_page_is_not_a_file(s3_behind, make_file, part_bytes):
    """Neither looking nor reading accepts it, and no upload in parts begins."""
    _server, proxy = s3_behind
    store = open_store(uri_at(proxy, "p") + part_bytes)
    proxy.plan = captive_portal

    with pytest.raises(StoreError, match="captive portal"):
        store.head("name")
    with Body(make_file(content=LARGE), "id") as body, pytest.raises(StoreError):
        store.put("name", body, overwrite=True)


def test_credentials_that_may_only_put_make_no_conflict_of_a_lost_answer(
    s3_behind, make_queue, make_file, caplog
):
    """The attempt whose answer was lost took the name; the log says that it couldn't be compared."""
    server, proxy = s3_behind
    lost = [True]

    def put_only(request):
        if request.method in {"HEAD", "GET"}:
            return Answer(403, headers=(("x-amz-request-id", "1"),))
        if "/name" in request.path and lost:
            lost.clear()
            return Answer(502, after_forwarding=True)
        return None

    proxy.plan = put_only
    with caplog.at_level(logging.WARNING, "uploads"):
        handle = make_queue(uri_at(proxy, "p")).submit(make_file(), "name")

        assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert server.under("p") == {"name": b"content"}
    assert any("HEAD is denied" in record.message for record in caplog.records)


def test_credentials_that_may_only_put_see_a_real_conflict(s3_behind, make_queue, make_file):
    """If no answer was lost, the object belongs to somebody else, and the bytes are kept."""
    server, proxy = s3_behind
    server.objects["p/name"] = b"theirs"
    proxy.plan = lambda request: (
        Answer(403, headers=(("x-amz-request-id", "1"),)) if request.method in {"HEAD", "GET"} else None
    )

    handle = make_queue(uri_at(proxy, "p")).submit(make_file(), "name")

    assert handle.exception(LIMIT_SECONDS) is not None
    assert handle.state is UploadState.CONFLICT
    assert server.under("p") == {"name": b"theirs"}


def test_a_put_that_the_server_carries_out_late_does_not_replace_a_newer_one(
    moto, proxy, prefix, make_queue, make_file
):
    """The first version timed out, the second was delivered, then the server carries out the first."""
    late = Late()
    taken = threading.Event()

    def first_put_is_late(request):
        if request.method == "PUT" and not taken.is_set():
            taken.set()
            return late
        return None

    proxy.plan = first_put_is_late
    queue = make_queue(moto.at(proxy.url).uri(prefix) + "&read_timeout_seconds=3", workers=1)
    queue.submit(make_file("one", b"version 1"), "name", overwrite=True)
    assert taken.wait(LIMIT_SECONDS)

    second = queue.submit(make_file("two", b"version 2"), "name", overwrite=True)
    assert second.result(LIMIT_SECONDS).state is UploadState.DONE
    late.event.set()
    assert late.is_done.wait(LIMIT_SECONDS)

    assert moto.objects(prefix) == {"name": b"version 2"}


class BodyThatCannotBeRead(Body):
    """Its parts raise what a failing disk raises."""

    def read(self, offset, count):
        raise OSError(errno.EIO, "Input/output error")


def test_unreadable_parts_delay_no_other_upload(moto, prefix, make_file):
    """As many reads fail as there are slots for parts, and the next upload still succeeds."""
    store = open_store(moto.uri(prefix) + SMALL_PARTS + "&part_threads=2")
    file = make_file(content=LARGE)
    for _ in range(2):
        with BodyThatCannotBeRead(file, "id") as body, pytest.raises(OSError, match="Input/output"):
            store.put("a", body, overwrite=True)

    with Body(file, "id") as body:
        put = threading.Thread(target=store.put, args=("b", body), kwargs={"overwrite": True}, daemon=True)
        put.start()
        put.join(LIMIT_SECONDS)
        assert not put.is_alive()

    assert moto.objects(prefix) == {"b": LARGE}


def test_no_upload_in_parts_is_left_after_answers_of_503(moto, proxy, prefix, make_queue, make_file):
    """The server carries out every request but answers 503 the first three times, even to aborts."""
    seen = {}

    def first_thrice(request):
        key = (request.method, request.path.partition("uploadId")[0])
        seen[key] = seen.get(key, 0) + 1
        if request.method == "GET" or ".uploads-probe-" in request.path or seen[key] > 3:
            return None
        return Answer(503, "ServiceUnavailable", after_forwarding=request.method != "DELETE")

    file = make_file(content=LARGE)
    queue = make_queue(moto.at(proxy.url).uri(prefix) + SMALL_PARTS, workers=2)
    proxy.plan = first_thrice
    handles = [queue.submit(file, f"n{number}", overwrite=bool(number % 2)) for number in range(2)]

    assert {handle.result(LIMIT_SECONDS).state for handle in handles} == {UploadState.DONE}
    assert sorted(moto.objects(prefix)) == ["n0", "n1"]
    assert moto.open_uploads(prefix) == 0


def test_an_abort_that_failed_is_retried(moto, proxy, prefix, make_queue, make_file):
    """A newer version replaces a half-sent one while the server refuses to drop its parts."""
    refusals = [3]

    def plan(request):
        if request.method == "DELETE" and refusals[0]:
            refusals[0] -= 1
            return Answer(503, "ServiceUnavailable")
        return Answer(503, "SlowDown") if "partNumber=3" in request.path and refusals[0] else None

    proxy.plan = plan
    queue = make_queue(moto.at(proxy.url).uri(prefix) + SMALL_PARTS, workers=1)
    queue.submit(make_file("one", LARGE), "name", overwrite=True)
    with proxy.arrived:
        assert proxy.arrived.wait_for(
            lambda: any("partNumber=3" in request.path for request in proxy.seen), LIMIT_SECONDS
        )
    newer = queue.submit(make_file("two", b"small"), "name", overwrite=True)

    assert newer.result(LIMIT_SECONDS).state is UploadState.DONE
    with proxy.arrived:
        assert proxy.arrived.wait_for(lambda: not refusals[0], LIMIT_SECONDS)
        assert proxy.arrived.wait_for(
            lambda: sum(request.method == "DELETE" for request in proxy.seen) > 3, LIMIT_SECONDS
        )
    queue.close(LIMIT_SECONDS)
    assert moto.open_uploads(prefix) == 0


def test_a_later_known_hosts_file_is_waited_for(sshd_login, make_queue, make_file, tmp_path):
    """Without the file the host isn't trusted; nothing is rejected, and the file is read once it exists."""
    known_hosts = tmp_path / "known_hosts"
    store = over_ssh(tmp_path / "there", **{**sshd_login, "known_hosts": str(known_hosts)})
    with Body(make_file(), "id") as body, pytest.raises(StoreParkedError, match="known_hosts"):
        store.put("name", body, overwrite=True)
    handle = make_queue(store).submit(make_file(), "name")
    assert not handle.done()

    known_hosts.write_text(Path(sshd_login["known_hosts"]).read_text())

    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    store.renew()


class BodyThatWaits(Body):
    """Gives its second chunk when the gate opens."""

    def __init__(self, path, identifier, started, gate):
        super().__init__(path, identifier)
        self.started = started
        self.gate = gate

    def chunks(self, chunk_bytes=1 << 20):
        for number, chunk in enumerate(super().chunks(chunk_bytes)):
            if number == 1:
                self.started.set()
                self.gate.wait(LIMIT_SECONDS)
            yield chunk


def test_a_new_session_of_one_thread_does_not_cut_the_uploads_of_others(sshd_login, make_file, tmp_path):
    """A refused name makes the store reconnect while a large file is on its way."""
    store = over_ssh(tmp_path / "there", **sshd_login)
    started, gate = threading.Event(), threading.Event()
    errors = []

    def put(body):
        try:
            store.put("large", body, overwrite=True)
        except BaseException as error:  # noqa: BLE001  # compared below
            errors.append(error)

    with BodyThatWaits(make_file(content=LARGE), "id", started, gate) as body:
        sender = threading.Thread(target=put, args=(body,), daemon=True)
        sender.start()
        assert started.wait(LIMIT_SECONDS)

        store.renew()
        with Body(make_file("small"), "id2") as small:
            store.put("small", small, overwrite=True)
        store.renew()
        gate.set()
        sender.join(LIMIT_SECONDS)

    assert errors == []
    assert sorted(found.name for found in store.list()) == ["large", "small"]
    store.renew()


def test_a_torn_continue_is_an_error(make_file):
    """The server closes the connection after "100 Continue", for which botocore would wait forever."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        store = open_store(f"s3://bucket?endpoint_url=http://127.0.0.1:{listening.getsockname()[1]}")
        errors = []

        def put():
            try:
                with Body(make_file(content=b"x" * (2 << 20)), "id") as body:
                    store.put("name", body, overwrite=True)
            except TransientStoreError as error:
                errors.append(error)

        sender = threading.Thread(target=put, daemon=True)
        sender.start()
        connection, _ = listening.accept()
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n")
        connection.close()
        sender.join(LIMIT_SECONDS)

    assert len(errors) == 1


def test_leftovers_of_killed_writers_in_a_folder_are_swept(tmp_path, make_file):
    """Half-written files without a writer are removed; locked or new ones stay."""
    folder = tmp_path / "store"
    folder.mkdir()
    for name in ("dead", "locked", "new"):
        (folder / f".uploads-partial-{name}").write_bytes(b"half")
    for name in ("dead", "locked"):
        os.utime(folder / f".uploads-partial-{name}", (1, 1))

    with (folder / ".uploads-partial-locked").open("rb") as held, Body(make_file(), "id") as body:
        fcntl.flock(held, fcntl.LOCK_EX)
        LocalStore(folder).put("name", body, overwrite=True)

    assert sorted(path.name for path in folder.iterdir()) == [
        ".uploads-partial-locked",
        ".uploads-partial-new",
        "name",
    ]
