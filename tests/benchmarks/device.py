"""Measures logging and the ledger in a loop on a GPU: `python -m tests.benchmarks.device`.

Without a CUDA device it says so and measures nothing. A small transformer trains in bf16 in short turns, each with one
way to log ten numbers that are on the device; the turns alternate, so that clock speeds and other load affect all of
them. In the first size the host, which queues kernels, is slower; in the second the device is.
`tests.benchmarks.checkpoints` measures checkpoints there.
"""

import contextlib
import csv
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch

from destinations import RunDirectory
from events import Run, Trainer

from .timing import Row, print_table, sample_microseconds

__all__ = ["main"]

QUEUED_MILLISECONDS = 50
CALLS, METRICS = 10, 10
TURNS, STEPS = 20, 10
SIZES = {"the host is slower": (2, 256, 2), "the device is slower": (4, 1024, 128)}
BUDGET_MICROSECONDS = 200.0
BUDGET_PERCENT = 1.0
BUDGET_CALL, BUDGET_STEP = 45.0, 60.0
LEDGER_BATCHES, LEDGER_FITS = 200, 4


def main() -> bool:
    """Prints the tables; returns whether the budgets were kept."""
    if not torch.cuda.is_available():
        print("There is no CUDA device: nothing was measured.")
        return True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = _calls()
    print_table(f"Ten CUDA scalars with {QUEUED_MILLISECONDS} ms of kernels queued", rows, ".item()")
    rows += (table := _short_steps())
    print_table("Ten CUDA scalars in a step of a millisecond, which the host bounds", table, ".item()")
    for name, size in SIZES.items():
        rows += (table := _steps(*size))
        print_table(f"Ten CUDA scalars in each step, {name}", table, "peer")
    rows += (table := _ledger())
    print_table("Trainer with TimeLedger, and without", table, "without")
    return all(row.is_within_budget for row in rows)


def _cycles() -> int:
    """Returns for how many cycles a kernel spins in the time that is queued."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return int(100_000_000 * QUEUED_MILLISECONDS / start.elapsed_time(end))


def _calls():
    """Returns what a call takes while the device is busy, beside a peer that converts each number.

    Each turn begins with 50 ms in which the thread only waits, so all code is cold. The least that a call can take is the
    time in which torch itself queues a kernel, a copy and an event then.
    """
    cycles = _cycles()
    values = {f"m{index}": torch.tensor(float(index), device="cuda") for index in range(METRICS)}
    sources = list(values.values())
    staging, on_host = torch.zeros(METRICS, device="cuda"), torch.zeros(METRICS, pin_memory=True)
    targets, event, steps = staging.unbind(), torch.cuda.Event(), itertools.count()

    def bare():
        torch._foreach_copy_(targets, sources)
        on_host.copy_(staging, non_blocking=True)
        event.record()

    with tempfile.TemporaryDirectory() as folder, Run(RunDirectory(Path(folder) / "run")) as run:

        def log():
            run.log_metrics(values, next(steps))

        def measured(call, turns=TURNS, calls=CALLS):
            call()
            run.logger.flush()
            taken = []
            for _ in range(turns):
                torch.cuda.synchronize()
                torch.cuda._sleep(cycles)
                taken.append([])
                for _ in range(calls):
                    begin = time.perf_counter()
                    call()
                    taken[-1].append((time.perf_counter() - begin) * 1e6)
            torch.cuda.synchronize()
            run.logger.flush()
            first = statistics.median(turn[0] for turn in taken)
            return first, statistics.median(
                itertools.chain(*(turn[1:] for turn in taken))
            ) if calls > 1 else first

        (first, later), (bare_first, bare_later) = measured(log), measured(bare)
        item, _ = measured(lambda: [value.item() for value in sources], turns=5, calls=1)
        idle = sample_microseconds(log, count=2000)
    return [
        Row("log_metrics, p50", later, BUDGET_MICROSECONDS, item),
        Row("log_metrics, p50, after 50 ms of waiting", first, None, item),
        Row("kernel, copy and event alone, p50", bare_later, None, item),
        Row("kernel, copy and event alone, after 50 ms", bare_first, None, item),
        Row("log_metrics, nothing queued, p50", idle.p50),
        Row("log_metrics, nothing queued, p99", idle.p99),
    ]


def _short_steps(turns=30, steps=60):
    """Returns what a call takes, and how much longer it makes a small step, in turns of one way to log each."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(32, 64, device="cuda")

    def turn(log):
        torch.cuda.synchronize()
        in_calls, begin = 0.0, time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(data) - data).square().mean()
            loss.backward()
            optimizer.step()
            loss = loss.detach()
            values = {f"m{index}": loss for index in range(METRICS)}
            called = time.perf_counter()
            log(values)
            in_calls += time.perf_counter() - called
        torch.cuda.synchronize()
        return 1e6 * in_calls / steps, 1e6 * (time.perf_counter() - begin) / steps

    with tempfile.TemporaryDirectory() as folder, Run(RunDirectory(Path(folder) / "run")) as run:
        ways = {
            "nothing": lambda _: None,
            "log_metrics": run.log_metrics,
            "log_metrics of ten floats": lambda values: run.log_metrics(dict.fromkeys(values, 0.5)),
            "torch.stack and tolist": lambda values: torch.stack([*values.values()]).tolist(),
            ".item()": lambda values: [value.item() for value in values.values()],
        }
        taken = {name: [] for name in ways}
        for number in range(turns + 3):
            for name, log in ways.items():
                run.batch_start()
                run.batch_end()
                taken[name] += [turn(log)] if number > 2 else []
    calls = {name: statistics.median(call for call, _ in found) for name, found in taken.items()}
    longer = {
        name: statistics.median(
            one - base for (_, one), (_, base) in zip(found, taken["nothing"], strict=True)
        )
        for name, found in taken.items()
    }
    rows = [Row("a step that logs nothing", statistics.median(step for _, step in taken["nothing"]))]
    for name in list(ways)[1:-1]:
        is_ours = name == "log_metrics"
        rows.append(Row(f"{name}, the call", calls[name], BUDGET_CALL if is_ours else None, calls[".item()"]))
        budget = min(BUDGET_STEP, longer[".item()"]) if is_ours else None
        rows.append(Row(f"{name}, the step is longer by", longer[name], budget, longer[".item()"]))
    return rows


class _Loop:
    """A transformer, its optimizer and a batch."""

    def __init__(self, layers, width, batch):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
        self.model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.data = torch.randn(batch, 256, width, device="cuda")
        self.step = 0

    def train(self, log):
        """Trains a step, and logs ten of its numbers."""
        with torch.autocast("cuda", torch.bfloat16):
            out = self.model(self.data)
            loss = torch.nn.functional.mse_loss(out, self.data)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if log is not None:
            loss = loss.detach()
            log({f"train/m{index}": loss if index % 2 else norm for index in range(METRICS)}, self.step)
        self.step += 1


@contextlib.contextmanager
def _ways(folder):
    """Returns the ways to log by name: none, ours, and one for each installed peer."""
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(RunDirectory(folder / "ours")))
        file = csv.writer(stack.enter_context((folder / "items.csv").open("w", encoding="utf-8")))
        ways = {
            "nothing": None,
            "ours": run.log_metrics,
            ".item() and csv": lambda values, step: file.writerow(
                [step, *(one.item() for one in values.values())]
            ),
        }
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"))
            stack.callback(writer.close)

            def add(values, step):
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

            ways["SummaryWriter"] = add
        yield ways


def _steps(layers, width, batch):
    """Returns how much longer steps take in each way than in turns without, in per cent.

    Each turn has one beside it that logs nothing, before it and after it by turns: the device is warmer, and so slower,
    in the second of two. A control logs nothing in both.
    """
    loop = _Loop(layers, width, batch)

    def seconds(log):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            loop.train(log)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / STEPS

    with tempfile.TemporaryDirectory() as folder, _ways(Path(folder)) as ways:
        taken, bare = {name: [] for name in ways}, []
        for turn in range(TURNS + 2):
            for name, log in ways.items():
                first, second = (seconds(one) for one in ((log, None) if turn % 2 else (None, log)))
                one, base = (first, second) if turn % 2 else (second, first)
                if turn > 1:
                    taken[name].append(one / base - 1)
                    bare.append(base)
    step = statistics.median(bare)
    # The mean of the two orders, each by its median.
    more = {
        name: 50 * (statistics.median(found[::2]) + statistics.median(found[1::2]))
        for name, found in taken.items()
    }
    rows = [
        Row("a step that logs nothing", step * 1e3, unit="ms"),
        Row("longer by, the control", more["nothing"], unit="%"),
    ]
    peers = [name for name in ways if name not in {"nothing", "ours"}]
    for number, name in enumerate(peers):
        budget = BUDGET_PERCENT if number == 0 and width > 256 else None
        rows.append(Row(f"longer by, ours beside {name}", more["ours"], budget, more[name], "%"))
    rows.append(Row("ours, a step", 1e6 * step * more["ours"] / 100))
    return rows


def _ledger():
    """Returns the time of a batch in a Trainer that the device bounds, with and without the ledger."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4096, 4096, device="cuda") for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(512, 4096, device="cuda")
    taken = {True: [], False: []}
    for number in range(2 * LEDGER_FITS + 2):
        is_on = bool(number % 2)
        with Trainer(
            model,
            [(data, data)] * LEDGER_BATCHES,
            max_duration="1ep",
            loss_fn=torch.nn.functional.mse_loss,
            optimizers=optimizer,
            time_ledger=is_on,
            device="cuda",
        ) as trainer:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            trainer.fit()
            torch.cuda.synchronize()
            if number > 1:
                taken[is_on].append((time.perf_counter() - begin) / LEDGER_BATCHES)
    charged, plain = (statistics.median(taken[key]) * 1e3 for key in (True, False))
    return [
        Row("a batch", charged, None, plain, "ms"),
        Row("longer by", 100 * (charged / plain - 1), 0.1, unit="%"),
    ]


if __name__ == "__main__":
    main()
