"""Measures draining the journal: `python -m tests.benchmarks.drain ROWS METRICS`.

The figure is the processor time of the draining thread alone, with an otherwise idle process; the best of three runs.
"""

import random
import sys
import tempfile
import time
from pathlib import Path


def seconds_to_drain(rows: int, metrics: int) -> float:
    """Returns the processor seconds of one pass over a journal."""
    from destinations.run_directory.drain import JournalDrain
    from destinations.run_directory.journal import Journal
    from destinations.run_directory.metrics_csv import MetricsCsv
    from events import State

    source = random.Random(0)
    values = [{f"train/m{index}": source.random() for index in range(metrics)} for _ in range(16)]
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        folder = run_dir / "journal" / "rank0"
        folder.mkdir(parents=True)
        journal = Journal(folder, State("bench"))
        for step in range(rows):
            journal.append(values[step % 16], step)
        drain = JournalDrain(run_dir, folder, MetricsCsv(run_dir / "metrics.csv"), journal)
        start = time.thread_time()
        drained = drain.run()
        taken = time.thread_time() - start
        assert drained == rows
        journal.close()
    return taken


if __name__ == "__main__":
    count, width = int(sys.argv[1]), int(sys.argv[2])
    best = min(seconds_to_drain(count, width) for _ in range(3))
    print(
        f"{count:,} rows of {width:,} metrics: {1e6 * best / count:.2f} µs of processor time a row, {count / best:,.0f} rows a second"
    )
