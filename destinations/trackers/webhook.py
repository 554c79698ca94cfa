"""`Webhook` and `Slack`: post notifications about a run to a URL, as JSON.

The training thread creates a small `Notice`; a background thread formats and posts it.
"""

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from destinations.background import Lane, LaneCounts, PeriodicThread
from destinations.base import LoggerDestination, closed_state
from destinations.text.formatting import one_line, plain, short
from events import Event, Logger, RunStatus, State, redact_text
from uploads import parse_retry_after

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

_log = logging.getLogger("destinations")

REDACTED = "[redacted]"

_ANSWER_BYTES = 1024
_MIN_SECRET_CHARACTERS = 8
_SHOWN_CHARACTERS = 200
_TOO_MANY_REQUESTS = 429
_REQUEST_TIMEOUT = 408
_SERVER_ERRORS = range(500, 600)


class DeliveryError(RuntimeError):
    """A message could not be delivered."""


@attrs.frozen
class HttpRetry:
    """Retry policy: exponential back-off with jitter, or the `Retry-After` of the server.

    Attributes:
        attempts: max number of attempts.
        first_seconds: wait after the first attempt.
        most_seconds: max wait, also for `Retry-After`.
        timeout_seconds: timeout of the connection.
    """

    attempts: int = attrs.field(default=6, validator=attrs.validators.ge(1))
    first_seconds: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    most_seconds: float = attrs.field(default=60.0, validator=attrs.validators.ge(0))
    timeout_seconds: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))

    def wait_seconds(self, attempt: int, retry_after: float | None) -> float:
        """Returns the wait after an attempt, counted from 0."""
        if retry_after is not None:
            return min(retry_after, self.most_seconds)
        longest = min(self.first_seconds * 2.0**attempt, self.most_seconds)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311  # jitter, not cryptography


@attrs.frozen
class _Failure:
    reason: str
    is_transient: bool
    retry_after: float | None = None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects, which could send the message and its secrets to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@attrs.define(eq=False, slots=False, repr=False)
class JsonPost:
    """Posts JSON documents to a URL.

    Args:
        url: the URL; see `require_url`.
        headers: headers of each request.
        retry: retry policy.
        wait: sleeps for a number of seconds; returns True to give up.
    """

    _url: str
    _headers: dict[str, str]
    _retry: HttpRetry
    _wait: Callable[[float], object]

    def __attrs_post_init__(self) -> None:
        # A proxy from the environment cannot reach the loopback interface of this machine.
        proxies = [urllib.request.ProxyHandler({})] if _is_loopback(_host(self._url)) else []
        self._opener = urllib.request.build_opener(_NoRedirects, *proxies)

    def send(self, document: Any) -> None:
        """Posts a document; blocks until it is accepted or given up.

        Raises:
            DeliveryError: rejected, or all attempts failed; the message has the last reason.
        """
        # ASCII with escapes, because UTF-8 cannot encode lone surrogates.
        body = json.dumps(document, allow_nan=False, default=str).encode("ascii")
        for attempt in range(self._retry.attempts):
            failure = self._try(body)
            if failure is None:
                return
            is_last = attempt == self._retry.attempts - 1
            if (
                not failure.is_transient
                or is_last
                or self._wait(self._retry.wait_seconds(attempt, failure.retry_after))
            ):
                raise DeliveryError(
                    f"{shown(self._url)} did not accept the message: {failure.reason} "
                    f"(attempt {attempt + 1} of {self._retry.attempts})"
                )

    def _try(self, body: bytes) -> _Failure | None:
        headers = {"Content-Type": "application/json; charset=utf-8", **self._headers}
        # The scheme was checked by require_url.
        request = urllib.request.Request(self._url, body, headers, method="POST")  # noqa: S310
        try:
            with self._opener.open(request, timeout=self._retry.timeout_seconds) as answer:
                answer.read(_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            return self._response_failure(error)
        except urllib.error.URLError as error:
            return _Failure(_kind(error.reason), is_transient=True)
        except (OSError, http.client.HTTPException) as error:
            # The text of the error may contain the URL, so it is left out.
            return _Failure(_kind(error), is_transient=not isinstance(error, http.client.InvalidURL))
        return None

    def _response_failure(self, error: urllib.error.HTTPError) -> _Failure:
        with error:
            try:
                text = error.read(_ANSWER_BYTES).decode("utf-8", "replace")
            except (OSError, http.client.HTTPException):
                text = ""
        text = redact_text(without_url(" ".join(text.split()), self._url))[:_SHOWN_CHARACTERS]
        reason = f"HTTP {error.code}{': ' if text else ''}{text}"
        is_busy = error.code in {_TOO_MANY_REQUESTS, _REQUEST_TIMEOUT} or error.code in _SERVER_ERRORS
        return _Failure(reason, is_busy, parse_retry_after(error.headers.get("Retry-After")))


def require_url(url: str, *, allow_http: bool) -> None:
    """Checks that a URL is https, or http to this machine.

    Raises:
        ValueError: invalid, or unencrypted; the message reveals no more than the host.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except (ValueError, TypeError, AttributeError):
        is_whole = False
    if not is_whole or not url.isprintable() or " " in url:
        raise ValueError("url must be a https:// URL without spaces (not shown, it may be a secret).")
    if parts.scheme == "http" and not allow_http and not _is_loopback(_host(url)):
        raise ValueError(
            f"url must begin with https://, got {shown(url)}, which is unencrypted. "
            "Pass allow_http=True to allow it."
        )


def shown(url: str) -> str:
    """Returns scheme and host of a URL, with an ellipsis for the rest."""
    return f"{urllib.parse.urlsplit(url).scheme}://{_host(url)}/…"


def without_url(text: str, url: str) -> str:
    """Returns the text with the URL, and its part after the host, redacted."""
    path = url.split("://", 1)[-1].partition("/")[2]
    text = text.replace(url, REDACTED)
    # A shorter path may be a word of the text.
    return text.replace(path, REDACTED) if len(path) >= _MIN_SECRET_CHARACTERS else text


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
    """Returns type and system message of an error, without the URL."""
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__} ({error.strerror})"
    return type(error).__name__


FAILURE = "failure"
"""Name of the notice sent at close if the run did not complete."""

_MAX_WAITING = 100
_MAX_EXCEPTION_CHARACTERS = 4000


@attrs.frozen
class Notice:
    """An event of a run and the state of the run at that time.

    Attributes:
        event: name of the event, such as "fit_end", "failure", or the event of an alert, see `Alerts`.
        run_name: name of the run.
        rank: rank of the sender.
        world_size: number of ranks.
        status: "running", "completed", "failed", "interrupted" or "preempted".
        time: time of the event, in seconds since 1970.
        duration_seconds: time since `init`.
        epoch: completed epochs.
        batch: completed batches.
        metrics: last value of each metric.
        exception: the exception that ended the run, "ValueError: …", with secrets redacted, or None.
        traceback: last 4000 characters of its traceback, with secrets redacted, or None.
        message: the finding of an alert, or None.
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
    message: str | None = None


@attrs.frozen
class Alerts:
    """The thresholds at which a `Webhook` reports a problem; it reports each problem once, until it ends.

    | event | when |
    |---|---|
    | "uploads_away" | files wait, and none was uploaded for `away_seconds` |
    | "uploads_back" | an upload has succeeded since, or no file waits |
    | "spool_nearly_full" | waiting files fill `full_share` of the spool's limit or of the room on its disk |
    | "run_silent" | no batch has ended for `silent_seconds` |

    A process that was killed reports nothing: `destinations view --webhook-file` reports it.

    Attributes:
        away_seconds: see above.
        full_share: see above; up to 1.
        silent_seconds: see above.
        look_seconds: how often to look.
    """

    away_seconds: float = attrs.field(default=600.0, validator=attrs.validators.ge(0))
    full_share: float = attrs.field(default=0.9, validator=attrs.validators.le(1))
    silent_seconds: float = attrs.field(default=1800.0, validator=attrs.validators.ge(0))
    look_seconds: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))


def notice_document(notice: Notice) -> dict[str, Any]:
    """Returns the attributes of a notice as strict JSON; NaN and infinities become strings."""
    document: dict[str, Any] = plain(attrs.asdict(notice))
    return document


class Webhook(LoggerDestination):
    """Posts a JSON document to a URL at chosen events, and when the run fails.

    ```python
    webhook = Webhook("https://example.org/hooks/training", events=["fit_end"])
    Trainer(..., loggers=[RunDirectory("runs"), webhook])
    ```

    **When.** At each of `events`; with `on_failure`, also at close if the run failed, was interrupted or
    preempted, as the event "failure".

    **Delivery.** Status 2xx is success. Connection errors, timeouts, 408, 429 and 5xx are retried according
    to `retry`; other responses, including redirects, are final. Errors never reach training: they are counted
    in `counts`, and reported once per kind. Up to 100 documents are queued; then the oldest is dropped and
    counted.

    **Threading.** The training thread creates a notice, which takes microseconds at a chosen event and
    nothing at others; a call of `log_metrics` costs one update of a dict. `close` waits up to `close_seconds`
    for pending documents.

    **Secrets.** The URL is treated as a secret: it appears in no message. Documents are redacted: the URL and
    everything that looks like a secret.

    **Ranks.** Rank 0, or with `all_ranks` every rank.

    Args:
        url: https, or http on this machine.
        events: names of events, such as "fit_start" and "epoch_end".
        on_failure: notify at close if the run did not complete.
        format: returns the JSON document of a `Notice`, or None to send nothing. Called in the background
            thread.
        headers: additional headers, such as `{"Authorization": "Bearer …"}`.
        retry: retry policy.
        close_seconds: max time that closing waits for pending documents.
        all_ranks: send from all ranks, not only from rank 0.
        allow_http: allow unencrypted http to other machines.
        alerts: report problems too, from a thread that checks every half minute; None for no alerts.
        clock: returns the time in seconds since 1970.

    Raises:
        ValueError: invalid URL, or unknown event.
    """

    def __init__(
        self,
        url: str,
        *,
        events: Iterable[str | Event] = ("fit_end",),
        on_failure: bool = True,
        format: Callable[[Notice], Any] = notice_document,  # the usual name
        headers: Mapping[str, str] | None = None,
        retry: HttpRetry = HttpRetry(),  # frozen
        close_seconds: float = 10.0,
        all_ranks: bool = False,
        allow_http: bool = False,
        alerts: Alerts | None = None,
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
        self._alerts = alerts
        self._clock = clock
        self._forget()
        # An engine calls only existing hooks.
        for event in self._events - {Event.INIT}:
            setattr(self, event.value, functools.partial(self._notify, event.value))

    def _forget(self) -> None:
        """Resets to the closed state."""
        self._lane: Lane | None = None
        self._post: JsonPost | None = None
        self._abandoned: threading.Event | None = None
        self._metrics: dict[str, float] = {}
        self._watch: PeriodicThread | None = None
        # Reported problems that haven't ended, and the time at which the last batch ended.
        self._troubles: set[tuple[str, str]] = set()
        self._batch, self._batch_seen = -1, 0.0
        self._started = 0.0
        self._counts = LaneCounts()

    @property
    def counts(self) -> LaneCounts:
        """Counters of the notices: accepted, done, failed, dropped, and errors by kind."""
        return self._counts

    def __repr__(self) -> str:
        """Shows only the host; the rest of the URL is a secret."""
        return f"{type(self).__name__}({shown(self._url)!r})"

    def init(self, state: State, logger: Logger) -> None:
        if state.rank and not self._all_ranks:
            return
        self._started = self._clock()
        self._abandoned = threading.Event()
        self._lane = Lane(type(self).__name__, limit=_MAX_WAITING, when_full="drop_oldest")
        self._counts = self._lane.counts
        self._post = JsonPost(self._url, self._headers, self._retry, self._abandoned.wait)
        if Event.INIT in self._events:
            self._notify(Event.INIT.value, state, logger)
        if self._alerts is not None:
            look = functools.partial(self._look, self._alerts, state, logger)
            self._watch = PeriodicThread(look, self._alerts.look_seconds, self._report_look, "alerts")
            self._watch.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._metrics.update(metrics)

    def close(self, state: State, logger: Logger) -> None:
        lane, abandoned = self._lane, self._abandoned
        if lane is None or abandoned is None:
            return
        if self._watch is not None:
            self._watch.stop(self._close_seconds)
        if self._on_failure and state.status not in {
            RunStatus.RUNNING,
            RunStatus.COMPLETED,
            RunStatus.STOPPED,
        }:
            self._notify(FAILURE, state, logger)
        try:
            if not lane.stop(self._close_seconds):
                _log.warning(
                    "%s: not all messages to %s were delivered within close_seconds=%g; "
                    "%d were sent, %d failed.",
                    type(self).__name__,
                    shown(self._url),
                    self._close_seconds,
                    lane.counts.done,
                    lane.counts.failed,
                )
        finally:
            # Ends a wait between two attempts; a hanging request ends by its own timeout.
            abandoned.set()
            counts = lane.counts
            self._forget()
            self._counts = counts

    __getstate__ = closed_state

    def _look(self, alerts: Alerts, state: State, logger: Logger, _is_last: bool) -> None:
        """Reports new problems and ended ones. Called by the thread of alerts."""
        for event, over, where, is_on, message in self._looked_at(alerts, state, logger):
            if is_on and (event, where) not in self._troubles:
                self._troubles.add((event, where))
                self._notify(event, state, logger, message)
            elif not is_on and (event, where) in self._troubles:
                self._troubles.discard((event, where))
                if over:
                    self._notify(over, state, logger, message)

    def _looked_at(
        self, alerts: Alerts, state: State, logger: Logger
    ) -> Iterator[tuple[str, str, str, bool, str]]:
        """Yields possible problems: the event, the event of its end, a place, whether it exists, a text."""
        now, batch = self._clock(), int(state.timestamp.batch)
        if batch != self._batch:
            self._batch, self._batch_seen = batch, now
        silent = now - self._batch_seen
        text = f"no batch has ended for {_duration(silent)}"
        yield "run_silent", "", "", silent > alerts.silent_seconds, text
        for queue in filter(None, (getattr(one, "queue", None) for one in logger.destinations)):
            found = queue.status()
            files, size = found["waiting_files"], found["waiting_bytes"]
            waits = f"waiting in {found['spool']}: {files} file{'s' * (files != 1)}, {size / 1e6:,.0f} MB"
            # A long queue has old files even if uploads succeed.
            quiet = min(found["oldest_waiting_seconds"], now - (found["last_success_timestamp_seconds"] or 0))
            text = f"{found['store']}: last upload {_duration(quiet)} ago; {waits}"
            yield "uploads_away", "uploads_back", found["spool"], quiet > alerts.away_seconds, text
            is_full = size > alerts.full_share * (size + found["room_bytes"])
            yield "spool_nearly_full", "", found["spool"], is_full, waits

    def _report_look(self, error: Exception) -> None:
        _log.warning("%s: alerts could not look: %s", type(self).__name__, self._clean(str(error)))

    def _notify(self, event: str, state: State, logger: Logger, message: str | None = None) -> None:
        lane, post = self._lane, self._post
        if lane is not None and post is not None:
            notice = self._notice(event, state, message)
            lane.put(functools.partial(self._send, post, notice), kind=f"message about {event}")

    def _notice(self, event: str, state: State, message: str | None = None) -> Notice:
        now = self._clock()
        exception = state.exception
        summary, lines = None, None
        if exception is not None:
            summary = self._clean("".join(traceback.format_exception_only(exception)).strip())
            lines = self._clean("".join(traceback.format_exception(exception)).strip())
        return Notice(
            event,
            state.run_name,
            state.rank,
            state.world_size,
            str(state.status),
            now,
            now - self._started,
            int(state.timestamp.epoch),
            int(state.timestamp.batch),
            dict(self._metrics),
            summary and summary[:_MAX_EXCEPTION_CHARACTERS],
            lines and lines[-_MAX_EXCEPTION_CHARACTERS:],
            message and self._clean(message),
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
_MAX_TRACEBACK_CHARACTERS = 2500
_WORDS = {
    "fit_start": "training starts",
    "fit_end": "training is completed",
    "epoch_end": "an epoch is completed",
    "eval_end": "an evaluation is completed",
    "uploads_away": "the store is away",
    "uploads_back": "uploads are back",
    "spool_nearly_full": "the spool is nearly full",
    "run_silent": "the run is silent",
}


def slack_text(notice: Notice) -> str:
    """Formats a notice in Slack's markup: event, duration, metrics, exception."""
    words = notice.status if notice.event == FAILURE else _WORDS.get(notice.event, notice.event)
    rank = f" (rank {notice.rank})" if notice.world_size > 1 else ""
    lines = [
        f"*{_escaped(one_line(notice.run_name))}*{rank}: {words}",
        f"{_duration(notice.duration_seconds)}, epoch {notice.epoch}, batch {notice.batch}",
    ]
    if notice.message is not None:
        lines.append(_escaped(one_line(notice.message)))
    shown = list(notice.metrics.items())[:_SLACK_METRICS]
    lines += [f"• {_escaped(one_line(name))}: {short(value)}" for name, value in shown]
    if len(notice.metrics) > len(shown):
        lines.append(f"({len(notice.metrics) - len(shown)} more metrics)")
    if notice.exception is not None:
        # Backticks in the text would end the code block.
        text = (notice.traceback or notice.exception).replace("```", "'''")
        lines.append(f"```{_escaped(text[-_MAX_TRACEBACK_CHARACTERS:])}```")
    return "\n".join(lines)


class Slack(Webhook):
    """Sends a message to a Slack channel at chosen events, and when the run fails.

    ```python
    Trainer(..., loggers=[Slack(os.environ["SLACK_WEBHOOK"], events=["fit_start", "fit_end"])])
    ```

    The URL belongs to an incoming webhook of one channel (https://api.slack.com/messaging/webhooks). For
    delivery, threading, secrets and ranks see `Webhook`.

    Args:
        webhook: the URL, a secret: read it from the environment.
        format: returns the message of a `Notice`: a text in Slack's markup, or a dict with `text` and
            `blocks` as in Slack's API, or None to send nothing.
        options: arguments of `Webhook`.

    Raises:
        ValueError: invalid URL, or unknown event.
    """

    def __init__(
        self,
        webhook: str,
        *,
        format: Callable[[Notice], Any] = slack_text,  # the usual name
        **options: Any,
    ) -> None:
        super().__init__(webhook, format=format, **options)

    def _document(self, notice: Notice) -> Any:
        message = super()._document(notice)
        return {"text": message} if isinstance(message, str) else message


def _escaped(text: str) -> str:
    """Escapes links and mentions of Slack's markup, such as "<!channel>"."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _duration(seconds: float) -> str:
    whole = math.floor(max(seconds, 0.0))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
