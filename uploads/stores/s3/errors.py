"""Classifies S3's answers; no other module knows their codes.

The codes are from https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and botocore's own
exceptions from its `exceptions.py`.
"""

import contextlib
import email.utils
import re
import time
from collections.abc import Iterator
from typing import Any

from uploads.errors import (
    BytesCorruptError,
    RejectedByStoreError,
    RemoteExistsError,
    RemoteNotFoundError,
    StoreError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.messages import parse_retry_after
from uploads.redaction import redact

__all__ = [
    "check_names",
    "check_page",
    "check_removed",
    "check_sender",
    "code_of",
    "is_from_store",
    "required",
    "translated",
]

_TRANSIENT = {
    "ConditionalRequestConflict",
    "InternalError",
    "NoSuchUpload",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_CREDENTIALS = {
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_DENIED = {"403", "AccessDenied", "AllAccessDisabled", "Forbidden"}
_BUCKET = {
    "301",
    "AccountProblem",
    "InvalidBucketName",
    "NoSuchBucket",
    "NotImplemented",
    "PermanentRedirect",
    "TemporaryRedirect",
}
_REJECTED = {
    "EntityTooLarge",
    "EntityTooSmall",
    "InvalidArgument",
    "InvalidObjectState",
    "InvalidRequest",
    "InvalidStorageClass",
    "KeyTooLongError",
    "MetadataTooLarge",
    "MethodNotAllowed",
}
_CORRUPT = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_EXISTS = {"412", "PreconditionFailed"}
_NOT_FOUND = {"404", "NoSuchKey", "NotFound"}

_ETAG = re.compile(r'(W/)?"?[0-9a-f]{32}(-\d+)?"?')

_NO_CONTENT = 204
_MULTIPLE_CHOICES = 300
_BAD_REQUEST = 400
_NOT_FOUND_STATUS = 404
_PRECONDITION_FAILED = 412
_TOO_MANY = 429
_SERVER_ERROR = 500
_NOT_IMPLEMENTED = 501


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Raises this package's errors in place of botocore's.

    Args:
        what: The request, for the message.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ResponseParserError as error:  # A page where XML was expected.
        raise StoreError(
            f"{_not_the_store(what, 200)} It could not be parsed: {redact(str(error))}"
        ) from error
    except ClientError as error:
        raise _from_answer(what, error) from error
    except BotoCoreError as error:
        raise _from_client(what, error) from error


def is_from_store(answer: dict[str, Any]) -> bool:
    """Returns whether an S3 server sent the answer: it has a header of S3's, or an ETag of S3's form.

    A captive portal or a proxy answers with a status and a page, whose ETag isn't 32 hexadecimal digits.

    Args:
        answer: As botocore parsed it, or the response of an error.
    """
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return any(name.startswith(("x-amz-", "x-amzn-", "x-goog-")) for name in headers) or bool(
        _ETAG.fullmatch(answer.get("ETag") or "")
    )


def check_sender(what: str, answer: dict[str, Any]) -> None:
    """Raises StoreError for a success that no S3 server sent.

    Args:
        what: The request, for the message.
        answer: As botocore parsed it.
    """
    if not is_from_store(answer):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        raise StoreError(_not_the_store(what, status))


def check_removed(what: str, answer: dict[str, Any]) -> None:
    """Raises StoreError for a removal that no S3 server did; they answer 204, or with their headers."""
    if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") != _NO_CONTENT:
        check_sender(what, answer)


def check_page(what: str, answer: dict[str, Any]) -> None:
    """Raises StoreError for a page of a listing that no S3 server sent, instead of taking it for empty."""
    if "IsTruncated" not in answer:
        check_sender(what, answer)


def check_names(what: str, answer: dict[str, Any]) -> None:
    """Raises StoreError for a page of names that was damaged on its way, instead of taking it for empty."""
    check_page(what, answer)
    if "IsTruncated" not in answer:
        raise TransientStoreError(f"{what}: the answer is no listing.")
    if answer.get("KeyCount", 0) > len(answer.get("Contents", ())):
        raise TransientStoreError(f"{what}: the answer lacks some of its {answer['KeyCount']} names.")


def required(what: str, answer: dict[str, Any], field: str) -> Any:
    """Returns a field that the answer of every S3 server has.

    Raises:
        StoreError: It is missing.
    """
    if answer.get(field) is None:
        raise StoreError(
            _not_the_store(
                f"{what} without {field}", answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            )
        )
    return answer[field]


def _not_the_store(what: str, status: object) -> str:
    return (
        f"{what}: HTTP {status} without the headers of an S3 server. "
        "A proxy or a captive portal may have answered: check the network and endpoint_url."
    )


def code_of(error: BaseException | None) -> str:
    """Returns S3's code of an error that `translated` raised, or of its cause; empty if there is none."""
    response: dict[str, Any] = (
        getattr(error, "response", None) or getattr(getattr(error, "__cause__", None), "response", None) or {}
    )
    return str(response.get("Error", {}).get("Code", ""))


# A table of codes, from top to bottom.
def _from_answer(what: str, error: Any) -> StoreError:  # noqa: C901, PLR0912
    code = code_of(error)
    about = error.response.get("ResponseMetadata", {})
    status, headers = about.get("HTTPStatusCode", 0), about.get("HTTPHeaders", {})
    is_moved = _MULTIPLE_CHOICES <= status < _BAD_REQUEST
    # Without the query, which may contain a signature.
    moved = f" (to {headers.get('location', 'an unknown place').partition('?')[0]})" if is_moved else ""
    text = redact(f"{what}: {error}{moved}")
    is_head = error.operation_name == "HeadObject"  # Answers without a body have no code.
    if is_head and status == _NOT_FOUND_STATUS:
        return RemoteNotFoundError(text)  # If a proxy answered, the put that follows shows it.
    if is_head and status < _SERVER_ERROR and status not in {_PRECONDITION_FAILED, _TOO_MANY}:
        advice = (
            "Check the bucket, its region and the endpoint."
            if is_moved
            else "Check the credentials; grant s3:GetObject and s3:ListBucket."
        )
        return StoreParkedError(f"{text}. {advice}", may_be_the_entry=True)
    if status < _SERVER_ERROR and status != _TOO_MANY and _is_foreign(code, error.response):
        return StoreError(f"{_not_the_store(what, status)} It said: {redact(f'{error}{moved}')}")
    if code in _EXISTS:
        return RemoteExistsError(text)
    if code in _NOT_FOUND:
        return RemoteNotFoundError(text)
    if code in _TRANSIENT or status == _TOO_MANY:
        return TransientStoreError(text, parse_retry_after(headers.get("retry-after")))
    if code == "RequestTimeTooSkewed":
        return StoreParkedError(
            f"{text}. This machine's clock is off by {_skew_seconds(headers)}. Set the clock."
        )
    if code in _CREDENTIALS:
        return StoreParkedError(f"{text}. Renew the credentials; a changed credentials file is noticed.")
    if code in _DENIED:
        return StoreParkedError(
            f"{text}. Grant s3:PutObject, s3:GetObject and s3:ListBucket.", may_be_the_entry=True
        )
    if code in _BUCKET or status == _NOT_IMPLEMENTED:
        return StoreParkedError(f"{text}. Check the bucket, its region and the endpoint.")
    if code in _CORRUPT:
        return BytesCorruptError(text)
    if code in _REJECTED:
        return RejectedByStoreError(text)
    if status >= _SERVER_ERROR:
        return TransientStoreError(text, parse_retry_after(headers.get("retry-after")), is_answer_lost=True)
    # An unknown refusal concerns this name alone if others get through.
    return StoreParkedError(text, may_be_the_entry=True)


def _is_foreign(code: str, answer: dict[str, Any]) -> bool:
    """Returns whether an error has neither a code, which only S3's XML has, nor a header of the store."""
    return (not code or code.isdigit()) and not is_from_store(answer)


def _from_client(what: str, error: Any) -> StoreError:
    from botocore import exceptions

    text = redact(f"{what}: {error}")
    match error:
        case exceptions.SSLError():
            return StoreParkedError(f"{text}. Check the server's certificate.")
        case (
            exceptions.EndpointConnectionError()
            | exceptions.ConnectTimeoutError()
            | exceptions.ProxyConnectionError()
            | exceptions.IncompleteReadError()
        ):
            return TransientStoreError(text)  # Nothing was sent, or only read.
        case exceptions.HTTPClientError() | exceptions.ConnectionError():
            return TransientStoreError(text, is_answer_lost=True)
        case exceptions.ParamValidationError():
            return RejectedByStoreError(text)
    return StoreParkedError(f"{text}. Check the credentials, the profile and the region.")


def _skew_seconds(headers: dict[str, str]) -> str:
    try:
        server = email.utils.parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError):
        return "an unknown difference"
    return f"{time.time() - server:+.0f} s"
