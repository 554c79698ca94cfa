"""Tells a Slack channel how a run goes, through an incoming webhook of Slack's."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from destinations._formatting import one_line, short
from events import Event

from ._http import HttpRetry
from .webhook import FAILURE, Notice, Webhook

__all__ = ["Slack", "slack_text"]

_MOST_METRICS = 20
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
    shown = list(notice.metrics.items())[:_MOST_METRICS]
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
        retry: HttpRetry = HttpRetry(),  # noqa: B008  # frozen
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
