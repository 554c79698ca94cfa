"""S3 against two independent servers, and through a proxy that misbehaves."""

import base64
import hashlib
import json
import os
import zlib

import attrs
import pytest
from botocore.stub import Stubber

from tests.servers.fault_proxy import Answer, Hang, Reset, Verifier
from tests.servers.s3_servers import BUCKET
from uploads import UploadState, open_store
from uploads.errors import (
    BytesCorruptError,
    RejectedByStoreError,
    RemoteExistsError,
    RemoteNotFoundError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.stores import Body
from uploads.stores.s3.options import S3Options
from uploads.stores.s3.parts import part_bytes_for
from uploads.stores.s3.requests import Part, PartBody, Requests
from uploads.stores.s3.store import S3Store
from uploads.stores.uri import SCHEMES

LIMIT_SECONDS = 120
PART_BYTES = 5 << 20  # The smallest size that S3 accepts.
LARGE = os.urandom(1 << 20) * 12  # Three parts.
SMALL_PARTS = f"&part_bytes={PART_BYTES}"


@pytest.fixture
def at_proxy(proxy, moto, prefix):
    """The URI of a store behind the proxy.

    Its timeouts are the default ones: a slow machine isn't a fault.
    """
    return moto.at(proxy.url).uri(prefix) + SMALL_PARTS


@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "in parts"])
def test_a_file_arrives_whole_with_our_mark_on_it(s3, prefix, make_queue, make_file, content):
    """The entry id and a checksum are kept with objects of none, one and many parts.

    SHA-256 in the metadata; of an object made of parts the CRC-32, which the server may have by itself.
    """
    outcome = (
        make_queue(s3.uri(prefix) + SMALL_PARTS)
        .submit(make_file(content=content), "ünï/a b.bin", overwrite=True)
        .result(LIMIT_SECONDS)
    )

    found = open_store(s3.uri(prefix)).head_with_checksum("ünï/a b.bin")
    sha256, crc32 = hashlib.sha256(content).hexdigest(), zlib.crc32(content)
    assert s3.objects(prefix) == {"ünï/a b.bin": content}
    assert (found.size, found.entry_id) == (len(content), outcome.identifier)
    if content == LARGE:
        assert {found.crc32, found.noted_crc32} - {None} == {crc32}
    assert found.sha256 == outcome.sha256 == (None if content == LARGE else sha256)
    assert outcome.crc32 == crc32
    assert s3.open_uploads(prefix) == 0


def test_one_of_two_racing_create_only_puts_in_parts_wins(moto, prefix, make_file):
    """The name is free when both look; the server decides; the loser's parts are aborted."""
    store = open_store(moto.uri(prefix) + SMALL_PARTS)
    with (
        Body(make_file("a", LARGE), "first") as first,
        Body(make_file("b", LARGE[::-1]), "second") as second,
    ):
        assert store.head("a") is None
        store.put("a", first, overwrite=False)

        with pytest.raises(RemoteExistsError):
            store.put("a", second, overwrite=False)

    assert moto.objects(prefix) == {"a": LARGE}
    assert moto.open_uploads(prefix) == 0


def test_a_server_that_ignores_create_only_is_detected(rclone, prefix, make_file):
    """The server is tested once, and refused if the user requires create-only.

    No probe stays behind.
    """
    store = open_store(rclone.uri(prefix) + "&create_only=require")

    with Body(make_file(), "id") as body, pytest.raises(RejectedByStoreError, match="ignores If-None-Match"):
        store.put("a", body, overwrite=False)

    assert rclone.objects(prefix) == {}


@pytest.mark.parametrize(
    "fault",
    [
        Answer(503, "SlowDown"),
        Answer(500, "InternalError"),
        Answer(429),
        Answer(409, "ConditionalRequestConflict"),
        Answer(400, "RequestTimeout"),
        Answer(409, "OperationAborted"),
        Reset(),
        Hang(),
    ],
    ids=lambda fault: getattr(fault, "code", "") or type(fault).__name__,
)
def test_transient_answers_are_retried(proxy, at_proxy, moto, prefix, make_queue, make_file, fault):
    """Storms, resets, black holes and conflicts of requests end in the right bytes."""
    proxy.fail_first(2, fault, part="/name")
    patience = "&read_timeout_seconds=1" if isinstance(fault, Hang) else ""

    outcome = (
        make_queue(at_proxy + patience)
        .submit(make_file(content=b"right bytes"), "name", overwrite=True)
        .result(LIMIT_SECONDS)
    )

    assert outcome.state is UploadState.DONE
    assert moto.objects(prefix) == {"name": b"right bytes"}


def test_throttling_slows_all_entries_down(proxy, at_proxy, make_queue, make_file):
    """While the server asks to slow down, the back-off sets the pace of requests, not the queue."""
    proxy.fail_first(40, Answer(503, "SlowDown", (("Retry-After", "0"),)), part="/n")
    queue = make_queue(at_proxy, workers=4)

    for number in range(20):
        queue.submit(make_file(), f"n{number}", overwrite=True)

    assert queue.drain(LIMIT_SECONDS).is_empty
    assert proxy.count("PUT", "/n") == 60


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "in parts"])
def test_a_success_with_a_lost_answer_is_recognised(
    proxy, at_proxy, moto, prefix, make_queue, make_file, content, overwrite
):
    """The server answers 500 after it stored the object.

    HEAD decides; nothing is sent twice or taken for a conflict.
    """
    method = "POST" if content is LARGE else "PUT"
    part = "uploadId=" if content is LARGE else "/name"
    proxy.fail_first(1, Answer(500, "InternalError", after_forwarding=True), method=method, part=part)

    outcome = (
        make_queue(at_proxy)
        .submit(make_file(content=content), "name", overwrite=overwrite)
        .result(LIMIT_SECONDS)
    )

    assert outcome.state is UploadState.DONE
    assert proxy.count(method, part) == 1
    assert moto.objects(prefix) == {"name": content}
    assert moto.open_uploads(prefix) == 0


def test_an_error_in_the_body_of_a_200_is_an_error(proxy, at_proxy, moto, prefix, make_queue, make_file):
    """CompleteMultipartUpload may answer 200 with an error in its body."""
    proxy.fail_first(1, Answer(200, "InternalError"), method="POST", part="uploadId=")

    make_queue(at_proxy).submit(make_file(content=LARGE), "name", overwrite=True).result(LIMIT_SECONDS)

    assert moto.objects(prefix) == {"name": LARGE}
    assert proxy.count("POST", "uploadId=") == 2


def test_an_upload_that_the_server_forgot_starts_over(moto, prefix, make_file, tmp_path):
    """After NoSuchUpload, as from a lifecycle rule, all parts are sent again."""
    notes = tmp_path / "multipart.json"
    notes.write_text(
        json.dumps({"key": f"{prefix}/name", "part_bytes": PART_BYTES, "upload_id": "forgotten"})
    )

    with Body(make_file(content=LARGE), "id") as body:
        open_store(moto.uri(prefix) + SMALL_PARTS).put("name", body, overwrite=True, notes=notes)

    assert moto.objects(prefix) == {"name": LARGE}


def test_an_upload_without_a_noted_id_is_aborted(moto, prefix, make_file, tmp_path):
    """A process that dies between creating an upload and noting its id leaves nothing open."""
    notes = tmp_path / "multipart.json"
    notes.write_text(json.dumps({"key": f"{prefix}/name", "part_bytes": PART_BYTES}))
    moto.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/name")
    moto.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/name2")

    with Body(make_file(content=LARGE), "id") as body:
        open_store(moto.uri(prefix) + SMALL_PARTS).put("name", body, overwrite=True, notes=notes)

    found = moto.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    uploads = [upload for upload in found if upload["Key"].startswith(prefix)]
    assert [upload["Key"] for upload in uploads] == [f"{prefix}/name2"]
    for upload in uploads:
        moto.client().abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])


def test_an_upload_without_a_noted_id_can_be_abandoned(moto, prefix, tmp_path):
    """All uploads of the name are aborted, and no others."""
    notes = tmp_path / "multipart.json"
    notes.write_text(json.dumps({"key": f"{prefix}/name", "part_bytes": PART_BYTES}))
    for name in ("name", "name", "name/2"):
        moto.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{name}")

    open_store(moto.uri(prefix)).abandon(notes)

    assert (moto.open_uploads(prefix), moto.open_uploads(f"{prefix}/name")) == (1, 1)
    assert not notes.exists()


def test_an_upload_is_noted_before_it_is_created(proxy, at_proxy, make_file, tmp_path):
    """Its id is noted afterwards, so that a process that dies at any moment leaves a trace of it."""
    notes, noted = tmp_path / "multipart.json", []

    def plan(request):
        if request.method == "POST" or "partNumber=1" in request.path:
            noted.append(json.loads(notes.read_text()))

    proxy.plan = plan
    with Body(make_file(content=LARGE), "id") as body:
        open_store(at_proxy).put("name", body, overwrite=True, notes=notes)

    created, sent, completed = noted
    assert created["key"].endswith("/name")
    assert sorted(created) == ["checksum", "key", "part_bytes"]
    assert sent == completed == {**created, "upload_id": sent["upload_id"], "is_whole_checked": True}


def test_an_upload_that_cannot_be_completed_starts_over(proxy, at_proxy, moto, prefix, make_file, tmp_path):
    """It does so even if its parts are still listed: some servers answer inconsistently."""
    notes = tmp_path / "multipart.json"
    proxy.fail_first(1, Answer(404, "NoSuchUpload"), method="POST", part="uploadId=")
    with Body(make_file(content=LARGE), "id") as body:
        with pytest.raises(TransientStoreError):
            open_store(at_proxy).put("name", body, overwrite=True, notes=notes)
        is_noted = notes.exists()
        open_store(at_proxy).put("name", body, overwrite=True, notes=notes)

    assert not is_noted
    assert proxy.count("POST", "uploads") == 2
    assert moto.objects(prefix) == {"name": LARGE}


def test_expired_credentials_are_reread_without_a_restart(
    proxy, at_proxy, moto, prefix, make_queue, make_file, tmp_path, caplog, monkeypatch
):
    """The store is parked while the key is refused, and uploads once the credentials file changes."""
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = OLDKEY\naws_secret_access_key = s\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    proxy.plan = lambda request: (
        Answer(403, "ExpiredToken") if "OLDKEY" in request.headers.get("Authorization", "") else None
    )
    queue = make_queue(at_proxy)
    handle = queue.submit(make_file(), "name", overwrite=True)
    with proxy.arrived:
        proxy.arrived.wait_for(lambda: len(proxy.seen) > 2, LIMIT_SECONDS)
    assert not handle.done()

    new = tmp_path / "new-credentials"
    new.write_text("[default]\naws_access_key_id = NEWKEY\naws_secret_access_key = s\n")
    new.replace(file)  # At once: a half-written file is another reason to wait.

    assert handle.result(LIMIT_SECONDS).state is UploadState.DONE
    assert sum("are paused: " in record.message for record in caplog.records) == 1


ANSWERS = [
    (400, "ExpiredToken", StoreParkedError),
    (403, "InvalidAccessKeyId", StoreParkedError),
    (403, "SignatureDoesNotMatch", StoreParkedError),
    (403, "AccessDenied", StoreParkedError),
    (403, "RequestTimeTooSkewed", StoreParkedError),
    (404, "NoSuchBucket", StoreParkedError),
    (301, "PermanentRedirect", StoreParkedError),
    (400, "KeyTooLongError", RejectedByStoreError),
    (400, "EntityTooLarge", RejectedByStoreError),
    (400, "InvalidArgument", RejectedByStoreError),
    (400, "BadDigest", BytesCorruptError),
    (502, "", TransientStoreError),
    (504, "", TransientStoreError),
    (412, "PreconditionFailed", RemoteExistsError),
]


@pytest.mark.parametrize(("status", "code", "expected"), ANSWERS)
def test_every_answer_has_one_meaning(proxy, at_proxy, make_file, status, code, expected):
    """Codes are classified as transient, parking, or failing the entry."""
    proxy.plan = lambda request: Answer(status, code) if request.method == "PUT" else None

    with Body(make_file(), "id") as body, pytest.raises(expected):
        open_store(at_proxy).put("a", body, overwrite=True)


def test_a_wrong_clock_is_named_with_its_offset(proxy, at_proxy, make_file):
    """The message says by how much the clock is off."""
    proxy.plan = lambda request: Answer(
        403, "RequestTimeTooSkewed", (("Date", "Mon, 01 Jan 2024 00:00:00 GMT"),)
    )

    with (
        Body(make_file(), "id") as body,
        pytest.raises(StoreParkedError, match=r"clock is off by \+\d+ s"),
    ):
        open_store(at_proxy).put("a", body, overwrite=True)


def test_missing_credentials_park_the_store(moto, prefix, make_file, monkeypatch):
    """A machine without credentials waits for them; nothing fails."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)

    with Body(make_file(), "id") as body, pytest.raises(StoreParkedError, match="credentials"):
        open_store(moto.uri(prefix)).put("a", body, overwrite=True)


@pytest.mark.parametrize("size", [11, 11 << 20], ids=["whole", "parts"])
def test_checksums_match_the_bytes_and_damaged_bodies_are_resent(
    proxy, at_proxy, moto, prefix, make_queue, make_file, size
):
    """A server that compares SHA-256 and CRC-32 gets one with every body, and refuses a damaged one."""
    content = os.urandom(size)
    verifier = proxy.plan = Verifier(flips=1)

    outcome = (
        make_queue(at_proxy).submit(make_file(content=content), "name", overwrite=True).result(LIMIT_SECONDS)
    )

    assert outcome.state is UploadState.DONE
    assert moto.objects(prefix) == {"name": content}
    assert verifier.refused == 1
    assert verifier.compared == proxy.count("PUT")


def test_a_response_with_another_checksum_is_an_error(proxy, at_proxy, make_file):
    """It acknowledges other bytes."""
    proxy.plan = lambda request: Answer(200, headers=(("x-amz-checksum-sha256", "AAAA"), ("ETag", '"x"')))

    with Body(make_file(), "id") as body, pytest.raises(BytesCorruptError, match="has checksum"):
        open_store(at_proxy).put("a", body, overwrite=True)


def test_an_answer_without_proof_is_checked_by_size(proxy, at_proxy, make_file):
    """If a server has its own ETags, the size is requested."""
    proxy.plan = lambda request: (
        Answer(200, headers=(("ETag", '"opaque"'),)) if request.method == "PUT" else None
    )

    with Body(make_file(), "id") as body, pytest.raises(RemoteNotFoundError):
        open_store(at_proxy).put("a", body, overwrite=True)

    assert proxy.count("HEAD", "/a") == 1


def test_an_object_of_proven_parts_needs_no_head(proxy, at_proxy, moto, prefix, make_file):
    """Its ETag is computed from the parts' ETags, which are the MD5 of the sent bytes."""
    with Body(make_file(content=LARGE), "id") as body:
        open_store(at_proxy + "&checksum=md5").put("a", body, overwrite=True)

    assert moto.objects(prefix) == {"a": LARGE}
    assert proxy.count("HEAD") == 0


def test_the_first_part_is_sent_before_the_file_was_read(moto, prefix, make_queue, make_file):
    """Each byte is read once: the parts give the CRC-32 of the whole, and no SHA-256 is computed."""
    queue = make_queue(moto.uri(prefix) + SMALL_PARTS)

    outcome = queue.submit(make_file(content=LARGE), "a").result(LIMIT_SECONDS)

    answer = moto.client().head_object(Bucket=BUCKET, Key=f"{prefix}/a", ChecksumMode="ENABLED")
    assert answer["Metadata"]["entry-id"] == outcome.identifier
    assert base64.b64decode(answer["ChecksumCRC32"]) == zlib.crc32(LARGE).to_bytes(4, "big")
    assert (outcome.sha256, outcome.crc32) == (None, zlib.crc32(LARGE))


def test_bytes_that_differ_from_the_staged_ones_never_become_an_object(
    proxy, at_proxy, moto, prefix, make_queue, make_file
):
    """The sent parts have another CRC-32 and are aborted; the file is read again and found corrupt."""
    wrong = zlib.crc32(LARGE) ^ 1
    handle = make_queue(at_proxy).submit(
        make_file(content=LARGE), "a", overwrite=True, link=True, crc32=wrong
    )

    with pytest.raises(BytesCorruptError, match=f"expected {wrong:08x}"):
        handle.result(LIMIT_SECONDS)

    assert handle.state is UploadState.CORRUPT
    assert (proxy.count("PUT", "partNumber="), proxy.count("POST", "uploadId=")) == (3, 0)
    assert (moto.objects(prefix), moto.open_uploads(prefix)) == ({}, 0)


def test_a_server_without_checksums_of_the_whole_gets_metadata_with_crc32(
    rclone, prefix, make_queue, make_file
):
    """It's detected with the first large file, before a part is sent; no upload stays open."""
    queue = make_queue(rclone.uri(prefix).replace("&checksum=md5", "") + SMALL_PARTS)

    for name in ("a", "b"):
        queue.submit(make_file(content=LARGE), name, overwrite=True).result(LIMIT_SECONDS)

    assert {queue._store.head(name).noted_crc32 for name in ("a", "b")} == {zlib.crc32(LARGE)}
    assert rclone.objects(prefix) == {"a": LARGE, "b": LARGE}
    assert rclone.open_uploads(prefix) == 0


def test_our_object_with_other_bytes_is_put_again(proxy, at_proxy, moto, prefix, make_queue, make_file):
    """The answer to the completion is lost, and the object has our mark but another CRC-32."""
    handles = []

    def plan(request):
        if request.method != "POST" or "uploadId=" not in request.path or handles:
            return None
        other = bytes(len(LARGE))
        identifier = entry_of_upload(request)
        with Body(make_file("other", other), identifier) as body:
            open_store(moto.uri(prefix) + SMALL_PARTS).put("a", body, overwrite=True)
        handles.append(identifier)
        return Reset()

    def entry_of_upload(request):
        created = next(one for one in proxy.seen if one.method == "POST" and one.path.endswith("?uploads"))
        return next(value for key, value in created.headers.items() if key.lower() == "x-amz-meta-entry-id")

    proxy.plan = plan
    outcome = make_queue(at_proxy).submit(make_file(content=LARGE), "a", overwrite=True).result(LIMIT_SECONDS)

    assert handles == [outcome.identifier]
    assert moto.objects(prefix) == {"a": LARGE}


@pytest.mark.parametrize(
    ("etag", "are_proven"),
    [("d316408c159ea701ab954894bd3a92c2-2", False), ("opaque", True), ("", True)],
    ids=["a part", "the whole", "no ETag"],
)
def test_parts_without_proof_are_checked_by_size(moto, make_file, etag, are_proven):
    """A server that keeps fewer bytes than were sent is detected, in a part or in the whole."""
    client = moto.client()
    parts = [Part(number, 2, '"4f08eef4096726bff1125e1b1b734644"', is_proven=are_proven) for number in (1, 2)]
    with Body(make_file(content=b"four"), "id") as body, Stubber(client) as server:
        server.add_response("complete_multipart_upload", {"ETag": f'"{etag}"'})
        server.add_response("head_object", {"ContentLength": 3, "ETag": '"d316408c159ea701ab954894bd3a92c2"'})

        with pytest.raises(BytesCorruptError, match="has 3 bytes in the store, expected 4"):
            Requests(client, BUCKET, "md5", {}).complete("key", "id", parts, body, {})


def test_extra_arguments_reach_the_requests_that_take_them(proxy, at_proxy, make_file):
    """Storage class, encryption and ACL are given by option or in the URI."""
    with Body(make_file("small"), "a") as small, Body(make_file("large", LARGE), "b") as large:
        store = open_store(
            at_proxy + "&StorageClass=STANDARD_IA", ServerSideEncryption="AES256", ACL="private"
        )
        store.put("small", small, overwrite=True)
        store.put("large", large, overwrite=True)

    sent = {
        request.method + request.path.rpartition("/")[2].partition("=")[0]: {
            key.lower(): value for key, value in request.headers.items()
        }
        for request in proxy.seen
    }
    for request in ("PUTsmall", "POSTlarge?uploads"):
        assert (
            sent[request]["x-amz-storage-class"],
            sent[request]["x-amz-server-side-encryption"],
            sent[request]["x-amz-acl"],
        ) == ("STANDARD_IA", "AES256", "private")


def test_composers_environment_is_supported(moto, prefix, make_file, monkeypatch):
    """S3_ENDPOINT_URL and S3_CANNED_ACL are defaults; options take precedence."""
    monkeypatch.setenv("S3_ENDPOINT_URL", moto.endpoint_url)
    monkeypatch.setenv("S3_CANNED_ACL", "public-read")

    assert S3Store(BUCKET, prefix)._extra_args == {"ACL": "public-read"}
    assert S3Store(BUCKET, prefix, ACL="private")._extra_args == {"ACL": "private"}
    assert list(open_store(f"s3://{BUCKET}/{prefix}").list()) == []


def test_a_misspelt_option_raises():
    """The option belongs neither to us nor to S3."""
    with pytest.raises(ValueError, match="unknown options storage_class"):
        open_store("s3://bucket?storage_class=STANDARD_IA")


def test_every_option_of_s3_is_in_the_table_of_schemes():
    """A missing option would not be written to disk, and `resume` would not know it."""
    options = {field.name for field in attrs.fields(S3Options)}
    secrets = {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
    row = SCHEMES["s3"]

    assert options - secrets == options & {*row.own_options, *row.shared_options}
    assert {*row.own_options} - {"client"} <= options


def test_a_body_gives_up_on_a_slow_server(make_file):
    """The timeout of a request grows with its size."""
    now = [0.0]
    with Body(make_file(content=b"x" * (1 << 20)), "id") as file:
        body = PartBody(file, 0, 1 << 20, clock=lambda: now[0])
        assert len(body.read(10)) >= 10

        now[0] = 60 + 32 + 1

        with pytest.raises(TransientStoreError, match="bytes per second"):
            body.read(10)


@pytest.mark.parametrize("size", [0, 1, 16 << 20, 50 << 30, 160 << 30, 5 << 40])
def test_a_file_of_any_size_fits_into_the_parts_that_s3_accepts(size):
    """Sizes up to 5 TiB need at most 10,000 parts."""
    part_bytes = part_bytes_for(size, 16 << 20)

    assert -(-size // part_bytes) <= 10_000
    assert 16 << 20 <= part_bytes <= 5 << 30


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_new_small_file_costs_one_request(proxy, at_proxy, moto, prefix, make_queue, make_file, overwrite):
    """The store isn't asked first whether the name is taken: the put has a condition."""
    queue = make_queue(at_proxy)

    for name in ("a", "b"):
        queue.submit(make_file(), name, overwrite=overwrite).result(LIMIT_SECONDS)

    for name in ("a", "b"):
        assert [one.method for one in proxy.seen if one.path.endswith(f"/{name}")] == ["PUT"]
    assert moto.objects(prefix) == {"a": b"content", "b": b"content"}


def test_a_name_of_another_process_is_replaced_on_condition(proxy, at_proxy, moto, prefix, make_file):
    """The first put finds it taken; the second names the version that it replaces."""
    moto.client().put_object(Bucket=BUCKET, Key=f"{prefix}/a", Body=b"theirs")
    store = open_store(at_proxy)

    for content in (b"ours", b"newer"):
        with Body(make_file(content=content), "id") as body:
            store.replace("a", body)

    assert [one.method for one in proxy.seen] == ["PUT", "HEAD", "PUT", "HEAD", "PUT"]
    assert moto.objects(prefix) == {"a": b"newer"}


def test_an_interrupted_first_attempt_is_continued_after_reading_the_file(
    proxy, at_proxy, moto, prefix, make_queue, make_file
):
    """Parts sent before the file was read stay, and the whole is still compared."""
    proxy.fail_first(1, Answer(500, "InternalError"), part="partNumber=3")

    outcome = make_queue(at_proxy).submit(make_file(content=LARGE), "a", overwrite=True).result(LIMIT_SECONDS)

    answer = moto.client().head_object(Bucket=BUCKET, Key=f"{prefix}/a", ChecksumMode="ENABLED")
    assert [proxy.count("PUT", f"partNumber={number}") for number in (1, 2, 3)] == [1, 1, 2]
    assert moto.objects(prefix) == {"a": LARGE}
    assert base64.b64decode(answer["ChecksumCRC32"]) == zlib.crc32(LARGE).to_bytes(4, "big")
    assert (outcome.sha256, outcome.crc32) == (hashlib.sha256(LARGE).hexdigest(), zlib.crc32(LARGE))
