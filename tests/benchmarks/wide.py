"""Measures runs of many metrics: `python -m tests.benchmarks wide`.

It compares ten thousand metrics in each row with fifty, and logs a new name in each row.
"""

import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from destinations import RunDirectory
from destinations.runs import open_runs
from events import Run

from .timing import Row, print_table

VALUES = 20_000_000
WIDE, NARROW = 10_000, 50
NEW_NAMES = 20_000
DRAINS = 40
MOST_FOR_A_VALUE = 1.3
MOST_OF_VALUES = 3.0
SERIES_SECONDS = 0.1


def main() -> bool:
    """Measures and prints; returns whether the promises are kept."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="wide-") as folder:
        narrow = _each_value(Path(folder) / "narrow", NARROW)
        wide = _each_value(Path(folder) / "wide", WIDE)
        rows.append(Row(f"a value of {WIDE:,} metrics a row", wide, narrow * MOST_FOR_A_VALUE, narrow))
        rows += _new_names(Path(folder) / "names")
    rows.append(
        Row("memory of the process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, unit="MiB")
    )
    print_table("runs of very many metrics", rows, peer=f"{NARROW} metrics")
    return all(row.is_within_budget for row in rows)


def _each_value(folder: Path, metrics: int) -> float:
    """Returns the processor time of a value in microseconds, calls and drain."""
    names = [f"layer{number}/norm" for number in range(metrics)]
    values = np.random.default_rng(0).normal(size=(10, metrics)).tolist()
    rows = VALUES // metrics
    started = time.process_time()
    with Run([RunDirectory(folder)], run_name="wide") as run:
        directory = run.logger.destinations[0]
        for step in range(rows):
            run.log_metrics(dict(zip(names, values[step % 10], strict=True)), step)
            if step % (rows // DRAINS) == 0:
                directory.flush()
    return (time.process_time() - started) / VALUES * 1e6


def _new_names(folder: Path) -> list[Row]:
    values = np.random.default_rng(0).normal(size=(NEW_NAMES, 2)).tolist()
    nbytes = 0
    started = time.process_time()
    with Run([RunDirectory(folder)], run_name="names") as run:
        for step, (loss, one) in enumerate(values):
            run.log_metrics({"loss": loss, f"loss/{step}": one}, step)
            # As lines of an export: name, step, time and value of each.
            nbytes += sum(
                len(f"{name},{step},1700000000.000001,{value!r}\n")
                for name, value in (("loss", loss), (f"loss/{step}", one))
            )
    taken = time.process_time() - started
    on_disk = sum(
        path.stat().st_size for pattern in ("metrics.csv", "parts/*/*") for path in folder.glob(pattern)
    )
    with open_runs(folder, cache=folder.parent / "cache") as runs:
        (run_read,) = runs.query()
        found = []
        for name in ("loss", f"loss/{NEW_NAMES // 2}"):
            at = time.perf_counter()
            assert len(run_read.series(name)) == (NEW_NAMES if name == "loss" else 1)
            found.append(time.perf_counter() - at)
        assert len(run_read.metric_names()) == NEW_NAMES + 1
    return [
        Row(f"{NEW_NAMES:,} rows with a new name each: processor time", taken, unit="s"),
        Row("  their files", on_disk / (1 << 20), nbytes * MOST_OF_VALUES / (1 << 20), unit="MiB"),
        Row("  the series that all have", found[0], unit="s"),
        Row("  the series that one has", found[1], SERIES_SECONDS, unit="s"),
    ]


if __name__ == "__main__":
    main()
