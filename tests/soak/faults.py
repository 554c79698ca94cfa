"""The faults of an S3 server and of proxies in front of it: one after the other, for seconds each."""

import random
import threading
import time
from collections import Counter

from tests.servers.fault_proxy import (
    Answer,
    Dribble,
    FaultProxy,
    Late,
    Request,
    Reset,
    Truncate,
    Verifier,
    captive_portal,
    front,
)

CALM = "calm"
_SPAN_SECONDS = (0.5, 2.5)
_HANG_SECONDS = 4.0


def _lost_answer(request):
    late = Late()
    late.event.set()
    return late


def _hang(request):
    """Stays silent for longer than the client waits; then the server carries out the request."""
    late = Late()
    timer = threading.Timer(_HANG_SECONDS, late.event.set)
    timer.daemon = True
    timer.start()
    return late


# Name, the share of requests that it hits, and what happens to them.
FAULTS = (
    (CALM, 0.0, lambda request: None),
    ("connection reset", 0.3, lambda request: Reset()),
    ("503 SlowDown", 0.3, lambda request: Answer(503, "SlowDown")),
    ("500 after the work was done", 0.3, lambda request: Answer(500, "InternalError", after_forwarding=True)),
    ("answer lost", 0.3, _lost_answer),
    ("body damaged, and refused", 0.3, lambda request: Verifier(flips=1)(request) if request.body else None),
    ("answer cut short", 0.3, lambda request: Truncate(10)),
    (CALM, 0.0, lambda request: None),
    ("no answer in time, then done", 0.1, _hang),
    ("answer byte by byte", 0.3, lambda request: Dribble(10, 0.02)),
    ("expired credentials", 1.0, lambda request: Answer(400, "ExpiredToken")),
    ("captive portal", 1.0, captive_portal),
    ("403 of a proxy", 1.0, lambda request: front(403)),
    ("407 of a proxy", 1.0, lambda request: front(407)),
    ("outage", 1.0, lambda request: Reset()),
)


class FaultsInTurn:
    """A plan for `FaultProxy`: all faults, one after the other, until `stop`.

    Forgets the requests that the proxy records, because hours have too many of them.
    """

    def __init__(self, proxy: FaultProxy, chance: random.Random) -> None:
        self._proxy = proxy
        self._chance = chance
        self._number = -1
        self._until = 0.0
        self._is_over = False
        self.counts: Counter[str] = Counter()

    def __call__(self, request: Request):
        del self._proxy.seen[:-100]
        if self._is_over:
            return None
        if time.monotonic() >= self._until:
            self._number = (self._number + 1) % len(FAULTS)
            self._until = time.monotonic() + self._chance.uniform(*_SPAN_SECONDS)
        name, share, fault = FAULTS[self._number]
        if self._chance.random() >= share or (found := fault(request)) is None:
            return None
        self.counts[name] += 1
        return found

    def stop(self) -> None:
        """Lets the server answer every request from now on."""
        self._is_over = True
