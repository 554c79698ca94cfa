"""Requests to S3, with checksums, and checks of the answers. Raises botocore's errors."""

import base64
import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs

from uploads.errors import BytesCorruptError, StoreError, TransientStoreError
from uploads.stores.store import Body, has_md5, md5_of, strong_etag

from .errors import check_page, check_removed, check_sender, required

__all__ = [
    "Checksum",
    "Part",
    "PartBody",
    "Requests",
    "whole_crc32",
]

Checksum = Literal["aws", "md5"]

_MD5 = re.compile(r"[0-9a-f]{32}")
_MIN_BYTES_PER_SECOND = 32 << 10
_PATIENCE_SECONDS = 60.0
_SEND_BYTES = 256 << 10
_CRC32_BYTES = 4


class PartBody:
    """A request body: a part of a file that is read while it is sent.

    Its pieces are larger than urllib3's 16 KiB, because each one takes the interpreter's lock. After a
    deadline it raises, so that a server that reads too slowly is given up.

    Args:
        body: The file.
        offset: Where the part begins.
        size: Its bytes.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, body: Body, offset: int, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._body = body
        self._offset = offset
        self._size = size
        self._clock = clock
        self._deadline = clock() + _PATIENCE_SECONDS + size / _MIN_BYTES_PER_SECOND
        self.seek(0)

    def __len__(self) -> int:
        return self._size

    def read(self, _size: int = -1, /) -> bytes:
        """Returns the next piece, of any size; empty at the end."""
        if self._clock() > self._deadline:
            raise TransientStoreError(f"the server read less than {_MIN_BYTES_PER_SECOND} bytes per second")
        return next(self._pieces, b"")

    def seek(self, position: int, _whence: int = 0, /) -> int:
        """Returns to the beginning, as botocore does after signing and before it sends again."""
        self._pieces = self._body.pieces(self._offset, self._size)
        return position

    def tell(self) -> int:
        """Returns the position at which signing begins."""
        return 0


@attrs.frozen
class Part:
    """An acknowledged part; proven if an answer confirmed its bytes, None if that was not compared."""

    number: int
    size: int
    etag: str
    crc32: str | None = None
    is_proven: bool | None = None

    def to_request(self) -> dict[str, Any]:
        """Returns the part as the last request of an upload lists it."""
        request: dict[str, Any] = {"PartNumber": self.number, "ETag": self.etag}
        return request if self.crc32 is None else {**request, "ChecksumCRC32": self.crc32}


@attrs.define(eq=False, slots=False, repr=False)
class Requests:
    """Requests to one bucket.

    Args:
        client: From boto3.
        bucket: Its name.
        checksum: "aws": SHA-256 for files of one request, CRC-32 for parts and for the object made of them.
            "md5": Content-MD5, which older and smaller servers check.
        extra_args: Sent with every request that accepts them (ServerSideEncryption, StorageClass, ACL, …).
    """

    _client: Any
    _bucket: str
    checksum: Checksum
    _extra_args: dict[str, Any]

    def put(self, key: str, body: Body, condition: dict[str, str]) -> bool:
        """Puts the whole file in one request.

        Args:
            key: Key of the object.
            body: The bytes.
            condition: `IfNoneMatch` or `IfMatch`, or empty.

        Returns:
            Whether the server compares the kind of checksum that was sent, according to its answer.
        """
        data, md5 = body.read_whole(), None
        headers = dict(condition)
        if self.checksum == "aws":
            headers["ChecksumSHA256"] = base64.b64encode(bytes.fromhex(body.sha256)).decode()
        else:
            md5 = md5_of(data)
            headers["ContentMD5"] = _encoded_md5(md5)
        answer = self._client.put_object(
            Bucket=self._bucket,
            Key=key,
            # botocore wraps `bytes`, but not a bytearray, in a stream, for a third of the processor time.
            Body=PartBody(body, 0, len(data)) if len(data) > _SEND_BYTES else bytearray(data),
            Metadata=_metadata(body),
            **(self._extra("PutObject") | headers),
        )
        etag = answer.get("ETag", "")
        is_proven = _echoed(answer, "ChecksumSHA256", headers)
        if not (is_proven or (_is_md5(etag) and has_md5(etag, md5 or md5_of(data)))):
            self.check_object(key, body)
            self._read_back(key, body)
        return "ChecksumSHA256" not in headers or "ChecksumSHA256" in answer

    def create_upload(self, key: str, body: Body) -> tuple[str, bool]:
        """Creates a multipart upload.

        Returns:
            Its id, and whether the server compares the CRC-32 of the whole object and keeps it.
        """
        headers = self._extra("CreateMultipartUpload")
        if self.checksum == "aws":
            headers |= {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
        else:
            body.crc32  # noqa: B018  # for the metadata; reads the file if it is unknown
        answer = self._client.create_multipart_upload(
            Bucket=self._bucket, Key=key, Metadata=_metadata(body), **headers
        )
        upload_id = str(required(f"create upload of {key}", answer, "UploadId"))
        return upload_id, "ChecksumType" in headers and answer.get("ChecksumType") == headers["ChecksumType"]

    def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        data: "PartBody",
        crc32: int,
        *,
        md5: bytes | None = None,
    ) -> Part:
        """Sends one part.

        Args:
            key: Key of the object.
            upload_id: From `create_upload`.
            number: From 1.
            data: The bytes.
            crc32: Their CRC-32.
            md5: Their MD5; None if it isn't needed.
        """
        headers = self._extra("UploadPart")
        if self.checksum == "aws":
            headers["ChecksumCRC32"] = _encoded(crc32)
        else:
            assert md5 is not None  # noqa: S101  # it is needed
            headers["ContentMD5"] = _encoded_md5(md5)
        answer = self._client.upload_part(
            Bucket=self._bucket,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=data,
            **headers,
        )
        etag = strong_etag(required(f"part {number} of {key}", answer, "ETag"))
        is_proven = _echoed(answer, "ChecksumCRC32", headers) or (md5 is not None and has_md5(etag, md5))
        return Part(number, len(data), etag, answer.get("ChecksumCRC32"), is_proven)

    def complete(
        self, key: str, upload_id: str, parts: list[Part], body: Body, condition: dict[str, str]
    ) -> None:
        """Completes an upload from its parts.

        Args:
            key: Key of the object.
            upload_id: From `create_upload`.
            parts: All parts, in order.
            body: The bytes of all parts.
            condition: As in `put`.
        """
        _check_parts(key, parts)
        headers = self._extra("CompleteMultipartUpload") | condition
        if self.checksum == "aws":
            headers |= {"ChecksumType": "FULL_OBJECT", "ChecksumCRC32": _encoded(body.digest.crc32)}
        answer = self._client.complete_multipart_upload(
            Bucket=self._bucket,
            Key=key,
            UploadId=upload_id,
            MultipartUpload={"Parts": [part.to_request() for part in parts]},
            **headers,
        )
        # A HEAD makes some servers read the whole object again.
        are_proven = all(part.is_proven for part in parts)
        is_proven = are_proven and strong_etag(answer.get("ETag", "")).strip('"') == _etag_of(parts)
        if not (_confirms_whole(key, answer, body) or is_proven):
            self.check_object(key, body, with_checksum=self.checksum == "aws")

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:
        """Yields the parts of an upload that the server has."""
        for page in self._client.get_paginator("list_parts").paginate(
            Bucket=self._bucket, Key=key, UploadId=upload_id
        ):
            check_page(f"parts of {key}", page)
            for part in page.get("Parts", ()):
                yield Part(part["PartNumber"], part["Size"], part["ETag"], part.get("ChecksumCRC32"))

    def abort(self, key: str, upload_id: str) -> None:
        """Aborts an upload, if it still exists."""
        with _ignore_missing_upload():
            answer = self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
            check_removed(f"abort {key}", answer)

    def abort_all(self, key: str) -> None:
        """Aborts every unfinished upload of exactly this key."""
        with _ignore_missing_upload():  # rclone's answer if there are none.
            for page in self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=key
            ):
                check_page(f"uploads of {key}", page)
                for upload in page.get("Uploads", ()):
                    if upload["Key"] == key:
                        self.abort(key, upload["UploadId"])

    def check_object(self, key: str, body: Body, *, with_checksum: bool = False) -> None:
        """Checks size, entry and CRC-32 of an object after a put whose answer did not confirm the bytes.

        A proxy may have answered, and an older object of that name may have the same size.
        """
        answer = self.head(key, with_checksum=with_checksum)
        check_sender(f"head {key}", answer)
        size = required(f"head {key}", answer, "ContentLength")
        if size != body.size:
            raise BytesCorruptError(f"{key} has {size} bytes in the store, expected {body.size}")
        _confirms_whole(key, answer, body)
        metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
        if metadata.get("entry-id", body.identifier) != body.identifier:
            raise StoreError(
                f"{key} is the object of entry {metadata['entry-id']} after it was put by {body.identifier}"
            )

    def _read_back(self, key: str, body: Body) -> None:
        answer = self._client.get_object(Bucket=self._bucket, Key=key)
        sha256 = hashlib.sha256()
        with contextlib.closing(answer["Body"]) as stream:
            while chunk := stream.read(_SEND_BYTES):
                sha256.update(chunk)
        if sha256.hexdigest() != body.sha256:
            raise BytesCorruptError(
                f"{key} has SHA-256 {sha256.hexdigest()} in the store, expected {body.sha256}"
            )

    def head(self, key: str, *, with_checksum: bool = False) -> dict[str, Any]:
        """Returns the answer to a HEAD; checksums require permission to decrypt the object."""
        mode = {"ChecksumMode": "ENABLED"} if with_checksum else {}
        answer: dict[str, Any] = self._client.head_object(Bucket=self._bucket, Key=key, **mode)
        return answer

    def _extra(self, operation: str) -> dict[str, Any]:
        members = self._client.meta.service_model.operation_model(operation).input_shape.members
        return {key: value for key, value in self._extra_args.items() if key in members}


def _echoed(answer: dict[str, Any], field: str, headers: dict[str, Any]) -> bool:
    """Returns whether the answer repeats the sent checksum; raises BytesCorruptError for another one."""
    sent, echo = headers.get(field), answer.get(field)
    if sent is None or echo is None:
        return False
    if echo != sent:
        raise BytesCorruptError(f"the server has checksum {echo}, expected {sent}")
    return True


@contextlib.contextmanager
def _ignore_missing_upload() -> Iterator[None]:
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchUpload":
            raise


def _is_md5(etag: str) -> bool:
    return _MD5.fullmatch(strong_etag(etag).strip('"')) is not None


def _check_parts(key: str, parts: list[Part]) -> None:
    """Raises BytesCorruptError if only some parts' ETags are the MD5 of the sent bytes.

    If none is, as with encryption by KMS keys, the ETags aren't MD5s.
    """
    damaged = [part.number for part in parts if part.is_proven is False and _is_md5(part.etag)]
    if damaged and any(part.is_proven for part in parts):
        raise BytesCorruptError(f"part {damaged[0]} of {key} has the ETag of other bytes than were sent")


def _etag_of(parts: list[Part]) -> str:
    """Returns the ETag of an object of these parts on most servers: MD5 of their MD5s, and their number.

    See "large object checksums" in S3's user guide, checking-object-integrity-upload.html.
    """
    etags = [part.etag.strip('"') for part in parts]
    if not all(_MD5.fullmatch(etag) for etag in etags):
        return "unknown"
    together = hashlib.md5(bytes.fromhex("".join(etags)), usedforsecurity=False).hexdigest()
    return f"{together}-{len(parts)}"


def whole_crc32(answer: dict[str, Any]) -> int | None:
    """Returns the CRC-32 of a whole object, if the answer to a HEAD or a completion has it."""
    try:
        crc32 = base64.b64decode(answer.get("ChecksumCRC32") or "", validate=True)
    except ValueError:
        return None
    is_whole = answer.get("ChecksumType") == "FULL_OBJECT" and len(crc32) == _CRC32_BYTES
    return int.from_bytes(crc32, "big") if is_whole else None


def _confirms_whole(key: str, answer: dict[str, Any], body: Body) -> bool:
    """Returns whether the answer has the CRC-32 of the object; raises BytesCorruptError for another one."""
    crc32 = whole_crc32(answer)
    if crc32 not in {None, body.digest.crc32}:
        raise BytesCorruptError(
            f"{key} has CRC-32 {crc32:08x} in the store, expected {body.digest.crc32:08x}"
        )
    return crc32 is not None


def _encoded(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(_CRC32_BYTES, "big")).decode()


def _metadata(body: Body) -> dict[str, str]:
    """Returns the metadata: the checksum that is known before the bytes are sent."""
    sums = {"crc32": f"{body.crc32:08x}"} if body.is_summed else {}
    if body.is_measured and body.digest.sha256 is not None:
        sums = {"sha256": body.digest.sha256}
    return {"entry-id": body.identifier, **sums}


def _encoded_md5(md5: bytes) -> str:
    return base64.b64encode(md5).decode()
