"""Measures the viewer: `python -m tests.benchmarks viewer`, or `python -m tests.benchmarks.viewer [RUNS [STEPS]]`.

The default is 1,000 runs of 100,000 steps and 10 metrics. Twenty different files are written, and the runs share them
by hard links, so reading is real and the disk holds 0.5 GB. TensorBoard reads twenty runs of 10,000 steps, and its time
is scaled to the number of steps: at 100,000 it takes minutes. All folders are removed afterwards; `BENCHMARK_FOLDER`
says where they are meanwhile.
"""

import http.client
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

import numpy as np

from destinations import RunDirectory
from destinations.runs import open_runs
from destinations.viewer.catalog import Catalog
from destinations.viewer.site import export_site
from events import Engine, Logger, State
from tests.benchmarks.timing import Row, print_table

RUNS, STEPS, METRICS = 1000, 100_000, 10
DIFFERENT = 20
CHART = 20
LIVE_SECONDS = 20.0
LIVE_ROWS = 100
TENSORBOARD_STEPS = 10_000


def main(runs=RUNS, steps=STEPS):
    """Measures, and prints a table; returns whether the budgets were kept."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as temporary:
        folder = Path(temporary)
        started = time.perf_counter()
        make_runs(folder / "runs", runs, steps)
        print(f"{runs} runs of {steps} steps were made in {time.perf_counter() - started:.0f} s")
        theirs = _measure_tensorboard(folder / "tensorboard", steps)
        with Server(folder / "runs", folder / "cache") as server:
            rows = _measure_page(server, theirs)
        rows += _measure_export(folder)
        print_table(f"{runs} runs of {steps} steps and {METRICS} metrics", rows, peer="TensorBoard")
        live = _measure_live(folder / "live", folder / "cache")
        print_table(f"{CHART} runs that log {LIVE_ROWS} rows a second", live)
        return all(row.is_within_budget for row in [*rows, *live])


def make_runs(root, count, steps):
    """Writes folders as finished runs leave them."""
    columns = [f"metric/{number}" for number in range(METRICS)]
    files = root.parent / "files"
    files.mkdir()
    for number in range(min(count, DIFFERENT)):
        rng = np.random.default_rng(number)
        step = np.arange(steps)
        curves = np.exp(-3 * step / steps)[:, None] + rng.normal(0, 0.05, (steps, METRICS))
        rows = (
            f"{at},{at // 1000},{1.7e9 + at / 100:.6f},{','.join(map(repr, row))}\n"
            for at, row in enumerate(curves.tolist())
        )
        with (files / f"{number}.csv").open("w") as file:
            file.write(f"step,epoch,time,{','.join(columns)}\n")
            file.writelines(rows)
    statistics = {"last": 0.05, "min": 0.0, "max": 1.1, "min_step": 1, "max_step": 1, "count": steps}
    for number in range(count):
        run = root / f"run-{number}"
        run.mkdir(parents=True)
        os.link(files / f"{number % DIFFERENT}.csv", run / "metrics.csv")
        sidecar = {
            "format_version": 1,
            "run_id": f"{number:012x}",
            "status": "completed",
            "created_at": 1.7e9 + number,
            "ended_at": 1.7e9 + number + 3600,
            "tags": [f"sweep:{number // 100}"],
            "hparams": {f"group.{one}": number * one / 7 for one in range(20)},
            "summary": dict.fromkeys(columns, 0.05),
        }
        (run / "sidecar.json").write_text(json.dumps(sidecar))
        (run / "summary.json").write_text(json.dumps({"metrics": dict.fromkeys(columns, statistics)}))


class Server:
    """`destinations view` in a process of its own."""

    def __init__(self, root, cache):
        program = "import sys; from destinations.cli import main; sys.exit(main())"
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, "view", str(root), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._process.stdout.readline()
        self.url = self._process.stdout.readline().strip()
        self._address, _, self.token = self.url.removeprefix("http://").partition("/?token=")
        self.address = f"http://{self._address}"
        self.bytes = 0

    def get(self, path, **parameters):
        """Returns the JSON of an answer."""
        connection = http.client.HTTPConnection(self._address, timeout=600)
        query = urlencode(parameters, doseq=True)
        headers = {"Authorization": f"Bearer {self.token}"}
        connection.request("GET", f"{path}?{query}" if query else path, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.bytes += len(content)
        assert answer.status == 200, content
        return content if path == "/" or path.startswith("/static") else json.loads(content)

    def processor_seconds(self):
        """Returns the processor time of the server so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self):
        """Returns the resident memory of the server."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * 4096 / (1 << 20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(60)
        self._process.stdout.close()


def _timed(call):
    started = time.perf_counter()
    found = call()
    return time.perf_counter() - started, found


def _measure_page(server, theirs):
    def page():
        server.get("/")
        for name in ("app.js", "data.js", "chart.js"):
            server.get(f"/static/{name}")
        server.get("/api/fields")
        return server.get("/api/runs", columns="summary.metric/0,hparams.group.1")

    from_nothing = time.perf_counter() - server.started
    first, found = _timed(page)
    again, _ = _timed(page)
    ids = [row["id"] for row in found["rows"][:CHART]]
    asked = {"run": ids, "metric": "metric/3"}
    spent = server.processor_seconds()
    chart, series = _timed(lambda: server.get("/api/series", **asked))
    chart_spent = server.processor_seconds() - spent
    assert [len(one["x"]) for one in series["series"]] == [1000] * CHART
    zoom, finer = _timed(lambda: server.get("/api/series", **asked, **{"from": 50_000, "to": 50_999}))
    assert finer["series"][0]["merged"] <= 2
    others, _ = _timed(
        lambda: server.get("/api/series", run=ids, metric=[f"metric/{one}" for one in range(METRICS)])
    )
    filtered, _ = _timed(
        lambda: server.get("/api/runs", where="hparams.group.3 > 100", sort="-summary.metric/1", limit=50)
    )
    return [
        Row("start: scan of all runs, and listening", from_nothing, unit="s"),
        Row("first page: its files, fields and 100 runs", first, 1.0, unit="s"),
        Row("the same again", again, unit="s"),
        Row(f"first chart of {CHART} runs", chart, 1.0, unit="s"),
        Row(f"first chart of {CHART} runs: processor time", chart_spent, unit="s"),
        Row("zoom to 1,000 of the steps", zoom * 1e3, 200.0, unit="ms"),
        Row(f"all {METRICS} charts of {CHART} runs", others, None, theirs.get("charts"), unit="s"),
        Row("filter and sort", filtered * 1e3, unit="ms"),
        Row("memory of the server", server.memory_mib(), None, theirs.get("memory"), unit="MiB"),
    ]


def _measure_export(folder):
    with open_runs(folder / "runs", cache=folder / "cache") as runs:
        spent = time.process_time()
        seconds, report = _timed(lambda: export_site(Catalog(runs), folder / "site", limit=CHART))
        spent = time.process_time() - spent
    assert report.runs == CHART
    return [
        Row(f"--export of {CHART} runs", seconds, 10.0, unit="s"),
        Row(f"--export of {CHART} runs: processor time", spent, unit="s"),
    ]


class _Training:
    """Twenty runs that log a hundred rows a second each, in a thread of this process."""

    def __init__(self, root):
        self.counts = [0] * CHART
        self._stop = threading.Event()
        self._runs = []
        for number in range(CHART):
            state = State(f"live-{number}")
            logger = Logger(state, [RunDirectory(root / f"live-{number}")])
            self._runs.append((Engine(state, logger), logger))
            self._runs[-1][0].run_event("init")
        self._thread = threading.Thread(target=self._log)

    def _log(self):
        started = time.perf_counter()
        while not self._stop.wait(0.05):
            wanted = int((time.perf_counter() - started) * LIVE_ROWS)
            for number, (_, logger) in enumerate(self._runs):
                for step in range(self.counts[number], wanted):
                    logger.log_metrics({f"metric/{one}": float(step) for one in range(METRICS)}, step)
                self.counts[number] = max(self.counts[number], wanted)

    def __enter__(self):
        self._thread.start()
        time.sleep(3.0)
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        for engine, _ in self._runs:
            engine.close(None)


def _measure_live(root, cache):
    """A page that shows one chart of twenty runs that are being written."""
    root.mkdir()
    with _Training(root) as training, Server(root, cache) as server:
        ids = [row["id"] for row in server.get("/api/runs")["rows"]]
        series = server.get("/api/series", run=ids, metric="metric/3")["series"]
        cursors = {one["run"]: one["cursor"] for one in series}
        version = server.get("/api/info")["version"]
        values, behind, memory = 0, [], [server.memory_mib()]
        server.bytes, spent, before = 0, server.processor_seconds(), sum(training.counts)
        began = time.perf_counter()
        while time.perf_counter() - began < LIVE_SECONDS:
            changed = server.get("/api/changes", since=version, run=ids)
            version = changed["version"]
            grown = [one for one, what in changed["runs"].items() if "rows" in what]
            if grown:
                after = [cursors[one] for one in grown]
                logged = max(training.counts)
                found = server.get("/api/series", run=grown, metric="metric/3", after=after)["series"]
                cursors |= {one["run"]: one["cursor"] for one in found}
                values += sum(len(one["x"]) for one in found)
                behind.append((logged - max(one["x"][-1] for one in found if one["x"])) / LIVE_ROWS)
            memory.append(server.memory_mib())
            time.sleep(0.5)
        seconds = time.perf_counter() - began
        spent = server.processor_seconds() - spent
        logged = sum(training.counts) - before
    settled = memory[len(memory) // 4 :]
    grown_bytes = (settled[-1] - settled[0]) * (1 << 20)
    return [
        Row("live: server, share of a processor", 100 * spent / seconds, 10.0, unit="%"),
        Row("live: bytes for each new value", server.bytes / max(1, values), 100.0, unit="byte"),
        Row("live: values that came, of those logged", 100 * values / max(1, logged), unit="%"),
        Row("live: rows behind when they come, at most", max(behind, default=99.0), 2.0, unit="s"),
        # Kept up to the bound of the cache, 256 MiB in all.
        Row("live: memory for each new row", grown_bytes / (0.75 * logged), 200.0, unit="byte"),
    ]


def _measure_tensorboard(folder, steps):
    """Returns what TensorBoard takes for the data of one chart of twenty runs, in a process of its own."""
    if importlib.util.find_spec("tensorboard") is None:
        print("TensorBoard is not installed: it is not measured.")
        return {}
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for number in range(CHART):
        writer = EventFileWriter(str(folder / f"run-{number}"))
        for step in range(TENSORBOARD_STEPS):
            values = [Summary.Value(tag=f"metric/{one}", simple_value=step + one) for one in range(METRICS)]
            writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=Summary(value=values)))
        writer.close()
    program = (
        "import sys, time; from tensorboard.backend.event_processing import event_multiplexer as m\n"
        "started = time.perf_counter(); found = m.EventMultiplexer(size_guidance={'tensors': 1000})\n"
        "found.AddRunsFromDirectory(sys.argv[1]); found.Reload()\n"
        "for run in found.Runs():\n"
        "    found.Tensors(run, 'metric/3') if 'metric/3' in found.Runs()[run]['tensors'] else None\n"
        "size = int(open('/proc/self/statm').read().split()[1]) * 4096 / (1 << 20)\n"
        "print(time.perf_counter() - started, size)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True, timeout=600
    )
    seconds, size = map(float, finished.stdout.split()[-2:])
    print(f"TensorBoard reads {CHART} runs of {TENSORBOARD_STEPS} steps in {seconds:.1f} s")
    # It reads all metrics before it shows one, in time that grows with their values.
    return {"charts": seconds * steps / TENSORBOARD_STEPS, "memory": size}


if __name__ == "__main__":
    sys.exit(0 if main(*map(int, sys.argv[1:])) else 1)
