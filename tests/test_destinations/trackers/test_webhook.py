"""Messages over HTTP: their content, recipients and frequency, and secrets that they never contain."""

import functools
import json
import logging
import math
import pickle
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from destinations import Artifacts, Slack, Webhook
from destinations.testing import DestinationContract, DryRun
from destinations.trackers.webhook import Alerts, DeliveryError, HttpRetry, JsonPost, Notice, slack_text
from events import Run
from tests.servers.stores import StoreThatWaits
from tests.waiting import until

PATIENCE_SECONDS = 60
AT_ONCE = HttpRetry(attempts=4, first_seconds=0.0, timeout_seconds=PATIENCE_SECONDS)
# The default, with time for a busy machine.
PATIENT = {"retry": HttpRetry(timeout_seconds=PATIENCE_SECONDS), "close_seconds": PATIENCE_SECONDS}
SECRET = "s3cr3t-path-of-the-hook"


def make_webhook(url, **options):
    """Returns a webhook whose limits a slow machine doesn't reach."""
    return Webhook(url, **{**PATIENT, **options})


def make_slack(url, **options):
    """Returns a Slack destination whose limits a slow machine doesn't reach."""
    return Slack(url, **{**PATIENT, **options})


class Server:
    """Keeps the posted documents, and responds with the given statuses and headers, one each.

    Afterwards it responds with 200.
    """

    def __init__(self):
        self.answers = []
        self.requests = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.has_request = threading.Event()
        # One thread handles all requests: separate threads could end just after the test looks for leftover
        # threads.
        self._http = _QuietServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._http.server_port}/{SECRET}"

    @property
    def documents(self):
        return [json.loads(body) for _, _, body in self.requests]

    def close(self):
        """Answers pending requests, and ends.

        Lanes that were still open have ended before, so their logs belong to this test.
        """
        self.may_answer.set()
        lanes = [one for one in threading.enumerate() if one.name in {"Webhook", "Slack"}]
        for lane in lanes:
            lane.join(PATIENCE_SECONDS)
        self._http.shutdown()
        self._thread.join(PATIENCE_SECONDS)
        self._http.server_close()
        assert not any(thread.is_alive() for thread in (self._thread, *lanes))


class _QuietServer(HTTPServer):
    def handle_error(self, request, client_address):
        """Ignores clients that have disconnected."""


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, server, *args):
        self._mine = server
        super().__init__(*args)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._mine.requests.append((self.path, dict(self.headers), body))
        self._mine.has_request.set()
        self._mine.may_answer.wait(PATIENCE_SECONDS)
        status, headers = self._mine.answers.pop(0) if self._mine.answers else (200, {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"words")

    do_GET = do_POST  # noqa: N815  # the library's name

    def log_message(self, *args):
        """Logs nothing."""


@pytest.fixture
def server():
    """Returns a server that runs for one test."""
    server = Server()
    yield server
    server.close()


class Clock:
    """A clock that tests advance."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def play(webhook, exception=None):
    """Plays a run of two batches, which takes 65 seconds on the webhook's clock."""
    run = DryRun(webhook, max_duration="2ba")
    run.init()
    run.fit()
    webhook._clock.now += 65
    run.close(exception)
    return run


class TestWebhookContract(DestinationContract):
    @pytest.fixture
    def destination(self, server):
        """Returns a destination that reports every event of a run."""
        self.server = server
        return make_webhook(server.url, events=["init", "fit_start", "epoch_end", "eval_end", "fit_end"])

    def read_output(self, destination):
        return list(self.server.documents)


class TestSlackContract(DestinationContract):
    @pytest.fixture
    def destination(self, server):
        """Returns a destination with its defaults."""
        self.server = server
        return make_slack(server.url)

    def read_output(self, destination):
        return list(self.server.documents)


# The content of messages.


def test_a_completed_run_is_reported_once(server):
    """By default, one document is sent at the end of fit: names, durations, counts, last metrics."""
    webhook = make_webhook(server.url, clock=Clock())

    play(webhook)

    assert server.documents == [
        {
            "event": "fit_end",
            "run_name": "dry-run",
            "rank": 0,
            "world_size": 1,
            "status": "running",
            "time": 1000.0,
            "duration_seconds": 0.0,
            "epoch": 0,
            "batch": 2,
            "metrics": {"loss/train": 0.5},
            "exception": None,
            "traceback": None,
            "message": None,
        }
    ]
    assert (webhook.counts.accepted, webhook.counts.done) == (1, 1)


def test_a_failure_is_reported_at_close(server):
    """The document has the exception with its traceback, without secrets."""
    webhook = make_webhook(server.url, events=[], clock=Clock())

    play(webhook, ValueError(f"no password=hunter2 for {server.url}"))

    (document,) = server.documents
    assert (document["event"], document["status"], document["duration_seconds"]) == ("failure", "failed", 65)
    assert document["exception"] == "ValueError: no password=[redacted] for [redacted]"
    assert "hunter2" not in str(document)
    assert SECRET not in str(document)


@pytest.mark.parametrize(
    ("exception", "status"), [(KeyboardInterrupt(), "interrupted"), (SystemExit(143), "preempted")]
)
def test_a_stopped_run_is_reported(server, exception, status):
    """Ctrl-C and SIGTERM don't count as completed."""
    webhook = make_webhook(server.url, events=[], clock=Clock())

    play(webhook, exception)

    assert [document["status"] for document in server.documents] == [status]


def test_failures_need_not_be_reported(server):
    """`on_failure=False` reports only the events."""
    play(make_webhook(server.url, events=[], on_failure=False, clock=Clock()), ValueError())

    assert server.documents == []


def test_only_chosen_events_are_hooked(server):
    """The engine finds hooks for these alone; names may have any case."""
    webhook = make_webhook(server.url, events="EPOCH_END", clock=Clock())
    run = DryRun(webhook, max_duration="2ep", batches_per_epoch=2)

    run.init()
    run.fit()
    run.close()

    assert [(document["event"], document["epoch"]) for document in server.documents] == [
        ("epoch_end", 1),
        ("epoch_end", 2),
    ]
    assert set(vars(webhook)) & {"batch_end", "fit_end", "epoch_end"} == {"epoch_end"}


def test_a_custom_format(server):
    """Its result is sent as JSON with the headers; None isn't sent."""
    webhook = make_webhook(
        server.url,
        events=["fit_start", "fit_end"],
        format=lambda notice: {"is": notice.event} if notice.event == "fit_end" else None,
        headers={"Authorization": "Bearer x"},
        clock=Clock(),
    )

    play(webhook)

    ((path, headers, body),) = server.requests
    assert (path, json.loads(body)) == (f"/{SECRET}", {"is": "fit_end"})
    assert headers["Authorization"] == "Bearer x"
    assert headers["Content-Type"] == "application/json; charset=utf-8"


def test_values_that_json_lacks_become_text(server):
    """NaN, infinities and lone surrogates arrive."""
    webhook = make_webhook(server.url, clock=Clock())
    run = DryRun(webhook, max_duration=None, run_name="a\udc80b")
    run.init()

    run.logger.log_metrics({"a": math.nan, "b": -math.inf, "c": True})
    run.fire("fit_start", "fit_end")
    run.close()

    (document,) = server.documents
    assert document["metrics"] == {"a": "NaN", "b": "-Infinity", "c": True}
    assert document["run_name"] == "a\udc80b"


def test_each_rank_reports_on_request(server):
    """With `all_ranks`, rank 1 reports too, and includes its rank."""
    webhook = make_webhook(server.url, all_ranks=True)
    run = DryRun(webhook, rank=1)

    run.init()
    run.close(ValueError())

    assert [(document["rank"], document["world_size"]) for document in server.documents] == [(1, 2)]


# Slack.


def test_a_slack_message_has_the_essentials(server):
    """It has the name, duration, metrics and exception; no markup in it notifies people."""
    slack = make_slack(server.url, events=[], clock=Clock())
    run = DryRun(slack, run_name="<!channel> & co", max_duration=None)
    run.init()
    run.logger.log_metrics({f"m{index}": index / 3 for index in range(22)})
    slack._clock.now += 7265

    run.close(ValueError("a <b>"))

    (document,) = server.documents
    lines = document["text"].splitlines()
    assert lines[:4] == [
        "*&lt;!channel&gt; &amp; co*: failed",
        "2 h 1 min, epoch 0, batch 0",
        "• m0: 0.0",
        "• m1: 0.3333",
    ]
    assert lines[-2:] == ["(2 more metrics)", "```ValueError: a &lt;b&gt;```"]


def test_slack_sends_what_the_format_returns(server):
    """For each event the format may return a text, a Slack dict, or None."""
    messages = {"fit_start": {"text": "begins", "blocks": []}, "fit_end": "the end", "epoch_end": None}
    slack = make_slack(
        server.url, events=list(messages), format=lambda notice: messages[notice.event], clock=Clock()
    )

    play(slack)

    assert server.documents == [{"text": "begins", "blocks": []}, {"text": "the end"}]


# Delivery.


def test_a_transient_response_is_retried(server):
    """429 and 5xx are transient, and the document arrives in the end."""
    server.answers += [(500, {}), (429, {"Retry-After": "0"}), (503, {})]
    webhook = make_webhook(server.url, retry=AT_ONCE, clock=Clock())

    play(webhook)

    assert len(server.requests) == 4
    assert len({body for _, _, body in server.requests}) == 1
    assert (webhook.counts.done, webhook.counts.failed) == (1, 0)


@pytest.mark.parametrize("status", [400, 403, 404, 410])
def test_a_final_response_is_not_retried(server, status, caplog):
    """A refusal is reported once, with its status and without the URL."""
    server.answers += [(status, {})]
    webhook = make_webhook(server.url, retry=AT_ONCE, clock=Clock())

    play(webhook)

    assert len(server.requests) == 1
    assert webhook.counts.errors == {"message about fit_end: DeliveryError": 1}
    assert f"HTTP {status}: words" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(server, status):
    """They would send the message to another server."""
    server.answers += [(status, {"Location": "/elsewhere"})]
    webhook = make_webhook(server.url, retry=AT_ONCE, clock=Clock())

    play(webhook)

    assert [path for path, _, _ in server.requests] == [f"/{SECRET}"]
    assert webhook.counts.failed == 1


def test_attempts_are_bounded(server):
    """A server that stays broken gets only the allowed number of requests."""
    server.answers += [(500, {})] * 100
    webhook = make_webhook(server.url, retry=AT_ONCE, clock=Clock())

    play(webhook)

    assert (len(server.requests), webhook.counts.failed) == (4, 1)


def test_a_port_without_a_server(caplog):
    """A refused connection is retried, then reported without the URL; training continues."""
    # Bound, so that no other process can take the port, but not listening.
    with socket.socket() as deaf, caplog.at_level(logging.DEBUG):
        deaf.bind(("127.0.0.1", 0))
        webhook = make_webhook(
            f"http://127.0.0.1:{deaf.getsockname()[1]}/{SECRET}", retry=AT_ONCE, clock=Clock()
        )
        play(webhook)

    assert webhook.counts.failed == 1
    assert "ConnectionRefusedError" in caplog.text
    assert "attempt 4 of 4" in caplog.text
    assert SECRET not in caplog.text


def test_close_stops_waiting_for_a_hanging_server_at_its_deadline(server, caplog):
    """Training continues, and close returns and names the unsent messages."""
    server.may_answer.clear()
    webhook = make_webhook(
        server.url, events=["fit_start", "fit_end"], retry=AT_ONCE, close_seconds=0.05, clock=Clock()
    )

    play(webhook)

    assert webhook.counts.done == 0
    assert "not all messages to http://127.0.0.1/…" in caplog.text
    server.may_answer.set()


def test_a_silent_connection_times_out(server):
    """The request's timeout ends it, and it's retried."""
    server.may_answer.clear()
    post = JsonPost(server.url, {}, HttpRetry(attempts=2, timeout_seconds=0.05), wait=lambda _: False)

    with pytest.raises(DeliveryError, match=r"TimeoutError .attempt 2 of 2"):
        post.send({})


def test_delays_grow_and_are_bounded(server):
    """They double, with jitter down to half, up to the maximum.

    The server's Retry-After applies, up to the maximum.
    """
    dates = [{"Retry-After": f"Thu, 01 Jan {year} 00:16:47 GMT"} for year in (2125, 1970)]
    server.answers += [(500, {})] * 4 + [
        (429, {"Retry-After": "3"}),
        (503, {"Retry-After": "99"}),
        *((503, date) for date in dates),
        (503, {"Retry-After": "x"}),
    ]
    waits = []
    retry = HttpRetry(attempts=10, first_seconds=2.0, most_seconds=10.0, timeout_seconds=PATIENCE_SECONDS)
    post = JsonPost(server.url, {}, retry, wait=lambda seconds: waits.append(seconds) or False)

    post.send({})

    for wait, longest in zip(waits, (2, 4, 8, 10), strict=False):
        assert longest / 2 <= wait <= longest
    assert waits[4:8] == [3.0, 10.0, 10.0, 0.0]
    assert 5 <= waits[8] <= 10


def test_retries_end_at_the_deadline(server):
    """Once the wait reports that no time is left, there is no further attempt."""
    server.answers += [(500, {})] * 4

    with pytest.raises(DeliveryError, match="attempt 1 of 6"):
        JsonPost(server.url, {}, HttpRetry(), wait=lambda _: True).send({})

    assert len(server.requests) == 1


def test_the_queue_is_bounded(server):
    """While the server hangs, a hundred messages wait; the oldest are dropped and counted."""
    server.may_answer.clear()
    webhook = make_webhook(server.url, events=["batch_end"], clock=Clock(), close_seconds=PATIENCE_SECONDS)
    run = DryRun(webhook, max_duration="201ba", batches_per_epoch=201)
    run.init()
    run.train_batch()
    assert server.has_request.wait(PATIENCE_SECONDS)

    run.fit()
    server.may_answer.set()
    run.close()

    assert webhook.counts.dropped == 100
    assert [document["batch"] for document in server.documents] == [1, *range(102, 202)]


# Secrets and mistakes.


def test_the_url_is_not_shown():
    """`repr` and `str` show only the host."""
    webhook = Webhook(f"https://user:{SECRET}@example.org/{SECRET}?token={SECRET}")

    assert repr(webhook) == str(webhook) == "Webhook('https://example.org/…')"


@pytest.mark.parametrize(
    "url",
    [
        f"http://example.org/{SECRET}",
        f"ftp://example.org/{SECRET}",
        f"file:///{SECRET}",
        f"example.org/{SECRET}",
        f"https://example.org/{SECRET} b",
        f"https://example.org/{SECRET}\n",
        f"https://[{SECRET}/",
        "https://",
        "",
        None,
    ],
)
def test_an_unsafe_url_raises(url):
    """Only https, or http on this machine, is accepted; the error doesn't contain the URL."""
    with pytest.raises(ValueError, match=r"^url must ") as caught:
        Webhook(url)

    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["http://localhost:1/a", "http://127.0.0.9:1/a", "http://[::1]:1/a"])
def test_http_is_accepted_on_this_machine(url):
    """Nobody can read the message on the way."""
    assert Webhook(url)


def test_http_elsewhere_is_accepted_on_request():
    """`allow_http` allows it."""
    assert Webhook("http://example.org/a", allow_http=True)


def test_an_unknown_event_raises():
    """The error names the nearest match."""
    with pytest.raises(ValueError, match="got 'fit_stop'"):
        Webhook("https://example.org/a", events=["fit_stop"])


def test_a_copy_keeps_its_settings(server):
    """It can be sent to another process, with its events and format."""
    slack = pickle.loads(  # noqa: S301  # our own bytes
        pickle.dumps(make_slack(server.url, events=["epoch_end"], format=text_of))
    )
    run = DryRun(slack, max_duration="1ep")

    run.init()
    run.fit()
    run.close()

    assert server.documents == [{"text": "epoch_end of dry-run"}]


def text_of(notice: Notice) -> str:
    """Returns a text. Defined at the top of the module, so that it can be pickled."""
    return f"{notice.event} of {notice.run_name}"


def test_an_outage_and_its_end_are_reported(server, tmp_path):
    """Each is reported once, with the pending files and the store; a full spool and a silent run are too."""
    gate = threading.Event()
    artifacts = Artifacts(
        StoreThatWaits(gate), spool=tmp_path / "spool", spool_bytes=105, free_bytes=0, close_seconds=0
    )
    alerts = Alerts(away_seconds=0, full_share=0.9, silent_seconds=0, look_seconds=0.01)
    (tmp_path / "file").write_bytes(b"x" * 100)
    try:
        with Run(loggers=[artifacts, make_webhook(server.url, events=(), alerts=alerts)]) as run:
            run.upload_file("file", tmp_path / "file")
            until(lambda: len(server.documents) == 3)
            gate.set()
            until(lambda: len(server.documents) == 4)
    finally:
        gate.set()

    found = {one["event"]: one["message"] for one in server.documents}
    assert found.keys() == {"uploads_away", "uploads_back", "spool_nearly_full", "run_silent"}
    assert list(found)[-1] == "uploads_back"
    assert f"waiting in {tmp_path / 'spool'}: 1 file, 0 MB" in found["uploads_away"]
    assert found["run_silent"].startswith("no batch has ended for 0 min")


def test_a_healthy_run_reports_nothing(server, tmp_path):
    """The thread checks periodically, and once more at the end."""
    artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0)
    (tmp_path / "file").write_bytes(b"x" * 100)
    webhook = make_webhook(server.url, events=(), alerts=Alerts(look_seconds=0.01))
    with Run(loggers=[artifacts, webhook]) as run:
        run.upload_file("file", tmp_path / "file")
        artifacts.queue.drain(PATIENCE_SECONDS)

    assert server.documents == []


def test_slack_describes_an_alert_in_words():
    """The finding follows the run's status."""
    notice = Notice("uploads_away", "digits", 0, 1, "running", 0.0, 61.0, 1, 20, {}, message="3 files wait")

    assert slack_text(notice) == "*digits*: the store is away\n1 min 1 s, epoch 1, batch 20\n3 files wait"
