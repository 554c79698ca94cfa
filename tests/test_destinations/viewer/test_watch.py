"""A webhook learns of runs that have stopped beating."""

import functools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from destinations import RunDirectory
from destinations.runs import open_runs
from destinations.viewer import Viewer
from destinations.viewer.watch import HeartbeatWatch
from events import Run
from tests.waiting import until


class Hook(BaseHTTPRequestHandler):
    """Stores posted documents."""

    def __init__(self, posted, *args):
        self._posted = posted
        super().__init__(*args)

    def do_POST(self):
        self._posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        """Says nothing."""


@pytest.fixture
def posted():
    """Gives the documents that a server received, and its address."""
    documents = []
    with HTTPServer(("127.0.0.1", 0), functools.partial(Hook, documents)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield documents, f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()
        thread.join()


def test_a_run_that_stops_beating_is_reported_once(posted, tmp_path):
    """Runs that stopped earlier or ended properly aren't reported."""
    documents, url = posted
    later = [0.0]

    def clock():
        return time.time() + later[0]

    for name in ("ended", "digits"):
        run = Run(loggers=[RunDirectory(tmp_path / "runs" / name)], run_name=name)
        run.log_metrics({"loss": 1.0})
        if name == "ended":
            run.close()
    with open_runs(tmp_path / "runs", clock=clock, cache=tmp_path / "cache") as runs:
        watch = HeartbeatWatch(runs, url, clock, look_seconds=0.01)
        watch.start()
        until(lambda: watch._beating)
        later[0] = 10_000.0
        until(lambda: documents)
        until(lambda: not watch._beating)
        watch.stop()
        again = HeartbeatWatch(runs, url, clock)
        again._look()
        again._look()
    run.close()

    assert documents == [{"text": f"digits has stopped beating: {tmp_path / 'runs/digits'}"}]


def test_a_url_must_be_encrypted(tmp_path):
    """It is a secret, and messages name runs."""
    (tmp_path / "runs").mkdir()
    with (
        open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs,
        pytest.raises(ValueError, match="https"),
    ):
        Viewer(runs, webhook="http://example.org/hook")
