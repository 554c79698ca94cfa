"""Small puts by the shortest way: what botocore composed for one is signed anew for the next, and sent over the same connections.

Most of what botocore does for a request (finding the endpoint, validating, five dozen hooks) has the same result for every object of a
bucket, and takes longer than to send a small file. So botocore makes the first put of a client; its URL and its headers are kept, and the
next ones differ in key, checksums, metadata, date and signature only. botocore's signer signs them too; whatever goes wrong is parsed by
botocore, and the next put is again its own: redirects and the like are its business.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs

if TYPE_CHECKING:
    from .requests import DeadlineBody

__all__ = ["Repeater", "Template", "signed"]

_CREDENTIAL = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[^,]+/\d{8}/(?P<region>[^/,]+)/(?P<service>[^/,]+)/aws4_request,"
)
# Made for each request by itself.
_OWN = {
    "amz-sdk-invocation-id",
    "amz-sdk-request",
    "authorization",
    "content-length",
    "content-md5",
    "expect",
    "if-match",
    "if-none-match",
    "x-amz-checksum-sha256",
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-security-token",
}
_METADATA = "x-amz-meta-"
# What another kind of signature or body needs.
_FOREIGN = re.compile(
    r"content-encoding|transfer-encoding|x-amz-checksum-(?!sha256$).*|x-amz-decoded-.*|x-amz-region-set|x-amz-s3session-.*|x-amz-sdk-.*|x-amz-trailer"
)
_OK = 200


@attrs.frozen
class Template:
    """What puts to one bucket have in common.

    Attributes:
        start: The URL up to the key.
        headers: By their lower-case names.
        region: Of the signature.
        service: Of the signature; "s3" nearly always.
    """

    start: str
    headers: dict[str, str]
    region: str
    service: str

    @classmethod
    def of(cls, url: str, headers: dict[str, str], key: str) -> Template | None:
        """Of a request that botocore has signed; None where it is of a kind that is not repeated."""
        found = _CREDENTIAL.match(headers.get("authorization", ""))
        ending = _quoted(key)
        if (
            found is None
            or not url.endswith(f"/{ending}")
            or any(_FOREIGN.fullmatch(name) for name in headers)
        ):
            return None
        common = {
            name: value
            for name, value in headers.items()
            if name not in _OWN and not name.startswith(_METADATA)
        }
        start = url.removesuffix(ending)
        return cls(start, common, found["region"], found["service"])


class Repeater:
    """Puts of one client. The first that succeeds is learned from; one that fails is forgotten. May be called from many threads.

    Args:
        client: From boto3; its events are listened to.
        credentials: What the client signs with; None where it does not.
    """

    def __init__(self, client: Any, credentials: Any) -> None:
        # botocore has no other door to its connections, which know proxies and certificates.
        self._connections: Any = getattr(getattr(client, "_endpoint", None), "http_session", None)
        self._credentials = credentials
        self._template: Template | None = None
        self._seen = threading.local()
        client.meta.events.register("before-send.s3.PutObject", self._see)

    def learn(self, key: str) -> None:
        """Keeps what botocore sent last in this thread, which was a put of this key that succeeded."""
        seen: tuple[str, dict[str, str]] | None = vars(self._seen).pop("request", None)
        if seen is not None and self._connections is not None and self._credentials is not None:
            url, headers = seen
            self._template = Template.of(url, headers, key)

    def put(
        self,
        key: str,
        data: bytes | DeadlineBody,
        size: int,
        sha256: str,
        headers: dict[str, str],
    ) -> dict[str, Any] | None:
        """Puts an object; returns the answer's ETag and ChecksumSHA256 where it has them, or None where there is nothing to repeat.

        Args:
            key: Of the object.
            data: All of it.
            size: Bytes.
            sha256: Of the data, in hexadecimal digits; the signature covers it, so that AWS compares it with what arrives.
            headers: Of this object alone, by their lower-case names.

        Raises:
            ClientError: The server refused.
            BotoCoreError: It could not be reached.
        """
        template = self._template
        if template is None:
            return None
        from botocore.awsrequest import AWSPreparedRequest

        url = template.start + _quoted(key)
        own = headers | {"content-length": str(size)}
        complete: Any = signed(template, url, own, sha256, self._credentials.get_frozen_credentials())
        try:
            response = self._send(AWSPreparedRequest("PUT", url, complete, data, stream_output=False))
        except BaseException:
            self._template = None
            raise
        return {
            "ETag": response.headers.get("ETag", ""),
            "ChecksumSHA256": response.headers.get("x-amz-checksum-sha256"),
            "ResponseMetadata": {
                "HTTPStatusCode": response.status_code,
                "HTTPHeaders": {name.lower(): value for name, value in response.headers.items()},
            },
        }

    def _send(self, request: Any) -> Any:
        response = self._connections.send(request)
        if response.status_code != _OK:
            raise _refusal(response)
        return response

    def _see(self, request: Any, **_: Any) -> None:
        if self._template is None:
            headers = {name.lower(): _text(value) for name, value in request.headers.items()}
            self._seen.request = (request.url, headers)  # Not the request, which has the bytes.


def signed(
    template: Template, url: str, own: dict[str, str], sha256: str, credentials: Any
) -> dict[str, str]:
    """Returns the headers of a put, signed by botocore.

    Args:
        template: What it has in common with others.
        url: Of the object.
        own: Headers of this object alone, by their lower-case names.
        sha256: Of the body, in hexadecimal digits.
        credentials: Frozen ones of botocore.
    """
    from botocore.awsrequest import AWSRequest

    request = AWSRequest("PUT", url, headers=template.headers | own)
    request.context["sha256"] = sha256
    _signer()(credentials, template.service, template.region).add_auth(request)
    return dict(request.headers.items())


@functools.cache
def _signer() -> Any:
    from botocore.auth import S3SigV4Auth

    class SignerOfKnownBytes(S3SigV4Auth):
        """Is told the SHA-256 of the body, and does not read it again."""

        def payload(self, request: Any) -> Any:
            return request.context["sha256"]

    return SignerOfKnownBytes


def _refusal(response: Any) -> Exception:
    """What botocore would have raised for this answer."""
    from botocore.exceptions import ClientError
    from botocore.parsers import create_parser

    answer = {
        "status_code": response.status_code,
        "headers": response.headers,
        "body": response.content,
    }
    parser: Any = create_parser("rest-xml")
    return ClientError(parser.parse(answer, None), "PutObject")


def _quoted(key: str) -> str:
    return quote(key, safe="/~")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
