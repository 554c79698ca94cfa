"""Tells somebody that something happened in a run: a JSON document, posted to a URL.

The training thread makes a small record of what happened; a lane makes the document of it and posts it.
"""

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from destinations._formatting import plain
from destinations._lane import Lane, LaneCounts
from destinations.base import LoggerDestination
from events import Event, Logger, RunStatus, State, redact_text

from ._http import HttpRetry, JsonPost, require_url, shown, without_url

__all__ = ["FAILURE", "HttpRetry", "Notice", "Webhook", "notice_document"]

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
        retry: HttpRetry = HttpRetry(),  # noqa: B008  # frozen
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

    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
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
