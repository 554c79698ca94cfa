"""Measures runs in a bucket, with rclone's S3 server on this machine: `python -m tests.benchmarks bucket`.

It measures how long a reader waits for new rows of a live run, the requests and bytes of the writer, and the first
page of a thousand runs. `LIVE` runs are written at once, for `SECONDS`.
"""

import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from pathlib import Path

from tests.benchmarks.timing import Row, print_table
from tests.servers import s3_servers
from tests.servers.fault_proxy import FaultProxy

LIVE = int(os.environ.get("LIVE", "100"))
SECONDS = float(os.environ.get("SECONDS", "120"))
PROCESSES = 4
COLD = int(os.environ.get("COLD", "1000"))
ROWS_BYTES = 64 << 20
PART_BYTES = 4 << 20

# Each process writes several runs; a process per run would be a hundred, with a worker each.
WRITER = """
import sys, threading, time
from destinations import RunDirectory
from events import Run
import uploads
uri, first, count, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
made = uploads.UploadQueue.__init__
def in_threads(self, store, **options):
    made(self, store, **{**options, "isolation": "threads", "workers": 1})
uploads.UploadQueue.__init__ = in_threads
runs = []
for number in range(first, first + count):
    run = Run(loggers=[RunDirectory(uri, flush_seconds=1.0)], run_name=f"run{number}")
    run.fit_start()
    runs.append(run)
print("ready", flush=True)
end = time.monotonic() + seconds
step = 0
while time.monotonic() < end:
    for run in runs:
        run.log_metrics({"at": time.time(), "loss": 1 / (step + 1)}, step=step)
    step += 1
    time.sleep(1.0)
import os; os._exit(0)
"""


def main():
    """Measures, and prints tables; returns whether the budgets were kept."""
    with tempfile.TemporaryDirectory() as temporary, s3_servers.rclone(Path(temporary) / "server") as server:
        folder = Path(temporary)
        os.environ.update(s3_servers.ENVIRONMENT)
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "UPLOADS_HOME"):
            os.environ[name] = str(folder / name)
        rows = [
            *_measure_requests(server),
            *_measure_bytes(server),
            *_measure_live(server),
            *_measure_cold(server),
        ]
    print_table(f"runs in a bucket: {LIVE} written at once, {COLD} that ended", rows)
    return all(row.is_within_budget for row in rows)


# Live.


def _measure_live(server):
    uri = server.uri("live/{run_name}")
    share = -(-LIVE // PROCESSES)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, uri, str(first), str(min(share, LIVE - first)), str(SECONDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for first in range(0, LIVE, share)
    ]
    for writer in writers:
        writer.stdout.readline()
    lags = []
    # The first piece of each is there.
    time.sleep(15.0)
    with _page(server.uri("live")) as page:
        ids = {row["id"]: row["name"] for row in page.get("/api/runs", limit=1000)["rows"]}
        shown = page.get("/api/series", run=[*ids], metric="at", points=5000)["series"]
        seen = Counter({one["run"]: len(one["y"]) for one in shown})
        version = page.get("/api/info")["version"]
        until = time.monotonic() + SECONDS - 25
        warm = time.monotonic() + 20
        while time.monotonic() < until:
            answer = page.get("/api/changes", since=version, run=[*ids])
            version, now = answer["version"], time.time()
            changed = [one for one, what in answer["runs"].items() if what.get("rows") and one in ids]
            if not changed:
                continue
            found = page.get("/api/series", run=changed, metric="at", points=5000)["series"]
            now = time.time()
            for one in found:
                new = one["y"][seen[one["run"]] :] if seen[one["run"]] else one["y"][-1:]
                seen[one["run"]] = len(one["y"])
                if time.monotonic() > warm:
                    lags += [now - at for at in new]
    for writer in writers:
        writer.wait()
    lags.sort()
    return [
        Row("from log_metrics to the page, p50", lags[len(lags) // 2], unit="s"),
        Row("from log_metrics to the page, p95", lags[int(len(lags) * 0.95)], 15.0, unit="s"),
        Row("rows that the page saw", len(lags), unit=""),
    ]


class _Page:
    """A server of the page in a process of its own."""

    def __init__(self, root):
        code = (
            "import sys\nfrom destinations.cli import main\n"
            f"sys.exit(main(['view', {root!r}, '--port', '0']))"
        )
        self._process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        self._process.stdout.readline()
        url = urllib.parse.urlsplit(self._process.stdout.readline().strip())
        self._token = urllib.parse.parse_qs(url.query)["token"][0]
        self._address = url.hostname, url.port

    def get(self, path, **parameters):
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        connection.request(
            "POST" if path != "/api/changes" else "GET", *self._asked(path, parameters), headers
        )
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        assert answer.status == 200, content[:300]
        return json.loads(content)

    @staticmethod
    def _asked(path, parameters):
        query = urllib.parse.urlencode(parameters, doseq=True)
        return (f"{path}?{query}", None) if path == "/api/changes" else (path, query)

    def close(self):
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def _page(root):
    page = _Page(root)
    try:
        yield page
    finally:
        page.close()


# Bytes and requests.


def _measure_requests(server):
    """Measures a run of few rows, with intervals shorter than an hour's."""
    from destinations import RunDirectory
    from events import Run

    counted = Counter()
    with contextlib.closing(FaultProxy(server.endpoint_url)) as proxy:
        _count(proxy, counted)
        directory = RunDirectory(
            server.at(proxy.url).uri("few/{run_name}"), mirror_seconds=0.5, flush_seconds=0.1
        )
        with Run(loggers=[directory], run_name="few") as run:
            run.fit_start()
            run.log_metrics({"loss": 1.0}, step=0)
            time.sleep(3.0)
            before, first = Counter(counted), directory._writer._mirror._interval
            for step in range(1, 800):
                run.log_metrics({"loss": 1 / step}, step=step)
                time.sleep(0.05)
            now, last = counted - before, directory._writer._mirror._interval
    hour = 360 / (last - first)
    return [
        Row("puts in 360 intervals", now["PUT"] * hour, 750.0, unit=""),
        Row("looks in 360 intervals", now["HEAD"] * hour, unit=""),
        Row("listings in 360 intervals", now["LIST"] * hour, 0.0, unit=""),
    ]


def _measure_bytes(server):
    """Measures a run of many rows, with parts scaled down like the run."""
    from destinations import RunDirectory
    from events import Run

    class Small(RunDirectory):
        _part_bytes = PART_BYTES

    draw = random.Random(0)
    counted = Counter()
    with contextlib.closing(FaultProxy(server.endpoint_url)) as proxy:
        _count(proxy, counted)
        uri = server.at(proxy.url).uri("bytes/{run_name}")
        with Run(loggers=[Small(uri, mirror_seconds=0.5, flush_seconds=0.1)], run_name="large") as run:
            run.fit_start()
            step = written = 0
            while written < ROWS_BYTES:
                run.log_metrics({f"m{number}": draw.random() for number in range(50)}, step=step)
                step += 1
                written += 19 * 50 + 30
                if step % 50 == 0:
                    time.sleep(0.05)
    return [Row("bytes sent for a byte of rows", counted["bytes"] / written, 3.0, unit="x")]


def _count(proxy, counted):
    lock = threading.Lock()

    def plan(request):
        with lock:
            counted["LIST" if "list-type" in request.path else request.method] += 1
            counted["bytes"] += len(request.body)

    proxy.plan = plan


# Cold.


def _measure_cold(server):
    from concurrent.futures import ThreadPoolExecutor

    from destinations import RunDirectory
    from events import Run

    with Run(loggers=[RunDirectory(server.uri("cold/{run_name}"))], run_name="run0") as run:
        run.log_hyperparameters({"lr": 0.1, "seed": 0})
        for step in range(1000):
            run.log_metrics({f"m{number}": step / (number + 1) for number in range(10)}, step=step)
    objects = server.objects("cold/run0")
    client = server.client()

    def copy(number):
        for name, content in objects.items():
            client.put_object(Bucket=s3_servers.BUCKET, Key=f"cold/run{number}/{name}", Body=content)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(copy, range(1, COLD)))
    started = time.monotonic()
    with _page(server.uri("cold")) as page:
        count = page.get("/api/runs", limit=100)["total"]
        first = time.monotonic() - started
    started = time.monotonic()
    with _page(server.uri("cold")) as page:
        page.get("/api/runs", limit=100)
        again = time.monotonic() - started
    assert count == COLD, count
    return [
        Row(f"page of {COLD} runs that ended, cold", first, 3.0, unit="s"),
        Row("the same again", again, unit="s"),
    ]
