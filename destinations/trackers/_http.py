"""One JSON document to one URL, with patience: time limits, retries with back-off, no redirects.

Runs in the thread that calls it, which is a lane's. The URL is a secret: no message and no `repr` of this module holds more
of it than scheme and host.
"""

import email.utils
import http.client
import ipaddress
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

import attrs

from events import redact_text

__all__ = ["REDACTED", "DeliveryError", "HttpRetry", "JsonPost", "require_url", "shown", "without_url"]

REDACTED = "[redacted]"

_ANSWER_BYTES = 1024
_SHOWN_CHARACTERS = 200
_TOO_MANY_REQUESTS = 429
_REQUEST_TIMEOUT = 408
_SERVER_ERRORS = range(500, 600)


class DeliveryError(RuntimeError):
    """A message was not taken by whom it was for."""


@attrs.frozen
class HttpRetry:
    """How often a message is tried, and how long is waited in between.

    Between two tries the wait is a random share of at least a half of a time that doubles; where the server says
    `Retry-After`, it is that.

    Attributes:
        attempts: tries in all.
        first_seconds: the wait after the first.
        most_seconds: the longest wait, also where a server asks for more.
        timeout_seconds: how long a connection may be silent.
    """

    attempts: int = attrs.field(default=6, validator=attrs.validators.ge(1))
    first_seconds: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    most_seconds: float = attrs.field(default=60.0, validator=attrs.validators.ge(0))
    timeout_seconds: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))

    def wait_seconds(self, attempt: int, retry_after: float | None) -> float:
        """Returns how long to wait after a try, the first being 0."""
        if retry_after is not None:
            return min(max(retry_after, 0.0), self.most_seconds)
        longest = min(self.first_seconds * 2.0**attempt, self.most_seconds)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311  # spreads load, hides nothing


@attrs.frozen
class _Failure:
    reason: str
    may_pass: bool
    retry_after: float | None = None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: a redirect would take the message, and whatever is secret in it, to somebody else."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class JsonPost:
    """Posts JSON documents to a URL.

    Args:
        url: where to; see `require_url`.
        headers: sent with each.
        retry: how often, and for how long.
        wait: waits for so many seconds; returns True where waiting is over for good.
        clock: the time in seconds since 1970, for a `Retry-After` that is a date.
    """

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        retry: HttpRetry,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json; charset=utf-8", **headers}
        self._retry = retry
        self._wait = wait
        self._clock = clock
        # A proxy of the environment is for the world outside, and could not reach this machine's own loopback.
        proxies = [urllib.request.ProxyHandler({})] if _is_loopback(_host(url)) else []
        self._opener = urllib.request.build_opener(_NoRedirects, *proxies)

    def send(self, document: Any) -> None:
        """Posts a document; blocks until it is taken, or given up.

        Raises:
            DeliveryError: it was refused, or the tries are used up; names the last reason.
        """
        # Lone surrogates cannot be sent as UTF-8; as escapes they can.
        body = json.dumps(document, allow_nan=False, default=str).encode("ascii")
        for attempt in range(self._retry.attempts):
            failure = self._try(body)
            if failure is None:
                return
            is_last = attempt == self._retry.attempts - 1
            if (
                not failure.may_pass
                or is_last
                or self._wait(self._retry.wait_seconds(attempt, failure.retry_after))
            ):
                raise DeliveryError(
                    f"message must be taken by {shown(self._url)}, got {failure.reason} at try {attempt + 1} of "
                    f"{self._retry.attempts}."
                )

    def _try(self, body: bytes) -> _Failure | None:
        request = urllib.request.Request(self._url, body, self._headers, method="POST")  # noqa: S310  # see require_url
        try:
            with self._opener.open(request, timeout=self._retry.timeout_seconds) as answer:
                answer.read(_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            return self._refusal(error)
        except urllib.error.URLError as error:
            return _Failure(_kind(error.reason), may_pass=True)
        except (OSError, http.client.HTTPException) as error:
            # Of an error about the URL itself the text would hold the URL.
            return _Failure(_kind(error), may_pass=not isinstance(error, http.client.InvalidURL))
        return None

    def _refusal(self, error: urllib.error.HTTPError) -> _Failure:
        with error:
            try:
                text = error.read(_ANSWER_BYTES).decode("utf-8", "replace")
            except (OSError, http.client.HTTPException):
                text = ""
        text = redact_text(without_url(" ".join(text.split()), self._url))[:_SHOWN_CHARACTERS]
        reason = f"HTTP {error.code}{': ' if text else ''}{text}"
        is_busy = error.code in {_TOO_MANY_REQUESTS, _REQUEST_TIMEOUT} or error.code in _SERVER_ERRORS
        return _Failure(reason, is_busy, _retry_after(error.headers.get("Retry-After"), self._clock))


def require_url(url: str, *, allow_http: bool) -> None:
    """Refuses what is no URL that a message may go to: https, or http to this machine.

    Raises:
        ValueError: the URL is none, or would carry the message in the clear; the text holds no more of it than the host.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except (ValueError, TypeError, AttributeError):
        is_whole = False
    if not is_whole or not url.isprintable() or " " in url:
        raise ValueError(
            "url must be a https:// URL without spaces, got something else (not shown, for it may be a secret)."
        )
    if parts.scheme == "http" and not allow_http and not _is_loopback(_host(url)):
        raise ValueError(
            f"url must begin with https://, got {shown(url)}: others could read it on its way. Pass allow_http=True to "
            "send it all the same."
        )


def shown(url: str) -> str:
    """Returns scheme and host of a URL, and an ellipsis for the rest."""
    return f"{urllib.parse.urlsplit(url).scheme}://{_host(url)}/…"


def without_url(text: str, url: str) -> str:
    """Returns a text without the URL, or the part of it that comes after the host."""
    path = url.split("://", 1)[-1].partition("/")[2]
    text = text.replace(url, REDACTED)
    return text.replace(path, REDACTED) if len(path) >= 8 else text  # noqa: PLR2004  # shorter ones are words


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _kind(error: object) -> str:
    """Returns what went wrong by its type, and the words of the system for it, without anything of the URL."""
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__} ({error.strerror})"
    return type(error).__name__


def _retry_after(value: str | None, clock: Callable[[], float]) -> float | None:
    """Reads `Retry-After`: seconds, or a date (RFC 9110, 10.2.3)."""
    if not value:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return email.utils.parsedate_to_datetime(value).timestamp() - clock()
    except ValueError:
        return None
