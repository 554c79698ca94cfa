"""Measures sending a run of 100,000 rows of ten metrics to TensorBoard files and to a run folder.

`python -m tests.benchmarks replay`. The time is from the call of `send` to its return, with everything in the files;
reading the rows alone stands beside it.
"""

import random
import tempfile
import time
from pathlib import Path

from .timing import Row, print_table

__all__ = ["main"]

ROWS = 100_000
METRICS = 10


def write_run(folder: Path) -> None:
    """Writes the run that is sent."""
    from destinations import RunDirectory
    from events import Run

    source = random.Random(0)
    values = [{f"train/m{index}": source.random() for index in range(METRICS)} for _ in range(64)]
    with Run(loggers=[RunDirectory(folder)], run_name="bench") as run:
        for step in range(ROWS):
            run.log_metrics(values[step % 64], step=step)


def seconds_to_send(run_dir: Path, target: str, cache: Path) -> float:
    """Returns how long a first sending takes."""
    from destinations.runs import Run
    from destinations.runs.send import send

    run = Run.open(run_dir)
    start = time.perf_counter()
    report = send(run, target, cache=cache)
    taken = time.perf_counter() - start
    assert (report.rows, report.failure_count) == (ROWS, 0), report
    return taken


def main() -> bool:
    """Measures, and prints a table."""
    from destinations.run_directory import read_rows

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder / "bench")
        start = time.perf_counter()
        assert len(read_rows(folder / "bench")) == ROWS
        reading = time.perf_counter() - start
        rows = [Row(f"read {ROWS:,} rows of {METRICS} metrics", reading, unit="s")]
        for kind in ("tensorboard", "run"):
            taken = seconds_to_send(folder / "bench", f"{kind}:{folder / kind}", folder / "cache")
            again = seconds_again(folder / "bench", f"{kind}:{folder / kind}", folder / "cache")
            rows.append(Row(f"send them to {kind}: ({ROWS / taken:,.0f} rows a second)", taken, unit="s"))
            rows.append(Row(f"send them to {kind}: again, nothing is new", again, unit="s"))
    print_table("Replay", rows)
    return all(row.is_within_budget for row in rows)


def seconds_again(run_dir: Path, target: str, cache: Path) -> float:
    """Returns how long a sending takes that finds nothing to send."""
    from destinations.runs import Run
    from destinations.runs.send import send

    start = time.perf_counter()
    report = send(Run.open(run_dir), target, cache=cache)
    taken = time.perf_counter() - start
    assert report.rows == 0
    return taken
