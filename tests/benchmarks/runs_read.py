"""Measures reading runs back: `python -m tests.benchmarks runs_read`.

`python -m tests.benchmarks.runs_read 1000` exports that many runs.

The run folders are written here as `RunDirectory` leaves them: ten metrics of random numbers, which no encoding makes
smaller. Seconds are processor time, since the machine has other work; peak memory is a child process's.
"""

import json
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.timing import Row, print_table

_ROWS = 10_000
METRICS = 10


def write_run(run_dir: Path, rows: int) -> None:
    """Writes a run that has ended."""
    import numpy as np

    from destinations.run_directory.layout import format_cell_rows, header_line

    source = np.random.default_rng(abs(hash(run_dir.name)) % 2**32)
    run_dir.mkdir(parents=True)
    names = [f"train/m{index}" for index in range(METRICS)]
    now = 1.76e9
    with (run_dir / "metrics.csv").open("wb") as file:
        file.write(header_line(["step", "epoch", "time", *names]))
        for start in range(0, rows, 10_000):
            count = min(10_000, rows - start)
            values = source.random((count, METRICS))
            times = now + np.cumsum(source.uniform(0.0009, 0.0011, count))
            now = float(times[-1])
            cells = format_cell_rows(values) or [",".join(map(repr, row)).encode() for row in values.tolist()]
            file.writelines(
                b"%d,0,%b,%b\n" % (start + index, repr(round(at, 6)).encode(), text)
                for index, (at, text) in enumerate(zip(times.tolist(), cells, strict=True))
            )
    sidecar = {"run_id": run_dir.name, "status": "completed", "format_version": 1, "schema_version": 1}
    sidecar |= {"created_at": 1.76e9, "ended_at": now, "updated_at": now, "tags": ["bench"], "notes": ""}
    sidecar |= {"hparams": {f"optim.h{index}": random.random() for index in range(40)}}
    sidecar |= {"summary": dict.fromkeys(names, 0.5)}
    (run_dir / "sidecar.json").write_text(json.dumps(sidecar))
    metric = {
        "last": 0.5,
        "min": 0.0,
        "max": 1.0,
        "min_step": 0,
        "max_step": 1,
        "count": rows,
        "non_finite": 0,
        "mean": 0.5,
    }
    (run_dir / "summary.json").write_text(json.dumps({"metrics": dict.fromkeys(names, metric)}))


def in_child(function, *arguments):
    """Calls a function in a fresh process.

    Returns what it returned, its processor seconds, and the memory it added in MiB.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, arguments))
    process.start()
    sender.close()  # So that a child that fails ends the waiting.
    try:
        return receiver.recv()
    finally:
        process.join()


def resident_kib(field):
    """Returns the memory of this process now ("VmRSS") or at its peak ("VmHWM").

    `ru_maxrss` begins with the parent's.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{field}:")[2].split()[0])


def _child(sender, function, arguments):
    before = resident_kib("VmRSS")
    start, wall = time.process_time(), time.perf_counter()
    returned = function(*arguments)
    taken = time.process_time() - start, time.perf_counter() - wall
    sender.send((returned, *taken, (resident_kib("VmHWM") - before) / 1024))


def read_series(run_dir):
    """Loads one metric of a large run; the best of three."""
    from destinations.runs import Run
    from destinations.runs.content.series import read_series

    run = Run.open(run_dir)
    best = 1e9
    for _ in range(3):
        start = time.process_time()
        count = len(run.series("train/m5"))
        best = min(best, time.process_time() - start)
    assert count == len(read_series(run_dir, "train/m9"))
    return best


def export(root, path):
    """Exports all metrics of all runs."""
    from destinations.runs import Run
    from destinations.runs.export import export_metrics

    return export_metrics((Run.open(folder) for folder in sorted(Path(root).iterdir())), path)


def main(runs: int = 100) -> bool:
    """Measures, and returns whether the budgets were kept."""
    table = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder / "large" / "run", 1_000_000)
        seconds, *_ = in_child(read_series, folder / "large" / "run")
        table.append(Row("series of 1,000,000 rows, 10 metrics", seconds, 1.0, unit="s"))
        _, _, wall, memory = in_child(export, folder / "large", folder / "large.csv")
        table.append(Row("export of one run of 1,000,000 rows: memory added", memory, 256, unit="MiB"))
        (folder / "large.csv").unlink()
        for index in range(runs):
            write_run(folder / "runs" / f"run{index:05d}", _ROWS)
        title = f"{runs:,} runs of {_ROWS:,} rows of {METRICS} metrics"
        for suffix in ("csv", "jsonl", "parquet"):
            points, seconds, wall, memory = in_child(export, folder / "runs", folder / f"metrics.{suffix}")
            table.append(
                Row(f"{title}: export to {suffix}, points per s of processor", points / seconds, unit="/s")
            )
            table.append(Row(f"{title}: export to {suffix}, points per s", points / wall, unit="/s"))
            table.append(Row(f"{title}: export to {suffix}, memory added", memory, 512, unit="MiB"))
            (folder / f"metrics.{suffix}").unlink()
    print_table("Reading runs back", table)
    return all(row.is_within_budget for row in table)


if __name__ == "__main__":
    sys.exit(0 if main(*map(int, sys.argv[1:])) else 1)
