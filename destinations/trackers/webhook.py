"""Tells somebody that something happened in a run: a JSON document, posted to a URL.

The training thread makes a small record of what happened; a lane makes the document of it and posts it.
"""

import email.utils
import functools
import http.client
import ipaddress
import json
import logging
import math
import random
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from destinations.background import Lane, LaneCounts
from destinations.base import LoggerDestination
from destinations.text.formatting import one_line, plain, short
from events import Event, Logger, RunStatus, State, redact_text

__all__ = [
    "FAILURE",
    "REDACTED",
    "DeliveryError",
    "HttpRetry",
    "JsonPost",
    "Notice",
    "Slack",
    "Webhook",
    "notice_document",
    "require_url",
    "shown",
    "slack_text",
    "without_url",
]

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


_log = logging.getLogger("destinations")

FAILURE = "failure"
"""The name of what is no event of the loop: the run was closed, and had not completed."""

_MOST_WAITING = 100
_MOST_METRICS = 1000
_MOST_EXCEPTION_CHARACTERS = 4000


@attrs.frozen
class Notice:
    """What happened, and how the run stood when it did.

    Attributes:
        event: the name of the event, such as "fit_end", or "failure".
        run_name: the name of the run.
        rank: the rank that tells it.
        world_size: how many ranks there are.
        status: how the run stands: "running", "completed", "failed", "interrupted", "preempted".
        time: when, in seconds since the epoch.
        duration_seconds: since `init`.
        epoch: completed epochs.
        batch: completed batches.
        metrics: the last value of each metric, and of no more than 1000.
        exception: what ended the run, "ValueError: …", without secrets; None where nothing did.
        traceback: where it came from: its last 4000 characters, without secrets.
    """

    event: str
    run_name: str
    rank: int
    world_size: int
    status: str
    time: float
    duration_seconds: float
    epoch: int
    batch: int
    metrics: Mapping[str, float]
    exception: str | None = None
    traceback: str | None = None


def notice_document(notice: Notice) -> dict[str, Any]:
    """Returns a notice as strict JSON can hold it: its attributes by name; NaN and infinities are texts."""
    document: dict[str, Any] = plain(attrs.asdict(notice))
    return document


class Webhook(LoggerDestination):
    """Posts a JSON document to a URL at chosen events, and when the run fails.

    ```python
    Trainer(..., loggers=[RunDirectory("runs"), Webhook("https://example.org/hooks/training", events=["fit_end"])])
    ```

    **When.** At each of `events`, and, with `on_failure`, at close where the run has failed, was interrupted or preempted;
    that notice's `event` is "failure".

    **Delivery.** A status of 2xx is success. Connection errors, time-outs, 408, 429 and 5xx are tried again as `retry`
    says; other answers, redirects among them, are final. Nothing that goes wrong reaches training: it is counted in
    `counts`, and reported once per kind. Up to 100 documents wait; the oldest goes for a newer one, and is counted.

    **Threading.** In the training thread a notice is made, which takes microseconds at a chosen event and nothing at
    others; a metrics call costs one update of a dict. `close` waits for what is on its way up to `close_seconds`.

    **Secrets.** The URL is treated as one: it is in no message, and is taken out of what is sent. What else is sent, is
    without what looks like a secret.

    **Ranks.** Rank 0, or with `all_ranks` each.

    Args:
        url: https, or http on this machine.
        events: names of events of the loop, such as "fit_start" and "epoch_end".
        on_failure: whether a run that did not complete is told at close.
        format: makes the document of a `Notice`: anything that JSON can hold; None for nothing to send. Runs in the
            lane.
        headers: sent along, such as `{"Authorization": "Bearer …"}`.
        retry: how often a document is tried, and how long is waited in between.
        close_seconds: how long closing the run may take for what is on its way.
        all_ranks: whether every rank sends, and not rank 0 alone.
        allow_http: whether the URL may be http beyond this machine, where others can read along.
        clock: the time in seconds since 1970.

    Raises:
        ValueError: the URL is none that a document may go to, or an event does not exist.
    """

    def __init__(
        self,
        url: str,
        *,
        events: Iterable[str | Event] = ("fit_end",),
        on_failure: bool = True,
        format: Callable[[Notice], Any] = notice_document,  # noqa: A002  # the word that everybody uses
        headers: Mapping[str, str] | None = None,
        retry: HttpRetry = HttpRetry(),  # frozen
        close_seconds: float = 10.0,
        all_ranks: bool = False,
        allow_http: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        require_url(url, allow_http=allow_http)
        if close_seconds < 0:
            raise ValueError(f"close_seconds must not be negative, got {close_seconds}.")
        self._url = url
        self._events = frozenset(Event(event) for event in ([events] if isinstance(events, str) else events))
        self._on_failure = on_failure
        self._format = format
        self._headers = dict(headers or {})
        self._retry = retry
        self._close_seconds = close_seconds
        self._all_ranks = all_ranks
        self._clock = clock
        self._reset()
        self._listen()

    def _reset(self) -> None:
        self._lane: Lane | None = None
        self._post: JsonPost | None = None
        self._abandoned = threading.Event()
        self._metrics: dict[str, float] = {}
        self._started = 0.0
        self._counts = LaneCounts()

    def _listen(self) -> None:
        """Gives the object a hook for each chosen event: an engine calls those that there are, and no others."""
        for event in self._events - {Event.INIT}:
            setattr(self, event.value, functools.partial(self._notify, event.value))

    @property
    def counts(self) -> LaneCounts:
        """What became of the notices: accepted, done, failed, dropped, and errors by kind."""
        return self._counts

    def __repr__(self) -> str:
        """Names the host; the rest of the URL is a secret."""
        return f"{type(self).__name__}({shown(self._url)!r})"

    def init(self, state: State, logger: Logger) -> None:
        if state.rank and not self._all_ranks:
            return
        self._started = self._clock()
        self._abandoned.clear()
        self._lane = Lane(type(self).__name__, limit=_MOST_WAITING, when_full="drop_oldest")
        self._counts = self._lane.counts
        self._post = JsonPost(self._url, self._headers, self._retry, self._abandoned.wait, self._clock)
        if Event.INIT in self._events:
            self._notify(Event.INIT.value, state, logger)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        latest = self._metrics
        if len(latest) < _MOST_METRICS:
            latest.update(metrics)
        else:
            latest.update((name, value) for name, value in metrics.items() if name in latest)

    def close(self, state: State, logger: Logger) -> None:
        lane = self._lane
        if lane is None:
            return
        if self._on_failure and state.status not in {RunStatus.RUNNING, RunStatus.COMPLETED}:
            self._notify(FAILURE, state, logger)
        try:
            if not lane.stop(self._close_seconds):
                _log.warning(
                    "%s: not every message was taken by %s within the %g seconds that closing may take; "
                    "%d were sent, %d failed.",
                    type(self).__name__,
                    shown(self._url),
                    self._close_seconds,
                    lane.counts.done,
                    lane.counts.failed,
                )
        finally:
            # Who waits between two tries gives up; a request that hangs ends by its own time limit.
            self._abandoned.set()
            counts = lane.counts
            self._reset()
            self._counts = counts

    def __getstate__(self) -> dict[str, Any]:
        """Takes what the constructor was given: a copy is closed."""
        own = {"_lane", "_post", "_abandoned", "_metrics", "_started", "_counts"}
        hooks = {event.value for event in self._events}
        return {name: value for name, value in self.__dict__.items() if name not in own | hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes what is not copied anew."""
        self.__dict__.update(state)
        self._reset()
        self._listen()

    def _notify(self, event: str, state: State, logger: Logger) -> None:
        lane, post = self._lane, self._post
        if lane is not None and post is not None:
            notice = self._notice(event, state)
            lane.put(functools.partial(self._send, post, notice), kind=f"message about {event}")

    def _notice(self, event: str, state: State) -> Notice:
        now = self._clock()
        exception = state.exception
        told, lines = None, None
        if exception is not None:
            told = self._clean("".join(traceback.format_exception_only(exception)).strip())
            lines = self._clean("".join(traceback.format_exception(exception)).strip())
        return Notice(
            event,
            state.run_name,
            state.rank,
            state.world_size,
            state.status.value,
            now,
            now - self._started,
            int(state.timestamp.epoch),
            int(state.timestamp.batch),
            dict(self._metrics),
            told and told[:_MOST_EXCEPTION_CHARACTERS],
            lines and lines[-_MOST_EXCEPTION_CHARACTERS:],
        )

    def _clean(self, text: str) -> str:
        return without_url(redact_text(text), self._url)

    def _send(self, post: JsonPost, notice: Notice) -> None:
        document = self._document(notice)
        if document is not None:
            post.send(document)

    def _document(self, notice: Notice) -> Any:
        return self._format(notice)


_SLACK_METRICS = 20
_MOST_TRACEBACK_CHARACTERS = 2500
_WORDS = {
    "fit_start": "training starts",
    "fit_end": "training is completed",
    "epoch_end": "an epoch is completed",
    "eval_end": "an evaluation is completed",
}


def slack_text(notice: Notice) -> str:
    """Returns what is told about a notice, in Slack's markup: what happened, how long it took, metrics, the exception."""
    words = notice.status if notice.event == FAILURE else _WORDS.get(notice.event, notice.event)
    rank = f" (rank {notice.rank})" if notice.world_size > 1 else ""
    lines = [
        f"*{_escaped(one_line(notice.run_name))}*{rank}: {words}",
        f"{_duration(notice.duration_seconds)}, epoch {notice.epoch}, batch {notice.batch}",
    ]
    shown = list(notice.metrics.items())[:_SLACK_METRICS]
    lines += [f"• {_escaped(one_line(name))}: {short(value)}" for name, value in shown]
    if len(notice.metrics) > len(shown):
        lines.append(f"({len(notice.metrics) - len(shown)} more metrics)")
    if notice.exception is not None:
        # Three backticks of its own would end the block early.
        text = (notice.traceback or notice.exception).replace("```", "'''")
        lines.append(f"```{_escaped(text[-_MOST_TRACEBACK_CHARACTERS:])}```")
    return "\n".join(lines)


class Slack(Webhook):
    """Sends a message to a Slack channel at chosen events, and when the run fails.

    ```python
    Trainer(..., loggers=[Slack(os.environ["SLACK_WEBHOOK"], events=["fit_start", "fit_end"])])
    ```

    The URL is that of an incoming webhook, which belongs to one channel (https://api.slack.com/messaging/webhooks). Delivery,
    threading, secrets and ranks are those of `Webhook`.

    Args:
        webhook: the URL, a secret: take it from the environment.
        events: names of events of the loop.
        on_failure: whether a run that did not complete is told at close.
        format: makes the message of a `Notice`: a text in Slack's markup, or a dict with `text` and `blocks` as Slack's API
            has them; None for nothing to send.
        formats: such functions for some events by name, "failure" among them.
        retry: how often a message is tried, and how long is waited in between.
        close_seconds: how long closing the run may take for what is on its way.
        all_ranks: whether every rank sends, and not rank 0 alone.
        clock: the time in seconds since 1970.

    Raises:
        ValueError: the URL is none, an event does not exist, or there is a format for one that is not among the events.
    """

    def __init__(
        self,
        webhook: str,
        *,
        events: Iterable[str | Event] = ("fit_end",),
        on_failure: bool = True,
        format: Callable[[Notice], Any] = slack_text,  # noqa: A002  # the word that everybody uses
        formats: Mapping[str, Callable[[Notice], Any]] | None = None,
        retry: HttpRetry = HttpRetry(),  # frozen
        close_seconds: float = 10.0,
        all_ranks: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(
            webhook,
            events=events,
            on_failure=on_failure,
            format=format,
            retry=retry,
            close_seconds=close_seconds,
            all_ranks=all_ranks,
            clock=clock,
        )
        self._formats = dict(formats or {})
        known = {FAILURE, *(event.value for event in self._events)}
        if unknown := set(self._formats) - known:
            raise ValueError(f"formats must be for {sorted(known)}, got {sorted(unknown)}. Add it to events.")

    def _document(self, notice: Notice) -> Any:
        message = self._formats.get(notice.event, self._format)(notice)
        return {"text": message} if isinstance(message, str) else message


def _escaped(text: str) -> str:
    """Returns a text in which Slack finds no markup of links and mentions: "<!channel>" would wake everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _duration(seconds: float) -> str:
    whole = math.floor(max(seconds, 0.0))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
