"""How S3 servers differ, as the defaults detect it: create-only puts, checksums, ETags, redirects."""

import contextlib
import hashlib
import itertools
import json
import os
import zlib

import pytest

from tests.servers.fault_proxy import Answer, Corrupt, FaultProxy, Rewrite, Truncate, weak_etags
from tests.servers.s3_servers import BUCKET
from uploads import RetryPolicy, UploadState, download_file, open_store
from uploads.command_line import verify
from uploads.errors import BytesCorruptError, StoreError, StoreParkedError, TransientStoreError
from uploads.stores import Body

LIMIT_SECONDS = 120
PART_BYTES = 5 << 20
LARGE = os.urandom(1 << 20) * 12
SMALL_PARTS = f"&part_bytes={PART_BYTES}"
AT_ONCE = RetryPolicy(first_seconds=0.0, cap_seconds=0.0)


def plain_uri(url, prefix):
    """The URI that users write: a bucket and its endpoint."""
    return f"s3://{BUCKET}/{prefix}?endpoint_url={url}"


@pytest.fixture
def at_proxy(proxy, prefix):
    """The plain URI of a store behind the proxy before moto."""
    return plain_uri(proxy.url, prefix) + SMALL_PARTS


def put(store, make_file, name, content, *, overwrite=True, notes=None):
    """Puts bytes from a file."""
    with Body(make_file("staged", content), "id") as body:
        return store.put(name, body, overwrite=overwrite, notes=notes)


def refuses(*headers, code="InvalidRequest", status=400):
    """A plan: requests with one of these headers are refused, as by a server that doesn't know them."""

    def plan(request):
        names = {name.lower() for name in request.headers}
        return Answer(status, code) if any(name in names for name in headers) else None

    return plan


AWS_CHECKSUMS = (
    "x-amz-checksum-sha256",
    "x-amz-checksum-crc32",
    "x-amz-checksum-type",
    "x-amz-checksum-algorithm",
)


def test_the_defaults_deliver_to_a_server_that_ignores_create_only(
    rclone, prefix, make_queue, make_file, caplog
):
    """With a plain URI every file arrives, a taken name is a conflict, and one warning says what may happen."""
    queue = make_queue(plain_uri(rclone.endpoint_url, prefix) + SMALL_PARTS)
    contents = {**{f"folder/{number}": b"%d" % number for number in range(8)}, "large": LARGE}
    handles = [queue.submit(make_file(name, content), name) for name, content in contents.items()]
    assert {handle.result(LIMIT_SECONDS).state for handle in handles} == {UploadState.DONE}

    again = queue.submit(make_file("other", b"other"), "folder/1")
    again.exception(LIMIT_SECONDS)

    assert again.state is UploadState.CONFLICT
    assert rclone.objects(prefix) == contents
    assert rclone.open_uploads(prefix) == 0
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "ignores If-None-Match" in warnings[0]
    assert "two writers at the same instant may overwrite each other" in warnings[0]


@pytest.mark.parametrize("client", ["boto3", "obstore"])
@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_server_that_refuses_conditions_gets_none(
    proxy, at_proxy, moto, prefix, make_file, status, code, client
):
    """The probe finds out, and the name is looked at before the put."""
    proxy.plan = refuses("if-none-match", code=code, status=status)
    store = open_store(f"{at_proxy}&client={client}".replace(SMALL_PARTS, ""))

    put(store, make_file, "a", b"first", overwrite=False)
    with pytest.raises(StoreError, match="exists"):
        put(store, make_file, "a", b"second", overwrite=False)

    assert moto.objects(prefix) == {"a": b"first"}


def test_a_probe_that_could_not_be_removed_is_named(proxy, at_proxy, moto, prefix, make_file, caplog):
    """It's a small object; the file is put all the same."""
    proxy.fail_first(1, Answer(503, "SlowDown"), method="DELETE")

    put(open_store(at_proxy), make_file, "a", b"content", overwrite=False)

    (probe,) = set(moto.objects(prefix)) - {"a"}
    assert f"could not remove probe object s3://{BUCKET}/{prefix}/{probe}" in caplog.text


def test_a_probe_whose_answer_was_lost_is_removed(proxy, at_proxy, moto, prefix, make_queue, make_file):
    """The next one has the same name, and finds it."""
    proxy.fail_first(1, Answer(500, "InternalError", after_forwarding=True), part=".uploads-probe-")

    make_queue(at_proxy).submit(make_file(), "name").result(LIMIT_SECONDS)

    assert moto.objects(prefix) == {"name": b"content"}


def test_a_server_that_refuses_checksums_gets_content_md5(
    proxy, at_proxy, moto, prefix, make_queue, make_file, caplog
):
    """It's detected with the first file of a kind, logged once for each, and not tried again."""
    refused = refuses(*AWS_CHECKSUMS)
    proxy.plan = refused
    queue = make_queue(at_proxy, workers=1)
    queue.submit(make_file("s", b"small"), "small").result(LIMIT_SECONDS)
    queue.submit(make_file("l", LARGE), "large").result(LIMIT_SECONDS)
    tried = len([request for request in proxy.seen if refused(request)])

    queue.submit(make_file("s", b"small"), "small2").result(LIMIT_SECONDS)
    queue.submit(make_file("l", LARGE), "large2").result(LIMIT_SECONDS)

    assert len([request for request in proxy.seen if refused(request)]) == tried
    assert moto.objects(prefix) == {"small": b"small", "small2": b"small", "large": LARGE, "large2": LARGE}
    assert moto.open_uploads(prefix) == 0
    said = [record.message for record in caplog.records if "refuses our checksums" in record.message]
    assert ["checksum=md5" in text for text in said] == [True, True]


def test_a_server_that_refuses_the_final_checksum_gets_the_parts_again(
    proxy, at_proxy, moto, prefix, make_queue, make_file
):
    """It accepted the CRC-32 of each part; that upload is aborted."""

    def plan(request):
        is_end = request.method == "POST" and "uploadId=" in request.path
        return refuses(*AWS_CHECKSUMS)(request) if is_end else None

    proxy.plan = plan
    make_queue(at_proxy).submit(make_file("l", LARGE), "large").result(LIMIT_SECONDS)

    assert moto.objects(prefix) == {"large": LARGE}
    assert moto.open_uploads(prefix) == 0


@pytest.mark.parametrize("kind", ["aws", "md5"])
@pytest.mark.parametrize("content", [b"small", LARGE], ids=["whole", "parts"])
def test_bytes_are_not_signed(proxy, at_proxy, make_file, kind, content):
    """Without https botocore would read them again for SHA-256; our checksum is signed in their place."""
    put(open_store(f"{at_proxy}&checksum={kind}"), make_file, "a", content)

    headers = [
        {name.lower(): value for name, value in request.headers.items()}
        for request in proxy.seen
        if request.method == "PUT"
    ]
    assert {one["x-amz-content-sha256"] for one in headers} == {"UNSIGNED-PAYLOAD"}
    sums = {"aws": "x-amz-checksum-", "md5": "content-md5"}[kind]
    names = [one["authorization"].partition("SignedHeaders=")[2].partition(",")[0] for one in headers]
    assert all(sums in text for text in names)


@pytest.mark.parametrize("kind", ["aws", "md5"])
def test_verify_reads_no_object(proxy, at_proxy, make_queue, make_file, kind):
    """The metadata or the server give the noted checksum of small and large files."""
    queue = make_queue(f"{at_proxy}&checksum={kind}")
    for name, content in (("small", b"small"), ("large", LARGE)):
        queue.submit(make_file(name, content), name).result(LIMIT_SECONDS)
    queue.close(LIMIT_SECONDS)
    asked = proxy.count("HEAD")

    assert verify(queue.spool.path) == []

    assert proxy.count("GET") == 0
    assert proxy.count("HEAD") - asked in {2, 3}


def test_a_download_is_compared_with_the_crc32_in_the_metadata(moto, prefix, tmp_path):
    """A large file that was sent to a server without checksums has that one."""
    store = open_store(moto.uri(prefix))
    for name, crc32 in (("good", zlib.crc32(b"content")), ("bad", 0)):
        metadata = {"crc32": f"{crc32:08x}"}
        moto.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"content", Metadata=metadata)

    assert download_file("good", tmp_path / "good", store=store).read_bytes() == b"content"
    with pytest.raises(BytesCorruptError, match="expected 00000000"):
        download_file("bad", tmp_path / "bad", store=store)


def test_a_requested_kind_of_checksum_is_required(proxy, at_proxy, make_file):
    """checksum=aws accepts no other kind."""
    proxy.plan = refuses(*AWS_CHECKSUMS)

    with pytest.raises(StoreError, match="InvalidRequest"):
        put(open_store(at_proxy + "&checksum=aws"), make_file, "a", b"content")

    assert proxy.count("PUT") == 1


def test_a_refusal_for_another_reason_stays_one(proxy, at_proxy, moto, prefix, make_file, caplog):
    """If it's refused with and without checksums, the first refusal is reported, and nothing is learnt."""
    store = open_store(at_proxy)
    proxy.plan = lambda request: Answer(400, "InvalidArgument") if "/bad" in request.path else None
    with pytest.raises(StoreError, match="InvalidArgument"):
        put(store, make_file, "bad", b"content")

    put(store, make_file, "good", b"content")

    names = {name.lower() for name in proxy.seen[-1].headers}
    assert "x-amz-checksum-sha256" in names
    assert "refuses our checksums" not in caplog.text


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("content", [b"right bytes", LARGE], ids=["whole", "parts"])
def test_a_server_without_our_checksums_keeps_no_damaged_bytes(
    rclone, prefix, make_queue, make_file, content, overwrite
):
    """A bit is flipped on the wire in the first file and in a later one; by default both are resent."""
    with contextlib.closing(FaultProxy(rclone.endpoint_url)) as proxy:
        queue = make_queue(plain_uri(proxy.url, prefix) + SMALL_PARTS)
        for name in ("first", "second"):
            part = f"/{name}?partNumber=2" if content is LARGE else f"/{name}"
            proxy.fail_first(1, Corrupt(), part=part)
            handle = queue.submit(make_file(name, content), name, overwrite=overwrite)
            assert handle.result(LIMIT_SECONDS).state is UploadState.DONE

    assert rclone.objects(prefix) == {"first": content, "second": content}
    assert rclone.open_uploads(prefix) == 0


@pytest.mark.parametrize("resumed", [False, True])
def test_a_damaged_part_is_detected_by_its_md5(proxy, at_proxy, moto, prefix, make_queue, make_file, resumed):
    """The server ignores Content-MD5, and returns each part's MD5; a later attempt compares it."""
    left = [Answer(503, "SlowDown")] if resumed else []

    def plan(request):
        if "partNumber=1" in request.path and flips:
            return flips.pop()
        return left.pop() if "partNumber=3" in request.path and left else None

    flips = [Corrupt()]
    proxy.plan = plan
    queue = make_queue(at_proxy + "&checksum=md5")

    queue.submit(make_file("l", LARGE), "name", overwrite=True).result(LIMIT_SECONDS)

    assert moto.objects(prefix) == {"name": LARGE}
    assert proxy.count("PUT", "partNumber=1") == 2
    assert moto.open_uploads(prefix) == 0


def test_an_object_without_any_proof_is_read_back(proxy, at_proxy, moto, prefix, make_file):
    """The answer has neither checksum nor MD5, and the store has other bytes of the same size."""

    def plan(request):
        if request.method != "PUT":
            return None
        moto.client().put_object(Bucket=BUCKET, Key=f"{prefix}/a", Body=b"wrong bytes")
        return Answer(200, headers=(("ETag", '"opaque"'), ("x-amz-request-id", "1")))

    proxy.plan = plan

    with pytest.raises(BytesCorruptError, match="in the store, expected"):
        put(open_store(at_proxy), make_file, "a", b"right bytes")


def test_failed_first_parts_leave_one_upload(proxy, at_proxy, moto, prefix, make_file, tmp_path):
    """An upload without parts is continued, so attempts don't leave one open each."""
    notes = tmp_path / "multipart.json"
    store = open_store(at_proxy)
    proxy.plan = lambda request: Answer(503, "SlowDown") if "partNumber=" in request.path else None
    for _ in range(2):
        with pytest.raises(TransientStoreError):
            put(store, make_file, "name", LARGE, notes=notes)
    assert moto.open_uploads(prefix) == 1

    proxy.plan = lambda request: None
    put(store, make_file, "name", LARGE, notes=notes)

    assert proxy.count("POST", "?uploads") == 1
    assert moto.objects(prefix) == {"name": LARGE}
    assert moto.open_uploads(prefix) == 0


def test_an_upload_that_nobody_can_continue_is_aborted(proxy, at_proxy, moto, prefix, make_file):
    """Without notes another attempt would not find it."""
    proxy.fail_first(1, Answer(503, "SlowDown"), part="partNumber=2")

    with pytest.raises(TransientStoreError):
        put(open_store(at_proxy), make_file, "name", LARGE)

    assert moto.open_uploads(prefix) == 0


@pytest.mark.parametrize("text", ["", '{"key": '])
def test_damaged_notes_leave_no_upload_open(moto, prefix, make_file, tmp_path, text):
    """They may have named an upload, so uploads of that name are aborted."""
    notes = tmp_path / "multipart.json"
    notes.write_text(text)
    moto.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/name")

    put(open_store(moto.uri(prefix) + SMALL_PARTS), make_file, "name", LARGE, notes=notes)

    assert moto.open_uploads(prefix) == 0


def test_an_upload_that_began_without_our_checksums_is_continued_by_another_process(
    rclone, prefix, make_file, tmp_path
):
    """The notes say how it began, so that no part is sent twice."""
    notes = tmp_path / "multipart.json"
    with contextlib.closing(FaultProxy(rclone.endpoint_url)) as proxy:
        uri = plain_uri(proxy.url, prefix) + SMALL_PARTS
        proxy.fail_first(1, Answer(503, "SlowDown"), part="partNumber=3")
        with pytest.raises(TransientStoreError):
            put(open_store(uri), make_file, "name", LARGE, notes=notes)
        assert json.loads(notes.read_text())["checksum"] == "md5"

        put(open_store(uri), make_file, "name", LARGE, notes=notes)

        assert [proxy.count("PUT", f"partNumber={number}") for number in (1, 2, 3)] == [1, 1, 2]
    assert rclone.objects(prefix) == {"name": LARGE}
    assert rclone.open_uploads(prefix) == 0


@pytest.mark.parametrize("content", [b"content", LARGE], ids=["whole", "parts"])
def test_files_pass_a_proxy_that_makes_etags_weak(
    proxy, at_proxy, moto, prefix, make_queue, make_file, tmp_path, content
):
    """They are uploaded, replaced and downloaded, in ranges too."""
    proxy.plan = weak_etags
    queue = make_queue(at_proxy)
    queue.submit(make_file("old", b"old"), "name", overwrite=True).result(LIMIT_SECONDS)
    handle = queue.submit(make_file("new", content), "name", overwrite=True)
    handle.result(LIMIT_SECONDS)
    cut = [Truncate(len(content) // 2)]
    proxy.plan = lambda request: cut.pop() if request.method == "GET" and cut else weak_etags(request)

    path = download_file(handle.uri, tmp_path / "back", progress_bar=False, policy=AT_ONCE)

    assert path.read_bytes() == content
    assert moto.open_uploads(prefix) == 0


@pytest.mark.parametrize("content", [b"content", LARGE], ids=["whole", "parts"])
def test_a_file_is_replaced_behind_a_proxy_that_makes_etags_up(
    proxy, at_proxy, moto, prefix, make_queue, make_file, content
):
    """No condition on them ever holds; after two refusals for an object that is the same, there is none."""
    numbers = itertools.count()
    proxy.plan = lambda request: (
        Rewrite("etag", lambda _: f'"made-up-{next(numbers)}"') if request.method == "HEAD" else None
    )
    queue = make_queue(at_proxy)
    for version in (b"first", content, b"last", content):
        queue.submit(make_file(content=version), "name", overwrite=True).result(LIMIT_SECONDS)

    assert moto.objects(prefix) == {"name": content}
    assert moto.open_uploads(prefix) == 0
    puts = [request for request in proxy.seen if request.method == "PUT"]
    assert sum("if-match" in map(str.lower, request.headers) for request in puts) == 2


@pytest.mark.parametrize("client", ["boto3", "obstore"])
def test_a_change_is_detected_behind_a_proxy_that_makes_etags_weak(proxy, prefix, make_file, client):
    """The rest of another version isn't appended to the beginning of the first."""
    proxy.plan = weak_etags
    store = open_store(f"{plain_uri(proxy.url, prefix)}&client={client}")
    put(store, make_file, "name", b"first version")
    version = store.head("name").version
    assert b"".join(store.get("name", offset=6, version=version)) == b"version"

    put(store, make_file, "name", b"other version")

    with pytest.raises(TransientStoreError, match="changed"):
        list(store.get("name", offset=6, version=version))


def test_an_empty_answer_is_no_empty_bucket(proxy, at_proxy, moto, prefix, make_file, tmp_path):
    """A proxy answers 200 and nothing else: nothing was listed, deleted or aborted."""
    notes = tmp_path / "multipart.json"
    notes.write_text(json.dumps({"key": f"{prefix}/name"}))
    moto.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/name")
    store = open_store(at_proxy)
    put(store, make_file, "a", b"content")
    proxy.plan = lambda request: Answer(200)

    for act in (lambda: list(store.list()), lambda: store.delete("a"), lambda: store.abandon(notes)):
        with pytest.raises(StoreError, match="captive portal"):
            act()

    assert moto.objects(prefix) == {"a": b"content"}
    assert (moto.open_uploads(prefix), notes.exists()) == (1, True)


def test_a_truncated_answer_to_a_probe_says_nothing_about_the_server(proxy, at_proxy):
    """The second put was refused, and the first line of the answer alone came: the next probe knows."""
    cut = Answer(200, "", (("x-amz-request-id", "1"),), after_forwarding=True)
    answers = iter([None, cut])
    proxy.plan = lambda request: next(answers, None) if request.method == "PUT" else None
    store = open_store(at_proxy)

    with pytest.raises(StoreError, match="without ETag"):
        store.refuses_overwrite()

    assert store.refuses_overwrite()


@pytest.mark.parametrize("keys", ["", "<IsTruncated>false</IsTruncated><KeyCount>2</KeyCount>"])
def test_an_answer_without_its_listing_is_no_empty_listing(proxy, at_proxy, keys):
    """Though it is the store's: a connection that is cut or damaged on the way leaves status and headers."""
    page = keys and f"<ListBucketResult>{keys}</ListBucketResult>"
    proxy.plan = lambda request: Answer(200, "", (("x-amz-request-id", "1"),), page=page.encode())

    with pytest.raises(TransientStoreError, match=r"no listing|lacks some of its 2 names"):
        list(open_store(at_proxy).list())


@pytest.mark.parametrize(
    ("status", "code"), [(301, "PermanentRedirect"), (307, "TemporaryRedirect"), (302, "Found"), (308, "")]
)
def test_a_redirect_in_a_circle_has_an_end(proxy, at_proxy, make_file, status, code):
    """A few requests, and a message that says where it leads; botocore asks for the region without end."""
    here = (("Location", f"{proxy.url}/elsewhere?token=1"), ("x-amz-request-id", "1"))
    proxy.plan = lambda request: Answer(status, "" if request.method == "HEAD" else code, here)
    store = open_store(at_proxy)

    for act in (
        lambda: put(store, make_file, "a", b"content"),
        lambda: put(store, make_file, "a", b"content", overwrite=False),
        lambda: store.head("a"),
        lambda: list(store.get("a")),
        lambda: list(store.list()),
    ):
        before = len(proxy.seen)
        with pytest.raises(StoreParkedError, match="/elsewhere\\)") as caught:
            act()
        assert len(proxy.seen) - before <= 4
        assert "token" not in str(caught.value)


def test_a_successor_that_comes_between_lookup_and_put_is_not_overwritten(s3, prefix, make_file, make_queue):
    """The object of `unless` is looked up after the version to be replaced."""
    queue = make_queue(plain_uri(s3.endpoint_url, prefix), isolation="threads")
    queue.submit(make_file("a", b"first"), "a", overwrite=True, unless="next").result(LIMIT_SECONDS)
    put(open_store(plain_uri(s3.endpoint_url, prefix)), make_file, "next", b"")

    outcome = queue.submit(make_file("b", b"late"), "a", overwrite=True, unless="next").result(LIMIT_SECONDS)

    assert outcome.state is UploadState.SUPERSEDED
    assert b"".join(open_store(plain_uri(s3.endpoint_url, prefix)).get("a")) == b"first"


class CountedSums:
    """Counts the bytes that any thread of this process sums."""

    def __init__(self, patch):
        self.crc32_bytes = self.md5_bytes = 0
        crc32, md5 = zlib.crc32, hashlib.md5

        def counted_crc32(data, *more):
            self.crc32_bytes += len(data)
            return crc32(data, *more)

        def counted_md5(data=b"", **options):
            found = CountedMd5(self, md5(**options))
            found.update(data)
            return found

        patch.setattr(zlib, "crc32", counted_crc32)
        patch.setattr(hashlib, "md5", counted_md5)


class CountedMd5:
    """hashlib's MD5, which counts."""

    def __init__(self, sums, inner):
        self._sums = sums
        self._inner = inner
        self.digest, self.hexdigest = inner.digest, inner.hexdigest

    def update(self, data):
        self._sums.md5_bytes += len(data)
        self._inner.update(data)


@pytest.mark.parametrize("known", [True, False], ids=["linked", "copied"])
def test_each_byte_is_summed_once_by_each_sum(rclone, prefix, make_file, monkeypatch, known):
    """Of a file of which nothing is known, CRC-32 and MD5 come from one pass before the parts are sent."""
    store = open_store(f"{plain_uri(rclone.endpoint_url, prefix)}{SMALL_PARTS}&checksum=md5")
    put(store, make_file, "before", b"content")  # Does the one-time work first.
    crc32 = zlib.crc32(LARGE) if known else None
    sums = CountedSums(monkeypatch)

    with Body(make_file(content=LARGE), "id", crc32=crc32, is_read_once=True) as body:
        store.put("name", body, overwrite=True)

    etags = 3 * 16  # The ETag of the whole is the MD5 of the parts' MD5s.
    assert (sums.crc32_bytes, sums.md5_bytes) == (len(LARGE), len(LARGE) + etags)
    monkeypatch.undo()
    assert store.head("name").noted_crc32 == zlib.crc32(LARGE)
    assert b"".join(store.get("name")) == LARGE


class BodyThatChanges(Body):
    """Changes the bytes of its last part once it was summed."""

    was_summed = False

    def sums(self, offset, count, **options):
        found = super().sums(offset, count, **options)
        self.was_summed |= offset == 2 * PART_BYTES
        return found

    def read(self, offset, count):
        data = super().read(offset, count)
        return bytes([data[0] ^ 1]) + data[1:] if self.was_summed and offset == 2 * PART_BYTES else data


def opaque_etags(request):
    """A plan: the ETags of parts and objects aren't MD5s, as with KMS keys."""
    return Rewrite("etag", lambda _: '"opaque"') if request.method == "PUT" else None


@pytest.mark.parametrize("plan", [None, opaque_etags], ids=["MD5", "opaque"])
def test_bytes_that_change_after_they_were_summed_never_become_an_object(
    proxy, at_proxy, moto, prefix, make_file, plan
):
    """The sent bytes are compared by MD5, or by CRC-32 if the server returns none."""
    if plan is not None:
        proxy.plan = plan
    store = open_store(f"{at_proxy}&checksum=md5")

    with (
        BodyThatChanges(make_file(content=LARGE), "id", is_read_once=True) as body,
        pytest.raises(BytesCorruptError),
    ):
        store.put("name", body, overwrite=True)

    assert (moto.objects(prefix), moto.open_uploads(prefix)) == ({}, 0)
