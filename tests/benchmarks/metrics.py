"""Measures logging metrics: `python -m tests.benchmarks.metrics`.

The project and the installed peers run side by side; ratios mean more than microseconds. Each system logs the same
rows in a process of its own, three times; the run with the smallest median counts.
"""

import importlib
import importlib.util
import json
import logging
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.peers import folder_of

from .timing import Row, print_table

ROWS = 5000
NAMES = [f"train/m{index}" for index in range(10)]
ROUNDS = 3


def main() -> None:
    """Measures and prints."""
    print_calls()
    print_tensors()
    print_busy_thread()
    print_drain()
    print_step_loop()
    print_kills()


# The calling thread.


def ours(
    folder: str, **options: Any
) -> tuple[Callable[[dict[str, Any], int], None], Callable[[], None], Any]:
    """Returns Logger + RunDirectory as two calls."""
    from destinations import RunDirectory
    from events import Engine, Logger, State

    destination = RunDirectory(Path(folder) / "run", **options)
    state = State("bench")
    logger = Logger(state, [destination], raise_errors=True)
    engine = Engine(state, logger)
    engine.run_event("init")
    engine.run_event("fit_start")
    return logger.log_metrics, engine.close, destination


def run_directory(folder: str) -> tuple[Any, Any]:
    """Logger and RunDirectory as users have them."""
    return ours(folder)[:2]


def run_directory_draining(folder: str) -> tuple[Any, Any]:
    """The same, with the writer thread at work all the time."""
    return ours(folder, flush_seconds=0.001)[:2]


def logger_alone(folder: str) -> tuple[Any, Any]:
    """Logger in front of a destination that does nothing."""
    from destinations import LoggerDestination
    from events import Logger, State

    class Nothing(LoggerDestination):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            """Takes nothing."""

    return Logger(State("bench"), [Nothing()]).log_metrics, lambda: None


def lightning_csv(folder: str) -> tuple[Any, Any]:
    """Lightning's CSVLogger, flushed every 100 rows."""
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder, flush_logs_every_n_steps=100)
    return logger.log_metrics, logger.save


def summary_writer(folder: str) -> tuple[Any, Any]:
    """Torch's writer of TensorBoard files."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def torchrl_csv(folder: str) -> tuple[Any, Any]:
    """Torchrl's CSVLogger."""
    from torchrl.record.loggers.csv import CSVLogger

    logger = CSVLogger("bench", folder)
    return logger.log_metrics, lambda: None


def wandb_offline(folder: str) -> tuple[Any, Any]:
    """W&B without a server."""
    import wandb

    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(mode="offline", dir=folder, project="bench", settings=settings)
    return lambda metrics, step: run.log(metrics, step=step), run.finish


def trackio_local(folder: str) -> tuple[Any, Any]:
    """Trackio without a server."""
    os.environ["TRACKIO_DIR"] = folder
    import trackio

    trackio.init(project="bench")
    return lambda metrics, _: trackio.log(metrics), trackio.finish


def stable_pretraining(folder: str) -> tuple[Any, Any]:
    """stable-pretraining's RegistryLogger, flushed every 50 rows.

    Its packages are passed by, which import much more.
    """
    root = folder_of("stable_pretraining")
    if root is None:
        raise ModuleNotFoundError("stable_pretraining")
    for part in ("", ".registry", ".utils"):
        package = types.ModuleType(f"stable_pretraining{part}")
        package.__path__ = [root + part.replace(".", "/")]
        sys.modules[package.__name__] = package
    if importlib.util.find_spec("loguru") is None:
        loguru: Any = types.ModuleType("loguru")
        loguru.logger = logging.getLogger("loguru")
        sys.modules["loguru"] = loguru
    logger = importlib.import_module("stable_pretraining.registry.logger").RegistryLogger(
        folder, "bench", flush_logs_every_n_steps=50
    )
    return logger.log_metrics, logger.save


SYSTEMS: dict[str, Callable[[str], tuple[Any, Any]]] = {
    "Logger + RunDirectory": run_directory,
    "Logger + RunDirectory, draining": run_directory_draining,
    "Logger + nothing": logger_alone,
    "Lightning CSVLogger": lightning_csv,
    "SummaryWriter": summary_writer,
    "torchrl CSVLogger": torchrl_csv,
    "W&B offline": wandb_offline,
    "Trackio": trackio_local,
    "stable-pretraining": stable_pretraining,
}


def timed(log: Callable[[dict[str, Any], int], None], rows: list[dict[str, Any]]) -> list[int]:
    """Returns what each call took, in nanoseconds, the clock's own cost included."""
    clock, taken = time.perf_counter_ns, []
    for step, row in enumerate(rows):
        start = clock()
        log(row, step)
        taken.append(clock() - start)
    return taken


def measure_calls(name: str, kind: str) -> None:
    """Measures one system, in this process; prints JSON."""
    rows: list[dict[str, Any]] = [
        {key: 0.1 * step + place for place, key in enumerate(NAMES)} for step in range(ROWS)
    ]
    if kind == "tensors":
        import torch

        rows = [{key: torch.tensor(value) for key, value in row.items()} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        log, close = SYSTEMS[name](folder)
        timed(log, rows[:500])
        taken = sorted(timed(log, rows))
        close()
    result = {
        "p50": taken[len(taken) // 2],
        "p99": taken[int(len(taken) * 0.99)],
        "mean": statistics.fmean(taken),
    }
    print(json.dumps({key: value / 1000 for key, value in result.items()}))


def in_child(*arguments: str) -> dict[str, Any] | None:
    """Runs a part of this module in a process of its own; None where the system is not installed."""
    command = [sys.executable, "-m", "tests.benchmarks.metrics", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr:
            return None
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def best_of(name: str, kind: str) -> dict[str, Any] | None:
    """Returns the round with the least median."""
    rounds = [in_child("calls", name, kind) for _ in range(ROUNDS)]
    found = [result for result in rounds if result is not None]
    return min(found, key=lambda result: result["p50"]) if found else None


def print_calls() -> None:
    """Ten floats per call."""
    ours, rows = {}, []
    for name in SYSTEMS:
        result = best_of(name, "floats")
        if result is None:
            print(f"  {name:34} not installed")
            continue
        ours = ours or result
        rows += [
            # A peer's own figure is in the last column, beside ours.
            Row(f"{name}, {what}", result[what])
            if name.startswith("Logger")
            else Row(f"{name}, {what}", ours[what], None, result[what])
            for what in ("p50", "p99", "mean")
        ]
    print_table(f"Ten floats per call, {ROWS:,} calls, best of {ROUNDS}", rows)


def print_tensors() -> None:
    """Ten CPU tensors per call."""
    result = best_of("Logger + RunDirectory", "tensors")
    if result is not None:
        rows = [Row(f"Logger + RunDirectory, {what}", result[what]) for what in ("p50", "p99", "mean")]
        print_table("Ten CPU tensors per call", rows)


def measure_busy_thread(journal: str) -> None:
    """Logs rows of ten floats beside a thread that runs Python without a pause; prints JSON."""
    is_over = False

    def spin() -> None:
        count = 0
        while not is_over:
            count += 1

    rows: list[dict[str, Any]] = [
        {key: 0.1 * step + place for place, key in enumerate(NAMES)} for step in range(ROWS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        log, close, _ = ours(folder, journal=journal)
        timed(log, rows[:500])
        thread = threading.Thread(target=spin, daemon=True)
        thread.start()
        taken = sorted(timed(log, rows))
        is_over = True
        thread.join()
        close()
    result = {
        "p50": taken[len(taken) // 2],
        "p99": taken[int(len(taken) * 0.99)],
        "mean": statistics.fmean(taken),
        "max": taken[-1],
    }
    print(json.dumps({key: value / 1000 for key, value in result.items()}))


def print_busy_thread() -> None:
    """Prints why the journal is mapped: a system call gives up the interpreter lock to a busy thread."""
    rows = []
    for journal in ("mapped", "appended"):
        rounds = [in_child("busy", journal) for _ in range(ROUNDS)]
        result = min((one for one in rounds if one is not None), key=lambda one: one["mean"])
        rows += [Row(f"journal {journal}, {what}", result[what]) for what in ("p50", "p99", "mean", "max")]
    print_table(f"Ten floats per call beside a busy Python thread, {ROWS:,} calls, best of {ROUNDS}", rows)


# Draining.


def resident_mib() -> tuple[float, float]:
    """Returns the resident memory of this process, in MiB: its own, and pages of files that it has mapped."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    page = resource.getpagesize() / (1 << 20)
    return (resident - of_files) * page, of_files * page


def measure_drain(count: int, keys: int) -> None:
    """Logs and drains rows; prints JSON."""
    names = [f"train/m{index}" for index in range(keys)]
    source = random.Random(0)
    values = [[source.random() for _ in names] for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        log, close, destination = ours(folder)
        log(dict(zip(names, values[0], strict=True)), 0)
        destination.flush()
        before = resident_mib()
        seen = [before]
        start = time.perf_counter()
        for step in range(1, count):
            log(dict(zip(names, values[step % 16], strict=True)), step)
            if step % (count // 20) == 0:
                seen.append(resident_mib())
        logged = time.perf_counter()
        writer = destination._writer
        while writer._drain.rows < count:
            destination.flush()
            seen.append(resident_mib())
        drained = time.perf_counter()
        close()
        size = (Path(folder) / "run" / "metrics.csv").stat().st_size
    print(
        json.dumps(
            {
                "log_seconds": logged - start,
                "rows_per_second": count / (drained - start),
                "own_mib": max(own for own, _ in seen) - before[0],
                "mapped_mib": max(mapped for _, mapped in seen) - before[1],
                "csv_mib": size / (1 << 20),
            }
        )
    )


def print_drain() -> None:
    """Many rows, and wide rows."""
    for count, keys in ((1_000_000, 10), (100_000, 1000)):
        result = in_child("drain", str(count), str(keys))
        if result is not None:
            print(f"{count:,} rows of {keys:,} metrics, logged as fast as can be")
            print(
                f"  logged in {result['log_seconds']:.1f} s, in the CSV at {result['rows_per_second']:,.0f} rows/s from the first "
                f"call on, memory +{result['own_mib']:.0f} MiB and +{result['mapped_mib']:.0f} MiB of mapped files, "
                f"CSV {result['csv_mib']:,.0f} MiB"
            )


# A step loop.


def measure_steps(kind: str) -> None:
    """Runs steps of a millisecond with and without logging, in turns; prints JSON."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.rand(200, 200)

    def python_step() -> None:
        total = 0
        for number in range(python_work):
            total += number

    def torch_step() -> None:
        for _ in range(torch_work):
            torch.mm(matrix, matrix)

    python_work, torch_work = 20_000, 4
    step = python_step if kind == "python" else torch_step
    start = time.perf_counter()
    for _ in range(200):
        step()
    scale = 0.001 / ((time.perf_counter() - start) / 200)
    python_work, torch_work = max(1, round(python_work * scale)), max(1, round(torch_work * scale))

    with tempfile.TemporaryDirectory() as folder:
        log, close, _ = ours(folder)
        row = {name: random.random() for name in NAMES}
        taken: dict[bool, list[float]] = {True: [], False: []}
        busy: dict[bool, list[float]] = {True: [], False: []}
        number = 0
        for turn in range(24):
            logs = turn % 2 == 1
            begin, begin_busy = time.perf_counter(), time.process_time()
            for _ in range(1000):
                step()
                if logs:
                    log(row, number)
                    number += 1
            taken[logs].append((time.perf_counter() - begin) / 1000)
            busy[logs].append(time.process_time() - begin_busy)
        close()
    # Compares neighbours in time, because the machine's speed varies.
    ratios = [logged / plain for plain, logged in zip(taken[False], taken[True], strict=True)]
    print(
        json.dumps(
            {
                "step_ms": 1000 * statistics.median(taken[False]),
                "ratio": statistics.median(ratios),
                "mean_ratio": sum(taken[True]) / sum(taken[False]),
                # All threads together, because other load disturbs the sum less.
                "processor_ratio": statistics.median(
                    logged / plain for plain, logged in zip(busy[False], busy[True], strict=True)
                ),
            }
        )
    )


def print_step_loop() -> None:
    """Prints what logging adds to a step of a loop."""
    for kind in ("python", "torch"):
        result = in_child("steps", kind)
        if result is not None:
            print(
                f"Steps of {result['step_ms']:.2f} ms ({kind}), a row of ten floats in each, drained once a second\n"
                f"  with logging / without: median of 12 pairs {result['ratio']:.4f}, of all {result['mean_ratio']:.4f}, "
                f"processor time of all threads {result['processor_ratio']:.4f}"
            )


# SIGKILL.


def log_until_killed(name: str, folder: str) -> None:
    """Logs 500 rows a second, and prints after each that its call has returned."""
    log, _ = SYSTEMS[name](folder)
    step = 0
    while True:
        log({"a": 0.5 * step, "b": 1.0 * step}, step)
        os.write(1, b"%d\n" % step)
        step += 1
        time.sleep(0.002)


def rows_left(name: str, folder: Path) -> int | None:
    """Counts the rows on disk."""
    if name.startswith("Logger"):
        from destinations.run_directory import read_rows

        return len(read_rows(folder / "run"))
    if name in {"Lightning CSVLogger", "stable-pretraining"}:
        found = list(folder.rglob("metrics.csv"))
        return max(0, len(found[0].read_text().splitlines()) - 1) if found else 0
    if name == "torchrl CSVLogger":
        found = list(folder.rglob("a.csv"))
        return len(found[0].read_text().splitlines()) if found else 0
    if name == "SummaryWriter":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        return len(events.Scalars("a")) if "a" in events.Tags()["scalars"] else 0
    return None


def print_kills() -> None:
    """Rows lost to SIGKILL."""
    print("Rows lost to SIGKILL after 1,730 rows at 500 a second")
    for name in (
        "Logger + RunDirectory",
        "Lightning CSVLogger",
        "SummaryWriter",
        "torchrl CSVLogger",
        "stable-pretraining",
    ):
        folder = Path(tempfile.mkdtemp())
        command = [sys.executable, "-m", "tests.benchmarks.metrics", "kill", name, str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        last = -1
        while last < 1730 and (line := process.stdout.readline()):
            last = int(line)
        process.send_signal(signal.SIGKILL)
        rest = [line for line in process.stdout.read().split(b"\n")[:-1] if line]
        last = int(rest[-1]) if rest else last
        process.wait()
        left = rows_left(name, folder) if last >= 0 else None
        shutil.rmtree(folder)
        if left is None:
            print(f"  {name:34} not installed")
        else:
            print(f"  {name:34} {max(0, last + 1 - left)} of {last + 1:,}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["calls", name, kind]:
            measure_calls(name, kind)
        case ["busy", journal]:
            measure_busy_thread(journal)
        case ["drain", count, keys]:
            measure_drain(int(count), int(keys))
        case ["steps", kind]:
            measure_steps(kind)
        case ["kill", name, folder]:
            log_until_killed(name, folder)
        case _:
            main()
