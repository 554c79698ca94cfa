"""Measures compacting runs into Delta tables: `python -m tests.benchmarks compaction`.

`python -m tests.benchmarks.compaction 1` compacts 1,000 runs of 100,000 steps of ten metrics, 10^9 values; the default
is a hundredth of these runs. It needs 16 GB of disk, in `BENCHMARK_FOLDER` or the temporary folder, and six minutes of
processor time. Sorting the values needs another 90 bytes each in the temporary folder, and is skipped if they aren't
free.

At most ten runs differ; the others are hard links to their files. The values are random, so the output isn't smaller
for it, but the input is read from memory. Memory is the peak of a process that does nothing else.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.runs_read import METRICS, in_child, resident_kib, write_run
from tests.benchmarks.timing import Row, print_table

_RUNS = 1000
_STEPS = 100_000
_DIFFERENT = 10
_SORTED_BYTES = 90


def make_runs(root: Path, count: int) -> None:
    """Makes runs that have ended."""
    for number in range(count):
        folder = root / f"run{number:05d}"
        if number < _DIFFERENT:
            write_run(folder, _STEPS)
            continue
        folder.mkdir()
        like = root / f"run{number % _DIFFERENT:05d}"
        for name in ("metrics.csv", "summary.json"):
            os.link(like / name, folder / name)
        sidecar = json.loads((like / "sidecar.json").read_bytes()) | {"run_id": folder.name}
        (folder / "sidecar.json").write_text(json.dumps(sidecar))


def compact_all(root: Path, dest: str, *, optimize: bool = False) -> tuple[int, int, float]:
    """Compacts all runs; returns points, bytes and the peak of memory in MiB."""
    from destinations.runs import Run
    from destinations.runs.dataset import compact

    report = compact((Run.open(folder) for folder in sorted(root.iterdir())), dest, optimize=optimize)
    return report.points, report.size, resident_kib("VmHWM") / 1024


def optimize_all(root: Path, dest: str) -> tuple[int, int, float]:
    """Compacts again and sorts the values."""
    return compact_all(root, dest, optimize=True)


def query(dest: str) -> tuple[float, float]:
    """Returns the processor time of the best value of each run, and of one series."""
    from destinations.runs.dataset import open_dataset

    with open_dataset(dest) as dataset:
        start = time.process_time()
        dataset.sql(
            "SELECT run_id, min(value), max(step) FROM metrics WHERE metric = 'train/m3' GROUP BY run_id"
        )
        middle = time.process_time()
        (run,) = dataset.query(limit=1)
        assert len(run.series("train/m3")) == _STEPS
        return middle - start, time.process_time() - middle


def main(scale: float = 0.01) -> bool:
    """Measures, and returns whether the budgets were kept.

    Args:
        scale: how many of the 1,000 runs.
    """
    count = max(1, round(_RUNS * scale))
    table = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
        root, dest = Path(name, "runs"), str(Path(name, "data"))
        root.mkdir()
        make_runs(root, count)
        (points, size, peak), seconds, wall, _ = in_child(compact_all, root, dest)
        assert points == count * _STEPS * METRICS
        table += [
            Row("compact, a value: processor time", seconds / points * 1e6),
            Row("compact: time", wall, unit="s"),
            Row("compact: memory of the process", peak, 2048, unit="MiB"),
            Row("compact: bytes of a value", size / points, 10, unit="B"),
            Row("compact, nothing new: processor time", in_child(compact_all, root, dest)[1], unit="s"),
        ]
        can_sort = shutil.disk_usage(tempfile.gettempdir()).free > points * _SORTED_BYTES
        for suffix in ("", ", optimized") if can_sort else ("",):
            if suffix:
                (_, size, peak), seconds, wall, _ = in_child(optimize_all, root, dest)
                table += [
                    Row("optimize, a value: processor time", seconds / points * 1e6),
                    Row("optimize: time", wall, unit="s"),
                    Row("optimize: memory of the process", peak, unit="MiB"),
                ]
            (of_all, of_one), *_ = in_child(query, dest)
            table.append(Row(f"best value of each run by SQL{suffix}: processor time", of_all, unit="s"))
            table.append(Row(f"one series{suffix}: processor time", of_one, unit="s"))
    if not can_sort:
        print(
            f"values were not sorted, which needs {points * _SORTED_BYTES >> 30} GiB in {tempfile.gettempdir()}"
        )
    print_table(f"{count:,} runs of {_STEPS:,} steps of {METRICS} metrics as Delta tables", table)
    return all(row.is_within_budget for row in table)


if __name__ == "__main__":
    sys.exit(0 if main(*map(float, sys.argv[1:])) else 1)
