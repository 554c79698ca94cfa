"""Measures what ten floats a step take from a real training loop: `python -m tests.benchmarks.loop [PAIRS]`.

A loop of Python and small operations empties the caches between two calls; a loop of nothing but calls doesn't. Each
system trains the same network in a process of its own, in short turns with and without logging that are compared in
pairs, so that other load affects both. The figures are processor time: of the training thread, and of the other
threads and processes of the system, such as the one that drains the journal.

The second table has a call between two matrix products and the same call right after it, in turns with the bare
packing of the numbers into memory.
"""

import contextlib
import json
import mmap
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .metrics import SYSTEMS
from .timing import Row, print_table

PAIRS = 150
# As many rows as Lightning writes at once.
STEPS = 100
STEP_SECONDS = 0.0006
COLD_CALLS = 300
BUDGET_MICROSECONDS = 40.0
COLD_BUDGET = 1.5
PEERS = ("Lightning CSVLogger", "SummaryWriter", "W&B offline", "Trackio")
PLACES = ("between two products", "at once again")
VALUES = {f"train/m{index}": 0.123456789 * index for index in range(10)}
OURS = "Logger + RunDirectory"

Log = Callable[[dict[str, Any], int], object]


def main(pairs: int = PAIRS) -> bool:
    """Prints both tables; returns whether the budgets were kept."""
    found = {name: _in_child("loop", name, str(pairs)) for name in (OURS, *PEERS)}
    rows = []
    for name, result in found.items():
        if result is None:
            print(f"  {name:34} not installed")
            continue
        if name == OURS:
            rows += [
                Row(f"{name}, {what}", result[what])
                for what in ("in the training thread", "in other threads")
            ]
            rows.append(Row(f"{name}, in all", result["in all"], BUDGET_MICROSECONDS))
        else:
            # Some have no other thread, and nothing to compare there.
            rows += [
                Row(f"{name}, {what}", found[OURS][what], None, result[what])
                for what in ("in the training thread", "in all")
            ]
    step = found[OURS]["step"]
    print_table(f"Processor time of ten floats in each step of {step / 1000:.1f} ms", rows)
    table = []
    for name in (OURS, "json.dumps to a file", *PEERS):
        if (result := _in_child("cold", name)) is not None:
            for (own, bare), what in zip(
                zip(result["own"], result["bare"], strict=True), PLACES, strict=True
            ):
                is_promised = name == OURS and what == PLACES[0]
                budget = COLD_BUDGET * bare if is_promised else None
                table.append(Row(f"{name}, {what}", own, budget, bare))
    print_table("A call of ten floats, p50", table, "struct.pack_into")
    return all(row.is_within_budget for row in rows + table)


def _in_child(*arguments: str) -> dict[str, Any] | None:
    """Runs a part of this module in a process of its own; None where the system is not installed."""
    command = [sys.executable, "-m", "tests.benchmarks.loop", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr:
            return None
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _training() -> Callable[[], object]:
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    points, labels = torch.randn(16, 32), torch.randint(2, (16,))

    def update() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()

    def step() -> None:
        for _ in range(updates):
            update()

    updates = 200
    step()
    begin = time.thread_time()
    step()
    updates = max(1, round(updates * STEP_SECONDS / (time.thread_time() - begin)))
    return step


def _children_seconds() -> float:
    import psutil

    seconds = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


def measure_loop(name: str, pairs: int) -> None:
    """Trains with and without logging, in turns; prints JSON of microseconds a step."""
    step = _training()
    with tempfile.TemporaryDirectory() as folder:
        log, close = SYSTEMS[name](folder)
        number = 0

        def turn(*, logs: bool) -> float:
            nonlocal number
            begin = time.thread_time()
            for _ in range(STEPS):
                step()
                if logs:
                    log(VALUES, number)
                    number += 1
            return (time.thread_time() - begin) / STEPS

        for logs in (False, True) * 4:
            turn(logs=logs)
        others = time.process_time() - time.thread_time() + _children_seconds()
        first = number
        # Neighbours in time are compared; the order within a pair changes.
        found = [
            {logs: turn(logs=logs) for logs in ((False, True), (True, False))[pair % 2]}
            for pair in range(pairs)
        ]
        others = time.process_time() - time.thread_time() + _children_seconds() - others
        in_thread = statistics.median(one[True] - one[False] for one in found)
        beside = others / (number - first)
        close()
    seconds = {
        "in the training thread": in_thread,
        "in other threads": beside,
        "in all": in_thread + beside,
        "step": statistics.median(one[False] for one in found),
    }
    print(json.dumps({what: 1e6 * value for what, value in seconds.items()}))


def _json_lines(folder: str) -> tuple[Log, Callable[[], object]]:
    """A line of JSON a row."""
    file = (Path(folder) / "lines.jsonl").open("w")
    return lambda metrics, step: file.write(json.dumps({"step": step, **metrics}) + "\n"), file.close


def measure_cold(name: str) -> None:
    """Times calls between two matrix products, and again at once, in turns with the bare pack; prints JSON."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.randn(600, 600)
    pack_into, memory, offset = struct.Struct("<q10d").pack_into, mmap.mmap(-1, 1 << 20), 0

    def pack(metrics: dict[str, Any], step: int) -> None:
        nonlocal offset
        pack_into(memory, offset, step, *metrics.values())
        offset += 88

    with tempfile.TemporaryDirectory() as folder:
        log, close = COLD_SYSTEMS[name](folder)
        found: dict[Any, list[tuple[float, float]]] = {pack: [], log: []}
        for step in range(COLD_CALLS):
            # In turns: the machine is not as fast at all times.
            for call, calls in found.items():
                for _ in range(2):
                    torch.mm(matrix, matrix)
                begin = time.perf_counter()
                call(VALUES, 2 * step)
                middle = time.perf_counter()
                call(VALUES, 2 * step + 1)
                calls.append((middle - begin, time.perf_counter() - middle))
        close()
    bare, own = (
        [1e6 * statistics.median(column) for column in zip(*calls[20:], strict=True)]
        for calls in found.values()
    )
    print(json.dumps({"bare": bare, "own": own}))


COLD_SYSTEMS = {"json.dumps to a file": _json_lines, **SYSTEMS}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["loop", name, pairs]:
            measure_loop(name, int(pairs))
        case ["cold", name]:
            measure_cold(name)
        case arguments:
            sys.exit(0 if main(*map(int, arguments)) else 1)
