"""Store on S3, or a server with its protocol, through boto3's client.

It doesn't use boto3's managed upload, which can't put create-only, reopens the file's name for every part,
and needs an executor that refuses work at interpreter exit.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs

from uploads.errors import (
    RejectedByStoreError,
    RemoteExistsError,
    RemoteNotFoundError,
    StoreError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.messages import log_warning
from uploads.stores.create_only import CreateOnlySupport
from uploads.stores.store import Body, RemoteObject, Store, can_match, check_version, noted_crc32
from uploads.stores.uri import StoreLocation, compose_uri

from .errors import check_names, check_removed, check_sender, code_of, required, translated
from .options import S3Options
from .parts import PartsUpload, abandon_parts, part_bytes_for
from .requests import Checksum, Requests, whole_crc32

__all__ = ["S3Store", "open_at"]

_CHUNK_BYTES = 1 << 20
_REPLACE_TRIES = 3
_NAMES_NOTED = 10_000
# Refusals of unknown headers.
_NOT_KNOWN = {"400", "501", "InvalidArgument", "InvalidRequest", "MalformedXML", "NotImplemented"}
_USER_AGENT = "training-destinations"


class S3Store:
    """A bucket, or a prefix in one.

    The first request makes the client with its own session, so that making a store costs nothing and `renew`
    finds changed credentials.

    Args:
        bucket: Its name.
        prefix: Put before every name, with a `/`.
        options: Options of `S3Options`, and arguments of S3's own requests by their own names:
            `ServerSideEncryption="aws:kms"`, `StorageClass="STANDARD_IA"`,
            `ACL="bucket-owner-full-control"` (default `$S3_CANNED_ACL`).

    Raises:
        ValueError: An option is unknown, or has a wrong value.
    """

    def __init__(self, bucket: str, prefix: str = "", **options: Any) -> None:
        if not bucket:
            raise ValueError("an S3 store needs a bucket: s3://bucket/prefix")
        own = {field.name for field in attrs.fields(S3Options)} & options.keys()
        self._options = S3Options(**{name: options[name] for name in own})
        self._extra_args = _extra_args({name: options[name] for name in options.keys() - own})
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        whole = compose_uri(f"s3://{bucket}", self.prefix, "", self._options.in_uris())
        self._uri, mark, query = whole.partition("?")
        self._uri_options = mark + query
        chosen = self._options.checksum
        first: Checksum = "aws" if chosen == "auto" else chosen
        # The kind that is sent, for files of one request and of parts; and the one that is tried last.
        self._checksums = {False: first, True: first}
        self._last_checksum: Checksum = "md5" if chosen == "auto" else chosen
        aws_itself = True if self._options.endpoint_url is None else None  # AWS supports it, since 2024.
        self._create_only = CreateOnlySupport(self._options.create_only, known=aws_itself)
        self._part_bytes = self._options.part_bytes
        self._slots = threading.BoundedSemaphore(self._options.part_threads)
        self._takes_conditions = True  # Until the server refuses If-Match.
        self._present: set[str] = set()  # Names that exist, or that a put of ours may create.
        self._lock = threading.Lock()  # Guards the client, and the kinds of checksums.
        self._client: Any = None

    def put(self, name: str, body: Body, *, overwrite: bool, notes: Path | None = None) -> RemoteObject:
        create_only = not overwrite and self._create_only.check(self, name)
        self._put(name, body, {"IfNoneMatch": "*"} if create_only else {}, notes)
        return RemoteObject(name, body.size, body.identifier, body.digest.sha256)

    def refuses_overwrite(self) -> bool:
        """Returns whether the server refuses a create-only put of a name that exists.

        Probes servers other than AWS, once.
        """
        return self._create_only.is_supported(self)

    def replace(
        self,
        name: str,
        body: Body,
        *,
        notes: Path | None = None,
    ) -> RemoteObject:
        # A new small file costs one request; for a large one, looking first costs next to nothing.
        is_new = name not in self._present and body.size <= self._part_bytes
        refused: list[RemoteObject] = []
        for _ in range(_REPLACE_TRIES + is_new):
            condition, found = self._condition(name, is_new=is_new)
            is_new = False
            self._note_present(name)
            body.check()
            try:
                self._put(name, body, condition, notes, overwrite=True)
            except (RemoteExistsError, RemoteNotFoundError):
                if not condition:
                    raise
                if found is not None:
                    refused.append(attrs.evolve(found, version=None))
                    # For the same object again, a proxy makes up its ETags, and no condition can hold.
                    self._takes_conditions = refused.count(refused[-1]) < _REPLACE_TRIES - 1
            except (RejectedByStoreError, StoreParkedError) as error:
                if not condition or code_of(error) not in _NOT_KNOWN:
                    raise
                self._takes_conditions = False
            else:
                return RemoteObject(name, body.size, body.identifier, body.digest.sha256)
        raise TransientStoreError(f"{self.uri(name)} kept changing while it was replaced")

    def _note_present(self, name: str) -> None:
        if len(self._present) >= _NAMES_NOTED:
            self._present.clear()
        self._present.add(name)

    def _condition(self, name: str, *, is_new: bool) -> tuple[dict[str, str], RemoteObject | None]:
        """Returns the condition of a put that replaces, maybe empty, and the present object."""
        if not self._takes_conditions:
            return {}, None
        try:
            found = None if is_new else self.head(name)
        except StoreParkedError as error:
            if error.may_be_the_entry:  # The credentials may lack permission to read.
                return {}, None
            raise
        if found is None:
            return {"IfNoneMatch": "*"}, None
        # Without an ETag that can match, put without a condition.
        if found.version is None or not can_match(found.version):
            return {}, found
        return {"IfMatch": found.version}, found

    def _put(
        self,
        name: str,
        body: Body,
        condition: dict[str, str],
        notes: Path | None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Puts with the kind of checksum that the server is thought to accept, or else with the last kind."""
        in_parts = body.size > self._part_bytes
        refusal: StoreError | None = None
        for kind in dict.fromkeys((self._checksums[in_parts], self._last_checksum)):
            try:
                accepted = self._send(name, body, condition, notes, kind, overwrite=overwrite)
            except (RejectedByStoreError, StoreParkedError) as error:
                if code_of(error) not in _NOT_KNOWN:
                    raise
                refusal = refusal or error
            else:
                self._note_checksum(accepted, refusal, in_parts=in_parts)
                return
        assert refusal is not None  # noqa: S101  # there is one kind at least
        raise refusal  # The server refuses it with every kind.

    def _note_checksum(self, accepted: Checksum, refusal: StoreError | None, *, in_parts: bool) -> None:
        """Sends the last kind from now on if the server accepts no other; logs a refusal."""
        with self._lock:
            is_new = accepted == self._last_checksum != self._checksums[in_parts]
            if is_new:
                self._checksums[in_parts] = accepted
        if is_new and refusal is not None:
            log_warning(
                "%s refuses our checksums, so files %s %d bytes are sent with checksum=%s: %s",
                self.uri(),
                "above" if in_parts else "up to",
                self._part_bytes,
                accepted,
                refusal,
            )

    def _send(
        self,
        name: str,
        body: Body,
        condition: dict[str, str],
        notes: Path | None,
        kind: Checksum,
        *,
        overwrite: bool,
    ) -> Checksum:
        """Sends a file; returns the kind of checksum to use next: the last if this one is ignored."""
        key, requests = self._key(name), self._requests(kind)
        if body.size <= self._part_bytes:
            with translated(f"put {key}"):
                is_compared = requests.put(key, body, condition)
            return kind if is_compared else self._last_checksum
        upload = PartsUpload(
            requests,
            key,
            body,
            part_bytes=part_bytes_for(body.size, self._part_bytes),
            slots=self._slots,
            notes=notes,
            otherwise=None if kind == self._last_checksum else self._last_checksum,
        )
        try:
            upload.run(condition, overwrite=overwrite)
        except StoreError as error:
            if code_of(error) in _NOT_KNOWN:  # The server accepted the upload but doesn't complete it.
                upload.abort()
            raise
        finally:
            if upload.is_whole_checked is False and kind != self._last_checksum:
                self._note_checksum(self._last_checksum, None, in_parts=True)
        return upload.checksum

    def checks_whole(self, size: int) -> bool:
        return size > self._part_bytes

    def head(self, name: str) -> RemoteObject | None:
        return self._head(name, with_checksum=False)

    def head_with_checksum(self, name: str) -> RemoteObject | None:
        return self._head(name, with_checksum=True)

    def _head(self, name: str, *, with_checksum: bool) -> RemoteObject | None:
        what = f"head {self._key(name)}"
        try:
            with translated(what):
                answer = self._requests().head(self._key(name), with_checksum=with_checksum)
        except RemoteNotFoundError:
            return None
        check_sender(what, answer)
        # Some servers capitalise.
        metadata = {key.lower(): value for key, value in answer.get("Metadata", {}).items()}
        return RemoteObject(
            name,
            required(what, answer, "ContentLength"),
            metadata.get("entry-id"),
            metadata.get("sha256"),
            answer.get("ETag") or None,
            whole_crc32(answer),
            noted_crc32(metadata.get("crc32")),
        )

    def get(self, name: str, offset: int = 0, version: str | None = None) -> Iterator[bytes]:
        yield from self._get(name, offset, None, version)

    def get_range(self, name: str, offset: int, size: int, version: str) -> Iterator[bytes]:
        yield from self._get(name, offset, size, version)

    def _get(self, name: str, offset: int, size: int | None, version: str | None) -> Iterator[bytes]:
        last = "" if size is None else offset + size - 1
        headers = {"Range": f"bytes={offset}-{last}"} if offset or size else {}
        if version is not None and can_match(version):
            headers["IfMatch"] = version
        try:
            with translated(f"get {self._key(name)}"):
                answer = self._connected().get_object(Bucket=self.bucket, Key=self._key(name), **headers)
        except RemoteExistsError as error:  # 412: If-Match did not.
            raise TransientStoreError(f"{self.uri(name)} changed while it was read. Start over.") from error
        with contextlib.closing(answer["Body"]) as stream, translated(f"get {self._key(name)}"):
            # Some servers ignore If-Match.
            check_version(answer.get("ETag"), version, self.uri(name))
            if size and not answer.get("ContentRange"):
                raise NotImplementedError(f"{self.uri(name)}: the server ignores ranges")
            if headers.get("Range") and not str(answer.get("ContentRange", "")).startswith(
                f"bytes {offset}-{last}"
            ):
                raise TransientStoreError(
                    f"{self.uri(name)}: the server sent another range than from byte {offset} on"
                )
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        start = f"{self.prefix}/" if self.prefix else ""
        pages = (
            self._connected()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=self.bucket, Prefix=start + prefix)
        )
        with translated(f"list {start}{prefix}"):
            for page in pages:
                check_names(f"list {start}{prefix}", page)
                for item in page.get("Contents", ()):
                    yield RemoteObject(
                        item["Key"].removeprefix(start), item["Size"], version=item.get("ETag") or None
                    )

    def delete(self, name: str) -> None:
        with translated(f"delete {self._key(name)}"):
            answer = self._connected().delete_object(Bucket=self.bucket, Key=self._key(name))
        check_removed(f"delete {self._key(name)}", answer)

    def uri(self, name: str = "") -> str:
        return f"{self._uri}/{quote(name)}{self._uri_options}" if name else self._uri + self._uri_options

    def renew(self) -> None:
        """Makes a new client and session, because a live session never reads the credentials file again.

        See boto/botocore#704.
        """
        with self._lock:
            self._client = None

    def credential_files(self) -> tuple[Path, ...]:
        names = {
            "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
            "AWS_CONFIG_FILE": "~/.aws/config",
            "AWS_WEB_IDENTITY_TOKEN_FILE": "",
        }
        paths = (os.environ.get(variable) or default for variable, default in names.items())
        return tuple(Path(path).expanduser() for path in paths if path)

    def abandon(self, notes: Path) -> None:
        abandon_parts(self._requests(), notes, self._key(""))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _requests(self, checksum: Checksum = "aws") -> Requests:
        return Requests(self._connected(), self.bucket, checksum, self._extra_args)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                with translated(f"connect to {self.uri()}"):
                    self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        import boto3
        from botocore.config import Config
        from botocore.session import get_session

        core = get_session()
        session = boto3.Session(botocore_session=core, **self._options.of_session())
        config = Config(
            retries={"total_max_attempts": 1},  # The queue retries.
            max_pool_connections=64,
            tcp_keepalive=True,
            user_agent=_USER_AGENT,  # Otherwise botocore composes it twice for every request.
            request_checksum_calculation="when_required",  # Every request has its own.
            response_checksum_validation="when_required",
            **self._options.of_client(),
        )
        # botocore parses times with dateutil: half the cost of a listing.
        core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_parse_time)
        client = session.client("s3", endpoint_url=self._options.endpoint_url, config=config)
        client.meta.events.register("before-call.s3.HeadBucket", _follow_no_redirect)
        for operation in ("PutObject", "UploadPart"):
            client.meta.events.register(f"request-created.s3.{operation}", _send_at_once)
        return client

    def put_probe(self, name: str) -> None:
        """Puts a small object create-only; see `CreateOnlySupport`."""
        try:
            with translated(f"probe {self.uri()}"):
                answer = self._connected().put_object(
                    Bucket=self.bucket, Key=self._key(name), Body=b"probe", IfNoneMatch="*"
                )
                check_sender(f"probe {self.uri()}", answer)
                # A truncated answer doesn't confirm that the put was carried out.
                required(f"probe {self.uri()}", answer, "ETag")
        except (RejectedByStoreError, StoreParkedError) as error:
            if code_of(error) in _NOT_KNOWN:
                raise NotImplementedError(str(error)) from error
            raise


def _send_at_once(request: Any, **_: Any) -> None:
    """Doesn't ask for "100 Continue", which costs a round trip; botocore hangs if that answer is torn.

    https://github.com/boto/botocore/blob/1.44.5/botocore/awsrequest.py#L185
    """
    del request.headers["Expect"]


def _parse_time(text: Any) -> datetime:
    from botocore.utils import parse_timestamp

    is_iso = isinstance(text, str) and text[10:11] == "T"
    return datetime.fromisoformat(text) if is_iso else parse_timestamp(text)


def _follow_no_redirect(context: dict[str, Any], **_: Any) -> None:
    """Stops botocore from following a redirect of HeadBucket, with which it resolves other redirects.

    It would ask again, without end: https://github.com/boto/botocore/blob/1.44.5/botocore/utils.py#L1651
    """
    context["s3_redirect"]["redirected"] = True


def _extra_args(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of S3's own requests, with the ACL from the environment.

    Raises:
        ValueError: An argument is unknown.
    """
    unknown = [name for name in given if not name[:1].isupper()]
    if unknown:
        raise ValueError(
            f"unknown options {', '.join(sorted(unknown))}: an S3 store takes its own and "
            "those of S3's requests (ServerSideEncryption, StorageClass, ACL, …)"
        )
    acl = os.environ.get("S3_CANNED_ACL")
    return {**({"ACL": acl} if acl else {}), **given}


def open_at(location: StoreLocation, *, client: str = "boto3", **options: Any) -> Store:
    """Returns the bucket of a URI, through boto3 or obstore.

    Raises:
        ValueError: `client` is something else.
    """
    if client == "obstore":
        from uploads.stores import cloud

        return cloud.open_at(location, **options)
    if client != "boto3":
        raise ValueError(f"client must be 'boto3' or 'obstore', got {client!r}")
    return S3Store(*location.bucket_and_prefix(), **options)
