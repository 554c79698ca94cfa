"""Reports runs that stop beating to a webhook, because a killed process can't."""

import logging
import threading
from collections.abc import Callable

from destinations.background import PeriodicThread
from destinations.runs import Runs
from destinations.runs.record import status_of
from destinations.trackers.webhook import DeliveryError, HttpRetry, JsonPost, require_url

__all__ = ["HeartbeatWatch"]

_log = logging.getLogger("destinations")

_LOOK_SECONDS = 30.0
_STOP_SECONDS = 5.0


class HeartbeatWatch:
    """Looks at all runs every half minute, in a thread, and posts once when a run stops beating.

    Runs that stopped earlier are not reported.

    Args:
        runs: must stay open until `stop`.
        url: the URL of the webhook, a secret.
        clock: returns the time in seconds since 1970.
        look_seconds: how often to look.

    Raises:
        ValueError: the URL is neither https nor local.
    """

    def __init__(
        self, runs: Runs, url: str, clock: Callable[[], float], *, look_seconds: float = _LOOK_SECONDS
    ) -> None:
        require_url(url, allow_http=False)
        self._runs = runs
        self._clock = clock
        self._stopping = threading.Event()
        self._post = JsonPost(url, {}, HttpRetry(), self._stopping.wait)
        self._beating: set[object] = set()
        self._thread = PeriodicThread(self._look, look_seconds, self._report, "heartbeats")

    def start(self) -> None:
        """Starts to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.stop(_STOP_SECONDS)

    def _look(self, is_last: bool = False) -> None:
        if is_last:
            return
        self._runs.scan()
        now = self._clock()
        statuses = [(one, status_of(one, now)) for one in self._runs.records()]
        beating = self._beating
        self._beating = {one.path for one, status in statuses if status == "running"}
        for one, status in statuses:
            if status == "killed" and one.path in beating:
                try:
                    self._post.send({"text": f"{one.name} has stopped beating: {one.path}"})
                except DeliveryError as error:
                    self._report(error)

    def _report(self, error: Exception) -> None:
        _log.warning("cannot report runs that have stopped: %s", error)
