"""Measures finding runs: `python -m tests.benchmarks.runs_scan [RUNS]`, by default 10,000, then 100,000.

Each has 40 hyperparameters and 40 metrics; one in a hundred was killed. If stable-pretraining is installed, its scanner
reads the same folders, up to 20,000 runs. All folders are removed afterwards; `BENCHMARK_FOLDER` says where they are
meanwhile.
"""

import importlib
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

from destinations.runs import open_runs
from tests.benchmarks.timing import Row, print_table
from tests.peers import folder_of

SIZES = (10_000, 100_000)
NAMES = 40
MOST_OF_THEIRS = 20_000
QUERIES = 15
WHERE = "hparams.optim.group_3.lr >= 1e-3 and summary.val/metric_7 > 0.5"


def main(*sizes):
    """Measures, and prints a table for each number of runs; returns whether the budgets were kept."""
    kept = [_measure(runs) for runs in sizes or SIZES]
    return all(kept)


def _measure(runs):
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as folder:
        cache = Path(folder) / "cache"
        root = Path(folder) / "cache" / "runs"
        started = time.perf_counter()
        paths = make_runs(root, runs)
        print(f"{runs} runs were made in {time.perf_counter() - started:.0f} s")
        theirs = _measure_theirs(cache, paths[len(paths) // 2]) if runs <= MOST_OF_THEIRS else {}
        _age(paths)
        # First, because a forked command starts with the memory of this process.
        shell = _measure_shell(root, Path(folder) / "shell", runs)
        rows = _measure_ours(root, Path(folder) / "index", paths, theirs) + shell
        print_table(
            f"{runs} runs of {NAMES} hyperparameters and {NAMES} metrics", rows, peer="stable-pretraining"
        )
        return all(row.is_within_budget for row in rows)


def make_runs(root, count):
    """Makes folders with what a scan reads of a run, a thousand in each folder; returns their paths."""
    random.seed(0)
    paths = []
    for number in range(count):
        path = root / f"sweep-{number // 1000}" / f"run-{number}"
        path.mkdir(parents=True)
        text = json.dumps(_sidecar(path, number), indent=2)
        (path / "sidecar.json").write_text(text, encoding="utf-8")
        (path / "summary.json").write_text(json.dumps({"metrics": _summary(number)}), encoding="utf-8")
        (path / "metrics.csv").write_text("step,epoch,time\n", encoding="utf-8")
        if number % 100 == 99:
            (path / "heartbeat").touch()
        paths.append(path)
    _age(paths)
    return paths


def _sidecar(path, number):
    choices = (
        lambda: 10 ** random.uniform(-5, 0),
        lambda: random.randrange(1000),
        lambda: "adamw",
        lambda: True,
    )
    return {
        "schema_version": 1,
        "run_id": f"{number:012x}",
        "run_dir": str(path),
        "status": "running" if number % 100 == 99 else "completed",
        "created_at": 1.7e9 + number,
        "ended_at": 1.7e9 + number + 3600,
        "updated_at": 1.7e9 + number + 3600,
        "tags": [f"sweep:{number // 100}"],
        "notes": "",
        "hparams": {
            f"optim.group_{index}.lr": choices[0 if index < 10 else index % 4]() for index in range(NAMES)
        },
        "summary": {f"val/metric_{index}": random.random() for index in range(NAMES)},
        "checkpoint_path": f"{path}/checkpoints/ep1-ba100.pt",
        "format_version": 1,
        "exception": None,
        "session": "0",
        "host": "node",
        "pid": 1,
        "overhead": {"calls": 1000, "p50_us": 1.0, "p99_us": 4.0, "csv_bytes": 100_000, "errors": {}},
    }


def _summary(number):
    steps = {"min_step": number, "max_step": number, "count": 1000, "non_finite": 0}
    return {
        f"val/metric_{index}": {
            "last": 0.5,
            "min": random.random(),
            "max": random.random(),
            "mean": 0.5,
            **steps,
        }
        for index in range(NAMES)
    }


def _age(paths):
    """Makes the folders an hour old, like finished runs.

    Files written this moment are always read twice.
    """
    then = time.time() - 3600
    for path in paths:
        os.utime(path / "sidecar.json", (then, then))
        os.utime(path, (then, then))
    for folder in {path.parent for path in paths}:
        os.utime(folder, (then, then))


def _change(path):
    """Makes one run log once more."""
    text = (path / "sidecar.json").read_text(encoding="utf-8").replace("adamw", "sgd")
    (path / "new").write_text(text, encoding="utf-8")
    (path / "new").replace(path / "sidecar.json")


def _spent(call):
    """Returns how long a call takes, and how much of that its process had a processor."""
    spent = time.process_time()
    return _timed(call), time.process_time() - spent


def _timed(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _measure_ours(root, cache, paths, theirs):
    count = len(paths)
    with open_runs(root, cache=cache, scan=False) as runs:
        cold, cold_spent = _spent(runs.scan)
        assert (runs.report.added, runs.report.damaged) == (count, 0)
        nothing, nothing_spent = min(_spent(runs.scan) for _ in range(3))
        assert runs.report.unchanged == count
    with open_runs(root, cache=cache, scan=False) as runs:
        another = _timed(runs.scan)
        _change(paths[count // 2])
        one = _timed(runs.scan)
        assert runs.report.changed == 1
        query = {"where": WHERE, "sort_by": "summary.val/metric_3", "limit": 20}
        first = _timed(lambda: runs.query(sort_by="summary.val/metric_3", limit=20))
        first_filter = _timed(lambda: runs.query(**query))
        later = statistics.median(_timed(lambda: runs.query(**query)) for _ in range(QUERIES))
        sort = statistics.median(
            _timed(lambda: runs.query(sort_by="summary.val/metric_3", limit=20)) for _ in range(QUERIES)
        )
        first_best = _timed(lambda: runs.best("val/metric_3", is_max=True, limit=20))
        best = statistics.median(
            _timed(lambda: runs.best("val/metric_3", is_max=True, limit=20)) for _ in range(QUERIES)
        )
        everything = _timed(runs.records)
    # In milliseconds: half a second for 100,000 runs, and a tenth of that for 10,000.
    most = count * 5e-3
    size = sum(path.stat().st_size for path in cache.iterdir())
    return [
        Row("cold scan, a run", cold / count * 1e6, 50.0, theirs.get("cold")),
        Row("cold scan, a run: processor time", cold_spent / count * 1e6),
        Row("nothing changed, a run", nothing / count * 1e6, 10.0, theirs.get("nothing")),
        Row("nothing changed, a run: processor time", nothing_spent / count * 1e6),
        Row("nothing changed, a run, first scan of a process", another / count * 1e6, 10.0),
        Row("one run changed", one * 1e3, 1000.0, theirs.get("one"), unit="ms"),
        Row("sort by a metric, best 20", sort * 1e3, most, theirs.get("sort"), unit="ms"),
        Row("sort by a metric for the first time", first * 1e3, unit="ms"),
        Row("filter by two and sort, best 20", later * 1e3, most, unit="ms"),
        Row("filter by two and sort for the first time", first_filter * 1e3, unit="ms"),
        Row("best 20 by the best value of a metric", best * 1e3, most, unit="ms"),
        Row("best value for the first time, a run", first_best / count * 1e6),
        Row("all runs with all values, a run", everything / count * 1e6),
        Row("size of the index, a run", size / count, unit="byte"),
    ]


def _peak_mib(environment, root, *words):
    """Returns the peak memory of a command; `ru_maxrss` would begin with the memory of this process."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from destinations.cli import main\n"
        "main(sys.argv[1:])\n"
        "lines = Path('/proc/self/status').read_text().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", program, "runs", *words, "--root", root]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(ended.stderr.split()[-1]) / 1024


def _measure_shell(root, cache, count):
    """Returns what commands take from start to end, each with its scan, and their memory."""
    program = Path(sys.executable).with_name("destinations")
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    # Modules are compiled once, as in an installation.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def run(*words):
        command = [program, "runs", *words, "--root", root]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)

    cold = _timed(lambda: run("scan"))
    scan = min(_timed(lambda: run("scan")) for _ in range(3))
    last = min(_timed(lambda: run("ls", "-n", "20")) for _ in range(3))
    words = ("ls", "-n", "20", "--where", WHERE, "--sort", "summary.val/metric_3")
    filtered = min(_timed(lambda: run(*words)) for _ in range(3))
    words = ("best", "val/metric_3", "--max", "-n", "20")
    best = min(_timed(lambda: run(*words)) for _ in range(3))
    peak = _peak_mib(environment, root, "scan", "--full")
    is_large = count > MOST_OF_THEIRS
    return [
        Row("shell: first scan", cold, 5.0 if is_large else None, unit="s"),
        Row("shell: scan, nothing changed", scan, unit="s"),
        Row("shell: ls -n 20", last, None if is_large else 0.3, unit="s"),
        Row("shell: ls -n 20, over the scan", last - scan, 0.5, unit="s"),
        Row("shell: filter by two and sort, over the scan", filtered - scan, 0.5, unit="s"),
        Row("shell: best -n 20, over the scan", best - scan, 0.5, unit="s"),
        Row("memory of a full scan", peak, 300.0 if is_large else None, unit="MiB"),
    ]


def _measure_theirs(cache, changing):
    """Returns what the scanner and query of stable-pretraining take, in the units of our rows."""
    modules = _load_theirs()
    if modules is None:
        print("stable-pretraining is not installed: its scanner is not measured.")
        return {}
    database, count = cache / "registry.db", sum(1 for _ in (cache / "runs").glob("*/*"))

    def scan():
        modules.open_registry(database, cache_dir=cache, scan_ttl_s=0.0).close()

    cold, nothing = _timed(scan), _timed(scan)
    _change(changing)
    one = _timed(scan)
    registry = modules.open_registry(database, cache_dir=cache, scan=False)
    # Its keys are paths in JSON, so that a name with a slash must be quoted.
    sort = statistics.median(
        _timed(lambda: registry.query(sort_by='summary."val/metric_3"', limit=20)) for _ in range(3)
    )
    registry.close()
    return {
        "cold": cold / count * 1e6,
        "nothing": nothing / count * 1e6,
        "one": one * 1e3,
        "sort": sort * 1e3,
    }


def _load_theirs():
    """Returns its module `registry.query`, without running its package, which wants Lightning, loguru and more."""
    root = folder_of("stable_pretraining")
    if root is None:
        return None
    for name, path in (("", root), (".registry", f"{root}/registry")):
        package = types.ModuleType(f"stable_pretraining{name}")
        package.__path__ = [path]
        sys.modules[package.__name__] = package
    loguru = types.ModuleType("loguru")
    loguru.logger = logging.getLogger("loguru")
    sys.modules.setdefault("loguru", loguru)
    return importlib.import_module("stable_pretraining.registry.query")


if __name__ == "__main__":
    sys.exit(0 if main(*map(int, sys.argv[1:])) else 1)
