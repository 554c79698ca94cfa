"""Measures a dataset of many short runs: `python -m tests.benchmarks archive`.

`python -m tests.benchmarks.archive 1` has 100,000 runs of twenty hyperparameters and ten values of ten metrics; the
default is a hundredth of them. Fifty are folders that are compacted. The rows of the others are copies under other
ids, in the parts and shelves where `compact` would put them: it reads a folder in milliseconds, and the folders are
not what is measured. They are in `BENCHMARK_FOLDER` or the temporary folder.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.timing import Row, print_table

_RUNS = 100_000
_KINDS = 50
_GROUPS = 16
_METRICS = 10
_ROWS = 10
_CHUNK = 4096
_BEST = """
SELECT "hparams.width" AS width, arg_min(run_id, "min.m0") AS run, min("min.m0") AS best
FROM runs GROUP BY width ORDER BY width
"""
_BEST_BY_ROWS = """
SELECT number AS width, arg_min(run_id, value), min(value)
FROM metrics JOIN hparams USING (run_id) WHERE metric = 'm0' AND name = 'width' GROUP BY width ORDER BY width
"""


def make_runs(root: Path) -> None:
    """Makes runs that have ended."""
    draw = random.Random(0)  # any numbers
    names = ",".join(f"m{metric}" for metric in range(_METRICS))
    for number in range(_KINDS):
        folder = root / f"run{number:06d}"
        folder.mkdir(parents=True)
        rows = (
            ",".join(map(str, (step, 1.7e9 + step, *(draw.random() for _ in range(_METRICS)))))
            for step in range(_ROWS)
        )
        (folder / "metrics.csv").write_text("\n".join([f"step,time,{names}", *rows]) + "\n")
        hparams = {f"h{index}": draw.random() for index in range(19)} | {"width": 1 << number % _GROUPS}
        sidecar = {"run_id": folder.name, "status": "completed", "hparams": hparams, "summary": {}}
        (folder / "sidecar.json").write_text(json.dumps(sidecar | {"format_version": 1, "created_at": 1.7e9}))


def multiply(dest: Path, count: int) -> None:
    """Adds copies of the runs of a dataset under other ids, until it has so many."""
    from destinations.runs.dataset.tables import PARTITIONS, Location, Placement
    from destinations.runs.dataset.writing import DatasetWriter

    writer = DatasetWriter(Location.of(dest, {}))

    def add() -> None:
        tables = {name: writer.snapshot.arrow(name).to_table() for name in PARTITIONS}
        known = {row["run_id"]: row for row in tables["runs"].to_pylist()}
        kinds, size = sorted(known), max(row["size"] for row in known.values())
        places = Placement(known.values(), size * count)
        for start in range(len(known), count, _CHUNK):
            numbers = range(start, min(start + _CHUNK, count))
            placed = [places.place(size) for _ in numbers]
            for name, table in tables.items():
                writer.write(name, _copies(table, kinds, numbers, placed, PARTITIONS[name]))

    writer.repeat(add)


def _copies(
    table: Any, kinds: list[str], numbers: range, placed: list[tuple[int, int]], partition: str
) -> Any:
    """Returns the rows of runs with these numbers, each as one of the kinds has them."""
    ids = np.asarray(table.column("run_id"))
    of_kind = [np.flatnonzero(ids == kind) for kind in kinds]
    chosen = [of_kind[number % len(kinds)] for number in numbers]
    runs = np.repeat(np.arange(len(numbers)), list(map(len, chosen)))
    own = {"run_id": [f"run{number:06d}" for number in numbers]}
    own |= {name: [one[index] for one in placed] for index, name in enumerate(("part", "shelf"))}
    found = table.take(pa.array(np.concatenate(chosen)))
    for name, values in own.items():
        if name in table.schema.names:
            place = table.schema.get_field_index(name)
            column = pa.array(values, table.schema.field(name).type).take(pa.array(runs))
            found = found.set_column(place, table.schema.field(name), column)
    order = [(name, "ascending") for name in (partition, "metric") if name in table.schema.names]
    return found.sort_by(order)


def main(scale: float = 0.01) -> bool:
    """Measures, and returns whether the budgets were kept.

    Args:
        scale: how many of the 100,000 runs.
    """
    from destinations.runs import Run
    from destinations.runs.dataset import compact, open_dataset

    count = max(_KINDS, round(_RUNS * scale))
    rows: list[Row] = []

    def timed(name: str, act: object, budget: float | None = None) -> object:
        start, used = time.perf_counter(), time.process_time()
        result = act()
        rows.append(Row(f"{name}: time", time.perf_counter() - start, budget, unit="s"))
        rows.append(Row(f"{name}: processor time", time.process_time() - used, unit="s"))
        return result

    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
        root, dest = Path(name, "runs"), Path(name, "data")
        make_runs(root)
        every = [Run.open(folder) for folder in sorted(root.iterdir())]
        timed(f"compact the first {_KINDS}", lambda: compact(every, dest))
        multiply(dest, count)
        timed("optimize", lambda: compact([], dest, optimize=True))
        for what, query in (("best of each group", _BEST), ("the same from all values", _BEST_BY_ROWS)):
            with timed(f"open for {what}", lambda: open_dataset(dest)) as dataset:
                budget = 2.0 if query is _BEST else None
                found = timed(what, lambda opened=dataset, text=query: opened.sql(text), budget)
                assert len(found.rows) == _GROUPS
        changed = root / f"run{_KINDS // 2:06d}"
        with (changed / "metrics.csv").open("a") as file:
            file.write((changed / "metrics.csv").read_text().splitlines()[-1] + "\n")
        report = timed("one changed run", lambda: compact([Run.open(changed)], dest), 5.0)
        assert (report.changed, report.runs) == (1, count)
        assert report.points == count * _METRICS * _ROWS + _METRICS
        with open_dataset(dest) as dataset:
            files = {table: len(dataset.files(table)) for table in dataset.versions}
    print(files)
    print_table(f"{count:,} runs of {_ROWS * _METRICS} values in a dataset", rows)
    return all(row.is_within_budget for row in rows)


if __name__ == "__main__":
    sys.exit(0 if main(*map(float, sys.argv[1:])) else 1)
