"""Measures one run of a simulated month: `python -m tests.benchmarks month`, or `python -m tests.benchmarks.month [SCALE]`.

At scale 1: 30 million rows of 50 metrics, 3,000 small files in place of checkpoints, 200,000 pictures. The default is
1/200. Everything is measured at the scale and at a quarter of it, each in a process of its own, and read from the
disk; figures that grow faster than the run are marked. At scale 1 the folder takes about 6 GB; `BENCHMARK_FOLDER` says
where it is meanwhile.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from destinations import Artifacts, RunDirectory
from destinations.history.snapshot import last_rows
from destinations.runs import open_runs
from events import Run

from .timing import Row, print_table
from .viewer import Server

ROWS, METRICS, CHECKPOINTS, PICTURES = 30_000_000, 50, 3_000, 200_000
SCALE = 1 / 200
SMALLER = 4
PARTS = 20
PICTURE_PIXELS = 32
LONGEST_SECONDS = 24 * 3600
# Figures may grow this much faster than the run: noise, and parts that don't depend on the run.
GROWTH = 1.6
# Growth by fewer seconds or MiB than this isn't felt.
LEAST = 0.5
# The memory of the writer may grow by this much from the first fifth of the run to its end.
WRITER_MIB = 24.0


def main(scale: float = SCALE) -> bool:
    """Measures and prints; returns whether nothing grew faster than the run, and the writer's memory was flat."""
    small, large = (_in_child(one) for one in (scale / SMALLER, scale))
    rows = [
        Row(name, large[name], max(small[name] * SMALLER * GROWTH, LEAST), small[name] * SMALLER, unit)
        for name, unit in FIGURES
    ]
    title = (
        f"a month at {scale:g}: {large['rows']:,} rows of {METRICS} metrics, {large['checkpoints']:,} checkpoints, "
        f"{large['pictures']:,} pictures"
    )
    print_table(title, rows, peer=f"{SMALLER} times a quarter")
    grown = large["writer"][-1] - large["writer"][PARTS // 5]
    print(
        "memory of the writer over the run, MiB: "
        + ", ".join(f"{one:.0f}" for one in large["writer"][:: PARTS // 10])
    )
    if grown > WRITER_MIB:
        print(f"  it grew by {grown:.0f} MiB: OVER")
    return all(row.is_within_budget for row in rows) and grown <= WRITER_MIB


# Name and unit.
FIGURES = (
    ("size of metrics.csv and its parts", "MiB"),
    ("size of the rest of the folder", "MiB"),
    ("processor time of the writing process", "s"),
    ("first scan of the folder", "s"),
    ("summary of all metrics", "s"),
    ("one series, all steps", "s"),
    ("list of the pictures", "s"),
    ("last 100 rows", "s"),
    ("page: until it listens", "s"),
    ("page: first chart", "s"),
    ("page: zoom to 1,000 steps", "s"),
    ("page: pictures of one name", "s"),
    ("reopened for writing", "s"),
    ("memory of the reader", "MiB"),
    ("memory of the page's server", "MiB"),
)


def _in_child(scale: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="month-", dir=os.environ.get("BENCHMARK_FOLDER")) as folder:
        found: dict = {}
        for part in MEASURES:
            command = [sys.executable, "-m", "tests.benchmarks.month", part, folder, str(scale)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LONGEST_SECONDS
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            found |= json.loads(done.stdout.splitlines()[-1])
    return found


def _destinations(folder: Path):
    return [
        RunDirectory(folder / "run", if_exists="resume"),
        Artifacts(folder / "store", spool=folder / "spool", free_bytes=0, isolation="threads"),
    ]


def _own_mib() -> float:
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * resource.getpagesize() / (1 << 20)


def write(folder: Path, scale: float) -> dict:
    """Writes the run in twenty parts, and drains each before the next, as in a month."""
    rows, checkpoints, pictures = (max(PARTS, int(scale * one)) for one in (ROWS, CHECKPOINTS, PICTURES))
    names = [f"{group}/m{number}" for group in ("train", "optimizer") for number in range(METRICS // 2)]
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (PICTURE_PIXELS, PICTURE_PIXELS, 3), dtype=np.uint8)
    memory = []
    started, values, not_ours = time.process_time(), [], 0.0
    source = folder / "checkpoint.pt"
    with Run(_destinations(folder), run_name="month") as run:
        directory = run.logger.destinations[0]
        for part in range(1, PARTS + 1):
            for step in range(rows * (part - 1) // PARTS, rows * part // PARTS):
                if step % 1000 == 0 or not values:
                    # Always different numbers, because repeated ones would be compressed.
                    begun = time.thread_time()
                    values = rng.standard_normal((1000, METRICS), np.float32).astype(float).tolist()
                    not_ours += time.thread_time() - begun
                run.log_metrics(dict(zip(names, values[step % 1000], strict=True)), step)
                if step % 10_000 == 0:
                    directory.flush()
            for number in range(pictures * (part - 1) // PARTS, pictures * part // PARTS):
                run.log_images(picture, f"samples/{number % 8}", channels_last=True, step=step)
                if number % 100 == 0:
                    directory.flush()
            for number in range(checkpoints * (part - 1) // PARTS, checkpoints * part // PARTS):
                source.write_bytes(b"%d " % number * 1000)
                run.upload_file(f"checkpoints/ep{number}.pt", source)
            run.batch_end()
            directory.flush()
            memory.append(_own_mib())
    taken = time.process_time() - started - not_ours
    csv, others = _sizes(folder)
    return {
        "rows": rows,
        "checkpoints": checkpoints,
        "pictures": pictures,
        "writer": memory,
        "size of metrics.csv and its parts": csv / (1 << 20),
        "size of the rest of the folder": others / (1 << 20),
        "processor time of the writing process": taken,
    }


def _sizes(folder: Path) -> tuple[int, int]:
    """Returns the bytes of the rows, with their indexes, and of all else."""
    sizes = {path: path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file()}
    rows = sum(sizes[path] for path in sizes if path.name == "metrics.csv" or "parts" in path.parts)
    return rows, sum(sizes.values()) - rows


def _forget(folder: Path) -> None:
    """Drops the run from the page cache, so that it is read from the disk."""
    os.sync()
    for path in (folder / "run").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path, scale: float) -> dict:
    """Reads it as a notebook does."""
    found: dict = {}
    _forget(folder)
    with open_runs(folder / "run", cache=folder / "cache", scan=False) as runs:
        found["first scan of the folder"], _ = _timed(runs.scan)
        run = next(iter(runs.query()))
        found["summary of all metrics"], summary = _timed(lambda: run.summary)
        found["one series, all steps"], series = _timed(lambda: run.series("train/m3"))
        found["list of the pictures"], images = _timed(run.images)
    found["last 100 rows"], last = _timed(lambda: last_rows(folder / "run", 100))
    assert len(summary) == METRICS
    assert len(series) == max(PARTS, int(scale * ROWS))
    assert len(images) == max(PARTS, int(scale * PICTURES))
    assert len(last) == 100
    return {**found, "memory of the reader": _own_mib()}


def page(folder: Path, scale: float) -> dict:
    """Reads it as the page does."""
    _forget(folder)
    with Server(folder / "run", folder / "page-cache") as server:
        rows = server.get("/api/runs")["rows"]
        found = {"page: until it listens": time.perf_counter() - server.started}
        asked = {"run": [rows[0]["id"]], "metric": "train/m3"}
        found["page: first chart"], series = _timed(lambda: server.get("/api/series", **asked))
        assert series["series"][0]["x"]
        middle = int(scale * ROWS) // 2
        found["page: zoom to 1,000 steps"], _ = _timed(
            lambda: server.get("/api/series", **asked, **{"from": middle, "to": middle + 999})
        )
        found["page: pictures of one name"], _ = _timed(
            lambda: server.get(f"/api/runs/{rows[0]['id']}/media", kind="images", name="samples/3")
        )
        return {**found, "memory of the page's server": server.memory_mib()}


def reopen(folder: Path, scale: float) -> dict:
    """Opens another session of the run, which continues where it ended."""
    started = time.perf_counter()
    run = Run(_destinations(folder), run_name="month")
    run.log_metrics({"train/m3": 0.5}, int(scale * ROWS))
    taken = time.perf_counter() - started
    run.close()
    return {"reopened for writing": taken}


def _timed(call):
    started = time.perf_counter()
    found = call()
    return time.perf_counter() - started, found


MEASURES = {
    "write": write,
    "read": read,
    "page": page,
    "reopen": reopen,
}

if __name__ == "__main__":
    match sys.argv[1:]:
        case [part, folder, scale] if part in MEASURES:
            print(json.dumps(MEASURES[part](Path(folder), float(scale))))
        case arguments:
            sys.exit(0 if main(*map(float, arguments)) else 1)
