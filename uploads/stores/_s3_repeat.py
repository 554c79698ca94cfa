"""Small puts by the shortest way: what botocore composed for one is signed anew for the next, and sent over the same connections.

Most of what botocore does for a request (finding the endpoint, validating, five dozen hooks) has the same result for every object of a
bucket, and takes longer than to send a small file. So botocore makes the first put of a client; its URL and its headers are kept, and the
next ones differ in key, checksums, metadata, date and signature only. Whatever goes wrong is parsed by botocore, and the next put is again
botocore's own: redirects and the like are its business.

Signature Version 4: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import attrs

if TYPE_CHECKING:
    from ._s3_requests import DeadlineBody

__all__ = ["Repeater", "Template", "sign"]

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
_UNSIGNED = {"user-agent"}  # A proxy may change it.
_OK = 200


@attrs.frozen
class Template:
    """What puts to one bucket have in common.

    Attributes:
        start: The URL up to the key.
        host: As the Host header says.
        headers: By their lower-case names.
        region: Of the signature.
        service: Of the signature; "s3" nearly always.
    """

    start: str
    host: str
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
        return cls(start, _host(start), common, found["region"], found["service"])


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
        data: bytes | bytearray | DeadlineBody,
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
        complete: Any = {
            **template.headers,
            **headers,
            "content-length": str(size),
            "x-amz-content-sha256": sha256,
        }
        sign(complete, url, template, self._credentials.get_frozen_credentials())
        try:
            response = self._send(AWSPreparedRequest("PUT", url, complete, data, stream_output=False))
        except BaseException:
            self._template = None
            raise
        return {
            "ETag": response.headers.get("ETag", ""),
            "ChecksumSHA256": response.headers.get("x-amz-checksum-sha256"),
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


def sign(headers: dict[str, str], url: str, template: Template, credentials: Any) -> None:
    """Adds date, token and signature."""
    timestamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{timestamp[:8]}/{template.region}/{template.service}/aws4_request"
    headers["x-amz-date"] = timestamp
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    signed = {name: value for name, value in headers.items() if name not in _UNSIGNED}
    signed["host"] = template.host
    names = sorted(signed)
    lines = [f"{name}:{' '.join(signed[name].split())}" for name in names]
    request = "\n".join(
        ["PUT", urlsplit(url).path, "", *lines, "", ";".join(names), headers["x-amz-content-sha256"]]
    )
    to_sign = f"AWS4-HMAC-SHA256\n{timestamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    secret = f"AWS4{credentials.secret_key}".encode()
    for part in (timestamp[:8], template.region, template.service, "aws4_request"):
        secret = hmac.digest(secret, part.encode(), "sha256")
    signature = hmac.digest(secret, to_sign.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )


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


def _host(url: str) -> str:
    """As http.client says it in the Host header: without a port that goes without saying."""
    parts = urlsplit(url)
    usual = {"http": ":80", "https": ":443"}[parts.scheme]
    return parts.netloc.rpartition("@")[2].lower().removesuffix(usual)


def _quoted(key: str) -> str:
    return quote(key, safe="/~")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
